"""The sizes of the local tensors of DTensors at another rank.

They are equal on all ranks if each sharded dim is divisible by the processes that share it. Otherwise they
are computed by torch's rule from the global size, the placements and the coordinates of the rank.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from torch_fakeify.compat import torch_distributed
from torch_fakeify.encoding.meshes import MESH, PLACEMENT, Meshes, decode_placement, mesh_coordinate
from torch_fakeify.errors import CaptureError
from torch_fakeify.records.rewrite import Rewriter, walk
from torch_fakeify.records.tensor import (
    MetaStorageDesc,
    MetaTensorDesc,
    NodeValue,
    OpaqueValue,
    SubclassDesc,
    SymDesc,
    TensorValue,
    TupleValue,
)

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from torch_fakeify.records.frame import InputDesc
    from torch_fakeify.records.graph import GraphModuleDesc
    from torch_fakeify.records.tensor import ContextDesc, IntLike, Value

_DTENSOR = "torch.distributed.tensor.DTensor"
_LOCAL = "_local_tensor"
_SHARDS = ("Shard", "_StridedShard")
_WHOLE = ("full_tensor",)
"""Methods of a DTensor that return a plain tensor of the same size on all ranks."""


class LocalSizes:
    """Rewrites DTensors from one rank to another.

    Attributes:
        changed: ids of the DTensors whose local sizes differ between ranks.
    """

    def __init__(self, old: int, new: int) -> None:
        self._old, self._new = old, new
        self._meshes = Meshes()
        self.changed: set[int] = set()

    def tensor(self, desc: MetaTensorDesc) -> MetaTensorDesc:
        """Return the record at the new rank.

        Raises:
            CaptureError: a local size differs between ranks and torch's rule does not compute it.
        """
        wrapper = desc.subclass
        if wrapper is None or wrapper.cls != _DTENSOR:
            return desc
        mesh, placements = self._sharding(wrapper)
        inner = [part for name, part in wrapper.tensors if name == _LOCAL]
        if mesh is None or len(inner) != 1:
            return desc
        size = _even_size(desc.size, mesh, placements)
        if size is not None:
            if not _fits(inner[0].size, size) and self._old != self._new:
                raise _unknown(f"there it is {list(size)}", desc, inner[0])
            return desc
        self.changed.add(desc.id)
        (local,) = inner
        if not all(isinstance(n, int) for n in (*desc.size, *local.size)):
            raise _unknown("its sizes are symbols", desc, local)
        sizes = tuple(n for n in desc.size if isinstance(n, int))
        old, new = (
            None
            if (coordinate := mesh_coordinate(mesh, rank)) is None
            else torch_distributed.local_sizes(sizes, _mesh_sizes(mesh), coordinate, placements)
            for rank in (self._old, self._new)
        )
        if old is None or new is None or local.size != old:
            raise _unknown(f"by torch's rule it is {old}", desc, local)
        changed = _resized(local, new)
        if changed is None and old == new:
            return desc
        if changed is None:
            raise _unknown("its elements are not dense in a storage of their own", desc, local)
        tensors = ((name, changed if part is local else part) for name, part in wrapper.tensors)
        return msgspec.structs.replace(
            desc,
            subclass=msgspec.structs.replace(wrapper, tensors=tuple(tensors)),
            symbolic_context=_without_base(desc.symbolic_context),
        )

    def _sharding(self, wrapper: SubclassDesc) -> tuple[Any, tuple[Any, ...]]:
        record = next((v for name, v in wrapper.opaques if name == "device_mesh"), None)
        match record, wrapper.context:
            case OpaqueValue(kind=kind), TupleValue(items=(TupleValue(items=parts), *_)) if (
                kind == MESH
            ):
                pass
            case _:
                return None, ()
        if not any(_is_shard(part) for part in parts):
            return None, ()
        mesh = self._meshes.decode(record, where="$")
        made = [
            decode_placement(part, lambda v, _: v, where="$") if _is_shard(part) else None
            for part in parts
            if isinstance(part, OpaqueValue)
        ]
        return mesh, tuple(made)


def _is_shard(part: Value) -> bool:
    if not isinstance(part, OpaqueValue) or part.kind != PLACEMENT:
        return False
    return isinstance(part.data, TupleValue) and part.data.items[:1] in [(n,) for n in _SHARDS]


def _mesh_sizes(mesh: Any) -> tuple[int, ...]:
    return tuple(axis.numel() for axis in mesh._layout.axes)


def _even_size(
    size: Sequence[IntLike], mesh: Any, placements: tuple[Any, ...]
) -> tuple[int | None, ...] | None:
    """The local size if each dim is divisible by the number of its shards; of a symbol, its hint.

    A dim without a number is ``None``. The result is ``None`` if a dim is not divisible.
    """
    shards: dict[int, int] = {}
    for n, placement in zip(_mesh_sizes(mesh), placements, strict=False):
        if placement is not None:
            dim = placement.dim % max(len(size), 1)
            shards[dim] = shards.get(dim, 1) * n
    values = [n.hint if isinstance(n, SymDesc) else n for n in size]
    local = [n if isinstance(n, int) else None for n in values]
    for dim, count in shards.items():
        value = local[dim] if dim < len(local) else 0
        if value is None or value % count:
            return None
        if dim < len(local):
            local[dim] = value // count
    return tuple(local)


def _fits(size: Sequence[IntLike], expected: tuple[int | None, ...]) -> bool:
    """Whether the numbers of a size are as expected; symbols are."""
    return len(size) == len(expected) and all(
        not isinstance(n, int) or other is None or n == other
        for n, other in zip(size, expected, strict=True)
    )


def _resized(local: MetaTensorDesc, size: tuple[int, ...]) -> MetaTensorDesc | None:
    """A dense tensor of its own storage with new sizes; ``None`` if the tensor is something else.

    Torch cuts a local tensor out of one with padding where its shard is smaller than that of others: it
    is a view then, and here a tensor of its own, as on the ranks without padding.
    """
    storage, whole = local.storage, local if local.base is None else local.base
    dtype = getattr(torch, local.dtype, None)
    if storage is None or not isinstance(dtype, torch.dtype) or local.subclass is not None:
        return None
    order = sorted(range(len(size)), key=lambda dim: (-_int(whole.stride[dim]), dim))
    is_dense = whole.stride == _dense(whole.size, order) and whole.dtype == local.dtype
    is_whole = _int(storage.nbytes) >= _count(whole.size) * dtype.itemsize
    if not is_dense or not is_whole or whole.storage is not storage:
        return None
    if (local.storage_offset, whole.storage_offset) != (0, 0):
        return None
    return msgspec.structs.replace(
        local,
        size=size,
        stride=_dense(size, order),
        storage=msgspec.structs.replace(storage, nbytes=_count(size) * dtype.itemsize),
        is_view=False,
        base=None,
        creation_meta=None,
        view_calls=None,
    )


def _without_base(context: ContextDesc | None) -> ContextDesc | None:
    """The context of a DTensor whose local tensor is no view."""
    if context is None:
        return None
    inner = tuple(
        (name, each and msgspec.structs.replace(each, view_base_context=None))
        for name, each in context.inner_contexts
    )
    return msgspec.structs.replace(context, inner_contexts=inner)


def _int(n: IntLike) -> int:
    return n if isinstance(n, int) else -1


def _count(size: Sequence[IntLike]) -> int:
    return math.prod(_int(n) for n in size)


def _dense(size: Sequence[IntLike], order: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor whose dims are in an order, the outermost first."""
    strides, step = [0] * len(size), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(_int(size[dim]), 1)
    return tuple(strides)


