"""Records to bytes and back, generic over the record types.

Expressions, stacks, sources, storages and tensors are *shared* types: each such object is written
once, as a row of a table of the document, and everywhere else its position in that table stands
for it. So an object that is referenced twice comes back as one object. A row refers to earlier
rows and earlier tables only: no bytes can describe a cycle. ``wire.py`` derives the form that
JSON sees from the record types themselves.

A document stands alone (``dumps``, ``loads``), or is cut into members that share one set of
tables (``Encoder``, ``Decoder``), which is what a capture file holds.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from . import bounds
from .chains import MAX_CHAIN, Link, too_long, unseen
from .desc import (
    ApplyNode,
    ExprDesc,
    ExprNode,
    FloatValue,
    FrameDesc,
    Record,
    SourceDesc,
    StackDesc,
)
from .errors import FormatError, LimitError, UnsupportedValueError, VersionError
from .strict_json import check_text, decode, too_deep
from .wire import (
    MAX_NESTING,
    SHARED,
    TABLES,
    Fault,
    Position,
    no_row,
    plan_of,
    record_name,
    record_type,
    swap_of,
    table_of,
    too_nested,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .desc_env import ShapeEnvDesc

__all__ = ["FORMAT", "VERSION", "Decoder", "Encoder", "dumps", "loads"]

FORMAT = "torch_fakeify.records"
VERSION = 1
"""History: 1 (2026-11) tables of expressions, stacks, sources, storages and tensors."""

MAX_EXPR_NODES = 10_000_000
"""Nodes of all expressions together, after the shared ones are written out for each."""

_NO_TABLE = len(TABLES)
"""Where a reference comes from that does not stand in a row: it may go to every table."""

_PLAIN = frozenset({type(None), bool, int, str})
"""Types whose values are written as they are."""

_T = TypeVar("_T")


# --- the document ---------------------------------------------------------------------------------


class _Header(msgspec.Struct):
    format: str
    version: int


class _RecordItem(msgspec.Struct, tag="record", forbid_unknown_fields=True):
    name: str
    body: msgspec.Raw


class _TupleItem(msgspec.Struct, tag="tuple", forbid_unknown_fields=True):
    items: list[_Tree]


class _ListItem(msgspec.Struct, tag="list", forbid_unknown_fields=True):
    items: list[_Tree]


class _DictItem(msgspec.Struct, tag="dict", forbid_unknown_fields=True):
    items: list[tuple[str | int, _Tree]]


_Tree: TypeAlias = (
    bool | int | float | str | FloatValue | _RecordItem | _TupleItem | _ListItem | _DictItem | None
)


@functools.cache
def _document_decoder() -> msgspec.json.Decoder[Any]:
    """For the whole of a document, which msgspec validates in one pass."""
    tables: list[Any] = [
        ("nodes", tuple[swap_of(ExprNode).wire, ...], ()),
        ("frames", tuple[swap_of(FrameDesc).wire, ...], ()),
    ]
    for name, cls in zip(TABLES, SHARED, strict=True):
        row: Any = plan_of(cls).wire
        if cls is ExprDesc:
            row = Position | tuple[Position, ...]
        elif cls is StackDesc:
            row = tuple[Position, ...]
        tables.append((name, tuple[row, ...], ()))
    root = ("root", msgspec.Raw | msgspec.UnsetType, msgspec.UNSET)
    document = msgspec.defstruct(
        "Document",
        [("format", str), ("version", int), *tables, root],
        omit_defaults=True,
        forbid_unknown_fields=True,
        gc=False,
    )
    return msgspec.json.Decoder(document)


@functools.cache
def _decoder(hint: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(hint)


def _read_document(data: bytes, where: str) -> Any:
    """The validated wire form of a document."""
    check_text(data, where)
    try:
        header = decode(_decoder(_Header), data, where, whole=False)
    except LimitError:
        raise
    except FormatError as error:
        raise FormatError(
            "not data of torch_fakeify", where=where, expected=FORMAT, found=error.what
        ) from error
    if header.format != FORMAT:
        raise FormatError(
            "not data of torch_fakeify", where=where, expected=FORMAT, found=repr(header.format)
        )
    if header.version > VERSION:
        raise VersionError(
            "a newer version of torch_fakeify wrote this",
            where=where,
            expected=f"version {VERSION} or older",
            found=f"version {header.version}",
            fix="Upgrade torch_fakeify",
        )
    if header.version < 1:
        raise VersionError("no such version", where=where, found=str(header.version))
    return decode(_document_decoder(), data, where)


def dumps(obj: object) -> bytes:
    """Write a record, or a list, tuple or dict of records and plain scalars, as bytes.

    Objects of the shared types that occur twice are written once. Equal input gives equal bytes.

    Args:
        obj: any record; ``None``, ``bool``, ``int``, ``float``, ``str``; or a list, tuple or dict
            (keys ``str`` or ``int``) of these, nested.

    Raises:
        UnsupportedValueError: an object has no record, or a field has the wrong type.
        LimitError: nesting is deeper than a reader allows.
    """
    encoder = Encoder()
    return encoder.document(encoder.encode(obj))


def loads(data: bytes | bytearray | memoryview) -> Any:
    """Read what ``dumps`` wrote; objects that were shared come back shared.

    Raises:
        FormatError: the bytes are not a document, truncated, or ill-typed; names the ``$.path``.
        VersionError: a newer version wrote them.
        LimitError: they ask for more depth or expression nodes than allowed.
    """
    document = _read_document(bytes(data), "$")
    if document.root is msgspec.UNSET:
        raise FormatError("the document has no root", where="$")
    return _Reader(document, "$").tree(bytes(document.root), "$.root")


# --- writing --------------------------------------------------------------------------------------


class _Table:
    """The rows of one shared type that are written so far."""

    def __init__(self, cls: type[Record]) -> None:
        plan = plan_of(cls)
        adders: dict[type[Record], Callable[[Encoder, int, _Table, Any], int]] = {
            ExprDesc: Encoder._add_expr,
            StackDesc: Encoder._add_stack,
            SourceDesc: Encoder._add_source,
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
    """

    def __init__(self) -> None:
        self.level = 0
        self._tables = tuple(map(_Table, SHARED))
        self._nodes: dict[ExprNode, int] = {}
        self._frames: dict[FrameDesc, int] = {}
        self._members: dict[str, bytes] = {}
        # By the id of a record, which the entry keeps alive.
        self._written: dict[int, tuple[Any, msgspec.Raw, int]] = {}
        self._expr_nodes = 0
        self._deepest = 0
        self._table = _NO_TABLE
        self._write = msgspec.json.Encoder().encode

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

    def members(self) -> dict[str, bytes]:
        """All members that were added, in that order, and their tables."""
        return {**self._members, "tables.json": self.document()}

    def encode(self, obj: object, where: str = "$") -> bytes:
        """One tree of records as JSON that refers to this encoder's tables."""
        self.level, self._deepest, self._table = 0, 0, _NO_TABLE
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
            body = plan_of(cls).encode(self, obj) if table is None else self.put(table, obj)
            return _RecordItem(name, msgspec.Raw(self._row(body)))
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
            return _DictItem(items)
        return _TupleItem(items) if type(obj) is tuple else _ListItem(items)

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

    def once(self, encode: Callable[[Encoder, Any], Any], obj: Any) -> Any:
        """The wire form of one of `wire.FREQUENT`, or of a tuple that may hold some of them.

        It is made when the object is first seen: tensors of one layout share theirs.
        """
        known = self._written.get(id(obj))
        if known is None or self.level >= MAX_NESTING:
            deepest, self._deepest = self._deepest, 0
            row = msgspec.Raw(self._row(encode(self, obj)))
            known = self._written[id(obj)] = (obj, row, self._deepest)
            self._deepest = deepest
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
        depth, wire = 1, obj
        if obj.base is not None:
            base = table.seen[id(obj.base)]  # written before what refers to it
            depth = table.depths[base] + 1
            wire = msgspec.structs.replace(obj, base=base)
        if depth > MAX_CHAIN:
            raise too_long()
        return table.remember(obj, table.row_of(self._row(wire), depth))

    def _add_record(self, index: int, table: _Table, obj: Any) -> int:
        deepest, referrer = self._deepest, self._table
        self._deepest, self._table = 0, index
        row = self._row(table.encode(self, obj))
        depth = self._deepest + 1
        self._deepest, self._table = deepest, referrer
        if depth > MAX_CHAIN:
            raise too_long()
        return table.remember(obj, table.row_of(row, depth))

    def _row(self, row: object) -> bytes:
        try:
            return self._write(row)
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
        if _postorder(len(args) - 1, args) == list(range(len(args))):
            return place[-1]
        return place


