"""Device meshes, placements of DTensors and process groups <-> records.

A mesh is recorded with its ranks, layout, root and the names of its process groups. It is decoded like
``DeviceMesh.__setstate__``: groups are looked up by name in the process, and none is made. The rank is
that of the writer, to match the sizes of local tensors. Placements are made by torch's constructors.

Method: ``DeviceMesh.__init__`` and ``__setstate__`` of torch 2.13. A mesh of torch 2.15 may preserve
the order of its ranks, which is recorded, and refused by other versions.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from torch_fakeify.compat import torch_dispatch, torch_distributed, torch_dynamo
from torch_fakeify.errors import ConvertError, FormatError, UnknownNameError, UnsupportedValueError
from torch_fakeify.records.tensor import DictValue, OpaqueValue, TupleValue, Value

MESH = "device_mesh"
PLACEMENT = "placement"
GROUP = "process_group"
"""Kinds of ``OpaqueValue`` of this module."""

EncodePart: TypeAlias = Callable[[object, str], Value]
DecodePart: TypeAlias = Callable[[Value, str], Any]

# Recorded, and computed when decoded: the ranks as a tensor, groups by name, the coordinates of the rank,
# the hash, the id of the thread (only of the backend ``threaded``).
_ATTRIBUTES = frozenset([
    "_device_type", "_layout", "_mesh_dim_names", "_root_mesh", "_flatten_rank_map", "_flatten_mapping",
    "_dim_group_names", "_rank", "_preserve_rank_order",
    "_rank_map", "_pg_registry", "_coordinate_on_dim", "_hash", "_thread_id",
])  # fmt: skip

_PRESERVES_ORDER = "keeps_rank_order"
"""Field of a mesh whose groups preserve its order of ranks; other meshes sort them."""
_FIELDS = frozenset(
    ["device_type", "rank", "ranks", "layout", "dim_names", "groups", "root", "flattened"]
) | {_PRESERVES_ORDER}


def is_mesh(obj: object) -> bool:
    """Whether an object is exactly of class ``DeviceMesh``."""
    return _named(obj, "torch.distributed.device_mesh", "DeviceMesh")


def is_placement(obj: object) -> bool:
    """Whether an object is exactly of one of torch's placement classes."""
    module = "torch.distributed.tensor.placement_types"
    return any(_named(obj, module, name) for name in _PLACEMENTS)


def is_group(obj: object) -> bool:
    """Whether an object is exactly of class ``ProcessGroup``."""
    return _named(obj, "torch.distributed.distributed_c10d", "ProcessGroup") or _named(
        obj, "torch._C._distributed_c10d", "ProcessGroup"
    )


def _named(obj: object, module: str, name: str) -> bool:
    # By name, which does not import the module.
    cls = type(obj)
    return cls.__name__ == name and cls.__module__ == module


# --- meshes: encode -------------------------------------------------------------------------------


def encode_mesh(mesh: Any, *, where: str) -> Value:
    """The record of a ``DeviceMesh`` with its root and flattened meshes.

    Raises:
        UnsupportedValueError: it is of device type ``xla`` or has unsupported attributes.
    """
    fields = _encode_one(mesh, where)
    root = mesh._root_mesh
    if root is not None and root is not mesh:
        fields["root"] = encode_mesh(root, where=f"{where}._root_mesh")
        if mesh._flatten_mapping:
            raise UnsupportedValueError(
                "a mesh that is part of another has flattened meshes of its own", where=where
            )
        if mesh._flatten_rank_map == root._flatten_rank_map:
            del fields["ranks"]
    flattened: list[tuple[Value, Value]] = []
    for name, child in mesh._flatten_mapping.items():
        at = f"{where}._flatten_mapping[{name!r}]"
        if child._root_mesh is not mesh or child._flatten_rank_map != mesh._flatten_rank_map:
            raise UnsupportedValueError("a flattened mesh is of another mesh", where=at)
        part = _encode_one(child, at)
        del part["ranks"]
        flattened.append((name, _fields(part)))
    if flattened:
        fields["flattened"] = DictValue(items=tuple(flattened))
    return OpaqueValue(kind=MESH, data=_fields(fields))


