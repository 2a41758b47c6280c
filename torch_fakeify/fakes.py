"""Fake tensors made around meta tensors, and view operators replayed on the meta tensors.

Both are short cuts past torch's own code (``FakeTensor.__new__``, the dispatch of operators on fake
tensors), which gives the same and takes several times as long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import _torch
from ._torch import FakeTensor, make_subclass, no_dispatch_guard
from .errors import ConvertError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ._torch import FakeTensorMode

__all__ = ["DTYPES", "META", "FakeDevice", "Replay", "dtype_of"]

META = torch.device("meta")

DTYPES: dict[str, torch.dtype] = {
    name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
"""Torch's dtypes by their names, short names included."""


def dtype_of(name: str, where: str) -> torch.dtype:
    """The dtype of that name.

    Raises:
        ConvertError: torch has no such dtype.
    """
    dtype = DTYPES.get(name)
    if dtype is None:
        raise ConvertError(f"torch {_torch.torch_version()} knows no dtype `{name}`", where=where)
    return dtype


class FakeDevice(NamedTuple):
    """A device of a mode's fake tensors, and how such tensors are made."""

    mode: FakeTensorMode
    device: torch.device
    attributes: dict[str, Any]
    """What torch's constructor puts on each of them."""
    of_parameter: dict[str, Any]
    """The same with what tells a parameter."""
    has_guard: bool
    """Whether this build of torch could drive such a device, if there were one."""

    @classmethod
    def make(cls, mode: FakeTensorMode, name: str, where: str) -> FakeDevice:
        """The device of that name.

        Raises:
            ConvertError: torch does not know it, or the mode does not take it.
        """
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise ConvertError(
                f"torch {_torch.torch_version()} knows no device `{name}`", where=where
            ) from error
        if device.type == "meta" and not mode.allow_meta:
            raise ConvertError(
                "the mode takes no tensors on the device `meta`",
                where=where,
                fix="Make the mode under torch._functorch.config.fake_tensor_allow_meta",
            )
        is_usual = device.type in ("cpu", "meta")
        if not is_usual:
            with mode:
                pass  # where there is no GPU, a build for GPUs gets a guard from this that asks for none
        known = _EXAMPLES.get(name)
        if known is None or _torch.FakeTensorConfig.debug:
            known = _example(mode, device)
            if is_usual and not _torch.FakeTensorConfig.debug:
                _EXAMPLES[name] = known
        example, has_guard = known
        attributes: dict[str, Any] = {**example, "fake_mode": mode}
        of_parameter = {**attributes, "_is_param": True}
        return cls(mode, attributes["_fake_device"], attributes, of_parameter, has_guard)

    def wrap(self, meta: torch.Tensor, *, fast: bool = True) -> Any:
        """The fake tensor around a meta tensor."""
        guard = no_dispatch_guard()
        try:
            if not fast or torch.compiler.is_exporting():
                return FakeTensor(self.mode, meta, device=self.device)
            fake = make_subclass(
                FakeTensor,
                meta,
                False,
                dispatch_device=True,
                device_for_backend_keys=self.device,
            )
        finally:
            del guard
        self.dress(fake)
        return fake

    def dress(self, fake: Any, *, is_parameter: bool = False) -> dict[str, Any]:
        """Gives a bare ``FakeTensor`` what the constructor would, and returns its attributes."""
        if self.mode._allow_unsafe_data_ptr_access:
            _torch.warn_on_data_ptr(fake)
        else:
            _torch.throw_on_data_ptr(fake)
        attributes = fake.__dict__
        attributes.update(self.of_parameter if is_parameter else self.attributes)
        return attributes


_EXAMPLES: dict[str, tuple[dict[str, Any], bool]] = {}
"""By device: those of CPU and ``meta`` are the same in every mode."""


def _example(mode: FakeTensorMode, device: torch.device) -> tuple[dict[str, Any], bool]:
    """What torch's constructor puts on a tensor, without the mode, and whether there is a guard."""
    guard = no_dispatch_guard()
    try:
        example: Any = FakeTensor(mode, torch.empty(0, device=META), device=device)
    finally:
        del guard
    # Pair by pair: a table without gaps is copied as a whole, which takes half the time.
    return dict({**vars(example), "fake_mode": None}.items()), _has_guard(device)


def _has_guard(device: torch.device) -> bool:
    accelerator = torch.accelerator.current_accelerator(check_available=False)
    if device.type in ("cpu", "meta") or (accelerator and accelerator.type == device.type):
        return True
    try:
        torch.Stream(device=device)
    except RuntimeError:
        return False
    return True


class Replay(_torch.TorchDispatchMode):
    """Runs view operators on fake tensors as operators on the bare meta tensor.

    Autograd above it sees the fake tensors, so views, version counters and history are as ever.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode
        self._meta: torch.Tensor | None = None
        self._device: FakeDevice | None = None

    def on(self, device: FakeDevice, meta: torch.Tensor | None) -> AbstractContextManager[Any]:
        """A context in which operators on fake tensors of this device are replayed.

        Args:
            device: of the fake tensors.
            meta: what to run the operators on; ``None`` runs them on the fake tensors.
        """
        self._meta = meta
        self._device = device
        return self

    def __exit__(self, *args: Any) -> None:
        """Leaves the context, and lets go of its tensors."""
        self._meta = self._device = None
        super().__exit__(*args)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answers for the device, replays the view operators and hands on the rest."""
        assert self._device is not None
        if func is _PRIM_DEVICE:
            # Autograd asks the device's guard for a stream, and a build of torch without that
            # guard ends the process there. No backward runs on such a device anyway.
            return self._device.device if self._device.has_guard else META
        if self._meta is None:
            with self._mode:
                return func(*args, **(kwargs or {}))
        if func not in _REPLAYED:
            return func(*args, **(kwargs or {}))
        guard = no_dispatch_guard()
        try:
            meta: torch.Tensor = func(self._meta, *args[1:], **(kwargs or {}))
        finally:
            del guard
        self._meta = meta
        return self._device.wrap(meta)


_PRIM_DEVICE = torch.ops.prim.device.default
_aten: Any = torch.ops.aten
_REPLAYED = frozenset(
    {
        _aten.as_strided.default,
        _aten.view.default,
        _aten.view.dtype,
        _aten.view_as_real.default,
        _aten.view_as_complex.default,
        _aten.detach.default,
    }
)
