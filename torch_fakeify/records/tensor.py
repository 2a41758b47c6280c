"""The records of tensors: frozen data, no torch object in any field.

A record contains what torch needs to make a fake tensor and nothing else. Dtypes, devices and layouts
are recorded by their torch names (``"float32"``, ``"cuda:1"``, ``"strided"``). Sizes, strides and
offsets count elements, ``nbytes`` counts bytes. Records refer to one another by reference: two tensors
on one storage refer to the same ``MetaStorageDesc`` object, before and after serialization.
"""

from __future__ import annotations

import os
import uuid
import weakref
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from .record import Record, set_fields

if TYPE_CHECKING:
    from collections.abc import Callable


class IdOwner:
    """What the ids of records are unique within: a describer, or the document they were loaded from.

    Args:
        origin: words of an error about its records, such as "of a document"; empty for a describer.
    """

    __slots__ = ("__weakref__", "_key", "origin")

    def __init__(self, origin: str = "") -> None:
        self.origin = origin
        self._key: tuple[int, str] | None = None

    def key(self) -> tuple[int, str]:
        """Return an identifier that no other owner has, in any process.

        A forked child continues with a copy of the owner, and its ids are others than its parent's.
        """
        if self._key is None or self._key[0] != os.getpid():
            self._key = os.getpid(), uuid.uuid4().hex
            _owners[self._key] = self
        return self._key


_owners: weakref.WeakValueDictionary[tuple[int, str], IdOwner] = weakref.WeakValueDictionary()
"""Owners by `IdOwner.key`, of records that were pickled here or elsewhere."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_owners.clear)


class Numbered:
    """A record with an id that is unique within an `IdOwner`.

    The owner is no field: it is neither serialized nor compared. Copies and pickles have it; records
    made by ``msgspec.structs.replace`` have none.
    """

    __slots__ = ("_owner",)

    _owner: IdOwner

    def __copy__(self: _R) -> _R:
        owner = owner_of(self)
        made: _R = msgspec.Struct.__copy__(self)  # type: ignore[arg-type]
        return made if owner is None else owned(made, owner)

    def __reduce__(self) -> tuple[Any, ...]:
        owner = owner_of(self)
        rebuild, args = msgspec.Struct.__reduce__(self)  # type: ignore[arg-type]
        return (rebuild, args) if owner is None else (_rebuild, (rebuild, args, *owner.key()))


_R = TypeVar("_R", bound=Numbered)
_set_owner: Any = Numbered._owner.__set__  # type: ignore[attr-defined]


def owner_of(record: Numbered) -> IdOwner | None:
    """Return the owner of a record's id; ``None`` for a record that a caller made."""
    return getattr(record, "_owner", None)


def owned(record: _R, owner: IdOwner) -> _R:
    """Set the owner of a record's id, and return the record."""
    _set_owner(record, owner)
    return record


def _rebuild(rebuild: Callable[..., _R], args: tuple[Any, ...], process: int, code: str) -> _R:
    """Return the record of a pickle; all that were pickled with one owner have one owner here."""
    key, owner = (process, code), IdOwner("of another process")
    owner._key = key
    return owned(rebuild(*args), _owners.setdefault(key, owner))


# --- expressions ------------------------------------------------------------------------------


class SymbolNode(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="s"):
    """A sympy symbol.

    ``assumptions`` are the symbol's explicit assumptions as sorted ``(name, value)`` pairs.
    """

    name: str
    assumptions: tuple[tuple[str, bool], ...]


class IntNode(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="i"):
    """An integer of any size."""

    value: int


class FloatNode(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="f"):
    """A float: ``mantissa * 2**exponent`` at ``precision`` bits, so that no digit is lost."""

    mantissa: int
    exponent: int
    precision: int


class RationalNode(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="q"
):
    """A fraction in lowest terms."""

    numerator: int
    denominator: int


class AtomNode(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="c"):
    """A named constant of a closed set: infinities, booleans, nan, pi, ..."""

    name: str


class ApplyNode(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="a"):
    """A function of a closed set applied to earlier nodes of the same expression."""

    function: str
    args: tuple[int, ...]


ExprNode: TypeAlias = SymbolNode | IntNode | FloatNode | RationalNode | AtomNode | ApplyNode


