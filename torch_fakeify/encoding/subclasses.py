"""Traceable wrapper subclasses <-> records.

``__tensor_flatten__`` returns the names of the inner attributes and a context. Inner tensors are
described by the caller; opaque attributes (such as a ``DeviceMesh``) and the context are encoded by
`subclass_context`. Other contexts need :func:`register_subclass`.

Decoding finds the class among those registered, torch's and those already imported, and never imports
one. It passes the decoded context to the class's ``__tensor_unflatten__``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

import torch

from torch_fakeify.compat import torch_fakes
from torch_fakeify.errors import (
    ConvertError,
    FormatError,
    UnknownNameError,
    UnsupportedTensorError,
    UnsupportedValueError,
    check_type,
    class_name,
)
from torch_fakeify.records.tensor import MetaTensorDesc, OpaqueValue, SubclassDesc, Value

from . import names, subclass_registry
from .meshes import Meshes
from .subclass_context import ContextDecoder, ContextEncoder, DecodeTensor, EncodeTensor

if TYPE_CHECKING:
    from collections.abc import Generator

    from .values import DecodeHook, EncodeHook

Part: TypeAlias = Callable[[torch.Tensor, str], MetaTensorDesc]
"""Describes an inner tensor, from the tensor and its attribute."""

_C = TypeVar("_C", bound=type)

_REGISTERED = "registered"

_PROTOCOL = ("__tensor_flatten__", "__tensor_unflatten__")


# --- registration ---------------------------------------------------------------------------------


@overload
def register_subclass(
    cls: _C,
    *,
    encode_ctx: Callable[[Any], object] | None = None,
    decode_ctx: Callable[[Any], object] | None = None,
) -> _C: ...


@overload
def register_subclass(
    cls: None = None,
    *,
    encode_ctx: Callable[[Any], object] | None = None,
    decode_ctx: Callable[[Any], object] | None = None,
) -> Callable[[_C], _C]: ...


def register_subclass(
    cls: type | None = None,
    *,
    encode_ctx: Callable[[Any], object] | None = None,
    decode_ctx: Callable[[Any], object] | None = None,
) -> Any:
    """Register a wrapper subclass, with a codec of its context; also a class decorator.

    Without functions it registers the name of the class, which may be local to a function, and allows
    dataclasses of its package in contexts. ``cls`` may also be a class whose instances are in contexts
    or opaque attributes; the functions then encode and decode the instance.

    A registration applies to exactly that class, not to its subclasses. Registering again replaces it.

    Args:
        cls: the class; without it, return a decorator.
        encode_ctx: returns the context as plain data: numbers, strings, containers, dtypes,
            enumerations, symbolic integers, ...
        decode_ctx: returns the context of that data.

    Raises:
        UnsupportedTensorError: a tensor class lacks a part of the protocol.
        UnsupportedValueError: one function is missing, or both for a class that is not a tensor class.

    Example:
        >>> class Scaled(torch.Tensor):
        ...     def __tensor_flatten__(self): ...
        ...     @staticmethod
        ...     def __tensor_unflatten__(inner, ctx, size, stride): ...
        >>> tfk.register_subclass(Scaled, encode_ctx=float, decode_ctx=float)
        <class '...Scaled'>
    """
    if cls is None:
        return lambda decorated: register_subclass(  # pyright: ignore[reportUnknownVariableType]
            decorated, encode_ctx=encode_ctx, decode_ctx=decode_ctx
        )
    check_type(cls, type, "a class", UnsupportedValueError)
    where = class_name(cls)
    if (encode_ctx is None) != (decode_ctx is None):
        raise UnsupportedValueError(
            "a class is registered with one function alone",
            where=where,
            expected="both encode_ctx and decode_ctx, or neither",
        )
    if issubclass(cls, torch.Tensor):
        _check_protocol(cls, where)
    elif encode_ctx is None:
        raise UnsupportedValueError(
            "a class that is no tensor class is registered without functions",
            where=where,
            expected="encode_ctx and decode_ctx",
        )
    subclass_registry.put(subclass_registry.Registration(cls, encode_ctx, decode_ctx))
    return cls


def _check_protocol(cls: type, where: str) -> None:
    missing = [name for name in _PROTOCOL if not names.hasattr_static(cls, name)]
    if missing:
        raise UnsupportedTensorError(
            f"{class_name(cls)} is no traceable wrapper subclass",
            where=where,
            expected=" and ".join(_PROTOCOL),
            found=f"no {' and no '.join(missing)}",
            fix=f"Define {' and '.join(missing)} on the class.",
        )


# --- encode ---------------------------------------------------------------------------------------


def encode_subclass(
    t: torch.Tensor, part: Part, *, where: str, ints: EncodeHook | None = None
) -> SubclassDesc:
    """The record of a wrapper subclass.

    ``part`` describes an inner tensor, from the tensor and its attribute, or a tensor in the context, from
    the tensor and its path, such as ``context[0].data``. ``ints`` encodes symbolic integers of the context.

    Raises:
        UnsupportedTensorError: the class lacks a part of the protocol, has no name that a reader can
            resolve, or has attributes or a context that cannot be recorded.
    """
    cls = type(t)
    _check_protocol(cls, where)
    name = _encode_name(cls, where)
    tensor: Any = t
    attributes, context = tensor.__tensor_flatten__()

    encoder = ContextEncoder(
        _package(name), ints, lambda found, path: part(found, path.removeprefix(f"{where}."))
    )
    tensors: list[tuple[str, MetaTensorDesc]] = []
    opaques: list[tuple[str, Value]] = []
    for attribute in attributes:
        at = f"{where}.{attribute}"
        inner = torch_fakes.unwrap_script_object(getattr(t, attribute))
        if isinstance(inner, torch.Tensor):
            tensors.append((attribute, part(inner, attribute)))
        elif torch_fakes.is_custom_class_obj(inner):
            with _advising(type(inner), f"an opaque attribute of {name}", "object"):
                opaques.append((attribute, encoder.encode(inner, at)))
        else:
            raise UnsupportedTensorError(
                f"an inner attribute of {name} is of no sort that torch traces",
                where=at,
                expected="a tensor or an opaque object",
                found=f"an object of {class_name(type(inner))}",
                fix="Return it as part of the context of __tensor_flatten__.",
            )
    return SubclassDesc(
        cls=name,
        tensors=tuple(tensors),
        opaques=tuple(opaques),
        context=_encode_context(cls, name, context, f"{where}.context", encoder),
    )


def _encode_name(cls: type, where: str) -> str:
    name = class_name(cls)
    if subclass_registry.find(cls) is not None:
        return name
    try:
        return names.encode_class(cls, where=where)
    except UnsupportedValueError as error:
        raise UnsupportedTensorError(
            f"the tensor subclass {name} cannot be found by its name",
            where=where,
            fix="Define it at the top level of a module, or call "
            f"torch_fakeify.register_subclass({cls.__name__}) in writer and reader.",
        ) from error


@contextmanager
def _advising(cls: type, what: str, kind: str) -> Generator[None, None, None]:
    """Raise what cannot be encoded as an error of the tensor, with the remedy for its class."""
    try:
        yield
    except UnsupportedValueError as error:
        raise UnsupportedTensorError(
            f"{what} cannot be encoded: {error.what}",
            where=error.where,
            expected=error.expected,
            found=error.found,
            fix=f"Call torch_fakeify.register_subclass({cls.__name__}, encode_ctx=..., "
            f"decode_ctx=...) with functions from the {kind} to plain data and back.",
        ) from error


def _encode_context(
    cls: type, name: str, context: object, where: str, encoder: ContextEncoder
) -> Value:
    registration = subclass_registry.find(cls)
    with _advising(cls, f"the context of {name}", "context"):
        if registration is None or registration.encode is None:
            return encoder.encode(context, where)
        data = encoder.encode(registration.encode(context), where)
        return OpaqueValue(kind=_REGISTERED, data=data)


def encode_flattened(
    t: torch.Tensor, *, where: str, ints: EncodeHook | None, tensors: EncodeTensor
) -> tuple[tuple[str, ...], Value]:
    """The inner attributes of a wrapper subclass and the record of its context.

    ``ints`` and ``tensors`` are those of a `ContextEncoder`.

    Raises:
        UnsupportedTensorError: the context cannot be recorded.
    """
    tensor: Any = t
    name = class_name(type(t))
    attributes, context = tensor.__tensor_flatten__()
    encoder = ContextEncoder(_package(name), ints, tensors)
    return tuple(attributes), _encode_context(type(t), name, context, f"{where}.context", encoder)


def _package(name: str) -> str:
    return name.partition(".")[0]


# --- decode ---------------------------------------------------------------------------------------


def subclass_of(record: SubclassDesc, *, where: str) -> type[Any]:
    """The class of a record, among those registered, torch's and those already imported.

    Raises:
        UnknownNameError: there is no such class, or it is not a traceable wrapper subclass.
    """
    name = record.cls
    registration = subclass_registry.find_class(name)
    cls = torch_fakes.own_subclass(name) if registration is None else registration.cls
    if cls is None:
        cls = names.find_class(name)
    if cls is None:
        raise UnknownNameError(
            f"the tensor subclass {name!r} is not known in this process",
            where=where,
            fix=_how_to_know(name),
        )
    is_wrapper = issubclass(cls, torch.Tensor) and all(
        names.hasattr_static(cls, method) for method in _PROTOCOL
    )
    if not is_wrapper:
        raise UnknownNameError(
            f"the class {name!r} is no traceable wrapper subclass",
            where=where,
            expected=f"a tensor subclass with {' and '.join(_PROTOCOL)}",
        )
    return cls


def unflatten(
    record: SubclassDesc,
    inner: dict[str, Any],
    context: object,
    size: Any,
    stride: Any,
    *,
    where: str,
) -> Any:
    """Make the tensor by the class's ``__tensor_unflatten__``.

    Raises:
        UnknownNameError: the class is unknown.
        ConvertError: the class does not accept the parts.
    """
    cls = subclass_of(record, where=where)
    try:
        return cls.__tensor_unflatten__(inner, context, size, stride)
    except (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ConvertError(
            f"{record.cls} makes no tensor of these parts",
            where=where,
            expected="what its __tensor_flatten__ gives",
            found=f"{', '.join(map(repr, inner))} ({type(error).__name__}: {error})",
        ) from error


def _how_to_know(name: str) -> str:
    module, _, short = name.rpartition(".")
    is_importable = all(part.isidentifier() and part.isascii() for part in name.split("."))
    if is_importable and module and module != "__main__":
        return f"Run `import {module}` first if you trust it."
    return f"Define it and call torch_fakeify.register_subclass({short}) first."


def context_decoder(
    record: SubclassDesc,
    ints: DecodeHook | None = None,
    tensors: DecodeTensor | None = None,
    meshes: Meshes | None = None,
) -> ContextDecoder:
    """Return the decoder of the context and opaque attributes of a record.

    ``meshes`` is one cache for all tensors that share meshes.
    """
    return ContextDecoder(_package(record.cls), ints, tensors, meshes or Meshes())


def decode_context(
    record: SubclassDesc, decoder: ContextDecoder | None = None, *, where: str
) -> object:
    """The context of a record, for ``__tensor_unflatten__``.

    Without a decoder of `context_decoder`, symbolic integers and tensors are refused.

    Raises:
        FormatError: the record is invalid.
        UnknownNameError: a class is unknown or not allowed, or the subclass is not registered.
    """
    context = record.context
    at = f"{where}.context"
    decoder = decoder or context_decoder(record)
    if not (isinstance(context, OpaqueValue) and context.kind == _REGISTERED):
        return decoder.decode(context, at)
    registration = subclass_registry.find_class(record.cls)
    if registration is None or registration.decode is None:
        raise UnknownNameError(
            f"the context of {record.cls} was written by a registered function",
            where=at,
            fix=f"Call torch_fakeify.register_subclass({record.cls.rpartition('.')[2]}, "
            "encode_ctx=..., decode_ctx=...) first, as the writer did.",
        )
    return registration.decode(decoder.decode(context.data, at))


def decode_opaques(
    record: SubclassDesc, decoder: ContextDecoder | None = None, *, where: str
) -> dict[str, object]:
    """The inner attributes of a record other than tensors, such as a ``DeviceMesh``.

    The arguments are those of `decode_context`.

    Raises:
        FormatError: an attribute is invalid or occurs twice.
        UnknownNameError: a class is unknown or not allowed.
    """
    found: dict[str, object] = {}
    decoder = decoder or context_decoder(record)
    taken = {attribute for attribute, _ in record.tensors}
    for attribute, v in record.opaques:
        at = f"{where}.{attribute}"
        if attribute in taken or attribute in found:
            raise FormatError("an inner attribute occurs twice", where=at)
        found[attribute] = decoder.decode(v, at)
    return found
