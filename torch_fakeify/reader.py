"""The tables of a document as objects, and the trees of members over them: the other half of ``codec.py``.

Rows are read in the order in which they stand, so that each refers to objects that exist.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from . import bounds
from .chains import MAX_CHAIN, too_long
from .closures import MAX_NESTING, Fault, no_row, too_nested
from .desc import (
    ApplyNode,
    ExprDesc,
    ExprNode,
    FloatValue,
    FrameDesc,
    MetaTensorDesc,
    Record,
    SourceDesc,
    StackDesc,
)
from .errors import FormatError, LimitError
from .fork_locks import fork_safe_lock
from .strict_json import decode, too_deep
from .wire import SHARED, TABLES, plan_of, record_type, swap_of, table_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "MAX_EXPR_NODES",
    "DictItem",
    "ListItem",
    "Reader",
    "RecordItem",
    "Tree",
    "TupleItem",
    "decoder",
    "postorder",
]

MAX_EXPR_NODES = 10_000_000
"""Nodes of all expressions together, after the shared ones are written out for each."""


class RecordItem(msgspec.Struct, tag="record", forbid_unknown_fields=True):
    """A record in a tree: its fields, or the position of a shared one."""

    name: str
    body: msgspec.Raw


class TupleItem(msgspec.Struct, tag="tuple", forbid_unknown_fields=True):
    """A tuple in a tree."""

    items: list[Tree]


class ListItem(msgspec.Struct, tag="list", forbid_unknown_fields=True):
    """A list in a tree."""

    items: list[Tree]


class DictItem(msgspec.Struct, tag="dict", forbid_unknown_fields=True):
    """A dictionary in a tree, whose keys are texts and ints."""

    items: list[tuple[str | int, Tree]]


Tree: TypeAlias = (
    bool | int | float | str | FloatValue | RecordItem | TupleItem | ListItem | DictItem | None
)


class Reader:
    """The tables of a document of ``size`` bytes as objects, and trees over them."""

    def __init__(self, document: Any, size: int, where: str) -> None:
        self.level = 0
        self.last: list[int] | None = None
        """The positions from which the next steps go, where references are steps."""
        self._characters = bounds.allowed_characters(size)
        self.depth = 0
        """Of the arrays and objects inside one another in a tree."""
        self.deepest = 0
        """Rows on the longest path of references from the row that is read."""
        self.rows: tuple[list[Any], ...] = tuple([] for _ in TABLES)
        self.depths: tuple[list[int], ...] = tuple([] for _ in TABLES)
        rows = len(document.nodes) + len(document.exprs)
        self._budget = allowed = bounds.allowed_nodes(rows, MAX_EXPR_NODES)
        self._write = msgspec.json.Encoder().encode
        self._known: dict[tuple[Callable[[Reader, Any], Any], bytes], tuple[Any, int]] = {}
        self._args: list[tuple[int, ...]] = []
        self.root = document.root
        """The tree of a document that stands alone, as text."""
        self.tables: dict[str, list[Any]] = {}
        self._depths: dict[str, list[int]] = {}
        self._fill("nodes", document.nodes, Reader._read_node, where)
        self.roots = document.exprs
        self.tree_nodes = bounds.tree_nodes(self._args, self.roots, allowed), allowed
        self._fill("frames", document.frames, swap_of(FrameDesc).decode, where)
        # By text: numbers can be chosen so that all have one hash.
        if len(set(map(self._write, self.tables["nodes"]))) != len(self.tables["nodes"]):
            raise FormatError("two expression nodes are equal", where=f"{where}.nodes")
        for name, rows, depths in zip(TABLES, self.rows, self.depths, strict=True):
            self.tables[name], self._depths[name] = rows, depths
        for name, cls in zip(TABLES, SHARED, strict=True):
            self.last = [0] * len(TABLES) if cls is MetaTensorDesc else None
            self._read_table(cls, getattr(document, name), where)
            setattr(document, name, ())  # its rows are records now

    def _read_table(self, cls: type[Record], wires: Any, where: str) -> None:
        """Read the rows of one shared type, the tables before it being there."""
        readers: dict[type[Record], Callable[[Any, Any], Any]] = {
            ExprDesc: Reader._read_expr,
            StackDesc: Reader._read_stack,
            SourceDesc: Reader._read_source,
        }
        read = readers.get(cls, plan_of(cls).decode_row)
        self._fill(TABLES[SHARED.index(cls)], wires, read, where)

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

    @staticmethod
    def typed(hint: Any, text: Any) -> Any:
        """A part of a document, of a wire type."""
        try:
            return decode(decoder(hint), memoryview(text), "$")
        except FormatError as error:
            path = (error.where or "$").removeprefix("$")
            fault = Fault(error.what, error.expected, error.found, kind=type(error))
            raise fault.at(path) from None

    def once(self, decode: Callable[[Reader, Any], Any], wire: Any) -> Any:
        """The record of one of `wire.FREQUENT`: the same object for all that was written alike."""
        return self._once(decode, self._write(wire), lambda _: wire)

    def once_text(self, hint: Any, decode: Callable[[Reader, Any], Any], text: Any) -> Any:
        """As `once`, a tuple that may hold some of them, of its text."""
        return self._once(decode, bytes(text), functools.partial(self.typed, hint))

    def _once(
        self, decode: Callable[[Reader, Any], Any], text: bytes, parse: Callable[[bytes], Any]
    ) -> Any:
        known = self._known.get((decode, text))
        if known is None or self.level >= MAX_NESTING:
            deepest, self.deepest = self.deepest, 0
            last, self.last = self.last, None
            known = self._known[decode, text] = (decode(self, parse(text)), self.deepest)
            self.deepest, self.last = deepest, last
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

    def _read_source(self, row: dict[str, Any]) -> SourceDesc:
        more = row.pop("more", None)
        if more is not None:
            if "name" in row or row.get("base") is None:
                raise Fault("a source has a name, or a base and what follows the base's name")
            try:
                row["name"] = name = self._row("sources", row["base"]).name + more
            except Fault as fault:
                raise fault.at(".base") from None
            self._characters -= len(name)
            if self._characters < 0:
                raise Fault("the names of sources are too long together", kind=LimitError)
        return plan_of(SourceDesc).decode_row(self, row)

    def _read_expr(self, row: int | tuple[int, ...]) -> ExprDesc:
        if isinstance(row, int):
            self._row("nodes", row)
            order = postorder(row, self._args, self._budget)
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

    def tree(self, data: bytes, where: str, depth: int = 0) -> Any:
        """The object that a tree of JSON stands for.

        Args:
            data: the tree.
            where: put before the path in an error.
            depth: of its arrays and objects inside one another, where it may be more than that of
                the tables.
        """
        self.depth = depth
        self.level = self.deepest = 0
        self.last = [0] * len(TABLES)
        tree = decode(decoder(Tree), data, where)
        try:
            return self._build(tree)
        except Fault as fault:
            raise fault.error(where, FormatError) from None
        except RecursionError:
            raise too_deep(where) from None

    def _build(self, tree: Any) -> Any:
        if isinstance(tree, FloatValue):
            return float(tree.text)
        if isinstance(tree, RecordItem):
            return self._record(tree)
        if not isinstance(tree, (TupleItem, ListItem, DictItem)):
            return tree
        self.level += 1
        if self.level > MAX_NESTING:
            raise too_nested()
        items: list[Any] = []
        try:
            if isinstance(tree, DictItem):
                for key, value in tree.items:
                    items.append((key, self._build(value)))
            else:
                for item in tree.items:
                    items.append(self._build(item))  # noqa: PERF401
        except Fault as fault:
            raise fault.at(f".items[{len(items)}]") from None
        self.level -= 1
        if isinstance(tree, DictItem):
            if len(dict(items)) != len(items):
                raise Fault("a key occurs twice")
            return dict(items)
        return tuple(items) if isinstance(tree, TupleItem) else items

    def _record(self, item: RecordItem) -> Any:
        try:
            cls = record_type(item.name)
            table = table_of(cls)
        except Fault as fault:
            raise fault.at(".name") from None
        try:
            if table is not None:
                return swap_of(cls).decode(self, self.typed(swap_of(cls).wire, item.body))
            plan = plan_of(cls)
            return plan.decode(self, self.typed(plan.wire, item.body))
        except Fault as fault:
            raise fault.at(".body") from None


_MAKING = fork_safe_lock()


@functools.cache
def decoder(hint: Any) -> msgspec.json.Decoder[Any]:
    """The decoder of a wire type.

    msgspec notes with a type what it finds out about it, and another thread that makes a decoder of
    the same type then would find half of that: one after the other.
    """
    with _MAKING:
        return msgspec.json.Decoder(hint)


def postorder(root: int, args: list[tuple[int, ...]], limit: int = MAX_EXPR_NODES) -> list[int]:
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