class ExprDesc(Record, frozen=True, kw_only=True):
    """A sympy expression as a flat directed acyclic graph.

    ``nodes`` is in topological order without two equal nodes: arguments are positions of earlier
    nodes, the last node is the expression. The size is linear in the number of distinct
    sub-expressions.
    """

    nodes: tuple[ExprNode, ...]


class NestedIntDesc(NamedTuple):
    """The size of a ragged dim, which torch calls a nested int: ``coeff`` times an unknown integer.

    Jagged tensors with the same offsets have the same ``id``, which is unique within a describer; a
    converter makes a new nested int for it.
    """

    id: int
    coeff: int = 1


class SymDesc(Record, frozen=True, kw_only=True):
    """A symbolic scalar (``SymInt``, ``SymFloat`` or ``SymBool``) and its hint."""

    expr: ExprDesc
    kind: Literal["int", "float", "bool"] = "int"
    hint: int | float | bool | NestedIntDesc | None = None
    """The value at capture time; ``None`` for unbacked expressions."""
    constant: bool = False
    """Whether it is a literal: torch's ``constant``, equal to the hint."""


IntLike: TypeAlias = int | SymDesc | NestedIntDesc


# --- text of stacks ---------------------------------------------------------------------------


class FrameDesc(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One entry of a stack, as text."""

    file: str
    line: int
    function: str
    code: str
    """The line of code; in a printed stack also the lines that Python printed below it."""


class StackDesc(Record, frozen=True, kw_only=True):
    """A stack as text, outermost entry first."""

    frames: tuple[FrameDesc, ...]


# --- tensors ----------------------------------------------------------------------------------


class MetaStorageDesc(Numbered, Record, frozen=True, kw_only=True):
    """An untyped storage.

    ``id`` is unique within a describer, and never reused for another storage.

    Example:
        >>> tfk.describe_tensor(torch.ones(2)).storage.nbytes
        8
    """

    id: int
    nbytes: IntLike


class MarksDesc(Record, frozen=True, kw_only=True):
    """The attributes set by ``torch._dynamo.mark_*`` and ``maybe_mark_dynamic``, by dim."""

    dynamic: tuple[int, ...] = ()
    dynamic_range: tuple[tuple[int, int | None, int | None], ...] = ()
    """``(dim, min, max)`` of ``mark_dynamic(min=, max=)``."""
    weak_dynamic: tuple[int, ...] = ()
    propagated_dynamic: tuple[int, ...] = ()
    static: tuple[int, ...] = ()
    unbacked: tuple[int, ...] = ()
    strict_unbacked: tuple[int, ...] = ()
    unbacked_bounds: tuple[tuple[int, int | None, int | None], ...] = ()
    shape_ids: tuple[tuple[int, str | None], ...] = ()
    hint_overrides: tuple[tuple[int, int], ...] = ()
    specialize_on: tuple[tuple[int, tuple[ExprDesc, ...]], ...] = ()
    """For each dim, the conditions to specialize on, as expressions over the symbol ``dim``."""
    static_input_type: str | None = None
    """``"guarded"`` or ``"unguarded"`` of ``mark_static_address``."""


class SymbolFactDesc(Record, frozen=True, kw_only=True):
    """The facts of a ``ShapeEnv`` about a symbol when a fake tensor was described.

    ``lower`` and ``upper`` are the ends of the value range, ``None`` for an infinite one. ``hint``
    is ``None`` for an unbacked symbol.
    """

    name: str
    shape_env: int = 0
    """The describer's number of the ``ShapeEnv``: symbols of different ones may have one name."""
    hint: int | float | NestedIntDesc | None = None
    lower: int | None = None
    upper: int | None = None
    size_like: bool = False
    hint_override: int | None = None


class SparseDesc(Record, frozen=True, kw_only=True):
    """The layout of a sparse tensor. The number of its entries is data, and not recorded."""

    sparse_dim: int
    dense_dim: int
    is_coalesced: bool | None = None
    """Only of COO."""
    index_dtype: str | None = None
    """Only of CSR, CSC, BSR and BSC: the dtype of the indices."""
    blocksize: tuple[int, ...] = ()
    """Only of BSR and BSC: rows and columns of a block."""


class ViewCallDesc(Record, frozen=True, kw_only=True):
    """A call of a view operator; its first argument, the viewed tensor, is not in ``args``."""

    op: str
    """The operator with its overload, e.g. ``aten.select.int``."""
    args: tuple[Value, ...] = ()
    kwargs: tuple[tuple[str, Value], ...] = ()
    output: int | None = None
    """The index of the viewed result, if the operator has several."""


class SubclassDesc(Record, frozen=True, kw_only=True):
    """The result of ``__tensor_flatten__`` of a traceable wrapper subclass."""

    cls: str
    """The qualified name of the class."""
    tensors: tuple[tuple[str, MetaTensorDesc], ...] = ()
    """The inner tensors by attribute."""
    opaques: tuple[tuple[str, Value], ...] = ()
    """The other inner attributes, such as a ``DeviceMesh``."""
    context: Value = None


class InterpreterDesc(Record, frozen=True, kw_only=True):
    """One level of the stack of functorch's interpreters."""

    kind: Literal["vmap", "grad", "jvp", "functionalize"]
    level: int
    """The position in the stack: 1 is the outermost."""
    batch_size: IntLike | None = None
    """Only of ``vmap``."""
    randomness: Literal["error", "same", "different"] | None = None
    """Only of ``vmap``."""
    grad_mode: bool | None = None
    """Only of ``grad`` and ``jvp``: the (forward) grad mode outside."""
    inference_mode: bool = False
    """Only of ``grad`` and ``jvp``: whether inference mode was on outside."""
    add_back_views: bool | None = None
    """Only of ``functionalize``."""


class FunctorchDesc(Record, frozen=True, kw_only=True):
    """A functorch wrapper of a tensor, with the stack of interpreters."""

    kind: Literal["batched", "grad", "functional"]
    unwrapped: MetaTensorDesc
    level: int
    """The level of its interpreter; -2, as in torch, for a grad wrapper that outlived it."""
    bdim: int | None = None
    """Only of ``batched``: which dim of the unwrapped tensor is the batch."""
    stack: tuple[InterpreterDesc, ...] = ()
    """The interpreters that were active, outermost first."""


class FunctionalDesc(Record, frozen=True, kw_only=True):
    """A functional tensor: the wrapper by which functionalization removes mutations."""

    unwrapped: MetaTensorDesc
    is_python: bool = False
    """Whether it is the Python class ``FunctionalTensor``."""


def _size_text(n: IntLike) -> str:
    """Return a number of a tensor, by the name of the symbol where it is one."""
    if isinstance(n, SymDesc) and len(n.expr.nodes) == 1:
        (expr_node,) = n.expr.nodes
        return expr_node.name if isinstance(expr_node, SymbolNode) else repr(n)
    return repr(n)


def _contiguous(size: tuple[IntLike, ...]) -> tuple[int, ...] | None:
    """Return the strides of a contiguous tensor; ``None`` if a size is a symbol."""
    stride, strides = 1, list[int]()
    for n in reversed(size):
        if not isinstance(n, int):
            return None
        strides.append(stride)
        stride *= max(n, 1)
    return tuple(reversed(strides))


class MetaTensorDesc(Numbered, Record, frozen=True, kw_only=True):
    """The record of a tensor.

    Sizes are concrete for a real tensor and symbolic (``SymDesc``) for a fake tensor that has a
    ``ShapeEnv``. ``source`` and ``symbolic_context`` are the policy by which a converter makes
    symbols; they travel with the record.

    Example:
        >>> tfk.describe_tensor(torch.ones(2, dtype=torch.int8)).dtype
        'int8'
    """

    id: int
    dtype: str
    device: str
    size: tuple[IntLike, ...]
    stride: tuple[IntLike, ...]
    storage_offset: IntLike = 0
    storage: MetaStorageDesc | None = None
    layout: str = "strided"
    requires_grad: bool = False
    is_leaf: bool = True
    is_inference: bool = False
    is_conj: bool = False
    is_neg: bool = False
    is_parameter: bool = False
    is_buffer: bool = False
    persistent: bool | None = None
    """Only of a buffer: whether a ``state_dict`` holds it."""
    is_view: bool = False
    base: MetaTensorDesc | None = None
    """``_base`` of a view."""
    creation_meta: str | None = None
    """Autograd's ``CreationMeta`` of a view: ``DEFAULT``, ``NO_GRAD_MODE``, ``MULTI_OUTPUT_NODE``, ..."""
    view_calls: tuple[ViewCallDesc, ...] | None = None
    """The calls that make the view from its base, if either is a wrapper subclass.

    A dense view of a dense base is defined by its sizes, strides and offset.
    """
    sparse: SparseDesc | None = None
    subclass: SubclassDesc | None = None
    functorch: FunctorchDesc | None = None
    functional: FunctionalDesc | None = None
    nested_int: int | None = None
    """Only of the offsets or lengths of jagged tensors: the id of their nested int."""
    is_pinned: bool = False
    grad: MetaTensorDesc | None = None
    grad_dtype: str | None = None
    """Only of a leaf and only when it differs from ``dtype``; ``"any"`` where torch has ``None``."""
    retains_grad: bool = False
    """Only of a non-leaf: ``retain_grad()`` was called."""
    is_fake: bool = False
    """Whether the tensor that was described was itself a fake tensor."""
    scalar_hint: int | float | None = None
    """Value of a 0-dim CPU tensor whose ``item()`` torch tracks as a symbol."""
    item_memo: SymDesc | None = None
    """Only of a fake tensor: the cached result of ``item()``."""
    symbols: tuple[SymbolFactDesc, ...] = ()
    """Only of a fake tensor: the facts of its ``ShapeEnv`` about the symbols in this record."""
    marks: MarksDesc | None = None
    source: SourceDesc | None = None
    symbolic_context: ContextDesc | None = None

    def __repr__(self) -> str:
        """Dtype, sizes, device and id; strides unless contiguous; other fields unless they have their defaults."""
        parts = [f"{self.dtype}[{', '.join(map(_size_text, self.size))}]", self.device]
        parts.append(f"id={self.id}")
        if self.stride != _contiguous(self.size):
            parts.append(f"stride=({', '.join(map(_size_text, self.stride))})")
        if self.storage is not None:
            nbytes = _size_text(self.storage.nbytes)
            parts.append(f"storage={self.storage.id} of {nbytes} bytes")
        shown = ("id", "dtype", "device", "size", "stride", "storage")
        parts += [f"{name}={value!r}" for name, value in set_fields(self) if name not in shown]
        return f"MetaTensorDesc({', '.join(parts)})"

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.size)


