"""Plain dense fake tensors and their views, made from one cache of layouts.

A model has many tensors of few layouts. Under a policy of duck sizes, the second tensor of a layout
has the symbols of the first, with sources of its own; the values in a graph are over symbols that
exist. `builder.TensorBuilder` makes equal tensors, and all others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import sympy
import torch
from torch.compiler import is_exporting

from torch_fakeify.compat import torch_dispatch
from torch_fakeify.compat.torch_dispatch import empty_strided, no_dispatch_guard
from torch_fakeify.compat.torch_fakes import FakeTensor, FakeTensorConfig
from torch_fakeify.compat.torch_symbols import (
    DimDynamic,
    ShapeEnv,
    SymNode,
)
from torch_fakeify.encoding.contexts import decode_context
from torch_fakeify.records.predicates import is_plain, is_plain_whole
from torch_fakeify.records.tensor import ContextDesc, SymDesc

from .attributes import set_attributes
from .fake_tensors import DTYPES, META
from .meta_tensors import meta_of, storage_nbytes
from .size_symbols import common_dims, is_symbol_creation_observed

if TYPE_CHECKING:
    from collections.abc import Callable, ItemsView

    from torch_fakeify.compat.torch_dynamo import Source
    from torch_fakeify.compat.torch_symbols import SymbolicContext
    from torch_fakeify.records.tensor import IntLike, MetaTensorDesc

    from .fake_tensors import FakeDevice, MetaDispatchMode
    from .memo import StorageMemo
    from .size_symbols import Dims, FreshGeometry
    from .sizes import SizeMaker

    Policy = SymbolicContext | ContextDesc | None

_MAX_INT = 2**63 - 1
_CREATION_METAS = dict(torch_dispatch.CreationMeta.__members__)
_NEEDED_KEYS = (
    torch_dispatch.DispatchKey.AutogradFunctionality,
    torch_dispatch.DispatchKey.ADInplaceOrView,
    torch_dispatch.DispatchKey.Python,
)


class _NewLayout(NamedTuple):
    """Geometry of new symbols, shared by the tensors of one policy, size, stride and dtype."""

    made: FreshGeometry
    nbytes: tuple[Any, int] | None
    """Size of the storage as expression and hint; ``None`` of views and where torch computes it."""
    symbols: ItemsView[int, sympy.Symbol]
    """By their values."""
    version: int
    """Version of the ``ShapeEnv``'s replacements."""


class _CachedLayout(NamedTuple):
    """Geometry of existing or carried symbols, shared by values of a graph."""

    size: Any
    stride: Any
    nbytes: torch.SymInt
    records: tuple[Any, ...]
    """Strong references to the records whose ids are in the key."""


