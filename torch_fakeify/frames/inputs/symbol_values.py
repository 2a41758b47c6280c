"""Values of the symbols of a frame, and of expressions over them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import sympy

from torch_fakeify.encoding.exprs import decode_expr
from torch_fakeify.errors import CaptureError
from torch_fakeify.records.tensor import ExprDesc, IntLike, NestedIntDesc, SymDesc
from torch_fakeify.render.text import expr_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_fakeify.records.shape_env import ShapeEnvDesc, SymbolDesc


class Symbols:
    """Values for the symbols of a frame.

    Args:
        env: the frame's shape environment, if it has one.
        sizes: chosen values by symbol name; other symbols have their hints.
    """

    def __init__(self, env: ShapeEnvDesc | None, sizes: Mapping[str, int]) -> None:
        self.chosen = bool(sizes)
        self.values: dict[str, Any] = {}
        self.by_source: dict[str, str] = {}
        self._decode = functools.cache(decode_expr)
        for symbol in () if env is None else env.symbols:
            for source in symbol.sources:
                self.by_source[source.name] = symbol.name
            chosen = sizes.get(symbol.name)
            if chosen is not None:
                self.values[symbol.name] = sympy.Integer(chosen)
            elif symbol.hint is not None:
                self.values[symbol.name] = self._decode(symbol.hint)
            else:
                self.values[symbol.name] = sympy.Integer(default_of(symbol))

    def evaluate(self, expr: ExprDesc) -> Any:
        """Replace each symbol in an expression by its value."""
        return substituted(self._decode(expr), self.values)

    def integer(self, value: IntLike, where: str) -> int:
        """Evaluate a size, stride, offset or number of bytes."""
        if isinstance(value, int):
            return value
        if isinstance(value, NestedIntDesc):
            raise CaptureError("a ragged size is no number", where=where, found=str(value))
        return int(self.scalar(value, where))

    def scalar(self, sym: SymDesc, where: str) -> Any:
        """Evaluate a symbolic scalar to a Python number."""
        if not self.chosen and sym.hint is not None:
            return sym.hint
        result = self.evaluate(sym.expr)
        if result.free_symbols:
            raise CaptureError(
                "a size has a symbol without a value",
                where=where,
                found=expr_text(sym.expr),
                fix="Pass it in sizes=",
            )
        if sym.kind == "int":
            return int(result)
        return float(result) if sym.kind == "float" else bool(result)


def default_of(symbol: SymbolDesc) -> int:
    """A value for a symbol without a hint."""
    if symbol.hint_override is not None:
        return symbol.hint_override
    value, upper = max(2, integer_of(symbol.lower, 2)), integer_of(symbol.upper, None)
    return value if upper is None else min(value, upper)


def integer_of(expr: ExprDesc | None, default: Any) -> Any:
    """The integer that an expression is; ``default`` for another expression or none."""
    value: Any = None if expr is None else decode_expr(expr)
    return int(value) if value is not None and value.is_Integer else default


def substituted(expr: Any, values: Mapping[str, Any]) -> Any:
    """Replace the symbols of an expression by numbers or expressions, by name."""
    names = {s: s.name for s in expr.free_symbols}
    return expr.xreplace(
        {s: sympy.sympify(values[n], strict=True) for s, n in names.items() if n in values}
    )
