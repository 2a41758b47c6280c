"""Numbers of tensors and records of storages, by identity, which keep neither alive.

Method: a dictionary by ``id()`` whose entries are the weak references themselves. It costs a third
of ``WeakIdKeyDictionary``, which hashes and compares through a wrapper around each key.

An entry goes away with its object, so a number is never given to another object, even if
Python reuses the address. A Python wrapper that torch keeps for a tensor or storage which
lives on in C++ keeps its address and its weak references, and so its number.

Threads may share a table: an entry is complete before anybody sees it, and the first one to put it
there wins, so that an object has one number however many threads see it first. No lock is taken, so
that a child forked while another thread describes finds the tables usable.

Where all that is described stays alive anyway, as while a frame is captured, the tables of ``Kept``
names keep it alive themselves: no weak reference is made for each object.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from .desc import MetaStorageDesc

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from .desc import IntLike
    from .symbols import SymMemo

__all__ = [
    "Entry",
    "KeptNumbers",
    "KeptRecords",
    "SizedRecords",
    "StorageRecords",
    "StoragesMade",
    "TensorMade",
    "TensorNumbers",
    "forgetting",
]


class Entry(weakref.ref[Any]):
    """A weak reference to an object, and what is known of it."""

    __slots__ = ("key", "value")

    key: int
    """By which it is in its table: the ``id()`` of the object, if nothing else is said."""
    value: Any


_E = TypeVar("_E", bound=Entry)


def forgetting(entries: dict[int, _E]) -> Callable[[_E], None]:
    """The callback of a table's entries: the object of one is gone, which may have a successor."""

    def forget(entry: _E) -> None:
        if entries.get(entry.key) is entry:
            del entries[entry.key]

    return forget


def _settled(entries: dict[int, Entry], known: Entry, entry: Entry) -> Entry:
    """The entry that holds for an object where another one was found in the place of its own.

    It is that of a thread that was faster, or of a dead object whose callback was interrupted.
    """
    while known is not entry and known() is not entry():
        forgetting(entries)(known)
        known = entries.setdefault(entry.key, entry)
    return known


class TensorNumbers:
    """Numbers for tensors by identity, in the order seen."""

    __slots__ = ("_count", "_forget", "entries")

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self._count = itertools.count()
        self._forget: Any = forgetting(self.entries)

    def of(self, t: torch.Tensor) -> int:
        """The number of a tensor, a new one at first sight."""
        key = id(t)
        entry = self.entries.get(key)
        if entry is not None and entry() is t:
            return entry.value
        entry = Entry(t, self._forget)
        entry.key = key
        entry.value = next(self._count)
        known = self.entries.setdefault(key, entry)
        return entry.value if known is entry else _settled(self.entries, known, entry).value

    def give(self, t: torch.Tensor, number: int) -> None:
        """Let a tensor have the number of another one."""
        entry = Entry(t, self._forget)
        entry.key = id(t)
        entry.value = number
        self.entries[id(t)] = entry

    def clear(self) -> None:
        """Forget all: a tensor that comes again gets a new number."""
        self.entries.clear()


class KeptNumbers:
    """As `TensorNumbers`, of tensors that it keeps alive, for one thread."""

    __slots__ = ("_alive", "_count", "_numbers")

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []
        self._count = itertools.count()

    def of(self, t: torch.Tensor) -> int:
        """The number of a tensor, a new one at first sight."""
        number = self._numbers.get(id(t))
        if number is None:
            self.give(t, number := next(self._count))
        return number

    def give(self, t: torch.Tensor, number: int) -> None:
        """Let a tensor have the number of another one."""
        self._numbers[id(t)] = number
        self._alive.append(t)

    def clear(self) -> None:
        """Forget all: a tensor that comes again gets a new number."""
        self._numbers.clear()
        self._alive.clear()


class TensorMade(Entry):
    """A fake tensor that was made, by the number of its record, which is the value."""

    __slots__ = ("meta",)

    meta: torch.Tensor | None
    """Of a tensor that is no view: the meta tensor on the same storage."""