class PlainFakes:
    """Makes the plain fake tensors of one converter; ``None`` instead of all others.

    Args:
        shape_env: of the symbols; ``None`` for static shapes.
        sizes: makes the sizes of the converter, with new or existing symbols.
        storages: the converter's cache of storages.
        meta_dispatch: the mode in which views are made.
        with_history: returns a non-leaf alias of a fake tensor.
    """

    def __init__(
        self,
        shape_env: ShapeEnv | None,
        sizes: SizeMaker | None,
        storages: StorageMemo,
        meta_dispatch: MetaDispatchMode,
        with_history: Callable[[MetaTensorDesc, FakeTensor, torch.Tensor], FakeTensor],
    ) -> None:
        self._env: Any = shape_env
        self._sizes = sizes
        self._fresh = None if sizes is None else sizes.fresh
        self._storages = storages
        self._meta_dispatch = meta_dispatch
        self._with_history = with_history
        self._layouts: dict[Any, Any] = {}
        self._dims: dict[ContextDesc, Dims | None] = {}
        """Policies of the dims by the record of a context; ``None`` if it has other settings."""

    def leaf(
        self,
        d: MetaTensorDesc,
        device_of: Callable[[MetaTensorDesc], FakeDevice],
        source: Source | None,
        policy: Policy,
        *,
        is_value: bool = False,
    ) -> tuple[FakeTensor, torch.Tensor] | None:
        """A tensor that fills a new storage, and its meta tensor.

        Args:
            d: the record.
            device_of: returns the device of a record.
            source: of the tensor.
            policy: a symbolic context, or the record of a stateless one.
            is_value: whether it is a fake tensor's, and no input: tensors of one layout then share
                the nodes of their sizes, which identify an input's sizes to tracers.
        """
        storage, dtype = d.storage, DTYPES.get(d.dtype)
        if storage is None or dtype is None or storage.id in self._storages.entries:
            return None
        if not is_plain_whole(d) or _has_ambient_modes():
            return None
        if d.requires_grad:
            if not (dtype.is_floating_point or dtype.is_complex):
                return None
            if not d.is_leaf and not _has_autograd():
                return None
        elif not d.is_leaf:
            return None
        device = device_of(d)
        guard = no_dispatch_guard()
        try:
            if self._fresh is not None and not is_value:
                meta = self._new_meta(d, dtype, source, policy)
            elif type(storage.nbytes) is int:
                meta = _static_meta(d, dtype)
            else:
                meta = self._cached_meta(d, dtype)
            if meta is None:
                return None
            fake = device.wrap(meta, requires_grad=d.requires_grad)
        finally:
            del guard
        self._storages.add(d, meta.untyped_storage())
        if not d.is_leaf:
            with torch.enable_grad():
                fake = self._with_history(d, fake, meta)
        set_attributes(d, fake)
        return fake, meta

    # --- new symbols ----------------------------------------------------------------------------

    def _new_meta(
        self, d: MetaTensorDesc, dtype: torch.dtype, source: Source | None, policy: Policy
    ) -> torch.Tensor | None:
        """The meta tensor of a real tensor, with symbols by the policy."""
        fresh = self._fresh
        assert fresh is not None
        assert d.storage is not None
        nbytes: Any = d.storage.nbytes
        if source is None or d.marks is not None or type(nbytes) is not int:
            return None
        if not 0 < nbytes <= _MAX_INT:
            return None
        layout = self._new_layout(d, dtype, source, policy)
        if layout is None:
            return None
        size, stride, _ = fresh.numbers(layout.made)
        if layout.nbytes is None:
            return empty_strided(size, stride, dtype=dtype, device=META)
        return meta_of(size, stride, dtype, fresh.number(layout.nbytes))

    def _new_layout(
        self, d: MetaTensorDesc, dtype: torch.dtype, source: Source, policy: Policy
    ) -> _NewLayout | None:
        """The layout of a real tensor under a policy, with its source recorded in the ``ShapeEnv``."""
        dims = self._dims_of(d, policy)
        env, fresh = self._env, self._fresh
        if dims is None or d.is_fake or is_symbol_creation_observed(env):
            return None
        assert fresh is not None
        cache = fresh.cache_of(policy)
        if cache:
            return None  # torch looks up the cached symbols
        size: Any = d.size
        stride: Any = d.stride
        offset: Any = d.storage_offset
        key = dims, size, stride, offset, dtype, d.is_view
        layout = self._layouts.get(key)
        if (
            layout is not None
            and layout.version == env._replacements_version_counter
            and layout.symbols <= env.val_to_var.items()
        ):
            fresh.record_reuse(layout.made.requests, source, cache)
            return layout
        if len(size) != len(stride) or not all(
            type(n) is int and 0 <= n <= _MAX_INT for n in (*size, *stride, offset)
        ):
            return None
        made = fresh.make_dims(size, stride, offset, source, dims, policy)
        if made is None:
            return None
        symbols = {
            each.value: each.symbol for each in made.requests if type(each.symbol) is sympy.Symbol
        }
        layout = _NewLayout(
            made,
            None if d.is_view else storage_nbytes(env, made.size, made.stride, dtype.itemsize),
            symbols.items(),
            env._replacements_version_counter,
        )
        if DimDynamic.DYNAMIC not in dims:
            self._layouts[key] = layout
        return layout

    def _dims_of(self, d: MetaTensorDesc, policy: Policy) -> Dims | None:
        """Policies of the dims; ``None`` if the policy has other settings or another ndim."""
        ndim = len(d.size)
        if policy is None:
            return (DimDynamic.DUCK,) * ndim
        if type(policy) is not ContextDesc:
            return common_dims(policy, ndim)
        if policy not in self._dims:
            self._dims[policy] = common_dims(decode_context(policy), len(policy.dynamic_sizes))
        dims = self._dims[policy]
        return dims if dims is not None and len(dims) == ndim else None

    # --- existing symbols -----------------------------------------------------------------------

    def _cached_meta(self, d: MetaTensorDesc, dtype: torch.dtype) -> torch.Tensor | None:
        """A meta tensor of the layout of an earlier one."""
        if d.source is not None:
            return None  # tracers identify an input's sizes by their nodes, which are shared here
        layout = self._layouts.get(_key_of(d, dtype))
        return None if layout is None else meta_of(layout.size, layout.stride, dtype, layout.nbytes)

    def add(self, d: MetaTensorDesc, meta: torch.Tensor) -> None:
        """Add the layout of a meta tensor over existing or carried symbols, made from a record."""
        env: Any = self._env
        if self._sizes is None or not is_plain_whole(d):
            return
        if d.storage is None or d.storage.nbytes == 0 or is_symbol_creation_observed(env):
            return
        size, stride = tuple(meta.size()), meta.stride()
        nbytes: Any = meta.untyped_storage().nbytes()
        symbolic: list[Any] = [n for n in (*size, *stride, nbytes) if type(n) is not int]
        if type(nbytes) is not int and all(
            type(n.node) is SymNode and type(n.node.hint) is int for n in symbolic
        ):
            key = _key_of(d, meta.dtype)
            self._layouts[key] = _CachedLayout(size, stride, nbytes, (d.size, d.stride))

    # --- views ----------------------------------------------------------------------------------

    def can_be_viewed(self, d: MetaTensorDesc) -> bool:
        """Whether `view` can make the view of a record, if its base has been made."""
        base = d.base
        return (
            base is not None
            and d.is_view
            and d.marks is None
            and d.storage is not None
            and (d.storage is base.storage or d.storage == base.storage)
            and d.dtype == base.dtype
            and d.device == base.device
            and (d.is_leaf or (d.requires_grad and base.requires_grad))
            and (d.creation_meta is None or d.creation_meta in _CREATION_METAS)
            and is_plain(d)
            and is_plain_whole(base)
            and not (self._fresh is not None and (d.is_fake or 0 in d.size))
            and _has_autograd()
            and not _has_ambient_modes()
        )

    def view(
        self,
        d: MetaTensorDesc,
        base: FakeTensor,
        meta: torch.Tensor,
        device: FakeDevice,
        source: Source | None,
        policy: Policy,
    ) -> FakeTensor | None:
        """The view of a record that `can_be_viewed`; guards are suppressed by the caller.

        Args:
            d: the record.
            base: the fake tensor of its base.
            meta: the meta tensor on the storage of the base.
            device: of both.
            source: of the view.
            policy: as for `leaf`.
        """
        shared = meta.untyped_storage()
        if shared is not base.untyped_storage():
            return None
        geometry = self._view_geometry(d, shared, source, policy)
        if geometry is None:
            return None
        had_grad = torch.is_grad_enabled()
        torch_dispatch.set_grad_enabled(not d.is_leaf)
        try:
            with self._meta_dispatch.on(device, meta):
                view: Any = base.as_strided(*geometry)
        except (RuntimeError, TypeError):
            return None  # the walk raises the error
        finally:
            torch_dispatch.set_grad_enabled(had_grad)
        if d.is_leaf and d.requires_grad:
            view.requires_grad = True
        set_attributes(d, view)
        torch_dispatch.set_creation_meta(view, _CREATION_METAS[d.creation_meta or "DEFAULT"])
        return view

    def _view_geometry(
        self, d: MetaTensorDesc, shared: torch.UntypedStorage, source: Source | None, policy: Policy
    ) -> Any:
        """Sizes, strides and offset of a view, or ``None``."""
        if self._fresh is not None:
            dtype = DTYPES.get(d.dtype)
            if source is None or dtype is None:
                return None
            layout = self._new_layout(d, dtype, source, policy)
            return None if layout is None else self._fresh.numbers(layout.made)
        if self._sizes is not None:
            return self._sizes.existing_geometry(d)
        assert d.storage is not None
        whole = shared.nbytes() == d.storage.nbytes
        return (d.size, d.stride, d.storage_offset) if whole else None


