"""Attributes of fake tensors that are not part of their geometry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_fakeify.encoding.marks import decode_marks, note_missing_properties

from .fake_tensors import dtype_of
from .sizes import concrete_int
from .validate import where_of

if TYPE_CHECKING:
    import torch

    from torch_fakeify.records.tensor import MarksDesc, MetaTensorDesc


def set_attributes(d: MetaTensorDesc, made: Any) -> None:
    """Set the gradient dtype, parameter, buffer and Dynamo attributes of a record."""
    if d.grad_dtype is not None and d.is_leaf:
        made.grad_dtype = None if d.grad_dtype == "any" else dtype_of(d.grad_dtype, where_of(d))
    if d.retains_grad and not d.is_leaf:
        made.retain_grad()
    if d.is_parameter:
        # The Parameter constructor would detach.
        made._is_param = True
    if d.is_buffer:
        made._is_buffer = True
        if d.persistent is not None:
            made.persistent = d.persistent
    if d.marks is not None:
        set_marks(d.marks, made)
    if d.layout == "_mkldnn" or d.is_pinned:
        note_missing_properties(d, made)


def set_marks(marks: MarksDesc, made: Any) -> None:
    """Set Dynamo's marks on a tensor."""
    for name, value in decode_marks(marks).items():
        setattr(made, name, value)


def set_inner_marks(d: MetaTensorDesc, made: Any) -> None:
    """Set the recorded marks on the inner tensors of a wrapper subclass."""
    for attribute, part in () if d.subclass is None else d.subclass.tensors:
        inner = getattr(made, attribute)
        set_inner_marks(part, inner)
        if part.marks is not None:
            set_marks(part.marks, inner)


def resize(d: MetaTensorDesc, storage: torch.UntypedStorage, *, symbolic: bool) -> None:
    """Resize a storage to the recorded bytes; with symbols only to zero, as torch does."""
    assert d.storage is not None
    nbytes = d.storage.nbytes
    if symbolic:
        if isinstance(nbytes, int) and nbytes == 0:
            storage.resize_(0)
    elif d.subclass is None and storage.nbytes() != nbytes:
        storage.resize_(concrete_int(nbytes, where_of(d)))
