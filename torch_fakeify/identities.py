"""Numbers of tensors and records of storages, by identity, which keep neither alive.

Method: a dictionary by ``id()`` whose entries are the weak references themselves. It costs a third
of ``WeakIdKeyDictionary``, which hashes and compares through a wrapper around each key.

An entry goes away with its object, so a number is never given to another object, even if
Python reuses the address. A Python wrapper that torch keeps for a tensor or storage which
lives on in C++ keeps its address and its weak references, and so its number.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

from .desc import MetaStorageDesc

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from .desc import IntLike
    from .symbols import SymMemo

__all__ = ["StorageRecords", "TensorNumbers"]


class _Entry(weakref.ref[Any]):
    """A weak reference to an object, and what is known of it."""

    __slots__ = ("key", "value")

    key: int
    """The ``id()`` of the object."""
    value: Any


def _forgetting(entries: dict[int, _Entry]) -> Callable[[_Entry], None]:
    """The callback of the entries of a dictionary: the object of one is gone."""

    def forget(entry: _Entry) -> None:
        if entries.get(entry.key) is entry:
            del entries[entry.key]

    return forget


class TensorNumbers:
    """Numbers for tensors by identity, in the order seen."""

    __slots__ = ("_count", "_forget", "entries")

    def __init__(self) -> None:
        self.entries: dict[int, _Entry] = {}
        self._count = itertools.count()
        self._forget: Any = _forgetting(self.entries)

    def of(self, t: torch.Tensor) -> int:
        """The number of a tensor, a new one at first sight."""
        key = id(t)
        entry = self.entries.get(key)
        if entry is not None and entry() is t:
            return entry.value
        self.entries[key] = entry = _Entry(t, self._forget)
        entry.key = key
        entry.value = number = next(self._count)
        return number

    def give(self, t: torch.Tensor, number: int) -> None:
        """Let a tensor have the number of another one."""
        self.entries[id(t)] = entry = _Entry(t, self._forget)
        entry.key = id(t)
        entry.value = number


class StorageRecords:
    """The records of storages by identity, their ids in the order seen."""

    __slots__ = ("_count", "_forget", "_syms", "entries")

    def __init__(self, syms: SymMemo) -> None:
        self.entries: dict[int, _Entry] = {}
        self._count = itertools.count()
        self._forget: Any = _forgetting(self.entries)
        self._syms = syms

    def of(self, storage: torch.UntypedStorage) -> MetaStorageDesc:
        """The record of a storage, the same object until the storage is resized."""
        nbytes: IntLike = storage.nbytes()
        if type(nbytes) is not int:
            nbytes = self._syms.encode_int(nbytes)
        return self.of_size(storage, nbytes)

    def of_size(self, storage: torch.UntypedStorage, nbytes: IntLike) -> MetaStorageDesc:
        """The same, given the record of its size."""
        key = id(storage)
        entry = self.entries.get(key)
        if entry is None or entry() is not storage:
            self.entries[key] = entry = _Entry(storage, self._forget)
            entry.key = key
            entry.value = record = MetaStorageDesc(id=next(self._count), nbytes=nbytes)
            return record
        record = entry.value
        if record.nbytes is not nbytes and record.nbytes != nbytes:
            entry.value = record = MetaStorageDesc(id=record.id, nbytes=nbytes)
        return record