def _static_meta(d: MetaTensorDesc, dtype: torch.dtype) -> torch.Tensor | None:
    """The meta tensor of integer sizes that fill the recorded storage."""
    assert d.storage is not None
    size: Any = d.size
    stride: Any = d.stride
    try:
        meta = empty_strided(size, stride, dtype=dtype, device=META)
    except (RuntimeError, TypeError):
        return None  # the walk raises the error
    return meta if meta.untyped_storage().nbytes() == d.storage.nbytes else None


def _key_of(d: MetaTensorDesc, dtype: torch.dtype) -> tuple[Any, ...]:
    """Key of a layout over existing or carried symbols."""
    env = d.symbols[0].shape_env if d.symbols else None
    return dtype, env, _number_key(d.size), _number_key(d.stride)


def _number_key(numbers: tuple[IntLike, ...]) -> tuple[Any, ...]:
    """Key of numbers: integers by value, symbolic ones by the identity of their expression."""
    return tuple([(id(n.expr), n.hint, type(n.hint)) if type(n) is SymDesc else n for n in numbers])


def _has_ambient_modes() -> bool:
    """Whether a mode or setting that changes the construction of tensors is active."""
    return (
        torch.is_inference_mode_enabled()
        or torch_dispatch.functionalize_included()
        or torch_dispatch.peek_interpreter_stack() is not None
        or is_exporting()
        or FakeTensorConfig.debug
    )


def _has_autograd() -> bool:
    """Whether autograd sees operators on fake tensors, below no ``__torch_function__`` mode."""
    return not (
        torch_dispatch.torch_function_depth() or any(map(torch_dispatch.key_excluded, _NEEDED_KEYS))
    )
