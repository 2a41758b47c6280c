"""Records -> fake tensors.

The result is what ``FakeTensorMode.from_tensor`` of torch 2.13 gives for the tensor that was
described, under the same policy. Where torch runs operators on fake tensors to get there, this
runs them on the bare meta tensors and wraps what they give (`fakes.Replay`), and it copies the
attributes of fake tensors that torch's own constructor made instead of calling it each time.
"""

from __future__ import annotations

import itertools
import weakref
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import _torch
from ._torch import (
    FakeTensor,
    dynamo_source,
    empty_strided,
    make_subclass,
    no_dispatch_guard,
)
from .errors import ConvertError
from .fakes import DTYPES, META, FakeDevice, Replay, dtype_of
from .layouts import Layouts
from .marks import decode_marks
from .sizes import Geometry, SizeMaker, concrete_int

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ._torch import FakeTensorMode, ShapeEnv, Source, SymbolicContext
    from .desc import ContextDesc, MetaStorageDesc, MetaTensorDesc
    from .sizes import SymbolPolicy
    from .sources import DecodeMemo

__all__ = ["MetaConverter"]

_MAX_INT = 2**63 - 1


class _Known(NamedTuple):
    """A fake tensor that was made, without keeping it alive."""

    reference: weakref.ref[Any]
    record: MetaTensorDesc
    meta: torch.Tensor | None
    """Of a tensor that is no view: the meta tensor on the same storage."""


