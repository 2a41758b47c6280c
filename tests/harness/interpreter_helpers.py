"""Helpers of the tests of interpreters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quiet import quiet

if TYPE_CHECKING:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode


def same(n: Any) -> Any:
    """Batch sizes that are plain numbers stay what they are."""
    return n


def torchs_fake(mode: FakeTensorMode, t: torch.Tensor) -> Any:
    """Torch's own fake tensor; without its warning about the gradients of non-leaves."""
    with quiet():
        return mode.from_tensor(t)
