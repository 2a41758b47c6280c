"""Symbolic contexts <-> records.

A context is the policy for the symbols of an input's sizes, strides and offset. Fields at torch's
defaults are omitted from a record, and so is the symbol cache, which is not part of the policy.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from torch_fakeify.compat import torch_symbols
from torch_fakeify.compat.known_fields import RECORD_FIELDS
from torch_fakeify.errors import (
    FormatError,
    LimitError,
    UnsupportedValueError,
    class_name,
)
from torch_fakeify.records.tensor import ConstraintDesc, ContextDesc, ExprDesc

from .conditions import decode_condition, encode_condition
from .exprs import decode_expr, encode_expr
from .sources import MAX_NESTING, decode_source, encode_source

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .sources import DecodeMemo

_KINDS: Mapping[type, Literal["stateless", "stateful", "subclass", "symint"]] = (
    types.MappingProxyType(
        {
            torch_symbols.StatelessSymbolicContext: "stateless",
            torch_symbols.StatefulSymbolicContext: "stateful",
            torch_symbols.SubclassSymbolicContext: "subclass",
            torch_symbols.SymIntSymbolicContext: "symint",
        }
    )
)


def encode_context(ctx: Any, where: str = "symbolic context", depth: int = 0) -> ContextDesc:
    """The record of a ``SymbolicContext``, without fields at torch's defaults and without symbol cache.

    Raises:
        UnsupportedValueError: the class is not torch's own, a constraint is of an unknown class,
            or a callable of ``specialize_on`` is not an expression of the size.
    """
    kind = _KINDS.get(type(ctx))
    if kind is None:
        raise UnsupportedValueError(
            "a symbolic context has no record",
            where=where,
            expected=" | ".join(cls.__name__ for cls in _KINDS),
            found=class_name(type(ctx)),
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
        items = _unless_default(tuple(getattr(ctx, name)), None)
        fields[name] = tuple([
            _encode_constraint(constraint, f"{where}.{name}[{i}]")
            for i, constraint in enumerate(items)
        ])  # fmt: skip
    if any(ctx.specialize_on):
        fields["specialize_on"] = tuple([
            tuple([_encode_condition(f, f"{where}.specialize_on[{i}][{j}]") for j, f in enumerate(dim)])
            for i, dim in enumerate(ctx.specialize_on)
        ])  # fmt: skip
    if ctx.view_base_context is not None:
        fields["view_base_context"] = encode_context(
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
            (name, None if inner is None else encode_context(inner, f"{where}.{name}", depth + 1))
            for name, inner in ctx.inner_contexts.items()
        )
    return ContextDesc(kind=kind, **fields)


def _unless_default(items: tuple[Any, ...], default: object) -> tuple[Any, ...]:
    return () if items.count(default) == len(items) else items


def _encode_constraint(constraint: Any, where: str) -> ConstraintDesc | None:
    if constraint is None:
        return None
    if type(constraint) is torch_symbols.RelaxedUnspecConstraint:
        return ConstraintDesc(kind="relaxed", warn_only=constraint.warn_only)
    if type(constraint) is not torch_symbols.StrictMinMaxConstraint:
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


def _encode_condition(check: Any, where: str) -> ExprDesc:
    name = getattr(check, "__qualname__", type(check).__qualname__)
    return encode_condition(check, where=f"{where} ({name})", error=UnsupportedValueError)


def decode_context(
    d: ContextDesc,
    where: str = "symbolic context",
    depth: int = 0,
    *,
    memo: DecodeMemo | None = None,
) -> torch_symbols.SymbolicContext:
    """A new symbolic context of a record, with an empty symbol cache.

    ``memo`` is that of `decode_source`.

    Raises:
        FormatError: fields do not fit the kind or one another, a dim occurs twice, or a
            constraint lacks its range.
    """
    if depth > MAX_NESTING:
        raise LimitError(f"contexts are nested deeper than {MAX_NESTING} levels", where=where)
    _check_kind(d, where)
    if d.kind == "symint":
        return torch_symbols.SymIntSymbolicContext(
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
                decode_condition(each, where=f"{where}.specialize_on[{i}][{j}]")
                for j, each in enumerate(dim)
            ]
            for i, dim in enumerate(_checked_length(d, "specialize_on", where))
        ]
    if d.view_base_context is not None:
        fields["view_base_context"] = decode_context(
            d.view_base_context, f"{where}.view_base_context", depth + 1, memo=memo
        )
    if d.shape_ids is not None:
        fields["shape_ids"] = _by_dim(d.shape_ids, ndim, f"{where}.shape_ids")
    if d.unbacked_bounds is not None:
        bounds = tuple((dim, (low, high)) for dim, low, high in d.unbacked_bounds)
        fields["unbacked_bounds"] = _by_dim(bounds, ndim, f"{where}.unbacked_bounds")
    if d.kind == "stateless":
        return torch_symbols.StatelessSymbolicContext(**fields)
    if d.tensor_source is None:
        raise FormatError("a stateful context lacks its source", where=f"{where}.tensor_source")
    fields["tensor_source"] = decode_source(d.tensor_source, memo=memo)
    fields["excluded_sizes"] = d.excluded_sizes
    if d.kind == "stateful":
        return torch_symbols.StatefulSymbolicContext(**fields)
    inner = {
        name: None
        if each is None
        else decode_context(each, f"{where}.{name}", depth + 1, memo=memo)
        for name, each in d.inner_contexts
    }
    if len(inner) != len(d.inner_contexts):
        raise FormatError("an inner tensor occurs twice", where=f"{where}.inner_contexts")
    return torch_symbols.SubclassSymbolicContext(
        **fields,
        inner_contexts=inner,  # pyright: ignore[reportArgumentType] - torch puts None there too
        track_outer_size_stride=d.track_outer_size_stride,
    )


_FIELDS_OF_KIND: Mapping[str, frozenset[str]] = types.MappingProxyType(
    {
        kind: RECORD_FIELDS[f"torch.fx.experimental.symbolic_shapes.{cls.__name__}"]
        for cls, kind in _KINDS.items()
    }
)


# Once: each call evaluates the annotations of the class anew.
_CONTEXT_FIELDS = msgspec.structs.fields(ContextDesc)


def _check_kind(d: ContextDesc, where: str) -> None:
    """Raise for fields that the kind does not have, which would be ignored."""
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


def _dims(names: tuple[str, ...]) -> list[torch_symbols.DimDynamic]:
    return [torch_symbols.DimDynamic[name] for name in names]


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
        return torch_symbols.RelaxedUnspecConstraint(warn_only=d.warn_only)
    if d.lower is None or d.upper is None:
        raise FormatError("a strict constraint lacks its range", where=where)
    lower, upper = decode_expr(d.lower), decode_expr(d.upper)
    try:
        value_range: Any = torch_symbols.ValueRanges(lower, upper)  # pyright: ignore[reportArgumentType, reportCallIssue]
    except (AssertionError, TypeError, torch_symbols.ValueRangeError) as error:
        raise FormatError("a range is empty", where=where, found=str(error)) from error
    return torch_symbols.StrictMinMaxConstraint(warn_only=d.warn_only, vr=value_range)
