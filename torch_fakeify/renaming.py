"""Records over other symbols: the same sizes, graphs and facts under the names of another ``ShapeEnv``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from .desc import ExprDesc, SourceDesc, StackDesc, SymbolFactDesc, SymbolNode

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["rename_symbols"]

_T = TypeVar("_T")

_WITHOUT_SYMBOLS = (SourceDesc, StackDesc, str, int, float, bytes, type(None))


def rename_symbols(record: _T, names: Mapping[SymbolNode, SymbolNode]) -> _T:
    """The same record with symbols in the place of others, all at once.

    What is one object in the record is one object in the result, and a part that names none of the
    symbols stays the object that it is.

    Args:
        record: any record, or a tuple of records.
        names: new symbols by old ones; a symbol that is not there keeps its name.
    """
    changed = {old: new for old, new in names.items() if old != new}
    return _Renamer(changed).part(record) if changed else record


class _Renamer:
    def __init__(self, names: Mapping[SymbolNode, SymbolNode]) -> None:
        self._names = names
        self._by_name = {old.name: new.name for old, new in names.items()}
        # By the id of a part, which the entry keeps alive.
        self._done: dict[int, tuple[Any, Any]] = {}

    def part(self, part: Any) -> Any:
        if isinstance(part, _WITHOUT_SYMBOLS):
            return part
        known = self._done.get(id(part))
        if known is None:
            known = self._done[id(part)] = (part, self._renamed(part))
        return known[1]

    def _renamed(self, part: Any) -> Any:
        match part:
            case ExprDesc():
                nodes = tuple(
                    self._names.get(n, n) if isinstance(n, SymbolNode) else n for n in part.nodes
                )
                return part if nodes == part.nodes else ExprDesc(nodes=nodes)
            case SymbolFactDesc():
                name = self._by_name.get(part.name, part.name)
                return part if name == part.name else msgspec.structs.replace(part, name=name)
            case tuple():
                items = [self.part(item) for item in part]
                if all(new is old for new, old in zip(items, part, strict=True)):
                    return part
                kind: Any = type(part)  # a named one is made of its fields
                return tuple(items) if kind is tuple else kind(*items)
            case msgspec.Struct():
                return self._struct(part)
            case _:
                return part

    def _struct(self, part: msgspec.Struct) -> msgspec.Struct:
        changes: dict[str, Any] = {}
        for field in part.__struct_fields__:
            old = getattr(part, field)
            new = self.part(old)
            if new is not old:
                changes[field] = new
        return msgspec.structs.replace(part, **changes) if changes else part
