"""Torch's own operators beside their fake kernels: what differs is known."""

from __future__ import annotations

import pytest
import torch
from checked_operators import INFOS, KNOWN, check

PARTS = 12


def test_operators_that_do_not_differ_have_no_difference() -> None:
    """A few entries of each kind, all of whose samples are compared."""
    names = {"addmm", "cat", "index_select", "sort", "std", "unfold"}
    infos = [each for each in INFOS if each.name in names]
    found = check(infos, samples=3, runs=2)
    assert found.differences == {}
    assert not found.not_compared
    assert set(found.compared) == {each.full_name for each in infos}


@pytest.mark.sweep
@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the table is that of torch 2.13"
)
def test_what_is_known_is_still_so() -> None:
    """Each difference of the table is found, and no other one of these operators."""
    names = {
        "item",
        "nn.functional.embedding_bag",
        "nn.functional.max_unpool2d",
        "NumpyMulScalarCustomOp",
    }
    found = check([each for each in INFOS if each.name in names], samples=40, runs=2)
    assert found.differences.keys() == KNOWN


@pytest.mark.sweep
@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_all_operators(part: int) -> None:
    """Nothing differs that is not known, and most samples are compared."""
    found = check(INFOS[part::PARTS], samples=12, runs=3)
    assert found.differences.keys() <= KNOWN
    assert found.compared.total() > 10 * found.not_compared.total()
