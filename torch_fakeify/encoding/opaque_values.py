"""Opaque inputs and constants of graphs <-> records.

Dynamo makes objects of registered opaque types inputs or constants of a graph: device meshes,
placements of DTensors, process groups and classes of users. Supported are torch's (see `meshes` and
`subclass_context`) and those registered with this package.
"""

from __future__ import annotations

import enum
from typing import Any

import torch

from torch_fakeify.compat import torch_distributed, torch_fakes
from torch_fakeify.errors import UnknownNameError, UnsupportedValueError, class_name
from torch_fakeify.records.tensor import OpaqueValue, TupleValue, Value

from . import meshes, subclass_registry
from .subclass_context import ContextDecoder, ContextEncoder
from .values import DecodeHook, EncodeHook, Located, decode_value, encode_value

_SPEC = "torch.distributed.tensor._dtensor_spec.DTensorSpec"
_KINDS = frozenset({meshes.MESH, meshes.PLACEMENT, meshes.GROUP, "object", "dataclass"})


def is_opaque(v: OpaqueValue) -> bool:
    """Whether `decode_opaque` can decode a record."""
    return v.kind in _KINDS


# --- encode ---------------------------------------------------------------------------------------


def encode_opaque(obj: object, where: str | None, hook: EncodeHook) -> Value | None:
    """The record of an opaque object; ``None`` for other objects.

    ``hook`` encodes symbolic integers and tensors inside it.

    Raises:
        UnsupportedValueError: the object or a part of it has no record.
    """
    cls = type(obj)
    if cls.__module__ == "builtins":
        return None
    if meshes.is_mesh(obj):
        return meshes.encode_mesh(obj, where=where or "$")
    if meshes.is_group(obj):
        return meshes.encode_group(obj, where=where)
    registration = subclass_registry.find(cls)
    is_registered = registration is not None and registration.encode is not None
    is_spec = class_name(cls) == _SPEC
    if meshes.is_placement(obj) or is_spec or (is_registered and not issubclass(cls, torch.Tensor)):
        return ContextEncoder("torch", _parts(obj, hook)).encode(obj, where or "$")
    advice = _advice(obj)
    if advice is None:
        return None
    name = str(obj._type()) if isinstance(obj, torch.ScriptObject) else class_name(cls)  # pyright: ignore
    raise UnsupportedValueError(
        "an object of an opaque type has no record",
        where=where,
        found=f"an object of {name}",
        fix=advice,
    )


def _parts(whole: object, hook: EncodeHook) -> EncodeHook:
    """A hook for the parts of an object that the codec of subclass contexts does not support."""

    def ask(obj: object) -> Value | None:
        is_own = obj is whole or meshes.is_mesh(obj) or meshes.is_placement(obj)
        return None if is_own else hook(obj)

    return ask


def encode_constant(obj: object, where: str, source: str | None = None) -> Value:
    """The record of an input or module attribute of a graph that is neither tensor nor number.

    ``source`` is its name in the program, for errors.

    Raises:
        UnsupportedValueError: it has no record.
    """
    try:
        hook = Located(lambda part, at: encode_opaque(part, at, lambda _: None))
        return encode_value(obj, where=where, hook=hook)
    except UnsupportedValueError as error:
        if source is not None:
            error.where = f"{error.where} ({source})"
        raise


def _advice(obj: object) -> str | None:
    """The remedy for an unsupported object that Dynamo passes to a backend."""
    name = type(obj).__name__
    if isinstance(obj, torch.ScriptObject):
        return "Call its methods outside the compiled function, or pass the tensors that it holds."
    if isinstance(obj, (torch.Stream, torch.Event)):
        return "Enter streams and wait for events outside the compiled function."
    if isinstance(obj, torch.Generator):
        return "Seed the default generator instead."
    if torch_fakes.is_opaque_type(type(obj)) and not isinstance(obj, enum.Enum):
        return (
            f"Call torch_fakeify.register_subclass({name}, encode_ctx=..., decode_ctx=...) with "
            "functions from the object to plain data and back."
        )
    return None


# --- decode ---------------------------------------------------------------------------------------


def decode_opaque(v: OpaqueValue, where: str, hook: DecodeHook, mesh_cache: meshes.Meshes) -> Any:
    """The object of a record of `encode_opaque`.

    ``hook`` decodes symbolic integers and tensors inside it.

    Raises:
        FormatError: the record is invalid.
        UnknownNameError: a class is not registered.
        ConvertError: the process has no such process group, or this torch does not support the mesh.
    """
    if v.kind == meshes.GROUP:
        return meshes.decode_group(v, where=where)
    if v.kind == "dataclass":
        match v.data:
            case TupleValue(items=(str(name), _)) if name == _SPEC:
                torch_distributed.device_meshes()  # imports it
            case _:
                raise UnknownNameError("a graph may not have such an object", where=where)

    def ask(part: Value) -> object:
        is_own = part is v or (isinstance(part, OpaqueValue) and part.kind in _KINDS)
        return NotImplemented if is_own else hook(part)

    return ContextDecoder("torch", ask, None, mesh_cache).decode(v, where)


def decode_constant(v: Value, where: str, mesh_cache: meshes.Meshes) -> Any:
    """The object of a record of `encode_constant`."""

    def ask(part: Value, at: str) -> object:
        if isinstance(part, OpaqueValue) and part.kind in _KINDS:
            return decode_opaque(part, at, lambda _: NotImplemented, mesh_cache)
        return NotImplemented

    return decode_value(v, where=where, hook=Located(ask))
