"""Whether conditions contradict each other: sound, not complete, bounded in what it costs.

The steps: equalities replace symbols everywhere, also inside of functions (``Eq(Mod(s0, 8), 0)``
makes ``s0`` eight times a new integer); functions and products that are left get inequalities that
hold of them (`lemmas`); exact linear programs decide over the rationals; disjunctions and
fractional values of integers are split, driven by the point found.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import floor, gcd
from typing import TYPE_CHECKING

from typing_extensions import assert_never

from .lemmas import Lemmas
from .polynomials import (
    FALSE,
    FLOOR,
    QUOTIENT,
    Either,
    Equal,
    Part,
    Poly,
    Terms,
    TooLargeError,
    add,
    all_rows,
    either,
    freeze,
    multiply,
)
from .simplex import Mono, Number, Row, solve, useful_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

__all__ = ["Effort", "Refuter", "opposite"]

MAX_PROGRAMS = 8
"""Linear programs for one question: the splits of disjunctions and fractions."""

MAX_PIVOTS = 400
"""Pivots of one linear program."""

MAX_REPLACED = 16
"""Symbols that equalities replace for one question."""


@dataclass(slots=True)
class Effort:
    """What was done so far, in steps that do not depend on the machine."""

    questions: int = 0
    """Refutations that were tried."""
    neighbours: int = 0
    """Facts that were looked at as possible neighbours."""
    rows: int = 0
    """Rows of all linear programs."""
    programs: int = 0
    """Linear programs."""
    pivots: int = 0
    """Pivots of all linear programs."""

    @property
    def total(self) -> int:
        """The sum of all."""
        return self.questions + self.neighbours + self.rows + self.programs + self.pivots


def opposite(terms: Terms, parts: Sequence[Part]) -> tuple[Part, ...]:
    """The parts of the condition that holds where this one does not."""
    return either([_opposite(terms, part) for part in parts])


def _opposite(terms: Terms, part: Part) -> tuple[Part, ...]:
    match part:
        case Row(coeffs, bound, strict):
            return terms.row(_poly(tuple((m, -c) for m, c in coeffs), -bound), not strict)
        case Equal(coeffs, bound):
            poly = _poly(coeffs, bound)
            return either([terms.row(poly, True), terms.row(add({}, poly, -1), True)])
        case Either(options):
            return tuple(p for option in options for p in opposite(terms, option))
        case _:
            assert_never(part)


def _poly(coeffs: Sequence[tuple[Mono, int]], bound: Number) -> Poly:
    total: Poly = dict(coeffs)
    return add(total, {(): -bound}) if bound else total


class Refuter:
    """Finds contradictions among conditions over the same `Terms`."""

    def __init__(self, terms: Terms, effort: Effort) -> None:
        self.terms = terms
        self.effort = effort
        self._programs_left = 0

    def contradicts(self, parts: Iterable[Part]) -> bool:
        """Whether no values satisfy all parts. False also says that it is not known."""
        self.effort.questions += 1
        self._programs_left = MAX_PROGRAMS
        rows, choices = _sorted_out(self._replaced(list(dict.fromkeys(parts))))
        if FALSE[0] in rows:
            return True
        rows = useful_rows(rows, self._possible(rows, choices))
        more, more_choices = Lemmas(self.terms, rows, choices).collect()
        return self._search([*rows, *more], [*choices, *more_choices])

    def _possible(self, rows: Sequence[Row], choices: Sequence[Either]) -> list[Row]:
        """The rows of choices, and stand-ins for those that lemmas may bring."""
        others = [row for choice in choices for row in all_rows(choice)]
        queue = [mono for row in (*rows, *others) for mono, _ in row.coeffs]
        inner: dict[Mono, None] = {}
        while queue:
            fresh = [mono for mono in self.terms.inside(queue.pop()) if mono not in inner]
            inner.update(dict.fromkeys(fresh))
            queue.extend(fresh)
        return [*others, *(Row(((mono, sign),), 0) for mono in inner for sign in (1, -1))]

    # --- equalities ----------------------------------------------------------------------------

    def _replaced(self, parts: list[Part]) -> list[Part]:
        """The parts without the symbols that equalities among them give away."""
        kept: set[Part] = set()
        for _ in range(MAX_REPLACED):
            found = ((p, self._solution(p)) for p in parts if isinstance(p, Equal))
            equal, solution = next((f for f in found if f[1] and f[0] not in kept), (None, None))
            if equal is None or solution is None:
                break
            try:
                changed = [p for part in parts for p in self._rewritten(part, *solution)]
            except TooLargeError:
                kept.add(equal)  # it still is two rows
                continue
            parts = list(dict.fromkeys(changed))
        return parts

    def _rewritten(self, part: Part, symbol: int, by: Poly) -> tuple[Part, ...]:
        terms = self.terms
        match part:
            case Row(coeffs, bound, strict):
                if symbol not in terms.symbols_of(coeffs):
                    return (part,)
                return terms.row(terms.replace(_poly(coeffs, bound), symbol, by), strict)
            case Equal(coeffs, bound):
                if symbol not in terms.symbols_of(coeffs):
                    return (part,)
                return terms.equal(terms.replace(_poly(coeffs, bound), symbol, by))
            case Either(options):
                return either(
                    [
                        tuple(p for inner in option for p in self._rewritten(inner, symbol, by))
                        for option in options
                    ]
                )
            case _:
                assert_never(part)

    def _solution(self, equal: Equal) -> tuple[int, Poly] | None:
        """A symbol of an equality and what it is equal to, which does not have it."""
        poly = _poly(equal.coeffs, equal.bound)
        return self._solved(poly, 0) or self._congruence(poly)

    def _solved(self, poly: Poly, modulus: int) -> tuple[int, Poly] | None:
        """The same for ``poly == 0``, or ``poly % modulus == 0`` up to a multiple of it."""
        terms = self.terms
        for mono, c in reversed(poly.items()):
            if not terms.is_symbol(mono):
                continue
            rest = {m: d for m, d in poly.items() if m != mono}
            if mono[0] in terms.symbols_of(rest.items()):
                continue
            if not terms.is_whole(mono):
                return mono[0], add({}, rest, Fraction(-1) / c)
            if not all(type(d) is int and terms.is_whole(m) for m, d in rest.items()):
                continue
            if c in (1, -1):
                return mono[0], add({}, rest, -c)
            if modulus and gcd(int(c), modulus) == 1:
                inverse = pow(int(c), -1, modulus)
                reduced = {m: -inverse * d % modulus for m, d in rest.items()}
                return mono[0], {m: d for m, d in reduced.items() if d}
        return None

    def _congruence(self, poly: Poly) -> tuple[int, Poly] | None:
        """From ``a - k*(a // k) == rest``: a symbol of ``a`` is a multiple of ``k`` and something."""
        for mono, c in poly.items():
            for at in mono:
                atom = self.terms.atoms[at]
                if atom.head is not FLOOR or len(atom.args[1]) != 1:
                    continue
                ((divisor, k),) = atom.args[1]
                if c not in (k, -k) or mono != tuple(sorted((*divisor, at))):
                    continue
                found = self._multiple(poly if c == -k else add({}, poly, -1), mono, at)
                if found is not None:
                    return found
        return None

    def _multiple(self, poly: Poly, mono: Mono, at: int) -> tuple[int, Poly] | None:
        numerator, denominator = map(dict, self.terms.atoms[at].args)
        ((divisor, k),) = denominator.items()
        rest = add({m: c for m, c in poly.items() if m != mono}, numerator, -1)
        if not all(m == () and type(c) is int for m, c in rest.items()):
            return None
        shifted = add(numerator, rest)  # this is k times the quotient
        if not all(type(c) is int and self.terms.is_whole(m) for m, c in shifted.items()):
            return None
        solved = self._solved(shifted, 0 if divisor else int(k))
        if solved is None or solved[0] in self.terms.symbols_of(denominator.items()):
            return None
        symbol, value = solved
        key = (freeze(shifted), freeze(denominator), (((symbol,), 1),))
        quotient = self.terms.atom(QUOTIENT, key, True)
        return symbol, add(value, multiply(denominator, quotient))

    # --- the search ----------------------------------------------------------------------------

    def _search(self, rows: list[Row], choices: list[Either]) -> bool:
        if self._programs_left == 0:
            return False
        self._programs_left -= 1
        used = useful_rows(rows, [r for c in choices for r in all_rows(c)])
        found = solve(used, max_pivots=MAX_PIVOTS)
        self.effort.programs += 1
        self.effort.rows += len(used)
        self.effort.pivots += found.pivots
        if found.verdict != "feasible":
            return found.verdict == "infeasible"
        # A variable without a row can be zero. One whose rows were of no use has moved far out of
        # their way, and out of that of the rows of choices.
        moved = {mono for row in rows for mono, _ in row.coeffs} - found.point.keys()
        for at, choice in enumerate(choices):
            if any(_holds(option, found.point, moved) for option in choice.options):
                continue
            left = choices[:at] + choices[at + 1 :]
            return all(self._with(rows, left, option) for option in choice.options)
        for mono, value in found.point.items():
            if value == floor(value) or not self.terms.is_whole(mono):
                continue
            below = Row(((mono, 1),), floor(value))
            above = Row(((mono, -1),), -floor(value) - 1)
            return self._with(rows, choices, (below,)) and self._with(rows, choices, (above,))
        return False

    def _with(self, rows: list[Row], choices: list[Either], option: Sequence[Part]) -> bool:
        more, more_choices = _sorted_out(option)
        return self._search([*rows, *more], [*choices, *more_choices])


def _sorted_out(parts: Iterable[Part]) -> tuple[list[Row], list[Either]]:
    rows: list[Row] = []
    choices: list[Either] = []
    for part in parts:
        match part:
            case Row():
                rows.append(part)
            case Equal():
                rows.extend(part.rows())
            case Either():
                choices.append(part)
            case _:
                assert_never(part)
    return rows, choices


def _holds(parts: Iterable[Part], point: Mapping[Mono, Number], moved: AbstractSet[Mono]) -> bool:
    """Whether a point satisfies a condition; rows with a variable that has moved are satisfied."""
    rows, choices = _sorted_out(parts)
    for row in rows:
        if any(mono in moved for mono, _ in row.coeffs):
            continue
        value = sum(point.get(mono, 0) * c for mono, c in row.coeffs)
        if value > row.bound or (row.strict and value == row.bound):
            return False
    return all(any(_holds(o, point, moved) for o in choice.options) for choice in choices)
