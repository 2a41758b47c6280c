"""Numbers that torch wrote as text, read back token by token: text is never evaluated.

A ``SymInt`` prints as a symbol, as a formula over symbols, or as a multiple of a nested int. Of the
formulas those are read that sums, products and powers make of symbols and numbers; all others, such
as a ``//`` or a function, are not.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch_fakeify.records.tensor import NestedIntDesc, SymDesc

if TYPE_CHECKING:
    from torch_fakeify.records.tensor import IntLike

_DIGITS = r"(?:0|[1-9][0-9]{0,18})"
_NESTED = re.compile(rf"(?:({_DIGITS})\*)?j({_DIGITS})")
_TOKEN = re.compile(r" *([su][0-9]{1,9}|[0-9]{1,19}|\*\*|[-+*()]) *", re.ASCII)
_MAX_FORMULA = 1000
_MAX_NESTING = 20


def number_of_text(text: str) -> IntLike | None:
    """The nested int or the formula over symbols that torch wrote as this text, or ``None``.

    The symbols have no hint and of their assumptions only that they are integers.
    """
    nested = _NESTED.fullmatch(text)
    if nested:
        return NestedIntDesc(int(nested[2]), int(nested[1] or 1))
    tokens: list[str] = []
    at = 0
    while at < len(text) <= _MAX_FORMULA and (match := _TOKEN.match(text, at)):
        tokens.append(match[1])
        at = match.end()
    if at < len(text) or not any(token[0] in "su" for token in tokens):
        return None
    formula = _Formula(tokens)
    try:
        expr = formula.sum(0)
    except _NotAFormulaError:
        return None
    if formula.at < len(tokens) or not expr.free_symbols:
        return None
    from torch_fakeify.encoding.exprs import encode_expr

    return SymDesc(expr=encode_expr(expr))


def _sympy() -> Any:
    import sympy  # only a log with symbols needs it

    return sympy


class _NotAFormulaError(Exception):
    """Raised when the tokens do not match the grammar."""


class _Formula:
    """Parser of a formula: a sum of products of symbols, numbers, powers and sums."""

    def __init__(self, tokens: list[str]) -> None:
        self.at = 0
        self._tokens = tokens

    def _take(self, *expected: str) -> str | None:
        if self.at < len(self._tokens) and self._tokens[self.at] in expected:
            self.at += 1
            return self._tokens[self.at - 1]
        return None

    def sum(self, depth: int) -> Any:
        """Parse products with signs between them."""
        negative = self._take("-") is not None
        total: Any = None
        while True:
            product = self._product(depth)
            product = -product if negative else product
            total = product if total is None else total + product
            sign = self._take("+", "-")
            if sign is None:
                return total
            negative = sign == "-"

    def _product(self, depth: int) -> Any:
        factors = [self._power(depth)]
        while self._take("*"):
            factors.append(self._power(depth))
        return _sympy().Mul(*factors)

    def _power(self, depth: int) -> Any:
        base = self._atom(depth)
        if self._take("**") is None:
            return base
        exponent = self._next()
        if base.is_number or not (exponent.isdigit() and 2 <= int(exponent) < 100):
            raise _NotAFormulaError
        return base ** int(exponent)

    def _atom(self, depth: int) -> Any:
        token = self._next()
        if token.isdigit():
            return _sympy().Integer(int(token))
        if token[0] in "su":
            return _sympy().Symbol(token, integer=True)
        if token != "(" or depth >= _MAX_NESTING:
            raise _NotAFormulaError
        inner = self.sum(depth + 1)
        if self._take(")") is None:
            raise _NotAFormulaError
        return inner

    def _next(self) -> str:
        if self.at == len(self._tokens):
            raise _NotAFormulaError
        self.at += 1
        return self._tokens[self.at - 1]
