"""Conversion of one event of torch's structured trace to a record.

Method: ``MetaTensorDesc.as_json`` and ``MetaStorageDesc.as_json`` of torch 2.13, read backwards. A
field at its default is not written; dtypes, devices, layouts and symbolic numbers are written as
their ``repr``, other tensors as their ids, and what torch calls unserializable as text. Text is
matched with patterns, never evaluated; unmatched text becomes a `MissingField`.
"""

from __future__ import annotations

import ast
import re
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

from torch_fakeify.errors import FormatError
from torch_fakeify.records.tensor import (
    FunctionalDesc,
    FunctorchDesc,
    MarksDesc,
    MetaStorageDesc,
    MetaTensorDesc,
    NestedIntDesc,
    OpaqueValue,
    SparseDesc,
    SubclassDesc,
    SymDesc,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_fakeify.records.tensor import IntLike, Value

# --- missing fields ------------------------------------------------------------------------------


class MissingField(NamedTuple):
    """A field of a record that the log lacks."""

    field: str
    """The field of the record, such as ``marks.dynamic_range``."""
    why: str
    text: str | None = None
    """The text in the log, if there is one."""


_NO_EVENT = "torch writes no event of it"

NEVER_LOGGED = (
    *(
        MissingField(name, _NO_EVENT)
        for name in ("grad_dtype", "is_buffer", "is_pinned", "item_memo")
    ),
    MissingField(
        "marks", "torch writes the dynamic dims and the hint overrides, and no other mark"
    ),
    *(MissingField(name, _NO_EVENT) for name in ("persistent", "retains_grad", "scalar_hint")),
    MissingField("source", "torch writes its name alone"),
    MissingField("symbolic_context", _NO_EVENT),
    MissingField("symbols", _NO_EVENT),
)
"""Fields that no log has."""

# --- events ---------------------------------------------------------------------------------------

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Number = _Count | str
_MAX_SHOWN = 200


class StorageEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """``describe_storage``."""

    id: _Count
    describer_id: _Count
    size: _Number
    """Size in bytes."""


class SourceEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """``describe_source``: where Dynamo found a tensor, by the name of the source."""

    id: _Count
    describer_id: _Count
    source: str


class TensorEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """``describe_tensor``: the fields and defaults of torch's ``MetaTensorDesc``."""

    id: _Count
    describer_id: _Count
    ndim: _Count
    dtype: str
    device: str
    size: tuple[_Number, ...]
    dynamo_dynamic_indices: tuple[_Count, ...] = ()
    dynamo_hint_overrides: dict[_Count, int] = {}
    layout: str = "torch.strided"
    is_inference: bool = False
    is_leaf: bool = False
    requires_grad: bool = False
    is_sparse: bool = False
    is_mkldnn: bool = False
    is_functorch_wrapped: bool = False
    is_batchedtensor: bool = False
    is_legacy_batchedtensor: bool = False
    is_gradtrackingtensor: bool = False
    is_view: bool = False
    is_nested: bool = False
    nested_int: str | None = None
    is_traceable_wrapper_subclass: bool = False
    is_functional: bool = False
    is_conj: bool = False
    is_neg: bool = False
    is_parameter: bool = False
    stride: tuple[_Number, ...] | None = None
    storage_offset: _Number = 0
    storage: _Count | None = None
    sparse_dim: _Count | None = None
    dense_dim: _Count | None = None
    is_coalesced: bool | None = None
    crow_indices: _Count | None = None
    col_indices: _Count | None = None
    ccol_indices: _Count | None = None
    row_indices: _Count | None = None
    values: _Count | None = None
    unwrapped: _Count | None = None
    bdim: _Count | None = None
    base: _Count | None = None
    attrs: dict[str, _Count] | None = None
    opaque_attrs: dict[str, str] | None = None
    creation_meta: str | None = None
    grad: _Count | None = None
    ctx: str | None = None
    type: str | None = None
    fake_mode: str | None = None
    view_func: str | None = None
    level: str | None = None
    current_level: str | None = None
    functorch_stack: str | None = None
    autograd_meta_from: None = None
    data: None = None


# --- records --------------------------------------------------------------------------------------


class _FieldReader:
    """Reads fields of an event and collects the missing ones.

    Args:
        tensor: the record of another tensor by field and id; ``None`` if it has none.
    """

    def __init__(
        self, tensor: Callable[[str, int], MetaTensorDesc | None] = lambda _field, _id: None
    ) -> None:
        self.lacks: list[MissingField] = []
        self.has_record = True
        self._tensor = tensor

    def part(self, field: str, tensor_id: int | None) -> MetaTensorDesc | None:
        """The record of a part; without it the tensor has no record either."""
        if tensor_id is None:
            return None
        record = self._tensor(field, tensor_id)
        if record is None:
            self.lack(field, f"tensor {tensor_id} has no record", needed=True)
        return record

    def lack(self, field: str, why: str, text: str | None = None, *, needed: bool = False) -> None:
        """Add a missing field; ``needed`` if the record requires it."""
        shown = text if text is None or len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
        self.lacks.append(MissingField(field, why, shown))
        self.has_record = self.has_record and not needed

    def numbers(self, field: str, written: tuple[int | str, ...]) -> tuple[IntLike, ...]:
        """Read sizes or strides; torch writes symbols without hints and ranges."""
        return tuple(self.number(f"{field}[{i}]", n) for i, n in enumerate(written))

    def number(self, field: str, written: int | str) -> IntLike:
        if isinstance(written, int):
            return written
        found = number_of_text(written)
        if found is None:
            self.lack(field, "a formula that is not read back", written, needed=True)
            return 0
        if isinstance(found, SymDesc):
            self.lack(field, "the hint, range and assumptions of its symbols", written)
        return found


def storage_record(e: StorageEvent) -> tuple[MetaStorageDesc | None, tuple[MissingField, ...]]:
    """Convert the event of a storage; ``None`` if its size is an unsupported formula."""
    reader = _FieldReader()
    nbytes = reader.number("nbytes", e.size)
    record = MetaStorageDesc(id=e.id, nbytes=nbytes) if reader.has_record else None
    return record, tuple(reader.lacks)


def tensor_record(
    e: TensorEvent,
    *,
    tensor: Callable[[str, int], MetaTensorDesc | None],
    storage: Callable[[int], MetaStorageDesc | None],
    where: str,
) -> tuple[MetaTensorDesc | None, tuple[MissingField, ...]]:
    """Convert the event of a tensor; also returns the missing fields.

    The record is ``None`` if something is lacking without which there is none, as are those of other
    tensors, by field and id, and of storages.

    Raises:
        FormatError: the event contradicts itself, or a dtype, device or the like is not written as
            torch writes it.
    """
    if len(e.size) != e.ndim or (e.stride is not None and len(e.stride) != e.ndim):
        found = f"{len(e.size)} sizes"
        if e.stride is not None:
            found += f", {len(e.stride)} strides"
        raise FormatError(
            "`ndim` contradicts the sizes or strides",
            where=where,
            expected=str(e.ndim),
            found=found,
        )

    def read(field: str) -> re.Match[str]:
        pattern, example = _WRITTEN[field]
        text = getattr(e, field)
        match = pattern.fullmatch(text)
        if match is None:
            raise FormatError(
                f"`{field}` is not written as torch writes it",
                where=where,
                expected=f"text like {example}",
                found=ascii(text[:_MAX_SHOWN]),
            )
        return match

    layout, device = read("layout")[1], read("device")
    reader = _FieldReader(tensor)
    is_sparse = layout.startswith("sparse_")
    if e.stride is None and not is_sparse:
        reader.lack("stride", "the event has none", needed=True)
    base = reader.part("base", e.base)
    if e.is_view and e.base is None:
        reader.lack("base", "torch describes the components of a sparse tensor without it")
    storage_of = None if e.storage is None else storage(e.storage)
    if e.storage is not None and storage_of is None:
        reader.lack("storage", f"storage {e.storage} has no record", needed=True)
    fields: dict[str, Any] = {
        "id": e.id,
        "dtype": read("dtype")[1],
        "device": device[1] if device[2] is None else f"{device[1]}:{device[2]}",
        "size": reader.numbers("size", e.size),
        "stride": () if is_sparse else reader.numbers("stride", e.stride or ()),
        "storage_offset": reader.number("storage_offset", e.storage_offset),
        "storage": storage_of,
        "layout": layout,
        "requires_grad": e.requires_grad,
        "is_leaf": e.is_leaf,
        "is_inference": e.is_inference,
        "is_conj": e.is_conj,
        "is_neg": e.is_neg,
        "is_parameter": e.is_parameter,
        "is_view": e.is_view,
        "base": base,
        "creation_meta": None if e.creation_meta is None else read("creation_meta")[1],
        "sparse": _sparse(e, layout, reader, where),
        "subclass": _subclass(e, reader),
        "functorch": _functorch(e, reader),
        "functional": _functional(e, reader),
        "nested_int": _nested_int(e, reader),
        "grad": reader.part("grad", e.grad),
        "is_fake": e.fake_mode is not None,
        "marks": _marks(e, reader),
    }
    if e.is_view and (e.attrs is not None or (base is not None and base.subclass is not None)):
        reader.lack("view_calls", "the view function is written as text", e.view_func)
    record = MetaTensorDesc(**fields) if reader.has_record else None
    return record, tuple(reader.lacks)


_WRITTEN = {
    "layout": (re.compile(r"torch\.(\w+)"), "torch.strided"),
    "device": (
        re.compile(r"device\(type='(\w+)'(?:, index=([0-9]{1,9}))?\)"),
        "device(type='cuda', index=0)",
    ),
    "dtype": (re.compile(r"torch\.(\w+)"), "torch.float32"),
    "creation_meta": (re.compile(r"CreationMeta\.(\w+)"), "CreationMeta.DEFAULT"),
}
"""How torch writes a field, and an example."""
_CLASS = re.compile(r"<class '([\w.]+)'>")
_INT = re.compile(r"[0-9]{1,18}")
_LEVEL = re.compile(r"-?[0-9]{1,18}")


def _nested_int(e: TensorEvent, reader: _FieldReader) -> int | None:
    if e.nested_int is None:
        return None
    if _INT.fullmatch(e.nested_int):
        return int(e.nested_int)
    reader.lack("nested_int", "a text that is no number", e.nested_int)
    return None


def _marks(e: TensorEvent, reader: _FieldReader) -> MarksDesc | None:
    if not e.dynamo_dynamic_indices and not e.dynamo_hint_overrides:
        return None
    if e.dynamo_dynamic_indices:
        reader.lack("marks.dynamic_range", "torch writes no event of it")
    return MarksDesc(
        dynamic=tuple(sorted(set(e.dynamo_dynamic_indices))),
        hint_overrides=tuple(sorted(e.dynamo_hint_overrides.items())),
    )


def _sparse(e: TensorEvent, layout: str, reader: _FieldReader, where: str) -> SparseDesc | None:
    if not layout.startswith("sparse_"):
        return None
    if e.sparse_dim is None or e.dense_dim is None:
        raise FormatError(
            "a sparse tensor without `sparse_dim` or `dense_dim`", where=where, found=layout
        )
    named = (e.crow_indices, e.col_indices, e.ccol_indices, e.row_indices)
    indices = [reader.part("sparse.index_dtype", part) for part in named if part is not None]
    index = indices[0] if indices else None
    if layout != "sparse_coo" and not indices:
        reader.lack("sparse.index_dtype", "the event names no indices", needed=True)
    values = reader.part("sparse.blocksize", e.values)
    blocksize: tuple[Any, ...] = ()
    if layout in ("sparse_bsr", "sparse_bsc"):
        # The sizes of the values: batches, entries, the two of a block, dense dims.
        batch = e.ndim - e.sparse_dim - e.dense_dim
        blocksize = () if values is None else values.size[batch + 1 : batch + 3]
        if len(blocksize) != 2 or not all(isinstance(n, int) for n in blocksize):
            reader.lack("sparse.blocksize", "the values do not show it", needed=True)
            blocksize = ()
    return SparseDesc(
        sparse_dim=e.sparse_dim,
        dense_dim=e.dense_dim,
        is_coalesced=e.is_coalesced,
        index_dtype=None if index is None else index.dtype,
        blocksize=blocksize,
    )


def _subclass(e: TensorEvent, reader: _FieldReader) -> SubclassDesc | None:
    if not e.is_traceable_wrapper_subclass:
        return None
    inner = [
        (name, reader.part(f"subclass.{name}", part)) for name, part in (e.attrs or {}).items()
    ]
    cls = _CLASS.fullmatch(e.type or "")
    if cls is None:
        reader.lack("subclass.cls", "the text is no name of a class", e.type, needed=True)
    opaques = (e.opaque_attrs or {}).items()
    for name, text in opaques:
        reader.lack(f"subclass.{name}", "written as text alone", text)
    context: Value = None
    if e.ctx is not None:
        reader.lack("subclass.context", "written as text alone", e.ctx)
        context = _unread(e.ctx)
    return SubclassDesc(
        cls="" if cls is None else cls[1],
        tensors=tuple((name, part) for name, part in inner if part is not None),
        opaques=tuple((name, _unread(text)) for name, text in opaques),
        context=context,
    )


def _unread(text: str) -> OpaqueValue:
    """Make a value that has only a text; converters refuse it."""
    return OpaqueValue(kind="trace_log_text", data=text)


def _functorch(e: TensorEvent, reader: _FieldReader) -> FunctorchDesc | None:
    if not e.is_functorch_wrapped and not e.is_legacy_batchedtensor:
        return None
    unwrapped = reader.part("functorch.unwrapped", e.unwrapped)
    is_known = e.is_batchedtensor or e.is_gradtrackingtensor or e.is_functional
    if not is_known or e.unwrapped is None:
        reader.lack("functorch", "a wrapper that is not known here", needed=True)
    text = (e.current_level if e.is_functional else e.level) or ""
    if not _LEVEL.fullmatch(text):
        reader.lack("functorch.level", "a text that is no number", text or None, needed=True)
    if e.functorch_stack != "[]":
        reader.lack("functorch.stack", "written as text alone", e.functorch_stack)
    if not reader.has_record or unwrapped is None:
        return None
    kind = "batched" if e.is_batchedtensor else "grad" if e.is_gradtrackingtensor else "functional"
    return FunctorchDesc(kind=kind, unwrapped=unwrapped, level=int(text), bdim=e.bdim)


def _functional(e: TensorEvent, reader: _FieldReader) -> FunctionalDesc | None:
    if not e.is_functional or e.is_functorch_wrapped:
        return None
    unwrapped = reader.part("functional.unwrapped", e.unwrapped)
    if e.unwrapped is None:  # xla and lazy tensors
        reader.lack("functional.unwrapped", "the event names none", needed=True)
    reader.lack("functional.is_python", "torch writes no event of it")
    return None if unwrapped is None else FunctionalDesc(unwrapped=unwrapped)


# --- numbers as text ------------------------------------------------------------------------------

# A ``SymInt`` prints as a symbol, as a formula over symbols, or as a multiple of a nested int. Of the
# formulas those are read that sums, products and powers make of symbols and numbers; all others, such
# as a ``//`` or a function, are not.

_DIGITS = r"(?:0|[1-9][0-9]{0,18})"
_NESTED = re.compile(rf"(?:({_DIGITS})\*)?j({_DIGITS})")
_FORMULA = re.compile(r"[su0-9*+() -]{1,1000}")
_SYMBOL = re.compile(r"[su][0-9]{1,9}")
_TWO_SIGNS = re.compile(r"[-+*] *[-+]")
_MAX_NESTING = 20
_MAX_DIGITS = 1000
"""The most digits that a number in a power may have, about; each takes part in the product."""


def number_of_text(text: str) -> IntLike | None:
    """The nested int or the formula over symbols that torch wrote as this text, or ``None``.

    The symbols have no hint and of their assumptions only that they are integers.
    """
    nested = _NESTED.fullmatch(text)
    if nested:
        return NestedIntDesc(int(nested[2]), int(nested[1] or 1))
    depths = accumulate({"(": 1, ")": -1}.get(each, 0) for each in text)
    if not _FORMULA.fullmatch(text) or _TWO_SIGNS.search(text) or max(depths) > _MAX_NESTING:
        return None
    try:
        expr = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError, _NotAFormulaError):
        return None
    if not expr.free_symbols:
        return None
    from torch_fakeify.encoding.exprs import encode_expr

    return SymDesc(expr=encode_expr(expr))


