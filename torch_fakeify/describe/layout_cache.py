"""Cache of the layouts of plain dense tensors, each with a function that recognizes it.

Method: Dynamo's guards on tensors. One C call compares a tensor's class, dispatch keys, dtype, device,
sizes and strides with those of an example.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from torch_fakeify.compat import torch_dispatch

from .unsupported import PLAIN, device_name, kind_of_keys, name_of

MAX_LAYOUTS = 4096
"""Layouts in a cache; a full cache is cleared."""

_NOT_PLAIN_KEYS = (
    torch_dispatch.DispatchKey.AutogradFunctionality,
    torch_dispatch.DispatchKey.ADInplaceOrView,
    torch_dispatch.DispatchKey.Conjugate,
    torch_dispatch.DispatchKey.Negative,
)
"""Dispatch keys that distinguish other tensors from plain ones."""

_OFFSET_DTYPES = (torch.int64, torch.int32)
"""Dtypes of the offsets of jagged tensors, which may have a nested int beside their layout."""


def has_symbols(t: torch.Tensor) -> bool:
    """Whether a strided tensor has symbolic numbers, as one on the meta device may without being fake."""
    return any(type(n) is not int for n in (*t.shape, *t.stride(), t.storage_offset()))


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

    def add(self, t: torch.Tensor) -> None:
        """Add the layout of a tensor if it is plain and the first of its class and size.

        Nothing is added while dispatch keys that distinguish other tensors are excluded, or included
        for all.
        """
        layouts = self.of_class.get(type(t))
        if layouts is None or t.dtype in _OFFSET_DTYPES or t.layout is not torch.strided:
            return
        if kind_of_keys(torch_dispatch.dispatch_keys(t).raw_repr()) != PLAIN:
            return
        if has_symbols(t) or t.shape in layouts:  # symbols have no hash
            return
        if torch_dispatch.functionalize_included():
            return
        if any(map(torch_dispatch.key_excluded, _NOT_PLAIN_KEYS)):
            return
        if len(layouts) >= MAX_LAYOUTS:
            layouts.clear()
        layouts[t.shape] = CachedLayout(
            matches=torch_dispatch.tensor_matcher(t),
            dtype=t.dtype,
            dtype_name=name_of(t.dtype),
            device_name=device_name(t.device),
            size=tuple(t.shape),
            stride=t.stride(),
        )
