"""Custom operators of the programs, registered in a process that imports this module."""

from __future__ import annotations

from typing import Any

import torch


@torch.library.custom_op("programs::scale", mutates_args=())
def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    """``x * factor``, with a gradient."""
    return x * factor


@scale.register_fake
def _(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(x)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.factor = inputs[1]


def _backward(ctx: Any, grad: torch.Tensor) -> Any:
    return grad * ctx.factor, None


scale.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("programs::add_one_", mutates_args=("x",))
def add_one_(x: torch.Tensor, names: list[int] | None = None) -> None:
    """Adds one in place."""
    x.add_(1)


@torch.library.custom_op("programs::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    """The positive elements; how many depends on the data."""
    return x[x > 0].clone()


@positive.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())
