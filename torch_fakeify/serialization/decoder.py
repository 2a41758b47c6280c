"""Decode the tables of a document to objects, and the trees of its members over them.

Rows are decoded in their order, so that each refers to objects that exist. msgspec makes the records:
once with numbers for references, which validates the text and puts it in its canonical order, and then
with a ``dec_hook`` that resolves the references.
"""

from __future__ import annotations

import functools
import typing
from typing import TYPE_CHECKING, Any, Union

import msgspec

from torch_fakeify._locks import fork_safe_lock
from torch_fakeify.errors import TRUST, FormatError, LimitError, VersionError
from torch_fakeify.records.id_owners import owner_of_document
from torch_fakeify.records.record import Record
from torch_fakeify.records.rewrite import parts_of
from torch_fakeify.records.tensor import (
    ApplyNode,
    ExprDesc,
    ExprNode,
    FloatValue,
    FrameDesc,
    MetaStorageDesc,
    MetaTensorDesc,
    SourceDesc,
    StackDesc,
    owned,
)

from . import limits
from .faults import Fault, check_limit
from .format import (
    DELTA_ENCODED,
    FORMAT,
    MAX_CHAIN,
    MAX_EXPR_NODES,
    MAX_NESTING,
    NON_FINITE,
    SHARED,
    TABLES,
    VERSION,
    DictItem,
    ListItem,
    Position,
    RecordItem,
    SourceRow,
    Tree,
    TupleItem,
    chain_limit_error,
    is_closed,
    is_union,
    postorder,
    record_type,
    too_nested,
)
from .strict_json import canonical_text, check_text, decode, parse, too_deep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# --- types ----------------------------------------------------------------------------------------


class _Reference(type):
    """The metaclass of reference types, of which msgspec takes resolved records for instances."""

    record: type[Record]

    def __instancecheck__(cls, instance: object) -> bool:
        return type(instance) is cls.record


_REFERENCES = {cls: _Reference(cls.__name__, (), {"record": cls}) for cls in SHARED}
INTERNED_FIELDS = ("size", "stride", "storage_offset", "item_memo", "symbols", "marks")
"""Fields of tensors without delta-encoded references: equal texts are decoded to one object."""

_set_field = msgspec.structs.force_setattr
"""Only for a record that has just been made and is not shared yet."""


class _DecodeTypes:
    """Makes the types by which msgspec decodes the values of a type hint.

    Args:
        resolved: whether a reference is decoded to its record, or to its number. In resolved types
            an instance that msgspec has made changes its class to the record type, and the interned
            parts of rows are text.
    """

    def __init__(self, *, resolved: bool) -> None:
        self._resolved = resolved
        self._structs: dict[type[Any], type[Any]] = {}

    def of(self, hint: Any) -> Any:
        """Return the decode type of a type hint; the hint itself where nothing differs.

        Raises:
            TypeError: a record cannot have a field of this type.
        """
        if is_closed(hint):
            return hint
        if hint in SHARED:
            return self._reference(hint)
        args = typing.get_args(hint)
        if is_union(hint):
            return self._union(args)
        if typing.get_origin(hint) is tuple:
            return tuple[tuple(map(self.of, args))]  # pyright: ignore[reportInvalidTypeForm]
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            return self.struct(hint)
        raise TypeError(f"records do not hold {hint}")

    def struct(self, cls: type[Any]) -> type[Any]:
        """Return the decode type of a record type itself, not of a reference to one."""
        if cls not in self._structs:
            config, fields = cls.__struct_config__, msgspec.structs.fields(cls)
            made = self._structs[cls] = msgspec.defstruct(
                cls.__name__,
                [(f.name, Any) if f.required else (f.name, Any, f.default) for f in fields],
                bases=cls.__bases__,
                namespace={"__post_init__": _become(cls)} if self._resolved else {},
                tag=config.tag,
                tag_field=config.tag_field,
            )
            texts = INTERNED_FIELDS if self._resolved and cls is MetaTensorDesc else ()
            # msgspec reads annotations when the first decoder is made: here recursion closes.
            made.__annotations__ = {
                f.name: msgspec.Raw if f.name in texts else self.of(f.type) for f in fields
            }
        return self._structs[cls]

    def _reference(self, cls: type[Record]) -> Any:
        if self._resolved:
            return _REFERENCES[cls]
        return int if cls in DELTA_ENCODED else Position

    def _union(self, args: tuple[Any, ...]) -> Any:
        others = set(args) - set(SHARED)
        if len(others) < len(args) and not others <= {type(None)}:
            raise TypeError(f"a reference looks like another member of the union {args}")
        parts = [arg if arg is float else self.of(arg) for arg in args]
        if float in args and str not in args:
            parts.append(NON_FINITE)
        return Union[tuple(parts)]  # noqa: UP007 - built from a list


