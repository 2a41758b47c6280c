"""Hypothesis strategies for tensors.

`tensor_groups` runs small programs that make tensors as users make them, so that every relation
between them (views, aliases, gradients) is one that torch itself set up.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from hypothesis import strategies as st
from torch._dynamo import decorators

from torch_fakeify.describe import describe_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex64, torch.complex128)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
RARE = (
    torch.complex32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.bits8,
    torch.bits16,
    torch.bits1x8,
    torch.bits2x4,
    torch.bits4x2,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.uint1,
    torch.uint4,
    torch.int3,
)
DTYPES = FLOATS + COMPLEX + INTS + RARE
COMMON = FLOATS + COMPLEX + INTS


def quietly(function: Callable[..., T], *args: Any) -> T:
    """Calls without the warnings that torch gives for experimental dtypes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides: contiguous, permuted, with gaps, or expanded."""
    size = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    stride = [0] * len(size)
    step = draw(st.integers(1, 2))
    for dim in draw(st.permutations(range(len(size)))):
        if draw(st.integers(0, 9)) == 0:
            continue
        stride[dim] = step
        step *= max(size[dim], 1) + draw(st.sampled_from((0, 0, 0, 1)))
    return size, tuple(stride)


@st.composite
def plain_tensors(draw: st.DrawFn, dtypes: Any = COMMON) -> torch.Tensor:
    """A tensor that is no view, on its own storage: with or without grad, parameter, buffer."""
    size, stride = draw(layouts())
    dtype = draw(st.sampled_from(dtypes))
    device = draw(st.sampled_from(("cpu", "cpu", "cpu", "meta")))
    if draw(st.booleans()):
        stride = torch.empty(size, device="meta").stride()
    with torch.inference_mode(draw(st.integers(0, 9)) == 0):
        t = quietly(lambda: torch.empty_strided(size, stride, dtype=dtype, device=device))
    kind = draw(st.sampled_from(("plain", "parameter", "buffer", "grad", "history", "frozen")))
    if t.is_inference():
        return t
    if kind == "buffer":
        return torch.nn.Buffer(t, persistent=draw(st.booleans()))
    if kind == "frozen":
        return torch.nn.Parameter(t, requires_grad=False)
    if dtype not in FLOATS + COMPLEX:
        return t
    if kind == "parameter":
        return torch.nn.Parameter(t)
    if kind in ("grad", "history"):
        t.requires_grad_()
    if kind == "grad" and draw(st.integers(0, 3)) == 0:
        t.grad_dtype = draw(st.sampled_from((None, torch.float32)))
    if kind == "history":
        t = quietly(t.clone)
        if draw(st.booleans()):
            t.retain_grad()
    return t


def _as_other_dtype(t: torch.Tensor) -> torch.Tensor:
    other = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}
    return t.view(other.get(t.itemsize, torch.complex128))


VIEWS: dict[str, Any] = {
    "slice": lambda t: t[1:],
    "select": lambda t: t[-1],
    "transpose": lambda t: t.transpose(0, -1),
    "unsqueeze": lambda t: t.unsqueeze(-1),
    "expand": lambda t: t.unsqueeze(0).expand(3, *t.shape),
    "split": lambda t: t.split(2)[-1],
    "unbind": lambda t: t.unbind(0)[0],
    "chunk": lambda t: t.chunk(2, -1)[0],
    "diagonal": lambda t: t.diagonal(),
    "dtype": _as_other_dtype,
    "narrower": lambda t: t.view(torch.uint8),
    "as_real": torch.view_as_real,
    "as_complex": torch.view_as_complex,
    "conj": torch.conj,
    "imag": lambda t: t.conj().imag,
    "alias": lambda t: t.view_as(t),
    "detach": lambda t: t.detach(),
}


@st.composite
def views(draw: st.DrawFn, t: torch.Tensor) -> torch.Tensor:
    """A view (or detached alias) of a tensor; the tensor itself where the view does not exist."""
    make = VIEWS[draw(st.sampled_from(sorted(VIEWS)))]
    mode = draw(st.sampled_from(("grad", "grad", "no_grad", "inference")))
    try:
        if mode == "inference":
            with torch.inference_mode():
                out = quietly(make, t)
        else:
            with torch.set_grad_enabled(mode == "grad"):
                out = quietly(make, t)
    except (RuntimeError, IndexError, TypeError):
        return t
    wants_grad = draw(st.integers(0, 2)) == 0
    if wants_grad and not out.is_inference() and out.is_leaf and out.dtype in FLOATS:
        out.requires_grad_()
    return out


def alias(draw: st.DrawFn, t: torch.Tensor) -> torch.Tensor:
    """Another tensor on the same storage that is no view of it."""
    size, stride = draw(layouts())
    room = t.untyped_storage().nbytes() // t.itemsize
    if 0 not in size:
        room -= sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1
    if room < 0:
        size, stride, room = (0,), (1,), 0
    offset = min(room, draw(st.integers(0, 3)))
    with torch.inference_mode(t.is_inference()):
        out = quietly(lambda: torch.empty(0, dtype=t.dtype, device=t.device))
        quietly(lambda: out.set_(t.untyped_storage(), offset, size, stride))
    return out


def give_grad(draw: st.DrawFn, t: torch.Tensor) -> None:
    """Assigns a gradient of any layout, if the tensor may have one."""
    if t.grad_fn is not None or not t.requires_grad or t.grad_dtype is not t.dtype:
        return
    order = draw(st.permutations(range(t.ndim)))
    grad = torch.empty([t.shape[i] for i in order], dtype=t.dtype, device=t.device)
    back = sorted(range(t.ndim), key=lambda i: order[i])
    t.grad = grad.permute(back).requires_grad_(draw(st.integers(0, 3)) == 0)


def give_marks(draw: st.DrawFn, t: torch.Tensor) -> None:
    """Marks a dim as Dynamo's users do."""
    if t.ndim == 0:
        return
    dim = draw(st.integers(0, t.ndim - 1))
    kinds = ("dynamic", "range", "unbacked", "strict", "weak", "static", "propagated", "address")
    match draw(st.sampled_from(kinds)):
        case "dynamic":
            conditions = [lambda n: n == 8, lambda n: n % 16 == 0]
            decorators.mark_dynamic(t, dim, hint_override=6, specialize_on=conditions)
        case "range":
            decorators.mark_dynamic(t, dim, min=2, max=draw(st.sampled_from((None, 64))))
        case "unbacked":
            decorators.mark_unbacked(t, dim, hint_override=7, shape_id="b", min=2)
        case "strict":
            decorators.mark_unbacked(t, dim, strict=True)
        case "weak":
            decorators.maybe_mark_dynamic(t, dim)
        case "static":
            decorators.mark_static(t, dim)
        case "propagated":
            t._dynamo_propagated_dynamic_indices = {dim}
        case _:
            decorators.mark_static_address(t, guard=draw(st.booleans()))


class Group(list[torch.Tensor]):
    """Tensors; its text reads no data, which a storage of no bytes does not have."""

    def __repr__(self) -> str:
        return "\n".join(map(str, map(describe_tensor, self)))


@st.composite
def tensor_groups(
    draw: st.DrawFn, *, marks: bool = False, resize: bool = True, dtypes: Any = COMMON
) -> Group:
    """Tensors that may share storages, be views of one another, or one another's gradients."""
    group = [draw(plain_tensors(dtypes)) for _ in range(draw(st.integers(1, 2)))]
    actions = ["view", "view", "view", "alias", "grad"] + ["marks"] * marks + ["resize"] * resize
    for _ in range(draw(st.integers(0, 5))):
        t = draw(st.sampled_from(group))
        match draw(st.sampled_from(actions)):
            case "view":
                group.append(draw(views(t)))
            case "alias":
                group.append(alias(draw, t))
            case "grad":
                give_grad(draw, t)
            case "marks":
                give_marks(draw, t)
            case _:
                nbytes = t.untyped_storage().nbytes()
                t.untyped_storage().resize_(draw(st.sampled_from((0, nbytes // 2, nbytes + 8))))
    return Group(group)
