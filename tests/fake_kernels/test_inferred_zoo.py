"""Kernels that are inferred for the operators of the zoo, beside the right ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from inferred_checks import facts, fake_facts, is_like
from operators import OPERATORS

import torch_fakeify as tfk

QUICK = (
    "blended", "converted", "joined", "loss", "picked", "pieces", "projected", "quantized", "spread",
    "suppressed", "turned", "windows",
)  # fmt: skip
"""Operators that cover what formulas can say; the others are inferred in the sweep."""


def check(name: str) -> None:
    """Infer a kernel from the samples, and hold it against the right one at other sizes."""
    operator = OPERATORS[name]
    kernel = tfk.infer_fake(operator.op, operator.samples())
    source = function_of(kernel.source)
    for args in operator.others():
        right = fake_facts(operator.true_fake, args)
        assert fake_facts(kernel, args) == right
        assert is_like(right, facts(operator.op(*copy.deepcopy(args))))
    for args in [*operator.samples(), *operator.others()]:
        assert fake_facts(source, args) == fake_facts(kernel, args)
    assert bool(kernel.desc.sizes) == operator.depends_on_data


def function_of(source: str) -> Any:
    """Return the function that a source defines, without registering it."""
    found: dict[str, Any] = {}
    lines = [line for line in source.splitlines() if not line.startswith("@")]
    exec("\n".join(lines), found)
    (made,) = [value for value in found.values() if callable(value) and not isinstance(value, type)]
    return made


@pytest.mark.parametrize("name", QUICK)
def test_an_inferred_kernel_is_the_right_one(name: str) -> None:
    """Its sizes, strides and dtypes are the right ones at other sizes, and its source does the same."""
    check(name)


@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted(set(OPERATORS) - set(QUICK)))
def test_an_inferred_kernel_is_the_right_one_for_all_others(name: str) -> None:
    """The same for the other operators of the zoo."""
    check(name)


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_the_right_kernel_of_the_zoo_is_right(name: str) -> None:
    """What is written by hand says what the operator does."""
    operator = OPERATORS[name]
    for args in [*operator.samples(), *operator.others()]:
        real = facts(operator.op(*copy.deepcopy(args)))
        assert is_like(fake_facts(operator.true_fake, args), real)
