"""``torch._guards.Source`` trees <-> records.

Sources are dataclasses, so one encoder serves all classes of ``torch._dynamo.source``: the
dataclass fields are the record. Only classes that torch defines are supported; fields at their defaults
are omitted. Decoding checks every field against the class's annotation, because torch renders some
fields into Python text that it evaluates later.
"""

from __future__ import annotations

import dataclasses
import functools
import keyword
import types
import typing
from typing import TYPE_CHECKING, Any

from torch_fakeify.compat import torch_dynamo
from torch_fakeify.errors import (
    FakeifyError,
    FormatError,
    LimitError,
    UnknownNameError,
    UnsupportedValueError,
    class_name,
)
from torch_fakeify.records.tensor import EnumValue, SourceDesc, SourceValue, Value

from .values import decode_value, encode_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


class DecodeMemo(dict[int, "torch_dynamo.Source"]):
    """Sources by ``id`` of a record."""

    __slots__ = ("alive",)

    def __init__(self) -> None:
        self.alive: list[SourceDesc] = []
        """Strong references to the records whose ids are keys."""


MAX_NESTING = 50
"""Maximum depth of sources in fields of other sources; chains of ``base`` are not limited."""

_PROPERTY = "torch._dynamo.source.TensorProperty"
_RECORD = "_fakeify_record"


# --- the closed table of source classes -----------------------------------------------------------


class _SourceClass(typing.NamedTuple):
    """A supported source class."""

    cls: type[Any]
    is_chained: bool
    """Whether it has a ``base``."""
    fields: dict[str, Any]
    """Annotations of the constructor's fields, except ``base``."""
    defaults: dict[str, Any]
    is_bare: bool
    """Whether a source is made without the constructor, which would only set the fields."""


# Fields whose values do not match torch's annotation.
_TAKEN: Mapping[tuple[str, str], Any] = types.MappingProxyType(
    {("LocalSource", "dynamism"): frozenset[str | tuple[str, tuple[bool, ...]]] | None}
)


def _is_identifier(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text)


def _is_dotted(text: str) -> bool:
    return all(map(_is_identifier, text.split(".")))


def _is_inert(text: str) -> bool:
    """Whether evaluating the text cannot call anything."""
    return not any(sign in text for sign in "()@;\n\r")


RENDERED_RAW: Mapping[tuple[str, str], Callable[[str], bool]] = types.MappingProxyType(
    {
        ("ImportSource", "module_name"): _is_dotted,
        ("DefaultsSource", "idx_key"): _is_identifier,
        ("GradSource", "member"): _is_identifier,
        ("ConstantSource", "source_name"): _is_inert,
    }
)
"""Checks of fields that torch inserts into Python text verbatim, by class and field."""


@functools.cache
def _source_classes() -> Mapping[str, _SourceClass]:
    """Every source class that torch defines, by name."""
    module = torch_dynamo.dynamo_source()
    found = {
        cls.__name__: cls
        for cls in vars(module).values()
        if isinstance(cls, type)
        and issubclass(cls, torch_dynamo.Source)
        and cls.__module__ in (module.__name__, torch_dynamo.Source.__module__)
    }
    return types.MappingProxyType({name: _inspect(cls) for name, cls in found.items()})


def _inspect(cls: type[Any]) -> _SourceClass:
    hints = typing.get_type_hints(cls)
    declared = dataclasses.fields(cls)
    taken = {field.name: field.default for field in declared if field.init}
    only_sets = len(taken) == len(declared) and not hasattr(cls, "__post_init__")
    return _SourceClass(
        cls,
        "base" in taken,
        {name: _TAKEN.get((cls.__name__, name), hints[name]) for name in taken if name != "base"},
        {name: value for name, value in taken.items() if value is not dataclasses.MISSING},
        # That of ImportSource adds a guard to the frame that is compiled; there is none.
        is_bare=only_sets or cls.__name__ == "ImportSource",
    )


# --- sources --------------------------------------------------------------------------------------


def source_of(fx_node: Any) -> Any | None:
    """Dynamo's source of the input of a placeholder, or ``None``."""
    source = getattr(fx_node, "_dynamo_source", None)
    if source is None:
        source = getattr(fx_node.meta.get("grapharg"), "source", None)
    return source


