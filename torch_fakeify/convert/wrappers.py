"""Wrappers of functorch and functionalization around fake tensors.

Method: ``MetaConverter.meta_tensor`` of torch 2.13, from records. The callers have suspended all
interpreters, modes and functionalization.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torch_fakeify.compat import torch_dispatch
from torch_fakeify.compat.torch_dispatch import functorch
from torch_fakeify.errors import ConvertError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal

_functions: Any = torch


def wrap_functorch(
    unwrapped: Any,
    *,
    kind: Literal["batched", "grad", "functional"],
    level: int,
    bdim: int | None,
    layers: Sequence[Any],
    requires_grad: bool,
    is_leaf: bool,
    where: str,
) -> Any:
    """A wrapper of functorch around a fake tensor.

    Args:
        unwrapped: what it wraps. For a dead grad wrapper (level -2), which torch makes no wrapper
            of, it must be a tensor of its own: it is returned, and requires grad as the wrapper did.
        kind: of the wrapper.
        level: of the interpreter that it belongs to.
        bdim: which dim of ``unwrapped`` is the batch; only of ``batched``.
        layers: the interpreters that were active, innermost first; see `interpreters.Interpreters`.
        requires_grad: of the wrapper: each level of ``grad`` has gradients of its own.
        is_leaf: of the wrapper.
        where: names the tensor for an error.

    Raises:
        ConvertError: level or batch dim do not fit, or the wrapper cannot require grad.
    """
    if kind == "grad" and level == torch_dispatch.DEAD_LEVEL:
        # Also of a wrapper that is no leaf torch makes one that is.
        return _with_grad(unwrapped, requires_grad, is_leaf or unwrapped.is_leaf)
    if requires_grad and kind == "functional":
        # functorch forbids it inside a transform, and outside there are no such wrappers.
        raise ConvertError(
            "a functional wrapper of functorch requires no grad",
            where=where,
            expected="kind grad or batched",
            found=kind,
        )
    # Batched and functional tensors may outlive their transform; then torch knows no level of them.
    lowest = max(functorch.maybe_get_level(unwrapped), 0) + 1
    highest = len(layers) if kind == "grad" else _MAX_LEVEL
    if not lowest <= level <= highest:
        raise ConvertError(
            "the level of a functorch wrapper does not fit",
            where=where,
            expected=f"{lowest} to {highest}",
            found=str(level),
        )
    if kind == "functional":
        return functorch._wrap_functional_tensor(unwrapped, level)
    if kind == "batched" and (bdim is None or not 0 <= bdim < unwrapped.dim()):
        raise ConvertError(
            "the batch dim is no dim of the wrapped tensor",
            where=where,
            expected=f"0 to {unwrapped.dim() - 1}",
            found=str(bdim),
        )
    with torch_dispatch.temporarily_restore_interpreter_stack(list(layers)):
        if kind == "batched":
            made = functorch._add_batch_dim(unwrapped, bdim, level)
        else:
            made = functorch._wrap_for_grad(unwrapped, level)
    # A batched tensor requires grad where an operator of autograd outside its transform made it.
    return _with_grad(made, requires_grad, is_leaf)


_MAX_LEVEL = 63
"""Torch stores the levels of batched tensors in 64 bits."""


def wrap_functional(unwrapped: Any, *, is_python: bool, requires_grad: bool, is_leaf: bool) -> Any:
    """A functional tensor around a fake tensor.

    Args:
        unwrapped: what it wraps.
        is_python: whether it is the Python class ``FunctionalTensor`` around that of C++. Operators
            on it need a ``FunctionalTensorMode``, which is the caller's.
        requires_grad: of the functional tensor.
        is_leaf: of the functional tensor.
    """
    made = _functions._to_functional_tensor(unwrapped)
    if is_python:
        made = torch_dispatch.functional_tensor(made)
    if not requires_grad:
        return made
    if is_leaf:
        made.requires_grad = True
        return made
    guard = torch_dispatch.no_dispatch_guard()
    try:
        source = torch.empty(0, requires_grad=True)
    finally:
        del guard
    # An operator that fails in backward would be functionalized; this only sets the history.
    _functions._mirror_autograd_meta_to(source, made)
    return made


def _with_grad(made: Any, requires_grad: bool, is_leaf: bool) -> Any:
    if not requires_grad:
        return made
    if made.is_leaf:
        made.requires_grad = True
    if is_leaf or not made.is_leaf:
        return made
    return torch_dispatch.DelayedError("Tried to backward() through an example input", 1)(made)
