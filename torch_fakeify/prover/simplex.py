"""Exact satisfiability of linear inequalities over the rationals.

Method: the general simplex of Dutertre and de Moura ("A fast linear-arithmetic solver for DPLL(T)",
CAV 2006) with Bland's rule: every linear combination gets a slack variable, inequalities are bounds
on variables, and pivots repair one violated bound at a time. Numbers are ``int`` where possible, else
``Fraction``. A strict bound is a bound minus an infinitesimal. ``sympy.solvers.simplex`` is about
fifty times slower and has no strict bounds.
"""

from __future__ import annotations

import sys
from fractions import Fraction
from math import gcd
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

Number: TypeAlias = int | Fraction

Mono: TypeAlias = tuple[int, ...]
"""A variable: a product of atoms, by their ids (`polynomials`)."""


class Row(NamedTuple):
    """``sum(factor * mono for mono, factor in coeffs) <= bound``, or ``<`` if strict."""

    coeffs: tuple[tuple[Mono, int], ...]
    """Sorted; no factor is zero. Empty: ``0 <= bound``."""
    bound: Number
    strict: bool = False


class Solution(NamedTuple):
    """The result of `solve`."""

    verdict: Literal["feasible", "infeasible", "undecided"]
    point: dict[Mono, Number]
    """Values that satisfy the rows, strict ones only up to an infinitesimal; empty if not feasible."""
    pivots: int
    operations: int = 0
    """Coefficients that the pivots changed: what they cost."""


class _DeltaRational:
    """A number plus a multiple of an infinitesimal."""

    __slots__ = ("slope", "value")

    def __init__(self, value: Number, slope: Number = 0) -> None:
        self.value = value
        self.slope = slope

    def __add__(self, other: _DeltaRational) -> _DeltaRational:
        return _DeltaRational(self.value + other.value, self.slope + other.slope)

    def __sub__(self, other: _DeltaRational) -> _DeltaRational:
        return _DeltaRational(self.value - other.value, self.slope - other.slope)

    def __mul__(self, factor: Number) -> _DeltaRational:
        return _DeltaRational(self.value * factor, self.slope * factor)

    def __lt__(self, other: _DeltaRational) -> bool:
        return (self.value, self.slope) < (other.value, other.slope)

    def __gt__(self, other: _DeltaRational) -> bool:
        return (self.value, self.slope) > (other.value, other.slope)


def _inverse(number: Number) -> Number:
    return number if number in (1, -1) else Fraction(1) / number


def _short(number: Any) -> Any:
    is_whole = type(number) is Fraction and number.denominator == 1
    return number.numerator if is_whole else number


def _reduced(sums: dict[int, int], scale: int) -> int:
    """Divide a sum and its divisor by their common divisor, in place; returns the new divisor."""
    if scale == 1:
        return 1
    common = gcd(scale, *sums.values())
    if common > 1:
        for p in sums:
            sums[p] //= common
    return scale // common


def useful_rows(rows: Iterable[Row], others: Iterable[Row] = ()) -> list[Row]:
    """The rows that can take part in a contradiction, in their order.

    A contradiction is a sum of rows in which every variable cancels. A row with a variable that no
    other row has with the opposite sign takes no part in one, and removing it preserves
    satisfiability: the variable can be chosen freely.

    Args:
        rows: to choose from.
        others: rows that may be added later.
    """
    left = list(rows)
    later = {(mono, factor > 0) for row in others for mono, factor in row.coeffs}
    while True:
        signs = later.union((mono, factor > 0) for row in left for mono, factor in row.coeffs)
        useful = [
            row for row in left if all((mono, factor < 0) in signs for mono, factor in row.coeffs)
        ]
        if len(useful) == len(left):
            return useful
        left = useful


def solve(rows: Iterable[Row], *, max_pivots: int, max_operations: int = sys.maxsize) -> Solution:
    """Whether a rational point satisfies all rows; undecided after so many pivots or operations."""
    tableau = _Tableau(any(row.strict for row in rows), max_operations)
    for row in rows:
        if not tableau.add(row):
            return Solution("infeasible", {}, 0)
    return tableau.check(max_pivots)


