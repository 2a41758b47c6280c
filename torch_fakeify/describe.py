"""Real (and fake) tensors -> records.

Method: what torch 2.13's ``MetaTensorDescriber`` reads, and what it leaves unsaid (retained
gradients, gradient dtype, Dynamo's marks, item memos), written without any torch object.

Not recorded, because nothing that reads a fake tensor depends on it: the data, the value of the
version counter, autograd hooks (they are code of the process), Python attributes other than
Dynamo's marks and those of ``nn.Buffer``, and of a fake tensor its data (``constant``,
``real_tensor``) and its memos of data-dependent sizes, which torch itself drops on a retrace.
Everything else that a record cannot hold is refused by name.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import sympy
import torch

from . import _torch, facts
from ._torch import dispatch_keys, key_excluded, torch_function_depth
from .desc import (
    FunctionalDesc,
    FunctorchDesc,
    ListValue,
    MetaStorageDesc,
    MetaTensorDesc,
    SparseDesc,
    SymDesc,
)
from .eager_views import keeps_strides
from .errors import UnsupportedTensorError, UnsupportedValueError
from .exprs import encode_expr, encode_sym
from .fake_records import DENSE, FakeRecords, creation_meta
from .identities import KeptNumbers, KeptRecords, StorageRecords, TensorNumbers
from .known_layouts import MOST_LAYOUTS, KnownLayouts
from .marks import LACKS, encode_marks
from .refusals import (
    MAX_DEPTH,
    NOT_PLAIN,
    PLAIN,
    PLAIN_INFERENCE,
    Where,
    device_name,
    is_pinned,
    kind_of_keys,
    name_of,
    refuse_unsupported,
)
from .symbols import SymMemo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from ._torch import Source, SymbolicContext
    from .desc import (
        ContextDesc,
        IntLike,
        MarksDesc,
        SourceDesc,
        Value,
        ViewCallDesc,
    )

__all__ = ["MetaTensorDescriber", "describe_tensor"]

_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_ITEM_DTYPES = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.float64})
"""Dtypes whose 0-dim CPU tensors get a symbol for ``item()`` from torch's ``from_tensor``."""

_FLAT_DTYPES = {
    dtype: name_of(dtype)
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype not in (torch.int64, torch.int32)
}
"""The names of dtypes of which no tensor holds the offsets of jagged tensors."""

_FUNCTIONALIZE = _torch.DispatchKey.Functionalize
_forward_ad: Any = torch.autograd.forward_ad


