"""Moving a recorded frame to other devices: a CUDA capture onto a CPU-only machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from .errors import CaptureError

if TYPE_CHECKING:
    from .desc import MetaTensorDesc
    from .desc_frame import CaptureDesc

_HOST = ("cpu", "meta")


class Retarget:
    """A map from recorded device names to new ones; false when it changes nothing."""

    def __init__(self, devices: Mapping[str, str]) -> None:
        self._devices = dict(devices)
        self._done: dict[int, tuple[MetaTensorDesc, MetaTensorDesc]] = {}

    def __bool__(self) -> bool:
        return bool(self._devices)

    @classmethod
    def parse(cls, device: Any, desc: CaptureDesc) -> Retarget:
        """From what a user may pass: nothing, one device, or a mapping of device names.

        One device takes the place of every accelerator that was recorded; if there was none, of
        the CPU.

        Raises:
            CaptureError: a key of the mapping is not a recorded device.
        """
        if device is None:
            return cls({})
        recorded = sorted(set(_recorded_devices(desc)))
        if isinstance(device, Mapping):
            unknown = sorted(str(k) for k in device if str(k) not in recorded)
            if unknown:
                raise CaptureError(
                    "cannot move tensors from a device that the capture does not use",
                    expected=f"one of {', '.join(recorded)}",
                    found=", ".join(unknown),
                    fix="Name only recorded devices",
                )
            return cls({str(k): str(v) for k, v in device.items()})
        accelerators = [d for d in recorded if d.partition(":")[0] not in _HOST]
        moved = accelerators or [d for d in recorded if d == "cpu"]
        target = str(device)
        return cls({d: target for d in moved if d != target})

    def device(self, name: str) -> str:
        """The new name of a device; ``"cuda"`` follows ``"cuda:0"`` and any other index."""
        if name in self._devices:
            return self._devices[name]
        device_type, _, index = name.partition(":")
        if not index:
            for recorded, target in self._devices.items():
                if recorded.partition(":")[0] == device_type:
                    return target
        return name

    def tensor(self, desc: MetaTensorDesc) -> MetaTensorDesc:
        """The record on the new device, with its base and gradient; shared parts stay shared."""
        if not self._devices:
            return desc
        done = self._done.get(id(desc))
        if done is not None:
            return done[1]
        moved = msgspec.structs.replace(
            desc,
            device=self.device(desc.device),
            base=None if desc.base is None else self.tensor(desc.base),
            grad=None if desc.grad is None else self.tensor(desc.grad),
        )
        # The record is kept with its copy: an id() is only good while its object lives.
        self._done[id(desc)] = (desc, moved)
        return moved


def _recorded_devices(desc: CaptureDesc) -> Iterator[str]:
    for entry in desc.inputs:
        tensor = entry.tensor
        while tensor is not None:
            yield tensor.device
            tensor = tensor.base
