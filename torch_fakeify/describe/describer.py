"""Real (and fake) tensors -> records.

Method: the fields that torch 2.13's ``MetaTensorDescriber`` reads, and those that it omits (retained
gradients, gradient dtype, Dynamo's marks, item memos), without any torch object.

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

from torch_fakeify.compat import torch_dispatch, torch_dynamo, torch_fakes
from torch_fakeify.compat.torch_dispatch import key_excluded, torch_function_depth
from torch_fakeify.encoding.exprs import encode_expr, encode_sym
from torch_fakeify.encoding.marks import MISSING_PROPERTIES, encode_marks
from torch_fakeify.encoding.views.eager_strides import preserves_strides
from torch_fakeify.errors import UnsupportedTensorError, UnsupportedValueError
from torch_fakeify.records.id_owners import Numbering
from torch_fakeify.records.tensor import (
    FunctionalDesc,
    FunctorchDesc,
    ListValue,
    MetaStorageDesc,
    MetaTensorDesc,
    SparseDesc,
    SymDesc,
    owned,
)

from . import tensor_state
from .fake_records import DENSE, FakeRecords, creation_meta
from .ids import StorageRecords, TensorIds
from .layout_cache import LayoutCache, has_symbols
from .sym_encoder import SymEncoder
from .unsupported import (
    MAX_DEPTH,
    TensorPath,
    device_name,
    is_pinned,
    name_of,
    refuse_unsupported,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch_fakeify.compat.torch_dynamo import Source
    from torch_fakeify.compat.torch_symbols import SymbolicContext
    from torch_fakeify.records.tensor import (
        ContextDesc,
        IntLike,
        MarksDesc,
        SourceDesc,
        Value,
        ViewCallDesc,
    )

_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_ITEM_DTYPES = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.float64})
"""Dtypes whose 0-dim CPU tensors get a symbol for ``item()`` from torch's ``from_tensor``."""

_FUNCTIONALIZE = torch_dispatch.DispatchKey.Functionalize
_forward_ad: Any = torch.autograd.forward_ad


