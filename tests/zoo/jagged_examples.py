"""Examples for the handoff: jagged nested tensors, each called with three sets of lengths."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from module_examples import example, variant
from torch import nn
from torch.nested import nested_tensor_from_jagged
from torch.nested._internal.nested_tensor import nested_from_padded

LENGTHS = ((2, 3, 4), (5, 2), (3, 3, 1, 6))


def offsets_of(lengths: tuple[int, ...]) -> torch.Tensor:
    """Where the rows of each length begin, and where the last ends."""
    return torch.tensor([0, *lengths]).cumsum(0)


def _of(lengths: tuple[int, ...], **ends: int) -> torch.Tensor:
    values = torch.randn(sum(lengths), 8, requires_grad=True)
    return nested_tensor_from_jagged(values, offsets_of(lengths), **ends)


# --- attention ------------------------------------------------------------------------------------


class _Attention(nn.Module):
    """Attention with two heads, also of jagged tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.ModuleList(nn.Linear(8, 16) for _ in range(3))
        self.out = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (m(x).unflatten(-1, [2, 8]).transpose(1, 2) for m in self.project)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(-2)) + x


def _jagged(*lengths: int, grad: bool = False) -> torch.Tensor:
    parts = [torch.randn(n, 8) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=grad)


def _jagged_calls(*, grad: bool = False) -> list[tuple[Any, ...]]:
    return [(_jagged(*lengths, grad=grad),) for lengths in LENGTHS]


@example(grad=True)
def jagged_attention() -> tuple[Any, ...]:
    """Scaled dot product attention of jagged inputs, in training."""
    return _Attention(), *_jagged_calls(grad=True)


@example()
def jagged_attention_inference() -> tuple[Any, ...]:
    """The same in inference."""
    return _Attention(), *_jagged_calls()


variant("jagged_attention_dynamic", jagged_attention, dynamic=True)
variant("jagged_attention_inductor", jagged_attention, backend="inductor")


class _Padded(_Attention):
    """Attention of a jagged tensor with padding, in one graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(torch.nested.to_padded_tensor(x, 0.0))
        return nested_from_padded(y, x.offsets(), ragged_idx=1, sum_S=x.values().shape[0]) + x


@example(grad=True)
def jagged_padded() -> tuple[Any, ...]:
    """Jagged inputs whose shortest and longest length is known, padded and cut again."""
    calls = [(_of(n, min_seqlen=min(n), max_seqlen=max(n)),) for n in LENGTHS]
    return _Padded(), *calls


@example(grad=True)
def jagged_norms() -> tuple[Any, ...]:
    """What else a model does with a jagged tensor: norms, activations, softmax."""
    m = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))

    def f(x: torch.Tensor) -> Any:
        y = m(x)
        return y, y.softmax(-1), y.values().shape[0] * 2

    f.module = m  # type: ignore[attr-defined]
    return f, *_jagged_calls(grad=True)


@example(grad=True)
def jagged_shared_offsets() -> tuple[Any, ...]:
    """Two jagged inputs of the same raggedness: their sum is known to fit."""

    def call(lengths: tuple[int, ...]) -> tuple[Any, ...]:
        offsets = offsets_of(lengths)
        values = [torch.randn(sum(lengths), 8, requires_grad=True) for _ in range(2)]
        return tuple(nested_tensor_from_jagged(v, offsets) for v in values)

    return (lambda x, y: (x * y + x.sin(), x.shape[0] + 1)), *map(call, LENGTHS)


variant("jagged_shared_offsets_dynamic", jagged_shared_offsets, dynamic=True)


@example()
def jagged_made_inside() -> tuple[Any, ...]:
    """A jagged tensor made in the graph of values and offsets, and given back."""

    def f(values: torch.Tensor, offsets: torch.Tensor) -> Any:
        x = nested_tensor_from_jagged(values, offsets)
        return x * 2, x.sum(dim=1)

    return f, *[(torch.randn(sum(lengths), 8), offsets_of(lengths)) for lengths in LENGTHS]


@example(grad=True)
def jagged_and_dense() -> tuple[Any, ...]:
    """A dense input is made jagged by the offsets of a jagged one."""

    def f(x: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        return x + nested_tensor_from_jagged(dense, x.offsets())

    calls = [(x, torch.randn(x.values().shape[0], 8)) for (x,) in _jagged_calls(grad=True)]
    return f, *calls


# --- inputs ---------------------------------------------------------------------------------------


@example(grad=True)
def jagged_and_its_values() -> tuple[Any, ...]:
    """A jagged tensor and what it holds, which share a storage."""
    calls = [(x, x.values()) for x in map(_of, LENGTHS)]
    return (lambda x, values: (x * 2, values + 1)), *calls


@example(grad=True)
def jagged_and_its_offsets() -> tuple[Any, ...]:
    """A jagged tensor and its offsets, which are one tensor."""
    calls = [(x, x.offsets()) for x in map(_of, LENGTHS)]
    return (lambda x, offsets: (x * 2, offsets + 1, x.sum())), *calls


@example(grad=True)
def jagged_transposed() -> tuple[Any, ...]:
    """The ragged dim is the last one."""
    calls = [(_of(lengths).transpose(1, 2),) for lengths in LENGTHS]
    return (lambda x: (x.sin(), x.transpose(1, 2) * 2)), *calls


@example()
def jagged_with_holes() -> tuple[Any, ...]:
    """Rows that do not follow one another: lengths beside the offsets."""

    def call(lengths: tuple[int, ...]) -> tuple[Any, ...]:
        x = _of(lengths).detach()
        shorter = x.offsets().diff().clamp(max=2)
        return (nested_tensor_from_jagged(x.values(), x.offsets(), lengths=shorter),)

    return (lambda x: x.sin() * 2), *map(call, LENGTHS)


@example()
def jagged_changed() -> tuple[Any, ...]:
    """A jagged input that is changed in place, and views of it given back."""

    def f(x: torch.Tensor) -> Any:
        x.mul_(2)
        return x.view(x.shape[0], -1, 2, 4), x.values().view(-1)

    return f, *[(_of(lengths).detach(),) for lengths in LENGTHS]


@example()
def jagged_two_kinds() -> tuple[Any, ...]:
    """Two jagged inputs of unequal raggedness."""
    calls = [(_of(lengths).detach(), _of((*lengths, 1)).detach()) for lengths in LENGTHS]
    return (lambda x, y: (x * 2, y.sin(), x.shape[0] + y.shape[0])), *calls
