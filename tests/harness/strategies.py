"""Hypothesis strategies for tensors.

`tensor_groups` runs small programs that make plain tensors as users make them, so that every
relation between them (views, aliases, gradients) is one that torch itself set up. `any_groups`
adds the other kinds: sparse, mkldnn, wrapper subclasses in one another, jagged nested tensors.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from hypothesis import HealthCheck, Phase, given, reject, seed, settings
from hypothesis import strategies as st
from quiet import quiet
from tensor_facts import COMPRESSED
from torch._dynamo import decorators
from torch.nested import nested_tensor_from_jagged
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_fakeify.describe.describer import describe_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")


def drawn(strategy: st.SearchStrategy[T], number: int, count: int) -> list[T]:
    """Random examples, the same ones each time."""
    found: list[T] = []

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(one: T) -> None:
        found.append(one)

    collect()
    return found


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
    with quiet():
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
    except (RuntimeError, IndexError, TypeError, ValueError):
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
    kinds = ["dynamic", "range", "weak", "static", "propagated", "address"]
    if not is_traceable_wrapper_subclass(t):  # torch does not mark those so
        kinds += ["unbacked", "strict"]
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


REFUSALS_OF_TORCH = (
    # Torch makes the base of a complex view complex, also where its last size is not 2.
    "Tensor must have a last dimension of size 2",
    # Torch gives a dim that is marked with a hint override another size than the gradient's dim.
    "attempting to assign a gradient of size",
)


def is_refusal_of_torch(error: Exception) -> bool:
    """Whether torch's own ``from_tensor`` fails for a tensor that it could make."""
    return any(refusal in str(error) for refusal in REFUSALS_OF_TORCH)


@contextmanager
def without_refusals_of_torch() -> Iterator[None]:
    """Drop the generated example if torch's own ``from_tensor`` fails for it in the block."""
    try:
        yield
    except RuntimeError as error:
        if is_refusal_of_torch(error):
            reject()
        raise


# --- other kinds ----------------------------------------------------------------------------------


@st.composite
def sparse_coo_tensors(draw: st.DrawFn) -> torch.Tensor:
    """A COO tensor, hybrid or not, coalesced, uncoalesced with duplicates, or without entries."""
    size = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    sparse_dim = draw(st.integers(1, len(size)))
    count = draw(st.integers(0, 3))
    indices = torch.stack([torch.arange(count) % n for n in size[:sparse_dim]])
    dtype = draw(st.sampled_from((torch.float32, torch.float64, torch.complex64, torch.int64)))
    values = torch.ones(count, *size[sparse_dim:], dtype=dtype)
    t = torch.sparse_coo_tensor(indices, values, size, is_coalesced=False)
    return _maybe_leaf(draw, t.coalesce() if draw(st.booleans()) else t)


@st.composite
def sparse_compressed_tensors(draw: st.DrawFn) -> torch.Tensor:
    """A CSR, CSC, BSR or BSC tensor, with batch and dense dims, and indices of either dtype."""
    layout = draw(st.sampled_from(COMPRESSED))
    blocked = layout in (torch.sparse_bsr, torch.sparse_bsc)
    block = draw(st.sampled_from(((1, 2), (2, 2), (2, 3)))) if blocked else (1, 1)
    batch = draw(st.lists(st.integers(1, 2), max_size=2))
    dense = draw(st.lists(st.integers(1, 3), max_size=1))
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    dtype = draw(st.sampled_from((torch.float32, torch.float64, torch.complex64, torch.int64)))
    full = torch.ones(*batch, rows * block[0], columns * block[1], *dense, dtype=dtype)
    blocksize = block if blocked else None
    t = quietly(lambda: full.to_sparse(layout=layout, blocksize=blocksize, dense_dim=len(dense)))
    if draw(st.booleans()):
        by_row = layout in (torch.sparse_csr, torch.sparse_bsr)
        pointers = t.crow_indices() if by_row else t.ccol_indices()
        others = t.col_indices() if by_row else t.row_indices()
        t = torch.sparse_compressed_tensor(
            pointers.int(), others.int(), t.values(), t.shape, layout=layout
        )
    return _maybe_leaf(draw, t)


