"""Records without the writer's rank: equal on all ranks, rebuilt for any, refused where they cannot be."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import rank_programs
import torch
import torch.distributed as dist
from captured_frames import captures_of
from places import GOLDEN, ZOO
from processes import python
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_fakeify as tfk
from torch_fakeify.compat import torch_distributed
from torch_fakeify.errors import CaptureError, FormatError
from torch_fakeify.records.frame import ProcessGroupDesc, WorldDesc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

QUICK = ("all_reduce_in_a_part", "tensor_parallel")


def run_ranks(mode: str, world: int, folder: Path, names: tuple[str, ...]) -> list[str]:
    """Run a mode of `rank_programs` in a fresh process for each rank, and return what each has to say."""
    python(ZOO / "rank_programs.py", mode, str(world), folder, *names)
    said = [(folder / f"{mode}.{rank}.txt").read_text("utf-8") for rank in range(world)]
    assert all(text.endswith("done") for text in said), "\n".join(said)
    return said


def check_bytes(world: int, folder: Path, names: tuple[str, ...]) -> None:
    """Check that the ranks wrote equal files."""
    for name in names:
        files = [(folder / f"{name}.{rank}.fkf").read_bytes() for rank in range(world)]
        assert all(file == files[0] for file in files), name


@contextmanager
def as_rank(rank: int, size: int = 4) -> Iterator[None]:
    """Make this process a rank of a world of torch's backend ``fake``."""
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def on_rank(rank: int, make: Callable[[], tuple[Any, tuple[Any, ...]]]) -> tfk.Capture:
    """Return the first frame of a program, as a rank records it."""
    with as_rank(rank):
        function, args = make()
        torch._dynamo.reset()
        return captures_of(function, args)[0]


def square() -> Any:
    """Return a mesh of two dims."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def reduced() -> tuple[Any, tuple[Any, ...]]:
    """Return a program with a collective along a dim of a mesh that is not in its graph."""
    mesh = square()
    return lambda x: functional.all_reduce(x.sin(), "sum", (mesh, 0)), (torch.ones(3),)


def asking() -> tuple[Any, tuple[Any, ...]]:
    """Return a program with a number of its rank."""
    return lambda x: x * dist.get_rank(), (torch.ones(3),)


def uneven() -> tuple[Any, tuple[Any, ...]]:
    """Return a program of a tensor whose shards have two, two, one and no rows."""
    mesh = init_device_mesh("cpu", (4,))
    whole = distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)])
    return lambda a: (a * 2).redistribute(placements=[Replicate()]), (whole,)


def uneven_part() -> tuple[Any, tuple[Any, ...]]:
    """Return a program that takes its part of such a tensor."""
    mesh = init_device_mesh("cpu", (4,))
    whole = distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)])
    return lambda a: a.to_local() * 2, (whole,)


# --- processes over gloo --------------------------------------------------------------------------


@pytest.mark.sweep
def test_one_rank_records_and_both_run(tmp_path: Path) -> None:
    """Two processes write equal files; two new ones run that of rank 0, with eager's results."""
    run_ranks("record", 2, tmp_path, QUICK)
    check_bytes(2, tmp_path, QUICK)
    run_ranks("run", 2, tmp_path, QUICK)


@pytest.mark.sweep
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.long), 4])
def test_all_programs_in_two_and_four_processes(world: int, tmp_path: Path) -> None:
    """The files of the programs that are the same on all ranks are equal, and run on each rank."""
    names = (*rank_programs.SAME, *rank_programs.OF_A_RANK)
    run_ranks("record", world, tmp_path, names)
    check_bytes(world, tmp_path, rank_programs.SAME)
    run_ranks("run", world, tmp_path, rank_programs.SAME)
    if world == 2:
        return
    first, *others = run_ranks("refuse", world, tmp_path, rank_programs.OF_A_RANK)
    assert all(f"{name}: compiled" in first for name in rank_programs.OF_A_RANK)
    for printed in others:
        assert "asks_for_rank: the program asks for its rank" in printed
        assert "uneven_local: the program asks for its rank or its part" in printed
    assert "group_of_two: compiled" in others[0]
    assert "group_of_two: the rank is not in a process group '" in others[1]


