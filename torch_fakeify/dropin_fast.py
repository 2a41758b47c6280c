"""Short ways for the tensors that Dynamo has most of: dense, real, no views.

What they give equals what `dropin_convert` gives the long way; benchmarks show what they save.
"""

from __future__ import annotations

import weakref
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from . import _torch
from ._torch import (
    FakeTensor,
    FakeTensorConverter,
    empty_strided,
    make_subclass,
    no_dispatch_guard,
)
from .fakes import META
from .fresh_sizes import FreshSizes
from .layouts import Layouts
from .sizes import Geometry

if TYPE_CHECKING:
    from ._torch import FakeTensorMode, ShapeEnv, Source, SymbolicContext
    from .dropin_desc import MetaTensorDesc

__all__ = ["ShortWays"]

_MAKE_FAKE = [
    part
    for part in FakeTensorConverter.from_real_tensor.__code__.co_consts
    if isinstance(part, CodeType) and part.co_name == "mk_fake_tensor"
]


def _fake_callback_of(callback: Any) -> Any:
    """The mode of the callback by which ``FakeTensorConverter`` makes fake tensors without data.

    ``None`` of every other callback.
    """
    code: Any = getattr(callback, "__code__", None)
    if not any(code is known for known in _MAKE_FAKE):
        return None
    cells = dict(zip(code.co_freevars, callback.__closure__, strict=True))
    if cells.keys() != {"constant", "fake_mode"} or cells["constant"].cell_contents is not None:
        return None
    return cells["fake_mode"].cell_contents


class ShortWays:
    """What one converter remembers of its mode, which it does not keep alive, and ``ShapeEnv``."""

    def __init__(self) -> None:
        self._mode: Any = _nothing
        self._templates: dict[torch.device, dict[str, Any]] = {}
        self._env: ShapeEnv | None = None
        self._sizes: Any = None
        self._layouts: Any = None

    def mode_of(self, callback: Any) -> FakeTensorMode | None:
        """The mode whose plain fake tensors a callback makes; ``None`` of all other callbacks."""
        mode = _fake_callback_of(callback)
        if mode is None or _torch.FakeTensorConfig.debug or torch.compiler.is_exporting():
            return None
        if self._mode() is not mode:
            self._mode = weakref.ref(mode)
            self._templates.clear()
        return mode

    def geometry(
        self,
        d: MetaTensorDesc[Any],
        shape_env: ShapeEnv,
        source: Source,
        context: SymbolicContext | None,
    ) -> Geometry | None:
        """The symbols of a real tensor by the common policies; ``None`` where torch has to be asked."""
        stride: Any = d.stride
        numbers = (*d.size, *stride, d.storage_offset)
        if d.dynamo_hint_overrides or any(type(n) is not int for n in numbers):
            return None
        self._enter(shape_env)
        made = self._sizes.make(d.size, stride, d.storage_offset, source, context)
        return None if made is None else Geometry(*made[:3])

    def fake(
        self,
        d: MetaTensorDesc[Any],
        geometry: Geometry,
        mode: FakeTensorMode,
        shape_env: ShapeEnv | None,
    ) -> Any:
        """The fake tensor around a meta tensor on a storage of its own.

        Method: ``FakeTensor.__new__``, torch 2.13, with what it finds of a device found once.
        """
        size, stride, _ = geometry
        guard = no_dispatch_guard()
        try:
            meta = None
            if shape_env is not None:
                self._enter(shape_env)
                meta = self._layouts.meta(size, stride, d.dtype)
            if meta is None:
                meta = empty_strided(size, stride, dtype=d.dtype, device=META)
            template = self._templates.get(d.device)
            if template is None:
                made: Any = FakeTensor(mode, meta, d.device)
                if d.device.type != "meta":  # of which the mode has to be asked each time
                    template = self._templates[d.device] = dict(vars(made))
                    del template["fake_mode"]  # which would keep itself alive
                return made
            made = make_subclass(
                FakeTensor,
                meta,
                False,
                dispatch_device=True,
                device_for_backend_keys=template["_fake_device"],
            )
        finally:
            del guard
        if mode._allow_unsafe_data_ptr_access:
            _torch.warn_on_data_ptr(made)
        else:
            _torch.throw_on_data_ptr(made)
        attributes = made.__dict__
        attributes.update(template)
        attributes["fake_mode"] = mode
        return made

    def _enter(self, shape_env: ShapeEnv) -> None:
        if self._env is not shape_env:
            self._env = shape_env
            self._sizes, self._layouts = FreshSizes(shape_env), Layouts(shape_env)


def _nothing() -> None:
    return None
