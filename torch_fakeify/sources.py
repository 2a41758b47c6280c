"""``torch._guards.Source`` trees and symbolic contexts <-> records.

Sources are dataclasses, so one encoder serves all classes of ``torch._dynamo.source``: the
dataclass fields are the record. Only classes that torch itself defines are known; a field at its
default is left out. Decoding checks every field against the class's annotation, because torch
renders some fields into Python text that it evaluates later.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec
from sympy.logic.boolalg import Boolean

from . import _torch
from .conditions import DIM, RecordedCondition, evaluate_condition
from .desc import (
    ConstraintDesc,
    ContextDesc,
    EnumValue,
    ExprDesc,
    SourceDesc,
    SourceValue,
    Value,
)
from .errors import (
    FormatError,
    LimitError,
    ShapeEnvError,
    UnknownNameError,
    UnsupportedValueError,
)
from .exprs import decode_expr, encode_expr
from .source_fields import RENDERED_RAW, is_a
from .values import decode_value, encode_value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "DecodeMemo",
    "EncodeMemo",
    "decode_context",
    "decode_source",
    "encode_context",
    "encode_source",
    "name_of",
    "source_of",
]

EncodeMemo: TypeAlias = "dict[int, tuple[_torch.Source, SourceDesc]]"
"""By ``id`` of a source: equal sources may differ in ``1`` and ``True``."""

DecodeMemo: TypeAlias = "dict[int, tuple[SourceDesc, _torch.Source]]"
"""By ``id`` of a record."""

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
    return _SourceClass(
        cls=cls,
        chained=any(field.name == "base" for field in taken),
        fields=fields,
        defaults=defaults,
        plain={
            name: hint
            for name, hint in fields.items()
            if hint in (str, int, bool) and (cls.__name__, name) not in RENDERED_RAW
        },
        required=frozenset(fields) - frozenset(defaults),
        bare=None if does_more else {field.name: field.default for field in taken},
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
    return _encode_source(source, memo, MAX_NESTING)


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
    return _decode_source(d, {} if memo is None else memo, MAX_NESTING)


def base_source_of(source: _torch.Source) -> _torch.Source:
    """The source of the base of a view."""
    like = _base_of_example()
    made = _new(type(like))
    _set_attribute(made, "__dict__", {**vars(like), "base": source})
    return made


@functools.cache
def _base_of_example() -> _torch.Source:
    sources = _torch.dynamo_source()
    return sources.AttrSource(sources.ConstantSource("x"), "_base")


def _decode_source(d: SourceDesc, memo: DecodeMemo, left: int) -> _torch.Source:
    chain: list[SourceDesc] = []
    current: SourceDesc | None = d
    source: Any = None
    while current is not None:
        known = memo.get(id(current))
        if known is not None:
            source = known[1]
            break
        chain.append(current)
        current = current.base
    while chain:
        link = chain.pop()
        source = _decode_link(link, source, memo, left)
        memo[id(link)] = link, source
    return source


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
            return _decode_source(part.source, memo, left - 1)
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


# --- symbolic contexts ----------------------------------------------------------------------------

_KINDS: Mapping[type, Literal["stateless", "stateful", "subclass", "symint"]] = (
    types.MappingProxyType(
        {
            _torch.StatelessSymbolicContext: "stateless",
            _torch.StatefulSymbolicContext: "stateful",
            _torch.SubclassSymbolicContext: "subclass",
            _torch.SymIntSymbolicContext: "symint",
        }
    )
)


def encode_context(ctx: _torch.SymbolicContext) -> ContextDesc:
    """The record of a symbolic context; what equals torch's default is left out.

    The symbol cache of a stateful context is not part of the policy and stays behind.

    Raises:
        UnsupportedValueError: the class is not torch's own, a constraint is of an unknown class,
            or a callable of ``specialize_on`` is no expression of the size.
    """
    return _encode_context(ctx, "symbolic context", 0)


def _encode_context(ctx: Any, where: str, depth: int) -> ContextDesc:
    kind = _KINDS.get(type(ctx))
    if kind is None:
        raise UnsupportedValueError(
            "a symbolic context has no record",
            where=where,
            expected=" | ".join(cls.__name__ for cls in _KINDS),
            found=f"{type(ctx).__module__}.{type(ctx).__qualname__}",
        )
    if depth > MAX_NESTING:
        raise LimitError(f"contexts are nested deeper than {MAX_NESTING} levels", where=where)
    if kind == "symint":
        constraint = _encode_constraint(ctx.constraint, f"{where}.constraint")
        return ContextDesc(kind=kind, constraint=constraint)
    fields: dict[str, Any] = {
        "dynamic_sizes": tuple([dim.name for dim in ctx.dynamic_sizes]),
        "dynamic_strides": _unless_default(
            tuple([dim.name for dim in ctx.dynamic_strides]), "INFER_STRIDE"
        ),
    }
    for name in ("constraint_sizes", "constraint_strides"):
        given = _unless_default(tuple(getattr(ctx, name)), None)
        fields[name] = tuple([
            _encode_constraint(constraint, f"{where}.{name}[{i}]")
            for i, constraint in enumerate(given)
        ])  # fmt: skip
    if any(ctx.specialize_on):
        fields["specialize_on"] = tuple([
            tuple([_encode_condition(f, f"{where}.specialize_on[{i}][{j}]") for j, f in enumerate(dim)])
            for i, dim in enumerate(ctx.specialize_on)
        ])  # fmt: skip
    if ctx.view_base_context is not None:
        fields["view_base_context"] = _encode_context(
            ctx.view_base_context, f"{where}.view_base_context", depth + 1
        )
    if ctx.shape_ids is not None:
        fields["shape_ids"] = tuple(ctx.shape_ids.items())
    if ctx.unbacked_bounds is not None:
        fields["unbacked_bounds"] = tuple(
            (dim, low, high) for dim, (low, high) in ctx.unbacked_bounds.items()
        )
    if kind != "stateless":
        fields["tensor_source"] = encode_source(ctx.tensor_source)
        fields["excluded_sizes"] = None if ctx.excluded_sizes is None else tuple(ctx.excluded_sizes)
    if kind == "subclass":
        fields["track_outer_size_stride"] = ctx.track_outer_size_stride
        fields["inner_contexts"] = tuple(
            (name, None if inner is None else _encode_context(inner, f"{where}.{name}", depth + 1))
            for name, inner in ctx.inner_contexts.items()
        )
    return ContextDesc(kind=kind, **fields)


def _unless_default(items: tuple[Any, ...], default: object) -> tuple[Any, ...]:
    return () if items.count(default) == len(items) else items


def _encode_constraint(constraint: Any, where: str) -> ConstraintDesc | None:
    if constraint is None:
        return None
    if type(constraint) is _torch.RelaxedUnspecConstraint:
        return ConstraintDesc(kind="relaxed", warn_only=constraint.warn_only)
    if type(constraint) is not _torch.StrictMinMaxConstraint:
        raise UnsupportedValueError(
            "a constraint has no record",
            where=where,
            expected="StrictMinMaxConstraint | RelaxedUnspecConstraint",
            found=type(constraint).__qualname__,
        )
    return ConstraintDesc(
        kind="strict",
        warn_only=constraint.warn_only,
        lower=encode_expr(constraint.vr.lower),
        upper=encode_expr(constraint.vr.upper),
    )


def _encode_condition(check: Callable[[Any], object], where: str) -> ExprDesc:
    if isinstance(check, RecordedCondition):
        return encode_expr(check.condition.xreplace({check.symbol: DIM}))
    try:
        return encode_expr(evaluate_condition(check, DIM))
    except ShapeEnvError as error:
        raise UnsupportedValueError(
            error.what,
            where=f"{where} ({getattr(check, '__qualname__', type(check).__qualname__)})",
            expected=error.expected,
            found=error.found,
        ) from error


def decode_context(d: ContextDesc, *, memo: DecodeMemo | None = None) -> _torch.SymbolicContext:
    """A new symbolic context of a record; the symbol cache of a stateful one is empty.

    Args:
        d: the record.
        memo: as for `decode_source`.

    Raises:
        FormatError: fields do not fit the kind or one another, a dim occurs twice, or a
            constraint lacks its range.
    """
    return _decode_context(d, "symbolic context", 0, memo)


def _decode_context(
    d: ContextDesc, where: str, depth: int, memo: DecodeMemo | None
) -> _torch.SymbolicContext:
    if depth > MAX_NESTING:
        raise LimitError(f"contexts are nested deeper than {MAX_NESTING} levels", where=where)
    _check_kind(d, where)
    if d.kind == "symint":
        return _torch.SymIntSymbolicContext(
            constraint=_decode_constraint(d.constraint, f"{where}.constraint")
        )
    ndim = len(d.dynamic_sizes)
    fields: dict[str, Any] = {"dynamic_sizes": _dims(d.dynamic_sizes)}
    if d.dynamic_strides:
        fields["dynamic_strides"] = _dims(_checked_length(d, "dynamic_strides", where))
        if {"STATIC", "UNBACKED"} & set(d.dynamic_strides):
            raise FormatError(
                "a stride has a policy that torch does not know for strides",
                where=f"{where}.dynamic_strides",
                expected="INFER_STRIDE | DYNAMIC | DUCK",
                found=" | ".join(d.dynamic_strides),
            )
    for name in ("constraint_sizes", "constraint_strides"):
        if getattr(d, name):
            fields[name] = [
                _decode_constraint(constraint, f"{where}.{name}[{i}]")
                for i, constraint in enumerate(_checked_length(d, name, where))
            ]
    if d.specialize_on:
        fields["specialize_on"] = [
            [
                _decode_condition(each, f"{where}.specialize_on[{i}][{j}]")
                for j, each in enumerate(dim)
            ]
            for i, dim in enumerate(_checked_length(d, "specialize_on", where))
        ]
    if d.view_base_context is not None:
        fields["view_base_context"] = _decode_context(
            d.view_base_context, f"{where}.view_base_context", depth + 1, memo
        )
    if d.shape_ids is not None:
        fields["shape_ids"] = _by_dim(d.shape_ids, ndim, f"{where}.shape_ids")
    if d.unbacked_bounds is not None:
        bounds = tuple((dim, (low, high)) for dim, low, high in d.unbacked_bounds)
        fields["unbacked_bounds"] = _by_dim(bounds, ndim, f"{where}.unbacked_bounds")
    if d.kind == "stateless":
        return _torch.StatelessSymbolicContext(**fields)
    if d.tensor_source is None:
        raise FormatError("a stateful context lacks its source", where=f"{where}.tensor_source")
    fields["tensor_source"] = decode_source(d.tensor_source, memo=memo)
    fields["excluded_sizes"] = d.excluded_sizes
    if d.kind == "stateful":
        return _torch.StatefulSymbolicContext(**fields)
    inner = {
        name: None if each is None else _decode_context(each, f"{where}.{name}", depth + 1, memo)
        for name, each in d.inner_contexts
    }
    if len(inner) != len(d.inner_contexts):
        raise FormatError("an inner tensor occurs twice", where=f"{where}.inner_contexts")
    return _torch.SubclassSymbolicContext(
        **fields,
        inner_contexts=inner,  # pyright: ignore[reportArgumentType] - torch puts None there too
        track_outer_size_stride=d.track_outer_size_stride,
    )


_SIZES = (
    "dynamic_sizes",
    "dynamic_strides",
    "constraint_sizes",
    "constraint_strides",
    "specialize_on",
    "view_base_context",
    "shape_ids",
    "unbacked_bounds",
)
_STATEFUL = (*_SIZES, "tensor_source", "excluded_sizes")
_FIELDS_OF_KIND: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "stateless": _SIZES,
        "stateful": _STATEFUL,
        "subclass": (*_STATEFUL, "inner_contexts", "track_outer_size_stride"),
        "symint": ("constraint",),
    }
)


# Once: each call evaluates the annotations of the class anew.
_CONTEXT_FIELDS = msgspec.structs.fields(ContextDesc)


def _check_kind(d: ContextDesc, where: str) -> None:
    """Refuse fields that the kind does not have: they would be lost in silence."""
    for field in _CONTEXT_FIELDS:
        mine = field.name == "kind" or field.name in _FIELDS_OF_KIND[d.kind]
        if not mine and getattr(d, field.name) != field.default:
            raise FormatError(
                f"a {d.kind} context has no such field", where=f"{where}.{field.name}"
            )


def _checked_length(d: ContextDesc, name: str, where: str) -> tuple[Any, ...]:
    items: tuple[Any, ...] = getattr(d, name)
    if len(items) != len(d.dynamic_sizes):
        raise FormatError(
            "a context has a wrong number of dims",
            where=f"{where}.{name}",
            expected=str(len(d.dynamic_sizes)),
            found=str(len(items)),
        )
    return items


def _dims(names: tuple[str, ...]) -> list[_torch.DimDynamic]:
    return [_torch.DimDynamic[name] for name in names]


def _by_dim(pairs: tuple[tuple[int, Any], ...], ndim: int, where: str) -> dict[int, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise FormatError("a dim occurs twice", where=where)
    for dim in found:
        if not -ndim <= dim < ndim:
            raise FormatError("there is no such dim", where=where, found=str(dim))
    return found


def _decode_constraint(d: ConstraintDesc | None, where: str) -> Any:
    if d is None:
        return None
    if d.kind == "relaxed":
        if d.lower is not None or d.upper is not None:
            raise FormatError("a relaxed constraint has no range", where=where)
        return _torch.RelaxedUnspecConstraint(warn_only=d.warn_only)
    if d.lower is None or d.upper is None:
        raise FormatError("a strict constraint lacks its range", where=where)
    lower, upper = decode_expr(d.lower), decode_expr(d.upper)
    try:
        value_range: Any = _torch.ValueRanges(lower, upper)  # pyright: ignore[reportArgumentType, reportCallIssue]
    except (AssertionError, TypeError, _torch.ValueRangeError) as error:
        raise FormatError("a range is empty", where=where, found=str(error)) from error
    return _torch.StrictMinMaxConstraint(warn_only=d.warn_only, vr=value_range)


def _decode_condition(d: ExprDesc, where: str) -> RecordedCondition:
    condition = decode_expr(d)
    if not isinstance(condition, Boolean) or not condition.free_symbols <= {DIM}:
        raise FormatError(
            "a condition to specialize on is no predicate of the size",
            where=where,
            expected=f"a comparison of the symbol {DIM}",
            found=str(condition)[:200],
        )
    return RecordedCondition(DIM, condition)
