"""Device meshes, placements of DTensors, and records.

A mesh is recorded with its ranks, its layout, its root and the names of its process groups. It is
rebuilt without a process group, as ``DeviceMesh.__setstate__`` does it: the groups are looked up by
name among those that the process has, and none is made. The rank is the writer's, since the sizes
of the local tensors are. Placements are made by torch's own constructors.

Method: ``DeviceMesh.__init__`` and ``__setstate__`` of torch 2.13. A mesh of torch 2.15 may keep the order
of its ranks; that is on record where it does, and refused where torch cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from . import _torch
from .desc import DictValue, OpaqueValue, TupleValue, Value
from .errors import ConvertError, FormatError, UnknownNameError, UnsupportedValueError

__all__ = [
    "MESH",
    "PLACEMENT",
    "Meshes",
    "decode_placement",
    "encode_mesh",
    "encode_placement",
    "is_mesh",
    "is_placement",
]

MESH = "device_mesh"
PLACEMENT = "placement"
"""The kinds of ``OpaqueValue`` that this room owns."""

EncodePart: TypeAlias = Callable[[object, str], Value]
DecodePart: TypeAlias = Callable[[Value, str], Any]

_CARRIED = frozenset(
    [
        "_device_type",
        "_layout",
        "_mesh_dim_names",
        "_root_mesh",
        "_flatten_rank_map",
        "_flatten_mapping",
        "_dim_group_names",
        "_rank",
        "_preserve_rank_order",
    ]
)
# Made anew: the ranks as a tensor, groups by name, the coordinates of the rank, the hash, the id
# of the thread (only of the backend ``threaded``).
_DERIVED = frozenset(["_rank_map", "_pg_registry", "_coordinate_on_dim", "_hash", "_thread_id"])

_KEEPS_ORDER = "keeps_rank_order"
"""The field of a mesh whose groups have the ranks in its own order; a mesh without it sorts them."""
_FIELDS = frozenset(
    [
        "device_type",
        "rank",
        "ranks",
        "layout",
        "dim_names",
        "groups",
        "root",
        "flattened",
        _KEEPS_ORDER,
    ]
)


def is_mesh(obj: object) -> bool:
    """Whether an object is a ``DeviceMesh``, and not of a class derived from it."""
    return _named(obj, "torch.distributed.device_mesh", "DeviceMesh")


def is_placement(obj: object) -> bool:
    """Whether an object is one of torch's placements, and not of a class derived from one."""
    module = "torch.distributed.tensor.placement_types"
    return any(_named(obj, module, name) for name in _PLACEMENTS)


def _named(obj: object, module: str, name: str) -> bool:
    # By name: what torch has not imported yet cannot be here, and need not be imported to know it.
    cls = type(obj)
    return cls.__name__ == name and cls.__module__ == module


# --- meshes: encode -------------------------------------------------------------------------------


