"""Processes that compile on request: their import path, and that none outlives its parent."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from captured_frames import only_capture_of
from processes import COMMAND, PACKAGE, environment, fresh
from registered_backends import write_backends

import torch_fakeify as tfk
from torch_fakeify import cli
from torch_fakeify.records.frame import FailureDesc
from torch_fakeify.tools import fuzzing
from torch_fakeify.tools.minify.failures import Failure
from torch_fakeify.tools.minify.repro_script import check_script
from torch_fakeify.tools.minify.search import with_failure
from torch_fakeify.tools.replaying import judge
from torch_fakeify.tools.worker import client, fork_server
from torch_fakeify.tools.worker.client import ask, deferred_interrupts, import_path
from torch_fakeify.tools.worker.fork_server import ForkServer
from torch_fakeify.tools.worker.replies import (
    Answer,
    Compiled,
    Ended,
    Failed,
    Found,
    Thrown,
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a folder with a capture of a frame and with backends."""
    write_backends(tmp_path / "lib")
    frame().save(tmp_path / "frame.fkf")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def frame() -> tfk.Capture:
    """A capture of a frame with a dynamic size."""
    return only_capture_of(lambda x: x * 2, torch.ones(4), dynamic=True)


# --- what they can import -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pythonpath", "on_path", "expected"),
    [
        (None, [], []),
        ("", [], []),
        (".", [], ["HERE"]),
        ("lib", [], ["HERE/lib"]),
        ("../x:/abs:lib", [], ["HERE/../x", "/abs", "HERE/lib"]),
        ("lib:", [], ["HERE/lib", "HERE"]),
        (None, [""], ["HERE"]),
        (None, ["HERE"], ["HERE"]),
        ("lib", [""], ["HERE", "HERE/lib"]),
        ("lib:.", ["HERE"], ["HERE/lib", "HERE"]),
    ],
)
def test_the_import_path_of_a_child_is_that_of_the_caller(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    pythonpath: str | None,
    on_path: list[str],
    expected: list[str],
) -> None:
    """Relative entries are resolved in the caller's directory, which is first if on its path."""
    monkeypatch.setattr(sys, "path", [each.replace("HERE", str(home)) for each in on_path])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if pythonpath is not None:
        monkeypatch.setenv("PYTHONPATH", pythonpath)
    assert import_path() == [each.replace("HERE", str(home)) for each in expected]


