"""``torch._guards.Source`` trees <-> records.

Sources are dataclasses, so one encoder serves all classes of ``torch._dynamo.source``: the
dataclass fields are the record. Only classes that torch itself defines are known; a field at its
default is left out. Decoding checks every field against the class's annotation, because torch
renders some fields into Python text that it evaluates later.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from . import _torch
from .desc import (
    EnumValue,
    SourceDesc,
    SourceValue,
    Value,
)
from .errors import (
    FormatError,
    LimitError,
    UnknownNameError,
    UnsupportedValueError,
)
from .source_fields import RENDERED_RAW, is_a
from .values import decode_value, encode_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = [
    "DecodeMemo",
    "EncodeMemo",
    "decode_source",
    "decode_sources",
    "encode_source",
    "name_of",
    "source_of",
]

EncodeMemo: TypeAlias = "dict[int, tuple[_torch.Source, SourceDesc]]"
"""By ``id`` of a source: equal sources may differ in ``1`` and ``True``."""


class DecodeMemo(dict[int, "_torch.Source"]):
    """By ``id`` of a record."""

    __slots__ = ("alive",)

    def __init__(self) -> None:
        self.alive: list[SourceDesc] = []
        """The records, whose ids are in the keys."""


MAX_NESTING = 50
"""Sources inside the fields of other sources; chains of ``base`` are not bounded by it."""

_PROPERTY = "torch._dynamo.source.TensorProperty"
_RECORD = "_fakeify_record"
_new: Any = object.__new__
_set_attribute = object.__setattr__
"""Also of a frozen dataclass."""


# --- the closed table of source classes -----------------------------------------------------------


class _SourceClass(msgspec.Struct, frozen=True):
    """What is known of one source class."""

    cls: type[Any]
    chained: bool
    """Whether it has a base."""
    fields: dict[str, Any]
    """Annotations of the fields that its constructor takes, except ``base``."""
    defaults: dict[str, Any]
    plain: dict[str, type[Any]]
    """The fields that are a ``str``, ``int`` or ``bool`` and may have any value of it."""
    required: frozenset[str]
    bare: dict[str, Any] | None
    """Every field and its default, where all that the constructor does is to set them."""
    naming: _Naming | None
    """How an instance is named."""
    link: _Link | None
    """How one over another source is made that one field at most tells from it."""


class _Naming(NamedTuple):
    """How torch names a source of which one text says all, if that is an identifier."""

    cls: type[Any]
    field: str
    before: str
    after: str
    values: dict[str, Any]
    """Of all fields, and of what torch caches of the name."""


class _Link(NamedTuple):
    """A source over another one of which no field, or one that is plain, says the rest."""

    cls: type[Any]
    values: dict[str, Any]
    """Of all fields where they are not given."""
    needed: str | None
    """The field that has to be given."""
    kinds: dict[str, frozenset[type[Any]]]
    """Of the others and this one: types of which it may have any value."""
    is_name: bool = False
    """Whether what is given may have no dot."""


# What the constructor takes as it is: a literal, of which it asks for the type.
_LITERALS: Mapping[tuple[str, str], frozenset[type[Any]]] = types.MappingProxyType(
    {("DictGetItemSource", "index"): frozenset({str, int})}
)
# The same of a name: it looks for dots.
_NAMES = frozenset({"AttrSource", "ParamBufferSource", "UnspecializedParamBufferSource"})

# Fields that torch annotates as what it does not put there: of which sizes a name was seen with.
_TAKEN: Mapping[tuple[str, str], Any] = types.MappingProxyType(
    {("LocalSource", "dynamism"): frozenset[str | tuple[str, tuple[bool, ...]]] | None}
)


@functools.cache
def _source_classes() -> Mapping[str, _SourceClass]:
    """Every source class that torch defines, by name."""
    module = _torch.dynamo_source()
    found = {
        cls.__name__: cls
        for cls in vars(module).values()
        if isinstance(cls, type)
        and issubclass(cls, _torch.Source)
        and cls.__module__ in (module.__name__, _torch.Source.__module__)
    }
    return types.MappingProxyType({name: _inspect(cls) for name, cls in found.items()})


@functools.cache
def _links() -> dict[str, _Link]:
    """How sources over others are made, by the names of the classes for which there is a way."""
    found = {name: known.link for name, known in _source_classes().items()}
    return {name: link for name, link in found.items() if link is not None}


@functools.cache
def _namings() -> dict[str, _Naming]:
    """How sources are made of which one text says all, by the names of their classes."""
    found = {name: known.naming for name, known in _source_classes().items()}
    return {name: naming for name, naming in found.items() if naming is not None}


def _inspect(cls: type[Any]) -> _SourceClass:
    hints = typing.get_type_hints(cls)
    taken = [field for field in dataclasses.fields(cls) if field.init]
    fields = {
        field.name: _TAKEN.get((cls.__name__, field.name), hints[field.name])
        for field in taken
        if field.name != "base"
    }
    defaults = {
        field.name: field.default for field in taken if field.default is not dataclasses.MISSING
    }
    does_more = hasattr(cls, "__post_init__") or len(taken) < len(dataclasses.fields(cls))
    bare = None if does_more else {field.name: field.default for field in taken}
    chained = any(field.name == "base" for field in taken)
    required = frozenset(fields) - frozenset(defaults)
    plain = {
        name: hint
        for name, hint in fields.items()
        if hint in (str, int, bool) and (cls.__name__, name) not in RENDERED_RAW
    }
    return _SourceClass(
        cls=cls,
        chained=chained,
        fields=fields,
        defaults=defaults,
        plain=plain,
        required=required,
        bare=bare,
        naming=None if bare is None or chained else _naming(cls, plain, required, bare),
        link=_link(cls, fields, plain, required, bare) if chained else None,
    )


def _link(
    cls: type[Any],
    fields: dict[str, Any],
    plain: dict[str, type[Any]],
    required: frozenset[str],
    bare: dict[str, Any] | None,
) -> _Link | None:
    needed = next(iter(required), None)
    if len(required) > 1:
        return None
    if bare is not None:
        return _Link(cls, bare, needed, {name: frozenset({kind}) for name, kind in plain.items()})
    is_name = cls.__name__ in _NAMES
    kinds = frozenset({str}) if is_name else _LITERALS.get((cls.__name__, needed or ""))
    if needed is None or kinds is None or fields.keys() != {needed}:
        return None
    # Does its constructor leave no more than what it is given?
    base = _torch.dynamo_source().ConstantSource("x")
    for example in ("x", 1):
        given: dict[str, Any] = {"base": base, needed: example}
        if type(example) in kinds and vars(cls(**given)) != given:
            return None
    return _Link(cls, {}, needed, {needed: kinds}, is_name)


def _naming(
    cls: type[Any], plain: dict[str, type[Any]], required: frozenset[str], bare: dict[str, Any]
) -> _Naming | None:
    name, template = cls.name, inspect.getattr_static(cls, "_name_template")
    if not type(name) is type(template) is functools.cached_property or len(required) != 1:
        return None
    (field,) = required
    example = "fakeify"
    if plain.get(field) is not str:
        return None
    before, found, after = cls(**{field: example}).name.partition(f"'{example}'")
    if not found:
        return None
    return _Naming(
        cls, field, before + "'", "'" + after, {**bare, "_name_template": "", "name": ""}
    )


# --- sources --------------------------------------------------------------------------------------


def source_of(fx_node: Any) -> Any | None:
    """Where Dynamo says that the input of a placeholder comes from."""
    source = getattr(fx_node, "_dynamo_source", None)
    if source is None:
        source = getattr(fx_node.meta.get("grapharg"), "source", None)
    return source


def encode_source(source: _torch.Source, *, memo: EncodeMemo | None = None) -> SourceDesc:
    """The record of a source; one source object always has one record object.

    A source keeps its record, as it keeps its hash and its name: a model's parameters share most
    of their bases, and are asked for often.

    Args:
        source: an instance of a class of ``torch._dynamo.source``.
        memo: a table of the caller's own to keep records in, instead of the sources.

    Raises:
        UnsupportedValueError: the class is not torch's own, or a field has no record.
        LimitError: sources are nested too deep in fields of other sources.
    """
    known = vars(source).get(_RECORD) if memo is None else None
    return _encode_source(source, memo, MAX_NESTING) if known is None else known


def _encode_source(source: _torch.Source, memo: EncodeMemo | None, left: int) -> SourceDesc:
    chain: list[_torch.Source] = []
    current: _torch.Source | None = source
    desc: SourceDesc | None = None
    while current is not None:
        desc = _known_record(current, memo)
        if desc is not None:
            break
        chain.append(current)
        current = getattr(current, "base", None)
    for link in reversed(chain):
        desc = _encode_link(link, desc, memo, left)
        if memo is None:
            # Sources are frozen dataclasses: set as torch sets their cached hash. Not a field,
            # so neither equality nor copies nor pickles see it.
            object.__setattr__(link, _RECORD, desc)
        else:
            memo[id(link)] = link, desc
    return typing.cast("SourceDesc", desc)


def _known_record(source: _torch.Source, memo: EncodeMemo | None) -> SourceDesc | None:
    if memo is None:
        return vars(source).get(_RECORD)
    found = memo.get(id(source))
    return None if found is None else found[1]


def _encode_link(
    source: Any,
    base: SourceDesc | None,
    memo: EncodeMemo | None,
    left: int,
) -> SourceDesc:
    cls = type(source)
    known = _source_classes().get(cls.__name__)
    if known is None or known.cls is not cls:
        raise UnsupportedValueError(
            "a source class has no record",
            where=name_of(source),
            expected="a class of torch._dynamo.source",
            found=f"{cls.__module__}.{cls.__qualname__}",
            fix="Give the source as one of torch's own classes",
        )
    fields: list[tuple[str, Value]] = []
    for name in known.fields:
        value = getattr(source, name)
        if name == "index" and getattr(source, "index_is_slice", False):
            value = source.unpack_slice()
        elif name == "index_is_slice" and value:
            continue  # a slice in ``index`` says it
        default = known.defaults.get(name, dataclasses.MISSING)
        if type(value) is type(default) and value == default:
            continue
        where = f"{name_of(source)} ({cls.__name__}.{name})"
        check = RENDERED_RAW.get((cls.__name__, name))
        if check is not None and isinstance(value, str) and not check(value):
            # What no reader would take is better refused here.
            raise UnsupportedValueError(
                "a field of a source is no identifier", where=where, found=repr(value)
            )
        fields.append((name, _encode_field(value, where, memo, left)))
    return SourceDesc(cls=cls.__name__, name=name_of(source), base=base, fields=tuple(fields))


def _encode_field(value: object, where: str, memo: EncodeMemo | None, left: int) -> Value:
    if value is None or type(value) in (bool, int):
        return typing.cast("Value", value)

    def own(part: object) -> Value | None:
        if isinstance(part, _torch.Source):
            if left == 0:
                raise LimitError(
                    f"sources are nested deeper than {MAX_NESTING} levels", where=where
                )
            return SourceValue(source=_encode_source(part, memo, left - 1))
        if isinstance(part, _torch.dynamo_source().TensorProperty):
            return EnumValue(cls=_PROPERTY, name=part.name)  # pyright: ignore[reportAttributeAccessIssue]
        return None

    return encode_value(value, where=where, hook=own)


def name_of(source: Any) -> str:
    """Torch's rendering, or the class name where torch has none."""
    try:
        name = source.name
    except (AssertionError, AttributeError, RuntimeError):
        # Torch refuses names of sources that nothing may guard on: NotImplementedError is a
        # RuntimeError; slices of lists and sources as plain indices assert.
        return type(source).__name__
    return name if isinstance(name, str) else type(source).__name__


