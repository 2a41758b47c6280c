"""Pairs of frames that differ in one thing, or in nothing that counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import torch
from quiet import quiet

from torch_fakeify.records.shape_env import SymbolDesc
from torch_fakeify.records.tensor import ApplyNode, SymbolFactDesc, SymbolNode

if TYPE_CHECKING:
    from collections.abc import Callable


def _plain() -> torch.Tensor:
    return torch.zeros(4, 4)


def _shared() -> tuple[torch.Tensor, torch.Tensor]:
    x = _plain()
    return x, x.detach()


def _with_grad(dtype: torch.dtype) -> torch.Tensor:
    x = _plain().requires_grad_()
    x.grad_dtype = None
    x.grad = torch.zeros(4, 4, dtype=dtype)
    return x


def _any_grad() -> torch.Tensor:
    x = _plain().requires_grad_()
    x.grad_dtype = None
    return x


def _no_bytes() -> torch.Tensor:
    x = _plain()
    x.untyped_storage().resize_(0)
    return x


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return _plain()


def _csr() -> torch.Tensor:
    with quiet():  # torch says once that it is in beta
        return _plain().to_sparse_csr()


def _no_grad_view() -> torch.Tensor:
    x = torch.zeros(5, 4, requires_grad=True)
    with torch.no_grad():
        return x[1:]


VARIANTS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "plain": lambda: (_plain(), _plain()),
    "dtype": lambda: (_plain().double(), _plain()),
    "device": lambda: (_plain().to("meta"), _plain()),
    "size": lambda: (torch.zeros(1, 4), _plain()),
    "stride": lambda: (_plain().t().contiguous().t(), _plain()),
    "offset": lambda: (torch.zeros(5, 4)[1:].detach(), _plain()),
    "storage": _shared,
    "twice": lambda: (_plain(),) * 2,
    "no bytes": lambda: (_no_bytes(), _plain()),
    "requires grad": lambda: (_plain().requires_grad_(), _plain()),
    "non-leaf": lambda: (_plain().requires_grad_() * 1, _plain()),
    "inference": lambda: (_inference(), _plain()),
    "conj": lambda: (_plain().cfloat().conj(), _plain()),
    "coo": lambda: (_plain().to_sparse(), _plain()),
    "csr": lambda: (_csr(), _plain()),
    "complex": lambda: (_plain().cfloat(), _plain()),
    "neg": lambda: (torch._neg_view(_plain()), _plain()),
    "parameter": lambda: (torch.nn.Parameter(_plain()), _plain()),
    "buffer": lambda: (torch.nn.Buffer(_plain()), _plain()),
    "view": lambda: (torch.zeros(5, 4)[1:], _plain()),
    "view of a leaf": lambda: (torch.zeros(5, 4, requires_grad=True)[1:], _plain()),
    "view under no_grad": lambda: (_no_grad_view(), _plain()),
    "gradient": lambda: (_with_grad(torch.float32), _plain()),
    "gradient of another dtype": lambda: (_with_grad(torch.float64), _plain()),
    "gradient of any dtype": lambda: (_any_grad(), _plain()),
    "number": lambda: (3, _plain()),
    "another number": lambda: (4, _plain()),
    "float": lambda: (3.0, _plain()),
    "bool": lambda: (True, _plain()),
    "int 1": lambda: (1, _plain()),
    "none": lambda: (None, _plain()),
    "text": lambda: ("3", _plain()),
}


def renamed(part: Any, names: dict[str, str]) -> Any:
    """A record with other symbol names, and what sympy sorts by name in another order."""
    if isinstance(part, tuple):
        return tuple(renamed(item, names) for item in part)
    if not isinstance(part, msgspec.Struct):
        return part
    if isinstance(part, (SymbolNode, SymbolDesc, SymbolFactDesc)):
        part = msgspec.structs.replace(part, name=names[part.name])
    if isinstance(part, ApplyNode) and part.function in ("Add", "Mul", "Max", "Eq", "Ne"):
        part = msgspec.structs.replace(part, args=part.args[::-1])
    fields = {f: renamed(getattr(part, f), names) for f in part.__struct_fields__}
    return msgspec.structs.replace(part, **fields)