# --- equal records --------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [reduced, uneven], ids=["collective", "uneven"])
def test_the_records_of_all_ranks_are_equal(make: Any) -> None:
    """Coordinates, names of groups and local sizes of the writer are not in the record."""
    first, *others = [tfk.dumps(on_rank(rank, make).desc) for rank in range(4)]
    assert all(other == first for other in others)


def test_a_record_has_the_groups_of_all_ranks() -> None:
    """The groups along a dim are recorded, also of a mesh that the graph does not have."""
    (group,) = on_rank(3, reduced).desc.world.groups  # pyright: ignore[reportOptionalMemberAccess]
    assert group == ProcessGroupDesc(name="1", ranks=(0, 2), parts=((0, 2), (1, 3)))


def test_a_record_of_one_rank_keeps_its_rank() -> None:
    """A program that asks for its rank is of that rank."""
    assert on_rank(2, asking).desc.world == WorldDesc(rank=2, size=4, rank_calls=("get_rank",))


# --- rebuilt for a rank ---------------------------------------------------------------------------


@pytest.mark.parametrize("rank", range(4))
def test_a_frame_is_that_of_the_rank(rank: int) -> None:
    """The group's name is that of the rank, in a world of its own and in that of the program."""
    capture = on_rank(0, reduced)
    name = "12"[rank % 2]
    assert f"'sum', '{name}'" in capture.instantiate(rank=rank).gm.code
    with capture.fake_world(rank=rank):
        assert dist.get_rank() == rank
        (out,) = capture.compile("aot_eager")(*capture.materialize())
        assert out.shape == (3,)
    with as_rank(rank):
        square()
        capture.compile("aot_eager")(torch.ones(3))


def test_the_rank_of_the_process_is_the_default() -> None:
    """Without process groups it is the lowest rank."""
    capture = on_rank(3, reduced)
    assert "'sum', '1'" in capture.instantiate().gm.code
    with as_rank(3):
        assert "'sum', '2'" in capture.instantiate().gm.code
        assert "'sum', '1'" in capture.instantiate(rank=0).gm.code


def test_a_group_of_another_name_is_found_by_its_ranks() -> None:
    """A process that made other groups before has the group under another name."""
    capture = on_rank(0, reduced)
    with as_rank(1):
        dist.new_group([0, 1])
        square()
        assert "'sum', '3'" in capture.instantiate().gm.code
        capture.compile("aot_eager")(torch.ones(3))


@pytest.mark.parametrize(("rank", "rows"), [(0, 2), (1, 2), (2, 1), (3, 0)])
def test_local_sizes_are_those_of_the_rank(rank: int, rows: int) -> None:
    """They are computed by torch's rule, for fake and for real inputs."""
    capture = on_rank(1, uneven)
    for (whole,) in (capture.instantiate(rank=rank).inputs, capture.materialize(rank=rank)):
        assert isinstance(whole, DTensor)
        assert whole.to_local().shape == (rows, 3)
        assert whole.device_mesh.get_coordinate() == (rank,)


def test_an_old_file_is_rebuilt_for_another_rank() -> None:
    """Its groups follow from its meshes; by default it is of the rank that recorded it."""
    capture = tfk.Capture.load(GOLDEN / "process_groups.fkf")
    (mesh,) = [v for v in capture.instantiate().inputs if not isinstance(v, (torch.Tensor, int))][
        :1
    ]
    assert mesh.get_coordinate() == (0, 1)
    moved = capture.at_rank(2)
    assert [(g.name, g.ranks) for g in moved.desc.world.groups] == [("1", (0, 2)), ("4", (2, 3))]  # pyright: ignore
    with capture.fake_world(rank=2):
        capture.compile("aot_eager")


def test_a_frame_without_groups_is_that_of_any_rank() -> None:
    """A rank has no meaning for it."""
    (capture,) = captures_of(lambda x: x + 1, (torch.ones(2),))
    assert capture.at_rank(7) is capture
    capture.compile("eager", rank=7)


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [-1, 4, "2", True, 1.0])
def test_a_rank_outside_of_the_world_is_refused(rank: Any) -> None:
    """The error has the ranks that there are."""
    capture = on_rank(0, reduced)
    for rebuild in (capture.at_rank, lambda r: capture.compile("eager", rank=r)):
        with pytest.raises(
            CaptureError, match=rf"no such rank; expected a rank from 0 to 3; found {rank!r}\."
        ):
            rebuild(rank)


