"""The plain results in a graph's metadata: many tensors of few layouts, over symbols that exist.

What the first tensor of a layout took to make (its expressions, the size of its storage, the checks
of its record and torch's checks of sizes) serves all that are like it. Each gets a storage of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ._torch import (
    FakeTensor,
    ShapeEnv,
    SymNode,
    empty_strided,
    no_dispatch_guard,
)
from .desc import SymDesc
from .fakes import META
from .fresh_sizes import symbols_are_watched
from .layouts import holder_of, meta_of, set_storage
from .plain_fakes import fake_of, has_autograd, is_changed, is_plain_whole
from .static_fakes import make_leaf

if TYPE_CHECKING:
    from collections.abc import Callable

    from .desc import IntLike, MetaTensorDesc
    from .fakes import FakeDevice
    from .identities import StoragesMade

__all__ = ["KeptFakes"]

_Key = tuple[Any, ...]


class _Layout(NamedTuple):
    """What tensors of one layout have in common."""

    size: Any
    stride: Any
    dtype: torch.dtype
    nbytes: torch.SymInt | None
    """Of the storage; ``None`` where sizes and strides are integers."""
    shape: torch.Tensor | None
    """Where they are symbolic, a meta tensor that has them, on a storage of its own."""
    records: tuple[Any, ...]
    """Whose ids are in the key, so that they stay alive."""


class KeptFakes:
    """Remembers the layouts of the fake tensors that a converter made, and makes more of them."""

    def __init__(
        self,
        shape_env: ShapeEnv,
        with_history: Callable[[MetaTensorDesc, FakeTensor, torch.Tensor], FakeTensor],
    ) -> None:
        self._env: Any = shape_env
        self._with_history = with_history
        self._known: dict[_Key, _Layout] = {}
        # By the ids of a record's parts, which the entry keeps alive.
        self._seen: dict[_Key, tuple[_Layout, MetaTensorDesc]] = {}

    def learn(self, d: MetaTensorDesc, meta: torch.Tensor) -> None:
        """Remember the layout of a meta tensor with a storage of its own, made of a record."""
        if type(self._env) is not ShapeEnv or not _is_usual(d) or symbols_are_watched(self._env):
            return
        nbytes: Any = meta.untyped_storage().nbytes()
        symbolic: list[Any] = [
            n for n in (*meta.size(), *meta.stride(), nbytes) if type(n) is not int
        ]
        if (type(nbytes) is int) != (not symbolic) or not all(
            type(n.node) is SymNode and type(n.node.hint) is int for n in symbolic
        ):
            return
        size, stride, dtype = tuple(meta.size()), meta.stride(), meta.dtype
        shape = None
        if symbolic:
            guard = no_dispatch_guard()
            try:
                shape = meta_of(size, stride, dtype, nbytes)
            finally:
                del guard
        self._known[_key(d)] = _Layout(
            size, stride, dtype, nbytes if symbolic else None, shape, (d.size, d.stride, d.storage)
        )

    def make(
        self,
        d: MetaTensorDesc,
        device: FakeDevice,
        storages: StoragesMade,
    ) -> tuple[FakeTensor, torch.Tensor] | None:
        """A fake tensor and its meta tensor, or ``None`` where the plain path has to make them.

        Args:
            d: the record.
            device: of the tensor.
            storages: those that there are, by number; the new one is added.
        """
        if d.scalar_hint is not None:
            return None  # its item() is tracked
        if not d.is_fake:
            # An input or parameter of static shape. Its marks are left to the caller.
            return make_leaf(d, device, storages, marked=True)
        if not _is_usual(d) or d.storage is None or d.storage.id in storages.entries:
            return None
        seen = self._seen.get(same := _identity(d))
        known = self._known.get(_key(d)) if seen is None else seen[0]
        if seen is None and known is not None:
            self._seen[same] = known, d
        if known is None and type(d.storage.nbytes) is int:
            return make_leaf(d, device, storages)
        if known is None or is_changed() or not (d.is_leaf or has_autograd()):
            return None
        if known.nbytes is not None and d.source is not None:
            return None  # an input has size nodes of its own: tracers tell by them whose they are
        guard = no_dispatch_guard()
        try:
            meta = _meta(known)
            fake = fake_of(d, meta, device, requires_grad=d.requires_grad)
        finally:
            del guard
        storages.add(d.storage.id, meta.untyped_storage())
        if not d.is_leaf:
            with torch.enable_grad():
                fake = self._with_history(d, fake, meta)
        return fake, meta


def _meta(layout: _Layout) -> torch.Tensor:
    if layout.shape is None:
        return empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=META)
    # Below all dispatch, and of the sizes nothing is asked again, as by what takes sizes. The version
    # counter is its own.
    meta = layout.shape.data
    set_storage(meta, holder_of(layout.nbytes))
    return meta


def _is_usual(d: MetaTensorDesc) -> bool:
    """Whether it is the record of a dense tensor on a storage of its own, and nothing else of note."""
    storage = d.storage
    return (
        storage is not None
        and storage.nbytes != 0
        and d.scalar_hint is None
        and (d.is_leaf or d.requires_grad)
        and is_plain_whole(d)
    )


def _identity(d: MetaTensorDesc) -> _Key:
    """What the parts of a record are, that tensors of one layout share as a rule."""
    assert d.storage is not None
    return d.dtype, id(d.size), id(d.stride), id(d.storage.nbytes)


def _key(d: MetaTensorDesc) -> _Key:
    """What decides the layout of a plain tensor: equal keys, equal layouts."""
    assert d.storage is not None
    return (d.dtype, _known_by(d.size), _known_by(d.stride), *_known_by((d.storage.nbytes,)))


def _known_by(numbers: tuple[IntLike, ...]) -> _Key:
    """Integers by value; of a symbolic number its expression by identity, which tensors share."""
    return tuple([(id(n.expr), n.hint, type(n.hint)) if type(n) is SymDesc else n for n in numbers])
