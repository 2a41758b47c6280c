"""Records of the process groups of a frame, and a fake world with these groups.

A frame with collectives or with tensors on a device mesh needs process groups. Their names, ranks and
sizes are recorded; where there are none, ``torch.distributed``'s ``fake`` backend stands
in for them, whose collectives copy what this rank has.

Torch makes the groups along one dim of a mesh together, one for each part of the ranks. A rank is in one
group of such a family, and names only that one. The layout of the mesh has the ranks of the others, and
torch's rule for names has their names.

Method of the families: ``DeviceMesh._init_one_process_group`` and ``_process_group_name`` of torch 2.13.
"""

from __future__ import annotations

import hashlib
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from torch_fakeify.compat import torch_distributed
from torch_fakeify.encoding.meshes import GROUP, MESH, Meshes, find_group, mesh_groups, mesh_text
from torch_fakeify.errors import CaptureError, FormatError, LimitError
from torch_fakeify.records.frame import ProcessGroupDesc, WorldDesc
from torch_fakeify.records.rewrite import walk
from torch_fakeify.records.tensor import OpaqueValue

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from torch_fakeify.records.frame import CaptureDesc, InputDesc
    from torch_fakeify.records.graph import GraphModuleDesc

Parts = tuple[tuple[int, ...], ...]
"""The ranks of each group of a family, in the order in which torch made them."""

_HASHED = 256
"""Most groups that a process is taken to have had when torch hashed their number into a name."""

MAX_RANKS = 1 << 17
"""Largest number of processes in the world of a file: torch makes tables of them."""

MAX_GROUPS = 1024
"""Largest number of process groups in the world of a file."""


def this_rank() -> tuple[int, int] | None:
    """The rank of this process and the size of its world; ``None`` without ``torch.distributed``."""
    distributed: Any = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return int(distributed.get_rank()), int(distributed.get_world_size())


# --- describe -------------------------------------------------------------------------------------


def describe_world(
    graph: GraphModuleDesc, inputs: tuple[InputDesc, ...], rank_calls: tuple[str, ...] = ()
) -> WorldDesc | None:
    """Describe the world of this process with the groups that a frame uses.

    A frame uses the groups of its meshes, groups that are inputs, and groups whose name is an argument
    of a call in its graph, as for functional collectives. ``None`` if it uses none and its program does
    not ask for its rank (`WorldDesc.rank_calls`).
    """
    here = this_rank()
    if here is None:
        return None
    rank, size = here
    found: dict[str, tuple[int, ...]] = {}
    for name in sorted({*_names_in_values((graph, inputs)), *_names_in_calls(graph)}):
        ranks = _ranks(find_group(name))
        if ranks is not None and rank in ranks:
            found[name] = () if ranks == tuple(range(size)) else ranks
    if not found and not rank_calls:
        return None
    own = {name for name, ranks in found.items() if ranks}
    families = families_of(meshes_in((graph, inputs))) if own else {}
    families.update(live_families(own - families.keys()))
    groups = [
        ProcessGroupDesc(
            name=name,
            ranks=ranks,
            parts=fitting(families[name], ranks) if name in own & families.keys() else (),
        )
        for name, ranks in found.items()
    ]
    return WorldDesc(rank=rank, size=size, groups=tuple(groups), rank_calls=rank_calls)


def _names_in_calls(graph: GraphModuleDesc) -> Iterator[str]:
    for fx_node in (fx_node for each in graph.graphs() for fx_node in each.nodes):
        if fx_node.op == "call_function":
            args = (*fx_node.args, *(value for _, value in fx_node.kwargs))
            yield from (arg for arg in args if isinstance(arg, str))


def _names_in_values(record: Any) -> Iterator[str]:
    for value in walk(record, OpaqueValue):
        if value.kind == GROUP and isinstance(value.data, str):
            yield value.data
        elif value.kind == MESH:
            yield from walk(value.data, str)


# --- what a frame needs -----------------------------------------------------------------------------


