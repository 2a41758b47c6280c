"""The command ``run``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cli_runs import ROWS, Command, error_of
from processes import fresh

from torch_fakeify.records.tensor import StackDesc
from torch_fakeify.serialization.capture_file import read_capture

if TYPE_CHECKING:
    import subprocess

# --- run ----------------------------------------------------------------------------------------


def test_run_prints_a_table(recorded: subprocess.CompletedProcess[str]) -> None:
    """Each compiled frame has one row, for each way to call ``torch.compile``."""
    lines = recorded.stdout.splitlines()
    head = next(at for at, line in enumerate(lines) if line.startswith("file "))
    assert lines[head].split() == ["file", "function", "ops", "ms", "result"]
    rows = [line.split(maxsplit=4) for line in lines[head + 1 : head + 1 + ROWS]]
    results = ["compiled"] * (ROWS - 1) + ["failed: ValueError"]
    results[4] += f"; the same frame as {rows[0][0]}"  # x + 1, in another function
    assert [row[-1] for row in rows] == results
    assert [row[1] for row in rows] == [
        "<lambda>", "<lambda>", "<lambda>", "forward", "breaks", rows[5][1], "<lambda>",
    ]  # fmt: skip
    assert all(int(row[2]) > 0 for row in rows)


def test_run_ends_as_the_script_does(
    recorded: subprocess.CompletedProcess[str],
) -> None:
    """A script that raises shows its traceback, and the exit status is 1."""
    assert recorded.returncode == 1
    home = str(recorded.args)
    assert (
        f'Traceback (most recent call last):\n  File "{home}/code/script.py", line'
        in recorded.stderr
    )
    assert "ValueError: cannot compile 1 inputs" in recorded.stderr
    assert recorded.stderr.endswith("torch-fakeify: the script raised, exit status 1\n")
    assert "runpy" not in recorded.stderr


@pytest.mark.sweep
def test_run_starts_the_script_as_python_does(
    recorded: subprocess.CompletedProcess[str],
) -> None:
    """``sys.argv``, ``__name__``, ``__file__`` and ``sys.path[0]`` are those of plain Python."""
    home = Path(str(recorded.args))
    plain = fresh(home / "code" / "script.py", "--out", "x", "-h", "b c", cwd=home, status=None)
    assert recorded.stdout.splitlines()[0] == plain.stdout.splitlines()[0]


def test_run_writes_the_files_of_its_table(
    recorded: subprocess.CompletedProcess[str], captures: list[Path]
) -> None:
    """The directory has exactly the files that the table lists."""
    lines = recorded.stdout.splitlines()
    listed = [line.split()[0] for line in lines if line.startswith("script/")]
    assert listed == [f"script/{path.name}" for path in captures]
    assert all(re.fullmatch(r"\d{3}-\w+-[0-9a-f]{8}\.fkf", path.name) for path in captures)


def test_run_records_failures_and_backends(captures: list[Path]) -> None:
    """A failure has type, message and stack as text; a backend is named without a memory address."""
    *good, failed = map(read_capture, captures)
    failure = failed.failure
    assert failure is not None
    assert (failure.type, failure.message) == ("builtins.ValueError", "cannot compile 1 inputs")
    assert isinstance(failure.stack, StackDesc)
    assert failure.stack.frames[-1].code.startswith('raise ValueError(f"cannot compile')
    assert all(each.failure is None for each in good)
    assert [each.backend for each in good[:4]] == ["aot_eager", "mine", "inductor", "eager"]
    assert "0x" not in str(failed.backend)


UNRECORDED = """
import torch
import torch_fakeify as tfk
from torch_fakeify.frames import record_backend as backend

def refuse(*args, **kwargs):
    raise tfk.UnsupportedTensorError("no record", where="x")

backend.describe_frame = refuse

@torch.compile(backend="eager")
def f(x):
    return x + 1