class MetaTensorDescriber:
    """Describes tensors and storages, with ids that are stable for the life of an object.

    In records of one describer, equal ids mean the same tensor or storage. A describer holds weak
    references to tensors and storages, and strong ones to expressions.

    Threads may share a describer outside of `assume_unchanged`: an object has one id in all of them,
    and ids are unique, though not always consecutive. A forked child has a copy, whose new ids differ
    from those of its parent.

    Args:
        keep_nested_ints: leaves torch's numbers of nested ints, so that records match a `snapshot` of
            their ``ShapeEnv``; else they get numbers of the describer.
        strip_subclasses: describes an instance of a class that has no record, such as one with a
            ``__torch_function__`` alone, as a plain tensor, like torch's ``from_tensor``; else it is
            refused.
        keep_alive: holds strong references until `forget`, too.

    Example:
        >>> describer, t = tfk.MetaTensorDescriber(), torch.ones(4)
        >>> describer.describe_tensor(t).storage is describer.describe_tensor(t[1:]).storage
        True
    """

    def __init__(
        self,
        *,
        keep_nested_ints: bool = False,
        strip_subclasses: bool = False,
        keep_alive: bool = False,
        _numbering: Numbering | None = None,
    ) -> None:
        self._strip_subclasses = strip_subclasses
        self._numbering = numbering = _numbering or Numbering()
        self._tensors = TensorIds(numbering, keep_alive=keep_alive)
        self._syms = SymEncoder(keep_nested_ints=keep_nested_ints, numbering=numbering)
        self._storages = StorageRecords(self._syms, keep_alive=keep_alive)
        self._fakes = FakeRecords(self._tensors, self._storages, self._syms)
        self._layouts = LayoutCache()
        self._policies: (
            tuple[Callable[..., None], Callable[..., SourceDesc], Callable[..., ContextDesc]] | None
        ) = None
        self._can_pin = torch.accelerator.is_available()

    def __repr__(self) -> str:
        return "<MetaTensorDescriber>"

    def alias(self, t: torch.Tensor, d: MetaTensorDesc, *, storage: bool = False) -> None:
        """Give a tensor the id of a record.

        Args:
            t: the tensor.
            d: the record.
            storage: whether to give its storage the id of the record's storage, too.
        """
        self._tensors.alias(t, d.id)
        if storage and d.storage is not None:
            self._storages.alias(t.untyped_storage(), d.storage)

    def forget(self) -> None:
        """Forget all tensors and storages; they get new ids when described again.

        It drops the weak references at once, since ``swap_tensors`` refuses a tensor with weak references.
        """
        self._tensors.clear()
        self._storages.clear()
        self._layouts.clear()

    def assume_unchanged(self) -> AbstractContextManager[None]:
        """Enter a context in which no fake tensor or ``ShapeEnv`` changes, so that caches stay valid.

        The describer is not thread-safe inside.
        """
        return self._fakes.assume_unchanged()

    def register_inputs(self, inputs: Iterable[tuple[Any, Any, MetaTensorDesc]]) -> None:
        """Give the fakes of a frame's inputs the records of the inputs, inside `assume_unchanged`.

        The graph's metadata then refers to the inputs. A fake that tracing has changed gets a record
        of its own.

        Args:
            inputs: for each input its fake, the tensor, and the tensor's record.
        """
        self._fakes.register_inputs(inputs)

    def describe_storage(self, s: torch.UntypedStorage) -> MetaStorageDesc:
        """Return the record of an untyped storage, the same object until its size changes."""
        return self._storages.of(s)

    def describe_tensor(
        self,
        t: torch.Tensor,
        *,
        source: Source | None = None,
        symbolic_context: SymbolicContext | None = None,
    ) -> MetaTensorDesc:
        """Return the record of a tensor.

        Args:
            t: the tensor, real or fake.
            source: of the tensor in the compiled function; stored in the record.
            symbolic_context: the policy for symbols of its dims; stored in the record.

        Raises:
            UnsupportedTensorError: the tensor has a property that a record cannot hold.
        """
        d = self._describe_plain(t, "$")
        if source is None and symbolic_context is None:
            return owned(self._describe_general(t, "$") if d is None else d, self._numbering)
        policy = self._policy(source, symbolic_context)
        if d is None:
            d = self._describe_general(t, "$", source, policy)
        else:
            d = msgspec.structs.replace(
                d,
                scalar_hint=None if d.storage is None else _scalar_hint(t, source, d.storage),
                source=policy[0],
                symbolic_context=policy[1],
            )
        return owned(d, self._numbering)

    def _policy(
        self, source: Source | None, symbolic_context: SymbolicContext | None
    ) -> tuple[SourceDesc | None, ContextDesc | None]:
        policies = self._policies
        if policies is None:
            # Imported late: not needed without policies.
            from torch_fakeify.compat.arguments import check_policy
            from torch_fakeify.encoding.contexts import encode_context
            from torch_fakeify.encoding.sources import encode_source

            policies = self._policies = check_policy, encode_source, encode_context
        check, encode_source, encode_context = policies
        check(source, symbolic_context, UnsupportedTensorError)
        return (
            None if source is None else encode_source(source),
            None if symbolic_context is None else encode_context(symbolic_context),
        )

    # --- the fast path --------------------------------------------------------------------------

    def _describe_plain(self, t: torch.Tensor, path: str) -> MetaTensorDesc | None:
        """The record of a plain tensor or dense view of a cached layout; ``None`` for all others.

        It equals that of `_describe_general`, which caches the layouts.
        """
        cls = type(t)
        if cls is not _Tensor and cls is not _Parameter:
            if cls is not torch_fakes.FakeTensor:
                return None
            return self._fakes.of(t, path, self._describe_part)
        if torch_function_depth() or self._can_pin or _forward_ad._current_level >= 0:
            return None
        if key_excluded(_FUNCTIONALIZE):
            return None  # `CachedLayout` does not distinguish functional tensors
        try:
            layout = self._layouts.of_class[cls].get(t.shape)
            if layout is None or (layout.device_name == "meta" and has_symbols(t)):
                return None  # torch's matcher ends the process if it cannot compare symbols
            if not layout.matches(t):
                return None
            requires_grad = t.requires_grad
            base = t._base  # None unless it is a view
            is_leaf = not requires_grad or t.is_leaf
        except (RuntimeError, TypeError):
            # A C++ nested tensor, sizes without a hash, or a history that inference mode hides.
            return None
        if (
            not is_leaf
            or t.grad is not None
            or t.grad_dtype is not layout.dtype
            or (base is not None and (type(base) not in DENSE or base.layout is not torch.strided))
        ):
            return None
        attributes = t.__dict__
        # Fields at their defaults are omitted to save time.
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
        if base is not None:
            d = msgspec.structs.replace(
                d,
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

    def _describe_part(self, t: torch.Tensor, path: str) -> MetaTensorDesc:
        """The record of a base or gradient."""
        if path.count(".") <= MAX_DEPTH:
            d = self._describe_plain(t, path)
            if d is not None:
                return owned(d, self._numbering)
        return owned(self._describe_general(t, path), self._numbering)

    # --- the general path -----------------------------------------------------------------------

    def _describe_general(
        self,
        t: torch.Tensor,
        path: str,
        source: Source | None = None,
        policy: tuple[SourceDesc | None, ContextDesc | None] = (None, None),
        number: int | None = None,
    ) -> MetaTensorDesc:
        """The record of any tensor: the definition of each field of a `MetaTensorDesc`.

        Args:
            t: the tensor.
            path: ``$`` or the path of a part, such as ``$.base``; its depth is limited.
            source: of the tensor, for errors and the hint of ``item()``.
            policy: records of its source and symbolic context.
            number: its id; ``None`` takes the next one.
        """
        # A __torch_function__ mode or subclass may return other values than the tensor's.
        with torch_dispatch.DisableTorchFunction():
            where = TensorPath(self._tensors.of, t, path, source)
            refuse_unsupported(t, where, strip_subclass=self._strip_subclasses)
            if number is None:
                number = self._tensors.of(t)  # before those of its parts
            if tensor_state.is_escaped_grad_wrapper(t):
                return self._describe_escaped_wrapper(t, number, path, policy)
            seen: list[Any] = []
            parts = self._parts(t, path, where, seen)
            is_fake = torch_fakes.maybe_get_fake_mode(t) is not None
            plain_fake = isinstance(t, torch_fakes.FakeTensor)
            is_leaf = tensor_state.is_leaf(t)
            base = tensor_state.base_of(t)
            grad = tensor_state.grad_without_warning(t)
            attributes = t.__dict__
            strided = tensor_state.has_strides(t)
            layout, pinned = self._layout(t, attributes)
            stored = tensor_state.has_storage(t) and layout != "_mkldnn"
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
            nested_int = tensor_state.nested_int_of(t)
            self._layouts.add(t)
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
                is_inference=t.is_inference() and not torch_fakes.inference_hidden(),
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
        """The layout and whether the memory is pinned, also as noted on a fake tensor."""
        lacks = attributes.get(MISSING_PROPERTIES)
        if lacks is not None:
            return lacks
        pinned = self._can_pin and not isinstance(t, torch_fakes.FakeTensor) and is_pinned(t)
        return name_of(t.layout), pinned

    def _describe_escaped_wrapper(
        self,
        t: torch.Tensor,
        number: int,
        path: str,
        policy: tuple[SourceDesc | None, ContextDesc | None],
    ) -> MetaTensorDesc:
        """The record of an escaped grad wrapper: that of the wrapped tensor with its own grad state."""
        d = self._describe_general(torch_dispatch.get_unwrapped(t), path, number=number)
        return msgspec.structs.replace(
            d,
            requires_grad=t.requires_grad,
            is_leaf=d.is_leaf or not t.requires_grad,
            source=policy[0],
            symbolic_context=policy[1],
        )

    def _encode_and_collect(self, seen: list[Any], obj: object) -> Value:
        """A hook of `values.encode_value` that appends symbolic scalars to ``seen``."""
        value = self._syms.encode_value(obj)
        if value is not None:
            seen.append(obj)
        return value

    def _parts(
        self, t: torch.Tensor, path: str, where: TensorPath, seen: list[Any]
    ) -> dict[str, Any]:
        """The fields of sparse, wrapped and functional tensors; appends their numbers to ``seen``."""

        def part(inner: torch.Tensor, name: str) -> MetaTensorDesc:
            return self._describe_part(inner, f"{path}.{name}")

        found: dict[str, Any] = {}
        if t.is_sparse or tensor_state.is_sparse_compressed(t.layout):
            found["sparse"] = _sparse(t)
        if torch_fakes.is_traceable_wrapper_subclass(t):
            from torch_fakeify.encoding.subclasses import encode_subclass

            found["subclass"] = encode_subclass(
                t, part, where=str(where), ints=partial(self._encode_and_collect, seen)
            )
        wrapper = tensor_state.functorch_wrapper(t)
        if wrapper is not None:
            found["functorch"] = self._functorch(wrapper, part, seen)
        inner = tensor_state.functional_inner(t)
        if inner is not None:
            found["functional"] = FunctionalDesc(
                unwrapped=part(inner, "unwrapped"), is_python=tensor_state.is_python_functional(t)
            )
        return found

    def _functorch(
        self,
        wrapper: tensor_state.FunctorchWrapper,
        part: Callable[[torch.Tensor, str], MetaTensorDesc],
        seen: list[Any],
    ) -> FunctorchDesc:
        from torch_fakeify.encoding.interpreters import encode_stack

        def batch_size(n: Any) -> IntLike:
            seen.append(n)
            return self._syms.encode_int(n)

        with torch_dispatch.temporarily_clear_interpreter_stack() as stack:
            pass
        return FunctorchDesc(
            kind=wrapper.kind,
            unwrapped=part(wrapper.unwrapped, "unwrapped"),
            level=wrapper.level,
            bdim=wrapper.bdim,
            stack=encode_stack(stack or (), ints=batch_size),
        )

    def _view_calls(
        self, t: torch.Tensor, base: torch.Tensor, path: str, where: TensorPath
    ) -> tuple[ViewCallDesc, ...] | None:
        if not tensor_state.needs_view_calls(t, base):
            return None
        from torch_fakeify.encoding.views.trace import trace_view_calls

        calls = trace_view_calls(
            t,
            part=lambda inner: self._describe_part(inner, f"{path}.view_calls"),
            ints=self._syms.encode_int,
            where=str(where),
        )
        in_two_steps = t.requires_grad and not (base.requires_grad or tensor_state.is_leaf(t))
        if in_two_steps and _is_whole_view(calls[0], base):
            # The first call made an alias that requires grad; a converter makes it too.
            return calls[1:]
        return calls

    def _marks(self, t: torch.Tensor, attributes: Mapping[str, Any], path: str) -> MarksDesc | None:
        try:
            return encode_marks(attributes)
        except UnsupportedTensorError as error:
            error.where = str(TensorPath(self._tensors.of, t, path, None))
            raise


_PROCESS_NUMBERING = Numbering()
"""The ids of all records of `describe_tensor`."""


def describe_tensor(
    t: torch.Tensor,
    *,
    source: Source | None = None,
    symbolic_context: SymbolicContext | None = None,
) -> MetaTensorDesc:
    """Return the record of one tensor.

    Each call uses new ids, so that records of several calls can be in one file and one converter: two
    calls describe two tensors on two storages, even for the same tensor or views of it. Use one
    `MetaTensorDescriber` for tensors that share storages.

    Args:
        t: the tensor.
        source: of the tensor in the compiled function; stored in the record.
        symbolic_context: the policy for symbols of its dims; stored in the record.

    Raises:
        UnsupportedTensorError: the tensor has a property that a record cannot hold.

    Example:
        >>> record = tfk.describe_tensor(torch.ones(2, 3).T)
        >>> record.size, record.stride, record.is_view
        ((3, 2), (1, 3), True)
    """
    describer = MetaTensorDescriber(_numbering=_PROCESS_NUMBERING)
    try:
        return describer.describe_tensor(t, source=source, symbolic_context=symbolic_context)
    finally:
        # The entries' callbacks refer to their table: this breaks the cycle.
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


def _is_whole_view(call: ViewCallDesc, base: torch.Tensor) -> bool:
    """Whether a call of a view operator returns an alias of the whole base."""
    if call.op == "aten.alias.default":
        return True
    if call.op == "aten.view.default":
        return call.args == (_ints(base.size()),) and preserves_strides(base)
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
    """The value of ``item()`` if torch's ``from_tensor`` makes a symbol for it, else ``None``.

    Method: the conditions of ``FakeTensorConverter.from_real_tensor``, torch 2.13.
    """
    if source is None or type(t) is not _Tensor or t.dim() or t.dtype not in _ITEM_DTYPES:
        return None
    if t.device.type != "cpu" or isinstance(source, torch_dynamo.dynamo_source().RandomValueSource):
        return None
    needed = (t.storage_offset() + 1) * t.itemsize
    if not isinstance(storage.nbytes, int) or storage.nbytes < needed:
        return None
    guard = torch_dispatch.no_dispatch_guard()
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
    """All numbers of a tensor that may be symbolic."""
    found = [*t.size()]
    if strided:
        found += t.stride()
    if stored:
        found += (t.storage_offset(), t.untyped_storage().nbytes())
    if isinstance(t, torch_fakes.FakeTensor):
        found.append(t.item_memo)
    return tuple(found)
