"""``run`` watches the script's process and records its frames, however the process ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cli_runs import error_of
from processes import COMMAND, environment, fresh, started
from registered_backends import write_backends

from torch_fakeify.frames.notes import FrameReport, Notes
from torch_fakeify.render.show import show_lines
from torch_fakeify.serialization.capture_file import read_capture

if TYPE_CHECKING:
    from cli_runs import Command

pytestmark = pytest.mark.usefixtures("warm_workers")


SCRIPT = """
import sys, torch
torch._dynamo.config.suppress_errors = "on" in sys.argv

def first(x):
    return x + 1

def second(x):
    return x * 2

torch.compile(first, backend="eager")(torch.ones(2))
print("now", flush=True)
torch.compile(second, backend=sys.argv[1])(torch.ones(2))
print("later")
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a folder with a script and registered backends."""
    write_backends(tmp_path / "lib")
    (tmp_path / "s.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "lib")
    return tmp_path


def only_second() -> Any:
    """Return the record of the second frame."""
    (path,) = Path("captures/s").glob("001-second-*.fkf")
    return read_capture(path)


def check_replay(done: subprocess.CompletedProcess[str], verdict: str) -> None:
    """Check the verdict of ``replay``, and its exit status."""
    assert done.stdout.splitlines()[0] == verdict, done.stdout + done.stderr
    assert done.returncode == (verdict != "reproduced")


# --- deaths -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "how", "text", "status"),
    [
        ("dies", "SIGSEGV", "killed by SIGSEGV", 139),
        pytest.param("dies", "SIGKILL", "killed by SIGKILL", 137, marks=pytest.mark.long),
        pytest.param("leaves", "3", "ended with exit status 3", 3, marks=pytest.mark.long),
        ("leaves", "0", "ended with exit status 0", 0),
    ],
)
@pytest.mark.sweep
def test_the_death_of_a_backend_is_recorded(
    home: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    how: str,
    text: str,
    status: int,
) -> None:
    """The table and the capture name the frame and the cause, and replay reproduces it."""
    monkeypatch.setenv("HOW", how)
    done = command("run", "s.py", backend, cwd=home)
    first, second = done.stdout.splitlines()[2:4]
    assert first.endswith("compiled")
    assert second.endswith(f"failed: {text} while {backend} compiled it")
    assert done.returncode == 1
    assert done.stderr.endswith(f"exit status {status}\n")
    assert ("in dies" in done.stderr) == (how == "SIGSEGV")
    assert f"result    failed: {text}" in show_lines(only_second())
    (path,) = Path("captures/s").glob("001-*.fkf")
    check_replay(command("replay", "--backend", backend, path, cwd=home), "reproduced")
    if how == "SIGSEGV":
        done = command("replay", "--backend", "good", path, cwd=home)
        check_replay(done, "not reproduced")
        assert "  recorded:\n    killed by SIGSEGV: Segmentation fault\n" in done.stdout
        done = command("run", "--script-status", "s.py", backend, cwd=home)
        assert done.returncode == status


@pytest.mark.sweep
def test_the_death_of_compiled_code_is_not_the_frames(
    home: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No output blames the compilation of a frame that had been compiled before."""
    monkeypatch.setenv("HOW", "SIGSEGV")
    done = command("run", "s.py", "later", cwd=home)
    assert done.returncode == 1
    assert any(line.endswith("  compiled") for line in done.stdout.splitlines())
    assert "in dies" in done.stderr
    assert done.stderr.endswith(
        "torch-fakeify: the script was killed by SIGSEGV, exit status 139\n"
    )
    assert "result    compiled" in show_lines(only_second())


@pytest.mark.sweep
def test_without_a_watcher_the_frame_is_recorded_as_unfinished(home: Path) -> None:
    """In a process that nothing watches, `record` leaves a frame whose backend did not return."""
    code = (
        "import mine, torch, torch_fakeify as tfk\n"
        "torch.compile(lambda x: x + 1, backend=tfk.record('captures', mine.dies))(torch.ones(2))"
    )
    fresh("-c", code, status=-signal.SIGSEGV, HOW="SIGSEGV")
    (path,) = Path("captures").iterdir()
    assert "result    not finished" in show_lines(read_capture(path))


