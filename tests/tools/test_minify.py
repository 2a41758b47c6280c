"""Minified frames: ten planted bugs, interruption, scripts, and when two failures are the same."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from captured_frames import recorded_frame
from places import GOLDEN
from planted_bugs import BACKENDS, BUGS, Bug, example
from planting import plant
from processes import fresh, started

import torch_fakeify as tfk
from torch_fakeify.cli import main
from torch_fakeify.errors import NotFailingError, WriteError
from torch_fakeify.records.symbol_names import names_in
from torch_fakeify.serialization.capture_file import read_capture, write_capture
from torch_fakeify.tools.fuzzing import FuzzReport, SizeFailure
from torch_fakeify.tools.graph_edits import operations
from torch_fakeify.tools.minify.failures import Failure, Outcome, failure_of
from torch_fakeify.tools.minify.reductions import REDUCTIONS, extent
from torch_fakeify.tools.minify.search import minify
from torch_fakeify.tools.replaying import replay_capture
from torch_fakeify.tools.size_edits import bound_symbols, is_bound
from torch_fakeify.tools.worker.fork_server import ForkServer
from torch_fakeify.tools.worker.replies import Answer, Ended

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from torch_fakeify.tools.minify.results import MinifyReport, Progress

pytestmark = pytest.mark.usefixtures("warm_workers")

SWEPT = ("bug_segfaults", "bug_wrong_gradient")
"""The bugs that ``.ci/run`` minifies."""

MORE = '''

def bug_none(gm, inputs):
    return gm


def bug_each_time_another(gm, inputs):
    raise RuntimeError("word " + "".join(chr(97 + b % 26) for b in os.urandom(8)))


def _tall(values):
    return any(isinstance(v, torch.Tensor) and v.ndim and v.shape[0] >= 13 for v in values)


def bug_tall(gm, inputs):
    """It is wrong where a dim is 13 or more."""

    def run(*args):
        first, *others = gm(*args)
        return [first + 1 if _tall([*args, first]) else first, *others]

    return run


def bug_tall_unexpected(gm, inputs):
    """It is wrong there only if it was compiled with a smaller one."""
    if any(isinstance(i, torch.SymInt) and (i.node.hint or 0) >= 13 for i in inputs):
        return gm
    return bug_tall(gm, inputs)


def bug_cos(gm, inputs):
    """It has no kernel for an operator, and looks at what each node is of."""
    for module in gm.modules():
        for node in getattr(module, "graph", torch.fx.Graph()).nodes:
            if node.op.startswith("call_") and "cos" in str(node.target):
                value = node.meta["example_value"]
                raise NotImplementedError(f"no kernel for cos of {value.dtype}, {value.ndim} dims")
    return gm


def bug_llama(gm, inputs):
    """Rotary embeddings: a negation beside a concatenation."""
    for fx_node in _calls(gm, "cat"):
        if any(n.op != "placeholder" and "neg" in str(n.target) for n in fx_node.all_input_nodes):
            raise RuntimeError(f"no layout for {fx_node.name} of {len(gm.graph.nodes)} nodes")
    return gm
'''


@pytest.fixture(scope="module", autouse=True)
def _planted(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """Put the backends where every process finds them."""
    with pytest.MonkeyPatch.context() as patch:
        plant(tmp_path_factory.mktemp("planted") / "here", BACKENDS + MORE, patch)
        yield


@pytest.fixture(scope="module")
def frame(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The capture of the model's frame."""
    model, inputs = example()
    return recorded_frame(tmp_path_factory.mktemp("frame"), model, *inputs, dynamic=True)


def fails(server: ForkServer, path: Path, bug: Bug) -> Failure | None:
    """Return how a capture fails with a backend, without the help of `minify`."""
    request = {
        "task": "try", "file": str(path), "backend": bug.backend, "runs": bug.accuracy,
        "sizes": {}, "seed": 0, "device": None, "trust": True,
    }  # fmt: skip
    return failure_of(server.ask(request, timeout=3.0 if bug.backend == "bug_hangs" else 60.0))


def marks_of(bug: Bug) -> list[pytest.MarkDecorator]:
    """Return the marks of a bug: which run of the tests minifies it."""
    return [pytest.mark.sweep] if bug.backend in SWEPT else [pytest.mark.sweep, pytest.mark.long]