def _fields(fields: dict[str, Value]) -> Value:
    return DictValue(items=tuple(fields.items()))


def _encode_one(mesh: Any, where: str) -> dict[str, Value]:
    """Fields of a mesh without its root and flattened meshes."""
    if "_rank" not in vars(mesh):
        raise UnsupportedValueError(
            "a device mesh has no rank",
            where=where,
            expected="a device type other than xla",
            found=repr(mesh._device_type),
        )
    unknown = sorted(vars(mesh).keys() - _ATTRIBUTES)
    if unknown:
        raise UnsupportedValueError(
            "a device mesh has attributes that have no record",
            where=where,
            found=", ".join(unknown),
        )
    names = mesh._mesh_dim_names
    groups = getattr(mesh, "_dim_group_names", None)
    layout = tuple(
        TupleValue(items=(_plain(axis.shape), _plain(axis.stride))) for axis in mesh._layout.axes
    )
    fields: dict[str, Value] = {
        "device_type": mesh._device_type,
        "rank": mesh._rank,
        "ranks": _plain(mesh._flatten_rank_map),
        "layout": TupleValue(items=layout),
        "dim_names": None if names is None else _plain(names),
        "groups": None if groups is None else _plain(groups),
    }
    if getattr(mesh, "_preserve_rank_order", False):
        fields[_PRESERVES_ORDER] = True
    return fields


def _plain(items: Any) -> Value:
    return TupleValue(items=tuple(items))


# --- meshes: decode -------------------------------------------------------------------------------


class Meshes:
    """Cache of decoded meshes: equal records give one mesh, which the tensors of a model share.

    Args:
        move: maps the name of a device to a new one, for the device types of meshes.
    """

    def __init__(self, move: Callable[[str], str] = str) -> None:
        self._cache: dict[Value, Any] = {}
        self._move = move

    def register_all(self, values: Iterable[Any]) -> None:
        """Register the live meshes among values and of the DTensors among them."""
        for value in values:
            mesh = value if is_mesh(value) else None
            if _named(value, "torch.distributed.tensor", "DTensor"):
                mesh = value.device_mesh
            if is_mesh(mesh):
                self.register(mesh)

    def register(self, mesh: Any) -> None:
        """Cache a live mesh for its record, for decoding in the same process."""
        root = mesh._root_mesh
        if root is not None:
            self.register(root)
        self._cache.setdefault(encode_mesh(mesh, where="$"), mesh)

    @contextmanager
    def apart(self) -> Generator[None, None, None]:
        """Isolate torch's sharding caches while a frame with these meshes is traced.

        Torch caches the shardings of results by equal meshes. A trace that uses an entry of another
        mesh, or a call that uses one of a trace, fails (torch 2.13).
        """
        if not self._cache:
            yield
            return
        api = torch_distributed.device_meshes()
        api.forget_shardings()
        try:
            yield
        finally:
            api.forget_shardings()

    def decode(self, v: OpaqueValue, *, where: str) -> Any:
        """The ``DeviceMesh`` of a record of :func:`encode_mesh`; no process group is made.

        Raises:
            FormatError: the ranks, layout and names do not fit together.
            UnknownNameError: a field is unknown.
            ConvertError: this torch does not support the mesh.
        """
        found = self._cache.get(v)
        if found is None:
            found = self._cache[v] = self._build(v, where)
        return found

    def _build(self, v: OpaqueValue, where: str) -> Any:
        fields = _Fields(v.data, where)
        root: Any = None
        if "root" in fields:
            record = fields["root"]
            if not isinstance(record, OpaqueValue) or record.kind != MESH:
                raise FormatError("not a device mesh", where=f"{where}.root")
            if "root" in _Fields(record.data, where):
                raise FormatError("the root of a device mesh has a root", where=f"{where}.root")
            root = self.decode(record, where=f"{where}.root")
        mesh = _build_one(fields, root, self._move)
        if root is not None:
            names = mesh._mesh_dim_names or ()
            twin = root._flatten_mapping.get(names[0]) if len(names) == 1 else None
            return twin if twin == mesh else mesh
        if "flattened" in fields:
            for name, part in _Fields(fields["flattened"], f"{where}.flattened").items():
                at = f"{where}.flattened[{name!r}]"
                child = _build_one(_Fields(part, at), mesh, self._move)
                mesh._flatten_mapping[name] = child
        return mesh