def encode_mesh(mesh: Any, *, where: str) -> Value:
    """The record of a ``DeviceMesh`` with its root and the meshes flattened from that.

    Raises:
        UnsupportedValueError: it is of device type ``xla``, or has attributes that torch's have not.
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
    """A mesh without the meshes that belong to it."""
    if "_rank" not in vars(mesh):
        raise UnsupportedValueError(
            "a device mesh has no rank",
            where=where,
            expected="a device type other than xla",
            found=repr(mesh._device_type),
        )
    unknown = sorted(vars(mesh).keys() - _CARRIED - _DERIVED)
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
        fields[_KEEPS_ORDER] = True
    return fields


def _plain(items: Any) -> Value:
    return TupleValue(items=tuple(items))


# --- meshes: decode -------------------------------------------------------------------------------


class Meshes:
    """The meshes rebuilt so far: equal records give one mesh, as tensors of one model share theirs."""

    def __init__(self) -> None:
        self._known: dict[Value, Any] = {}

    def adopt(self, mesh: Any) -> None:
        """Lets a live mesh stand for its record, for a reader in the writer's own process."""
        root = mesh._root_mesh
        if root is not None:
            self.adopt(root)
        self._known.setdefault(encode_mesh(mesh, where="$"), mesh)

    def decode(self, v: OpaqueValue, *, where: str) -> Any:
        """The ``DeviceMesh`` of a record of :func:`encode_mesh`; no process group is made.

        Raises:
            FormatError: the ranks, layout and names do not fit together.
            UnknownNameError: a field is not known here.
            ConvertError: this torch has no such mesh.
        """
        found = self._known.get(v)
        if found is None:
            found = self._known[v] = self._build(v, where)
        return found

    def _build(self, v: OpaqueValue, where: str) -> Any:
        fields = _Fields(v.data, where)
        root: Any = None
        if fields.has("root"):
            record = fields.get("root")
            if not isinstance(record, OpaqueValue) or record.kind != MESH:
                raise FormatError("not a device mesh", where=f"{where}.root")
            if _Fields(record.data, where).has("root"):
                raise FormatError("the root of a device mesh has a root", where=f"{where}.root")
            root = self.decode(record, where=f"{where}.root")
        mesh = _build_one(fields, root)
        if root is not None:
            return _flattened_twin(root, mesh) or mesh
        if fields.has("flattened"):
            for name, part in _Fields(fields.get("flattened"), f"{where}.flattened").items():
                child = _build_one(_Fields(part, f"{where}.flattened[{name!r}]"), mesh)
                mesh._flatten_mapping[name] = child
        return mesh


def _flattened_twin(root: Any, mesh: Any) -> Any:
    """The mesh that its root already has under its name."""
    names = mesh._mesh_dim_names or ()
    twin = root._flatten_mapping.get(names[0]) if len(names) == 1 else None
    return twin if twin == mesh else None


class _Fields:
    """The named fields of a record, each checked when it is read."""

    def __init__(self, v: Value, where: str) -> None:
        self.where = where
        if not isinstance(v, DictValue) or not all(isinstance(k, str) for k, _ in v.items):
            raise FormatError("not the fields of a device mesh", where=where)
        self._fields: dict[str, Value] = {str(key): item for key, item in v.items}

    def items(self) -> list[tuple[str, Value]]:
        """All of them."""
        return list(self._fields.items())

    def has(self, name: str) -> bool:
        """Whether the record has the field."""
        return name in self._fields

    def get(self, name: str) -> Value:
        """The field as it stands."""
        if name not in self._fields:
            raise FormatError(f"a device mesh has no {name}", where=self.where)
        return self._fields[name]

    def whole(self, name: str) -> int:
        """A field that is an integer of at least zero."""
        return _whole(self.get(name), f"{self.where}.{name}")

    def text(self, name: str) -> str:
        """A field that is a string."""
        return _text(self.get(name), f"{self.where}.{name}")

    def texts(self, name: str) -> list[str] | None:
        """A field that is a tuple of strings, or ``None``."""
        v = self.get(name)
        at = f"{self.where}.{name}"
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


