"""What can be asked of a fake tensor of any kind, as plain data that two fake tensors share.

`facts` is deep: it goes to bases, gradients and the inner tensors of subclasses. `relations` says
how the tensors of a group lie to one another.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.meta_utils import safe_grad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def own_facts(t: torch.Tensor) -> dict[str, Any]:
    """The metadata of a fake tensor, without those of the tensors that belong to it."""
    found: dict[str, Any] = {
        "type": type(t).__qualname__,
        "dtype": t.dtype,
        "size": text(tuple(t.size())),
        "device": t.device,
        "layout": t.layout,
        "requires_grad": t.requires_grad,
        "is_leaf": t.is_leaf,
        "grad_fn": None if t.grad_fn is None else t.grad_fn.name(),
        "grad_dtype": t.grad_dtype if t.is_leaf else None,
        "is_inference": t.is_inference(),
        "is_parameter": isinstance(t, torch.nn.Parameter),
        "keys": str(torch._C._dispatch_keys(t)),
        "is_view": t._is_view(),
    }
    if t._is_view():
        found["creation_meta"] = torch._C._autograd._get_creation_meta(t)
    if t.layout in (torch.strided, torch.jagged):
        found["stride"] = text(t.stride())
        found["storage_offset"] = text(t.storage_offset())
        found["is_conj"] = t.is_conj()
        found["is_neg"] = t.is_neg()
    return found


def facts(t: torch.Tensor) -> dict[str, Any]:
    """All metadata of a fake tensor and of the tensors that belong to it."""
    found = own_facts(t)
    if t._is_view():
        found["base"] = facts(t._base)
    if is_traceable_wrapper_subclass(t):
        names, context = t.__tensor_flatten__()
        found["context"] = text(context)
        found["inner"] = {name: inner_facts(getattr(t, name)) for name in names}
    elif t.layout in (torch.strided, torch.jagged):
        found["nbytes"] = text(t.untyped_storage().nbytes())
    else:
        found["sparse"] = sparse_layout(t)
    grad = safe_grad(t)
    if grad is not None:
        found["grad"] = facts(grad)
    return found


def sparse_layout(t: torch.Tensor) -> list[Any]:
    """What a sparse tensor is beside its sizes; of an mkldnn tensor nothing more is to be said."""
    if t.layout is torch.sparse_coo:
        return [t.sparse_dim(), t.dense_dim(), t.is_coalesced()]
    if t.layout not in COMPRESSED:
        return []
    by_row = t.layout in (torch.sparse_csr, torch.sparse_bsr)
    pointers = t.crow_indices() if by_row else t.ccol_indices()
    others = t.col_indices() if by_row else t.row_indices()
    parts = [[p.dtype, text(tuple(p.shape))] for p in (pointers, others, t.values())]
    return [t.sparse_dim(), t.dense_dim(), parts]


def inner_facts(part: Any) -> Any:
    """The facts of an inner tensor, the text of another inner attribute."""
    return facts(part) if isinstance(part, torch.Tensor) else text(part)


def text(value: Any) -> str:
    """A value as text; nested ints and addresses, which are numbered by the process, alike."""
    return re.sub(r"\b0x[0-9a-f]+|\bj\d+|(?<=SingletonInt\()\d+", "#", str(value))


def outcome(value: Any) -> Any:
    """What an operator gave: the facts of tensors, the text of all else, in the same structure."""
    if isinstance(value, torch.Tensor):
        return facts(value)
    if isinstance(value, (tuple, list)):
        return [type(value).__name__, *map(outcome, value)]
    if isinstance(value, dict):
        return {key: outcome(item) for key, item in value.items()}
    return text(value)


def storage_of(t: torch.Tensor) -> int | None:
    """The address of a tensor's storage, where it has one; all tensors are to be kept alive."""
    if t.layout is not torch.strided:
        return None
    return t.untyped_storage()._cdata


def parts(group: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, their bases, gradients and inner tensors, at all depths."""
    found: list[torch.Tensor] = []
    for t in group:
        more = [t._base] if t._is_view() else []
        grad = safe_grad(t)
        if grad is not None:
            more.append(grad)
        if is_traceable_wrapper_subclass(t):
            inner = (getattr(t, name) for name in t.__tensor_flatten__()[0])
            more += [part for part in inner if isinstance(part, torch.Tensor)]
        found += [t, *parts(more)]
    return found


def relations(group: Sequence[torch.Tensor]) -> list[tuple[bool, ...]]:
    """For each pair: one object, one storage, one base, the one the other's base, one ragged size."""
    storages = [storage_of(t) for t in group]
    bases = [t._base for t in group]
    ragged = [str(t.size()) if t.layout is torch.jagged else None for t in group]
    return [
        (
            a is b,
            i != j and storages[i] is not None and storages[i] == storages[j],
            bases[i] is not None and bases[i] is bases[j],
            bases[i] is b,
            ragged[i] is not None and ragged[i] == ragged[j],
        )
        for i, a in enumerate(group)
        for j, b in enumerate(group)
    ]