# --- interruption -------------------------------------------------------------------------------


def wait_for(process: subprocess.Popen[str], line: str) -> str:
    """Return what a process prints, up to a line."""
    assert process.stdout is not None
    text = ""
    while not text.endswith(f"{line}\n"):
        text += process.stdout.readline() or pytest.fail(f"it has ended: {text}")
    return text


@pytest.mark.sweep
def test_an_interrupted_backend_leaves_an_unfinished_frame(home: Path, command: Command) -> None:
    """The command prints one line, its status is 130, and replay reproduces the hang."""
    process = started("run", "s.py", "hangs")
    wait_for(process, "hanging")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert err.endswith("torch-fakeify: interrupted; 2 captures in captures/s\n")
    assert "  next        torch-fakeify replay" in err
    assert process.returncode == 130
    assert any(line.endswith("not finished: interrupted") for line in out.splitlines())
    assert "result    not finished" in show_lines(only_second())
    (path,) = Path("captures/s").glob("001-*.fkf")
    done = command("replay", "--backend", "hangs", "--timeout", "8", path, cwd=home)
    check_replay(done, "reproduced")
    check_replay(command("replay", "--backend", "good", path, cwd=home), "not reproduced")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("backend", "number", "times", "status"),
    [("deaf", signal.SIGINT, 3, 130), ("hangs", signal.SIGTERM, 1, 143)],
)
def test_signals_reach_the_script(
    home: Path, backend: str, number: signal.Signals, times: int, status: int
) -> None:
    """SIGTERM ends the script, a third Ctrl-C kills one that ignores it, and no process is left."""
    process = started("run", "s.py", backend)
    wait_for(process, "hanging")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.5)
    out, err = process.communicate(timeout=100)
    assert process.returncode == status, err
    by = "" if number == signal.SIGINT else " by SIGTERM"
    assert err.endswith(f"torch-fakeify: interrupted{by}; 2 captures in captures/s\n")
    assert "not finished" in out
    assert children
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    assert only_second().state == "not finished"


def test_an_interruption_before_the_script_starts_prints_one_line(home: Path) -> None:
    """While the command still starts, an interruption prints one line too."""
    process = started("run", "s.py", "good")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not children.read_text():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert (process.returncode, out, err) == (130, "", "torch-fakeify: interrupted\n")


@pytest.mark.sweep
def test_a_script_may_handle_an_interruption_itself(home: Path) -> None:
    """A script that handles the interruption ends with an exit status of its own."""
    (home / "s.py").write_text(
        "import time, torch\n"
        "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2))\n"
        "try:\n    print('ready', flush=True)\n    time.sleep(100)\n"
        "except KeyboardInterrupt:\n    print('saved')\n"
    )
    process = started("run", "s.py")
    wait_for(process, "ready")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert (process.returncode, err) == (0, "")
    assert out.startswith("saved\n")


# --- the script's process -----------------------------------------------------------------------


def test_the_script_runs_as_under_python(home: Path) -> None:
    """Standard input, interpreter flags, spawned processes, threads and ``atexit`` work."""
    (home / "s.py").write_text(
        "import atexit, multiprocessing, sys, threading, torch, helper\n"
        "def child(n): print('child', n, flush=True)\n"
        "def late(): torch.compile(lambda x: x - 1, backend='eager')(torch.ones(3))\n"
        "if __name__ == '__main__':\n"
        "    print(sys.stdin.readline().strip(), sys.flags.no_user_site, sys.flags.utf8_mode, flush=True)\n"
        "    process = multiprocessing.get_context('spawn').Process(target=child, args=(7,))\n"
        "    process.start(); process.join()\n"
        "    threading.Thread(target=late).start()\n"
        "    atexit.register(lambda: print('last'))\n"
    )
    (home / "helper.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-s", "-X", "utf8", *COMMAND, "run", "s.py"],
        env=environment(), input="typed\n", capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:3] == ["typed 1 1", "child 7", "last"]
    assert [path.name[:8] for path in (home / "captures" / "s").iterdir()] == ["000-late"] or (
        "000-_lambda_" in next((home / "captures" / "s").iterdir()).name
    )


