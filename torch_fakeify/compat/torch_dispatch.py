"""Torch's private dispatch: keys, modes, functorch's interpreters and wrappers, autograd's bindings."""

# pyright: reportUnusedImport=false
# Other rooms import these names from here; a test finds the ones that none does.
from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from . import gate

gate.check_installed_torch()  # before anything private is asked for

from torch._C import DispatchKey, DispatchKeySet
from torch._C._autograd import CreationMeta
from torch._dispatch.python import suspend_functionalization
from torch._functorch import config as _functorch_config
from torch._functorch.pyfunctorch import (
    temporarily_clear_interpreter_stack,
    temporarily_restore_interpreter_stack,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager

functorch_config_patch: Callable[..., AbstractContextManager[Any]] = _functorch_config.patch
_c: Any = torch._C
dispatch_keys = _c._dispatch_keys
dispatch_key_of = _c._dispatch_key_parse
disable_autocast = _c._DisableAutocast
torch_function_depth = _c._len_torch_function_stack
DisableTorchFunction = _c.DisableTorchFunction

no_dispatch_guard = _c._DisableTorchDispatch
"""Disables Python dispatch while an instance exists: tensors made then are not fake."""

functorch = _c._functorch
"""The bindings of functorch: interpreters and wrappers."""

is_functorch_wrapped = _c._functorch.is_functorch_wrapped_tensor
functorch_is_legacy_batched = _c._functorch.is_legacy_batchedtensor
peek_interpreter_stack = _c._functorch.peek_interpreter_stack
is_batched = _c._functorch.is_batchedtensor
is_gradtracking = _c._functorch.is_gradtrackingtensor
get_unwrapped = _c._functorch.get_unwrapped
get_level = _c._functorch.maybe_get_level

DEAD_LEVEL = -2
"""The result of `get_level` for a grad wrapper that outlived its transform."""

get_bdim = _c._functorch.maybe_get_bdim
autograd = _c._autograd


def tensor_matcher(t: torch.Tensor) -> Callable[[torch.Tensor], bool]:
    """Return a predicate in C for tensors with the class, keys, dtype, device and geometry of ``t``."""
    return _c._dynamo.guards.TensorGuards(t, dynamic_dims_sizes=[], dynamic_dims_strides=[]).check


def unwrap_functional(t: torch.Tensor) -> torch.Tensor:
    """Return the synchronized inner tensor of a functional tensor of functorch."""
    return _c._functorch._unwrap_functional_tensor(t, _c._functionalization_reapply_views_tls())


def functorch_level() -> int:
    """Return the innermost level of functorch's interpreters."""
    return _c._functorch.current_level()


def set_forward_grad(mode: bool) -> AbstractContextManager[Any]:
    """Return a context that switches forward-mode AD on or off."""
    forward_ad: Any = torch.autograd.forward_ad
    return forward_ad._set_fwd_grad_enabled(mode)


def functional_tensor(elem: torch.Tensor) -> Any:
    """Return a ``FunctionalTensor`` that wraps a functional tensor of C++, without history."""
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    mode = _c._get_dispatch_mode(_c._TorchDispatchModeKey.FUNCTIONAL)
    return FunctionalTensor(elem, FunctionalTensorMode() if mode is None else mode)


get_creation_meta = _c._autograd._get_creation_meta
set_creation_meta = _c._autograd._set_creation_meta
set_conj = _c._set_conj
set_neg = _c._set_neg
throw_on_data_ptr = _c._set_throw_on_mutable_data_ptr
warn_on_data_ptr = _c._set_warn_deprecated_on_mutable_data_ptr
key_excluded = _c._dispatch_tls_is_dispatch_key_excluded
_set_key_excluded = _c._dispatch_tls_set_dispatch_key_excluded


@contextmanager
def views_tracked(is_tracked: bool) -> Generator[None, None, None]:
    """Enter a context in which an operator's result on storage of another tensor is its view, or is not."""
    was_excluded = key_excluded(DispatchKey.ADInplaceOrView)
    _set_key_excluded(DispatchKey.ADInplaceOrView, not is_tracked)
    try:
        yield
    finally:
        _set_key_excluded(DispatchKey.ADInplaceOrView, was_excluded)


set_grad_enabled = _c._set_grad_enabled
DelayedError = _c._functions.DelayedError
enable_python_dispatcher = _c._EnablePythonDispatcher
empty_strided = _c._VariableFunctions.empty_strided
make_subclass: Any = torch.Tensor._make_subclass
make_wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass

functionalize_included = functools.partial(
    _c._dispatch_tls_is_dispatch_key_included, DispatchKey.Functionalize
)
"""Whether functionalization is active in this thread."""

_functions: Any = torch
add_batch_dim = _c._functorch._add_batch_dim
wrap_functional = _c._functorch._wrap_functional_tensor
wrap_for_grad = _c._functorch._wrap_for_grad
disable_functorch = _c._DisableFuncTorch
is_functional: Any = _functions._is_functional_tensor
is_functional_base: Any = _functions._is_functional_tensor_base
to_functional: Any = _functions._to_functional_tensor
from_functional: Any = _functions._from_functional_tensor
sync_functional: Any = _functions._sync
mirror_autograd_meta: Any = _functions._mirror_autograd_meta_to


def python_dispatch_excluded() -> bool:
    """Return whether Python dispatch is disabled, so that operators bypass the fake tensor mode."""
    return _c._dispatch_tls_local_exclude_set().has(_c.DispatchKey.Python)
