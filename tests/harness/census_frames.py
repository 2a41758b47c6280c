"""Frames with which the census compares rebuilt objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from assert_frames import CONFIG

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Callable


def dense(x: torch.Tensor, n: int) -> torch.Tensor:
    """A frame with guards."""
    return x.flatten() * n if x.shape[0] > 3 else x


def jagged_inside(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """A frame that makes a jagged tensor itself."""
    return torch.nested.nested_tensor_from_jagged(values, offsets) * 2


def jagged_input(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A frame with a jagged input."""
    return x * 2, x.offsets() + 1


def make_jagged() -> torch.Tensor:
    """A jagged tensor of three rows."""
    return torch.nested.nested_tensor_from_jagged(torch.randn(6, 5), torch.tensor([0, 2, 3, 6]))


def in_backend(
    check: Callable[..., None], fn: Callable[..., Any], *args: Any, dynamic: bool = True
) -> None:
    """Call ``check`` with a frame, its inputs, its capture and an instance, inside a backend."""
    calls: list[int] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        capture = tfk.capture(gm, inputs)
        check(gm, inputs, capture, capture.instantiate())
        calls.append(1)
        return gm.forward

    torch._dynamo.reset()
    with torch._dynamo.config.patch(**CONFIG):
        torch.compile(fn, backend=backend, dynamic=dynamic)(*args)
    torch._dynamo.reset()
    assert calls == [1]