class _NotAFormulaError(Exception):
    """Raised for another syntax than that of sums, products and powers."""


def _value(part: ast.expr) -> Any:
    import sympy  # only a log with symbols needs it

    parts: list[Any] = []
    match part:
        case ast.Name(id=name) if _SYMBOL.fullmatch(name):
            return sympy.Symbol(name, integer=True)
        case ast.Constant(value=int() as number) if number < 10**19:
            return sympy.Integer(number)
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            while isinstance(part, ast.BinOp) and isinstance(part.op, (ast.Add, ast.Sub)):
                term = _value(part.right)
                parts.append(-term if isinstance(part.op, ast.Sub) else term)
                part = part.left
            return sympy.Add(_value(part), *parts)
        case ast.BinOp(op=ast.Mult()):
            while isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult):
                parts.append(_value(part.right))
                part = part.left
            if isinstance(part, ast.UnaryOp) and isinstance(
                part.op, ast.USub
            ):  # the sign of the whole product
                parts.append(-1)
                part = part.operand
            return sympy.Mul(_value(part), *parts)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int() as exponent)):
            base = _value(left)
            digits = max(len(str(n)) for n in (1, *base.atoms(sympy.Integer)))
            if not base.is_number and 2 <= exponent < 100 and digits * exponent < _MAX_DIGITS:
                return base**exponent
        case _:
            pass
    raise _NotAFormulaError
