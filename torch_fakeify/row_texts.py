"""The text of rows of tensors that are like an earlier one but for their ids and what they refer to.

The other half of what ``fast_reader.py`` does: of the first such row a text is made, into which the
rows after it put what each has of its own.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from .desc import ContextDesc, MetaTensorDesc
from .wire import TABLES

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RowTexts", "Template"]

_Key = tuple[Any, ...]

_SOURCES = TABLES.index("sources")
_REFERENCES = (
    ("storage", TABLES.index("storages")),
    ("base", TABLES.index("tensors")),
    ("source", _SOURCES),
)
"""Fields that refer to rows, in the order in which they are written, and their tables."""
_BY_ID = ("size", "stride", "storage_offset", "symbols")
"""Fields that tensors of one layout share."""
_RARE: dict[str, object] = {
    "view_calls": None,
    "sparse": None,
    "subclass": None,
    "functorch": None,
    "functional": None,
    "nested_int": None,
    "grad": None,
    "scalar_hint": None,
    "item_memo": None,
}
"""Fields with which a row is written in the plain way, and what they are without."""
_RARE_OF_CONTEXT: dict[str, object] = {
    "constraint_sizes": (),
    "constraint_strides": (),
    "constraint": None,
    "specialize_on": (),
    "view_base_context": None,
    "inner_contexts": (),
}
"""The same of a symbolic context."""
_APART = {"id", "symbolic_context", *[name for name, _ in _REFERENCES], *_BY_ID}
_of_rare, _rare = operator.attrgetter(*_RARE), tuple(_RARE.values())
_of_tensor = operator.attrgetter(*[f for f in MetaTensorDesc.__struct_fields__ if f not in _APART])
_of_context_rare = operator.attrgetter(*_RARE_OF_CONTEXT)
_context_rare = tuple(_RARE_OF_CONTEXT.values())
_of_context = operator.attrgetter(
    *[f for f in ContextDesc.__struct_fields__ if f != "tensor_source"]
)
_MARKERS = (81604378617, 81604378623, 81604378629, 81604378631, 81604378643)
"""Numbers that stand for what a row has of its own, until its text is known."""
_MAX_FOUND_ONCE = 256
"""Layouts of one tensor each, after which no more are looked for if most were such."""


class Template(NamedTuple):
    """What rows have in common."""

    text: bytes
    """With ``%d`` for the id, and for each reference in turn."""
    references: tuple[tuple[int, Callable[[MetaTensorDesc], Any]], ...]
    """The table of each, and what gets the object."""
    has_exprs: bool

    def positions(
        self, d: MetaTensorDesc, seen: tuple[dict[int, int], ...]
    ) -> list[tuple[int, int]] | None:
        """The tables and positions of what a record refers to; ``None`` if not all are there.

        Args:
            d: the record.
            seen: of each table the positions by the ids of objects.
        """
        found: list[tuple[int, int]] = []
        for table, get in self.references:
            position = seen[table].get(id(get(d)))
            if position is None:
                return None
            found.append((table, position))
        return found


class RowTexts:
    """Remembers the text of rows of tensors by what they have in common."""

    def __init__(self) -> None:
        self._templates: dict[_Key, Template] = {}
        self._alive: list[MetaTensorDesc] = []
        """Whose parts' ids are in the keys."""
        self._used = 0

    def key(self, d: MetaTensorDesc) -> _Key:
        """Equal for records whose rows differ in ids and references alone."""
        offset, context = d.storage_offset, d.symbolic_context
        return (
            d.storage is None,
            d.base is None,
            d.source is None,
            id(d.size),
            id(d.stride),
            offset if type(offset) is int else (id(offset),),
            id(d.symbols),
            _of_tensor(d),
            None if context is None else (context.tensor_source is None, _of_context(context)),
        )

    def find(self, key: _Key) -> Template | None:
        """What is known of such rows."""
        template = self._templates.get(key)
        if template is not None:
            self._used += 1
        return template

    def wants(self, d: MetaTensorDesc) -> bool:
        """Whether the row of a record is worth remembering."""
        if len(self._templates) >= _MAX_FOUND_ONCE and self._used < len(self._templates):
            return False
        marks, context = d.marks, d.symbolic_context
        if _of_rare(d) != _rare or (marks is not None and marks.specialize_on):
            return False
        return context is None or _of_context_rare(context) == _context_rare

    def learn(self, key: _Key, d: MetaTensorDesc, wire: Any) -> None:
        """Remember the row of a record that it `wants`.

        Args:
            key: of the record.
            d: the record.
            wire: its row as an object, with positions where it refers to others.
        """
        context = d.symbolic_context
        markers = iter(_MARKERS)
        changes: dict[str, Any] = {"id": next(markers)}
        references: list[tuple[int, Callable[[MetaTensorDesc], Any]]] = []
        for name, table in _REFERENCES:
            if getattr(d, name) is not None:
                changes[name] = next(markers)
                references.append((table, operator.attrgetter(name)))
        if context is not None and context.tensor_source is not None:
            changes["symbolic_context"] = msgspec.structs.replace(
                wire.symbolic_context, tensor_source=next(markers)
            )
            references.append((_SOURCES, operator.attrgetter("symbolic_context.tensor_source")))
        text = msgspec.json.encode(msgspec.structs.replace(wire, **changes)).replace(b"%", b"%%")
        for mark in _MARKERS[: len(references) + 1]:
            if text.count(b"%d" % mark) != 1:
                return
            text = text.replace(b"%d" % mark, b"%d")
        self._alive.append(d)
        self._templates[key] = Template(text, tuple(references), b'"expr":' in text)
