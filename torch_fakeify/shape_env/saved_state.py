"""The state of a ``ShapeEnv`` at one moment, saved by reference and restored in place.

A container is saved as a shallow copy and gets its old contents back in place, so that other
references to it see them too. Nested lists, sets, dicts and the few records that torch assigns to are
saved as well; sources, expressions, stacks and guards are immutable and shared.
"""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict, defaultdict
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch.fx import Graph, Node

from torch_fakeify.compat.torch_symbols import OrderedSet, ValueRangesSLoc
from torch_fakeify.errors import ShapeEnvError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import sympy

_DICTS = (dict, Counter, defaultdict)
_CHANGING = frozenset(
    {dict, Counter, defaultdict, OrderedDict, list, set, tuple, OrderedSet, ValueRangesSLoc, Graph}
)
"""Types of entries that may be changed in place; a tuple because of its items."""

FLAT = frozenset(
    {
        "_symop_cache",
        "axioms",
        "backed_var_to_val",
        "fake_tensor_cache",
        "foreign_unbacked_symbol_cache",
        "guards",
        "name_to_symbol",
        "replacements",
        "replacements_slocs",
        "source_name_to_debug_name",
        "source_to_symbol",
        "source_to_var",
        "symbol_guard_counter",
        "unbacked_alloc_order",
        "val_to_var",
        "var_to_range",
        "var_to_stack",
    }
)
"""Large attributes whose entries are never changed in place, and so need not be visited."""

FLAT_LISTS = frozenset({"var_to_sources"})
"""Attributes with lists of entries that are never changed in place."""

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

    @property
    def replacements_version(self) -> int:
        """The saved version of the replacements."""
        return self._vars["_replacements_version_counter"]

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
        """By the ``id`` of the container, which the lists below refer to."""
        self.graphs: list[_SavedGraph] = []
        self._dicts: list[tuple[Any, Any]] = []
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._sets: list[tuple[set[Any], set[Any]]] = []
        self._objects: list[tuple[Any, dict[str, Any]]] = []
        self._groups: list[_Lists | _Locations] = []

    def save_attributes(self, attributes: dict[str, Any]) -> None:
        """Save the containers in an object's ``__dict__``, but not the ``__dict__`` itself."""
        for name, value in attributes.items():
            kind = type(value)
            if kind in _CHANGING:
                self.save(value, flat=name in FLAT, flat_lists=name in FLAT_LISTS)
            elif kind.__module__ in _OWN_MODULES and hasattr(value, "__dict__"):
                self._save_object(value)

    def _save_object(self, value: Any) -> None:
        if id(value) in self.copies:
            return
        saved = self.copies[id(value)] = dict(vars(value))
        self._objects.append((value, saved))
        self.save_attributes(saved)

    def save(self, value: Any, *, flat: bool = False, flat_lists: bool = False) -> None:
        """Save a container and, recursively, the containers in it.

        Args:
            value: the container.
            flat: whether its entries are never changed in place.
            flat_lists: whether its entries are lists whose items are never changed in place.
        """
        if id(value) in self.copies:
            return
        kind = type(value)
        if kind in _DICTS:
            saved = self.copies[id(value)] = dict.copy(value)
            self._dicts.append((value, saved))
            if not flat:
                self._save_entries(saved.values(), flat=flat_lists)
        elif kind is list:
            copy = self.copies[id(value)] = value.copy()
            self._lists.append((value, copy))
            if not flat:
                self._save_entries(copy)
        elif kind is set:
            self.copies[id(value)] = members = value.copy()
            self._sets.append((value, members))
        elif kind is OrderedSet:
            self.save(value._dict)
        elif kind is OrderedDict:
            self.copies[id(value)] = ordered = value.copy()
            self._dicts.append((value, ordered))
            self._save_entries(ordered.values())
        elif kind is tuple:
            self._save_entries(value)
        elif kind is ValueRangesSLoc:
            self._groups.append(_Locations((value,)))
        elif kind is Graph:
            self.copies[id(value)] = graph = _SavedGraph(value, self)
            self.graphs.append(graph)

    def _save_entries(self, values: Iterable[Any], *, flat: bool = False) -> None:
        """Save the containers among some values, with nested ones unless ``flat``."""
        kinds = set(map(type, values))
        if _CHANGING.isdisjoint(kinds):
            return
        if kinds == {ValueRangesSLoc}:
            self._groups.append(_Locations(list(values)))
        elif kinds == {list}:
            group = _Lists(list(values))
            self._groups.append(group)
            if not flat:
                self._save_entries(group.contents)
        else:
            for value in values:
                if type(value) in _CHANGING:
                    self.save(value)

    def restore(self) -> None:
        """Restore the contents of every container."""
        for value, saved in self._objects:
            _restore_attributes(vars(value), saved)
        for target, copy in self._dicts:
            kind = OrderedDict if type(target) is OrderedDict else dict
            kind.clear(target)
            kind.update(target, copy)
        for entries, entries_then in self._lists:
            entries[:] = entries_then
        for members, members_then in self._sets:
            members.clear()
            members |= members_then
        for group in self._groups:
            group.restore()
        for graph in self.graphs:
            graph.restore()


class _Lists:
    """The contents of many short lists, such as the sources of each symbol, as one list."""

    def __init__(self, lists: Sequence[list[Any]]) -> None:
        self._lists = lists
        self._lengths = list(map(len, lists))
        self.contents = list(chain.from_iterable(lists))

    def restore(self) -> None:
        if list(map(len, self._lists)) == self._lengths and all(
            map(operator.is_, chain.from_iterable(self._lists), self.contents)
        ):
            return
        start = 0
        for entries, length in zip(self._lists, self._lengths, strict=True):
            entries[:] = self.contents[start : start + length]
            start += length


class _Locations:
    """The ``lower`` and ``upper`` fields of many ``ValueRangesSLoc``, to which torch assigns."""

    def __init__(self, records: Sequence[Any]) -> None:
        self._records = records
        self._lower = [record.lower for record in records]
        self._upper = [record.upper for record in records]

    def restore(self) -> None:
        for record, lower, upper in zip(self._records, self._lower, self._upper, strict=True):
            record.lower = lower
            record.upper = upper


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
        for names in vars(graph._graph_namespace).values():
            saver.save(names)

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
