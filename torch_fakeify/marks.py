"""What ``torch._dynamo.mark_*`` leaves on a tensor <-> record.

Dynamo's marks are Python attributes of the tensor. They are the policy by which Dynamo, and a
frontend like it, chooses dynamic dims, so they travel with the tensor's record and are put back on
the fake tensor. An empty mark and an absent one are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sympy
import torch

from ._torch import ShapeEnv, dim_range_class
from .desc import ExprDesc, MarksDesc
from .errors import UnsupportedTensorError
from .exprs import decode_expr, encode_expr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = ["Condition", "decode_marks", "encode_condition", "encode_marks"]

_INDICES = {
    "_dynamo_dynamic_indices": "dynamic",
    "_dynamo_weak_dynamic_indices": "weak_dynamic",
    "_dynamo_propagated_dynamic_indices": "propagated_dynamic",
    "_dynamo_static_indices": "static",
    "_dynamo_unbacked_indices": "unbacked",
    "_dynamo_strict_unbacked_indices": "strict_unbacked",
}
"""Attributes that hold a set of dims, and their field of the record."""

_OTHERS = frozenset(
    {
        "_dynamo_dynamic_range",
        "_dynamo_unbacked_bounds",
        "_dynamo_shape_ids",
        "_dynamo_hint_overrides",
        "_dynamo_static_input_type",
        "_specialize_on",
        "_has_dynamo_dim_marking",
    }
)

_FLAGGED = ("dynamic", "weak_dynamic", "static", "unbacked", "strict_unbacked")
"""Fields whose marks also set ``_has_dynamo_dim_marking``."""

_DIM = sympy.Symbol("dim", integer=True)


class Condition:
    """A condition on a dim, as a function of its size: what ``specialize_on`` has lambdas for."""

    __slots__ = ("expr",)

    def __init__(self, expr: ExprDesc) -> None:
        self.expr = expr

    def __call__(self, size: int | torch.SymInt) -> bool | torch.SymBool:
        """Whether the condition holds for a size in elements; a ``SymBool`` for a ``SymInt``."""
        expr: Any = decode_expr(self.expr)
        if isinstance(size, torch.SymInt):
            sym_node: Any = size.node
            return sym_node.shape_env.create_symboolnode(expr.xreplace({_DIM: sym_node.expr}))
        return bool(expr.xreplace({_DIM: sympy.Integer(size)}))


def encode_condition(condition: Callable[[Any], object], *, where: str = "$") -> ExprDesc:
    """The condition as an expression over the integer symbol ``dim``.

    The function is called once, with a symbolic size of a throwaway ``ShapeEnv``.

    Raises:
        UnsupportedTensorError: the function branches on the size, or does not give a bool.
    """
    if isinstance(condition, Condition):
        return condition.expr
    size = ShapeEnv().create_unbacked_symint()
    try:
        holds = condition(size)
    except Exception as error:
        raise UnsupportedTensorError(
            "a condition to specialize on cannot be written as an expression",
            where=where,
            expected="one comparison of the size, such as `lambda n: n % 8 == 0`",
            found=f"{type(error).__name__} when it was called with a symbolic size",
        ) from error
    if isinstance(holds, bool):
        return encode_expr(sympy.true if holds else sympy.false)
    if not isinstance(holds, torch.SymBool):
        raise UnsupportedTensorError(
            "a condition to specialize on does not give a bool",
            where=where,
            expected="bool or SymBool",
            found=type(holds).__name__,
        )
    sym_node: Any = holds.node
    return encode_expr(sym_node.expr.xreplace({size.node.expr: _DIM}))


def encode_marks(attributes: Mapping[str, Any], *, where: str = "$") -> MarksDesc | None:
    """The marks among a tensor's Python attributes, or ``None`` without any.

    Args:
        attributes: ``vars(tensor)``.
        where: names the tensor in errors.

    Raises:
        UnsupportedTensorError: an attribute in Dynamo's name space that is not known here, or a
            mark that has no record.
    """
    found: dict[str, Any] = {}
    for name, value in attributes.items():
        if name in _INDICES:
            if value:
                found[_INDICES[name]] = tuple(sorted(value))
        elif name in _OTHERS:
            if value:
                _encode_other(name, value, found, where)
        elif name.startswith("_dynamo"):
            raise UnsupportedTensorError(
                f"the tensor attribute `{name}` has no record",
                where=where,
                found=f"{name} = {value!r}",
                fix="Delete the attribute, or describe a detached alias of the tensor",
            )
    return MarksDesc(**found) if found else None


def _encode_other(name: str, value: Any, found: dict[str, Any], where: str) -> None:
    match name:
        case "_dynamo_dynamic_range":
            found["dynamic_range"] = _ranges((r.dim, r.min, r.max) for r in value)
        case "_dynamo_unbacked_bounds":
            found["unbacked_bounds"] = _ranges((dim, *ends) for dim, ends in value.items())
        case "_dynamo_shape_ids":
            found["shape_ids"] = tuple(sorted(value.items()))
        case "_dynamo_hint_overrides":
            found["hint_overrides"] = tuple(sorted(value.items()))
        case "_dynamo_static_input_type":
            found["static_input_type"] = value
        case "_specialize_on":
            conditions = tuple(
                (dim, tuple(encode_condition(f, where=where) for f in functions))
                for dim, functions in sorted(value.items())
                if functions
            )
            if conditions:
                found["specialize_on"] = conditions
        case _:  # _has_dynamo_dim_marking follows from the others
            pass


def _ranges(
    triples: Iterable[tuple[int, int | None, int | None]],
) -> tuple[tuple[int, int | None, int | None], ...]:
    def key(triple: tuple[int, int | None, int | None]) -> tuple[float, ...]:
        dim, lower, upper = triple
        return (
            dim,
            float("-inf") if lower is None else lower,
            float("inf") if upper is None else upper,
        )

    return tuple(sorted(triples, key=key))


def decode_marks(marks: MarksDesc) -> dict[str, Any]:
    """The attributes that ``mark_*`` would leave, to be put on a fake tensor.

    Raises:
        FormatError: a condition's expression is not well-formed.
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
    dims_marked = any(getattr(marks, field) for field in _FLAGGED)
    if marks.hint_overrides or marks.dynamic or marks.unbacked:
        # mark_dynamic and mark_unbacked always leave these two, and Dynamo's builder and a second
        # mark_dynamic on the same tensor rely on it.
        out["_dynamo_hint_overrides"] = dict(marks.hint_overrides)
    if marks.specialize_on or marks.dynamic or marks.unbacked:
        out["_specialize_on"] = {dim: [] for dim in (*marks.dynamic, *marks.unbacked)}
        for dim, conditions in marks.specialize_on:
            out["_specialize_on"][dim] = [_checked(condition) for condition in conditions]
    if marks.dynamic and "_dynamo_dynamic_range" not in out:
        out["_dynamo_dynamic_range"] = set()
    if dims_marked:
        out["_has_dynamo_dim_marking"] = True
    return out


def _checked(condition: ExprDesc) -> Condition:
    decode_expr(condition)
    return Condition(condition)
