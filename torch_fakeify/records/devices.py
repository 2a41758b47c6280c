"""Move a recorded frame to other devices, such as a CUDA capture to a CPU-only machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from torch_fakeify.errors import CaptureError

from .rewrite import Rewriter, walk
from .tensor import MetaTensorDesc, TorchConstValue

if TYPE_CHECKING:
    from .frame import CaptureDesc, ModesDesc

_HOST = ("cpu", "meta")


class DeviceMap:
    """A map from recorded device names to new ones; false if it is empty."""

    def __init__(self, devices: Mapping[str, str], accelerators: str | None = None) -> None:
        """Make a map.

        Args:
            devices: new names by recorded name.
            accelerators: the new name of all other accelerators.
        """
        self._devices = dict(devices)
        self._accelerators = accelerators
        self._rewriter = Rewriter(self._moved)

    def __bool__(self) -> bool:
        return bool(self._devices) or self._accelerators is not None

    @classmethod
    def parse(cls, device: Any, desc: CaptureDesc) -> DeviceMap:
        """Return the map for an argument ``device``: none, one device, or a mapping of device names.

        One device replaces every recorded accelerator, or the CPU if there is none.

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
        target = str(device)
        if any(_is_accelerator(d) for d in recorded):
            return cls({}, accelerators=target)
        return cls({"cpu": target} if "cpu" in recorded and target != "cpu" else {})

    def device(self, name: str) -> str:
        """Return the new name of a device; ``"cuda"`` maps as ``"cuda:0"`` or any other index does."""
        if name in self._devices:
            return self._devices[name]
        device_type, _, index = name.partition(":")
        if not index:
            for recorded, target in self._devices.items():
                if recorded.partition(":")[0] == device_type:
                    return target
        if self._accelerators is not None and _is_accelerator(name):
            return self._accelerators
        return name

    def modes(self, desc: ModesDesc) -> ModesDesc:
        """Return the modes with autocast states moved to the new devices."""
        if not self:
            return desc
        moved = {a.device_type: a for a in desc.autocast}
        for autocast in desc.autocast:
            target = self.device(autocast.device_type).partition(":")[0]
            if target != autocast.device_type:
                del moved[autocast.device_type]
                moved[target] = msgspec.structs.replace(autocast, device_type=target)
        return msgspec.structs.replace(desc, autocast=tuple(moved.values()))

    def tensor(self, desc: MetaTensorDesc) -> MetaTensorDesc:
        """Return the record on the new device, with its base and gradient; shared parts stay shared."""
        return self._rewriter(desc) if self else desc

    def _moved(self, part: Any) -> Any:
        if isinstance(part, MetaTensorDesc):
            return msgspec.structs.replace(part, device=self.device(part.device))
        if isinstance(part, TorchConstValue) and part.kind == "device":
            return msgspec.structs.replace(part, name=self.device(part.name))
        return part


def devices_of(desc: CaptureDesc, device: str | None = None) -> list[str]:
    """Return the devices that a frame is compiled for, moved according to an argument ``device``."""
    devices = DeviceMap.parse(device, desc)
    return sorted({devices.device(name) for name in _recorded_devices(desc)})


def _is_accelerator(name: str) -> bool:
    return name.partition(":")[0] not in _HOST


def _recorded_devices(desc: CaptureDesc) -> Iterator[str]:
    """Yield the devices of inputs, of tensors in the graph and its metadata, and of constants."""
    for part in walk((desc.inputs, desc.graph), (MetaTensorDesc, TorchConstValue), inside=True):
        if isinstance(part, MetaTensorDesc):
            yield part.device
        elif part.kind == "device":
            yield part.name
