"""Helpers of the tests of dropin."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from tensor_facts import facts, parts
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedFakeTensorException
from torch.testing._internal.two_tensor import TwoTensor

from torch_fakeify import dropin
from torch_fakeify.dropin import converter as dropin_convert
from torch_fakeify.dropin import desc
from torch_fakeify.dropin import describer as dropin_describe

if TYPE_CHECKING:
    from collections.abc import Callable


def a_leaf_with_grad() -> torch.Tensor:
    """A leaf with a gradient that is a view."""
    t = torch.empty(3, 4, requires_grad=True)
    t.grad = torch.empty(4, 3).t()
    return t


def marked() -> torch.Tensor:
    """A tensor with a dynamic dim and a hint for it."""
    t = torch.empty(6, 4)
    torch._dynamo.mark_dynamic(t, 0, hint_override=8)
    return t


def jagged(*, view: bool = False) -> torch.Tensor:
    """A jagged nested tensor, or one that is a view of its values."""
    values, offsets = torch.randn(5, 3), torch.tensor([0, 2, 5])
    if view:
        return torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=2, max_seqlen=3)
    return torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(3, 3)], layout=torch.jagged)


def functional(t: torch.Tensor) -> torch.Tensor:
    """A functional tensor that functorch did not make."""
    return torch._to_functional_tensor(t)


def two(*size: int, **kwargs: Any) -> TwoTensor:
    """A wrapper subclass."""
    return TwoTensor(torch.randn(size), torch.randn(size), **kwargs)


def in_inference(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The tensor as made in inference mode."""
    with torch.inference_mode():
        return make()


def without_grad(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The tensor as made without grad."""
    with torch.no_grad():
        return make()


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.empty(2, 3),
    "strides": lambda: torch.empty_strided((2, 3), (1, 4)),
    "scalar": lambda: torch.tensor(3),
    "parameter": lambda: torch.nn.Parameter(torch.empty(2, 3)),
    "buffer": lambda: torch.nn.Buffer(torch.empty(2, 3), persistent=False),
    "grad": a_leaf_with_grad,
    "history": lambda: torch.empty(3, requires_grad=True).clone(),
    "marks": marked,
    "meta": lambda: torch.empty(2, 3, device="meta"),
    "conj": lambda: torch.empty(3, dtype=torch.complex64).conj(),
    "imag": lambda: torch.empty(3, dtype=torch.complex64).conj().imag,
    "bytes": lambda: torch.empty(4, 3).view(torch.uint8),
    "view": lambda: torch.empty(4, 3).t()[1:],
    "leaf view": lambda: without_grad(lambda: torch.empty(4, 3)[1:]).requires_grad_(),
    "two steps": lambda: torch.empty(4).view(2, 2).requires_grad_().view(4),
    "offset": lambda: torch.empty(8)[2:].detach(),
    "multi": lambda: torch.empty(4, requires_grad=True).unbind()[0],
    "no bytes": lambda: (t := torch.empty(4), t.untyped_storage().resize_(0))[0],
    "inference": lambda: in_inference(lambda: torch.empty(2, 3)),
    "inference view": lambda: in_inference(lambda: torch.empty(2, 3)[1:]),
    "coo": lambda: torch.eye(3).to_sparse(),
    "hybrid": lambda: torch.randn(3, 4, 2).to_sparse(1).requires_grad_(),
    "coo history": lambda: torch.eye(3).to_sparse().requires_grad_().clone(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "csc": lambda: torch.eye(3).to_sparse_csc().requires_grad_(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "mkldnn": lambda: torch.randn(2, 3).to_mkldnn(),
    "wrapper": lambda: two(3, 4),
    "wrapper parameter": lambda: torch.nn.Parameter(two(3, 4)),
    "wrapper grad": lambda: two(3, 4, requires_grad=True).clone(),
    "wrapper view": lambda: two(3, 4)[1:],
    "wrapper transposed": lambda: two(3, 4, requires_grad=True).t(),
    "wrappers": lambda: TwoTensor(two(3, 4), two(3, 4)),
    "wrapper of views": lambda: TwoTensor(torch.randn(4, 3).t(), torch.randn(4, 3).t()),
    "jagged": jagged,
    "jagged view": lambda: jagged(view=True),
    "jagged values": lambda: jagged().values(),
    "offsets": lambda: jagged().offsets(),
    "functional": lambda: functional(torch.randn(3, 4, requires_grad=True)),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]),
    "view of coo": lambda: torch.eye(3).to_sparse().requires_grad_().t(),
}


def told(t: Any) -> Any:
    """What a tensor of any kind says of itself, and what is inside it."""
    if not isinstance(t, torch.Tensor):
        return str(t)
    names = ("_is_buffer", "persistent", "fake_device")
    return facts(t), [
        (
            type(part),
            str(getattr(part, "nested_int_memo", None)),
            *(getattr(part, n, None) for n in names),
        )
        for part in parts([t])
    ]


OURS = {
    "MetaConverter": dropin_convert.MetaConverter,
    "MetaStorageDesc": desc.MetaStorageDesc,
    "MetaTensorDesc": desc.MetaTensorDesc,
    "MetaTensorDescriber": dropin_describe.MetaTensorDescriber,
}


def both(make: Callable[[], Any]) -> tuple[Any, Any]:
    """What a function gives with the drop-in and without; or the exceptions."""
    found: list[Any] = []
    for place in (dropin.installed(), nullcontext()):
        FakeTensorMode.cache_clear()  # of what operators give, which counts in the memos too
        with place:
            try:
                found.append(make())
            except (RuntimeError, AssertionError, UnsupportedFakeTensorException) as error:
                found.append(f"{type(error).__name__}: {error}")
    return found[0], found[1]
