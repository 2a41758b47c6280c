"""The short way to read a document, beside the plain one of ``reader.py``.

Most rows of tensors and storages are like another one but for their ids and what they refer to: such
a row is a copy of the first one's record. Trees are read by msgspec, which makes the records
themselves and asks for what they refer to, without wire objects in between.

It reads what this package writes, as it is written: in any other text it gives up, and the plain way
says what is wrong, or reads it.
"""

from __future__ import annotations

import copy
import functools
import re
import types
import typing
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import msgspec

from .chains import MAX_CHAIN
from .closures import MAX_NESTING, Fault
from .desc import ContextDesc, MetaStorageDesc, MetaTensorDesc, Record, SourceDesc
from .errors import FakeifyError
from .fork_locks import fork_safe_lock
from .reader import Reader, RecordItem, decoder
from .strict_json import is_canonical
from .wire import (
    SHARED,
    STEPPED,
    TABLES,
    Swap,
    plan_of,
    record_type,
    swap_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FastReader", "GaveUp"]

_MAX_TEMPLATES = 4096
"""Of a table: what is left is read row by row, so that a text of other rows is not held twice."""

_ID = re.compile(rb'\{"id":(0|[1-9][0-9]{0,17})')
"""How a row of a tensor or a storage begins."""

_SOURCES = TABLES.index("sources")
_STORAGES = TABLES.index("storages")
_TENSORS = TABLES.index("tensors")

_PLAIN = frozenset({type(None), bool, int, str})
"""Types whose values are their own wire form."""

_STEPS = (
    ("storage", _STORAGES),
    ("base", _TENSORS),
    ("grad", _TENSORS),
    ("source", _SOURCES),
)
"""Fields of a tensor that refer to other rows by steps, in the order of its fields; the tables."""

_OTHER_STEPS = ("view_calls", "subclass", "functorch", "functional")
"""Fields below which there may be more of them."""


class GaveUp(Exception):  # noqa: N818 - never leaves the package
    """The text is not one for the short way."""


class _Template(NamedTuple):
    """A record that rows of one text have in common, without what each has of its own."""

    record: Any
    steps: tuple[tuple[str, int, int], ...]
    """Of each reference by a step: the field, the table, and the step."""
    context: ContextDesc | None
    """Its symbolic context, which may refer to a source, too."""
    context_step: int | None
    deepest: int
    """Rows on the longest path below the other references."""


class FastReader(Reader):
    """The tables of a document that was decoded with `row_types`, and trees over them.

    Raises:
        GaveUp: the text is not one for the short way.
    """

    def __init__(self, document: Any, size: int, where: str) -> None:
        try:
            super().__init__(document, size, where)
        except (Fault, FakeifyError, msgspec.MsgspecError, RecursionError) as error:
            raise GaveUp from error

    @staticmethod
    def row_types() -> dict[type[Record], Any]:
        """The wire types of the rows that it reads by itself."""
        raw: Any = msgspec.Raw
        unset = msgspec.UnsetType
        hints = [("name", str), ("more", str), ("base", int), ("fields", _source_fields().wire)]
        source = msgspec.defstruct(
            "SourceRow",
            [("cls", str), *[(name, hint | unset, msgspec.UNSET) for name, hint in hints]],
            forbid_unknown_fields=True,
            gc=False,
        )
        return {SourceDesc: source, MetaStorageDesc: raw, MetaTensorDesc: raw}

    # --- rows ---------------------------------------------------------------------------------

    def _read_table(self, cls: type[Record], wires: Sequence[Any], where: str) -> None:
        if cls is SourceDesc:
            self._read_sources(wires)
        elif cls in (MetaStorageDesc, MetaTensorDesc):
            self._read_alike(cls, wires)
        else:
            super()._read_table(cls, wires, where)

    def _read_sources(self, wires: Sequence[Any]) -> None:
        table = TABLES.index("sources")
        rows, depths = self.rows[table], self.depths[table]
        characters = self._characters
        for wire in wires:
            base, name, more, fields = wire.base, wire.name, wire.more, wire.fields
            depth, over = 0, None
            if type(base) is int:
                if not 0 <= base < len(rows):
                    raise GaveUp
                over, depth = rows[base], depths[base]
            if more is not msgspec.UNSET:
                if over is None or name is not msgspec.UNSET:
                    raise GaveUp
                name = over.name + more
                characters -= len(name)
            if fields is msgspec.UNSET:
                fields = ()
            for _, value in fields:
                if type(value) not in _PLAIN:
                    self.level, self.deepest = 1, depth
                    fields, depth = _source_fields().decode(self, fields), self.deepest
                    break
            if name is msgspec.UNSET or characters < 0 or depth >= MAX_CHAIN:
                raise GaveUp
            rows.append(SourceDesc(cls=wire.cls, name=name, base=over, fields=fields))
            depths.append(depth + 1)
        self._characters = characters

    def _read_alike(self, cls: type[Record], wires: Sequence[msgspec.Raw]) -> None:
        """Rows that begin with their ids, most of them alike in what follows."""
        table = _TENSORS if cls is MetaTensorDesc else _STORAGES
        rows, depths = self.rows[table], self.depths[table]
        templates: dict[bytes, _Template] = {}
        for wire in wires:
            text = bytes(wire)
            head, _, rest = text.partition(b",")
            found = _ID.fullmatch(head)
            if found is None:
                raise GaveUp
            known = templates.get(rest)
            row = None if known is not None else _row_of(cls, text)
            if row is not None and len(templates) < _MAX_TEMPLATES:
                known = self._template(cls, row)
                if known is not None:
                    templates[rest] = known
            if known is not None:
                record, deepest = self._copy(known, int(found[1]))
            else:
                self.level = self.deepest = 0
                record, deepest = plan_of(cls).decode_row(self, row), self.deepest
            if deepest >= MAX_CHAIN:
                raise GaveUp
            rows.append(record)
            depths.append(deepest + 1)

    def _copy(self, template: _Template, number: int) -> tuple[Any, int]:
        """A record with that id, and the rows on the longest path below it."""
        prototype, steps, context, context_step, deepest = template
        record = prototype.__copy__()
        _set_field(record, "id", number)
        for name, table, step in steps:
            row, depth = self._step(table, step)
            _set_field(record, name, row)
            if depth > deepest:
                deepest = depth
        if context is not None:
            if context_step is not None:
                row, depth = self._step(_SOURCES, context_step)
                context = copy.copy(context)
                _set_field(context, "tensor_source", row)
                if depth > deepest:
                    deepest = depth
            _set_field(record, "symbolic_context", context)
        return record, deepest

    def _step(self, table: int, step: int) -> tuple[Any, int]:
        """What a step leads to, and the rows on the longest path down from there."""
        last = self.last
        assert last is not None
        position = last[table] = last[table] + step
        rows = self.rows[table]
        if not 0 <= position < len(rows):
            raise GaveUp
        return rows[position], self.depths[table][position]

    def _template(self, cls: type[Record], row: dict[str, Any]) -> _Template | None:
        """What rows like this one have in common; ``None`` where more refers to other rows."""
        if any(name in row for name in _OTHER_STEPS):
            return None
        common, steps, policy, policy_step = row.copy(), [], None, None
        last, self.last = self.last, None
        self.level = self.deepest = 0
        if cls is MetaTensorDesc:
            steps = [
                (name, at, common.pop(name)) for name, at in _STEPS if common.get(name) is not None
            ]
            context = common.pop("symbolic_context", None)
            if context is not None:
                if context.view_base_context is not None or context.inner_contexts:
                    self.last = last
                    return None
                policy_step = context.tensor_source
                policy = plan_of(ContextDesc).decode(
                    self, msgspec.structs.replace(context, tensor_source=None)
                )
        record = plan_of(cls).decode_row(self, common)
        self.last = last
        return _Template(record, tuple(steps), policy, policy_step, self.deepest)

    # --- trees --------------------------------------------------------------------------------

    def _record(self, item: RecordItem) -> Any:
        """As the plain way, which it takes where msgspec cannot make the record itself."""
        last = None if self.last is None else self.last.copy()
        try:
            cls = record_type(item.name)
            if cls not in SHARED and self.depth <= MAX_NESTING:
                text = memoryview(item.body)
                wire = decoder(plan_of(cls).wire).decode(text)
                if is_canonical(wire, text):
                    del wire
                    direct = msgspec.json.Decoder(_twin_of(cls), dec_hook=self._refer)
                    return direct.decode(text)
        except (Fault, msgspec.MsgspecError, RecursionError):
            pass
        self.last = last
        return super()._record(item)

    def _refer(self, kind: Any, wire: Any) -> Any:
        """What msgspec asks for: the record that a reference in the text stands for."""
        if type(wire) is not int:
            raise TypeError("not a reference")
        position, table = wire, kind.table
        if kind.is_step:
            last = self.last
            assert last is not None
            position = last[table] = last[table] + wire
        rows = self.rows[table]
        if not 0 <= position < len(rows):
            raise ValueError("there is no such row")
        return rows[position]


@functools.cache
def _source_fields() -> Swap:
    """How the fields of a source cross."""
    (hint,) = (f.type for f in msgspec.structs.fields(SourceDesc) if f.name == "fields")
    return swap_of(hint)


_set_field = msgspec.structs.force_setattr
"""Of a record that nobody else has yet."""


def _row_of(cls: type[Record], text: bytes) -> dict[str, Any]:
    """A row as a dictionary, of a text as this package writes it."""
    row = decoder(plan_of(cls).row).decode(text)
    if not is_canonical(row, text):
        raise GaveUp
    return row


# --- the types that msgspec makes of a tree -------------------------------------------------------


class _Reference(type):
    """The type of a reference on the wire: of what comes back for one, msgspec asks for this."""

    record: type[Record]
    table: int
    is_step: bool

    def __instancecheck__(cls, instance: object) -> bool:
        return type(instance) is cls.record


_REFERENCES = {
    cls: _Reference(cls.__name__, (), {"record": cls, "table": i, "is_step": cls in STEPPED})
    for i, cls in enumerate(SHARED)
}
_MAKING = fork_safe_lock()


class _Types:
    """For each record type one that msgspec makes in its place, with references for shared types.

    What it has made changes its class to the record type: both have the same fields.
    """

    def __init__(self) -> None:
        self._twins: dict[type[Any], type[Any]] = {}

    def of(self, hint: Any) -> Any:
        """What stands on the wire for a type; the same object where nothing in it is shared."""
        if hint in _REFERENCES:
            return _REFERENCES[hint]
        if isinstance(hint, type) and issubclass(hint, Record):
            return self._twin(hint)
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        parts = [self.of(arg) for arg in args]
        if all(part is arg for part, arg in zip(parts, args, strict=True)):
            return hint
        if origin in (Union, types.UnionType):
            return Union[tuple(parts)]  # noqa: UP007 - built from a list
        if origin is tuple:
            return tuple[tuple(parts)]  # pyright: ignore[reportInvalidTypeForm]
        raise TypeError(f"records hold no {hint}")

    def _twin(self, cls: type[Any]) -> type[Any]:
        if cls in self._twins or plan_of(cls).plain:
            return self._twins.get(cls, cls)
        config, fields = cls.__struct_config__, msgspec.structs.fields(cls)

        def become_record(made: Any) -> None:
            _set_field(made, "__class__", cls)

        twin = self._twins[cls] = msgspec.defstruct(
            cls.__name__,
            [(f.name, Any) if f.required else (f.name, Any, f.default) for f in fields],
            bases=cls.__bases__,
            namespace={"__post_init__": become_record},
            tag=config.tag,
            tag_field=config.tag_field,
        )
        # msgspec reads annotations when the first decoder is made: here recursion closes.
        twin.__annotations__ = {f.name: self.of(f.type) for f in fields}
        return twin


@functools.cache
def _twin_of(cls: type[Record]) -> Any:
    """The type that msgspec makes in the place of a record type."""
    with _MAKING:
        twin = _TYPES.of(cls)
        msgspec.json.Decoder(twin, dec_hook=_no_reference)  # which looks at the annotations
    return twin


_TYPES = _Types()


def _no_reference(_kind: Any, _wire: object) -> Any:
    raise AssertionError("nothing is decoded to look at types")
