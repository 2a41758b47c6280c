"""Writing records: an object of a shared type becomes a row of a table, and its position elsewhere.

Most of what a frame holds is written before its tree, one kind of row after the other (`prepare`):
texts are put together there, of which the plain way would make the same.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import msgspec

from .chains import MAX_CHAIN, Link, too_long, unseen
from .closures import MAX_NESTING, Fault, too_nested
from .desc import (
    ApplyNode,
    ExprDesc,
    ExprNode,
    FloatValue,
    FrameDesc,
    MetaStorageDesc,
    MetaTensorDesc,
    Record,
    SourceDesc,
    StackDesc,
    SymDesc,
)
from .errors import LimitError, UnsupportedValueError
from .reader import MAX_EXPR_NODES, DictItem, ListItem, RecordItem, TupleItem, postorder
from .row_texts import RowTexts
from .strict_json import too_deep
from .wire import SHARED, TABLES, plan_of, record_name, swap_of, table_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["FORMAT", "VERSION", "Encoder"]

FORMAT = "torch_fakeify.records"
VERSION = 1
"""History: 1 (2026-11) tables of expressions, stacks, sources, storages and tensors."""

_SOURCES, _STORAGES, _TENSORS = map(TABLES.index, ("sources", "storages", "tensors"))

_NO_TABLE = len(TABLES)
"""Where a reference comes from that does not stand in a row: it may go to every table."""

_LARGE = 1 << 63
"""Numbers below it are written as they are."""

_PLAIN = frozenset({type(None), bool, int, str})
"""Types whose values are written as they are."""


class _ShortSource(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A source whose name begins with that of its base, of which `more` is the rest."""

    cls: str
    more: str
    base: int
    fields: tuple[tuple[str, Any], ...] = ()


class _Table:
    """The rows of one shared type that are written so far."""

    def __init__(self, cls: type[Record]) -> None:
        plan = plan_of(cls)
        adders: dict[type[Record], Callable[[Encoder, int, _Table, Any], int]] = {
            ExprDesc: Encoder._add_expr,
            StackDesc: Encoder._add_stack,
            SourceDesc: Encoder._add_source,
            MetaStorageDesc: Encoder._add_storage,
        }
        self.cls = cls
        self.chain = plan.chain
        self.children = plan.children
        self.encode = plan.encode
        self.add = adders.get(cls, Encoder._add_record)
        self.interned = cls in (ExprDesc, StackDesc, SourceDesc)
        """Whether equal objects become one; two equal tensors must stay two."""
        self.rows: list[msgspec.Raw] = []
        self.depths: list[int] = []
        self.seen: dict[int, int] = {}
        """Position by the object's ``id``."""
        self.alive: list[object] = []
        """What ``seen`` knows, so that no ``id`` goes to another object."""
        self.equal: dict[object, int] = {}
        """Position by content: what JSON tells apart, so ``1`` and ``True`` of a source too."""
        self.texts: dict[tuple[Any, ...], int] = {}
        """Position of a source that has texts only, by these: it takes no time to write them."""
        self.last: list[int] | None = [0] * len(TABLES) if cls is MetaTensorDesc else None
        """The positions to which its last row referred last, if its rows have steps."""

    def row_of(self, row: bytes, depth: int) -> int:
        """The position of a row; a new one where the content is new or does not matter."""
        position = len(self.rows)
        if self.interned:
            position = self.equal.setdefault(row, position)
        if position == len(self.rows):
            self.rows.append(msgspec.Raw(row))
            self.depths.append(depth)
        return position

    def remember(self, obj: object, position: int) -> int:
        """Know the object again."""
        self.seen[id(obj)] = position
        self.alive.append(obj)
        return position


