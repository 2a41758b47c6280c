"""The records of guards: conditions on the arguments of a graph, as data."""

from __future__ import annotations

from typing import Literal, TypeAlias

from .record import Record
from .shape_env import LocationDesc
from .tensor import ExprDesc, SourceDesc, Value

CheckName: TypeAlias = Literal[
    "names",
    "type",
    "constant",
    "keys",
    "length",
    "tree",
    "tree constants",
    "dtype",
    "device",
    "layout",
    "ndim",
    "requires_grad",
    "is_inference",
    "is_conj",
    "is_neg",
    "sparse_dim",
    "dense_dim",
    "flatten",
    "not nan",
    "same object",
    "other object",
    "separate objects",
    "same storage",
    "separate storages",
    "overlap",
    "grad mode",
    "inference mode",
    "default dtype",
    "deterministic",
    "matmul precision",
    "autocast",
    "autocast dtype",
]
"""The conditions other than those on sizes and numbers."""


class SizeGuardDesc(Record, frozen=True, kw_only=True, tag="sizes"):
    """A condition on the sizes and numbers of arguments."""

    expr: ExprDesc
    """The condition, over symbols named as their sources."""
    sources: tuple[SourceDesc, ...]
    """The sources of the symbols."""
    location: LocationDesc | None = None
    """Where the traced code caused it."""


class CheckDesc(Record, frozen=True, kw_only=True, tag="check"):
    """A named check of the values of sources, or of torch's global state."""

    check: CheckName
    sources: tuple[SourceDesc, ...] = ()
    argument: Value = None
    """What the check needs besides values, such as the device type of an autocast state."""
    expected: Value = None
    """The answer of the check when it was made."""


GuardDesc: TypeAlias = SizeGuardDesc | CheckDesc


class GuardsDesc(Record, frozen=True, kw_only=True):
    """Conditions on the arguments of a graph, in order: each may assume that the earlier ones hold."""

    guards: tuple[GuardDesc, ...]
