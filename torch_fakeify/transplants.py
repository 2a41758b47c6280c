"""``transplant``: what is assumed of a number in the data, when a pass replaces the node that finds it.

A pass that puts another node in the place of ``nonzero()`` leaves the ``ShapeEnv`` with runtime
asserts about a symbol that no node binds any more. They are moved to what has its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import sympy
import torch

from . import _torch
from .allocations import Memos, forget
from .binding_checks import finds_numbers
from .binding_sites import (
    Binding,
    env_of,
    expr_of,
    find_bindings,
    follow,
    is_flag,
    path_steps,
    place_of,
    renamed,
    shown,
    symbols_in,
)
from .checkpoints import checkpoint
from .errors import ShapeEnvError
from .expr_nodes import bodies, value_of
from .runtime_asserts import insert_runtime_asserts
from .unbacked_facts import limits_of, move_range, over, state_assert

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Transplanted", "transplant"]


class Transplanted(NamedTuple):
    """What became of the symbols of a node."""

    moved: dict[sympy.Symbol, sympy.Symbol]
    """By old symbols, those that the new node binds in their place."""
    replaced: dict[sympy.Symbol, sympy.Basic]
    """By old symbols that are gone, the number that has their place."""
    kept: dict[sympy.Symbol, torch.fx.Node]
    """Symbols that another node finds too, which showed them because torch remembered them: that
    node binds them from now on, and what was assumed of them stays, besides."""
    checks: tuple[str, ...]
    """What was assumed of the symbols that are gone, over what replaced them, as far as it does not
    always hold: guards, or runtime asserts, which are nodes of the graph now."""


def transplant(
    gm: torch.fx.GraphModule, old_fx_node: torch.fx.Node, new_fx_node: torch.fx.Node | None
) -> Transplanted:
    """Move what is assumed of a node's unbacked symbols to the node that takes its place.

    Where the value of the new node has, at the same place, a symbol that the new node binds, runtime
    asserts (with their messages and stacks), range and all move to that symbol. Where it has another
    number, they become checks of that: a constant is checked at once, of a number of the inputs the
    ``ShapeEnv`` makes a guard, and of another number from the data an assertion in the graph. The old
    symbol stays known as another name of what replaced it, so values that show it stay right. Only if
    another node of the graph finds the same number, it is that node's from now on: the new number
    may be another one, and what uses the new node is to be brought up to date with `repropagate`.

    Call it when the new node has a value, before the old one is erased or after. The old node's note
    goes; the new node gets one where it lacks it.

    Args:
        gm: the graph with both nodes; they may be in a body of it.
        old_fx_node: the node that bound the symbols.
        new_fx_node: what has its place; ``None`` if nothing has. Then nothing may be assumed of the
            symbols.

    Raises:
        ShapeEnvError: the new node has no value or no number there; what is assumed does not hold
            of it; nothing has the place of a symbol of which something is assumed. Nothing is
            changed then.
    """
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
    mine = _notes(gm, old_fx_node, new_fx_node, env)
    mover = _Mover(env)
    heirs = {s: heir for s, _ in sites if (heir := _heir(gm, s, old_fx_node, new_fx_node, env))}
    with checkpoint(env):
        for symbol, site in sites:
            mover.symbol(symbol, site, new_fx_node, value, mine, is_kept=symbol in heirs)
    for symbol, heir in heirs.items():
        _note(heir, symbol, env)
    old_fx_node.meta.pop("unbacked_bindings", None)
    if mine:
        new_fx_node.meta["unbacked_bindings"] = mine
    if mover.needs_nodes:
        insert_runtime_asserts(gm, env)
    return Transplanted(mover.moved, mover.replaced, heirs, tuple(mover.checks))


# --- the two nodes --------------------------------------------------------------------------------


def _graphs(gm: torch.fx.GraphModule) -> Iterator[torch.fx.Graph]:
    yield gm.graph
    for body in bodies(gm):
        yield from _graphs(body)


def _sites_of(
    gm: torch.fx.GraphModule, fx_node: torch.fx.Node, env: Any
) -> Iterator[tuple[Any, Binding]]:
    """What a node binds, by its note or by its value; it may be out of the graph already."""
    notes = fx_node.meta.get("unbacked_bindings")
    if notes:
        for raw, path in notes.items():
            steps = path_steps(path)
            if steps is not None:
                yield renamed(raw, env), Binding(fx_node, steps)
        return
    wanted = {renamed(s, env) for s in symbols_in(value_of(fx_node))} - _bound(gm, fx_node, env)
    alone = torch.fx.Graph()
    copy = alone.call_function(lambda: None)
    copy.meta = dict(fx_node.meta)
    for symbol, site in find_bindings(alone, env, wanted).items():
        yield symbol, Binding(fx_node, site.steps)


def _bound(gm: torch.fx.GraphModule, but: torch.fx.Node, env: Any) -> set[Any]:
    """What all other nodes bind, and what inputs hold."""
    found: set[Any] = set(env.unbacked_inputs)
    for graph in _graphs(gm):
        for fx_node in graph.nodes:
            if fx_node.op == "placeholder":
                found |= {renamed(s, env) for s in symbols_in(value_of(fx_node))}
            elif fx_node is not but:
                found |= {renamed(s, env) for s in fx_node.meta.get("unbacked_bindings") or {}}
    return found


def _notes(
    gm: torch.fx.GraphModule, old: torch.fx.Node, new: torch.fx.Node, env: Any
) -> dict[Any, Any]:
    """What the new node binds, as torch notes it."""
    notes = new.meta.get("unbacked_bindings")
    if notes:
        return dict(notes)
    value = value_of(new)
    pending = {s for s in symbols_in(value) if renamed(s, env) not in _bound(gm, old, env)}
    env.pending_fresh_unbacked_symbols[:] = [
        s for s in env.pending_fresh_unbacked_symbols if s not in pending
    ]
    return _torch.free_unbacked_symbols_with_path(value, (), shape_env=env, pending=pending)


def _heir(
    gm: torch.fx.GraphModule, symbol: Any, old: torch.fx.Node, new: torch.fx.Node, env: Any
) -> torch.fx.Node | None:
    """The first other node that finds the number itself, in the same tensor."""
    asked = set(old.all_input_nodes)  # none of a node that was erased
    for graph in _graphs(gm):
        for fx_node in graph.nodes:
            inputs = set(fx_node.all_input_nodes)
            if fx_node in (old, new) or not inputs.isdisjoint((old, new)):
                continue
            if fx_node.op == "placeholder" or (asked and asked.isdisjoint(inputs)):
                continue
            if symbol not in {renamed(s, env) for s, _ in shown(value_of(fx_node))}:
                continue
            brought = {renamed(s, env) for n in inputs for s in symbols_in(value_of(n))}
            if symbol not in brought and finds_numbers(fx_node):
                return fx_node
    return None


def _note(fx_node: torch.fx.Node, symbol: Any, env: Any) -> None:
    """Note that a node binds a symbol that its value shows."""
    pending = {s for s in symbols_in(value_of(fx_node)) if renamed(s, env) == symbol}
    path = _torch.free_unbacked_symbols_with_path(
        value_of(fx_node), (), shape_env=env, pending=pending
    )
    fx_node.meta.setdefault("unbacked_bindings", {}).update(path)


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
                fix="Keep the node, or transplant to one that gives the number",
            )
    old.meta.pop("unbacked_bindings", None)
    forget(env, symbols, Memos(()))


def _asserts_about(env: Any, symbol: Any) -> list[Any]:
    return [
        one
        for group in env.deferred_runtime_asserts.values()
        for one in group
        if symbol in {renamed(s, env) for s in one.expr.free_symbols}
    ]


# --- facts ----------------------------------------------------------------------------------------


class _Mover:
    """Moves the facts about one symbol after another."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self.moved: dict[Any, Any] = {}
        self.replaced: dict[Any, Any] = {}
        self.checks: list[str] = []
        self.needs_nodes = False

    def symbol(
        self,
        symbol: Any,
        site: Binding,
        new: torch.fx.Node,
        value: Any,
        mine: dict[Any, Any],
        *,
        is_kept: bool,
    ) -> None:
        """Move what is assumed of one symbol, or state it of the new number too."""
        env = self._env
        there = Binding(new, site.steps)
        expr = _read(follow(value, place_of(site.steps)), site)
        if expr is None:
            raise ShapeEnvError(
                "the node that takes another one's place has no number there",
                where=there.text,
                expected=f"the number that was {symbol}, {site.text}",
                found=f"a {type(value).__name__}",
            )
        if env.replace(expr) == env.replace(symbol) and symbol not in env.replacements:
            return  # it is the same one still
        asserts = _asserts_about(env, symbol)
        if isinstance(expr, sympy.Symbol) and expr in mine:
            self.moved[symbol] = expr
            if not is_kept:
                self._cut(symbol, asserts)
                env.unbacked_renamings[symbol] = expr
            self._state(symbol, expr, asserts)
            move_range(env, symbol, env, expr)
        else:
            self.replaced[symbol] = expr
            limits = list(limits_of(expr, env.var_to_range[symbol]))
            if not is_kept:
                self._cut(symbol, asserts)
            before = _size(env)
            self._state(symbol, expr, asserts)
            for limit in limits:
                now = {symbol: expr}
                state_assert(env, limit, "", None, was=f"the range of {symbol}", now=now)
            self._note_checks(expr, asserts, symbol, limits, before)
        if env.replace(symbol) == symbol and not is_kept:
            final = env.replace(expr)
            env.var_to_range[symbol] = env.bound_sympy(
                final
            )  # another name has no range of its own
            env._set_replacement(symbol, final, "transplant")

    def _cut(self, symbol: Any, asserts: list[Any]) -> None:
        """Take the asserts about a symbol out."""
        env = self._env
        ids = set(map(id, asserts))
        for key, group in list(env.deferred_runtime_asserts.items()):
            left = [one for one in group if id(one) not in ids]
            if len(left) != len(group):
                env.deferred_runtime_asserts[key] = left
        env.num_deferred_runtime_asserts -= len(asserts)
        for condition in [c for c in env.axioms if symbol in c.free_symbols]:
            del env.axioms[condition]
        env._update_version_counter()

    def _state(self, symbol: Any, expr: Any, asserts: list[Any]) -> None:
        env = self._env
        for one in asserts:
            names = {s: renamed(s, env) for s in one.expr.free_symbols}
            moved = over(over(one.expr, names), {symbol: expr})
            now = {symbol: expr}
            state_assert(env, moved, one.msg, one.stack, was=str(one.expr), now=now)

    def _note_checks(
        self, expr: Any, asserts: list[Any], symbol: Any, limits: list[Any], before: Any
    ) -> None:
        env = self._env
        guards, deferred = before
        if len(env.guards) > guards or env.num_deferred_runtime_asserts > deferred:
            texts = [str(over(one.expr, {symbol: expr})) for one in asserts]
            texts += [str(limit) for limit in limits]
            self.checks += [t for t in dict.fromkeys(texts) if t != "True"]
        if env.num_deferred_runtime_asserts > deferred:
            self.needs_nodes = True


def _size(env: Any) -> tuple[int, int]:
    return len(env.guards), env.num_deferred_runtime_asserts


def _read(found: Any, site: Binding) -> Any:
    """A number as a binding site reads it: a flag as an integer, a multiple divided."""
    expr: Any = expr_of(found)
    if expr is None:
        return None
    for step in site.steps[len(place_of(site.steps)) :]:
        if step[0] == "as_int":
            expr = expr.args[0] if is_flag(expr) else sympy.Piecewise((1, expr), (0, True))
        else:
            expr = _divided(expr, step[1])
    return sympy.Integer(int(expr == sympy.true)) if expr in (sympy.true, sympy.false) else expr


def _divided(expr: Any, divisor: Any) -> Any:
    if isinstance(expr, sympy.Mul) and divisor in expr.args:
        return sympy.Mul(*(arg for arg in expr.args if arg != divisor))
    return _torch.sympy_functions.FloorDiv(expr, divisor)
