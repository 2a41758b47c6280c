"""Worker processes: every way to end, limits of time and memory, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from captured_frames import small_and_large
from planting import plant
from processes import is_there, until
from warm_workers import WarmServer, idle

import torch_fakeify as tfk
from torch_fakeify import cli
from torch_fakeify.serialization.capture_file import read_capture
from torch_fakeify.tools import replaying
from torch_fakeify.tools.worker import client
from torch_fakeify.tools.worker import limits as watching
from torch_fakeify.tools.worker.fork_server import ForkServer
from torch_fakeify.tools.worker.replies import Compiled, Ended, Failed, Raised, Ran, Refused

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from torch_fakeify.tools.worker.replies import Answer


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small and a large capture."""
    return small_and_large(tmp_path_factory.mktemp("captures"))


BACKENDS = '''
import subprocess, sys


def planted_deaf(gm, inputs):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGABRT})
    planted_hangs(gm, inputs)


def planted_feeds(gm, inputs):
    """A process of its own eats."""
    code = "import time; x = b'x' * (600 << 20); print('fed', flush=True); time.sleep(1000)"
    subprocess.run([sys.executable, "-c", code])


def planted_asks(gm, inputs):
    bytearray(1 << 60)


def planted_aborts(gm, inputs):
    os.abort()


def planted_killed(gm, inputs):
    os.kill(os.getpid(), signal.SIGKILL)


def planted_exits(gm, inputs):
    os._exit(3)


def planted_leaves(gm, inputs):
    """A process of its own outlives it."""
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid
    Path(__file__).with_name("left").write_text(str(left))
    return gm
'''


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    """A folder of planted backends that Dynamo finds in every process started from here."""
    folder = tmp_path_factory.mktemp("planted")
    with pytest.MonkeyPatch.context() as patch:
        plant(folder, BACKENDS, patch)
        yield folder


@pytest.fixture(scope="module")
def server(planted: Path) -> Generator[ForkServer]:
    """A server whose next request no planted fault may affect."""
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
def test_every_end_of_a_child_is_reported(
    server: ForkServer,
    pair: tuple[Path, Path],
    backend: str,
    limits: dict[str, Any],
    word: str,
    detail: str,
) -> None:
    """One server reports a hang, lack of memory and a signal as such, one after the other."""
    answer = compile_with(server, pair[0], backend, **limits)
    desc = read_capture(pair[0])
    within: dict[str, Any] = {"timeout": 100.0, **limits}
    found = replaying.judge(desc, answer, **within)
    assert (found.verdict, found.holds, found.details[0]) == (word, False, detail)
    if backend in {"planted_hangs", "planted_eats", "planted_aborts", "planted_segfaults"}:
        assert any(f"in {backend}" in line for line in found.details), found.details


def test_a_reported_exception_has_its_innermost_frames(
    server: ForkServer, pair: tuple[Path, Path]
) -> None:
    """The frames distinguish failures with equal messages."""
    desc = read_capture(pair[0])
    answer = compile_with(server, pair[0], "planted_asks")
    assert isinstance(answer.outcome, Failed)
    assert answer.outcome.error.frames[-1].endswith(" in planted_asks")
    found = replaying.judge(desc, answer, timeout=1)
    assert (found.verdict, found.details[0]) == ("out of memory", "  MemoryError: ")
    differs = ("differs here:", "  backend: eager recorded, planted_asks here")
    assert found.details[1:] == differs
    answer = server.ask({"task": "no such"}, timeout=100)
    assert isinstance(answer.outcome, Raised)
    assert answer.outcome.error.type == "builtins.KeyError"
    found = replaying.judge(desc, answer, timeout=1)
    assert (found.verdict, found.details[0]) == ("crashes", "  KeyError: 'no such'")
    assert found.details[-1].endswith(" in carry_out")


def test_a_child_leaves_no_process(
    server: ForkServer, planted: Path, pair: tuple[Path, Path]
) -> None:
    """The processes that a child has started end with it, also if it ends without a fault."""
    answer = compile_with(server, pair[0], "planted_leaves")
    assert isinstance(answer.outcome, Compiled)
    pid = int((planted / "left").read_text())
    until(lambda: not is_there(pid), seconds=1)