class MetaTensorDescriber:
    """Describes tensors and storages, giving each a number that is stable for its life.

    A describer holds weak references only, if it is not told to ``keep_alive``, and of symbolic sizes
    the expressions. Records of one describer belong together: equal ids mean the same tensor or
    storage.

    Threads may share a describer, each outside of what another one has `settled`: an object has one
    number in all of them, and numbers are given once, though not always without gaps. A forked child
    goes on with a copy: what it and its parent describe then gets numbers of their own.

    Args:
        keep_nested_ints: leaves nested ints the numbers that torch gave them, so that the records
            go with a `snapshot` of their ``ShapeEnv``; else they get numbers of the describer.
        lose_classes: takes an instance of a class that no record can hold, such as one with a
            ``__torch_function__`` alone, for the tensor that it is, as torch's ``from_tensor`` does;
            else it is refused.
        keep_alive: holds what it has described until it is to `forget` it, which takes less time
            than weak references do; the describer is one thread's then.
        fast: ``False`` reads each tensor in the long way; the records are equal.
    """

    def __init__(
        self,
        *,
        keep_nested_ints: bool = False,
        lose_classes: bool = False,
        keep_alive: bool = False,
        fast: bool = True,
    ) -> None:
        self._lose_classes = lose_classes
        self._fast = fast
        self._tensors = KeptNumbers() if keep_alive else TensorNumbers()
        self._syms = SymMemo(keep_nested_ints=keep_nested_ints)
        self._storages = (KeptRecords if keep_alive else StorageRecords)(self._syms)
        self._fakes = FakeRecords(self._tensors, self._storages, self._syms)
        self._sizes: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._known = KnownLayouts()
        self._policies: tuple[Callable[..., SourceDesc], Callable[..., ContextDesc]] | None = None
        self._can_pin = torch.accelerator.is_available()

    def same(self, t: torch.Tensor, d: MetaTensorDesc) -> None:
        """Let a tensor have the id of a record: it stands for the tensor that was described."""
        self._tensors.give(t, d.id)

    def forget(self) -> None:
        """Forget all tensors and storages: one that comes again gets a new number.

        A weak reference to a tensor that nobody needs any more is not left to the garbage collector:
        as long as there is one, torch refuses to swap the tensor.
        """
        self._tensors.clear()
        self._storages.clear()
        self._sizes.clear()
        self._known.clear()

    def settled(self) -> AbstractContextManager[None]:
        """Inside, nobody changes a fake tensor or a ``ShapeEnv``, as while a graph is recorded.

        The describer is one thread's then.
        """
        return self._fakes.settled()

    def adopt(self, inputs: Iterable[tuple[Any, Any, MetaTensorDesc]]) -> None:
        """Let the fakes of a frame's inputs have the records of these, inside of `settled`.

        As in the frame, a graph that works on them then works on the inputs. A fake that tracing has
        changed since it was made stays a tensor of its own.

        Args:
            inputs: for each the fake, the tensor that it stands for, and its record.
        """
        if self._fast:
            self._fakes.adopt(inputs)

    def describe_storage(self, s: torch.UntypedStorage) -> MetaStorageDesc:
        """The record of an untyped storage: the same object as long as its size stays."""
        return self._storages.of(s)

    def describe_tensor(
        self,
        t: torch.Tensor,
        *,
        source: Source | None = None,
        symbolic_context: SymbolicContext | None = None,
    ) -> MetaTensorDesc:
        """The record of a tensor.

        Args:
            t: any strided tensor, real or fake.
            source: where the compiled function finds the tensor; travels with the record.
            symbolic_context: by which policy its dims get symbols; travels with the record.

        Raises:
            UnsupportedTensorError: the tensor has a property that a record cannot hold.
        """
        d = self._describe_plain(t, "$") if self._fast else None
        if source is None and symbolic_context is None:
            return self._describe_any(t, "$") if d is None else d
        policy = self._policy(source, symbolic_context)
        if d is None:
            return self._describe_any(t, "$", source, policy)
        return msgspec.structs.replace(
            d,
            scalar_hint=None if d.storage is None else _scalar_hint(t, source, d.storage),
            source=policy[0],
            symbolic_context=policy[1],
        )

    def _policy(
        self, source: Source | None, symbolic_context: SymbolicContext | None
    ) -> tuple[SourceDesc | None, ContextDesc | None]:
        policies = self._policies
        if policies is None:
            # Not needed to describe tensors alone.
            from .contexts import ContextRecords
            from .sources import encode_source

            policies = self._policies = encode_source, ContextRecords().of
        encode_source, encode_context = policies
        return (
            None if source is None else encode_source(source),
            None if symbolic_context is None else encode_context(symbolic_context),
        )

    # --- the fast path --------------------------------------------------------------------------

    def _describe_plain(self, t: torch.Tensor, path: str) -> MetaTensorDesc | None:
        """The record of a plain dense tensor or a dense view of one, or ``None`` for all others.

        Equal to what `_describe_any` gives: one query of the dispatch keys answers what that asks
        in two dozen calls.
        """
        cls = type(t)
        if cls is not _Tensor and cls is not _Parameter:
            if cls is not _torch.FakeTensor:
                return None
            return self._fakes.of(t, path, self._describe_part)
        if torch_function_depth() or self._can_pin or _forward_ad._current_level >= 0:
            return None
        if key_excluded(_FUNCTIONALIZE):
            return self._describe_dense(
                t, path
            )  # to `fits`, functional tensors look like plain ones
        try:
            layout = self._known.of_class[cls].get(t.shape)
            if layout is None or not layout.fits(t):
                return self._describe_dense(t, path)
            requires_grad = t.requires_grad
            base = t._base  # None unless it is a view
            is_leaf = not requires_grad or t.is_leaf
        except (RuntimeError, TypeError):
            # No one shape, sizes without a hash, or a history that inference mode hides.
            return None
        if (
            not is_leaf
            or t.grad is not None
            or t.grad_dtype is not layout.dtype
            or (base is not None and type(base) not in DENSE)
        ):
            return self._describe_dense(t, path)
        attributes = t.__dict__
        # Each field given costs time, also one that is at its default.
        if base is None:
            d = MetaTensorDesc(
                id=self._tensors.of(t),
                dtype=layout.dtype_name,
                device=layout.device_name,
                size=layout.size,
                stride=layout.stride,
                storage_offset=t.storage_offset(),  # type: ignore[arg-type]
                storage=self._storages.of(t.untyped_storage()),
                requires_grad=requires_grad,
                is_parameter=cls is _Parameter,
            )
        else:
            d = MetaTensorDesc(
                id=self._tensors.of(t),
                dtype=layout.dtype_name,
                device=layout.device_name,
                size=layout.size,
                stride=layout.stride,
                storage_offset=t.storage_offset(),  # type: ignore[arg-type]
                storage=self._storages.of(t.untyped_storage()),
                requires_grad=requires_grad,
                is_parameter=cls is _Parameter,
                is_view=True,
                base=self._describe_part(base, f"{path}.base"),
                creation_meta=creation_meta(t),
            )
        if not attributes:
            return d
        return msgspec.structs.replace(
            d,
            is_parameter=d.is_parameter or bool(attributes.get("_is_param")),
            is_buffer=bool(attributes.get("_is_buffer", False)),
            persistent=_persistent(attributes),
            marks=self._marks(t, attributes, path),
        )

    def _describe_dense(self, t: torch.Tensor, path: str) -> MetaTensorDesc | None:
        """The same of a tensor of a layout not known yet, or with a history, gradient or attribute."""
        cls = type(t)
        kind = kind_of_keys(dispatch_keys(t).raw_repr())
        if kind == NOT_PLAIN:
            return None
        requires_grad = t.requires_grad
        try:
            is_leaf = not requires_grad or t.is_leaf
        except RuntimeError:
            return None  # inference mode forbids to regenerate its history
        grad = t.grad if is_leaf else facts.shown_grad(t)
        dtype = t.dtype
        grad_dtype = t.grad_dtype if is_leaf else dtype
        dtype_name = _FLAT_DTYPES.get(dtype)
        if dtype_name is None:
            if facts.nested_int_of(t) is not None:
                return None
            dtype_name = name_of(dtype)
        elif kind == PLAIN:
            self._known.meet(t, dtype_name)
        base = t._base
        attributes = t.__dict__
        if base is not None and type(base) not in DENSE:
            return None  # the plain path records the view operators
        return MetaTensorDesc(
            id=self._tensors.of(t),
            dtype=dtype_name,
            device=device_name(t.device),
            size=self._size(t),
            stride=t.stride(),
            storage_offset=t.storage_offset(),  # type: ignore[arg-type]
            storage=self._storages.of(t.untyped_storage()),
            requires_grad=requires_grad,
            is_leaf=is_leaf,
            is_inference=kind == PLAIN_INFERENCE and not _torch.inference_hidden(),
            is_parameter=cls is _Parameter or bool(attributes and attributes.get("_is_param")),
            is_buffer=bool(attributes and attributes.get("_is_buffer", False)),
            persistent=_persistent(attributes) if attributes else None,
            is_view=base is not None,
            base=None if base is None else self._describe_part(base, f"{path}.base"),
            creation_meta=None if base is None else creation_meta(t),
            grad=None if grad is None else self._describe_part(grad, f"{path}.grad"),
            grad_dtype=None if grad_dtype is dtype else _grad_dtype_name(grad_dtype),
            retains_grad=not is_leaf and t.retains_grad,
            marks=self._marks(t, attributes, path) if attributes else None,
        )

    def _size(self, t: torch.Tensor) -> tuple[int, ...]:
        """The size as a tuple, one object for equal sizes: finding it beats making it."""
        size = tuple(t.shape)
        if len(self._sizes) >= MOST_LAYOUTS:
            self._sizes.clear()
        return self._sizes.setdefault(size, size)

    def _describe_part(self, t: torch.Tensor, path: str) -> MetaTensorDesc:
        """The record of a base or gradient."""
        if self._fast and path.count(".") <= MAX_DEPTH:
            d = self._describe_plain(t, path)
            if d is not None:
                return d
        return self._describe_any(t, path)

    # --- the plain path -------------------------------------------------------------------------

    def _describe_any(
        self,
        t: torch.Tensor,
        path: str,
        source: Source | None = None,
        policy: tuple[SourceDesc | None, ContextDesc | None] = (None, None),
        number: int | None = None,
    ) -> MetaTensorDesc:
        # What a __torch_function__ mode or subclass says is not what the tensor is.
        with _torch.DisableTorchFunction():
            where = Where(self._tensors.of, t, path, source)
            refuse_unsupported(t, where, lose_class=self._lose_classes)
            if number is None:
                number = self._tensors.of(t)  # before those of its parts
            if facts.is_dead_wrapper(t):
                return self._describe_dead(t, number, path, policy)
            seen: list[Any] = []
            parts = self._parts(t, path, where, seen)
            is_fake = _torch.maybe_get_fake_mode(t) is not None
            plain_fake = isinstance(t, _torch.FakeTensor)
            is_leaf = facts.is_leaf(t)
            base = facts.base_of(t)
            grad = facts.shown_grad(t)
            attributes = t.__dict__
            strided = facts.has_strides(t)
            layout, pinned = self._layout(t, attributes)
            stored = facts.has_storage(t) and layout != "_mkldnn"
            storage = None
            try:
                encode_int = self._syms.encode_int
                size = tuple([encode_int(n) for n in t.size()])
                stride = tuple([encode_int(n) for n in t.stride()]) if strided else ()
                storage_offset = encode_int(t.storage_offset()) if stored else 0
                if stored:
                    storage = self.describe_storage(t.untyped_storage())
                item_memo = _item_memo(t) if plain_fake else None
            except UnsupportedValueError as error:
                where.refuse("size", error.what, error.found, error.fix)
            nested_int = facts.nested_int_of(t)
            dtype = t.dtype
            grad_dtype = t.grad_dtype if is_leaf else dtype
            return MetaTensorDesc(
                id=number,
                dtype=name_of(dtype),
                device=device_name(t.device),
                size=size,
                stride=stride,
                storage_offset=storage_offset,
                storage=storage,
                layout=layout,
                requires_grad=t.requires_grad,
                is_leaf=is_leaf,
                is_inference=t.is_inference() and not _torch.inference_hidden(),
                is_conj=t.is_conj(),
                is_neg=t.is_neg(),
                is_parameter=isinstance(t, _Parameter),
                is_buffer=bool(attributes.get("_is_buffer", False)),
                persistent=_persistent(attributes),
                is_view=base is not None,
                base=None if base is None else self._describe_part(base, f"{path}.base"),
                creation_meta=None if base is None else creation_meta(t),
                view_calls=None if base is None else self._view_calls(t, base, path, where),
                grad=None if grad is None else self._describe_part(grad, f"{path}.grad"),
                grad_dtype=None if grad_dtype is dtype else _grad_dtype_name(grad_dtype),
                retains_grad=not is_leaf and t.retains_grad,
                is_fake=is_fake,
                scalar_hint=None if storage is None else _scalar_hint(t, source, storage),
                item_memo=item_memo,
                symbols=self._syms.facts((*_sizes_of(t, strided, stored), *seen))
                if is_fake
                else (),
                nested_int=None if nested_int is None else self._syms.nested_number(nested_int),
                is_pinned=pinned,
                marks=self._marks(t, attributes, path),
                source=policy[0],
                symbolic_context=policy[1],
                **parts,
            )

    def _layout(self, t: torch.Tensor, attributes: Mapping[str, Any]) -> tuple[str, bool]:
        """The layout, and whether the memory is pinned; also where a fake stands in for such."""
        lacks = attributes.get(LACKS)
        if lacks is not None:
            return lacks
        pinned = self._can_pin and not isinstance(t, _torch.FakeTensor) and is_pinned(t)
        return name_of(t.layout), pinned

    def _describe_dead(
        self,
        t: torch.Tensor,
        number: int,
        path: str,
        policy: tuple[SourceDesc | None, ContextDesc | None],
    ) -> MetaTensorDesc:
        """A grad wrapper that outlived its transform is what it wraps, but for the gradient."""
        d = self._describe_any(_torch.get_unwrapped(t), path, number=number)
        return msgspec.structs.replace(
            d,
            requires_grad=t.requires_grad,
            is_leaf=d.is_leaf or not t.requires_grad,
            source=policy[0],
            symbolic_context=policy[1],
        )

    def _encode_seen(self, seen: list[Any], obj: object) -> Value:
        """A hook of `values.encode_value` that keeps the symbolic scalars in ``seen``."""
        value = self._syms.encode_value(obj)
        if value is not None:
            seen.append(obj)
        return value

    def _parts(self, t: torch.Tensor, path: str, where: Where, seen: list[Any]) -> dict[str, Any]:
        """The fields that only some kinds of tensors have; the numbers in them go to ``seen``."""

        def part(inner: torch.Tensor, name: str) -> MetaTensorDesc:
            return self._describe_part(inner, f"{path}.{name}")

        found: dict[str, Any] = {}
        if t.is_sparse or facts.is_sparse_compressed(t.layout):
            found["sparse"] = _sparse(t)
        if _torch.is_traceable_wrapper_subclass(t):
            from .subclasses import encode_subclass

            found["subclass"] = encode_subclass(
                t, part, where=str(where), ints=partial(self._encode_seen, seen)
            )
        wrapper = facts.functorch_facts(t)
        if wrapper is not None:
            found["functorch"] = self._functorch(wrapper, part, seen)
        inner = facts.functional_inner(t)
        if inner is not None:
            found["functional"] = FunctionalDesc(
                unwrapped=part(inner, "unwrapped"), is_python=facts.is_python_functional(t)
            )
        return found

    def _functorch(
        self,
        wrapper: facts.FunctorchFacts,
        part: Callable[[torch.Tensor, str], MetaTensorDesc],
        seen: list[Any],
    ) -> FunctorchDesc:
        from .interpreters import encode_stack

        def batch_size(n: Any) -> IntLike:
            seen.append(n)
            return self._syms.encode_int(n)

        with _torch.temporarily_clear_interpreter_stack() as stack:
            pass
        return FunctorchDesc(
            kind=wrapper.kind,
            unwrapped=part(wrapper.unwrapped, "unwrapped"),
            level=wrapper.level,
            bdim=wrapper.bdim,
            stack=encode_stack(stack or (), ints=batch_size),
        )

    def _view_calls(
        self, t: torch.Tensor, base: torch.Tensor, path: str, where: Where
    ) -> tuple[ViewCallDesc, ...] | None:
        if not facts.needs_view_calls(t, base):
            return None
        from .view_calls import trace_view_calls

        calls = trace_view_calls(
            t,
            part=lambda inner: self._describe_part(inner, f"{path}.view_calls"),
            ints=self._syms.encode_int,
            where=str(where),
        )
        in_two_steps = t.requires_grad and not (base.requires_grad or facts.is_leaf(t))
        if in_two_steps and _views_whole(calls[0], base):
            # Only so can a view of it require grad where it does not: a converter does the same.
            return calls[1:]
        return calls

    def _marks(self, t: torch.Tensor, attributes: Mapping[str, Any], path: str) -> MarksDesc | None:
        try:
            return encode_marks(attributes)
        except UnsupportedTensorError as error:
            error.where = str(Where(self._tensors.of, t, path, None))
            raise