def needed_world(desc: CaptureDesc, *, grouped: bool = True) -> WorldDesc | None:
    """The world that a frame needs: the recorded one, or one with the ranks of its meshes, or ``None``.

    If ``grouped``, meshes without process groups need none.

    Raises:
        FormatError: the record is contradictory; ``LimitError``: it has too many ranks.
    """
    world = desc.world
    if world is None:
        world = _world_of_meshes(desc)
        if world is None or (grouped and not world.groups):
            return None
    check_groups(world)
    return world


def meshes_of(desc: CaptureDesc) -> list[Any]:
    """The meshes of the inputs and attributes of a frame."""
    graph = desc.graph
    return meshes_in((desc.inputs, graph.tensors, graph.values))


def _world_of_meshes(desc: CaptureDesc) -> WorldDesc | None:
    """Derive the world from meshes, for a file by an older release without one."""
    meshes = meshes_of(desc)
    if not meshes:
        return None
    groups: dict[str, tuple[int, ...]] = {}
    for mesh in meshes:
        for each in (mesh, *mesh._flatten_mapping.values()):
            groups.update(mesh_groups(each))
    rank = meshes[0]._rank
    size = 1 + max(max(mesh._flatten_rank_map) for mesh in meshes)
    found = tuple(ProcessGroupDesc(name=name, ranks=groups[name]) for name in sorted(groups))
    return WorldDesc(rank=rank, size=size if groups else max(size, rank + 1), groups=found)


def check_groups(world: WorldDesc) -> None:
    """Check a world before torch uses it.

    Raises:
        FormatError: it is contradictory; ``LimitError``: it has too many ranks.
    """
    where = "$.world"
    if world.size > MAX_RANKS or len(world.groups) > MAX_GROUPS:
        raise LimitError(
            "a world of processes is too large",
            where=where,
            expected=f"at most {MAX_RANKS} ranks and {MAX_GROUPS} groups",
            found=f"{world.size} and {len(world.groups)}",
        )
    if not 0 <= world.rank < world.size:
        raise FormatError(
            "the rank is not in the world",
            where=f"{where}.rank",
            expected=f"0 to {world.size - 1}",
            found=str(world.rank),
        )
    names: set[str] = set()
    for i, group in enumerate(world.groups):
        at = f"{where}.groups[{i}]"
        if not group.name or group.name in names:
            raise FormatError("not the name of one process group", where=f"{at}.name")
        names.add(group.name)
        ranks = group.ranks
        in_world = not ranks or (min(ranks) >= 0 and max(ranks) < world.size)
        if not in_world or len(set(ranks)) != len(ranks) or (ranks and world.rank not in ranks):
            raise FormatError("not the ranks of a process group of this rank", where=f"{at}.ranks")
        if group.parts:
            _check_parts(world, group, f"{at}.parts")


def _check_parts(world: WorldDesc, group: ProcessGroupDesc, where: str) -> None:
    ranks = [rank for part in group.parts for rank in part]
    if len(ranks) > world.size or len(set(ranks)) != len(ranks):
        raise FormatError("a rank is in two groups of one dim of a mesh", where=where)
    if min(ranks, default=0) < 0 or max(ranks, default=0) >= world.size:
        raise FormatError("not ranks of the world", where=where)
    if group.ranks not in group.parts:
        raise FormatError("the groups of a dim of a mesh lack the one of this rank", where=where)


def ranks_of(world: WorldDesc, group: ProcessGroupDesc) -> tuple[int, ...]:
    """The ranks of a group."""
    return group.ranks or tuple(range(world.size))


def world_of_calls(desc: CaptureDesc, world: WorldDesc) -> dict[str, tuple[int, ...]]:
    """The ranks of the groups whose name is an argument of a call in the graph."""
    names = set(_names_in_calls(desc.graph))
    return {group.name: ranks_of(world, group) for group in world.groups if group.name in names}


def has_world(world: WorldDesc) -> bool:
    """Whether ``torch.distributed`` is initialized and has the groups of a world.

    Raises:
        CaptureError: it is initialized without these groups.
    """
    here = this_rank()
    if here is None:
        return False
    if here != (world.rank, world.size):
        raise _unfit(world, f"rank {here[0]} of {here[1]}")
    for group in world.groups:
        ranks = _ranks(find_group(group.name))
        if ranks is None:
            raise _unfit(world, f"no process group {group.name!r}")
        if ranks != ranks_of(world, group):
            raise _unfit(world, f"a process group {group.name!r} of the ranks {ranks}")
    return True


