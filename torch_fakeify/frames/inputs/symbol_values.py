"""Values of the symbols of a frame, and of expressions over them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import sympy

from torch_fakeify.encoding.exprs import decode_expr
from torch_fakeify.errors import CaptureError
from torch_fakeify.records.tensor import ExprDesc, IntLike, NestedIntDesc, SymDesc
from torch_fakeify.render.text import expr_text

from .requirements import guard_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_fakeify.records.shape_env import GuardDesc, ShapeEnvDesc, SymbolDesc


class Symbols:
    """Values for the symbols of a frame.

    Args:
        env: the frame's shape environment, if it has one.
        sizes: chosen values by symbol name; other symbols have their hints.
    """

    def __init__(self, env: ShapeEnvDesc | None, sizes: Mapping[str, int]) -> None:
        self.env = env
        self.chosen = bool(sizes)
        self.values: dict[str, Any] = {}
        self.by_source: dict[str, str] = {}
        self._exprs: dict[ExprDesc, Any] = {}
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

    def _decode(self, expr: ExprDesc) -> Any:
        decoded = self._exprs.get(expr)
        if decoded is None:
            decoded = self._exprs[expr] = decode_expr(expr)
        return decoded

    def evaluate(self, expr: ExprDesc) -> Any:
        """Replace each symbol in an expression by its value."""
        decoded = self._decode(expr)
        return decoded.xreplace(
            {s: self.values[s.name] for s in decoded.free_symbols if s.name in self.values}
        )

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

    def check_guards(self) -> None:
        """Raise if a value violates a range or a guard."""
        assert self.env is not None
        for symbol in self.env.symbols:
            value = self.values[symbol.name]
            for bound, text, holds in (
                (symbol.lower, ">=", lambda b, v: v >= b),
                (symbol.upper, "<=", lambda b, v: v <= b),
            ):
                if bound is not None and holds(self._decode(bound), value) == sympy.false:
                    raise self._violation(f"{symbol.name} {text} {expr_text(bound)}", None)
        for guard in self.env.guards:
            if self.evaluate(guard.expr) == sympy.false:
                raise self._violation(expr_text(guard.expr), guard)

    def _violation(self, text: str, guard: GuardDesc | None) -> CaptureError:
        names = set(re.findall(r"\w+", text))
        values = ", ".join(f"{n}={v}" for n, v in sorted(self.values.items()) if n in names)
        return CaptureError(
            "the sizes violate what the frame was compiled for",
            where=guard_line(guard),
            expected=text,
            found=values,
            fix="Choose sizes that satisfy the guards; `torch-fakeify show FILE` lists them",
        )


def default_of(symbol: SymbolDesc) -> int:
    """A value for a symbol without a hint."""
    if symbol.hint_override is not None:
        return symbol.hint_override
    lower: Any = None if symbol.lower is None else decode_expr(symbol.lower)
    upper: Any = None if symbol.upper is None else decode_expr(symbol.upper)
    value = max(2, int(lower)) if lower is not None and lower.is_Integer else 2
    return min(value, int(upper)) if upper is not None and upper.is_Integer else value
