"""Records of view calls -> the view, made again of another base.

Torch's own replay is ``Tensor._view_func_unsafe(base, symint_visitor, tensor_visitor)``, which needs
the tensor. This does the same from the record: the visitors see the same numbers and tensors in the
same order, because each number may make a symbol, and the order of symbols is their names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _torch
from .desc import (
    FunctionValue,
    ListValue,
    NestedIntDesc,
    SizeValue,
    SymDesc,
    SymValue,
    TensorValue,
    TupleValue,
)
from .errors import ConvertError, FormatError, UnknownNameError
from .names import decode_function
from .values import decode_value
from .view_ops import BoundArgument, bind, gives_several, is_view_operator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ._torch import OpOverload
    from .desc import MetaTensorDesc, Value, ViewCallDesc

__all__ = ["replay_view_calls"]

_SEQUENCES = (ListValue, TupleValue, SizeValue)


def replay_view_calls(
    calls: Sequence[ViewCallDesc],
    base: torch.Tensor,
    *,
    symint: Callable[[Any], Any] | None = None,
    tensor: Callable[[MetaTensorDesc], torch.Tensor] | None = None,
    where: str,
) -> torch.Tensor:
    """The view of a base that the calls make, one of the result of the other.

    Every number is exchanged before every tensor, each in the order of the calls and of the schemas,
    and only then the operators run: as torch's C++ view function does it.

    Args:
        calls: the view calls, first on the base.
        base: what is viewed, real or fake.
        symint: what takes the place of each number that the schema calls a ``SymInt``. It is given
            an ``int``, or a ``SymDesc`` or ``NestedIntDesc`` where the number was symbolic. Without
            it a number is itself and a symbol its hint.
        tensor: what takes the place of each tensor that the operators were given beside the base.
        where: names the tensor, for errors.

    Raises:
        UnknownNameError: an operator is not registered here, or is no view operator.
        FormatError: the arguments do not fit the operator's schema.
        ConvertError: torch cannot run the operator on this base, or there is nothing to take the
            place of a tensor or of a symbol.
    """
    steps = [_decode(call, f"{where}.view_calls[{i}]") for i, call in enumerate(calls)]
    concrete = symint is None
    for step in steps:
        step.exchange("int", lambda v, place: _number(v, symint, place))
    for step in steps:
        step.exchange("tensor", lambda v, place: _tensor(v, tensor, place))
    for step in steps:
        base = step.run(base, concrete=concrete)
    return base


class _Step:
    """One call, while its arguments are decoded."""

    def __init__(
        self,
        op: OpOverload[..., Any],
        arguments: list[BoundArgument],
        output: int | None,
        where: str,
    ) -> None:
        self.op = op
        self.arguments = arguments
        self.output = output
        self.where = where

    def exchange(self, kind: str, decode: Callable[[Any, str], Any]) -> None:
        """Puts what ``decode`` gives into the place of each argument of a kind."""
        for i, (parameter, value) in enumerate(self.arguments):
            if parameter.kind == kind:
                made = _each(value, decode, f"{self.where}.{parameter.name}")
                self.arguments[i] = BoundArgument(parameter, made)

    def run(self, base: torch.Tensor, *, concrete: bool) -> torch.Tensor:
        """What the operator gives of the base."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for parameter, value in self.arguments:
            # After an argument that was left out, only names say which one is meant.
            if parameter.keyword_only or parameter.position > len(args):
                kwargs[parameter.name] = value
            else:
                args.append(value)
        call: Any = self.op
        try:
            with _torch.DisableTorchFunction():  # the C++ view function knows none either
                result = call(base, *args, **kwargs)
        except (RuntimeError, TypeError, IndexError) as error:
            if not concrete:
                raise  # what torch says of symbols, its callers catch by type
            raise ConvertError(
                f"torch cannot run {self.op} on this base",
                where=self.where,
                found=str(error).partition("\n")[0],
            ) from error
        if self.output is None:
            return result
        if self.output >= len(result):
            raise ConvertError(
                f"{self.op} gives too few tensors of this base",
                where=self.where,
                expected=f"more than {self.output}",
                found=str(len(result)),
            )
        return result[self.output]


def _decode(call: ViewCallDesc, where: str) -> _Step:
    """The call, with its numbers and tensors still as records."""
    op: Any = decode_function(FunctionValue(kind="op", name=call.op), where=where)
    if not is_view_operator(op):
        raise UnknownNameError(
            f"torch.ops.{call.op} is no view operator",
            where=where,
            expected="an operator whose schema says that its result aliases the first argument",
            found=str(op._schema),
        )
    several = gives_several(op)
    if several != (call.output is not None) or (call.output or 0) < 0:
        raise FormatError(
            f"`output` does not fit {op}",
            where=where,
            expected="the position of one of its results" if several else "none: it gives one",
            found=str(call.output),
        )
    bound = bind(op, call.args, call.kwargs, where=where)
    for i, (parameter, value) in enumerate(bound):
        if parameter.kind == "other":
            place = f"{where}.{parameter.name}"
            bound[i] = BoundArgument(parameter, decode_value(value, where=place))
    return _Step(op, bound, call.output, where)


def _each(value: Any, decode: Callable[[Any, str], Any], where: str) -> Any:
    """An argument that may be left out (``None``) or a sequence."""
    if isinstance(value, _SEQUENCES):
        items = value.items
    elif isinstance(value, list):  # the default of an argument
        items: Sequence[Value] = value
    else:
        return None if value is None else decode(value, where)
    return [decode(item, f"{where}[{i}]") for i, item in enumerate(items)]


def _number(value: Any, symint: Callable[[Any], Any] | None, where: str) -> Any:
    if isinstance(value, SymValue):
        value = value.sym
    elif type(value) is not int:
        raise FormatError(
            "not a size", where=where, expected="an integer", found=type(value).__name__
        )
    if symint is not None:
        return symint(value)
    number = value.hint if isinstance(value, SymDesc) else value
    if number is None or isinstance(number, NestedIntDesc):
        raise ConvertError("a symbol without a number needs `symint`", where=where)
    return number


def _tensor(
    value: Any, tensor: Callable[[MetaTensorDesc], torch.Tensor] | None, where: str
) -> torch.Tensor:
    if not isinstance(value, TensorValue):
        raise FormatError(
            "not a tensor", where=where, expected="a tensor or none", found=type(value).__name__
        )
    if tensor is None:
        raise ConvertError(
            "the view function holds a tensor, which needs `tensor`",
            where=where,
            found=f"tensor {value.tensor.id}",
        )
    return tensor(value.tensor)