def test_a_frame_without_meshes_needs_no_classes_of_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import takes long, and is not possible in every build."""
    world = WorldDesc(rank=0, size=4, groups=(ProcessGroupDesc(name="0", ranks=(0, 1)),))
    desc = msgspec.structs.replace(captures_of(torch.sin, (torch.ones(3),))[0].desc, world=world)
    monkeypatch.setattr(torch_distributed, "device_meshes", None)
    moved = tfk.Capture(desc).at_rank(1).desc.world
    assert moved is not None
    assert (moved.rank, moved.groups) == (1, world.groups)


def test_another_rank_than_that_of_the_process_cannot_run() -> None:
    """It can be looked at, and not compiled."""
    capture = on_rank(0, reduced)
    with as_rank(1):
        square()
        assert capture.instantiate(rank=2).inputs
        with pytest.raises(CaptureError, match=r"expected rank 2 of 4.*found rank 1 of 4"):
            capture.compile("eager", rank=2)


@pytest.mark.parametrize("make", [asking, uneven_part], ids=["rank", "part"])
def test_a_number_of_the_rank_is_refused_on_others(make: Any) -> None:
    """The error has the function by which the program asked."""
    capture = on_rank(1, make)
    capture.instantiate()
    message = (
        r"asks for its rank or its part.*expected rank 1, .*found rank 0, and (get_rank|to_local)"
    )
    with pytest.raises(CaptureError, match=message):
        capture.at_rank(0)
    with as_rank(0), pytest.raises(CaptureError, match=message):
        capture.instantiate()


def test_a_rank_outside_of_a_group_is_refused() -> None:
    """A group that is of no mesh has its own ranks only."""

    def pair() -> tuple[Any, tuple[Any, ...]]:
        group = dist.new_group([0, 1])
        return lambda x: functional.all_reduce(x, "sum", group), (torch.ones(3),)

    capture = on_rank(1, pair)
    assert tfk.dumps(capture.desc) == tfk.dumps(on_rank(0, pair).desc)
    with pytest.raises(CaptureError, match=r"not in a process group '1' .*ranks 0, 1; found 2"):
        capture.at_rank(2)


def test_a_graph_of_aten_operators_with_numbers_is_of_its_rank() -> None:
    """It was traced below the program: its numbers may be those of a rank, unless the user says that they are not."""

    def traced(rank: int, function: Any) -> tfk.Capture:
        with as_rank(rank):
            x = torch.ones(4)
            return tfk.capture(make_fx(function, tracing_mode="fake")(x))

    def plain(x: torch.Tensor) -> Any:
        return functional.all_reduce(x.sin(), "sum", dist.group.WORLD)

    def shifted(x: torch.Tensor) -> Any:
        return functional.all_reduce(x[dist.get_rank() :], "sum", dist.group.WORLD)

    assert tfk.dumps(traced(0, plain).desc) == tfk.dumps(traced(3, plain).desc)
    capture = traced(1, shifted)
    with as_rank(2), pytest.raises(CaptureError, match="may have numbers of the rank"):
        capture.instantiate()
    assert capture.at_rank(2).desc.world == WorldDesc(
        rank=2, size=4, groups=(ProcessGroupDesc(name="0"),)
    )


BAD_PARTS = {
    "a rank twice": ((0, 1), (1, 2)),
    "a rank that there is not": ((0, 1), (2, 9)),
    "without the group": ((0, 2), (1, 3)),
    "too many": ((0, 1), (2, 3, 4, 5)),
}


@pytest.mark.parametrize("case", BAD_PARTS)
def test_impossible_parts_are_refused(case: str) -> None:
    """The record is checked before it is used."""
    desc = on_rank(0, reduced).desc
    group = ProcessGroupDesc(name="1", ranks=(0, 1), parts=BAD_PARTS[case])
    world = WorldDesc(rank=0, size=4, groups=(group,))
    capture = tfk.Capture(msgspec.structs.replace(desc, world=world))
    with pytest.raises(FormatError, match=r"\$\.world\.groups\[0\]\.parts"):
        capture.at_rank(1)
