"""A frame as another rank of its world has it, and the record that is the same for all ranks.

Of a rank are its coordinates in device meshes, the names and members of its process groups, and the sizes
of its parts of DTensors. All of them follow from the meshes, so that a record is written as the lowest rank
has it, and rebuilt for any. A number that the program computed from its rank is a number like any
other: frames in which torch's calls for it are seen, and graphs of ATen operators with numbers, stay those
of the rank that wrote them.
"""

from __future__ import annotations

import dis
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from torch_fakeify.compat.torch_graphs import find_operator
from torch_fakeify.encoding.meshes import GROUP, MESH
from torch_fakeify.errors import CaptureError, FormatError, check_integer, wrap_torch_errors
from torch_fakeify.records.frame import ProcessGroupDesc, WorldDesc
from torch_fakeify.records.graph import NodeDesc
from torch_fakeify.records.rewrite import Rewriter, walk
from torch_fakeify.records.tensor import (
    DictValue,
    FloatValue,
    FunctionValue,
    MetaTensorDesc,
    NodeValue,
    OpaqueValue,
    TupleValue,
)

from .local_sizes import LocalSizes, refuse_local_sizes_in_graph, renumbered
from .process_groups import (
    check_groups,
    families_of,
    fitting,
    meshes_in,
    name_at,
    needed_world,
    place_of,
    ranks_of,
    this_rank,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import CodeType

    from torch_fakeify.records.frame import CaptureDesc
    from torch_fakeify.records.graph import GraphModuleDesc
    from torch_fakeify.records.tensor import Value

    from .process_groups import Parts

_CALLS = frozenset(
    ["get_rank", "get_group_rank", "get_node_local_rank", "get_local_rank", "get_coordinate"]
)
"""Functions of ``torch.distributed`` and methods of meshes that return a number of the rank."""
_PARTS = frozenset(["to_local", "_local_tensor"])
"""Methods and attributes of DTensors that return the local tensor."""
_METHODS = frozenset(["rank"])
"""Methods of process groups that do; attributes of these names are something else."""
_OF_TORCH = frozenset(["permute_tensor"])
"""Functions of torch that write numbers of the rank into a graph."""
_TORCH = str(Path(torch.__file__).parent)


# --- the record that is the same for all ranks ------------------------------------------------------


def without_rank(desc: CaptureDesc, local_calls: tuple[str, ...] = ()) -> CaptureDesc:
    """Return a frame as the lowest rank has it that can have it; the same frame if it is of one rank.

    The result is equal for all ranks of a program that does the same on all of them. ``local_calls`` are
    the functions by which the program may read the size of its part of a tensor, which is a number of the
    rank if shards are uneven.
    """
    world = needed_world(desc, grouped=False)
    if world is None or world.rank_calls or _may_have_numbers_of_rank(desc.graph):
        return desc
    lowest = _lowest_rank(desc, world)
    if lowest is None:
        return desc
    for rank in (lowest, world.rank):
        try:
            found, is_uneven = _moved(desc, world, rank)
        except (CaptureError, FormatError):  # raised again for a rank that it is rebuilt for
            continue
        if rank == world.rank or not (is_uneven and local_calls):
            break
    else:
        return desc
    if not is_uneven:
        return found
    inputs, graph = renumbered((found.inputs, found.graph))
    world = found.world
    if local_calls and world is not None:
        world = msgspec.structs.replace(world, rank_calls=local_calls)
    return msgspec.structs.replace(found, inputs=inputs, graph=graph, world=world)


def calls_for_rank(codes: Iterable[CodeType]) -> tuple[str, ...]:
    """Return the names, sorted, of functions in traced code by which a program asks for its rank.

    Of torch's own code, only that counts which puts a number of the rank into a graph.
    """
    found: set[str] = set()
    for code in codes:
        if code.co_filename.startswith(_TORCH):
            found |= _OF_TORCH & {code.co_name}
        else:
            found |= _calls_in(code)
    return tuple(sorted(found))


def calls_for_part(codes: Iterable[CodeType]) -> tuple[str, ...]:
    """Return the names, sorted, by which the code of a program takes its part of a DTensor."""
    own = (code for code in codes if not code.co_filename.startswith(_TORCH))
    return tuple(sorted({name for code in own for name in _PARTS & set(code.co_names)}))


def _calls_in(code: CodeType) -> set[str]:
    found = set(_CALLS.intersection(code.co_names))
    if _METHODS & set(code.co_names):
        for each in dis.get_instructions(code):
            is_method = each.opname == "LOAD_METHOD" or "NULL|self" in each.argrepr
            if is_method and each.argval in _METHODS:
                found |= {str(each.argval)}
    return found


def _lowest_rank(desc: CaptureDesc, world: WorldDesc) -> int | None:
    """The lowest rank that is in all groups and meshes of a frame that the writer is in."""
    members = set(range(world.size))
    for group in world.groups:
        members &= {rank for part in _parts(group, world) for rank in part}
    for mesh in meshes_in((desc.inputs, desc.graph)):
        of_mesh = _members(mesh)
        if world.rank in of_mesh:
            members &= of_mesh
    return min(members, default=None)


def _members(mesh: Any) -> set[int]:
    return set(mesh._layout.remap_to_tensor(mesh._rank_map).flatten().tolist())


# --- a frame at another rank ----------------------------------------------------------------------


def running_rank(desc: CaptureDesc) -> int | None:
    """The rank of this process in a world of the size of a frame's; ``None`` without one."""
    here = this_rank()
    world = None if here is None else needed_world(desc, grouped=False)
    if here is None or world is None or world.size != here[1]:
        return None  # with another size compiling raises, with both sizes
    return here[0]


def at_rank(desc: CaptureDesc, rank: int, *, by_request: bool) -> CaptureDesc:
    """Return a frame as a rank of its world has it; the same object if nothing in it is of the rank.

    If the user asked for this rank, a graph of ATen operators counts as the same for all.

    Raises:
        CaptureError: the world has no such rank, the rank is not in a mesh or a process group of the
            frame, or the frame is of the rank that recorded it.
        FormatError: the record is contradictory.
    """
    world = needed_world(desc, grouped=False)
    if world is None:
        check_integer(rank, "rank", CaptureError, least=0)
        return desc
    if type(rank) is not int or not 0 <= rank < world.size:
        raise CaptureError(
            "the world of the frame has no such rank",
            expected=f"a rank from 0 to {world.size - 1}",
            found=repr(rank),
            fix="Pass the rank of one of its processes; a world of another size needs a recording "
            "of its own",
        )
    if rank != world.rank:
        _refuse_numbers(desc, world, rank, by_request=by_request)
    elif _groups_at(desc, world, rank)[0] == world.groups:
        return desc
    return _moved(desc, world, rank)[0]


def _moved(desc: CaptureDesc, world: WorldDesc, rank: int) -> tuple[CaptureDesc, bool]:
    """The frame at a rank, and whether a DTensor in it has local sizes that depend on the rank."""
    for mesh in meshes_in((desc.inputs, desc.graph)) if rank != world.rank else ():
        of_mesh = _members(mesh)
        if world.rank in of_mesh and rank not in of_mesh:
            raise _not_member("a device mesh", of_mesh, rank)
    groups, names = _groups_at(desc, world, rank)
    change = _Change(world.rank, rank, names)
    with wrap_torch_errors("$.inputs"):
        inputs, graph = Rewriter(change)((desc.inputs, desc.graph))
    if change.sizes.changed and rank != world.rank:
        refuse_local_sizes_in_graph(inputs, graph, change.sizes.changed)
    changed = msgspec.structs.replace(world, rank=rank, groups=groups)
    check_groups(changed)
    found = msgspec.structs.replace(
        desc,
        inputs=inputs,
        graph=graph,
        world=None if desc.world is None else changed,
    )
    return found, bool(change.sizes.changed)


def _refuse_numbers(desc: CaptureDesc, world: WorldDesc, rank: int, *, by_request: bool) -> None:
    if world.rank_calls:
        raise CaptureError(
            "the program asks for its rank or its part of a tensor: its graph may have numbers of the rank",
            expected=f"rank {world.rank}, which recorded it",
            found=f"rank {rank}, and {', '.join(world.rank_calls)} in the traced code",
            fix=f"Record the frame on rank {rank}, or ask outside of the compiled function",
        )
    if not by_request and _may_have_numbers_of_rank(desc.graph):
        raise CaptureError(
            "a graph of ATen operators may have numbers of the rank that recorded it",
            expected=f"rank {world.rank}",
            found=f"rank {rank}",
            fix=f"Record the frame on rank {rank}, record what Dynamo traced instead, or pass "
            f"rank={rank} if the graph is the same for all ranks",
        )


def _not_member(what: str, ranks: Iterable[int], rank: int) -> CaptureError:
    return CaptureError(
        f"the rank is not in {what} of the frame",
        expected=f"one of the ranks {', '.join(map(str, sorted(ranks)))}",
        found=str(rank),
        fix="Record the frame of that rank: it is another one",
    )


def _parts(group: ProcessGroupDesc, world: WorldDesc) -> Parts:
    return group.parts or (ranks_of(world, group),)


def _groups_at(
    desc: CaptureDesc, world: WorldDesc, rank: int
) -> tuple[tuple[ProcessGroupDesc, ...], dict[str, str]]:
    """The groups that a rank has in the place of those of a frame, and their names by the recorded ones."""
    known = {group.name: group for group in world.groups}
    missing = any(group.ranks and not group.parts for group in world.groups)
    meshes = meshes_in((desc.inputs, desc.graph)) if missing or not known else []
    for name, parts in families_of(meshes).items():
        here = place_of(parts, world.rank)
        found = known.get(name)
        if found is None and here is not None:
            known[name] = ProcessGroupDesc(name=name, ranks=parts[here], parts=parts)
        elif found is not None and found.ranks and not found.parts:
            known[name] = msgspec.structs.replace(found, parts=fitting(parts, found.ranks))
    is_own = this_rank() == (rank, world.size)
    groups: list[ProcessGroupDesc] = []
    names: dict[str, str] = {}
    recorded = {group.name for group in world.groups}
    for name, group in known.items():
        parts = _parts(group, world)
        here, there = place_of(parts, world.rank), place_of(parts, rank)
        if there is None:
            raise _not_member(
                f"a process group {name!r}", {each for part in parts for each in part}, rank
            )
        assert here is not None  # checked with the world
        new = name_at(name, parts, here, there, rank=rank if is_own else None)
        names[name] = new
        if name in recorded:
            ranks = parts[there] if group.ranks else ()
            groups.append(ProcessGroupDesc(name=new, ranks=ranks, parts=group.parts))
    return tuple(sorted(groups, key=lambda group: group.name)), names


class _Change:
    """Rewrites a part of a record from one rank to another."""

    def __init__(self, old: int, new: int, names: dict[str, str]) -> None:
        self._new = new
        self._names = {name: other for name, other in names.items() if name != other}
        self.sizes = LocalSizes(old, new)

    def __call__(self, part: Any) -> Any:
        match part:
            case OpaqueValue(kind=kind, data=DictValue() as data) if kind == MESH:
                changed = self._mesh(data)
                return part if changed == data else OpaqueValue(kind=MESH, data=changed)
            case OpaqueValue(kind=kind, data=str(name)) if kind == GROUP and name in self._names:
                return OpaqueValue(kind=GROUP, data=self._names[name])
            case NodeDesc(op="call_function", target=FunctionValue() as target) if self._names:
                return self._call(part, target)
            case MetaTensorDesc() if part.subclass is not None:
                return self.sizes.tensor(part)
            case _:
                return part

    def _mesh(self, fields: DictValue) -> DictValue:
        items: list[tuple[Value, Value]] = []
        for name, value in fields.items:
            new = value
            if name == "rank":
                new = self._new
            elif name == "groups" and isinstance(value, TupleValue):
                groups = (self._names.get(v, v) if isinstance(v, str) else v for v in value.items)
                new = TupleValue(items=tuple(groups))
            elif name == "flattened" and isinstance(value, DictValue):
                new = DictValue(
                    items=tuple(
                        (key, self._mesh(each) if isinstance(each, DictValue) else each)
                        for key, each in value.items
                    )
                )
            items.append((name, new))
        return DictValue(items=tuple(items))

    def _call(self, fx_node: NodeDesc, target: FunctionValue) -> NodeDesc:
        args = [self._argument(target, i, v) for i, v in enumerate(fx_node.args)]
        kwargs = [(key, self._argument(target, key, v)) for key, v in fx_node.kwargs]
        if (tuple(args), tuple(kwargs)) == (fx_node.args, fx_node.kwargs):
            return fx_node
        return msgspec.structs.replace(fx_node, args=tuple(args), kwargs=tuple(kwargs))

    def _argument(self, target: FunctionValue, at: int | str, v: Value) -> Value:
        if not isinstance(v, str) or v not in self._names:
            return v
        if not _is_group_name(target, at):
            raise CaptureError(
                "a text in the graph is the name of a process group, or something else",
                where=f"argument {at} of {target.name}",
                expected="an argument for a group, such as group_name",
                found=repr(v),
                fix="Record the frame on the rank that it is for",
            )
        return self._names[v]


# --- arguments of graphs ----------------------------------------------------------------------------


def _is_group_name(target: FunctionValue, at: int | str) -> bool:
    """Whether an argument of a function, by position or name, is the name of a process group."""
    if target.kind not in ("op", "packet"):
        return target.name.startswith("torch.distributed.")
    for names in _arguments(target.name):
        name = at if isinstance(at, str) else names[at] if at < len(names) else ""
        if "group" in name or name in ("pg", "pg_name"):
            return True
    return False


@cache
def _arguments(operator: str) -> tuple[tuple[str, ...], ...]:
    """Names of the arguments of the overloads of an operator; none if it is not registered here."""
    namespace, _, rest = operator.partition(".")
    packet = find_operator(namespace, rest.partition(".")[0])
    overloads = [] if packet is None else packet.overloads()
    schemas = (getattr(packet, overload)._schema for overload in overloads)
    return tuple(tuple(arg.name for arg in schema.arguments) for schema in schemas)


def _may_have_numbers_of_rank(graph: GraphModuleDesc) -> bool:
    """Whether a graph is of ATen operators and some number is an argument.

    Such a graph is traced below DTensor and the user's program: a shard of a tensor is a slice of it.
    """
    graphs = list(graph.graphs())
    is_aten = any(
        isinstance(fx_node.target, FunctionValue)
        and fx_node.target.kind == "op"
        and fx_node.target.name.startswith("aten.")
        for each in graphs
        for fx_node in each.nodes
    )
    return is_aten and any(_has_number(fx_node) for each in graphs for fx_node in each.nodes)


def _has_number(fx_node: NodeDesc) -> bool:
    target = fx_node.target
    if fx_node.op != "call_function" or not isinstance(target, FunctionValue):
        return False
    if target.name.startswith("_c10d_functional.all_gather_into_tensor"):
        return False  # the size of the group
    values = walk((fx_node.args, fx_node.kwargs), (int, float, FloatValue, NodeValue))
    return any(not isinstance(v, (bool, NodeValue)) for v in values)
