"""The search for formulas of integers: what it finds has the values, and simple formulas are found."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from torch_fakeify.fake_kernels.evaluating import Evaluation
from torch_fakeify.fake_kernels.integers import IntegerSearch
from torch_fakeify.fake_kernels.observed import TensorFacts
from torch_fakeify.records.fake_kernel import Arg, Binary, Integer, Number, Size

ROWS = 40
X, K, P = Size(Arg("x"), 0), Number(Arg("k")), Number(Arg("p"))
ATOMS = (X, Size(Arg("x"), 1), K, P)
LEAVES = st.sampled_from([*ATOMS, Integer(1), Integer(2)])


def evaluations(seed: int, rows: int = ROWS) -> list[Evaluation]:
    """Return random calls."""
    draw = np.random.default_rng(seed)
    return [
        Evaluation({
            "x": TensorFacts(tuple(draw.integers(1, 40, 2).tolist()), (1, 1), 0, "int8", "cpu"),
            "k": int(draw.integers(1, 6)),
            "p": int(draw.integers(0, 4)),
        })
        for _ in range(rows)
    ]  # fmt: skip


def values(part: Any, calls: list[Evaluation]) -> np.ndarray[Any, Any]:
    """Return the values of a formula."""
    return np.array([each.int(part) for each in calls], np.int64)


def search(calls: list[Evaluation]) -> IntegerSearch:
    """Return a search over the sizes and numbers of calls."""
    atoms = [(part, values(part, calls)) for part in ATOMS]
    return IntegerSearch(atoms, len(calls), ([X, ATOMS[1]], [K, P]))


@given(op=st.sampled_from(["+", "-", "*", "min", "max"]), left=LEAVES, right=LEAVES, more=LEAVES)
@settings(max_examples=25)
def test_law_what_is_found_has_the_values(op: str, left: Any, right: Any, more: Any) -> None:
    """A formula with two operations is found; calls that refute the found one lead to one that none does."""
    part = Binary(op, Binary("*", left, more), right)  # type: ignore[arg-type]
    calls, others = evaluations(0), evaluations(1, 200)
    for _ in range(20):
        found = search(calls).find(values(part, calls))
        assert found is not None
        assert values(found, calls).tolist() == values(part, calls).tolist()
        wrong = values(found, others) != values(part, others)
        if not wrong.any():
            return
        calls = [
            *calls,
            *[each for each, is_wrong in zip(others, wrong, strict=True) if is_wrong][:5],
        ]
    raise AssertionError(f"{part} was not found")


@pytest.mark.parametrize("op", ["//", "ceil"])
def test_windows_are_found(op: str) -> None:
    """The number of windows with padding, a gap and a step."""
    span = Binary("*", P, Binary("-", K, Integer(1)))
    room = Binary("-", Binary("-", Binary("+", X, Binary("*", Integer(2), P)), span), Integer(1))
    part = Binary("+", Binary(op, room, K), Integer(1))  # type: ignore[arg-type]
    calls, others = evaluations(0), evaluations(1, 200)
    found = search(calls).find(values(part, calls))
    assert found is not None
    assert values(found, others).tolist() == values(part, others).tolist()


def test_noise_has_no_formula() -> None:
    """Numbers that follow from nothing are not explained by something."""
    calls = evaluations(0)
    noise = np.random.default_rng(5).integers(0, 1000, ROWS)
    assert search(calls).find(noise) is None
