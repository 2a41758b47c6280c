"""``tfk.run``, ``replay_capture``, ``minify``, ``fuzz``, ``diff`` and ``report``: what the commands do, as functions."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from captured_frames import only_capture_of

import torch_fakeify as tfk
from torch_fakeify import cli
from torch_fakeify.tools import replaying, run_script
from torch_fakeify.tools.capture_files import as_file, output_beside
from torch_fakeify.tools.run_script import ScriptReport
from torch_fakeify.tools.worker import client

if TYPE_CHECKING:
    from collections.abc import Callable

FUNCTIONS: dict[str, Callable[[Any], object]] = {
    "replay": tfk.replay_capture,
    "minify": tfk.minify,
    "fuzz": tfk.fuzz,
    "diff": lambda file: tfk.diff(file, file),
    "report": tfk.report,
    "show": tfk.Capture.load,
}
"""By command, the function with its first argument."""


def frame(factor: int = 2) -> tfk.Capture:
    """A capture of a frame with a dynamic size."""
    return only_capture_of(lambda x: x * factor, torch.ones(4), dynamic=True)


@pytest.mark.parametrize("command", [*FUNCTIONS, "run"])
def test_a_missing_file_is_the_error_that_the_command_prints(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    """It is a ``FileNotFoundError`` too, and nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as raised:
        FUNCTIONS.get(command, tfk.run)("nowhere")
    assert isinstance(raised.value, tfk.FakeifyError)
    assert cli.main([command, *["nowhere"] * (1 + (command == "diff"))]) == 2
    assert capsys.readouterr().err == f"torch-fakeify: error: {raised.value}\n"
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("command", FUNCTIONS)
def test_a_file_that_is_no_capture_is_a_value_error(command: str, tmp_path: Path) -> None:
    """The message is the command's."""
    (tmp_path / "text.fkf").write_text("text")
    with pytest.raises(ValueError, match=r"text\.fkf: ") as raised:
        FUNCTIONS[command](tmp_path / "text.fkf")
    assert isinstance(raised.value, tfk.FormatError)


@pytest.mark.parametrize("command", [*FUNCTIONS][:-1])
def test_what_is_neither_a_path_nor_a_capture_is_refused(command: str) -> None:
    """The error names what was given."""
    with pytest.raises(tfk.CaptureError, match="a Capture, or the path of its file; found dict"):
        FUNCTIONS[command]({})


def test_a_capture_and_its_file_are_one_argument(tmp_path: Path) -> None:
    """The object is compared and reported as its file is, without being saved by the user."""
    one, other = frame(), frame(3)
    one.save(tmp_path / "one.fkf")
    assert tfk.diff(one, tmp_path / "one.fkf").is_one_frame
    assert tfk.diff(one, other) == tfk.diff(str(tmp_path / "one.fkf"), other)
    assert not tfk.diff(one, other).is_one_frame
    pages = [
        tfk.report(c, tmp_path / f"{i}.html") for i, c in enumerate((one, tmp_path / "one.fkf"))
    ]
    assert Path(pages[0]).read_text().replace(" FILE<", " one.fkf<") == pages[1].path.read_text()


def test_a_file_of_an_object_lives_as_long_as_its_block() -> None:
    """Nothing is left in the folder of temporary files."""
    with as_file(frame()) as path:
        assert tfk.Capture.load(path).fingerprint() == frame().fingerprint()
    assert not path.parent.exists()


def test_an_output_is_beside_the_file_or_in_the_current_folder(tmp_path: Path) -> None:
    """A capture that was read knows its file; another one gives its function's name."""
    (capture := frame()).save(tmp_path / "a.fkf")
    assert output_beside(capture, ".html") == Path("lambda.html")
    assert output_beside(tfk.Capture.load(tmp_path / "a.fkf"), ".html") == tmp_path / "a.html"
    assert output_beside("b.fkf", ".min.fkf") == Path("b.min.fkf")


@pytest.mark.parametrize("options", [{"backend": "eager"}, {"imports": ["torch"]}])
def test_a_report_compiles_only_for_its_stages(tmp_path: Path, options: Any) -> None:
    """A backend without stages would be ignored, so it is refused."""
    with pytest.raises(tfk.FakeifyError, match="Add --stages, in Python stages=True"):
        tfk.report(frame(), tmp_path / "a.html", **options)
    assert [*tmp_path.iterdir()] == []


