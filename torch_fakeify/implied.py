"""Which facts about shape symbols follow from other facts, and which contradict each other.

A fact is a sympy condition over torch's symbols and functions; a value range is two facts. Every
answer "it follows" and "it contradicts" is sound: over the integers for integer symbols, over the
real numbers for all others. "It does not" may also mean that it was not found out: a question looks
at a bounded number of facts, the nearest ones, so that many facts cost what they weigh.

What sympy knows of a symbol besides integer or not (``positive=True``) is no fact here, beyond
what sympy itself makes of a condition: whoever leaves a fact out must have it from another fact. How a contradiction is found: `refutation`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from .polynomials import FALSE, Either, Terms, all_rows
from .refutation import Effort, Refuter, opposite

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import sympy

    from .polynomials import Part
    from .simplex import Mono, Number, Row

__all__ = ["Effort", "conflict", "implied", "redundant"]

MAX_NEIGHBOURS = 20
"""Facts with more than one variable that a question looks at; bounds of variables come on top."""

MAX_CHOICES = 4
"""Disjunctions among them."""

MAX_LOOKED_AT = 32
"""Facts looked at for the sake of one variable."""

WIDER = 4
"""`conflict` asks again with this many times the neighbours: it is one question, not one a fact."""


def redundant(
    facts: Sequence[sympy.Basic],
    *,
    removable: Sequence[bool] | None = None,
    effort: Effort | None = None,
) -> list[int]:
    """Positions of facts that follow from the facts that are left, in ascending order.

    The last fact is tried first, and each against all that are still there, so no two facts go
    for each other's sake: what is left says the same as all did. Time is linear in the number of
    facts. A fact stays where this is undecided.

    Args:
        facts: sympy conditions; ranges are facts like ``s0 >= 2``. What should rather stay
            stands before what should rather go.
        removable: for each fact whether it may be named; all may without it.
        effort: counts the steps of the work.
    """
    index = _Facts(facts, effort or Effort())
    gone: list[int] = []
    for at in reversed(range(len(facts))):
        if removable is not None and not removable[at]:
            continue
        if index.implies(index.parts[at], without=at):
            index.remove(at)
            gone.append(at)
    return gone[::-1]


def implied(
    premises: Sequence[sympy.Basic], conclusion: sympy.Basic, *, effort: Effort | None = None
) -> bool:
    """Whether a condition follows from others. False also says that it is not known.

    Facts are found from the condition on: a contradiction among facts that have nothing to do with
    it is not looked for.
    """
    index = _Facts(premises, effort or Effort())
    return index.implies(index.terms.condition(conclusion), without=None)


def conflict(
    facts: Sequence[sympy.Basic], new: sympy.Basic, *, effort: Effort | None = None
) -> tuple[int, ...] | None:
    """Positions of facts that contradict a condition, in ascending order.

    No position can be left out: without it, no contradiction is found. Empty if the condition
    contradicts itself; ``None`` if no contradiction was found.
    """
    index = _Facts(facts, effort or Effort())
    parts = index.terms.condition(new)
    for limit in (MAX_NEIGHBOURS, MAX_NEIGHBOURS * WIDER):
        found = index.near(parts, None, limit)
        if index.refuter.contradicts([*parts, *(part for _, part in found)]):
            return tuple(sorted(_needed(index.refuter, parts, found)))
    return None


def _needed(
    refuter: Refuter, parts: Sequence[Part], found: list[tuple[int, Part]]
) -> dict[int, None]:
    """The facts without which there is no contradiction; the farthest are tried first."""
    needed = dict.fromkeys(at for at, _ in found)
    for at in reversed(needed.copy()):
        left = [part for other, part in found if other in needed and other != at]
        if refuter.contradicts([*parts, *left]):
            del needed[at]
    return needed


class _Entry(NamedTuple):
    """One fact of a direction, the tightest first."""

    bound: Number
    is_loose: bool
    """Not strict."""
    at: int
    part: int


class _Facts:
    """Facts, and where to find those that have a variable."""

    def __init__(self, facts: Iterable[sympy.Basic], effort: Effort) -> None:
        self.terms = Terms()
        self.effort = effort
        self.refuter = Refuter(self.terms, effort)
        self.parts = [self.terms.condition(fact) for fact in facts]
        self._tightest: dict[tuple[tuple[Mono, int], ...], list[_Entry]] = {}
        self._directions: dict[tuple[Mono, bool], dict[tuple[tuple[Mono, int], ...], None]] = {}
        self._of_symbol: dict[int, dict[tuple[int, int], None]] = {}
        self._never = {at: None for at, parts in enumerate(self.parts) if FALSE[0] in parts}
        for at, parts in enumerate(self.parts):
            for number, part in enumerate(parts):
                self._insert(at, number, part)

    def _insert(self, at: int, number: int, part: Part) -> None:
        for row in _rows(part):
            entry = _Entry(row.bound, not row.strict, at, number)
            insort(self._tightest.setdefault(row.coeffs, []), entry)
            if len(row.coeffs) > 1:
                for mono, c in row.coeffs:
                    self._directions.setdefault((mono, c > 0), {})[row.coeffs] = None
        for symbol in self._deep_symbols(part):
            self._of_symbol.setdefault(symbol, {})[at, number] = None

    def remove(self, at: int) -> None:
        """Takes a fact out."""
        self._never.pop(at, None)
        for number, part in enumerate(self.parts[at]):
            for row in _rows(part):
                entries = self._tightest[row.coeffs]
                del entries[bisect_left(entries, _Entry(row.bound, not row.strict, at, number))]
                if not entries:
                    for mono, c in row.coeffs if len(row.coeffs) > 1 else ():
                        del self._directions[mono, c > 0][row.coeffs]
                    del self._tightest[row.coeffs]
            for symbol in self._deep_symbols(part):
                del self._of_symbol[symbol][at, number]

    def _deep_symbols(self, part: Part) -> list[int]:
        """The symbols of a part that may matter beyond the variables of its rows."""
        if isinstance(part, Either):
            return sorted({s for row in all_rows(part) for s in self.terms.symbols_of(row.coeffs)})
        is_plain = all(self.terms.is_symbol(mono) for mono, _ in part.coeffs)
        return [] if is_plain else sorted(self.terms.symbols_of(part.coeffs))

    def implies(self, parts: Sequence[Part], *, without: int | None) -> bool:
        """Whether a condition follows from the facts, all but one of them."""
        for part in parts:
            wrong = opposite(self.terms, [part])
            near = [p for _, p in self.near(wrong, without, MAX_NEIGHBOURS)]
            # An option of its own lets its equalities replace symbols.
            lone = wrong[0] if len(wrong) == 1 else None
            options = lone.options if isinstance(lone, Either) else (wrong,)
            if not all(self.refuter.contradicts([*option, *near]) for option in options):
                return False
        return True

    # --- neighbours ----------------------------------------------------------------------------

    def near(
        self, parts: Sequence[Part], without: int | None, limit: int
    ) -> list[tuple[int, Part]]:
        """The facts that can have a part in a contradiction with a condition, nearest first.

        In a contradiction every variable of a row cancels against another row, which has it with
        the other sign. So the way from fact to fact follows variables and signs, level by level.
        """
        search = _Search(self, without, limit)
        search.found += [(at, FALSE[0]) for at in self._never if at != without]
        for part in parts:
            search.reach(part)
        search.run()
        self.effort.neighbours += search.looked_at
        return search.found

    def tightest(
        self, coeffs: tuple[tuple[Mono, int], ...], without: int | None
    ) -> tuple[int, int] | None:
        """The fact that bounds a direction most, by its position and its part's."""
        for entry in self._tightest.get(coeffs, ()):
            if entry.at != without:
                return entry.at, entry.part
        return None

    def with_variable(self, mono: Mono, positive: bool) -> Iterable[tuple[tuple[Mono, int], ...]]:
        """Directions of more than one variable that have this one with this sign."""
        return islice(self._directions.get((mono, positive), ()), MAX_LOOKED_AT)

    def of_symbol(self, symbol: int) -> Iterable[tuple[int, int]]:
        """Parts that have the symbol inside of a function, a product or a disjunction."""
        return islice(self._of_symbol.get(symbol, ()), MAX_LOOKED_AT)


