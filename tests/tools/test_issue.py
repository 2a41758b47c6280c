"""The text of a bug report: its script is run as a reader would run it."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace
from places import GOLDEN
from processes import COMMAND, fresh

from torch_fakeify.cli import main
from torch_fakeify.serialization.capture_file import read_capture, write_capture
from torch_fakeify.tools.issue import _fenced
from torch_fakeify.tools.minify.failures import Failure, failure_in

if TYPE_CHECKING:
    from pathlib import Path

    from cli_runs import Command

pytestmark = pytest.mark.usefixtures("warm_workers")

CHIP = """
def compiler(gm, inputs):
    if any(node.target == "cos" for node in gm.graph.nodes):
        raise NotImplementedError("no cos, see ```here```")
    return gm.forward


def wrong(gm, inputs):
    return lambda *args: [x + 1 for x in gm(*args)]
"""
MODEL = """
import chip
import torch


def wave(x, y):
    z = x @ y
    return (z.cos() + z.sum(0)).relu()


torch.compile(wave, backend=chip.compiler, dynamic=True)(torch.ones(4, 5), torch.ones(5, 6))
"""


@pytest.mark.parametrize(
    "failure",
    [
        Failure("raises", "compile", "builtins.ValueError", "no\nmore"),
        Failure("raises", "backward", "builtins.ValueError", "no: more"),
        Failure("wrong", "forward", message="output 0: 3 of 4 elements are off"),
        Failure("crashes", type="SIGSEGV"),
        Failure("crashes", type="exit status 3"),
        Failure("hangs"),
        Failure("out of memory"),
    ],
)
def test_a_failure_is_read_from_its_text(failure: Failure) -> None:
    """What a script says of its failure is that failure; a docstring that was edited has none."""
    assert failure_in(failure.lines) == failure
    assert failure_in(["something else"]) is failure_in([]) is None


def test_a_fence_is_longer_than_those_in_its_text() -> None:
    """A message cannot end the block that contains it."""
    lines = [*_fenced("text", ["a ````", "```"])]
    assert (lines[0], lines[-1]) == ("`````text", "`````")


def test_a_capture_without_a_failure_has_no_report(capsys: pytest.CaptureFixture[str]) -> None:
    """The error says how to get a capture that has one, and the exit status is 1."""
    path = GOLDEN / "model_bert.fkf"
    assert main(["issue", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "no failure on record" in err
    assert f"torch-fakeify minify {path}" in err


@pytest.mark.parametrize("given", [(), ("--backend", "acme")])
def test_without_the_backend_no_script_is_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: tuple[str, ...]
) -> None:
    """The error is that of ``replay``, and names the place of the recorded one."""
    desc = read_capture(GOLDEN / "program_failed.fkf")
    path = tmp_path / "frame.fkf"
    write_capture(path, replace(desc, backend="acme", backend_place="chips.acme:compiler"))
    assert main(["issue", str(path), *given]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert ("--backend chips.acme:compiler" in err) is (not given)
    assert main(["replay", str(path), *given]) == 2
    # The registered backends that it lists may be others in the worker.
    assert capsys.readouterr().err.partition("; expected")[0] == err.partition("; expected")[0]


def test_no_report_is_written_over_its_capture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The capture and the script beside it are not overwritten."""
    path = tmp_path / "frame.fkf"
    path.write_bytes((GOLDEN / "program_failed.fkf").read_bytes())
    (tmp_path / "frame.py").write_text("mine")
    for output in (path, tmp_path / "frame.py"):
        assert main(["issue", str(path), "-o", str(output)]) == 2
    assert capsys.readouterr().err.count("torch-fakeify: error: ") == 2
    assert (tmp_path / "frame.py").read_text() == "mine"


def script_in(text: str) -> str:
    """Return the script in a report."""
    found = re.search(r"^(`{3,})python\n(.*?)^\1$", text, re.MULTILINE | re.DOTALL)
    assert found is not None, text
    return found[2]


@pytest.fixture(scope="module")
def recorded_wave(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model, its backend and the capture of its frame, which failed."""
    folder = tmp_path_factory.mktemp("wave")
    (folder / "chip.py").write_text(CHIP)
    (folder / "model.py").write_text(MODEL)
    fresh(*COMMAND, "run", "model.py", cwd=folder, status=1)
    return folder


@pytest.fixture
def frame(recorded_wave: Path, tmp_path: Path) -> Path:
    """The capture in a folder of the test's own, which has the backend."""
    shutil.copytree(recorded_wave, tmp_path, dirs_exist_ok=True)
    (frame,) = tmp_path.glob("captures/*/*.fkf")
    return frame


@pytest.mark.sweep
@pytest.mark.parametrize("minified", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_report_reproduces_the_failure(
    command: Command, frame: Path, tmp_path: Path, minified: bool
) -> None:
    """The script in it fails in plain Python, in the folder of the backend, and so does its command."""
    backend = ("--backend", "chip:compiler")
    if minified:
        small = ("-o", "small.fkf", frame)
        assert command("minify", *backend, *small, cwd=tmp_path).returncode == 0
        frame = tmp_path / "small.fkf"
    done = command("issue", *backend, frame, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("# torch.compile with compiler: NotImplementedError: no cos")
    assert "This script fails in the same way with torch " in done.stdout
    script = tmp_path / "frame.py"
    script.write_text(script_in(done.stdout))
    assert "NotImplementedError: no cos" in fresh(script, cwd=tmp_path, status=1).stderr
    (line,) = re.findall(r"^\$ torch-fakeify (.*)$", done.stdout, re.MULTILINE)
    (frame.parent / "chip.py").write_text(CHIP)
    again = command(*line.split(), cwd=frame.parent)
    assert again.stdout.startswith("reproduced\n"), again.stderr


@pytest.mark.sweep
def test_a_report_of_wrong_numbers_has_the_script_of_minify(
    command: Command, frame: Path, tmp_path: Path
) -> None:
    """The numbers are on no record: the failure is the one that the script describes."""
    backend = ("--backend", "chip:wrong")
    done = command("minify", *backend, "--accuracy", "-o", "small.fkf", frame, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = command("issue", "small.fkf", "-o", "bug.md", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "script: fails in the same way\nwrote bug.md\n")
    text = (tmp_path / "bug.md").read_text()
    assert text.startswith("# torch.compile with wrong: wrong numbers in the forward pass: ")
    assert "$ torch-fakeify minify --accuracy --backend chip:wrong small.fkf" in text
    # A script that no longer fails is no evidence.
    (tmp_path / "chip.py").write_text(CHIP.replace("x + 1", "x"))
    done = command("issue", "small.fkf", cwd=tmp_path)
    assert done.returncode == 1
    assert "does **not** fail in the same way" in done.stdout
