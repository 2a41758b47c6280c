"""Evaluate the formulas of a fake kernel, over observed numbers or over sizes that are symbols."""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

import torch

from torch_fakeify.encoding.operators import bound_arguments
from torch_fakeify.errors import FakeKernelError
from torch_fakeify.records import fake_kernel as fk

from .observed import NamedValue, TensorFacts, is_integer, item_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_LAST = {4: (torch.channels_last, (0, 2, 3, 1)), 5: (torch.channels_last_3d, (0, 2, 3, 4, 1))}
"""Memory formats by number of dims, with the dims from the outermost to the innermost in memory."""
_MOST_RESULTS = 10_000
"""Most tensors in a result that is a list."""
_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "min": torch.sym_min,
    "max": torch.sym_max,
    "//": operator.floordiv,
    "%": operator.mod,
    "ceil": lambda left, right: -(-left // right),
}
_COMPARISONS = {"==": operator.eq, "!=": operator.ne, "<=": operator.le, ">=": operator.ge}
_NOT_FOUND = object()


class NoValueError(Exception):
    """A formula has no value for these arguments: there is no such dim, item or case."""


class Evaluation:
    """The values of formulas for one call; `NoValueError` is raised where a formula has none.

    Args:
        args: the arguments by name.
        index: the position in a result that is a list.
        sizes: the sizes that depend on data.
        tensors: the tensors themselves, by name and position in a list; ``None`` where there are none.
    """

    def __init__(
        self,
        args: dict[str, Any],
        index: int | None = None,
        sizes: Sequence[Any] = (),
        tensors: Mapping[tuple[str, int | None], torch.Tensor] | None = None,
    ) -> None:
        self.args = args
        self.index = index
        self.sizes = sizes
        self._tensors_here = tensors
        self._known: dict[Any, Any] = {}

    def at(self, index: int) -> Evaluation:
        """Return the same for a position in a list."""
        return Evaluation(self.args, index, self.sizes, self._tensors_here)

    def known(self, evaluate: Callable[[Any], Any], part: Any) -> Any:
        """Return the value of a formula by `int` or `ints`, evaluated once; ``None`` if it has none."""
        found = self._known.get(part, _NOT_FOUND)
        if found is _NOT_FOUND:
            try:
                found = evaluate(part)
            except NoValueError:
                found = None
            self._known[part] = found
        return found

    def tensor(self, of: fk.Arg) -> TensorFacts:
        """Return the metadata of a tensor."""
        found = item_of(self.args, of.name, of.item)
        if not isinstance(found, TensorFacts):
            raise NoValueError(f"{of.name} is no tensor")
        return found

    def int(self, part: Any) -> Any:
        """Return the value of a formula of an integer."""
        match part:
            case fk.Integer(value=value):
                return value
            case fk.Size(of=of, dim=dim):
                return _item(self.tensor(of).size, dim)
            case fk.SizeAt(of=of, dim=dim):
                return _item(self.tensor(of).size, self.int(dim))
            case fk.Stride(of=of, dim=dim):
                return _item(self.tensor(of).stride, dim)
            case fk.Offset(of=of):
                return self.tensor(of).offset
            case fk.Ndim(of=of):
                return len(self.tensor(of).size)
            case fk.Number(of=of):
                return self._number(of)
            case fk.ItemAt(name=name, at=at):
                return _item(self.ints(fk.Numbers(name)), self.int(at))
            case fk.Length(name=name):
                return len(self._list(name))
            case fk.Product(of=of):
                found: Any = 1
                for value in self.ints(of):
                    found = found * value
                return found
            case fk.Total(of=of):
                return sum(self.ints(of))
            case fk.SizesTotal(name=name, dim=dim):
                at = self.int(dim)
                return sum(_item(each.size, at) for each in self._tensors(name))
            case fk.Binary(op=op, left=left, right=right):
                a, b = self.int(left), self.int(right)
                if op in ("//", "%", "ceil") and isinstance(b, int) and b == 0:
                    raise NoValueError("a division by zero")
                return _OPERATIONS[op](a, b)
            case fk.Index():
                if self.index is None:
                    raise NoValueError("not in a list")
                return self.index
            case fk.DataSize(at=at):
                return _item(self.sizes, at)
            case fk.Case():
                return self.int(self.chosen(part))
            case _:
                raise NoValueError(f"{type(part).__name__} is no integer")

    def ints(self, part: Any) -> tuple[Any, ...]:
        """Return the value of a formula of a list of integers."""
        match part:
            case fk.Items(items=items):
                return tuple([self.int(each) for each in items])
            case fk.Shape(of=of):
                return self.tensor(of).size
            case fk.Strides(of=of):
                return self.tensor(of).stride
            case fk.Numbers(name=name):
                found = self._list(name)
                if any(isinstance(each, (TensorFacts, type(None))) for each in found):
                    raise NoValueError(f"{name} is no list of integers")
                return tuple(found)
            case fk.Broadcast(of=of):
                return _broadcast([self.ints(each) for each in of])
            case fk.Slice(of=of, start=start, stop=stop):
                values = self.ints(of)
                low = None if start is None else self._position(start, len(values))
                high = None if stop is None else self._position(stop, len(values))
                return values[low:high]
            case fk.Concat(parts=parts):
                return tuple([value for each in parts for value in self.ints(each)])
            case fk.Reduced(of=of, dims=dims, keep=keep):
                return self._reduced(self.ints(of), self.args.get(dims), keep=keep)
            case fk.Picked(of=of, at=at):
                values = self.ints(of)
                return tuple([_item(values, each) for each in self.ints(at)])
            case fk.Swapped(of=of, first=first, second=second):
                values = list(self.ints(of))
                a, b = self.int(first), self.int(second)
                left, right = _item(values, a), _item(values, b)
                values[a], values[b] = right, left
                return tuple(values)
            case fk.Case():
                return self.ints(self.chosen(part))
            case _:
                raise NoValueError(f"{type(part).__name__} is no list of integers")

    def dtype(self, part: Any) -> str:
        """Return the name of a dtype."""
        match part:
            case fk.ConstantDtype(name=name):
                return name
            case fk.DtypeOf(of=of):
                return self.tensor(of).dtype
            case fk.DtypeArg(name=name):
                value = self.args.get(name)
                if isinstance(value, NamedValue) and value.kind == "dtype":
                    return value.name
                raise NoValueError(f"{name} is no dtype")
            case fk.Promoted(left=left, right=right):
                return torch_name(torch.result_type(self._sample(left), self._sample(right)))
            case fk.PromotedTypes(of=of):
                found = [dtype_named(each.dtype) for each in self._each_tensor(of)]
                return torch_name(functools.reduce(torch.promote_types, found))
            case fk.Floating(of=of):
                name = self.dtype(of)
                dtype = dtype_named(name)
                is_float = dtype.is_floating_point or dtype.is_complex
                return name if is_float else torch_name(torch.get_default_dtype())
            case fk.DtypeTable(of=of, table=table):
                found = dict(table).get(dtype := self.tensor(of).dtype)
                if found is None:
                    raise NoValueError(f"{of.name} is of {dtype}, which was not seen")
                return found
            case fk.Case():
                return self.dtype(self.chosen(part))
            case _:
                raise NoValueError(f"{type(part).__name__} is no dtype")

    def device(self, part: Any) -> str:
        """Return the name of a device."""
        match part:
            case fk.ConstantDevice(name=name):
                return name
            case fk.DeviceOf(of=of):
                return self.tensor(of).device
            case fk.Case():
                return self.device(self.chosen(part))
            case _:
                raise NoValueError(f"{type(part).__name__} is no device")

    def strides(self, part: Any, size: Sequence[Any]) -> tuple[Any, ...]:
        """Return the strides of a new tensor.

        Args:
            part: the formula.
            size: of the new tensor.
        """
        match part:
            case fk.Contiguous():
                return contiguous_strides(size)
            case fk.Ordered(dims=dims):
                if len(dims) != len(size):
                    raise NoValueError("another number of dims")
                return ordered_strides(size, dims)
            case fk.GivenStrides(strides=strides):
                return self.ints(strides)
            case fk.LikeStrides(of=of):
                found = self._meta(of)
                if found.ndim != len(size):
                    raise NoValueError("another number of dims")
                return tuple(torch.empty_like(found).stride())
            case fk.FormatOf(of=of):
                found = [self._meta(each) for each in of]
                order = _LAST.get(len(size))
                if order is None or any(each.ndim != len(size) for each in found):
                    return contiguous_strides(size)
                is_last = any(
                    each.is_contiguous(memory_format=order[0]) and each.stride(1) < each.stride(-1)
                    for each in found
                )
                return ordered_strides(size, order[1]) if is_last else contiguous_strides(size)
            case fk.Elementwise(of=of):
                first, *others = map(self._meta, of)
                try:
                    for each in others:
                        first = first + each
                except RuntimeError as error:
                    raise NoValueError("the shapes cannot be broadcast") from error
                if first.ndim != len(size):
                    raise NoValueError("another number of dims")
                return tuple(first.stride())
            case fk.Case():
                return self.strides(self.chosen(part), size)
            case _:
                raise NoValueError(f"{type(part).__name__} is no layout")

    def real(self, of: fk.Arg) -> torch.Tensor | None:
        """Return a tensor itself, if this is a call with tensors."""
        if self._tensors_here is None:
            return None
        item = of.item
        if item is not None and item < 0:
            item += len(self._list(of.name))
        return self._tensors_here.get((of.name, item))

    def _meta(self, of: fk.Arg) -> torch.Tensor:
        here = self.real(of)
        if here is not None:
            return here
        found = self.tensor(of)
        return torch.empty_strided(found.size, found.stride, device="meta")

    def chosen(self, part: fk.Case) -> Any:
        """Return the formula for the value that the feature has here."""
        value = self.feature(part.feature)
        if isinstance(value, torch.SymBool):
            value = bool(value)
        for seen, found in part.cases:
            if type(seen) is type(value) and seen == value:
                return found
        words = _FEATURES.get(type(part.feature), "a comparison of sizes").format(part.feature)
        raise NoValueError(f"{words} is {value}, which was not seen")

    def feature(self, part: Any) -> Any:
        """Return the value of a feature; a comparison of symbols is one of them."""
        match part:
            case fk.IsNone(name=name):
                return self.args.get(name) is None
            case fk.Flag(name=name):
                value = self.args.get(name)
                if not isinstance(value, (bool, str)):
                    raise NoValueError(f"{name} is no bool and no string")
                return value
            case fk.Named(name=name):
                value = self.args.get(name)
                if not isinstance(value, NamedValue):
                    raise NoValueError(f"{name} is no dtype, layout or memory format")
                return value.name
            case fk.Rank(of=of):
                return len(self.tensor(of).size)
            case fk.DtypeIs(of=of):
                return self.tensor(of).dtype
            case fk.IsContiguous(of=of):
                here = self.real(of)
                if here is not None:
                    return here.is_contiguous()
                found = self.tensor(of)
                return is_same_strides(found.size, found.stride, contiguous_strides(found.size))
            case fk.Length(name=name):
                return len(self._list(name))
            case fk.Seen(name=name, value=value):
                return value_text(self.args.get(name)) == value
            case fk.SameDtype(left=left, right=right):
                return self.tensor(left).dtype == self.tensor(right).dtype
            case fk.DtypeIn(of=of, names=names):
                return self.tensor(of).dtype in names
            case fk.Compared(op=op, left=left, right=right):
                return _COMPARISONS[op](self.int(left), self.int(right))
            case _:
                raise NoValueError(f"{type(part).__name__} is no feature")

    def allows(self, condition: Any) -> bool:
        """Return whether a condition holds, also because there is no such tensor, dim or number here."""
        try:
            return bool(self.feature(condition))
        except NoValueError:
            return True

    def _list(self, name: str) -> Sequence[Any]:
        value = self.args.get(name)
        if not isinstance(value, (list, tuple)):
            raise NoValueError(f"{name} is no list")
        return value

    def _tensors(self, name: str) -> list[TensorFacts]:
        found = self._list(name)
        tensors = [each for each in found if isinstance(each, TensorFacts)]
        if len(tensors) < len(found):
            raise NoValueError(f"{name} is no list of tensors")
        return tensors

    def _each_tensor(self, of: Sequence[fk.Arg]) -> list[TensorFacts]:
        """Return some tensors, and all of an argument that is a list."""
        found: list[TensorFacts] = []
        for each in of:
            is_list = each.item is None and isinstance(self.args.get(each.name), (list, tuple))
            found += self._tensors(each.name) if is_list else [self.tensor(each)]
        return found

    def _number(self, of: fk.Arg) -> Any:
        value = self.args.get(of.name)
        if of.item is not None:
            value = _item(self._list(of.name), of.item)
        if not is_integer(value) and not isinstance(value, torch.SymInt):
            raise NoValueError(f"{of.name} is no integer")
        return value

    def _position(self, part: Any, length: int) -> Any:
        """Return a position in a list; one that an argument says counts from the end if it is negative."""
        value = self.int(part)
        if isinstance(part, fk.Integer):
            return value
        if not isinstance(value, int):
            raise NoValueError("a dim that is no constant")
        return value + length if value < 0 else value

    def _reduced(self, sizes: tuple[Any, ...], dims: Any, *, keep: bool) -> tuple[Any, ...]:
        given = [dims] if is_integer(dims) else dims
        if given is not None and not isinstance(given, (list, tuple)):
            raise NoValueError("the dims are no integers")
        if not given:
            return tuple([1] * len(sizes)) if keep else ()
        count = max(len(sizes), 1)
        if any(not -count <= each < count for each in given):
            raise NoValueError("there is no such dim")
        gone = {each % count for each in given}
        if keep:
            return tuple([1 if at in gone else size for at, size in enumerate(sizes)])
        return tuple([size for at, size in enumerate(sizes) if at not in gone])

    def _sample(self, of: fk.Arg) -> Any:
        """Return what ``torch.result_type`` takes: a tensor on the device ``meta``, or a number."""
        found = item_of(self.args, of.name, of.item)
        if isinstance(found, TensorFacts):
            dtype = dtype_named(found.dtype)
            return torch.empty([1] * len(found.size), dtype=dtype, device="meta")
        value = self.args.get(of.name)
        if isinstance(value, (bool, int, float, complex)):
            return value
        if isinstance(value, torch.SymInt):
            return 1
        if isinstance(value, torch.SymFloat):
            return 1.0
        raise NoValueError(f"{of.name} is no tensor and no number")


