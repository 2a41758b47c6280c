"""Points that satisfy all facts but one, which therefore does not follow from the others.

Method: from a point that satisfies all facts, such as the example inputs of a frame, one symbol after
another is moved by Newton steps to where the fact fails, and back to the limit of any other fact that
fails there. A point that was found is exact; that none was found says nothing.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor
from typing import TYPE_CHECKING

from typing_extensions import assert_never

from .polynomials import FLOOR, MAX, Either, Equal, all_rows, options_of
from .refutation import opposite
from .simplex import Row

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    import sympy

    from .polynomials import AtomTable, Part
    from .refutation import WorkCounter
    from .simplex import Mono, Number

MAX_STEPS = 16
"""The most Newton steps towards one limit, and the most limits to which one move retreats."""

MAX_SYMBOLS = 4
"""The most symbols of a fact that are moved."""

FAR = 64
"""The distance over which the slope is taken where it is zero over a distance of one: quotients."""

MAX_FACTS = 64
"""The most facts about a symbol that is moved: all of them are evaluated."""


class Counterexamples:
    """A search for points that satisfy some facts and violate another one.

    Args:
        table: has the atoms of the facts.
        facts: the parts of each fact.
        values: the integers at which all facts hold. A symbol without a value is not moved, nor one
            that shares a fact with it.
        work: counts the facts that are evaluated.
    """

    def __init__(
        self,
        table: AtomTable,
        facts: Sequence[tuple[Part, ...]],
        values: Mapping[sympy.Symbol, object],
        work: WorkCounter,
    ) -> None:
        self._table = table
        self._work = work
        self._facts = facts
        self._of_symbol: dict[int, list[int]] = {}
        for at, fact in enumerate(facts):
            for symbol in _symbols_of(table, fact):
                self._of_symbol.setdefault(symbol, []).append(at)
        known: dict[int, Number] = {}
        for symbol in self._of_symbol:
            value = values.get(table.atoms[symbol].head)
            if isinstance(value, int) or getattr(value, "is_Integer", False):
                known[symbol] = int(value)  # pyright: ignore[reportArgumentType]
        self._start = _Point(table, known, {})
        self._is_usable = all(self._start.satisfies(fact) is not False for fact in facts)

    def violates(self, at: int, others: Collection[int]) -> bool:
        """Whether a point was found that violates the fact at a position and satisfies others.

        Args:
            at: the position.
            others: positions of the facts to satisfy.
        """
        if not self._is_usable:
            return False
        symbols = self._movable(_symbols_of(self._table, self._facts[at]))[:MAX_SYMBOLS]
        for goal in options_of(opposite(self._table, self._facts[at])):
            for order in (symbols, symbols[::-1]) if len(symbols) > 1 else (symbols,):
                if self._reaches(goal, order, at, others):
                    return True
        return False

    def _movable(self, symbols: Iterable[int]) -> list[int]:
        return [s for s in sorted(symbols) if len(self._of_symbol[s]) <= MAX_FACTS]

    def _reaches(
        self, goal: Sequence[Part], order: Sequence[int], at: int, others: Collection[int]
    ) -> bool:
        point = self._start
        for symbol in order:
            there = _towards(point, symbol, goal)
            limited = there and self._limited(point, there, symbol, at, others)
            if limited:
                point = limited
                if point.satisfies(goal):
                    return True
        return False

    def _limited(
        self, start: _Point, point: _Point, symbol: int, at: int, others: Collection[int]
    ) -> _Point | None:
        """The point, or one on the way to it, that satisfies the other facts about a symbol."""
        for _ in range(MAX_STEPS):
            failing = self._failing(point, symbol, at, others)
            if failing is None:
                return point
            backs = (
                _towards(point, symbol, option, step)
                for step in (1, -1)
                for option in options_of(self._facts[failing])
            )
            nearer = (b for b in backs if b and _is_between(b, start, point, symbol))
            better = self._repaired(point, failing, at, others) or next(nearer, None)
            if better is None:
                return None
            point = better
        return None

    def _failing(self, point: _Point, symbol: int, at: int, others: Collection[int]) -> int | None:
        """The position of a fact about a symbol that does not hold at a point."""
        for fact in self._of_symbol[symbol]:
            if fact == at or fact not in others:
                continue
            self._work.evaluations += 1
            if not point.satisfies(self._facts[fact]):
                return fact
        return None

    def _repaired(
        self, point: _Point, failing: int, at: int, others: Collection[int]
    ) -> _Point | None:
        """The point with another value of a symbol at its start, so that a failing fact holds."""
        fixed = point.moved.keys() | _symbols_of(self._table, self._facts[at])
        for symbol in self._movable(_symbols_of(self._table, self._facts[failing]) - fixed):
            there = _towards(point, symbol, self._facts[failing])
            if there and self._failing(there, symbol, at, others) is None:
                return there
        return None


class _Point:
    """Integers for the symbols of facts: those of the start, but for symbols that were moved."""

    def __init__(
        self, table: AtomTable, start: Mapping[int, Number], moved: Mapping[int, Number]
    ) -> None:
        self._table = table
        self._start = start
        self.moved = moved
        self._found: dict[int, Number | None] = {}

    def with_value(self, symbol: int, value: Number) -> _Point:
        return _Point(self._table, self._start, {**self.moved, symbol: value})

    def satisfies(self, parts: Iterable[Part]) -> bool | None:
        answer: bool | None = True
        for part in parts:
            holds = self._holds(part)
            if holds is False:
                return False
            answer = answer and holds
        return answer

    def _holds(self, part: Part) -> bool | None:
        match part:
            case Row(coeffs, bound, strict):
                value = self.sum(coeffs)
                return None if value is None else value < bound or (value == bound and not strict)
            case Equal(coeffs, bound):
                value = self.sum(coeffs)
                return None if value is None else value == bound
            case Either(options):
                answers = [self.satisfies(option) for option in options]
                return True if True in answers else None if None in answers else False
            case _:
                assert_never(part)

    def sum(self, poly: Iterable[tuple[Mono, Number]]) -> Number | None:
        total: Number = 0
        for mono, factor in poly:
            product = factor
            for at in mono:
                value = self.value(at)
                if value is None:
                    return None
                product *= value
            total += product
        return total

    def value(self, at: int) -> Number | None:
        if at not in self._found:
            value = self.moved.get(at, self._start.get(at))
            self._found[at] = self._of_function(at) if value is None else value
        return self._found[at]

    def _of_function(self, at: int) -> Number | None:
        atom = self._table.atoms[at]
        args = [self.sum(arg) for arg in atom.args]
        known = [arg for arg in args if arg is not None]
        if len(known) == len(args) and atom.head is MAX:
            return max(known)
        if len(known) == len(args) and atom.head is FLOOR and known[1]:
            return known[0] // known[1]
        return None


def _towards(point: _Point, symbol: int, goal: Sequence[Part], step: int = 1) -> _Point | None:
    """The point with the value of a symbol that is nearest to where a part of a condition holds.

    Args:
        point: the point to start from.
        symbol: the symbol that is moved.
        goal: the parts of the condition, of which one does not hold at the point.
        step: 1 or -1: whether the slope is taken towards larger or smaller values.
    """
    part = next((p for p in goal if not point.satisfies((p,))), None)
    if part is None or isinstance(part, Either):
        return None
    for _ in range(MAX_STEPS):
        value, here = point.value(symbol), point.sum(part.coeffs)
        if value is None or here is None:
            return None
        missing = part.bound - here
        slope = _slope(point, symbol, part.coeffs, step) or _slope(
            point, symbol, part.coeffs, step * FAR
        )
        if not slope or (isinstance(part, Equal) and missing % slope):
            return None
        by = floor(missing / slope) if slope > 0 else ceil(missing / slope)  # so that it is reached
        point = point.with_value(symbol, value + by)
        if point.satisfies((part,)):
            return point
    return None


def _slope(
    point: _Point, symbol: int, poly: Iterable[tuple[Mono, Number]], step: int
) -> Number | None:
    value, here = point.value(symbol), point.sum(poly)
    if value is None or here is None:
        return None
    there = point.with_value(symbol, value + step).sum(poly)
    return None if there is None else Fraction(there - here, step)


def _is_between(point: _Point, start: _Point, end: _Point, symbol: int) -> bool:
    values = [p.value(symbol) for p in (start, point, end)]
    first, middle, last = (0 if value is None else value for value in values)
    return first < middle < last or last < middle < first


def _symbols_of(table: AtomTable, parts: Iterable[Part]) -> set[int]:
    rows = (row for part in parts for row in all_rows(part))
    return {symbol for row in rows for symbol in table.symbols_of(row.coeffs)}
