"""The names of symbols in the expressions of records: which there are, and others in their place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from .rewrite import Rewriter, walk
from .tensor import (
    ExprDesc,
    FloatNode,
    IntNode,
    RationalNode,
    SymbolFactDesc,
    SymbolNode,
    SymDesc,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .shape_env import SymbolDesc

_T = TypeVar("_T")


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


def with_symbols(expr: ExprDesc, change: Callable[[SymbolNode], SymbolNode]) -> ExprDesc:
    """Return an expression with other symbols, itself if none is another one."""
    nodes = tuple([change(n) if isinstance(n, SymbolNode) else n for n in expr.nodes])
    return expr if nodes == expr.nodes else ExprDesc(nodes=nodes)


def rename_symbols(record: _T, names: Mapping[SymbolNode, SymbolNode]) -> _T:
    """Return a record with symbols replaced simultaneously.

    Shared parts stay shared, and a part without any of the symbols is the same object.

    Args:
        record: any record, or a tuple of records.
        names: new symbols by old ones; other symbols do not change.
    """
    changed = {old: new for old, new in names.items() if old != new}
    if not changed:
        return record
    by_name = {old.name: new.name for old, new in changed.items()}

    def renamed(part: Any) -> Any:
        match part:
            case ExprDesc():
                return with_symbols(part, lambda symbol: changed.get(symbol, symbol))
            case SymbolFactDesc():
                name = by_name.get(part.name, part.name)
                return part if name == part.name else msgspec.structs.replace(part, name=name)
            case _:
                return part

    return Rewriter(renamed)(record)
