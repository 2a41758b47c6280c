"""Moving a recorded frame to other devices: a CUDA capture onto a CPU-only machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from .desc import ExprDesc, MetaTensorDesc, SourceDesc, StackDesc, TorchConstValue
from .errors import CaptureError

if TYPE_CHECKING:
    from .desc_frame import CaptureDesc, ModesDesc

_HOST = ("cpu", "meta")
_WITHOUT_TENSORS = (ExprDesc, SourceDesc, StackDesc)


class Retarget:
    """A map from recorded device names to new ones; false when it changes nothing."""

    def __init__(self, devices: Mapping[str, str], accelerators: str | None = None) -> None:
        """A map.

        Args:
            devices: new names by recorded name.
            accelerators: where every other device goes that is no host.
        """
        self._devices = dict(devices)
        self._accelerators = accelerators
        self._done: dict[int, tuple[MetaTensorDesc, MetaTensorDesc]] = {}

    def __bool__(self) -> bool:
        return bool(self._devices) or self._accelerators is not None

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
        target = str(device)
        if any(_is_accelerator(d) for d in recorded):
            return cls({}, accelerators=target)
        return cls({"cpu": target} if "cpu" in recorded and target != "cpu" else {})

    def device(self, name: str) -> str:
        """The new name of a device; ``"cuda"`` follows ``"cuda:0"`` and any other index."""
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
        """The global state with the autocast of a device that moves, on the new device."""
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
        """The record on the new device, with its base and gradient; shared parts stay shared."""
        if not self:
            return desc
        done = self._done.get(id(desc))
        if done is not None:
            return done[1]
        moved = msgspec.structs.replace(
            desc,
            device=self.device(desc.device),
            base=None if desc.base is None else self.tensor(desc.base),
            grad=None if desc.grad is None else self.tensor(desc.grad),
            view_calls=self._part(desc.view_calls),
            subclass=self._part(desc.subclass),
            functorch=self._part(desc.functorch),
            functional=self._part(desc.functional),
        )
        # The record is kept with its copy: an id() is only good while its object lives.
        self._done[id(desc)] = (desc, moved)
        return moved

    def _part(self, part: Any) -> Any:
        """Anything in a record of a tensor, with the tensors and devices in it moved."""
        if isinstance(part, MetaTensorDesc):
            return self.tensor(part)
        if isinstance(part, TorchConstValue) and part.kind == "device":
            return msgspec.structs.replace(part, name=self.device(part.name))
        if isinstance(part, tuple) and type(part) is tuple:  # no named tuple
            return tuple(self._part(item) for item in part)
        if not isinstance(part, msgspec.Struct) or isinstance(part, _WITHOUT_TENSORS):
            return part
        fields = {name: getattr(part, name) for name in part.__struct_fields__}
        return msgspec.structs.replace(part, **{k: self._part(v) for k, v in fields.items()})


def _is_accelerator(name: str) -> bool:
    return name.partition(":")[0] not in _HOST


def _recorded_devices(desc: CaptureDesc) -> Iterator[str]:
    """Devices of inputs, of tensors in the graph and its metadata, and of its constants."""
    pending: list[object] = [desc.inputs, desc.graph]
    seen: set[int] = set()
    while pending:
        part = pending.pop()
        if isinstance(part, tuple):
            pending.extend(part)
        elif isinstance(part, msgspec.Struct) and id(part) not in seen:
            seen.add(id(part))  # records are shared
            if isinstance(part, TorchConstValue) and part.kind == "device":
                yield part.name
            elif isinstance(part, MetaTensorDesc):
                yield part.device
                pending.extend((part.base, part.grad, part.view_calls, part.subclass))
                pending.extend((part.functorch, part.functional))
            elif not isinstance(part, _WITHOUT_TENSORS):
                pending.extend(getattr(part, field) for field in part.__struct_fields__)
