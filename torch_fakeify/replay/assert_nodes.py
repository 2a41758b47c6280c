"""``insert_runtime_asserts``: the runtime asserts of a ``ShapeEnv`` as nodes of a graph.

Torch collects these assertions while it traces (``ShapeEnv.deferred_runtime_asserts``) and has a pass
that turns them into nodes (``insert_deferred_runtime_asserts``, torch 2.13) and rewrites the graph.
This pass only adds nodes, which can be removed again.

An assertion is stated over the numbers that the graph computes. After ``u0 == s0`` a ``ShapeEnv`` has
replaced ``u0``, so the condition is trivial for it; the graph must still check it. So a symbol is
replaced only where the graph does not compute it.
"""

from __future__ import annotations

import functools
import re
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import sympy
import torch

from torch_fakeify.compat.arguments import check_graph, check_shape_env
from torch_fakeify.encoding.stacks import encode_stack, location_text, stack_text
from torch_fakeify.errors import ShapeEnvError
from torch_fakeify.records.redact_paths import short_path
from torch_fakeify.records.tensor import StackDesc

from .bindings import (
    canonical_symbol,
    divisors_of,
    find_bindings,
    is_flag,
    is_unbacked,
    path_text,
    read_path,
)
from .existing_asserts import asserted_by, condition_keys
from .facts import range_facts, runtime_asserts, stated_bounds
from .input_sites import Site, find_sites, site_texts
from .lowering import ASSERT_SCALAR, ASSERTS, ExprLowering, bodies, set_mark, strip_marked

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .existing_asserts import Key

_aten: Any = torch.ops.aten
_SIZE = _aten.sym_constrain_range_for_size.default

# A message of torch that only names the line of torch which added the assert.
_PLACE = re.compile(r"(|[^\n]+\.(?:py|cpp|cc|cu|h)):(\d+)")


class InsertedAsserts(NamedTuple):
    """The runtime asserts of a ``ShapeEnv`` by outcome, each as text."""

    inserted: tuple[str, ...]
    """Asserted by nodes of the graph."""
    present: tuple[str, ...]
    """Asserted by the graph already."""
    implied: tuple[str, ...]
    """Not inserted, since they follow from a range that the graph asserts."""
    unplaced: tuple[str, ...]
    """Not inserted, since no node and no input holds a symbol, or no graph function computes a
    part. They remain in the ``ShapeEnv`` and in the record of a capture."""


def insert_runtime_asserts(gm: torch.fx.GraphModule, shape_env: Any) -> InsertedAsserts:
    """Insert the runtime asserts of a ``ShapeEnv``, each where its last symbol is bound.

    The ranges of the symbols that the graph binds come before the other assertions, with the nodes
    that make a symbol size-like. Assertions about inputs alone come directly after the placeholders.
    Bodies of higher-order operators get the assertions about the symbols that they bind. The
    environment is not changed. A second call first removes the nodes of the first one.

    Each node has a mark in ``meta["custom"]["torch_fakeify"]``: ``what`` it is (``assert``,
    ``size_like`` or ``compute``) and the ``expr`` over the names of nodes. An assertion has torch's
    message, or the condition where torch's only names one of torch's lines; ``meta["stack_trace"]``
    has the user's frames, or those of the node that binds the symbol.

    An assertion that the graph has in another form is not inserted again. A call of ``torch._check``
    counts, though AOTAutograd and ``make_fx`` drop it and leave the assertion to the environment that
    they trace with. Both also merge equal numbers (``dedupe_symints``, torch 2.13): an unbacked input
    with the size that it must equal, and a condition that the environment has assumed with a
    comparison of inputs that always holds. Nodes of `insert_guards` are not affected.

    Args:
        gm: a graph with fake values in ``meta``, as Dynamo, AOTAutograd and ``make_fx`` make it.
        shape_env: the ``ShapeEnv`` of these values.

    Raises:
        ShapeEnvError: an input has no fake value, or one of another ``ShapeEnv``.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda x: x[1:], tracing_mode="symbolic")(torch.ones(4))
        >>> x = gm.graph.find_nodes(op="placeholder")[0].meta["val"]
        >>> tfk.insert_runtime_asserts(gm, x.fake_mode.shape_env).inserted
        ()
    """
    check_graph(gm)
    check_shape_env(shape_env)
    strip_marked(gm, ASSERTS.__contains__)
    asserts = [_Assert(one.expr, one.msg, one.stack) for one in runtime_asserts(shape_env)]
    done = _Done([], [], [])
    left = _insert(gm, shape_env, asserts, done, outermost=True)
    return InsertedAsserts(
        inserted=tuple(done.inserted),
        present=tuple(dict.fromkeys(done.present)),
        implied=tuple(dict.fromkeys(done.implied)),
        unplaced=tuple(dict.fromkeys(str(item.expr) for item in left)),
    )


