"""Observed calls of an operator as plain data: the metadata of arguments and of results, no data of tensors."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec


class TensorFacts(msgspec.Struct, frozen=True, tag="tensor"):
    """The metadata of a tensor; sizes, strides and offset in elements."""

    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    dtype: str
    device: str
    layout: str = "strided"
    shares: tuple[str, int | None] | None = None
    """Of a result: the argument whose storage it has, with the position in a list."""
    is_argument: bool = False
    """Of a result: whether it is that argument itself."""


class NamedValue(msgspec.Struct, frozen=True, tag="named"):
    """A dtype, device, layout or memory format, by the name that torch prints."""

    kind: str
    name: str


Observed: TypeAlias = Any
"""``TensorFacts``, ``NamedValue``, a list of them or of integers, a number, string or ``None``."""


class Outcome(msgspec.Struct, frozen=True):
    """What one call of an operator gave."""

    args: dict[str, Any] = {}
    """The metadata of its arguments; empty if its process ended."""
    results: list[Any] | None = None
    """Its results; ``None`` if it raised or did not end."""
    error: str = ""
    """What it raised, or how its process ended."""
    has_survived: bool = True
    """Whether its process did not end."""
    written: list[str] = []
    """Arguments that the schema does not name as written, whose data changed."""
    values: str = ""
    """A digest of the data of the results."""


class Row(msgspec.Struct, frozen=True):
    """One observed call; ``index`` is the position of a tensor in a result that is a list."""

    args: dict[str, Observed]
    index: int | None = None


def is_tensor_list(value: Observed) -> bool:
    """Return whether an observed argument is a list of tensors."""
    return (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and all(isinstance(item, TensorFacts) for item in value)
    )


def tensor_of(args: dict[str, Observed], name: str, item: int | None) -> TensorFacts | None:
    """Return a tensor among the arguments; ``None`` if there is no such tensor."""
    value = args.get(name)
    if item is not None:
        if not isinstance(value, (list, tuple)) or not -len(value) <= item < len(value):
            return None
        value = value[item]
    return value if isinstance(value, TensorFacts) else None
