"""Classes that tests put into records: a wrapper with any context, one without protocol, opaque objects."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import torch
from subclass_zoo import describe
from torch._library.opaque_object import register_opaque_type

from torch_fakeify.compat.torch_fakes import CustomClassBase
from torch_fakeify.encoding.subclasses import encode_subclass

if TYPE_CHECKING:
    from torch_fakeify.records.tensor import SubclassDesc


class Holder(torch.Tensor):
    """A wrapper around one tensor with any context and any other attributes."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, context: Any = None, **attributes: Any) -> Any:
        """Make the outer tensor."""
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor, context: Any = None, **attributes: Any) -> None:
        self.inner = inner
        self.context = context
        self.attributes = list(attributes)
        vars(self).update(attributes)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner", *self.attributes], self.context

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner.pop("inner"), context, **inner)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


class Unlucky(torch.Tensor):
    """A wrapper that cannot be made again."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [], None


class Kind(enum.Enum):
    """An enumeration."""

    A = 1


class Handle(CustomClassBase):
    """An opaque object of a user."""

    def __init__(self, number: int) -> None:
        self.number = number


register_opaque_type(Handle, typ="reference")


def encode(t: torch.Tensor) -> SubclassDesc:
    """Return the record of a wrapper."""
    return encode_subclass(t, describe, where="t")


def holder(context: Any = None, **attributes: Any) -> Any:
    """Return a wrapper with that context."""
    return Holder(torch.ones(2), context, **attributes)