class _Assert(NamedTuple):
    """A runtime assert, or one bound of a symbol's range."""

    expr: sympy.Basic
    message: str = ""
    """Torch's message; empty for a range."""
    stack: Any = None
    """The ``CapturedTraceback``."""
    location: Any = None
    """For a range: the ``SLoc`` of the guard that caused it."""


_Placed: TypeAlias = tuple[_Assert, sympy.Basic]
"""An assertion, and its condition over symbols that the graph holds."""


class _Place(NamedTuple):
    """The assertions to insert at one place of a graph, in this order."""

    limits: list[_Placed]
    sizes: list[Any]
    """Size-like symbols."""
    asserts: list[_Placed]


class _Done(NamedTuple):
    """The texts of the assertions of `InsertedAsserts`, collected over a graph and its bodies."""

    inserted: list[str]
    present: list[str]
    implied: list[str]


def _insert(
    gm: torch.fx.GraphModule, env: Any, asserts: list[_Assert], done: _Done, *, outermost: bool
) -> list[_Assert]:
    """Insert assertions into a graph and its bodies; returns those that have no place there."""
    try:
        placer = _Placer(gm.graph, env, asserts, done)
    except ShapeEnvError:
        if outermost:
            raise
        return asserts  # a body without values, or with values of another trace
    left = placer.plan(asserts, outermost=outermost)
    if placer.insert():
        gm.recompile()
    for body in bodies(gm):
        left = _insert(body, env, left, done, outermost=False)
    return left


