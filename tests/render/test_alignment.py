"""The alignment of two sequences: as long as possible, in few steps where they are nearly equal."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torch_fakeify.render import alignment
from torch_fakeify.render.alignment import Alignment, align

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ITEMS = st.lists(st.integers(0, 4), max_size=30)
LAYER = ["linear", "gelu", "linear", "add", "norm", "mul", "add"]


def check(a: Sequence[object], b: Sequence[object], found: Alignment) -> None:
    """Fail if the pairs are no common subsequence."""
    assert all(a[i] == b[j] for i, j in found.pairs)
    assert all(p[0] < q[0] and p[1] < q[1] for p, q in pairwise(found.pairs))


def longest(a: list[int], b: list[int]) -> int:
    """Return the length of the longest common subsequence, by dynamic programming."""
    row = [0] * (len(b) + 1)
    for x in a:
        now = [0]
        for j, y in enumerate(b):
            now.append(row[j] + 1 if x == y else max(row[j + 1], now[j]))
        row = now
    return row[-1]


@given(ITEMS, ITEMS)
def test_the_common_subsequence_is_a_longest_one(a: list[int], b: list[int]) -> None:
    """Where few items differ, no common subsequence is longer."""
    found = align(a, b)
    check(a, b, found)
    assert len(found.pairs) == longest(a, b)
    assert found.unsearched == (0, 0)


@given(ITEMS, ITEMS, st.integers(1, 4))
@example([2, 0, 1, 0, 0, 1, 0], [0, 2, 0, 1, 1], 2)
def test_with_many_differences_no_pair_is_left(a: list[int], b: list[int], edits: int) -> None:
    """With many differences, no items between two pairs are equal."""
    with mock.patch.object(alignment, "MOST_EDITS", edits):
        found = align(a, b)
    check(a, b, found)
    assert found.unsearched == (0, 0)
    ends = [(-1, -1), *found.pairs, (len(a), len(b))]
    for (i, j), (i_end, j_end) in pairwise(ends):
        assert not set(a[i + 1 : i_end]) & set(b[j + 1 : j_end])


@given(ITEMS, ITEMS, st.integers(0, 60))
def test_pairs_beyond_the_limit_of_steps_are_counted(
    a: list[int], b: list[int], steps: int
) -> None:
    """The pairs that are found are right, and the items that were not searched are counted."""
    with mock.patch.object(alignment, "MOST_EDITS", 1):
        found = align(a, b, steps=steps)
    check(a, b, found)
    left = len(a) - len(found.pairs), len(b) - len(found.pairs)
    assert found.unsearched[0] <= left[0]
    assert found.unsearched[1] <= left[1]
    if found.unsearched == (0, 0):
        assert len(found.pairs) >= min(1, longest(a, b))


MIDDLE = 30_000
EDITS: dict[str, tuple[Callable[[list[str]], list[str]], int]] = {
    "changed": (lambda a: [*a[:MIDDLE], "other", *a[MIDDLE + 1 :]], 1),
    "inserted": (lambda a: [*a[:MIDDLE], "mul", *a[MIDDLE:]], 0),
    "removed": (lambda a: [*a[:MIDDLE], *a[MIDDLE + 1 :]], 1),
    "moved": (lambda a: [*a[:7], *a[8:MIDDLE], a[7], *a[MIDDLE:]], 1),
    "100 layers removed": (lambda a: [x for i, x in enumerate(a) if i // 7 % 85], 707),
    "every layer changed": (lambda a: ["tanh" if x == "gelu" else x for x in a], 8572),
    "every layer longer": (lambda a: [y for x in a for y in ([x] * (1 + (x == "gelu")))], 0),
}


@pytest.mark.parametrize("what", EDITS)
def test_graphs_of_repeated_layers_take_steps_in_proportion(what: str) -> None:
    """The steps for an item do not grow with its occurrences, and no pair is missed."""
    edit, lost = EDITS[what]
    a = (LAYER * 8572)[:60_000]
    b = edit(a)
    found = align(a, b)
    check(a, b, found)
    assert len(found.pairs) == len(a) - lost
    assert found.unsearched == (0, 0)
    assert found.steps < (20 if what == "every layer longer" else 1) * len(a)


def test_swapped_halves_have_the_longer_one_in_common() -> None:
    """The longer half is found as one run, in a number of steps in proportion to the length."""
    first = [f"a{i % 7}" for i in range(30_001)]
    second = [f"b{i % 9}" for i in range(30_000)]
    found = align(first + second, second + first)
    assert found.pairs == [(i, 30_000 + i) for i in range(30_001)]
    assert found.steps < 12 * 60_000


def test_sequences_without_a_common_order_take_bounded_steps() -> None:
    """The steps of the search are bounded, and what it leaves is counted as not searched."""
    a = [(i * i // 7) % 50 for i in range(20_000)]
    b = [(i * i // 11 + i) % 50 for i in range(20_000)]
    found = align(a, b, steps=300_000)
    check(a, b, found)
    assert found.steps < 700_000
    assert sum(found.unsearched) > 10_000


def test_sequences_without_common_items_cost_nothing() -> None:
    """Two such sequences are aligned without a search."""
    found = align(range(50_000), range(50_000, 100_000))
    assert found == Alignment([], (0, 0), found.steps)
    assert found.steps < 10
