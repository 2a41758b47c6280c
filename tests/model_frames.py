"""What the recording and the replaying process of the model tests have in common.

No ``transformers`` here: the replaying process imports this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sympy
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def guard_set(shape_env: Any) -> list[str]:
    """The guards of a shape environment as expressions over sources, sorted."""
    names = {s: sources[0].name for s, sources in shape_env.var_to_sources.items() if sources}
    guards = set()
    for guard in shape_env.guards:
        text = {s: sympy.Symbol(n) for s, n in names.items()}
        guards.add(str(guard.expr.xreplace(text)))
    return sorted(guards)


def run(
    fn: Callable[..., Any], inputs: Sequence[Any], *, training: bool
) -> dict[str, torch.Tensor]:
    """Outputs of a frame and, in training, the gradients of a fixed functional of them."""
    with torch.set_grad_enabled(training):
        outputs = [o for o in fn(*inputs) if isinstance(o, torch.Tensor)]
    result = {f"out{i}": o.detach().clone() for i, o in enumerate(outputs)}
    if not training:
        return result
    loss = sum(
        ((i + 1) * o.double().cos().sum() for i, o in enumerate(outputs) if o.requires_grad),
        torch.zeros(()),
    )
    leaves = [(i, x) for i, x in enumerate(inputs) if _needs_grad(x)]
    if leaves and isinstance(loss, torch.Tensor) and loss.requires_grad:
        grads = torch.autograd.grad(loss, [x for _, x in leaves], allow_unused=True)
        for (i, _), grad in zip(leaves, grads, strict=True):
            if grad is not None:
                result[f"grad{i}"] = grad.clone()
    return result


def _needs_grad(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf


def contents(inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
    """The data of tensor inputs, each on a storage of its own, as safetensors wants it."""
    return {
        str(i): x.detach().clone(memory_format=torch.contiguous_format)
        for i, x in enumerate(inputs)
        if isinstance(x, torch.Tensor)
    }


def fill(inputs: Sequence[Any], data: dict[str, torch.Tensor]) -> None:
    """Put recorded data into materialized inputs."""
    with torch.no_grad():
        for i, x in enumerate(inputs):
            if isinstance(x, torch.Tensor):
                x.detach().copy_(data[str(i)])
