"""Encode records: an object of a shared type becomes a row of a table, referenced by position.

A record is copied with positions in place of shared objects, and msgspec writes the copy. Fields whose
type holds no shared object are not visited.
"""

from __future__ import annotations

import copy
import functools
import math
import operator
import sys
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from torch_fakeify.errors import LimitError, UnsupportedValueError
from torch_fakeify.records.graph import NodeDesc
from torch_fakeify.records.id_owners import (
    find_clash,
    find_storage_clash,
    have_two_describers,
    two_describers_clash,
)
from torch_fakeify.records.record import Record
from torch_fakeify.records.tensor import (
    ApplyNode,
    ExprDesc,
    ExprNode,
    FloatValue,
    FrameDesc,
    MetaTensorDesc,
    SourceDesc,
    StackDesc,
    owner_of,
)

from . import limits
from .faults import Fault
from .format import (
    DELTA_ENCODED,
    FORMAT,
    INTERNED,
    MAX_CHAIN,
    MAX_EXPR_NODES,
    MAX_NESTING,
    SHARED,
    TABLES,
    VERSION,
    DictItem,
    ListItem,
    RecordItem,
    SourceRow,
    TupleItem,
    chain_limit_error,
    is_closed,
    is_union,
    postorder,
    record_name,
    too_nested,
)
from .strict_json import too_deep

if TYPE_CHECKING:
    from torch_fakeify.records.shape_env import ShapeEnvDesc

_NO_TABLE = len(TABLES)
"""The referring table of a reference outside of rows, which may refer to every table."""

_replace = msgspec.structs.replace

_SAME_DESCRIBER = (
    "Describe tensors that belong together with one MetaTensorDescriber, and write records of several"
    " describers, or of several times, apart"
)
"""The remedy for two different records with one id."""


@functools.cache
def _parents(cls: type[Record]) -> list[str]:
    own, fields = {cls, type(None)}, msgspec.structs.fields(cls)
    return [field.name for field in fields if set(typing.get_args(field.type)) == own]


class _Table:
    """The rows written for one shared type."""

    def __init__(self, index: int, cls: type[Record]) -> None:
        self.index = index
        self.cls = cls
        self.parents = _parents(cls)
        """Names of the fields that hold the same record type or None."""
        self.is_delta = cls in DELTA_ENCODED
        adders: dict[type[Record], Callable[[Encoder, _Table, Any], None]] = {
            ExprDesc: Encoder.add_expr,
            StackDesc: Encoder.add_stack,
            SourceDesc: Encoder.add_source,
        }
        self.add = adders.get(cls, Encoder.add_tensor)
        self.interned = cls in (ExprDesc, StackDesc, SourceDesc)
        """Whether equal objects share a row; two equal tensors must stay two."""
        self.by_id: dict[int, Any] = {}
        """The first record of each id, of tensors and storages."""
        self.rows: list[msgspec.Raw] = []
        self.depths: list[int] = []
        self.seen: dict[int, int] = {}
        """Position of a row by the ``id()`` of its object."""
        self.alive: list[Any] = []
        """The objects of ``seen``, referenced so that their ``id()`` stay theirs."""
        self.equal: dict[object, int] = {}
        """Position of a row by its JSON text, in which ``1`` and ``True`` differ."""
        self.last: list[int] | None = [0] * len(TABLES) if cls is MetaTensorDesc else None
        """The positions that its last row refers to, by table, if rows are delta-encoded."""

    def add_row(self, obj: object, row: bytes, depth: int) -> bool:
        """Add the row of an object, unless an equal one may be shared; return whether it is new."""
        position = end = len(self.rows)
        if self.interned:
            position = self.equal.setdefault(row, position)
        if position == end:
            self.rows.append(msgspec.Raw(row))
            self.depths.append(depth)
        self.seen[id(obj)] = position
        self.alive.append(obj)
        return position == end