class _Fields(dict[str, Value]):
    """The named fields of a record."""

    def __init__(self, v: Value, where: str) -> None:
        if not isinstance(v, DictValue) or not all(isinstance(k, str) for k, _ in v.items):
            raise FormatError("not the fields of a device mesh", where=where)
        super().__init__((str(key), item) for key, item in v.items)
        self.where = where

    def __missing__(self, name: str) -> Value:
        raise FormatError(f"a device mesh has no {name}", where=self.where)

    def texts(self, name: str) -> list[str] | None:
        """A field that is a tuple of strings, or ``None``."""
        v, at = self[name], f"{self.where}.{name}"
        return None if v is None else [_text(item, at) for item in _items(v, at)]


def _whole(v: Value, where: str) -> int:
    if type(v) is not int or not 0 <= v < 2**31:
        raise FormatError("not a rank or a size", where=where, expected="an integer below 2**31")
    return v


def _text(v: Value, where: str) -> str:
    if not isinstance(v, str):
        raise FormatError("not a string", where=where, found=type(v).__name__)
    return v


def _items(v: Value, where: str) -> tuple[Value, ...]:
    if not isinstance(v, TupleValue):
        raise FormatError("not a tuple", where=where, found=type(v).__name__)
    return v.items


def _build_one(fields: _Fields, root: Any, move: Callable[[str], str]) -> Any:
    api = torch_distributed.device_meshes()
    where = fields.where
    unknown = sorted(fields.keys() - _FIELDS)
    if unknown:
        raise UnknownNameError(
            "no such field of a device mesh", where=where, found=", ".join(unknown)
        )
    device_type = _text(fields["device_type"], f"{where}.device_type")
    try:
        torch.device(device_type)
    except RuntimeError as error:
        raise FormatError("not a device type", where=where, found=repr(device_type)) from error
    device_type = move(device_type).partition(":")[0]
    if "ranks" in fields:
        at = f"{where}.ranks"
        ranks = tuple(_whole(rank, at) for rank in _items(fields["ranks"], at))
    elif root is not None:
        ranks = root._flatten_rank_map
    else:
        raise FormatError("a device mesh has no ranks", where=where)
    preserves_order = fields.get(_PRESERVES_ORDER, False)
    if not isinstance(preserves_order, bool):
        raise FormatError("not a boolean", where=f"{where}.{_PRESERVES_ORDER}")
    if preserves_order and not _can_preserve_order(api):
        raise ConvertError(
            "the device mesh preserves the order of its ranks, which this torch does not support",
            where=where,
            expected="a torch whose DeviceMesh takes `preserve_rank_order`",
            found=f"torch {torch_dynamo.torch_version()}",
            fix="Use the version that recorded it",
        )
    layout = _decode_layout(fields, len(ranks), api)
    names = fields.texts("dim_names")
    groups = fields.texts("groups")
    rank = _whole(fields["rank"], f"{where}.rank")
    for name, found in (("dim_names", names), ("groups", groups)):
        if found and len(found) != len(layout):
            raise FormatError(
                f"wrong number of {name} for a device mesh",
                where=where,
                expected=str(len(layout)),
                found=str(len(found)),
            )
    shared = None if "ranks" in fields else root
    if shared is None:
        with torch_dispatch.no_dispatch():  # real, also under a FakeTensorMode
            rank_map = torch.tensor(ranks, dtype=torch.int32, device="cpu")
    else:
        rank_map = shared._rank_map
    mesh = api.device_mesh.__new__(api.device_mesh)
    vars(mesh).update(
        _device_type=device_type,
        _layout=layout,
        _rank_map=rank_map,
        _mesh_dim_names=None if names is None else tuple(names),
        _root_mesh=root,
        _flatten_rank_map=ranks,
        _thread_id=_thread_id(),
        _flatten_mapping={},
        _pg_registry={},
        _rank=rank,
        _coordinate_on_dim=_coordinates(layout, rank_map, rank, api, where),
        _hash=None,
    )
    if _can_preserve_order(api):
        mesh._preserve_rank_order = preserves_order
    if groups is not None:
        mesh._dim_group_names = groups
        target = (mesh if root is None else root)._pg_registry
        for name, axis in zip(groups, layout.axes, strict=False):
            group = find_group(name)
            if group is not None and group.size() == axis.numel():
                target[name] = group
    return mesh