def result_of(part: Any, evaluation: Evaluation, make: Callable[[Any, Evaluation], Any]) -> Any:
    """Return a result by its formula.

    Args:
        part: the formula.
        evaluation: of the call.
        make: makes a new tensor, a view or an argument itself.
    """
    match part:
        case fk.NewTensor() | fk.View() | fk.SameTensor():
            return make(part, evaluation)
        case fk.IntResult(value=value):
            return evaluation.int(value)
        case fk.ConstantResult(value=value):
            return value
        case fk.ListResult(count=count, item=item):
            number = int(evaluation.int(count))
            if number > _MOST_RESULTS:
                raise NoValueError(f"{number} results")
            return [result_of(item, evaluation.at(at), make) for at in range(number)]
        case fk.TupleResult(items=items):
            return [result_of(each, evaluation, make) for each in items]
        case fk.Case():
            return result_of(evaluation.chosen(part), evaluation, make)
        case _:
            raise NoValueError(f"{type(part).__name__} is no result")


def value_text(value: Any) -> str:
    """Return an argument that is no tensor and no number as Python; a tensor or number as its class."""
    if isinstance(value, NamedValue):
        return f"torch.{value.name}" if value.kind != "device" else f"torch.device({value.name!r})"
    return repr(value) if isinstance(value, (bool, str, type(None))) else type(value).__name__


