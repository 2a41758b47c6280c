"""What a fresh ``ShapeEnv`` has learned, stated in the one that it was made from.

A backend finds out more about the inputs of a frame, and Dynamo makes the guards of the frame from
its own environment. So all that the backend's environment has learned since a moment is stated
there, over the symbols of the same sources:

====================================  ============================================================
of the fresh environment              in the other one
====================================  ============================================================
guards                                evaluated again, in their order; from them come most ranges,
                                      replacements, divisibilities and axioms
value ranges, replacements,           stated, if no guard has: each is a fact
``divisible``, ``axioms``
deferred runtime asserts              stated, with their messages and stacks
``size_like``, hint overrides,        added
``exclusion_constraints``,
``specializations``
stacks and locations                  those of who learned it
what concerns its own symbols alone   stays: the graphs of the backend hold and check it
====================================  ============================================================

Symbols that only the fresh environment has are of three kinds. A backed one stands for a size of
what the graph itself holds, which never changes, and is its hint. One that a retrace made in the
place of another is that one. The others stand for what only the backend's graphs compute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import sympy

from ._torch import ValueRangesSLoc
from .errors import ShapeEnvError
from .fresh_env import caused_by, defer_assert, specialization_over
from .sizes import narrow_range

if TYPE_CHECKING:
    from .fresh_env import FreshEnv

__all__ = ["Knowledge", "state_learned"]


class Knowledge(NamedTuple):
    """How much a ``ShapeEnv`` knew at one moment."""

    guards: int
    ranges: dict[sympy.Symbol, Any]
    replacements: dict[sympy.Symbol, Any]
    divisible: frozenset[Any]
    axioms: frozenset[Any]
    asserts: dict[Any, int]
    size_like: frozenset[sympy.Symbol]
    hint_overrides: dict[sympy.Symbol, int]
    exclusions: int
    specializations: frozenset[Any]

    @classmethod
    def of(cls, env: Any) -> Knowledge:
        """What it knows now."""
        return cls(
            len(env.guards),
            dict(env.var_to_range),
            dict(env.replacements),
            frozenset(env.divisible),
            frozenset(env.axioms),
            {symbol: len(group) for symbol, group in env.deferred_runtime_asserts.items()},
            frozenset(env.size_like),
            dict(env.var_to_hint_override),
            len(env.exclusion_constraints),
            frozenset(env.specializations),
        )


def state_learned(fresh: FreshEnv, known: Any, before: Knowledge) -> None:
    """State in an environment what the one that was made from it has learned since.

    Args:
        fresh: the environment that has learned.
        known: the environment that it was made from.
        before: what it knew when it was new.

    Raises:
        ShapeEnvError: a guard does not hold for the hints, or is about a number without a source.
    """
    statement = _Statement(fresh, known, before)
    # Conditions first: where the ranges that they imply are known, nobody notes them.
    statement.guards()
    statement.asserts()
    statement.ranges()
    statement.replacements()
    statement.others()


class _Statement:
    def __init__(self, fresh: FreshEnv, known: Any, before: Knowledge) -> None:
        self._env = fresh.env
        self._known = known
        self._before = before
        self._symbols = {new: old for old, new in fresh.symbols.items()}
        self._fresh = fresh
        self._ranges_before = dict(known.var_to_range)

    # --- symbols ----------------------------------------------------------------------------------

    def _over_known(self, expr: Any) -> Any | None:
        """An expression over the other environment's symbols.

        ``None`` if it is about what only the backend's graphs compute.
        """
        own = expr.free_symbols - self._symbols.keys()
        if own:
            values = {symbol: self._own(symbol) for symbol in own}
            if None in values.values():
                return None
            expr = expr.xreplace(values)
        return self._fresh.over_known(expr)

    def _own(self, symbol: Any) -> Any | None:
        """What a symbol without a counterpart stands for, over symbols that have one."""
        hint = self._env.backed_var_to_val.get(symbol)
        if hint is not None:
            return hint
        replaced = self._env.replace(symbol)
        return replaced if replaced.free_symbols <= self._symbols.keys() else None

    # --- facts ------------------------------------------------------------------------------------

    def guards(self) -> None:
        for guard in self._env.guards[self._before.guards :]:
            expr = self._over_known(guard.expr)
            if expr is None:
                raise _unknown_number(guard.expr, guard.expr.free_symbols - self._symbols.keys())
            with caused_by(self._known, guard.sloc):
                holds = self._known.evaluate_expr(expr, size_oblivious=guard.size_oblivious)
            if holds != sympy.true:
                raise _wrong(guard.expr)

    def asserts(self) -> None:
        for key, group in self._env.deferred_runtime_asserts.items():
            for one in group[self._before.asserts.get(key, 0) :]:
                expr = self._over_known(one.expr)
                if expr is not None and not defer_assert(self._known, expr, one):
                    raise _wrong(one.expr)

    def ranges(self) -> None:
        env, known = self._env, self._known
        for symbol, bounds in env.var_to_range.items():
            old = self._symbols.get(symbol)
            if old is None or old not in known.var_to_range:
                continue
            if bounds == self._before.ranges.get(symbol):
                continue
            if bounds != known.var_to_range[old]:
                narrow_range(known, old, bounds)
            self._locate_range(symbol, old)

    def _locate_range(self, symbol: Any, old: Any) -> None:
        """Who moved an end of the range is who moved it in the fresh environment."""
        before, now = self._ranges_before[old], self._known.var_to_range[old]
        theirs = self._env.var_to_range_sloc[symbol]
        ours = self._known.var_to_range_sloc[old]
        self._known.var_to_range_sloc[old] = ValueRangesSLoc(
            ours.lower if now.lower == before.lower else theirs.lower,
            ours.upper if now.upper == before.upper else theirs.upper,
        )

    def replacements(self) -> None:
        before = self._before.replacements
        # New ones first: what another one has become may follow from them.
        for symbol, expr in sorted(
            self._env.replacements.items(), key=lambda item: item[0] in before
        ):
            if symbol in self._symbols and before.get(symbol) != expr:
                with caused_by(self._known, self._env.replacements_slocs.get(symbol)):
                    self._replacement(symbol)

    def _replacement(self, symbol: Any) -> None:
        known = self._known
        expr = self._over_known(self._env.replace(symbol))
        if expr is None:
            return
        a, b = known.replace(self._symbols[symbol]), known.replace(expr)
        if a == b:
            return
        if not isinstance(a, sympy.Symbol):
            a, b = b, a
        if isinstance(a, sympy.Symbol):
            known._set_replacement(a, b, "handoff")
        # Torch does not replace by what it has wider bounds of, nor by what has the symbol in it.
        same = known.replace(a) == known.replace(b)
        if not same and not known.guard_or_defer_runtime_assert(sympy.Eq(a, b), ""):
            raise _wrong(sympy.Eq(symbol, self._env.replacements[symbol], evaluate=False))

    def others(self) -> None:
        env, known, before = self._env, self._known, self._before
        for part in sorted(env.divisible - before.divisible, key=str):
            expr = self._over_known(part)
            if expr is not None and expr != 0:
                known._add_divisible(expr)
        for condition, value in env.axioms.items():
            if condition not in before.axioms and condition not in (sympy.true, sympy.false):
                self._axiom(condition, value)
        self._policy()

    def _axiom(self, condition: Any, value: Any) -> None:
        expr = self._over_known(condition)
        if expr is not None and expr not in (sympy.true, sympy.false):
            self._known.axioms.setdefault(expr, value)

    def _policy(self) -> None:
        """What else the backend has said of symbols that both environments have."""
        env, known, before = self._env, self._known, self._before
        own = self._symbols
        known.size_like.update(own[s] for s in env.size_like - before.size_like if s in own)
        for symbol, hint in env.var_to_hint_override.items():
            if symbol in own and before.hint_overrides.get(symbol) != hint:
                known.var_to_hint_override[own[symbol]] = hint
        known.exclusion_constraints.extend(
            (own[symbol], n)
            for symbol, n in env.exclusion_constraints[before.exclusions :]
            if symbol in own
        )
        for one in env.specializations:
            if one not in before.specializations:
                known.specializations.add(specialization_over(one, self._over_known))


def _wrong(expr: Any) -> ShapeEnvError:
    return ShapeEnvError(
        "a backend assumed what does not hold for the frame",
        where=str(expr),
        expected="what holds for the inputs of the frame",
        found="false",
        fix="Report this with a capture of the frame",
    )


def _unknown_number(expr: Any, own: set[Any]) -> ShapeEnvError:
    return ShapeEnvError(
        "a backend assumed something of a number that Dynamo does not know",
        where=str(expr),
        expected="symbols of the frame's inputs",
        found=", ".join(sorted(map(str, own))),
        fix="Compile without the handoff, and report this with a capture of the frame",
    )
