"""Transfers the facts about unbacked symbols to the numbers that take their place.

The facts are deferred runtime asserts with their messages and stacks, value ranges, size-like symbols
and replacements. Each is stated as soon as all its symbols have a counterpart, asserts before ranges:
torch does not record an assert that a range implies.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import sympy

from torch_fakeify.compat.torch_symbols import ValueRangeError, int_oo, narrow_range
from torch_fakeify.errors import ShapeEnvError
from torch_fakeify.replay.bindings import canonical_symbol, is_unbacked
from torch_fakeify.replay.facts import runtime_asserts
from torch_fakeify.transfer.fresh_env import defer_assert, renamed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def substitute(expr: Any, symbols: Mapping[sympy.Symbol, sympy.Basic]) -> Any:
    """Substitute symbols in an expression by symbols or expressions."""
    used = {s: symbols[s] for s in expr.free_symbols if s in symbols and symbols[s] != s}
    if not used:
        return expr
    others = expr.free_symbols - used.keys()
    distinct = others.isdisjoint(used.values()) and len(set(used.values())) == len(used)
    if distinct and all(isinstance(new, sympy.Symbol) for new in used.values()):
        return renamed(expr, used)
    return expr.xreplace(used)


def canonical_expr(expr: Any, env: Any) -> Any:
    """An expression over the canonical symbols of an environment (`canonical_symbol`)."""
    return substitute(expr, {s: canonical_symbol(s, env) for s in expr.free_symbols})


def state_assert(
    env: Any,
    expr: Any,
    message: str,
    stack: Any,
    *,
    was: str,
    now: Mapping[Any, Any],
) -> None:
    """State a condition in a ``ShapeEnv``: as a deferred assert, or as a guard if about inputs alone.

    The stack is as for `defer_assert`. The error names the original condition (``was``) and the
    replacements of its symbols (``now``).

    Raises:
        ShapeEnvError: the condition does not hold.
    """
    hints = {s: env.backed_var_to_val[s] for s in expr.free_symbols & env.backed_var_to_val.keys()}
    if expr.xreplace(hints) == sympy.false or not (
        expr == sympy.true or defer_assert(env, expr, message, stack)
    ):
        raise ShapeEnvError(
            "a runtime assert does not hold any more",
            where=was,
            expected=str(expr) if expr.free_symbols else None,
            found=", ".join(f"{s} is {n}" for s, n in sorted({**now, **hints}.items(), key=str)),
            fix="Replace the symbol by a number for which the graph's assumptions hold",
        )


class DeferredFacts:
    """The facts of one ``ShapeEnv``, if any, stated in another one once their symbols have counterparts.

    Attributes:
        symbols: the counterparts of canonical symbols (`canonical_symbol`).
    """

    def __init__(self, original: Any, env: Any) -> None:
        self._original = original
        self._env = env
        self.symbols: dict[sympy.Symbol, Any] = {}
        self._new: list[sympy.Symbol] = []
        self._asserts: list[Any] = []
        self._equalities: dict[sympy.Symbol, Any] = {}
        if original is None:
            return
        self._asserts = runtime_asserts(original)
        self._equalities = {
            symbol: expr
            for symbol, expr in original.replacements.items()
            if is_unbacked(symbol) and symbol not in original.unbacked_renamings
        }

    def bind(self, symbol: sympy.Symbol, expr: Any) -> None:
        """Set the counterpart of a symbol."""
        self.symbols[symbol] = expr
        self._new.append(symbol)

    def to_fresh(self, expr: Any) -> Any:
        """An expression over the counterparts of its symbols; ``None`` if one is missing."""
        expr = canonical_expr(expr, self._original)
        return substitute(expr, self.symbols) if expr.free_symbols <= self.symbols.keys() else None

    def state(self) -> None:
        """State all facts whose symbols have counterparts by now.

        Raises:
            ShapeEnvError: a fact does not hold.
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
        """State the remaining asserts after replacements; returns the texts of those left over."""
        left: list[Any] = []
        for one in self._asserts:
            expr = self._original.replace(canonical_expr(one.expr, self._original))
            # A replacement rests on the asserts that it makes trivial: they are not lost.
            if expr == sympy.true or not self._stated(one, expr):
                left.append(one)
        return tuple(dict.fromkeys(str(one.expr) for one in left))

    def _stated(self, one: Any, expr: Any) -> bool:
        moved = self.to_fresh(expr)
        if moved is None:
            return False
        now = {s: new for s in expr.free_symbols if (new := self.symbols.get(s, s)) != s}
        state_assert(self._env, moved, one.msg, one.stack, was=str(one.expr), now=now)
        return True

    def _limit(self, symbol: sympy.Symbol) -> None:
        expr, bounds = self.symbols[symbol], self._original.var_to_range.get(symbol)
        if not is_unbacked(symbol) or bounds is None:
            return
        env = self._env
        if not isinstance(expr, sympy.Symbol) or not is_unbacked(expr):
            for limit in limits_of(expr, bounds):
                now = {symbol: expr}
                state_assert(env, limit, "", None, was=f"the range of {symbol}", now=now)
            return
        move_range(self._original, symbol, env, expr)

    def _equality(self, symbol: sympy.Symbol) -> None:
        left, right = self.symbols.get(symbol), self.to_fresh(self._equalities[symbol])
        if left is None or right is None:
            return
        del self._equalities[symbol]
        env = self._env
        if isinstance(left, sympy.Symbol) and env.replace(left) == left != env.replace(right):
            env._set_replacement(left, right, "retrace")


def move_range(original: Any, symbol: sympy.Symbol, env: Any, new: sympy.Symbol) -> None:
    """Transfer the range, hints and size-like property of an unbacked symbol to another one.

    Raises:
        ShapeEnvError: the intersection of the ranges is empty.
    """
    bounds = original.var_to_range[symbol]
    try:
        narrow_range(env, new, bounds)
    except ValueRangeError as error:
        raise ShapeEnvError(
            "the range of a number from the data is empty",
            where=str(symbol),
            expected=f"[{bounds.lower}, {bounds.upper}]",
            found=str(env.var_to_range.get(new)),
        ) from error
    if symbol in original.size_like:
        env.size_like.add(new)
    for name in ("var_to_hint_override", "real_tensor_prop_unbacked_vals"):
        table = getattr(original, name)
        if symbol in table:
            getattr(env, name).setdefault(new, table[symbol])


def limits_of(expr: Any, bounds: Any) -> Iterator[Any]:
    """The finite bounds of a range as conditions on an expression."""
    if bounds.lower not in NO_LOWER:
        yield sympy.Ge(expr, bounds.lower)
    if bounds.upper not in NO_UPPER:
        yield sympy.Le(expr, bounds.upper)


NO_LOWER = (-sympy.oo, -int_oo, -sys.maxsize - 1)
NO_UPPER = (sympy.oo, int_oo, sys.maxsize - 1, sys.maxsize)
"""Bounds that are no limits. Torch gives ``sys.maxsize - 1`` to the sizes of `nonzero`."""
