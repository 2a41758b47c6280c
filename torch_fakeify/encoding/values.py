"""Python constants <-> ``records.tensor.Value``.

Exact types are preserved: ``True`` is not ``1``, a tuple is not a list, a ``torch.Size`` is not a tuple.
Objects without a record (generators, modules, tensors without a hook, other classes, a subclass of
``int`` or ``str``) are refused with their path. Decoding makes plain data only; classes of enumeration
members and named tuples come from ``names.decode_class``, and a named tuple is made without calling its
class's ``__new__``.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list
from typing_extensions import assert_never

from torch_fakeify.errors import (
    FormatError,
    LimitError,
    UnknownNameError,
    UnsupportedValueError,
    class_name,
)
from torch_fakeify.records.tensor import (
    BytesValue,
    ComplexValue,
    DictValue,
    EllipsisValue,
    EnumValue,
    ExprValue,
    FloatValue,
    FunctionValue,
    ListValue,
    NamedTupleValue,
    NodeValue,
    OpaqueValue,
    RangeValue,
    SetValue,
    SizeValue,
    SliceValue,
    SourceValue,
    SymValue,
    TensorValue,
    TorchConstValue,
    TupleValue,
    TypeValue,
    Value,
)

from . import names

EncodeHook: TypeAlias = Callable[[object], "Value | None"]
"""Encodes an object; ``None`` for objects that the hook does not support."""

DecodeHook: TypeAlias = Callable[[Value], object]
"""Decodes a record; ``NotImplemented`` for records that the hook does not support."""


class Located(NamedTuple):
    """A hook that also takes the path of the object, for errors in its parts."""

    ask: Callable[[Any, str], Any]

    def __call__(self, item: Any) -> Any:
        """The result for an item without a path."""
        return self.ask(item, "$")


MAX_DEPTH = 64
"""Maximum depth of nested containers."""

MAX_EQUAL_HASHES = 64
"""Maximum number of keys of a dictionary, or items of a set, with equal hashes. An integer of 64 bits
shares its hash with up to eight others and some 33 floats."""

_PLAIN = frozenset({type(None), bool, int})
_SCALARS = _PLAIN | {float, str}

_UNOWNED = frozenset({TupleValue, ListValue, DictValue})
"""Records that are not passed to hooks, except for their parts."""


# --- encode ---------------------------------------------------------------------------------------


def encode_value(
    obj: object, *, where: str = "$", hook: EncodeHook | None = None, _depth: int = 0
) -> Value:
    """The record of a constant.

    The hook is called first for each part other than plain scalars, for additional types.

    Raises:
        UnsupportedValueError: a part has no record; the error has its path.
    """
    kind = type(obj)
    if kind in _PLAIN:
        return obj  # pyright: ignore[reportReturnType]
    if kind is str:
        return _encode_str(obj, where)  # pyright: ignore[reportArgumentType]
    if kind is float:
        return _encode_float(obj)  # pyright: ignore[reportArgumentType]
    if hook is not None:
        owned = hook.ask(obj, where) if isinstance(hook, Located) else hook(obj)
        if owned is not None:
            return owned
    if _depth > MAX_DEPTH:
        raise UnsupportedValueError(
            "a constant is nested too deeply (or contains itself)",
            where=where,
            expected=f"at most {MAX_DEPTH} levels",
        )

    def part(item: object, suffix: str) -> Value:
        return encode_value(item, where=where + suffix, hook=hook, _depth=_depth + 1)

    container = _CONTAINERS.get(kind)
    return _encode_atom(obj, where, part) if container is None else container(obj, part)


_Part: TypeAlias = Callable[[object, str], Value]


def _items(obj: Iterable[object], part: _Part) -> tuple[Value, ...]:
    return tuple(
        [item if type(item) in _PLAIN else part(item, f"[{i}]") for i, item in enumerate(obj)]  # type: ignore[misc]
    )


def _encode_set(obj: Any, part: _Part) -> Value:
    # The order of a set depends on the process: the records are sorted by their text.
    items = sorted((part(item, "{}") for item in obj), key=repr)
    return SetValue(items=tuple(items), frozen=isinstance(obj, frozenset))


def _encode_dict(obj: Any, part: _Part) -> Value:
    if all(map(_is_ascii, obj)) and all(map(_is_ascii, obj.values())):
        return DictValue(items=tuple(obj.items()), immutable=type(obj) is immutable_dict)
    items = tuple((part(k, "{key}"), part(v, f"[{_short(k)}]")) for k, v in obj.items())
    return DictValue(items=items, immutable=type(obj) is immutable_dict)


def _is_ascii(part: object) -> bool:
    return type(part) is str and part.isascii()


def _short(key: object) -> str:
    return repr(key) if isinstance(key, (str, int)) else f"<{type(key).__name__}>"


_CONTAINERS: dict[type, Callable[[Any, _Part], Value]] = {
    tuple: lambda obj, part: TupleValue(items=_items(obj, part)),
    list: lambda obj, part: ListValue(items=_items(obj, part)),
    immutable_list: lambda obj, part: ListValue(items=_items(obj, part), immutable=True),
    torch.Size: lambda obj, part: SizeValue(items=_items(obj, part)),
    dict: _encode_dict,
    immutable_dict: _encode_dict,
    set: _encode_set,
    frozenset: _encode_set,
    slice: lambda obj, part: SliceValue(
        start=part(obj.start, ".start"), stop=part(obj.stop, ".stop"), step=part(obj.step, ".step")
    ),
    range: lambda obj, _: RangeValue(start=obj.start, stop=obj.stop, step=obj.step),
}


def _encode_str(obj: str, where: str) -> str:
    try:
        obj.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedValueError(
            "a string is not valid Unicode", where=where, found=repr(obj)
        ) from error
    return obj


def _encode_float(obj: float) -> float | FloatValue:
    if math.isfinite(obj):
        return obj
    return FloatValue(text="nan" if math.isnan(obj) else "inf" if obj > 0 else "-inf")


def _encode_atom(obj: object, where: str, part: _Part) -> Value:
    if isinstance(obj, enum.Enum) or names.is_pybind_enum(type(obj)):
        return _encode_enum(obj, where)
    if type(obj) is complex:
        return ComplexValue(real=_encode_float(obj.real), imag=_encode_float(obj.imag))
    if type(obj) is bytes:
        return BytesValue(data=obj)
    if obj is ...:
        return EllipsisValue()
    for kind, const in _CONST_CLASSES.items():
        if isinstance(obj, const):
            return TorchConstValue(kind=kind, name=str(obj).removeprefix("torch."))
    if isinstance(obj, tuple) and names.is_record_tuple(type(obj)):
        return _encode_named_tuple(obj, where, part)
    if isinstance(obj, type):
        return TypeValue(name=names.encode_class(obj, where=where))
    if isinstance(obj, names.CALLABLES):
        return names.encode_function(obj, where=where)
    raise UnsupportedValueError(
        "a value has no record",
        where=where,
        expected="a constant",
        found=f"an object of {class_name(type(obj))}",
        fix=_ADVICE.get(class_name(type(obj))),
    )


_ADVICE = {
    "builtins.generator": "Make it a list or a tuple first.",
    "builtins.module": "Pass the function that you need of it.",
    "builtins.method": "Pass a function.",
    "functools.partial": "Pass a function that is registered as an operator.",
    "torch._C.Generator": "Seed the default generator instead.",
}


def _encode_enum(obj: Any, where: str) -> Value:
    cls = type(obj)
    name = obj.name
    members = cls.__members__
    if not isinstance(name, str) or members.get(name) != obj:
        # A combination of flags has no name of its own.
        raise UnsupportedValueError(
            "a value is no named member of its enumeration", where=where, found=repr(obj)
        )
    return EnumValue(cls=names.encode_class(cls, where=where), name=name)


_CONST_CLASSES: dict[Literal["dtype", "device", "layout", "memory_format", "qscheme"], type] = {
    "dtype": torch.dtype,
    "device": torch.device,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
    "qscheme": torch.qscheme,
}
"""Classes of torch's constants by the kind of their record."""


