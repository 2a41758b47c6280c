"""Records -> fake tensors.

The result equals that of ``FakeTensorMode.from_tensor`` of torch 2.13 for the described tensor, under
the same policy. Operators that torch runs on fake tensors run on the underlying meta tensors here
(`fake_tensors.MetaDispatchMode`), and the attributes that torch's constructor sets are copied.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import torch

from torch_fakeify._weak_table import Entry, removal_callback
from torch_fakeify.compat import torch_dispatch
from torch_fakeify.compat.arguments import check_mode, check_policy
from torch_fakeify.compat.torch_dispatch import empty_strided, no_dispatch_guard
from torch_fakeify.compat.torch_dynamo import dynamo_source
from torch_fakeify.compat.torch_fakes import FakeTensor, FakeTensorMode
from torch_fakeify.encoding.contexts import decode_context
from torch_fakeify.encoding.interpreters import Interpreters
from torch_fakeify.encoding.meshes import Meshes
from torch_fakeify.encoding.nested_ints import NestedInts
from torch_fakeify.encoding.sources import DecodeMemo, decode_source
from torch_fakeify.errors import ConvertError, check_choice
from torch_fakeify.records.tensor import NestedIntDesc, SymDesc, SymValue, owner_of

from .attributes import resize, set_attributes, set_inner_marks
from .builder import Kind, TensorBuilder
from .dtype_views import can_be_viewed_as, layout_to_cast, view_as_dtype
from .fake_tensors import (
    DTYPES,
    META,
    FakeDevice,
    MetaDispatchMode,
    attach_grad,
    dtype_of,
    neutral_dispatch_state,
)
from .meta_tensors import ValueLayout, ValueLayouts, meta_of
from .size_symbols import Geometry
from .sizes import (
    SizeMaker,
    SymbolPolicy,
    all_static,
    concrete_int,
    is_symbolic,
    with_strides,
)
from .storages import Storages
from .tracked_items import tracked_item
from .validate import (
    KINDS,
    LAYOUTS,
    check_describer,
    check_record,
    check_same,
    sparse_layout,
    view_mismatch,
    where_of,
)
from .wrappers import wrap_functional, wrap_functorch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from torch_fakeify.compat.torch_dynamo import Source
    from torch_fakeify.compat.torch_symbols import ShapeEnv, SymbolicContext
    from torch_fakeify.records.tensor import ContextDesc, IntLike, MetaTensorDesc, Value

    from .builder import SparseLayout


class _TensorEntry(Entry):
    """A cached fake tensor; the key is the id of its record, the value the record."""

    __slots__ = ("meta",)

    meta: torch.Tensor | None
    """The meta tensor on the same storage; ``None`` for views."""


def _is_shared(record: ContextDesc) -> bool:
    """Whether one context serves all equal records: it caches no symbols, and has no functions."""
    base = record.view_base_context
    is_own = record.kind == "stateless" and not record.specialize_on
    return is_own and (base is None or _is_shared(base))


class MetaConverter(TensorBuilder):
    """Makes fake tensors of one ``FakeTensorMode`` from records of one describer.

    Equal ids in records give the same fake tensor and storage as long as they live; the converter
    holds weak references only. Like its mode and ``ShapeEnv``, it is not thread-safe.

    Records of two describers are refused, and so are those of two documents (see `loads`). Of records
    that a caller made, one is refused if its id belongs to a live tensor or storage with other content;
    equal records are one tensor.

    Args:
        mode: the mode of the fake tensors.
        symbols: ``"fresh"`` makes symbols in the mode's ``ShapeEnv`` by the policy (source and
            symbolic context); ``"keep"`` leaves sizes as recorded: integers stay integers,
            symbols must be in the ``ShapeEnv`` already.
        sources: cache of decoded sources; see `sources.decode_source`.
        keep_nested_ints: leave recorded nested ints, for a describer with the same option.
        meshes: cache of decoded device meshes.

    Example:
        >>> mode = torch._subclasses.FakeTensorMode()
        >>> tfk.MetaConverter(mode).from_desc(tfk.describe_tensor(torch.ones(2)))
        FakeTensor(..., size=(2,))
    """

    def __init__(
        self,
        mode: FakeTensorMode,
        *,
        symbols: SymbolPolicy = "fresh",
        sources: DecodeMemo | None = None,
        keep_nested_ints: bool = False,
        meshes: Meshes | None = None,
    ) -> None:
        check_mode(mode, ConvertError)
        check_choice(symbols, get_args(SymbolPolicy), "symbols", ConvertError)
        self.mode = mode
        # A mode of static shapes makes no symbols, but may have some to keep.
        static = mode.static_shapes and symbols != "keep"
        self._shape_env: ShapeEnv | None = None if static else mode.shape_env
        self._tensors: dict[int, _TensorEntry] = {}
        self._forget: Any = removal_callback(self._tensors)
        self._devices: dict[str, FakeDevice] = {}
        self._sizes: SizeMaker | None = None
        self._nested_ints = NestedInts(mode, keep=keep_nested_ints)
        self._interpreters = Interpreters()
        self._meshes = Meshes() if meshes is None else meshes
        if self._shape_env is not None:
            nested = self._nested_ints
            self._sizes = SizeMaker(self._shape_env, symbols, nested=nested)
        self._storages = Storages(self._shape_env, self._sizes)
        self._symbols: SymbolPolicy = symbols
        self._sources = DecodeMemo() if sources is None else sources
        self._contexts: dict[ContextDesc | int, tuple[ContextDesc, SymbolicContext]] = {}
        self._meta_dispatch = MetaDispatchMode(self.mode)
        self._layouts: ValueLayouts | None = None
        if self._shape_env is not None:
            self._layouts = ValueLayouts(self._shape_env)
            self._value_source: Source = dynamo_source().ConstantSource("__fakeify_value")
            """Of a value that binds no symbols."""
        self.shares_sizes = symbols == "keep"
        """Whether fake tensors of one layout may share the nodes of their sizes: those of a graph's
        values, not those of inputs, which tracers identify by these nodes."""
        self._unnamed = itertools.count()
        self.has_alias_fakes = False
        """Whether other tensors have the ids of inputs, as in `transfer.refakeifier.GraphValues`."""
        self._first_record: MetaTensorDesc | None = None
        """The first record, which identifies the describer of all."""

    def __repr__(self) -> str:
        return f"<MetaConverter: {len(self._tensors)} tensors>"

    def from_desc(
        self,
        d: MetaTensorDesc,
        *,
        source: Source | None = None,
        symbolic_context: SymbolicContext | None = None,
    ) -> FakeTensor:
        """Return the fake tensor of a record; the same one as before if it is still alive.

        Args:
            d: the record.
            source: overrides the record's source.
            symbolic_context: overrides the record's symbolic context.

        Raises:
            ConvertError: the record is invalid, the mode cannot have such a tensor, or the record
                is of another describer than those before.
        """
        if source is not None or symbolic_context is not None:
            check_policy(source, symbolic_context, ConvertError)
        if (fake := self._find_cached(d)) is not None:
            return fake
        context = symbolic_context
        if self._shape_env is None:
            if context is not None:
                raise ConvertError(
                    "a mode with static shapes takes no symbolic context", where=where_of(d)
                )
        else:
            source = source or self._source_of(d)
            if self._symbols != "keep":  # else policies are not used
                context = context or self._context_of(d.symbolic_context)
        with neutral_dispatch_state(self._interpreters.cleared):
            fake = self._build(d, source, context)
            if self._shape_env is not None and d.scalar_hint is not None and source is not None:
                self._track_item(fake, d, source, context)
            return fake

    # --- fields of a record ---------------------------------------------------------------------

    def interpreters(self, d: MetaTensorDesc) -> AbstractContextManager[None]:
        """Enter the functorch transforms in which a tensor was described.

        Inside, operators on the fake tensor of the record run under the recorded ``vmap``, ``grad``,
        and so on. Transforms that are already active are left unchanged.

        Args:
            d: the record of a functorch wrapper; no effect for other tensors.

        Raises:
            ConvertError: the recorded stack is invalid.
        """
        stack = () if d.functorch is None else d.functorch.stack
        return self._interpreters.entered(stack, ints=partial(self._batch_size, d))

    def _where(self, d: MetaTensorDesc) -> str:
        return where_of(d)

    def _find_cached(self, d: MetaTensorDesc) -> Any:
        cached = self._tensors.get(d.id)
        if cached is None or cached.value is not d:
            check_describer(self._first_record, d)
        fake = None if cached is None else cached()
        if cached is not None and fake is not None and not self.has_alias_fakes:
            check_same(cached.value, d)
        return fake

    def _cache_made(self, d: MetaTensorDesc, made: Any, meta: torch.Tensor | None) -> None:
        entry = _TensorEntry(made, self._forget)
        entry.key, entry.value, entry.meta = d.id, d, meta
        self._tensors[d.id] = entry
        if self._first_record is None and owner_of(d) is not None:
            self._first_record = d

    def _name_source(self, d: MetaTensorDesc) -> Source:  # noqa: ARG002
        if self._symbols == "keep":
            return self._value_source
        # Torch's name, which determines the name of a symbol. Torch counts the live tensors of the
        # mode instead, including results of operators.
        name = f"__meta_utils_unknown_tensor{next(self._unnamed)}"
        return dynamo_source().ConstantSource(name)

    def _kind(self, d: MetaTensorDesc) -> Kind:
        if d.subclass is not None:
            return Kind.SUBCLASS
        if d.functorch is not None:
            return Kind.FUNCTORCH
        if d.functional is not None:
            return Kind.FUNCTIONAL
        return KINDS[d.layout]

    def _dtype(self, d: MetaTensorDesc) -> torch.dtype:
        return DTYPES.get(d.dtype) or dtype_of(d.dtype, where_of(d))

    def _layout(self, d: MetaTensorDesc) -> torch.layout:
        return LAYOUTS[d.layout]

    def _geometry(
        self, d: MetaTensorDesc, source: Source | None, context: SymbolicContext | None
    ) -> Geometry:
        if self._sizes is None:
            if not is_symbolic(d):
                return Geometry(d.size, d.stride, d.storage_offset)  # type: ignore[arg-type]
            where = where_of(d)
            return Geometry(
                tuple(self._static(n, where) for n in d.size),
                tuple(self._static(n, where) for n in d.stride),
                concrete_int(d.storage_offset, where),
            )
        assert source is not None
        return self._sizes.geometry(d, source, context)

    def _static(self, n: IntLike, where: str) -> Any:
        if isinstance(n, NestedIntDesc):
            return self._nested_ints.make(n)
        if isinstance(n, SymDesc) and isinstance(n.hint, NestedIntDesc):
            return self._nested_ints.make(n.hint)
        return concrete_int(n, where)

    def _sparse_size(
        self, d: MetaTensorDesc, source: Source | None, context: SymbolicContext | None
    ) -> tuple[Any, ...]:
        if self._sizes is None:
            return tuple(concrete_int(n, where_of(d)) for n in d.size)
        if context is None and not any(isinstance(n, SymDesc) for n in d.size):
            return d.size
        assert source is not None
        return self._sizes.geometry(with_strides(d), source, context).size

    def _sparse(self, d: MetaTensorDesc) -> SparseLayout:
        return sparse_layout(d)

    def _creation_meta(self, d: MetaTensorDesc) -> Any:
        return getattr(torch_dispatch.CreationMeta, d.creation_meta or "DEFAULT")

    def _build(
        self, d: MetaTensorDesc, source: Source | None, context: SymbolicContext | None
    ) -> Any:
        check_record(d)
        return super()._build(d, source, context)

    # --- how tensors are made -------------------------------------------------------------------

    def _wrap(self, d: MetaTensorDesc, make_meta: Callable[[], torch.Tensor]) -> Any:
        device = self._device(d)
        guard = no_dispatch_guard()
        try:
            return device.wrap(make_meta())
        finally:
            del guard

    def _dense(
        self, d: MetaTensorDesc, kind: Kind, source: Source | None, context: SymbolicContext | None
    ) -> tuple[Any, torch.Tensor | None]:
        """A tensor that is no view, and the meta tensor on its storage."""
        geometry = self._known_layout(d) or self._geometry(d, source, context)
        dtype, device = self._dtype(d), self._device(d)
        guard = no_dispatch_guard()
        try:
            if isinstance(geometry, ValueLayout):
                meta = meta_of(geometry.size, geometry.stride, dtype, geometry.nbytes)
                self._storages.add(d, meta.untyped_storage())
            elif kind is Kind.NO_STORAGE:
                meta = empty_strided(geometry.size, geometry.stride, dtype=dtype, device=META)
            else:
                meta = self._meta(d, geometry, dtype)
        except RuntimeError as error:
            if self._shape_env is not None:
                raise
            raise ConvertError(
                "torch makes no tensor of these sizes, strides and storage",
                where=self._where(d),
                found=str(error).partition("\n")[0],
            ) from error
        else:
            made = device.wrap(meta)
        finally:
            del guard
        return self._with_grad(d, made, meta), meta

    def _known_layout(self, d: MetaTensorDesc) -> ValueLayout | None:
        """The layout of a graph's value, if one like it was converted before."""
        if self._layouts is None or not self.shares_sizes:
            return None
        return None if d.source is not None or d in self._storages else self._layouts.find(d)

    def _meta(self, d: MetaTensorDesc, geometry: Geometry, dtype: torch.dtype) -> torch.Tensor:
        if self._layouts is None or not d.is_fake:
            return self._storages.meta_tensor(d, geometry, dtype)
        # Guards on the sizes of a fake tensor were added when it was made.
        has_own_storage = d not in self._storages
        with self._suppressed():
            meta = self._storages.meta_tensor(d, geometry, dtype)
        if has_own_storage:
            self._layouts.add(d, meta)
        return meta

    def _operator_mode(self, d: MetaTensorDesc) -> AbstractContextManager[Any]:
        device = self._device(d)
        return self.mode if device.has_guard else self._meta_dispatch.on(device, None)

    def _with_history(self, d: MetaTensorDesc, made: Any, meta: torch.Tensor | None) -> Any:
        # With a size of zero, torch's operator compares symbolic strides.
        asks = self._compares_strides(d) or (self._shape_env is not None and 0 in d.size)
        if meta is None or asks:
            return super()._with_history(d, made, meta)
        error = torch_dispatch.DelayedError("Tried to backward() through an example input", 1)
        with self._meta_dispatch.on(self._device(d), meta):
            return error(made)

    def _base(
        self, d: MetaTensorDesc, source: Source | None, context: SymbolicContext | None
    ) -> Any:
        assert d.base is not None
        cached = self._find_cached(d.base)
        return super()._base(d, source, context) if cached is None else cached

    def _view_operator_mode(
        self, base: Any, d: MetaTensorDesc, *, replayed: bool
    ) -> AbstractContextManager[Any]:
        if replayed:
            return self._dispatching()
        assert d.base is not None
        entry = self._tensors.get(d.base.id)
        meta = None if entry is None else entry.meta
        device = self._device(d.base)
        if meta is not None and meta.untyped_storage() is not base.untyped_storage():
            meta = None
        is_aliased = not d.is_leaf and d.base.requires_grad != d.requires_grad
        asks = self._compares_strides(d.base) or (self._shape_env is not None and is_aliased)
        if meta is not None and not asks:
            return self._meta_dispatch.on(device, meta)
        if not device.has_guard:
            return self._meta_dispatch.on(device, None)
        return self._dispatching()

    def _compares_strides(self, d: MetaTensorDesc) -> bool:
        """Whether torch's cache of operators, which must run then, adds guards on the strides.

        It asks for the memory format of 4 and 5 dims, also outside `ShapeEnv.suppress_guards`. The
        guards of a fake tensor were added when it was made.
        """
        return self._shape_env is not None and not d.is_fake and len(d.size) in (4, 5)

    def _dispatching(self) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(self.mode)  # another mode may be active
        stack.enter_context(torch_dispatch.enable_python_dispatcher())
        return stack

    def _set_view_device(self, d: MetaTensorDesc, made: Any) -> None:
        if isinstance(made, FakeTensor):
            made.fake_device = self._device(d).device

    def _view_dtype(
        self, base: Any, base_record: MetaTensorDesc, dtype: torch.dtype, d: MetaTensorDesc
    ) -> Any:
        """A view of the base under another dtype.

        Where the whole base cannot be viewed under the dtype, the part of its storage that can be
        is viewed instead.
        """
        if can_be_viewed_as(base_record, base.dtype, dtype):
            return view_as_dtype(base, dtype)
        nbytes = concrete_int(0 if d.storage is None else d.storage.nbytes, where_of(d))
        size, stride = layout_to_cast(nbytes, base.dtype, dtype)
        with self._suppressed():
            return view_as_dtype(base.as_strided(size, stride, 0), dtype)

    # --- wrapper subclasses, functorch, functional tensors ---------------------------------------

    def _inner(self, d: MetaTensorDesc) -> Iterable[tuple[str, MetaTensorDesc]]:
        return () if d.subclass is None else d.subclass.tensors

    def _outer(self, d: MetaTensorDesc) -> tuple[Any, Any]:
        if self._sizes is not None and d.is_fake:
            numbers = self._sizes.carry(d, (*d.size, *d.stride))
            return numbers[: d.ndim], numbers[d.ndim :]
        where = where_of(d)
        size = tuple(self._static(n, where) for n in d.size)
        return size, tuple(self._static(n, where) for n in d.stride)

    def _unflatten(self, d: MetaTensorDesc, inner: dict[str, Any], size: Any, stride: Any) -> Any:
        from torch_fakeify.encoding import subclasses

        record = d.subclass
        assert record is not None
        where = where_of(d)
        ints = partial(self._value_of, d)
        decoder = subclasses.context_decoder(record, ints, self.from_desc, self._meshes)
        inner.update(subclasses.decode_opaques(record, decoder, where=where))
        context = subclasses.decode_context(record, decoder, where=where)
        return subclasses.unflatten(record, inner, context, size, stride, where=where)

    def _value_of(self, d: MetaTensorDesc, value: Value) -> Any:
        """Decode a symbolic scalar in the context of a subclass; a hook of `values.decode_value`."""
        return self._scalar(d, value.sym) if isinstance(value, SymValue) else NotImplemented

    def _scalar(self, d: MetaTensorDesc, n: SymDesc | NestedIntDesc) -> Any:
        if isinstance(n, NestedIntDesc):
            return self._nested_ints.make(n)
        if self._sizes is None:
            return self._static(n, where_of(d)) if n.kind == "int" else n.hint
        source = dynamo_source().ConstantSource(f"__fakeify_context_{d.id}")
        return self._sizes.scalar(n, d, source)

    def _replay_view(
        self,
        d: MetaTensorDesc,
        base: Any,
        symint: Callable[[int], Any],
        tensor: Callable[[Any], Any],
    ) -> Any:
        from torch_fakeify.encoding.views.replay import replay_view_calls

        assert d.view_calls is not None
        static = self._symbols == "keep" and not is_symbolic(d)

        def number(n: int | SymDesc | NestedIntDesc) -> Any:
            if static and type(n) is int:
                return n
            if isinstance(n, SymDesc) and self._sizes is not None:
                return self._scalar(d, n)
            return symint(n if isinstance(n, int) else self._scalar(d, n))

        return replay_view_calls(
            d.view_calls, base, symint=number, tensor=tensor, where=where_of(d)
        )

    def _inner_tensor_lookup(
        self, d: MetaTensorDesc, inner: dict[int, Any]
    ) -> Callable[[Any], Any | None]:
        del d
        return lambda part: inner.get(part.id)

    def _closed_over(self, part: MetaTensorDesc) -> Any:
        if self._shape_env is None:
            return self._convert(part, None, None)
        source = dynamo_source().EphemeralSource("tensor_visitor_fn")
        return self._convert(part, source, self._all_dynamic(part, source))

    def _functorch(
        self, d: MetaTensorDesc, source: Source | None, context: SymbolicContext | None
    ) -> Any:
        wrapper = d.functorch
        assert wrapper is not None
        inner = wrapper.unwrapped
        if wrapper.kind != "functional" and self._shape_env is not None:
            # Torch makes no symbols for tensors inside vmap and grad; a fake one has its own.
            context = None if inner.is_fake else all_static(inner)
        if wrapper.level == torch_dispatch.DEAD_LEVEL:
            unwrapped, _ = self._make(inner, source, context)
        else:
            unwrapped = self._convert(inner, source, context)
        ints = partial(self._batch_size, d)
        layers = self._interpreters.layers(wrapper.stack, ints=ints)
        return wrap_functorch(
            unwrapped,
            kind=wrapper.kind,
            level=wrapper.level,
            bdim=wrapper.bdim,
            layers=layers,
            requires_grad=d.requires_grad,
            is_leaf=d.is_leaf,
            where=where_of(d),
        )

    def _batch_size(self, d: MetaTensorDesc, n: IntLike) -> Any:
        if isinstance(n, int):
            return n
        return (
            self._static(n, where_of(d)) if self._sizes is None else self._sizes.carry(d, (n,))[0]
        )

    def _functional(
        self, d: MetaTensorDesc, source: Source | None, context: SymbolicContext | None
    ) -> Any:
        assert d.functional is not None
        return wrap_functional(
            self._convert(d.functional.unwrapped, source, context),
            is_python=d.functional.is_python,
            requires_grad=d.requires_grad,
            is_leaf=d.is_leaf,
        )

    # --- attributes -----------------------------------------------------------------------------

    def _attach_grad(self, d: MetaTensorDesc, made: Any, grad: Any) -> None:
        attach_grad(made, grad, where_of(d))

    def _finish(self, d: MetaTensorDesc, made: Any, source: Source | None) -> None:
        if d.storage is not None and d.functional is None:
            # Operators may also have grown a storage that is smaller than its tensors.
            resize(d, made.untyped_storage(), symbolic=self._shape_env is not None)
        set_attributes(d, made)
        if d.item_memo is not None and self._sizes is not None:
            assert source is not None
            made.item_memo = self._sizes.scalar(d.item_memo, d, source)
        if d.nested_int is not None:
            made.nested_int_memo = self._nested_ints.symbol(d.nested_int)

    def _wrapped(
        self,
        d: MetaTensorDesc,
        size: Any,
        stride: Any,
        source: Source | None,
        context: SymbolicContext | None,
    ) -> Any:
        made = super()._wrapped(d, size, stride, source, context)
        # Its class may take `requires_grad` of the inner tensors.
        if made.requires_grad and not d.requires_grad:
            if not made.is_leaf:
                raise ConvertError(
                    "__tensor_unflatten__ gave a tensor with a gradient function",
                    where=self._where(d),
                    expected="one that does not require grad",
                )
            made.requires_grad = False
        return made

    def _inner_wrapper(
        self, d: MetaTensorDesc, source: Source | None, context: SymbolicContext | None
    ) -> Any:
        made = self._find_cached(d)
        if made is not None:
            return made
        with torch.inference_mode(d.is_inference):
            made = super()._inner_wrapper(d, source, context)
        if d.requires_grad:
            made.requires_grad = True
        geometry = Geometry(made.size(), made.stride(), made.storage_offset())
        self._storages.share(d, made, geometry)
        self._finish(d, made, source)
        if self._shape_env is None:  # else, as an input, it gets symbols of its own
            self._cache_made(d, made, None)
        return made

    def _view_by_calls(
        self,
        base: Any,
        d: MetaTensorDesc,
        geometry: Geometry,
        source: Source | None,
        context: SymbolicContext | None,
    ) -> Any:
        made = super()._view_by_calls(base, d, geometry, source, context)
        set_inner_marks(d, made)
        return made

    def _wrapper(
        self, d: MetaTensorDesc, source: Source | None, context: SymbolicContext | None
    ) -> Any:
        geometry = self._geometry(d, source, context)
        made = self._with_grad(d, self._empty_wrapper(d, geometry, source, context), None)
        self._storages.share(d, made, geometry)
        if not d.is_leaf:  # its inner tensors were replaced when it got a history
            set_inner_marks(d, made)
        return made

    def _view_mismatch(self, d: MetaTensorDesc, found: Any, expected: Any) -> Exception:
        return view_mismatch(d, found, expected)

    def _track_item(
        self, fake: Any, d: MetaTensorDesc, source: Source, context: SymbolicContext | None
    ) -> None:
        """Set the symbol of ``item()``; see `tracked_items`."""
        if fake._item_memo is None and not self.mode.fake_tensor_converter.export:
            keep = self._symbols == "keep"
            if (item := tracked_item(self._shape_env, d, source, context, keep=keep)) is not None:
                fake.item_memo = item

    def _source_of(self, d: MetaTensorDesc) -> Source | None:
        return None if d.source is None else decode_source(d.source, memo=self._sources)

    def _context_of(self, record: ContextDesc | None) -> SymbolicContext | None:
        """The context of a record, the same one at each call."""
        if record is None:
            return None
        key = record if _is_shared(record) else id(record)
        found = self._contexts.get(key)
        if found is None:
            found = self._contexts[key] = record, decode_context(record, memo=self._sources)
        return found[1]

    def _device(self, d: MetaTensorDesc) -> FakeDevice:
        if d.device not in self._devices:
            self._devices[d.device] = FakeDevice.make(self.mode, d.device, where_of(d))
        return self._devices[d.device]
