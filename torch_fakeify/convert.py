"""Records -> fake tensors.

The result is what ``FakeTensorMode.from_tensor`` of torch 2.13 gives for the tensor that was
described, under the same policy. Where torch runs operators on fake tensors to get there, this
runs them on the bare meta tensors and wraps what they give (`fakes.Replay`), and it copies the
attributes of fake tensors that torch's own constructor made instead of calling it each time.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from . import _torch
from ._torch import FakeTensor, dynamo_source, no_dispatch_guard
from .contexts import decode_context
from .desc import ContextDesc, NestedIntDesc, SymDesc, SymValue
from .dtype_views import can_be_viewed_as, layout_to_cast, viewed_as
from .errors import ConvertError
from .fakes import FakeDevice, Replay, dtype_of
from .identities import StoragesMade, TensorMade, forgetting
from .interpreters import Interpreters
from .kept_fakes import KeptFakes
from .layouts import Layouts, is_alone
from .marks import decode_marks, mark_lacks
from .meshes import Meshes
from .nested_ints import NestedInts
from .rebuild import Kind, Rebuilder, SparseFacts
from .record_checks import KINDS, LAYOUTS, check_numbers, check_record, check_same, where_of
from .sizes import Geometry, SizeMaker, all_static, concrete_int, with_strides
from .sources import DecodeMemo, base_source_of, decode_source
from .static_fakes import Viewing, can_be_viewed, is_untold, make_leaf, make_view, views_are_as_ever
from .symbolic_leaves import SymbolicLeaves
from .tracked_items import tracked_item
from .wrapped import wrap_functional, wrap_functorch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from ._torch import FakeTensorMode, ShapeEnv, Source, SymbolicContext
    from .desc import IntLike, MarksDesc, MetaTensorDesc, Value
    from .sizes import SymbolPolicy

    _Policy = SymbolicContext | ContextDesc | None

__all__ = ["MetaConverter"]


class MetaConverter(Rebuilder):
    """Makes fake tensors of one ``FakeTensorMode`` from records of one describer.

    Equal ids in records give the same fake tensor and storage as long as they live; the converter
    holds weak references only. It is one thread's at a time, as its mode and ``ShapeEnv`` are.

    Args:
        mode: the mode the fake tensors belong to.
        symbols: ``"fresh"`` makes symbols in the mode's ``ShapeEnv`` by the policy (source and
            symbolic context); ``"keep"`` takes sizes as the record has them: integers
            stay integers, symbols must be in the ``ShapeEnv`` already.
        fast: ``False`` takes torch's own way for each step; the results are equal.
        sources: what was decoded of the same records before; see `sources.decode_source`.
        keep_nested_ints: leaves nested ints the numbers that records have; as the describer's.
    """

    def __init__(
        self,
        mode: FakeTensorMode,
        *,
        symbols: SymbolPolicy = "fresh",
        fast: bool = True,
        sources: DecodeMemo | None = None,
        keep_nested_ints: bool = False,
    ) -> None:
        self.mode = mode
        # A mode of static shapes makes no symbols; those that it has are kept like any other's.
        static = mode.static_shapes and symbols != "keep"
        self._shape_env: ShapeEnv | None = None if static else mode.shape_env
        self._fast = fast and not _torch.FakeTensorConfig.debug
        self._tensors: dict[int, TensorMade] = {}
        self._forget: Any = forgetting(self._tensors)
        self._storages = StoragesMade()
        self._devices: dict[str, FakeDevice] = {}
        self._sizes: SizeMaker | None = None
        self._kept: KeptFakes | None = None
        self._leaves: SymbolicLeaves | None = None
        self._nested_ints = NestedInts(mode, keep=keep_nested_ints)
        self._interpreters = Interpreters(lambda n: n)
        self._meshes = Meshes()
        if self._shape_env is not None:
            nested = self._nested_ints
            self._sizes = SizeMaker(self._shape_env, symbols, fast=self._fast, nested=nested)
            self._layouts = Layouts(self._shape_env) if self._fast else None
            if symbols == "keep" and self._fast:
                self._kept = KeptFakes(self._shape_env, self._with_history)
            elif self._layouts is not None and self._sizes.fresh is not None:
                self._leaves = SymbolicLeaves(self._shape_env, self._sizes.fresh, self._layouts)
        self._symbols: SymbolPolicy = symbols
        self._sources = DecodeMemo() if sources is None else sources
        self._contexts: dict[int, tuple[ContextDesc, SymbolicContext]] = {}
        self._replay = Replay(self.mode)
        self._views = Viewing()
        self._unknown = itertools.count()

    def from_desc(
        self,
        d: MetaTensorDesc,
        *,
        source: Source | None = None,
        symbolic_context: SymbolicContext | None = None,
    ) -> FakeTensor:
        """The fake tensor of a record; the same one as before if it is still alive.

        Args:
            d: the record.
            source: instead of the record's.
            symbolic_context: instead of the record's.

        Raises:
            ConvertError: the record is not sound, or this mode cannot have such a tensor.
        """
        known = self._tensors.get(d.id)
        if known is not None:
            fake = known()
            if fake is not None:
                check_same(known.value, d)
                return fake
        if self._shape_env is None:
            if symbolic_context is not None:
                raise ConvertError(
                    "a mode with static shapes takes no symbolic context", where=where_of(d)
                )
            if self._fast:
                fake = self._plain_static(d)
                if fake is not None:
                    return fake
        elif self._fast:
            source = source or self._source_of(d)
            policy = None if self._leaves is None else symbolic_context or self._policy_of(d)
            if (fake := self._plain_symbolic(d, source, policy)) is not None:
                return fake
        with self._ambience():
            if self._shape_env is not None:
                source = source or self._source_of(d)
                if self._symbols != "keep" or not self._fast:  # no policy is asked there
                    symbolic_context = symbolic_context or self._context_of(d)
            fake = self._convert(d, source, symbolic_context)
            if self._shape_env is not None and d.scalar_hint is not None and source is not None:
                self._track_item(fake, d, source, symbolic_context)
            return fake

    # --- the fast path --------------------------------------------------------------------------

    def _plain_static(self, d: MetaTensorDesc) -> FakeTensor | None:
        """A dense tensor of static shape or a view of one, or ``None`` for all others."""
        device = self._devices.get(d.device)
        if device is None:
            return None
        fake, meta = None, None
        if not d.is_view:
            made = make_leaf(d, device, self._storages)
            if made is not None:
                fake, meta = made
        elif d.base is not None and can_be_viewed(d) and views_are_as_ever():
            base = self.from_desc(d.base)
            base_meta = self._tensors[d.base.id].meta
            if base_meta is not None:
                fake = make_view(d, base, base_meta, device, self._views)
        if fake is not None:
            self._remember(d, fake, meta)
        return fake

    def _plain_symbolic(
        self, d: MetaTensorDesc, source: Source | None, policy: _Policy, *, quiet: bool = False
    ) -> FakeTensor | None:
        """A dense leaf over symbols that are made by a common policy, or that there are."""
        made, usable = None, self._leaves is not None
        if self._leaves is not None and source is not None and not d.is_view:
            made = self._leaves.make(d, self._device, self._storages, source, policy, quiet=quiet)
        elif self._kept is not None and (device := self._devices.get(d.device)) is not None:
            made = self._kept.make(d, device, self._storages)
            if made is not None and d.marks is not None:
                self._mark(d.marks, made[0])
            usable = usable or d.is_fake
        if made is None and usable and d.is_view and can_be_viewed(d):
            fake = self._symbolic_view(d, source, policy)
            made = None if fake is None else (fake, None)
        if made is not None:
            self._remember(d, *made)
        return None if made is None else made[0]

    def _symbolic_view(self, d: MetaTensorDesc, source: Source | None, policy: _Policy) -> Any:
        """As `_plain_symbolic`, of a view."""
        record: Any = d.base
        if d.scalar_hint is not None or record.scalar_hint is not None or not views_are_as_ever():
            return None
        leaves = self._leaves
        known = None if leaves is None or source is None else leaves.known_view(d, policy)
        if known is None:
            check_numbers(d)
        quiet = known is not None and is_alone()
        base: Any = self._recall(record)
        if self._kept is not None:
            base = self.from_desc(record) if base is None else base
        elif source is not None and leaves is not None:
            unusual = d.is_fake or record.is_fake or 0 in d.size or 0 in record.size
            if unusual or (known is None and not leaves.takes(d, policy)):
                return None
            if base is None:
                inner = getattr(policy, "view_base_context", None)
                base = self._plain_symbolic(record, base_source_of(source), inner, quiet=quiet)
        meta = None if base is None else self._tensors[record.id].meta
        if base is None or meta is None or meta.untyped_storage() is not base.untyped_storage():
            return None  # before symbols are noted for it
        device, layout = self._device(d), None
        source = source or self._name_source(d)
        if known is not None and leaves is not None:
            layout = leaves.view_like(known, meta, source, quiet=quiet)
            if is_untold(d):
                return make_view(d, base, meta, device, self._views, layout, quiet=quiet)
        elif leaves is not None:
            layout = leaves.view(d, source, policy)
        with self._suppressed():
            if layout is None:
                context = self._context_of(d) if isinstance(policy, ContextDesc) else policy
                layout = self._geometry(d, source, context)
            return make_view(d, base, meta, device, self._views, layout)

    # --- what a record says ---------------------------------------------------------------------

    def _ambience(self) -> AbstractContextManager[Any]:
        """Switches off what is active around a call, as in a process where nothing is."""
        if _torch.peek_interpreter_stack() is None and not _torch.functionalize_included():
            return nullcontext()
        stack = ExitStack()
        stack.enter_context(_torch.suspend_functionalization())
        stack.enter_context(self._interpreters.cleared())
        return stack

    def interpreters(self, d: MetaTensorDesc) -> AbstractContextManager[None]:
        """The transforms of functorch that a tensor was described in.

        Inside, operators on what `from_desc` gives for the record give what they give on the tensor
        that was described: batched by ``vmap``, tracked by ``grad``, and so on. Where these very
        transforms are active already, they are left as they are.

        Args:
            d: the record of a tensor that functorch has wrapped, or of any other, for which nothing
                changes.

        Raises:
            ConvertError: the recorded stack is not sound.
        """
        stack = () if d.functorch is None else d.functorch.stack
        return self._interpreters.entered(stack, ints=partial(self._batch_size, d))

    def _where(self, d: MetaTensorDesc) -> str:
        return where_of(d)

    def _recall(self, d: MetaTensorDesc) -> Any:
        known = self._tensors.get(d.id)
        if known is None:
            return None
        fake = known()
        if fake is not None:
            check_same(known.value, d)
        return fake

    def _remember(self, d: MetaTensorDesc, made: Any, meta: torch.Tensor | None) -> None:
        known = TensorMade(made, self._forget)
        known.key, known.value, known.meta = d.id, d, meta
        self._tensors[d.id] = known

    def _name_source(self, d: MetaTensorDesc) -> Source:  # noqa: ARG002
        # The name that torch gives, and of which a symbol's name is made. Torch counts the
        # live tensors of the mode instead, among them results of operators.
        name = f"__meta_utils_unknown_tensor{next(self._unknown)}"
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
        return dtype_of(d.dtype, where_of(d))

    def _layout(self, d: MetaTensorDesc) -> torch.layout:
        return LAYOUTS[d.layout]

    def _geometry(
        self, d: MetaTensorDesc, source: Source | None, context: SymbolicContext | None
    ) -> Geometry:
        if self._sizes is None:
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

    def _sparse(self, d: MetaTensorDesc) -> SparseFacts:
        facts = d.sparse
        assert facts is not None
        index_dtype = facts.index_dtype
        return SparseFacts(
            facts.sparse_dim,
            facts.dense_dim,
            facts.is_coalesced,
            None if index_dtype is None else dtype_of(index_dtype, where_of(d)),
            facts.blocksize,
        )

    def _nbytes(self, d: MetaTensorDesc) -> Any:
        assert d.storage is not None
        if isinstance(d.storage.nbytes, int):
            return d.storage.nbytes
        if self._sizes is None:
            return concrete_int(d.storage.nbytes, f"storage {d.storage.id}")
        return self._sizes.carry(d, (d.storage.nbytes,))[0]

    def _known_storage(self, d: MetaTensorDesc) -> torch.UntypedStorage | None:
        return None if d.storage is None else self._storages.get(d.storage.id)

    def _keep_storage(self, d: MetaTensorDesc, storage: torch.UntypedStorage) -> None:
        if d.storage is not None:
            self._storages.add(d.storage.id, storage)

    def _creation_meta(self, d: MetaTensorDesc) -> Any:
        return getattr(_torch.CreationMeta, d.creation_meta or "DEFAULT")

    def _convert(
        self, d: MetaTensorDesc, source: Source | None, context: SymbolicContext | None
    ) -> Any:
        if d.id not in self._tensors:
            fake = None
            if self._fast and self._shape_env is None:
                fake = self._plain_static(d)
            elif self._fast:
                fake = self._plain_symbolic(d, source, context)
            if fake is not None:
                return fake
            check_record(d)
        return super()._convert(d, source, context)

    # --- how tensors are made -------------------------------------------------------------------

    def _wrap(self, d: MetaTensorDesc, make_meta: Callable[[], torch.Tensor]) -> Any:
        guard = no_dispatch_guard()
        try:
            meta = make_meta()
        finally:
            del guard
        return self._device(d).wrap(meta, fast=self._fast)

    def _meta(self, d: MetaTensorDesc, geometry: Geometry, dtype: torch.dtype) -> torch.Tensor:
        if not d.is_fake:
            return super()._meta(d, geometry, dtype)
        # What is asked of the sizes of a fake tensor was answered where it was made.
        has_own_storage = self._known_storage(d) is None
        with self._suppressed():
            meta = super()._meta(d, geometry, dtype)
        if self._kept is not None and has_own_storage:
            self._kept.learn(d, meta)
        return meta

    def _running(self, d: MetaTensorDesc) -> AbstractContextManager[Any]:
        device = self._device(d)
        return self.mode if device.has_guard else self._replay.on(device, None)

    def _with_history(self, d: MetaTensorDesc, made: Any, meta: torch.Tensor | None) -> Any:
        # Of symbolic strides around a size of zero, torch's operator asks which is the larger.
        asks = self._shape_env is not None and 0 in d.size
        if not self._fast or meta is None or asks:
            return super()._with_history(d, made, meta)
        error = _torch.DelayedError("Tried to backward() through an example input", 1)
        with self._replay.on(self._device(d), meta):
            return error(made)

    def _viewing(
        self, base: Any, d: MetaTensorDesc, *, replayed: bool
    ) -> AbstractContextManager[Any]:
        if replayed:
            return self._dispatching()
        known = self._tensors.get(d.id)
        meta = None if known is None else known.meta
        device = self._device(d)
        if meta is not None and meta.untyped_storage() is not base.untyped_storage():
            meta = None
        if self._fast and meta is not None:
            return self._replay.on(device, meta)
        if not device.has_guard:
            return self._replay.on(device, None)
        return self._dispatching()

    def _dispatching(self) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(self.mode)  # another mode may be active
        stack.enter_context(_torch.enable_python_dispatcher())
        return stack

    def _set_view_device(self, d: MetaTensorDesc, made: Any) -> None:
        if isinstance(made, FakeTensor):
            made.fake_device = self._device(d).device

    def _view_dtype(
        self, base: Any, base_record: MetaTensorDesc, dtype: torch.dtype, d: MetaTensorDesc
    ) -> Any:
        """The base as a tensor of another dtype, by the view that torch has for it.

        A view of a part of the base may have a dtype as which the whole cannot be viewed: then the
        view goes by way of as much of the storage as can.
        """
        if can_be_viewed_as(base_record, base.dtype, dtype):
            return viewed_as(base, dtype)
        nbytes = concrete_int(0 if d.storage is None else d.storage.nbytes, where_of(d))
        size, stride = layout_to_cast(nbytes, base.dtype, dtype)
        with self._suppressed():
            return viewed_as(base.as_strided(size, stride, 0), dtype)

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
        from .subclasses import decode_context as decode_class_context
        from .subclasses import decode_opaques, unflatten

        record = d.subclass
        assert record is not None
        where = where_of(d)
        ints, meshes = partial(self._value_of, d), self._meshes
        inner.update(decode_opaques(record, where=where, ints=ints, meshes=meshes))
        context = decode_class_context(
            record, where=where, ints=ints, tensors=self.from_desc, meshes=meshes
        )
        return unflatten(record, inner, context, size, stride, where=where)

    def _value_of(self, d: MetaTensorDesc, value: Value) -> Any:
        """A symbolic scalar in the context of a subclass; a hook of `values.decode_value`."""
        return self._scalar(d, value.sym) if isinstance(value, SymValue) else NotImplemented

    def _scalar(self, d: MetaTensorDesc, n: SymDesc | NestedIntDesc) -> Any:
        if isinstance(n, NestedIntDesc):
            return self._nested_ints.make(n)
        if self._sizes is None:
            return self._static(n, where_of(d)) if n.kind == "int" else n.hint
        source = dynamo_source().ConstantSource(f"__fakeify_context_{d.id}")
        return self._sizes.scalar(n, d, source)

    def _view_again(
        self,
        d: MetaTensorDesc,
        base: Any,
        symint: Callable[[int], Any],
        tensor: Callable[[Any], Any],
    ) -> Any:
        from .view_replay import replay_view_calls

        assert d.view_calls is not None

        def number(n: int | SymDesc | NestedIntDesc) -> Any:
            if isinstance(n, SymDesc) and self._sizes is not None:
                return self._scalar(d, n)  # over symbols already
            return symint(n if isinstance(n, int) else self._scalar(d, n))

        return replay_view_calls(
            d.view_calls, base, symint=number, tensor=tensor, where=where_of(d)
        )

    def _view_inputs(self, d: MetaTensorDesc, known: dict[int, Any]) -> Callable[[Any], Any | None]:  # noqa: ARG002
        return lambda part: known.get(part.id)

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
            # Torch makes no symbols for what vmap and grad have wrapped; those of a fake stay.
            context = None if inner.is_fake else all_static(inner)
        if wrapper.level == _torch.DEAD_LEVEL:
            unwrapped, _ = self._made(inner, source, context)
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

    # --- what is no part of the geometry ---------------------------------------------------------

    def _finish(self, d: MetaTensorDesc, made: Any, source: Source | None) -> None:
        if d.storage is not None and d.functional is None:
            # Operators may also have grown a storage that is too small for its tensors.
            self._resize(made.untyped_storage(), d)
        if d.grad_dtype is not None and d.is_leaf:
            made.grad_dtype = None if d.grad_dtype == "any" else dtype_of(d.grad_dtype, where_of(d))
        if d.retains_grad and not d.is_leaf:
            made.retain_grad()
        if d.is_parameter:
            # The Parameter constructor would detach.
            made._is_param = True
        if d.is_buffer:
            made._is_buffer = True
            if d.persistent is not None:
                made.persistent = d.persistent
        if d.marks is not None:
            self._mark(d.marks, made)
        if d.item_memo is not None and self._sizes is not None:
            assert source is not None
            made.item_memo = self._sizes.scalar(d.item_memo, d, source)
        if d.nested_int is not None:
            made.nested_int_memo = self._nested_ints.symbol(d.nested_int)
        if d.layout == "_mkldnn" or d.is_pinned:
            mark_lacks(d, made)

    def _inner_wrapper(
        self, d: MetaTensorDesc, source: Source | None, context: SymbolicContext | None
    ) -> Any:
        made = self._recall(d)
        if made is not None:
            return made
        with torch.inference_mode(d.is_inference):
            made = super()._inner_wrapper(d, source, context)
        if d.requires_grad:
            made.requires_grad = True
        self._join(d, made, Geometry(made.size(), made.stride(), made.storage_offset()))
        self._finish(d, made, source)
        if self._shape_env is None:  # else it may get symbols of its own, as a tensor by itself
            self._remember(d, made, None)
        return made

    def _replayed(
        self,
        base: Any,
        d: MetaTensorDesc,
        geometry: Geometry,
        source: Source | None,
        context: SymbolicContext | None,
    ) -> Any:
        made = super()._replayed(base, d, geometry, source, context)
        self._mark_parts(d, made)
        return made

    def _wrapper(
        self, d: MetaTensorDesc, source: Source | None, context: SymbolicContext | None
    ) -> Any:
        made = super()._wrapper(d, source, context)
        if not d.is_leaf:  # what gave it a history made its inner tensors anew
            self._mark_parts(d, made)
        return made

    def _other_view(self, d: MetaTensorDesc, found: Any, expected: Any) -> Exception:
        return ConvertError(
            "the view operators give a tensor of other sizes, strides or offset",
            where=where_of(d),
            expected=str(tuple(expected)),
            found=str(tuple(found)),
        )

    def _mark_parts(self, d: MetaTensorDesc, made: Any) -> None:
        """Gives the inner tensors the marks of those that were described."""
        for attribute, part in self._inner(d):
            inner = getattr(made, attribute)
            self._mark_parts(part, inner)
            if part.marks is not None:
                self._mark(part.marks, inner)

    @staticmethod
    def _mark(marks: MarksDesc, made: Any) -> None:
        for name, value in decode_marks(marks).items():
            setattr(made, name, value)

    def _resize(self, made: torch.UntypedStorage, d: MetaTensorDesc) -> None:
        """Gives the storage the recorded size, which need not be what its tensors fill."""
        assert d.storage is not None
        nbytes = d.storage.nbytes
        if self._shape_env is None:
            if d.subclass is not None:
                return
            nbytes = concrete_int(nbytes, where_of(d))
            if made.nbytes() != nbytes:
                made.resize_(nbytes)
        elif isinstance(nbytes, int) and nbytes == 0:
            # Under symbolic sizes torch leaves storages as large as the sizes say, but for this.
            made.resize_(0)

    def _track_item(
        self, fake: Any, d: MetaTensorDesc, source: Source, context: SymbolicContext | None
    ) -> None:
        """The symbol of ``item()``, as ``FakeTensorConverter.from_real_tensor`` makes it."""
        if fake._item_memo is None and not self.mode.fake_tensor_converter.export:
            keep = self._symbols == "keep"
            item = tracked_item(self._shape_env, d, source, context, keep=keep)
            if item is not None:
                fake.item_memo = item

    # --- parts ----------------------------------------------------------------------------------

    def _source_of(self, d: MetaTensorDesc) -> Source | None:
        return None if d.source is None else decode_source(d.source, memo=self._sources)

    def _context_of(self, d: MetaTensorDesc) -> SymbolicContext | None:
        record = d.symbolic_context
        if record is None:
            return None
        found = self._contexts.get(id(record))
        if found is None:
            context = decode_context(record, memo=self._sources)
            found = self._contexts[id(record)] = (record, context)
        return found[1]

    def _policy_of(self, d: MetaTensorDesc) -> SymbolicContext | ContextDesc | None:
        record = d.symbolic_context
        if record is None or record.kind != "stateless":
            return None if record is None else self._context_of(d)
        base = record.view_base_context
        return record if base is None or base.kind == "stateless" else self._context_of(d)

    def _device(self, d: MetaTensorDesc) -> FakeDevice:
        found = self._devices.get(d.device)
        if found is None:
            found = self._devices[d.device] = FakeDevice.make(self.mode, d.device, where_of(d))
        return found
