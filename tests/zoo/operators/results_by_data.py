"""Operators whose sizes depend on data."""

import torch
from torch import Tensor

from .registry import integers, operator, randn


def _count():
    return torch.library.get_ctx().new_dynamic_size()


@operator(
    lambda: [(randn(3, 4),), (randn(6),)],
    lambda: [(randn(2, 3, 4),)],
    lambda x: x.new_empty([_count(), x.ndim], dtype=torch.int64),
    depends_on_data=True,
)
def found(x: Tensor) -> Tensor:
    return (x > 0).nonzero().contiguous()


@operator(
    lambda: [(randn(5, 3), randn(5) > 0)],
    lambda: [(randn(8, 2), randn(8) > 0), (randn(4, 2, 3), randn(4) > 0)],
    lambda x, mask: x.new_empty([_count(), *x.shape[1:]]),
    depends_on_data=True,
)
def picked(x: Tensor, mask: Tensor) -> Tensor:
    return x[mask.bool()].contiguous()


def _distinct(x):
    count = _count()
    return x.new_empty([count]), x.new_empty([count], dtype=torch.int64)


@operator(
    lambda: [(integers(5, 9),), (integers(3, 2, 4),)],
    lambda: [(integers(6, 12),)],
    _distinct,
    depends_on_data=True,
)
def distinct(x: Tensor) -> tuple[Tensor, Tensor]:
    values, counts = x.unique(return_counts=True)
    return values, counts


@operator(
    lambda: [(randn(6, 4).abs(), randn(6), 0.5)],
    lambda: [(randn(11, 4).abs(), randn(11), 0.1)],
    lambda boxes, scores, threshold: boxes.new_empty([_count()], dtype=torch.int64),
    depends_on_data=True,
)
def suppressed(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    low, high = boxes[:, :2], boxes[:, :2] + boxes[:, 2:].abs() + 1e-3
    size = (high - low).prod(1)
    shared = (torch.minimum(high[:, None], high) - torch.maximum(low[:, None], low)).clamp(min=0)
    overlap = shared.prod(2) / (size[:, None] + size - shared.prod(2))
    chosen: list[int] = []
    for at in scores.argsort(descending=True).tolist():
        if all(overlap[at, other] <= threshold for other in chosen):
            chosen.append(at)
    return torch.tensor(chosen, dtype=torch.int64)