class MetaConverter:
    """Makes fake tensors of one ``FakeTensorMode`` from records of one describer.

    Equal ids in records give the same fake tensor and storage as long as they live; the converter
    holds weak references only.

    Args:
        mode: the mode the fake tensors belong to.
        symbols: ``"fresh"`` makes symbols in the mode's ``ShapeEnv`` by the policy (source and
            symbolic context); ``"keep"`` takes sizes as the record has them: integers
            stay integers, symbols must be in the ``ShapeEnv`` already.
        fast: ``False`` takes torch's own way for each step; the results are equal.
        sources: what was decoded of the same records before; see `sources.decode_source`.
    """

    def __init__(
        self,
        mode: FakeTensorMode,
        *,
        symbols: SymbolPolicy = "fresh",
        fast: bool = True,
        sources: DecodeMemo | None = None,
    ) -> None:
        self.mode = mode
        self._shape_env: ShapeEnv | None = None if mode.static_shapes else mode.shape_env
        self._fast = fast and not _torch.FakeTensorConfig.debug
        self._tensors: dict[int, _Known] = {}
        self._storages: weakref.WeakValueDictionary[int, torch.UntypedStorage] = (
            weakref.WeakValueDictionary()
        )
        self._devices: dict[str, FakeDevice] = {}
        self._sizes: SizeMaker | None = None
        self._layouts: Layouts | None = None
        if self._shape_env is not None:
            self._sizes = SizeMaker(self._shape_env, symbols, fast=self._fast)
            self._layouts = Layouts(self._shape_env) if self._fast else None
        self._symbols: SymbolPolicy = symbols
        self._sources: DecodeMemo = {} if sources is None else sources
        self._contexts: dict[int, tuple[ContextDesc, SymbolicContext]] = {}
        self._replay = Replay(self.mode)
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
            fake = known.reference()
            if fake is not None:
                _check_same(known.record, d)
                return fake
        if self._shape_env is None:
            if symbolic_context is not None:
                raise ConvertError(
                    "a mode with static shapes takes no symbolic context", where=_where(d)
                )
            if self._fast:
                fake = self._plain_static(d)
                if fake is not None:
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
        """A dense leaf on a storage of its own that it fills, or ``None`` for all others."""
        storage = d.storage
        if (
            d.is_view
            or storage is None
            or d.storage_offset
            or not d.is_leaf
            or d.marks is not None
            or d.grad is not None
            or d.is_conj
            or d.is_neg
            or d.grad_dtype is not None
            or d.is_inference
            or d.item_memo is not None
            or d.layout != "strided"
            or storage.id in self._storages
            or torch.is_inference_mode_enabled()
            or _torch.functionalize_included()
            or _torch.peek_interpreter_stack() is not None
            or torch.compiler.is_exporting()
        ):
            return None
        device = self._devices.get(d.device)
        dtype = DTYPES.get(d.dtype)
        if device is None or dtype is None:
            return None
        guard = no_dispatch_guard()
        try:
            meta = empty_strided(d.size, d.stride, dtype=dtype, device=META)
            fake = make_subclass(
                FakeTensor,
                meta,
                d.requires_grad,
                dispatch_device=True,
                device_for_backend_keys=device.device,
            )
        except (RuntimeError, TypeError):
            return None  # the plain path says what is wrong with the record
        finally:
            del guard
        memo = meta.untyped_storage()
        if memo.nbytes() != storage.nbytes:
            return None
        attributes = device.dress(fake)
        if d.is_parameter:
            attributes["_is_param"] = True
        if d.is_buffer:
            attributes["_is_buffer"] = True
            if d.persistent is not None:
                attributes["persistent"] = d.persistent
        self._storages[storage.id] = memo
        self._remember(d, fake, meta)
        return fake

    # --- the plain path -------------------------------------------------------------------------

    def _ambience(self) -> AbstractContextManager[Any]:
        """Switches off what is active around a call, as in a process where nothing is."""
        if _torch.peek_interpreter_stack() is None and not _torch.functionalize_included():
            return nullcontext()
        stack = ExitStack()
        stack.enter_context(_torch.suspend_functionalization())
        stack.enter_context(_torch.temporarily_clear_interpreter_stack())
        return stack

    def _convert(
        self, d: MetaTensorDesc, source: Source | None, context: SymbolicContext | None
    ) -> Any:
        known = self._tensors.get(d.id)
        if known is not None and (fake := known.reference()) is not None:
            _check_same(known.record, d)
            return fake
        _check(d)
        if source is None and self._shape_env is not None:
            # The name that torch gives, and of which a symbol's name is made. Torch counts the
            # live tensors of the mode instead, among them results of operators.
            name = f"__meta_utils_unknown_tensor{next(self._unknown)}"
            source = dynamo_source().ConstantSource(name)
        inference: AbstractContextManager[Any] = nullcontext()
        if torch.is_inference_mode_enabled() != d.is_inference:
            inference = torch.inference_mode(d.is_inference)
        with inference:
            meta = None
            if d.base is not None:
                fake = self._view(d, d.base, source, context)
            else:
                fake, meta = self._dense(d, source, context)
            if d.grad is not None:
                fake.grad = self._grad(d.grad, source, context)
            if d.is_conj:
                _torch.set_conj(fake, True)
            if d.is_neg:
                _torch.set_neg(fake, True)
        # Operators above may also have grown a storage that is too small for its tensors.
        self._resize(fake.untyped_storage(), d)
        self._finish(d, fake, source)
        self._remember(d, fake, meta)
        return fake

    def _finish(self, d: MetaTensorDesc, fake: Any, source: Source | None) -> None:
        """What is no part of the tensor's geometry."""
        if d.grad_dtype is not None and d.is_leaf:
            fake.grad_dtype = None if d.grad_dtype == "any" else dtype_of(d.grad_dtype, _where(d))
        if d.retains_grad and not d.is_leaf:
            fake.retain_grad()
        if d.is_parameter:
            # The Parameter constructor would detach.
            fake._is_param = True
        if d.is_buffer:
            fake._is_buffer = True
            if d.persistent is not None:
                fake.persistent = d.persistent
        if d.marks is not None:
            for name, value in decode_marks(d.marks).items():
                setattr(fake, name, value)
        if d.item_memo is not None and self._sizes is not None:
            assert source is not None
            fake.item_memo = self._sizes.scalar(d.item_memo, d, source)

    def _remember(self, d: MetaTensorDesc, fake: Any, meta: torch.Tensor | None) -> None:
        number = d.id
        forget = partial(self._tensors.pop, number)
        self._tensors[number] = _Known(weakref.ref(fake, forget), d, meta)

    def _geometry(
        self, d: MetaTensorDesc, source: Source | None, context: SymbolicContext | None
    ) -> Geometry:
        if self._sizes is None:
            where = _where(d)
            return Geometry(
                tuple(concrete_int(n, where) for n in d.size),
                tuple(concrete_int(n, where) for n in d.stride),
                concrete_int(d.storage_offset, where),
            )
        assert source is not None
        return self._sizes.geometry(d, source, context)

    def _dense(
        self, d: MetaTensorDesc, source: Source | None, context: SymbolicContext | None
    ) -> tuple[Any, torch.Tensor]:
        """A tensor that is no view, and the meta tensor on its storage."""
        geometry = self._geometry(d, source, context)
        storage = d.storage
        if storage is None:
            raise ConvertError("a strided tensor has a storage", where=_where(d), found="none")
        dtype = dtype_of(d.dtype, _where(d))
        guard = no_dispatch_guard()
        try:
            meta = self._meta(storage, geometry, dtype)
        except RuntimeError as error:
            if self._shape_env is not None:
                raise
            raise ConvertError(
                "torch makes no tensor of these sizes, strides and storage",
                where=_where(d),
                found=str(error).partition("\n")[0],
            ) from error
        finally:
            del guard
        device = self._device(d)
        fake = device.wrap(meta, fast=self._fast)
        if d.requires_grad:
            fake.requires_grad = True
            if not d.is_leaf:
                fake = self._with_history(fake, meta, device)
        return fake, meta

    def _meta(
        self, storage: MetaStorageDesc, geometry: Geometry, dtype: torch.dtype
    ) -> torch.Tensor:
        """The meta tensor, on the storage of this number; dispatch to Python is off."""
        size, stride, offset = geometry
        shared = self._storages.get(storage.id)
        offset_is_zero = (
            offset == 0 if isinstance(offset, int) else _torch.guard_or_false(offset == 0)
        )
        if shared is None and offset_is_zero:
            meta = None if self._layouts is None else self._layouts.meta(size, stride, dtype)
            if meta is None:
                meta = empty_strided(size, stride, dtype=dtype, device=META)
            shared = meta.untyped_storage()
        else:
            if shared is None:
                shared = self._new_storage(storage)
            meta = torch.empty(0, dtype=dtype, device=META)
            # That the sizes fit the storage is a fact of the tensor described, no guard.
            with self._suppressed():
                meta.set_(shared, offset, size, stride)
        self._storages[storage.id] = shared
        return meta

    def _new_storage(self, storage: MetaStorageDesc) -> torch.UntypedStorage:
        if isinstance(storage.nbytes, int):
            return torch.UntypedStorage(storage.nbytes, device=META)
        if self._sizes is None:
            nbytes = concrete_int(storage.nbytes, f"storage {storage.id}")
        else:
            nbytes = self._sizes.nbytes(storage.nbytes)
        return torch.empty((nbytes,), dtype=torch.uint8, device=META).untyped_storage()

    def _resize(self, made: torch.UntypedStorage, d: MetaTensorDesc) -> None:
        """Gives the storage the recorded size, which need not be what its tensors fill."""
        nbytes = 0 if d.storage is None else d.storage.nbytes
        if self._shape_env is None:
            nbytes = concrete_int(nbytes, _where(d))
            if made.nbytes() != nbytes:
                made.resize_(nbytes)
        elif isinstance(nbytes, int) and nbytes == 0:
            # Under symbolic sizes torch leaves storages as large as the sizes say, but for this.
            made.resize_(0)

    def _view(
        self,
        d: MetaTensorDesc,
        base_record: MetaTensorDesc,
        source: Source | None,
        context: SymbolicContext | None,
    ) -> Any:
        """A view, made of its base by ``as_strided``: so the two share the version counter."""
        base_source = None
        base_context = None
        fresh_unbacked: AbstractContextManager[Any] = nullcontext()
        if self._shape_env is not None:
            base_source = dynamo_source().AttrSource(source, "_base")
            # A base is no input: what unbacked symbols it has are bound nowhere.
            fresh_unbacked = self._shape_env.ignore_fresh_unbacked_symbols()
            if context is not None:
                base_context = context.view_base_context  # type: ignore[attr-defined]
        with fresh_unbacked:
            base = self._convert(base_record, base_source, base_context)
        # Views are made also where autograd is switched off around this call.
        key = _torch.DispatchKey.ADInplaceOrView
        excluded = _torch.key_excluded(key)
        _torch.set_key_excluded(key, False)
        try:
            with self._viewing(base, base_record):
                fake = self._view_of(base, base_record, d, source, context)
        finally:
            _torch.set_key_excluded(key, excluded)
        name = d.creation_meta or "DEFAULT"
        _torch.set_creation_meta(fake, getattr(_torch.CreationMeta, name))
        fake.fake_device = self._device(d).device
        return fake

    def _view_of(
        self,
        base: Any,
        base_record: MetaTensorDesc,
        d: MetaTensorDesc,
        source: Source | None,
        context: SymbolicContext | None,
    ) -> Any:
        dtype = dtype_of(d.dtype, _where(d))
        if base.dtype != dtype:
            base = self._view_dtype(base, base_record, dtype, d)

        def strided(base: Any) -> Any:
            size, stride, offset = self._geometry(d, source, context)
            with self._suppressed():
                return base.as_strided(size, stride, offset)

        if d.is_leaf:
            with torch.no_grad():
                fake = strided(base)
            if d.requires_grad:
                fake.requires_grad = True
            return fake
        if base_record.requires_grad == d.requires_grad:
            with torch.enable_grad():
                return strided(base)
        # A view that was made to require grad, and a view of that: two steps.
        with torch.no_grad(), self._suppressed():
            middle = base.as_strided(base.size(), base.stride(), base.storage_offset())
        middle.requires_grad = True
        with torch.enable_grad():
            return strided(middle)

    def _view_dtype(
        self, base: Any, base_record: MetaTensorDesc, dtype: torch.dtype, d: MetaTensorDesc
    ) -> Any:
        """The base as a tensor of another dtype, by the view that torch has for it.

        A view of a part of the base may have a dtype as which the whole cannot be viewed: then the
        view goes by way of as much of the storage as can.
        """
        if _can_be_viewed_as(base_record, base.dtype, dtype):
            return _viewed_as(base, dtype)
        nbytes = concrete_int(0 if d.storage is None else d.storage.nbytes, _where(d))
        if dtype.is_complex and dtype.to_real() == base.dtype:
            size, stride = (nbytes // dtype.itemsize, 2), (2, 1)
        else:
            unit = max(dtype.itemsize, base.dtype.itemsize)
            size, stride = (nbytes // unit * unit // base.dtype.itemsize,), (1,)
        with self._suppressed():
            return _viewed_as(base.as_strided(size, stride, 0), dtype)

    def _viewing(self, base: Any, base_record: MetaTensorDesc) -> AbstractContextManager[Any]:
        """In which way the view operators run."""
        known = self._tensors.get(base_record.id)
        meta = None if known is None else known.meta
        device = self._device(base_record)
        if meta is not None and meta.untyped_storage() is not base.untyped_storage():
            meta = None
        if self._fast and meta is not None:
            return self._replay.on(device, meta)
        if not device.has_guard:
            return self._replay.on(device, None)
        stack = ExitStack()
        stack.enter_context(self.mode)  # another mode may be active
        stack.enter_context(_torch.enable_python_dispatcher())
        return stack

    def _with_history(self, fake: Any, meta: torch.Tensor, device: FakeDevice) -> Any:
        """The tensor as a non-leaf; a backward through it fails."""
        error = _torch.DelayedError("Tried to backward() through an example input", 1)
        if not self._fast and device.has_guard:
            with self.mode:
                return error(fake)
        with self._replay.on(device, meta if self._fast else None):
            return error(fake)

    def _grad(
        self,
        grad: MetaTensorDesc,
        source: Source | None,
        context: SymbolicContext | None,
    ) -> Any:
        grad_source = None
        if self._shape_env is not None:
            grad_source = dynamo_source().AttrSource(source, "grad")
            if context is not None and not _fits_grad(context, grad):
                context = _all_dynamic(grad)
        return self._convert(grad, grad_source, context)

    def _track_item(
        self,
        fake: Any,
        d: MetaTensorDesc,
        source: Source,
        context: SymbolicContext | None,
    ) -> None:
        """The symbol of ``item()``, as ``FakeTensorConverter.from_real_tensor`` makes it."""
        sources = dynamo_source()
        if self.mode.fake_tensor_converter.export or isinstance(source, sources.RandomValueSource):
            return
        if fake._item_memo is not None or d.scalar_hint is None:
            return
        env: Any = self._shape_env
        is_float = d.dtype == "float64"
        value = float(d.scalar_hint) if is_float else int(d.scalar_hint)
        if isinstance(source, sources.FloatTensorSource):
            item_source: Any = source.base  # type: ignore[attr-defined]
        else:
            item_source = sources.CallMethodItemSource(source)
        if self._symbols == "keep":
            # A frontend that did not track the scalar has no symbol for it.
            symbol = env.source_to_var.get(item_source.name)
            if symbol is None:
                return
        else:
            symbol = env.create_unspecified_symbol(
                value,
                source=item_source,
                dynamic_dim=_torch.DimDynamic.DYNAMIC,
                symbolic_context=context,
            )
        if is_float:
            fake.item_memo = env.create_symfloatnode(symbol, hint=value, source=item_source)
        elif d.dtype == "int64":
            fake.item_memo = env.create_symintnode(symbol, hint=value, source=item_source)

    # --- parts ----------------------------------------------------------------------------------

    def _suppressed(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._shape_env is None else self._shape_env.suppress_guards()

    def _source_of(self, d: MetaTensorDesc) -> Source | None:
        record = d.source
        if record is None:
            return None
        found = self._sources.get(id(record))
        if found is None:
            from .sources import decode_source

            return decode_source(record, memo=self._sources)
        return found[1]

    def _context_of(self, d: MetaTensorDesc) -> SymbolicContext | None:
        record = d.symbolic_context
        if record is None:
            return None
        found = self._contexts.get(id(record))
        if found is None:
            from .sources import decode_context

            context = decode_context(record, memo=self._sources)
            found = self._contexts[id(record)] = (record, context)
        return found[1]

    def _device(self, d: MetaTensorDesc) -> FakeDevice:
        found = self._devices.get(d.device)
        if found is None:
            found = self._devices[d.device] = FakeDevice.make(self.mode, d.device, _where(d))
        return found


# --- checks -------------------------------------------------------------------------------------


def _where(d: MetaTensorDesc) -> str:
    return f"tensor {d.id}" if d.source is None else f"tensor {d.id} ({d.source.name})"


def _check(d: MetaTensorDesc) -> None:
    """Raises for a record that no tensor can have given."""
    where = _where(d)
    if d.layout != "strided":
        raise ConvertError(
            "the layout is not handled", where=where, expected="strided", found=d.layout
        )
    if len(d.size) != len(d.stride):
        raise ConvertError(
            "sizes and strides differ in number",
            where=where,
            expected=f"{len(d.size)} strides",
            found=f"{len(d.stride)}",
        )
    nbytes = 0 if d.storage is None else d.storage.nbytes
    for n in (*d.size, *d.stride, d.storage_offset, nbytes):
        if isinstance(n, int) and not 0 <= n <= _MAX_INT:
            raise ConvertError(
                "a size is out of range", where=where, expected="0 to 2**63 - 1", found=str(n)
            )
    if d.is_view != (d.base is not None):
        raise ConvertError("a view and a base belong together", where=where)
    if not d.is_leaf and not d.requires_grad:
        raise ConvertError("a tensor that is no leaf requires grad", where=where)
    if d.creation_meta is not None and d.creation_meta not in _torch.CreationMeta.__members__:
        raise ConvertError(
            "the creation meta of the view is not known",
            where=where,
            expected=", ".join(_torch.CreationMeta.__members__),
            found=d.creation_meta,
        )


def _check_same(known: MetaTensorDesc, d: MetaTensorDesc) -> None:
    """Raises if two records with one id cannot be of the same tensor at one time."""
    if known is d or (known.dtype, known.device, known.size) == (d.dtype, d.device, d.size):
        return
    raise ConvertError(
        "two different records have the same id",
        where=_where(d),
        expected=f"{known.dtype} of size {known.size} on {known.device}",
        found=f"{d.dtype} of size {d.size} on {d.device}",
        fix="Convert the records of each describer with a converter of its own",
    )


# --- views and gradients ------------------------------------------------------------------------


def _can_be_viewed_as(base: MetaTensorDesc, old: torch.dtype, new: torch.dtype) -> bool:
    """Whether torch views a tensor like this one as the dtype; asked of its hints, no guard."""
    where = _where(base)
    try:
        size = [concrete_int(n, where) for n in base.size]
        stride = [concrete_int(n, where) for n in base.stride]
        offset = concrete_int(base.storage_offset, where)
    except ConvertError:
        return True  # unbacked: torch is asked of the symbols
    guard = no_dispatch_guard()
    try:
        storage = torch.UntypedStorage(0, device=META)
        probe = torch.empty(0, dtype=old, device=META).set_(storage, offset, size, stride)
        _viewed_as(probe, new)
    except RuntimeError:
        return False
    finally:
        del guard
    return True


def _viewed_as(base: Any, dtype: torch.dtype) -> Any:
    if base.dtype.is_complex and base.dtype.to_real() == dtype:
        return torch.view_as_real(base)
    if dtype.is_complex and dtype.to_real() == base.dtype:
        return torch.view_as_complex(base)
    return base.view(dtype)


def _fits_grad(context: SymbolicContext, grad: MetaTensorDesc) -> bool:
    """Whether a tensor's symbolic context serves for its gradient too: both a view or neither."""
    if not isinstance(context, _torch.StatelessSymbolicContext):
        return True
    base_context = context.view_base_context
    if grad.is_view != (base_context is not None):
        return False
    return not (
        isinstance(base_context, _torch.StatelessSymbolicContext)
        and grad.base is not None
        and len(base_context.dynamic_sizes) != grad.base.ndim
    )


def _all_dynamic(d: MetaTensorDesc) -> SymbolicContext:
    """The symbolic context by which every dim gets a symbol of its own."""
    return _torch.StatelessSymbolicContext(
        dynamic_sizes=[_torch.DimDynamic.DYNAMIC] * d.ndim,
        constraint_sizes=[None] * d.ndim,
        view_base_context=None if d.base is None else _all_dynamic(d.base),
    )
