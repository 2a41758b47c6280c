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
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar

import msgspec

from torch_fakeify.desc import (
    ApplyNode,
    ExprDesc,
    ExprNode,
    FloatValue,
    FrameDesc,
    Record,
    StackDesc,
)
from torch_fakeify.errors import (
    FakeifyError,
    FormatError,
    LimitError,
    UnsupportedValueError,
    VersionError,
)
from torch_fakeify.wire import (
    MAX_NESTING,
    TABLES,
    Fault,
    Position,
    plan_of,
    record_name,
    record_type,
    table_of,
    swap_of,
)

__all__ = ["FORMAT", "VERSION", "Decoder", "Encoder", "dumps", "loads"]

FORMAT = "torch_fakeify.records"
VERSION = 1
"""History: 1 (2025-11) tables of expressions, stacks, sources, storages and tensors."""

MAX_CHAIN = 250
"""Rows on the longest path of references, e.g. a source over its base over its base."""
MAX_JSON_DEPTH = 4 * MAX_NESTING
MAX_EXPR_NODES = 10_000_000
"""Nodes of all expressions together, after the shared ones are written out for each."""

_ROOT = len(TABLES)
_TABLE_NAMES = tuple(TABLES)

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
    None | bool | int | float | str | FloatValue | _RecordItem | _TupleItem | _ListItem | _DictItem
)


class _Table(msgspec.Struct):
    """Rows that are already written, with what the encoder must know of each."""

    rows: list[msgspec.Raw] = []
    depths: list[int] = []
    seen: dict[int, int] = {}
    """Position by ``id`` of the object."""
    equal: dict[bytes, int] | None = None
    """Position by content; ``None`` where two equal objects must stay two."""
    alive: list[object] = []
    """What ``seen`` knows by id, so that no id is given to another object."""


@functools.cache
def _document() -> type[msgspec.Struct]:
    """The whole of a document, for msgspec to validate in one pass."""
    tables: list[tuple[str, Any, Any]] = [
        ("nodes", tuple[swap_of(ExprNode).wire, ...], ()),
        ("frames", tuple[swap_of(FrameDesc).wire, ...], ()),
    ]
    for name, cls in TABLES.items():
        row: Any = plan_of(cls).wire
        if cls is ExprDesc:
            row = Position | tuple[Position, ...]
        elif cls is StackDesc:
            row = tuple[Position, ...]
        tables.append((name, tuple[row, ...], ()))
    return msgspec.defstruct(
        "Document",
        [
            ("format", str),
            ("version", int),
            *tables,
            ("root", msgspec.Raw | msgspec.UnsetType, msgspec.UNSET),
        ],
        omit_defaults=True,
        forbid_unknown_fields=True,
    )


