"""Helpers of the tests of interpreters."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode


def same(n: Any) -> Any:
    """Batch sizes that are plain numbers stay what they are."""
    return n


def torchs_fake(mode: FakeTensorMode, t: torch.Tensor) -> Any:
    """Torch's own fake tensor; without its warning about the gradients of non-leaves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mode.from_tensor(t)
