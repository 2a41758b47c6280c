"""Programs over device meshes, each compiled in a world of four ranks; records their frames when run.

``python tests/zoo/mesh_programs.py FOLDER [dynamic]`` writes ``FOLDER/NAME.fkf``.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES = (
    *("shard_to_replicate", "replicate_to_shard", "partial_to_replicate", "from_local"),
    *("partial_average", "to_local", "gradient_placements", "full_tensor", "two_dims", "part"),
    *("mesh_argument", "mesh_attribute", "placements_argument", "strided", "group_of_a_part"),
    *("collective_by_name", "collective_of_the_world", "mlp", "mlp_on_a_part", "fully_sharded"),
)


class Mlp(nn.Module):
    """Two layers behind a normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output of the second."""
        return self.down(self.up(self.norm(x)).relu())


class OnMesh(nn.Module):
    """A layer that has its mesh and placements."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.mesh, self.placements, self.linear = mesh, [Shard(0)], nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Its result on a part of the mesh."""
        part = self.mesh["dp"]
        return DTensor.from_local(self.linear(x), part, self.placements).to_local() * part.size()


def programs() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """What is compiled, and its arguments, by name. Needs a world of four ranks."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def leaf(*size: int) -> torch.Tensor:
        return torch.randn(*size, requires_grad=True)

    def whole(placements: list[Any], mesh: Any = line) -> DTensor:
        return distribute_tensor(leaf(8, 8), mesh, placements).detach().requires_grad_()

    strided = [_StridedShard(0, split_factor=2), Shard(0)]
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    plain = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    world = dist.group.WORLD
    made = (
        (lambda a: a.redistribute(line, [Replicate()]) * 2, (whole([Shard(0)]),)),
        (lambda a: a.redistribute(placements=[Shard(1)]) * 2, (whole([Replicate()]),)),
        (lambda a: (a @ a).redistribute(placements=[Replicate()]), (whole([Shard(1)]),)),
        (lambda x: DTensor.from_local(x, line, [Shard(0)]) * 2, (leaf(2, 8),)),
        (
            lambda x: DTensor.from_local(x, line, [Partial("avg")]).full_tensor() * 2,
            (leaf(8, 8),),
        ),
        (lambda a: a.to_local() * 2, (whole([Shard(0)]),)),
        (lambda a: a.to_local(grad_placements=[Partial()]) * 2, (whole([Replicate()]),)),
        (lambda a: a.full_tensor() * 2, (whole([Shard(0)]),)),
        (lambda a: a.redistribute(square, [Replicate(), Shard(0)]) + 1,
         (whole([Shard(0), Shard(1)], square),)),
        (lambda x: DTensor.from_local(x, square["tp"], [Shard(0)]).to_local() * 2, (leaf(2, 8),)),
        (lambda x, m: DTensor.from_local(x, m, [Shard(0)]).to_local() * m.size(), (leaf(2, 8), line)),
        (OnMesh(square), (leaf(2, 8),)),
        (lambda a, p: a.redistribute(placements=p) * 2, (whole([Shard(0)]), (Replicate(),))),
        (lambda x, p: DTensor.from_local(x, square, p).to_local() * 2, (leaf(2, 8), strided)),
        (lambda x, m: functional.all_reduce(x.sin(), "sum", m["tp"].get_group()),
         (torch.randn(4, 3), square)),
        (lambda x: functional.all_reduce(x.sin(), "sum", world.group_name), (torch.randn(4, 3),)),
        (lambda x: functional.all_gather_tensor(x.sin(), 0, world), (torch.randn(4, 3),)),
        (parallelize_module(Mlp(), line, plan), (leaf(2, 8, 8),)),
        (parallelize_module(Mlp(), square["tp"], plain), (leaf(2, 8, 8),)),
        (fully_shard(Mlp(), mesh=line), (leaf(2, 8, 8),)),
    )  # fmt: skip
    return dict(zip(NAMES, made, strict=True))


def record(folder: Path, *, dynamic: bool | None) -> None:
    """The first frame of each program."""
    from captured_frames import captures_of

    for name, (function, args) in programs().items():
        captures_of(function, args, dynamic=dynamic)[0].save(folder / f"{name}.fkf")


if __name__ == "__main__":
    import subclass_zoo

    warnings.simplefilter("ignore")
    with subclass_zoo.fake_world():
        record(Path(sys.argv[1]), dynamic=True if sys.argv[2:] == ["dynamic"] else None)
