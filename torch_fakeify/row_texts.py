"""The text of rows of tensors that are like an earlier one but for their ids and what they refer to.

The other half of what ``fast_reader.py`` does: the text of the first such row is cut where a row has
something of its own, and the rows after it are put together from these pieces.
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
_APART = {"id", "symbolic_context", "marks", *[name for name, _ in _REFERENCES], *_BY_ID, *_RARE}
_of_rare, _rare = operator.attrgetter(*_RARE), tuple(_RARE.values())
_of_rest = operator.attrgetter(*[f for f in MetaTensorDesc.__struct_fields__ if f not in _APART])
_of_context_rare = operator.attrgetter(*_RARE_OF_CONTEXT)
_context_rare = tuple(_RARE_OF_CONTEXT.values())
_of_context = operator.attrgetter(
    *[f for f in ContextDesc.__struct_fields__ if f not in (*_RARE_OF_CONTEXT, "tensor_source")]
)
_MARKERS = (81604378617, 81604378623, 81604378629, 81604378631, 81604378643)
"""Numbers that stand for what a row has of its own, while its text is cut."""
_MAX_FOUND_ONCE = 256
"""Layouts of one tensor each, after which no more are looked for if most were such."""


class Template(NamedTuple):
    """What rows have in common: the text before, between and after what each has of its own."""

    pieces: tuple[bytes, ...]
    references: tuple[Callable[[MetaTensorDesc], Any], ...]
    """What gets each of the objects that a row refers to, in the order of their positions."""
    tables: tuple[int, ...]
    has_exprs: bool


class RowTexts:
    """Remembers the text of rows of tensors by what they have in common."""

    def __init__(self) -> None:
        self._templates: dict[_Key, Template] = {}
        self._alive: list[MetaTensorDesc] = []
        """Whose parts' ids are in the keys."""
        self._used = 0

    def key(self, d: MetaTensorDesc) -> _Key | None:
        """Equal for records whose rows differ in ids and references alone; ``None`` if not known."""
        if _of_rare(d) != _rare:
            return None
        marks, context, offset = d.marks, d.symbolic_context, d.storage_offset
        if (marks is not None and marks.specialize_on) or type(d.id) is not int:
            return None
        policy = None
        if context is not None:
            if _of_context_rare(context) != _context_rare:
                return None
            policy = (context.tensor_source is None, *_of_context(context))
        return (
            d.storage is None,
            d.base is None,
            d.source is None,
            id(d.size),
            id(d.stride),
            offset if type(offset) is int else (id(offset),),
            id(d.symbols),
            marks,
            policy,
            _of_rest(d),
        )

    def find(self, key: _Key) -> Template | None:
        """What is known of such rows."""
        template = self._templates.get(key)
        if template is not None:
            self._used += 1
        return template

    def learn(self, key: _Key, d: MetaTensorDesc, wire: Any) -> None:
        """Remember the row of a record.

        Args:
            key: of the record.
            d: the record.
            wire: its row as an object, with positions where it refers to others.
        """
        if len(self._templates) >= _MAX_FOUND_ONCE and self._used < len(self._templates):
            return
        markers = iter(_MARKERS)
        changes: dict[str, Any] = {"id": next(markers)}
        used: list[int] = [changes["id"]]
        getters: list[Callable[[MetaTensorDesc], Any]] = []
        tables: list[int] = []
        for name, table in _REFERENCES:
            if getattr(d, name) is not None:
                changes[name] = next(markers)
                used.append(changes[name])
                getters.append(operator.attrgetter(name))
                tables.append(table)
        context = d.symbolic_context
        if context is not None and context.tensor_source is not None:
            mark = next(markers)
            changes["symbolic_context"] = msgspec.structs.replace(
                wire.symbolic_context, tensor_source=mark
            )
            used.append(mark)
            getters.append(operator.attrgetter("symbolic_context.tensor_source"))
            tables.append(_SOURCES)
        rest = msgspec.json.encode(msgspec.structs.replace(wire, **changes))
        pieces: list[bytes] = []
        for mark in used:
            before, found, rest = rest.partition(b"%d" % mark)
            if not found:
                return
            pieces.append(before)
        if any(b"%d" % mark in piece for mark in used for piece in (*pieces, rest)):
            return
        self._alive.append(d)
        self._templates[key] = Template(
            (*pieces, rest), tuple(getters), tuple(tables), b'"expr":' in rest + b"".join(pieces)
        )