def decode_source(d: SourceDesc, *, memo: DecodeMemo | None = None) -> _torch.Source:
    """The source of a record. ``name`` of the record is not read.

    Args:
        d: the record.
        memo: what the caller's earlier calls decoded; records with a common base then share its
            source.

    Raises:
        UnknownNameError: torch has no such source class.
        FormatError: a field is missing, unknown or has the wrong type.
    """
    if memo is None:
        memo = DecodeMemo()
    known = memo.get(id(d))
    if known is not None:
        return known
    if d.base is not None:
        return decode_sources((d,), memo)[0]
    source = _named(d) or _decode_link(d, None, memo, MAX_NESTING)
    memo[id(d)] = source
    memo.alive.append(d)
    return source


def base_source_of(source: _torch.Source) -> _torch.Source:
    """The source of the base of a view."""
    cls, fields, suffix = _base_of_example()
    made = _new(cls)
    own = made.__dict__
    own.update(fields)
    own["base"] = source
    name = source.__dict__.get("name")
    if name is not None:
        own["name"] = name + suffix
    return made


@functools.cache
def _base_of_example() -> tuple[type[Any], dict[str, Any], str]:
    """Its class, what it has besides base and name, and what its name has after that of the tensor."""
    sources = _torch.dynamo_source()
    example = sources.ConstantSource("x")
    base = sources.AttrSource(example, "_base")
    suffix = base.name.removeprefix(example.name)
    fields = {name: value for name, value in vars(base).items() if name not in ("base", "name")}
    return type(base), fields, suffix


