"""Builder of fake or meta tensors from torch's descriptions with live objects.

Method: ``MetaConverter.meta_tensor`` of torch 2.13. It makes the calls of torch's converter in the same
order, so that symbols, guards and errors are equal.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from torch_fakeify.compat import torch_dispatch, torch_dynamo, torch_fakes, torch_symbols
from torch_fakeify.compat.torch_dispatch import empty_strided, no_dispatch
from torch_fakeify.compat.torch_dynamo import dynamo_source
from torch_fakeify.convert.builder import Kind, SparseLayout, TensorBuilder
from torch_fakeify.convert.context_checks import has_geometry
from torch_fakeify.convert.dtype_views import view_as_dtype
from torch_fakeify.convert.fake_tensors import META, in_kernel
from torch_fakeify.convert.size_symbols import Geometry
from torch_fakeify.convert.sizes import are_ints
from torch_fakeify.encoding.views.eager_strides import identity_view

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from torch_fakeify.compat.torch_dynamo import Source
    from torch_fakeify.compat.torch_symbols import ShapeEnv, SymbolicContext

    from .desc import MetaTensorDesc

_NOTHING: AbstractContextManager[Any] = nullcontext()


class DropinBuilder(TensorBuilder):
    """One call of `MetaConverter.meta_tensor`."""

    def __init__(self, converter: Any, shape_env: ShapeEnv | None, callback: Any) -> None:
        self._converter = converter
        self._shape_env = shape_env
        self._callback = callback
        self._copy_data = converter.copy_data

    # --- fields of a description ----------------------------------------------------------------

    def _where(self, d: MetaTensorDesc[Any]) -> str:
        return f"tensor {d.id}"

    def _find_cached(self, d: MetaTensorDesc[Any]) -> Any:
        return self._converter.tensor_memo.get(d.id)

    def _cache_made(self, d: MetaTensorDesc[Any], made: Any, meta: torch.Tensor | None) -> None:
        del meta
        self._converter.set_tensor_memo(d, made)

    def _name_source(self, d: MetaTensorDesc[Any]) -> Source:
        del d
        name = f"__meta_utils_unknown_tensor{len(self._converter.tensor_memo)}"
        return dynamo_source().ConstantSource(name)

    def _kind(self, d: MetaTensorDesc[Any]) -> Kind:
        if d.is_sparse:
            return Kind.COO
        if d.layout is not torch.strided and d.layout in _COMPRESSED:
            return Kind.COMPRESSED
        if d.is_mkldnn:
            return Kind.NO_STORAGE
        if d.is_functorch_wrapped:
            return Kind.FUNCTORCH
        if d.is_functional and d.device.type not in ("xla", "lazy"):
            return Kind.FUNCTIONAL
        return Kind.SUBCLASS if d.is_traceable_wrapper_subclass else Kind.DENSE

    def _dtype(self, d: MetaTensorDesc[Any]) -> torch.dtype:
        return d.dtype

    def _layout(self, d: MetaTensorDesc[Any]) -> torch.layout:
        return d.layout

    def _geometry(
        self, d: MetaTensorDesc[Any], source: Source | None, context: SymbolicContext | None
    ) -> Geometry:
        stride = require(d.stride, "t.stride", "")
        env: Any = self._shape_env
        if env is None:
            return Geometry(d.size, stride, d.storage_offset)
        mode = d.fake_mode
        if mode is None:
            fresh = self._fresh_geometry(d, env, source, context)
            if fresh is not None:
                return fresh
            return Geometry(
                *env._create_symbolic_sizes_strides_storage_offset(
                    d.size,
                    stride,
                    d.storage_offset,
                    [False] * d.ndim,
                    source,
                    symbolic_context=context,
                    hint_overrides=d.dynamo_hint_overrides,
                )
            )
        if mode.shape_env is env or (context is None and not _is_symbolic(d)):
            return Geometry(d.size, stride, d.storage_offset)
        here = d.size, stride, d.storage_offset
        overrides = d.dynamo_hint_overrides
        return Geometry(*torch_fakes.transfer_symbols(env, here, source, context, overrides))

    def _fresh_geometry(
        self,
        d: MetaTensorDesc[Any],
        shape_env: ShapeEnv,
        source: Source | None,
        context: SymbolicContext | None,
    ) -> Geometry | None:
        """Geometry of a real tensor with symbols by common policies; ``None`` for others."""
        stride: Any = d.stride
        known = are_ints(*d.size, *stride, d.storage_offset)
        if source is None or d.dynamo_hint_overrides or not known:
            return None
        sizes = self._converter._fresh_sizes(shape_env)
        return sizes.make(d.size, stride, d.storage_offset, source, context)

    def _sparse_size(
        self, d: MetaTensorDesc[Any], source: Source | None, context: SymbolicContext | None
    ) -> tuple[Any, ...]:
        # Compressed layouts are static in torch.
        if self._shape_env is None or not d.is_sparse:
            return d.size
        mode = d.fake_mode
        if mode is not None and mode.shape_env is self._shape_env:
            return d.size
        symbolic = any(map(torch_symbols.is_symbolic, d.size))
        if context is None and (mode is None or not symbolic):
            return d.size
        stride: Any = torch_fakes.make_contiguous_strides_for(d.size)
        dense = dataclasses.replace(d, stride=stride, storage_offset=0)
        return self._geometry(dense, source, context).size

    def _sparse(self, d: MetaTensorDesc[Any]) -> SparseLayout:
        if d.is_sparse:
            sparse_dim = require(d.sparse_dim, "t.sparse_dim", "")
            dense_dim = require(d.dense_dim, "t.dense_dim", "")
            return SparseLayout(sparse_dim, dense_dim, d.is_coalesced, None, ())
        layout = str(d.layout).removeprefix("torch.sparse_")
        blocksize: Any = ()
        if layout in ("bsr", "bsc"):
            why = " for sparse block layout"
            sparse_dim = require(d.sparse_dim, "t.sparse_dim", why)
            dense_dim = require(d.dense_dim, "t.dense_dim", why)
            batch_dim = d.ndim - sparse_dim - dense_dim
            blocksize = require(d.values, "t.values", why).shape[batch_dim + 1 : batch_dim + 3]
        if layout in ("csr", "bsr"):
            indices = require(d.crow_indices, "t.crow_indices", " for sparse csr/bsr layout")
        else:
            indices = require(d.ccol_indices, "t.ccol_indices", " for sparse csc/bsc layout")
        return SparseLayout(d.sparse_dim or 0, d.dense_dim or 0, None, indices.dtype, blocksize)

    def _creation_meta(self, d: MetaTensorDesc[Any]) -> Any:
        return require(d.creation_meta, "t.creation_meta", " for view tensor")

    # --- conversion -----------------------------------------------------------------------------

    def _convert(
        self, d: MetaTensorDesc[Any], source: Source | None, context: SymbolicContext | None
    ) -> Any:
        self._converter.arg_cnt += 1
        if d.is_legacy_batchedtensor and self._kind(d) is Kind.DENSE and not d.is_view:
            return NotImplemented
        return super()._convert(d, source, context)

    def _make(
        self, d: MetaTensorDesc[Any], source: Source | None, context: SymbolicContext | None
    ) -> tuple[Any, torch.Tensor | None]:
        kind = self._kind(d)
        if kind in (Kind.COO, Kind.COMPRESSED):
            return super()._make(d, source, context)
        if d.is_nested and not d.is_traceable_wrapper_subclass:
            torch_dynamo.unimplemented(
                "attempted to apply meta conversion to strided nested tensor", str(d)
            )
        if kind is Kind.NO_STORAGE:  # also if it is a view
            return self._dense(d, kind, source, context)
        return super()._make(d, source, context)

    def _dense(
        self,
        d: MetaTensorDesc[Any],
        kind: Kind,
        source: Source | None,
        context: SymbolicContext | None,
    ) -> tuple[Any, torch.Tensor | None]:
        geometry = self._geometry(d, source, context)
        made = self._wrap(d, _maker(d, geometry.size, geometry.stride))
        made = self._with_grad(d, made, None)
        if kind is not Kind.NO_STORAGE:
            self._place_on_storage(d, made, geometry)
        return made, None

    def _wrapper(
        self, d: MetaTensorDesc[Any], source: Source | None, context: SymbolicContext | None
    ) -> Any:
        geometry = self._geometry(d, source, context)
        made = self._checked(self._empty_wrapper(d, geometry, source, context))
        made = self._with_grad(d, made, None)
        if not torch_fakes.WHOLE_STORAGES:
            self._place_on_storage(d, made, geometry)
        return made

    def _place_on_storage(self, d: MetaTensorDesc[Any], made: Any, geometry: Geometry) -> None:
        """Set the storage of a new tensor to the one with the described id, at its offset."""
        storage = require(d.storage, "t.storage", "")
        converter = self._converter
        if storage.id not in converter.storage_memo and has_geometry(made, geometry):
            own = made.untyped_storage()
            if not made.is_nested:
                self._make_whole(own, storage.size)
            converter.set_storage_memo(storage, own)
            if self._copy_data:
                self._share_real(d, made, own)
            return
        shared: Any = converter.meta_storage(
            storage, callback=partial(self._callback, device=d.device)
        )
        size, stride, offset, _ = geometry
        # That the sizes fit the storage is a fact of the tensor described, no guard.
        with torch.no_grad(), self._suppressed():
            with in_kernel(made):
                made.set_(shared, offset, size, stride)
            if self._copy_data:
                with torch.no_grad(), no_dispatch():
                    stride = require(d.stride, "t.stride")
                    _real(made).set_(shared.real_storage, d.storage_offset, d.size, stride)

    @staticmethod
    def _make_whole(own: torch.UntypedStorage, nbytes: Any) -> None:
        """Grow the new storage of a tensor to the described size in bytes."""
        if torch_fakes.WHOLE_STORAGES and isinstance(nbytes, int) and nbytes:
            size: Any = own.size()
            if isinstance(size, int) and size < nbytes:
                own.resize_(nbytes)

    @staticmethod
    def _share_real(d: MetaTensorDesc[Any], made: Any, own: torch.UntypedStorage) -> None:
        """Set the real storage of a fake tensor's storage, and its real tensor on it."""
        real, storage = _real(made), require(d.storage, "t.storage", "")
        if not torch_fakes.WHOLE_STORAGES or (isinstance(storage.size, int) and storage.size == 0):
            set_real_storage(own, real.untyped_storage())
            return
        size, stride = require(d.size, "t.size"), require(d.stride, "t.stride")
        data: Any = require(d.data, "t.data")
        with torch.no_grad(), no_dispatch():
            whole = torch_fakes.clone_real_storage(data)
            set_real_storage(own, whole)
            real.set_(whole, d.storage_offset, size, stride)

    # --- how tensors are made -------------------------------------------------------------------

    def _wrap(self, d: MetaTensorDesc[Any], make_meta: Callable[[], torch.Tensor]) -> Any:
        made = self._callback(make_meta, device=d.device)
        if self._copy_data:
            self._copy(d, made)
        return self._checked(made)

    @staticmethod
    def _checked(made: Any) -> Any:
        if not torch_fakes.meta_utils.safe_is_leaf(made):
            raise AssertionError("the callback you passed in doesn't detach")
        return made

    def _copy(self, d: MetaTensorDesc[Any], made: Any) -> None:
        """Set the real tensor of a fake tensor."""
        if not isinstance(made, torch_fakes.FakeTensor):
            raise AssertionError("Expected r to be a FakeTensor")
        data: Any = d.data
        with torch.no_grad(), no_dispatch():
            if self._kind(d) in (Kind.COO, Kind.COMPRESSED):
                data = require(data, "t.data")
                made.real_tensor = data.clone() if type(data) in _WITH_DATA else None
                return
            size, stride = require(d.size, "t.size"), require(d.stride, "t.stride")
            made.real_tensor = torch.empty_strided(size, stride, dtype=d.dtype, device=d.device)
            freed = d.storage is not None and d.storage.size == 0
            if type(data) in _WITH_DATA and not freed:  # reading freed memory ends the process
                made.real_tensor.copy_(data)

    def _operator_mode(self, d: MetaTensorDesc[Any]) -> AbstractContextManager[Any]:
        del d
        return _NOTHING

    def _with_history(self, d: MetaTensorDesc[Any], made: Any, _meta: torch.Tensor | None) -> Any:
        del d
        return self._converter._backward_error(made)

    # --- views ----------------------------------------------------------------------------------

    def _view(
        self, d: MetaTensorDesc[Any], source: Source | None, context: SymbolicContext | None
    ) -> Any:
        if d.base is None:
            raise AssertionError("t.base must not be None for view tensor")
        if self._shape_env is not None and context is not None:
            stateless = torch_symbols.StatelessSymbolicContext
            if not isinstance(context, stateless):
                raise AssertionError(f"Expected StatelessSymbolicContext, got {type(context)}")
        return super()._view(d, source, context)

    def _view_operator_mode(
        self, base: Any, d: Any, *, replayed: bool
    ) -> AbstractContextManager[Any]:
        del base, d, replayed
        return _NOTHING

    def _view_geometry_mode(self) -> AbstractContextManager[Any]:
        return torch_dispatch.enable_python_dispatcher()

    def _alias_of_base(self, base: Any) -> Any:
        with torch.no_grad(), torch_dispatch.enable_python_dispatcher():
            return identity_view(base)

    def _set_view_device(self, d: MetaTensorDesc[Any], made: Any) -> None:
        made.fake_device = d.device

    def _view_dtype(self, base: Any, base_record: Any, dtype: torch.dtype, d: Any) -> Any:
        del base_record, d
        return view_as_dtype(base, dtype)

    def _replay_view(
        self,
        d: MetaTensorDesc[Any],
        base: Any,
        symint: Callable[[int], Any],
        tensor: Callable[[Any], Any],
    ) -> Any:
        return require(d.view_func, "t.view_func", " for view replay").apply(
            d, base, symint, tensor
        )

    def _inner_tensor_lookup(
        self, d: MetaTensorDesc[Any], inner: dict[int, Any]
    ) -> Callable[[Any], Any | None]:
        del d
        number = self._converter.describer.get_tensor_id
        return lambda part: None if part is None else inner.get(number(part))

    def _closed_over(self, part: Any) -> Any:
        if part is None:  # the lengths that a jagged tensor does not have
            return None
        d = self._converter.describer.describe_tensor(part)
        source = dynamo_source().EphemeralSource("tensor_visitor_fn")
        return self._convert(d, source, self._all_dynamic(d, source))

    # --- wrapper subclasses ---------------------------------------------------------------------

    def _inner(self, d: MetaTensorDesc[Any]) -> Iterable[tuple[str, Any]]:
        return () if d.attrs is None else d.attrs.items()

    def _outer(self, d: MetaTensorDesc[Any]) -> tuple[Any, Any]:
        return d.size, d.stride

    def _empty_wrapper(
        self,
        d: MetaTensorDesc[Any],
        geometry: Geometry,
        source: Source | None,
        context: SymbolicContext | None,
    ) -> Any:
        if context is not None and not isinstance(context, torch_symbols.SubclassSymbolicContext):
            raise AssertionError(f"Expected SubclassSymbolicContext or None, got {type(context)}")
        return super()._empty_wrapper(d, geometry, source, context)

    def _inner_context(
        self, d: MetaTensorDesc[Any], attribute: str, context: SymbolicContext | None
    ) -> SymbolicContext | None:
        del d
        if context is None:
            return None
        if not isinstance(context, torch_symbols.SubclassSymbolicContext):
            raise AssertionError(f"Expected SubclassSymbolicContext, got {type(context)}")
        if attribute not in context.inner_contexts:
            raise AssertionError(f"tensor attr {attribute!r} missing from inner_contexts")
        return context.inner_contexts[attribute]

    def _outer_mismatch(
        self, d: MetaTensorDesc[Any], name: str, expected: Any, found: Any
    ) -> Exception:
        return AssertionError(
            f"Expected return value from {d.type}__tensor_unflatten__() to have "
            f"{name} equal to {expected}, but got: {found}"
        )

    def _unflatten(
        self, d: MetaTensorDesc[Any], inner: dict[str, Any], size: Any, stride: Any
    ) -> Any:
        if d.opaque_attrs:
            inner.update(d.opaque_attrs)
        cls: Any = require(d.type, "t.type", " for subclass")
        return cls.__tensor_unflatten__(inner, d.ctx, size, stride)

    # --- functorch and functionalization --------------------------------------------------------

    def _functorch(
        self, d: MetaTensorDesc[Any], source: Source | None, context: SymbolicContext | None
    ) -> Any:
        if d.is_view:
            torch_dynamo.unimplemented(
                "attempted to apply meta conversion to view functorch tensor", str(d)
            )
        return self._rewrapped(d, d.device, source, context)

    def _rewrapped(
        self,
        d: MetaTensorDesc[Any],
        device: torch.device,
        source: Source | None,
        context: SymbolicContext | None,
    ) -> Any:
        """Convert the tensor inside functorch's wrappers and wrap it again."""
        restored = torch_dispatch.temporarily_restore_interpreter_stack
        if d.is_batchedtensor:
            why = " for batchedtensor"
            level, bdim = require(d.level, "t.level", why), require(d.bdim, "t.bdim", why)
            inner = self._rewrapped(
                require(d.unwrapped, "t.unwrapped", why), device, source, context
            )
            # Levels are those of interpreters: without the stack there are none.
            with restored(d.functorch_stack):
                return torch_dispatch.add_batch_dim(inner, bdim, level)
        if d.is_gradtrackingtensor:
            why = " for gradtrackingtensor"
            unwrapped = require(d.unwrapped, "t.unwrapped", why)
            level = require(d.level, "t.level", why)
            with torch_dispatch.disable_functorch():
                made = self._rewrapped(unwrapped, device, source, context)
            if level != torch_dispatch.DEAD_LEVEL:
                with restored(d.functorch_stack):
                    made = torch_dispatch.wrap_for_grad(made, level)
            if not d.requires_grad:
                return made
            if torch_fakes.meta_utils.safe_is_leaf(made):
                made.requires_grad = True
            elif not d.is_leaf:
                made = self._converter._backward_error(made)
            return made
        if d.is_functional:
            why = " for functional tensor"
            unwrapped = require(d.unwrapped, "t.unwrapped", why)
            level = require(d.current_level, "t.current_level", why)
            inner = self._convert(unwrapped, source, context)
            return torch_dispatch.wrap_functional(inner, level)
        stride = require(d.stride, "t.stride", "")
        made = self._callback(_maker(d, d.size, stride), device=device)
        if self._copy_data:
            self._copy(d, made)
        return made

    def _functional(
        self, d: MetaTensorDesc[Any], source: Source | None, context: SymbolicContext | None
    ) -> Any:
        unwrapped = require(d.unwrapped, "t.unwrapped", " for functional tensor")
        made = torch_dispatch.to_functional(self._convert(unwrapped, source, context))
        torch_dispatch.mirror_autograd_meta(d.autograd_meta_from, made)
        return made

    # --- attributes -----------------------------------------------------------------------------

    def _finish(self, d: MetaTensorDesc[Any], made: Any, source: Source | None) -> None:
        del source
        torch_fakes.assert_metadata_eq(
            torch_fakes.assert_eq,
            d,  # type: ignore[arg-type]
            made,
            skip_symbolic=True,
            skip_leaf=d.is_gradtrackingtensor and d.level == torch_dispatch.DEAD_LEVEL,
        )
        if d.storage is not None and torch_symbols.guard_or_false(d.storage.size == 0):
            made.untyped_storage().resize_(0)
        if d.is_parameter:
            made._is_param = True
        if d.nested_int is not None:
            if not isinstance(made, torch_fakes.FakeTensor):
                raise AssertionError("Expected r to be a FakeTensor for nested int")
            made.nested_int_memo = made.fake_mode.create_symbolic_nested_int(
                nt_tensor_id=d.nested_int
            )


# --- parts --------------------------------------------------------------------------------------

_COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


_WITH_DATA = frozenset({torch.Tensor, torch.nn.Parameter})
"""Classes of tensors whose data is copied; torch leaves the copy of a parameter uninitialized."""


def require(value: Any, name: str, why: str = " when copy_data is True") -> Any:
    """Return the value of a field, which must not be ``None``."""
    if value is None:
        raise AssertionError(f"{name} must not be None{why}")
    return value


def _maker(d: MetaTensorDesc[Any], size: Any, stride: Any) -> Callable[[], torch.Tensor]:
    return partial(empty_strided, size, stride, dtype=d.dtype, device=META)


def _is_symbolic(d: MetaTensorDesc[Any]) -> bool:
    return any(map(torch_symbols.is_symbolic, (*d.size, *(d.stride or ()), d.storage_offset)))


def _real(made: Any) -> torch.Tensor:
    if not isinstance(made, torch_fakes.FakeTensor):
        raise AssertionError("Expected r to be a FakeTensor")
    return require(made.real_tensor, "r.real_tensor")


def set_real_storage(storage: Any, real: torch.UntypedStorage) -> None:
    """Set the real storage of a fake tensor's storage."""
    storage.real_storage = real
