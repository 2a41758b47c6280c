"""Differences between torch's own operators and their fake kernels that no backend has to care for."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch_fakeify.compat.torch_graphs import OpOverload

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from .replies import Parted

_KNOWN: Mapping[str, str] = MappingProxyType(
    {
        # The operator returns its argument outside of training, the fake kernel a copy
        # (``torch._decomp.decompositions.dropout``, torch 2.13).
        "dropout": "storage",
        # The operator returns a part of a larger tensor: the losses one number in the storage of all of them.
        "mse_loss": "storage bytes",
        "smooth_l1_loss": "storage bytes",
        "soft_margin_loss": "storage bytes",
        "binary_cross_entropy": "storage bytes",
        "_embedding_bag_forward_only": "storage bytes",
        "fold": "storage bytes",
        "hann_window": "storage bytes",
        "hamming_window": "storage bytes",
        "blackman_window": "storage bytes",
        "bartlett_window": "storage bytes",
        "kaiser_window": "storage bytes",
    }
)
"""What may differ, by the name of torch's function."""


def without_known(fx_node: torch.fx.Node, parts: Iterable[Parted]) -> list[Parted]:
    """Return the parts of a difference that are not known of a function of torch."""
    target: Any = fx_node.target
    if isinstance(target, OpOverload):
        name = target._schema.name.removeprefix("aten::")
    else:
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return [part for part in parts if part.what != _KNOWN.get(name)]
