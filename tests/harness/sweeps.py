"""What the sweeps over torch's operator databases share: samples, tallies, tables of exceptions."""

from __future__ import annotations

import copy
import unittest
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.bool)
COMPLEX = (torch.complex64, torch.complex128)
LAYOUTS = {
    "coo": torch.sparse_coo,
    "csr": torch.sparse_csr,
    "csc": torch.sparse_csc,
    "bsr": torch.sparse_bsr,
    "bsc": torch.sparse_bsc,
}


def op_infos() -> list[Any]:
    """Every operator of ``op_db`` and ``custom_op_db``."""
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.custom_op_db import custom_op_db

    return [*op_db, *custom_op_db]


def dtypes_of(info: Any) -> list[torch.dtype]:
    """float32, one integer and one complex dtype, as far as the operator has them on CPU."""
    supported = info.supported_dtypes("cpu")
    found = [torch.float32] if torch.float32 in supported else []
    for family in (INTEGERS, COMPLEX):
        found += [dtype for dtype in family if dtype in supported][:1]
    return found


def samples_of(info: Any, dtype: torch.dtype) -> Iterator[Any]:
    """The operator's sample inputs: strided, with the conj bit, and of the sparse layouts it has."""
    grad = info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
    conj = dtype.is_complex and info.test_conjugated_samples
    make = info.conjugate_sample_inputs if conj else info.sample_inputs
    torch.manual_seed(0)
    yield from make("cpu", dtype, requires_grad=grad)
    if dtype is torch.float32:
        for name, layout in LAYOUTS.items():
            if getattr(info, f"supports_sparse_{name}".replace("_coo", "")):
                yield from sparse_samples(info, name, layout, requires_grad=grad)


def sparse_samples(
    info: Any, name: str, layout: torch.layout, *, requires_grad: bool
) -> Iterator[Any]:
    """Samples of a sparse layout; of operators without any, the dense ones made sparse."""
    make = getattr(info, f"sample_inputs_sparse_{name}_func")
    if make.__name__ != "_sample_inputs_unspecified":
        try:
            yield from info.sample_inputs_sparse(
                layout, "cpu", torch.float32, requires_grad=requires_grad
            )
        except unittest.SkipTest:
            return  # all its samples are of what it refuses
        return
    blocksize = (1, 1) if name.startswith("bs") else None
    for sample in info.sample_inputs("cpu", torch.float32):
        if sample.input.ndim >= 2:
            sparse = sample.input.to_sparse(layout=layout, blocksize=blocksize)
            sample.input = sparse.requires_grad_(requires_grad)
            yield sample


def call(info: Any, sample: Any) -> tuple[Callable[..., Any], Any]:
    """The operator as a function of a tree, and the sample's inputs as that tree."""
    return lambda tree: info.op(*tree[0], **tree[1]), ((sample.input, *sample.args), sample.kwargs)


def swap(tree: Any, old: list[torch.Tensor], new: list[torch.Tensor]) -> Any:
    """The tree with other tensors, its containers fresh: operators may write to lists."""
    known = {id(a): b for a, b in zip(old, new, strict=True)}
    return pytree.tree_map(
        lambda leaf: known[id(leaf)] if isinstance(leaf, torch.Tensor) else copy.copy(leaf), tree
    )


class Tally:
    """Counts of one shard of a sweep, and what differed.

    Args:
        left_out: the names that may differ, with the reason of each.
    """

    def __init__(self, left_out: dict[str, str]) -> None:
        self.left_out = left_out
        self.total = self.passed = self.samples = 0
        self.wrong: list[str] = []

    def add(self, name: str, samples: int, difference: str | None) -> None:
        """One operator with one dtype: the first difference that its samples showed, if any."""
        self.total += 1
        self.samples += samples
        if difference is None:
            self.passed += 1
            if name in self.left_out:
                self.wrong.append(f"{name}: passes, though left out ({self.left_out[name]})")
        elif name not in self.left_out:
            self.wrong.append(f"{name}: {difference}")

    def report(self, sweep: str, record_property: Callable[[str, object], None]) -> None:
        """Put the counts where the summary of the run finds them, and fail if anything differed."""
        record_property("sweep", [sweep, self.passed, self.total, self.samples])
        assert not self.wrong, "\n" + "\n".join(self.wrong)
