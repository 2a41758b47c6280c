"""The state of a ``ShapeEnv`` at one moment, saved by reference and restored in place.

A container is saved as a shallow copy and gets its old contents back in place, so that other
references to it see them too. Nested lists, sets, dicts and the few records that torch assigns to are
saved as well; sources, expressions, stacks and guards are immutable and shared.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

from torch.fx import Graph, Node

from torch_fakeify.compat.torch_symbols import OrderedSet, ValueRangesSLoc
from torch_fakeify.errors import ShapeEnvError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import sympy

_DICTS = (dict, Counter, defaultdict)
_CHANGING = frozenset(
    {dict, Counter, defaultdict, OrderedDict, list, set, tuple, OrderedSet, ValueRangesSLoc, Graph}
)
"""Types of entries that may be changed in place; a tuple because of its items."""

_OWN_MODULES = ("torch.fx.experimental.symbolic_shapes", "torch.fx.experimental.validator")
"""Modules of torch; attributes that are instances of their classes are saved recursively."""

_COUNTERS = ("_version_counter", "_replacements_version_counter")
_SYMBOL_TABLES = (
    "var_to_range",
    "backed_var_to_val",
    "var_to_sources",
    "var_to_stack",
    "unbacked_alloc_order",
)
"""The tables of a ``ShapeEnv`` that have its symbols as keys."""

_MISSING = object()


class SkippingCounter(int):
    """A version counter that skips values which were used before a rollback.

    A rollback resets a version counter to its old value. Counting up from there would repeat the
    versions of states that were rolled back, and torch would take entries cached under these
    (``SymNode.expr``, the caches of methods) for current.
    """

    successor: int

    def __new__(cls, value: int, successor: int) -> SkippingCounter:
        """A counter equal to ``value``; adding 1 gives ``successor``."""
        made = super().__new__(cls, value)
        made.successor = successor
        return made

    def __add__(self, other: int) -> int:
        return self.successor + other - 1 if other > 0 else int(self) + other

    def __reduce__(self) -> tuple[type[SkippingCounter], tuple[int, int]]:
        return SkippingCounter, (int(self), self.successor)


def last_used(counter: int) -> int:
    """The highest value of a version counter that can be derived from its current value."""
    return counter.successor - 1 if isinstance(counter, SkippingCounter) else counter


class SavedState:
    """All attributes of a ``ShapeEnv`` at one moment.

    The cost is a shallow copy of each container. Attributes are enumerated from the instance, so
    those of later versions of torch are saved too.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self._saver = _Saver()
        self._saver.save_attributes(vars(env))
        self._vars = dict(vars(env))
        self.replacements_version: int = env._replacements_version_counter
        self._tables = [
            self._saver.copies[id(table)]
            for name in _SYMBOL_TABLES
            if (table := self._vars.get(name)) is not None
        ]

    def new_symbols(self, expr: Any) -> list[sympy.Symbol]:
        """The symbols of an expression that were made after the state was saved."""
        now = [vars(self._env)[name] for name in _SYMBOL_TABLES]
        return [
            symbol
            for symbol in getattr(expr, "free_symbols", ())
            if not any(symbol in table for table in self._tables)
            and any(symbol in table for table in now)
        ]

    def is_new(self, fx_node: Any) -> bool:
        """Whether an FX node was added to the translation validation's graph after the save."""
        return isinstance(fx_node, Node) and not any(
            graph.has(fx_node) for graph in self._saver.graphs
        )

    def check(self) -> None:
        """Check that `restore` is possible, without changes.

        Raises:
            ShapeEnvError: the graph of the translation validation has lost a saved node.
        """
        for graph in self._saver.graphs:
            graph.check()

    def restore(self, used: Mapping[str, int]) -> None:
        """Restore the saved state; may be called any number of times.

        Args:
            used: the highest value that each version counter has had.
        """
        _restore_attributes(vars(self._env), self._vars)
        self._saver.restore()
        for name in _COUNTERS:
            value = self._vars[name]
            if used[name] > value:
                vars(self._env)[name] = SkippingCounter(value, used[name] + 1)

    def counters(self) -> Iterator[tuple[str, int]]:
        """The name and the highest derivable value of each version counter of the environment."""
        return ((name, last_used(vars(self._env)[name])) for name in _COUNTERS)