def _encode_named_tuple(obj: tuple[object, ...], where: str, part: _Part) -> NamedTupleValue:
    cls = type(obj)
    extra: dict[str, object] = getattr(obj, "__dict__", {})
    if extra:
        raise UnsupportedValueError(
            "a named tuple has attributes beside its fields",
            where=where,
            found=f"{', '.join(sorted(extra))} on {class_name(cls)}",
        )
    return NamedTupleValue(cls=names.encode_class(cls, where=where), items=_items(obj, part))


# --- decode ---------------------------------------------------------------------------------------


def decode_value(
    v: Value, *, where: str = "$", hook: DecodeHook | None = None, _depth: int = 0
) -> Any:
    """The constant of a record.

    The hook is called first for each part that is a record, except tuples, lists and dictionaries.

    Raises:
        FormatError: the record is invalid.
        UnknownNameError: a class or function is unknown or not allowed.
    """
    kind = type(v)
    if kind in _SCALARS:
        return v
    if hook is not None and kind not in _UNOWNED:
        owned = hook.ask(v, where) if isinstance(hook, Located) else hook(v)
        if owned is not NotImplemented:
            return owned
    if _depth > MAX_DEPTH:
        raise LimitError(
            "a constant is nested too deeply", where=where, expected=f"at most {MAX_DEPTH} levels"
        )

    def part(item: Value, suffix: str) -> Any:
        return decode_value(item, where=where + suffix, hook=hook, _depth=_depth + 1)

    def parts(items: tuple[Value, ...]) -> list[Any]:
        return [
            item if type(item) in _SCALARS else part(item, f".items[{i}]")
            for i, item in enumerate(items)
        ]

    match v:  # the most frequent types of a graph first
        case TupleValue():
            return tuple(parts(v.items))
        case DictValue():
            return _decode_dict(v, where, part)
        case ListValue():
            return immutable_list(parts(v.items)) if v.immutable else parts(v.items)
        case None | bool() | int() | float() | str():
            return v
        case FloatValue():
            return _decode_float(v)
        case ComplexValue():
            return complex(_decode_float(v.real), _decode_float(v.imag))
        case BytesValue():
            return v.data
        case EllipsisValue():
            return ...
        case SizeValue():
            return _decode_size(parts(v.items), where)
        case SetValue():
            return _decode_set(v, parts(v.items), where)
        case SliceValue():
            return slice(part(v.start, ".start"), part(v.stop, ".stop"), part(v.step, ".step"))
        case RangeValue():
            return _decode_range(v, where)
        case TorchConstValue():
            return _decode_torch_const(v, where)
        case EnumValue():
            return _decode_enum(v, where)
        case NamedTupleValue():
            return _decode_named_tuple(v, parts(v.items), where)
        case TypeValue():
            return names.decode_class(v.name, where=where)
        case FunctionValue():
            return names.decode_function(v, where=where)
        case SymValue() | ExprValue() | TensorValue() | SourceValue() | NodeValue() | OpaqueValue():
            raise FormatError(
                "a value of this kind has no meaning here",
                where=where,
                expected="a constant",
                found=type(v).__name__,
            )
        case _:
            assert_never(v)


