"""What a ``ShapeEnv`` assumes of its unbacked symbols, told of what has taken their place.

The facts are those that a graph's inputs do not tell: deferred runtime asserts with their messages
and stacks, value ranges, that a symbol is a size, replacements. Each one is stated as soon as
something has the place of all its symbols, asserts before ranges: where a range says the same, torch
would not note the assert.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import sympy

from ._torch import ValueRangeError, int_oo
from .binding_sites import is_unbacked, renamed
from .desc import SymbolNode
from .errors import ShapeEnvError
from .exprs import decode_expr, encode_expr
from .renaming import rename_symbols
from .sizes import narrow_range

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["FactsToMove", "limits_of", "move_range", "over", "state_assert"]


def over(expr: Any, symbols: Mapping[sympy.Symbol, sympy.Basic]) -> Any:
    """An expression over other symbols, or over what has taken their place."""
    used = {s: symbols[s] for s in expr.free_symbols if s in symbols and symbols[s] != s}
    if not used:
        return expr
    others = expr.free_symbols - used.keys()
    distinct = others.isdisjoint(used.values()) and len(set(used.values())) == len(used)
    if distinct and all(isinstance(new, sympy.Symbol) for new in used.values()):
        # As a record: `xreplace` would evaluate what torch has left unevaluated.
        names = {_record(old): _record(new) for old, new in used.items()}
        return decode_expr(rename_symbols(encode_expr(expr), names))
    return expr.xreplace(used)


def _record(symbol: Any) -> SymbolNode:
    record = encode_expr(symbol).nodes[0]
    assert isinstance(record, SymbolNode)
    return record


def state_assert(
    env: Any,
    expr: Any,
    message: str,
    stack: Any,
    *,
    was: str,
    now: Mapping[Any, Any],
) -> None:
    """Assume a condition: as a deferred assert, or as a guard if it is about inputs alone.

    Args:
        env: the ``ShapeEnv`` of the symbols.
        expr: the condition.
        message: of the assertion.
        stack: the ``CapturedTraceback`` of who asked for it; ``None`` leaves it to torch.
        was: the condition as it was, for the error.
        now: what has the place of its symbols, for the error.

    Raises:
        ShapeEnvError: it does not hold.
    """
    hints = {s: env.backed_var_to_val[s] for s in expr.free_symbols & env.backed_var_to_val.keys()}
    groups = env.deferred_runtime_asserts
    keys = (None, *expr.free_symbols)  # one of them it is filed under
    before = {key: len(groups.get(key, ())) for key in keys}
    if expr.xreplace(hints) == sympy.false or not (
        expr == sympy.true or env.guard_or_defer_runtime_assert(expr, message)
    ):
        raise ShapeEnvError(
            "a runtime assert does not hold any more",
            where=was,
            expected=str(expr) if expr.free_symbols else None,
            found=", ".join(f"{s} is {n}" for s, n in sorted({**now, **hints}.items(), key=str)),
            fix="What has the place of the symbol is not what the graph assumes of it",
        )
    for key, count in before.items():
        if stack is not None and key in groups and len(groups[key]) > count:
            groups[key][-1] = dataclasses.replace(groups[key][-1], stack=stack)


class FactsToMove:
    """The facts of one ``ShapeEnv``, stated in another one as its symbols become known there.

    Args:
        known: the environment that has the facts; ``None`` if there are none.
        env: the environment that is told.

    Attributes:
        symbols: what has the place of each symbol, by `renamed` names.
    """

    def __init__(self, known: Any, env: Any) -> None:
        self._known = known
        self._env = env
        self.symbols: dict[sympy.Symbol, Any] = {}
        self._new: list[sympy.Symbol] = []
        self._asserts: list[Any] = []
        self._equalities: dict[sympy.Symbol, Any] = {}
        if known is None:
            return
        self._asserts = [one for group in known.deferred_runtime_asserts.values() for one in group]
        self._equalities = {
            symbol: expr
            for symbol, expr in known.replacements.items()
            if is_unbacked(symbol) and symbol not in known.unbacked_renamings
        }

    def know(self, symbol: sympy.Symbol, expr: Any) -> None:
        """Say what has the place of a symbol."""
        self.symbols[symbol] = expr
        self._new.append(symbol)

    def over_new(self, expr: Any) -> Any:
        """An expression of the known environment over what has the place of its symbols.

        ``None`` if something is missing.
        """
        expr = self._plain(expr)
        return over(expr, self.symbols) if expr.free_symbols <= self.symbols.keys() else None

    def _plain(self, expr: Any) -> Any:
        changes = {s: renamed(s, self._known) for s in expr.free_symbols}
        return over(expr, changes)

    def state(self) -> None:
        """State all that can be since the last time.

        Raises:
            ShapeEnvError: something does not hold.
        """
        if not self._new:
            return
        new, self._new = self._new, []
        self._asserts = [one for one in self._asserts if not self._stated(one, one.expr)]
        for symbol in new:
            self._limit(symbol)
        for symbol in list(self._equalities):
            self._equality(symbol)

    def finish(self) -> tuple[str, ...]:
        """State what other forms of the facts allow; the text of the asserts that are left."""
        left: list[Any] = []
        for one in self._asserts:
            expr = self._known.replace(self._plain(one.expr))
            # What a replacement makes trivial is what the replacement rests on.
            if expr == sympy.true or not self._stated(one, expr):
                left.append(one)
        return tuple(dict.fromkeys(str(one.expr) for one in left))

    def _stated(self, one: Any, expr: Any) -> bool:
        moved = self.over_new(expr)
        if moved is None:
            return False
        now = {s: new for s in expr.free_symbols if (new := self.symbols.get(s, s)) != s}
        state_assert(self._env, moved, one.msg, one.stack, was=str(one.expr), now=now)
        return True

    def _limit(self, symbol: sympy.Symbol) -> None:
        expr, bounds = self.symbols[symbol], self._known.var_to_range.get(symbol)
        if not is_unbacked(symbol) or bounds is None:
            return
        env = self._env
        if not isinstance(expr, sympy.Symbol) or not is_unbacked(expr):
            for limit in limits_of(expr, bounds):
                now = {symbol: expr}
                state_assert(env, limit, "", None, was=f"the range of {symbol}", now=now)
            return
        move_range(self._known, symbol, env, expr)

    def _equality(self, symbol: sympy.Symbol) -> None:
        left, right = self.symbols.get(symbol), self.over_new(self._equalities[symbol])
        if left is None or right is None:
            return
        del self._equalities[symbol]
        env = self._env
        if isinstance(left, sympy.Symbol) and env.replace(left) == left != env.replace(right):
            env._set_replacement(left, right, "retrace")


def move_range(known: Any, symbol: sympy.Symbol, env: Any, new: sympy.Symbol) -> None:
    """Give an unbacked symbol what is known of another one's range and kind.

    Raises:
        ShapeEnvError: no number is in both ranges.
    """
    bounds = known.var_to_range[symbol]
    try:
        narrow_range(env, new, bounds)
    except ValueRangeError as error:
        raise ShapeEnvError(
            "the range of a number from the data is empty",
            where=str(symbol),
            expected=f"[{bounds.lower}, {bounds.upper}]",
            found=str(env.var_to_range.get(new)),
        ) from error
    if symbol in known.size_like:
        env.size_like.add(new)
    for name in ("var_to_hint_override", "real_tensor_prop_unbacked_vals"):
        table = getattr(known, name)
        if symbol in table:
            getattr(env, name).setdefault(new, table[symbol])


def limits_of(expr: Any, bounds: Any) -> Iterator[Any]:
    """A range as conditions on an expression, as far as it says something."""
    if bounds.lower not in NO_LOWER:
        yield sympy.Ge(expr, bounds.lower)
    if bounds.upper not in NO_UPPER:
        yield sympy.Le(expr, bounds.upper)


NO_LOWER = (-sympy.oo, -int_oo, -sys.maxsize - 1)
NO_UPPER = (sympy.oo, int_oo, sys.maxsize - 1, sys.maxsize)
"""Ends of a range that say nothing. Torch gives the last but one to the sizes of `nonzero`."""
