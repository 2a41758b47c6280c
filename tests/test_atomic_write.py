"""After a fault during a write, the file is the old one or the new one, complete."""

from __future__ import annotations

import fcntl
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from captured_frames import small_and_large
from places import HARNESS
from processes import environment, fresh
from torch._dynamo.exc import BackendCompilerFailed

import torch_fakeify as tfk
from torch_fakeify._atomic_write import write_atomic
from torch_fakeify.serialization.capture_file import read_capture, write_capture

LEFTOVER = re.compile(r"\.c\.fkf\.[0-9a-f]{16}\.tmp")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small and a large capture."""
    return small_and_large(tmp_path_factory.mktemp("captures"))


def names(directory: Path) -> list[str]:
    """Return the names in a directory."""
    return sorted(entry.name for entry in directory.iterdir())


# --- killed at any moment -------------------------------------------------------------------------


def end_writers(
    pair: tuple[Path, Path], directory: Path, signals: list[signal.Signals], times: int
) -> int:
    """Kill or interrupt writers at random moments and check the file each time.

    Returns:
        How many of them left a temporary file, that is, were ended in the middle.
    """
    path = directory / "c.fkf"
    wholes = {whole.read_bytes() for whole in pair}
    server = subprocess.Popen(
        [sys.executable, str(HARNESS / "save_server.py"), *map(str, pair), str(path)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    middle = 0
    try:
        for number in range(times):
            print(file=server.stdin, flush=True)
            pid = int(server.stdout.readline())
            time.sleep(random.uniform(0, 0.03))
            os.kill(pid, signals[number % len(signals)])
            assert server.stdout.readline() == "ended\n"
            assert path.read_bytes() in wholes
            read_capture(path)
            left = [name for name in names(directory) if name != "c.fkf"]
            assert (
                len(left) <= 1
            )  # the next writer has removed the temporary file of the one before
            assert all(LEFTOVER.fullmatch(name) for name in left)
            middle += len(left)
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # end the writer too, which would write forever
        server.stdin.close()
        server.wait()
        server.stdout.close()
    return middle


def test_a_killed_writer_leaves_a_complete_file(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """The file is the old one or the new one, and a later save removes the temporary file."""
    middle = end_writers(pair, tmp_path, [signal.SIGKILL, signal.SIGTERM], 100)
    assert middle > 0
    write_capture(tmp_path / "c.fkf", read_capture(pair[0]))
    assert names(tmp_path) == ["c.fkf"]


def test_an_interrupted_writer_removes_its_temporary_file(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """Ctrl-C is an exception in Python, which a write handles except in its first lines."""
    assert end_writers(pair, tmp_path, [signal.SIGINT], 8) <= 1


# --- temporary files ------------------------------------------------------------------------------


def leftover(directory: Path, name: str = "c.fkf", digit: str = "0") -> Path:
    """Write a temporary file as an ended writer leaves it."""
    path = directory / f".{name}.{digit * 16}.tmp"
    path.write_bytes(b"part")
    return path


def test_a_save_removes_only_temporary_files_of_ended_writers_of_its_name(tmp_path: Path) -> None:
    """Files of running writers, of other names and of other kinds stay."""
    dead, at_work = leftover(tmp_path), leftover(tmp_path, digit="1")
    other = leftover(tmp_path, "d.fkf")
    folder = tmp_path / ".c.fkf.2222222222222222.tmp"
    folder.mkdir()
    link = tmp_path / ".c.fkf.3333333333333333.tmp"
    link.symlink_to(other)
    unlike = tmp_path / ".c.fkf.4.tmp"
    unlike.write_bytes(b"")
    with at_work.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write_atomic(tmp_path / "c.fkf", b"new")
    assert not dead.exists()
    remaining = {at_work, other, folder, link, unlike, tmp_path / "c.fkf"}
    assert set(tmp_path.iterdir()) == remaining


def test_a_temporary_file_that_another_writer_removes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is removed before it is locked is made again under another name."""
    lock, removed = fcntl.flock, list[str]()

    def slow(handle: int, how: int) -> None:
        if not removed:
            removed.append(names(tmp_path)[0])
            (tmp_path / removed[0]).unlink()
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", slow)
    write_atomic(tmp_path / "c.fkf", b"new")
    assert LEFTOVER.fullmatch(removed[0])
    assert (tmp_path / "c.fkf").read_bytes() == b"new"
    assert names(tmp_path) == ["c.fkf"]


