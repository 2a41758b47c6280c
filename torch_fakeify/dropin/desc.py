"""Descriptions of tensors as torch's callers expect them: with live objects in their fields.

They have the fields of ``MetaTensorDesc`` and ``MetaStorageDesc`` in ``torch._subclasses.meta_utils``,
which they inherit. Records (`records.tensor.MetaTensorDesc`) have no torch objects in them; these are
for callers within one process, and for ``GraphPickler``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from torch_fakeify.compat.torch_fakes import TorchStorageDesc, TorchTensorDesc

if TYPE_CHECKING:
    from collections.abc import Mapping

_TensorT = TypeVar("_TensorT", bound=torch.Tensor)
_PARTS = (
    "base",
    "grad",
    "crow_indices",
    "col_indices",
    "ccol_indices",
    "row_indices",
    "values",
)


@dataclass(frozen=True)
class MetaStorageDesc(TorchStorageDesc):
    """A storage: its number, its size in bytes, and itself where data is to be copied."""


@dataclass(frozen=True)
class MetaTensorDesc(TorchTensorDesc[_TensorT], Generic[_TensorT]):
    """A tensor. Sizes, strides and the storage offset are in elements and may be symbolic."""

    def __post_init__(self) -> None:
        """Set the fake mode of the parts to that of the tensor."""
        if self.fake_mode is None:
            return
        for name in _PARTS:
            part = getattr(self, name)
            if part is not None and part.fake_mode is None:
                part = dataclasses.replace(part, fake_mode=self.fake_mode)
                object.__setattr__(self, name, part)

    def __getstate__(self) -> dict[str, Any]:
        """What pickling writes: all but the mode, which the reader has another of."""
        return {name: value for name, value in vars(self).items() if name != "fake_mode"}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> MetaTensorDesc[Any]:
        """A description with these fields; the others are at their defaults.

        The constructor of a frozen dataclass would set each of fifty fields by a call.
        """
        made = object.__new__(cls)
        made.__dict__.update(fields)
        return made
