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
import itertools
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
    is_long,
    plan_of,
    record_type,
    swap_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["FastReader", "GaveUp"]

_MAX_TEMPLATES = 4096
"""Of a table: what is left is read row by row, so that a text of other rows is not held twice."""

_ID = b'{"id":'
"""How a row of a tensor or a storage begins."""

_DIGITS = 18
"""Of an id, which then has 64 bits."""

_LARGEST = 1 << 16
"""Bytes of a row that is compared with others: of a larger one no copy is made."""

_BATCH = 64
"""Rows whose texts are looked at together."""

_RECORD = re.compile(rb'\{"type":"record","name":"(\w+)","body":')
"""How a tree begins that is a record alone."""

_ONES = bytes(49 if 48 <= byte < 58 else byte for byte in range(256))
"""Each digit as 1, with which a number may begin, as it may not with 0 before others."""

_NUMBER = re.compile(rb"1+(?:\.1+)?(?:[eE][-+]?1+)?")
"""Of such digits. What was read of one with a fraction may be written in another form."""

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
            number = head[len(_ID) :]
            if not (head.startswith(_ID) and number.isdigit() and len(number) <= _DIGITS):
                raise GaveUp
            known = templates.get(rest)
            row = None if known is not None else _row_of(cls, text)
            if row is not None and len(templates) < _MAX_TEMPLATES:
                known = self._template(cls, row)
                if known is not None:
                    templates[rest] = known
            if known is not None:
                record, deepest = self._copy(known, int(number))
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

    def tree(self, data: bytes, where: str, depth: int = 0) -> Any:
        """As the plain way, which it takes where msgspec cannot make the records themselves."""
        found = _RECORD.match(data)
        if found is not None and data.endswith(b"}"):
            self.depth, self.last = depth, [0] * len(TABLES)
            name, body = str(found[1], "ascii"), memoryview(data)[found.end() : -1]
            record = self._direct(name, body)
            if record is not None:
                return record
        return super().tree(data, where, depth)

    def _record(self, item: RecordItem) -> Any:
        last = None if self.last is None else self.last.copy()
        record = self._direct(item.name, memoryview(item.body))
        if record is not None:
            return record
        self.last = last
        return super()._record(item)

    def _direct(self, name: str, text: memoryview) -> Any:
        """The record that msgspec makes of a text; ``None`` where it cannot."""
        try:
            cls = record_type(name)
            if cls in SHARED or self.depth > MAX_NESTING or not _is_ours(cls, text):
                return None
            return msgspec.json.Decoder(_twin_of(cls), dec_hook=self._refer).decode(text)
        except (Fault, msgspec.MsgspecError, RecursionError):
            return None

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


# --- how a text is written ------------------------------------------------------------------------


def _is_ours(cls: type[Record], text: memoryview) -> bool:
    """Whether a record's text is as this package writes it: each key once and in its place.

    Of long tuples this is asked of one row of those that differ in digits alone. How numbers are
    written, and what stands in strings, makes no difference to what is read in either way.
    """
    wire = decoder(plan_of(cls).wire).decode(text)
    if not is_canonical(wire, text):
        return False
    known: set[bytes] = set()
    for hint, rows in _long_rows(cls, wire):
        for start in range(0, len(rows), _BATCH):
            if not _are_ours(hint, rows[start : start + _BATCH], known):
                return False
    return True


def _are_ours(hint: Any, rows: Sequence[msgspec.Raw], known: set[bytes]) -> bool:
    """The same of such rows; in ``known`` are those that are, with each digit as 1."""
    lengths = [len(memoryview(row)) for row in rows]
    if max(lengths) > _LARGEST:
        views = map(memoryview, rows)
        return all(is_canonical(decoder(hint).decode(view), view) for view in views)
    text = b",".join(rows).translate(_ONES)
    end = -1
    for length in lengths:
        start = end + 1
        end = start + length
        alike = text[start:end]
        if alike not in known:
            if not _is_alike(msgspec.json.encode(decoder(hint).decode(alike)), alike):
                return False
            if len(known) < _MAX_TEMPLATES:
                known.add(alike)
    return True


def _is_alike(written: bytes, text: bytes) -> bool:
    """Whether two texts differ in numbers alone."""
    return written == text or _without_numbers(written) == _without_numbers(text)


def _without_numbers(text: bytes) -> bytes:
    return _NUMBER.sub(b"1", text.translate(_ONES))


def _long_rows(hint: Any, wire: Any) -> Iterator[tuple[Any, Sequence[msgspec.Raw]]]:
    """The texts of `wire.LONG` rows in what was read of a type, each tuple with their wire type."""
    args = typing.get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Record):
        for name, kind in _fields_with_rows(hint):
            yield from _long_rows(kind, getattr(wire, name))
    elif typing.get_origin(hint) is not tuple:
        raise TypeError(f"records hold rows in tuples, not in {hint}")
    elif is_long(args[0]):
        yield swap_of(args[0]).wire, wire
    else:
        kinds = itertools.repeat(args[0]) if args[-1] is Ellipsis else args
        for kind, item in zip(kinds, wire):  # noqa: B905 - one of them may have no end
            if _has_rows(kind):
                yield from _long_rows(kind, item)


@functools.cache
def _fields_with_rows(cls: type[Record]) -> list[tuple[str, Any]]:
    """The fields of a record below which there may be such rows, each with its type."""
    return [(f.name, f.type) for f in msgspec.structs.fields(cls) if _has_rows(f.type)]


@functools.cache
def _has_rows(hint: Any) -> bool:
    """Whether there may be such rows below a value of a type."""
    seen: set[Any] = set()
    pending = [hint]
    while pending:
        kind = pending.pop()
        if is_long(kind):
            return True
        if kind not in seen:
            seen.add(kind)
            is_record = isinstance(kind, type) and issubclass(kind, Record)
            fields = msgspec.structs.fields(kind) if is_record else ()
            pending += [f.type for f in fields] or typing.get_args(kind)
    return False


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