def test_a_run_is_a_sequence_of_its_captures(tmp_path: Path) -> None:
    """Frames that were not recorded are in ``frames`` alone."""
    paths = [tmp_path / name for name in ("a.fkf", "b.fkf")]
    for path in paths:
        frame().save(path)
    states = ("compiled", "failed")
    rows = [
        run_script.FrameReport(path=path, state=state)  # type: ignore[arg-type]
        for path, state in zip(paths, states, strict=True)
    ]
    report = ScriptReport((*rows, run_script.FrameReport(problem="no")), folder=tmp_path)
    assert [capture.path for capture in report] == report.paths == paths
    assert report[-1].path == report[1:][0].path == report.failed[0].path == paths[1]
    assert repr(report) == (
        f"<ScriptReport {tmp_path.name}: 2 captures, of 3 frames 1 failed, 1 not finished, "
        "1 not recorded; the script finished, exit status 0>"
    )


def test_results_are_frozen() -> None:
    """No field of a result can be set."""
    for report in (ScriptReport(), tfk.FuzzReport({}), tfk.diff(frame(), frame())):
        with pytest.raises(dataclasses.FrozenInstanceError):
            report.tried = 1  # type: ignore[union-attr]
    with pytest.raises(AttributeError):
        tfk.ReplayReport("compiles", True, ()).verdict = "crashes"  # type: ignore[misc]


def test_a_child_does_not_record_what_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording is asked of this process; its variables stay here and are not passed on."""
    monkeypatch.setenv("TORCH_FAKEIFY_RECORD", "there")
    assert "TORCH_FAKEIFY_RECORD" not in client.without_recording()
    assert "TORCH_FAKEIFY_RECORD" not in client._environment(None)
    assert os.environ["TORCH_FAKEIFY_RECORD"] == "there"


def test_the_method_passes_every_option_of_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Capture.replay` and `replay_capture` have the same options with the same defaults."""
    import inspect

    names = inspect.signature(tfk.Capture.replay).parameters
    wanted = inspect.signature(replaying.replay_capture).parameters
    assert set(wanted) - set(names) == {"capture", "trace"}
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(replaying, "replay_capture", lambda _, **options: asked.append(options))
    frame().replay()
    assert asked == [
        {name: wanted[name].default for name in wanted if name not in ("capture", "trace")}
    ]


NOTEBOOK = """
import os, sys, threading, time
import torch_fakeify as tfk
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()  # as a kernel has several
call = {
    "run": lambda: tfk.run("sleeps.py").ending,
    "replay": lambda: tfk.replay_capture("frame.fkf", backend="sleeps:compiler"),
    "fuzz": lambda: tfk.fuzz("frame.fkf", backend="sleeps:compiler").interrupted,
    "minify": lambda: tfk.minify("frame.fkf", backend="sleeps:compiler").interrupted,
}[sys.argv[1]]
try:
    print(call())
except KeyboardInterrupt:
    print("KeyboardInterrupt")
left = open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read()
print(left or "no process is left")
"""
SLEEPS = """
import pathlib, time, torch
def compiler(gm, inputs):
    pathlib.Path("STARTED").touch()
    time.sleep(600)
if __name__ == "__main__":
    torch.compile(torch.sin, backend=compiler)(torch.ones(2))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ("run", "interrupted"),
        ("replay", "KeyboardInterrupt"),
        pytest.param("fuzz", "True", marks=pytest.mark.long),
        ("minify", "KeyboardInterrupt"),
    ],
)
@pytest.mark.sweep
def test_an_interrupted_cell_leaves_no_process(tmp_path: Path, call: str, answer: str) -> None:
    """The kernel's process goes on, with the result or ``KeyboardInterrupt``."""
    (tmp_path / "sleeps.py").write_text(SLEEPS.replace("STARTED", str(tmp_path / "started")))
    frame().save(tmp_path / "frame.fkf")
    process = subprocess.Popen(
        [sys.executable, "-c", NOTEBOOK, call],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    deadline = time.monotonic() + 200
    while not (tmp_path / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as Jupyter does
    out, err = process.communicate(timeout=60)
    assert out.splitlines()[-2:] == [answer, "no process is left"], err
