"""Propagates new facts of a fresh ``ShapeEnv`` to the one that it was made from.

A backend adds facts about the inputs of a frame, but Dynamo makes the frame's guards from its own
environment. So facts added to the fresh environment since a baseline are stated in the original one,
over the symbols of the same sources: guards are evaluated again, in their order, which implies most
ranges, replacements, divisibilities and axioms; asserts, and what guards do not imply, are stated.
Facts about its local symbols alone are not propagated: the backend's graphs check them.

A local symbol, which only the fresh environment has, is of one of three kinds. A backed one is a size
of a tensor that the graph itself holds, which has no policy and is constant: its hint. One that replaced
another symbol in a retrace is that symbol. The others are numbers that only the backend's graphs compute.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import sympy

from torch_fakeify.compat.torch_symbols import narrow_range
from torch_fakeify.encoding.stacks import copy_stack
from torch_fakeify.errors import ShapeEnvError

from .fresh_env import caused_by, defer_assert, locations_of_equal, moved_over

if TYPE_CHECKING:
    from .fresh_env import FreshEnv


_FACTS = (
    "guards",
    "var_to_range",
    "replacements",
    "divisible",
    "axioms",
    "size_like",
    "var_to_hint_override",
    "exclusion_constraints",
    "specializations",
)
"""The attributes of a ``ShapeEnv`` that have its facts, besides the runtime asserts."""


def facts_of(env: Any) -> Any:
    """The current facts of an environment, as attributes with its own names."""
    asserts = {symbol: len(group) for symbol, group in env.deferred_runtime_asserts.items()}
    facts = {name: copy.copy(getattr(env, name)) for name in _FACTS}
    return SimpleNamespace(assert_counts=asserts, **facts)


def propagate_new_facts(fresh: FreshEnv, original: Any, before: Any) -> None:
    """State the new facts of a fresh environment in the original one.

    ``before`` are the facts of the fresh environment when it was made, from `facts_of`.

    Raises:
        ShapeEnvError: a guard does not hold for the hints, or is about a number without a source.
    """
    propagation = _Propagation(fresh, original, before)
    # Guards and asserts first: torch does not record those that known ranges imply.
    propagation.guards()
    propagation.asserts()
    propagation.ranges()
    propagation.replacements()
    propagation.others()


class _Propagation:
    def __init__(self, fresh: FreshEnv, original: Any, before: Any) -> None:
        self._env = fresh.env
        self._original = original
        self._before = before
        self._symbols = {new: old for old, new in fresh.symbols.items()}
        self._fresh = fresh
        self._ranges_before = dict(original.var_to_range)

    # --- symbols ----------------------------------------------------------------------------------

    def _to_original(self, expr: Any) -> Any | None:
        """An expression over the original symbols; ``None`` if a local symbol has no equivalent."""
        local = expr.free_symbols - self._symbols.keys()
        if local:
            values = {symbol: self._resolve_local_symbol(symbol) for symbol in local}
            if None in values.values():
                return None
            expr = expr.xreplace(values)
        return self._fresh.to_original(expr)

    def _resolve_local_symbol(self, symbol: Any) -> Any | None:
        """The value of a local symbol over symbols that the original environment has too, if any."""
        hint = self._env.backed_var_to_val.get(symbol)
        if hint is not None:
            return hint
        replaced = self._env.replace(symbol)
        return replaced if replaced.free_symbols <= self._symbols.keys() else None

    # --- facts ------------------------------------------------------------------------------------

    def guards(self) -> None:
        for guard in self._env.guards[len(self._before.guards) :]:
            expr = self._to_original(guard.expr)
            if expr is None:
                raise _no_source(guard.expr, guard.expr.free_symbols - self._symbols.keys())
            with caused_by(self._original, guard.sloc):
                holds = self._original.evaluate_expr(expr, size_oblivious=guard.size_oblivious)
            if holds != sympy.true:
                raise _wrong(guard.expr)

    def asserts(self) -> None:
        for key, group in self._env.deferred_runtime_asserts.items():
            for one in group[self._before.assert_counts.get(key, 0) :]:
                expr = self._to_original(one.expr)
                if expr is None:
                    continue
                if not defer_assert(self._original, expr, one.msg, copy_stack(one.stack)):
                    raise _wrong(one.expr)

    def ranges(self) -> None:
        env, original = self._env, self._original
        for symbol, bounds in env.var_to_range.items():
            old = self._symbols.get(symbol)
            if old is None or old not in original.var_to_range:
                continue
            if bounds == self._before.var_to_range.get(symbol):
                continue
            if bounds != original.var_to_range[old]:
                narrow_range(original, old, bounds)
            self._locate_range(symbol, old)

    def _locate_range(self, symbol: Any, old: Any) -> None:
        """Take the locations of changed bounds from the fresh environment."""
        before, now = self._ranges_before[old], self._original.var_to_range[old]
        ours, theirs = self._original.var_to_range_sloc, self._env.var_to_range_sloc
        ours[old] = locations_of_equal(now, before, ours[old], theirs[symbol])

    def replacements(self) -> None:
        before = self._before.replacements
        # New ones first: changes of earlier ones may follow from them.
        for symbol, expr in sorted(
            self._env.replacements.items(), key=lambda item: item[0] in before
        ):
            if symbol in self._symbols and before.get(symbol) != expr:
                with caused_by(self._original, self._env.replacements_slocs.get(symbol)):
                    self._replacement(symbol)

    def _replacement(self, symbol: Any) -> None:
        original = self._original
        expr = self._to_original(self._env.replace(symbol))
        if expr is None:
            return
        a, b = original.replace(self._symbols[symbol]), original.replace(expr)
        if a == b:
            return
        if not isinstance(a, sympy.Symbol):
            a, b = b, a
        if isinstance(a, sympy.Symbol):
            original._set_replacement(a, b, "handoff")
        # Torch rejects a replacement with wider bounds, and one that contains the symbol.
        same = original.replace(a) == original.replace(b)
        if not same and not original.guard_or_defer_runtime_assert(sympy.Eq(a, b), ""):
            raise _wrong(sympy.Eq(symbol, self._env.replacements[symbol], evaluate=False))

    def others(self) -> None:
        env, original, before = self._env, self._original, self._before
        for part in sorted(env.divisible - before.divisible, key=str):
            expr = self._to_original(part)
            if expr is not None and expr != 0:
                original._add_divisible(expr)
        constants = (None, sympy.true, sympy.false)
        for condition, value in env.axioms.items():
            if condition not in before.axioms and condition not in constants:
                expr = self._to_original(condition)
                if expr not in constants:
                    original.axioms.setdefault(expr, value)
        self._policy()

    def _policy(self) -> None:
        env, original, before = self._env, self._original, self._before
        symbols = self._symbols
        original.size_like.update(
            symbols[s] for s in env.size_like - before.size_like if s in symbols
        )
        for symbol, hint in env.var_to_hint_override.items():
            if symbol in symbols and before.var_to_hint_override.get(symbol) != hint:
                original.var_to_hint_override[symbols[symbol]] = hint
        original.exclusion_constraints.extend(
            (symbols[symbol], n)
            for symbol, n in env.exclusion_constraints[len(before.exclusion_constraints) :]
            if symbol in symbols
        )
        for one in env.specializations:
            if one not in before.specializations:
                original.specializations.add(moved_over(one, self._to_original))


def _wrong(expr: Any) -> ShapeEnvError:
    return ShapeEnvError(
        "a backend assumed what does not hold for the frame",
        where=str(expr),
        expected="what holds for the inputs of the frame",
        found="false",
        fix="Report this with a capture of the frame",
    )


def _no_source(expr: Any, symbols: set[Any]) -> ShapeEnvError:
    return ShapeEnvError(
        "a backend assumed something of a number that Dynamo does not know",
        where=str(expr),
        expected="symbols of the frame's inputs",
        found=", ".join(sorted(map(str, symbols))),
        fix="Compile without the handoff, and report this with a capture of the frame",
    )