def encode_source(source: torch_dynamo.Source) -> SourceDesc:
    """The record of a source; each source object has one record object.

    The record is cached on the source, since a model's parameters share most of their bases.

    Raises:
        UnsupportedValueError: the class is not torch's, or a field has no record.
        LimitError: sources are nested too deeply in fields of other sources.
    """
    return _encode_source(source, MAX_NESTING)


def _encode_source(source: torch_dynamo.Source, left: int) -> SourceDesc:
    chain: list[torch_dynamo.Source] = []
    current: torch_dynamo.Source | None = source
    desc: SourceDesc | None = None
    while current is not None and (desc := vars(current).get(_RECORD)) is None:
        chain.append(current)
        current = getattr(current, "base", None)
    for link in reversed(chain):
        desc = _encode_link(link, desc, left)
        # Set like torch's cached hash of a frozen dataclass. It is not a field, so it does not
        # affect equality, copies and pickles.
        object.__setattr__(link, _RECORD, desc)
    return typing.cast("SourceDesc", desc)


def _encode_link(source: Any, base: SourceDesc | None, left: int) -> SourceDesc:
    cls = type(source)
    source_class = _source_classes().get(cls.__name__)
    if source_class is None or source_class.cls is not cls:
        raise UnsupportedValueError(
            "a source class has no record",
            where=name_of(source),
            expected="a class of torch._dynamo.source",
            found=class_name(cls),
            fix="Give the source as one of torch's own classes",
        )
    fields: list[tuple[str, Value]] = []
    for name in source_class.fields:
        value = getattr(source, name)
        if name == "index" and getattr(source, "index_is_slice", False):
            value = source.unpack_slice()
        elif name == "index_is_slice" and value:
            continue  # implied by a slice in ``index``
        default = source_class.defaults.get(name, dataclasses.MISSING)
        if type(value) is type(default) and value == default:
            continue
        where = f"{name_of(source)} ({cls.__name__}.{name})"
        # Refused here, since no reader would accept it.
        _check_rendered((cls.__name__, name), value, where, UnsupportedValueError)
        fields.append((name, _encode_field(value, where, left)))
    return SourceDesc(cls=cls.__name__, name=name_of(source), base=base, fields=tuple(fields))


def _encode_field(value: object, where: str, left: int) -> Value:
    def own(part: object) -> Value | None:
        if isinstance(part, torch_dynamo.Source):
            _check_nesting(left, where)
            return SourceValue(source=_encode_source(part, left - 1))
        if isinstance(part, torch_dynamo.dynamo_source().TensorProperty):
            return EnumValue(cls=_PROPERTY, name=part.name)  # pyright: ignore[reportAttributeAccessIssue]
        return None

    return encode_value(value, where=where, hook=own)


def _check_nesting(left: int, where: str) -> None:
    if left == 0:
        raise LimitError(f"sources are nested deeper than {MAX_NESTING} levels", where=where)


def _check_rendered(
    field: tuple[str, str], value: object, where: str, error: type[FakeifyError]
) -> None:
    """Raise for a text that torch would insert into Python text as more than a name."""
    check = RENDERED_RAW.get(field)
    if check is not None and isinstance(value, str) and not check(value):
        raise error("a field of a source is no identifier", where=where, found=repr(value))


def name_of(source: Any) -> str:
    """Torch's name of a source, or the name of its class if torch has none."""
    try:
        name = source.name
    except (AssertionError, AttributeError, RuntimeError):
        # Torch refuses names of sources that nothing may guard on: NotImplementedError is a
        # RuntimeError; slices of lists and sources as plain indices assert.
        return type(source).__name__
    return name if isinstance(name, str) else type(source).__name__


def decode_source(d: SourceDesc, *, memo: DecodeMemo | None = None) -> torch_dynamo.Source:
    """The source of a record, whose ``name`` is not used.

    Records with a common base share its source if they are decoded with one ``memo``.

    Raises:
        UnknownNameError: torch has no such source class.
        FormatError: a field is missing, unknown or has the wrong type.
    """
    return decode_sources((d,), DecodeMemo() if memo is None else memo)[0]


