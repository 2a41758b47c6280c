"""A distributed program over gloo, whose processes record their frames or run recorded ones.

``PYTHONPATH=tests/harness python tests/zoo/rank_programs.py record|run|refuse WORLD FOLDER [NAME...]`` makes a process for each rank;
they meet at a file of the folder, and write what they have to say to ``FOLDER/MODE.RANK.txt``. ``record`` writes ``FOLDER/NAME.RANK.fkf``; ``run`` loads ``FOLDER/NAME.0.fkf``, compiles
it for its own rank and compares results, and the gradients of weights, with eager ones.
"""

from __future__ import annotations

import datetime
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from captured_frames import captures_of
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Program = tuple["Callable[..., Any]", tuple[Any, ...]]

SAME = (
    *("all_reduce_in_a_part", "mesh_argument", "gather_in_the_world", "tensor_parallel"),
    *("two_dims", "uneven", "fully_sharded", "partial"),
)
"""Programs that are the same on all ranks."""
OF_A_RANK = ("asks_for_rank", "uneven_local", "group_of_two")
"""Programs whose graphs differ between ranks."""


class Mlp(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output of the second."""
        return self.down(self.up(x).relu())


def programs() -> dict[str, Program]:
    """What is compiled, and its arguments on this rank, by name."""
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    line = init_device_mesh("cpu", (world,), mesh_dim_names=("all",))
    pairs = [dist.new_group([i, i + 1]) for i in range(0, world, 2)]
    pair = pairs[rank // 2]
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    own = torch.arange(6.0) + rank
    whole = torch.arange(24.0).reshape(8, 3) / 10
    odd = torch.arange(15.0).reshape(5, 3) / 10

    def on(tensor: torch.Tensor, mesh: Any, *placements: Any) -> DTensor:
        return distribute_tensor(tensor.clone(), mesh, placements).detach().requires_grad_()

    return {
        "all_reduce_in_a_part": (
            lambda x: functional.all_reduce(x.sin(), "sum", (mesh, 0)) + 1,
            (own,),
        ),
        "mesh_argument": (
            lambda x, m: functional.all_reduce(x.sin(), "sum", m["tp"].get_group()) * m.size(),
            (own, mesh),
        ),
        "gather_in_the_world": (
            lambda x: functional.all_gather_tensor(x.cos(), 0, dist.group.WORLD),
            (own,),
        ),
        "tensor_parallel": (
            parallelize_module(Mlp(), mesh["tp"], plan),
            (torch.ones(2, 8).requires_grad_(),),
        ),
        "two_dims": (
            lambda a: (a * 2).redistribute(placements=[Replicate(), Shard(0)]).to_local().sin(),
            (on(whole, mesh, Shard(0), Shard(0)),),
        ),
        "uneven": (
            lambda a: (a * a).redistribute(placements=[Replicate()]).full_tensor().sin(),
            (on(odd, line, Shard(0)),),
        ),
        "fully_sharded": (fully_shard(Mlp(), mesh=line), (torch.ones(2, 8).requires_grad_(),)),
        "partial": (
            lambda x: DTensor.from_local(x, line, [Partial()]).full_tensor() * 2,
            (own.clone().requires_grad_(),),
        ),
        "asks_for_rank": (lambda x: x * dist.get_rank(), (own,)),
        "uneven_local": (lambda a: a.to_local() * 2, (on(odd, line, Shard(0)),)),
        "group_of_two": (lambda x: functional.all_reduce(x, "sum", pair), (own,)),
    }


def compare(capture: tfk.Capture, program: Program) -> None:
    """Compile a frame for this rank, and compare what it returns with what the program does."""
    function, args = program
    inputs: list[Any] = []

    def backend(gm: torch.fx.GraphModule, example: list[Any]) -> Any:
        def run(*values: Any) -> Any:
            inputs[:] = values
            return gm.forward(*values)

        return run

    torch._dynamo.reset()
    expected = torch.compile(function, backend=backend)(*args)
    eager = _gradients(function(*args), inputs)
    torch.testing.assert_close(_plain(expected), _plain(function(*args)))
    compiled = capture.compile("aot_eager")
    (found,) = compiled(*inputs)
    torch.testing.assert_close(_plain(found), _plain(expected))
    if isinstance(
        function, FSDPModule
    ):  # its hooks, outside of the frame, are part of its backward
        return
    for one, other in zip(_gradients(found, inputs), eager, strict=True):
        torch.testing.assert_close(one, other)


def _plain(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value.detach()


def _gradients(result: Any, inputs: list[Any]) -> list[torch.Tensor]:
    leaves = [v for v in inputs if isinstance(v, torch.Tensor) and v.requires_grad]
    if not leaves or not result.requires_grad:
        return []
    found = torch.autograd.grad(_sum(result), leaves, allow_unused=True)
    return [_plain(grad) for grad in found if grad is not None]


def _sum(value: Any) -> Any:
    return (value.to_local() if isinstance(value, DTensor) else value).sum()


def of_rank(mode: str, rank: int, world: int, folder: Path, names: list[str]) -> Iterator[str]:
    """Record or run programs as one rank, and yield what is to be said of them."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store_{mode}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=100),
    )
    made = programs()
    for name in names:
        if mode == "record":
            function, args = made[name]
            captures_of(function, args)[0].save(folder / f"{name}.{rank}.fkf")
            continue
        capture = tfk.Capture.load(folder / f"{name}.0.fkf")
        if mode == "run":
            compare(capture, made[name])
            continue
        try:
            capture.compile("eager")
        except tfk.CaptureError as error:
            yield f"{name}: {error}"
        else:
            yield f"{name}: compiled"
    dist.barrier()
    dist.destroy_process_group()
    yield "done"


def forked(mode: str, rank: int, world: int, folder: Path, names: list[str]) -> int:
    """Start a process for a rank, and return its id. Torch is imported, and nothing of it has run."""
    child = os.fork()
    if child:
        return child
    lines: list[str] = []
    try:
        lines += of_rank(mode, rank, world, folder, names)
    except BaseException:
        lines.append(traceback.format_exc())
        raise
    finally:
        (folder / f"{mode}.{rank}.txt").write_text("\n".join(lines), encoding="utf-8")
        os._exit(0)


def main(mode: str, world: int, folder: Path, names: list[str]) -> None:
    """Run all ranks and wait for them."""
    for child in [forked(mode, rank, world, folder, names) for rank in range(world)]:
        os.waitpid(child, 0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
