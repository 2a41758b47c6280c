"""What the fast ways of making fake tensors have in common.

They make dense tensors that have nothing of note besides their geometry; whatever has more, or is
asked for while something active around the call changes how tensors are made, goes the plain way.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import is_inference_mode_enabled
from torch.compiler import is_exporting

from . import _torch
from ._torch import (
    FakeTensor,
    functionalize_included,
    key_excluded,
    make_subclass,
    peek_interpreter_stack,
)

if TYPE_CHECKING:
    from .desc import MetaTensorDesc
    from .fakes import FakeDevice

__all__ = [
    "fake_of",
    "has_autograd",
    "is_changed",
    "is_plain",
    "is_plain_but_for_marks",
    "is_plain_input",
    "is_plain_leaf",
    "is_plain_real_leaf",
    "is_plain_whole",
]

# Fields and what they are where there is nothing of note; those that models have come first.
_PLAIN = {
    "layout": "strided",
    "grad": None,
    "grad_dtype": None,
    "marks": None,
    "is_conj": False,
    "is_neg": False,
    "is_inference": False,
    "is_pinned": False,
    "retains_grad": False,
    "nested_int": None,
    "item_memo": None,
    "view_calls": None,
    "sparse": None,
    "subclass": None,
    "functorch": None,
    "functional": None,
}
_WHOLE = {
    "is_view": False,
    "storage_offset": 0,
    **_PLAIN,
    "base": None,
    "creation_meta": None,
}
_NEEDED_KEYS = (
    _torch.DispatchKey.AutogradFunctionality,
    _torch.DispatchKey.ADInplaceOrView,
    _torch.DispatchKey.Python,
)
# All in one call of C.
_of_plain, _of_whole = attrgetter(*_PLAIN), attrgetter(*_WHOLE)
_plain_values, _whole_values = tuple(_PLAIN.values()), tuple(_WHOLE.values())
_REAL_LEAF = {"is_fake": False, "is_leaf": True, "scalar_hint": None, **_WHOLE}
_of_real_leaf, _real_leaf_values = attrgetter(*_REAL_LEAF), tuple(_REAL_LEAF.values())


_UNMARKED = {name: value for name, value in _WHOLE.items() if name != "marks"}
_of_unmarked, _unmarked_values = attrgetter(*_UNMARKED), tuple(_UNMARKED.values())
_INPUT = {**_REAL_LEAF, "is_buffer": False}
del _INPUT["marks"]
_of_input, _input_values = attrgetter(*_INPUT), tuple(_INPUT.values())


def is_plain(d: MetaTensorDesc) -> bool:
    """Whether there is nothing of note besides its geometry, or what it is a view of."""
    return _of_plain(d) == _plain_values


def is_plain_whole(d: MetaTensorDesc) -> bool:
    """The same of a tensor that is no view and begins where its storage does."""
    return _of_whole(d) == _whole_values


def is_plain_leaf(d: MetaTensorDesc) -> bool:
    """The same of a leaf."""
    return d.is_leaf and _of_whole(d) == _whole_values


def is_plain_but_for_marks(d: MetaTensorDesc) -> bool:
    """The same of a leaf that may have marks."""
    return d.is_leaf and _of_unmarked(d) == _unmarked_values


def is_plain_real_leaf(d: MetaTensorDesc) -> bool:
    """The same of a leaf that is no fake tensor and whose ``item()`` is not tracked."""
    return _of_real_leaf(d) == _real_leaf_values


def is_plain_input(d: MetaTensorDesc) -> bool:
    """The same of such a leaf that may have marks, but is no buffer."""
    return _of_input(d) == _input_values


def is_changed() -> bool:
    """Whether what is active around a call changes how tensors are made."""
    return (
        is_inference_mode_enabled()
        or functionalize_included()
        or peek_interpreter_stack() is not None
        or is_exporting()
    )


def has_autograd() -> bool:
    """Whether operators on fake tensors are seen by autograd, and by nothing above it."""
    return not (_torch.torch_function_depth() or any(map(key_excluded, _NEEDED_KEYS)))


def fake_of(
    d: MetaTensorDesc, meta: torch.Tensor, device: FakeDevice, *, requires_grad: bool
) -> FakeTensor:
    """The fake tensor over a meta tensor, with the attributes of a parameter or buffer.

    Called where nothing dispatches. Raises ``RuntimeError`` where torch takes no such tensor.

    Args:
        d: the record.
        meta: the meta tensor.
        device: that it is to be on.
        requires_grad: whether it is to require grad.
    """
    fake: Any = make_subclass(
        FakeTensor,
        meta,
        requires_grad,
        dispatch_device=True,
        device_for_backend_keys=device.device,
    )
    attributes = device.dress(fake, is_parameter=d.is_parameter)
    if d.is_buffer:
        attributes["_is_buffer"] = True
        if d.persistent is not None:
            attributes["persistent"] = d.persistent
    return fake
