"""``transplant``: move the facts about unbacked symbols when a pass replaces the node that binds them.

A pass that replaces a node such as ``nonzero()`` leaves the ``ShapeEnv`` with runtime asserts about a
symbol that no node binds. They are moved to the number that takes its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import sympy
import torch

from torch_fakeify.compat import torch_symbols
from torch_fakeify.compat.arguments import check_graph
from torch_fakeify.errors import ShapeEnvError
from torch_fakeify.replay.assert_nodes import insert_runtime_asserts
from torch_fakeify.replay.bindings import (
    Binding,
    canonical_symbol,
    canonical_symbols_in,
    env_of,
    expr_of,
    find_bindings,
    follow,
    is_flag,
    noted_bindings,
    raw_path,
    symbols_in,
    visible_symbols,
)
from torch_fakeify.replay.facts import runtime_asserts
from torch_fakeify.replay.lowering import graphs_of, value_of
from torch_fakeify.shape_env.rollback import checkpoint

from .allocations import Memos, drop_asserts, drop_symbols
from .binding_checks import finds_numbers
from .facts import canonical_expr, limits_of, move_range, state_assert, substitute

if TYPE_CHECKING:
    from collections.abc import Iterator


class Transplanted(NamedTuple):
    """The symbols of a replaced node by outcome."""

    moved: dict[sympy.Symbol, sympy.Symbol]
    """The symbol that the new node binds in place of each old one."""
    replaced: dict[sympy.Symbol, sympy.Basic]
    """The number that replaces each old symbol for which the new node binds none."""
    retained: dict[sympy.Symbol, torch.fx.Node]
    """Old symbols that another node of the graph computes too, through a memo of torch: that node
    binds them from now on, and the facts about them remain."""
    checks: tuple[str, ...]
    """The facts about replaced symbols that do not always hold for their replacements: now guards, or
    runtime asserts with nodes in the graph."""


def transplant(
    gm: torch.fx.GraphModule, old_fx_node: torch.fx.Node, new_fx_node: torch.fx.Node | None
) -> Transplanted:
    """Move the facts about a node's unbacked symbols to the node that replaces it.

    If the new node binds a symbol at the same place of its value, the facts (runtime asserts with
    their messages and stacks, range, hints) move to that symbol. If it has another number there, they
    become checks of that number: at once for a constant, a guard for a number of the inputs, a runtime
    assert for another unbacked number. The old symbol becomes an alias of its replacement, so values
    that contain it remain correct. But if another node of the graph computes the same number, that
    node binds the old symbol from now on; the new number may then differ, and the users of the new
    node must be updated with `repropagate`.

    Call it once the new node has a value, before or after the old one is erased. The old node loses
    its ``unbacked_bindings``; the new node gets them if it has none.

    Args:
        gm: the graph with both nodes; they may be in a body of it.
        old_fx_node: the node that bound the symbols.
        new_fx_node: the node that replaces it; ``None`` if the node is removed, which is an error if
            there are facts about its symbols.

    Raises:
        ShapeEnvError: the new node has no value, or no number at that place; a fact does not hold for
            it; a node is removed although there are facts about its symbols. Nothing is changed then.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(torch.nonzero, tracing_mode="symbolic")(torch.ones(4))
        >>> (old,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.nonzero.default)
        >>> with gm.graph.inserting_after(old):
        ...     new = gm.graph.call_function(torch.ops.aten.nonzero.default, old.args)
        >>> _ = tfk.repropagate(gm, [new])
        >>> old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        [output]
        >>> gm.graph.erase_node(old)
        >>> moved = tfk.transplant(gm, old, new)
        >>> tfk.check_bindings(gm)
    """
    check_graph(gm)
    env = env_of(gm.graph)
    sites = [] if env is None else list(_sites_of(gm, old_fx_node, env))
    if new_fx_node is None:
        _remove(env, sites, old_fx_node)
        return Transplanted({}, {}, {}, ())
    value = value_of(new_fx_node)
    if value is None:
        raise ShapeEnvError(
            "a node that takes another one's place has no value",
            where=new_fx_node.name,
            expected="a fake value in meta",
            fix="repropagate(gm, [node]) gives it one",
        )
    new_bindings = _new_bindings(gm, old_fx_node, new_fx_node, env)
    binders = {
        s: binder
        for s, _ in sites
        if (binder := _replacement_binder(gm, s, old_fx_node, new_fx_node, env))
    }
    mover = _Mover(env, new_fx_node, new_bindings)
    with checkpoint(env):
        for symbol, site in sites:
            mover.symbol(symbol, site, has_binder=symbol in binders)
    for symbol, binder in binders.items():
        _note(binder, symbol, env)
    old_fx_node.meta.pop("unbacked_bindings", None)
    if new_bindings:
        new_fx_node.meta["unbacked_bindings"] = new_bindings
    if mover.needs_nodes:
        insert_runtime_asserts(gm, env)
    return Transplanted(mover.moved, mover.replaced, binders, tuple(mover.checks))


# --- the two nodes --------------------------------------------------------------------------------


def _sites_of(
    gm: torch.fx.GraphModule, fx_node: torch.fx.Node, env: Any
) -> Iterator[tuple[Any, Binding]]:
    """The symbols that a node binds, by metadata or by its value; it may have been erased."""
    if fx_node.meta.get("unbacked_bindings"):
        yield from noted_bindings(fx_node, env)
        return
    requested = canonical_symbols_in(value_of(fx_node), env) - _bound(gm, fx_node, env)
    alone = torch.fx.Graph()
    copy = alone.call_function(lambda: None)
    copy.meta = dict(fx_node.meta)
    for symbol, site in find_bindings(alone, env, requested).items():
        yield symbol, Binding(fx_node, site.path)


def _bound(gm: torch.fx.GraphModule, but: torch.fx.Node, env: Any) -> set[Any]:
    """The symbols that inputs and all other nodes bind."""
    found: set[Any] = set(env.unbacked_inputs)
    for graph in graphs_of(gm):
        for fx_node in graph.nodes:
            if fx_node.op == "placeholder":
                found |= canonical_symbols_in(value_of(fx_node), env)
            elif fx_node is not but:
                found |= {
                    canonical_symbol(s, env) for s in fx_node.meta.get("unbacked_bindings") or {}
                }
    return found


def _new_bindings(
    gm: torch.fx.GraphModule, old: torch.fx.Node, new: torch.fx.Node, env: Any
) -> dict[Any, Any]:
    """The ``unbacked_bindings`` of the new node, computed if it has none."""
    notes = new.meta.get("unbacked_bindings")
    if notes:
        return dict(notes)
    value = value_of(new)
    pending = {s for s in symbols_in(value) if canonical_symbol(s, env) not in _bound(gm, old, env)}
    env.pending_fresh_unbacked_symbols[:] = [
        s for s in env.pending_fresh_unbacked_symbols if s not in pending
    ]
    return torch_symbols.free_unbacked_symbols_with_path(value, (), shape_env=env, pending=pending)


def _replacement_binder(
    gm: torch.fx.GraphModule, symbol: Any, old: torch.fx.Node, new: torch.fx.Node, env: Any
) -> torch.fx.Node | None:
    """The first other node that computes the number itself, from the same tensor."""
    old_inputs = set(old.all_input_nodes)  # empty for an erased node
    for graph in graphs_of(gm):
        for fx_node in graph.nodes:
            inputs = set(fx_node.all_input_nodes)
            if fx_node in (old, new) or not inputs.isdisjoint((old, new)):
                continue
            if fx_node.op == "placeholder" or (old_inputs and old_inputs.isdisjoint(inputs)):
                continue
            if symbol not in {
                canonical_symbol(s, env) for s, _ in visible_symbols(value_of(fx_node))
            }:
                continue
            from_inputs = canonical_symbols_in(list(map(value_of, inputs)), env)
            if symbol not in from_inputs and finds_numbers(fx_node):
                return fx_node
    return None


def _note(fx_node: torch.fx.Node, symbol: Any, env: Any) -> None:
    pending = {s for s in symbols_in(value_of(fx_node)) if canonical_symbol(s, env) == symbol}
    torch_path = torch_symbols.free_unbacked_symbols_with_path(
        value_of(fx_node), (), shape_env=env, pending=pending
    )
    fx_node.meta.setdefault("unbacked_bindings", {}).update(torch_path)


def _remove(env: Any, sites: list[tuple[Any, Binding]], old: torch.fx.Node) -> None:
    if env is None or not sites:
        return
    symbols = {symbol for symbol, _ in sites}
    for symbol, site in sites:
        lost = [str(one.expr) for one in _asserts_about(env, symbol)]
        if lost:
            raise ShapeEnvError(
                "a runtime assert would be lost",
                where=site.text,
                expected=f"a node that has the place of {symbol}",
                found=", ".join(lost),
                fix="Do not remove the node, or transplant to one that gives the number",
            )
    old.meta.pop("unbacked_bindings", None)
    drop_symbols(env, symbols, Memos(()))


def _asserts_about(env: Any, symbol: Any) -> list[Any]:
    return [
        one
        for one in runtime_asserts(env)
        if symbol in {canonical_symbol(s, env) for s in one.expr.free_symbols}
    ]


# --- facts ----------------------------------------------------------------------------------------


class _Mover:
    """Moves facts, one symbol at a time."""

    def __init__(self, env: Any, new: torch.fx.Node, new_bindings: dict[Any, Any]) -> None:
        self._env = env
        self._new = new
        self._new_bindings = new_bindings
        self.moved: dict[Any, Any] = {}
        self.replaced: dict[Any, Any] = {}
        self.checks: list[str] = []
        self.needs_nodes = False

    def symbol(self, symbol: Any, site: Binding, *, has_binder: bool) -> None:
        """Move the facts about one symbol; copy them if another node binds the symbol."""
        env = self._env
        value = value_of(self._new)
        expr = _read(follow(value, raw_path(site.path)), site)
        if expr is None:
            raise ShapeEnvError(
                "the node that takes another one's place has no number there",
                where=Binding(self._new, site.path).text,
                expected=f"the number that was {symbol}, {site.text}",
                found=f"a {type(value).__name__}",
            )
        if env.replace(expr) == env.replace(symbol) and symbol not in env.replacements:
            return  # the number is the same
        asserts = _asserts_about(env, symbol)
        if not has_binder:
            ids = set(map(id, asserts))
            drop_asserts(env, {symbol}, lambda one: id(one) in ids)
        if isinstance(expr, sympy.Symbol) and expr in self._new_bindings:
            self.moved[symbol] = expr
            if not has_binder:
                env.unbacked_renamings[symbol] = expr
            self._state(symbol, expr, asserts)
            move_range(env, symbol, env, expr)
        else:
            self.replaced[symbol] = expr
            limits = list(limits_of(expr, env.var_to_range[symbol]))
            guards, deferred = len(env.guards), env.num_deferred_runtime_asserts
            self._state(symbol, expr, asserts)
            for limit in limits:
                now = {symbol: expr}
                state_assert(env, limit, "", None, was=f"the range of {symbol}", now=now)
            needs_nodes = env.num_deferred_runtime_asserts > deferred
            if len(env.guards) > guards or needs_nodes:
                texts = [str(substitute(one.expr, {symbol: expr})) for one in asserts]
                texts += [str(limit) for limit in limits]
                self.checks += [t for t in dict.fromkeys(texts) if t != "True"]
            self.needs_nodes |= needs_nodes
        if env.replace(symbol) == symbol and not has_binder:
            final = env.replace(expr)
            env.var_to_range[symbol] = env.bound_sympy(final)  # an alias has no range of its own
            env._set_replacement(symbol, final, "transplant")

    def _state(self, symbol: Any, expr: Any, asserts: list[Any]) -> None:
        env = self._env
        for one in asserts:
            moved = substitute(canonical_expr(one.expr, env), {symbol: expr})
            now = {symbol: expr}
            state_assert(env, moved, one.msg, one.stack, was=str(one.expr), now=now)


def _read(found: Any, site: Binding) -> Any:
    """A number after the conversions and divisions in the path of a binding site."""
    expr: Any = expr_of(found)
    if expr is None:
        return None
    for entry in site.path[len(raw_path(site.path)) :]:
        if entry[0] == "as_int":
            expr = expr.args[0] if is_flag(expr) else sympy.Piecewise((1, expr), (0, True))
        elif isinstance(expr, sympy.Mul) and entry[1] in expr.args:
            expr = sympy.Mul(*(arg for arg in expr.args if arg != entry[1]))
        else:
            expr = torch_symbols.sympy_functions.FloorDiv(expr, entry[1])
    return sympy.Integer(int(expr == sympy.true)) if expr in (sympy.true, sympy.false) else expr
