"""Conditions over symbols as Python code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sympy.printing.str import StrPrinter

from torch_fakeify.compat.torch_symbols import PythonPrinter

if TYPE_CHECKING:
    from collections.abc import Callable

    import sympy


class _Printer(PythonPrinter):
    """Torch's printer of Python code, with names for symbols."""

    def __init__(self, name: Callable[[sympy.Symbol], str]) -> None:
        super().__init__()
        self._name = name

    def _print_Symbol(self, expr: sympy.Symbol) -> str:  # noqa: N802
        return self._name(expr)

    def _print_Add(self, expr: Any, order: Any = None) -> str:  # noqa: N802
        return StrPrinter._print_Add(self, expr, order)  # with minus signs, numbers last

    def _print_Relational(self, expr: Any) -> str:  # noqa: N802
        return f"{self._print(expr.lhs)} {expr.rel_op} {self._print(expr.rhs)}"

    def _print_Equality(self, expr: Any) -> str:  # noqa: N802
        return self._print_Relational(expr)


def condition_text(expr: Any, name: Callable[[sympy.Symbol], str] = str) -> str:
    """Return a condition as Python code.

    Args:
        expr: a sympy condition.
        name: gives the text of a symbol.
    """
    return _Printer(name).doprint(expr)
