"""Attributes set by ``torch._dynamo.mark_*`` <-> record.

Dynamo's marks are Python attributes of a tensor by which frontends choose dynamic dims. They are part
of the tensor's record and are set on the fake tensor. An empty mark equals an absent one.
"""

from __future__ import annotations

import copy
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from torch_fakeify.compat.torch_dispatch import DispatchKey, DispatchKeySet, dispatch_key_of
from torch_fakeify.compat.torch_dynamo import dim_range_class
from torch_fakeify.compat.torch_fakes import FakeTensor
from torch_fakeify.errors import UnsupportedTensorError
from torch_fakeify.records.tensor import MarksDesc

from .conditions import decode_condition, encode_condition

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

    from torch_fakeify.records.tensor import MetaTensorDesc

MISSING_PROPERTIES = "_fakeify_lacks"
"""Attribute of a fake tensor: layout of the described tensor, and whether its memory is pinned.

Torch's fake tensors cannot be pinned or, before torch 2.14, mkldnn tensors.
"""

_INDICES = {
    "_dynamo_dynamic_indices": "dynamic",
    "_dynamo_weak_dynamic_indices": "weak_dynamic",
    "_dynamo_propagated_dynamic_indices": "propagated_dynamic",
    "_dynamo_static_indices": "static",
    "_dynamo_unbacked_indices": "unbacked",
    "_dynamo_strict_unbacked_indices": "strict_unbacked",
}
"""Attributes with a set of dims -> field of the record."""

_FLAG = "_has_dynamo_dim_marking"
"""Attribute that follows from the others."""

_FLAGGED = ("dynamic", "weak_dynamic", "static", "unbacked", "strict_unbacked")
"""Fields whose marks also set ``_has_dynamo_dim_marking``."""


@contextmanager
def same_marks(args: Iterable[object]) -> Generator[None]:
    """Leave the marks of the tensors among the arguments of an operator as they were before the block.

    Torch's nested tensor marks the tensors that it is made of, also when a view of one is made again.
    """
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    before = [_mark_attributes(t) for t in tensors]
    try:
        yield
    finally:
        for t, marks in zip(tensors, before, strict=True):
            attributes = vars(t)
            for name in _mark_attributes(t).keys() - marks.keys():
                del attributes[name]
            attributes.update(marks)


def _mark_attributes(t: torch.Tensor) -> dict[str, Any]:
    """Return copies of the attributes with marks; torch changes their sets in place."""
    return {
        name: copy.copy(value)
        for name, value in vars(t).items()
        if name in (_FLAG, "_specialize_on") or name.startswith("_dynamo")
    }


def encode_marks(attributes: Mapping[str, Any], *, where: str = "$") -> MarksDesc | None:
    """The marks among a tensor's Python attributes, or ``None`` without any.

    Raises:
        UnsupportedTensorError: an unsupported attribute of Dynamo, or a mark without a record.
    """
    found: dict[str, Any] = {}
    for name, value in attributes.items():
        if name in _INDICES:
            if value:
                found[_INDICES[name]] = tuple(sorted(value))
        elif name in _OTHERS:
            field, encode = _OTHERS[name]
            if value and (record := encode(value, where)):
                found[field] = record
        elif name.startswith("_dynamo") and name != _FLAG:
            raise UnsupportedTensorError(
                f"the tensor attribute `{name}` has no record",
                where=where,
                found=f"{name} = {value!r}",
                fix="Delete the attribute, or describe a detached alias of the tensor",
            )
    return MarksDesc(**found) if found else None


def _ranges(
    triples: Iterable[tuple[int, int | None, int | None]],
) -> tuple[tuple[int, int | None, int | None], ...]:
    def key(triple: tuple[int, int | None, int | None]) -> tuple[float, ...]:
        dim, lower, upper = triple
        return dim, -math.inf if lower is None else lower, math.inf if upper is None else upper

    return tuple(sorted(triples, key=key))


def _conditions(value: Mapping[int, Any], where: str) -> tuple[Any, ...]:
    return tuple(
        (
            dim,
            tuple(
                encode_condition(f, where=where, error=UnsupportedTensorError) for f in functions
            ),
        )
        for dim, functions in sorted(value.items())
        if functions
    )


_OTHERS: dict[str, tuple[str, Callable[[Any, str], Any]]] = {
    "_dynamo_dynamic_range": (
        "dynamic_range",
        lambda value, _: _ranges((r.dim, r.min, r.max) for r in value),
    ),
    "_dynamo_unbacked_bounds": (
        "unbacked_bounds",
        lambda value, _: _ranges((dim, *ends) for dim, ends in value.items()),
    ),
    "_dynamo_shape_ids": ("shape_ids", lambda value, _: tuple(sorted(value.items()))),
    "_dynamo_hint_overrides": ("hint_overrides", lambda value, _: tuple(sorted(value.items()))),
    "_dynamo_static_input_type": ("static_input_type", lambda value, _: value),
    "_specialize_on": ("specialize_on", _conditions),
}
"""Other attributes -> field of the record, and its value."""


def decode_marks(marks: MarksDesc) -> dict[str, Any]:
    """The attributes that ``mark_*`` would set.

    Raises:
        FormatError: a condition's expression is not well-formed, or no predicate of the size.
    """
    out: dict[str, Any] = {}
    for attribute, field in _INDICES.items():
        dims: Sequence[int] = getattr(marks, field)
        if dims:
            out[attribute] = set(dims)
    if marks.dynamic_range:
        dim_range = dim_range_class()
        out["_dynamo_dynamic_range"] = {dim_range(*triple) for triple in marks.dynamic_range}
    if marks.unbacked_bounds:
        out["_dynamo_unbacked_bounds"] = {d: (lo, hi) for d, lo, hi in marks.unbacked_bounds}
    if marks.shape_ids:
        out["_dynamo_shape_ids"] = dict(marks.shape_ids)
    if marks.static_input_type is not None:
        out["_dynamo_static_input_type"] = marks.static_input_type
    if marks.hint_overrides or marks.dynamic or marks.unbacked:
        # mark_dynamic and mark_unbacked always set these two; Dynamo's builder and a second
        # mark_dynamic rely on them.
        out["_dynamo_hint_overrides"] = dict(marks.hint_overrides)
    if marks.specialize_on or marks.dynamic or marks.unbacked:
        out["_specialize_on"] = {dim: [] for dim in (*marks.dynamic, *marks.unbacked)}
        for dim, conditions in marks.specialize_on:
            out["_specialize_on"][dim] = [
                decode_condition(condition, where="$.marks") for condition in conditions
            ]
    if marks.dynamic and "_dynamo_dynamic_range" not in out:
        out["_dynamo_dynamic_range"] = set()
    if any(getattr(marks, field) for field in _FLAGGED):
        out[_FLAG] = True
    return out


def note_missing_properties(d: MetaTensorDesc, fake: Any) -> None:
    """Make a fake tensor mkldnn if torch supports it; else, and if pinned, note the properties."""
    is_mkldnn = d.layout == "_mkldnn" and "is_mkldnn" in vars(FakeTensor)
    if is_mkldnn:
        fake.dispatch_keys = DispatchKeySet(dispatch_key_of("MkldnnCPU"))
        if not d.is_inference:
            fake.dispatch_keys |= DispatchKeySet(DispatchKey.ADInplaceOrView)
            fake.dispatch_keys |= DispatchKeySet(DispatchKey.AutogradOther)
    if not is_mkldnn or d.is_pinned:
        setattr(fake, MISSING_PROPERTIES, (d.layout, d.is_pinned))