def _become(cls: type[Any]) -> Callable[[Any], None]:
    """Return a function that makes an instance of a resolved type a record."""
    floats = [
        field.name
        for field in msgspec.structs.fields(cls)
        if float in typing.get_args(field.type) and str not in typing.get_args(field.type)
    ]

    if not floats:
        return lambda made: _set_field(made, "__class__", cls)

    def become(made: Any) -> None:
        _set_field(made, "__class__", cls)
        for name in floats:
            value = getattr(made, name)
            if type(value) is str:
                _set_field(made, name, float(value))

    return become


_NUMBERED = _DecodeTypes(resolved=False)
_RESOLVED = _DecodeTypes(resolved=True)
_MAKING = fork_safe_lock()


@functools.cache
def decode_types(hint: Any, *, row: bool = False) -> tuple[msgspec.json.Decoder[Any], Any]:
    """Return how values of a type hint, or the rows of a shared type, are decoded.

    The decoder gives numbers for references, and refuses what is ill-typed; the type is for a decoder
    that resolves references. They are made under a lock: msgspec caches what it finds out on the type
    itself, and another thread could see that half done.
    """
    with _MAKING:
        make = [types.struct if row else types.of for types in (_NUMBERED, _RESOLVED)]
        numbered, resolved = make[0](hint), make[1](hint)
        msgspec.json.Decoder(resolved, dec_hook=_no_reference)  # which looks at the annotations
        return msgspec.json.Decoder(numbered), resolved


@functools.cache
def _field_type(cls: type[Record], name: str) -> Any:
    """Return the type that resolves references in a field; msgspec evaluates annotations for it."""
    (hint,) = (field.type for field in msgspec.structs.fields(cls) if field.name == name)
    return decode_types(hint)[1]


def _no_reference(_kind: Any, _number: object) -> Any:
    raise AssertionError("nothing is decoded to look at types")


class _SourceText(SourceRow, frozen=True, kw_only=True):
    """A row of sources, its fields not parsed."""

    base: int | None = None  # type: ignore[assignment]
    fields: msgspec.Raw = msgspec.Raw(b"[]")  # type: ignore[assignment]


class _StorageText(Record, frozen=True, kw_only=True):
    """A row of storages, its size not parsed."""

    id: int
    nbytes: msgspec.Raw