class _Saver:
    """Copies of the contents of containers, one for each container."""

    def __init__(self) -> None:
        self.copies: dict[int, Any] = {}
        """By the ``id`` of the container, which `_saved` refers to."""
        self.graphs: list[_SavedGraph] = []
        self._saved: list[tuple[Any, Any]] = []
        """Containers and other objects, each with a copy of its entries or attributes."""

    def save_attributes(self, attributes: dict[str, Any]) -> None:
        """Save the containers in an object's ``__dict__``, but not the ``__dict__`` itself."""
        for value in attributes.values():
            kind = type(value)
            if kind in _CHANGING:
                self._save(value)
            elif (
                kind.__module__ in _OWN_MODULES
                and hasattr(value, "__dict__")
                and id(value) not in self.copies
            ):
                copy = self.copies[id(value)] = dict(vars(value))
                self._saved.append((value, copy))
                self.save_attributes(copy)

    def _save(self, value: Any) -> None:
        """Save a container and, recursively, the containers in it."""
        if id(value) in self.copies:
            return
        kind = type(value)
        entries: Iterable[Any] = ()
        if kind is list:
            copy = entries = value.copy()
        elif kind is ValueRangesSLoc:
            copy = value.lower, value.upper
        elif kind in _DICTS:
            copy = dict.copy(value)
            entries = copy.values()
        elif kind is OrderedDict:
            copy = value.copy()
            entries = copy.values()
        elif kind is set:
            copy = value.copy()
        elif kind is Graph:
            copy = self.copies[id(value)] = _SavedGraph(value, self)
            self.graphs.append(copy)
            return
        elif kind is OrderedSet:
            self._save(value._dict)
            return
        else:  # a tuple
            self.save_entries(value)
            return
        self.copies[id(value)] = copy
        self._saved.append((value, copy))
        if entries:
            self.save_entries(entries)

    def save_entries(self, values: Iterable[Any]) -> None:
        kinds = set(map(type, values))
        if kinds == {ValueRangesSLoc}:  # one for each symbol
            self._saved += [(value, (value.lower, value.upper)) for value in values]
        elif kinds == {list}:  # such as the sources of each symbol
            copies = [value.copy() for value in values]
            self._saved += zip(values, copies, strict=True)
            self.save_entries(list(itertools.chain.from_iterable(copies)))
        elif not _CHANGING.isdisjoint(kinds):
            for value in values:
                if type(value) in _CHANGING:
                    self._save(value)

    def restore(self) -> None:
        for value, copy in self._saved:
            kind = type(value)
            if kind is list:
                value[:] = copy
            elif kind is ValueRangesSLoc:
                value.lower, value.upper = copy
            elif kind in _DICTS:
                dict.clear(value)
                dict.update(value, copy)
            elif kind is OrderedDict:
                value.clear()
                value.update(copy)
            elif kind is set:
                value.clear()
                value |= copy
            else:
                _restore_attributes(vars(value), copy)
        for graph in self.graphs:
            graph.restore()


class _SavedGraph:
    """The nodes of the translation validation's FX graph; `restore` erases later ones.

    Torch adds nodes to it and erases only nodes that it has just added.
    """

    def __init__(self, graph: Any, saver: _Saver) -> None:
        self._graph = graph
        self._nodes = list(graph.nodes)
        self._saved = frozenset(self._nodes)
        self._metas = [dict(fx_node.meta) for fx_node in self._nodes]
        self._insert = graph._insert
        saver.save_entries(vars(graph._graph_namespace).values())

    def has(self, fx_node: Any) -> bool:
        return fx_node in self._saved

    def check(self) -> None:
        left = [fx_node for fx_node in self._graph.nodes if fx_node in self._saved]
        if left == self._nodes:
            return
        lost = next((fx_node.name for fx_node in self._nodes if fx_node not in set(left)), None)
        raise ShapeEnvError(
            "cannot roll back the graph of the translation validation",
            expected="the FX nodes that it had at the checkpoint, in their order",
            found="another order" if lost is None else f"FX node {lost} erased",
        )

    def restore(self) -> None:
        for fx_node in reversed(list(self._graph.nodes)):
            if fx_node not in self._saved:
                self._graph.erase_node(fx_node)
        for fx_node, meta in zip(self._nodes, self._metas, strict=True):
            fx_node.meta.clear()
            fx_node.meta.update(meta)
        self._graph._insert = self._insert


def _restore_attributes(attributes: dict[str, Any], saved: dict[str, Any]) -> None:
    """Restore an object's ``__dict__``, including the order of its keys."""
    for name, value in saved.items():
        if attributes.get(name, _MISSING) is not value:
            attributes[name] = value
    if list(attributes) != list(saved):  # another order, or one that was added
        attributes.clear()
        attributes.update(saved)
