"""Fake tensors of static shapes: dense tensors and dense views of them, the fast way.

What `rebuild.Rebuilder` gives in general, without what such tensors have no need of: symbols,
sources, contexts, wrappers. Whatever is not as plain as that is left to it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from . import _torch
from ._torch import (
    DisableTorchFunction,
    FakeTensor,
    disable_current_modes,
    empty_strided,
    make_wrapper_subclass,
    no_dispatch_guard,
    pop_dispatch_mode,
    push_dispatch_mode,
    set_grad_enabled,
)
from .fakes import DTYPES, META
from .plain_fakes import (
    fake_of,
    has_autograd,
    is_changed,
    is_plain,
    is_plain_but_for_marks,
    is_plain_leaf,
)

if TYPE_CHECKING:
    from .desc import MetaTensorDesc
    from .fakes import FakeDevice
    from .identities import StoragesMade

__all__ = [
    "Viewing",
    "can_be_viewed",
    "is_untold",
    "make_leaf",
    "make_view",
    "views_are_as_ever",
]

_AS_STRIDED = torch.ops.aten.as_strided.default
_UNSQUEEZE = torch.ops.aten.unsqueeze.default
_DISPATCH = "__torch_dispatch__"
_PRIM_DEVICE = torch.ops.prim.device.default
_CREATION_METAS = dict(_torch.CreationMeta.__members__)


class Viewing(_torch.TorchDispatchMode):
    """Answers autograd, which makes a view, with the fake tensor that the view is to be.

    Method: as `fakes.Replay`, for one view operator on one tensor.
    """

    fake: FakeTensor | None = None
    device: FakeDevice | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else each call goes through a wrapper that costs more than all that is done here. It would
        # keep Dynamo from tracing these lines, which are as good to trace as those that lead here.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answers for the device and the one view, and hands on the rest."""
        if func is _UNSQUEEZE or func is _AS_STRIDED:
            return self.fake
        if func is _PRIM_DEVICE and self.device is not None:
            return self.device.device if self.device.has_guard else META
        return func(*args, **(kwargs or {}))


def make_leaf(
    d: MetaTensorDesc, device: FakeDevice, storages: StoragesMade, *, marked: bool = False
) -> tuple[FakeTensor, torch.Tensor] | None:
    """A dense leaf on a storage of its own that it fills, and its meta tensor.

    ``None`` for all others, also for sizes that torch takes no tensor of: the plain path says so.

    Args:
        d: the record.
        device: of the tensor.
        storages: those that there are, by number; the new one is added.
        marked: whether it may have marks, which are left to the caller.
    """
    storage = d.storage
    if storage is None or storage.id in storages.entries or is_changed():
        return None
    if not (is_plain_but_for_marks(d) if marked else is_plain_leaf(d)):
        return None
    dtype = DTYPES.get(d.dtype)
    if dtype is None:
        return None
    guard = no_dispatch_guard()
    try:
        meta = empty_strided(d.size, d.stride, dtype=dtype, device=META)
        fake = fake_of(d, meta, device, requires_grad=d.requires_grad)
    except (RuntimeError, TypeError):
        return None
    finally:
        del guard
    made = meta.untyped_storage()
    if made.nbytes() != storage.nbytes:
        return None
    storages.add(storage.id, made)
    return fake, meta


def can_be_viewed(d: MetaTensorDesc) -> bool:
    """Whether `make_view` may make the tensor of a record, when there is its base."""
    base = d.base
    return (
        base is not None
        and d.is_view
        and not base.is_view
        and d.storage is not None
        and base.storage is not None
        and (d.storage is base.storage or d.storage == base.storage)
        and d.dtype == base.dtype
        and d.device == base.device
        and (d.is_leaf or (d.requires_grad and base.requires_grad))
        and (d.creation_meta is None or d.creation_meta in _CREATION_METAS)
        and base.layout == "strided"
        and not base.is_inference
        and not base.is_conj
        and not base.is_neg
        and base.subclass is None
        and base.functorch is None
        and base.functional is None
        and is_plain(d)
    )


def views_are_as_ever() -> bool:
    """Whether nothing that is active around a call changes how `make_view` makes views."""
    return has_autograd() and not is_changed()


def is_untold(d: MetaTensorDesc) -> bool:
    """Whether autograd notes neither a history of a view nor how to make it again.

    Then nothing tells by which operator it was made.
    """
    return d.is_leaf and not _torch._is_view_replay_enabled()


