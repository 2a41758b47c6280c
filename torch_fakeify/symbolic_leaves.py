"""Plain leaves in a ``ShapeEnv``: tensors of a storage of their own, by the common policies.

A model has many tensors of few layouts. Where equal sizes share their symbols, the second tensor of
a layout differs from the first in its name only: it gets the same expressions, an entry for each of
its sources, a storage of its own, and an alias of the first one's shape.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import sympy
import torch

from . import _torch
from ._torch import (
    DimDynamic,
    FakeTensor,
    StatefulSymbolicContext,
    SymNode,
    empty_strided,
    experimental_config,
    no_dispatch_guard,
    without_keys,
)
from .contexts import decode_context, plain_sizes
from .desc import ContextDesc
from .fakes import DTYPES, META
from .fresh_sizes import common_dims, reuse_is_watched
from .layouts import ABOVE_META, Stock, aliases_of, meta_of, on_own_storages, set_storage
from .plain_fakes import fake_of, is_changed, is_plain_real_leaf

if TYPE_CHECKING:
    from collections.abc import Callable, ItemsView

    from ._torch import ShapeEnv, Source, SymbolicContext
    from .desc import MetaTensorDesc
    from .fakes import FakeDevice
    from .fresh_sizes import Dims, FreshGeometry, FreshSizes, Part
    from .identities import StoragesMade
    from .layouts import Layouts

__all__ = ["Prototype", "SymbolicLeaves"]

_Key = tuple["ContextDesc | Dims | None", Any, Any, torch.dtype, Any]
"""The record of a policy, or which dims are dynamic; sizes, strides, dtype, the offset of a view."""
_COMMON = {dim.name: dim for dim in (DimDynamic.DUCK, DimDynamic.DYNAMIC, DimDynamic.STATIC)}
_Layout = tuple[Any, Any, Any]
"""Sizes, strides and storage offset."""
_MORE: Any = object()
"""Instead of what a policy asks for, where no prototype serves it."""
_MAX_INT = 2**63 - 1
_new = object.__new__

# C++ asks nodes for them; these answer in C: ``None``, ``True``, and that the name of a file is no number.
_NO_INT: Any = [].clear
_YES: Any = True.__bool__
_HOLDS_AT: Any = operator.ne


class _Mold(SymNode):
    """A size or stride of a prototype, of which each alias gets a node of its own.

    C++ clones the nodes of the sizes and strides that it gives to a tensor. Torch's own are their own
    clones, but tracers tell the sizes of two tensors apart by their nodes.
    """

    values: tuple[Any, ...] | None = None
    """Of `_FIELDS`, once the prototype has been made, which takes the molds themselves."""
    cast: type[SymNode] = SymNode
    """The class of its nodes."""

    def clone(self) -> SymNode:
        if self.values is None:
            return self
        # Without the constructor, which looks at each argument; one by one, so that Python keeps
        # them without a dictionary.
        node: Any = _new(self.cast)
        (
            node._expr,
            node.shape_env,
            node.pytype,
            node._optimized_summation,
            node._expr_ver,
            node._expr_cache,
            node._hint,
            node.constant,
            node.fx_node,
        ) = self.values
        return node

    maybe_as_int, is_int = _NO_INT, _YES


_FIELDS = (
    "_expr",
    "shape_env",
    "pytype",
    "_optimized_summation",
    "_expr_ver",
    "_expr_cache",
    "_hint",
    "constant",
    "fx_node",
)
"""The attributes of a node, as `_Mold.clone` sets them."""
_FIELD_SET = frozenset(_FIELDS)


class _OffsetMold(_Mold):
    """The same of a storage offset: its nodes are `_Offset` at first."""


class _Holds(SymNode):
    """A condition that holds."""

    is_bool = _YES
    guard_or_true = guard_bool = guard_or_false = expect_true = _HOLDS_AT


_ZERO = SymNode(sympy.Integer(0), None, int, 0, constant=0)
_HOLDS = _Holds(sympy.true, None, bool, True, constant=True)


class _Numbers(dict[int, SymNode]):
    """The nodes of integers."""

    def __missing__(self, num: int) -> SymNode:
        return _ZERO.wrap_int(num)


class _Offset(SymNode):
    """The offset of a view until it has the storage of its base.

    C++ asks then whether it is negative, which no offset of a record is.
    """

    maybe_as_int, is_int = _NO_INT, _YES
    wrap_int: Any = _Numbers({0: _ZERO}).__getitem__

    def ge(self, other: SymNode) -> SymNode:
        return _HOLDS if other is _ZERO else SymNode.ge(self, other)  # pyright: ignore[reportAttributeAccessIssue]


_OffsetMold.cast = _Offset


class Prototype(NamedTuple):
    """What the tensors of one layout have in common."""

    parts: tuple[Part, ...]
    symbolic: tuple[Part, ...]
    """Those that are symbols."""
    of_values: ItemsView[int, sympy.Symbol]
    """The symbols, each with the number that it stands for."""
    counts: dict[sympy.Symbol, int]
    """A zero for each symbol."""
    has_zero_one: bool
    """Whether a dim that could be dynamic is none because of its size."""
    version: int
    """Of what the ``ShapeEnv`` replaces in expressions."""
    stock: Stock[torch.Tensor] | None
    """Where sizes or strides are symbolic, more of them."""
    views: Stock[tuple[torch.Tensor, Any]] | None
    """The same of views, which get a storage, each with the node of its storage offset."""


class _Single(NamedTuple):
    """The one tensor of a layout so far: most layouts of a model without duck sizes occur once."""

    dims: Dims
    made: FreshGeometry
    nbytes: Any
    version: int
    """As that of a prototype."""


class SymbolicLeaves:
    """Makes the plain leaves of one converter, equal to what `convert.MetaConverter` makes of them."""

    def __init__(self, shape_env: ShapeEnv, fresh: FreshSizes, layouts: Layouts) -> None:
        self._env: Any = shape_env
        self._fresh = fresh
        self._layouts = layouts
        self._known: dict[_Key, Prototype] = {}
        self._singles: dict[_Key, _Single] = {}
        """Each becomes a prototype as the second tensor of its layout comes."""
        self._dims: dict[ContextDesc, Dims | None] = {}
        """Of the records of policies; ``None`` if they ask for more."""

    def make(
        self,
        d: MetaTensorDesc,
        device_of: Callable[[MetaTensorDesc], FakeDevice],
        storages: StoragesMade,
        source: Source,
        policy: SymbolicContext | ContextDesc | None,
        *,
        quiet: bool = False,
    ) -> tuple[FakeTensor, torch.Tensor] | None:
        """A fake tensor and its meta tensor, or ``None`` where the plain path has to make them.

        Args:
            d: the record.
            device_of: gives the device of the tensor.
            storages: those that there are, by number; the new one is added.
            source: of the tensor.
            policy: a symbolic context, or the record of one that is stateless.
            quiet: whether nothing is active around the call and nobody watches, as was just seen:
                `views_are_as_ever` and `is_alone` hold, and `known_view` found one.
        """
        storage, requires_grad = d.storage, d.requires_grad
        if (
            storage is None
            or storage.id in storages.entries
            or not is_plain_real_leaf(d)
            or type(storage.nbytes) is not int
            or not 0 < storage.nbytes <= _MAX_INT
            or (not quiet and (is_changed() or _torch.torch_function_depth()))
        ):
            return None
        dtype = DTYPES.get(d.dtype)
        if dtype is None or (requires_grad and not (dtype.is_floating_point or dtype.is_complex)):
            return None
        device = device_of(d)
        meta = self._meta(d, dtype, source, policy, quiet)
        if meta is None:
            return None
        fake = fake_of(d, meta, device, requires_grad=requires_grad)
        storages.add(storage.id, meta.untyped_storage())
        return fake, meta

    def _meta(
        self,
        d: MetaTensorDesc,
        dtype: torch.dtype,
        source: Source,
        policy: SymbolicContext | ContextDesc | None,
        quiet: bool,
    ) -> torch.Tensor | None:
        key = (self._asked(d, policy), d.size, d.stride, dtype, None)
        known = self._known.get(key) or self._learned(key)
        if known is None or not self._serves(known, quiet=quiet):
            dims = self._dims_of(d, policy)
            return None if dims is None else self._first(key, dims, source, policy)
        cache = None
        if type(policy) is StatefulSymbolicContext:
            cache = self._fresh.cache_of(policy)
            if cache:
                return None  # made before: torch looks its symbols up
        self._fresh.again(known.parts, known.symbolic, known.counts, source, cache)
        return _like(known, key, quiet=quiet)

    def takes(self, d: MetaTensorDesc, policy: SymbolicContext | ContextDesc | None) -> bool:
        """Whether the policy asks for no more than which dims are dynamic."""
        return self._dims_of(d, policy) is not None

    def known_view(
        self, d: MetaTensorDesc, policy: SymbolicContext | ContextDesc | None
    ) -> Prototype | None:
        """What the view of a real tensor has in common with one that there was before it.

        Then its numbers are in order, and `takes` holds.
        """
        key, storage = self._view_key(d, policy), d.storage
        if key is None or storage is None:
            return None
        if type(storage.nbytes) is not int or not 0 <= storage.nbytes <= _MAX_INT:
            return None
        known = self._known.get(key) or self._learned(key)
        return (
            known if known is not None and known.views is not None and self._serves(known) else None
        )

    def view_like(
        self, known: Prototype, meta: torch.Tensor, source: Source, *, quiet: bool
    ) -> torch.Tensor:
        """A meta tensor as one that there was before, on the storage of ``meta``."""
        assert known.views is not None
        self._fresh.again(known.parts, known.symbolic, known.counts, source, None)
        view, offset = known.views.take(quiet=quiet)
        try:
            set_storage(view, meta)
        finally:
            if type(offset) is _Offset:
                offset.__class__ = SymNode  # pyright: ignore[reportAttributeAccessIssue]
        return view

    def view(
        self, d: MetaTensorDesc, source: Source, policy: SymbolicContext | ContextDesc | None
    ) -> _Layout | None:
        """Sizes, strides and offset of the view of a real tensor, once its symbols are noted.

        ``None`` where the plain path has to make them.
        """
        size: Any = d.size
        stride: Any = d.stride
        offset: Any = d.storage_offset
        key, dims = self._view_key(d, policy), self._dims_of(d, policy)
        if key is None or dims is None:
            return None
        if not all(type(n) is int and 0 <= n <= _MAX_INT for n in (*size, *stride, offset)):
            return None
        made = self._fresh.make_dims(size, stride, offset, source, dims, None)
        if made is None:
            return None
        self._keep(key, dims, made, 0)
        return made.size, made.stride, made.storage_offset

    def _view_key(
        self, d: MetaTensorDesc, policy: SymbolicContext | ContextDesc | None
    ) -> _Key | None:
        dtype = DTYPES.get(d.dtype)
        if dtype is None or type(policy) is StatefulSymbolicContext:
            return None
        return self._asked(d, policy), d.size, d.stride, dtype, d.storage_offset

    def _asked(
        self, d: MetaTensorDesc, policy: SymbolicContext | ContextDesc | None
    ) -> ContextDesc | Dims | None:
        """What tells a policy from others that ask for no more than which dims are dynamic."""
        if policy is None or type(policy) is ContextDesc:
            return policy
        dims = self._dims_of(d, policy)
        return _MORE if dims is None else dims

    def _dims_of(
        self, d: MetaTensorDesc, policy: SymbolicContext | ContextDesc | None
    ) -> Dims | None:
        """Which dims are dynamic; ``None`` if the policy asks for more, or of other tensors."""
        ndim = len(d.size)
        if policy is None:
            return (DimDynamic.DUCK,) * ndim
        if type(policy) is not ContextDesc:
            return common_dims(policy, ndim)
        if policy not in self._dims:
            names = plain_sizes(policy)
            self._dims[policy] = (
                common_dims(decode_context(policy), len(policy.dynamic_sizes))
                if names is None or not _COMMON.keys() >= set(names)
                else tuple([_COMMON[name] for name in names])
            )
        dims = self._dims[policy]
        return dims if dims is not None and len(dims) == ndim else None

    def _serves(self, known: Prototype, *, quiet: bool = False) -> bool:
        env = self._env
        return (
            known.version == env._replacements_version_counter
            and known.of_values <= env.val_to_var.items()
            and (quiet or not reuse_is_watched(env))
            and not (known.has_zero_one and experimental_config.backed_size_oblivious)
        )

    def _first(self, key: _Key, dims: Dims, source: Source, policy: object) -> torch.Tensor | None:
        """A meta tensor without a prototype, of which one is made if it can be."""
        _, size, stride, dtype, _ = key
        if len(size) != len(stride) or not all(
            type(n) is int and 0 <= n <= _MAX_INT for n in (*size, *stride)
        ):
            return None
        made = self._fresh.make_dims(size, stride, 0, source, dims, policy)
        if made is None:
            return None
        guard = no_dispatch_guard()
        try:
            meta = self._layouts.fresh(made, size, stride, dtype)
            if meta is None:
                meta = empty_strided(made.size, made.stride, dtype=dtype, device=META)
        finally:
            del guard
        self._keep(key, dims, made, meta.untyped_storage().nbytes())
        return meta

    def _keep(self, key: _Key, dims: Dims, made: FreshGeometry, nbytes: Any) -> None:
        if DimDynamic.DYNAMIC not in dims:
            self._known.pop(key, None)
            version = self._env._replacements_version_counter
            self._singles[key] = _Single(dims, made, nbytes, version)

    def _learned(self, key: _Key) -> Prototype | None:
        """The prototype that the one tensor of a layout gives, if it gives one."""
        single = self._singles.pop(key, None)
        if single is None:
            return None
        _, size, _, dtype, view_offset = key
        dims, made, nbytes, version = single
        offset = made.storage_offset
        own: tuple[Any, ...] = () if view_offset is not None else (nbytes,)
        nodes = [n.node for n in (*made.size, *made.stride, offset, *own) if type(n) is not int]
        symbolic = tuple([part for part in made.parts if isinstance(part.symbol, sympy.Symbol)])
        of_values = {part.value: part.symbol for part in symbolic}
        if own and (type(offset) is not int or (nodes and type(nbytes) is int)):
            return None
        replaces = bool(self._env.replacements)
        if not all(_can_be_mold(node, replaces=replaces) for node in nodes):
            return None
        shape = _molded(made, dtype) if nodes else None
        known = Prototype(
            parts=made.parts,
            symbolic=symbolic,
            of_values=of_values.items(),
            counts=dict.fromkeys(of_values.values(), 0),
            has_zero_one=any(
                n < 2 and dim is not DimDynamic.STATIC for n, dim in zip(size, dims, strict=True)
            ),
            version=version,
            stock=Stock(partial(on_own_storages, shape, nbytes))
            if shape is not None and own
            else None,
            views=Stock(partial(_views, shape)) if shape is not None and not own else None,
        )
        if not self._serves(known):
            return None
        self._known[key] = known
        return known


def _can_be_mold(node: Any, *, replaces: bool) -> bool:
    """Whether it is symbolic, also after what the ``ShapeEnv`` replaces in expressions, if it does."""
    return (
        type(node) is SymNode
        and vars(node).keys() == _FIELD_SET
        and type(node.hint) is int
        and not (node.expr if replaces else vars(node)["_expr"]).is_number
    )


def _molded(made: FreshGeometry, dtype: torch.dtype) -> torch.Tensor:
    """A meta tensor whose aliases get nodes of their own. Its storage is not used."""
    molds: list[_Mold] = []
    guard = no_dispatch_guard()

    def mold(n: Any, cls: type[_Mold] = _Mold) -> Any:
        if type(n) is int:
            return n
        made = _new(cls)
        vars(made).update(vars(n.node))
        molds.append(made)
        return torch.SymInt(made)

    size = tuple([mold(n) for n in made.size])
    stride = tuple([mold(n) for n in made.stride])
    offset = mold(made.storage_offset, _OffsetMold)
    shape = meta_of(size, stride, dtype, 0, storage_offset=offset)
    for each in molds:
        each.values = tuple([vars(each)[name] for name in _FIELDS])
    del guard
    return shape


def _views(shape: torch.Tensor, count: int, quiet: bool) -> list[tuple[torch.Tensor, Any]]:
    """Meta tensors that get a storage, each with the node of its storage offset, if it has one."""
    views = aliases_of(shape, count, quiet=quiet)
    offsets: list[Any] = [view.storage_offset() for view in views]
    return [(v, None if type(n) is int else n.node) for v, n in zip(views, offsets, strict=True)]


def _like(known: Prototype, key: _Key, *, quiet: bool) -> torch.Tensor:
    """A meta tensor like a prototype, on a storage of its own."""
    if known.stock is None:
        _, size, stride, dtype, _ = key
        guard = without_keys(ABOVE_META)
        try:
            return empty_strided(size, stride, dtype=dtype, device=META)
        finally:
            del guard
    return known.stock.take(quiet=quiet)
