"""Operators whose results have other strides, dtypes or numbers of dims, by flags, strings and types."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .registry import integers, operator, randn


def _largest(x, k):
    size = [*x.shape[:-1], k]
    return x.new_empty(size), x.new_empty(size, dtype=torch.int64)


@operator(
    lambda: [(randn(6, 5), 3), (randn(2, 3, 7), 2)],
    lambda: [(randn(9), 4), (randn(4, 2, 5), 5)],
    _largest,
)
def largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, positions = x.contiguous().topk(k)
    return values, positions


@operator(
    lambda: [(randn(6, 5),), (randn(2, 3, 7),)],
    lambda: [(randn(9),), (randn(4, 2, 5),)],
    lambda x: x.new_empty(x.shape[:-1], dtype=torch.int64),
)
def position(x: Tensor) -> Tensor:
    return x.argmax(-1)


@operator(
    lambda: [(integers(4, 6), 5), (integers(3, 2, 3), 4)],
    lambda: [(integers(7, 3, 1, 2), 8)],
    lambda x, classes: x.new_empty([*x.shape, classes], dtype=torch.float32),
)
def one_hot(x: Tensor, classes: int) -> Tensor:
    if classes < 1:
        raise ValueError("at least one class")
    return torch.nn.functional.one_hot(x.long(), classes).float()


@operator(
    lambda: [(randn(2, 3, 4, 6), randn(3, 6))],
    lambda: [(randn(1, 5, 2, 8), randn(5, 8))],
    lambda x, angle: torch.empty_like(x),
)
def rotated(x: Tensor, angle: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out.copy_(x * angle[:, None, :].cos())
    return out


@operator(
    lambda: [(randn(6, 3), integers(4, 6), 5)],
    lambda: [(randn(9, 2), integers(7, 9), 7), (randn(4, 1), integers(2, 4), 3)],
    lambda x, index, count: x.new_empty([count, x.shape[1]]),
)
def segments(x: Tensor, index: Tensor, count: int) -> Tensor:
    return x.new_zeros(count, x.shape[1]).index_add_(0, index.long(), x)


@operator(
    lambda: [(randn(9), 4), (randn(3, 5), 6)],
    lambda: [(randn(2, 2, 2), 3)],
    lambda x, bins: x.new_empty([bins], dtype=torch.int64),
)
def histogram(x: Tensor, bins: int) -> Tensor:
    return torch.histc(x.float(), bins).long()


@operator(
    lambda: [(randn(2, 3, 4, 5),)],
    lambda: [(randn(1, 6, 2, 7),), (randn(4, 2, 3, 3),)],
    lambda x: torch.empty(
        x.shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last
    ),
)
def channels_last(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last).copy_(x)


@operator(
    lambda: [(randn(2, 3, 4),)],
    lambda: [(randn(5, 1, 6),), (randn(3, 3, 2),)],
    lambda x: torch.empty_permuted(
        [x.shape[2], x.shape[0], x.shape[1]], (1, 2, 0), dtype=x.dtype, device=x.device
    ),
)
def turned(x: Tensor) -> Tensor:
    return x.contiguous().clone().permute(2, 0, 1)[:].clone(memory_format=torch.preserve_format)


def _quantized(x, group):
    scales = x.new_empty([x.shape[0], -(-x.shape[1] // group)], dtype=torch.float32)
    return x.new_empty(x.shape, dtype=torch.int8), scales


@operator(
    lambda: [(randn(3, 8), 4), (randn(2, 9), 4)],
    lambda: [(randn(5, 33), 16), (randn(1, 7), 7)],
    _quantized,
)
def quantized(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    count = -(-columns // group)
    wide = torch.nn.functional.pad(x.float(), [0, count * group - columns]).view(rows, count, group)
    scales = wide.abs().amax(-1).clamp(min=1e-6) / 127
    whole = (wide / scales[..., None]).round().to(torch.int8).view(rows, -1)
    return whole[:, :columns].contiguous(), scales


@operator(
    lambda: [(randn(3, 4), torch.float64), (randn(5), None), (randn(2, 2), torch.float16)],
    lambda: [(randn(2, 3, 4), torch.int32), (randn(7, 1), None)],
    lambda x, dtype: x.new_empty(x.shape, dtype=x.dtype if dtype is None else dtype),
)
def converted(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x.contiguous().to(x.dtype if dtype is None else dtype, copy=True)


@operator(
    lambda: [(randn(3, 1, 4), True), (randn(3, 2), False), (randn(2, 1), True)],
    lambda: [(randn(5, 1, 1, 2), True), (randn(4, 3, 2), False)],
    lambda x, drop: x.new_empty([x.shape[0], *x.shape[2:]] if drop else x.shape),
)
def narrowed(x: Tensor, drop: bool) -> Tensor:
    return x[:, 0].contiguous().clone() if drop else x.contiguous().clone()


@operator(
    lambda: [(randn(3, 4), "mean"), (randn(5, 2), "none"), (randn(3), "sum"), (randn(6), "none")],
    lambda: [(randn(2, 3, 4), "none"), (randn(2, 7), "mean")],
    lambda x, reduction: x.new_empty(x.shape if reduction == "none" else [], dtype=torch.float32),
)
def loss(x: Tensor, reduction: str) -> Tensor:
    value = x.contiguous().float().square()
    if reduction == "none":
        return value
    return value.mean() if reduction == "mean" else value.sum()


@operator(
    lambda: [(randn(3, 4), 2.0)], lambda: [(randn(5), 0.5)], lambda x, by: None, mutates=["x"]
)
def scaled_(x: Tensor, by: float) -> None:
    x.mul_(by)


@operator(
    lambda: [(randn(3, 4), randn(4))],
    lambda: [(randn(5, 2), randn(2))],
    lambda x, state: x.new_empty([x.shape[0]]),
    mutates=["state"],
)
def updated(x: Tensor, state: Tensor) -> Tensor:
    state.add_(x.sum(0))
    return x.mean(1)


@operator(
    lambda: [(randn(3, 4), 0.5)],
    lambda: [(randn(5, 2, 2), 0.1)],
    lambda x, p: (x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.bool)),
)
def dropped(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    mask = torch.rand(x.shape) > p
    return (x * mask).contiguous(), mask


@operator(
    lambda: [(randn(8, 3), integers(8, 6), [0, 2, 4])],
    lambda: [(randn(5, 7), integers(5, 9), [0, 1, 2, 6])],
    lambda weight, index, offsets: weight.new_empty([len(offsets), weight.shape[1]]),
)
def bags(weight: Tensor, index: Tensor, offsets: Sequence[int]) -> Tensor:
    ends = [*offsets[1:], index.shape[0]]
    rows = [weight[index[a:b].long()].sum(0) for a, b in zip(offsets, ends, strict=True)]
    return torch.stack(rows)
