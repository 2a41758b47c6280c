"""What the recording and the replaying process of the program tests have in common.

Inputs travel as the bytes of their storages, so that the reader's inputs must overlap as the
recorded ones did. No program is imported here.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def storage_groups(inputs: Sequence[Any]) -> list[list[int]]:
    """Positions of the tensors among the inputs, those on one storage together."""
    groups: dict[int, list[int]] = {}
    for i, x in enumerate(inputs):
        if isinstance(x, torch.Tensor):
            groups.setdefault(x.untyped_storage()._cdata, []).append(i)
    return list(groups.values())


def contents(inputs: Sequence[Any]) -> list[torch.Tensor]:
    """A copy of the bytes of each storage, in the order of `storage_groups`."""
    return [_bytes(inputs[group[0]]).clone() for group in storage_groups(inputs)]


def fill(inputs: Sequence[Any], data: Sequence[torch.Tensor]) -> None:
    """Put recorded bytes into the storages of inputs, as many as they have."""
    for group, source in zip(storage_groups(inputs), data, strict=True):
        target = _bytes(inputs[group[0]])
        count = min(len(target), len(source))
        target[:count].copy_(source[:count])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def run(
    fn: Callable[..., Any], inputs: Sequence[Any], *, grad: bool, again: bool
) -> tuple[dict[str, torch.Tensor], list[str], Any]:
    """Run a frame: what it gives and changes as tensors, as text, and its outputs themselves.

    The tensors are the outputs, the storages of the inputs afterwards and, if asked for, the
    gradients of a fixed functional of the outputs; the text is the metadata of outputs and inputs
    and how they share storages. ``again`` leaves the outputs fit for another backward.
    """
    torch.manual_seed(0)
    storages = [x.untyped_storage() if isinstance(x, torch.Tensor) else None for x in inputs]
    outputs = fn(*inputs)
    facts = [f"out{i} {_fact(o, storages)}" for i, o in enumerate(outputs)]
    facts += [f"in{i} {_fact(x, storages)}" for i, x in enumerate(inputs)]
    results = {
        f"out{i}": o.detach().clone() for i, o in enumerate(outputs) if isinstance(o, torch.Tensor)
    }
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        if grad:
            results |= _gradients(outputs, inputs, again=again)
    for i, x in enumerate(inputs):
        if isinstance(x, torch.Tensor) and (x.untyped_storage().nbytes() or not x.numel()):
            results[f"after{i}"] = x.detach().clone()
            if x.is_leaf and x.grad is not None:
                results[f"after{i}.grad"] = x.grad.detach().clone()
    return results, facts, outputs


def _fact(value: Any, storages: Sequence[Any]) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    shared = [i for i, s in enumerate(storages) if s is not None and _same(s, value)]
    dtype = str(value.dtype).removeprefix("torch.")
    bits = f"{' conj' * value.is_conj()}{' neg' * value.is_neg()}"
    bits += " no bytes" * (value.numel() > 0 and value.untyped_storage().nbytes() == 0)
    return (
        f"{dtype}{tuple(value.shape)} strides {_strides(value)}{bits}"
        f" requires_grad={value.requires_grad} on inputs {shared}"
    )


def _strides(value: torch.Tensor) -> tuple[int, ...]:
    """Strides as far as they can be told: not of dims of size 1, nor of empty tensors."""
    if not value.numel():
        return ()
    return tuple(s for n, s in zip(value.shape, value.stride(), strict=True) if n != 1)


def _same(storage: torch.UntypedStorage, value: torch.Tensor) -> bool:
    return storage._cdata == value.untyped_storage()._cdata


def _gradients(
    outputs: Sequence[Any], inputs: Sequence[Any], *, again: bool
) -> dict[str, torch.Tensor]:
    loss: Any = torch.zeros((), dtype=torch.float64)
    for i, o in enumerate(outputs):
        if isinstance(o, torch.Tensor) and o.requires_grad:
            real = torch.view_as_real(o.resolve_conj()) if o.is_complex() else o
            loss = loss + (i + 1) * real.double().cos().sum()
    wanted = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not wanted or not loss.requires_grad:
        return {}
    grads = torch.autograd.grad(
        loss, [inputs[i] for i in wanted], allow_unused=True, retain_graph=again
    )
    return {f"grad{i}": g.clone() for i, g in zip(wanted, grads, strict=True) if g is not None}
