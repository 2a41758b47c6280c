"""Faults: the old file or the new one is there, whole; and whoever asks a process gets an answer."""

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
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from planting import plant
from torch._dynamo.exc import BackendCompilerFailed

import torch_fakeify as tfk
from torch_fakeify import cli, isolation, verdict, watching
from torch_fakeify.files import read_capture, write_capture
from torch_fakeify.fork_server import ForkServer
from torch_fakeify.whole_files import write_whole

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch_fakeify.isolation import Answer

HERE = Path(__file__).parent
PACKAGE = str(HERE.parent)
LEFTOVER = re.compile(r"\.c\.fkf\.[0-9a-f]{16}\.tmp")


def captured(directory: Path) -> Path:
    """A capture of a small frame."""
    recorder = tfk.record(directory)
    torch.compile(lambda x: x.sin(), backend=recorder, dynamic=True)(torch.randn(3, 4))
    torch._dynamo.reset()
    return recorder.paths[-1]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small capture, and one that takes so long to write that a writer is often caught at it."""
    directory = tmp_path_factory.mktemp("captures")
    small = captured(directory)
    desc = msgspec.structs.replace(read_capture(small), backend=random.randbytes(1 << 20).hex())
    large = directory / "large.fkf"
    write_capture(large, desc)
    return small, large


def names(directory: Path) -> list[str]:
    """What is in a directory."""
    return sorted(entry.name for entry in directory.iterdir())


def run(code: str, *args: str | Path, **options: Any) -> str:
    """What a script prints in a process of its own."""
    done = subprocess.run(
        [*options.pop("before", ()), sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        env={**os.environ, "PYTHONPATH": PACKAGE},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- killed at any moment -------------------------------------------------------------------------


def end_writers(
    pair: tuple[Path, Path], directory: Path, signals: list[signal.Signals], times: int
) -> int:
    """End so many writers at random moments and look at the file each time.

    Returns:
        How many of them left a temporary file, that is, were ended in the middle.
    """
    path = directory / "c.fkf"
    wholes = {whole.read_bytes() for whole in pair}
    server = subprocess.Popen(
        [sys.executable, str(HERE / "save_server.py"), *map(str, pair), str(path)],
        env={**os.environ, "PYTHONPATH": PACKAGE},
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
            assert len(left) <= 1  # the next writer has removed that of the one before
            assert all(LEFTOVER.fullmatch(name) for name in left)
            middle += len(left)
    finally:
        os.killpg(
            server.pid, signal.SIGKILL
        )  # the writer too: one that lives on would write for ever
        server.stdin.close()
        server.wait()
        server.stdout.close()
    return middle


def test_a_writer_that_is_killed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Killed at any moment, it leaves the old file or the new one; a later save tidies up."""
    middle = end_writers(pair, tmp_path, [signal.SIGKILL, signal.SIGTERM], 100)
    assert middle > 0
    write_capture(tmp_path / "c.fkf", read_capture(pair[0]))
    assert names(tmp_path) == ["c.fkf"]