@pytest.mark.sweep
def test_every_child_has_the_import_path(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh interpreter, a forked child and a minified script find a backend by it."""
    monkeypatch.setenv("PYTHONPATH", "lib")
    request = {"task": "backend", "backend": "good"}
    assert ask(request, timeout=200).outcome == Found()
    with ForkServer() as server:
        assert server.ask(request, timeout=200).outcome == Found()
    (home / "out").mkdir()
    script = home / "out" / "script.py"
    script.write_text("import mine\nraise ValueError('cannot')")
    failure = Failure("raises", "compile", "builtins.ValueError", "cannot")
    assert check_script(script, failure, timeout=100).fails


@pytest.mark.sweep
def test_the_command_finds_a_backend_in_its_directory(home: Path) -> None:
    """``python -m torch_fakeify`` has the working directory on its path, and so has the child."""
    write_backends(home / "beside")
    args = ["replay", "--backend", "good", "../frame.fkf"]
    done = fresh(*COMMAND, *args, cwd=home / "beside", PYTHONPATH=PACKAGE)
    assert done.stdout.splitlines()[0] == "compiles"


# --- interruption -------------------------------------------------------------------------------


def start(*args: str) -> subprocess.Popen[str]:
    """Start the command in a process of its own, with pipes."""
    return subprocess.Popen(
        [sys.executable, *COMMAND, *args],
        env=environment(PYTHONPATH=os.pathsep.join([PACKAGE, "lib"])),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def children_of(pid: int) -> list[str]:
    """Return the ids of the processes that a process has started."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.parametrize(
    ("number", "line", "status"),
    [
        (signal.SIGINT, "interrupted", 130),
        pytest.param(signal.SIGTERM, "interrupted by SIGTERM", 143, marks=pytest.mark.sweep),
    ],
)
@pytest.mark.parametrize(
    "command", ["replay", *(pytest.param(c, marks=pytest.mark.sweep) for c in ("fuzz", "minify"))]
)
def test_an_interrupted_command_prints_one_line_and_leaves_no_process(
    home: Path, command: str, number: signal.Signals, line: str, status: int
) -> None:
    """A waiting command ends with the signal's exit status and one line on standard error."""
    process = start(command, "--backend", "hangs", "frame.fkf")
    deadline = time.monotonic() + 60
    while not (started := children_of(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(2)
    process.send_signal(number)
    _, err = process.communicate(timeout=100)
    assert process.returncode == status
    assert err.splitlines()[0].startswith(f"torch-fakeify: {line}" if number == 2 else "torch-")
    assert len(err.splitlines()) == 1
    assert started
    assert not any(Path(f"/proc/{child}").exists() for child in started)


@pytest.mark.parametrize("command", ["doctor", "demo --check"])
@pytest.mark.parametrize("seconds", [0, 1])
def test_a_command_interrupted_during_an_import_prints_one_line(
    home: Path, command: str, seconds: float
) -> None:
    """While torch is imported or a frame is compiled, an interruption prints one line too.

    It says so if torch dropped the exception and the command went on to its end.
    """
    process = start(*command.split())
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        time.sleep(0.01)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 130
    assert err in ("torch-fakeify: interrupted\n", f"{DROPPED}\n")


DROPPED = (
    "torch-fakeify: interrupted; torch ignored it, so what is printed may be wrong: "
    "run the command again"
)


@pytest.mark.parametrize("result", [0, 1, 2])
def test_an_interruption_that_torch_drops_is_not_a_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], result: int
) -> None:
    """A command whose ``KeyboardInterrupt`` was dropped ends with 130 and says so."""

    def dropping(_args: object) -> int:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(cli, "_doctor", dropping)
    before = signal.getsignal(signal.SIGINT)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == f"{DROPPED}\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupted_fuzz_saves_what_it_found(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The failing sizes of the batches before Ctrl-C are printed and saved."""
    batches: list[Any] = []

    def failures(self: Any, batch: Any, not_compared: Any) -> list[fuzzing.SizeFailure]:
        batches.append(batch)
        if len(batches) == 2:
            raise KeyboardInterrupt
        return [fuzzing.SizeFailure(batch[0], "wrong", "planted")]

    monkeypatch.setattr(fuzzing._Search, "_failures", failures)
    assert cli.main(["fuzz", "--backend", "eager", "--save", "found.json", "frame.fkf"]) == 130
    out, err = capsys.readouterr()
    assert "20 sizes tried, 20 compared, 1 fails" in out
    assert "wrong: planted" in out
    assert err.startswith("torch-fakeify: interrupted; ")
    assert len(err.splitlines()) == 1
    assert '"planted"' in (home / "found.json").read_text()


