"""Operators outside of torch <-> records: their schemas as text, which torch alone parses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_fakeify.compat import torch_library
from torch_fakeify.errors import FormatError, StubError
from torch_fakeify.records.frame import OperatorDesc
from torch_fakeify.serialization.limits import OPERATORS, SCHEMA_TEXT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from torch_fakeify.records.fake_kernel import FakeKernelDesc

_TYPES = frozenset({
    "BoolType", "ComplexType", "DeviceObjType", "FloatType", "GeneratorType", "IntType", "LayoutType",
    "MemoryFormatType", "NoneType", "NumberType", "ScalarTypeType", "StringType", "SymBoolType",
    "SymFloatType", "SymIntType", "TensorType",
})  # fmt: skip
"""Kinds of types of which a stub takes and returns values, also as lists and optional ones."""
_LEVELS = 5
"""Most lists and optional types around one of these, and one more."""


def describe_operators(
    gm: torch.fx.GraphModule, fakes: Mapping[str, FakeKernelDesc]
) -> tuple[OperatorDesc, ...]:
    """Return every overload of the operators outside of torch that a graph and its bodies name.

    A schema that is longer than a reader accepts is left out: the operator then has no stub. ``fakes`` are
    inferred fake kernels by operator.
    """
    found = [
        OperatorDesc(
            schema=str(overload._schema),
            tags=tuple(sorted(tag.name for tag in overload.tags)),
            autograd=torch_library.autograd_of(overload),
            fake=fakes.get(torch_library.full_name(overload._schema)),
        )
        for overload in torch_library.own_overloads(gm)
    ]
    short = [each for each in found if len(each.schema) <= SCHEMA_TEXT and each.schema.isascii()]
    return tuple(short[:OPERATORS])


def decode_schema(desc: OperatorDesc, where: str) -> Any:
    """Return the schema of an operator, a ``torch.FunctionSchema``.

    Raises:
        FormatError: torch cannot parse it.
        StubError: a stub cannot take or return its types.
    """
    try:
        schema = torch_library.parse_schema(desc.schema)
    except ValueError as error:
        if "Unknown custom class" in str(error):
            raise _no_stub(desc, "it takes or returns objects of a custom class") from error
        raise FormatError(
            "not the schema of an operator",
            where=f"{where}.schema",
            expected="a schema that torch can parse",
            found=f"{desc.schema} ({error})",
        ) from error
    names = [argument.name for argument in schema.arguments]
    if len(set(names)) < len(names):
        raise FormatError(
            "two arguments of an operator have one name", where=f"{where}.schema", found=desc.schema
        )
    for item in (*schema.arguments, *schema.returns):
        kind = _unsupported(item.type)
        if kind is not None:
            raise _no_stub(desc, f"it takes or returns values of the type {kind}")
    if "..." in desc.schema:
        raise _no_stub(desc, "it takes or returns any number of values")
    for position, item in enumerate(schema.returns):
        if item.alias_info is not None and written_argument(schema, position) is None:
            raise _no_stub(desc, "its result is a view of an argument")
    if desc.autograd in ("formula", "composite") and any(map(_is_written, schema.arguments)):
        raise _no_stub(desc, "it writes into an argument and has a gradient")
    return schema


def _unsupported(kind: Any) -> str | None:
    element = kind
    for _ in range(_LEVELS):
        if element.kind() not in ("OptionalType", "ListType"):
            return None if element.kind() in _TYPES else str(kind)
        element = element.getElementType()
    return "a list of lists"


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def bound_arguments(
    schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the arguments of a call by name, with defaults; ``None`` if they do not fit the schema."""
    positional = [a for a in schema.arguments if not a.kwarg_only]
    if len(args) > len(positional):
        return None
    given = {a.name: value for a, value in zip(positional, args, strict=False)}
    if given.keys() & kwargs.keys():
        return None
    given.update(kwargs)
    names = [argument.name for argument in schema.arguments]
    if not given.keys() <= set(names):
        return None
    for argument in schema.arguments:
        if argument.name not in given:
            if not argument.has_default_value():
                return None
            given[argument.name] = torch_library.default_of(argument)
    return {name: given[name] for name in names}


def written_argument(schema: Any, position: int) -> str | None:
    """Return the name of the argument that a result is, as of ``(Tensor(a!) x) -> Tensor(a!)``."""
    alias = schema.returns[position].alias_info
    if alias is None or not alias.is_write:
        return None
    return next(
        (
            argument.name
            for argument in schema.arguments
            if _is_written(argument) and argument.alias_info.before_set == alias.before_set
        ),
        None,
    )


def _no_stub(desc: OperatorDesc, reason: str) -> StubError:
    name = desc.schema.partition("(")[0]
    return StubError(
        f"the operator {name} is not registered here and cannot have a stub: {reason}",
        fix="Import the module that registers it (--import MODULE)",
    )


def other_schemas(operators: tuple[OperatorDesc, ...]) -> list[str]:
    """Return a line for each operator that is registered here with another schema than the recorded one."""
    lines: list[str] = []
    for desc in operators:
        name = desc.schema.partition("(")[0]
        overload = name.partition("::")[2].partition(".")[2]
        here = torch_library.registered_schemas(*desc.operator.split(".", 1))
        if here and here.get(overload) != desc.schema:
            lines.append(
                f"the operator {name}: {desc.schema} recorded, {here.get(overload, 'no such overload')} here"
            )
    return lines