def _can_preserve_order(api: Any) -> bool:
    """Whether meshes can preserve the order of their ranks, as of torch 2.15."""
    return "_preserve_rank_order" in api.device_mesh.__annotations__


def _thread_id() -> int | None:
    """What a mesh made in this thread has as its ``_thread_id``."""
    distributed: Any = torch.distributed
    is_threaded = distributed.is_initialized() and distributed.get_backend() == "threaded"
    return threading.get_ident() if is_threaded else None


def _decode_layout(fields: _Fields, world: int, api: Any) -> Any:
    where = f"{fields.where}.layout"
    axes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for axis in _items(fields["layout"], where):
        pair = _items(axis, where)
        if len(pair) != 2:
            raise FormatError("not sizes and strides", where=where)
        shape, stride = (tuple(_whole(i, where) for i in _items(part, where)) for part in pair)
        axes.append((shape, stride))
    sizes = [size for shape, _ in axes for size in shape]
    # Before torch makes anything of it: no larger than the ranks, which the file has in full.
    if 0 in sizes or len(sizes) > 64 or math.prod(sizes) > world:
        raise FormatError(
            "the layout of a device mesh does not fit its ranks",
            where=where,
            expected=f"at most {world} devices",
            found=" x ".join(map(str, sizes)),
        )
    if any(len(shape) != len(stride) for shape, stride in axes):
        raise FormatError("not sizes and strides", where=where)
    layout = api.mesh_layout([api.flat_layout(shape, stride) for shape, stride in axes])
    if layout.cosize() > world or not layout.collapse().check_orthogonal():
        raise FormatError(
            "the layout of a device mesh does not fit its ranks",
            where=where,
            expected=f"no overlap, at most {world} devices",
            found=str(layout),
        )
    return layout


def _coordinates(
    layout: Any, rank_map: torch.Tensor, rank: int, api: Any, where: str
) -> tuple[int, ...] | None:
    """Coordinates of the rank in the mesh, or ``None`` if it is not in the mesh."""
    try:
        with torch_dispatch.no_dispatch():
            full = layout.remap_to_tensor(rank_map)
            part = api.device_mesh._get_mesh_tensor_from_full_mesh(full, current_rank=rank)
            return api.device_mesh._compute_coordinates_from_mesh(part, rank)
    except (RuntimeError, AssertionError) as error:
        raise FormatError(f"not a device mesh: {error}", where=where) from error


# --- process groups -------------------------------------------------------------------------------


def find_group(name: str) -> Any:
    """The process group of that name in this process, or ``None``."""
    try:
        return torch_distributed.device_meshes().resolve_group(name)
    except RuntimeError:
        return None


def encode_group(group: Any, *, where: str | None) -> Value:
    """The record of a ``ProcessGroup``: its registered name.

    Raises:
        UnsupportedValueError: it has no name, or the name of another group.
    """
    name: object = getattr(group, "group_name", None)
    if not isinstance(name, str) or find_group(name) != group:
        raise UnsupportedValueError(
            "a process group is not registered under a name",
            where=where,
            fix="Make it by torch.distributed.new_group",
        )
    return OpaqueValue(kind=GROUP, data=str(name))


def decode_group(v: OpaqueValue, *, where: str) -> Any:
    """The process group of a record, found by name in this process.

    Raises:
        FormatError: not a name.
        ConvertError: this process has no group of that name.
    """
    name = _text(v.data, where)
    group = find_group(name)
    if group is None:
        raise ConvertError(
            "this process has no process group of that name",
            where=where,
            found=repr(name),
            fix="Do it inside `with capture.fake_world():`",
        )
    return group


