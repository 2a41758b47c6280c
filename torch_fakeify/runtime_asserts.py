"""What a ``ShapeEnv`` assumes of numbers that a graph finds in its data, as nodes of the graph.

Torch collects such assumptions while it traces (``ShapeEnv.deferred_runtime_asserts``) and has a
pass of its own that turns them into nodes (``insert_deferred_runtime_asserts``, torch 2.13), which
also rewrites the graph. This one only adds nodes, and they can be taken out again.

An assertion is stated over the numbers that the graph computes. A ``ShapeEnv`` that has been told
``u0 == s0`` has replaced ``u0``, for it the condition is trivial; the graph must check it still. So
a symbol is replaced only where the graph has no number for it.
"""

from __future__ import annotations

import functools
import re
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import sympy
import torch

from ._torch import int_oo
from .asserted import asserted_by, condition_keys
from .binding_sites import (
    divisors_of,
    find_bindings,
    is_flag,
    is_unbacked,
    read_binding,
    renamed,
)
from .desc import StackDesc
from .errors import ShapeEnvError
from .expr_nodes import ASSERTS, ExprNodes, bodies, set_mark, strip_marked
from .paths import short_path
from .sites import Site, SiteReader, find_sites
from .stacks import encode_stack, location_text, stack_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .asserted import Key

__all__ = ["InsertedAsserts", "insert_runtime_asserts"]

_aten: Any = torch.ops.aten
_ASSERT = _aten._assert_scalar.default
_SIZE = _aten.sym_constrain_range_for_size.default

# What torch has as the message of an assert: which of its own lines asked for it.
_PLACE = re.compile(r"(|[^\n]+\.(?:py|cpp|cc|cu|h)):(\d+)")

_NO_LOWER = (-sympy.oo, -int_oo, -sys.maxsize - 1)
_NO_UPPER = (sympy.oo, int_oo, sys.maxsize - 1, sys.maxsize)
"""Ends of a range that say nothing. Torch gives the last but one to the sizes of `nonzero`."""


class InsertedAsserts(NamedTuple):
    """What became of the runtime asserts of a ``ShapeEnv``; each tuple has their text."""

    inserted: tuple[str, ...]
    """Asserted by nodes of the graph."""
    present: tuple[str, ...]
    """Asserted by the graph already."""
    implied: tuple[str, ...]
    """Left out, since they follow from a range that the graph asserts."""
    unplaced: tuple[str, ...]
    """About a symbol that no node and no input of the graph holds, or with a part that no function
    of a graph computes. They stay in the ``ShapeEnv``, and so in the record of a capture."""


def insert_runtime_asserts(gm: torch.fx.GraphModule, shape_env: Any) -> InsertedAsserts:
    """Assert what a ``ShapeEnv`` assumes of the data, where its last symbol gets bound.

    Also the ranges of the symbols that the graph binds, before the other assertions, and that a
    symbol is size-like. What is about inputs alone stands right after the placeholders. Bodies of
    higher-order operators get the assertions about what they bind. No assertion is added to the
    environment. A second call first takes out what the first one inserted.

    Each node has a mark in ``meta["custom"]["torch_fakeify"]``: ``what`` it is (``assert``,
    ``size_like`` or ``compute``) and the ``expr`` over the names of nodes. The message of an
    assertion is torch's, with the condition where torch only says which of its own lines asked for
    it; ``meta["stack_trace"]`` has the user's frames, or those of the node that binds the symbol.

    What the graph asserts in another form stays as it is and is not asserted again. A call of
    ``torch._check`` counts, though AOTAutograd and ``make_fx`` drop it: they leave the assertion to
    the environment that they trace with. They also merge what they know to be equal
    (``dedupe_symints``, torch 2.13): a number from the data that must equal the size of an input
    with that size, if it is an input itself; a condition that the environment takes for a fact with
    a comparison of inputs that always holds. The nodes of `insert_guards` are none of these.

    Args:
        gm: a graph with fake values in ``meta``, as Dynamo, AOTAutograd and ``make_fx`` make it.
        shape_env: the ``ShapeEnv`` of these values.

    Raises:
        ShapeEnvError: an input has no fake value, or one of another ``ShapeEnv``.
    """
    strip_marked(gm, ASSERTS.__contains__)
    asserts = [
        _Assert(ra.expr, ra.msg, ra.stack)
        for group in shape_env.deferred_runtime_asserts.values()
        for ra in group
    ]
    done = _Done([], [], [])
    left = _insert(gm, shape_env, asserts, done, outermost=True)
    return InsertedAsserts(
        inserted=tuple(done.inserted),
        present=tuple(dict.fromkeys(done.present)),
        implied=tuple(dict.fromkeys(done.implied)),
        unplaced=tuple(dict.fromkeys(str(item.expr) for item in left)),
    )