def _named(d: SourceDesc) -> Any:
    """A source of which one text says all; ``None`` for all others, also where the text is unusual."""
    naming, given = _namings().get(d.cls), d.fields
    if naming is None or d.base is not None or len(given) != 1:
        return None
    cls, needed, before, after, values = naming
    ((field, text),) = given
    if type(text) is not str or field != needed or not text.isascii() or not text.isidentifier():
        return None
    source = _new(cls)
    own = source.__dict__
    own.update(values)
    own[field] = text
    own["_name_template"] = own["name"] = before + text + after
    return source


def decode_sources(
    records: Iterable[SourceDesc], memo: DecodeMemo, left: int = MAX_NESTING
) -> list[_torch.Source]:
    """As `decode_source`, of many.

    Args:
        records: the records.
        memo: as there; what is decoded here is noted.
        left: how deep sources may be nested in fields.
    """
    decoded: list[Any] = []
    known_of: Callable[[int], Any] = memo.get
    link_of, keep_alive = _links().get, memo.alive.append
    for d in records:
        chain: list[SourceDesc] = []
        record: Any = d
        source: Any = None
        while record is not None:
            source = known_of(id(record))
            if source is not None:
                break
            chain.append(record)
            record = record.base
        while chain:
            record = chain.pop()
            link = None if source is None else link_of(record.cls)
            if link is not None:
                # Over another one, without its constructor: there are thousands of them.
                cls, values, needed, kinds, is_name = link
                name, given = None, record.fields
                made = _new(cls)
                own = made.__dict__
                own.update(values)
                own["base"] = source
                if given:
                    name, value = given[0]
                    own[name] = value
                    dotted = is_name and "." in str(value)
                    if len(given) > 1 or dotted or type(value) not in kinds.get(name, ()):
                        link = None
                if link is not None and (needed is None or name == needed):
                    source = memo[id(record)] = made
                    keep_alive(record)
                    continue
            named = _named(record) if source is None else None
            source = named or _decode_link(record, source, memo, left)
            memo[id(record)] = source
            keep_alive(record)
        decoded.append(source)
    return decoded


