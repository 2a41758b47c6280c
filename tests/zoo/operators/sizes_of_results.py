"""Operators whose sizes are formulas over sizes: products, windows, concatenations, broadcasts."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .registry import operator, randn


@operator(lambda: [(randn(3, 4),)], lambda: [(randn(5),), (randn(2, 3, 1),)], torch.empty_like)
def same(x: Tensor) -> Tensor:
    return x.exp()


@operator(
    lambda: [(randn(3, 4), randn(3, 4)), (randn(3, 4), randn(4))],
    lambda: [(randn(5, 1, 3), randn(2, 1)), (randn(7), randn(7)), (randn(1, 4), randn(6, 1))],
    lambda x, y: torch.empty_like(x + y),
)
def blended(x: Tensor, y: Tensor) -> Tensor:
    return x * 0.5 + y


@operator(
    lambda: [(randn(3, 4), randn(5, 4), randn(5)), (randn(2, 3, 4), randn(5, 4), None)],
    lambda: [(randn(7, 6), randn(2, 6), None), (randn(2, 2, 3, 8), randn(9, 8), randn(9))],
    lambda x, weight, bias: x.new_empty([*x.shape[:-1], weight.shape[0]]),
)
def projected(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


@operator(
    lambda: [(randn(2, 3, 4), randn(2, 4, 5))],
    lambda: [(randn(6, 1, 7), randn(6, 7, 9)), (randn(1, 2, 2), randn(1, 2, 8))],
    lambda x, y: x.new_empty([x.shape[0], x.shape[1], y.shape[2]]),
)
def batched(x: Tensor, y: Tensor) -> Tensor:
    return torch.bmm(x, y)


def _filtered(x, weight, stride, padding, dilation):
    size = [
        (x.shape[2 + i] + 2 * padding[i] - dilation[i] * (weight.shape[2 + i] - 1) - 1) // stride[i]
        + 1
        for i in range(2)
    ]
    return x.new_empty([x.shape[0], weight.shape[0], *size])


@operator(
    lambda: [
        (randn(2, 3, 9, 8), randn(4, 3, 3, 2), [1, 2], [1, 0], [1, 1]),
        (randn(2, 3, 9, 8), randn(4, 3, 3, 2), [2, 1], [0, 1], [2, 1]),
    ],
    lambda: [(randn(1, 2, 16, 17), randn(5, 2, 3, 5), [2, 3], [2, 1], [1, 2])],
    _filtered,
)
def filtered(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    return torch.nn.functional.conv2d(
        x.contiguous(), weight.contiguous(), None, stride, padding, dilation
    ).contiguous()


def _pooled(x, width, step, ceil_mode):
    if ceil_mode:
        count = -(-(x.shape[-1] - width) // step) + 1
        count = torch.sym_min(count, -(-x.shape[-1] // step))
    else:
        count = (x.shape[-1] - width) // step + 1
    return x.new_empty([*x.shape[:-1], count])


@operator(
    lambda: [(randn(2, 3, 11), 3, 2, False), (randn(2, 3, 12), 3, 2, True)],
    lambda: [(randn(1, 5, 30), 4, 3, True), (randn(4, 2, 17), 5, 2, False)],
    _pooled,
)
def pooled(x: Tensor, width: int, step: int, ceil_mode: bool) -> Tensor:
    return torch.nn.functional.avg_pool1d(x, width, step, ceil_mode=ceil_mode)


def _spread(x, dim, keepdim):
    dim = dim % x.ndim
    return x.new_empty([*x.shape[:dim], *([1] if keepdim else []), *x.shape[dim + 1 :]])


@operator(
    lambda: [(randn(3, 4), 1, False), (randn(3, 4, 5), 0, True), (randn(3, 4, 5), -1, False)],
    lambda: [(randn(2, 3, 4, 5), 2, True), (randn(6), 0, False), (randn(2, 7), -2, False)],
    _spread,
)
def spread(x: Tensor, dim: int, keepdim: bool) -> Tensor:
    return x.double().std(dim, keepdim=keepdim).to(x.dtype)


def _joined(xs, dim):
    dim = dim % xs[0].ndim
    total = sum(x.shape[dim] for x in xs)
    return xs[0].new_empty([*xs[0].shape[:dim], total, *xs[0].shape[dim + 1 :]])


@operator(
    lambda: [([randn(2, 3), randn(4, 3)], 0), ([randn(2, 3), randn(2, 1), randn(2, 6)], 1)],
    lambda: [([randn(2, 3, 4), randn(2, 5, 4)], -2), ([randn(8), randn(1), randn(3)], 0)],
    _joined,
)
def joined(xs: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat(list(xs), dim)


def _pieces(x, size):
    count = -(-x.shape[0] // size)
    return [
        x.new_empty([torch.sym_min(size, x.shape[0] - i * size), *x.shape[1:]])
        for i in range(count)
    ]


@operator(
    lambda: [(randn(7, 3), 2), (randn(8, 2), 4)],
    lambda: [(randn(9, 1), 5), (randn(12, 4), 3)],
    _pieces,
)
def pieces(x: Tensor, size: int) -> list[Tensor]:
    return [each.clone() for each in x.contiguous().split(size)]


def _distances(x, y):
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return x.new_empty([*batch, x.shape[-2], y.shape[-2]])


@operator(
    lambda: [(randn(5, 3), randn(4, 3))],
    lambda: [(randn(2, 8), randn(9, 8)), (randn(3, 5, 2), randn(3, 7, 2))],
    _distances,
)
def distances(x: Tensor, y: Tensor) -> Tensor:
    return torch.cdist(x.contiguous(), y.contiguous())


@operator(
    lambda: [(randn(2, 3, 4, 5), 2), (randn(1, 2, 3, 3), 3)],
    lambda: [(randn(2, 1, 7, 2), 4)],
    lambda x, factor: x.new_empty([*x.shape[:-2], x.shape[-2] * factor, x.shape[-1] * factor]),
)
def enlarged(x: Tensor, factor: int) -> Tensor:
    return x.repeat_interleave(factor, -1).repeat_interleave(factor, -2)


@operator(
    lambda: [(randn(3, 4), [1, 2]), (randn(2, 3, 4), [0, 3])],
    lambda: [(randn(5, 6), [2, 2]), (randn(9), [4, 1])],
    lambda x, pad: x.new_empty([*x.shape[:-1], x.shape[-1] + pad[0] + pad[1]]),
)
def padded(x: Tensor, pad: Sequence[int]) -> Tensor:
    return torch.nn.functional.pad(x, list(pad)).contiguous()


@operator(
    lambda: [(randn(3, 10), 4, 2), (randn(12), 3, 1)],
    lambda: [(randn(2, 2, 21), 5, 3)],
    lambda x, width, step: x.new_empty([*x.shape[:-1], (x.shape[-1] - width) // step + 1, width]),
)
def windows(x: Tensor, width: int, step: int) -> Tensor:
    return x.unfold(-1, width, step).contiguous()


def _shuffled(x, factor):
    n, c, h, w = x.shape
    return x.new_empty([n, c // (factor * factor), h * factor, w * factor])


@operator(
    lambda: [(randn(2, 8, 3, 3), 2), (randn(1, 9, 2, 4), 3)],
    lambda: [(randn(2, 32, 5, 2), 4), (randn(3, 12, 2, 2), 2)],
    _shuffled,
)
def shuffled(x: Tensor, factor: int) -> Tensor:
    return torch.pixel_shuffle(x.contiguous(), factor).contiguous()


@operator(
    lambda: [(randn(3), randn(4), randn(5))],
    lambda: [(randn(1), randn(7), randn(2))],
    lambda x, y, z: x.new_empty([x.shape[0], y.shape[0], z.shape[0]]),
)
def cube(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return torch.einsum("i,j,k->ijk", x, y, z).contiguous()


@operator(
    lambda: [(randn(3, 8),), (randn(2, 3, 9),)],
    lambda: [(randn(5, 17),), (randn(6),)],
    lambda x: x.new_empty([*x.shape[:-1], x.shape[-1] // 2 + 1], dtype=torch.complex64),
)
def spectrum(x: Tensor) -> Tensor:
    return torch.fft.rfft(x.float().contiguous()).contiguous()


@operator(
    lambda: [(randn(3, 4, 5),), (randn(2, 6),)],
    lambda: [(randn(7),), (randn(2, 3, 4, 5),)],
    lambda x: math.prod(x.shape),
)
def elements(x: Tensor) -> int:
    return x.numel()