# --- reading --------------------------------------------------------------------------------------


class Decoder:
    """Reads the members that an ``Encoder`` wrote.

    Args:
        members: their bytes by name; the tables are read and validated at once.
        expr_nodes: how many distinct nodes the expressions may have.

    Raises:
        FormatError: as ``loads``, with the member's name before the path.
        VersionError: as ``loads``.
        LimitError: as ``loads``.
    """

    def __init__(self, members: Mapping[str, bytes], expr_nodes: int = MAX_EXPR_NODES) -> None:
        self._members = members
        if "tables.json" not in members:
            raise FormatError("the member is missing", where="tables.json")
        where = "tables.json $"
        document = _read_document(members["tables.json"], where)
        bounds.check_count(len(document.nodes), expr_nodes, f"{where}.nodes")
        self._reader = _Reader(document, where)
        bounds.check_tables(self._reader.tables, self._reader.roots, self._reader.tree_nodes, where)

    def check_exponents(self, env: ShapeEnvDesc) -> None:
        """Refuse expressions that are too large with the numbers that a member has for symbols."""
        bounds.check_exponents(self._reader.tables["nodes"], env, "tables.json $.nodes")

    def get(self, name: str, cls: type[_T]) -> _T:
        """The object of a member.

        Raises:
            FormatError: there is no such member, it is ill-typed, or no instance of ``cls``.
        """
        file = f"{name}.json"
        if file not in self._members:
            raise FormatError("the member is missing", where=file)
        data = self._members[file]
        check_text(data, f"{file} $")
        obj = self._reader.tree(data, f"{file} $")
        if not isinstance(obj, cls):
            expected, found = cls.__name__, type(obj).__name__
            raise FormatError(
                "the member has the wrong type", where=file, expected=expected, found=found
            )
        return obj


