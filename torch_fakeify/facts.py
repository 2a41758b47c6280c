"""What torch says of a tensor, in torch's own objects.

Method: what ``MetaTensorDescriber.describe_tensor`` of torch 2.13 reads. A describer makes records
of it; the drop-in, what torch's callers expect. Parts that are tensors themselves (base, gradient,
inner tensors, ...) are given as they are: describing them is up to the describer.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from . import _torch

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "FunctorchFacts",
    "base_of",
    "functional_inner",
    "functorch_facts",
    "has_storage",
    "has_strides",
    "is_dead_wrapper",
    "is_functional",
    "is_functional_view",
    "is_leaf",
    "is_python_functional",
    "is_sparse_compressed",
    "is_strided_nested",
    "needs_view_calls",
    "nested_int_of",
    "nested_int_registry",
    "shown_grad",
]

_COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


class FunctorchFacts(NamedTuple):
    """A wrapper of functorch: ``batched``, ``grad`` or ``functional``."""

    kind: Literal["batched", "grad", "functional"]
    unwrapped: torch.Tensor
    level: int
    bdim: int | None


def is_leaf(t: torch.Tensor) -> bool:
    """``is_leaf``; of a tensor whose history inference mode forbids to regenerate, ``False``."""
    try:
        return t.is_leaf
    except RuntimeError:
        return False


def shown_grad(t: torch.Tensor) -> torch.Tensor | None:
    """The gradient, also one assigned to a non-leaf, of which torch warns where there is none."""
    if is_leaf(t) or t.retains_grad:
        return t.grad  # no warning, and to be quiet costs more than to ask
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor", UserWarning)
        return t.grad


def base_of(t: torch.Tensor) -> torch.Tensor | None:
    """The base of a view."""
    return t._base if t._is_view() else None


def needs_view_calls(t: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether sizes, strides and an offset do not tell how the view is made of its base."""
    is_wrapper = _torch.is_traceable_wrapper_subclass
    return is_wrapper(t) or is_wrapper(base)


def is_sparse_compressed(layout: torch.layout) -> bool:
    """Whether it is CSR, CSC, BSR or BSC."""
    return layout in _COMPRESSED


def is_strided_nested(t: torch.Tensor) -> bool:
    """Whether it is a nested tensor of C++, which has neither sizes nor strides."""
    return t.is_nested and not _torch.is_traceable_wrapper_subclass(t)


def has_strides(t: torch.Tensor) -> bool:
    """Whether torch tells strides of it."""
    return not (t.is_sparse or is_sparse_compressed(t.layout) or is_strided_nested(t))


def has_storage(t: torch.Tensor) -> bool:
    """Whether torch shows a storage of it."""
    return not (
        not has_strides(t)
        or t.is_mkldnn
        or _torch.is_functorch_wrapped(t)
        or _torch.functorch_is_legacy_batched(t)
    )


def is_dead_wrapper(t: torch.Tensor) -> bool:
    """Whether it is a grad wrapper of functorch that outlived its transform."""
    return _torch.is_gradtracking(t) and _torch.get_level(t) == _torch.DEAD_LEVEL


def functorch_facts(t: torch.Tensor) -> FunctorchFacts | None:
    """What functorch has wrapped, and for which level; ``None`` for other tensors.

    Asking a functional tensor of functorch for its inside brings it up to date, as torch does.
    """
    if not _torch.is_functorch_wrapped(t):
        return None
    if _torch.is_batched(t):
        return FunctorchFacts(
            "batched", _torch.get_unwrapped(t), _torch.get_level(t), _torch.get_bdim(t)
        )
    if _torch.is_gradtracking(t):
        return FunctorchFacts("grad", _torch.get_unwrapped(t), _torch.get_level(t), None)
    # Torch's describer takes the level of the call instead, which may be of a transform further in.
    return FunctorchFacts("functional", _torch.unwrap_functional(t), _torch.get_level(t), None)


def is_python_functional(t: torch.Tensor) -> bool:
    """Whether it is of the Python class ``FunctionalTensor``."""
    module: Any = sys.modules.get("torch._subclasses.functional_tensor")
    return module is not None and isinstance(t, module.FunctionalTensor)


def is_functional(t: torch.Tensor) -> bool:
    """Whether functionalization has wrapped it, in C++ or Python."""
    return _torch.is_functional(t) or is_python_functional(t)


def is_functional_view(t: torch.Tensor) -> bool:
    """Whether writes to a functional tensor of C++ reach another, of which it is a view."""
    return _torch.is_functional(t) and not _torch.is_functional_base(t)


def functional_inner(t: torch.Tensor) -> torch.Tensor | None:
    """What a functional tensor that is not functorch's has inside; brings it up to date.

    Also of the Python class ``FunctionalTensor``, which is a wrapper around one of C++.
    """
    if is_python_functional(t):
        t = t.elem  # type: ignore[attr-defined]
    if _torch.is_functorch_wrapped(t) or not _torch.is_functional(t):
        return None
    if t.device.type in ("xla", "lazy"):
        return None
    _torch.sync_functional(t)
    return _torch.from_functional(t)


def nested_int_of(t: torch.Tensor) -> torch.SymInt | None:
    """The nested int that the tensor stands for as offsets or lengths of jagged tensors."""
    if isinstance(t, _torch.FakeTensor):
        memo: Any = t.nested_int_memo
        return memo
    registry = nested_int_registry()
    return registry.get(t) if registry else None


def nested_int_registry() -> Mapping[torch.Tensor, torch.SymInt] | None:
    """Real offsets to their nested ints; ``None`` if this process has never used jagged tensors."""
    module: Any = sys.modules.get("torch.nested._internal.nested_tensor")
    return None if module is None else module._tensor_symint_registry