# --- values: constants in sources, contexts and graphs -------------------------------------------


class FloatValue(Record, frozen=True, kw_only=True, tag="float"):
    """A float that JSON cannot write: ``"inf"``, ``"-inf"`` or ``"nan"``."""

    text: Literal["inf", "-inf", "nan"]


class ComplexValue(Record, frozen=True, kw_only=True, tag="complex"):
    """A complex number."""

    real: float | FloatValue
    imag: float | FloatValue


class BytesValue(Record, frozen=True, kw_only=True, tag="bytes"):
    """A byte string."""

    data: bytes


class EllipsisValue(Record, frozen=True, kw_only=True, tag="ellipsis"):
    """The constant ``...``."""


class TupleValue(Record, frozen=True, kw_only=True, tag="tuple"):
    """A tuple."""

    items: tuple[Value, ...]


class ListValue(Record, frozen=True, kw_only=True, tag="list"):
    """A list, or with ``immutable`` FX's ``immutable_list`` in a node's arguments."""

    items: tuple[Value, ...]
    immutable: bool = False


class SizeValue(Record, frozen=True, kw_only=True, tag="size"):
    """A ``torch.Size``."""

    items: tuple[Value, ...]


class SetValue(Record, frozen=True, kw_only=True, tag="set"):
    """A set or frozenset, its items in encoded order."""

    items: tuple[Value, ...]
    frozen: bool = False