# --- ten bugs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bug",
    [pytest.param(bug, marks=marks_of(bug)) for bug in BUGS],
    ids=lambda bug: bug.backend.removeprefix("bug_"),
)
def test_a_planted_bug_is_minified_to_its_operations(frame: Path, tmp_path: Path, bug: Bug) -> None:
    """The result fails as the whole frame does, and no single operation can be removed from it."""
    output = tmp_path / "small.fkf"
    timeout = 2.0 if bug.backend == "bug_hangs" else 60.0
    report = minify(frame, output, backend=bug.backend, accuracy=bug.accuracy, timeout=timeout)
    assert report.finished
    assert report.after.operations == bug.left < report.before.operations
    small = read_capture(output)
    assert small == report.desc
    assert len(operations(small.graph)) == bug.left
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.fkf", "small.py"]
    assert is_bound(small)
    facts = () if small.shape_env is None else small.shape_env.guards
    assert names_in(facts) <= bound_symbols(small)
    with ForkServer() as server:
        whole = fails(server, frame, bug)
        assert whole is not None
        found = fails(server, output, bug)
        assert found is not None
        assert found.same_as(whole)
        assert report.failure.key == whole.key
        for step in REDUCTIONS:
            if step.propagates or bug.backend == "bug_hangs":
                continue
            for item in step.items(small):
                less = step.without(small, [item])
                if less is None or extent(less) >= extent(small) or not is_bound(less):
                    continue
                if not operations(less.graph):
                    continue
                write_capture(tmp_path / "less.fkf", less)
                other = fails(server, tmp_path / "less.fkf", bug)
                assert other is None or not other.same_as(whole), (step.name, item)
    check_script(report, bug)


def check_script(report: MinifyReport, bug: Bug) -> None:
    """Check that a script needs its backend to fail, and nothing of this package."""
    assert report.script_state == "fails in the same way"
    assert report.script is not None
    text = report.script.read_text()
    assert "fakeify" not in text
    assert f"{bug.backend!r}" in text
    if bug.backend not in ("bug_rejects_pattern", "bug_wrong_gradient"):
        return  # what the others do with another backend is no different
    report.script.write_text(text.replace(f"backend={bug.backend!r}", "backend='bug_none'"))
    fresh(report.script)


@pytest.mark.sweep
@pytest.mark.long
def test_a_real_model_is_minified(tmp_path: Path) -> None:
    """`replay` reproduces the failure of what the command line leaves of Llama's golden frame."""
    output = tmp_path / "small.fkf"
    source = str(GOLDEN / "model_llama.fkf")
    assert main(["minify", source, "--backend", "bug_llama", "-o", str(output), "--no-script"]) == 0
    small = read_capture(output)
    assert len(operations(small.graph)) == 2
    assert small.failure is not None
    # The message of the planted backend counts the nodes.
    assert small.failure.message.endswith(f"of {len(small.graph.nodes)} nodes")
    verdict = replay_capture(output, backend="bug_llama")
    assert (verdict.verdict, verdict.holds) == ("reproduced", True)


# --- the search -----------------------------------------------------------------------------------


@pytest.mark.sweep
def test_an_interrupted_search_is_resumed(frame: Path, tmp_path: Path) -> None:
    """The best frame so far is on disk, and a second call tries no candidate again."""
    output, journal = tmp_path / "small.fkf", tmp_path / "small.fkf.journal"

    def tried() -> list[str]:
        lines = journal.read_text().splitlines()[1:] if journal.exists() else []
        return [line for line in lines if not line.startswith("best ")]

    options = ("--backend", "bug_rejects_pattern", "-o", str(output))
    child = started("minify", str(frame), *options, start_new_session=True)
    while child.poll() is None and len(tried()) < 3:
        time.sleep(0.02)
    os.killpg(child.pid, signal.SIGINT)
    out, _ = child.communicate(timeout=120)
    assert child.returncode == 130
    assert out.startswith(
        "interrupted: the smallest frame so far is written; run the same command to resume"
    )
    with ForkServer() as server:
        whole, written = (fails(server, path, BUGS[1]) for path in (frame, output))
    assert whole is not None
    assert written is not None
    assert written.same_as(whole)
    before = tried()
    assert len(set(before)) == len(before)
    seen: list[Progress] = []
    report = minify(
        frame, output, backend="bug_rejects_pattern", script=False, progress=seen.append
    )
    assert report.finished
    assert report.after.operations == 2
    assert not journal.exists()
    assert report.tried > seen[0].tried == len(before) >= 3
    extents = [now.extent for now in seen]
    assert extents == sorted(extents, reverse=True)


