"""Which records can be those of a tensor; the rest is refused before a tensor is made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torch_fakeify.compat import torch_dispatch
from torch_fakeify.errors import ConvertError
from torch_fakeify.records.id_owners import (
    Clash,
    find_clash,
    find_storage_clash,
    have_two_describers,
    two_describers_clash,
)

from .builder import Kind, SparseLayout
from .fake_tensors import dtype_of
from .sizes import are_ints

if TYPE_CHECKING:
    from torch_fakeify.records.tensor import MetaTensorDesc, SparseDesc

_MAX_INT = 2**63 - 1

LAYOUTS = {
    "sparse_csr": torch.sparse_csr,
    "sparse_csc": torch.sparse_csc,
    "sparse_bsr": torch.sparse_bsr,
    "sparse_bsc": torch.sparse_bsc,
}

KINDS = {
    "strided": Kind.DENSE,
    "sparse_coo": Kind.COO,
    "_mkldnn": Kind.NO_STORAGE,
    **dict.fromkeys(LAYOUTS, Kind.COMPRESSED),
}
"""By layout, of tensors without a wrapper."""


def where_of(d: MetaTensorDesc) -> str:
    """The name of a record's tensor, for errors."""
    return f"tensor {d.id}" if d.source is None else f"tensor {d.id} ({d.source.name})"


def check_record(d: MetaTensorDesc) -> None:
    """Raise for a record that describes no possible tensor."""
    if d.subclass is None and d.layout not in KINDS:
        raise ConvertError(
            "the layout is not handled",
            where=where_of(d),
            expected=", ".join(KINDS),
            found=d.layout,
        )
    if (d.sparse is not None) != d.layout.startswith("sparse_"):
        raise ConvertError(
            "a sparse layout and what a sparse tensor has belong together",
            where=where_of(d),
            expected="`sparse` of a sparse layout only",
            found=d.layout,
        )
    if d.sparse is not None:
        _check_sparse(d, d.sparse, where_of(d))
    elif d.storage is None and d.layout == "strided" and d.functorch is None:
        raise ConvertError("a strided tensor has a storage", where=where_of(d), found="none")
    _check_numbers(d)
    if d.is_view != (d.base is not None):
        raise ConvertError("a view and a base belong together", where=where_of(d))
    if not d.is_leaf and not d.requires_grad:
        raise ConvertError("a tensor that is no leaf requires grad", where=where_of(d))
    if d.subclass is not None:
        for name, _ in (*d.subclass.tensors, *d.subclass.opaques):
            _check_inner_name(name, where_of(d))
    if (
        d.creation_meta is not None
        and d.creation_meta not in torch_dispatch.CreationMeta.__members__
    ):
        raise ConvertError(
            "the creation meta of the view is not known",
            where=where_of(d),
            expected=", ".join(torch_dispatch.CreationMeta.__members__),
            found=d.creation_meta,
        )


def _check_numbers(d: MetaTensorDesc) -> None:
    """Raises for sizes, strides, an offset or a storage that no tensor can have."""
    if len(d.size) != len(d.stride) and d.sparse is None:
        raise ConvertError(
            "sizes and strides differ in number",
            where=where_of(d),
            expected=f"{len(d.size)} strides",
            found=f"{len(d.stride)}",
        )
    nbytes = 0 if d.storage is None else d.storage.nbytes
    numbers: Any = (*d.size, *d.stride, d.storage_offset, nbytes)
    ints = numbers if are_ints(*numbers) else [n for n in numbers if isinstance(n, int)]
    if ints and (min(ints) < 0 or max(ints) > _MAX_INT):
        raise ConvertError(
            "a size is out of range",
            where=where_of(d),
            expected="0 to 2**63 - 1",
            found=str(next(n for n in ints if not 0 <= n <= _MAX_INT)),
        )


def _check_inner_name(name: str, where: str) -> None:
    """Raises for the name of an inner attribute that could be no attribute that holds a tensor."""
    if not name.isidentifier() or name.startswith("__"):
        raise ConvertError(
            "not the name of an inner attribute",
            where=where,
            expected="an identifier without double underscores in front",
            found=repr(name),
        )


def _check_sparse(d: MetaTensorDesc, facts: SparseDesc, where: str) -> None:
    if facts.sparse_dim < 0 or facts.dense_dim < 0 or facts.sparse_dim + facts.dense_dim > d.ndim:
        raise ConvertError(
            "sparse and dense dims are more than the dims",
            where=where,
            expected=f"at most {d.ndim} together",
            found=f"{facts.sparse_dim} and {facts.dense_dim}",
        )
    if d.layout != "sparse_coo" and facts.index_dtype is None:
        raise ConvertError("a compressed sparse tensor has a dtype of its indices", where=where)
    blocks = 2 if d.layout in ("sparse_bsr", "sparse_bsc") else 0
    if len(facts.blocksize) != blocks or any(n < 1 for n in facts.blocksize):
        raise ConvertError(
            "the size of a block does not fit the layout",
            where=where,
            expected=f"{blocks} positive numbers for {d.layout}",
            found=str(facts.blocksize),
        )


def view_mismatch(d: MetaTensorDesc, found: Any, expected: Any) -> ConvertError:
    """The error for view operators whose result differs from the recorded view."""
    return ConvertError(
        "the view operators give a tensor of other sizes, strides or offset",
        where=where_of(d),
        expected=str(tuple(expected)),
        found=str(tuple(found)),
    )


def sparse_layout(d: MetaTensorDesc) -> SparseLayout:
    """The sparse layout of a record."""
    facts = d.sparse
    assert facts is not None
    index_dtype = facts.index_dtype
    return SparseLayout(
        facts.sparse_dim,
        facts.dense_dim,
        facts.is_coalesced,
        None if index_dtype is None else dtype_of(index_dtype, where_of(d)),
        facts.blocksize,
    )


_OWN = "Convert the records of each describer with a converter of its own"


def check_describer(earlier: MetaTensorDesc | None, d: MetaTensorDesc) -> None:
    """Raises if a record is, or may be, of another describer than one before."""
    if earlier is not None and have_two_describers(earlier, d):
        raise _error(two_describers_clash(earlier, d), where_of(d))


def check_same(earlier: MetaTensorDesc, d: MetaTensorDesc) -> None:
    """Raises if two records with one id cannot be of the same tensor at one time."""
    if earlier is not d and (clash := find_clash(earlier, d)) is not None:
        raise _error(clash, where_of(d))


def check_same_storage(earlier: MetaTensorDesc, d: MetaTensorDesc) -> None:
    """Raises if two tensors whose storages have one id cannot be on the same storage."""
    if earlier.storage is None or d.storage is None:
        return
    where = f"{where_of(d)}, storage {d.storage.id}"
    if earlier.device != d.device:
        what = "tensors on two devices have the same storage"
        raise _error(Clash(what, f"{earlier.device}, as {where_of(earlier)}", d.device), where)
    clash = find_storage_clash(earlier.storage, d.storage)
    if clash is not None:
        raise _error(clash._replace(first=f"{clash.first}, as {where_of(earlier)}"), where)


def _error(clash: Clash, where: str) -> ConvertError:
    return ConvertError(
        clash.what, where=where, expected=clash.first, found=clash.found, fix=_OWN + clash.fix
    )
