"""Cache of the layouts of plain dense tensors, each with a function that recognizes it.

Method: Dynamo's guards on tensors. One C call compares a tensor's class, dispatch keys, dtype, device,
sizes and strides with those of an example.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from torch_fakeify.compat import torch_dispatch

from .unsupported import device_name

MAX_LAYOUTS = 4096
"""Layouts in a cache; a full cache is cleared."""

_NOT_PLAIN_KEYS = (
    torch_dispatch.DispatchKey.AutogradFunctionality,
    torch_dispatch.DispatchKey.ADInplaceOrView,
    torch_dispatch.DispatchKey.Conjugate,
    torch_dispatch.DispatchKey.Negative,
)
"""Dispatch keys that distinguish other tensors from plain ones."""


class CachedLayout(msgspec.Struct, gc=False):
    """The layout of plain tensors, with a function that recognizes it."""

    matches: Callable[[torch.Tensor], bool]
    """Whether a tensor has this class, layout and device, and the dispatch keys of a plain one."""
    dtype: torch.dtype
    dtype_name: str
    device_name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]


class LayoutCache:
    """Cached layouts, the first of each class and size."""

    __slots__ = ("of_class",)

    def __init__(self) -> None:
        self.of_class: dict[type, dict[tuple[int, ...], CachedLayout]] = {
            torch.Tensor: {},
            torch.nn.Parameter: {},
        }

    def clear(self) -> None:
        """Remove all layouts."""
        for layouts in self.of_class.values():
            layouts.clear()

    def add(self, t: torch.Tensor, dtype_name: str) -> None:
        """Add the layout of a plain tensor, unless there is one of its class and size.

        Nothing is added while dispatch keys that distinguish other tensors are excluded.
        """
        layouts = self.of_class[type(t)]
        if len(layouts) >= MAX_LAYOUTS:
            layouts.clear()
        if t.shape not in layouts and not any(map(torch_dispatch.key_excluded, _NOT_PLAIN_KEYS)):
            layouts[t.shape] = CachedLayout(
                matches=torch_dispatch.tensor_matcher(t),
                dtype=t.dtype,
                dtype_name=dtype_name,
                device_name=device_name(t.device),
                size=tuple(t.shape),
                stride=t.stride(),
            )