@pytest.mark.sweep
def test_an_idle_interpreter_of_the_tests_has_nothing_of_an_earlier_request(
    planted: Path, pair: tuple[Path, Path]
) -> None:
    """A warm server answers after a crash and an import as a new one does, from one interpreter."""
    idle.clear()
    (planted / "asked.py").write_text("")
    asked = {"directory": str(planted), "imports": ["asked"]}
    absent = {"task": "run", "backend": "eager", "sizes": [], "absent": ["asked"]}
    used: list[Any] = []
    answers: list[Answer] = []
    for request in (
        {**absent, **asked},
        {"task": "compile", "backend": "planted_segfaults", "device": None},
        absent,
    ):
        with WarmServer() as server:
            answers.append(server.ask({"file": str(pair[0]), **request}, timeout=100))
            used.append(server._server)
    idle.clear()
    imported, crashed, other = (answer.outcome for answer in answers)
    assert isinstance(imported, Refused)
    assert "found asked" in imported.message
    assert isinstance(crashed, Ended)
    assert crashed.status == -signal.SIGSEGV
    assert isinstance(other, Ran)
    assert used[0] is used[1] is used[2]


@pytest.mark.sweep
def test_a_killed_server_is_replaced(server: ForkServer, pair: tuple[Path, Path]) -> None:
    """The request that it had is answered, and the next one gets a new server."""
    assert isinstance(compile_with(server, pair[0], "eager").outcome, Compiled)
    process: Any = server._server
    os.kill(process.pid, signal.SIGKILL)
    answer = compile_with(server, pair[0], "eager")
    if not isinstance(answer.outcome, Compiled):
        assert answer.outcome == Ended("crashes", -signal.SIGKILL)
    assert isinstance(compile_with(server, pair[0], "eager").outcome, Compiled)


@pytest.mark.sweep
def test_replay_has_limits(
    planted: Path, pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The command kills a compilation that exceeds its memory limit and ends with status 1."""
    assert planted.exists()
    args = ["replay", str(pair[0]), "--memory", "600", "--backend", "planted_eats"]
    assert cli.main(args) == 1
    printed = capsys.readouterr().out
    assert printed.startswith(
        "out of memory\n  with planted_eats, cpu\n  killed at more than 600 MiB\n"
    )
    assert "in planted_eats" in printed


def test_the_memory_of_a_process_includes_its_children() -> None:
    """What a child allocates counts, files that it has mapped do not."""
    before = watching.memory_of(os.getpid())
    code = "x = b'x' * (200 << 20); print(flush=True); input()"
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as child:
        child.stdout.readline()
        during = watching.memory_of(os.getpid())
        child.communicate(b"\n")
    assert 200 << 20 <= during - before < 260 << 20
    assert watching.memory_of(os.getpid()) - before < 30 << 20


def test_the_default_limit_is_nine_tenths_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The free memory is that of the machine or of the control group, whichever has less."""
    free = watching.free_memory()
    assert free is not None
    assert 0 < free < 1 << 50
    monkeypatch.setattr(replaying, "free_memory", lambda: 1000)
    assert replaying.allowed_memory(None) == 900
    assert replaying.allowed_memory(5) == 5
    monkeypatch.setattr(replaying, "can_count_memory", lambda: False)
    assert replaying.allowed_memory(None) is None
    with pytest.raises(tfk.FakeifyError, match="memory of a process cannot be counted"):
        replaying.allowed_memory(5)


def test_the_free_memory_of_a_group_is_its_unused_limit(tmp_path: Path) -> None:
    """A control group without a limit has no amount of free memory."""
    (tmp_path / "max").write_text("1000\n")
    (tmp_path / "used").write_text("300\n")
    assert watching._free_of_group(("max", "used", tmp_path)) == 700
    (tmp_path / "max").write_text("max\n")
    assert watching._free_of_group(("max", "used", tmp_path)) is None
    assert watching._free_of_group(("no", "used", tmp_path)) is None


def test_an_interrupted_caller_ends_its_child(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path]
) -> None:
    """Ctrl-C while a child works leaves no process behind."""
    pids: list[int] = []

    def interrupted(pid: int, *args: Any, **kwargs: Any) -> None:
        pids.append(pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "enforce", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replaying.replay_capture(pair[0], backend="eager")
    until(lambda: not is_there(pids[0]), seconds=1)