@functools.cache
def _decoder(hint: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(hint)


def dumps(obj: object) -> bytes:
    """Write a record, or a list, tuple or dict of records and plain scalars, as bytes.

    Objects of the shared types that occur twice are written once. Equal input gives equal bytes.

    Args:
        obj: any record; ``None``, ``bool``, ``int``, ``float``, ``str``; or a list, tuple or dict
            (keys ``str`` or ``int``) of these, nested.

    Raises:
        UnsupportedValueError: an object has no record or a field has the wrong type.
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
    data = bytes(data)
    document = _read_document(data, "$")
    if document.root is msgspec.UNSET:
        raise FormatError("the document has no root", where="$", fix="Members are read by Decoder.")
    return _Reader(document, "$").tree(bytes(document.root), "$.root")


class Encoder:
    """Writes several members over one set of tables.

    ``Encoder().add("graph", desc).add("inputs", descs).members()`` gives ``graph.json``,
    ``inputs.json`` and ``tables.json``.
    """

    def __init__(self) -> None:
        self._tables = tuple(
            _Table(equal={} if cls in (ExprDesc, StackDesc) or name == "sources" else None)
            for name, cls in TABLES.items()
        )
        self._nodes: dict[ExprNode, int] = {}
        self._frames: dict[FrameDesc, int] = {}
        self._members: dict[str, bytes] = {}
        self._expr_nodes = 0
        self._deepest = 0
        self._table = _ROOT
        self.level = 0
        self._write = msgspec.json.Encoder().encode

    def add(self, name: str, obj: object) -> Encoder:
        """Add a member.

        Args:
            name: the member's name without ``.json``; ``tables`` is taken.
            obj: what ``dumps`` takes.

        Raises:
            UnsupportedValueError: as ``dumps``; also a name that is taken.
        """
        if name == "tables" or f"{name}.json" in self._members:
            raise UnsupportedValueError("a member of this name exists", where=name)
        self._members[f"{name}.json"] = self.encode(obj, name)
        return self

    def members(self) -> dict[str, bytes]:
        """All members that were added, in that order, and their tables."""
        return {**self._members, "tables.json": self.document(msgspec.UNSET)}

    def encode(self, obj: object, where: str = "$") -> bytes:
        """One tree of records as JSON that refers to this encoder's tables."""
        self._deepest, self._table, self.level = 0, _ROOT, 0
        try:
            return self._write(self._tree(obj))
        except Fault as fault:
            raise fault.error(where, UnsupportedValueError) from fault.__cause__
        except RecursionError:
            raise _too_deep(where) from None

    def document(self, root: bytes | msgspec.UnsetType) -> bytes:
        """The tables, with ``root`` if it is given, under a header."""
        tables = {
            name: [msgspec.Raw(self._row(node)) for node in pool]
            for name, pool in (("nodes", self._nodes), ("frames", self._frames))
        }
        tables |= {name: table.rows for name, table in zip(_TABLE_NAMES, self._tables, strict=True)}
        body = {"format": FORMAT, "version": VERSION}
        body |= {name: rows for name, rows in tables.items() if rows}
        if not isinstance(root, msgspec.UnsetType):
            body["root"] = msgspec.Raw(root)
        return self._write(body)

    # --- trees ---

    def _tree(self, obj: object) -> object:
        if obj is None or isinstance(obj, (bool, int, str)):
            return obj
        if isinstance(obj, float):
            return obj if math.isfinite(obj) else FloatValue(text=_float_text(obj))
        if isinstance(obj, Record):
            name, cls = record_name(type(obj)), type(obj)
            table = table_of(cls)
            body = plan_of(cls).encode(self, obj) if table is None else self.put(table, obj)
            return _RecordItem(name, msgspec.Raw(self._row(body)))
        self.enter()
        items: list[Any] = []
        try:
            if isinstance(obj, dict):
                for key, value in obj.items():
                    if type(key) not in (str, int):
                        raise Fault("a key has no JSON form", "a str or an int", repr(key))
                    items.append((key, self._tree(value)))
            elif isinstance(obj, (list, tuple)):
                items.extend(map(self._tree, obj))
            else:
                raise Fault(
                    "no record",
                    "a record, or a list, tuple or dict of them",
                    type(obj).__qualname__,
                )
        except Fault as fault:
            raise fault.at(f"[{len(items)}]") from fault.__cause__
        self.level -= 1
        if isinstance(obj, dict):
            return _DictItem(items)
        return _TupleItem(items) if isinstance(obj, tuple) else _ListItem(items)

    # --- called by the compiled closures ---

    def enter(self) -> None:
        """One level of nesting deeper."""
        self.level += 1
        if self.level > MAX_NESTING:
            raise Fault(f"records are nested deeper than {MAX_NESTING} levels", kind=LimitError)

    def put(self, index: int, obj: Any) -> int:
        """The position of ``obj`` in table ``index``; written first if it is new."""
        table = self._tables[index]
        if index > self._table:
            inner, outer = _TABLE_NAMES[index], _TABLE_NAMES[self._table]
            raise Fault(f"a row of {outer} cannot hold one of {inner}")
        position = table.seen.get(id(obj))
        if position is None:
            chain = plan_of(type(obj)).chain if type(obj) is TABLES[_TABLE_NAMES[index]] else ()
            for earlier in reversed(_unseen(obj, chain, table.seen)) if chain else ():
                self._add(index, table, earlier)
            position = self._add(index, table, obj)
        if table.depths[position] > self._deepest:
            self._deepest = table.depths[position]
        return position

    def _add(self, index: int, table: _Table, obj: Any) -> int:
        position = table.seen.get(id(obj))
        if position is not None:
            return position
        outer, self._deepest, self._table = (self._deepest, self._table), 0, index
        self.enter()
        if type(obj) is ExprDesc:
            row: object = self._expr(obj)
        elif type(obj) is StackDesc:
            row = [self._frames.setdefault(frame, len(self._frames)) for frame in obj.frames]
        else:
            row = plan_of(TABLES[_TABLE_NAMES[index]]).encode(self, obj)
        data = self._row(row)
        if self._deepest >= MAX_CHAIN:
            raise Fault(f"more than {MAX_CHAIN} {_TABLE_NAMES[index]} in a chain", kind=LimitError)
        depth = self._deepest + 1
        self.level -= 1
        self._deepest, self._table = outer
        position = len(table.rows)
        if table.equal is not None:
            position = table.equal.setdefault(data, position)
        if position == len(table.rows):
            table.rows.append(msgspec.Raw(data))
            table.depths.append(depth)
        table.seen[id(obj)] = position
        table.alive.append(obj)
        return position

    def _row(self, row: object) -> bytes:
        try:
            return self._write(row)
        except (TypeError, ValueError, OverflowError) as error:
            raise Fault(f"a value cannot be written: {error}") from error

    def _expr(self, desc: ExprDesc) -> int | tuple[int, ...]:
        """The root's position, or all positions where the order is not the canonical one."""
        args: list[tuple[int, ...]] = []
        place: list[int] = []
        for i, node in enumerate(desc.nodes):
            args.append(node.args if type(node) is ApplyNode else ())
            if type(node) is ApplyNode:
                if any(not 0 <= arg < i for arg in node.args):
                    raise Fault("an argument is not an earlier node").at(f".nodes[{i}].args")
                node = ApplyNode(node.function, tuple([place[arg] for arg in node.args]))  # noqa: PLW2901
            place.append(self._nodes.setdefault(node, len(self._nodes)))
        self._expr_nodes += len(place)
        if self._expr_nodes > MAX_EXPR_NODES:
            raise Fault(f"expressions have more than {MAX_EXPR_NODES} nodes", kind=LimitError)
        if not place or len(set(place)) != len(place):
            raise Fault("an expression is empty or has two equal nodes").at(".nodes")
        if _postorder(len(args) - 1, args) == list(range(len(args))):
            return place[-1]
        return tuple(place)


class Decoder:
    """Reads the members that an ``Encoder`` wrote.

    Args:
        members: their bytes by name; the tables are read and validated at once.

    Raises:
        FormatError, VersionError, LimitError: as ``loads``, with the member's name before the path.
    """

    def __init__(self, members: Mapping[str, bytes]) -> None:
        self._members = members
        if "tables.json" not in members:
            raise FormatError("a member is missing", where="tables.json")
        where = "tables.json $"
        self._reader = _Reader(_read_document(members["tables.json"], where), where)

    def get(self, name: str, cls: type[_T]) -> _T:
        """The object of a member.

        Raises:
            FormatError: there is no such member, it is ill-typed, or no instance of ``cls``.
        """
        file = f"{name}.json"
        if file not in self._members:
            raise FormatError("a member is missing", where=file)
        data = self._members[file]
        _check_text(data, f"{file} $")
        obj = self._reader.tree(data, f"{file} $")
        if not isinstance(obj, cls):
            raise FormatError(
                "a member has the wrong type",
                where=file,
                expected=cls.__name__,
                found=type(obj).__name__,
            )
        return obj


class _Reader:
    """The tables of a document as objects."""

    def __init__(self, document: Any, where: str) -> None:
        self.level = 0
        self._deepest = 0
        self._rows: tuple[list[Any], ...] = tuple([] for _ in TABLES)
        self._depths: tuple[list[int], ...] = tuple([] for _ in TABLES)
        self._frames = self._read_rows("frames", document.frames, swap_of(FrameDesc).decode, where)
        self._args: list[tuple[int, ...]] = []
        self._budget = MAX_EXPR_NODES
        self._nodes = self._read_rows("nodes", document.nodes, _read_node, where)
        if len(set(self._nodes)) != len(self._nodes):
            raise FormatError("two expression nodes are equal", where=f"{where}.nodes")
        for index, (name, cls) in enumerate(TABLES.items()):
            decode = plan_of(cls).decode
            if cls is ExprDesc:
                decode = _Reader._read_expr
            elif cls is StackDesc:
                decode = _Reader._read_stack
            self._read_rows(name, getattr(document, name), decode, where, index)

    def _read_rows(
        self,
        name: str,
        wires: tuple[Any, ...],
        decode: Callable[[Any, Any], Any],
        where: str,
        index: int = -1,
    ) -> list[Any]:
        rows, depths = (self._rows[index], self._depths[index]) if index >= 0 else ([], [])
        for wire in wires:
            self._deepest = self.level = 0
            try:
                rows.append(decode(self, wire))
                if self._deepest >= MAX_CHAIN:
                    raise Fault(f"more than {MAX_CHAIN} {name} in a chain", kind=LimitError)
            except Fault as fault:
                raise fault.at(f".{name}[{len(depths)}]").error(where, FormatError) from None
            depths.append(self._deepest + 1)
        return rows

    def enter(self) -> None:
        """One level of nesting deeper."""
        self.level += 1
        if self.level > MAX_NESTING:
            raise Fault(f"records are nested deeper than {MAX_NESTING} levels", kind=LimitError)

    def get(self, index: int, position: int) -> Any:
        """The object at a position of table ``index``."""
        rows = self._rows[index]
        if position >= len(rows):
            raise _out_of_range(_TABLE_NAMES[index], position, len(rows))
        depth = self._depths[index][position]
        if depth > self._deepest:
            self._deepest = depth
        return rows[position]

    def tree(self, data: bytes, where: str) -> Any:
        """The object that a tree of JSON stands for."""
        self._deepest = self.level = 0
        tree = _read(_decoder(_Tree), data, where)
        try:
            return self._build(tree)
        except Fault as fault:
            raise fault.error(where, FormatError) from None
        except RecursionError:
            raise _too_deep(where) from None

    def _build(self, tree: Any) -> Any:
        if isinstance(tree, FloatValue):
            return float(tree.text)
        if isinstance(tree, _RecordItem):
            return self._record(tree)
        if not isinstance(tree, (_TupleItem, _ListItem, _DictItem)):
            return tree
        self.enter()
        items: list[Any] = []
        try:
            for item in tree.items:
                items.append(  # noqa: PERF401 - its length is the path of an error
                    (item[0], self._build(item[1])) if type(item) is tuple else self._build(item)
                )
        except Fault as fault:
            raise fault.at(f".items[{len(items)}]") from None
        self.level -= 1
        if isinstance(tree, _ListItem):
            return items
        if isinstance(tree, _TupleItem):
            return tuple(items)
        if len(dict(items)) != len(items):
            raise Fault("a key occurs twice")
        return dict(items)

    def _record(self, item: _RecordItem) -> Any:
        cls = record_type(item.name)
        table = table_of(cls)
        decoder = _decoder(plan_of(cls).wire if table is None else Position)
        try:
            wire = _read(decoder, bytes(item.body), "$")
            return plan_of(cls).decode(self, wire) if table is None else self.get(table, wire)
        except FormatError as error:
            path = (error.where or "$").removeprefix("$")
            fault = Fault(error.what, error.expected, error.found, kind=type(error))
            raise fault.at(f".body{path}") from None
        except Fault as fault:
            raise fault.at(".body") from None

    def _read_stack(self, row: tuple[int, ...]) -> StackDesc:
        for i, position in enumerate(row):
            if position >= len(self._frames):
                raise _out_of_range("frames", position, len(self._frames)).at(f"[{i}]")
        return StackDesc(frames=tuple([self._frames[position] for position in row]))

    def _read_expr(self, row: int | tuple[int, ...]) -> ExprDesc:
        order = (row,) if isinstance(row, int) else row
        for position in order:
            if position >= len(self._nodes):
                raise _out_of_range("nodes", position, len(self._nodes))
        if isinstance(row, int):
            order = _postorder(row, self._args, self._budget)
        self._budget -= len(order)
        if self._budget < 0:
            raise Fault(f"expressions have more than {MAX_EXPR_NODES} nodes", kind=LimitError)
        local: dict[int, int] = {}
        nodes: list[ExprNode] = []
        for position in order:
            node = self._nodes[position]
            if args := self._args[position]:
                if any(arg not in local for arg in args):
                    raise Fault("a node stands before its arguments")
                node = ApplyNode(node.function, tuple([local[arg] for arg in args]))
            local[position] = len(nodes)
            nodes.append(node)
        if not nodes or len(local) != len(nodes):
            raise Fault("an expression is empty or has two equal nodes")
        return ExprDesc(nodes=tuple(nodes))


def _read_node(reader: _Reader, wire: Any) -> ExprNode:
    node = swap_of(ExprNode).decode(reader, wire)
    args = node.args if type(node) is ApplyNode else ()
    for arg in args:
        if not 0 <= arg < len(reader._args):
            raise _out_of_range("nodes", arg, len(reader._args)).at(".args")
    reader._args.append(args)
    return node


# --- helpers ----------------------------------------------------------------------------------------


def _postorder(root: int, args: list[tuple[int, ...]], budget: int = MAX_EXPR_NODES) -> list[int]:
    """What ``root`` needs, arguments first and from left to right: the canonical order."""
    if not args[root]:
        return [root]
    order: dict[int, None] = {}
    stack = [root]
    while stack:
        position = stack[-1]
        pending = [arg for arg in args[position] if arg not in order]
        if pending and position not in order:
            stack.extend(reversed(pending))
            continue
        stack.pop()
        order[position] = None
        if len(order) > budget:
            break
    return list(order)


def _unseen(obj: Any, chain: tuple[str, ...], seen: dict[int, int]) -> list[Any]:
    """Objects of the same type that ``obj`` reaches through its own fields, nearest first."""
    found: list[Any] = []
    known: set[int] = set()
    pending = [(obj, 0)]
    while pending:
        parent, depth = pending.pop()
        for name in chain:
            child = getattr(parent, name)
            if child is None or id(child) in seen or id(child) in known:
                continue
            if depth >= MAX_CHAIN:
                raise Fault(f"more than {MAX_CHAIN} objects in a chain", kind=LimitError)
            known.add(id(child))
            found.append(child)
            pending.append((child, depth + 1))
    return found


def _float_text(value: float) -> Literal["inf", "-inf", "nan"]:
    if math.isnan(value):
        return "nan"
    return "inf" if value > 0 else "-inf"


def _out_of_range(table: str, position: int, size: int) -> Fault:
    return Fault(f"no such row of {table}", f"a position below {size}", str(position))


def _too_deep(where: str) -> LimitError:
    return LimitError(
        "the interpreter's stack is too short for this nesting",
        where=where,
        fix="Call it from a shallower stack, or raise sys.setrecursionlimit.",
    )


def _read_document(data: bytes, where: str) -> Any:
    """The validated wire form of a document."""
    _check_text(data, where)
    header = _read(_decoder(_Header), data, where, strict=False)
    if header.format != FORMAT:
        raise FormatError(
            "not data of torch_fakeify", where=where, expected=FORMAT, found=header.format
        )
    if header.version > VERSION:
        raise VersionError(
            "a newer version of torch_fakeify wrote this",
            where=where,
            expected=f"version {VERSION} or older",
            found=f"version {header.version}",
            fix="Upgrade torch_fakeify.",
        )
    if header.version < 1:
        raise VersionError("no such version", where=where, found=str(header.version))
    return _read(_decoder(_document()), data, where)


def _check_text(data: bytes, where: str) -> None:
    """Refuse what is not UTF-8 and what would overflow the C stack of a recursive parser."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise FormatError("not UTF-8 text", where=f"{where} byte {error.start}") from None
    # A backslash occurs in strings alone; without escapes, every second piece is a string.
    text = data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data
    brackets = b"".join(text.split(b'"')[::2]).translate(None, _NO_BRACKETS)
    for _ in range(MAX_JSON_DEPTH):
        shorter = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if len(shorter) == len(brackets):
            break
        brackets = shorter
    if brackets.count(b"[") + brackets.count(b"{") > MAX_JSON_DEPTH:
        raise LimitError(f"JSON is nested deeper than {MAX_JSON_DEPTH} levels", where=where)


_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


def _read(
    decoder: msgspec.json.Decoder[Any], data: bytes, where: str, *, strict: bool = True
) -> Any:
    try:
        wire = decoder.decode(data)
        if strict and msgspec.json.encode(wire) != data:
            # Not as we write it: perhaps edited. Fine, but msgspec lets duplicate keys pass.
            json.loads(data, object_pairs_hook=functools.partial(_refuse_duplicates, where))
    except msgspec.ValidationError as error:
        _raise_invalid(str(error), where)
    except msgspec.DecodeError as error:
        raise FormatError("not valid JSON", where=where, found=str(error)) from None
    except RecursionError:
        raise _too_deep(where) from None
    except ValueError as error:
        raise FormatError("not readable", where=where, found=str(error)) from None
    return wire


def _refuse_duplicates(where: str, pairs: list[tuple[str, object]]) -> None:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise FormatError(f"the key {twice!r} occurs twice in one object", where=where)


def _raise_invalid(message: str, where: str) -> NoReturn:
    text, _, path = message.partition(" - at `$")
    where = f"{where}{path.removesuffix('`')}"
    found = re.fullmatch(r"Expected `(.*)`, got `(.*)`", text)
    if found:
        raise FormatError(
            "a value has the wrong type", where=where, expected=found[1], found=found[2]
        )
    raise FormatError(text[0].lower() + text[1:], where=where)
