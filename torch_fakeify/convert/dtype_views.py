"""Views of tensors under another dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torch_fakeify.compat.torch_dispatch import no_dispatch_guard
from torch_fakeify.errors import ConvertError

from .fake_tensors import META
from .sizes import concrete_int

if TYPE_CHECKING:
    from torch_fakeify.records.tensor import MetaTensorDesc


def can_be_viewed_as(base: MetaTensorDesc, old: torch.dtype, new: torch.dtype) -> bool:
    """Whether torch can view the tensor as a dtype, by its hints and without a guard."""
    where = f"tensor {base.id}"
    try:
        size = [concrete_int(n, where) for n in base.size]
        stride = [concrete_int(n, where) for n in base.stride]
        offset = concrete_int(base.storage_offset, where)
    except ConvertError:
        return True  # unbacked: torch is asked of the symbols
    guard = no_dispatch_guard()
    try:
        storage = torch.UntypedStorage(0, device=META)
        probe = torch.empty(0, dtype=old, device=META).set_(storage, offset, size, stride)
        view_as_dtype(probe, new)
    except RuntimeError:
        return False
    finally:
        del guard
    return True


def view_as_dtype(base: Any, dtype: torch.dtype) -> Any:
    """View the tensor as a dtype."""
    if base.dtype.is_complex and base.dtype.to_real() == dtype:
        return torch.view_as_real(base)
    if dtype.is_complex and dtype.to_real() == base.dtype:
        return torch.view_as_complex(base)
    return base.view(dtype)


def layout_to_cast(
    nbytes: int, old: torch.dtype, new: torch.dtype
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides, in elements of the old dtype, of the part of a storage that can be cast."""
    if new.is_complex and new.to_real() == old:
        return (nbytes // new.itemsize, 2), (2, 1)
    unit = max(new.itemsize, old.itemsize)
    return (nbytes // unit * unit // old.itemsize,), (1,)
