"""Bounds of polynomials by interval arithmetic, from the bounds of their variables: the quick way to an answer."""

from __future__ import annotations

from fractions import Fraction
from math import floor
from typing import TYPE_CHECKING

from .polynomials import FLOOR, MAX, AtomTable, Either, Equal
from .simplex import Mono, Number, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from .polynomials import Part

Interval = tuple["Number | None", "Number | None"]
"""Lower and upper bound; ``None``: unbounded."""

MAX_DEPTH = 8
"""The most functions inside of one another whose arguments are looked at: powers in them grow fast."""


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


def of_polynomial(poly: Mapping[Mono, Number], of_product: Callable[[Mono], Interval]) -> Interval:
    """Return the bounds of a polynomial from those of its products."""
    low: Number | None = 0
    high: Number | None = 0
    for mono, c in poly.items():
        least, most = (1, 1) if mono == () else of_product(mono)
        if c < 0:
            least, most = most, least
        low = None if low is None or least is None else low + c * least
        high = None if high is None or most is None else high + c * most
        if low is None and high is None:
            break
    return low, high


def is_positive(divisor: Interval) -> bool:
    """Return whether a divisor is at least one, by bounds that do not contradict each other."""
    least, most = divisor
    return least is not None and least >= 1 and (most is None or most >= least)


def of_quotient(numerator: Interval, divisor: Interval) -> Interval:
    """Return the bounds of a floor division; none unless both are known not to be negative."""
    least, most = divisor
    low, high = numerator
    if not is_positive(divisor) or low is None or low < 0:
        return None, None
    assert least is not None
    lowest = 0 if most is None else floor(Fraction(low) / most)
    return lowest, None if high is None else floor(Fraction(high) / least)


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
        self._depth = 0

    def refutes(self, parts: Iterable[Part]) -> bool:
        """Return whether one of some conditions is false for all values within the bounds."""
        for part in parts:
            match part:
                case Row(coeffs, bound, strict):
                    low, _ = self.of(dict(coeffs))
                    if low is not None and (low > bound or (strict and low == bound)):
                        return True
                case Equal(coeffs, bound):
                    low, high = self.of(dict(coeffs))
                    if (low is not None and low > bound) or (high is not None and high < bound):
                        return True
                case Either(options):
                    if all(self.refutes(option) for option in options):
                        return True
        return False

    def of(self, poly: Mapping[Mono, Number]) -> Interval:
        """Return the bounds of a polynomial."""
        return of_polynomial(poly, self._of_product)

    def _of_product(self, mono: Mono) -> Interval:
        found = self._found.get(mono)
        if found is not None:
            return found
        found = self._known(mono)
        if len(mono) > 1:
            factors: Interval = (1, 1)
            for atom in dict.fromkeys(mono):
                factors = times(factors, self._of_power(atom, mono.count(atom)))
            found = tighter(found, factors)
        elif mono and self._depth < MAX_DEPTH:
            self._depth += 1
            found = tighter(found, self._of_function(mono[0]))
            self._depth -= 1
        self._found[mono] = found
        return found

    def _of_power(self, atom: int, exponent: int) -> Interval:
        low, high = one = self._of_product((atom,))
        if low is not None and low >= 0:
            return low**exponent, None if high is None else high**exponent
        found: Interval = (1, 1)
        for _ in range(exponent):
            found = times(found, one)
        return found if exponent % 2 else tighter(found, (0, None))

    def _of_function(self, at: int) -> Interval:
        atom = self._table.atoms[at]
        if atom.head is MAX:
            bounds = [self.of(dict(arg)) for arg in atom.args]
            lows = [low for low, _ in bounds if low is not None]
            highs = [high for _, high in bounds]
            known = [high for high in highs if high is not None]
            return max(lows, default=None), max(known) if len(known) == len(highs) else None
        if atom.head is FLOOR:
            numerator, divisor = (self.of(dict(arg)) for arg in atom.args)
            return of_quotient(numerator, divisor)
        return None, None
