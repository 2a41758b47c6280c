"""Ids of tensors and records of storages, by identity.

The ``Weak`` tables are dictionaries by ``id()`` whose entries are the weak references themselves; see
`_weak_table`. An entry is removed with its object, so no id is used twice even if Python reuses an
address. A tensor or storage that survives in C++ has the same Python wrapper, and so the same id.

Threads may share a weak table: entries are complete before they are inserted, and the first one
inserted wins, so that an object has one id. There is no lock, so that a child forked meanwhile finds
usable tables.

The ``Strong`` tables hold references to their objects, which saves a weak reference for each where the
objects stay alive anyway, as while a frame is captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_fakeify._weak_table import Entry, removal_callback, winning_entry
from torch_fakeify.records.tensor import MetaStorageDesc, owned

if TYPE_CHECKING:
    import torch

    from torch_fakeify.records.id_owners import Numbering
    from torch_fakeify.records.tensor import IntLike

    from .sym_encoder import SymEncoder

__all__ = [
    "StorageRecordsBase",
    "StrongStorageRecords",
    "StrongTensorIds",
    "WeakStorageRecords",
    "WeakTensorIds",
]


class WeakTensorIds:
    """Ids of tensors, consecutive in the order of first use."""

    __slots__ = ("_count", "_on_removal", "entries")

    def __init__(self, numbering: Numbering) -> None:
        self.entries: dict[int, Entry] = {}
        self._count = numbering.tensors
        self._on_removal: Any = removal_callback(self.entries)

    def of(self, t: torch.Tensor) -> int:
        """The id of a tensor, a new one at its first use."""
        key = id(t)
        entry = self.entries.get(key)
        if entry is not None and entry() is t:
            return entry.value
        entry = Entry(t, self._on_removal)
        entry.key = key
        entry.value = next(self._count)
        stored = self.entries.setdefault(key, entry)
        return entry.value if stored is entry else winning_entry(self.entries, stored, entry).value

    def alias(self, t: torch.Tensor, number: int) -> None:
        """Give a tensor the id of another one."""
        entry = Entry(t, self._on_removal)
        entry.key = id(t)
        entry.value = number
        self.entries[id(t)] = entry

    def clear(self) -> None:
        """Remove all entries."""
        self.entries.clear()


class StrongTensorIds:
    """Ids of tensors with strong references to them; not thread-safe."""

    __slots__ = ("_alive", "_count", "_numbers")

    def __init__(self, numbering: Numbering) -> None:
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []
        self._count = numbering.tensors

    def of(self, t: torch.Tensor) -> int:
        """The id of a tensor, a new one at its first use."""
        number = self._numbers.get(id(t))
        if number is None:
            self.alias(t, number := next(self._count))
        return number

    def alias(self, t: torch.Tensor, number: int) -> None:
        """Give a tensor the id of another one."""
        self._numbers[id(t)] = number
        self._alive.append(t)

    def clear(self) -> None:
        """Remove all entries."""
        self._numbers.clear()
        self._alive.clear()


class StorageRecordsBase:
    """Base class of the tables of storage records, with ids in the order of first use."""

    __slots__ = ("_numbering", "_syms")

    def __init__(self, syms: SymEncoder) -> None:
        self._numbering = syms.numbering
        self._syms = syms

    def of(self, storage: torch.UntypedStorage) -> MetaStorageDesc:
        """The record of a storage, the same object until the storage is resized."""
        nbytes: IntLike = storage.nbytes()
        if type(nbytes) is not int:
            nbytes = self._syms.encode_int(nbytes)
        return self.of_size(storage, nbytes)

    def of_size(self, storage: torch.UntypedStorage, nbytes: IntLike) -> MetaStorageDesc:
        """The record of a storage with the encoded size ``nbytes`` in bytes."""
        raise NotImplementedError

    def _record(self, nbytes: IntLike, number: int | None = None) -> MetaStorageDesc:
        """A new record with an id, by default the next one."""
        if number is None:
            number = next(self._numbering.storages)
        return owned(MetaStorageDesc(id=number, nbytes=nbytes), self._numbering)


class WeakStorageRecords(StorageRecordsBase):
    """Records of storages with weak references to them."""

    __slots__ = ("_on_removal", "entries")

    def __init__(self, syms: SymEncoder) -> None:
        super().__init__(syms)
        self.entries: dict[int, Entry] = {}
        self._on_removal: Any = removal_callback(self.entries)

    def alias(self, storage: torch.UntypedStorage, record: MetaStorageDesc) -> None:
        """Give a storage the record of another one."""
        entry = Entry(storage, self._on_removal)
        entry.key = id(storage)
        entry.value = record
        self.entries[entry.key] = entry

    def of_size(self, storage: torch.UntypedStorage, nbytes: IntLike) -> MetaStorageDesc:
        """The record of a storage with the encoded size ``nbytes`` in bytes."""
        key = id(storage)
        entry = self.entries.get(key)
        if entry is None or entry() is not storage:
            entry = Entry(storage, self._on_removal)
            entry.key = key
            entry.value = record = self._record(nbytes)
            stored = self.entries.setdefault(key, entry)
            if stored is entry:
                return record
            entry = winning_entry(self.entries, stored, entry)
        record = entry.value
        if record.nbytes is not nbytes and record.nbytes != nbytes:
            entry.value = record = self._record(nbytes, record.id)
        return record

    def clear(self) -> None:
        """Remove all entries."""
        self.entries.clear()


class StrongStorageRecords(StorageRecordsBase):
    """Records of storages with strong references to them; not thread-safe."""

    __slots__ = ("_alive", "_records")

    def __init__(self, syms: SymEncoder) -> None:
        super().__init__(syms)
        self._records: dict[int, MetaStorageDesc] = {}
        self._alive: list[torch.UntypedStorage] = []

    def alias(self, storage: torch.UntypedStorage, record: MetaStorageDesc) -> None:
        """Give a storage the record of another one."""
        self._records[id(storage)] = record
        self._alive.append(storage)

    def of_size(self, storage: torch.UntypedStorage, nbytes: IntLike) -> MetaStorageDesc:
        """The record of a storage with the encoded size ``nbytes`` in bytes."""
        record = self._records.get(id(storage))
        if record is None:
            record = self._record(nbytes)
            self.alias(storage, record)
        elif record.nbytes is not nbytes and record.nbytes != nbytes:
            record = self._records[id(storage)] = self._record(nbytes, record.id)
        return record

    def clear(self) -> None:
        """Remove all entries."""
        self._records.clear()
        self._alive.clear()