def test_an_interruption_waits_until_a_started_process_is_registered() -> None:
    """A signal that arrives while a process is started is raised afterwards."""
    known: list[int] = []

    def interrupted() -> None:
        with deferred_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            known.append(1)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert known == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupted_fork_server_leaves_no_process(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is interrupted before it has reported a forked child leaves no child."""

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(fork_server, "_Job", interrupted)
    server = ForkServer()
    started: list[Any] = []
    real = client.start
    monkeypatch.setattr(
        fork_server, "start", lambda *a, **k: started.append(real(*a, **k)) or started[-1]
    )
    with pytest.raises(KeyboardInterrupt):
        server.ask({"task": "backend", "backend": None}, timeout=100)
    assert started[0].returncode is not None


# --- what minify leaves on record --------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "runs", "recorded"),
    [
        (Failure("crashes", type="SIGSEGV"), False, ("crashes", "SIGSEGV")),
        (Failure("hangs"), False, ("hangs", "")),
        (Failure("out of memory"), False, ("out of memory", "")),
        (
            Failure("raises", "compile", "builtins.ValueError"),
            True,
            ("raises", "builtins.ValueError"),
        ),
        (Failure("crashes", type="SIGSEGV"), True, None),
        (Failure("raises", "forward", "builtins.ValueError"), True, None),
        (Failure("wrong", "forward"), True, None),
    ],
)
def test_a_failure_that_replay_can_reproduce_is_recorded(
    failure: Failure, runs: bool, recorded: Any
) -> None:
    """A failure of compiling is recorded; one that may be of running is not: replay does not run."""
    desc = with_failure(frame().with_state("not finished").desc, failure, "mine", runs=runs)
    found = None if desc.failure is None else (desc.failure.kind, desc.failure.type)
    assert (found, desc.state) == (recorded, None)


# --- verdicts on frames whose backend did not return --------------------------------------------

CRASH = ("crashes", "SIGSEGV", "Segmentation fault")
KILLED = ("crashes", "SIGKILL", "Killed")
LEFT = ("crashes", "exit status 3", "")
FAILED = Failed(Thrown("builtins.ValueError", "no", memory=False, frames=()))


@pytest.mark.parametrize(
    ("recorded", "end", "word"),
    [
        (CRASH, Ended("crashes", -11), "reproduced"),
        (CRASH, Ended("crashes", -6), "not reproduced"),
        (CRASH, Ended("crashes", 3), "not reproduced"),
        (CRASH, Ended("hangs"), "hangs"),
        (CRASH, Ended("out of memory"), "out of memory"),
        (CRASH, Ended("crashes", -9), "out of memory"),
        (KILLED, Ended("crashes", -9), "reproduced"),
        (KILLED, Ended("out of memory"), "reproduced"),
        (LEFT, Ended("crashes", 3), "reproduced"),
        (LEFT, Ended("crashes", 4), "not reproduced"),
        (("hangs", "", ""), Ended("hangs"), "reproduced"),
        (("hangs", "", ""), Ended("crashes", -11), "crashes"),
        (("out of memory", "", ""), Ended("out of memory"), "reproduced"),
        (("out of memory", "", ""), Ended("crashes", -9), "reproduced"),
        ("not finished", Ended("crashes", -11), "reproduced"),
        ("not finished", Ended("hangs"), "reproduced"),
        ("not finished", Ended("crashes", 0), "reproduced"),
        ("not compiled", Ended("crashes", -11), "crashes"),
        (None, Ended("crashes", -11), "crashes"),
    ],
)
def test_a_frame_whose_compilation_ends_its_process_has_a_verdict(
    recorded: Any, end: Any, word: str
) -> None:
    """An equal signal or status is reproduced; the verdict on another names the recorded one."""
    desc = frame().with_state(None).desc
    if isinstance(recorded, tuple):
        kind, how, message = recorded
        failure = FailureDesc(kind=kind, type=how, message=message)
        desc = msgspec.structs.replace(desc, failure=failure)
    else:
        desc = tfk.Capture(desc).with_state(recorded).desc
    verdict = judge(desc, Answer(end), timeout=5.0)
    assert (verdict.verdict, verdict.holds) == (word, word == "reproduced")
    is_on_record = recorded not in (None, "not compiled")
    assert ("recorded:" in verdict.details) == (is_on_record and word != "reproduced")


@pytest.mark.parametrize(
    ("state", "outcome", "word"),
    [
        ("not finished", Compiled(1.0), "not reproduced"),
        ("not compiled", Compiled(1.0), "compiles"),
        ("not finished", FAILED, "not reproduced"),
        ("not compiled", FAILED, "does not compile"),
    ],
)
def test_a_backend_that_returns_does_not_reproduce_a_death(
    state: Any, outcome: Any, word: str
) -> None:
    """The verdict on a frame whose backend did not return depends on the reply of a child."""
    verdict = judge(frame().with_state(state).desc, Answer(outcome), timeout=5.0)
    assert verdict.verdict == word
