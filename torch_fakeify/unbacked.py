"""Unbacked symbols of a graph: where they are bound, through retraces and passes."""

from __future__ import annotations

from .binding_sites import Binding, find_bindings, is_flag, is_unbacked, renamed

__all__ = [
    "Binding",
    "find_bindings",
    "is_flag",
    "is_unbacked",
    "renamed",
]