class _Assert(NamedTuple):
    """A condition on what a graph computes, as the ``ShapeEnv`` has it."""

    expr: sympy.Basic
    message: str = ""
    """Torch's; empty for a range."""
    stack: Any = None
    """The ``CapturedTraceback``."""
    location: Any = None
    """Of a range: the ``SLoc`` of what caused it."""


_Placed: TypeAlias = tuple[_Assert, sympy.Basic]
"""An assertion, and the condition over symbols that the graph holds."""


class _Place(NamedTuple):
    """What is inserted at one place of a graph, in this order."""

    limits: list[_Placed]
    sizes: list[Any]
    """Symbols that are size-like."""
    asserts: list[_Placed]


class _Done(NamedTuple):
    """What was found to hold already, and what was inserted."""

    inserted: list[str]
    present: list[str]
    implied: list[str]


def _insert(
    gm: torch.fx.GraphModule, env: Any, asserts: list[_Assert], done: _Done, *, outermost: bool
) -> list[_Assert]:
    """Insert into a graph and its bodies; returns the assertions that have no place there."""
    placer = _placer(gm.graph, env, asserts, done, outermost=outermost)
    if placer is None:
        return asserts
    left = placer.plan(asserts, outermost=outermost)
    if placer.insert():
        gm.recompile()
    for body in bodies(gm):
        left = _insert(body, env, left, done, outermost=False)
    return left


def _placer(
    graph: torch.fx.Graph, env: Any, asserts: list[_Assert], done: _Done, *, outermost: bool
) -> _Placer | None:
    try:
        return _Placer(graph, env, asserts, done)
    except ShapeEnvError:
        if outermost:
            raise
        return None  # a body without values, or with those of a trace of its own