def decode_sources(
    records: Iterable[SourceDesc], memo: DecodeMemo, left: int = MAX_NESTING
) -> list[torch_dynamo.Source]:
    """Decode many sources, with at most ``left`` levels of sources in fields; see `decode_source`."""
    decoded: list[Any] = []
    for d in records:
        chain: list[SourceDesc] = []
        record: SourceDesc | None = d
        source: torch_dynamo.Source | None = None
        while record is not None and (source := memo.get(id(record))) is None:
            chain.append(record)
            record = record.base
        for link in reversed(chain):
            source = memo[id(link)] = _decode_link(link, source, memo, left)
            memo.alive.append(link)
        decoded.append(source)
    return decoded


def _decode_link(
    d: SourceDesc, base: torch_dynamo.Source | None, memo: DecodeMemo, left: int
) -> torch_dynamo.Source:
    source_class = _source_classes().get(d.cls)
    if source_class is None:
        raise UnknownNameError(
            "no such source class",
            where=d.name,
            expected="a class of torch._dynamo.source",
            found=d.cls,
        )
    if source_class.is_chained != (base is not None):
        expected, found = ("a base", "none") if source_class.is_chained else ("no base", "one")
        raise FormatError(
            "a source has the wrong base", where=_where_of(d), expected=expected, found=found
        )
    values: dict[str, Any] = {} if base is None else {"base": base}
    is_plain = True
    for name, value in d.fields:
        if name not in source_class.fields or name in values:
            raise FormatError(
                "a source has a field that is unknown or occurs twice",
                where=_where_of(d),
                expected=" | ".join(source_class.fields) or "no field",
                found=name,
            )
        hint = source_class.fields[name]
        if type(value) is hint and hint in _PLAIN and (d.cls, name) not in RENDERED_RAW:
            values[name] = value  # as most are: there are thousands in the capture of a model
            continue
        where, is_plain = f"{_where_of(d)}.{name}", False
        values[name] = _decode_field(value, where, memo, left)
        if not _is_a(values[name], hint):
            raise FormatError(
                "a field of a source has the wrong type",
                where=where,
                expected=getattr(hint, "__name__", str(hint)),
                found=type(values[name]).__name__,
            )
        _check_rendered((d.cls, name), values[name], where, FormatError)
    for name in source_class.fields:
        if name not in values and name not in source_class.defaults:
            raise FormatError("a source lacks a field", where=_where_of(d), expected=name)
    try:
        if source_class.is_bare:
            source = object.__new__(source_class.cls)
            vars(source).update(source_class.defaults | values)
        else:
            source = source_class.cls(**values)
        if not is_plain:
            hash(source)
    except (AssertionError, TypeError, ValueError) as error:
        raise FormatError(
            "a source cannot be made", where=_where_of(d), found=str(error)
        ) from error
    return source


_PLAIN = frozenset({str, int, bool})


def _where_of(d: SourceDesc) -> str:
    return f"{d.name} ({d.cls})"


def _decode_field(value: Value, where: str, memo: DecodeMemo, left: int) -> Any:
    def own(part: Value) -> object:
        if isinstance(part, SourceValue):
            _check_nesting(left, where)
            return decode_sources((part.source,), memo, left - 1)[0]
        if isinstance(part, EnumValue) and part.cls == _PROPERTY:
            members = torch_dynamo.dynamo_source().TensorProperty.__members__
            if part.name not in members:
                raise UnknownNameError("no such tensor property", where=where, found=part.name)
            return members[part.name]
        return NotImplemented

    return decode_value(value, where=where, hook=own)


def _is_a(value: object, hint: Any) -> bool:
    """Whether a value has exactly the annotated type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is object:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_is_a(value, arg) for arg in args)
    if origin is frozenset:
        return isinstance(value, frozenset) and all(_is_a(item, args[0]) for item in value)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = args[:1] * len(value) if args[-1] is ... else args
        return len(value) == len(kinds) and all(map(_is_a, value, kinds))
    return type(value) is (hint if hint is not None else type(None))
