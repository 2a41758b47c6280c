"""Conditions of ``specialize_on`` <-> expressions."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import sympy
import torch
from sympy.logic.boolalg import Boolean

from torch_fakeify.compat.torch_symbols import (
    CapturedTraceback,
    ShapeEnv,
    SymNode,
    ValueRanges,
    int_oo,
)
from torch_fakeify.errors import FakeifyError, FormatError, ShapeEnvError

from .exprs import decode_expr, encode_expr

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_fakeify.records.tensor import ExprDesc

DIM = sympy.Symbol("dim", positive=True, integer=True)
"""Symbol for a size without one."""


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class RecordedCondition:
    """A condition on a size, callable like ``Specialization.check_fn``."""

    symbol: sympy.Symbol
    condition: sympy.Basic

    def __call__(self, size: int | torch.SymInt) -> bool | torch.SymBool:
        """Whether the condition holds for a size; a ``SymBool`` for a ``SymInt``."""
        if not isinstance(size, torch.SymInt):
            return bool(self.condition.xreplace({self.symbol: sympy.Integer(size)}))
        sym_node: Any = size.node
        condition = self.condition.xreplace({self.symbol: sym_node.expr})
        return sym_node.shape_env.create_symboolnode(condition)


def evaluate_condition(check_fn: Callable[[Any], Any], symbol: sympy.Symbol) -> sympy.Basic:
    """Evaluate a ``check_fn`` on a symbol.

    Raises:
        ShapeEnvError: the function branches on the size, or does not return a bool.
    """
    # As patch_source_specialization asks it, but in an environment of its own, which learns
    # nothing: a function that branches on the size finds no hint there and fails.
    scratch: Any = ShapeEnv(should_record_events=False)
    scratch.var_to_stack[symbol] = CapturedTraceback(None)
    scratch.var_to_range[symbol] = ValueRanges(-int_oo, int_oo)
    size = torch.SymInt(SymNode(symbol, scratch, int, None))
    where = f"check_fn of {symbol}"
    try:
        holds = check_fn(size)
    except Exception as error:
        raise ShapeEnvError(
            "a condition to specialize on cannot be written as an expression",
            where=where,
            expected="one comparison of the size, such as `lambda n: n % 8 == 0`",
            found=f"{type(error).__name__} when it was called with a symbolic size",
        ) from error
    if isinstance(holds, bool):
        return sympy.true if holds else sympy.false
    if not isinstance(holds, torch.SymBool):
        raise ShapeEnvError(
            "a condition to specialize on gives no bool",
            where=where,
            expected="bool or SymBool",
            found=type(holds).__name__,
        )
    sym_node: Any = holds.node
    return sym_node._expr


def encode_condition(
    check_fn: Callable[[Any], Any], *, where: str, error: type[FakeifyError]
) -> ExprDesc:
    """The expression of a condition, over the symbol `DIM`.

    Raises:
        error: the function branches on the size, or does not return a bool.
    """
    try:
        return encode_expr(evaluate_condition(check_fn, DIM))
    except ShapeEnvError as cause:
        raise error(cause.what, where=where, expected=cause.expected, found=cause.found) from cause


def decode_condition(d: ExprDesc, *, where: str) -> RecordedCondition:
    """The condition of an expression over the symbol `DIM`.

    Raises:
        FormatError: it is no predicate of that symbol.
    """
    condition = decode_expr(d)
    if not isinstance(condition, Boolean) or not condition.free_symbols <= {DIM}:
        raise FormatError(
            "a condition to specialize on is no predicate of the size",
            where=where,
            expected=f"a comparison of the symbol {DIM}",
            found=str(condition)[:200],
        )
    return RecordedCondition(DIM, condition)
