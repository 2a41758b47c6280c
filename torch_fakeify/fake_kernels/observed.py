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


def is_integer(value: Observed) -> bool:
    """Return whether an observed argument is an integer, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_integer_list(value: Observed) -> bool:
    """Return whether an observed argument is a list of integers."""
    return isinstance(value, (list, tuple)) and all(map(is_integer, value))


def is_tensor_list(value: Observed) -> bool:
    """Return whether an observed argument is a list of tensors."""
    return (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and all(isinstance(item, TensorFacts) for item in value)
    )


def item_of(args: dict[str, Observed], name: str, item: int | None) -> Observed:
    """Return an argument, or an item of one that is a list; ``None`` if there is none."""
    value = args.get(name)
    if item is None:
        return value
    if not isinstance(value, (list, tuple)) or not -len(value) <= item < len(value):
        return None
    return value[item]