def decode_dtype(name: str, where: str = "$.dtype") -> torch.dtype:
    """Return the dtype of a name.

    Raises:
        UnknownNameError: torch has no such dtype.
    """
    dtype = decode_value(TorchConstValue(kind="dtype", name=name), where=where)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _decode_float(v: float | FloatValue) -> float:
    return float(v.text) if isinstance(v, FloatValue) else v


def _decode_size(items: list[Any], where: str) -> torch.Size:
    for i, item in enumerate(items):
        if type(item) is not int and not isinstance(item, torch.SymInt):
            raise FormatError(
                "not a size",
                where=f"{where}.items[{i}]",
                expected="an integer",
                found=type(item).__name__,
            )
    return torch.Size(items)


def _check_hashes(keys: Sequence[Any], where: str) -> None:
    """Raise for many keys with equal hashes, which make a dictionary quadratic.

    Python randomizes the hashes of strings and bytes, but not of tuples of numbers.

    Raises:
        TypeError: one of them has no hash.
    """
    if len(keys) <= MAX_EQUAL_HASHES:
        return
    ((_, most),) = Counter(map(hash, keys)).most_common(1)
    if most > MAX_EQUAL_HASHES:
        raise LimitError(
            "too many keys have one hash",
            where=where,
            expected=f"at most {MAX_EQUAL_HASHES}",
            found=str(most),
        )


