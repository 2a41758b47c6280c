"""Abstract builder of tensors from descriptions, with one method for each kind of tensor.

Method: ``MetaConverter.meta_tensor`` of torch 2.13. A description is a record
(`converter.MetaConverter`) or torch's own, with live objects in it (`dropin.builder.DropinBuilder`);
the two subclasses read its fields and wrap meta tensors. Both kinds of description have the fields
``id``, ``requires_grad``, ``is_leaf``, ``is_inference``, ``is_conj``, ``is_neg``, ``is_view``,
``base``, ``grad`` and ``storage`` with its ``id``.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torch_fakeify.compat import torch_dispatch, torch_fakes, torch_symbols
from torch_fakeify.compat.torch_dynamo import dynamo_source
from torch_fakeify.encoding.views.eager_strides import (
    hints_differ,
    identity_view,
    view_with_eager_strides,
)
from torch_fakeify.errors import ConvertError

from .context_checks import is_static, matches_base
from .fake_tensors import META
from .meta_tensors import suppressed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from torch_fakeify.compat.torch_dynamo import Source
    from torch_fakeify.compat.torch_symbols import ShapeEnv, SymbolicContext

    from .size_symbols import Geometry

_aten: Any = torch.ops.aten
_NOTHING: AbstractContextManager[Any] = nullcontext()


class Kind(enum.Enum):
    """The construction that a tensor needs, other than a view."""

    DENSE = enum.auto()
    COO = enum.auto()
    COMPRESSED = enum.auto()
    NO_STORAGE = enum.auto()
    """Sizes and strides without an accessible storage: mkldnn."""
    SUBCLASS = enum.auto()
    FUNCTORCH = enum.auto()
    FUNCTIONAL = enum.auto()


class SparseLayout(NamedTuple):
    """Layout of a sparse tensor without its sizes; fields as in `records.tensor.SparseDesc`."""

    sparse_dim: int
    dense_dim: int
    is_coalesced: bool | None
    index_dtype: torch.dtype | None
    blocksize: tuple[int, ...]


class TensorBuilder(ABC):
    """Builds tensors from descriptions, with symbols of a ``ShapeEnv`` or static shapes.

    `_convert` returns the cached tensor or that of `_build`, which calls, in this order:
    `_name_source`, `_make`, which chooses by `_kind`, `_attach_grad`, `_finish` and `_cache_made`.
    """

    _shape_env: ShapeEnv | None

    # --- fields of a description, and construction -----------------------------------------------

    @abstractmethod
    def _where(self, d: Any) -> str:
        """The tensor's name for an error."""

    @abstractmethod
    def _find_cached(self, d: Any) -> Any:
        """The live tensor made from this description before, or ``None``."""

    @abstractmethod
    def _cache_made(self, d: Any, made: Any, meta: torch.Tensor | None) -> None:
        """Cache a tensor and, unless it is a view, the meta tensor on its storage."""

    @abstractmethod
    def _name_source(self, d: Any) -> Source:
        """A placeholder source for a tensor without one."""

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
    def _sparse(self, d: Any) -> SparseLayout: ...

    @abstractmethod
    def _wrap(self, d: Any, make_meta: Callable[[], torch.Tensor]) -> Any:
        """Wrap the meta tensor that ``make_meta`` returns, on the described device."""

    @abstractmethod
    def _operator_mode(self, d: Any) -> AbstractContextManager[Any]:
        """The context in which operators run on the tensor of this description."""

    @abstractmethod
    def _view_operator_mode(
        self, base: Any, d: Any, *, replayed: bool
    ) -> AbstractContextManager[Any]:
        """The context in which view operators run on a base.

        Args:
            base: the base.
            d: the description of the view.
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
    def _replay_view(
        self,
        d: Any,
        base: Any,
        symint: Callable[[int], Any],
        tensor: Callable[[Any], Any],
    ) -> Any:
        """Run the recorded view operators on a base.

        Each recorded number is replaced by ``symint(number)``, each tensor by ``tensor(record)``.
        """

    @abstractmethod
    def _inner_tensor_lookup(self, d: Any, inner: dict[int, Any]) -> Callable[[Any], Any | None]:
        """A lookup from an argument of a view operator to the inner tensor with its id, or ``None``.

        Args:
            d: the description of the view.
            inner: inner tensors of the view, by id.
        """

    @abstractmethod
    def _functorch(self, d: Any, source: Source | None, context: SymbolicContext | None) -> Any: ...

    @abstractmethod
    def _functional(
        self, d: Any, source: Source | None, context: SymbolicContext | None
    ) -> Any: ...

    def _attach_grad(self, _d: Any, made: Any, grad: Any) -> None:
        """Assign the gradient; torch raises where sizes, dtypes or devices differ."""
        made.grad = grad

    @abstractmethod
    def _finish(self, d: Any, made: Any, source: Source | None) -> None:
        """Set the attributes that are not part of the geometry."""

    # --- conversion -----------------------------------------------------------------------------

    def _convert(self, d: Any, source: Source | None, context: SymbolicContext | None) -> Any:
        cached = self._find_cached(d)
        return self._build(d, source, context) if cached is None else cached

    def _build(self, d: Any, source: Source | None, context: SymbolicContext | None) -> Any:
        """Make the tensor of a description, with its gradient and attributes, and cache it."""
        if source is None and self._shape_env is not None:
            source = self._name_source(d)
        inference: AbstractContextManager[Any] = nullcontext()
        # Entering either mode also sets the grad mode and whether autograd sees the operators, so
        # that modes active around the call (no_grad, a dispatched operator) have no effect.
        if (
            torch.is_inference_mode_enabled() != d.is_inference
            or torch.is_grad_enabled() == d.is_inference
            or torch_dispatch.key_excluded(torch_dispatch.DispatchKey.AutogradFunctionality)
            != d.is_inference
        ):
            inference = torch.inference_mode(d.is_inference)
        with inference:
            made, meta = self._make(d, source, context)
            if d.grad is not None:
                self._attach_grad(d, made, self._grad(d, source, context))
            # The view operators of a wrapper may have set the bits.
            if d.is_conj and not made.is_conj():
                torch_dispatch.set_conj(made, True)
            if d.is_neg and not made.is_neg():
                torch_dispatch.set_neg(made, True)
        self._finish(d, made, source)
        self._cache_made(d, made, meta)
        return made

    def _make(
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

    @abstractmethod
    def _dense(
        self, d: Any, kind: Kind, source: Source | None, context: SymbolicContext | None
    ) -> tuple[Any, torch.Tensor | None]:
        """A tensor that is no view, and the meta tensor on its storage if views need it."""

    def _with_grad(self, d: Any, made: Any, meta: torch.Tensor | None) -> Any:
        """Set ``requires_grad``, and return a non-leaf where the description has one."""
        if d.requires_grad:
            made.requires_grad = True
            if not d.is_leaf:
                return self._with_history(d, made, meta)
        return made

    def _with_history(self, d: Any, made: Any, _meta: torch.Tensor | None) -> Any:
        """A non-leaf alias of the tensor; backward through it raises."""
        error = torch_dispatch.DelayedError("Tried to backward() through an example input", 1)
        with self._operator_mode(d):
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
        with self._operator_mode(d):
            made._coalesced_(bool(facts.is_coalesced))
        if not d.requires_grad:
            return made
        made.requires_grad = True
        if d.is_leaf:
            return made
        # An operator that fails in backward would make a dense tensor of it.
        with self._operator_mode(d), torch.enable_grad():
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

    @abstractmethod
    def _wrapper(self, d: Any, source: Source | None, context: SymbolicContext | None) -> Any:
        """A wrapper subclass that is no view."""

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
                raise self._outer_mismatch(d, name, expected, found)
        return made

    def _outer_mismatch(self, d: Any, name: str, expected: Any, found: Any) -> Exception:
        """The error for a wrapper with other sizes or strides than requested."""
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
        """A wrapper inside another one, without symbols of its own for its outer sizes.

        Torch makes a new one at each occurrence, without gradient or attributes.
        """
        return self._wrapped(d, *self._outer(d), source, context)

    @abstractmethod
    def _outer(self, d: Any) -> tuple[Any, Any]:
        """Outer sizes and strides of a wrapper inside another one."""

    def _inner_context(
        self, d: Any, attribute: str, context: SymbolicContext | None
    ) -> SymbolicContext | None:
        if context is None:
            return None
        if not isinstance(context, torch_symbols.SubclassSymbolicContext):
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
        """A view, made from its base so that both share a version counter."""
        base = self._base(d, source, context)
        replayed = Kind.SUBCLASS in (self._kind(d), self._kind(d.base))
        # Views are made also where autograd is switched off around this call.
        untracked = torch_dispatch.key_excluded(torch_dispatch.DispatchKey.ADInplaceOrView)
        with torch_dispatch.views_tracked(True) if untracked else _NOTHING:
            with self._view_operator_mode(base, d, replayed=replayed):
                made = self._view_of(base, d, source, context, replayed=replayed)
            torch_dispatch.set_creation_meta(made, self._creation_meta(d))
        self._set_view_device(d, made)
        return made

    def _base(self, d: Any, source: Source | None, context: SymbolicContext | None) -> Any:
        """The base of a view."""
        if self._shape_env is None:
            return self._convert(d.base, None, None)
        base_source = dynamo_source().AttrSource(source, "_base")
        base_context: Any = None if context is None else context.view_base_context  # type: ignore[attr-defined]
        # A base is not an input, so its unbacked symbols are bound nowhere.
        with self._shape_env.ignore_fresh_unbacked_symbols():
            return self._convert(d.base, base_source, base_context)

    def _view_of(
        self,
        base: Any,
        d: Any,
        source: Source | None,
        context: SymbolicContext | None,
        *,
        replayed: bool,
    ) -> Any:
        dtype = self._dtype(d)
        if base.dtype != dtype and not replayed:
            base = self._view_dtype(base, d.base, dtype, d)
        if not d.is_leaf and d.base.requires_grad != d.requires_grad:
            # A view of an alias that was made to require grad.
            base = self._alias_of_base(base)
            base.requires_grad = True
        had_grad = torch.is_grad_enabled()
        torch_dispatch.set_grad_enabled(not d.is_leaf)
        try:
            with self._view_geometry_mode():
                geometry = self._geometry(d, source, context)
                if replayed:
                    made = self._view_by_calls(base, d, geometry, source, context)
                else:
                    with self._suppressed():
                        made = base.as_strided(*geometry[:3])
        finally:
            torch_dispatch.set_grad_enabled(had_grad)
        if d.is_leaf and d.requires_grad:
            made.requires_grad = True
        return made

    def _view_geometry_mode(self) -> AbstractContextManager[Any]:
        """The context in which a view of the right dtype gets its sizes, strides and offset."""
        return _NOTHING

    def _alias_of_base(self, base: Any) -> Any:
        """An alias of the base, which may require grad where the base does not."""
        with torch.no_grad():
            if torch_fakes.is_traceable_wrapper_subclass(base):
                with self._suppressed():
                    return identity_view(base)
            return base.view(base.shape)

    @abstractmethod
    def _view_dtype(self, base: Any, base_record: Any, dtype: torch.dtype, d: Any) -> Any:
        """A view of the base under another dtype."""

    def _view_by_calls(
        self,
        base: Any,
        d: Any,
        geometry: Geometry,
        source: Source | None,
        context: SymbolicContext | None,
    ) -> Any:
        """A view from or to a wrapper subclass, by its recorded view operators.

        Their numbers and tensors become symbols and tensors of this converter, so that running them
        specializes nothing; checks against the sizes of the policy then replace these symbols.
        """
        inner: dict[int, Any] = {}
        if self._kind(d) is Kind.SUBCLASS:
            # For its inner tensors, which may be arguments of the view operators.
            wrapper = self._empty_wrapper(d, geometry, source, context)
            for attribute, part in self._inner(d):
                inner[part.id] = getattr(wrapper, attribute)
        static = self._shape_env is None or is_static(context)
        find = self._inner_tensor_lookup(d, inner)

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

        made = view_with_eager_strides(
            partial(self._replay_view, d, base), symint, tensor, geometry.stride
        )
        for found, expected in (
            (made.size(), geometry.size),
            (made.stride(), geometry.stride),
            ((made.storage_offset(),), (geometry.storage_offset,)),
        ):
            same = torch_symbols.sym_eq(found, expected)
            if same is False or hints_differ(found, expected):
                error = self._view_mismatch(d, found, expected)
                if error is not None:
                    raise error
            torch._check(same)
        return made

    def _view_mismatch(self, d: Any, found: Any, expected: Any) -> Exception | None:  # noqa: ARG002
        """The error for view operators that return other sizes; ``None`` lets torch raise."""
        return None

    @abstractmethod
    def _closed_over(self, part: Any) -> Any:
        """A tensor argument of a view operator that is not an inner tensor of the view."""

    # --- gradients ------------------------------------------------------------------------------

    def _grad(self, d: Any, source: Source | None, context: SymbolicContext | None) -> Any:
        grad_source = None
        if self._shape_env is not None:
            grad_source = dynamo_source().AttrSource(source, "grad")
            if context is not None and not self._matches_grad(context, d.grad):
                context = self._all_dynamic(d.grad, grad_source)
        return self._convert(d.grad, grad_source, context)

    def _matches_grad(self, context: SymbolicContext, grad: Any) -> bool:
        """Whether a tensor's symbolic context applies to its gradient: same views, same parts."""
        if not isinstance(context, torch_symbols.StatelessSymbolicContext):
            return True
        if not matches_base(context, grad):
            return False
        if not isinstance(context, torch_symbols.SubclassSymbolicContext):
            return not (torch_fakes.WHOLE_STORAGES and self._kind(grad) is Kind.SUBCLASS)
        inner = dict(self._inner(grad))
        return all(
            attribute in inner
            and (
                not isinstance(part, torch_symbols.StatelessSymbolicContext)
                or matches_base(part, inner[attribute])
            )
            for attribute, part in context.inner_contexts.items()
        )

    def _all_dynamic(self, d: Any, source: Any) -> SymbolicContext:
        """The symbolic context in which every dim is dynamic."""
        base = None
        if d.is_view:
            base = self._all_dynamic(d.base, dynamo_source().AttrSource(source, "_base"))
        ndim = len(d.size)
        if self._kind(d) is not Kind.SUBCLASS:
            return torch_symbols.StatelessSymbolicContext(
                dynamic_sizes=[torch_symbols.DimDynamic.DYNAMIC] * ndim,
                constraint_sizes=[None] * ndim,
                view_base_context=base,
            )
        inner = {
            attribute: self._all_dynamic(part, dynamo_source().AttrSource(source, attribute))
            for attribute, part in self._inner(d)
        }
        return torch_symbols.SubclassSymbolicContext(
            dynamic_sizes=[torch_symbols.DimDynamic.DYNAMIC] * ndim,
            constraint_sizes=[None] * ndim,
            view_base_context=base,
            tensor_source=source,
            inner_contexts=inner,
        )

    # --- parts ----------------------------------------------------------------------------------

    def _suppressed(self) -> AbstractContextManager[Any]:
        return suppressed(self._shape_env)