def _unknown(why: str, desc: MetaTensorDesc, local: MetaTensorDesc) -> CaptureError:
    name = "an intermediate tensor" if desc.source is None else desc.source.name
    return CaptureError(
        "the size of a local tensor depends on the rank, and is not known for another one",
        where=name,
        expected=f"a local tensor of {list(desc.size)} as torch shards it: {why}",
        found=repr(local),
        fix="Record the frame on the rank that it is for",
    )


def renumbered(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return records with ids of tensors and storages in the order in which they are met."""
    new: dict[tuple[type[Any], int], int] = {}
    counts = {MetaTensorDesc: 0, MetaStorageDesc: 0}
    for record in walk(parts, (MetaTensorDesc, MetaStorageDesc), inside=True):
        kind = type(record)
        if (kind, record.id) not in new:
            new[kind, record.id] = counts[kind]
            counts[kind] += 1

    def change(part: Any) -> Any:
        if isinstance(part, (MetaTensorDesc, MetaStorageDesc)):
            return msgspec.structs.replace(part, id=new[type(part), part.id])
        return part

    return Rewriter(change)(parts)


# --- graphs ---------------------------------------------------------------------------------------


def refuse_local_sizes_in_graph(
    inputs: Sequence[InputDesc], graph: GraphModuleDesc, changed: Set[int]
) -> None:
    """Raise if a tensor of a frame other than the ``changed`` DTensors has a size that depends on the rank.

    Raises:
        CaptureError: the graph takes a local tensor out of such a DTensor, or makes one of a local tensor.
    """
    wrappers = [t for t in walk((inputs, graph), MetaTensorDesc, inside=True) if t.id in changed]
    parts = [part for t in wrappers if t.subclass for _, part in t.subclass.tensors]
    storages = {part.storage.id for part in parts if part.storage is not None}
    sizes: dict[int, IntLike] = {}
    for storage in walk((inputs, graph), MetaStorageDesc):
        if (
            storage.id in storages
            and sizes.setdefault(storage.id, storage.nbytes) != storage.nbytes
        ):
            raise _in_graph("a storage that other tensors share")
    for each in inputs:
        tensor = each.tensor
        if tensor is None or tensor.subclass is not None or tensor.storage is None:
            continue
        if tensor.storage.id in storages:
            raise _in_graph(f"the input {each.name}")
    for each in graph.graphs():
        _check_graph(each, changed)


def _check_graph(graph: GraphModuleDesc, changed: Set[int]) -> None:
    is_uneven: list[bool] = []
    for fx_node in graph.nodes:
        tensors = [v.tensor for v in walk(fx_node.meta, TensorValue)]
        is_uneven.append(any(t.id in changed for t in tensors))
        if fx_node.op in ("placeholder", "get_attr", "output") or fx_node.target in _WHOLE:
            continue
        args = walk((fx_node.args, fx_node.kwargs), NodeValue)
        from_uneven = any(is_uneven[v.index] for v in args if v.index < len(is_uneven) - 1)
        is_plain = any(t.subclass is None for t in tensors)
        if (from_uneven and is_plain) or (is_uneven[-1] and not from_uneven):
            raise _in_graph(f"the node {fx_node.name}")


def _in_graph(where: str) -> CaptureError:
    return CaptureError(
        "the graph has a size that depends on the rank",
        where=where,
        expected="tensors whose local sizes are equal on all ranks, or used in DTensors alone",
        found="a local tensor of an uneven shard",
        fix="Record the frame on the rank that it is for",
    )
