"""What the closed sets of the format are, by the code, and which of it occurs in a record.

Both sides are sets of texts, so that a kind which the code has and no file holds is named.
"""

from __future__ import annotations

import functools
import types
import typing
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

from torch_fakeify.compat.torch_graphs import meta_dataclasses
from torch_fakeify.convert import validate
from torch_fakeify.encoding import exprs, meshes, sources, subclass_context, subclasses
from torch_fakeify.frames.graph import calling
from torch_fakeify.records import tensor
from torch_fakeify.records.tensor import (
    ApplyNode,
    AtomNode,
    FunctionValue,
    MetaTensorDesc,
    OpaqueValue,
    SourceDesc,
    TupleValue,
    Value,
)
from torch_fakeify.serialization import format as wire_format

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FUNCTION_KINDS = (
    *("op", "packet", "hop", "function", "class", "numpy", "numpy_method", "numpy_operator"),
)
"""Of ``FunctionValue``, as ``names.py`` lists them."""

OPAQUE_KINDS = (
    *(meshes.MESH, meshes.PLACEMENT, subclasses._REGISTERED),
    *(subclass_context._DATACLASS, subclass_context._OBJECT, "TreeSpec", "NodeSource", "shared"),
)
"""Of ``OpaqueValue``, beside the notes in the metadata of nodes."""


def expected() -> set[str]:
    """Every kind that the code can write."""
    found = {f"function {name}" for name in (*exprs.HEADS, exprs._SINGLETON_INT)}
    found |= {f"constant {name}" for name in exprs._ATOMS}
    found |= {f"source {name}" for name in sources._source_classes()}
    found |= {f"callable {kind}" for kind in FUNCTION_KINDS}
    found |= {f"opaque {kind}" for kind in (*OPAQUE_KINDS, *meta_dataclasses())}
    found |= {f"placement {name}" for name in meshes._PLACEMENTS}
    found |= {f"structure {name}" for name in (*calling._CONTAINERS, "namedtuple")}
    found |= {f"dtype {name}" for name in dtypes()}
    found |= {f"layout {name}" for name in (*validate.KINDS, "jagged")}
    for cls in record_types():
        found.add(f"record {cls.__name__}")
        for name, hint, default in fields(cls):
            if default is not msgspec.NODEFAULT:
                found.add(f"{cls.__name__}.{name}")
            found |= {f"{cls.__name__}.{name} = {value!r}" for value in _literals(hint)}
            found |= {f"{cls.__name__}.{name} holds {kind}" for kind in _members(hint)}
    return found


def observed(records: Iterable[Any]) -> set[str]:
    """Every kind that occurs in records."""
    found: set[str] = set()
    for value in _parts(records):
        cls = type(value)
        found.add(f"record {cls.__name__}")
        for name, hint, default in fields(cls):
            item = getattr(value, name)
            if default is not msgspec.NODEFAULT and item != default:
                found.add(f"{cls.__name__}.{name}")
            if (literals := _literals(hint)) or _members(hint):
                for part in _leaves(item):
                    if isinstance(part, (str, int)) and part in literals:
                        found.add(f"{cls.__name__}.{name} = {part!r}")
                    found.add(f"{cls.__name__}.{name} holds {type(part).__name__}")
        match value:
            case ApplyNode(function=name):
                found.add(f"function {name}")
            case AtomNode(name=name):
                found.add(f"constant {name}")
            case SourceDesc(cls=name):
                found.add(f"source {name}")
            case FunctionValue(kind=name):
                found.add(f"callable {name}")
            case OpaqueValue(kind=name):
                found.add(f"opaque {name}")
                found |= _first_of(value)
            case MetaTensorDesc():
                found |= {f"dtype {value.dtype}", f"layout {value.layout}"}
            case _:
                pass
    return found


def _first_of(value: OpaqueValue) -> set[str]:
    """What an opaque value of several sorts is one of."""
    match value:
        case OpaqueValue(kind=meshes.PLACEMENT, data=TupleValue(items=(str(sort), *_))):
            return {f"placement {sort}"}
        case OpaqueValue(kind="TreeSpec", data=TupleValue(items=(str(sort), *_))):
            return {f"structure {sort}"}
        case _:
            return set()


def record_types() -> list[Any]:
    """Every type that stands in a record: the records, and what their fields hold beside them."""
    todo: list[Any] = list(wire_format.RECORD_TYPES)
    found: dict[Any, None] = {}
    while todo:
        cls = todo.pop(0)
        if cls in found:
            continue
        found[cls] = None
        for _, hint, _ in fields(cls):
            todo += [arg for arg in _flat(hint) if _is_struct(arg)]
    return [cls for cls in found if cls is not tensor.Record]


@functools.cache
def fields(cls: Any) -> list[tuple[str, Any, Any]]:
    """Name, type and default of the fields of a record type."""
    if not issubclass(cls, msgspec.Struct):
        hints, defaults = typing.get_type_hints(cls), cls._field_defaults
        return [(name, hints[name], defaults.get(name, msgspec.NODEFAULT)) for name in cls._fields]
    return [(field.name, field.type, field.default) for field in msgspec.structs.fields(cls)]


def _is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and (
        issubclass(hint, msgspec.Struct) or hasattr(hint, "_field_defaults")
    )


def _flat(hint: Any) -> Iterator[Any]:
    """The types that a type is made of."""
    if typing.get_origin(hint) is Literal:
        return
    args = typing.get_args(hint)
    if not args:
        yield hint
    for arg in args:
        yield from _flat(arg)


@functools.cache
def _literals(hint: Any) -> frozenset[Any]:
    if typing.get_origin(hint) is Literal:
        return frozenset(typing.get_args(hint))
    return frozenset().union(*map(_literals, typing.get_args(hint)))


_ANYWHERE = tuple(set(typing.get_args(union)) for union in (Value, tensor.ExprNode, tensor.IntLike))
"""Unions whose members need occur in one place only, as all places treat them alike."""


@functools.cache
def _members(hint: Any) -> frozenset[str]:
    """Names of the types that one place of a field may hold, if there are several."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if set(args) - {type(None)} in _ANYWHERE or set(args) in _ANYWHERE:
            return frozenset()
        if type(None) in args and len(args) == 2:
            return _members(args[0])
        return frozenset(arg.__name__ for arg in args if isinstance(arg, type))
    return frozenset().union(*map(_members, args))


def _leaves(value: Any) -> Iterator[Any]:
    if type(value) is tuple:
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _parts(records: Iterable[Any]) -> Iterator[Any]:
    """All records inside of records, each object once."""
    todo: list[Any] = list(records)
    seen: dict[int, Any] = {}
    while todo:
        value = todo.pop()
        if type(value) is tuple:
            todo += value
        elif _is_struct(type(value)) and id(value) not in seen:
            seen[id(value)] = value
            yield value
            todo += [getattr(value, name) for name, _, _ in fields(type(value))]


def dtypes() -> dict[str, torch.dtype]:
    """Every dtype of torch by name, but the quantized ones, whose tensors have no fakes."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    names = {str(dtype).removeprefix("torch."): dtype for dtype in found}
    return {name: names[name] for name in sorted(names) if not name.startswith("q")}