class StoragesMade:
    """Storages by the numbers of their records."""

    __slots__ = ("_forget", "entries")

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        """Without those that are gone."""
        self._forget: Any = forgetting(self.entries)

    def get(self, number: int) -> torch.UntypedStorage | None:
        """The storage of a number, if it is alive."""
        entry = self.entries.get(number)
        return None if entry is None else entry()

    def add(self, number: int, storage: torch.UntypedStorage) -> None:
        """Let a number stand for a storage as long as it lives."""
        self.entries[number] = entry = Entry(storage, self._forget)
        entry.key = number


class SizedRecords:
    """Gives storages records, their ids in the order seen; a table of them says where they are."""

    __slots__ = ("_count", "_syms")

    def __init__(self, syms: SymMemo) -> None:
        self._count = itertools.count()
        self._syms = syms

    def of(self, storage: torch.UntypedStorage) -> MetaStorageDesc:
        """The record of a storage, the same object until the storage is resized."""
        nbytes: IntLike = storage.nbytes()
        if type(nbytes) is not int:
            nbytes = self._syms.encode_int(nbytes)
        return self.of_size(storage, nbytes)

    def of_size(self, storage: torch.UntypedStorage, nbytes: IntLike) -> MetaStorageDesc:
        """The same, given the record of its size."""
        raise NotImplementedError


class StorageRecords(SizedRecords):
    """The records of storages by identity."""

    __slots__ = ("_forget", "entries")

    def __init__(self, syms: SymMemo) -> None:
        super().__init__(syms)
        self.entries: dict[int, Entry] = {}
        self._forget: Any = forgetting(self.entries)

    def give(self, storage: torch.UntypedStorage, record: MetaStorageDesc) -> None:
        """Let a storage have the record of another one."""
        entry = Entry(storage, self._forget)
        entry.key = id(storage)
        entry.value = record
        self.entries[entry.key] = entry

    def of_size(self, storage: torch.UntypedStorage, nbytes: IntLike) -> MetaStorageDesc:
        """The same, given the record of its size."""
        key = id(storage)
        entry = self.entries.get(key)
        if entry is None or entry() is not storage:
            entry = Entry(storage, self._forget)
            entry.key = key
            entry.value = record = MetaStorageDesc(id=next(self._count), nbytes=nbytes)
            known = self.entries.setdefault(key, entry)
            if known is entry:
                return record
            entry = _settled(self.entries, known, entry)
        record = entry.value
        if record.nbytes is not nbytes and record.nbytes != nbytes:
            entry.value = record = MetaStorageDesc(id=record.id, nbytes=nbytes)
        return record

    def clear(self) -> None:
        """Forget all: a storage that comes again gets a new id."""
        self.entries.clear()


class KeptRecords(SizedRecords):
    """The same of storages that it keeps alive, for one thread."""

    __slots__ = ("_alive", "_records")

    def __init__(self, syms: SymMemo) -> None:
        super().__init__(syms)
        self._records: dict[int, MetaStorageDesc] = {}
        self._alive: list[torch.UntypedStorage] = []

    def give(self, storage: torch.UntypedStorage, record: MetaStorageDesc) -> None:
        """Let a storage have the record of another one."""
        self._records[id(storage)] = record
        self._alive.append(storage)

    def of_size(self, storage: torch.UntypedStorage, nbytes: IntLike) -> MetaStorageDesc:
        """The record of a storage, given that of its size."""
        record = self._records.get(id(storage))
        if record is None:
            record = MetaStorageDesc(id=next(self._count), nbytes=nbytes)
            self.give(storage, record)
        elif record.nbytes is not nbytes and record.nbytes != nbytes:
            record = self._records[id(storage)] = MetaStorageDesc(id=record.id, nbytes=nbytes)
        return record

    def clear(self) -> None:
        """Forget all: a storage that comes again gets a new id."""
        self._records.clear()
        self._alive.clear()
