"""Real tensors of the kinds that are more than a storage with sizes and strides.

Their data is synthetic, but must be consistent: indices of a sparse tensor lie in
its sizes, offsets of a jagged one in its values.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import torch

from torch_fakeify.compat.torch_symbols import make_nested_int
from torch_fakeify.encoding.subclasses import (
    context_decoder,
    decode_context,
    decode_opaques,
    unflatten,
)
from torch_fakeify.encoding.views.replay import replay_view_calls
from torch_fakeify.errors import CaptureError
from torch_fakeify.records.tensor import NestedIntDesc, SymValue

if TYPE_CHECKING:
    from torch_fakeify.encoding.meshes import Meshes
    from torch_fakeify.records.tensor import MetaTensorDesc, SparseDesc, Value


class Maker(Protocol):
    """Interface of the maker of real tensors in `materializing`."""

    meshes: Meshes

    def make(self, desc: MetaTensorDesc) -> torch.Tensor:
        """Make the tensor of a record, once for each id."""
        ...

    def random(self, count: int, dtype: torch.dtype, desc: MetaTensorDesc) -> torch.Tensor:
        """A vector of random data."""
        ...

    def number(self, n: Any, where: str) -> Any:
        """Evaluate a size or symbolic scalar."""
        ...


def make_sparse(
    maker: Maker, desc: MetaTensorDesc, size: list[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Make a sparse tensor with about half of its entries."""
    facts = desc.sparse
    assert facts is not None
    dense = maker.random(math.prod(size), dtype, desc).reshape(size).to(device)
    first = len(size) - facts.dense_dim - facts.sparse_dim
    # One pattern for all batches, which must have equally many entries.
    pattern = torch.zeros(size[first : first + facts.sparse_dim], dtype=torch.bool)
    pattern.view(-1)[::2] = True
    if facts.blocksize:
        rows, columns = facts.blocksize
        pattern = pattern[::rows, ::columns].repeat_interleave(rows, 0)
        pattern = pattern.repeat_interleave(columns, 1)
    pattern = pattern.reshape(pattern.shape + (1,) * facts.dense_dim)
    dense = torch.where(pattern.to(device), dense + (dense == 0), torch.zeros_like(dense))
    return _coo(dense, facts) if desc.layout == "sparse_coo" else _compressed(dense, facts, desc)


def _coo(dense: torch.Tensor, facts: SparseDesc) -> torch.Tensor:
    if not facts.sparse_dim:  # one entry, the whole tensor
        indices = torch.zeros((0, 1), dtype=torch.int64, device=dense.device)
        return torch.sparse_coo_tensor(
            indices, dense[None], dense.shape, is_coalesced=facts.is_coalesced
        )
    made: Any = dense.to_sparse(facts.sparse_dim)
    if facts.is_coalesced:
        return made
    indices, values = made._indices(), made._values()
    # A duplicate entry, so that the tensor is not coalesced.
    return torch.sparse_coo_tensor(
        torch.cat([indices, indices[:, :1]], 1),
        torch.cat([values, values[:1]], 0),
        made.shape,
        is_coalesced=False,
        check_invariants=False,
    )


def _compressed(dense: torch.Tensor, facts: SparseDesc, desc: MetaTensorDesc) -> torch.Tensor:
    convert: Any = getattr(dense, f"to_{desc.layout}")
    blocks: tuple[Any, ...] = (facts.blocksize,) if facts.blocksize else ()
    made = convert(*blocks, dense_dim=facts.dense_dim)
    if facts.index_dtype in (None, "int64"):
        return made
    rows_first = desc.layout in ("sparse_csr", "sparse_bsr")
    compressed = made.crow_indices() if rows_first else made.ccol_indices()
    plain = made.col_indices() if rows_first else made.row_indices()
    return torch.sparse_compressed_tensor(
        compressed.to(torch.int32),
        plain.to(torch.int32),
        made.values(),
        made.shape,
        layout=made.layout,
        check_invariants=False,
    )


def make_wrapper(maker: Maker, desc: MetaTensorDesc) -> torch.Tensor:
    """Make a wrapper subclass around real inner tensors."""
    record = desc.subclass
    assert record is not None
    where = f"tensor {desc.id}"
    inner: dict[str, Any] = {name: maker.make(part) for name, part in record.tensors}
    if desc.layout == "jagged":
        _partition(maker, dict(record.tensors), where)

    def number(value: Value) -> Any:
        return maker.number(value.sym, where) if isinstance(value, SymValue) else NotImplemented

    decoder = context_decoder(record, number, maker.make, maker.meshes)
    inner.update(decode_opaques(record, decoder, where=where))
    context = decode_context(record, decoder, where=where)
    size = tuple(_size(maker, n, where) for n in desc.size)
    stride = tuple(_size(maker, n, where) for n in desc.stride)
    return unflatten(record, inner, context, size, stride, where=where)


def _size(maker: Maker, n: Any, where: str) -> Any:
    nested = n if isinstance(n, NestedIntDesc) else getattr(n, "hint", None)
    if isinstance(nested, NestedIntDesc):
        # Real jagged tensors use their offsets instead.
        return make_nested_int(nested.id, nested.coeff)
    return maker.number(n, where)


def _partition(maker: Maker, parts: dict[str, MetaTensorDesc], where: str) -> None:
    """Fill the offsets and lengths of a jagged tensor with consistent values."""

    def rows_of(name: str) -> int | None:
        part = parts.get(name)
        return None if part is None else maker.number(part.size[0], where)

    offsets = maker.make(parts["_offsets"])
    rows, total = offsets.shape[0] - 1, rows_of("_values") or 0
    # The extreme lengths are the sizes of tensors without elements.
    smallest, largest = rows_of("_min_seqlen_tensor"), rows_of("_max_seqlen_tensor")
    lengths = [total // max(rows, 1) + (i < total % max(rows, 1)) for i in range(rows)]
    if rows > 1 and smallest is not None and largest is not None:
        lengths = _spread(rows, total, smallest, largest) or lengths
    with torch.no_grad():
        offsets.copy_(torch.tensor([0, *lengths]).cumsum(0))
        if "_lengths" in parts:
            maker.make(parts["_lengths"]).copy_(torch.tensor(lengths))


def _spread(rows: int, total: int, smallest: int, largest: int) -> list[int] | None:
    """Split a total into parts with a minimum and a maximum part; ``None`` if impossible."""
    parts = [largest, *[smallest] * (rows - 1)]
    rest = total - sum(parts)
    for i in range(1, rows - 1):
        more = max(0, min(rest, largest - smallest))
        parts[i] += more
        rest -= more
    return parts if rest == 0 else None


def make_view(maker: Maker, desc: MetaTensorDesc, base: torch.Tensor) -> torch.Tensor:
    """Make a view that is, or whose base is, a wrapper subclass, by its view operators."""
    assert desc.view_calls is not None
    where = f"tensor {desc.id}"
    if desc.subclass is not None and desc.layout == "jagged":
        _partition(maker, dict(desc.subclass.tensors), where)
    return replay_view_calls(
        desc.view_calls,
        base,
        symint=lambda n: _size(maker, n, where),
        tensor=maker.make,
        where=where,
    )


def refuse_wrapped(desc: MetaTensorDesc) -> None:
    """Raise for tensors that exist only inside a functorch transform."""
    kind = "functorch" if desc.functorch is not None else "functional"
    raise CaptureError(
        f"a {kind} tensor exists only inside its transform",
        where=f"tensor {desc.id}",
        fix="Materialize the frame that calls the transform",
    )