@pytest.mark.long
@pytest.mark.sweep
def test_several_jobs_find_the_same(frame: Path, tmp_path: Path) -> None:
    """The number of candidates that are tried ahead does not change the result."""
    one, two = (
        minify(
            frame, tmp_path / f"{jobs}.fkf", backend="bug_rejects_pattern", script=False, jobs=jobs
        )
        for jobs in (1, 2)
    )
    assert one.desc == two.desc
    assert (tmp_path / "1.fkf").read_bytes() == (tmp_path / "2.fkf").read_bytes()


UNRELATED = "the file exists and was not written by minify"


@pytest.mark.parametrize(
    ("backend", "output", "existing", "status", "message"),
    [
        ("bug_none", "small.fkf", "small.fkf", 1, "does not fail"),
        pytest.param("bug_each_time_another", "small.fkf", "small.fkf", 1, "does not fail in the same way", marks=pytest.mark.sweep),
        ("no_such_backend", "small.fkf", "small.fkf", 2, "no_such_backend"),
        ("bug_guard_only", "small.fkf", "small.py", 2, UNRELATED),
        ("bug_guard_only", "small.fkf", "small.fkf.journal", 2, UNRELATED),
        ("bug_guard_only", "small.py", "other", 2, "the capture and its script cannot be in one file"),
    ],
)  # fmt: skip
def test_a_refused_search_leaves_the_files_as_they_are(
    frame: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    backend: str, output: str, existing: str, status: int, message: str,
) -> None:  # fmt: skip
    """A frame that does not fail has exit status 1, a wrong argument 2."""
    (tmp_path / existing).write_text("Monday: nothing.\n")
    command = ["minify", str(frame), "-o", str(tmp_path / output), "--backend", backend]
    assert main(command) == status
    error = capsys.readouterr().err
    assert message in error
    assert existing in error or message != UNRELATED
    assert [path.name for path in tmp_path.iterdir()] == [existing]
    assert (tmp_path / existing).read_text() == "Monday: nothing.\n"