@st.composite
def mkldnn_tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor in MKL-DNN's own layout."""
    size = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    return _maybe_leaf(draw, torch.ones(size).to_mkldnn())


def _maybe_leaf(draw: st.DrawFn, t: torch.Tensor) -> torch.Tensor:
    wants_grad = (t.is_floating_point() or t.is_complex()) and draw(st.integers(0, 2)) == 0
    return t.requires_grad_() if wants_grad else t


def two_tensor(draw: st.DrawFn, group: list[torch.Tensor]) -> torch.Tensor:
    """A `TwoTensor`: of plain tensors, of aliases of one or of one twice, or of two `TwoTensor`."""
    plain = [
        t for t in group if type(t) is torch.Tensor and t.layout is torch.strided
        and not t.requires_grad and not t.is_inference() and not t.is_conj()
        and not t.storage_offset()
    ]  # fmt: skip
    if plain and draw(st.booleans()):
        a = draw(st.sampled_from(plain))
    else:
        a = torch.ones(draw(st.lists(st.integers(1, 3), max_size=3)))
    other = torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=a.device)
    match draw(st.sampled_from(("apart", "alias", "same", "nested"))):
        case "apart":
            t = TwoTensor(a, other)
        case "alias":
            t = TwoTensor(a, a.detach())
        case "same":
            t = TwoTensor(a, a)
        case _:
            t = TwoTensor(TwoTensor(a, other), TwoTensor(other.detach(), a))
    match draw(st.sampled_from(("plain", "grad", "parameter", "frozen", "history"))):
        case "frozen":
            return torch.nn.Parameter(t, requires_grad=False)
        case "parameter" if a.is_floating_point():
            return torch.nn.Parameter(t)
        case "grad" if a.is_floating_point():
            return t.requires_grad_()
        case "history" if a.is_floating_point():
            return t.requires_grad_() * 2
        case _:
            return t


def jagged_tensors(draw: st.DrawFn) -> list[torch.Tensor]:
    """Jagged nested tensors that share offsets or do not, their offsets and their values."""
    offsets = torch.tensor([0, 2, 3, 6], dtype=draw(st.sampled_from((torch.int64, torch.int32))))
    values = torch.ones(6, *draw(st.lists(st.integers(1, 3), max_size=2)))
    if draw(st.booleans()):
        values.requires_grad_()
    lengths = torch.tensor([1, 1, 2], dtype=offsets.dtype) if draw(st.booleans()) else None
    cached = {"min_seqlen": 1, "max_seqlen": 3} if draw(st.booleans()) else {}
    first = nested_tensor_from_jagged(values, offsets, lengths, **cached)
    found = [first]
    if draw(st.booleans()):
        found.append(nested_tensor_from_jagged(torch.ones(6, 2), offsets, lengths))
    if draw(st.booleans()):
        found.append(nested_tensor_from_jagged(torch.ones(6, 2), offsets.clone(), lengths))
    if draw(st.booleans()):
        found.append(nested_tensor_from_jagged(torch.ones(6), first.offsets()))
    if draw(st.booleans()):
        found.append(first.values())
    return found + [offsets] * draw(st.booleans()) + [values] * draw(st.booleans())


KINDS = ("coo", "compressed", "mkldnn", "two", "two", "jagged")


@st.composite
def any_groups(draw: st.DrawFn, *, kinds: tuple[str, ...] = KINDS, marks: bool = False) -> Group:
    """Tensors of every kind, with views of them (also multi-output, ``no_grad``, inference)."""
    group: list[torch.Tensor] = (
        list(draw(tensor_groups(resize=False))) if draw(st.booleans()) else []
    )
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=2)):
        match kind:
            case "coo":
                group.append(draw(sparse_coo_tensors()))
            case "compressed":
                group.append(draw(sparse_compressed_tensors()))
            case "mkldnn":
                group.append(draw(mkldnn_tensors()))
            case "two":
                group.append(two_tensor(draw, group))
            case _:
                group += jagged_tensors(draw)
    for _ in range(draw(st.integers(0, 3))):
        t = draw(st.sampled_from(group))
        if marks and draw(st.integers(0, 3)) == 0:
            give_marks(draw, t)
        elif t.layout in (torch.strided, torch.jagged):
            group.append(draw(views(t)))
    return Group(group)
