"""Checks of symbolic contexts and of the geometry of wrappers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_fakeify.compat import torch_symbols

if TYPE_CHECKING:
    from torch_fakeify.compat.torch_symbols import SymbolicContext

    from .size_symbols import Geometry


def has_geometry(made: Any, geometry: Geometry) -> bool:
    """Whether a wrapper has these strides and this offset; always true of a jagged tensor."""
    if made.is_nested:
        return True
    same = torch_symbols.guard_or_false
    return same(torch_symbols.sym_eq(made.stride(), geometry.stride)) and same(
        made.storage_offset() == geometry.storage_offset
    )


def matches_base(context: Any, d: Any) -> bool:
    """Whether a symbolic context has one for the base of a view, with the ndim of the base."""
    base_context = context.view_base_context
    if d.is_view != (base_context is not None):
        return False
    return not (
        isinstance(base_context, torch_symbols.StatelessSymbolicContext)
        and d.base is not None
        and len(base_context.dynamic_sizes) != len(d.base.size)
    )


def is_static(context: SymbolicContext | None) -> bool:
    """Whether a symbolic context is static in all dims."""
    return isinstance(context, torch_symbols.StatelessSymbolicContext) and all(
        dim is torch_symbols.DimDynamic.STATIC for dim in context.dynamic_sizes
    )
