"""Map the devices in a graph's calls: ``x.cuda()``, ``device="cuda"``, autocast."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from torch_fakeify.encoding.names import encode_function
from torch_fakeify.errors import ConvertError, FormatError

if TYPE_CHECKING:
    from collections.abc import Callable

_DEVICE = re.compile(r"[a-z][a-z0-9]*(?::\d+)?")

_ACCELERATORS = ("cuda", "xpu", "mps", "hpu", "mtia", "ipu")
"""Types of devices that a bare index may mean, and after which a method of tensors is named."""

_TENSOR_TYPE = re.compile(r"torch\.(?:([a-z]+)\.)?([A-Za-z0-9]+Tensor)")
"""The name of one of torch's old tensor types: ``torch.cuda.FloatTensor``."""

_KEYWORDS = frozenset({"device", "device_type"})

_FIRST_IS_TYPE = frozenset({"_enter_autocast", "is_autocast_available", "get_autocast_dtype",
                            "set_autocast_dtype", "set_autocast_enabled", "is_autocast_enabled",
                            "wrap_with_autocast"})  # fmt: skip
"""Functions whose first argument is the type of a device."""

_TAKES_DEVICE = frozenset({"to", "device_put", "_to_copy", "set_default_device"})
"""Methods and functions that take a device by position."""


class Devices:
    """A map of device names for constants and calls; false if it is empty."""

    def __init__(self, retarget: Callable[[str], str] | None) -> None:
        self._retarget = retarget

    def __bool__(self) -> bool:
        return self._retarget is not None

    def move(self, name: str, where: str = "$") -> str:
        """Map the name of a device.

        Raises:
            FormatError: the new name is not a device.
        """
        new = name if self._retarget is None else self._retarget(name)
        try:
            torch.device(new)
        except RuntimeError as error:
            raise FormatError("not a device", where=where, found=repr(new)) from error
        return new

    def move_call(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        where: str,
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Map the devices in a call, except ``torch.device`` objects, which are mapped already."""
        kwargs = {
            k: self._move_any(v, where, type_only=k == "device_type") if k in _KEYWORDS else v
            for k, v in kwargs.items()
        }
        function = target if isinstance(target, str) else getattr(target, "__name__", "")
        if op == "call_method" and function in _ACCELERATORS:
            return self._move_method(function, args, kwargs, where)
        if op == "call_method" and function == "type":
            return target, (*args[:1], *(self._move_type(arg) for arg in args[1:])), kwargs
        if op == "call_function" and str(getattr(target, "__module__", "")).startswith("torch."):
            target = self._move_function(target, where)
        if function in _FIRST_IS_TYPE and args:
            args = (self._move_any(args[0], where, type_only=True), *args[1:])
        elif function in _TAKES_DEVICE:
            args = (*args[:1], *(self._move_any(arg, where) for arg in args[1:]))
        return target, args, kwargs

    def _move_any(self, value: Any, where: str, *, type_only: bool = False) -> Any:
        if type(value) is int:
            return self._move_index(value, where)
        if not isinstance(value, str) or _DEVICE.fullmatch(value) is None:
            return value
        new = self.move(value, where)
        return new.partition(":")[0] if type_only else new

    def _move_index(self, index: int, where: str) -> Any:
        """Map a bare index, which means a device of the accelerator."""
        for device_type in _ACCELERATORS:
            name = f"{device_type}:{index}"
            new = self.move(name, where)
            if new != name:
                return torch.device(new)
        return index

    def _move_type(self, value: Any) -> Any:
        found = _TENSOR_TYPE.fullmatch(value) if isinstance(value, str) else None
        if found is None:
            return value
        device_type = self.move(found[1] or "cpu").partition(":")[0]
        return f"torch.{found[2]}" if device_type == "cpu" else f"torch.{device_type}.{found[2]}"

    def _move_function(self, function: Any, where: str) -> Any:
        """Map a function of ``torch.cuda`` to the function of that name for the new device type."""
        name = f"{function.__module__}.{function.__name__}"
        if (
            function.__module__ == "torch._C"
        ):  # a build with the device has some of its functions there
            name = encode_function(function, where=where).name
        path, _, attribute = name.rpartition(".")
        home = path.removeprefix("torch.")
        if home not in _ACCELERATORS:
            return function
        new = self.move(home, where).partition(":")[0]
        if new == home:
            return function
        moved = getattr(getattr(torch, new, None), attribute, None)
        if moved is None:
            raise ConvertError(
                f"{name} has no counterpart for {new!r}",
                where=where,
                fix="Instantiate the frame on the recorded devices",
            )
        return moved

    def _move_method(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], where: str
    ) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        """Replace ``x.cuda(...)`` by ``x.to(...)`` if the device changes."""
        positional = list(args[1:])
        device = kwargs.get("device", positional[0] if positional else None)
        if isinstance(device, torch.device):
            new = str(device)
        else:
            name = f"{method}:{device}" if type(device) is int else str(device or method)
            new = self.move(name, where)
        if new.partition(":")[0] == method:
            return method, args, kwargs
        rest = {k: v for k, v in kwargs.items() if k != "device"}
        if len(positional) > 1:
            rest["non_blocking"] = positional[1]
        return "to", (args[0], torch.device(new)), rest