_FEATURES: dict[type, str] = {
    fk.IsNone: "whether {0.name} is None",
    fk.Flag: "{0.name}",
    fk.Named: "{0.name}",
    fk.Rank: "the number of dims of {0.of.name}",
    fk.DtypeIs: "the dtype of {0.of.name}",
    fk.IsContiguous: "whether {0.of.name} is contiguous",
    fk.Length: "the length of {0.name}",
}
"""Features in words."""


def contiguous_strides(size: Sequence[Any]) -> tuple[Any, ...]:
    """Return the strides of a contiguous tensor."""
    return ordered_strides(size, range(len(size)))


def ordered_strides(size: Sequence[Any], dims: Sequence[int]) -> tuple[Any, ...]:
    """Return dense strides, for dims from the outermost to the innermost in memory."""
    found: list[Any] = [0] * len(size)
    step: Any = 1
    for dim in reversed(dims):
        found[dim] = step
        factor = size[dim]
        step = step * (max(factor, 1) if isinstance(factor, int) else factor)
    return tuple(found)


def is_same_strides(size: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Return whether strides address the same elements; those of dims of size 1 and of empty tensors do not matter."""
    if len(a) != len(b) or len(a) != len(size):
        return False
    return 0 in size or all(
        n == 1 or left == right for n, left, right in zip(size, a, b, strict=True)
    )


def _item(values: Sequence[Any], at: Any) -> Any:
    if not isinstance(at, int) or not -len(values) <= at < len(values):
        raise NoValueError("there is no such dim or item")
    return values[at]


def _broadcast(shapes: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError as error:
        raise NoValueError("the shapes cannot be broadcast") from error


def dtype_named(name: str) -> torch.dtype:
    """Return a dtype by its name; `NoValueError` if torch has none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise NoValueError(f"{name} is no dtype")
    return found


def torch_name(constant: torch.dtype | torch.layout | torch.memory_format) -> str:
    """Return the name of a constant of torch, without ``torch.``."""
    return str(constant).removeprefix("torch.")


def bound(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, with the defaults of a schema.

    Raises:
        FakeKernelError: they do not fit the schema.
    """
    found = bound_arguments(schema, args, kwargs)
    if found is None:
        raise FakeKernelError(
            f"the arguments do not fit the operator {schema.name}",
            expected=str(schema),
            found=f"{len(args)} arguments, and {', '.join(kwargs) or 'no keywords'}",
        )
    return found
