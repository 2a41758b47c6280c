"""Operators with planted faults in their fake kernels, and operators that raise, crash or hang at some size.

They are registered in a process that imports this module.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_LIBRARY = torch.library.Library("planted", "FRAGMENT")


def _add(schema: str, real: Callable[..., Any], fake: Callable[..., Any]) -> None:
    _LIBRARY.define(schema)
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, real, "CPU")
    torch.library.register_fake(f"planted::{name}", fake, lib=_LIBRARY)


def _empty_like(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


def _copy(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _at(size: int, act: Callable[[], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """An operator that acts where the first size is that one."""

    def real(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == size:
            act()
        return _copy(x)

    return real


def _half(x: torch.Tensor) -> torch.Tensor:
    """Half of the rows, of an odd number one more."""
    return x[: (x.shape[0] + 1) // 2].clone()


def _part_of_more(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(2 * x.numel()).fill_(1)[: x.numel()].view(x.shape)


def _raise() -> None:
    raise ValueError("not this size")


_add("right(Tensor x) -> Tensor", _copy, _empty_like)
_add("stride(Tensor x) -> Tensor", lambda x: _copy(x.t()).t(), _empty_like)
_add("dtype(Tensor x) -> Tensor", lambda x: _copy(x.double()), _empty_like)
_add("odd(Tensor x) -> Tensor", _half, lambda x: x.new_empty(x.shape[0] // 2, *x.shape[1:]))
_add("alias(Tensor x) -> Tensor", lambda x: x.view(x.shape), _empty_like)
_add("storage(Tensor x) -> Tensor", _part_of_more, _empty_like)
_add("offset(Tensor x) -> Tensor", lambda x: torch.cat([x, x])[x.shape[0] :], _empty_like)
_add("ndim(Tensor x) -> Tensor", lambda x: x.sum(), lambda x: x.new_empty(1))
_add("length(Tensor x) -> Tensor[]", lambda x: [_copy(x)], lambda x: [_empty_like(x)] * 2)
_add("number(Tensor x) -> SymInt", lambda x: x.shape[0], lambda x: x.shape[0] * 2)
_add(
    "second(Tensor x) -> (Tensor, Tensor)",
    lambda x: (_copy(x), x.long()),
    lambda x: (_empty_like(x), _empty_like(x)),
)
_add("raises(Tensor x) -> Tensor", _at(7, _raise), _empty_like)
_add(
    "crashes(Tensor x) -> Tensor", _at(7, lambda: os.kill(os.getpid(), signal.SIGSEGV)), _empty_like
)
_add("hangs(Tensor x) -> Tensor", _at(7, lambda: time.sleep(1000)), _empty_like)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x[x[:, 0] > -9].clone()


def _counted(x: torch.Tensor, *, most: int | None = None) -> torch.Tensor:
    rows = torch.library.get_ctx().new_dynamic_size(max=most)
    return x.new_empty(rows, x.shape[1])


_add("rows(Tensor x) -> Tensor", _rows, _counted)
_add("rows_in_float64(Tensor x) -> Tensor", lambda x: _rows(x).double(), _counted)
_add("few_rows(Tensor x) -> Tensor", lambda x: x.repeat(4, 1), lambda x: _counted(x, most=3))


def _clear(x: torch.Tensor) -> torch.Tensor:
    x.zero_()
    return _copy(x).int()


_add("clear_(Tensor(a!) x) -> Tensor", _clear, _empty_like)