def test_a_writer_that_is_interrupted(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Ctrl-C is an exception in Python: the temporary file goes, but for one in its first lines."""
    assert end_writers(pair, tmp_path, [signal.SIGINT], 8) <= 1


# --- temporary files ------------------------------------------------------------------------------


def leftover(directory: Path, name: str = "c.fkf", digit: str = "0") -> Path:
    """A temporary file of a writer that is no more."""
    path = directory / f".{name}.{digit * 16}.tmp"
    path.write_bytes(b"part")
    return path


def test_a_save_removes_only_what_a_dead_writer_of_its_name_left(tmp_path: Path) -> None:
    """Not the file of a writer that is at work, of another name, or of another kind."""
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
        write_whole(tmp_path / "c.fkf", b"new")
    assert not dead.exists()
    kept = {at_work, other, folder, link, unlike, tmp_path / "c.fkf"}
    assert set(tmp_path.iterdir()) == kept


def test_a_temporary_file_that_is_taken_for_a_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removed between its making and its locking, it is made again under another name."""
    lock, removed = fcntl.flock, list[str]()

    def slow(handle: int, how: int) -> None:
        if not removed:
            removed.append(names(tmp_path)[0])
            (tmp_path / removed[0]).unlink()
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", slow)
    write_whole(tmp_path / "c.fkf", b"new")
    assert LEFTOVER.fullmatch(removed[0])
    assert (tmp_path / "c.fkf").read_bytes() == b"new"
    assert names(tmp_path) == ["c.fkf"]


def test_many_processes_save_to_one_path(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Each of them succeeds, and the file is that of one of them."""
    path, other = tmp_path / "c.fkf", pair[0].with_name("other.fkf")
    write_capture(other, msgspec.structs.replace(read_capture(pair[0]), backend="other"))
    code = """
        import sys
        from torch_fakeify.files import read_capture, write_capture
        desc = read_capture(sys.argv[1])
        for _ in range(60):
            assert write_capture(sys.argv[2], desc) > 0
    """
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), str(source), str(path)],
            env={**os.environ, "PYTHONPATH": PACKAGE},
        )
        for source in (pair[0], other) * 2
    ]
    assert [writer.wait() for writer in writers] == [0] * 4
    assert path.read_bytes() in {whole.read_bytes() for whole in (pair[0], other)}
    assert names(tmp_path) == ["c.fkf"]


# --- disks and paths ------------------------------------------------------------------------------

ON_A_SMALL_DISK = """
    import os, subprocess, sys
    from pathlib import Path
    from torch_fakeify.errors import WriteError
    from torch_fakeify.whole_files import write_whole

    disk = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)], check=True)
    path = disk / "c.fkf"
    write_whole(path, b"old" * 10_000)
    try:
        write_whole(path, bytes(1 << 20))
    except WriteError as error:
        print(error)
    print(path.read_bytes() == b"old" * 10_000, sorted(os.listdir(disk)))
    (disk / (".c.fkf." + "0" * 16 + ".tmp")).write_bytes(bytes(200_000))
    write_whole(path, b"new" * 10_000)
    print(path.read_bytes() == b"new" * 10_000, sorted(os.listdir(disk)))
"""


def may_mount() -> bool:
    """Whether a process may have a file system of its own here."""
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        return False
    mount = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(mount, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not may_mount(), reason="no process may mount a file system here")
def test_a_full_disk(tmp_path: Path) -> None:
    """The old file stays and the error says what to do; what dead writers left makes room."""
    said = run(ON_A_SMALL_DISK, tmp_path, before=["unshare", "-rm"])
    assert said.splitlines() == [
        f"{tmp_path}/c.fkf: the file cannot be written; found No space left on device. "
        "Free some space, or choose another disk",
        "True ['c.fkf']",
        "True ['c.fkf']",
    ]


def test_a_file_larger_than_allowed(tmp_path: Path) -> None:
    """The system's limit on the size of a file is an error like any other."""
    said = run(
        """
        import resource, sys
        from torch_fakeify.errors import WriteError
        from torch_fakeify.whole_files import write_whole
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        write_whole(sys.argv[1], b"old")
        try:
            write_whole(sys.argv[1], bytes(2000))
        except WriteError as error:
            print(error)
        """,
        tmp_path / "c.fkf",
    )
    assert said == (
        f"{tmp_path}/c.fkf: the file cannot be written; found File too large. "
        "Raise the limit on the size of a file, or choose another disk\n"
    )
    assert (tmp_path / "c.fkf").read_bytes() == b"old"
    assert names(tmp_path) == ["c.fkf"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody else; see test_container")
def test_a_directory_of_somebody_else() -> None:
    """Without the permission nothing changes and the error says so."""
    said = run(
        """
        import os, sys, tempfile
        from torch_fakeify.errors import WriteError
        from torch_fakeify.whole_files import write_whole
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            path = os.path.join(folder, "c.fkf")
            os.chmod(folder, 0o755)
            write_whole(path, b"old")
            os.seteuid(65534)
            try:
                write_whole(path, b"new")
            except WriteError as error:
                print(str(error).replace(path, "PATH"))
            print(open(path).read(), os.listdir(folder))
            os.seteuid(0)
        """
    )
    assert said == (
        "PATH: the file cannot be written; found Permission denied. "
        "Choose a directory that you may write to\nold ['c.fkf']\n"
    )


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path) -> None:
    """Also where that is elsewhere, or not there yet."""
    (tmp_path / "there").mkdir()
    link = tmp_path / "latest.fkf"
    link.symlink_to(tmp_path / "there" / "c.fkf")
    for data in (b"first", b"second"):
        write_whole(link, data)
        assert link.is_symlink()
        assert (tmp_path / "there" / "c.fkf").read_bytes() == data
    assert names(tmp_path) == ["latest.fkf", "there"]


