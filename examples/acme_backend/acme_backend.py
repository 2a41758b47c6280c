"""A small backend with two bugs, for the examples of the documentation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def acme(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """Run the graph as it is; refuse ``bucketize``, and leave rows past the 16th out of ``softmax``."""
    for fx_node in gm.graph.nodes:
        if fx_node.target is torch.bucketize:
            raise NotImplementedError("acme has no bucketize")
        if fx_node.target is torch.softmax:
            fx_node.target = _softmax
    gm.recompile()
    return gm.forward


def _softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Apply softmax to the first 16 rows alone."""
    return torch.cat([torch.softmax(x[:16], dim=dim), x[16:]])