def mesh_ranks(mesh: Any) -> torch.Tensor:
    """The ranks of a mesh as a tensor of its shape, also without process groups."""
    full = mesh._layout.remap_to_tensor(mesh._rank_map)
    return mesh._get_mesh_tensor_from_full_mesh(full, current_rank=mesh._rank)


def mesh_coordinate(mesh: Any, rank: int) -> tuple[int, ...] | None:
    """Coordinates of a rank in a mesh, or ``None`` if it is not in the mesh."""
    api = torch_distributed.device_meshes()
    return _coordinates(mesh._layout, mesh._rank_map, rank, api, "$")


def mesh_groups(mesh: Any) -> dict[str, tuple[int, ...]]:
    """Ranks of the process groups of this rank along the dims of a mesh, by name."""
    names = getattr(mesh, "_dim_group_names", None)
    coordinate = mesh._coordinate_on_dim
    if not names or coordinate is None:
        return {}
    ranks = mesh_ranks(mesh)
    found: dict[str, tuple[int, ...]] = {}
    for dim, name in enumerate(names):
        at = [slice(None) if i == dim else n for i, n in enumerate(coordinate)]
        found[name] = tuple(ranks[tuple(at)].tolist())
    return found


def mesh_text(mesh: Any) -> str:
    """Source text of a call that makes a mesh of this shape."""
    names = mesh._mesh_dim_names
    named = f", mesh_dim_names={tuple(names)}" if names else ""
    return f'init_device_mesh("{mesh._device_type}", {tuple(mesh_ranks(mesh).shape)}{named})'


# --- placements -----------------------------------------------------------------------------------

_PLACEMENTS = {
    "Shard": ("dim",),
    "_StridedShard": ("dim", "_split_factor_int", "_symbolic_split_factor"),
    "Replicate": (),
    "Partial": ("reduce_op",),
    "_MaskPartial": ("reduce_op", "mask_buffer", "offset_shape", "offset_dim"),
}


def encode_placement(p: Any, part: EncodePart, *, where: str) -> Value:
    """The record of a placement; ``part`` encodes its symbolic sizes and its mask.

    Raises:
        UnsupportedValueError: it has additional attributes.
    """
    kind = type(p).__name__
    names = _PLACEMENTS[kind]
    extra = sorted(vars(p).keys() - set(names))
    if extra:
        raise UnsupportedValueError(
            "a placement has additional attributes", where=where, found=", ".join(extra)
        )
    items: list[tuple[Value, Value]] = []
    for name in names:
        item = getattr(p, name, None)
        if name == "_split_factor_int":
            item = p._split_factor_int()
        items.append((name, part(item, f"{where}.{name}")))
    return OpaqueValue(kind=PLACEMENT, data=TupleValue(items=(kind, DictValue(items=tuple(items)))))


def decode_placement(v: OpaqueValue, part: DecodePart, *, where: str) -> Any:
    """The placement of a record of :func:`encode_placement`.

    Raises:
        FormatError: torch has no such placement, or its fields are of the wrong type.
    """
    match v.data:
        case TupleValue(items=(str(kind), DictValue(items=items))) if kind in _PLACEMENTS:
            names = tuple(name for name, _ in items)
            if names != _PLACEMENTS[kind]:
                raise FormatError(
                    f"wrong fields of the placement {kind}",
                    where=where,
                    expected=", ".join(_PLACEMENTS[kind]) or "none",
                    found=", ".join(map(str, names)) or "none",
                )
            values = [part(item, f"{where}.{name}") for name, item in items]
        case _:
            raise FormatError("not a placement", where=where)
    cls = getattr(torch_distributed.device_meshes().placements, kind)
    try:
        if kind != "_StridedShard":
            return cls(*values)
        dim, factor, symbolic = values
        made = cls(dim, split_factor=factor)
    except TypeError as error:
        raise FormatError(f"wrong fields of the placement {kind}", where=where) from error
    if symbolic is not None:
        # Not by the constructor, which would guard on the current value.
        made._symbolic_split_factor = symbolic
    return made
