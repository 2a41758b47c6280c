"""``recording``: what is compiled in a block is on record, and torch is as it was after it."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dynamo import output_graph

import torch_fakeify as tfk

if TYPE_CHECKING:
    from pathlib import Path


def hooked() -> tuple[Any, Any]:
    """The functions of torch that a recording replaces."""
    return (
        output_graph.OutputGraph._call_user_compiler,
        output_graph.get_backend_override_for_compile_id,
    )


def compile_one(number: int, backend: Any = "eager") -> None:
    """Compile a frame of its own."""
    torch._dynamo.reset()
    torch.compile(lambda x: x + number, backend=backend)(torch.ones(2))


def refuse(gm: Any, inputs: Any) -> Any:
    """A backend that fails."""
    raise ValueError("no")


def test_a_block_records_every_backend(tmp_path: Path) -> None:
    """The sequence has what was compiled inside, with the backend's name; nothing from outside."""
    compile_one(1)
    with tfk.recording(tmp_path / "a") as frames:
        compile_one(2, "eager")
        assert [each.desc.state for each in frames] == [None]
        compile_one(3, "aot_eager")
    compile_one(4)
    assert [each.desc.backend for each in frames] == ["eager", "aot_eager"]
    assert [path.name[:4] for path in frames.paths] == ["000-", "001-"]
    assert sorted((tmp_path / "a").iterdir()) == frames.paths
    assert (frames[-1].fingerprint(), len(frames[:1])) == (
        tfk.Capture.load(frames.paths[1]).fingerprint(),
        1,
    )


def test_a_failure_leaves_its_capture_and_torch_as_it_was(tmp_path: Path) -> None:
    """The exception of a backend leaves the block, and is in the capture."""
    before, block = hooked(), tfk.recording(tmp_path)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no"), block as frames:
        compile_one(1, refuse)
    assert hooked() == before
    assert frames[0].desc.failure is not None
    assert frames[0].desc.failure.message == "no"


def test_blocks_may_be_nested_and_end_in_any_order(tmp_path: Path) -> None:
    """Each records a frame, with the backend's own name and place; the last one restores torch."""
    before = hooked()
    outer, inner = tfk.recording(tmp_path), tfk.recording(tmp_path)
    one, two = outer.__enter__(), inner.__enter__()
    compile_one(1, _mine)
    outer.__exit__(None, None, None)
    compile_one(2)
    inner.__exit__(None, None, None)
    assert hooked() == before
    assert (len(one), len(two), len(list(tmp_path.iterdir()))) == (1, 2, 3)
    descs = [one[0].desc, two[0].desc]
    assert [(each.backend, each.backend_place) for each in descs] == [
        ("_mine", f"{__name__}:_mine")
    ] * 2


def _mine(gm: Any, inputs: Any) -> Any:
    return gm.forward


def test_frames_of_all_threads_are_recorded(tmp_path: Path) -> None:
    """Blocks of two threads overlap; torch is as it was after the last one."""
    before, inside, leave = hooked(), threading.Event(), threading.Event()

    def other() -> None:
        with tfk.recording(tmp_path / "other"):
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(60)
    with tfk.recording(tmp_path / "here") as frames:
        compile_one(1)
    leave.set()
    thread.join()
    assert hooked() == before
    assert len(frames) == len(list((tmp_path / "other").iterdir())) == 1


def test_a_block_that_compiles_nothing_leaves_no_folder(tmp_path: Path) -> None:
    """Folders that the block made are removed; those that were there stay."""
    (tmp_path / "there").mkdir()
    for name in ("there", "new/deep"):
        with tfk.recording(tmp_path / name) as frames:
            pass
        assert list(frames) == []
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """The block does not begin, and torch is as it was; no backend is made for a file in its place."""
    before = hooked()
    (tmp_path / "file").write_text("")
    with pytest.raises(tfk.WriteError, match="the directory cannot be written"):
        tfk.recording(tmp_path / "file" / "x").__enter__()
    assert hooked() == before
    with pytest.raises(tfk.WriteError, match="the directory cannot be written"):
        tfk.record(tmp_path / "file")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_writes_into_its_own_folder(tmp_path: Path) -> None:
    """A process that was forked after a frame was recorded begins with number 000 in ``PID``."""
    with tfk.recording(tmp_path) as frames:
        compile_one(1)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                compile_one(2)
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
    assert len(frames) == 1
    assert [path.name[:4] for path in (tmp_path / str(child)).iterdir()] == ["000-"]


def test_two_recorders_of_one_directory_never_share_a_file(tmp_path: Path) -> None:
    """A number that is taken, also by a file that is not written yet, is skipped."""
    with tfk.recording(tmp_path) as frames:
        compile_one(1)
        name = frames.paths[0].name[4:]
        (tmp_path / f"001-{name}").touch()
        compile_one(1)
    assert [path.name for path in frames.paths] == [f"000-{name}", f"002-{name}"]


class _Unhashable:
    """An attribute of a tensor whose hash and comparison fail."""

    def __hash__(self) -> int:
        raise RuntimeError("no hash")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")


def test_objects_of_the_program_are_not_compared(tmp_path: Path) -> None:
    """An input's ``tag``, which Dynamo puts into the metadata, is left out of the record by name."""
    x: Any = torch.ones(3)
    x.tag = _Unhashable()
    torch._dynamo.reset()
    with tfk.recording(tmp_path) as frames:
        torch.compile(lambda a: a + 1, backend="eager")(x)
    (frame,) = frames
    (lost,) = frame.desc.graph.nodes[0].dropped_meta
    assert lost[0] == "tensor_dict.tag"