class _Reader:
    """The tables of a document as objects, and trees over them."""

    def __init__(self, document: Any, where: str) -> None:
        self.level = 0
        self.deepest = 0
        """Rows on the longest path of references from the row that is read."""
        self.rows: tuple[list[Any], ...] = tuple([] for _ in TABLES)
        self.depths: tuple[list[int], ...] = tuple([] for _ in TABLES)
        rows = len(document.nodes) + len(document.exprs)
        self._budget = allowed = bounds.allowed_nodes(rows, MAX_EXPR_NODES)
        self._write = msgspec.json.Encoder().encode
        self._known: dict[tuple[Callable[[_Reader, Any], Any], bytes], tuple[Any, int]] = {}
        self._args: list[tuple[int, ...]] = []
        self.tables: dict[str, list[Any]] = {}
        self._depths: dict[str, list[int]] = {}
        self._fill("nodes", document.nodes, _Reader._read_node, where)
        self.roots = document.exprs
        self.tree_nodes = bounds.tree_nodes(self._args, self.roots, allowed), allowed
        self._fill("frames", document.frames, swap_of(FrameDesc).decode, where)
        # By text: numbers can be chosen so that all have one hash.
        if len(set(map(self._write, self.tables["nodes"]))) != len(self.tables["nodes"]):
            raise FormatError("two expression nodes are equal", where=f"{where}.nodes")
        readers: dict[type[Record], Callable[[Any, Any], Any]] = {
            ExprDesc: _Reader._read_expr,
            StackDesc: _Reader._read_stack,
        }
        for name, rows, depths in zip(TABLES, self.rows, self.depths, strict=True):
            self.tables[name], self._depths[name] = rows, depths
        for name, cls in zip(TABLES, SHARED, strict=True):
            self._fill(name, getattr(document, name), readers.get(cls, plan_of(cls).decode), where)
            setattr(document, name, ())  # its rows are records now

    def _fill(self, name: str, wires: Any, read: Callable[[Any, Any], Any], where: str) -> None:
        rows = self.tables.setdefault(name, [])
        depths = self._depths.setdefault(name, [])
        for wire in wires:
            self.level = self.deepest = 0
            try:
                row = read(self, wire)
                if self.deepest >= MAX_CHAIN:
                    raise too_long()
            except Fault as fault:
                raise fault.at(f".{name}[{len(rows)}]").error(where, FormatError) from None
            except RecursionError:
                raise too_deep(f"{where}.{name}[{len(rows)}]") from None
            rows.append(row)
            depths.append(self.deepest + 1)

    def once(self, decode: Callable[[_Reader, Any], Any], wire: Any) -> Any:
        """The record of one of `wire.FREQUENT`, or a tuple with some of them, made once.

        It is the same object for all that was written alike.
        """
        key = decode, self._write(wire)
        known = self._known.get(key)
        if known is None or self.level >= MAX_NESTING:
            deepest, self.deepest = self.deepest, 0
            known = self._known[key] = (decode(self, wire), self.deepest)
            self.deepest = deepest
        if known[1] > self.deepest:
            self.deepest = known[1]
        return known[0]

    def _row(self, name: str, position: int) -> Any:
        rows = self.tables[name]
        if not 0 <= position < len(rows):
            raise no_row(name, position, len(rows))
        return rows[position]

    def _read_node(self, wire: Any) -> ExprNode:
        node = swap_of(ExprNode).decode(self, wire)
        args = node.args if type(node) is ApplyNode else ()
        below = len(self._args)
        for i, arg in enumerate(args):
            if not 0 <= arg < below:
                raise no_row("nodes", arg, below).at(f".args[{i}]")
        self._args.append(args)
        return node

    def _read_stack(self, row: tuple[int, ...]) -> StackDesc:
        return StackDesc(frames=tuple([self._row("frames", position) for position in row]))

    def _read_expr(self, row: int | tuple[int, ...]) -> ExprDesc:
        if isinstance(row, int):
            self._row("nodes", row)
            order = _postorder(row, self._args, self._budget)
        else:
            order = row
        self._budget -= len(order)
        if self._budget < 0:
            most = self.tree_nodes[1]
            raise Fault(f"expressions have more than {most} nodes", kind=LimitError)
        local: dict[int, int] = {}
        nodes: list[ExprNode] = []
        for position in order:
            node = self._row("nodes", position)
            args = self._args[position]
            if args:
                if any(arg not in local for arg in args):
                    raise Fault("a node stands before its arguments")
                node = ApplyNode(node.function, tuple([local[arg] for arg in args]))
            local[position] = len(nodes)
            nodes.append(node)
        if not nodes or len(local) != len(nodes):
            raise Fault("an expression is empty or has two equal nodes")
        return ExprDesc(nodes=tuple(nodes))

    def tree(self, data: bytes, where: str) -> Any:
        """The object that a tree of JSON stands for."""
        self.level = self.deepest = 0
        tree = decode(_decoder(_Tree), data, where)
        try:
            return self._build(tree)
        except Fault as fault:
            raise fault.error(where, FormatError) from None
        except RecursionError:
            raise too_deep(where) from None

    def _build(self, tree: Any) -> Any:
        if isinstance(tree, FloatValue):
            return float(tree.text)
        if isinstance(tree, _RecordItem):
            return self._record(tree)
        if not isinstance(tree, (_TupleItem, _ListItem, _DictItem)):
            return tree
        self.level += 1
        if self.level > MAX_NESTING:
            raise too_nested()
        items: list[Any] = []
        try:
            if isinstance(tree, _DictItem):
                for key, value in tree.items:
                    items.append((key, self._build(value)))
            else:
                for item in tree.items:
                    items.append(self._build(item))  # noqa: PERF401
        except Fault as fault:
            raise fault.at(f".items[{len(items)}]") from None
        self.level -= 1
        if isinstance(tree, _DictItem):
            if len(dict(items)) != len(items):
                raise Fault("a key occurs twice")
            return dict(items)
        return tuple(items) if isinstance(tree, _TupleItem) else items

    def _record(self, item: _RecordItem) -> Any:
        try:
            cls = record_type(item.name)
            table = table_of(cls)
        except Fault as fault:
            raise fault.at(".name") from None
        try:
            if table is not None:
                position = decode(_decoder(Position), memoryview(item.body), "$")
                return swap_of(cls).decode(self, position)
            plan = plan_of(cls)
            return plan.decode(self, decode(_decoder(plan.wire), memoryview(item.body), "$"))
        except Fault as fault:
            raise fault.at(".body") from None
        except FormatError as error:
            path = (error.where or "$").removeprefix("$")
            fault = Fault(error.what, error.expected, error.found, kind=type(error))
            raise fault.at(f".body{path}") from None


# --- helpers --------------------------------------------------------------------------------------


def _postorder(root: int, args: list[tuple[int, ...]], limit: int = MAX_EXPR_NODES) -> list[int]:
    """What ``root`` needs, arguments first and from left to right: the canonical order."""
    if not args[root]:
        return [root]
    order: dict[int, None] = {}
    stack = [root]
    while stack and len(order) <= limit:
        position = stack[-1]
        pending = [arg for arg in args[position] if arg not in order]
        if pending and position not in order:
            stack.extend(reversed(pending))
        else:
            order[stack.pop()] = None
    return list(order)
