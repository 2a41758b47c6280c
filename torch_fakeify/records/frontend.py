"""The records of a frontend's inputs and of the policy that made them."""

from __future__ import annotations

from typing import Literal, TypeAlias

from .frame import InputDesc
from .guards import GuardsDesc
from .record import Record

DimKind: TypeAlias = Literal["DYNAMIC", "DUCK", "STATIC", "UNBACKED"]
"""The policies of dims and numbers, by the names of torch's ``DimDynamic``."""


class DimDesc(Record, frozen=True, kw_only=True):
    """The policy of one dim of a tensor, or of a Python number."""

    kind: DimKind = "DYNAMIC"
    min: int | None = None
    max: int | None = None
    warn_only: bool = False


class NamedDimsDesc(Record, frozen=True, kw_only=True):
    """The policy of an argument or of a part of one."""

    name: str
    """The name of the argument, or the source of the part."""
    every: DimDesc | None = None
    """Of a number, or of all dims of a tensor; ``None`` if ``dims`` has them by index."""
    dims: tuple[tuple[int, DimDesc], ...] = ()


class PolicyDesc(Record, frozen=True, kw_only=True):
    """Which dims and numbers of a function's inputs become symbolic."""

    dims: DimKind = "STATIC"
    scalars: DimKind = "STATIC"
    parameters: DimKind = "STATIC"
    named: tuple[NamedDimsDesc, ...] = ()
    marks: bool = True
    duck_shape: bool = True
    specialize_zero_one: bool = True
    prefer_deferred_runtime_asserts_over_guards: bool = False


class TracedInputDesc(Record, frozen=True, kw_only=True):
    """One input of a trace."""

    input: InputDesc
    """The record of a tensor with its policy, or the value of a number."""
    dim: DimDesc | None = None
    """The policy of a number."""


class TracedInputsDesc(Record, frozen=True, kw_only=True):
    """The described arguments of a function."""

    inputs: tuple[TracedInputDesc, ...]
    places: tuple[tuple[str, int], ...]
    """The name of each source that is an input, and the input's position."""
    guards: GuardsDesc
    """The conditions on the arguments other than sizes."""
    policy: PolicyDesc
