"""Ids of tensors and records of storages, by identity.

The tables are dictionaries by ``id()`` whose entries are the weak references themselves; see
`_weak_table`. An entry is removed with its object, so no id is used twice even if Python reuses an
address. A tensor or storage that survives in C++ has the same Python wrapper, and so the same id.

Threads may share a table: entries are complete before they are inserted, and the first one inserted
wins, so that an object has one id. There is no lock, so that a child forked meanwhile finds usable
tables.
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


class _Table:
    """Values of objects.

    Args:
        keep_alive: holds strong references to the objects, too.
    """

    __slots__ = ("_alive", "_on_removal", "entries")

    def __init__(self, *, keep_alive: bool) -> None:
        self.entries: dict[int, Entry] = {}
        self._on_removal: Any = removal_callback(self.entries)
        self._alive: list[Any] | None = [] if keep_alive else None

    def _entry(self, obj: Any, value: Any) -> Entry:
        """A new entry, which is not in the table yet."""
        if self._alive is not None:
            self._alive.append(obj)
        entry = Entry(obj, self._on_removal)
        entry.key = id(obj)
        entry.value = value
        return entry

    def _added(self, entry: Entry) -> Entry:
        """Add an entry, and return it or the one that another thread has added for its object."""
        stored = self.entries.setdefault(entry.key, entry)
        return stored if stored is entry else winning_entry(self.entries, stored, entry)

    def alias(self, obj: Any, value: Any) -> None:
        """Give an object the value of another one."""
        entry = self._entry(obj, value)
        self.entries[entry.key] = entry

    def clear(self) -> None:
        """Remove all entries."""
        self.entries.clear()
        if self._alive is not None:
            self._alive.clear()


class TensorIds(_Table):
    """Ids of tensors, consecutive in the order of first use."""

    __slots__ = ("_count",)

    def __init__(self, numbering: Numbering, *, keep_alive: bool = False) -> None:
        super().__init__(keep_alive=keep_alive)
        self._count = numbering.tensors

    def of(self, t: torch.Tensor) -> int:
        """The id of a tensor, a new one at its first use."""
        entry = self.entries.get(id(t))
        if entry is None or entry() is not t:
            entry = self._added(self._entry(t, next(self._count)))
        return entry.value


class StorageRecords(_Table):
    """Records of storages, with ids in the order of first use."""

    __slots__ = ("_numbering", "_syms")

    def __init__(self, syms: SymEncoder, *, keep_alive: bool = False) -> None:
        super().__init__(keep_alive=keep_alive)
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
        entry = self.entries.get(id(storage))
        if entry is None or entry() is not storage:
            record = self._record(nbytes, next(self._numbering.storages))
            entry = self._added(self._entry(storage, record))
        record = entry.value
        if record.nbytes is not nbytes and record.nbytes != nbytes:
            entry.value = record = self._record(nbytes, record.id)
        return record

    def _record(self, nbytes: IntLike, number: int) -> MetaStorageDesc:
        return owned(MetaStorageDesc(id=number, nbytes=nbytes), self._numbering)
