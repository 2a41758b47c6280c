"""Align two sequences: find a long common subsequence in bounded work.

Method: the greedy algorithm of E. W. Myers, *An O(ND) Difference Algorithm and Its Variations*
(Algorithmica 1, 1986), which is linear where few items differ. Where many differ, it restarts at the
furthest position reached if most items before it were equal; else the sequences are split at their
longest common run, which a suffix automaton finds in linear time (Blumer et al., *The smallest
automaton recognizing the subwords of a text*, 1985).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

MOST_EDITS = 256
"""Most removed and inserted items for which a longest common subsequence is found."""
STEPS = 3_000_000
"""Default steps of the search, besides 20 for each item; they take a second or two."""
_STRIDE = 64
"""Items that are compared in one operation."""


class Alignment(NamedTuple):
    """The matched items of two sequences."""

    pairs: list[tuple[int, int]]
    """Positions of equal items in both sequences, strictly increasing on both sides."""
    unsearched: tuple[int, int]
    """Number of items on each side that were not searched, as the steps were used up."""
    steps: int
    """The steps of the search."""


class _Range(NamedTuple):
    """A part of both sequences, ends exclusive."""

    a: int
    a_end: int
    b: int
    b_end: int


def align(a: Sequence[Hashable], b: Sequence[Hashable], *, steps: int | None = None) -> Alignment:
    """Find a long common subsequence of two sequences in at most about ``steps`` steps.

    It is a longest one if at most `MOST_EDITS` items that occur on both sides have no partner.
    """
    common = set(a).intersection(b)
    numbers = {key: i for i, key in enumerate(common)}
    # Items that occur on one side only are removed first.
    places = [[i for i, key in enumerate(side) if key in numbers] for side in (a, b)]
    search = _Search(
        [numbers[a[i]] for i in places[0]],
        [numbers[b[i]] for i in places[1]],
        STEPS + 20 * (len(a) + len(b)) if steps is None else steps,
    )
    search.run()
    pairs = sorted((places[0][i], places[1][j]) for i, j in search.pairs)
    return Alignment(pairs, search.unsearched, search.steps)


class _Search:
    """The search for pairs, part by part."""

    def __init__(self, a: list[int], b: list[int], most: int) -> None:
        self._a, self._b = a, b
        self._most = most
        self.steps = 0
        self.pairs: list[tuple[int, int]] = []
        self.unsearched = (0, 0)

    def run(self) -> None:
        """Find pairs until the steps are used up."""
        pending = [_Range(0, len(self._a), 0, len(self._b))]
        while pending:
            part = self._without_ends(pending.pop())
            if part.a == part.a_end or part.b == part.b_end:
                continue
            if self.steps > self._most:
                left_a, left_b = self.unsearched
                self.unsearched = (left_a + part.a_end - part.a, left_b + part.b_end - part.b)
                continue
            i, j = self._by_edits(part)
            if (i, j) != (part.a, part.b):
                pending.append(_Range(i, part.a_end, j, part.b_end))
                continue
            i, j, length = self._longest_run(part)
            if length:
                self._pair(i, j, length)
                pending.append(_Range(part.a, i, part.b, j))
                pending.append(_Range(i + length, part.a_end, j + length, part.b_end))

    def _pair(self, i: int, j: int, length: int) -> None:
        self.pairs.extend(zip(range(i, i + length), range(j, j + length), strict=True))

    def _common(self, i: int, j: int, length: int) -> int:
        """Return how many items from ``i`` and ``j`` on are equal, up to ``length``."""
        a, b = self._a, self._b
        done = 0
        while done < length and (
            a[i + done : i + done + _STRIDE] == b[j + done : j + done + _STRIDE]
        ):
            done += _STRIDE
        done = min(done, length)
        while done < length and a[i + done] == b[j + done]:
            done += 1
        return done

    def _without_ends(self, part: _Range) -> _Range:
        """Pair the common beginning and end of a part, and return the rest."""
        a, a_end, b, b_end = part
        start = self._common(a, b, min(a_end - a, b_end - b))
        self._pair(a, b, start)
        a, b = a + start, b + start
        end = 0
        most = min(a_end - a, b_end - b)
        while end < most and self._a[a_end - end - 1] == self._b[b_end - end - 1]:
            end += 1
        self._pair(a_end - end, b_end - end, end)
        self.steps += 1 + (start + end) // _STRIDE
        return _Range(a, a_end - end, b, b_end - end)

    # --- few differences --------------------------------------------------------------------------

    def _by_edits(self, part: _Range) -> tuple[int, int]:
        """Pair by the fewest edits; return the end of the pairs, or the start if too few are equal."""
        n, m = part.a_end - part.a, part.b_end - part.b
        trace = [{0: self._run(part, 0, 0)}]
        for edits in range(1, MOST_EDITS + 1):
            before, now = trace[-1], dict[int, int]()
            for diagonal in range(-edits, edits + 1, 2):
                i = max(before.get(diagonal + 1, -1), before.get(diagonal - 1, -2) + 1)
                j = i - diagonal
                if 0 <= i <= n and 0 <= j <= m:
                    now[diagonal] = i = self._run(part, i, j)
                    if i == n and i - diagonal == m:
                        self._walk_back(part, [*trace, now], diagonal)
                        return part.a_end, part.b_end
            trace.append(now)
            self.steps += edits
        diagonal, i = max(trace[-1].items(), key=lambda item: 2 * item[1] - item[0])
        far = 2 * i - diagonal
        if far < 4 * MOST_EDITS:  # less than three quarters of the items are equal
            return part.a, part.b
        # What is left after the last pair is searched again, with what follows.
        return self._walk_back(part, trace, diagonal)

    def _run(self, part: _Range, i: int, j: int) -> int:
        """Return the end of the equal items from ``i`` and ``j`` of a part, on the first side."""
        i, j = part.a + i, part.b + j
        length = min(part.a_end - i, part.b_end - j)
        if not length or self._a[i] != self._b[j]:
            return i - part.a
        run = self._common(i, j, length)
        self.steps += run // _STRIDE
        return i + run - part.a

    def _walk_back(
        self, part: _Range, trace: list[dict[int, int]], diagonal: int
    ) -> tuple[int, int]:
        """Pair the equal items of the path that ends on a diagonal; return the end of the last pair."""
        i = trace[-1][diagonal]
        last: tuple[int, int] | None = None
        for before in reversed(trace[:-1]):
            down, right = before.get(diagonal + 1, -1), before.get(diagonal - 1, -2) + 1
            begin = max(down, right)
            self._pair(part.a + begin, part.b + begin - diagonal, i - begin)
            if last is None and i > begin:
                last = part.a + i, part.b + i - diagonal
            i, diagonal = (down, diagonal + 1) if down >= right else (right - 1, diagonal - 1)
        self._pair(part.a, part.b, i)
        return last or (part.a + i, part.b + i)

    # --- many differences -------------------------------------------------------------------------

    def _longest_run(self, part: _Range) -> tuple[int, int, int]:
        """Return the starts of the first longest common run on both sides, and its length."""
        automaton = _Automaton(self._b[part.b : part.b_end])
        best = (part.a, part.b, 0)
        state = length = 0
        for i in range(part.a, part.a_end):
            item = self._a[i]
            while state and item not in automaton.next[state]:
                state = automaton.link[state]
                length = automaton.length[state]
            if item in automaton.next[state]:
                state = automaton.next[state][item]
                length += 1
            if length > best[2]:
                best = (i + 1 - length, part.b + automaton.end[state] + 1 - length, length)
        self.steps += 4 * (part.a_end - part.a + part.b_end - part.b)
        return best


class _Automaton:
    """The suffix automaton of a sequence: its states are the sets of runs with the same ends."""

    def __init__(self, items: Sequence[int]) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.end = [-1]
        """Where a run of the state first ends."""
        last = 0
        for i, item in enumerate(items):
            new = self._state({}, 0, self.length[last] + 1, i)
            state = last
            while state >= 0 and item not in self.next[state]:
                self.next[state][item] = new
                state = self.link[state]
            if state >= 0:
                self.link[new] = self._suffix(state, item)
            last = new

    def _state(self, after: dict[int, int], link: int, length: int, end: int) -> int:
        self.next.append(after)
        self.link.append(link)
        self.length.append(length)
        self.end.append(end)
        return len(self.next) - 1

    def _suffix(self, state: int, item: int) -> int:
        """Return the state of the longest earlier run that ends with ``item``."""
        target = self.next[state][item]
        if self.length[target] == self.length[state] + 1:
            return target
        clone = self._state(
            dict(self.next[target]), self.link[target], self.length[state] + 1, self.end[target]
        )
        self.link[target] = clone
        while state >= 0 and self.next[state].get(item) == target:
            self.next[state][item] = clone
            state = self.link[state]
        return clone