def describe_tensor(
    t: torch.Tensor,
    *,
    source: Source | None = None,
    symbolic_context: SymbolicContext | None = None,
) -> MetaTensorDesc:
    """The record of one tensor, by a describer of its own: see `MetaTensorDescriber`."""
    describer = MetaTensorDescriber()
    try:
        return describer.describe_tensor(t, source=source, symbolic_context=symbolic_context)
    finally:
        # The entries' callbacks refer to their table; without them there is no cycle to collect.
        describer.forget()


# --- fields -------------------------------------------------------------------------------------


def _sparse(t: torch.Tensor) -> SparseDesc:
    if t.is_sparse:
        return SparseDesc(
            sparse_dim=t.sparse_dim(), dense_dim=t.dense_dim(), is_coalesced=t.is_coalesced()
        )
    rows_first = t.layout in (torch.sparse_csr, torch.sparse_bsr)
    indices = t.crow_indices() if rows_first else t.ccol_indices()
    sparse_dim, dense_dim = t.sparse_dim(), t.dense_dim()
    blocksize: tuple[int, ...] = ()
    if t.layout in (torch.sparse_bsr, torch.sparse_bsc):
        batch_dim = t.dim() - sparse_dim - dense_dim
        blocksize = tuple(t.values().shape[batch_dim + 1 : batch_dim + 3])
    return SparseDesc(
        sparse_dim=sparse_dim,
        dense_dim=dense_dim,
        index_dtype=name_of(indices.dtype),
        blocksize=blocksize,
    )