class _Document(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """The text of a document, with parts of rows and the root not parsed."""

    format: str
    version: int
    nodes: tuple[ExprNode, ...] = ()
    frames: tuple[FrameDesc, ...] = ()
    exprs: tuple[Position | tuple[Position, ...], ...] = ()
    stacks: tuple[tuple[Position, ...], ...] = ()
    sources: tuple[_SourceText, ...] = ()
    storages: tuple[_StorageText, ...] = ()
    tensors: tuple[msgspec.Raw, ...] = ()
    root: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


@functools.cache
def _numbered_document() -> msgspec.json.Decoder[Any]:
    """Return the decoder of a whole document, with numbers for references."""
    with _MAKING:
        rows = {
            "sources": _NUMBERED.struct(SourceRow),
            "storages": _NUMBERED.struct(MetaStorageDesc),
            "tensors": _NUMBERED.struct(MetaTensorDesc),
        }
        made = msgspec.defstruct(
            "Document",
            [(name, tuple[row, ...], ()) for name, row in rows.items()],
            bases=(_Document,),
        )
        return msgspec.json.Decoder(made)


class _Header(msgspec.Struct):
    format: str
    version: int


_HEADER = msgspec.json.Decoder(_Header)
_DOCUMENT = msgspec.json.Decoder(_Document)
_TREE = msgspec.json.Decoder(Tree)


# --- tables ---------------------------------------------------------------------------------------


class _Table:
    """The rows of a shared type that are decoded, to which later rows and trees refer."""

    __slots__ = ("depths", "is_delta", "last", "name", "rows")

    def __init__(self, name: str, cls: type[Record]) -> None:
        self.name = name
        self.is_delta = cls in DELTA_ENCODED
        self.last = 0
        """The position that was referenced last, where references are delta-encoded."""
        self.rows: list[Any] = []
        self.depths: list[int] = []


class _Tables:
    """The tables by reference type, and counts of the references in the decoded text."""

    def __init__(self) -> None:
        self.by_kind = {
            _REFERENCES[cls]: _Table(name, cls) for name, cls in zip(TABLES, SHARED, strict=True)
        }
        self.are_deltas = False
        """Whether references are delta-encoded."""
        self.deepest = 0
        """Rows on the longest path of references."""

    def start_deltas(self) -> None:
        """Count deltas from the first row of each table."""
        self.are_deltas = True
        for table in self.by_kind.values():
            table.last = 0

    def resolve(self, kind: Any, number: int) -> Any:
        """Return the record of a reference; the ``dec_hook`` of msgspec."""
        table = self.by_kind[kind]
        if self.are_deltas and table.is_delta:
            number = table.last = table.last + number
        rows = table.rows
        if not 0 <= number < len(rows):
            raise _missing_row(table.name, number, len(rows))
        depth = table.depths[number]
        if depth > self.deepest:
            self.deepest = depth
        return rows[number]


class _Part:
    """A field of rows, of which equal texts are decoded to one object."""

    __slots__ = ("decoder", "found", "name")

    def __init__(self, name: str, decoder: msgspec.json.Decoder[Any]) -> None:
        self.name = name
        self.decoder = decoder
        self.found: dict[bytes, tuple[Any, int]] = {}
        """By text the object, and the rows on the longest path of references below it."""


class Reader:
    """Decodes the tables of a document when made, then trees over them.

    Args:
        text: the document.
        where: a prefix of the path in errors.
        expr_nodes: most distinct nodes of the expressions.
        describer: a name of the describer that made the records.

    Raises:
        FormatError: the text is no document, or ill-typed.
        VersionError: a newer version wrote it.
        LimitError: it has more depth or expression nodes than allowed.
    """

    def __init__(
        self,
        text: bytes,
        where: str,
        expr_nodes: int = MAX_EXPR_NODES,
        describer: str | None = None,
    ) -> None:
        self._depth = check_text(text, where)
        self._owner = owner_of_document(describer)
        document = _document(text, where)
        what = "the expressions have too many nodes"
        check_limit(len(document.nodes), expr_nodes, what, f"{where}.nodes", fix=TRUST)
        self.root = document.root
        """The JSON text of the root tree, if the document has one."""
        self._where = where
        self._characters = limits.allowed_characters(len(text))
        rows = len(document.nodes) + len(document.exprs)
        self._budget = allowed = limits.allowed_nodes(rows, MAX_EXPR_NODES)
        self._tables = _Tables()
        self._fields_of_source = self._new_part(SourceDesc, "fields")
        self._size_of_storage = self._new_part(MetaStorageDesc, "nbytes")
        self._parts_of_tensor = [self._new_part(MetaTensorDesc, name) for name in INTERNED_FIELDS]
        self._decode_tensor = self._decoder(decode_types(MetaTensorDesc, row=True)[1])
        self._nodes, self._frames = document.nodes, document.frames
        self._args: list[tuple[int, ...]] = []
        self._each("nodes", self._nodes, self._add_node)
        # By text: numbers can be chosen so that all have one hash.
        if len(set(map(msgspec.json.encode, self._nodes))) != len(self._nodes):
            raise FormatError("two expression nodes are equal", where=f"{where}.nodes")
        self.roots = document.exprs
        self.tree_nodes = limits.tree_nodes(self._args, self.roots, allowed), allowed
        self._add_rows(ExprDesc, document.exprs, self._expr)
        self._add_rows(StackDesc, document.stacks, self._stack)
        self._add_rows(SourceDesc, document.sources, self._source)
        document.sources = ()  # its rows are records now
        self._add_rows(MetaStorageDesc, document.storages, self._storage)
        document.storages = ()
        self._tables.start_deltas()
        self._add_rows(MetaTensorDesc, document.tensors, self._tensor)
        rows = {table.name: table.rows for table in self._tables.by_kind.values()}
        self.tables = {"nodes": self._nodes, **rows}

    def _add_rows(
        self, cls: type[Record], wires: Iterable[Any], read: Callable[[Any], Any]
    ) -> None:
        tables, table = self._tables, self._tables.by_kind[_REFERENCES[cls]]
        rows, depths = table.rows, table.depths

        def add(wire: Any) -> None:
            tables.deepest = 0
            row = read(wire)
            if tables.deepest >= MAX_CHAIN:
                raise chain_limit_error()
            if self._depth > MAX_NESTING:
                _check_nesting(row, 0)
            rows.append(row)
            depths.append(tables.deepest + 1)

        self._each(table.name, wires, add)

    def _each(self, table: str, wires: Iterable[Any], add: Callable[[Any], None]) -> None:
        position = 0
        try:
            for position, wire in enumerate(wires):  # noqa: B007 - the path of an error
                add(wire)
        except Fault as fault:
            raise fault.at(f".{table}[{position}]").error(self._where, FormatError) from None
        except RecursionError:
            raise too_deep(f"{self._where}.{table}[{position}]") from None

    def _add_node(self, node: ExprNode) -> None:
        args = node.args if type(node) is ApplyNode else ()
        below = len(self._args)
        for i, arg in enumerate(args):
            if not 0 <= arg < below:
                raise _missing_row("nodes", arg, below).at(f".args[{i}]")
        self._args.append(args)

    def _expr(self, row: int | tuple[int, ...]) -> ExprDesc:
        if isinstance(row, int):
            _at("nodes", self._nodes, row)
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
            node = _at("nodes", self._nodes, position)
            args = self._args[position]
            if args:
                if any(arg not in local for arg in args):
                    raise Fault("a node precedes its arguments")
                node = ApplyNode(node.function, tuple([local[arg] for arg in args]))
            local[position] = len(nodes)
            nodes.append(node)
        if not nodes or len(local) != len(nodes):
            raise Fault("an expression is empty or has two equal nodes")
        return ExprDesc(nodes=tuple(nodes))

    def _stack(self, row: tuple[int, ...]) -> StackDesc:
        return StackDesc(frames=tuple([_at("frames", self._frames, each) for each in row]))

    def _source(self, row: _SourceText) -> SourceDesc:
        base: SourceDesc | None = None
        if row.base is not None:
            try:
                base = self._tables.resolve(_REFERENCES[SourceDesc], row.base)
            except Fault as fault:
                raise fault.at(".base") from None
        if isinstance(row.name, str) and row.more is msgspec.UNSET:
            name = row.name
        elif isinstance(row.more, str) and row.name is msgspec.UNSET and base is not None:
            name = base.name + row.more
            self._characters -= len(name)
            if self._characters < 0:
                raise Fault("the names of sources are too long together", kind=LimitError)
        else:
            raise Fault("a source has a name, or a base and what follows the base's name")
        fields = self._part(self._fields_of_source, row.fields)
        return SourceDesc(cls=row.cls, name=name, base=base, fields=fields)

    def _storage(self, row: _StorageText) -> MetaStorageDesc:
        nbytes = self._part(self._size_of_storage, row.nbytes)
        return owned(MetaStorageDesc(id=row.id, nbytes=nbytes), self._owner)

    def _tensor(self, text: msgspec.Raw) -> MetaTensorDesc:
        row = parse(self._decode_tensor, text)
        for part in self._parts_of_tensor:
            value = getattr(row, part.name)
            if type(value) is msgspec.Raw:
                _set_field(row, part.name, self._part(part, value))
        return owned(row, self._owner)

    def _new_part(self, cls: type[Record], name: str) -> _Part:
        return _Part(name, self._decoder(_field_type(cls, name)))

    def _part(self, part: _Part, text: msgspec.Raw) -> Any:
        """Decode a field of a row, unless one of equal text has been."""
        tables, key = self._tables, bytes(text)
        found = part.found.get(key)
        if found is None:
            deepest, tables.deepest = tables.deepest, 0
            are_deltas, tables.are_deltas = tables.are_deltas, False
            try:
                found = part.found[key] = parse(part.decoder, text), tables.deepest
            except Fault as fault:
                raise fault.at(f".{part.name}") from None
            tables.deepest, tables.are_deltas = deepest, are_deltas
        value, deepest = found
        if deepest > tables.deepest:
            tables.deepest = deepest
        return value

    def _decoder(self, resolved: Any) -> msgspec.json.Decoder[Any]:
        """Return a decoder of records that resolves references."""
        with _MAKING:
            return msgspec.json.Decoder(resolved, dec_hook=self._tables.resolve)

    # --- trees ----------------------------------------------------------------------------------

    def tree(self, data: bytes, where: str) -> Any:
        """Decode a tree.

        Args:
            data: its JSON text.
            where: a prefix of the path in errors.
        """
        depth = check_text(data, where)
        self._tables.start_deltas()
        tree = decode(_TREE, data, where)
        try:
            return self._build(tree, 0, depth)
        except Fault as fault:
            raise fault.error(where, FormatError) from None
        except RecursionError:
            raise too_deep(where) from None

    def _build(self, tree: Any, level: int, depth: int) -> Any:
        if isinstance(tree, FloatValue):
            return float(tree.text)
        if isinstance(tree, RecordItem):
            try:
                cls = record_type(tree.name)
            except Fault as fault:
                raise fault.at(".name") from None
            try:
                numbered, resolved = decode_types(cls)
                text = canonical_text(numbered, tree.body)
                found = parse(self._decoder(resolved), text)
                if depth > MAX_NESTING:
                    _check_nesting(found, level)
                return found
            except Fault as fault:
                raise fault.at(".body") from None
        if not isinstance(tree, (TupleItem, ListItem, DictItem)):
            return tree
        if level >= MAX_NESTING:
            raise too_nested()
        keys: list[str | int] = []
        parts: list[Any] = tree.items
        if isinstance(tree, DictItem):
            keys, parts = [key for key, _ in tree.items], [part for _, part in tree.items]
            if len(set(keys)) != len(keys):
                raise Fault("a key occurs twice")
        items: list[Any] = []
        try:
            for part in parts:
                items.append(self._build(part, level + 1, depth))  # noqa: PERF401 - a path
        except Fault as fault:
            raise fault.at(f".items[{len(items)}]") from None
        if isinstance(tree, DictItem):
            return dict(zip(keys, items, strict=True))
        return tuple(items) if isinstance(tree, TupleItem) else items


# --- helpers --------------------------------------------------------------------------------------


def _document(text: bytes, where: str) -> _Document:
    """Parse the tables of a document, whose rows stay text, and validate them."""
    try:
        canonical = canonical_text(_numbered_document(), text)
    except Fault as fault:
        _check_header(text, where)
        raise fault.error(where, FormatError) from None
    except RecursionError:
        raise too_deep(where) from None
    document = parse(_DOCUMENT, canonical)
    _check_version(document, where)
    return document


def _check_header(text: bytes, where: str) -> None:
    """Refuse text that is no document, or has an unsupported version."""
    try:
        header = decode(_HEADER, text, where, whole=False)
    except LimitError:
        raise
    except FormatError as error:
        raise FormatError(
            "not data of torch_fakeify", where=where, expected=FORMAT, found=error.what
        ) from error
    _check_version(header, where)


def _check_version(header: _Header | _Document, where: str) -> None:
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


def _at(name: str, rows: tuple[Any, ...], position: int) -> Any:
    if not 0 <= position < len(rows):
        raise _missing_row(name, position, len(rows))
    return rows[position]


def _missing_row(table: str, position: int, below: int) -> Fault:
    """Return the error for a reference to a row that does not exist (yet)."""
    expected = f"a position below {below}" if below else "no position: there are no rows"
    return Fault(f"there is no such row of {table} yet", expected, str(position))


def _check_nesting(value: Any, level: int) -> None:
    """Refuse records that are nested too deep, with so many levels around them."""
    pending: list[tuple[Any, int]] = [(value, level)]
    while pending:
        each, level = pending.pop()
        if type(each) is tuple:
            pending += [(item, level) for item in each]
        elif isinstance(each, Record) and not is_closed(type(each)):
            if level >= MAX_NESTING:
                raise too_nested()
            parts = parts_of(each)
            pending += [(part, level + 1) for part in parts if type(part) not in SHARED]
