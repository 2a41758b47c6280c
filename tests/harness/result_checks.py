"""Results of two compilations, compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree


def same(ours: Any, theirs: Any) -> None:
    """Fails if results differ in one bit."""
    for a, b in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
        if isinstance(a, np.ndarray):
            assert np.array_equal(a, b)
        elif not isinstance(a, torch.Tensor):
            assert a == b
        elif a.is_nested:
            assert torch.equal(a.values(), b.values())
        elif a.dtype.itemsize == 1 and a.dtype.is_floating_point:
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        else:
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