class Encoder:
    """Writes several members over one set of tables.

    ``Encoder().add("graph", desc).add("inputs", descs).members()`` gives ``graph.json``,
    ``inputs.json`` and ``tables.json``.

    Args:
        fast: ``False`` takes the plain way for all rows; the bytes are equal.
    """

    def __init__(self, *, fast: bool = True) -> None:
        self.level = 0
        self._fast = fast
        self._tables = tuple(map(_Table, SHARED))
        self._nodes: dict[ExprNode, int] = {}
        self._frames: dict[FrameDesc, int] = {}
        self._members: dict[str, bytes] = {}
        # By the id of a record, which the entry keeps alive.
        self._written: dict[int, tuple[Any, msgspec.Raw, int]] = {}
        self._expr_nodes = 0
        self._deepest = 0
        self._table = _NO_TABLE
        self._last: list[int] | None = None
        encoder = msgspec.json.Encoder()
        self._write, self._write_into = encoder.encode, encoder.encode_into
        self._write_lines = encoder.encode_lines

    def add(self, name: str, obj: object) -> Encoder:
        """Add a member.

        Args:
            name: the member's name without ``.json``; ``tables`` is taken.
            obj: what ``dumps`` takes.

        Raises:
            UnsupportedValueError: as ``dumps``; also a name that is taken.
        """
        file = f"{name}.json"
        if name == "tables" or file in self._members:
            raise UnsupportedValueError("a member of this name exists", where=file)
        self._members[file] = self.encode(obj, f"{file} $")
        return self

    def prepare(self, sources: Sequence[SourceDesc], tensors: Sequence[MetaTensorDesc]) -> Encoder:
        """Write rows that a tree will refer to, one kind after the other.

        The work on each is a short loop then, of which the processor keeps the code.

        Args:
            sources: in the order in which they are to stand.
            tensors: the same; their storages and what else they hold come before them. What cannot
                be written is left to the tree, which knows where it stands.
        """
        self.level, self._deepest, self._table = 0, 0, _NO_TABLE
        with contextlib.suppress(Fault):
            self._add_sources(sources)
            self._add_storages(self._tables[_STORAGES], [each.storage for each in tensors])
            self._add_tensors(self._tables[_TENSORS], tensors)
        return self

    def _add_sources(self, sources: Sequence[SourceDesc]) -> None:
        """Most of them stand over another one and have texts only: these are written all at once."""
        table = self._tables[_SOURCES]
        seen, depths, texts = table.seen, table.depths, table.texts
        table.alive.append(sources)
        rows: list[_ShortSource] = []
        chain: list[SourceDesc] = []
        for source in sources:
            link = source
            while id(link) not in seen:
                chain.append(link)
                if link.base is None:
                    break
                link = link.base
            while chain:
                link = chain.pop()
                base = link.base
                key = None if base is None or not self._fast else _texts_of(link, seen[id(base)])
                if base is None or key is None or depths[key[2]] >= MAX_CHAIN:
                    self._write_sources(table, rows)
                    self.put(_SOURCES, link)
                    continue
                position = texts.get(key)
                if position is None:
                    position = texts[key] = len(depths)
                    depths.append(depths[key[2]] + 1)
                    rows.append(_ShortSource(key[0], key[1][len(base.name) :], key[2], key[3]))
                seen[id(link)] = position
        self._write_sources(table, rows)

    def _write_sources(self, table: _Table, rows: list[_ShortSource]) -> None:
        """Write rows that have their positions."""
        try:
            texts = self._write_lines(rows).split(b"\n")[:-1]
        except (TypeError, ValueError, OverflowError) as error:
            # The plain way knows which of them it is.
            end = len(table.rows)
            del table.depths[end:]
            for positions in (table.seen, table.texts):
                for key in [key for key, position in positions.items() if position >= end]:
                    del positions[key]  # type: ignore[arg-type]
            raise Fault(f"a value cannot be written: {error}") from error
        table.rows.extend(map(msgspec.Raw, texts))
        rows.clear()

    def _add_storages(self, table: _Table, storages: Iterable[MetaStorageDesc | None]) -> None:
        """A storage has two numbers, of which one may be symbolic."""
        seen, rows, depths, alive = table.seen, table.rows, table.depths, table.alive
        written, level = self._written, self.level
        for storage in storages:
            if storage is None or id(storage) in seen:
                continue
            if type(storage) is not MetaStorageDesc:
                self.put(_STORAGES, storage)  # which says so
                continue
            number, nbytes, text, deepest = storage.id, storage.nbytes, None, 0
            if self._fast and type(number) is int and -_LARGE < number < _LARGE:
                if type(nbytes) is int:
                    text = b"%d" % nbytes if -_LARGE < nbytes < _LARGE else None
                elif type(nbytes) is SymDesc and level < MAX_NESTING - 1:
                    if id(nbytes) not in written:
                        self.once(plan_of(SymDesc).encode, nbytes)
                    _, text, deepest = written[id(nbytes)]
            if text is None:
                self._add_record(_STORAGES, table, storage)
                continue
            if deepest >= MAX_CHAIN:
                raise too_long()
            seen[id(storage)] = len(rows)
            alive.append(storage)
            rows.append(msgspec.Raw(b'{"id":%d,"nbytes":%b}' % (number, text)))
            depths.append(deepest + 1)

    def _add_tensors(self, table: _Table, tensors: Iterable[MetaTensorDesc]) -> None:
        """Most of them are like an earlier one in all but what they refer to, which is there."""
        texts = RowTexts()
        seen = tuple([each.seen for each in self._tables])
        depths = tuple([each.depths for each in self._tables])
        for tensor in tensors:
            known = id(tensor) in table.seen or type(tensor.id) is not int
            if not self._fast or known or not -_LARGE < tensor.id < _LARGE:
                self.put(_TENSORS, tensor)
                continue
            key = texts.key(tensor)
            template = texts.find(key)
            found = None if template is None else template.positions(tensor, seen)
            if template is None or found is None:
                self.put(_TENSORS, tensor)
                if template is None and texts.wants(tensor):
                    self._last = None  # whatever positions: they are taken out
                    texts.learn(key, tensor, table.encode(self, tensor))
                continue
            last, deepest = table.last, int(template.has_exprs)
            assert last is not None
            steps: list[int] = []
            for index, position in found:
                steps.append(position - last[index])
                last[index] = position
                if depths[index][position] > deepest:
                    deepest = depths[index][position]
            if deepest >= MAX_CHAIN:
                raise too_long()
            table.seen[id(tensor)] = len(table.rows)
            table.rows.append(msgspec.Raw(template.text % (tensor.id, *steps)))
            table.depths.append(deepest + 1)
        self._deepest = 0

    def members(self) -> dict[str, bytes]:
        """All members that were added, in that order, and their tables."""
        return {**self._members, "tables.json": self.document()}

    def encode(self, obj: object, where: str = "$") -> bytes:
        """One tree of records as JSON that refers to this encoder's tables."""
        self.level, self._deepest, self._table = 0, 0, _NO_TABLE
        self._last = [0] * len(TABLES)
        try:
            return self._row(self._tree(obj))
        except Fault as fault:
            raise fault.error(where, UnsupportedValueError) from fault.__cause__
        except RecursionError:
            raise too_deep(where) from None

    def document(self, root: bytes | None = None) -> bytes:
        """The tables, with ``root`` if it is given, under a header."""
        body: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        for name, pool in (("nodes", self._nodes), ("frames", self._frames)):
            if pool:
                body[name] = list(pool)
        for name, table in zip(TABLES, self._tables, strict=True):
            if table.rows:
                body[name] = table.rows
        if root is not None:
            body["root"] = msgspec.Raw(root)
        return self._write(body)

    def _tree(self, obj: object) -> object:
        if obj is None or type(obj) in (bool, int, str):
            return obj
        if type(obj) is float:
            # JSON has no infinities.
            text = repr(obj)
            return obj if math.isfinite(obj) else FloatValue(text=text)  # pyright: ignore[reportArgumentType]
        if isinstance(obj, Record):
            name, cls = record_name(type(obj)), type(obj)
            table = table_of(cls)
            encode = plan_of(cls).encode if table is None else swap_of(cls).encode
            body = encode(self, obj)
            return RecordItem(name, msgspec.Raw(self._row(body)))
        self.level += 1
        if self.level > MAX_NESTING:
            raise too_nested()
        items: list[Any] = []
        try:
            if type(obj) is dict:
                for key, value in obj.items():
                    if type(key) not in (str, int):
                        raise Fault("a key has no JSON form", "a str or an int", repr(key))
                    items.append((key, self._tree(value)))
            elif type(obj) in (list, tuple):
                for item in obj:  # pyright: ignore[reportGeneralTypeIssues]
                    items.append(self._tree(item))  # noqa: PERF401 - its length is an error's path
            else:
                expected = "a record, a plain scalar, or a list, tuple or dict of them"
                raise Fault("there is no record of this", expected, type(obj).__qualname__)
        except Fault as fault:
            if type(obj) in (dict, list, tuple):
                fault.at(f"[{len(items)}]")
            raise
        self.level -= 1
        if type(obj) is dict:
            return DictItem(items)
        return TupleItem(items) if type(obj) is tuple else ListItem(items)

    # What follows is called by the closures of wire.py.

    def put(self, index: int, obj: Any) -> int:
        """The position of ``obj`` in table ``index``; it is written first if it is new."""
        table = self._tables[index]
        position = table.seen.get(id(obj))
        if position is None:
            if type(obj) is not table.cls:
                expected, found = table.cls.__name__, type(obj).__qualname__
                raise Fault("a value has the wrong type", expected, found)
            position = self._add_chain(index, table, obj)
        if index > self._table:
            raise Fault(f"a row of {TABLES[self._table]} cannot hold one of {TABLES[index]}")
        if table.depths[position] > self._deepest:
            self._deepest = table.depths[position]
        return position

    def step(self, index: int, obj: Any) -> int:
        """As `put`: the step to the position from the last one, where steps are counted."""
        position = self.put(index, obj)
        last = self._last
        if last is None:
            return position
        before, last[index] = last[index], position
        return position - before

    def once(self, encode: Callable[[Encoder, Any], Any], obj: Any) -> Any:
        """The wire form of one of `wire.FREQUENT`, or of a tuple that may hold some of them.

        It is made when the object is first seen: tensors of one layout share theirs.
        """
        known = self._written.get(id(obj))
        if known is None or self.level >= MAX_NESTING:
            deepest, self._deepest = self._deepest, 0
            last, self._last = self._last, None
            row = msgspec.Raw(self._row(encode(self, obj)))
            known = self._written[id(obj)] = (obj, row, self._deepest)
            self._deepest, self._last = deepest, last
        if known[2] > self._deepest:
            self._deepest = known[2]
        return known[1]

    def _add_chain(self, index: int, table: _Table, obj: Any) -> int:
        """Write ``obj`` after what it reaches through fields of its own type, without recursion."""
        seen = table.seen
        for child in table.children(obj):
            if child is not None and id(child) not in seen:
                break
        else:
            return table.add(self, index, table, obj)
        link: Link = (obj, "", None)
        try:
            for link in unseen(obj, table.chain, seen):
                table.add(self, index, table, link[0])
        except Fault as fault:
            while link[2] is not None:
                fault.at(f".{link[1]}")
                link = link[2]
            raise
        return table.add(self, index, table, obj)

    def _add_expr(self, _index: int, table: _Table, obj: ExprDesc) -> int:
        position = table.equal.get(obj)
        if position is None:
            row = self._row(self._expr(obj))
            position = table.equal[obj] = len(table.rows)
            table.rows.append(msgspec.Raw(row))
            table.depths.append(1)
        return table.remember(obj, position)

    def _add_stack(self, _index: int, table: _Table, obj: StackDesc) -> int:
        frames = self._frames
        row = self._row([frames.setdefault(frame, len(frames)) for frame in obj.frames])
        return table.remember(obj, table.row_of(row, 1))

    def _add_source(self, index: int, table: _Table, obj: SourceDesc) -> int:
        """As `_add_record`: most sources have plain fields only, and these need no visit."""
        if type(obj) is not table.cls:
            return self._add_record(index, table, obj)
        for field in obj.fields:
            if len(field) != 2 or type(field[1]) not in _PLAIN:
                return self._add_record(index, table, obj)
        over = obj.base
        if over is not None:
            base = table.seen[id(over)]  # written before what refers to it
            depth = table.depths[base] + 1
            if depth > MAX_CHAIN:
                raise too_long()
            texts = _texts_of(obj, base)
            position = None if texts is None else table.texts.get(texts)
            if position is None:
                position = table.row_of(self._row(_shortened(obj, base, obj.fields)), depth)
                if texts is not None:
                    table.texts[texts] = position
            return table.remember(obj, position)
        return table.remember(obj, table.row_of(self._row(obj), 1))

    def _add_storage(self, _index: int, table: _Table, obj: MetaStorageDesc) -> int:
        self._add_storages(table, (obj,))
        return table.seen[id(obj)]

    def _add_record(self, index: int, table: _Table, obj: Any) -> int:
        deepest, referrer, last = self._deepest, self._table, self._last
        self._table = index
        while True:
            rows = len(table.rows)
            self._deepest, self._last = 0, None if table.last is None else table.last.copy()
            wire = table.encode(self, obj)
            if type(obj) is SourceDesc and obj.base is not None:
                wire = _shortened(obj, wire.base, wire.fields)
            row = self._row(wire)
            # Steps are counted from the row before, which may have been written only now.
            if table.last is None or len(table.rows) == rows:
                break
        depth = self._deepest + 1
        table.last = self._last
        self._deepest, self._table, self._last = deepest, referrer, last
        if depth > MAX_CHAIN:
            raise too_long()
        return table.remember(obj, table.row_of(row, depth))

    def _row(self, row: object) -> bytes:
        try:
            return self._write(row)
        except (TypeError, ValueError, OverflowError) as error:
            raise Fault(f"a value cannot be written: {error}") from error

    def write_into(self, row: object, text: bytearray) -> None:
        """Write one of the records that a tuple holds."""
        try:
            self._write_into(row, text, -1)
        except (TypeError, ValueError, OverflowError) as error:
            raise Fault(f"a value cannot be written: {error}") from error

    def _expr(self, desc: ExprDesc) -> int | list[int]:
        """The root's position, or all positions where the order is not the canonical one."""
        args: list[tuple[int, ...]] = []
        place: list[int] = []
        pool = self._nodes
        for i, node in enumerate(desc.nodes):
            args.append(node.args if type(node) is ApplyNode else ())
            if args[i]:
                if min(args[i]) < 0 or max(args[i]) >= i:
                    raise Fault("an argument is no earlier node").at(f".nodes[{i}].args")
                pooled = ApplyNode(node.function, tuple([place[arg] for arg in args[i]]))  # pyright: ignore[reportAttributeAccessIssue]
                place.append(pool.setdefault(pooled, len(pool)))
            else:
                place.append(pool.setdefault(node, len(pool)))
        self._expr_nodes += len(place)
        if self._expr_nodes > MAX_EXPR_NODES:
            raise Fault(f"expressions have more than {MAX_EXPR_NODES} nodes", kind=LimitError)
        if not place or len(set(place)) != len(place):
            raise Fault("an expression is empty or has two equal nodes").at(".nodes")
        if postorder(len(args) - 1, args) == list(range(len(args))):
            return place[-1]
        return place


# --- helpers --------------------------------------------------------------------------------------


_Texts = tuple[str, str, int, tuple[tuple[str, str], ...]]


def _texts_of(source: SourceDesc, base: int) -> _Texts | None:
    """What a source over another one is, if it has texts only, of which the first is its base's.

    Equal texts are one row: of other values JSON tells apart what Python does not, as 1 and True.
    """
    name, cls, fields = source.name, source.cls, source.fields
    if type(cls) is not str or type(fields) is not tuple or not name.startswith(source.base.name):  # pyright: ignore[reportOptionalMemberAccess]
        return None
    for field in fields:
        if len(field) != 2 or not type(field[0]) is type(field[1]) is str:
            return None
    return cls, name, base, fields  # pyright: ignore[reportReturnType]


def _shortened(obj: SourceDesc, base: Any, fields: Any) -> Any:
    """The wire form of a source over another one, which its name begins with as a rule."""
    below = "" if obj.base is None else obj.base.name
    if obj.name.startswith(below):
        return _ShortSource(obj.cls, obj.name[len(below) :], base, fields)
    return msgspec.structs.replace(obj, base=base, fields=fields)
