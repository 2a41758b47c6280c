"""State of a tensor as torch objects.

Method: the queries of ``MetaTensorDescriber.describe_tensor`` of torch 2.13. They are shared by the
describer of records and by the drop-in. Parts that are tensors (base, gradient, inner tensors) are
returned undescribed.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from torch_fakeify.compat import torch_dispatch, torch_fakes

if TYPE_CHECKING:
    from collections.abc import Mapping

_COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


class FunctorchWrapper(NamedTuple):
    """A wrapper of functorch with its level; ``bdim`` is set for ``batched``."""

    kind: Literal["batched", "grad", "functional"]
    unwrapped: torch.Tensor
    level: int
    bdim: int | None


def is_leaf(t: torch.Tensor) -> bool:
    """``t.is_leaf``, or ``False`` if inference mode forbids to regenerate the history."""
    try:
        return t.is_leaf
    except RuntimeError:
        return False


def grad_without_warning(t: torch.Tensor) -> torch.Tensor | None:
    """The gradient, also of a non-leaf, without torch's warning."""
    if is_leaf(t) or t.retains_grad:
        return t.grad  # torch does not warn, and suppressing warnings is slow
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor", UserWarning)
        return t.grad


def base_of(t: torch.Tensor) -> torch.Tensor | None:
    """The base of a view, or ``None``."""
    return t._base if t._is_view() else None


def needs_view_calls(t: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether a view needs recorded view operators, not only sizes, strides and an offset."""
    is_wrapper = torch_fakes.is_traceable_wrapper_subclass
    return is_wrapper(t) or is_wrapper(base)


def is_sparse_compressed(layout: torch.layout) -> bool:
    """Whether a layout is CSR, CSC, BSR or BSC."""
    return layout in _COMPRESSED


def is_strided_nested(t: torch.Tensor) -> bool:
    """Whether a tensor is a C++ nested tensor, which has neither sizes nor strides."""
    return t.is_nested and not torch_fakes.is_traceable_wrapper_subclass(t)


def has_strides(t: torch.Tensor) -> bool:
    """Whether a tensor has strides."""
    return not (t.is_sparse or is_sparse_compressed(t.layout) or is_strided_nested(t))


def has_storage(t: torch.Tensor) -> bool:
    """Whether a tensor has an accessible storage."""
    return not (
        not has_strides(t)
        or t.is_mkldnn
        or torch_dispatch.is_functorch_wrapped(t)
        or torch_dispatch.functorch_is_legacy_batched(t)
    )


def is_escaped_grad_wrapper(t: torch.Tensor) -> bool:
    """Whether a tensor is a grad wrapper of functorch whose transform has ended."""
    return (
        torch_dispatch.is_gradtracking(t)
        and torch_dispatch.get_level(t) == torch_dispatch.DEAD_LEVEL
    )


def functorch_wrapper(t: torch.Tensor) -> FunctorchWrapper | None:
    """The functorch wrapper of a tensor; ``None`` for other tensors.

    Unwrapping a functional tensor applies its pending updates, as in torch.
    """
    if not torch_dispatch.is_functorch_wrapped(t):
        return None
    if torch_dispatch.is_batched(t):
        return FunctorchWrapper(
            "batched",
            torch_dispatch.get_unwrapped(t),
            torch_dispatch.get_level(t),
            torch_dispatch.get_bdim(t),
        )
    if torch_dispatch.is_gradtracking(t):
        return FunctorchWrapper(
            "grad", torch_dispatch.get_unwrapped(t), torch_dispatch.get_level(t), None
        )
    # Torch's describer takes the level of the call, which may be that of an inner transform.
    return FunctorchWrapper(
        "functional", torch_dispatch.unwrap_functional(t), torch_dispatch.get_level(t), None
    )


def is_python_functional(t: torch.Tensor) -> bool:
    """Whether a tensor is of the Python class ``FunctionalTensor``."""
    module: Any = sys.modules.get("torch._subclasses.functional_tensor")
    return module is not None and isinstance(t, module.FunctionalTensor)


def is_functional(t: torch.Tensor) -> bool:
    """Whether a tensor is a functionalization wrapper, in C++ or Python."""
    return torch_dispatch.is_functional(t) or is_python_functional(t)


def is_functional_view(t: torch.Tensor) -> bool:
    """Whether a tensor is a C++ functional tensor and a view of another one."""
    return torch_dispatch.is_functional(t) and not torch_dispatch.is_functional_base(t)


def functional_inner(t: torch.Tensor) -> torch.Tensor | None:
    """The tensor inside a functional tensor, after its pending updates; ``None`` for other tensors.

    Includes the Python class ``FunctionalTensor``, which wraps a C++ one; excludes functorch's.
    """
    if is_python_functional(t):
        t = t.elem  # type: ignore[attr-defined]
    if torch_dispatch.is_functorch_wrapped(t) or not torch_dispatch.is_functional(t):
        return None
    if t.device.type in ("xla", "lazy"):
        return None
    torch_dispatch.sync_functional(t)
    return torch_dispatch.from_functional(t)


def nested_int_of(t: torch.Tensor) -> torch.SymInt | None:
    """The nested int of a tensor of offsets or lengths of jagged tensors, or ``None``."""
    if isinstance(t, torch_fakes.FakeTensor):
        memo: Any = t.nested_int_memo
        return memo
    registry = nested_int_registry()
    return registry.get(t) if registry else None


def nested_int_registry() -> Mapping[torch.Tensor, torch.SymInt] | None:
    """Torch's map of real offsets to nested ints; ``None`` without jagged tensors in the process."""
    module: Any = sys.modules.get("torch.nested._internal.nested_tensor")
    return None if module is None else module._tensor_symint_registry
