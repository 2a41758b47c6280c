"""``check_bindings``: check that every unbacked symbol of a graph is bound.

An unbacked symbol is bound once in each graph, by the node that computes its number, before it is
used. In the body of a higher-order operator the symbols bound around it are in scope too.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torch_fakeify.compat.arguments import check_graph
from torch_fakeify.compat.torch_graphs import OpOverload
from torch_fakeify.errors import ShapeEnvError
from torch_fakeify.replay.bindings import (
    canonical_symbol,
    canonical_symbols_in,
    decode_path,
    env_of,
    expr_of,
    follow,
    is_unbacked,
    path_text,
    raw_path,
    visible_symbols,
)
from torch_fakeify.replay.facts import runtime_asserts
from torch_fakeify.replay.lowering import attribute_of, value_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import sympy


class BindingFault(NamedTuple):
    """An unbacked symbol that is not bound correctly."""

    fx_node: str
    """The name of the node; empty for a runtime assert."""
    symbol: str
    what: str
    """The fault, as a sentence without the names of node and symbol."""

    def __str__(self) -> str:
        """The fault as one line of text."""
        return f"{self.fx_node or 'a runtime assert'}: {self.symbol} {self.what}"


def check_bindings(gm: torch.fx.GraphModule, *, asserts: bool = True) -> None:
    """Check that every unbacked symbol of a graph is bound, once, before it is used.

    Inputs, also those of a body, bind their symbols. The replacement of a symbol counts as the
    symbol.

    Args:
        gm: a graph with fake values in ``meta``, with the bodies of its higher-order operators.
        asserts: also check the symbols in the runtime asserts of the ``ShapeEnv``. Disable it for a
            part of a graph, as AOTAutograd's partitioner makes them: another part binds the rest.

    Raises:
        ShapeEnvError: all faults, each with node and symbol.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(torch.nonzero, tracing_mode="symbolic")(torch.ones(4))
        >>> tfk.check_bindings(gm)
    """
    faults = binding_faults(gm, asserts=asserts)
    if not faults:
        return
    raise ShapeEnvError(
        "unbacked symbols are not bound as they should be"
        if len(faults) > 1
        else "an unbacked symbol is not bound as it should be",
        where=faults[0].fx_node or None,
        found="; ".join(map(str, faults)),
        fix="A pass that replaces or removes a node that binds symbols calls transplant, and "
        "repropagate for what uses it",
    )


def binding_faults(gm: torch.fx.GraphModule, *, asserts: bool = True) -> list[BindingFault]:
    """The faults that `check_bindings` reports, in the order of the nodes."""
    check_graph(gm)
    env = env_of(gm.graph)
    if env is None:
        return []
    checker = _Checker(env)
    checker.graph(gm, frozenset())
    if asserts:
        checker.asserts()
    return checker.faults


class _Checker:
    def __init__(self, env: Any) -> None:
        self.faults: list[BindingFault] = []
        self._env = env
        self._everywhere: set[sympy.Symbol] = set()
        self._reported: set[sympy.Symbol] = set()
        self._done: set[int] = set()

    def graph(self, gm: torch.fx.GraphModule, outer: frozenset[sympy.Symbol]) -> None:
        """Check one graph, with the symbols that are bound around it."""
        self._done.add(id(gm))
        bound = {*outer, *map(self._name, self._env.unbacked_inputs)}
        binders: dict[sympy.Symbol, str] = {}
        later = self._binders(gm.graph)
        for fx_node in gm.graph.nodes:
            if fx_node.op == "placeholder":
                bound |= canonical_symbols_in(value_of(fx_node), self._env)
                continue
            for symbol in self._notes(fx_node):
                if symbol in binders:
                    self._fault(fx_node, symbol, f"is bound twice: {binders[symbol]} binds it")
                binders.setdefault(symbol, fx_node.name)
                bound.add(symbol)
            self._uses(fx_node, bound, later)
            for arg in fx_node.all_input_nodes:
                body = attribute_of(gm, str(arg.target)) if arg.op == "get_attr" else None
                if isinstance(body, torch.fx.GraphModule) and id(body) not in self._done:
                    self.graph(body, frozenset(bound))
        self._everywhere |= bound

    def asserts(self) -> None:
        for one in runtime_asserts(self._env):
            for symbol in sorted(self._unbound(one.expr, self._everywhere), key=str):
                if symbol not in self._reported:
                    self._reported.add(symbol)
                    what = f"is bound nowhere: nothing can check {one.expr}"
                    self.faults.append(BindingFault("", str(symbol), what))

    def _name(self, symbol: Any) -> Any:
        return canonical_symbol(symbol, self._env)

    def _fault(self, fx_node: torch.fx.Node, symbol: Any, what: str) -> None:
        self.faults.append(BindingFault(fx_node.name, str(symbol), what))

    # --- notes ------------------------------------------------------------------------------------

    def _binders(self, graph: torch.fx.Graph) -> dict[Any, str]:
        found: dict[Any, str] = {}
        for fx_node in graph.nodes:
            if fx_node.op != "placeholder":
                for symbol in fx_node.meta.get("unbacked_bindings") or {}:
                    found.setdefault(self._name(symbol), fx_node.name)
        return found

    def _notes(self, fx_node: torch.fx.Node) -> Iterator[Any]:
        """The symbols that a node binds by its metadata; reports wrong metadata as faults."""
        value = value_of(fx_node)
        for raw, torch_path in (fx_node.meta.get("unbacked_bindings") or {}).items():
            symbol = self._name(raw)
            path = decode_path(torch_path)
            number = None if path is None else follow(value, raw_path(path))
            expr = expr_of(number)
            text = str(torch_path) if path is None else path_text(fx_node.name, path)
            if expr is None:
                self._fault(fx_node, symbol, f"is not there: {text} leads to no number")
            elif not self._is_of(symbol, expr):
                self._fault(fx_node, symbol, f"is not there: {text} gives {expr}")
            yield symbol

    def _is_of(self, symbol: Any, expr: Any) -> bool:
        """Whether a number contains a symbol, or the symbol's replacement."""
        if symbol in map(self._name, expr.free_symbols):
            return True
        final = self._env.replace(symbol)
        if final == symbol:
            return False
        found = self._env.replace(expr)
        if final.free_symbols:
            return bool(final.free_symbols <= found.free_symbols)
        return not found.free_symbols

    # --- uses -------------------------------------------------------------------------------------

    def _uses(self, fx_node: torch.fx.Node, bound: set[Any], later: dict[Any, str]) -> None:
        if fx_node.op in ("output", "get_attr"):
            return
        value = value_of(fx_node)
        for symbol in sorted(canonical_symbols_in(value, self._env), key=str):
            if symbol in self._reported or not self._unbound(symbol, bound):
                continue
            self._reported.add(symbol)
            if symbol in later:
                what = f"is used before {later[symbol]}, which binds it"
            elif finds_numbers(fx_node) and symbol in {
                self._name(s) for s, _ in visible_symbols(value)
            }:
                what = "is new here, and the node has no note of it"
            else:
                what = "is used, and bound nowhere"
            self._fault(fx_node, symbol, what)

    def _unbound(self, expr: Any, bound: set[Any]) -> set[Any]:
        missing: set[Any] = set()
        for symbol in expr.free_symbols:
            if not is_unbacked(symbol):
                continue
            name = self._name(symbol)
            if name in bound:
                continue
            final = self._env.replace(name)
            parts = {p for p in final.free_symbols if is_unbacked(p)}
            if final == name or not parts <= bound:
                missing.add(name)
        return missing


def finds_numbers(fx_node: torch.fx.Node) -> bool:
    """Whether the result of a node may depend on data in its sizes or numbers."""
    if fx_node.op != "call_function":
        return True
    if isinstance(fx_node.target, OpOverload):
        tags = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
        return not tags.isdisjoint(fx_node.target.tags)
    if fx_node.target is operator.getitem:
        return isinstance(value_of(fx_node.args[0]), torch.Tensor)
    return getattr(fx_node.target, "__module__", "") not in ("_operator", "math")
