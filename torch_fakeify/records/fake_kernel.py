"""A fake kernel as data: formulas for the sizes, strides, dtypes and devices of an operator's results.

A formula refers to the operator's arguments by name. It is a closed language: it can be read from a
file and evaluated without running code of that file.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from .record import Record


class _Node(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of a part of a formula."""


class Arg(_Node, frozen=True, tag="arg"):
    """An argument, or one item of an argument that is a list."""

    name: str
    item: int | None = None


class _OfArg(_Node, frozen=True):
    """Base of what a formula takes from one argument, or from one item of it."""

    of: Arg


class _OfName(_Node, frozen=True):
    """Base of what a formula takes from an argument as a whole, by its name."""

    name: str


# --- integers ----------------------------------------------------------------------------------------


class Integer(_Node, frozen=True, tag="int"):
    """A constant."""

    value: int


class Size(_OfArg, frozen=True, tag="size"):
    """``tensor.shape[dim]``."""

    dim: int


class SizeAt(_OfArg, frozen=True, tag="size_at"):
    """``tensor.shape[dim]``, where the dim is an argument."""

    dim: Int


class Stride(_OfArg, frozen=True, tag="stride"):
    """``tensor.stride(dim)``."""

    dim: int


class Offset(_OfArg, frozen=True, tag="offset"):
    """``tensor.storage_offset()``."""


class Ndim(_OfArg, frozen=True, tag="ndim"):
    """``tensor.ndim``."""


class Number(_OfArg, frozen=True, tag="number"):
    """An integer argument, or an item of a list of integers."""


class ItemAt(_OfName, frozen=True, tag="item_at"):
    """An item of a list of integers, at a position that is a formula."""

    at: Int


class Length(_OfName, frozen=True, tag="len"):
    """``len(argument)``."""


class Product(_Node, frozen=True, tag="product"):
    """The product of integers; 1 without any."""

    of: Ints


class Total(_Node, frozen=True, tag="sum"):
    """The sum of integers."""

    of: Ints


class SizesTotal(_OfName, frozen=True, tag="sizes_sum"):
    """The sum of the sizes along a dim of all tensors of a list."""

    dim: Int


class Binary(_Node, frozen=True, tag="op"):
    """An operation on two integers; ``ceil`` divides and rounds up, ``//`` rounds down."""

    op: Literal["+", "-", "*", "//", "ceil", "%", "min", "max"]
    left: Int
    right: Int


class Index(_Node, frozen=True, tag="index"):
    """The position of a tensor in a result that is a list."""


class DataSize(_Node, frozen=True, tag="data_size"):
    """A size that depends on data: an index into ``FakeKernelDesc.sizes``."""

    at: int


# --- lists of integers -------------------------------------------------------------------------------


class Items(_Node, frozen=True, tag="items"):
    """A list of formulas."""

    items: tuple[Int, ...]


class Shape(_OfArg, frozen=True, tag="shape"):
    """``tensor.shape``."""


class Strides(_OfArg, frozen=True, tag="strides"):
    """``tensor.stride()``."""


class Numbers(_OfName, frozen=True, tag="numbers"):
    """An argument that is a list of integers."""


class Broadcast(_Node, frozen=True, tag="broadcast"):
    """``torch.broadcast_shapes``."""

    of: tuple[Ints, ...]


class Slice(_Node, frozen=True, tag="slice"):
    """``list[start:stop]``."""

    of: Ints
    start: Int | None = None
    stop: Int | None = None


class Concat(_Node, frozen=True, tag="concat"):
    """Lists one after the other."""

    parts: tuple[Ints, ...]


class Reduced(_Node, frozen=True, tag="reduced"):
    """Sizes after a reduction over the dims of an argument; over all dims if it is ``None`` or empty."""

    of: Ints
    dims: str
    keep: bool = False


class Swapped(_Node, frozen=True, tag="swapped"):
    """A list with two of its items swapped."""

    of: Ints
    first: Int
    second: Int


class Picked(_Node, frozen=True, tag="picked"):
    """``[list[i] for i in at]``."""

    of: Ints
    at: Ints


# --- cases -------------------------------------------------------------------------------------------


class IsNone(_OfName, frozen=True, tag="is_none"):
    """Whether an argument is ``None``."""


class Flag(_OfName, frozen=True, tag="flag"):
    """The value of an argument that is a bool or a string."""


class Named(_OfName, frozen=True, tag="named"):
    """The name of an argument that is a dtype, layout or memory format."""


class Rank(_OfArg, frozen=True, tag="rank"):
    """The number of dims of a tensor."""


class DtypeIs(_OfArg, frozen=True, tag="dtype_is"):
    """The dtype of a tensor."""


class IsContiguous(_OfArg, frozen=True, tag="is_contiguous"):
    """Whether a tensor is contiguous."""


class Compared(_Node, frozen=True, tag="compared"):
    """Whether a comparison of two integers holds."""

    op: Literal["==", "!=", "<=", ">="]
    left: Int
    right: Int


class SameDtype(_Node, frozen=True, tag="same_dtype"):
    """Whether two tensors have one dtype."""

    left: Arg
    right: Arg


class DtypeIn(_OfArg, frozen=True, tag="dtype_in"):
    """Whether a tensor has one of some dtypes."""

    names: tuple[str, ...]


class Seen(_OfName, frozen=True, tag="seen"):
    """Whether an argument that is no tensor and no number has the one value that it had in all calls."""

    value: str
    """The value as Python, such as ``None`` or ``torch.float32``."""