class Encoder:
    """Encodes the members of a capture over one set of tables.

    ``Encoder().add("graph", desc).add("inputs", descs).members()`` gives ``graph.json``,
    ``inputs.json`` and ``tables.json``.
    """

    def __init__(self) -> None:
        self._tables = {cls: _Table(i, cls) for i, cls in enumerate(SHARED)}
        self._nodes: dict[ExprNode, int] = {}
        self._frames: dict[FrameDesc, int] = {}
        self._roots: list[int | tuple[int, ...]] = []
        """For each row of expressions, the position of its root, or those of all its nodes."""
        self._members: dict[str, bytes] = {}
        # By the ``id()`` of a record, which the entry references.
        self._written: dict[int, tuple[Any, msgspec.Raw, int]] = {}
        self._first: Any = None
        """The first described or loaded record: all others must come from its describer."""
        self._characters = 0
        """Of the names of sources whose rows leave a part out."""
        self._expr_nodes = 0
        self.level = 0
        self._deepest = 0
        """Rows on the longest path of references from what is encoded."""
        self._referrer = _NO_TABLE
        self._last: list[int] | None = None
        """By table the position referenced last, where references are delta-encoded."""
        self._write = msgspec.json.Encoder().encode

    def add(self, name: str, obj: object) -> Encoder:
        """Add a member, by its name without ``.json``: a tree of records, as for ``dumps``.

        Raises:
            UnsupportedValueError: as for ``dumps``; the name is taken; or a record has the id of a
                different one in any member.
        """
        file = f"{name}.json"
        if name == "tables" or file in self._members:
            raise UnsupportedValueError("a member of this name exists", where=file)
        self._members[file] = self.encode(obj, f"{file} $")
        return self

    def members(self) -> dict[str, bytes]:
        """Return the added members in their order, and the tables."""
        return {**self._members, "tables.json": self.document()}

    def check(self, env: ShapeEnvDesc | None, products: int) -> Encoder:
        """Refuse what a `Decoder` of a frame with this ``ShapeEnv`` refuses; ``products`` is that of `Limits`.

        Raises:
            LimitError: the expressions or tensors are too large when expanded.
        """
        where = "tables.json $"
        nodes = list(self._nodes)
        most = limits.allowed_nodes(len(nodes) + len(self._roots), MAX_EXPR_NODES)
        args = [node.args if type(node) is ApplyNode else () for node in nodes]
        found = limits.tree_nodes(args, self._roots, most)
        tables = {"nodes": nodes, "tensors": self._tables[MetaTensorDesc].alive}
        limits.check_tables(tables, (found, most), where)
        size = sum([len(memoryview(row)) for row in self._tables[SourceDesc].rows])
        if self._characters > limits.allowed_characters(size):
            what = "the names of sources are too long together"
            raise LimitError(what, where=f"{where}.sources")
        if env is not None:
            ids = self._tables[ExprDesc].seen
            limits.check_frame(tables, self._roots, ids, env, products, where)
        return self

    def encode(self, obj: object, where: str = "$") -> bytes:
        """Encode a tree of records as JSON that refers to this encoder's tables."""
        self.level, self._deepest, self._referrer = 0, 0, _NO_TABLE
        self._last = [0] * len(TABLES)
        try:
            return self._text(self._tree(obj))
        except Fault as fault:
            raise fault.error(where, UnsupportedValueError) from fault.__cause__
        except RecursionError:
            raise too_deep(where) from None

    def document(self, root: bytes | None = None) -> bytes:
        """Return the document of the tables, with the header and an optional root."""
        body: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        for name, pool in (("nodes", self._nodes), ("frames", self._frames)):
            if pool:
                body[name] = list(pool)
        for table in self._tables.values():
            if table.rows:
                body[TABLES[table.index]] = table.rows
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
            name, hook = record_name(type(obj)), hooks_of(type(obj))[type(obj)]
            body = obj if hook is None else hook(self, obj)
            return RecordItem(name, msgspec.Raw(self._text(body)))
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

    # --- values of fields -----------------------------------------------------------------------

    def refer(self, obj: Any) -> int:
        """Return the reference to an object of a shared type; write its row if there is none."""
        table = self._tables[type(obj)]
        position = table.seen.get(id(obj))
        if position is None:
            for name in table.parents:
                parent = getattr(obj, name)
                if parent is not None and id(parent) not in table.seen:
                    self._add_chain(table, obj)
                    break
            else:
                table.add(self, table, obj)
            position = table.seen[id(obj)]
        index = table.index
        if index > self._referrer:
            raise Fault(f"a row of {TABLES[self._referrer]} cannot hold one of {TABLES[index]}")
        if table.depths[position] > self._deepest:
            self._deepest = table.depths[position]
        last = self._last
        if last is None or not table.is_delta:
            return position
        before, last[index] = last[index], position
        return position - before

    def memoized(self, encode: _Hook, obj: Any) -> msgspec.Raw:
        """Return the cached JSON of an interned record, or of a tuple that may hold some.

        Tensors of one layout share these objects.
        """
        cached = self._written.get(id(obj))
        if cached is None or self.level >= MAX_NESTING:
            deepest, self._deepest = self._deepest, 0
            last, self._last = self._last, None
            row = msgspec.Raw(self._text(encode(self, obj)))
            cached = self._written[id(obj)] = (obj, row, self._deepest)
            self._deepest, self._last = deepest, last
        _, row, deepest = cached
        if deepest > self._deepest:
            self._deepest = deepest
        return row

    def _text(self, obj: object) -> bytes:
        try:
            return self._write(obj)
        except (TypeError, ValueError, OverflowError) as error:
            raise Fault(f"a value cannot be written: {error}") from error

    # --- rows -----------------------------------------------------------------------------------

    def _add_chain(self, table: _Table, obj: Any) -> None:
        """Write an object, after what it refers to through fields of its own type; not recursive."""
        chain: list[tuple[str, Any]] = [("", obj)]
        try:
            while chain:
                link = chain[-1][1]
                for name in table.parents:
                    parent = getattr(link, name)
                    if type(parent) is table.cls and id(parent) not in table.seen:
                        if len(chain) >= MAX_CHAIN:
                            raise chain_limit_error()
                        chain.append((f".{name}", parent))
                        break
                else:
                    table.add(self, table, link)
                    chain.pop()
        except Fault as fault:
            for part, _ in reversed(chain):
                fault.at(part)
            raise

    def add_tensor(self, table: _Table, obj: Any) -> None:
        """Write the row of a tensor, or of a storage."""
        self._check_id(table, obj)
        self._add_record(table, obj, obj)

    def add_stack(self, table: _Table, obj: StackDesc) -> None:
        """Write the row of a stack: the positions of its frames."""
        frames = self._frames
        row = [frames.setdefault(frame, len(frames)) for frame in obj.frames]
        table.add_row(obj, self._text(row), 1)

    def add_source(self, table: _Table, obj: SourceDesc) -> None:
        """Write the row of a source, without the part of its name that its base has."""
        base = obj.base
        if type(base) is not SourceDesc or not obj.name.startswith(base.name):
            self._add_record(table, obj, obj)
            return
        more = obj.name[len(base.name) :]
        row = SourceRow(cls=obj.cls, more=more, base=base, fields=obj.fields)
        if self._add_record(table, obj, row):
            self._characters += len(obj.name)

    def _add_record(self, table: _Table, obj: Any, row: Any) -> bool:
        """Write a row, and return whether there was no equal one."""
        deepest, referrer, last = self._deepest, self._referrer, self._last
        self._referrer, encode = table.index, record_hook(type(row))
        while True:
            rows = len(table.rows)
            self._deepest, self._last = 0, None if table.last is None else table.last.copy()
            text = self._text(encode(self, row))
            # Deltas are counted from the row before, which may have been written just now.
            if table.last is None or len(table.rows) == rows:
                break
        depth = self._deepest + 1
        table.last = self._last
        self._deepest, self._referrer, self._last = deepest, referrer, last
        if depth > MAX_CHAIN:
            raise chain_limit_error()
        return table.add_row(obj, text, depth)

    def _check_id(self, table: _Table, obj: Any) -> None:
        """Refuse a record of another describer, or with the id of a different record."""
        if self._first is None and owner_of(obj) is not None:
            self._first = obj
        clash = None
        if self._first is not None and have_two_describers(self._first, obj):
            clash = two_describers_clash(self._first, obj)
        elif type(obj.id) is int:
            first = table.by_id.setdefault(obj.id, obj)
            if first is obj:
                return
            if table.cls is MetaTensorDesc:
                clash = find_clash(first, obj, deep=False)
            else:
                clash = find_storage_clash(first, obj)
        if clash is not None:
            name = "tensor" if table.cls is MetaTensorDesc else "storage"
            raise Fault(
                f"{name} {obj.id}: {clash.what}",
                clash.first,
                clash.found,
                fix=_SAME_DESCRIBER + clash.fix,
            )

    def add_expr(self, table: _Table, obj: ExprDesc) -> None:
        """Write an expression: the position of its root, if its nodes are in canonical order."""
        root = self._pooled(obj)
        if table.add_row(obj, self._text(root), 1):
            self._roots.append(root)
            self._expr_nodes += len(obj.nodes)
        if self._expr_nodes > MAX_EXPR_NODES:
            raise Fault(f"expressions have more than {MAX_EXPR_NODES} nodes", kind=LimitError)

    def _pooled(self, desc: ExprDesc) -> int | tuple[int, ...]:
        """Add the nodes of an expression to the pool, and return the row."""
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
        if not place or len(set(place)) != len(place):
            raise Fault("an expression is empty or has two equal nodes").at(".nodes")
        if postorder(len(args) - 1, args) == list(range(len(args))):
            return place[-1]
        return tuple(place)


