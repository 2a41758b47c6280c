"""Records of view calls -> the view of another base.

Torch's replay is ``Tensor._view_func_unsafe(base, symint_visitor, tensor_visitor)``, which needs the
tensor. Here the visitors see the recorded numbers and tensors in the same order, since each number may
make a symbol whose name depends on the order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch_fakeify.compat import torch_dispatch
from torch_fakeify.encoding.names import decode_function
from torch_fakeify.encoding.values import decode_value
from torch_fakeify.errors import ConvertError, FormatError, UnknownNameError
from torch_fakeify.records.tensor import (
    FunctionValue,
    ListValue,
    NestedIntDesc,
    SizeValue,
    SymDesc,
    SymValue,
    TensorValue,
    TupleValue,
)

from .schemas import bind, gives_several, is_view_operator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from torch_fakeify.compat.torch_graphs import OpOverload
    from torch_fakeify.records.tensor import MetaTensorDesc, Value, ViewCallDesc

    from .schemas import BoundArgument

_SEQUENCES = (ListValue, TupleValue, SizeValue)


def replay_view_calls(
    calls: Sequence[ViewCallDesc],
    base: torch.Tensor,
    *,
    symint: Callable[[Any], Any] | None = None,
    tensor: Callable[[MetaTensorDesc], torch.Tensor] | None = None,
    where: str,
) -> torch.Tensor:
    """Run recorded view calls on a base.

    Like torch's C++ view function, it replaces all numbers, then all tensors, each in the order of the
    calls and schemas, before it runs the operators.

    Args:
        calls: the view calls, first on the base.
        base: the tensor to view, real or fake.
        symint: replaces each number of schema type ``SymInt``: an ``int``, ``SymDesc`` or
            ``NestedIntDesc``. Without it a number is itself and a symbol its hint.
        tensor: replaces each tensor argument besides the base.
        where: of the tensor, for errors.

    Raises:
        UnknownNameError: an operator is not registered or not a view operator.
        FormatError: the arguments do not match the operator's schema.
        ConvertError: torch cannot run the operator on this base, or ``symint`` or ``tensor`` is
            missing.
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


class _Step(NamedTuple):
    """One call, while its arguments are decoded."""

    op: OpOverload[..., Any]
    arguments: list[BoundArgument]
    output: int | None
    where: str

    def exchange(self, kind: str, decode: Callable[[Any, str], Any]) -> None:
        """Replace each argument of a kind by the result of ``decode``."""
        for i, argument in enumerate(self.arguments):
            if argument.kind == kind:
                made = _each(argument.value, decode, f"{self.where}.{argument.name}")
                self.arguments[i] = argument._replace(value=made)

    def run(self, base: torch.Tensor, *, concrete: bool) -> torch.Tensor:
        """Run the operator on a base."""
        named = {argument.name: argument.value for argument in self.arguments}
        call: Any = self.op
        try:
            with torch_dispatch.DisableTorchFunction():  # the C++ view function knows none either
                result = call(base, **named)
        except (RuntimeError, TypeError, IndexError) as error:
            if not concrete:
                raise  # torch's callers catch errors about symbols by type
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
            expected="an operator whose result aliases the first argument by its schema",
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
    step = _Step(op, bind(op, call.args, call.kwargs, where=where), call.output, where)
    for i, argument in enumerate(step.arguments):
        if argument.kind == "other":
            value = decode_value(argument.value, where=f"{where}.{argument.name}")
            step.arguments[i] = argument._replace(value=value)
    return step


def _each(value: Any, decode: Callable[[Any, str], Any], where: str) -> Any:
    """Decode an argument, which may be ``None`` or a sequence."""
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
