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

import contextlib
import functools
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import msgspec

from . import bounds
from .closures import MAX_NESTING
from .desc import (
    ExprDesc,
    ExprNode,
    FrameDesc,
    SourceDesc,
    StackDesc,
)
from .errors import FormatError, LimitError, VersionError
from .fast_reader import FastReader, GaveUp
from .reader import (
    MAX_EXPR_NODES,
    Reader,
    decoder,
)
from .strict_json import check_text, decode, is_canonical
from .wire import (
    SHARED,
    TABLES,
    Position,
    plan_of,
    swap_of,
)
from .writer import FORMAT, VERSION, Encoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .desc_env import ShapeEnvDesc

__all__ = ["FORMAT", "VERSION", "Decoder", "Encoder", "dumps", "loads"]

_T = TypeVar("_T")


# --- the document ---------------------------------------------------------------------------------


class _Header(msgspec.Struct):
    format: str
    version: int


@functools.cache
def _document_decoder(*, strict: bool = False, fast: bool = False) -> msgspec.json.Decoder[Any]:
    """For the whole of a document, which msgspec validates in one pass.

    Args:
        strict: refuse unknown fields of rows too, which the other decoder passes over; it does
            not give what the tables are made of.
        fast: for a `FastReader`.
    """
    fast_types = FastReader.row_types() if fast else {}
    tables: list[Any] = [
        ("nodes", tuple[swap_of(ExprNode).wire, ...], ()),
        ("frames", tuple[swap_of(FrameDesc).wire, ...], ()),
    ]
    for name, cls in zip(TABLES, SHARED, strict=True):
        row: Any = plan_of(cls).wire if strict else plan_of(cls).row
        if cls is ExprDesc:
            row = Position | tuple[Position, ...]
        elif cls is StackDesc:
            row = tuple[Position, ...]
        elif cls is SourceDesc:
            row = _source_row(row, strict=strict)
        row = fast_types.get(cls, row)
        tables.append((name, tuple[row, ...], ()))
    root = ("root", msgspec.Raw | msgspec.UnsetType, msgspec.UNSET)
    document = msgspec.defstruct(
        "Document",
        [("format", str), ("version", int), *tables, root],
        omit_defaults=True,
        forbid_unknown_fields=True,
        gc=False,
    )
    return decoder(document)


def _source_row(row: Any, *, strict: bool) -> Any:
    """A row of a source, that may have `_ShortSource.more` in place of its name."""
    hints = {**row.__annotations__, "more": str}
    if not strict:
        return TypedDict("SourceRow", hints, total=False)  # pyright: ignore[reportArgumentType,reportGeneralTypeIssues]
    fields = [(name, hint | msgspec.UnsetType, msgspec.UNSET) for name, hint in hints.items()]
    return msgspec.defstruct("SourceRow", fields, forbid_unknown_fields=True)


def _read_tables(
    text: bytes, where: str, expr_nodes: int = MAX_EXPR_NODES, *, fast: bool
) -> Reader:
    """The validated tables of a document."""
    depth = check_text(text, where)
    if fast and depth <= MAX_NESTING:
        reader = _read_fast(text, where, expr_nodes)
        if reader is not None:
            return reader
    _check_header(text, where)
    strict = functools.partial(_document_decoder, strict=True)
    document = decode(_document_decoder(), text, where, strict=strict)
    bounds.check_count(len(document.nodes), expr_nodes, f"{where}.nodes")
    return Reader(document, len(text), where)


def _read_fast(text: bytes, where: str, expr_nodes: int) -> FastReader | None:
    """The tables of a text as this package writes it; of any other, nothing is held afterwards."""
    with contextlib.suppress(GaveUp, msgspec.MsgspecError, RecursionError):
        document = _document_decoder(fast=True).decode(text)
        if document.format == FORMAT and 1 <= document.version <= VERSION:
            bounds.check_count(len(document.nodes), expr_nodes, f"{where}.nodes")
            if is_canonical(document, text):
                return FastReader(document, len(text), where)
    return None


def _check_header(text: bytes, where: str) -> None:
    """Refuse what is no document, or one of a version that is not known."""
    try:
        header = decode(decoder(_Header), text, where, whole=False)
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


def dumps(obj: object, *, fast: bool = True) -> bytes:
    """Write a record, or a list, tuple or dict of records and plain scalars, as bytes.

    Objects of the shared types that occur twice are written once. Equal input gives equal bytes.

    Args:
        obj: any record; ``None``, ``bool``, ``int``, ``float``, ``str``; or a list, tuple or dict
            (keys ``str`` or ``int``) of these, nested.
        fast: ``False`` takes the plain way for all of it; the bytes are equal.

    Raises:
        UnsupportedValueError: an object has no record, or a field has the wrong type.
        LimitError: nesting is deeper than a reader allows.
    """
    encoder = Encoder(fast=fast)
    return encoder.document(encoder.encode(obj))


def loads(data: bytes | bytearray | memoryview, *, fast: bool = True) -> Any:
    """Read what ``dumps`` wrote; objects that were shared come back shared.

    Args:
        data: the bytes.
        fast: ``False`` takes the plain way for all of it; the results are equal.

    Raises:
        FormatError: the bytes are not a document, truncated, or ill-typed; names the ``$.path``.
        VersionError: a newer version wrote them.
        LimitError: they ask for more depth or expression nodes than allowed.
    """
    reader = _read_tables(bytes(data), "$", fast=fast)
    if reader.root is msgspec.UNSET:
        raise FormatError("the document has no root", where="$")
    return reader.tree(bytes(reader.root), "$.root")


# --- reading --------------------------------------------------------------------------------------


class Decoder:
    """Reads the members that an ``Encoder`` wrote.

    Args:
        members: their bytes by name; the tables are read and validated at once.
        expr_nodes: how many distinct nodes the expressions may have.
        fast: as for ``loads``.

    Raises:
        FormatError: as ``loads``, with the member's name before the path.
        VersionError: as ``loads``.
        LimitError: as ``loads``.
    """

    def __init__(
        self, members: Mapping[str, bytes], expr_nodes: int = MAX_EXPR_NODES, *, fast: bool = True
    ) -> None:
        self._members = members
        if "tables.json" not in members:
            raise FormatError("the member is missing", where="tables.json")
        where = "tables.json $"
        self._reader = _read_tables(members["tables.json"], where, expr_nodes, fast=fast)
        bounds.check_tables(self._reader.tables, self._reader.tree_nodes, where)

    def check_frame(self, env: ShapeEnvDesc) -> None:
        """Refuse expressions that are too large for a ``ShapeEnv``.

        Args:
            env: what a member has for their symbols.

        Raises:
            LimitError: one is too large multiplied out, or with numbers for its symbols.
        """
        tables, where = self._reader.tables, "tables.json $"
        bounds.check_products(tables, self._reader.roots, where)
        bounds.check_exponents(tables["nodes"], env, f"{where}.nodes")

    def get(self, name: str, cls: type[_T]) -> _T:
        """The object of a member.

        Raises:
            FormatError: there is no such member, it is ill-typed, or no instance of ``cls``.
        """
        file = f"{name}.json"
        if file not in self._members:
            raise FormatError("the member is missing", where=file)
        data = self._members[file]
        depth = check_text(data, f"{file} $")
        obj = self._reader.tree(data, f"{file} $", depth)
        if not isinstance(obj, cls):
            expected, found = cls.__name__, type(obj).__name__
            raise FormatError(
                "the member has the wrong type", where=file, expected=expected, found=found
            )
        return obj
