"""Records over other symbols: the same sizes, graphs and facts under the names of another ``ShapeEnv``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from .desc import ExprDesc, SymbolFactDesc, SymbolNode
from .rewriting import Rewriter

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["rename_symbols"]

_T = TypeVar("_T")


def rename_symbols(record: _T, names: Mapping[SymbolNode, SymbolNode]) -> _T:
    """The same record with symbols in the place of others, all at once.

    What is one object in the record is one object in the result, and a part that names none of the
    symbols stays the object that it is.

    Args:
        record: any record, or a tuple of records.
        names: new symbols by old ones; a symbol that is not there keeps its name.
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
