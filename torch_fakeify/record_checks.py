"""Which records can be those of a tensor; the rest is refused before a tensor is made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import _torch
from .errors import ConvertError
from .rebuild import Kind

if TYPE_CHECKING:
    from .desc import MetaTensorDesc, SparseDesc

__all__ = ["KINDS", "LAYOUTS", "check_numbers", "check_record", "check_same", "where_of"]

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
    """Raises for a record that no tensor can have given."""
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
    check_numbers(d)
    if d.is_view != (d.base is not None):
        raise ConvertError("a view and a base belong together", where=where_of(d))
    if not d.is_leaf and not d.requires_grad:
        raise ConvertError("a tensor that is no leaf requires grad", where=where_of(d))
    if d.subclass is not None:
        for name, _ in (*d.subclass.tensors, *d.subclass.opaques):
            _check_inner_name(name, where_of(d))
    if d.creation_meta is not None and d.creation_meta not in _torch.CreationMeta.__members__:
        raise ConvertError(
            "the creation meta of the view is not known",
            where=where_of(d),
            expected=", ".join(_torch.CreationMeta.__members__),
            found=d.creation_meta,
        )


def check_numbers(d: MetaTensorDesc) -> None:
    """Raises for sizes, strides, an offset or a storage that no tensor can have."""
    if len(d.size) != len(d.stride) and d.sparse is None:
        raise ConvertError(
            "sizes and strides differ in number",
            where=where_of(d),
            expected=f"{len(d.size)} strides",
            found=f"{len(d.stride)}",
        )
    nbytes = 0 if d.storage is None else d.storage.nbytes
    ints = [n for n in (*d.size, *d.stride, d.storage_offset, nbytes) if isinstance(n, int)]
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


def check_same(known: MetaTensorDesc, d: MetaTensorDesc) -> None:
    """Raises if two records with one id cannot be of the same tensor at one time."""
    if known is d or (known.dtype, known.device, known.size) == (d.dtype, d.device, d.size):
        return
    raise ConvertError(
        "two different records have the same id",
        where=where_of(d),
        expected=f"{known.dtype} of size {known.size} on {known.device}",
        found=f"{d.dtype} of size {d.size} on {d.device}",
        fix="Convert the records of each describer with a converter of its own",
    )
