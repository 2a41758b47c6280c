"""Nested ints, the sizes of ragged dims, under the numbers of records.

A nested int is a number that torch gives to the offsets of jagged tensors, one after the other as
they turn up in a process. A record has a number of the describer's own, so that records do not
depend on what the process did before; a converter takes a new nested int of the process that it
runs in for each number, so that no tensor of that process is taken for one of the same raggedness.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from ._torch import SymNode, make_nested_int, new_nested_int, reserve_nested_int
from .desc import NestedIntDesc
from .errors import FormatError

if TYPE_CHECKING:
    from ._torch import FakeTensorMode

__all__ = ["MAX_NESTED_INT", "NestedIntNumbers", "NestedInts", "is_nested_int"]

MAX_NESTED_INT = 1 << 48
"""Numbers of nested ints are below this; torch counts on from them without a check."""


def is_nested_int(n: object) -> bool:
    """Whether it is a nested int (times a coefficient) itself, and no symbol that stands for one."""
    # A symbol that stands for one says that it is one, too.
    return (
        isinstance(n, torch.SymInt) and not isinstance(n.node, SymNode) and n.node.is_nested_int()
    )


class NestedIntNumbers:
    """Gives nested ints numbers in the order in which they are seen.

    Args:
        keep: leaves them torch's own numbers, by which a snapshot of a ``ShapeEnv`` knows them.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self._numbers: dict[int, int] = {}
        self._count = itertools.count()
        self._keep = keep

    def encode(self, n: torch.SymInt) -> NestedIntDesc:
        """The record of a nested int."""
        sym_node: Any = n.node
        number = int(sym_node.nested_int())
        if not self._keep:
            known = self._numbers.get(number)
            # Of two threads that see it first, one is told what the other one put down.
            number = self._numbers.setdefault(number, next(self._count)) if known is None else known
        return NestedIntDesc(number, int(sym_node.nested_int_coeff()))


class NestedInts:
    """Makes the nested ints of records, a new one for each number.

    Args:
        mode: whose tensors have them.
        keep: takes the numbers of records as they are, by which a restored ``ShapeEnv`` has them.
    """

    def __init__(self, mode: FakeTensorMode, *, keep: bool = False) -> None:
        self._mode = mode
        self._keep = keep
        self._ids: dict[int, int] = {}

    def id_of(self, number: int) -> int:
        """Torch's number for the number of a record."""
        known = self._ids.get(number)
        if known is None:
            if self._keep:
                if not 0 <= number < MAX_NESTED_INT:
                    raise FormatError(
                        "a nested int that torch does not give",
                        expected=f"a number below {MAX_NESTED_INT}",
                        found=str(number),
                    )
                reserve_nested_int(number)
                known = number
            else:
                known = new_nested_int(self._mode)
            self._ids[number] = known
        return known

    def make(self, n: NestedIntDesc) -> torch.SymInt:
        """The nested int of a record."""
        return make_nested_int(self.id_of(n.id), n.coeff)

    def symbol(self, number: int) -> torch.SymInt:
        """What the memo of offsets holds: a symbol for the nested int, or without a ``ShapeEnv`` itself."""
        if self._mode.shape_env is None:
            return make_nested_int(self.id_of(number), 1)
        env: Any = self._mode.shape_env
        known = env.val_to_var.get(self.make(NestedIntDesc(number))) if self._keep else None
        if known is not None:
            return env.create_symintnode(known, hint=self.make(NestedIntDesc(number)))
        symbol: Any = self._mode.create_symbolic_nested_int(nt_tensor_id=self.id_of(number))
        return symbol
