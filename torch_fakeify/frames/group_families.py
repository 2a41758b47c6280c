"""The process groups that torch made together along one dim of a mesh, one for each part of the ranks.

A rank is in one group of such a family, and names only that one. The layout of the mesh has the ranks of
the others, and torch's rule for names has their names.

Method: ``DeviceMesh._init_one_process_group`` and ``_process_group_name`` of torch 2.13.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch

from torch_fakeify.compat import torch_distributed
from torch_fakeify.encoding.meshes import MESH, Meshes, find_group
from torch_fakeify.records.rewrite import walk
from torch_fakeify.records.tensor import OpaqueValue

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Parts = tuple[tuple[int, ...], ...]
"""The ranks of each group of a family, in the order in which torch made them."""

_HASHED = 256
"""Most groups that a process is taken to have had when torch hashed their number into a name."""


def meshes_in(record: Any) -> list[Any]:
    """The device meshes of a record, decoded at the rank that they are recorded with."""
    meshes = Meshes()
    return [meshes.decode(v, where="$") for v in walk(record, OpaqueValue) if v.kind == MESH]


def families_of(meshes: Iterable[Any]) -> dict[str, Parts]:
    """The families of the groups of meshes, their roots and flattened meshes, by the name of one group."""
    found: dict[str, Parts] = {}
    for mesh in meshes:
        root = mesh._get_root_mesh()
        for each in (mesh, root, *root._flatten_mapping.values()):
            found.update(_dims(each))
    return found


def _dims(mesh: Any) -> Iterator[tuple[str, Parts]]:
    """Yield the name of the group of the mesh's own rank, and its family, for each dim."""
    api = torch_distributed.device_meshes()
    names = getattr(mesh, "_dim_group_names", None) or ()
    for name, axis in zip(names, mesh._layout.axes, strict=False):
        rows = api.mesh_layout([axis]).remap_to_tensor(mesh._rank_map).tolist()
        parts = tuple(tuple(int(rank) for rank in row) for row in rows)
        if place_of(parts, mesh._rank) is not None:
            yield name, parts


def live_families(names: set[str]) -> dict[str, Parts]:
    """The families of groups by the meshes that exist in this process.

    A graph may name a group of a mesh without having the mesh. A group does not refer to its mesh, and
    torch has no list of meshes: they are found among the objects of the process, which are searched
    only if a group of these names was made for a mesh.
    """
    descriptions = (getattr(find_group(name), "group_desc", "") for name in names)
    if not any(str(text).startswith("mesh_") for text in descriptions):
        return {}
    found = families_of(torch_distributed.live_meshes())
    return {name: parts for name, parts in found.items() if name in names}


def fitting(parts: Parts, ranks: tuple[int, ...]) -> Parts:
    """Return a family with the ranks in the order of its groups; empty if a group is not of the family.

    Torch sorts the ranks of a group, except for a mesh that preserves their order.
    """
    if ranks in parts:
        return parts
    ordered = tuple(tuple(sorted(part)) for part in parts)
    return ordered if ranks in ordered else ()


def place_of(parts: Parts, rank: int) -> int | None:
    """The position of the part that has a rank; ``None`` if none has it."""
    return next((i for i, part in enumerate(parts) if rank in part), None)


def name_at(name: str, parts: Parts, here: int, there: int, *, rank: int | None) -> str:
    """The name of the group of a family at the position ``there``, by that of the group ``here``.

    ``rank`` is that of this process, if its own groups are meant: a group that has the ranks, but not
    the name of torch's rule, is then found if it is the only one.
    """
    named = _by_rule(name, parts, here, there)
    if rank is None or rank not in parts[there] or _ranks(find_group(named)) == parts[there]:
        return named
    own = [n for n in torch_distributed.group_names() if _ranks(find_group(n)) == parts[there]]
    return own[0] if len(own) == 1 else named


def _by_rule(name: str, parts: Parts, here: int, there: int) -> str:
    if here == there:
        return name
    if name.isdecimal() and len(name) < 9:  # torch counts the groups
        number = int(name) - here + there
        return str(number) if number >= 0 else name
    for count in range(_HASHED):
        if name == _hashed(parts[here], count):
            return _hashed(parts[there], count)
    return name


def _hashed(ranks: tuple[int, ...], count: int) -> str:
    text = "_".join(map(str, (*ranks, count)))
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _ranks(group: Any) -> tuple[int, ...] | None:
    distributed: Any = torch.distributed
    return None if group is None else tuple(distributed.get_process_group_ranks(group))