def _decode_link(
    d: SourceDesc, base: _torch.Source | None, memo: DecodeMemo, left: int
) -> _torch.Source:
    known = _source_classes().get(d.cls)
    if known is None:
        raise UnknownNameError(
            "no such source class",
            where=d.name,
            expected="a class of torch._dynamo.source",
            found=d.cls,
        )
    if known.chained != (base is not None):
        expected, found = ("a base", "none") if known.chained else ("no base", "one")
        raise FormatError(
            "a source has the wrong base", where=_where_of(d), expected=expected, found=found
        )
    if known.bare is not None and (source := _bare(known, known.bare, d.fields, base)) is not None:
        return source
    values: dict[str, Any] = {} if base is None else {"base": base}
    is_plain = True
    for name, value in d.fields:
        if type(value) is known.plain.get(name) and name not in values:
            values[name] = value
            continue
        where, is_plain = _where_of(d), False
        if name not in known.fields or name in values:
            raise FormatError(
                "a source has a field that is unknown or occurs twice",
                where=where,
                expected=" | ".join(known.fields) or "no field",
                found=name,
            )
        values[name] = _decode_field(value, f"{where}.{name}", memo, left)
        _check_field(d.cls, name, values[name], known.fields[name], where)
    if not known.required <= values.keys():
        missing = [name for name in known.fields if name in known.required - values.keys()]
        raise FormatError("a source lacks a field", where=_where_of(d), expected=missing[0])
    return _construct(known, values, d, hashable=is_plain)


