"""Which facts about shape symbols follow from other facts, and which contradict each other.

A fact is a sympy condition over torch's symbols and functions; a value range is two facts. A
positive answer ("it follows", "it contradicts") is sound: over the integers for integer symbols, over
the real numbers for all others. A negative answer may be a failure of the search, which looks at a
bounded number of facts, the nearest ones. `refutation` finds the contradictions.

Of sympy's assumptions on a symbol only ``integer`` counts; ``positive=True`` is not a fact, unless
sympy itself simplifies a condition by it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from fractions import Fraction
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from .counterexamples import Counterexamples
from .intervals import Interval, Intervals
from .polynomials import FALSE, AtomTable, Either, all_rows, options_of, rows_of
from .refutation import Refuter, WorkCounter, opposite
from .simplex import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

    import sympy

    from .polynomials import Part, Poly
    from .simplex import Mono, Number

__all__ = ["FactIndex", "WorkCounter", "conflict", "redundant"]

MAX_NEIGHBOURS = 20
"""The most facts of several variables that one question uses; bounds of one variable are extra."""

MAX_CHOICES = 4
"""The most disjunctions among the facts that one question uses."""

MAX_LOOKED_AT = 32
"""The most facts that are considered for one variable."""

WIDER_SEARCH_FACTOR = 4
"""The factor by which `conflict` raises `MAX_NEIGHBOURS` for its second attempt."""


def redundant(
    facts: Sequence[sympy.Basic],
    *,
    removable: Sequence[bool] | None = None,
    is_range: Sequence[bool] | None = None,
    example: Mapping[sympy.Symbol, object] | None = None,
    work: WorkCounter | None = None,
) -> dict[int, tuple[int, ...] | None]:
    """Positions of facts that follow from the remaining facts, in ascending order.

    Each range with the positions of one fact, and of bounds of its other variables, that give it;
    every other fact with ``None``.

    Facts are tried from the last to the first, each against those not yet removed, so the remaining
    facts are equivalent to all of them. Time is linear in the number of facts. An undecided fact is
    not redundant.

    Args:
        facts: sympy conditions, the most important first; ranges are facts like ``s0 >= 2``.
        removable: for each fact whether it may be removed; by default every fact may.
        is_range: for each fact whether it is the bound of one variable that is removed only if one
            fact, which has the variable with the factor 1 or -1, and bounds give it; by default none.
        example: values of symbols at which all facts hold. From there a counterexample is often
            found, which takes a tenth of the time of a failing proof.
        work: counts the work done.
    """
    work = work or WorkCounter()
    index = FactIndex(facts, work)
    counterexamples = Counterexamples(index.table, index.parts, example or {}, work)
    left = set(range(len(facts)))
    removed: dict[int, tuple[int, ...] | None] = {}
    for at in reversed(range(len(facts))):
        if removable is not None and not removable[at]:
            continue
        if counterexamples.violates(at, left):
            continue
        reasons, parts = None, index.parts[at]
        if is_range is not None and is_range[at]:
            reasons = index.bounding(parts[0], at, is_solved=True) if len(parts) == 1 else None
            follows = reasons is not None
        else:
            follows = index.implies(parts, without=at)
        if follows:
            index.remove(at)
            left.remove(at)
            removed[at] = reasons
    return dict(reversed(removed.items()))


def conflict(
    facts: Sequence[sympy.Basic], new: sympy.Basic, *, work: WorkCounter | None = None
) -> tuple[int, ...] | None:
    """Positions of a minimal set of facts that contradict a condition, in ascending order.

    Empty if the condition contradicts itself; ``None`` if no contradiction was found.
    """
    index = FactIndex(facts, work or WorkCounter())
    parts = index.table.condition(new)
    for limit in (MAX_NEIGHBOURS, MAX_NEIGHBOURS * WIDER_SEARCH_FACTOR):
        found = index.near(parts, None, limit)

        def suffices(used: Container[int], found: Any = found) -> bool:
            index.refuter.begin_question()
            return index.refuter.contradicts([*parts, *(part for at, part in found if at in used)])

        positions = dict.fromkeys(at for at, _ in found)
        if suffices(positions):
            return _minimal(reversed(positions), suffices)
    return None


def _minimal(
    positions: Iterable[int], suffices: Callable[[Container[int]], bool]
) -> tuple[int, ...]:
    """The sorted positions that are left when each, in turn, is removed if the others suffice."""
    order = list(positions)
    needed = set(order)
    for at in order:
        if suffices(needed - {at}):
            needed.remove(at)
    return tuple(sorted(needed))


class _Entry(NamedTuple):
    """A bound on one linear combination; entries sort from the tightest to the loosest."""

    bound: Number
    is_loose: bool
    """Whether the inequality is not strict."""
    at: int
    part: int


class FactIndex:
    """An index of facts by the variables and symbols that occur in them."""

    def __init__(self, facts: Iterable[sympy.Basic], work: WorkCounter) -> None:
        self.table = AtomTable()
        self.work = work
        self.refuter = Refuter(self.table, work)
        self.parts: list[tuple[Part, ...]] = []
        self._tightest: dict[tuple[tuple[Mono, int], ...], list[_Entry]] = {}
        self._directions: dict[tuple[Mono, bool], dict[tuple[tuple[Mono, int], ...], None]] = {}
        self._of_symbol: dict[int, dict[tuple[int, int], None]] = {}
        self._never: dict[int, None] = {}
        for fact in facts:
            self.add(fact)

    def add(self, fact: sympy.Basic) -> int:
        """Add a fact to the index; returns its position."""
        at, parts = len(self.parts), self.table.condition(fact)
        self.parts.append(parts)
        if FALSE[0] in parts:
            self._never[at] = None
        for number, part in enumerate(parts):
            for row in rows_of(part):
                entry = _Entry(row.bound, not row.strict, at, number)
                insort(self._tightest.setdefault(row.coeffs, []), entry)
                if len(row.coeffs) > 1:
                    for mono, c in row.coeffs:
                        self._directions.setdefault((mono, c > 0), {})[row.coeffs] = None
            for symbol in self._deep_symbols(part):
                self._of_symbol.setdefault(symbol, {})[at, number] = None
        return at

    def remove(self, at: int) -> None:
        """Remove a fact from the index."""
        self._never.pop(at, None)
        for number, part in enumerate(self.parts[at]):
            for row in rows_of(part):
                entries = self._tightest[row.coeffs]
                del entries[bisect_left(entries, _Entry(row.bound, not row.strict, at, number))]
                if not entries:
                    for mono, c in row.coeffs if len(row.coeffs) > 1 else ():
                        del self._directions[mono, c > 0][row.coeffs]
                    del self._tightest[row.coeffs]
            for symbol in self._deep_symbols(part):
                del self._of_symbol[symbol][at, number]

    def _deep_symbols(self, part: Part) -> list[int]:
        """The symbols inside functions, products and disjunctions of a part."""
        if isinstance(part, Either):
            return sorted({s for row in all_rows(part) for s in self.table.symbols_of(row.coeffs)})
        is_plain = all(self.table.is_symbol(mono) for mono, _ in part.coeffs)
        return [] if is_plain else sorted(self.table.symbols_of(part.coeffs))

    def implies_by_bounds(self, parts: Sequence[Part]) -> bool:
        """Whether a condition follows from the bounds of its variables alone, by interval arithmetic."""
        return self._is_within(parts, range(len(self.parts)), {})

    def _is_within(
        self, parts: Sequence[Part], usable: Container[int], used: dict[int, None]
    ) -> bool:
        """Whether a condition follows from bounds.

        Args:
            parts: the condition.
            usable: positions of the facts that may be used.
            used: gets the positions of the facts whose bounds were looked at.
        """

        def bound(coeffs: tuple[tuple[Mono, int], ...]) -> Number | None:
            for entry in self._tightest.get(coeffs, ()):
                if entry.at in usable:
                    used[entry.at] = None
                    return entry.bound
            return None

        def bounds_of(mono: Mono) -> Interval:
            least, most = bound(((mono, -1),)), bound(((mono, 1),))
            return None if least is None else -least, most

        intervals = Intervals(self.table, bounds_of)
        return all(intervals.refutes(opposite(self.table, [part])) for part in parts)

    def _reasons_by_bounds(self, parts: Sequence[Part]) -> tuple[int, ...] | None:
        """Positions of a minimal set of facts whose bounds imply a condition; ``None``: they do not."""
        used: dict[int, None] = {}
        if not self._is_within(parts, range(len(self.parts)), used):
            return None
        return _minimal(used, lambda fewer: self._is_within(parts, fewer, {}))

    def implies(self, parts: Sequence[Part], *, without: int | None) -> bool:
        """Whether a condition follows from the facts except the one at position ``without``."""
        self.refuter.begin_question()
        for part in parts:
            if self.bounding(part, without) is not None:
                continue
            wrong = opposite(self.table, [part])
            if not self._refuted(wrong, self.near(wrong, without, MAX_NEIGHBOURS)):
                return False
        return True

    def bounding(
        self, part: Part, without: int | None, *, is_solved: bool = False
    ) -> tuple[int, ...] | None:
        """Positions of one fact, and of bounds of its other variables, that give a bound of a variable.

        The fact has the variable with any factor, or with 1 or -1 if ``is_solved``. Most ranges that a
        ``ShapeEnv`` derives from guards follow so, without a linear program.
        """
        if not isinstance(part, Row) or len(part.coeffs) != 1:
            return None
        ((mono, sign),) = part.coeffs
        for coeffs in self.with_variable(mono, sign > 0):
            if is_solved and abs(dict(coeffs)[mono]) != 1:
                continue
            factors = {coeffs: 1} | {
                ((other, -1 if c > 0 else 1),): abs(c) for other, c in coeffs if other != mono
            }
            self.work.neighbours += 1
            entries = [(self.tightest(key, without), factor) for key, factor in factors.items()]
            known = [(entry, factor) for entry, factor in entries if entry is not None]
            if len(known) < len(entries):
                continue
            total = sum(factor * entry.bound for entry, factor in known)
            limit: Poly = {mono: sign, (): -Fraction(total) / abs(dict(coeffs)[mono])}
            (found,) = self.table.row(limit, not all(entry.is_loose for entry, _ in known))
            assert isinstance(found, Row)
            if (found.bound, not found.strict) <= (part.bound, not part.strict):
                return tuple(entry.at for entry, _ in known)
        return None

    def reasons(self, parts: Sequence[Part]) -> tuple[int, ...] | None:
        """Positions of a minimal set of facts from which a condition follows; ``None``: undecided.

        Minimal: without any one of them the prover finds no proof. Facts are left out one by one,
        the farthest first.
        """
        asked: list[tuple[tuple[Part, ...], list[tuple[int, Part]]]] = []
        bounding: set[int] = set()
        self.refuter.begin_question()
        for part in parts:
            wrong = opposite(self.table, [part])
            near = self.near(wrong, None, MAX_NEIGHBOURS)
            if self._refuted(wrong, near):
                asked.append((wrong, near))
            elif (found := self.bounding(part, None)) is not None:
                bounding.update(found)
            else:
                return self._reasons_by_bounds(parts)

        def suffices(used: Container[int]) -> bool:
            self.refuter.begin_question()
            return all(self._refuted(w, [n for n in near if n[0] in used]) for w, near in asked)

        positions = dict.fromkeys(at for _, near in asked for at, _ in near)
        return tuple(sorted(bounding.union(_minimal(reversed(positions), suffices))))

    def _refuted(self, wrong: tuple[Part, ...], near: Iterable[tuple[int, Part]]) -> bool:
        """Whether a condition contradicts facts."""
        facts = [part for _, part in near]
        # Each option is refuted separately, so that its equalities can replace symbols.
        return all(self.refuter.contradicts([*option, *facts]) for option in options_of(wrong))

    # --- neighbours ----------------------------------------------------------------------------

    def near(
        self, parts: Sequence[Part], without: int | None, limit: int
    ) -> list[tuple[int, Part]]:
        """The facts that can take part in a contradiction with a condition, nearest first.

        In a contradiction every variable of a row cancels against a row that has it with the opposite
        sign. The search is breadth-first over these pairs of variable and sign.
        """
        search = _Search(self, without, limit)
        search.found += [(at, FALSE[0]) for at in self._never if at != without]
        for part in parts:
            search.reach(part)
        search.run()
        self.work.neighbours += search.looked_at
        return search.found

    def tightest(self, coeffs: tuple[tuple[Mono, int], ...], without: int | None) -> _Entry | None:
        """The tightest bound on a linear combination."""
        entries = self._tightest.get(coeffs, ())
        return next((entry for entry in entries if entry.at != without), None)

    def with_variable(self, mono: Mono, positive: bool) -> Iterable[tuple[tuple[Mono, int], ...]]:
        """Linear combinations of several variables that have this one with this sign."""
        return islice(self._directions.get((mono, positive), ()), MAX_LOOKED_AT)

    def of_symbol(self, symbol: int) -> Iterable[tuple[int, int]]:
        """Parts that have the symbol inside a function, a product or a disjunction."""
        return islice(self._of_symbol.get(symbol, ()), MAX_LOOKED_AT)


class _Search:
    """A breadth-first search for the facts that can contradict a condition."""

    def __init__(self, facts: FactIndex, without: int | None, limit: int) -> None:
        self.facts = facts
        self.table = facts.table
        self.without = without
        self.limit = limit
        self.choices_left = MAX_CHOICES
        self.looked_at = 0
        self.found: list[tuple[int, Part]] = []
        self._taken: set[tuple[int, int]] = set()
        self._requested: dict[tuple[Mono, bool], None] = {}
        self._next: list[tuple[Mono, bool]] = []
        self._symbols: set[int] = set()

    def reach(self, part: Part) -> None:
        """Request rows in which the variables of a part have the opposite sign."""
        for key in _cancelling(part):
            self._request(key)

    def _request(self, key: tuple[Mono, bool]) -> None:
        if key not in self._requested:
            self._requested[key] = None
            self._next.append(key)

    def run(self) -> None:
        """Search level by level; facts that add the fewest new variables come first."""
        while self._next and self.limit > 0:
            level, self._next = self._next, []
            candidates: dict[tuple[int, int], None] = {}
            for mono, positive in level:
                self._bound(mono, positive)
                candidates.update(dict.fromkeys(self._around(mono, positive)))
            ranked = [(self._new(at, number), at, number) for at, number in candidates]
            ranked.sort(key=lambda item: item[0])  # stable: then in the order of their variables
            for _, at, number in ranked:
                self._take(at, number)
        while self._next:  # bounds of the variables of the last facts
            level, self._next = self._next, []
            for mono, positive in level:
                self._bound(mono, positive)
                self._request_inside(mono)

    def _bound(self, mono: Mono, positive: bool) -> None:
        entry = self.facts.tightest(((mono, 1 if positive else -1),), self.without)
        if entry is not None and (entry.at, entry.part) not in self._taken:
            self._taken.add((entry.at, entry.part))
            self.found.append((entry.at, self.facts.parts[entry.at][entry.part]))

    def _around(self, mono: Mono, positive: bool) -> Iterator[tuple[int, int]]:
        for coeffs in self.facts.with_variable(mono, positive):
            self.looked_at += 1
            entry = self.facts.tightest(coeffs, self.without)
            if entry is not None and (entry.at, entry.part) not in self._taken:
                yield entry.at, entry.part
        self._request_inside(mono)
        for symbol in sorted(self.table.symbols_of([(mono, 1)]) - self._symbols):
            self._symbols.add(symbol)
            for key in self.facts.of_symbol(symbol):
                self.looked_at += 1
                if key[0] != self.without and key not in self._taken:
                    yield key

    def _request_inside(self, mono: Mono) -> None:
        for inner in self.table.inside(mono):
            self._request((inner, True))
            self._request((inner, False))

    def _new(self, at: int, number: int) -> int:
        return sum(key not in self._requested for key in _cancelling(self.facts.parts[at][number]))

    def _take(self, at: int, number: int) -> None:
        part = self.facts.parts[at][number]
        if self.limit == 0 or (at, number) in self._taken:
            return
        if isinstance(part, Either):
            if self.choices_left == 0:
                return
            self.choices_left -= 1
        self.limit -= 1
        self._taken.add((at, number))
        self.found.append((at, part))
        self.reach(part)


def _cancelling(part: Part) -> list[tuple[Mono, bool]]:
    """The pairs of variable and sign that would cancel the variables of a part."""
    return [(mono, c < 0) for row in all_rows(part) for mono, c in row.coeffs]
