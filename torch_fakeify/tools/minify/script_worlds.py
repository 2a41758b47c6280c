"""Process groups, device meshes and DTensors in a script of a frame.

The script's process has the recorded rank of a world of torch's ``fake`` backend. Groups have their
recorded names if the graph contains these as text; meshes make their own groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_fakeify.encoding.meshes import is_group, is_mesh, mesh_ranks
from torch_fakeify.frames.process_groups import needed_world, ranks_of, world_of_calls
from torch_fakeify.tools.worker.comparing import is_distributed

from .script_code import filled, with_gradient

if TYPE_CHECKING:
    from torch_fakeify.frames.instances import Instance
    from torch_fakeify.records.frame import CaptureDesc, InputDesc

_GROUP = """\
def named_group(name, ranks):
    made, _ = c10d._new_process_group_helper(
        len(ranks), ranks.index(dist.get_rank()), ranks, dist.Backend("fake"), FakeStore(), name,
        timeout=dist.default_pg_timeout,
    )
    c10d._world.pg_group_ranks[made] = {rank: i for i, rank in enumerate(ranks)}
    c10d._world.group_count = max(c10d._world.group_count, 1 + int(name) if name.isdecimal() else 0)
    return made


""".splitlines()


class ScriptWorld:
    """Writes the process groups, meshes and DTensors of a frame, of which ``instance`` is made."""

    def __init__(self, desc: CaptureDesc, instance: Instance) -> None:
        self._world = needed_world(desc)
        self._named = {} if self._world is None else world_of_calls(desc, self._world)
        values = zip(desc.inputs, instance.inputs, strict=True)
        self._values: dict[str, Any] = {entry.name: value for entry, value in values}
        self._meshes: list[tuple[Any, str, str]] = []
        self._inputs = {name: self._of(value) for name, value in self._values.items()}

    def lines(self) -> list[str]:
        """Write the lines at the top of the script; none for a frame without process groups."""
        world = self._world
        if world is None:
            return []
        imports = [
            "import torch.distributed as dist",
            "import torch.distributed.distributed_c10d as c10d",
            "from torch.distributed.device_mesh import DeviceMesh, init_device_mesh",
            "from torch.distributed.tensor import DTensor, Partial, Replicate, Shard",
            "from torch.distributed.tensor.placement_types import _StridedShard",
            "from torch.testing._internal.distributed.fake_pg import FakeStore",
        ]
        lines = [
            *imports,
            "",
            f"# This process is rank {world.rank} of {world.size}: the backend is fake, and its",
            "# collectives copy what this rank has. No other process and no network is needed.",
            "dist.init_process_group(",
            f'    "fake", store=FakeStore(), rank={world.rank}, world_size={world.size}',
            ")",
        ]
        made = {name: ranks for name, ranks in self._named.items() if name != "0"}
        if made:
            lines += ["", "", *_GROUP]
            lines += [f"named_group({name!r}, {list(ranks)})" for name, ranks in made.items()]
        lines += [f"{name} = {call}" for _, name, call in self._meshes]
        return lines

    def code(self, line: str) -> str:
        """Replace names in a line of the graph's code by importable ones."""
        line = line.replace("torch.distributed.tensor._api.from_local(", "DTensor.from_local(")
        line = line.replace(
            "torch.distributed.tensor.placement_types._StridedShard", "_StridedShard"
        )
        return line.replace(", sf=", ", split_factor=")

    def input(self, entry: InputDesc) -> str | None:
        """Write the expression for a mesh, a process group or a DTensor; ``None`` for any other input."""
        found = self._inputs[entry.name]
        if found is None or entry.tensor is None:
            return found
        tensor = entry.tensor
        whole: Any = self._values[entry.name]
        local: Any = whole.to_local()
        if tensor.base is not None or type(local).__name__ != "FakeTensor":
            return None
        dtype = str(local.dtype).removeprefix("torch.")
        data = filled(dtype, str(_hints(local.shape)), local.ndim)
        geometry = f"shape={_hints(whole.shape)}, stride={_hints(whole.stride())}"
        made = f"DTensor.from_local({data}, {found}, {geometry})"
        return with_gradient(made, tensor)

    def _of(self, value: Any) -> str | None:
        """Write a mesh or group, or the mesh and placements of a DTensor; ``None`` for any other value."""
        if is_mesh(value):
            return self._mesh(value)
        if is_group(value):
            name = str(value.group_name)
            assert self._world is not None
            ranks = next(ranks_of(self._world, g) for g in self._world.groups if g.name == name)
            self._named.setdefault(name, tuple(ranks))
            return f"c10d._resolve_process_group({name!r})"
        if not is_distributed(value):
            return None
        placements = [_placement_text(p) for p in value.placements]
        mesh = self._mesh(value.device_mesh)
        if mesh is None or None in placements:
            return None
        return f"{mesh}, [{', '.join(map(str, placements))}]"

    def _mesh(self, mesh: Any) -> str | None:
        root = mesh._root_mesh
        names = mesh._mesh_dim_names
        if root is not None and root is not mesh:
            root_name = self._mesh(root)
            if root_name is None or not names or not set(names) <= set(root._mesh_dim_names or ()):
                return None
            part = names[0] if len(names) == 1 else tuple(names)
            return f"{root_name}[{part!r}]"
        for other, name, _ in self._meshes:
            if other == mesh:
                return name
        ranks = mesh_ranks(mesh)
        named = f", mesh_dim_names={tuple(names)}" if names else ""
        whole = self._world is not None and self._world.size == ranks.numel()
        if whole and ranks.flatten().tolist() == list(range(ranks.numel())):
            call = f"init_device_mesh({mesh._device_type!r}, {tuple(ranks.shape)}{named})"
        else:
            call = f"DeviceMesh({mesh._device_type!r}, {ranks.tolist()}{named})"
        name = f"mesh_{len(self._meshes)}"
        self._meshes.append((mesh, name, call))
        return name


def _hints(sizes: Any) -> tuple[int, ...]:
    return tuple(n if isinstance(n, int) else n.node.hint or 2 for n in sizes)


def _placement_text(p: Any) -> str | None:
    match type(p).__name__:
        case "Shard":
            return f"Shard({p.dim})"
        case "Replicate":
            return "Replicate()"
        case "Partial":
            return f"Partial({p.reduce_op!r})"
        case "_StridedShard":
            return f"_StridedShard({p.dim}, split_factor={p.split_factor})"
        case _:
            return None
