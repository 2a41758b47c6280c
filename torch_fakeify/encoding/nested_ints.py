"""Nested ints, the sizes of ragged dims, <-> numbers of records.

Torch numbers the offsets of jagged tensors consecutively in a process. A describer numbers nested ints
itself, so that records do not depend on earlier work of the process; a converter makes a new nested
int for each recorded number, so that it differs from those of other tensors in the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torch_fakeify.compat.torch_symbols import (
    SymNode,
    make_nested_int,
    new_nested_int,
    reserve_nested_int,
)
from torch_fakeify.errors import FormatError
from torch_fakeify.records.tensor import NestedIntDesc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch_fakeify.compat.torch_fakes import FakeTensorMode

MAX_NESTED_INT = 1 << 48
"""Bound of the numbers of nested ints; torch increments them without a check."""


def is_nested_int(n: object) -> bool:
    """Whether an object is a nested int (times a coefficient), and not a symbol with one as hint."""
    # `is_nested_int` of such a symbol is true.
    return (
        isinstance(n, torch.SymInt) and not isinstance(n.node, SymNode) and n.node.is_nested_int()
    )


class NestedIntNumbers:
    """Numbers nested ints in the order of first use.

    Args:
        count: the numbers.
        keep: whether to use torch's numbers instead, to match a snapshot of a ``ShapeEnv``.
    """

    def __init__(self, count: Iterator[int], *, keep: bool = False) -> None:
        self._numbers: dict[int, int] = {}
        self._count = count
        self._keep = keep

    def encode(self, n: torch.SymInt) -> NestedIntDesc:
        """The record of a nested int."""
        sym_node: Any = n.node
        number = int(sym_node.nested_int())
        if not self._keep:
            cached = self._numbers.get(number)
            # Of two threads that see it first, the second gets the number of the first.
            number = (
                self._numbers.setdefault(number, next(self._count)) if cached is None else cached
            )
        return NestedIntDesc(number, int(sym_node.nested_int_coeff()))


class NestedInts:
    """Makes the nested ints of records, a new one for each number.

    Args:
        mode: the fake mode of the tensors.
        keep: whether to use the recorded numbers, to match a restored ``ShapeEnv``.
    """

    def __init__(self, mode: FakeTensorMode, *, keep: bool = False) -> None:
        self._mode = mode
        self._keep = keep
        self._ids: dict[int, int] = {}

    def id_of(self, number: int) -> int:
        """Torch's number for a recorded number."""
        cached = self._ids.get(number)
        if cached is None:
            if self._keep:
                if not 0 <= number < MAX_NESTED_INT:
                    raise FormatError(
                        "a nested int that torch does not give",
                        expected=f"a number below {MAX_NESTED_INT}",
                        found=str(number),
                    )
                reserve_nested_int(number)
                cached = number
            else:
                cached = new_nested_int(self._mode)
            self._ids[number] = cached
        return cached

    def make(self, n: NestedIntDesc) -> torch.SymInt:
        """The nested int of a record."""
        return make_nested_int(self.id_of(n.id), n.coeff)

    def symbol(self, number: int) -> torch.SymInt:
        """The value of ``nested_int_memo``: a symbol, or the nested int without a ``ShapeEnv``."""
        if self._mode.shape_env is None:
            return make_nested_int(self.id_of(number), 1)
        env: Any = self._mode.shape_env
        existing = env.val_to_var.get(self.make(NestedIntDesc(number))) if self._keep else None
        if existing is not None:
            return env.create_symintnode(existing, hint=self.make(NestedIntDesc(number)))
        symbol: Any = self._mode.create_symbolic_nested_int(nt_tensor_id=self.id_of(number))
        return symbol
