"""Contexts and opaque attributes of wrapper subclasses <-> records.

Besides the constants of `values`, a context may contain dataclass instances, device meshes, placements
of DTensors, symbolic integers and tensors (both by the caller's hooks), and objects of registered
classes.

Decoding makes instances only of dataclasses that this process has already imported and that belong to
torch, torchao, a registered package or the package of the subclass. It sets field by field: neither
``__init__`` nor ``__post_init__`` nor a property runs, and a class with a finalizer is refused.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from contextlib import suppress
from types import MemberDescriptorType
from typing import Any, TypeAlias

import torch

from torch_fakeify.errors import (
    FormatError,
    LimitError,
    UnknownNameError,
    UnsupportedValueError,
    class_name,
)
from torch_fakeify.records.tensor import (
    DictValue,
    MetaTensorDesc,
    NamedTupleValue,
    OpaqueValue,
    SymValue,
    TensorValue,
    TupleValue,
    Value,
)

from . import meshes, names, subclass_registry
from .values import DecodeHook, EncodeHook, Located, decode_value, encode_value

EncodeTensor: TypeAlias = Callable[[torch.Tensor, str], MetaTensorDesc]
"""Describes a tensor, from the tensor and its path."""

DecodeTensor: TypeAlias = Callable[[MetaTensorDesc], torch.Tensor]
"""Makes the tensor of a record."""

MAX_DEPTH = 16
"""Maximum depth of nested dataclass instances."""

_DATACLASS = "dataclass"
_OBJECT = "object"

_PACKAGES = frozenset({"torch", "torchao"})

# Caches that depend on the process: recorded as empty.
_CACHES = {"torch.distributed.tensor._dtensor_spec.DTensorSpec": "_hash"}

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement

_MISSING = object()


# --- which classes --------------------------------------------------------------------------------


def _is_dataclass(obj: object) -> bool:
    return dataclasses.is_dataclass(obj) and not isinstance(obj, (type, enum.Enum, torch.Tensor))


def _objection(cls: type, package: str) -> str | None:
    """The reason why instances of a dataclass cannot be decoded, or ``None``."""
    home = cls.__module__.partition(".")[0]
    if home not in _PACKAGES | subclass_registry.packages() | {package}:
        return "it is of another package than the tensor subclass"
    if _has_finalizer(cls):
        return "it has a finalizer"
    if not all(_is_plain_base(base) for base in cls.__mro__):
        return "it derives from a class that is not written in Python"
    for field in dataclasses.fields(cls):
        if _is_descriptor(_class_attribute(cls, field.name), "__set__"):
            return f"its field {field.name} is computed by a property"
    return None


def _is_plain_base(cls: type) -> bool:
    return cls is object or (
        bool(cls.__flags__ & _HEAP_TYPE) and type(cls).__name__ != "pybind11_type"
    )


def _class_attribute(cls: type, name: str) -> object:
    for base in cls.__mro__:
        if name in vars(base):
            return vars(base)[name]
    return _MISSING


def _is_descriptor(attribute: object, method: str) -> bool:
    """Whether a class attribute other than a slot has ``__get__`` or ``__set__``."""
    is_slot = isinstance(attribute, MemberDescriptorType)
    return not is_slot and names.hasattr_static(type(attribute), method)


def _is_behaviour(attribute: object) -> bool:
    """Whether a class attribute is a method or descriptor, which no instance may replace."""
    return _is_descriptor(attribute, "__get__")


def _slots(cls: type) -> dict[str, MemberDescriptorType]:
    return {
        name: attribute
        for base in reversed(cls.__mro__)
        for name, attribute in vars(base).items()
        if isinstance(attribute, MemberDescriptorType)
    }


def _has_finalizer(cls: type) -> bool:
    return names.hasattr_static(cls, "__del__")


# --- encode ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class ContextEncoder:
    """Makes the records of contexts and opaque attributes of a tensor subclass."""

    package: str
    """The top-level package of the subclass."""
    ints: EncodeHook | None = None
    """Encodes symbolic integers; called first for each part."""
    tensors: EncodeTensor | None = None
    _depth: int = 0

    def encode(self, obj: object, where: str) -> Value:
        """The record of a context, an opaque attribute, or a part of one.

        Raises:
            UnsupportedValueError: a part has no record; the error has its path.
        """
        return encode_value(obj, where=where, hook=Located(self._ask))

    def _ask(self, obj: object, where: str) -> Value | None:
        if self.ints is not None:
            owned = self.ints(obj)
            if owned is not None:
                return owned
        if isinstance(obj, torch.Tensor):
            if self.tensors is None:
                raise UnsupportedValueError("a tensor has no record here", where=where)
            return TensorValue(tensor=self.tensors(obj, where))
        registration = subclass_registry.find(type(obj))
        if registration is not None and registration.encode is not None:
            data = self.encode(registration.encode(obj), where)
            return OpaqueValue(kind=_OBJECT, data=TupleValue(items=(_name(obj), data)))
        if meshes.is_mesh(obj):
            return meshes.encode_mesh(obj, where=where)
        if meshes.is_placement(obj):
            return meshes.encode_placement(obj, self.encode, where=where)
        if _is_dataclass(obj):
            return self._dataclass(obj, where)
        if names.is_record_tuple(type(obj)) and _has_finalizer(type(obj)):
            raise UnsupportedValueError(
                "a named tuple class has a finalizer", where=where, found=_name(obj)
            )
        return None

    def _dataclass(self, obj: Any, where: str) -> Value:
        cls: type = type(obj)
        objection = _objection(cls, self.package)
        if objection is not None:
            raise UnsupportedValueError(
                f"a dataclass instance cannot be recorded: {objection}",
                where=where,
                found=_name(obj),
            )
        if names.find_class(_name(obj)) is not cls:
            raise UnsupportedValueError(
                "a dataclass cannot be found by its name", where=where, found=_name(obj)
            )
        if self._depth == MAX_DEPTH:
            raise UnsupportedValueError(
                "dataclass instances are nested too deeply (or contain themselves)",
                where=where,
                expected=f"at most {MAX_DEPTH} levels",
            )
        self._depth += 1
        items = tuple(
            (name, self.encode(item, f"{where}.{name}")) for name, item in _state(obj, where)
        )
        self._depth -= 1
        data = TupleValue(items=(_name(obj), DictValue(items=items)))
        return OpaqueValue(kind=_DATACLASS, data=data)


def _name(obj: object) -> str:
    return class_name(type(obj))


def _state(obj: Any, where: str) -> list[tuple[str, object]]:
    """State of an instance: its fields in order, then additional attributes."""
    cls = type(obj)
    held: dict[str, object] = {}
    for name, slot in _slots(cls).items():
        with suppress(AttributeError):  # not set
            held[name] = slot.__get__(obj, cls)
    held.update(getattr(obj, "__dict__", {}))
    found: list[tuple[str, object]] = []
    for field in dataclasses.fields(cls):
        if field.name in held:
            found.append((field.name, held.pop(field.name)))
        elif field.init:
            raise UnsupportedValueError(
                "a field of a dataclass instance is not set",
                where=f"{where}.{field.name}",
                found=_name(obj),
            )
    for name, item in held.items():
        attribute = _class_attribute(cls, name)
        if isinstance(attribute, functools.cached_property) or name == _CACHES.get(_name(obj)):
            continue
        if _is_behaviour(attribute):
            raise UnsupportedValueError(
                "a dataclass instance hides a method of its class",
                where=f"{where}.{name}",
                found=_name(obj),
            )
        found.append((name, item))
    return found


# --- decode ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class ContextDecoder:
    """Makes the contexts and opaque attributes of the records of a tensor subclass."""

    package: str
    """The top-level package of the subclass."""
    ints: DecodeHook | None = None
    """Decodes symbolic integers; called first for each part."""
    tensors: DecodeTensor | None = None
    mesh_cache: meshes.Meshes = dataclasses.field(default_factory=meshes.Meshes)
    _depth: int = 0

    def decode(self, v: Value, where: str) -> Any:
        """The object of a record.

        Raises:
            FormatError: the record is invalid.
            UnknownNameError: a class is unknown or not allowed.
        """
        return decode_value(v, where=where, hook=Located(self._ask))

    def _ask(self, v: Value, where: str) -> object:
        if self.ints is not None:
            owned = self.ints(v)
            if owned is not NotImplemented:
                return owned
        match v:
            case SymValue():
                raise FormatError("a symbolic integer has no meaning here", where=where)
            case TensorValue(tensor=tensor):
                if self.tensors is None:
                    raise FormatError("a tensor has no meaning here", where=where)
                return self.tensors(tensor)
            case OpaqueValue():
                return self._opaque(v, where)
            case NamedTupleValue(cls=name):
                cls = names.decode_class(name, where=where)
                if _has_finalizer(cls):
                    raise UnknownNameError(
                        f"no instance of the class {name!r} may be made: it has a finalizer",
                        where=where,
                    )
                return NotImplemented
            case _:
                return NotImplemented

    def _opaque(self, v: OpaqueValue, where: str) -> object:
        if v.kind == meshes.MESH:
            return self.mesh_cache.decode(v, where=where)
        if v.kind == meshes.PLACEMENT:
            return meshes.decode_placement(v, self.decode, where=where)
        match v:
            case OpaqueValue(
                kind="dataclass", data=TupleValue(items=(str(name), DictValue() as d))
            ):
                return self._dataclass(name, d, where)
            case OpaqueValue(kind="object", data=TupleValue(items=(str(name), data))):
                return self._registered(name, data, where)
            case _:
                raise FormatError(
                    "a value of this kind has no meaning here", where=where, found=repr(v.kind)
                )

    def _registered(self, name: str, data: Value, where: str) -> object:
        found = subclass_registry.find_class(name)
        if found is None or found.decode is None or issubclass(found.cls, torch.Tensor):
            raise UnknownNameError(
                f"the class {name!r} is not registered in this process",
                where=where,
                fix=f"Call torch_fakeify.register_subclass({name.rpartition('.')[2]}, "
                "encode_ctx=..., decode_ctx=...) first, as the writer did.",
            )
        return found.decode(self.decode(data, where))

    def _dataclass(self, name: str, data: DictValue, where: str) -> object:
        cls = _find_dataclass(name, self.package, where)
        if self._depth == MAX_DEPTH:
            raise LimitError(
                "dataclass instances are nested too deeply",
                where=where,
                expected=f"at most {MAX_DEPTH} levels",
            )
        self._depth += 1
        state: dict[str, object] = {}
        for key, item in data.items:
            if not isinstance(key, str) or key in state:
                raise FormatError("not the fields of a dataclass", where=where)
            state[key] = self.decode(item, f"{where}.{key}")
        self._depth -= 1
        return _fill(cls, name, state, where)


def _find_dataclass(name: str, package: str, where: str) -> type:
    cls = names.known_class(name, where=where)
    if not (dataclasses.is_dataclass(cls) and not issubclass(cls, (enum.Enum, torch.Tensor))):
        raise UnknownNameError(f"the class {name!r} is no dataclass", where=where)
    objection = _objection(cls, package)
    if objection is not None:
        raise UnknownNameError(
            f"no instance of the class {name!r} may be made: {objection}", where=where
        )
    return cls


def _fill(cls: type, name: str, state: dict[str, object], where: str) -> object:
    slots = _slots(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    missing = [field.name for field in fields.values() if field.init and field.name not in state]
    if missing:
        raise FormatError(f"a field of {name} is missing", where=where, expected=", ".join(missing))
    for key in state:
        is_known = key in fields or key in slots
        if not is_known and (not key.isidentifier() or _is_behaviour(_class_attribute(cls, key))):
            raise FormatError(f"{name} cannot have an attribute {key!r}", where=where)
    try:
        made = object.__new__(cls)
    except TypeError as error:
        raise FormatError(f"no instance of {name} can be made: {error}", where=where) from error
    for key, item in state.items():
        if key in slots:
            slots[key].__set__(made, item)
        elif hasattr(made, "__dict__"):
            vars(made)[key] = item
        else:
            raise FormatError(f"{name} cannot have an attribute {key!r}", where=where)
    cache = _CACHES.get(name)
    if cache is not None:
        vars(made)[cache] = None
    return made
