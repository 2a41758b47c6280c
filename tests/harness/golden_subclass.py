"""Wrapper subclasses with contexts of their own, which golden captures hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

import torch_fakeify as tfk


@dataclass(frozen=True)
class Factor:
    """A context that is taught by a registration."""

    scale: float


@dataclass(frozen=True)
class Tags:
    """A context that is plain data."""

    dtype: torch.dtype
    tags: tuple[Any, ...]


class Label:
    """No data to us: a registration says what is in it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return f"Label({self.text!r})"


tfk.register_subclass(Label, encode_ctx=lambda label: label.text, decode_ctx=Label)


class _Wrapper(torch.Tensor):
    """A tensor around one."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, _context: Any) -> Any:
        """A wrapper of the inner tensor's sizes."""
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor, context: Any) -> None:
        self.inner, self.context = inner, context

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """One inner tensor, and the context."""
        return ["inner"], self.context

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, _size: Any, _stride: Any) -> Any:
        """The wrapper again."""
        return cls(inner["inner"], context)

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Results are of the inner tensors."""
        args, kwargs = tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        return op(*args, **kwargs)


@tfk.register_subclass(encode_ctx=lambda ctx: ctx.scale, decode_ctx=Factor)
class Scaled(_Wrapper):
    """A tensor with a registered context."""


class Tagged(_Wrapper):
    """A tensor whose context is a dataclass."""
