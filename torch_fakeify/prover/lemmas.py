"""Linear inequalities that hold for functions and products of symbols, for use in linear programs.

A floor division gets its definition; a maximum is at least each of its arguments and equals one of
them; a product gets McCormick's bounds ("Computability of global solutions to factorable nonconvex
programs", 1976) and those of rows multiplied by a factor.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from math import floor
from typing import TYPE_CHECKING

from .intervals import Interval, is_positive, of_polynomial, of_quotient, tighter, times
from .polynomials import FLOOR, MAX, AtomTable, Either, Poly, add, all_rows, either, multiply
from .simplex import Mono, Number, Row

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

MAX_LEMMAS = 80
"""The most inequalities about functions and products for one question."""

MAX_WIDTH = 16
"""The most variables of a row that is multiplied by a factor."""

PROPAGATION_ROUNDS = 3
"""Rounds of bound propagation through the rows before products use the bounds."""


class Lemmas:
    """Inequalities that follow from some rows for the functions and products in them."""

    def __init__(self, table: AtomTable, rows: Sequence[Row], choices: Sequence[Either]) -> None:
        self.table = table
        self.rows = rows
        self.choices = choices
        self.low: dict[Mono, Number] = {}
        self.high: dict[Mono, Number] = {}
        self.found: dict[Row, None] = {}
        self.splits: list[Either] = []

    def collect(self) -> tuple[list[Row], list[Either]]:
        """The inequalities, and for each maximum the disjunction that it equals an argument."""
        seen: dict[Mono, None] = {}
        rows = [*self.rows, *(row for choice in self.choices for row in all_rows(choice))]
        queue = [m for row in rows for m, _ in row.coeffs if not self.table.is_symbol(m)]
        if not queue:
            return [], []
        self._propagate()
        while queue and len(self.found) < MAX_LEMMAS:
            mono = queue.pop(0)
            if mono in seen or self.table.is_symbol(mono):
                continue
            seen[mono] = None
            before = len(self.found)
            self._about(mono)
            fresh = list(self.found)[before:]
            queue.extend(m for row in fresh for m, _ in row.coeffs)
            queue.extend((a,) for a in mono if len(mono) > 1)  # also factors without bounds
        self._multiplied([m for m in seen if len(m) > 1])
        return list(self.found), self.splits

    # --- bounds --------------------------------------------------------------------------------

    def _propagate(self) -> None:
        rows = sorted(self.rows, key=lambda row: len(row.coeffs))
        for _ in range(PROPAGATION_ROUNDS):
            before = self.low.copy(), self.high.copy()
            for row in rows:
                for mono, c in row.coeffs:
                    others: Poly = {m: -d for m, d in row.coeffs if m != mono}
                    others[()] = row.bound
                    _, high = self.interval(others)  # c * mono <= high
                    if high is not None:
                        self._bound(mono, high * c if c in (1, -1) else Fraction(high) / c, c > 0)
            if (self.low, self.high) == before:
                return

    def _bound(self, mono: Mono, value: Number, is_high: bool) -> None:
        if self.table.is_whole(mono):
            value = floor(value) if is_high else -floor(-value)
        if is_high:
            self.high[mono] = min(self.high.get(mono, value), value)
        else:
            self.low[mono] = max(self.low.get(mono, value), value)

    def interval(self, poly: Mapping[Mono, Number]) -> Interval:
        """Lower and upper bound of a polynomial from those of its products; ``None``: unbounded."""
        return of_polynomial(poly, self._range)

    def _range(self, mono: Mono) -> Interval:
        known = self.low.get(mono), self.high.get(mono)
        if len(mono) < 2:
            return known
        least, most = times(self._range(mono[:1]), self._range(mono[1:]))
        if all(mono.count(a) % 2 == 0 for a in mono):
            least = 0 if least is None else max(0, least)
        return tighter((least, most), known)

    # --- lemmas --------------------------------------------------------------------------------

    def _add(self, poly: Poly) -> None:
        for row in self.table.row(poly, False):
            if isinstance(row, Row):
                self.found[row] = None

    def _about(self, mono: Mono) -> None:
        first, *others = mono
        if others:
            self._about_product(mono)
            return
        atom = self.table.atoms[first]
        if atom.head is FLOOR:
            self._about_floor(mono, dict(atom.args[0]), dict(atom.args[1]))
        elif atom.head is MAX:
            options = [add(dict(arg), {mono: 1}, -1) for arg in atom.args]
            for option in options:
                self._add(option)
            least = [self.table.row(add({}, option, -1), False) for option in options]
            self.splits.extend(p for p in either(least) if isinstance(p, Either))

    def _about_floor(self, mono: Mono, a: Poly, b: Poly) -> None:
        whole = all(type(c) is int and self.table.is_whole(m) for m, c in (*a.items(), *b.items()))
        divisor = self.interval(b)
        if not whole or not is_positive(divisor):
            return
        rest = add(a, multiply(b, {mono: 1}), -1)
        self._add(add({}, rest, -1))
        self._add(add(add(rest, b, -1), {(): 1}))
        self._bound_lemmas(mono, of_quotient(self.interval(a), divisor))

    def _bound_lemmas(self, mono: Mono, bounds: Interval) -> None:
        for value, is_high in zip(bounds, (False, True), strict=True):
            if value is not None:
                self._bound_lemma(mono, value, is_high)

    def _bound_lemma(self, mono: Mono, value: Number, is_high: bool) -> None:
        self._bound(mono, value, is_high)
        poly = add({mono: 1}, {(): value}, -1)
        self._add(poly if is_high else add({}, poly, -1))

    def _about_product(self, mono: Mono) -> None:
        low, _ = bounds = self._range(mono)
        self._bound_lemmas(mono, bounds)
        if low is not None and low > 0:
            self._about_positive_product(mono)
        for a in dict.fromkeys(mono):
            rest = list(mono)
            rest.remove(a)
            x, y = (a,), tuple(rest)
            for p, q in product(self._gaps(x), self._gaps(y)):
                self._add(add({}, multiply(p, q), -1))

    def _about_positive_product(self, mono: Mono) -> None:
        """A factor that is not negative is at least one: with zero the product would be zero."""
        for a in dict.fromkeys(mono):
            least = self.low.get((a,))
            if least is not None and 0 <= least < 1 and self.table.is_whole((a,)):
                self._bound_lemma((a,), 1, False)

    def _gaps(self, mono: Mono) -> Iterator[Poly]:
        """The polynomials that bounds make non-negative: ``mono - low`` and ``high - mono``."""
        low, high = self._range(mono)
        if low is not None:
            yield add({mono: 1}, {(): low}, -1)
        if high is not None:
            yield add({(): high} if high else {}, {mono: 1}, -1)

    def _multiplied(self, products: list[Mono]) -> None:
        """Add rows multiplied by a factor where all resulting products occur already."""
        present = set(products)
        factors = dict.fromkeys((a,) for mono in products for a in mono)
        for row, factor in product(self.rows, factors):
            if len(self.found) >= MAX_LEMMAS:
                return
            if not 2 <= len(row.coeffs) <= MAX_WIDTH:
                continue
            if not all(tuple(sorted(m + factor)) in present for m, _ in row.coeffs):
                continue
            slack = add({(): row.bound} if row.bound else {}, dict(row.coeffs), -1)
            for gap in self._gaps(factor):
                self._add(add({}, multiply(slack, gap), -1))