def test_what_is_no_file_is_refused_and_stays(tmp_path: Path) -> None:
    """A device or pipe must not give way to a file; a link in a circle leads nowhere."""
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
            write_whole(path, b"new")
        assert str(error.value) == f"{path}: the file cannot be written; found {end}"
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)
    assert names(tmp_path) == ["circle", "pipe"]


def test_a_file_keeps_its_permissions(tmp_path: Path) -> None:
    """What only its owner could read, only its owner can read when it is replaced."""
    path = tmp_path / "c.fkf"
    write_whole(path, b"old")
    path.chmod(0o600)
    write_whole(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_long_name_of_wide_letters(tmp_path: Path) -> None:
    """A name has room for 255 bytes, not letters; every name that a file may have can be saved to."""
    path = tmp_path / ("\N{SNOWMAN}" * 83 + ".fkf")
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_failure_that_cannot_be_saved(tmp_path: Path) -> None:
    """Dynamo gets the backend's exception, the report says what is wrong with the file."""

    def backend(gm: Any, inputs: Any) -> Any:
        path = recorder.directory / names(recorder.directory)[0]
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


# --- a process that is asked ----------------------------------------------------------------------

BACKENDS = '''
import os, signal, subprocess, sys, time


def planted_hangs(gm, inputs):
    while True:
        time.sleep(1)


def planted_deaf(gm, inputs):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGABRT})
    planted_hangs(gm, inputs)


def planted_eats(gm, inputs):
    held = []
    while True:
        held.append(b"x" * (16 << 20))


def planted_feeds(gm, inputs):
    """A process of its own eats."""
    code = "import time; x = b'x' * (600 << 20); print('fed', flush=True); time.sleep(1000)"
    subprocess.run([sys.executable, "-c", code])


def planted_asks(gm, inputs):
    bytearray(1 << 60)


def planted_aborts(gm, inputs):
    os.abort()


def planted_segfaults(gm, inputs):
    os.kill(os.getpid(), signal.SIGSEGV)


def planted_killed(gm, inputs):
    os.kill(os.getpid(), signal.SIGKILL)


def planted_exits(gm, inputs):
    os._exit(3)


def planted_leaves(gm, inputs):
    """A process of its own outlives it."""
    print("left", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid)
    return gm
'''


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    """Where the planted backends are: Dynamo finds them in every process that starts from here."""
    folder = tmp_path_factory.mktemp("planted")
    with pytest.MonkeyPatch.context() as patch:
        plant(folder, BACKENDS, patch)
        yield folder


@pytest.fixture(scope="module")
def server(planted: Path) -> Generator[ForkServer]:
    """A server of which every planted fault has to leave the next request alone."""
    assert planted.exists()
    with ForkServer() as server:
        yield server


def compile_with(server: ForkServer, path: Path, backend: str, **limits: Any) -> Answer:
    """Ask a server to compile a capture."""
    request = {"task": "compile", "file": str(path), "backend": backend, "device": None}
    within: dict[str, Any] = {"timeout": 100.0, **limits}
    return server.ask(request, **within)


@pytest.mark.parametrize(
    ("backend", "limits", "word", "detail"),
    [
        ("planted_hangs", {"timeout": 2.0}, "hangs", "killed after 2 s"),
        ("planted_deaf", {"timeout": 1.0}, "hangs", "killed after 1 s"),
        ("planted_eats", {"memory": 700 << 20}, "out of memory", "killed at more than 700 MiB"),
        ("planted_feeds", {"memory": 500 << 20}, "out of memory", "killed at more than 500 MiB"),
        ("planted_aborts", {}, "crashes", "the process was ended by SIGABRT"),
        ("planted_segfaults", {}, "crashes", "the process was ended by SIGSEGV"),
        (
            "planted_killed",
            {},
            "out of memory",
            "the process was killed from outside (SIGKILL), as when memory runs out",
        ),
        ("planted_exits", {}, "crashes", "the process ended with exit status 3"),
    ],
)
def test_every_way_to_end(
    server: ForkServer,
    pair: tuple[Path, Path],
    backend: str,
    limits: dict[str, Any],
    word: str,
    detail: str,
) -> None:
    """A hang, lack of memory and a signal are reported as that; each is the next one's predecessor."""
    answer = compile_with(server, pair[0], backend, **limits)
    desc = read_capture(pair[0])
    within: dict[str, Any] = {"timeout": 100.0, **limits}
    found = verdict.judge(desc, answer, **within)
    assert (found.word, found.holds, found.details[0]) == (word, False, detail)
    if backend in {"planted_hangs", "planted_eats", "planted_aborts", "planted_segfaults"}:
        assert any(f"in {backend}" in line for line in found.details), found.details


def test_an_exception_is_told_with_its_innermost_frames(
    server: ForkServer, pair: tuple[Path, Path]
) -> None:
    """Whoever asks can tell one failure from another by where it comes from."""
    desc = read_capture(pair[0])
    answer = compile_with(server, pair[0], "planted_asks")
    assert answer.reply["frames"][-1].endswith(" in planted_asks")
    found = verdict.judge(desc, answer, timeout=1)
    assert (found.word, found.details) == ("out of memory", ("  builtins.MemoryError: ",))
    answer = server.ask({"task": "no such"}, timeout=100)
    assert answer.reply["outcome"] == "raised"
    assert answer.reply["type"] == "builtins.KeyError"
    found = verdict.judge(desc, answer, timeout=1)
    assert (found.word, found.details[0]) == ("crashes", "  builtins.KeyError: 'no such'")
    assert found.details[-1].endswith(" in main")


def gone(pid: int) -> bool:
    """Whether a process ends within a second."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def test_a_child_leaves_no_process(server: ForkServer, pair: tuple[Path, Path]) -> None:
    """What a child has started ends with it, also when it ends well."""
    answer = compile_with(server, pair[0], "planted_leaves")
    assert answer.reply["outcome"] == "compiled"
    (left,) = (int(line.split()[1]) for line in answer.tail if line.startswith("left"))
    assert gone(left)


@pytest.mark.sweep
def test_a_server_that_is_killed(server: ForkServer, pair: tuple[Path, Path]) -> None:
    """The request that it had is answered, and the next one has a new server."""
    assert compile_with(server, pair[0], "eager").ending == "replied"
    process: Any = server._server
    os.kill(process.pid, signal.SIGKILL)
    answer = compile_with(server, pair[0], "eager")
    if answer.ending != "replied":
        assert (answer.ending, answer.signal_name) == ("crashed", "SIGKILL")
    assert compile_with(server, pair[0], "eager").ending == "replied"


def test_replay_has_limits(
    planted: Path, pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The command kills a compilation that holds more than it may, and ends with status 1."""
    assert planted.exists()
    args = ["replay", str(pair[0]), "--memory", "600", "--backend", "planted_eats"]
    assert cli.main(args) == 1
    said = capsys.readouterr().out
    assert said.startswith("out of memory\n  killed at more than 600 MiB\n")
    assert "in planted_eats" in said


def test_memory_is_that_of_the_process_and_its_children() -> None:
    """What a child holds counts, what it has mapped of files does not."""
    before = watching.memory_of(os.getpid())
    code = "x = b'x' * (200 << 20); print(flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    during = watching.memory_of(os.getpid())
    child.communicate(b"\n")
    assert 200 << 20 <= during - before < 260 << 20
    assert watching.memory_of(os.getpid()) - before < 30 << 20


def test_the_default_is_a_part_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine tenths of it, of the machine or of the control group, whichever has less."""
    free = watching.free_memory()
    assert free is not None
    assert 0 < free < 1 << 50
    monkeypatch.setattr(verdict, "free_memory", lambda: 1000)
    assert verdict.allowed_memory(None) == 900
    assert verdict.allowed_memory(5) == 5
    monkeypatch.setattr(verdict, "can_count_memory", lambda: False)
    assert verdict.allowed_memory(None) is None
    with pytest.raises(tfk.FakeifyError, match="memory of a process cannot be counted"):
        verdict.allowed_memory(5)


def test_the_free_memory_of_a_group(tmp_path: Path) -> None:
    """A group without a limit has none to tell."""
    (tmp_path / "max").write_text("1000\n")
    (tmp_path / "used").write_text("300\n")
    assert watching._free_of_group(("max", "used", tmp_path)) == 700
    (tmp_path / "max").write_text("max\n")
    assert watching._free_of_group(("max", "used", tmp_path)) is None
    assert watching._free_of_group(("no", "used", tmp_path)) is None


def test_an_interrupted_caller_takes_the_child_along(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path]
) -> None:
    """Ctrl-C while a child works leaves no process behind."""
    pids: list[int] = []

    def interrupted(pid: int, *args: Any, **kwargs: Any) -> None:
        pids.append(pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(isolation, "watch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        verdict.replay(pair[0], backend="eager")
    assert gone(pids[0])
