"""Rename the symbols of records, to those of another ``ShapeEnv``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from .rewrite import Rewriter
from .tensor import ExprDesc, SymbolFactDesc, SymbolNode

if TYPE_CHECKING:
    from collections.abc import Mapping

_T = TypeVar("_T")


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
                nodes = tuple(
                    changed.get(n, n) if isinstance(n, SymbolNode) else n for n in part.nodes
                )
                return part if nodes == part.nodes else ExprDesc(nodes=nodes)
            case SymbolFactDesc():
                name = by_name.get(part.name, part.name)
                return part if name == part.name else msgspec.structs.replace(part, name=name)
            case _:
                return part

    return Rewriter(renamed)(record)