def _views_whole(call: ViewCallDesc, base: torch.Tensor) -> bool:
    """Whether a call of a view operator gives the whole of the base as it is."""
    if call.op == "aten.alias.default":
        return True
    if call.op == "aten.view.default":
        return call.args == (_ints(base.size()),) and keeps_strides(base)
    if call.op != "aten.as_strided.default":
        return False
    return call.args == (_ints(base.size()), _ints(base.stride()), base.storage_offset())


def _ints(sizes: Sequence[Any]) -> ListValue:
    return ListValue(items=tuple(sizes))


def _persistent(attributes: Mapping[str, Any]) -> bool | None:
    if not attributes.get("_is_buffer", False) or "persistent" not in attributes:
        return None
    return bool(attributes["persistent"])


def _grad_dtype_name(dtype: torch.dtype | None) -> str:
    return "any" if dtype is None else name_of(dtype)


def _scalar_hint(
    t: torch.Tensor, source: Source | None, storage: MetaStorageDesc
) -> int | float | None:
    """The value of ``item()`` where torch's ``from_tensor`` makes a symbol for it, else ``None``.

    Method: the conditions of ``FakeTensorConverter.from_real_tensor``, torch 2.13.
    """
    if source is None or type(t) is not _Tensor or t.dim() or t.dtype not in _ITEM_DTYPES:
        return None
    if t.device.type != "cpu" or isinstance(source, _torch.dynamo_source().RandomValueSource):
        return None
    needed = (t.storage_offset() + 1) * t.itemsize
    if not isinstance(storage.nbytes, int) or storage.nbytes < needed:
        return None
    guard = _torch.no_dispatch_guard()
    try:
        value = t.item()
    finally:
        del guard
    return value if math.isfinite(value) else None


def _item_memo(t: Any) -> SymDesc | None:
    memo = t.item_memo
    if memo is None:
        return None
    if isinstance(memo, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return encode_sym(memo)
    kind = "bool" if isinstance(memo, bool) else "int" if isinstance(memo, int) else "float"
    return SymDesc(expr=encode_expr(sympy.sympify(memo, strict=True)), kind=kind, hint=memo)


def _sizes_of(t: Any, strided: bool, stored: bool) -> tuple[Any, ...]:
    """Every number of a fake tensor that may be symbolic."""
    found = [*t.size()]
    if strided:
        found += t.stride()
    if stored:
        found += (t.storage_offset(), t.untyped_storage().nbytes())
    if isinstance(t, _torch.FakeTensor):
        found.append(t.item_memo)
    return tuple(found)