class _Tableau:
    """The tableau of one simplex run.

    Variables are numbered. A basic variable is a sum of nonbasic ones. Nonbasic variables are within
    their bounds; `check` repairs the basic ones.
    """

    def __init__(self, near: bool, max_operations: int) -> None:
        self.near = near
        self.max_operations = max_operations
        self.operations = 0
        self.column: dict[Mono, int] = {}
        self.slack: dict[tuple[tuple[Mono, int], ...], int] = {}
        self.lower: list[Any] = []
        self.upper: list[Any] = []
        self.value: list[Any] = []
        self.basic: dict[int, dict[int, int]] = {}
        """For each basic variable the integer coefficients of its sum."""
        self.scale: dict[int, int] = {}
        """The positive divisor of each sum: integer rows are several times faster than fractions."""

    def _number(self, value: Number, slope: int = 0) -> Any:
        return _DeltaRational(value, slope) if self.near else value

    def _variable(self) -> int:
        self.lower.append(None)
        self.upper.append(None)
        self.value.append(self._number(0))
        return len(self.value) - 1

    def _column(self, mono: Mono) -> int:
        found = self.column.get(mono)
        if found is None:
            found = self.column[mono] = self._variable()
        return found

    def add(self, row: Row) -> bool:
        """Add a row as a bound of a variable; False if it contradicts the opposite bound.

        All rows are added before the first pivot, while only sums of columns are basic.
        """
        coeffs = row.coeffs
        if not coeffs:
            return row.bound >= 0 and not (row.strict and row.bound == 0)
        first = coeffs[0][1]
        is_upper = first > 0
        if len(coeffs) == 1:
            at = self._column(coeffs[0][0])
            scale: Number = _inverse(first)
        else:
            # Opposite directions share a variable: an equality is one variable with two bounds.
            scale = 1 if is_upper else -1
            direction = coeffs if is_upper else tuple((m, -c) for m, c in coeffs)
            slack = self.slack.get(direction)
            if slack is None:
                slack = self.slack[direction] = self._variable()
                self.basic[slack] = {self._column(m): c for m, c in direction}
                self.scale[slack] = 1
            at = slack
        bound = self._number(
            _short(row.bound * scale), 0 if not row.strict else -1 if is_upper else 1
        )
        return self._bound(at, bound, is_upper)

    def _bound(self, at: int, bound: Any, is_upper: bool) -> bool:
        if is_upper:
            if self.upper[at] is None or bound < self.upper[at]:
                self.upper[at] = bound
        elif self.lower[at] is None or bound > self.lower[at]:
            self.lower[at] = bound
        low, high = self.lower[at], self.upper[at]
        return low is None or high is None or not low > high

    def _start(self) -> None:
        for at in self.column.values():
            low, high, value = self.lower[at], self.upper[at], self.value[at]
            if low is not None and value < low:
                self.value[at] = low
            elif high is not None and value > high:
                self.value[at] = high
        for at, parts in self.basic.items():
            total = self._number(0)
            for part, factor in parts.items():
                total = total + self.value[part] * factor
            self.value[at] = total

    def check(self, max_pivots: int) -> Solution:
        """Repair violated bounds until none is left or one cannot be repaired."""
        self._start()
        for pivots in range(max_pivots + 1):
            at = self._violated()
            if at is None:
                return Solution("feasible", self._point(), pivots, self.operations)
            if self.operations > self.max_operations:
                return Solution("undecided", {}, pivots, self.operations)
            low = self.lower[at]
            must_grow = low is not None and self.value[at] < low
            partner = self._partner(at, must_grow)
            if partner is None:
                return Solution("infeasible", {}, pivots, self.operations)
            self._pivot(at, partner, low if must_grow else self.upper[at])
        return Solution("undecided", {}, max_pivots, self.operations)

    def _violated(self) -> int | None:
        found: int | None = None
        for at in self.basic:
            if found is not None and at > found:
                continue
            value, low, high = self.value[at], self.lower[at], self.upper[at]
            if (low is not None and value < low) or (high is not None and value > high):
                found = at
        return found

    def _partner(self, at: int, must_grow: bool) -> int | None:
        found: int | None = None
        for part, factor in self.basic[at].items():
            if found is not None and part > found:
                continue
            grows = (factor > 0) == must_grow
            limit = self.upper[part] if grows else self.lower[part]
            if limit is None or (self.value[part] < limit if grows else self.value[part] > limit):
                found = part
        return found

    def _pivot(self, at: int, partner: int, target: Any) -> None:
        parts, scale = self.basic.pop(at), self.scale.pop(at)
        factor = parts.pop(partner)
        delta = (target - self.value[at]) * _short(Fraction(scale, factor))
        self.value[at] = target
        self.value[partner] = _short(self.value[partner] + delta)
        # scale * at = factor * partner + rest, so factor * partner = scale * at - rest
        sign = 1 if factor > 0 else -1
        solved = {p: -sign * c for p, c in parts.items()}
        solved[at] = sign * scale
        divisor = _reduced(solved, abs(factor))
        self.operations += len(self.basic)
        for other, sums in self.basic.items():
            weight = sums.pop(partner, None)
            if weight is None:
                continue
            self.operations += len(sums) + len(solved)
            before = self.scale[other]
            change = delta * _short(Fraction(weight, before))
            self.value[other] = _short(self.value[other] + change)
            common = gcd(weight, divisor)
            weight, times = weight // common, divisor // common
            if times != 1:
                for p in sums:
                    sums[p] *= times
            for p, c in solved.items():
                total = sums.get(p, 0) + weight * c
                if total:
                    sums[p] = total
                else:
                    del sums[p]
            self.scale[other] = _reduced(sums, before * times)
        self.basic[partner] = solved
        self.scale[partner] = divisor

    def _point(self) -> dict[Mono, Number]:
        values = {mono: self.value[at] for mono, at in self.column.items()}
        return {m: v.value for m, v in values.items()} if self.near else values