class _Search:
    """One walk from fact to fact."""

    def __init__(self, facts: _Facts, without: int | None, limit: int) -> None:
        self.facts = facts
        self.terms = facts.terms
        self.without = without
        self.limit = limit
        self.choices_left = MAX_CHOICES
        self.looked_at = 0
        self.found: list[tuple[int, Part]] = []
        self._taken: set[tuple[int, int]] = set()
        self._wanted: dict[tuple[Mono, bool], None] = {}
        self._next: list[tuple[Mono, bool]] = []
        self._symbols: set[int] = set()

    def reach(self, part: Part) -> None:
        """Asks for rows in which the variables of a part have the other sign."""
        for key in _wants(part):
            self._want(key)

    def _want(self, key: tuple[Mono, bool]) -> None:
        if key not in self._wanted:
            self._wanted[key] = None
            self._next.append(key)

    def run(self) -> None:
        """Level by level, those that bring the fewest new variables first."""
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
        while self._next:  # bounds of what the last facts have
            level, self._next = self._next, []
            for mono, positive in level:
                self._bound(mono, positive)
                self._want_inside(mono)

    def _bound(self, mono: Mono, positive: bool) -> None:
        key = self.facts.tightest(((mono, 1 if positive else -1),), self.without)
        if key is not None and key not in self._taken:
            self._taken.add(key)
            self.found.append((key[0], self.facts.parts[key[0]][key[1]]))

    def _around(self, mono: Mono, positive: bool) -> Iterator[tuple[int, int]]:
        for coeffs in self.facts.with_variable(mono, positive):
            self.looked_at += 1
            key = self.facts.tightest(coeffs, self.without)
            if key is not None and key not in self._taken:
                yield key
        self._want_inside(mono)
        for symbol in sorted(self.terms.symbols_of([(mono, 1)]) - self._symbols):
            self._symbols.add(symbol)
            for key in self.facts.of_symbol(symbol):
                self.looked_at += 1
                if key[0] != self.without and key not in self._taken:
                    yield key

    def _want_inside(self, mono: Mono) -> None:
        for inner in self.terms.inside(mono):
            self._want((inner, True))
            self._want((inner, False))

    def _new(self, at: int, number: int) -> int:
        return sum(key not in self._wanted for key in _wants(self.facts.parts[at][number]))

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


def _rows(part: Part) -> tuple[Row, ...]:
    """The rows that hold if a part does."""
    return () if isinstance(part, Either) else tuple(all_rows(part))


def _wants(part: Part) -> list[tuple[Mono, bool]]:
    """The variables and signs that would cancel those of a part."""
    return [(mono, c < 0) for row in all_rows(part) for mono, c in row.coeffs]