def _bare(
    known: _SourceClass, defaults: dict[str, Any], given: tuple[tuple[str, Value], ...], base: Any
) -> Any:
    """A source without its constructor; ``None`` unless all fields are there once and plain."""
    values = defaults.copy()
    if base is not None:
        values["base"] = base
    for name, value in given:
        if type(value) is not known.plain.get(name):
            return None
        values[name] = value
    for name in known.required:
        if values[name] is dataclasses.MISSING:
            return None
    if len(given) > 1 and len(dict(given)) < len(given):
        return None
    source = _new(known.cls)
    _set_attribute(source, "__dict__", values)
    return source


def _where_of(d: SourceDesc) -> str:
    return f"{d.name} ({d.cls})"


def _decode_field(value: Value, where: str, memo: DecodeMemo, left: int) -> Any:
    def own(part: Value) -> object:
        if isinstance(part, SourceValue):
            if left == 0:
                raise LimitError(
                    f"sources are nested deeper than {MAX_NESTING} levels", where=where
                )
            return decode_sources((part.source,), memo, left - 1)[0]
        if isinstance(part, EnumValue) and part.cls == _PROPERTY:
            members = _torch.dynamo_source().TensorProperty.__members__
            if part.name not in members:
                raise UnknownNameError("no such tensor property", where=where, found=part.name)
            return members[part.name]
        return NotImplemented

    return decode_value(value, where=where, hook=own)


def _construct(
    known: _SourceClass, values: dict[str, Any], d: SourceDesc, *, hashable: bool
) -> _torch.Source:
    if d.cls == "ImportSource":
        # Its __post_init__ puts a guard on the frame that is being compiled. None is.
        source = object.__new__(known.cls)
        for name, value in values.items():
            object.__setattr__(source, name, value)
        return source
    try:
        source = known.cls(**values)
        if not hashable:
            hash(source)
    except (AssertionError, TypeError, ValueError) as error:
        raise FormatError(
            "a source cannot be made", where=_where_of(d), found=str(error)
        ) from error
    return source


def _check_field(cls: str, name: str, value: object, hint: Any, where: str) -> None:
    if not is_a(value, hint):
        raise FormatError(
            "a field of a source has the wrong type",
            where=f"{where}.{name}",
            expected=getattr(hint, "__name__", str(hint)),
            found=type(value).__name__,
        )
    check = RENDERED_RAW.get((cls, name))
    if check is not None and isinstance(value, str) and not check(value):
        raise FormatError(
            "a field of a source is no identifier", where=f"{where}.{name}", found=repr(value)
        )
