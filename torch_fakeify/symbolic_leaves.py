"""Plain leaves in a ``ShapeEnv``: tensors of a storage of their own, by the common policies.

A model has many tensors of few layouts. Where equal sizes share their symbols, the second tensor of
a layout differs from the first in its name only: it gets the same expressions, an entry for each of
its sources, a storage of its own, and an alias of the first one's shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import sympy
import torch

from . import _torch
from ._torch import (
    DimDynamic,
    DispatchKey,
    DispatchKeySet,
    FakeTensor,
    StatefulSymbolicContext,
    StatelessSymbolicContext,
    SymNode,
    empty_strided,
    experimental_config,
    make_wrapper_subclass,
    no_dispatch_guard,
    without_keys,
)
from .contexts import decode_context
from .desc import ContextDesc
from .fakes import DTYPES, META
from .fresh_sizes import common_dims, reuse_is_watched
from .layouts import Shell, meta_of
from .plain_fakes import fake_of, is_changed, is_plain_leaf
from .static_fakes import set_storage

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._torch import ShapeEnv, Source, SymbolicContext
    from .desc import MetaTensorDesc
    from .fakes import FakeDevice
    from .fresh_sizes import Dims, FreshGeometry, FreshSizes, Part
    from .identities import StoragesMade
    from .layouts import Layouts

__all__ = ["SymbolicLeaves"]

_Key = tuple[Any, Any, torch.dtype, int | None]
"""Sizes, strides, dtype, and the storage offset of a view."""
_Layout = tuple[Any, Any, Any]
"""Sizes, strides and storage offset."""
_MAX_INT = 2**63 - 1
_new = object.__new__

# Below them nothing of autograd, of a dispatch mode or of a Python dispatcher sees an operator.
_ABOVE_META = (
    DispatchKeySet(DispatchKey.AutogradFunctionality)
    | DispatchKeySet(DispatchKey.ADInplaceOrView)
    | DispatchKeySet(DispatchKey.Python)
    | DispatchKeySet(DispatchKey.PythonTLSSnapshot)
    | DispatchKeySet(DispatchKey.PythonDispatcher)
)


# C++ asks nodes for them; these answer in C: ``None``, and ``True``.
_NO_INT: Any = [].clear
_YES: Any = True.__bool__


class _Mold(SymNode):
    """A size or stride of a prototype, of which each alias gets a node of its own.

    C++ clones the nodes of the sizes and strides that it gives to a tensor. Torch's own are their own
    clones, but tracers tell the sizes of two tensors apart by their nodes.
    """

    fields: dict[str, Any] | None = None
    """Of a node, once the prototype has been made, which takes the molds themselves."""

    def clone(self) -> SymNode:
        if self.fields is None:
            return self
        node = _new(SymNode)
        node.__dict__ = self.fields.copy()  # without the constructor, which looks at each argument
        return node

    maybe_as_int, is_int = _NO_INT, _YES


class _OffsetMold(_Mold):
    """The same of a storage offset."""

    last: _Offset | None = None
    """The node that it made last."""

    def clone(self) -> SymNode:
        if self.fields is None:
            return self
        self.last = node = _new(_Offset)
        node.__dict__ = self.fields.copy()
        return node

    def settle(self) -> None:
        """Make an ordinary node of the last one."""
        node: Any = self.last
        if node is not None:
            node.__class__ = SymNode
            self.last = None


class _Offset(SymNode):
    """The offset of a view until it has the storage of its base.

    C++ asks then whether it is negative, which no offset of a record is.
    """

    maybe_as_int, is_int = _NO_INT, _YES

    def wrap_int(self, num: int) -> SymNode:
        return _ZERO if num == 0 else super().wrap_int(num)

    def ge(self, other: SymNode) -> SymNode:
        return _HOLDS if other is _ZERO else SymNode.ge(self, other)  # pyright: ignore[reportAttributeAccessIssue]


class _Holds(SymNode):
    """A condition that holds."""

    is_bool = _YES

    def guard_or_true(self, file: str, line: int) -> bool:  # noqa: ARG002
        return True

    guard_bool = guard_or_false = expect_true = guard_or_true


_ZERO = SymNode(sympy.Integer(0), None, int, 0, constant=0)
_HOLDS = _Holds(sympy.true, None, bool, True, constant=True)


class _Prototype(NamedTuple):
    """What the tensors of one layout have in common."""

    parts: tuple[Part, ...]
    symbolic: tuple[Part, ...]
    """Those that are symbols."""
    has_zero_one: bool
    """Whether a dim that could be dynamic is none because of its size."""
    version: int
    """Of what the ``ShapeEnv`` replaces in expressions."""
    shape: torch.Tensor | None
    """A meta tensor over molds; ``None`` where all sizes and strides are integers."""
    offset: _OffsetMold | None
    """That of its storage offset, if it is symbolic."""
    nbytes: Any
    """Of the storage."""


class _Group(NamedTuple):
    """The layouts of one policy."""

    dims: Dims
    known: dict[_Key, _Prototype]
    seen: set[_Key]
    """The second tensor of a layout becomes its prototype."""


class SymbolicLeaves:
    """Makes the plain leaves of one converter, equal to what `convert.MetaConverter` makes of them."""

    def __init__(self, shape_env: ShapeEnv, fresh: FreshSizes, layouts: Layouts) -> None:
        self._env: Any = shape_env
        self._fresh = fresh
        self._layouts = layouts
        self._groups: dict[Dims, _Group] = {}
        self._group_of: dict[ContextDesc | int, _Group | None] = {}
        """By the record of a policy; without one, every dim is as large as others that are equal."""

    def make(
        self,
        d: MetaTensorDesc,
        device_of: Callable[[MetaTensorDesc], FakeDevice],
        storages: StoragesMade,
        source: Source,
        policy: SymbolicContext | ContextDesc | None,
    ) -> tuple[FakeTensor, torch.Tensor] | None:
        """A fake tensor and its meta tensor, or ``None`` where the plain path has to make them.

        Args:
            d: the record.
            device_of: gives the device of the tensor.
            storages: those that there are, by number; the new one is added.
            source: of the tensor.
            policy: a symbolic context, or the record of one that is stateless.
        """
        storage, dtype = d.storage, DTYPES.get(d.dtype)
        if (
            storage is None
            or dtype is None
            or storage.id in storages.entries
            or d.is_fake
            or d.scalar_hint is not None
            or not is_plain_leaf(d)
            or type(storage.nbytes) is not int
            or not 0 < storage.nbytes <= _MAX_INT
            or (d.requires_grad and not (dtype.is_floating_point or dtype.is_complex))
            or is_changed()
            or _torch.torch_function_depth()
        ):
            return None
        device = device_of(d)
        meta = self._meta(d, dtype, source, policy)
        if meta is None:
            return None
        fake = fake_of(d, meta, device, requires_grad=d.requires_grad)
        storages.add(storage.id, meta.untyped_storage())
        return fake, meta

    def _meta(
        self,
        d: MetaTensorDesc,
        dtype: torch.dtype,
        source: Source,
        policy: SymbolicContext | ContextDesc | None,
    ) -> torch.Tensor | None:
        group = self._group_for(d, policy)
        if group is None:
            return None
        key = (d.size, d.stride, dtype, None)
        known = group.known.get(key)
        if known is None or not self._serves(known):
            return self._first(key, group, source, policy)
        cache = self._fresh.cache_of(policy)
        if cache:
            return None  # made before: torch looks its symbols up
        self._fresh.again(known.symbolic if cache is None else known.parts, source, cache)
        return _alias(known, key)

    def takes(self, d: MetaTensorDesc, policy: SymbolicContext | ContextDesc | None) -> bool:
        """Whether the policy asks for no more than which dims are dynamic."""
        return self._group_for(d, policy) is not None

    def view(
        self,
        d: MetaTensorDesc,
        meta: torch.Tensor,
        source: Source,
        policy: SymbolicContext | ContextDesc | None,
    ) -> torch.Tensor | _Layout | None:
        """What the view of a real tensor is to be like, once its symbols are noted.

        A meta tensor of its shape on the storage of ``meta``, where there was such a view before;
        else sizes, strides and storage offset, or ``None`` where the plain path has to make them.
        """
        size: Any = d.size
        stride: Any = d.stride
        offset: Any = d.storage_offset
        group, dtype = self._group_for(d, policy), DTYPES.get(d.dtype)
        if group is None or dtype is None or type(policy) is StatefulSymbolicContext:
            return None
        key = (size, stride, dtype, offset)
        known = group.known.get(key)
        if known is not None and self._serves(known) and known.shape is not None:
            self._fresh.again(known.symbolic, source, None)
            try:
                with without_keys(_ABOVE_META):
                    view = known.shape[...]
                    set_storage(view, meta)
            finally:
                if known.offset is not None:
                    known.offset.settle()
            return view
        if not all(type(n) is int and 0 <= n <= _MAX_INT for n in (*size, *stride, offset)):
            return None
        made = self._fresh.make_dims(size, stride, offset, source, group.dims, None)
        if made is None:
            return None
        if key not in group.seen:
            group.seen.add(key)
        elif DimDynamic.DYNAMIC not in group.dims:
            guard = no_dispatch_guard()
            try:
                self._learn(key, group, made, 0)
            finally:
                del guard
        return made.size, made.stride, made.storage_offset

    def _group_for(
        self, d: MetaTensorDesc, policy: SymbolicContext | ContextDesc | None
    ) -> _Group | None:
        ndim = len(d.size)
        if isinstance(policy, StatelessSymbolicContext):
            group = self._group(ndim, policy)
        else:
            asked: Any = ndim if policy is None else policy
            group = self._group_of.get(asked)
            if group is None:
                group = self._group(ndim, policy)
                if group is not None:
                    self._group_of[asked] = group
        return group if group is not None and len(group.dims) == ndim else None

    def _group(self, ndim: int, policy: SymbolicContext | ContextDesc | None) -> _Group | None:
        """The prototypes of a policy; ``None`` if it asks for more than which dims are dynamic."""
        dims: Dims | None = (DimDynamic.DUCK,) * ndim
        if policy is not None:
            context = decode_context(policy) if type(policy) is ContextDesc else policy
            dims = common_dims(context, len(getattr(context, "dynamic_sizes", ())))
        return None if dims is None else self._groups.setdefault(dims, _Group(dims, {}, set()))

    def _serves(self, known: _Prototype) -> bool:
        env = self._env
        return (
            known.version == env._replacements_version_counter
            and self._fresh.would_be(known.symbolic)
            and not reuse_is_watched(env)
            and not (known.has_zero_one and experimental_config.backed_size_oblivious)
        )

    def _first(
        self, key: _Key, group: _Group, source: Source, policy: object
    ) -> torch.Tensor | None:
        """A meta tensor without a prototype, of which one is made if it can be."""
        size, stride, dtype, _ = key
        if len(size) != len(stride) or not all(
            type(n) is int and 0 <= n <= _MAX_INT for n in (*size, *stride)
        ):
            return None
        made = self._fresh.make_dims(size, stride, 0, source, group.dims, policy)
        if made is None:
            return None
        guard = no_dispatch_guard()
        try:
            meta = self._layouts.fresh(made, size, stride, dtype)
            if meta is None:
                meta = empty_strided(made.size, made.stride, dtype=dtype, device=META)
            if key not in group.seen:
                group.seen.add(key)  # most layouts of a model without duck sizes occur once
            elif DimDynamic.DYNAMIC not in group.dims:
                self._learn(key, group, made, meta.untyped_storage().nbytes())
        finally:
            del guard
        return meta

    def _learn(self, key: _Key, group: _Group, made: FreshGeometry, nbytes: Any) -> None:
        offset = made.storage_offset
        own: tuple[Any, ...] = () if key[3] is not None else (nbytes,)
        nodes = [n.node for n in (*made.size, *made.stride, offset, *own) if type(n) is not int]
        symbolic = tuple([part for part in made.parts if isinstance(part.symbol, sympy.Symbol)])
        if not self._fresh.would_be(symbolic) or (own and type(offset) is not int):
            return
        if own and nodes and type(nbytes) is int:
            return
        if not all(_can_be_mold(node) for node in nodes):
            return
        shape, offset_mold = _molded(made, key[2]) if nodes else (None, None)
        dims = zip(key[0], group.dims, strict=True)
        group.known[key] = _Prototype(
            parts=made.parts,
            symbolic=symbolic,
            has_zero_one=any(n < 2 and dim is not DimDynamic.STATIC for n, dim in dims),
            version=self._env._replacements_version_counter,
            shape=shape,
            offset=offset_mold,
            nbytes=nbytes,
        )


def _can_be_mold(node: Any) -> bool:
    """Whether it is symbolic, also after what the ``ShapeEnv`` replaces in expressions."""
    return type(node) is SymNode and type(node.hint) is int and not node.expr.is_number


def _molded(made: FreshGeometry, dtype: torch.dtype) -> tuple[torch.Tensor, _OffsetMold | None]:
    """A meta tensor whose aliases get nodes of their own, and the mold of its offset.

    Its storage is not used.
    """
    molds: list[_Mold] = []

    def mold(n: Any, cls: type[_Mold] = _Mold) -> Any:
        if type(n) is int:
            return n
        of = n.node
        molds.append(cls(of._expr, of.shape_env, int, of.hint))
        return torch.SymInt(molds[-1])

    size = tuple([mold(n) for n in made.size])
    stride = tuple([mold(n) for n in made.stride])
    offset = mold(made.storage_offset, _OffsetMold)
    shape = meta_of(size, stride, dtype, 0, storage_offset=offset)
    for each in molds:
        each.fields = vars(each).copy()
    return shape, None if type(offset) is int else offset.node


def _alias(known: _Prototype, key: _Key) -> torch.Tensor:
    """A meta tensor of the shape of a prototype, on a storage of its own."""
    size, stride, dtype, _ = key
    with without_keys(_ABOVE_META):
        if known.shape is None:
            return empty_strided(size, stride, dtype=dtype, device=META)
        # Below autograd this is no view: it has a version counter of its own.
        meta: torch.Tensor = known.shape[...]
    holder = make_wrapper_subclass(Shell, (0,), dtype=dtype, device=META, storage_size=known.nbytes)
    set_storage(meta, holder)
    return meta