def make_view(
    d: MetaTensorDesc,
    base: FakeTensor,
    meta: torch.Tensor,
    device: FakeDevice,
    viewing: Viewing,
    layout: torch.Tensor | tuple[Any, Any, Any] | None = None,
    *,
    quiet: bool = False,
) -> FakeTensor | None:
    """A dense view of a dense fake tensor, made by autograd as any other; or ``None``.

    Args:
        d: the record, for which `can_be_viewed` holds, as `views_are_as_ever` does.
        base: the fake tensor of its base.
        meta: the meta tensor on the storage of the base.
        device: of both.
        viewing: the mode in which views are made.
        layout: sizes, strides and offset where they are symbolic, or a meta tensor that has them, on
            that storage, which may be used up; else those of the record.
        quiet: whether no dispatch mode is active; then `is_untold` holds.
    """
    assert d.storage is not None
    if isinstance(layout, torch.Tensor):
        if quiet and _instances_answer():
            return _make_untold_view(d, base, layout, device, viewing)
    else:
        shared = meta.untyped_storage()
        if shared is not base.untyped_storage():
            return None
        if layout is None:
            if shared.nbytes() != d.storage.nbytes:
                return None
            layout = (d.size, d.stride, d.storage_offset)
    had_grad = torch.is_grad_enabled()
    set_grad_enabled(not d.is_leaf)
    push_dispatch_mode(viewing)
    try:
        guard = no_dispatch_guard()
        try:
            view = layout if isinstance(layout, torch.Tensor) else meta.as_strided(*layout)
            fake = fake_of(d, view, device, requires_grad=False)
        finally:
            del guard
        viewing.fake, viewing.device = fake, device
        if is_untold(d):
            made: Any = base.unsqueeze(0)  # of all, that of fewest arguments takes the least time
        elif isinstance(layout, torch.Tensor):
            made = base.as_strided(layout.size(), layout.stride(), layout.storage_offset())
        else:
            made = base.as_strided(*layout)
    except (RuntimeError, TypeError):
        return None  # the plain path says what is wrong with the record
    finally:
        viewing.fake = viewing.device = None
        pop_dispatch_mode(None)
        set_grad_enabled(had_grad)
    if d.is_leaf and d.requires_grad:
        made.requires_grad = True
    _torch.set_creation_meta(made, _CREATION_METAS[d.creation_meta or "DEFAULT"])
    return made


def _make_untold_view(
    d: MetaTensorDesc,
    base: FakeTensor,
    view: torch.Tensor,
    device: FakeDevice,
    viewing: Viewing,
) -> FakeTensor | None:
    """As `make_view` of a view for which `is_untold` holds, over the meta tensor that it is to have.

    Method: while one view is made, its base answers for itself. To push a mode and pop it takes half as
    long as all else.
    """
    # Where no grad is required either way, it is as well switched on.
    switched = base.requires_grad or not torch.is_grad_enabled()
    had_grad = switched and torch.is_grad_enabled()
    attributes: Any = base.__dict__
    try:
        viewing.fake = fake_of(d, view, device, requires_grad=False)
        viewing.device = device
        attributes[_DISPATCH] = viewing.__torch_dispatch__
        if switched:
            set_grad_enabled(False)
        made: Any = base.unsqueeze(0)  # as there
    except (RuntimeError, TypeError):
        return None  # the plain path says what is wrong with the record
    finally:
        viewing.fake = viewing.device = None
        attributes.pop(_DISPATCH, None)
        if switched:
            set_grad_enabled(had_grad)
    if d.requires_grad:
        made.requires_grad = True
    if switched or d.creation_meta is not None:
        _torch.set_creation_meta(made, _CREATION_METAS[d.creation_meta or "DEFAULT"])
    return made


@functools.cache
def _instances_answer() -> bool:
    """Whether C++ asks a tensor of a subclass itself what it dispatches to, before its class."""

    class Asked(torch.Tensor):
        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            return torch.empty(1)

    with disable_current_modes(), DisableTorchFunction():
        asked: Any = make_wrapper_subclass(Asked, (1,))
        asked.__torch_dispatch__ = lambda *_: made
        made = torch.empty(1, 1)
        return asked.unsqueeze(0) is made