class DictValue(Record, frozen=True, kw_only=True, tag="dict"):
    """A dictionary in insertion order, or with ``immutable`` FX's ``immutable_dict``."""

    items: tuple[tuple[Value, Value], ...]
    immutable: bool = False


class SliceValue(Record, frozen=True, kw_only=True, tag="slice"):
    """A slice."""

    start: Value = None
    stop: Value = None
    step: Value = None


class RangeValue(Record, frozen=True, kw_only=True, tag="range"):
    """A range."""

    start: Value
    stop: Value
    step: Value


class TorchConstValue(Record, frozen=True, kw_only=True, tag="torch"):
    """A dtype, device, layout, memory format or quantization scheme, by its torch name."""

    kind: Literal["dtype", "device", "layout", "memory_format", "qscheme"]
    name: str


class EnumValue(Record, frozen=True, kw_only=True, tag="enum"):
    """A member of an allow-listed or already imported enumeration."""

    cls: str
    name: str


class NamedTupleValue(Record, frozen=True, kw_only=True, tag="namedtuple"):
    """A named tuple or ``torch.return_types`` structure of an already imported class."""

    cls: str
    items: tuple[Value, ...]


class TypeValue(Record, frozen=True, kw_only=True, tag="type"):
    """A class of an allow-listed module."""

    name: str