# --- functions that encode fields -----------------------------------------------------------------

_Hook = Callable[[Encoder, Any], Any]


class _Hooks(dict[type, "_Hook | None"]):
    """Functions that encode the values of a type hint, by their exact type.

    ``None`` for a type whose values are their own JSON form.
    """

    def __missing__(self, kind: type) -> _Hook:
        names = " | ".join(sorted(each.__name__ for each in self if each is not type(None)))
        raise Fault("a value has the wrong type", names, kind.__qualname__)


@functools.cache
def hooks_of(hint: Any) -> _Hooks:
    """Return the functions that encode the values of a type hint.

    Raises:
        TypeError: a record cannot have a field of this type.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if is_union(hint):
        return _union_hooks(args)
    if origin is tuple:
        return _Hooks({tuple: None if _is_own_form(hint) else _tuple_hook(args)})
    if origin is Literal:
        return _Hooks({type(args[0]): None})
    if origin is not None or hint in (list, dict, set, frozenset):
        raise TypeError(f"records hold tuples, not {hint}")
    if hint is float:
        return _Hooks({float: _float})
    if hint in SHARED:
        return _Hooks({hint: Encoder.refer})
    if _is_own_form(hint):
        return _Hooks({hint: None})
    if hint in INTERNED:
        return _Hooks({hint: _memoized(record_hook(hint))})
    return _Hooks({hint: record_hook(hint)})


@functools.cache
def record_hook(cls: type[Record]) -> _Hook:
    """Return a function that copies a record with its fields encoded; itself if none changes."""
    values_of: Any = None
    fields: list[tuple[str, Any, _Hooks]] = []

    def encode(encoder: Encoder, record: Any) -> Any:
        nonlocal values_of, fields
        if values_of is None:  # not before: record types are recursive
            values_of, fields = _visited_fields(cls)
        encoder.level = level = encoder.level + 1
        if level > MAX_NESTING:
            raise too_nested()
        changes: dict[str, Any] = {}
        name = ""
        try:
            for value, (name, default, hooks) in zip(values_of(record), fields):  # noqa: B905
                if value is default:
                    continue
                if default == () == value:  # Python 3.10 has more than one empty tuple
                    changes[name] = default
                    continue
                hook = hooks[type(value)]
                if hook is not None:
                    wire = hook(encoder, value)
                    if wire is not value:
                        changes[name] = wire
                elif value == default and type(value) is type(default):
                    # msgspec omits defaults by identity: equal records must give equal bytes.
                    changes[name] = default
        except Fault as fault:
            raise fault.at(f".{name}") from fault.__cause__
        encoder.level = level - 1
        return _replace(record, **changes) if changes else record

    return encode


def _union_hooks(args: tuple[Any, ...]) -> _Hooks:
    found = _Hooks()
    for arg in args:
        part = hooks_of(arg)
        if not found.keys().isdisjoint(part):
            raise TypeError(f"{arg} looks like another member of the union {args}")
        found.update(part)
    if found.keys() >= {float, str}:
        found[float] = _finite_float
    return found


def _visited_fields(
    cls: type[Record],
) -> tuple[Callable[[Any], tuple[Any, ...]], list[tuple[str, Any, _Hooks]]]:
    """Return the name, default and functions of the fields to visit, and a getter of their values."""
    fields = [
        (field.name, field.default, hooks_of(field.type))
        for field in msgspec.structs.fields(cls)
        if not _is_own_form(field.type) or _may_be_copied(field.default)
    ]
    names = [name for name, _, _ in fields]
    # The getter of a single name gives no tuple.
    return operator.attrgetter(*names, names[0]), fields


@functools.cache
def _is_own_form(hint: Any) -> bool:
    """Return whether msgspec writes values of a type as they are, equal ones as equal texts."""
    if not is_closed(hint):
        return False
    is_struct = isinstance(hint, type) and issubclass(hint, msgspec.Struct)
    fields = msgspec.structs.fields(hint) if is_struct else ()
    if any(_may_be_copied(field.default) for field in fields):
        return False
    return all(map(_is_own_form, [field.type for field in fields] or typing.get_args(hint)))


def _may_be_copied(default: object) -> bool:
    """Return whether a value equal to a default may be another object.

    Python 3.10 has more than one empty tuple: ``tuple(x for x in ())`` is a new one.
    """
    return (
        isinstance(default, str)
        or (type(default) is int and not -5 <= default <= 256)
        or (default == () and sys.version_info < (3, 11))
    )


def _tuple_hook(args: tuple[Any, ...]) -> _Hook:
    if len(args) != 2 or args[1] is not Ellipsis:
        return _fixed_tuple_hook([hooks_of(arg) for arg in args])
    of_pair = typing.get_args(args[0])
    if typing.get_origin(args[0]) is tuple and len(of_pair) == 2 and of_pair[0] is str:
        return _pairs_hook(hooks_of(of_pair[1]))
    hooks = hooks_of(args[0])
    if args[0] is NodeDesc:  # there may be very many; as text, an error in one has its path
        encode_node = record_hook(NodeDesc)
        hooks = copy.copy(hooks)
        hooks[NodeDesc] = lambda encoder, each: msgspec.Raw(
            encoder._text(encode_node(encoder, each))
        )
    hook = _items_hook(hooks)
    holds_interned = not set(INTERNED).isdisjoint((args[0], *typing.get_args(args[0])))
    return _memoized(hook) if holds_interned else hook


def _memoized(hook: _Hook) -> _Hook:
    return lambda encoder, value: encoder.memoized(hook, value)


def _pairs_hook(hooks: _Hooks) -> _Hook:
    """Return a function for a tuple of pairs of a name and a value."""

    def encode(encoder: Encoder, pairs: tuple[tuple[str, Any], ...]) -> Any:
        out: list[tuple[str, Any]] = []
        part = ""
        try:
            for pair in pairs:
                part = ""
                if len(pair) != 2:
                    raise Fault("a tuple has the wrong length", "2", str(len(pair)))
                part = "[1]"
                hook = hooks[type(pair[1])]
                out.append(pair if hook is None else (pair[0], hook(encoder, pair[1])))
        except Fault as fault:
            raise fault.at(f"[{len(out)}]{part}") from fault.__cause__
        return out

    return encode


def _items_hook(hooks: _Hooks) -> _Hook:
    """Return a function for tuples of any number of items of one type."""
    # Most items of sizes and arguments need no call.
    all_plain = frozenset([kind for kind, hook in hooks.items() if hook is None]).issuperset

    def encode(encoder: Encoder, items: tuple[Any, ...]) -> Any:
        if all_plain(map(type, items)):
            return items
        out: list[Any] = []
        try:
            for item in items:
                hook = hooks[type(item)]
                out.append(item if hook is None else hook(encoder, item))
        except Fault as fault:
            raise fault.at(f"[{len(out)}]") from fault.__cause__
        return out

    return encode


def _fixed_tuple_hook(parts: list[_Hooks]) -> _Hook:
    """Return a function for tuples with a type for each item."""

    def encode(encoder: Encoder, items: tuple[Any, ...]) -> Any:
        if len(items) != len(parts):
            raise Fault("a tuple has the wrong length", str(len(parts)), str(len(items)))
        out: list[Any] = []
        try:
            for item, hooks in zip(items, parts):  # noqa: B905 - their lengths are equal
                hook = hooks[type(item)]
                out.append(item if hook is None else hook(encoder, item))
        except Fault as fault:
            raise fault.at(f"[{len(out)}]") from fault.__cause__
        return out

    return encode


def _float(_: Encoder, value: float) -> float | str:
    """Encode a float; infinities and NaN, which JSON lacks, as their names."""
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def _finite_float(_: Encoder, value: float) -> float:
    """Refuse a non-finite float in a union with ``str``, where its name would be a string."""
    if not math.isfinite(value):
        raise Fault("JSON has no such number", "a finite float or a FloatValue", repr(value))
    return value
