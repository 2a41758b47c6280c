"""The names of symbols in the expressions of records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .rewrite import walk
from .tensor import ExprDesc, FloatNode, IntNode, RationalNode, SymbolNode, SymDesc

if TYPE_CHECKING:
    from .shape_env import SymbolDesc


def names_in(record: Any) -> set[str]:
    """Return the names of the symbols in the expressions of a record."""
    found: set[str] = set()
    for expr in walk(record, ExprDesc):
        found.update(n.name for n in expr.nodes if isinstance(n, SymbolNode))
    return found


def lone_symbol(number: Any) -> str | None:
    """Return the name of a number that is a symbol; ``None`` for any other number."""
    if isinstance(number, SymDesc) and len(number.expr.nodes) == 1:
        expr_node = number.expr.nodes[0]
        if isinstance(expr_node, SymbolNode):
            return expr_node.name
    return None


def has_number(symbol: SymbolDesc) -> bool:
    """Return whether a symbol has a number as its hint, not a nested int."""
    return symbol.hint is not None and isinstance(symbol.hint.nodes[-1], _NUMBERS)


_NUMBERS = (IntNode, FloatNode, RationalNode)
