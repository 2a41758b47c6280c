"""The walk from a description to a tensor, for each kind of tensor.

Method: ``MetaConverter.meta_tensor`` of torch 2.13. The walk is the same whether the description is
a record (`convert.MetaConverter`) or one of torch's own, with live objects in it (the drop-in); what
a description says, and how a tensor is made around a meta tensor, is left to the subclass. Both
kinds of description have the fields ``id``, ``requires_grad``, ``is_leaf``, ``is_inference``,
``is_conj``, ``is_neg``, ``is_view``, ``base``, ``grad`` and ``storage`` with its ``id``.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import _torch
from ._torch import dynamo_source, empty_strided, no_dispatch_guard
from .eager_views import as_it_is, differ, view_alike
from .errors import ConvertError
from .fakes import META

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from ._torch import ShapeEnv, Source, SymbolicContext
    from .layouts import Layouts
    from .sizes import Geometry

__all__ = ["Kind", "Rebuilder", "SparseFacts"]

_aten: Any = torch.ops.aten
_NOTHING: AbstractContextManager[Any] = nullcontext()


class Kind(enum.Enum):
    """What has to be done for a tensor that is no view."""

    DENSE = enum.auto()
    COO = enum.auto()
    COMPRESSED = enum.auto()
    NO_STORAGE = enum.auto()
    """Sizes and strides, but no storage that torch shows: mkldnn."""
    SUBCLASS = enum.auto()
    FUNCTORCH = enum.auto()
    FUNCTIONAL = enum.auto()


class SparseFacts(NamedTuple):
    """What a sparse tensor is beside its sizes; see `desc.SparseDesc`."""

    sparse_dim: int
    dense_dim: int
    is_coalesced: bool | None
    index_dtype: torch.dtype | None
    blocksize: tuple[int, ...]


class Rebuilder(ABC):
    """Makes tensors from descriptions in a ``ShapeEnv``, or with static shapes without one."""

    _shape_env: ShapeEnv | None
    _layouts: Layouts | None = None

    # --- what a description says, and how tensors are made ---------------------------------------

    @abstractmethod
    def _where(self, d: Any) -> str:
        """The tensor's name for an error."""

    @abstractmethod
    def _recall(self, d: Any) -> Any:
        """The tensor that was made of this description before, or ``None``."""

    @abstractmethod
    def _remember(self, d: Any, made: Any, meta: torch.Tensor | None) -> None:
        """Keeps a tensor, and of one that is no view the meta tensor on its storage."""

    @abstractmethod
    def _name_source(self, d: Any) -> Source:
        """The source of a tensor that was given none."""

    @abstractmethod
    def _kind(self, d: Any) -> Kind: ...

    @abstractmethod
    def _dtype(self, d: Any) -> torch.dtype: ...

    @abstractmethod
    def _geometry(
        self, d: Any, source: Source | None, context: SymbolicContext | None
    ) -> Geometry: ...

    @abstractmethod
    def _sparse_size(
        self, d: Any, source: Source | None, context: SymbolicContext | None
    ) -> tuple[Any, ...]:
        """The sizes of a sparse tensor, which has no strides."""

    @abstractmethod
    def _sparse(self, d: Any) -> SparseFacts: ...

    @abstractmethod
    def _nbytes(self, d: Any) -> Any:
        """The size of the storage in bytes."""

    @abstractmethod
    def _known_storage(self, d: Any) -> torch.UntypedStorage | None: ...

    @abstractmethod
    def _keep_storage(self, d: Any, storage: torch.UntypedStorage) -> None: ...

    @abstractmethod
    def _wrap(self, d: Any, make_meta: Callable[[], torch.Tensor]) -> Any:
        """The tensor around the meta tensor that ``make_meta`` gives, on the described device."""

    @abstractmethod
    def _running(self, d: Any) -> AbstractContextManager[Any]:
        """In which way operators run on a tensor that was made of this description."""

    @abstractmethod
    def _viewing(self, base: Any, d: Any, *, replayed: bool) -> AbstractContextManager[Any]:
        """In which way view operators run on a base of this description.

        Args:
            base: the base.
            d: its description.
            replayed: whether the recorded view operators run, or ``as_strided``.
        """

    @abstractmethod
    def _set_view_device(self, d: Any, made: Any) -> None: ...

    @abstractmethod
    def _creation_meta(self, d: Any) -> Any: ...

    @abstractmethod
    def _inner(self, d: Any) -> Iterable[tuple[str, Any]]:
        """The inner tensors of a wrapper subclass, by attribute; none for other kinds."""

    @abstractmethod
    def _unflatten(self, d: Any, inner: dict[str, Any], size: Any, stride: Any) -> Any:
        """The wrapper subclass around inner tensors."""

    @abstractmethod
    def _view_again(
        self,
        d: Any,
        base: Any,
        symint: Callable[[int], Any],
        tensor: Callable[[Any], Any],
    ) -> Any:
        """Makes the view of its base by its view operators.

        They get ``symint`` of each number and ``tensor`` of each tensor that they were given.
        """

    @abstractmethod
    def _view_inputs(self, d: Any, known: dict[int, Any]) -> Callable[[Any], Any | None]:
        """Which of the tensors in ``known``, by their ids, a tensor given to `_view_again` is."""

    @abstractmethod
    def _functorch(self, d: Any, source: Source | None, context: SymbolicContext | None) -> Any: ...

    @abstractmethod
    def _functional(
        self, d: Any, source: Source | None, context: SymbolicContext | None
    ) -> Any: ...

    @abstractmethod
    def _finish(self, d: Any, made: Any, source: Source | None) -> None:
        """Gives the tensor what is no part of its geometry."""

    # --- the walk -------------------------------------------------------------------------------

    def _convert(self, d: Any, source: Source | None, context: SymbolicContext | None) -> Any:
        known = self._recall(d)
        if known is not None:
            return known
        if source is None and self._shape_env is not None:
            source = self._name_source(d)
        inference: AbstractContextManager[Any] = nullcontext()
        # Entering either mode also sets the grad mode, and whether autograd sees the operators: what
        # is active around the call (no_grad, an operator that is being dispatched) says nothing.
        if (
            torch.is_inference_mode_enabled() != d.is_inference
            or torch.is_grad_enabled() == d.is_inference
            or _torch.key_excluded(_torch.DispatchKey.AutogradFunctionality) != d.is_inference
        ):
            inference = torch.inference_mode(d.is_inference)
        with inference:
            made, meta = self._made(d, source, context)
            if d.grad is not None:
                made.grad = self._grad(d, source, context)
            # The view operators of a wrapper may have set the bits.
            if d.is_conj and not made.is_conj():
                _torch.set_conj(made, True)
            if d.is_neg and not made.is_neg():
                _torch.set_neg(made, True)
        self._finish(d, made, source)
        self._remember(d, made, meta)
        return made

    def _made(
        self, d: Any, source: Source | None, context: SymbolicContext | None
    ) -> tuple[Any, torch.Tensor | None]:
        kind = self._kind(d)
        if kind is Kind.COO:
            return self._coo(d, source, context), None
        if kind is Kind.COMPRESSED:
            return self._compressed(d, source, context), None
        if kind is Kind.FUNCTORCH:
            return self._functorch(d, source, context), None
        if kind is Kind.FUNCTIONAL:
            return self._functional(d, source, context), None
        if d.is_view:
            return self._view(d, source, context), None
        if kind is Kind.SUBCLASS:
            return self._wrapper(d, source, context), None
        return self._dense(d, kind, source, context)

    # --- dense ----------------------------------------------------------------------------------

    def _dense(
        self, d: Any, kind: Kind, source: Source | None, context: SymbolicContext | None
    ) -> tuple[Any, torch.Tensor | None]:
        """A tensor that is no view, and the meta tensor on its storage."""
        geometry = self._geometry(d, source, context)
        dtype = self._dtype(d)

        def make_meta() -> torch.Tensor:
            if kind is Kind.NO_STORAGE:
                return empty_strided(geometry.size, geometry.stride, dtype=dtype, device=META)
            return self._meta(d, geometry, dtype)

        meta: Any = None
        guard = no_dispatch_guard()
        try:
            meta = make_meta()
        except RuntimeError as error:
            if self._shape_env is not None:
                raise
            raise ConvertError(
                "torch makes no tensor of these sizes, strides and storage",
                where=self._where(d),
                found=str(error).partition("\n")[0],
            ) from error
        finally:
            del guard
        made = self._wrap(d, lambda: meta)
        return self._with_grad(d, made, meta), meta

    def _meta(self, d: Any, geometry: Geometry, dtype: torch.dtype) -> torch.Tensor:
        """The meta tensor, on the storage of this number; dispatch to Python is off."""
        size, stride, offset = geometry
        shared = self._known_storage(d)
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
                shared = self._new_storage(d)
            meta = torch.empty(0, dtype=dtype, device=META)
            # That the sizes fit the storage is a fact of the tensor described, no guard.
            with self._suppressed():
                meta.set_(shared, offset, size, stride)
        self._keep_storage(d, shared)
        return meta

    def _new_storage(self, d: Any) -> torch.UntypedStorage:
        nbytes = self._nbytes(d)
        if isinstance(nbytes, int):
            return torch.UntypedStorage(nbytes, device=META)
        return torch.empty((nbytes,), dtype=torch.uint8, device=META).untyped_storage()

    def _with_grad(self, d: Any, made: Any, meta: torch.Tensor | None) -> Any:
        """The tensor as it requires grad, with a history if it is no leaf."""
        if d.requires_grad:
            made.requires_grad = True
            if not d.is_leaf:
                return self._with_history(d, made, meta)
        return made

    def _with_history(self, d: Any, made: Any, _meta: torch.Tensor | None) -> Any:
        """The tensor as a non-leaf; a backward through it fails."""
        error = _torch.DelayedError("Tried to backward() through an example input", 1)
        with self._running(d):
            return error(made)

    # --- sparse ---------------------------------------------------------------------------------

    def _coo(self, d: Any, source: Source | None, context: SymbolicContext | None) -> Any:
        """A COO tensor without entries."""
        size = self._sparse_size(d, source, context)
        facts = self._sparse(d)
        dtype = self._dtype(d)

        def make_meta() -> torch.Tensor:
            return _aten._sparse_coo_tensor_with_dims_and_tensors(
                facts.sparse_dim,
                facts.dense_dim,
                size,
                torch.empty((facts.sparse_dim, 0), dtype=torch.int64, device=META),
                torch.empty((0, *size[facts.sparse_dim :]), dtype=dtype, device=META),
                dtype=dtype,
                layout=torch.sparse_coo,
                device=META,
                is_coalesced=facts.is_coalesced,
            )

        made = self._wrap(d, make_meta)
        with self._running(d):
            made._coalesced_(bool(facts.is_coalesced))
        if not d.requires_grad:
            return made
        made.requires_grad = True
        if d.is_leaf:
            return made
        # An operator that fails in backward would make a dense tensor of it.
        with self._running(d), torch.enable_grad():
            made = made.clone()
            made._coalesced_(bool(facts.is_coalesced))
        return made

    def _compressed(self, d: Any, source: Source | None, context: SymbolicContext | None) -> Any:
        """A CSR, CSC, BSR or BSC tensor without entries."""
        size = self._sparse_size(d, source, context)
        facts = self._sparse(d)
        dtype, layout = self._dtype(d), self._layout(d)

        def make_meta() -> torch.Tensor:
            return _aten._sparse_compressed_tensor_with_dims(
                0,
                facts.dense_dim,
                size,
                facts.blocksize,
                facts.index_dtype,
                layout=layout,
                dtype=dtype,
                device=META,
            )

        return self._with_grad(d, self._wrap(d, make_meta), None)

    @abstractmethod
    def _layout(self, d: Any) -> torch.layout: ...

    # --- wrapper subclasses ---------------------------------------------------------------------

    def _wrapper(self, d: Any, source: Source | None, context: SymbolicContext | None) -> Any:
        """A wrapper subclass that is no view."""
        geometry = self._geometry(d, source, context)
        made = self._with_grad(d, self._empty_wrapper(d, geometry, source, context), None)
        self._join(d, made, geometry)
        return made

    def _join(self, d: Any, made: Any, geometry: Geometry) -> None:
        """Puts a wrapper on the storage of its number, where torch does so."""
        if _torch.WHOLE_STORAGES:
            return
        shared = self._known_storage(d)
        if shared is None and _has_geometry(made, geometry):
            self._keep_storage(d, made.untyped_storage())
            return
        if shared is None:
            shared = self._new_storage(d)
            self._keep_storage(d, shared)
        # A wrapper has a storage without bytes, by which its aliases know one another.
        with torch.no_grad(), self._suppressed(), self._below(made):
            made.set_(shared, geometry.storage_offset, geometry.size, geometry.stride)

    @staticmethod
    def _below(made: Any) -> AbstractContextManager[Any]:
        """Operators run on the tensor itself, and on the device ``meta``."""
        mode = _torch.maybe_get_fake_mode(made)
        return nullcontext() if mode is None else _torch.in_kernel_invocation_manager(mode)

    def _empty_wrapper(
        self, d: Any, geometry: Geometry, source: Source | None, context: SymbolicContext | None
    ) -> Any:
        """A wrapper of these outer sizes and strides around inner tensors."""
        made = self._wrapped(d, geometry.size, geometry.stride, source, context)
        # Guards on purpose: they relate the symbols of the wrapper to those of its inner tensors.
        for name, expected, found in (
            ("shape", geometry.size, made.shape),
            ("stride", geometry.stride, made.stride()),
        ):
            if tuple(found) != tuple(expected):
                raise self._other_outer(d, name, expected, found)
        return made

    def _other_outer(self, d: Any, name: str, expected: Any, found: Any) -> Exception:
        """The error of a wrapper whose sizes or strides are not those asked for."""
        return ConvertError(
            f"__tensor_unflatten__ gave a tensor of another {name}",
            where=self._where(d),
            expected=str(tuple(expected)),
            found=str(tuple(found)),
        )

    def _wrapped(
        self,
        d: Any,
        size: Any,
        stride: Any,
        source: Source | None,
        context: SymbolicContext | None,
    ) -> Any:
        inner: dict[str, Any] = {}
        for attribute, part in self._inner(d):
            inner_source = None
            if self._shape_env is not None:
                inner_source = dynamo_source().AttrSource(source, attribute)
            inner_context = self._inner_context(d, attribute, context)
            if self._kind(part) is not Kind.SUBCLASS:
                inner[attribute] = self._convert(part, inner_source, inner_context)
                continue
            inner[attribute] = self._inner_wrapper(part, inner_source, inner_context)
        return self._unflatten(d, inner, size, stride)

    def _inner_wrapper(self, d: Any, source: Source | None, context: SymbolicContext | None) -> Any:
        """A wrapper inside another: its outer sizes are not asked for, no symbols are made of them.

        Torch makes it anew each time, and gives it neither gradient nor attributes.
        """
        return self._wrapped(d, *self._outer(d), source, context)

    @abstractmethod
    def _outer(self, d: Any) -> tuple[Any, Any]:
        """Sizes and strides of a wrapper inside another, without symbols of their own."""

    def _inner_context(
        self, d: Any, attribute: str, context: SymbolicContext | None
    ) -> SymbolicContext | None:
        if context is None:
            return None
        if not isinstance(context, _torch.SubclassSymbolicContext):
            raise ConvertError(
                "a wrapper subclass has a symbolic context for each inner tensor",
                where=self._where(d),
                expected="SubclassSymbolicContext",
                found=type(context).__name__,
            )
        if attribute not in context.inner_contexts:
            raise ConvertError(
                f"the symbolic context has nothing for the inner tensor `{attribute}`",
                where=self._where(d),
                expected=f"one of {', '.join(context.inner_contexts)}",
                found=attribute,
            )
        return context.inner_contexts[attribute]

    # --- views ----------------------------------------------------------------------------------

    def _view(self, d: Any, source: Source | None, context: SymbolicContext | None) -> Any:
        """A view, made of its base: so the two share the version counter."""
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
            base = self._convert(d.base, base_source, base_context)
        # Views are made also where autograd is switched off around this call.
        key = _torch.DispatchKey.ADInplaceOrView
        excluded = _torch.key_excluded(key)
        _torch.set_key_excluded(key, False)
        try:
            is_wrapper = _torch.is_traceable_wrapper_subclass(base)
            replayed = is_wrapper or self._kind(d) is Kind.SUBCLASS
            with self._viewing(base, d.base, replayed=replayed):
                made = self._view_of(base, d, source, context, replayed=replayed)
            _torch.set_creation_meta(made, self._creation_meta(d))
        finally:
            _torch.set_key_excluded(key, excluded)
        self._set_view_device(d, made)
        return made

    def _view_of(
        self,
        base: Any,
        d: Any,
        source: Source | None,
        context: SymbolicContext | None,
        *,
        replayed: bool,
    ) -> Any:
        base_record = d.base
        dtype = self._dtype(d)
        if base.dtype != dtype and not replayed:
            base = self._view_dtype(base, base_record, dtype, d)

        def view(base: Any) -> Any:
            with self._making_view():
                geometry = self._geometry(d, source, context)
                if replayed:
                    return self._replayed(base, d, geometry, source, context)
                with self._suppressed():
                    return base.as_strided(geometry.size, geometry.stride, geometry.storage_offset)

        if d.is_leaf:
            with torch.no_grad():
                made = view(base)
            if d.requires_grad:
                made.requires_grad = True
            return made
        if base_record.requires_grad == d.requires_grad:
            with torch.enable_grad():
                return view(base)
        # A view that was made to require grad, and a view of that: two steps.
        middle = self._middle(base)
        middle.requires_grad = True
        with torch.enable_grad():
            return view(middle)

    def _making_view(self) -> AbstractContextManager[Any]:
        """In which way a view of the right dtype gets its sizes, strides and offset."""
        return _NOTHING

    def _middle(self, base: Any) -> Any:
        """A view of the whole of the base, which may require grad where the base does not."""
        with torch.no_grad(), self._suppressed():
            if _torch.is_traceable_wrapper_subclass(base):
                return as_it_is(base)
            return base.as_strided(base.size(), base.stride(), base.storage_offset())

    @abstractmethod
    def _view_dtype(self, base: Any, base_record: Any, dtype: torch.dtype, d: Any) -> Any:
        """The base as a tensor of another dtype, by the view that torch has for it."""

    def _replayed(
        self,
        base: Any,
        d: Any,
        geometry: Geometry,
        source: Source | None,
        context: SymbolicContext | None,
    ) -> Any:
        """A view of or as a wrapper subclass, by its view operators.

        The numbers and tensors that these were given become symbols and tensors of this converter,
        so that running them specializes nothing; comparing with the sizes that the policy gives
        puts those in the place of the symbols.
        """
        known: dict[int, Any] = {}
        if self._kind(d) is Kind.SUBCLASS:
            # For its inner tensors, which the view operators may have been given.
            wrapper = self._empty_wrapper(d, geometry, source, context)
            for attribute, part in self._inner(d):
                known[part.id] = getattr(wrapper, attribute)
        static = self._shape_env is None or _is_static(context)
        find = self._view_inputs(d, known)

        def symint(n: int) -> Any:
            if static:
                return n
            env: Any = self._shape_env
            ephemeral = dynamo_source().EphemeralSource("symint_visitor_fn")
            symbol = env.create_symbol(n, ephemeral, positive=None)
            return env.create_symintnode(symbol, hint=n, source=ephemeral)

        def tensor(part: Any) -> Any:
            found = find(part)
            return self._closed_over(part) if found is None else found

        made = view_alike(partial(self._view_again, d, base), symint, tensor, geometry.stride)
        for found, expected in (
            (made.size(), geometry.size),
            (made.stride(), geometry.stride),
            ((made.storage_offset(),), (geometry.storage_offset,)),
        ):
            same = _torch.sym_eq(found, expected)
            if same is False or differ(found, expected):
                error = self._other_view(d, found, expected)
                if error is not None:
                    raise error
            torch._check(same)
        return made

    def _other_view(self, d: Any, found: Any, expected: Any) -> Exception | None:  # noqa: ARG002
        """The error where the view operators give other sizes; ``None`` leaves it to torch."""
        return None

    @abstractmethod
    def _closed_over(self, part: Any) -> Any:
        """A tensor that a view operator was given and that is no inner tensor of the view."""

    # --- gradients ------------------------------------------------------------------------------

    def _grad(self, d: Any, source: Source | None, context: SymbolicContext | None) -> Any:
        grad_source = None
        if self._shape_env is not None:
            grad_source = dynamo_source().AttrSource(source, "grad")
            if context is not None and not self._fits_grad(context, d.grad):
                context = self._all_dynamic(d.grad, grad_source)
        return self._convert(d.grad, grad_source, context)

    def _fits_grad(self, context: SymbolicContext, grad: Any) -> bool:
        """Whether a tensor's symbolic context serves for its gradient too: same views, same parts."""
        if not isinstance(context, _torch.StatelessSymbolicContext):
            return True
        if not _fits_base(context, grad):
            return False
        if not isinstance(context, _torch.SubclassSymbolicContext):
            return not (_torch.WHOLE_STORAGES and self._kind(grad) is Kind.SUBCLASS)
        inner = dict(self._inner(grad))
        return all(
            attribute in inner
            and (
                not isinstance(part, _torch.StatelessSymbolicContext)
                or _fits_base(part, inner[attribute])
            )
            for attribute, part in context.inner_contexts.items()
        )

    def _all_dynamic(self, d: Any, source: Any) -> SymbolicContext:
        """The symbolic context by which every dim gets a symbol of its own."""
        base = None
        if d.is_view:
            base = self._all_dynamic(d.base, dynamo_source().AttrSource(source, "_base"))
        ndim = len(d.size)
        if self._kind(d) is not Kind.SUBCLASS:
            return _torch.StatelessSymbolicContext(
                dynamic_sizes=[_torch.DimDynamic.DYNAMIC] * ndim,
                constraint_sizes=[None] * ndim,
                view_base_context=base,
            )
        inner = {
            attribute: self._all_dynamic(part, dynamo_source().AttrSource(source, attribute))
            for attribute, part in self._inner(d)
        }
        return _torch.SubclassSymbolicContext(
            dynamic_sizes=[_torch.DimDynamic.DYNAMIC] * ndim,
            constraint_sizes=[None] * ndim,
            view_base_context=base,
            tensor_source=source,
            inner_contexts=inner,
        )

    # --- parts ----------------------------------------------------------------------------------

    def _suppressed(self) -> AbstractContextManager[Any]:
        env: Any = self._shape_env
        return nullcontext() if env is None or env._suppress_guards_tls() else env.suppress_guards()


def _has_geometry(made: Any, geometry: Geometry) -> bool:
    """Whether a wrapper has these strides and this offset; a jagged one always has."""
    if made.is_nested:
        return True
    same = _torch.guard_or_false
    return same(_torch.sym_eq(made.stride(), geometry.stride)) and same(
        made.storage_offset() == geometry.storage_offset
    )


def _fits_base(context: Any, d: Any) -> bool:
    base_context = context.view_base_context
    if d.is_view != (base_context is not None):
        return False
    return not (
        isinstance(base_context, _torch.StatelessSymbolicContext)
        and d.base is not None
        and len(base_context.dynamic_sizes) != len(d.base.size)
    )


def _is_static(context: SymbolicContext | None) -> bool:
    return isinstance(context, _torch.StatelessSymbolicContext) and all(
        dim is _torch.DimDynamic.STATIC for dim in context.dynamic_sizes
    )
