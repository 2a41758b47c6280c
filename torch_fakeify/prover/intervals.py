"""Bounds of polynomials by interval arithmetic, from the bounds of their variables: the quick way to an answer."""

from __future__ import annotations

from fractions import Fraction
from math import floor
from typing import TYPE_CHECKING

from .polynomials import FLOOR, MAX, AtomTable, Either, Equal
from .simplex import Mono, Number, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from .polynomials import Part

__all__ = ["Interval", "Intervals", "tighter", "times"]

Interval = tuple["Number | None", "Number | None"]
"""Lower and upper bound; ``None``: unbounded."""

MAX_DEPTH = 8
"""The most functions inside of one another whose arguments are looked at."""


def times(a: Interval, b: Interval) -> Interval:
    """Return the bounds of a product from the bounds of its two factors."""
    ends = [x * y for x in a for y in b if x is not None and y is not None]
    if len(ends) == 4:
        return min(ends), max(ends)
    a_low, b_low = a[0], b[0]
    if a_low is None or b_low is None or a_low < 0 or b_low < 0:
        return None, None
    return a_low * b_low, None


def tighter(a: Interval, b: Interval) -> Interval:
    """Return the bounds of what has two bounds."""
    lows = [low for low in (a[0], b[0]) if low is not None]
    highs = [high for high in (a[1], b[1]) if high is not None]
    return max(lows, default=None), min(highs, default=None)


class Intervals:
    """Bounds of products, functions and polynomials.

    Args:
        table: has the atoms.
        known: the bounds of a product, or of one atom, that are facts.
    """

    def __init__(self, table: AtomTable, known: Callable[[Mono], Interval]) -> None:
        self._table = table
        self._known = known
        self._found: dict[Mono, Interval] = {}

    def refutes(self, parts: Iterable[Part], depth: int = 0) -> bool:
        """Return whether one of some conditions is false for all values within the bounds."""
        for part in parts:
            match part:
                case Row(coeffs, bound, strict):
                    low, _ = self.of(dict(coeffs), depth)
                    if low is not None and (low > bound or (strict and low == bound)):
                        return True
                case Equal(coeffs, bound):
                    low, high = self.of(dict(coeffs), depth)
                    if (low is not None and low > bound) or (high is not None and high < bound):
                        return True
                case Either(options):
                    if all(self.refutes(option, depth) for option in options):
                        return True
        return False

    def of(self, poly: Mapping[Mono, Number], depth: int = 0) -> Interval:
        """Return the bounds of a polynomial."""
        low: Number | None = 0
        high: Number | None = 0
        for mono, c in poly.items():
            least, most = (1, 1) if mono == () else self._of_product(mono, depth)
            if c < 0:
                least, most = most, least
            low = None if low is None or least is None else low + c * least
            high = None if high is None or most is None else high + c * most
            if low is None and high is None:
                break
        return low, high

    def _of_product(self, mono: Mono, depth: int) -> Interval:
        found = self._found.get(mono)
        if found is not None:
            return found
        found = self._known(mono)
        if len(mono) > 1:
            factors: Interval = (1, 1)
            for atom in dict.fromkeys(mono):
                factors = times(factors, self._of_power(atom, mono.count(atom), depth))
            found = tighter(found, factors)
        elif mono and depth < MAX_DEPTH:
            (atom,) = mono
            found = tighter(found, self._of_function(atom, depth + 1))
        self._found[mono] = found
        return found

    def _of_power(self, atom: int, exponent: int, depth: int) -> Interval:
        low, high = one = self._of_product((atom,), depth)
        if low is not None and low >= 0:
            return low**exponent, None if high is None else high**exponent
        found: Interval = (1, 1)
        for _ in range(exponent):
            found = times(found, one)
        return found if exponent % 2 else tighter(found, (0, None))

    def _of_function(self, at: int, depth: int) -> Interval:
        atom = self._table.atoms[at]
        if atom.head is MAX:
            bounds = [self.of(dict(arg), depth) for arg in atom.args]
            lows = [low for low, _ in bounds if low is not None]
            highs = [high for _, high in bounds]
            known = [high for high in highs if high is not None]
            return max(lows, default=None), max(known) if len(known) == len(highs) else None
        if atom.head is FLOOR:
            return self._of_quotient(atom.args, depth)
        return None, None

    def _of_quotient(self, args: Sequence[Iterable[tuple[Mono, Number]]], depth: int) -> Interval:
        numerator, divisor = (self.of(dict(arg), depth) for arg in args)
        least, most = divisor
        if least is None or least < 1 or (most is not None and most < least):
            return None, None  # of another sign, or the bounds contradict each other
        low, high = numerator
        if low is None or low < 0:
            return None, None
        lowest = 0 if most is None else floor(Fraction(low) / most)
        return lowest, None if high is None else floor(Fraction(high) / least)
