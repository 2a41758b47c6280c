"""Whether conditions contradict each other: sound, incomplete, of bounded cost.

Method: equalities replace symbols everywhere, also inside functions (``Eq(Mod(s0, 8), 0)`` makes
``s0`` eight times a new integer); the remaining functions and products get inequalities (`lemmas`);
exact linear programs decide over the rationals; disjunctions and fractional values of integers are
split, driven by the point found.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from fractions import Fraction
from math import floor, gcd
from typing import TYPE_CHECKING, TypeAlias

from typing_extensions import assert_never

from .lemmas import Lemmas
from .polynomials import (
    FALSE,
    FLOOR,
    QUOTIENT,
    AtomTable,
    Either,
    Equal,
    Part,
    Poly,
    TooLargeError,
    add,
    all_rows,
    either,
    freeze,
    multiply,
    rows_of,
)
from .simplex import Mono, Number, Row, solve, useful_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

MAX_PROGRAMS = 8
"""The most linear programs for one question: the splits of disjunctions and fractions."""

MAX_PIVOTS = 400
"""The most pivots of one linear program."""

MAX_OPERATIONS = 40_000
"""The most changed coefficients of all linear programs of one question: some 20 ms."""

MAX_REPLACED = 16
"""The most symbols that equalities replace for one question."""


@dataclass(slots=True)
class WorkCounter:
    """How much work was done, in counts that do not depend on the machine."""

    questions: int = 0
    """Refutations that were tried."""
    neighbours: int = 0
    """Facts that were considered as neighbours."""
    rows: int = 0
    """Rows of all linear programs."""
    programs: int = 0
    """Linear programs."""
    pivots: int = 0
    """Pivots of all linear programs."""
    evaluations: int = 0
    """Facts that were evaluated at possible counterexamples."""

    @property
    def total(self) -> int:
        """The sum of all counts."""
        return sum(astuple(self))


def opposite(table: AtomTable, parts: Sequence[Part]) -> tuple[Part, ...]:
    """The parts of the negation of a condition."""
    return either([_opposite(table, part) for part in parts])


def _opposite(table: AtomTable, part: Part) -> tuple[Part, ...]:
    match part:
        case Row(coeffs, bound, strict):
            return table.row(_poly(tuple((m, -c) for m, c in coeffs), -bound), not strict)
        case Equal(coeffs, bound):
            poly = _poly(coeffs, bound)
            return either([table.row(poly, True), table.row(add({}, poly, -1), True)])
        case Either(options):
            return tuple(p for option in options for p in opposite(table, option))
        case _:
            assert_never(part)


def _poly(coeffs: Sequence[tuple[Mono, int]], bound: Number) -> Poly:
    total: Poly = dict(coeffs)
    return add(total, {(): -bound}) if bound else total


class Refuter:
    """Finds contradictions among conditions over the same `AtomTable`."""

    def __init__(self, table: AtomTable, work: WorkCounter) -> None:
        self.table = table
        self.work = work
        self._programs_left = 0
        self._operations_left = 0

    def begin_question(self) -> None:
        """Give the refutations that follow the operations of one question."""
        self._operations_left = MAX_OPERATIONS

    def contradicts(self, parts: Iterable[Part]) -> bool:
        """Whether no values satisfy all parts; False if that is undecided.

        All calls since `begin_question` together have at most `MAX_OPERATIONS`.
        """
        self.work.questions += 1
        self._programs_left = MAX_PROGRAMS
        rows, choices = _sorted_out(self._replaced(list(dict.fromkeys(parts))))
        if FALSE[0] in rows:
            return True
        more, more_choices = Lemmas(self.table, rows, choices).collect()
        return self._search([*rows, *more], [*choices, *more_choices])

    # --- equalities ----------------------------------------------------------------------------

    def _replaced(self, parts: list[Part]) -> list[Part]:
        """The parts with symbols eliminated by the equalities among them."""
        too_large: set[Part] = set()
        for _ in range(MAX_REPLACED):
            found = ((p, self._solution(p)) for p in parts if isinstance(p, Equal))
            equal, solution = next(
                (f for f in found if f[1] and f[0] not in too_large), (None, None)
            )
            if equal is None or solution is None:
                break
            try:
                changed = [p for part in parts for p in self._rewritten(part, *solution)]
            except TooLargeError:
                too_large.add(equal)  # it is still used as two rows
                continue
            parts = list(dict.fromkeys(changed))
        return parts

    def _rewritten(self, part: Part, symbol: int, by: Poly) -> tuple[Part, ...]:
        table = self.table
        match part:
            case Row(coeffs, bound, strict):
                if symbol not in table.symbols_of(coeffs):
                    return (part,)
                return table.row(table.replace(_poly(coeffs, bound), symbol, by), strict)
            case Equal(coeffs, bound):
                if symbol not in table.symbols_of(coeffs):
                    return (part,)
                return table.equal(table.replace(_poly(coeffs, bound), symbol, by))
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
        """Solve an equality for one of its symbols: the symbol and the polynomial it equals."""
        poly = _poly(equal.coeffs, equal.bound)
        return self._solved(poly, 0) or self._congruence(poly)

    def _solved(self, poly: Poly, modulus: int) -> tuple[int, Poly] | None:
        """Solve ``poly == 0``, or ``poly % modulus == 0`` up to a multiple, for a symbol."""
        table = self.table
        for mono, c in reversed(poly.items()):
            if not table.is_symbol(mono):
                continue
            rest = {m: d for m, d in poly.items() if m != mono}
            if mono[0] in table.symbols_of(rest.items()):
                continue
            if not table.is_whole(mono):
                return mono[0], add({}, rest, Fraction(-1) / c)
            if not all(type(d) is int and table.is_whole(m) for m, d in rest.items()):
                continue
            if c in (1, -1):
                return mono[0], add({}, rest, -c)
            if modulus and gcd(int(c), modulus) == 1:
                inverse = pow(int(c), -1, modulus)
                reduced = {m: -inverse * d % modulus for m, d in rest.items()}
                return mono[0], {m: d for m, d in reduced.items() if d}
        return None

    def _congruence(self, poly: Poly) -> tuple[int, Poly] | None:
        """From ``a - k*(a // k) == rest``: a symbol of ``a``, solved modulo ``k``."""
        for mono, c in poly.items():
            for at in mono:
                atom = self.table.atoms[at]
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
        numerator, denominator = map(dict, self.table.atoms[at].args)
        ((divisor, k),) = denominator.items()
        rest = add({m: c for m, c in poly.items() if m != mono}, numerator, -1)
        if not all(m == () and type(c) is int for m, c in rest.items()):
            return None
        shifted = add(numerator, rest)  # this is k times the quotient
        if not all(type(c) is int and self.table.is_whole(m) for m, c in shifted.items()):
            return None
        solved = self._solved(shifted, 0 if divisor else int(k))
        if solved is None or solved[0] in self.table.symbols_of(denominator.items()):
            return None
        symbol, value = solved
        key = (freeze(shifted), freeze(denominator), (((symbol,), 1),))
        quotient = self.table.atom(QUOTIENT, key, True)
        return symbol, add(value, multiply(denominator, quotient))

    # --- the search ----------------------------------------------------------------------------

    def _search(self, rows: list[Row], choices: list[Either]) -> bool:
        propagated = _propagated(rows, choices)
        if propagated is None:
            return True
        rows, choices = propagated
        if self._programs_left == 0 or self._operations_left <= 0:
            return False
        self._programs_left -= 1
        used = useful_rows(rows, [r for c in choices for r in all_rows(c)])
        found = solve(used, max_pivots=MAX_PIVOTS, max_operations=self._operations_left)
        self._operations_left -= found.operations
        self.work.programs += 1
        self.work.rows += len(used)
        self.work.pivots += found.pivots
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
            if value == floor(value) or not self.table.is_whole(mono):
                continue
            below = Row(((mono, 1),), floor(value))
            above = Row(((mono, -1),), -floor(value) - 1)
            return self._with(rows, choices, (below,)) and self._with(rows, choices, (above,))
        return False

    def _with(self, rows: list[Row], choices: list[Either], option: Sequence[Part]) -> bool:
        more, more_choices = _sorted_out(option)
        return self._search([*rows, *more], [*choices, *more_choices])


_Bounds: TypeAlias = "dict[tuple[tuple[Mono, int], ...], tuple[Number, bool]]"
"""The tightest bound of each linear combination, and whether it is not strict."""


def _propagated(rows: list[Row], choices: list[Either]) -> tuple[list[Row], list[Either]] | None:
    """Rows and disjunctions after options that a single row refutes are removed.

    A disjunction with one option left is replaced by it. ``None``: a disjunction has no option left.
    """
    bounds: _Bounds = {}
    changed = bool(choices)
    while changed:
        changed = False
        for row in rows:
            bound = row.bound, not row.strict
            bounds[row.coeffs] = min(bounds.get(row.coeffs, bound), bound)
        left: list[Either] = []
        for choice in choices:
            options = [o for o in choice.options if not _refuted_by_bounds(o, bounds)]
            if not options:
                return None
            if len(options) == 1:
                changed = True
                more, more_choices = _sorted_out(options[0])
                rows = [*rows, *more]
                left += more_choices
            else:
                left.append(Either(tuple(options)))
        choices = left
    return rows, choices


def _refuted_by_bounds(parts: Iterable[Part], bounds: _Bounds) -> bool:
    """Whether a row of a conjunction and a bound of the same combination contradict each other."""
    rows, choices = _sorted_out(parts)
    for row in rows:
        if not row.coeffs:
            return row.bound < 0 or (row.strict and row.bound == 0)
        opposite = bounds.get(tuple((m, -c) for m, c in row.coeffs))
        if opposite is not None:
            sum_ = row.bound + opposite[0]
            if sum_ < 0 or (sum_ == 0 and (row.strict or not opposite[1])):
                return True
    return any(all(_refuted_by_bounds(o, bounds) for o in c.options) for c in choices)


def _sorted_out(parts: Iterable[Part]) -> tuple[list[Row], list[Either]]:
    parts = tuple(parts)
    rows = [row for part in parts for row in rows_of(part)]
    return rows, [part for part in parts if isinstance(part, Either)]


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