Feature: TypeAlias = IsNone | Flag | Named | Rank | DtypeIs | IsContiguous | Compared | Length


class Case(_Node, frozen=True, tag="case"):
    """A formula for each value of a feature that was seen."""

    feature: Feature
    cases: tuple[tuple[bool | int | str, Part], ...]


# --- dtype, device, strides ---------------------------------------------------------------------------


class ConstantDtype(_Node, frozen=True, tag="dtype"):
    """A dtype by name."""

    name: str


class DtypeOf(_OfArg, frozen=True, tag="dtype_of"):
    """The dtype of a tensor."""


class DtypeArg(_OfName, frozen=True, tag="dtype_arg"):
    """An argument that is a dtype."""


class Promoted(_Node, frozen=True, tag="promoted"):
    """``torch.result_type`` of two arguments."""

    left: Arg
    right: Arg


class PromotedTypes(_Node, frozen=True, tag="promoted_types"):
    """``torch.promote_types`` of the dtypes of tensors, and of all tensors of an argument that is a list."""

    of: tuple[Arg, ...]


class Floating(_Node, frozen=True, tag="floating"):
    """A dtype, or torch's default dtype in place of one of integers or bools."""

    of: Dtype


class DtypeTable(_OfArg, frozen=True, tag="dtype_table"):
    """A dtype for each dtype of a tensor that was seen."""

    table: tuple[tuple[str, str], ...]


class ConstantDevice(_Node, frozen=True, tag="device"):
    """A device by name."""

    name: str


class DeviceOf(_OfArg, frozen=True, tag="device_of"):
    """The device of a tensor."""


class Contiguous(_Node, frozen=True, tag="contiguous"):
    """Contiguous strides."""


class LikeStrides(_OfArg, frozen=True, tag="like"):
    """The strides of ``torch.empty_like``."""


class FormatOf(_Node, frozen=True, tag="format_of"):
    """Channels last if one of the tensors is, else contiguous."""

    of: tuple[Arg, ...]


class Elementwise(_Node, frozen=True, tag="elementwise"):
    """The strides of the sum of tensors."""

    of: tuple[Arg, ...]


class Ordered(_Node, frozen=True, tag="ordered"):
    """Dense strides; the dims from the outermost to the innermost in memory."""

    dims: tuple[int, ...]


class GivenStrides(_Node, frozen=True, tag="strides_given"):
    """Strides by a formula."""

    strides: Ints


# --- results -----------------------------------------------------------------------------------------


class NewTensor(_Node, frozen=True, tag="new"):
    """A tensor with a storage of its own."""

    size: Ints
    layout: Layout
    dtype: Dtype
    device: Device


class View(_Node, frozen=True, tag="view"):
    """A view of an argument."""

    of: Arg
    size: Ints
    stride: Ints
    offset: Int


class SameTensor(_OfArg, frozen=True, tag="same"):
    """An argument itself."""


class IntResult(_Node, frozen=True, tag="int_result"):
    """A Python integer."""

    value: Int


class ConstantResult(_Node, frozen=True, tag="constant"):
    """A Python value that does not depend on the arguments."""

    value: bool | int | float | str | None


class ListResult(_Node, frozen=True, tag="list"):
    """A list of results by one formula, in which `Index` is the position."""

    count: Int
    item: Result


class TupleResult(_Node, frozen=True, tag="tuple"):
    """A list of results, each by a formula of its own."""

    items: tuple[Result, ...]


Int: TypeAlias = (
    Integer | Size | SizeAt | Stride | Offset | Ndim | Number | ItemAt | Length | Product | Total
    | SizesTotal | Binary | Index | DataSize | Case
)  # fmt: skip
Ints: TypeAlias = (
    Items
    | Shape
    | Strides
    | Numbers
    | Broadcast
    | Slice
    | Concat
    | Reduced
    | Picked
    | Swapped
    | Case
)
Dtype: TypeAlias = (
    ConstantDtype | DtypeOf | DtypeArg | Promoted | PromotedTypes | Floating | DtypeTable | Case
)
Device: TypeAlias = ConstantDevice | DeviceOf | Case
Layout: TypeAlias = (
    Contiguous | LikeStrides | FormatOf | Elementwise | Ordered | GivenStrides | Case
)
Result: TypeAlias = (
    NewTensor | View | SameTensor | IntResult | ConstantResult | ListResult | TupleResult | Case
)
Part: TypeAlias = Int | Ints | Dtype | Device | Layout | Result


class MadeSize(Record, frozen=True, kw_only=True):
    """A size that depends on data: at least ``lower``, and at most ``upper`` if there is a bound."""

    lower: int = 0
    upper: Int | None = None


class Check(Record, frozen=True, kw_only=True):
    """What the operator requires of its arguments."""

    condition: Compared | SameDtype | DtypeIn | IsContiguous | Seen
    message: str = ""
    """The first line of what the operator raises where it does not hold; empty if it accepts such arguments.

    Then its results follow no formula that was found.
    """


class FakeKernelDesc(Record, frozen=True, kw_only=True):
    """A fake kernel of an operator."""

    operator: str
    """``namespace::name``, with ``.overload`` if it has one."""
    arguments: tuple[str, ...]
    """The names of its arguments, in order."""
    keywords: int = 0
    """How many of them, the last ones, are keyword-only."""
    checks: tuple[Check, ...] = ()
    sizes: tuple[MadeSize, ...] = ()
    results: tuple[Result, ...] = ()
