"""Torch's global state at compile time <-> record."""

from __future__ import annotations

import warnings
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

from torch_fakeify.compat import torch_dispatch
from torch_fakeify.records.frame import AutocastDesc, ModesDesc

from .values import decode_dtype

if TYPE_CHECKING:
    from collections.abc import Generator
    from contextlib import AbstractContextManager

_AUTOCAST_DEFAULT = {"cpu": "bfloat16", "cuda": "float16", "xpu": "float16", "mps": "float16"}


def describe_modes() -> ModesDesc:
    """The record of the global state that a backend reads while it compiles."""
    return ModesDesc(
        grad_enabled=torch.is_grad_enabled(),
        inference_mode=torch.is_inference_mode_enabled(),
        autocast=tuple(_describe_autocast()),
        autocast_cache_enabled=torch.is_autocast_cache_enabled(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        deterministic_warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        default_dtype=_dtype_name(torch.get_default_dtype()),
        float32_matmul_precision=torch.get_float32_matmul_precision(),
    )


def _describe_autocast() -> Generator[AutocastDesc, None, None]:
    for device_type, default in _AUTOCAST_DEFAULT.items():
        enabled = torch.is_autocast_enabled(device_type)
        dtype = _dtype_name(torch.get_autocast_dtype(device_type))
        if enabled or dtype != default:
            yield AutocastDesc(device_type=device_type, enabled=enabled, dtype=dtype)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def apply_modes(desc: ModesDesc) -> Generator[None, None, None]:
    """Apply the recorded state inside the context, and restore torch's state at the end.

    It also leaves the modes and functorch transforms that nodes of a graph have entered, which the
    graph does not leave if a node raises.
    """
    before = describe_modes()
    with ExitStack() as stack:
        stack.callback(_leave_transforms, torch_dispatch.functorch.get_dynamic_layer_stack_depth())
        stack.callback(
            _allow_hooks, torch_dispatch.autograd._saved_tensors_hooks_get_disabled_error_message()
        )
        stack.callback(
            torch_dispatch.functorch.set_inplace_requires_grad_allowed,
            torch_dispatch.functorch.get_inplace_requires_grad_allowed(),
        )
        stack.callback(_apply_settings, before)
        stack.callback(_apply_autocast, before)
        stack.enter_context(torch.inference_mode(desc.inference_mode))
        stack.enter_context(torch.set_grad_enabled(desc.grad_enabled))
        _apply_settings(desc)
        _apply_autocast(desc)
        yield


def preserve_modes() -> AbstractContextManager[None]:
    """Leave at the end the modes and transforms that a graph has entered inside."""
    return apply_modes(describe_modes())


def _leave_transforms(depth: int) -> None:
    """Leave the transforms of functorch above a depth."""
    if torch_dispatch.functorch.get_dynamic_layer_stack_depth() > depth:
        torch_dispatch.functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)


def _allow_hooks(error: str | None) -> None:
    """Allow saved-tensor hooks, or disable them with an error message."""
    if error is None:
        torch_dispatch.autograd._saved_tensors_hooks_enable()
    else:
        torch_dispatch.autograd._saved_tensors_hooks_disable(error)


def _apply_settings(desc: ModesDesc) -> None:
    torch.use_deterministic_algorithms(desc.deterministic, warn_only=desc.deterministic_warn_only)
    torch.set_default_dtype(decode_dtype(desc.default_dtype, "$.modes.default_dtype"))
    if torch.get_float32_matmul_precision() != desc.float32_matmul_precision:
        torch.set_float32_matmul_precision(desc.float32_matmul_precision)


def _apply_autocast(desc: ModesDesc) -> None:
    recorded = {a.device_type: a for a in desc.autocast}
    for device_type, default in _AUTOCAST_DEFAULT.items():
        autocast = recorded.get(device_type)
        enabled = autocast is not None and autocast.enabled
        dtype = decode_dtype(default if autocast is None else autocast.dtype, "$.modes.autocast")
        if enabled != torch.is_autocast_enabled(device_type):
            with warnings.catch_warnings():
                # Suppresses warnings for CUDA autocast on a machine without CUDA.
                warnings.simplefilter("ignore", UserWarning)
                torch.set_autocast_enabled(device_type, enabled)
        if dtype != torch.get_autocast_dtype(device_type):
            torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_cache_enabled(desc.autocast_cache_enabled)
