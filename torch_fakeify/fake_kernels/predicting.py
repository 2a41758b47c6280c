"""Predict the results of a call by a fake kernel, as observed data, and compare them with what a call gave."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch_fakeify.records import fake_kernel as fk

from .evaluating import Evaluation, NoValueError, is_same_strides, result_of
from .observed import TensorFacts
from .source import condition_text

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Unknown:
    """A size that depends on data, before it is known."""

    def __init__(self, at: int) -> None:
        self.at = at


def predicted(
    kernel: fk.FakeKernelDesc, args: dict[str, Any], actual: Sequence[Any] | None
) -> list[Any]:
    """Return the results of a call by a kernel.

    Args:
        kernel: the kernel.
        args: the observed arguments.
        actual: what the call gave, for the sizes that depend on data; ``None`` if it raised.

    Raises:
        NoValueError: the kernel refuses the call.
    """
    sizes: list[Any] = [0] * len(kernel.sizes)
    if kernel.sizes and actual is not None:
        sizes = _bound(kernel, args, actual)
    evaluation = Evaluation(args, None, sizes)
    for check in kernel.checks:
        if not holds(check, evaluation):
            raise NoValueError(f"not {condition_text(check.condition)}")
    return [result_of(part, evaluation, _facts) for part in kernel.results]


def holds(check: fk.Check, evaluation: Evaluation) -> bool:
    """Return whether a check holds, also because there is no such tensor or number in this call."""
    try:
        return bool(evaluation.feature(check.condition))
    except NoValueError:
        return True


def _bound(kernel: fk.FakeKernelDesc, args: dict[str, Any], actual: Sequence[Any]) -> list[Any]:
    """Return the sizes that depend on data, from where they stand alone in a result."""
    sizes: list[Any] = [_Unknown(at) for at in range(len(kernel.sizes))]
    evaluation = Evaluation(args, None, sizes)
    for part, value in zip(kernel.results, actual, strict=True):
        try:
            expected = result_of(part, evaluation, partial(_facts, has_strides=False))
        except (NoValueError, TypeError, AssertionError):  # torch refuses what is no number
            continue
        if isinstance(expected, _Unknown):
            sizes[expected.at] = value
        if isinstance(expected, TensorFacts) and isinstance(value, TensorFacts):
            for size, number in zip(expected.size, value.size, strict=False):
                if isinstance(size, _Unknown):
                    sizes[size.at] = number
    return [0 if isinstance(each, _Unknown) else each for each in sizes]


def _facts(part: Any, evaluation: Evaluation, *, has_strides: bool = True) -> TensorFacts:
    """Return the metadata of a new tensor, a view or an argument itself."""
    if isinstance(part, fk.NewTensor):
        sizes = evaluation.ints(part.size)
        if has_strides and any(each < 0 for each in sizes):
            raise NoValueError("a negative size")
        stride = evaluation.strides(part.layout, sizes) if has_strides else ()
        dtype, device = evaluation.dtype(part.dtype), evaluation.device(part.device)
        return TensorFacts(sizes, stride, 0, dtype, device)
    found = evaluation.tensor(part.of)
    size, stride, offset = found.size, found.stride, found.offset
    if isinstance(part, fk.View):
        size, stride = evaluation.ints(part.size), evaluation.ints(part.stride)
        offset = evaluation.int(part.offset)
    return TensorFacts(
        size, stride, offset, found.dtype, found.device,
        shares=(part.of.name, part.of.item), is_argument=isinstance(part, fk.SameTensor),
    )  # fmt: skip


def same_results(expected: Any, found: Any) -> bool:
    """Return whether two results have the same metadata."""
    if isinstance(expected, TensorFacts) and isinstance(found, TensorFacts):
        return (
            tuple(expected.size) == tuple(found.size)
            and is_same_strides(found.size, expected.stride, found.stride)
            and expected.dtype == found.dtype
            and expected.device == found.device
            and expected.layout == found.layout
            and expected.shares == found.shares
            and (expected.shares is None or expected.offset == found.offset)
        )
    if isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)):
        return len(expected) == len(found) and all(map(same_results, expected, found))
    return type(expected) is type(found) and expected == found
