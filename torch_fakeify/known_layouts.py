"""Layouts of plain dense tensors that a describer has met, each with a call that recognizes it.

Method: what Dynamo's guards on tensors do. One call of C compares a tensor's class, dispatch keys,
dtype, device, sizes and strides with those of the first tensor that had them.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from . import _torch
from .refusals import device_name

__all__ = ["MOST_LAYOUTS", "KnownLayout", "KnownLayouts"]

MOST_LAYOUTS = 4096
"""How many layouts a describer remembers; then it begins anew."""

_SEEN_KEYS = (
    _torch.DispatchKey.AutogradFunctionality,
    _torch.DispatchKey.ADInplaceOrView,
    _torch.DispatchKey.Conjugate,
    _torch.DispatchKey.Negative,
)
"""Keys by which tensors that are not plain are told from plain ones."""


class KnownLayout(msgspec.Struct, gc=False):
    """What many plain tensors have in common, and by what to see that one has it."""

    fits: Callable[[torch.Tensor], bool]
    """Whether a tensor has it all, and no dispatch key more: one call answers two dozen."""
    dtype: torch.dtype
    dtype_name: str
    device_name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]


class KnownLayouts:
    """The layouts that were met, the first of each class and size."""

    __slots__ = ("of_class",)

    def __init__(self) -> None:
        self.of_class: dict[type, dict[tuple[int, ...], KnownLayout]] = {
            torch.Tensor: {},
            torch.nn.Parameter: {},
        }

    def clear(self) -> None:
        """Forget them all."""
        for layouts in self.of_class.values():
            layouts.clear()

    def meet(self, t: torch.Tensor, dtype_name: str) -> None:
        """Remember the layout of a plain tensor, unless one of its class and size is known.

        Nothing is remembered where keys are hidden by which a tensor that is not plain shows itself.
        """
        layouts = self.of_class[type(t)]
        if len(layouts) >= MOST_LAYOUTS:
            layouts.clear()
        if t.shape not in layouts and not any(map(_torch.key_excluded, _SEEN_KEYS)):
            layouts[t.shape] = KnownLayout(
                fits=_torch.likeness(t),
                dtype=t.dtype,
                dtype_name=dtype_name,
                device_name=device_name(t.device),
                size=tuple(t.shape),
                stride=t.stride(),
            )
