"""Numbers that torch wrote as text, read back from their syntax tree: text is never evaluated.

A ``SymInt`` prints as a symbol, as a formula over symbols, or as a multiple of a nested int. Of the
formulas those are read that sums, products and powers make of symbols and numbers; all others, such
as a ``//`` or a function, are not.
"""

from __future__ import annotations

import ast
import re
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from torch_fakeify.records.tensor import NestedIntDesc, SymDesc

if TYPE_CHECKING:
    from torch_fakeify.records.tensor import IntLike

_DIGITS = r"(?:0|[1-9][0-9]{0,18})"
_NESTED = re.compile(rf"(?:({_DIGITS})\*)?j({_DIGITS})")
_FORMULA = re.compile(r"[su0-9*+() -]{1,1000}")
_SYMBOL = re.compile(r"[su][0-9]{1,9}")
_TWO_SIGNS = re.compile(r"[-+*] *[-+]")
_MAX_NESTING = 20
_MAX_DIGITS = 1000
"""The most digits that a number in a power may have, about; each takes part in the product."""


def number_of_text(text: str) -> IntLike | None:
    """The nested int or the formula over symbols that torch wrote as this text, or ``None``.

    The symbols have no hint and of their assumptions only that they are integers.
    """
    nested = _NESTED.fullmatch(text)
    if nested:
        return NestedIntDesc(int(nested[2]), int(nested[1] or 1))
    depths = accumulate({"(": 1, ")": -1}.get(each, 0) for each in text)
    if not _FORMULA.fullmatch(text) or _TWO_SIGNS.search(text) or max(depths) > _MAX_NESTING:
        return None
    try:
        expr = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError, _NotAFormulaError):
        return None
    if not expr.free_symbols:
        return None
    from torch_fakeify.encoding.exprs import encode_expr

    return SymDesc(expr=encode_expr(expr))


class _NotAFormulaError(Exception):
    """Raised for another syntax than that of sums, products and powers."""


def _value(part: ast.expr) -> Any:
    import sympy  # only a log with symbols needs it

    parts: list[Any] = []
    match part:
        case ast.Name(id=name) if _SYMBOL.fullmatch(name):
            return sympy.Symbol(name, integer=True)
        case ast.Constant(value=int() as number) if number < 10**19:
            return sympy.Integer(number)
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            while isinstance(part, ast.BinOp) and isinstance(part.op, (ast.Add, ast.Sub)):
                term = _value(part.right)
                parts.append(-term if isinstance(part.op, ast.Sub) else term)
                part = part.left
            return sympy.Add(_value(part), *parts)
        case ast.BinOp(op=ast.Mult()):
            while isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult):
                parts.append(_value(part.right))
                part = part.left
            if isinstance(part, ast.UnaryOp) and isinstance(
                part.op, ast.USub
            ):  # the sign of the whole product
                parts.append(-1)
                part = part.operand
            return sympy.Mul(_value(part), *parts)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int() as exponent)):
            base = _value(left)
            digits = max(len(str(n)) for n in (1, *base.atoms(sympy.Integer)))
            if not base.is_number and 2 <= exponent < 100 and digits * exponent < _MAX_DIGITS:
                return base**exponent
        case _:
            pass
    raise _NotAFormulaError