def test_many_processes_save_to_one_path(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Each process succeeds, and the file is complete and that of one of them."""
    path, other = tmp_path / "c.fkf", pair[0].with_name("other.fkf")
    write_capture(other, msgspec.structs.replace(read_capture(pair[0]), backend="other"))
    code = """
        import sys
        from torch_fakeify.serialization.capture_file import read_capture, write_capture
        desc = read_capture(sys.argv[1])
        for _ in range(60):
            assert write_capture(sys.argv[2], desc) > 0
    """
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), str(source), str(path)],
            env=environment(),
        )
        for source in (pair[0], other) * 2
    ]
    assert [writer.wait() for writer in writers] == [0] * 4
    assert path.read_bytes() in {whole.read_bytes() for whole in (pair[0], other)}
    assert names(tmp_path) == ["c.fkf"]


# --- disks and paths ------------------------------------------------------------------------------

AT_A_LIMIT = """
import os, resource, subprocess, sys
from pathlib import Path
from torch_fakeify.errors import WriteError
from torch_fakeify._atomic_write import write_atomic

folder = Path(sys.argv[1])
path = folder / "c.fkf"
def look():
    print(path.read_bytes()[:3], path.stat().st_size, sorted(os.listdir(folder)))

{before}
write_atomic(path, b"old" * 100)
{limit}
try:
    write_atomic(path, bytes(1 << 20))
except WriteError as error:
    print(error)
look()
{after}
"""
"""A file is replaced where something keeps it from being written."""
LEFT = """
(folder / f".c.fkf.{'0' * 16}.tmp").write_bytes(bytes(200_000))
write_atomic(path, b"new" * 30_000)
look()
"""
"""Most of the disk is taken by the temporary file of a writer that has ended."""


def may_mount() -> bool:
    """Return whether a process may mount a file system on this machine."""
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        return False
    mount = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(mount, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("before", "limit", "after", "found"),
    [
        pytest.param(
            'subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", folder], check=True)', "", LEFT,
            "No space left on device. Free some space, or choose another disk",
            marks=pytest.mark.skipif(not may_mount(), reason="no process may mount a file system here"),
        ),
        ("", "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))", "",
         "File too large. Raise the limit on the size of a file, or choose another disk"),
        pytest.param(
            "folder.chmod(0o755)", "os.seteuid(65534)", "os.seteuid(0)",
            "Permission denied. Choose a directory that you may write to",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root may change the user of a process"),
        ),
    ],
    ids=["a full disk", "the system's limit on files", "no permission"],
)  # fmt: skip
def test_a_file_that_cannot_be_replaced_stays(
    before: str, limit: str, after: str, found: str
) -> None:
    """The error contains what to do; the temporary files of ended writers are removed first."""
    code = AT_A_LIMIT.format(before=before, limit=limit, after=after)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # which another user may enter
        unshare = ("unshare", "-rm") if "mount" in before else ()
        printed = fresh("-c", code, folder, before=unshare).stdout
        lines = [f"{folder}/c.fkf: the file cannot be written; found {found}"]
    lines.append("b'old' 300 ['c.fkf']")
    assert printed.splitlines() == [*lines, *["b'new' 90000 ['c.fkf']"] * (after == LEFT)]


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    """The target may be in another directory, and need not exist."""
    (tmp_path / "there").mkdir()
    link = tmp_path / "latest.fkf"
    link.symlink_to(tmp_path / "there" / "c.fkf")
    for data in (b"first", b"second"):
        write_atomic(link, data)
        assert link.is_symlink()
        assert (tmp_path / "there" / "c.fkf").read_bytes() == data
    assert names(tmp_path) == ["latest.fkf", "there"]


def test_a_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    """A device, a pipe and a circular link are refused and not replaced."""
    pipe, circle = tmp_path / "pipe", tmp_path / "circle"
    os.mkfifo(pipe)
    circle.symlink_to(circle)
    cases = [
        (pipe, "what is there is no file. Give the path of a file"),
        (Path(os.devnull), "what is there is no file. Give the path of a file"),
        (circle, "a symbolic link leads to itself. Mend the link, or choose another path"),
    ]
    for path, end in cases:
        with pytest.raises(tfk.WriteError) as error:
            write_atomic(path, b"new")
        assert str(error.value) == f"{path}: the file cannot be written; found {end}"
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)
    assert names(tmp_path) == ["circle", "pipe"]


def test_a_replaced_file_has_its_old_permissions(tmp_path: Path) -> None:
    """A file that only its owner could read can be read only by the owner after it is replaced."""
    path = tmp_path / "c.fkf"
    write_atomic(path, b"old")
    path.chmod(0o600)
    write_atomic(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_long_name_of_wide_letters_can_be_saved(tmp_path: Path) -> None:
    """A name may have 255 bytes, not letters, and the temporary file's name is no longer."""
    path = tmp_path / ("\N{SNOWMAN}" * 83 + ".fkf")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_failed_save_of_a_failure_is_reported(tmp_path: Path) -> None:
    """Dynamo gets the backend's exception, and the report has the error of the file."""

    def backend(gm: Any, inputs: Any) -> Any:
        path = recorder.folder.root / names(recorder.folder.root)[0]
        path.unlink()
        path.mkdir()
        raise RuntimeError("the backend's own")

    recorder = tfk.record(tmp_path, inner=backend)
    with pytest.raises(BackendCompilerFailed, match="the backend's own"):
        torch.compile(lambda x: x + 1, backend=recorder)(torch.ones(3))
    (report,) = recorder.frames
    assert report.problem is not None
    assert "a directory is in the way" in report.problem
    assert report.failure == "RuntimeError: the backend's own"
