"""Registry of users' classes: wrapper subclasses, and objects inside their contexts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from torch_fakeify.errors import class_name

Encode: TypeAlias = Callable[[Any], object]
Decode: TypeAlias = Callable[[Any], object]


class Registration(NamedTuple):
    """A registered class with the optional codec of its context."""

    cls: type
    encode: Encode | None
    decode: Decode | None


_BY_NAME: dict[str, Registration] = {}


def put(registration: Registration) -> None:
    """Register a class; it replaces one of the same name, such as one redefined in a notebook."""
    _BY_NAME[class_name(registration.cls)] = registration


def find(cls: type) -> Registration | None:
    """The registration of exactly this class, not of a base."""
    found = _BY_NAME.get(class_name(cls))
    return found if found is not None and found.cls is cls else None


def find_class(name: str) -> Registration | None:
    """The registration of the class of that name."""
    return _BY_NAME.get(name)


def packages() -> frozenset[str]:
    """The top-level packages of all registered classes."""
    return frozenset(name.partition(".")[0] for name in _BY_NAME)