class _Placer:
    """Plans and inserts the assertions of one graph."""

    def __init__(
        self, graph: torch.fx.Graph, env: Any, asserts: Iterable[_Assert], done: _Done
    ) -> None:
        self.graph = graph
        self.env = env
        self.done = done
        self.lowering = ExprLowering(graph, env)
        self._present, self._sizes = asserted_by(graph, env)
        self._stated: set[Key] = set()
        self._sites = self._find_sites()
        requested = {
            canonical_symbol(symbol, env)
            for item in asserts
            for symbol in item.expr.free_symbols
            if is_unbacked(symbol)
        }
        found = find_bindings(graph, env, requested - self._sites.keys())
        self._bindings = {
            symbol: binding
            for symbol, binding in found.items()
            if symbol not in self._sites
            and all(d.free_symbols <= self._sites.keys() for d in divisors_of(binding))
        }
        for symbol, binding in self._bindings.items():
            self.lowering.name(symbol, binding.text)
        self._order = {fx_node: i for i, fx_node in enumerate(graph.nodes)}
        self._limited: dict[Any, Any] = {}
        self._numbers: set[Any] = set()
        self._keys = functools.cache(lambda expr: condition_keys(expr, env))
        self._plan: defaultdict[int, _Place] = defaultdict(lambda: _Place([], [], []))

    def _find_sites(self) -> dict[Any, Site]:
        sites = [s for s in find_sites(self.graph, self.env) if isinstance(s.expr, sympy.Symbol)]
        # An unbacked `item()` is a memo: the node that calls it binds the symbol.
        sites = [s for s in sites if s.prop != "item" or not is_unbacked(s.expr)]
        for symbol, text in site_texts(sites).items():
            self.lowering.name(symbol, text)
        found: dict[Any, Site] = {}
        for site in sites:
            found.setdefault(site.expr, site)
        return found

    # --- placement --------------------------------------------------------------------------------

    def plan(self, asserts: list[_Assert], *, outermost: bool) -> list[_Assert]:
        """Find a place for each assertion; returns those without one."""
        scoped = [(item, self._in_scope(item.expr)) for item in asserts]
        causes: dict[Key, _Placed] = {}
        for item, expr in scoped:
            if expr is not None:
                causes.update((key, (item, expr)) for key in self._keys(expr) if key not in causes)
        inputs = [s for s in self._sites if outermost and is_unbacked(s)]
        for symbol in (*inputs, *self._bindings):
            place = self._plan[self._position(symbol)]
            for limit in self._limits(symbol):
                same = (causes[key] for key in self._keys(limit.expr) if key in causes)
                item, expr = next(same, (limit, limit.expr))
                if self._is_new(expr):
                    place.limits.append((item, expr))
            if symbol in self._bindings and self._needs_size(symbol):
                place.sizes.append(symbol)
        left: list[_Assert] = []
        for item, expr in scoped:
            if expr is None or not self.lowering.can_compute(expr):
                left.append(item)
            elif self._is_new(expr, limited=True):
                at = max(map(self._position, expr.free_symbols))
                self._plan[at].asserts.append((item, expr))
        return left

    def _text(self, expr: Any) -> str:
        binding = self._bindings.get(expr.args[0]) if is_flag(expr) else None
        if binding is not None and binding.is_flag:
            return path_text(binding.fx_node.name, binding.path[:-1])
        return self.lowering.text(expr)

    def _position(self, symbol: Any) -> int:
        """The index of the node that binds a symbol; -1 for the inputs."""
        binding = self._bindings.get(symbol)
        if binding is None or binding.fx_node.op == "placeholder":
            return -1
        return self._order[binding.fx_node]

    def _limits(self, symbol: Any) -> list[_Assert]:
        bounds = stated_bounds(symbol, self.env)
        if bounds is None:
            return []
        self._limited[symbol] = bounds
        binding = self._bindings.get(symbol)
        is_flag = binding is not None and binding.is_flag
        limits = [(-sys.maxsize - 1, sys.maxsize), *([(0, 1)] if is_flag else [])]
        trivial = [sympy.Ge(symbol, low, evaluate=False) for low, _ in limits]
        trivial += [sympy.Le(symbol, high, evaluate=False) for _, high in limits]
        return [
            _Assert(fact.expr, location=fact.location)
            for fact in range_facts(symbol, bounds, self.env)
            if fact.expr not in trivial
        ]

    def _is_new(self, expr: sympy.Basic, *, limited: bool = False) -> bool:
        """Whether a condition is not asserted yet nor, if ``limited``, implied by a range."""
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
        """Whether a condition on one symbol is implied by the symbol's range."""
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
        if symbol not in self.env.size_like or symbol in self._sizes:
            return False
        # Torch has no size-like expressions, only symbols.
        return isinstance(self.env.replace(symbol), sympy.Symbol)

    # --- symbols in scope -------------------------------------------------------------------------

    def _in_scope(self, expr: sympy.Basic) -> sympy.Basic | None:
        """A condition over symbols that the graph holds; ``None`` if there is no such form."""
        changes: dict[Any, Any] = {}
        for symbol in expr.free_symbols:
            found = self._scoped(symbol)
            if found is None:
                return None
            if found != symbol:
                changes[symbol] = found
        # If the graph holds only one side of an equality, there is nothing to check.
        result = expr.xreplace(changes) if changes else expr
        return result if result.free_symbols else None

    def _scoped(self, symbol: Any) -> sympy.Basic | None:
        if self._holds(symbol):
            return symbol
        symbol = canonical_symbol(symbol, self.env)
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
        """The symbols that the graph holds, by their replacements."""
        found: dict[Any, Any] = {}
        for symbol in (*self._sites, *self._bindings):
            found.setdefault(self.env.replace(symbol), symbol)
        return found

    # --- nodes ------------------------------------------------------------------------------------

    def insert(self) -> bool:
        planned = {at: place for at, place in self._plan.items() if any(place)}
        if not planned:
            return False
        fx_nodes = list(self.graph.nodes)
        start = sum(fx_node.op == "placeholder" for fx_node in fx_nodes)
        reads: dict[Any, torch.fx.Node] = {}
        needed = self._needed(planned.values())
        by_place: defaultdict[int, list[Any]] = defaultdict(list)
        for symbol in self._bindings:
            if symbol in needed:
                by_place[self._position(symbol)].append(symbol)
        for at in sorted({-1, *planned, *by_place}):
            with self.graph.inserting_before(fx_nodes[at + 1 if at >= 0 else start]):
                self.lowering.stack_trace = None
                for symbol in (s for s in self._sites if at < 0 and s in needed):
                    site = self._sites[symbol]
                    operand = read_path(self.lowering, site.placeholder, site.path, reads)
                    self.lowering.bind(symbol, operand)
                for symbol in by_place[at]:
                    self._read(symbol)
                if at in planned:
                    stack = fx_nodes[at].meta.get("stack_trace") if at >= 0 else None
                    self._insert_place(planned[at], stack)
        return True

    def _read(self, symbol: Any) -> None:
        binding = self._bindings[symbol]
        if binding.is_flag:  # a ShapeEnv derives more facts from the boolean itself
            operand = read_path(self.lowering, binding.fx_node, binding.path[:-1], {})
            self.lowering.bind(sympy.Eq(symbol, 1), operand)
        if not binding.is_flag or symbol in self._numbers:
            operand = read_path(self.lowering, binding.fx_node, binding.path, {})
            self.lowering.bind(symbol, operand)

    def _needed(self, places: Iterable[_Place]) -> set[Any]:
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
            self.lowering.stack_trace = stack
            operand = self.lowering.compute(symbol)
            fx_node = self.graph.call_function(_SIZE, (operand,), {"min": 0})
            set_mark(fx_node, {"what": "size_like", "expr": self.lowering.text(symbol)})
            if stack is not None:
                fx_node.meta["stack_trace"] = stack
        for item, expr in place.asserts:
            self._assert(item, expr, stack)

    def _assert(self, item: _Assert, expr: sympy.Basic, stack: str | None) -> None:
        text = self._text(expr)
        self.lowering.stack_trace = _user_stack(item) or stack
        condition = self.lowering.compute(expr)
        mark = {"what": "assert", "expr": text}
        self.lowering.call(ASSERT_SCALAR, (condition, _message(item, text)), mark)
        self.done.inserted.append(text)


def _message(item: _Assert, text: str) -> str:
    """The message of an assertion; the condition where torch's only names a line of torch."""
    place = _PLACE.fullmatch(item.message)
    if item.message and place is None:
        return item.message
    by = f" ({short_path(place[1])}:{place[2]})" if place is not None and place[1] else ""
    return f"the graph assumes {text}{by}"


def _user_stack(item: _Assert) -> str | None:
    """The user's frames in the form of ``meta["stack_trace"]``; ``None`` if there are none.

    Dynamo runs no user code while it traces, so frames below it are only the caller of the function.
    """
    if item.location is not None:
        return location_text(item.location)
    desc = encode_stack(item.stack)
    frames = [] if desc is None else [(short_path(frame.file), frame) for frame in desc.frames]
    if any(file == "torch/_dynamo/convert_frame.py" for file, _ in frames):
        return None
    own = [frame for file, frame in frames if not file.startswith(("torch/", "torch_fakeify/"))]
    return stack_text(StackDesc(frames=tuple(own))) if own else None
