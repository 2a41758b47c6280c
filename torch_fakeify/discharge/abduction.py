"""The weakest check that would make a condition follow from what a ``ShapeEnv`` knows.

Method: abduction over small candidates: the canonical form of the condition, comparisons of the symbols
nearby and of the constants, and divisibility. The weakest check is one that, under the facts, says as
much as the condition itself. So a candidate counts if the prover shows both directions: the condition
follows from the facts together with the candidate, and the candidate from the facts together with the
condition. The smallest such candidate is the check, if it is smaller than the condition.
"""

from __future__ import annotations

from itertools import combinations, islice, product
from typing import TYPE_CHECKING, Any

import sympy

from torch_fakeify.compat.torch_symbols import sympy_functions
from torch_fakeify.prover.implication import FactIndex, WorkCounter, redundant
from torch_fakeify.prover.simplex import Row

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

MAX_CANDIDATES = 60
"""The most candidates that are tried for one condition."""

MAX_SYMBOLS = 6
"""The most symbols that candidates are made of."""


def weakest_checks(
    facts: Sequence[Any], condition: Any, hints: Mapping[sympy.Symbol, Any]
) -> tuple[Any, ...]:
    """Return the smallest checks that, under the facts, say as much as a condition.

    One check for each part of a conjunction, without those that follow.

    Args:
        facts: conditions that are known.
        condition: the condition; it does not follow.
        hints: the values of symbols in the example.

    Returns:
        The checks; empty if they are known to contradict the facts or the example.
    """
    abduction = _Abduction(facts, hints)
    parts = condition.args if isinstance(condition, sympy.And) else (condition,)
    checks = [abduction.weakest(part) for part in parts if not abduction.follows(part)]
    if not all(abduction.is_possible(check) for check in checks):
        return ()
    removable = [False] * len(facts) + [True] * len(checks)
    implied = redundant([*facts, *checks], removable=removable)
    return tuple(c for at, c in enumerate(checks, len(facts)) if at not in implied)


class _Abduction:
    """Facts to which candidates are added one at a time."""

    def __init__(self, facts: Sequence[Any], hints: Mapping[sympy.Symbol, Any]) -> None:
        self.facts = facts
        self.index = FactIndex(facts, WorkCounter())
        self.example = FactIndex(facts, WorkCounter())
        for symbol, value in hints.items():
            self.example.add(sympy.Eq(symbol, value, evaluate=False))

    def follows(self, condition: Any, *, given: Any = None) -> bool:
        index = self.index
        parts = index.table.condition(condition)
        if given is None:
            return index.implies(parts, without=None)
        at = index.add(given)
        try:
            return index.implies(parts, without=None)
        finally:
            index.remove(at)

    def is_possible(self, check: Any) -> bool:
        return not self.example.implies(self.example.table.condition(check, True), without=None)

    def weakest(self, condition: Any) -> Any:
        size = _size(condition)
        tried = islice(dict.fromkeys(self._candidates(condition)), MAX_CANDIDATES)
        for candidate in sorted(tried, key=_size):
            if _size(candidate) >= size:
                break
            if self.follows(condition, given=candidate) and self.follows(
                candidate, given=condition
            ):
                return candidate
        return condition

    def _candidates(self, condition: Any) -> Iterator[Any]:
        yield from self._canonical(condition)
        yield from _small_conditions(condition, self.facts)

    def _canonical(self, condition: Any) -> Iterator[Any]:
        """A linear condition divided by its common factor, with positive terms on both sides."""
        table = self.index.table
        parts = table.condition(condition)
        if len(parts) != 1 or not isinstance(parts[0], Row):
            return
        coeffs, bound, _ = parts[0]
        if not all(len(mono) == 1 and not table.atoms[mono[0]].args for mono, _ in coeffs):
            return
        terms = [(table.atoms[mono[0]].head, factor) for mono, factor in coeffs]
        left = sum(factor * head for head, factor in terms if factor > 0)
        right = sum(-factor * head for head, factor in terms if factor < 0)
        offset = sympy.Integer(int(bound))
        if left == 0:
            yield sympy.Ge(right, -offset, evaluate=False)
        elif right == 0 or offset > 0:
            yield sympy.Le(left, right + offset, evaluate=False)
        else:
            yield sympy.Le(left - offset, right, evaluate=False)


def _size(expr: Any) -> int:
    return sum(1 for _ in sympy.preorder_traversal(expr))


def _small_conditions(condition: Any, facts: Iterable[Any]) -> Iterator[Any]:
    """Comparisons and divisibility of the symbols of a condition, and of symbols in facts about these."""
    own = sorted(condition.free_symbols, key=_order)
    near = {
        symbol
        for fact in facts
        if fact.free_symbols & condition.free_symbols
        for symbol in fact.free_symbols
    }
    symbols = [*own, *sorted(near.difference(own), key=_order)][:MAX_SYMBOLS]
    mods = condition.atoms(sympy_functions.Mod, sympy_functions.PythonMod)
    for base, divisor in (part.args for part in sorted(mods, key=str)):
        divisors: list[Any] = [*sympy.divisors(divisor)][1:] if divisor.is_Integer else [divisor]
        for symbol in sorted(base.free_symbols - divisor.free_symbols, key=str):
            for number in divisors:
                rest = sympy_functions.PythonMod(symbol, number)
                yield sympy.Eq(rest, 0, evaluate=False)
                yield sympy.Ne(rest, 0, evaluate=False)
    pairs = list(combinations(symbols, 2))
    pairs.sort(key=lambda pair: sum(symbol in own for symbol in pair), reverse=True)
    for left, right in pairs:
        for kind in (sympy.Le, sympy.Ge, sympy.Lt, sympy.Gt, sympy.Eq, sympy.Ne):
            yield kind(left, right, evaluate=False)
    for symbol, number in product(own, _thresholds(condition)):
        for kind in (sympy.Le, sympy.Ge, sympy.Eq, sympy.Ne):
            yield kind(symbol, number, evaluate=False)


def _order(symbol: sympy.Symbol) -> tuple[bool, str]:
    """Numbers from data first, then sizes, which are positive: a check reads ``u <= x.shape[0]``."""
    return symbol.is_positive is True, str(symbol)


def _thresholds(condition: Any) -> list[int]:
    """The numbers of a condition, and those at which a quotient of it changes."""
    numbers = {int(n) for n in condition.atoms(sympy.Integer)}
    if condition.has(sympy_functions.FloorDiv):
        products = {a * b for a, b in combinations(sorted(numbers), 2)}
        numbers |= products | {n - 1 for n in products}
    return sorted({0, 1, *numbers}, key=abs)