def _unfit(world: WorldDesc, found: str) -> CaptureError:
    return CaptureError(
        "torch.distributed is not initialized as the frame needs it",
        expected=_world_text(world),
        found=found,
        fix="Use `with capture.fake_world():` in a process without process groups, or initialize "
        "torch.distributed as the recorded program did",
    )


def _world_text(world: WorldDesc) -> str:
    groups = ", ".join(
        f"{group.name!r} of {'all' if not group.ranks else f'the ranks {group.ranks}'}"
        for group in world.groups
    )
    return f"rank {world.rank} of {world.size} with the process groups {groups}"


def check_world(desc: CaptureDesc, error: Exception | None = None) -> None:
    """Raise if this process lacks the process groups of a frame.

    Without an error that occurred, a process that has no process groups at all is fine.

    Raises:
        CaptureError: it lacks them; the error explains how to create them.
    """
    if error is None and this_rank() is None:
        return
    world = needed_world(desc)
    if world is None or has_world(world) or error is None:
        return
    made = sorted({mesh_text(mesh._get_root_mesh()) for mesh in meshes_of(desc)})
    raise CaptureError(
        "the frame needs process groups, and this process has none",
        expected=_world_text(world) + "".join(f", {text}" for text in made),
        found=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
        fix="Do it inside `with capture.fake_world():`",
    ) from error


# --- families of groups -------------------------------------------------------------------------------


def meshes_in(record: Any) -> list[Any]:
    """The device meshes of a record, decoded at the rank that they are recorded with."""
    meshes = Meshes()
    return [meshes.decode(v, where="$") for v in walk(record, OpaqueValue) if v.kind == MESH]


def families_of(meshes: Iterable[Any]) -> dict[str, Parts]:
    """The families of the groups of meshes, their roots and flattened meshes, by the name of one group."""
    found: dict[str, Parts] = {}
    for mesh in meshes:
        api = torch_distributed.device_meshes()  # imported only where there is a mesh
        root = mesh._get_root_mesh()
        for each in (mesh, root, *root._flatten_mapping.values()):
            names = getattr(each, "_dim_group_names", None) or ()
            for name, axis in zip(names, each._layout.axes, strict=False):
                rows = api.mesh_layout([axis]).remap_to_tensor(each._rank_map).tolist()
                parts = tuple(tuple(int(rank) for rank in row) for row in rows)
                if place_of(parts, each._rank) is not None:
                    found[name] = parts
    return found


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


# --- fake world -----------------------------------------------------------------------------------


@contextmanager
def fake_world(desc: CaptureDesc) -> Generator[None, None, None]:
    """Initialize the world of a frame with torch's ``fake`` backend, without network or other processes.

    Does nothing for a frame without process groups, or if this process has them already.

    Raises:
        CaptureError: this process has process groups, but not those that the frame needs.
    """
    world = needed_world(desc)
    if world is None or has_world(world):
        yield
        return
    hook = sys.excepthook
    _make(world)
    try:
        yield
    finally:
        distributed: Any = torch.distributed
        distributed.destroy_process_group()
        sys.excepthook = hook  # torch wrapped it


def _make(world: WorldDesc) -> None:
    distributed: Any = torch.distributed
    fake_store, new_group, table = torch_distributed.process_groups()
    store = fake_store()
    distributed.init_process_group("fake", store=store, rank=world.rank, world_size=world.size)
    for group in world.groups:
        ranks = ranks_of(world, group)
        existing = find_group(group.name)
        if existing is None:
            made, _ = new_group(
                len(ranks),
                ranks.index(world.rank),
                list(ranks),
                distributed.Backend("fake"),
                store,
                group.name,
                timeout=distributed.default_pg_timeout,
            )
            table.pg_group_ranks[made] = {rank: i for i, rank in enumerate(ranks)}
        if group.name.isdecimal() and len(group.name) < 9:  # torch continues to count from it
            table.group_count = max(table.group_count, int(group.name) + 1)
    has_world(world)