def _build_one(fields: _Fields, root: Any) -> Any:
    api = _torch.device_meshes()
    where = fields.where
    unknown = sorted(name for name, _ in fields.items() if name not in _FIELDS)
    if unknown:
        raise UnknownNameError(
            "no such field of a device mesh", where=where, found=", ".join(unknown)
        )
    device_type = fields.text("device_type")
    try:
        torch.device(device_type)
    except RuntimeError as error:
        raise FormatError("not a device type", where=where, found=repr(device_type)) from error
    if fields.has("ranks"):
        at = f"{where}.ranks"
        ranks = tuple(_whole(rank, at) for rank in _items(fields.get("ranks"), at))
    elif root is not None:
        ranks = root._flatten_rank_map
    else:
        raise FormatError("a device mesh has no ranks", where=where)
    keeps_order = fields.get(_KEEPS_ORDER) if fields.has(_KEEPS_ORDER) else False
    if not isinstance(keeps_order, bool):
        raise FormatError("not a boolean", where=f"{where}.{_KEEPS_ORDER}")
    if keeps_order and not api.may_keep_order:
        raise ConvertError(
            "the device mesh keeps the order of its ranks, as no mesh of this torch can",
            where=where,
            expected="a torch whose DeviceMesh takes `preserve_rank_order`",
            found=f"torch {_torch.torch_version()}",
            fix="Use the version that recorded it",
        )
    layout = _decode_layout(fields, len(ranks), api)
    names = fields.texts("dim_names")
    groups = fields.texts("groups")
    rank = fields.whole("rank")
    for name, found in (("dim_names", names), ("groups", groups)):
        if found and len(found) != len(layout):
            raise FormatError(
                f"wrong number of {name} for a device mesh",
                where=where,
                expected=str(len(layout)),
                found=str(len(found)),
            )
    shared = None if fields.has("ranks") else root
    rank_map = _rank_tensor(ranks) if shared is None else shared._rank_map
    mesh = api.device_mesh.__new__(api.device_mesh)
    vars(mesh).update(
        _device_type=device_type,
        _layout=layout,
        _rank_map=rank_map,
        _mesh_dim_names=None if names is None else tuple(names),
        _root_mesh=root,
        _flatten_rank_map=ranks,
        _thread_id=api.thread_id(),
        _flatten_mapping={},
        _pg_registry={},
        _rank=rank,
        _coordinate_on_dim=_coordinates(layout, rank_map, rank, api, where),
        _hash=None,
    )
    if api.may_keep_order:
        mesh._preserve_rank_order = keeps_order
    if groups is not None:
        mesh._dim_group_names = groups
        target = (mesh if root is None else root)._pg_registry
        for name, axis in zip(groups, layout.axes, strict=False):
            group = api.find_group(name)
            if group is not None and group.size() == axis.numel():
                target[name] = group
    return mesh


def _decode_layout(fields: _Fields, world: int, api: Any) -> Any:
    where = f"{fields.where}.layout"
    axes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for axis in _items(fields.get("layout"), where):
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


def _rank_tensor(ranks: tuple[int, ...]) -> torch.Tensor:
    guard = _torch.no_dispatch_guard()  # real, also under a FakeTensorMode
    tensor = torch.tensor(ranks, dtype=torch.int32, device="cpu")
    del guard
    return tensor


def _coordinates(
    layout: Any, rank_map: torch.Tensor, rank: int, api: Any, where: str
) -> tuple[int, ...] | None:
    """Where the rank stands in the mesh, ``None`` if it does not."""
    guard = _torch.no_dispatch_guard()
    try:
        full = layout.remap_to_tensor(rank_map)
        part = api.device_mesh._get_mesh_tensor_from_full_mesh(full, current_rank=rank)
        return api.device_mesh._compute_coordinates_from_mesh(part, rank)
    except (RuntimeError, AssertionError) as error:
        raise FormatError(f"not a device mesh: {error}", where=where) from error
    finally:
        del guard


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
        UnsupportedValueError: it has attributes beside its own.
    """
    kind = type(p).__name__
    names = _PLACEMENTS[kind]
    extra = sorted(vars(p).keys() - set(names))
    if extra:
        raise UnsupportedValueError(
            "a placement has attributes beside its own", where=where, found=", ".join(extra)
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
    try:
        return _make_placement(kind, values)
    except TypeError as error:
        raise FormatError(f"wrong fields of the placement {kind}", where=where) from error


def _make_placement(kind: str, values: list[Any]) -> Any:
    module = _torch.device_meshes().placements
    cls = getattr(module, kind)
    if kind == "_StridedShard":
        dim, factor, symbolic = values
        made = cls(dim, split_factor=factor)
        if symbolic is not None:
            # Not by the constructor, which would guard on the value that it has now.
            made._symbolic_split_factor = symbolic
        return made
    return cls(*values)
