"""A frame with an inferred fake kernel in whose formulas every part holds every kind of part."""

from __future__ import annotations

import types
import typing
from typing import TYPE_CHECKING, Any

import msgspec

import torch_fakeify as tfk
from torch_fakeify.records import fake_kernel as fk
from torch_fakeify.records.frame import OperatorDesc

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["with_fake_kernels"]

X = fk.Arg("x")
SMALLEST: dict[Any, Any] = {
    fk.Int: fk.Integer(1),
    fk.Ints: fk.Shape(X),
    fk.Dtype: fk.DtypeOf(X),
    fk.Device: fk.DeviceOf(X),
    fk.Layout: fk.Contiguous(),
    fk.Result: fk.SameTensor(X),
    fk.Feature: fk.Rank(X),
    fk.Part: fk.Integer(1),
    fk.Arg: X,
    str: "x",
    int: 2,
    bool: True,
    float: 0.5,
}
"""A value of each type of a field."""
WRAPPED = (
    (fk.Int, fk.IntResult),
    (fk.Ints, lambda part: fk.NewTensor(part, fk.Contiguous(), fk.DtypeOf(X), fk.DeviceOf(X))),
    (fk.Layout, lambda part: fk.NewTensor(fk.Shape(X), part, fk.DtypeOf(X), fk.DeviceOf(X))),
    (fk.Dtype, lambda part: fk.NewTensor(fk.Shape(X), fk.Contiguous(), part, fk.DeviceOf(X))),
    (fk.Device, lambda part: fk.NewTensor(fk.Shape(X), fk.Contiguous(), fk.DtypeOf(X), part)),
    (fk.Feature, lambda part: fk.Case(part, ((1, fk.SameTensor(X)),))),
)
"""Results in which there is a part of a type."""


def smallest(kind: Any) -> Any:
    """Return a value of a type."""
    if kind in SMALLEST:
        return SMALLEST[kind]
    return next(iter(values(kind)))


def values(kind: Any) -> Iterator[Any]:
    """Yield a value of each member of a type."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for member in args:
            yield from values(member)
    elif origin is typing.Literal:
        yield from args
    elif origin is tuple and args[-1] is Ellipsis:
        for value in values(args[0]):
            yield (value,)
    elif origin is tuple:
        for at, member in enumerate(args):
            for value in values(member):
                yield tuple(value if at == i else smallest(each) for i, each in enumerate(args))
    elif kind is type(None):
        yield None
    elif kind in SMALLEST:
        yield SMALLEST[kind]
    else:
        hints = typing.get_type_hints(kind)
        yield kind(*[smallest(hints[name]) for name in kind.__struct_fields__])


def variants(kind: type[msgspec.Struct]) -> Iterator[Any]:
    """Yield records of a class with each kind of value in each field."""
    hints = typing.get_type_hints(kind)
    plain = {name: smallest(hints[name]) for name in kind.__struct_fields__}
    yield kind(**plain)
    for name in kind.__struct_fields__:
        for value in values(hints[name]):
            yield kind(**{**plain, name: value})


def with_fake_kernels(desc: Any) -> Any:
    """Return a frame with such a kernel.

    Args:
        desc: a frame.
    """
    results = [each for kind in typing.get_args(fk.Result) for each in variants(kind)]
    results.append(fk.SameTensor(fk.Arg("xs", -1)))
    for union, wrap in WRAPPED:
        for kind in typing.get_args(union):
            results += [wrap(each) for each in variants(kind)]
    kernel = fk.FakeKernelDesc(
        operator="npu::all.kinds",
        arguments=("x", "n"),
        keywords=1,
        checks=tuple(variants(fk.Check)),
        sizes=tuple(variants(fk.MadeSize)),
        results=tuple(dict.fromkeys(results)),
    )
    operators = (
        OperatorDesc(schema="npu::all.kinds(Tensor x, *, SymInt n) -> Tensor", fake=kernel),
    )
    return tfk.Capture(msgspec.structs.replace(desc, operators=operators))