def _decode_set(v: SetValue, items: list[Any], where: str) -> set[Any] | frozenset[Any]:
    try:
        _check_hashes(items, where)
        found = frozenset(items)
    except TypeError as error:
        raise FormatError(f"not the items of a set: {error}", where=where) from error
    if len(found) != len(items):
        raise FormatError("an item occurs twice in a set", where=where)
    return found if v.frozen else set(found)


def _decode_dict(v: DictValue, where: str, part: Callable[[Value, str], Any]) -> dict[Any, Any]:
    keys = [
        k if type(k) in _SCALARS else part(k, f".items[{i}][0]") for i, (k, _) in enumerate(v.items)
    ]
    result: dict[Any, Any] = {}
    for i, (key, (_, item)) in enumerate(zip(keys, v.items, strict=True)):
        try:
            if i == MAX_EQUAL_HASHES:
                _check_hashes(keys, where)
            is_repeated = key in result
        except TypeError as error:
            raise FormatError(f"not a key: {error}", where=f"{where}.items[{i}][0]") from error
        if is_repeated:
            raise FormatError("a key occurs twice in a dictionary", where=f"{where}.items[{i}][0]")
        result[key] = item if type(item) in _SCALARS else part(item, f".items[{i}][1]")
    return immutable_dict(result) if v.immutable else result


def _decode_range(v: RangeValue, where: str) -> range:
    bounds = (v.start, v.stop, v.step)
    for bound in bounds:
        if type(bound) is not int:
            raise FormatError(
                "not a bound of a range",
                where=where,
                expected="an integer",
                found=type(bound).__name__,
            )
    if v.step == 0:
        raise FormatError("the step of a range is zero", where=where)
    return range(*bounds)  # pyright: ignore[reportArgumentType]


def _decode_torch_const(v: TorchConstValue, where: str) -> Any:
    if v.kind == "device":
        try:
            return torch.device(v.name)
        except RuntimeError as error:
            raise FormatError("not a device", where=where, found=repr(v.name)) from error
    found = vars(torch).get(v.name)
    if isinstance(found, _CONST_CLASSES[v.kind]):
        return found
    raise FormatError(f"torch has no {v.kind} of that name", where=where, found=repr(v.name))


def _decode_enum(v: EnumValue, where: str) -> Any:
    cls = names.decode_class(v.cls, where=where)
    if not (issubclass(cls, enum.Enum) or names.is_pybind_enum(cls)):
        raise FormatError("not an enumeration", where=where, found=repr(v.cls))
    members: Mapping[str, Any] = getattr(cls, "__members__")  # noqa: B009
    if v.name not in members:
        raise UnknownNameError(
            f"the enumeration {v.cls} has no member {v.name!r}",
            where=where,
            expected=", ".join(members),
        )
    return members[v.name]


def _decode_named_tuple(v: NamedTupleValue, items: list[Any], where: str) -> Any:
    cls: Any = names.decode_class(v.cls, where=where)
    if not names.is_record_tuple(cls):
        raise FormatError("not a named tuple class", where=where, found=repr(v.cls))
    is_struct = names.hasattr_static(cls, "n_sequence_fields")
    expected = cls.n_sequence_fields if is_struct else len(cls._fields)
    if len(items) != expected:
        raise FormatError(
            f"wrong number of fields for {v.cls}",
            where=where,
            expected=str(expected),
            found=str(len(items)),
        )
    # The class may be a user's: its own __new__ must not run.
    return cls(items) if is_struct else tuple.__new__(cls, items)
