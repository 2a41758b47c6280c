"""Captures compiled by other interpreters: one, several side by side, and where the verdict changes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
import torch
from processes import COMMAND, fresh

import torch_fakeify as tfk
from torch_fakeify.errors import CaptureError
from torch_fakeify.tools.worker.interpreters import find_interpreter, package_folder

if TYPE_CHECKING:
    from pathlib import Path

    from cli_runs import Command

BACKEND = """
import os


def by_interpreter(gm, inputs):
    if os.environ.get("WORLD", "old") != "old":
        raise NotImplementedError("the new one cannot")
    return gm.forward
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a capture, a backend, and interpreters: this one, in scripts that set a variable."""
    folder = tmp_path_factory.mktemp("interpreters")
    capture = tfk.capture(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(2)])
    capture.save(folder / "relu.fkf")
    (folder / "backends.py").write_text(BACKEND)
    for name, world in (("one", "old"), ("two", "old"), ("three", "new"), ("four", "new")):
        script = folder / name
        script.write_text(f'#!/bin/sh\nWORLD={world} exec {sys.executable} "$@"\n')
        script.chmod(0o755)
    return folder


OWN = ("--backend", "backends:by_interpreter")


def test_the_versions_of_an_interpreter_are_asked_for(folder: Path) -> None:
    """It is started once, without torch; links to it are not resolved."""
    found = find_interpreter(str(folder / "one"))
    python = ".".join(map(str, sys.version_info[:3]))
    assert (found.executable, found.python) == (str(folder / "one"), python)
    assert torch.__version__.startswith(found.torch.partition("+")[0])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (None, r"cannot be started; .* found FileNotFoundError"),
        ("exit 3", "cannot be started; .* found ValueError: it ended without output"),
        ('echo "no option $2" >&2; echo "$2" | tr "\\n" " " >&2; exit 2', r"ValueError: .{157}\.\.\.$"),
        ("echo hello", "cannot be started"),
        ("echo '{\"python\": \"3.9.1\", \"torch\": null, \"missing\": []}'", "too old; expected Python 3.10"),
        (
            "echo '{\"python\": \"3.12.1\", \"torch\": null, \"missing\": [\"torch\"]}'",
            "the interpreter has no torch; .* -m pip install torch",
        ),
    ],
    ids=["missing", "failing", "printing much", "no interpreter", "old", "no torch"],
)  # fmt: skip
def test_what_cannot_compile_is_one_error(tmp_path: Path, text: str | None, error: str) -> None:
    """The error names the executable and what it lacks."""
    path = tmp_path / "python"
    if text is not None:
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    with pytest.raises(CaptureError, match=error) as caught:
        find_interpreter(str(path))
    assert str(path) in str(caught.value)


def test_another_interpreter_gets_this_package_alone(folder: Path) -> None:
    """Packages beside this one are those of this interpreter: another one does not see them."""
    from pathlib import Path

    assert [path.name for path in Path(package_folder()).iterdir()] == ["torch_fakeify"]


@pytest.mark.sweep
def test_replay_compiles_with_another_interpreter(folder: Path, command: Command) -> None:
    """The verdict names its Python, and how long a call takes; one without torch is exit status 2."""
    done = command("replay", "--python", "./three", "--time", *OWN, "relu.fkf", cwd=folder)
    assert (done.returncode, done.stdout.splitlines()[0]) == (1, "does not compile"), done.stderr
    assert f"Python {sys.version.split()[0]}" in done.stdout
    assert "the new one cannot" in done.stdout
    (folder / "bare").write_text("#!/bin/sh\nexit 1\n")
    (folder / "bare").chmod(0o755)
    refused = command("replay", "--python", "./bare", "relu.fkf", cwd=folder)
    assert refused.returncode == 2
    assert "./bare: the interpreter cannot be started" in refused.stderr


@pytest.mark.sweep
def test_interpreters_side_by_side(folder: Path) -> None:
    """A line for each capture, with verdict and times of each interpreter, and what differs."""
    options = ("--python", "./one", "--python", "./three", "--time", "--tolerance", "1000")
    done = fresh(*COMMAND, "replay", *options, *OWN, "relu.fkf", cwd=folder, status=1)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["A", "B"]
    row = next(line.split() for line in lines if line.startswith("relu.fkf  compiles"))
    assert row[:5] == ["relu.fkf", "compiles", "does", "not", "compile"]
    assert float(row[5]) > 0
    assert row[6] == "-"
    assert float(row[7]) > 0
    assert "relu.fkf with B: does not compile: NotImplementedError" in done.stdout
    assert lines[-1] == "1 capture, 1 differ, 0 slower"


@pytest.mark.sweep
def test_bisect_finds_where_the_verdict_changes(folder: Path) -> None:
    """Not every interpreter is asked; without a change the exit status is 1."""
    names = [part for name in ("one", "two", "three", "four") for part in ("--python", f"./{name}")]
    done = fresh(*COMMAND, "bisect", *names, *OWN, "relu.fkf", cwd=folder)
    assert f"the verdict changes at {folder / 'three'}: Python" in done.stdout
    assert f"the one before is {folder / 'two'}: Python" in done.stdout
    same = fresh(*COMMAND, "bisect", *names[:4], *OWN, "relu.fkf", cwd=folder, status=1)
    assert "there is nothing to find" in same.stdout


def test_a_time_is_slower_by_the_tolerance() -> None:
    """Times are compared with those of the first interpreter; what failed has none."""
    from torch_fakeify.corpus.command import SideBySide
    from torch_fakeify.corpus.results import Row

    def row(compile_ms: float | None, run_ms: float | None) -> Row:
        return Row(
            file="a", verdict="compiles", holds=True, backend="eager",
            compile_ms=compile_ms, run_ms=run_ms,
        )  # fmt: skip

    table = SideBySide((), (), timed=True, tolerance=1.5)
    first = row(10.0, 1.0)
    assert not table.is_slower(row(15.0, 1.5), first)
    assert table.is_slower(row(15.1, 1.0), first)
    assert table.is_slower(row(10.0, 1.6), first)
    assert not table.is_slower(row(None, None), first)
    assert not SideBySide((), ()).is_slower(row(1e9, None), first)