class _Placer:
    """One graph: where it holds the numbers of symbols, and what is to be asserted there."""

    def __init__(
        self, graph: torch.fx.Graph, env: Any, asserts: Iterable[_Assert], done: _Done
    ) -> None:
        self.graph = graph
        self.env = env
        self.done = done
        self.nodes = ExprNodes(graph, env)
        self._present, self._sizes = asserted_by(graph, env)
        self._stated: set[Key] = set()
        self._sites = self._find_sites()
        wanted = {
            renamed(symbol, env)
            for item in asserts
            for symbol in item.expr.free_symbols
            if is_unbacked(symbol)
        }
        found = find_bindings(graph, env, wanted - self._sites.keys())
        self._bindings = {
            symbol: binding
            for symbol, binding in found.items()
            if symbol not in self._sites
            and all(d.free_symbols <= self._sites.keys() for d in divisors_of(binding))
        }
        for symbol, binding in self._bindings.items():
            self.nodes.name(symbol, binding.text)
        self._order = {fx_node: i for i, fx_node in enumerate(graph.nodes)}
        self._limited: dict[Any, Any] = {}
        self._numbers: set[Any] = set()
        self._known_keys: dict[sympy.Basic, tuple[Key, ...]] = {}
        self._plan: defaultdict[int, _Place] = defaultdict(lambda: _Place([], [], []))

    def _find_sites(self) -> dict[Any, Site]:
        """The first input that holds each symbol."""
        found: dict[Any, Site] = {}
        texts: dict[Any, str] = {}
        for site in find_sites(self.graph, self.env):
            symbol = site.expr
            if not isinstance(symbol, sympy.Symbol):
                continue
            if site.prop == "item" and is_unbacked(symbol):
                continue  # a memo: the node that calls `item()` binds it
            found.setdefault(symbol, site)
            if site.prop not in ("value", "as_int"):
                # Dynamo names a scalar input after its symbol; the size says more.
                texts.setdefault(symbol, site.text)
        for symbol, site in found.items():
            self.nodes.name(symbol, texts.get(symbol, site.text))
        return found

    # --- what goes where --------------------------------------------------------------------------

    def plan(self, asserts: list[_Assert], *, outermost: bool) -> list[_Assert]:
        """Find a place for all that has one; returns the rest."""
        scoped = [(item, self._in_scope(item.expr)) for item in asserts]
        causes: dict[Key, _Placed] = {}
        for item, expr in scoped:
            if expr is not None:
                causes.update((key, (item, expr)) for key in self._keys(expr) if key not in causes)
        inputs = [s for s in self._sites if outermost and is_unbacked(s)]
        for symbol in (*inputs, *self._bindings):
            place = self._plan[self._position(symbol)]
            for limit in self._limits(symbol):
                same = (causes[key] for key in self._keys(limit) if key in causes)
                item, expr = next(same, (self._range(symbol, limit), limit))
                if self._is_new(expr):
                    place.limits.append((item, expr))
            if symbol in self._bindings and self._needs_size(symbol):
                place.sizes.append(symbol)
        left: list[_Assert] = []
        for item, expr in scoped:
            if expr is None or not self.nodes.can_compute(expr):
                left.append(item)
            elif self._is_new(expr, limited=True):
                at = max(map(self._position, expr.free_symbols))
                self._plan[at].asserts.append((item, expr))
        return left

    def _text(self, expr: Any) -> str:
        binding = self._bindings.get(expr.args[0]) if is_flag(expr) else None
        if binding is not None and binding.is_flag:
            return binding.unconverted.text
        return self.nodes.text(expr)

    def _position(self, symbol: Any) -> int:
        """The index of the node that binds a symbol; -1 for the inputs."""
        binding = self._bindings.get(symbol)
        if binding is None or binding.fx_node.op == "placeholder":
            return -1
        return self._order[binding.fx_node]

    def _limits(self, symbol: Any) -> Iterator[sympy.Basic]:
        """The range of a symbol as conditions, as far as it says something."""
        bounds = self.env.var_to_range.get(symbol)
        if bounds is None:
            return
        if symbol in self.env.replacements:
            implied = self.env.bound_sympy(self.env.replace(symbol))
            if implied.issubset(bounds):
                return  # it follows from the assertion that made the replacement
        self._limited[symbol] = bounds
        binding = self._bindings.get(symbol)
        is_flag = binding is not None and binding.is_flag
        if bounds.lower not in _NO_LOWER and not (is_flag and bounds.lower == 0):
            yield sympy.Ge(symbol, bounds.lower, evaluate=False)
        if bounds.upper not in _NO_UPPER and not (is_flag and bounds.upper == 1):
            yield sympy.Le(symbol, bounds.upper, evaluate=False)

    def _range(self, symbol: Any, limit: sympy.Basic) -> _Assert:
        locations = self.env.var_to_range_sloc.get(symbol)
        if locations is None:
            return _Assert(limit)
        is_lower = isinstance(limit, sympy.Ge)
        return _Assert(limit, location=locations.lower if is_lower else locations.upper)

    def _keys(self, expr: sympy.Basic) -> tuple[Key, ...]:
        known = self._known_keys.get(expr)
        if known is None:
            known = self._known_keys[expr] = condition_keys(expr, self.env)
        return known

    def _is_new(self, expr: sympy.Basic, *, limited: bool = False) -> bool:
        """Whether a condition is neither asserted already nor, if asked for, due to a range."""
        keys = self._keys(expr)
        if not self._stated.isdisjoint(keys):
            return False
        if not self._present.isdisjoint(keys):
            self.done.present.append(self._text(expr))
            return False
        if limited and self._is_limited(keys[0]):
            self.done.implied.append(self._text(expr))
            return False
        self._stated.update(keys)
        return True

    def _is_limited(self, key: Any) -> bool:
        """Whether a condition is one on one symbol, weaker than the symbol's range."""
        if not isinstance(key, sympy.Le) or len(key.free_symbols) != 1:
            return False
        (symbol,) = key.free_symbols
        bounds = self._limited.get(symbol)
        if bounds is None:
            return False
        rest = key.args[1] - key.args[0]  # type: ignore[operator]
        if (low := symbol - rest).is_number:  # type: ignore[operator]
            return bool(bounds.lower >= low)
        if (high := rest + symbol).is_number:
            return bool(bounds.upper <= high)
        return False

    def _needs_size(self, symbol: Any) -> bool:
        """Whether the graph must be told that a symbol is size-like."""
        if symbol not in self.env.size_like or symbol in self._sizes:
            return False
        # Of what has become an expression torch cannot say it.
        return isinstance(self.env.replace(symbol), sympy.Symbol)

    # --- symbols in scope -------------------------------------------------------------------------

    def _in_scope(self, expr: sympy.Basic) -> sympy.Basic | None:
        """The condition over symbols that the graph holds; ``None`` if it has no such form."""
        changes: dict[Any, Any] = {}
        for symbol in expr.free_symbols:
            found = self._scoped(symbol)
            if found is None:
                return None
            if found != symbol:
                changes[symbol] = found
        # Where the other side of an equality is all that the graph has, there is nothing to check.
        result = expr.xreplace(changes) if changes else expr
        return result if result.free_symbols else None

    def _scoped(self, symbol: Any) -> sympy.Basic | None:
        if self._holds(symbol):
            return symbol
        symbol = renamed(symbol, self.env)
        if self._holds(symbol):
            return symbol
        final = self.env.replace(symbol)
        if final in self._equals:
            return self._equals[final]
        changes = {part: self._equals.get(part) for part in final.free_symbols}
        return None if None in changes.values() else final.xreplace(changes)

    def _holds(self, symbol: Any) -> bool:
        return symbol in self._sites or symbol in self._bindings

    @functools.cached_property
    def _equals(self) -> dict[Any, Any]:
        """Symbols that the graph holds, by what they were replaced by."""
        found: dict[Any, Any] = {}
        for symbol in (*self._sites, *self._bindings):
            found.setdefault(self.env.replace(symbol), symbol)
        return found

    # --- nodes ------------------------------------------------------------------------------------

    def insert(self) -> bool:
        """Insert what was planned; whether that was anything."""
        planned = {at: place for at, place in self._plan.items() if any(place)}
        if not planned:
            return False
        fx_nodes = list(self.graph.nodes)
        start = sum(fx_node.op == "placeholder" for fx_node in fx_nodes)
        reader = SiteReader(self.nodes)
        needed = self._needed(planned.values())
        by_place: defaultdict[int, list[Any]] = defaultdict(list)
        for symbol in self._bindings:
            if symbol in needed:
                by_place[self._position(symbol)].append(symbol)
        for at in sorted({-1, *planned, *by_place}):
            with self.graph.inserting_before(fx_nodes[at + 1 if at >= 0 else start]):
                self.nodes.stack_trace = None
                for symbol in (s for s in self._sites if at < 0 and s in needed):
                    self.nodes.bind(symbol, reader.read(self._sites[symbol]))
                for symbol in by_place[at]:
                    self._read(symbol)
                if at in planned:
                    stack = fx_nodes[at].meta.get("stack_trace") if at >= 0 else None
                    self._insert_place(planned[at], stack)
        return True

    def _read(self, symbol: Any) -> None:
        binding = self._bindings[symbol]
        if binding.is_flag:  # a ShapeEnv learns more from the boolean itself
            operand = read_binding(self.nodes, binding.unconverted)
            self.nodes.know(sympy.Eq(symbol, 1), operand)
        if not binding.is_flag or symbol in self._numbers:
            self.nodes.bind(symbol, read_binding(self.nodes, binding))

    def _needed(self, places: Iterable[_Place]) -> set[Any]:
        """The symbols whose numbers must be read."""
        needed: set[Any] = set()
        for place in places:
            needed.update(place.sizes)
            for _, expr in (*place.limits, *place.asserts):
                needed.update(expr.free_symbols)
                if not is_flag(expr):
                    self._numbers.update(expr.free_symbols)
        for symbol in needed & self._bindings.keys():
            for divisor in divisors_of(self._bindings[symbol]):
                needed.update(divisor.free_symbols)
        return needed

    def _insert_place(self, place: _Place, stack: str | None) -> None:
        for item, expr in place.limits:
            self._assert(item, expr, stack)
        for symbol in place.sizes:
            self.nodes.stack_trace = stack
            operand = self.nodes.compute(symbol)
            fx_node = self.graph.call_function(_SIZE, (operand,), {"min": 0})
            set_mark(fx_node, {"what": "size_like", "expr": self.nodes.text(symbol)})
            if stack is not None:
                fx_node.meta["stack_trace"] = stack
        for item, expr in place.asserts:
            self._assert(item, expr, stack)

    def _assert(self, item: _Assert, expr: sympy.Basic, stack: str | None) -> None:
        text = self._text(expr)
        self.nodes.stack_trace = _user_stack(item) or stack
        condition = self.nodes.compute(expr)
        mark = {"what": "assert", "expr": text}
        self.nodes.call(_ASSERT, (condition, _message(item, text)), mark)
        self.done.inserted.append(text)


def _message(item: _Assert, text: str) -> str:
    """Torch's message; the condition where that only names a line, which is torch's own."""
    place = _PLACE.fullmatch(item.message)
    if item.message and place is None:
        return item.message
    by = f" ({short_path(place[1])}:{place[2]})" if place is not None and place[1] else ""
    return f"the graph assumes {text}{by}"


def _user_stack(item: _Assert) -> str | None:
    """The user's frames as ``meta["stack_trace"]`` has them; ``None`` if there are none.

    Dynamo runs no user code while it traces: who called the compiled function is not the reason.
    """
    if item.location is not None:
        return location_text(item.location)
    desc = encode_stack(item.stack)
    frames = [] if desc is None else [(short_path(frame.file), frame) for frame in desc.frames]
    if any(file == "torch/_dynamo/convert_frame.py" for file, _ in frames):
        return None
    own = [frame for file, frame in frames if not file.startswith(("torch/", "torch_fakeify/"))]
    return stack_text(StackDesc(frames=tuple(own))) if own else None