@pytest.mark.sweep
def test_inductor_gets_the_settings_of_the_script(home: Path) -> None:
    """``mode`` has its effect also where ``--backend inductor`` replaces the backend."""
    (home / "s.py").write_text(
        "import torch, torch._inductor.compile_fx as module\n"
        "def compile_fx(gm, inputs, config_patches=None, **rest):\n"
        "    print(sorted(config_patches or {}))\n"
        "    return gm.forward\n"
        "module.compile_fx = compile_fx\n"
        "torch.compile(lambda x: x + 1, mode='max-autotune-no-cudagraphs')(torch.ones(2))\n"
        "torch.compile(lambda x: x + 2, backend=lambda gm, inputs, mode: gm, mode='lite')(torch.ones(2))\n"
    )
    mine = ["['coordinate_descent_tuning', 'max_autotune']"]
    for options in ([], ["--backend", "inductor"]):
        done = fresh(*COMMAND, "run", *options, "s.py")
        lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
        assert lines[:1] == mine
        assert len(lines) == 1 + bool(options)


@pytest.mark.sweep
def test_an_exported_frame_is_captured_but_not_compiled(home: Path) -> None:
    """``--backend`` does not make a frame of ``torch.export`` one that is compiled."""
    (home / "s.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def forward(self, x): return x.relu()\n"
        "torch.export.export(Net(), (torch.ones(2),), strict=True)\n"
    )
    done = fresh(*COMMAND, "run", "--backend", "eager", "s.py")
    assert done.stderr == ""
    assert done.stdout.splitlines()[1].endswith("  not compiled")


# --- exit statuses ------------------------------------------------------------------------------


@pytest.mark.sweep
def test_a_failed_frame_makes_the_status_1_although_the_script_continues(
    home: Path, command: Command
) -> None:
    """The last line counts the frames; ``--script-status`` returns the script's own status."""
    done = command("run", "s.py", "fails", "on", cwd=home)
    assert done.returncode == 1
    assert "later" in done.stdout
    assert any(line.endswith("failed: ValueError") for line in done.stdout.splitlines())
    last = "torch-fakeify: of 2 frames 1 failed; the script finished, exit status 0"
    assert done.stderr.splitlines()[-1] == last
    again = command("run", "--script-status", "s.py", "fails", "on", cwd=home)
    assert again.returncode == 0


# --- modules and child processes -----------------------------------------------------------------


MODULE = """
import multiprocessing, sys, torch

def child(n):
    return torch.compile(lambda x: x * n, backend="eager")(torch.ones(2)).tolist()

if __name__ == "__main__":
    print("argv", sys.argv[1:], sys.path[0], __spec__.name)
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        print(pool.map(child, [3]))
"""


def rows_of(text: str) -> list[str]:
    """The files in the table, with their folder."""
    return [line.split()[0] for line in text.splitlines() if ".fkf " in line]


