"""Fake kernels as records: they survive a file, and hostile ones are refused."""

from __future__ import annotations

import msgspec
import pytest
import torch
from inferred_checks import fake_facts

from torch_fakeify.errors import FakeKernelError, LimitError
from torch_fakeify.fake_kernels.kernels import fake_results
from torch_fakeify.records.fake_kernel import (
    Arg,
    Binary,
    ConstantDevice,
    ConstantDtype,
    Contiguous,
    DeviceOf,
    DtypeOf,
    FakeKernelDesc,
    Integer,
    Items,
    ListResult,
    NewTensor,
    Number,
    Shape,
    Size,
)
from torch_fakeify.records.frame import OperatorDesc
from torch_fakeify.serialization.limits import KERNEL_DEPTH, KERNEL_PARTS, check_operators

X = Arg("x")
SCHEMA = torch._C.parse_schema("away::twice(Tensor x, int n=3) -> Tensor")
NEW = NewTensor(Shape(X), Contiguous(), DtypeOf(X), DeviceOf(X))


def kernel(*results: object) -> FakeKernelDesc:
    """Return a kernel with these results."""
    return FakeKernelDesc(operator="away::twice", arguments=("x", "n"), results=results)  # type: ignore[arg-type]


def deep(levels: int) -> Binary | Size:
    """Return a sum of sums."""
    part: Binary | Size = Size(X, 0)
    for _ in range(levels):
        part = Binary("+", part, Integer(1))
    return part


def test_a_kernel_survives_json() -> None:
    """What is read equals what was written."""
    size = Items((Binary("ceil", Size(X, -1), Number(Arg("n"))), Integer(2)))
    desc = kernel(ListResult(Number(Arg("n")), NewTensor(size, NEW.layout, NEW.dtype, NEW.device)))
    assert msgspec.json.decode(msgspec.json.encode(desc), type=FakeKernelDesc) == desc


@pytest.mark.parametrize(
    "part",
    [
        Items((deep(KERNEL_DEPTH),)),
        Items(tuple(Integer(at) for at in range(KERNEL_PARTS))),
        Items((Integer(1 << 63),)),
        Items((Size(Arg("x" * 100_000), 0),)),
    ],
    ids=["deep", "many", "large", "long"],
)
def test_a_kernel_beyond_the_limits_is_refused(part: Items) -> None:
    """Before anything of it is evaluated."""
    desc = kernel(NewTensor(part, NEW.layout, NEW.dtype, NEW.device))
    operator = OperatorDesc(schema="away::twice(Tensor x, int n=3) -> Tensor", fake=desc)
    with pytest.raises(LimitError, match="fake kernel"):
        check_operators((operator,), "$.operators")


@pytest.mark.parametrize(
    "result",
    [
        NewTensor(Shape(X), Contiguous(), ConstantDtype("load"), DeviceOf(X)),
        NewTensor(Shape(X), Contiguous(), DtypeOf(X), ConstantDevice("../../etc")),
        ListResult(Integer(1 << 40), NEW),
        NewTensor(Items((Size(X, 7),)), Contiguous(), DtypeOf(X), DeviceOf(X)),
        NewTensor(Items((Binary("//", Size(X, 0), Integer(0)),)), Contiguous(), DtypeOf(X), DeviceOf(X)),
        NewTensor(Shape(Arg("y")), Contiguous(), DtypeOf(X), DeviceOf(X)),
    ],
    ids=["dtype", "device", "results", "dim", "division", "argument"],
)  # fmt: skip
def test_a_formula_without_a_value_is_one_error(result: object) -> None:
    """A wrong formula of a file gives the error of a kernel, and none of torch's."""
    with pytest.raises(FakeKernelError):
        fake_facts(lambda x: fake_results(kernel(result), SCHEMA, (x,), {}), (torch.ones(2, 3),))
