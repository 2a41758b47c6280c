"""View operators and the arguments in their schemas, for tracing and replaying view calls.

Torch's C++ view function stores the arguments of its operators by type: visitors get every ``SymInt``
first, then every tensor, in the order of the chain and of each schema
(``torch/csrc/autograd/variable.h``, torch 2.13).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from torch_fakeify.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch_fakeify.compat.torch_graphs import OpOverload

ArgumentKind: TypeAlias = Literal["int", "tensor", "other"]
"""Kind of an argument: view functions can replace integers and tensors."""


class BoundArgument(NamedTuple):
    """An argument of a call."""

    name: str
    kind: ArgumentKind
    value: Any


@functools.cache
def is_view_operator(op: OpOverload[..., Any]) -> bool:
    """Whether all results of an operator alias its first argument, by its schema.

    It writes nothing, and each result is a tensor or a list of tensors.
    """
    schema = op._schema
    arguments = schema.arguments
    if not arguments or schema.is_mutable or not schema.returns:
        return False
    if arguments[0].alias_info is None or str(arguments[0].type) != "Tensor":
        return False
    if any(argument.alias_info is not None for argument in arguments[1:]):
        return False
    return all(
        result.alias_info is not None and str(result.type) in ("Tensor", "List[Tensor]")
        for result in schema.returns
    )


def gives_several(op: OpOverload[..., Any]) -> bool:
    """Whether a view operator returns a sequence of tensors."""
    returns = op._schema.returns
    return len(returns) > 1 or str(returns[0].type) == "List[Tensor]"


def _kind(type_: Any) -> ArgumentKind:
    while type_.kind() in ("OptionalType", "ListType"):
        type_ = type_.getElementType()
    kinds: dict[str, ArgumentKind] = {"SymIntType": "int", "TensorType": "tensor"}
    return kinds.get(type_.kind(), "other")


def bind(
    op: OpOverload[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | Iterable[tuple[str, Any]],
    *,
    where: str,
) -> list[BoundArgument]:
    """The arguments of a call in the order of the schema.

    Torch omits arguments at their defaults. An omitted number is added, since the view function stores
    it. ``args`` are the positional arguments after the viewed tensor.

    Raises:
        FormatError: the arguments do not match the schema.
    """
    declared = op._schema.arguments[1:]
    positional = [argument.name for argument in declared if not argument.kwarg_only]
    if len(args) > len(positional):
        raise FormatError(
            f"too many arguments for {op}",
            where=where,
            expected=f"at most {len(positional)} after the tensor",
            found=str(len(args)),
        )
    passed = dict(zip(positional, args, strict=False))
    for name, value in dict(kwargs).items():
        if name in passed or all(argument.name != name for argument in declared):
            raise FormatError(
                f"not an argument of {op}, or a repeated one", where=where, found=repr(name)
            )
        passed[name] = value
    bound: list[BoundArgument] = []
    for argument in declared:
        name, kind = argument.name, _kind(argument.real_type)
        if name in passed:
            bound.append(BoundArgument(name, kind, passed[name]))
        elif not argument.has_default_value():
            raise FormatError(f"an argument of {op} is missing", where=where, expected=repr(name))
        elif kind == "int" and argument.default_value is not None:
            bound.append(BoundArgument(name, kind, argument.default_value))
    return bound