class FunctionValue(Record, frozen=True, kw_only=True, tag="function"):
    """A function of an allow-listed module, or an operator, by its qualified name.

    ``kind`` is the namespace of the name; see `encoding.names`.
    """

    kind: str
    name: str


class SymValue(Record, frozen=True, kw_only=True, tag="sym"):
    """A symbolic scalar or a nested int."""

    sym: SymDesc | NestedIntDesc


class ExprValue(Record, frozen=True, kw_only=True, tag="expr"):
    """A bare sympy expression."""

    expr: ExprDesc


class TensorValue(Record, frozen=True, kw_only=True, tag="tensor"):
    """A tensor, by its record."""

    tensor: MetaTensorDesc


class SourceValue(Record, frozen=True, kw_only=True, tag="source"):
    """A ``torch._guards.Source``."""

    source: SourceDesc


class NodeValue(Record, frozen=True, kw_only=True, tag="node"):
    """An FX node of the enclosing graph, by its position."""

    index: int


class OpaqueValue(Record, frozen=True, kw_only=True, tag="opaque"):
    """A value with an encoder of its own, named by ``kind``."""

    kind: str
    data: Value = None


Value: TypeAlias = (
    bool
    | int
    | float
    | str
    | FloatValue
    | ComplexValue
    | BytesValue
    | EllipsisValue
    | TupleValue
    | ListValue
    | SizeValue
    | SetValue
    | DictValue
    | SliceValue
    | RangeValue
    | TorchConstValue
    | EnumValue
    | NamedTupleValue
    | TypeValue
    | FunctionValue
    | SymValue
    | ExprValue
    | TensorValue
    | SourceValue
    | NodeValue
    | OpaqueValue
    | None
)


# --- sources and symbolic contexts ---------------------------------------------------------------


class SourceDesc(Record, frozen=True, kw_only=True):
    """A ``torch._guards.Source`` tree.

    ``cls`` is the class name in ``torch._dynamo.source``; ``name`` is torch's rendering of the source,
    for display and fingerprints, never parsed.
    """

    cls: str
    name: str
    base: SourceDesc | None = None
    fields: tuple[tuple[str, Value], ...] = ()


class ConstraintDesc(Record, frozen=True, kw_only=True):
    """A ``DimConstraint``: ``strict`` has a value range, ``relaxed`` only forbids specialization."""

    kind: Literal["strict", "relaxed"]
    warn_only: bool = False
    lower: ExprDesc | None = None
    upper: ExprDesc | None = None


DimDynamicName: TypeAlias = Literal["DYNAMIC", "DUCK", "STATIC", "UNBACKED", "INFER_STRIDE"]


class ContextDesc(Record, frozen=True, kw_only=True):
    """A symbolic context: the policy by which dims get symbols.

    ``kind`` is the class in torch: ``stateless``, ``stateful``, ``subclass`` or ``symint``.
    """

    kind: Literal["stateless", "stateful", "subclass", "symint"]
    dynamic_sizes: tuple[DimDynamicName, ...] = ()
    dynamic_strides: tuple[DimDynamicName, ...] = ()
    constraint_sizes: tuple[ConstraintDesc | None, ...] = ()
    constraint_strides: tuple[ConstraintDesc | None, ...] = ()
    constraint: ConstraintDesc | None = None
    """Only of ``symint``."""
    specialize_on: tuple[tuple[ExprDesc, ...], ...] = ()
    """For each dim, conditions as expressions over the symbol ``dim``."""
    view_base_context: ContextDesc | None = None
    shape_ids: tuple[tuple[int, str | None], ...] | None = None
    unbacked_bounds: tuple[tuple[int, int | None, int | None], ...] | None = None
    tensor_source: SourceDesc | None = None
    excluded_sizes: tuple[int | None, ...] | None = None
    inner_contexts: tuple[tuple[str, ContextDesc | None], ...] = ()
    track_outer_size_stride: bool = True
