"""Tables by identity whose entries are weak references.

A dictionary by ``id()`` whose entries are the weak references themselves costs a third of
``WeakIdKeyDictionary``, which hashes and compares through a wrapper around each key.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable


class Entry(weakref.ref[Any]):
    """A weak reference to an object, with a cached value."""

    __slots__ = ("key", "value")

    key: int
    """The key in the table, by default the ``id()`` of the object."""
    value: Any


_E = TypeVar("_E", bound=Entry)


def removal_callback(entries: dict[int, _E]) -> Callable[[_E], None]:
    """Return the weak reference callback of a table, which removes the entry unless it was replaced."""

    def forget(entry: _E) -> None:
        if entries.get(entry.key) is entry:
            del entries[entry.key]

    return forget


def winning_entry(entries: dict[int, Entry], existing: Entry, entry: Entry) -> Entry:
    """Return the valid entry of an object, if another entry was found under its key.

    The other entry was added by a faster thread, or belongs to a dead object whose callback has not
    removed it.
    """
    while existing is not entry and existing() is not entry():
        removal_callback(entries)(existing)
        existing = entries.setdefault(entry.key, entry)
    return existing
