"""Meta tensors on the storages of one converter, with one storage for each recorded id."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torch_fakeify._weak_table import Entry, removal_callback
from torch_fakeify.compat import torch_fakes, torch_symbols

from .context_checks import has_geometry
from .fake_tensors import META, in_kernel
from .meta_tensors import empty_meta, strided_on, suppressed
from .sizes import concrete_int
from .validate import check_same_storage

if TYPE_CHECKING:
    from torch_fakeify.compat.torch_symbols import ShapeEnv
    from torch_fakeify.records.tensor import MetaTensorDesc

    from .size_symbols import Geometry
    from .sizes import SizeMaker


class Storages:
    """Weak cache of storages by the ids of their records, and the meta tensors on them.

    Args:
        shape_env: of the symbols; ``None`` for static shapes.
        sizes: makes storage sizes of symbols; ``None`` for static shapes.
    """

    def __init__(self, shape_env: ShapeEnv | None, sizes: SizeMaker | None) -> None:
        self._env = shape_env
        self._sizes = sizes
        self.entries: dict[int, Entry] = {}
        """By id; the value of an entry is the record of the tensor for which the storage was made."""
        self._forget: Any = removal_callback(self.entries)

    def __contains__(self, d: MetaTensorDesc) -> bool:
        """Whether the storage of a tensor's record was made and is alive."""
        return d.storage is not None and d.storage.id in self.entries

    def find(self, d: MetaTensorDesc) -> torch.UntypedStorage | None:
        """Return the storage of a tensor's record, or ``None``.

        Raises:
            ConvertError: the records of two tensors on the storage contradict each other.
        """
        entry = None if d.storage is None else self.entries.get(d.storage.id)
        storage = None if entry is None else entry()
        if entry is None or storage is None:
            return None
        check_same_storage(entry.value, d)
        return storage

    def add(self, d: MetaTensorDesc, storage: torch.UntypedStorage) -> None:
        """Cache the storage of a tensor's record."""
        if d.storage is not None:
            self.entries[d.storage.id] = entry = Entry(storage, self._forget)
            entry.key, entry.value = d.storage.id, d

    def meta_tensor(
        self, d: MetaTensorDesc, geometry: Geometry, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a meta tensor on the storage of a record.

        The caller has switched off dispatch to Python.
        """
        size, stride, offset, _ = geometry
        shared = self.find(d)
        is_at_start = (
            offset == 0 if isinstance(offset, int) else torch_symbols.guard_or_false(offset == 0)
        )
        if shared is None and is_at_start:
            meta = empty_meta(self._env, geometry, dtype)
            self.add(d, meta.untyped_storage())
            return meta
        if shared is None:
            shared = self._new(d)
        # That the sizes fit the storage is a fact of the tensor described, no guard.
        with suppressed(self._env):
            try:
                return torch.empty(0, dtype=dtype, device=META).set_(shared, offset, size, stride)
            except torch_symbols.GuardOnDataDependentSymNode:
                # `set_` asks whether strides without hints are contiguous.
                return strided_on(shared, geometry, dtype)

    def share(self, d: MetaTensorDesc, wrapper: Any, geometry: Geometry) -> None:
        """Set a wrapper's storage to the one with its recorded id, where torch does so."""
        if torch_fakes.WHOLE_STORAGES:
            return
        shared = self.find(d)
        if shared is None and has_geometry(wrapper, geometry):
            self.add(d, wrapper.untyped_storage())
            return
        if shared is None:
            shared = self._new(d)
        # A wrapper's storage has no bytes; it identifies the wrapper's aliases.
        with torch.no_grad(), suppressed(self._env), in_kernel(wrapper):
            wrapper.set_(shared, geometry.storage_offset, geometry.size, geometry.stride)

    def _new(self, d: MetaTensorDesc) -> torch.UntypedStorage:
        assert d.storage is not None
        nbytes: Any = d.storage.nbytes
        if not isinstance(nbytes, int):
            if self._sizes is None:
                nbytes = concrete_int(nbytes, f"storage {d.storage.id}")
            else:
                nbytes = self._sizes.carry(d, (nbytes,))[0]
        if isinstance(nbytes, int):
            made = torch.UntypedStorage(nbytes, device=META)
        else:
            made = torch.empty((nbytes,), dtype=torch.uint8, device=META).untyped_storage()
        self.add(d, made)
        return made