def test_sizes_are_read_from_the_file_of_fuzz(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`minify` takes the file that `fuzz` saves, and sizes by name."""
    asked: list[dict[str, Any]] = []

    def stand_in(*_args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs)
        raise NotFailingError("it does not fail")

    monkeypatch.setattr("torch_fakeify.tools.minify.search.minify", stand_in)
    failure = SizeFailure({"s77": 3, "s1": 4}, "wrong", "result 0")
    report = FuzzReport({"s77": "x.size(0)", "s1": "x.size(1)"}, 5, (failure,), failure)
    report.save(tmp_path / "sizes.json")
    for sizes in (str(tmp_path / "sizes.json"), "s77=3, s1=4"):
        assert main(["minify", "a.fkf", "--accuracy", "--sizes", sizes]) == 1
    assert [each["sizes"] for each in asked] == [failure.sizes] * 2
    assert all(each["accuracy"] and each["script"] for each in asked)
    with pytest.raises(SystemExit, match="2"):
        main(["minify", "a.fkf", "--sizes", "none.json"])


# --- the same failure -----------------------------------------------------------------------------


def raised(message: str = "no lane 3", kind: str = "builtins.ValueError", **more: Any) -> Failure:
    """Return an exception of a backend."""
    frames = more.get("frames", ("/a/x.py:1 in one", "/a/y.py:2 in two", "/b/z.py:3 in three"))
    return Failure("raises", "compile", kind, message, frames)


OFF = Failure("wrong", "forward", message="result 0: 3 of 4 elements are off, by up to 1")
TAIL = ("Fatal Python error: Segmentation fault", "", "Thread 0x1 (most recent call first):",
        '  File "/a/b.py", line 3 in kernel', '  File "/a/c.py", line 9 in compile')  # fmt: skip
CRASH = Failure("crashes", type="SIGSEGV", frames=("c.py in compile", "b.py in kernel"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (raised(), raised("no lane 71")),
        (raised(), raised("no lane s0")),
        (raised(), raised("no lane 3\n\n  target: aten.add.Tensor\n  args[0]: 8")),
        (raised(), raised(frames=("/q/w.py:7 in zero", "/c/x.py:1 in one", "/a/y.py:9 in two", "/z.py in three"))),
        (OFF, Failure("wrong", "forward", message="result 3: 1 of 9 elements differ")),
        (CRASH, failure_of(Answer(Ended("crashes", -11, TAIL)))),
    ],
)  # fmt: skip
def test_failures_that_differ_in_details_are_the_same(one: Failure, other: Failure) -> None:
    """Numbers, symbols, folders, lines, outer frames and the end of a message do not matter."""
    assert one.same_as(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (raised(), raised("no line 3")),
        (raised(), raised(kind="builtins.TypeError")),
        (raised(), raised(frames=("/a/x.py:1 in one", "/a/y.py:2 in two", "/b/z.py:3 in four"))),
        (raised(), raised("no lane 3\nadd.cpp:7: error: expected ';'")),
        (raised(), OFF),
        (raised(), Failure("crashes", type="SIGSEGV")),
        (raised(), Failure("hangs")),
        (OFF, Failure("wrong", "backward", message=OFF.message)),
        (OFF, Failure("wrong", "forward", message="result 0: shape [1], not [2]")),
        (CRASH, failure_of(Answer(Ended("crashes", -11, (*TAIL[:3], TAIL[4]))))),
        (CRASH, Failure("crashes", type="SIGABRT", frames=CRASH.frames)),
    ],
)
def test_failures_of_other_kinds_differ(one: Failure, other: Failure) -> None:
    """The type, the words, the lines with errors, the innermost frames and the kind matter."""
    assert not one.same_as(other)


def test_a_frame_that_is_not_compared_is_not_minified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error contains the reason, and no file is written."""
    path = recorded_frame(tmp_path, torch.linalg.cholesky, torch.eye(3))
    assert main(["minify", "--accuracy", "--backend", "eager", str(path)]) == 2
    message = capsys.readouterr().err
    assert "the frame was not compared with eager; found eager raised _LinAlgError" in message
    assert not list(tmp_path.glob("*.min.*"))


# --- what is read is not written over -------------------------------------------------------------


@pytest.mark.parametrize(
    "how", ["itself", "another path", "symlink", "hard link", "script", "journal"]
)
def test_the_capture_is_not_overwritten(
    frame: Path, tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the output nor a file beside it may be the capture, under any of its paths."""
    source = tmp_path / {"script": "a.py", "journal": "a.fkf.journal"}.get(how, "a.fkf")
    data = frame.read_bytes()
    source.write_bytes(data)
    names = {"another path": f"../{tmp_path.name}/a.fkf", "symlink": "s.fkf", "hard link": "h.fkf"}
    output = tmp_path / names.get(how, "a.fkf")
    if how == "symlink":
        output.symlink_to(source)
    if how == "hard link":
        output.hardlink_to(source)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(WriteError, match="the output is an input; found the same file as") as error:
        minify(source, output, backend="bug_guard_only")
    assert str(source) in str(error.value)
    assert main(["minify", str(source), "-o", str(output), "--backend", "bug_guard_only"]) == 2
    assert "the output is an input" in capsys.readouterr().err
    assert source.read_bytes() == data
    assert sorted(path.name for path in tmp_path.iterdir()) == before


# --- sizes ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Frames with a dim that is dynamic, or unbacked, or computed from data."""
    folder = tmp_path_factory.mktemp("sized")

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * 2).cos(), x.relu()

    def finds(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x.nonzero() * 2,)

    unbacked = torch.ones(6, 2)
    torch._dynamo.decorators.mark_unbacked(unbacked, 0)
    found: dict[str, Path] = {}
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for name, function, x, dynamic in (
            ("backed", program, torch.ones(8, 4), True),
            ("unbacked", program, unbacked, None),
            ("data", finds, torch.ones(5, 4), None),
        ):
            found[name] = recorded_frame(
                folder / name, function, x, dynamic=dynamic, fullgraph=True
            )
    return found


def small(path: Path, backend: str, output: Path, *options: str) -> int:
    """Return the exit status of the command, which compares numbers."""
    command = ["minify", str(path), "-o", str(output), "--accuracy", "--backend", backend]
    return main([*command, *options])


@pytest.mark.sweep
def test_sizes_that_fuzz_saves_become_hints(
    sized: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The minified frame and its script fail without `--sizes`, and the exit status is 0."""
    sizes, output = str(tmp_path / "s.json"), tmp_path / "small.fkf"
    fuzzed = ["fuzz", str(sized["backed"]), "--backend", "bug_tall", "--runs", "40"]
    assert main([*fuzzed, "--save", sizes]) == 1
    assert small(sized["backed"], "bug_tall", output, "--sizes", sizes) == 0
    assert "script: fails in the same way" in capsys.readouterr().out
    assert small(output, "bug_tall", tmp_path / "again.fkf", "--no-script") == 0
    assert "AssertionError" in fresh(tmp_path / "small.py", status=1).stderr


@pytest.mark.sweep
@pytest.mark.long
def test_minify_reports_a_frame_that_fails_at_other_hints_only(
    sized: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first line and exit status 1 report it; the script compiles at other sizes and fails."""
    output = tmp_path / "small.fkf"
    assert small(sized["backed"], "bug_tall_unexpected", output, "--sizes", "x.size(0)=14") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "the capture that was written does not fail in the same way: it compiles and runs right; "
        "it does with --sizes 'x.size(0)=14'"
    )
    assert "script: fails in the same way" in lines
    again = ["--no-script", "--sizes", "s77=14"]
    small(output, "bug_tall_unexpected", tmp_path / "again.fkf", *again)
    assert "wrong numbers" in capsys.readouterr().out


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["unbacked", pytest.param("data", marks=pytest.mark.long)])
def test_unbacked_sizes_become_static(
    sized: dict[str, Path], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unbacked sizes cannot be hints: the written frame has constants and fails without options."""
    output = tmp_path / "small.fkf"
    assert small(sized[name], "bug_tall", output, "--sizes", "u0=14") == 0
    assert "script: fails in the same way" in capsys.readouterr().out
    assert small(output, "bug_tall", tmp_path / "again.fkf", "--no-script") == 0


@pytest.mark.sweep
@pytest.mark.long
def test_minify_reports_a_script_that_does_not_fail(
    sized: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The first line and exit status 1 report it; the status is 2 if the outcome is unknown."""
    for fails, status, word in (
        (False, 1, "does not fail in the same way"),
        (None, 2, "was not checked"),
    ):
        outcome = Outcome(fails, "it is another one")
        monkeypatch.setattr(
            "torch_fakeify.tools.minify.repro_script.check_script", lambda *_, o=outcome, **__: o
        )
        output = tmp_path / f"{status}.fkf"
        command = ["minify", str(sized["backed"]), "-o", str(output), "--backend", "bug_cos"]
        assert main(command) == status
        first = capsys.readouterr().out.splitlines()[0]
        assert first == f"the script that was written {word}: it is another one"


@pytest.mark.sweep
@pytest.mark.parametrize("is_written", [True, False])
def test_ctrl_c_at_the_first_write_says_what_was_written(
    frame: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    """It may come right after the file is there, or right before."""

    def write(path: Path, desc: Any, **options: Any) -> None:
        if is_written or path != output:
            write_capture(path, desc, **options)
        if path == output:
            raise KeyboardInterrupt

    monkeypatch.setattr("torch_fakeify.tools.minify.search.write_capture", write)
    output = tmp_path / "small.fkf"
    if is_written:
        report = tfk.minify(frame, output, backend="bug_rejects_pattern")
        assert (report.interrupted, report.finished) == (True, False)
        assert tfk.Capture.load(output).failure is not None
    else:
        with pytest.raises(KeyboardInterrupt):
            tfk.minify(frame, output, backend="bug_rejects_pattern")
        assert not output.exists()