@pytest.mark.parametrize(
    "method", ["spawn", pytest.param("fork", marks=pytest.mark.long)]
)  # of multiprocessing
@pytest.mark.sweep
def test_a_module_and_its_children_are_recorded(
    command: Command, tmp_path: Path, method: str
) -> None:
    """``run -m`` is ``python -m``; the table has the frames of child processes, in their folders."""
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "prog.py").write_text(MODULE)
    done = command("run", "--out", "out", "-m", "pkg.prog", method, "--out", "x", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    argv = [method, "--out", "x"]
    assert done.stdout.startswith(f"argv {argv} {tmp_path} pkg.prog\n[[3.0, 3.0]]\nfile")
    own, of_child = rows_of(done.stdout)
    assert own.startswith("pkg.prog/000-")
    process = of_child.split("/")[1]
    assert of_child.startswith(f"pkg.prog/{process}/000-")
    assert process.isdecimal()
    assert sorted(map(str, (tmp_path / "out").rglob("*.fkf"))) == sorted(
        str(tmp_path / "out" / row) for row in (own, of_child)
    )


@pytest.mark.sweep
def test_runs_do_not_mix(command: Command, tmp_path: Path) -> None:
    """Two scripts, and two runs of one script, have folders of their own; a failed run leaves none."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(
            f"import torch\ntorch.compile(lambda x: x + {ord(name)}, backend='eager')(torch.ones(2))\n"
        )
    (tmp_path / "c.py").write_text("raise ValueError")
    runs = [command("run", f"{name}.py", cwd=tmp_path) for name in "aab"]
    assert [rows_of(done.stdout)[0].split("/")[0] for done in runs] == ["a", "a-2", "b"]
    assert "found ValueError: " in error_of(command("run", "c.py", cwd=tmp_path))
    shown = command("show", "captures", cwd=tmp_path).stdout
    assert [shown.count(f"\n{name}/000-") for name in ("a", "a-2", "b", "c")] == [1, 1, 1, 0]
    assert sorted(path.name for path in (tmp_path / "captures").iterdir()) == ["a", "a-2", "b"]


@pytest.mark.sweep
def test_a_child_that_fails_or_dies_is_in_the_table(command: Command, tmp_path: Path) -> None:
    """The exit status is 1, though the script ends well."""
    (tmp_path / "s.py").write_text(
        "import subprocess, sys\n"
        "code = '''import os, signal, torch\n"
        "def fails(gm, inputs):\n"
        "    raise ValueError('no')\n"
        "def dies(gm, inputs):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "try:\n"
        "    torch.compile(lambda x: x + 1, backend=fails)(torch.ones(2))\n"
        "except Exception:\n"
        "    torch.compile(lambda x: x + 2, backend=dies)(torch.ones(2))\n"
        "'''\n"
        "subprocess.run([sys.executable, '-c', code], check=False)\n"
    )
    done = command("run", "s.py", cwd=tmp_path)
    assert done.returncode == 1
    first, second = done.stdout.splitlines()[1:3]
    assert first.endswith("failed: ValueError")
    process = second.split("/")[1]
    assert second.endswith(f"not finished: process {process} ended while dies compiled it")
    assert done.stderr.endswith(
        "of 2 frames 1 failed, 1 not finished; the script finished, exit status 0\n"
    )


@pytest.mark.sweep
def test_a_module_that_does_not_exist_is_an_error(command: Command, tmp_path: Path) -> None:
    """The error is Python's."""
    done = command("run", "-m", "no_such_module", cwd=tmp_path)
    assert error_of(done) == (
        "no_such_module: the script ended before it compiled anything; "
        "found ImportError: No module named no_such_module. Run it without recording first"
    )
    assert list(tmp_path.iterdir()) == []


# --- notes --------------------------------------------------------------------------------------


def test_notes_are_read_up_to_a_truncated_line(tmp_path: Path) -> None:
    """The last note on a frame counts, discarded frames are absent, and half a line is ignored."""
    notes = Notes(tmp_path / "notes")
    assert notes.read().frames == []
    one, two, three = (FrameReport(function=name, path=tmp_path / name) for name in "abc")
    for report in (one, two, three):
        notes.frame(report)
    one.state, two.state = "compiled", "left out"
    notes.frame(one)
    notes.frame(two)
    notes.write("started", 1)
    with notes.path.open("ab") as file:
        file.write(b'{"frame": [1, 2], "cont')
    read = notes.read()
    assert [(each.function, each.state) for each in read.frames] == [
        ("a", "compiled"), ("c", "not finished"),
    ]  # fmt: skip
    assert read.frames[0] == one
    assert read.script == {"started": 1}
