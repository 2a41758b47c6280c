"""Weak caches of a converter's fake tensors and storages, by the ids of their records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_fakeify._weak_table import Entry, removal_callback

if TYPE_CHECKING:
    import torch

    from torch_fakeify.records.tensor import MetaTensorDesc


class TensorEntry(Entry):
    """A cached fake tensor; the key is the id of its record, the value the record."""

    __slots__ = ("meta",)

    meta: torch.Tensor | None
    """The meta tensor on the same storage; ``None`` for views."""


class StorageMemo:
    """Weak cache of storages by the ids of their records.

    The value of an entry is the record of the tensor for which the storage was made.
    """

    __slots__ = ("_forget", "entries")

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        """Entries of live storages."""
        self._forget: Any = removal_callback(self.entries)

    def get(self, d: MetaTensorDesc) -> tuple[torch.UntypedStorage, MetaTensorDesc] | None:
        """The cached storage of a tensor's record, and the record for which it was made."""
        entry = None if d.storage is None else self.entries.get(d.storage.id)
        storage = None if entry is None else entry()
        return None if entry is None or storage is None else (storage, entry.value)

    def add(self, d: MetaTensorDesc, storage: torch.UntypedStorage) -> None:
        """Cache the storage of a tensor's record."""
        if d.storage is not None:
            self.entries[d.storage.id] = entry = Entry(storage, self._forget)
            entry.key, entry.value = d.storage.id, d
