"""The format of a document: its tables, the types of its rows and trees, and the names of records.

A document is a JSON object with a table for each shared type. A row of a table is a record of that
type, in which a reference to a shared object is the position of its row. Expressions are positions in
the table of nodes, stacks positions in the table of frames, and a source row may leave out the part of
its name that its base has (`SourceRow`). A tree is JSON with a tag for each record, tuple, list and
dictionary.
"""

from __future__ import annotations

import functools
import types
import typing
from typing import Annotated, Any, TypeAlias

import msgspec

from torch_fakeify.errors import LimitError, UnknownNameError
from torch_fakeify.records import frame, frontend, graph, guards, shape_env, tensor
from torch_fakeify.records.record import Record
from torch_fakeify.records.tensor import (
    ExprDesc,
    FloatValue,
    MetaStorageDesc,
    MetaTensorDesc,
    SourceDesc,
    StackDesc,
    SymbolFactDesc,
    SymDesc,
    Value,
)

from .faults import Fault

FORMAT = "torch_fakeify.records"
VERSION = 1
"""History: 1 (2026-11) tables of expressions, stacks, sources, storages and tensors."""

MAX_CHAIN = 250
"""Most rows on a path of references, such as a source over its base over its base."""

MAX_EXPR_NODES = 10_000_000
"""Most nodes of all expressions together, shared nodes counted in each expression."""

MAX_NESTING = 100
"""Most levels of records and values nested in one another."""

SHARED: tuple[type[Record], ...] = (
    ExprDesc,
    StackDesc,
    SourceDesc,
    MetaStorageDesc,
    MetaTensorDesc,
)
"""The shared types in the order of their tables: a row refers to its own and earlier tables."""

TABLES = ("exprs", "stacks", "sources", "storages", "tensors")
"""The names of the tables of `SHARED`."""

DELTA_ENCODED: tuple[type[Record], ...] = (SourceDesc, MetaStorageDesc, MetaTensorDesc)
"""Types whose references are delta-encoded: written as the difference from the reference before.

Most of these references count up, so that rows become equal texts and compress well. Deltas are
counted within a member, and within the table of tensors, in the order of the record's fields. Rows of
sources, and interned records, hold positions.
"""

INTERNED: tuple[type[Record], ...] = (SymDesc, SymbolFactDesc)
"""Interned types: small records of which tensors hold many equal ones.

Each is encoded once, and those of equal text in rows are decoded to one object. They do not hold one
another.
"""

Position = Annotated[int, msgspec.Meta(ge=0)]
"""A reference to an object of a shared type: its position in the type's table."""

NON_FINITE = typing.Literal["inf", "-inf", "nan"]
"""The JSON form of a float that JSON lacks, in a field that holds no strings."""


class SourceRow(Record, frozen=True, kw_only=True):
    """The row of a source: with ``more``, its name is that of its base followed by ``more``."""

    cls: str
    name: str | msgspec.UnsetType = msgspec.UNSET
    more: str | msgspec.UnsetType = msgspec.UNSET
    base: SourceDesc | None = None
    fields: tuple[tuple[str, Value], ...] = ()


# --- trees ----------------------------------------------------------------------------------------


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
    """A dictionary in a tree, with string and integer keys."""

    items: list[tuple[str | int, Tree]]


Tree: TypeAlias = (
    bool | int | float | str | FloatValue | RecordItem | TupleItem | ListItem | DictItem | None
)


# --- names ----------------------------------------------------------------------------------------

RECORD_TYPES: tuple[type[Record], ...] = tuple(
    cls
    for module in (tensor, shape_env, graph, frame, guards, frontend)
    for cls in vars(module).values()
    if isinstance(cls, type) and issubclass(cls, Record) and cls.__module__ == module.__name__
)
"""The types of the records that may be the root of a tree."""

_BY_NAME = {cls.__name__: cls for cls in RECORD_TYPES}


def record_name(cls: type[Any]) -> str:
    """Return the name under which a record type is written.

    Raises:
        Fault: it is not a type of this package's record modules.
    """
    if _BY_NAME.get(cls.__name__) is not cls:
        raise Fault("not a record type of torch_fakeify", found=cls.__qualname__)
    return cls.__name__


def record_type(name: str) -> type[Record]:
    """Return the record type of a name.

    Raises:
        Fault: there is none.
    """
    if name not in _BY_NAME:
        raise Fault("no such record type", found=repr(name), kind=UnknownNameError)
    return _BY_NAME[name]


# --- types and rows -------------------------------------------------------------------------------


@functools.cache
def is_closed(hint: Any) -> bool:
    """Return whether values of a type are their own JSON form: no shared object, no float below."""
    seen: set[Any] = set()
    pending = [hint]
    while pending:
        kind = pending.pop()
        if kind in SHARED or kind is float:
            return False
        if kind not in seen:
            seen.add(kind)
            is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
            fields = msgspec.structs.fields(kind) if is_struct else ()
            pending += [field.type for field in fields] or typing.get_args(kind)
    return True


def is_union(hint: Any) -> bool:
    """Return whether a type hint is a union."""
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def postorder(root: int, args: list[tuple[int, ...]], limit: int = MAX_EXPR_NODES) -> list[int]:
    """Return the nodes below ``root`` in canonical order: arguments first, from left to right."""
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


def chain_limit_error() -> Fault:
    """Return the error for a path of more than `MAX_CHAIN` rows."""
    return Fault(f"more than {MAX_CHAIN} rows in a chain", kind=LimitError)


def too_nested() -> Fault:
    """Return the error for more than `MAX_NESTING` levels."""
    return Fault(f"records are nested deeper than {MAX_NESTING} levels", kind=LimitError)