"""
"""A function whose frame cannot be recorded."""


def run_text(
    command: Command, tmp_path: Path, code: str, *options: str
) -> subprocess.CompletedProcess[str]:
    """Run a script with this text under ``run``."""
    (tmp_path / "s.py").write_text(code)
    return command("run", *options, "s.py", cwd=tmp_path)


@pytest.mark.sweep
def test_run_replaces_the_backend(command: Command, tmp_path: Path) -> None:
    """``--backend`` compiles every frame with that backend, with exit status 0."""
    code = (
        "import torch\n"
        "def bad(gm, inputs): raise ValueError\n"
        "torch.compile(lambda x: x + 1, backend=bad)(torch.ones(2))\n"
    )
    done = run_text(command, tmp_path, code, "--backend", "eager", "--out", "a/b")
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "a" / "b" / "s").iterdir()
    assert read_capture(path).backend == "eager"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        pytest.param("raise KeyError('no')", "found KeyError: 'no'", marks=pytest.mark.sweep),
        pytest.param("import sys\nsys.exit(3)", "found exit status 3", marks=pytest.mark.sweep),
        pytest.param("import sys\nsys.exit('go away')", "found go away", marks=pytest.mark.sweep),
        ("x = = 1", "found SyntaxError: invalid syntax (s.py, line 1)"),
    ],
)
def test_run_reports_a_script_that_ends_before_it_compiles(
    command: Command, tmp_path: Path, code: str, message: str
) -> None:
    """A script that fails before it compiles anything gives one error, status 2 and no file."""
    done = run_text(command, tmp_path, code)
    assert error_of(done) == (
        "s.py: the script ended before it compiled anything; "
        f"{message}. Run it without recording first"
    )
    assert not (tmp_path / "captures").exists()


def test_run_of_a_script_that_compiles_nothing_fails(command: Command, tmp_path: Path) -> None:
    """A script that ends without an error but compiles nothing gives exit status 1."""
    done = run_text(command, tmp_path, "print('hello')")
    assert (done.returncode, done.stdout) == (1, "hello\n")
    assert done.stderr == "torch-fakeify: the script compiled nothing\n"


@pytest.mark.sweep
def test_run_reports_the_exit_status_of_the_script(command: Command, tmp_path: Path) -> None:
    """What the script compiled before it exits is recorded."""
    code = (
        "import sys, torch\n"
        "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2))\n"
        "sys.exit(7)\n"
    )
    done = run_text(command, tmp_path, code)
    assert done.returncode == 1
    assert done.stderr == "torch-fakeify: the script exited, exit status 7\n"
    assert len(list((tmp_path / "captures" / "s").iterdir())) == 1


def test_run_continues_after_a_frame_that_cannot_be_recorded(
    command: Command, tmp_path: Path
) -> None:
    """A warning and the table name the frame, and the script is not affected."""
    done = run_text(command, tmp_path, UNRECORDED + "print(f(torch.ones(2)))\n")
    assert done.stdout.splitlines()[0] == "tensor([2., 2.])"
    assert "compiled; not recorded: x: no record" in done.stdout
    warning = "torch-fakeify: warning: the frame of 'f' is not on record: x: no record. "
    assert done.stderr.startswith(warning + "It is compiled all the same\n")
    assert done.stderr.endswith(
        "torch-fakeify: of 1 frame 1 not recorded; the script finished, exit status 0\n"
    )
    assert done.returncode == 1
    assert not (tmp_path / "captures").exists()


@pytest.mark.sweep
def test_run_can_stop_at_a_frame_that_cannot_be_recorded(command: Command, tmp_path: Path) -> None:
    """``--on-error raise`` raises in the script, before the backend is called."""
    done = run_text(command, tmp_path, UNRECORDED + "f(torch.ones(2))\n", "--on-error", "raise")
    assert done.returncode == 1
    assert "UnsupportedTensorError: x: no record" in done.stderr
    assert done.stderr.endswith("torch-fakeify: the script raised, exit status 1\n")


@pytest.mark.sweep
def test_run_omits_frames_that_are_not_compiled(command: Command, tmp_path: Path) -> None:
    """A frame that a backend returns to Python has neither a row nor a file."""
    code = (
        "import torch\n"
        "def skip(gm, inputs): raise torch._dynamo.exc.SkipFrame\n"
        "torch.compile(lambda x: x + 1, backend=skip)(torch.ones(2))\n"
        "torch.compile(lambda x: x + 2, backend='eager')(torch.ones(2))\n"
    )
    done = run_text(command, tmp_path, code)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "captures" / "s").iterdir()
    assert path.name.startswith("000-")
    assert done.stdout.count(".fkf ") == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["nothing.py"], "nothing.py: there is no such script. Check the path"),
        (
            ["--backend", "nonesuch", "s.py"],
            "there is no Dynamo backend 'nonesuch'; expected one of ",
        ),
        pytest.param(
            ["--out", "file", "s.py"],
            "file: the directory cannot be written",
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_run_refuses_what_cannot_be_before_the_script_starts(
    command: Command, tmp_path: Path, options: list[str], error: str
) -> None:
    """A missing script, an unknown backend, a file in place of the directory."""
    (tmp_path / "s.py").write_text("print('started')")
    (tmp_path / "file").write_text("keep me")
    done = command("run", *options, cwd=tmp_path)
    assert error_of(done).startswith(error)
    assert done.stdout == ""
    assert {path.name for path in tmp_path.iterdir()} == {"s.py", "file"}
    assert (tmp_path / "file").read_text() == "keep me"
