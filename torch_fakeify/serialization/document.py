"""Serialize records to bytes and back, generic over the record types.

Expressions, stacks, sources, storages and tensors are *shared* types: each such object is written
once, as a row of a table of the document, and referenced by its position. An object that is
referenced twice is decoded to one object. A row refers to earlier rows and earlier tables only, so no
bytes can describe a cycle.

A document is complete (``dumps``, ``loads``), or is split into the members of a capture file, which
share one set of tables (``Encoder``, ``Decoder``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, overload

import msgspec

from torch_fakeify.errors import FormatError, check_type

from . import limits
from .decoder import Reader
from .encoder import Encoder
from .format import MAX_EXPR_NODES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

    from torch_fakeify.records.shape_env import ShapeEnvDesc

__all__ = ["Decoder", "Encoder", "Serializable", "dumps", "loads"]

_T = TypeVar("_T")


def dumps(obj: object) -> bytes:
    """Serialize a record, or a list, tuple or dict of records and scalars, to bytes.

    Objects of the shared types that occur twice are written once. Equal input gives equal bytes.

    Args:
        obj: any record; ``None``, ``bool``, ``int``, ``float``, ``str``; or a list, tuple or dict
            (keys ``str`` or ``int``) of these, nested.

    Raises:
        UnsupportedValueError: an object has no record, a field has the wrong type, records are of
            two describers, or two with one id are not of one tensor or storage at one time.
        LimitError: records are nested deeper than a reader allows.

    Example:
        >>> record = tfk.describe_tensor(torch.ones(2))
        >>> tfk.loads(tfk.dumps([record])) == [record]
        True
    """
    encoder = Encoder()
    return encoder.document(encoder.encode(obj))


@overload
def loads(data: bytes | bytearray | memoryview, *, root: type[_T]) -> _T: ...
@overload
def loads(data: bytes | bytearray | memoryview, *, describer: str | None = None) -> Any: ...
def loads(
    data: bytes | bytearray | memoryview,
    *,
    describer: str | None = None,
    root: type[Any] = object,
) -> Any:
    """Deserialize the bytes of ``dumps``; shared objects are shared again.

    A document does not name the describer of its records. Records of two documents are therefore taken
    for those of two describers, and refused where they meet, unless the caller names the describer.

    Args:
        data: the bytes.
        describer: a name of the describer, such as that of the process which sent the bytes: records
            loaded under one name are of one describer, and equal ids of one tensor.
        root: the class that the document must have.

    Raises:
        FormatError: the bytes are not a document, truncated, or ill-typed; names the ``$.path``.
        VersionError: a newer version wrote them.
        LimitError: they have more depth or expression nodes than allowed.

    Example:
        >>> tfk.loads(tfk.dumps({"x": tfk.describe_tensor(torch.ones(2))}))["x"].size
        (2,)
    """
    check_type(data, (bytes, bytearray, memoryview), "data of torch_fakeify", FormatError)
    check_type(describer, (str, type(None)), "the name of a describer", FormatError)
    check_type(root, type, "a class of records", FormatError)
    reader = Reader(bytes(data), "$", describer=describer)
    if reader.root is msgspec.UNSET:
        raise FormatError("the document has no root", where="$")
    found = reader.tree(bytes(reader.root), "$.root")
    if not isinstance(found, root):
        raise FormatError(
            "the document holds something else",
            where="$.root",
            expected=root.__name__,
            found=type(found).__name__,
        )
    return found


class Serializable(ABC, Generic[_T]):
    """Base of objects that are written and read as their records."""

    _root: ClassVar[type[Any]]
    """The class of the records."""

    @property
    @abstractmethod
    def desc(self) -> _T:
        """The record."""

    @classmethod
    @abstractmethod
    def from_desc(cls, desc: _T) -> Self:
        """The object of a record."""

    def dumps(self) -> bytes:
        """Serialize the object.

        Raises:
            UnsupportedValueError: a part of it has no record; see `desc`.
        """
        return dumps(self.desc)

    @classmethod
    def loads(cls, data: bytes | bytearray | memoryview) -> Self:
        """Deserialize the bytes of `dumps`; runs no code of them.

        Raises:
            FormatError: the bytes are not those of such an object.
            VersionError: a newer version wrote them.
            LimitError: they are nested too deeply or too large.
            ShapeEnvError: a dim of a policy cannot have its kind.
        """
        return cls.from_desc(loads(data, root=cls._root))


class Decoder:
    """Decodes the members that an ``Encoder`` wrote.

    Args:
        members: their bytes by name; the tables are decoded and validated here.
        expr_nodes: most distinct nodes of the expressions.

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
        self._reader = Reader(members["tables.json"], where, expr_nodes)
        limits.check_tables(self._reader.tables, self._reader.tree_nodes, where)

    def check_frame(self, env: ShapeEnvDesc, products: int) -> None:
        """Refuse expressions that are too large for a ``ShapeEnv``; ``products`` is that of `Limits`.

        Raises:
            LimitError: one is too large multiplied out, or with numbers for its symbols.
        """
        tables = self._reader.tables
        expr_ids = {id(expr): at for at, expr in enumerate(tables["exprs"])}
        limits.check_frame(tables, self._reader.roots, expr_ids, env, products, "tables.json $")

    def get(self, name: str, cls: type[_T]) -> _T:
        """Decode a member.

        Raises:
            FormatError: there is no such member, it is ill-typed, or no instance of ``cls``.
        """
        file = f"{name}.json"
        if file not in self._members:
            raise FormatError("the member is missing", where=file)
        obj = self._reader.tree(self._members[file], f"{file} $")
        if not isinstance(obj, cls):
            expected, found = cls.__name__, type(obj).__name__
            raise FormatError(
                "the member has the wrong type", where=file, expected=expected, found=found
            )
        return obj
