"""Exact linear programs, compared with z3."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import z3
from hypothesis import given
from hypothesis import strategies as st

from torch_fakeify.prover.simplex import Row, solve, useful_rows

MONOS = [(0,), (1,), (2,), (0, 1)]


def rows_of(strict: st.SearchStrategy[bool]) -> st.SearchStrategy[list[Row]]:
    """Draw rows over four variables, with small bounds, so that contradictions are frequent."""
    factors = st.integers(-3, 3).filter(bool)
    coeffs = st.dictionaries(st.sampled_from(MONOS), factors, max_size=3)
    bounds = st.one_of(st.integers(-4, 4), st.fractions(-2, 2, max_denominator=3))
    row = st.builds(lambda c, b, s: Row(tuple(sorted(c.items())), b, s), coeffs, bounds, strict)
    return st.lists(row, max_size=9)


def as_z3(row: Row) -> Any:
    """Return the row over z3's reals."""
    total = z3.RealVal(0) + sum(c * z3.Real(str(mono)) for mono, c in row.coeffs)
    bound = z3.RealVal(str(row.bound))
    return total < bound if row.strict else total <= bound


def holds_together(rows: list[Row]) -> bool:
    """Return the verdict of z3."""
    solver = z3.Solver()
    solver.add(*map(as_z3, rows))
    return solver.check() == z3.sat


@given(rows_of(st.booleans()))
def test_verdict_is_z3s(rows: list[Row]) -> None:
    """Feasibility, with and without strict rows, equals the verdict of z3."""
    found = solve(rows, max_pivots=10_000)
    assert (found.verdict == "feasible") == holds_together(rows)
    assert found.verdict != "undecided"


@given(rows_of(st.just(False)))
def test_point_satisfies_the_rows(rows: list[Row]) -> None:
    """The point of a feasible system satisfies each row exactly."""
    found = solve(rows, max_pivots=10_000)
    if found.verdict == "feasible":
        for row in rows:
            assert sum(c * found.point[mono] for mono, c in row.coeffs) <= row.bound


@given(rows_of(st.booleans()))
def test_useful_rows_decide_alone(rows: list[Row]) -> None:
    """Rows that are left out have no part in a contradiction."""
    assert holds_together(useful_rows(rows)) == holds_together(rows)


@given(rows_of(st.booleans()), rows_of(st.booleans()))
def test_useful_rows_include_those_for_later_rows(rows: list[Row], later: list[Row]) -> None:
    """Rows that contradict only together with later ones remain."""
    useful = useful_rows(rows, later)
    assert holds_together([*useful, *later]) == holds_together([*rows, *later])


def test_useful_rows_drop_what_cannot_cancel() -> None:
    """A chain with an unbounded end is removed completely."""
    chain = [
        Row((((0,), 1), ((1,), -1)), 0),
        Row((((1,), 1), ((2,), -1)), 0),
        Row((((0,), -1),), 0),
    ]
    assert useful_rows(chain) == []
    assert useful_rows(chain, [Row((((2,), 1),), 0)]) == chain


@pytest.mark.parametrize("allowed", [0, 1])
def test_pivots_are_limited(allowed: int) -> None:
    """A system that needs more pivots than allowed is undecided, not feasible."""
    rows = [
        Row((((0,), 1), ((1,), 1)), -1),
        Row((((0,), -1), ((1,), 1)), -1),
        Row((((0,), 1), ((1,), -2)), 2),
    ]
    assert solve(rows, max_pivots=allowed).verdict == "undecided"
    assert solve(rows, max_pivots=10).verdict != "undecided"


def test_numbers_are_exact() -> None:
    """A gap far below the precision of floats counts."""
    tiny = Fraction(1, 10**40)
    third = Row((((0,), 3), ((1,), -1)), 0)
    rows = [third, Row((((1,), 1),), 1), Row((((0,), -3),), -1 - tiny)]
    assert solve(rows, max_pivots=10).verdict == "infeasible"
    assert solve([*rows[:2], Row((((0,), -3),), -1)], max_pivots=10).verdict == "feasible"
