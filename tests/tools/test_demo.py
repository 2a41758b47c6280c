"""The command ``demo``: each step does what it says, or the exit status says that it did not."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from processes import COMMAND, environment, fresh

import torch_fakeify as tfk
from torch_fakeify import cli
from torch_fakeify.frames.notes import FrameReport
from torch_fakeify.tools.demo import tour
from torch_fakeify.tools.run_script import ScriptReport

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

QUIET = 4.0
"""Most seconds without a sign of life; two, and as many for a machine that is busy."""


@pytest.mark.sweep
def test_the_demo_leaves_files_that_do_what_it_says(tmp_path: Path) -> None:
    """Each command that it prints is true, its script fails by itself, and it is never silent."""
    process = subprocess.Popen(
        [sys.executable, *COMMAND, "demo"],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    out, times = b"", [time.monotonic()]
    with process.stdout as stdout:
        while part := os.read(stdout.fileno(), 1 << 16):
            out += part
            times.append(time.monotonic())
    assert process.wait() == 0, out.decode()
    assert max(b - a for a, b in itertools.pairwise(times)) < QUIET
    text = out.decode()
    lines = re.sub(r"\.{2,}", "", text.replace(str(tmp_path), "")).splitlines()
    assert max(map(len, lines)) <= 80
    for words in ("reproduced", "operations: 12 -> 1", "fails in the same way", "chip has no code"):
        assert words in text
    folder = tmp_path / "torch-fakeify-demo"
    assert f"All files are in {folder}\n" in text
    (script,) = folder.glob("train/*.min.py")
    (page,) = folder.glob("train/*.html")
    assert page.stat().st_size > 10_000
    assert f"python {script.relative_to(folder)}\n" in text
    done = fresh(script.relative_to(folder), cwd=folder, status=1)
    assert "NotImplementedError: chip has no code for cumsum" in done.stderr
    capture = tfk.Capture.load(next(folder.glob("train/*.min.fkf")))
    assert [node.name for node in capture.desc.graph.nodes if node.op == "call_function"] == [
        "cumsum"
    ]


def nothing_recorded(folder: Path) -> dict[str, Any]:
    """The script compiles nothing."""
    return {"run": lambda *_, **__: ScriptReport()}


def not_reproduced(folder: Path) -> dict[str, Any]:
    """The frame is on record and compiles when it is replayed."""
    path = folder / "torch-fakeify-demo" / "a.fkf"

    def run(*_: Any, **__: Any) -> ScriptReport:
        path.touch()
        return ScriptReport((FrameReport(path=path, state="failed", failure="E: no"),))

    verdict = tfk.ReplayReport("not reproduced", False, ("compiled in 1 ms",))
    return {"run": run, "replay_capture": lambda *_, **__: verdict}


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        (nothing_recorded, "0 failing frames are on record, not 1"),
        (not_reproduced, "not reproduced\n  compiled in 1 ms"),
    ],
)
def test_a_step_that_fails_ends_the_demo_with_status_1(
    planted: Callable[[Path], dict[str, Any]],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It says which step, what was found, and does not go on."""
    monkeypatch.chdir(tmp_path)
    for name, function in planted(tmp_path).items():
        monkeypatch.setattr(tour, name, function)
    assert cli.main(["demo"]) == 1
    out = capsys.readouterr().out
    assert f"This step did not do what it says: {words}" in out
    assert "All files are in" not in out
    assert tmp_path.samefile(".")


def test_a_second_demo_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier one left is not changed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tour, "run", lambda *_, **__: ScriptReport())
    folders = [tour.show_tour(lambda _: None)[0].name for _ in range(2)]
    assert folders == ["torch-fakeify-demo", "torch-fakeify-demo-2"]
