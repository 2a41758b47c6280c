"""Frames made small: ten planted bugs, interruption, scripts, and what counts as the same failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from planted_bugs import BACKENDS, BUGS, Bug, example
from planting import plant

import torch_fakeify as tfk
from torch_fakeify.cli import main
from torch_fakeify.errors import NotFailingError
from torch_fakeify.failures import Failure, failure_of
from torch_fakeify.files import read_capture, write_capture
from torch_fakeify.fork_server import ForkServer
from torch_fakeify.fuzz import FuzzReport, SizeFailure
from torch_fakeify.graph_edits import operations
from torch_fakeify.isolation import Answer
from torch_fakeify.minify import MinifyReport, Progress, minify
from torch_fakeify.reductions import STEPS, extent
from torch_fakeify.size_edits import bound_symbols, is_bound, names_in
from torch_fakeify.trials import run_trial
from torch_fakeify.verdict import replay

if TYPE_CHECKING:
    from collections.abc import Generator

QUICK = ("bug_guard_only",)
"""Those that the default run has."""
SWEPT = ("bug_rejects_pattern", "bug_segfaults", "bug_wrong_gradient", "bug_dynamic_only")
"""Those that ``.ci/run`` has, too."""
GOLDEN = Path(__file__).parent / "golden" / "v1"

MORE = '''

def bug_none(gm, inputs):
    return gm


def bug_each_time_another(gm, inputs):
    raise RuntimeError("word " + "".join(chr(97 + b % 26) for b in os.urandom(8)))


def bug_llama(gm, inputs):
    """Rotary embeddings: a negation beside a concatenation."""
    for fx_node in _calls(gm, "cat"):
        if any(n.op != "placeholder" and "neg" in str(n.target) for n in fx_node.all_input_nodes):
            raise RuntimeError(f"no layout for {fx_node.name} of {len(gm.graph.nodes)} nodes")
    return gm
'''


@pytest.fixture(scope="module", autouse=True)
def _planted(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """The backends, where every process finds them."""
    with pytest.MonkeyPatch.context() as patch:
        plant(tmp_path_factory.mktemp("planted") / "here", BACKENDS + MORE, patch)
        yield


@pytest.fixture(scope="module")
def frame(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The capture of the model's frame."""
    folder = tmp_path_factory.mktemp("frame")
    torch._dynamo.reset()
    model, inputs = example()
    torch.compile(model, backend=tfk.record(folder), dynamic=True)(*inputs)
    (path,) = folder.glob("*.fkf")
    return path


def fails(server: ForkServer, path: Path, bug: Bug) -> Failure | None:
    """How a capture fails with a backend, asked without `minify`."""
    request = {
        "task": "try", "file": str(path), "backend": bug.backend, "runs": bug.accuracy,
        "sizes": {}, "seed": 0, "device": None, "trust": True,
    }  # fmt: skip
    return failure_of(server.ask(request, timeout=3.0 if bug.backend == "bug_hangs" else 60.0))


def marks_of(bug: Bug) -> list[pytest.MarkDecorator]:
    """When a bug is minified."""
    if bug.backend in QUICK:
        return []
    return [pytest.mark.sweep] if bug.backend in SWEPT else [pytest.mark.sweep, pytest.mark.long]


# --- ten bugs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bug",
    [pytest.param(bug, marks=marks_of(bug)) for bug in BUGS],
    ids=lambda bug: bug.backend.removeprefix("bug_"),
)
def test_what_is_left_of_a_planted_bug(frame: Path, tmp_path: Path, bug: Bug) -> None:
    """As few operations as the bug takes, which fail as the whole frame; no one of them can go."""
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
        for step in STEPS:
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
    """The script fails with the backend, and not without it; it has no word of this package."""
    assert report.script_state == "fails in the same way"
    assert report.script is not None
    text = report.script.read_text()
    assert "fakeify" not in text
    assert f"{bug.backend!r}" in text
    if bug.backend not in ("bug_rejects_pattern", "bug_wrong_gradient"):
        return  # what the others do with another backend is no different
    report.script.write_text(text.replace(f"backend={bug.backend!r}", "backend='bug_none'"))
    done = subprocess.run([sys.executable, str(report.script)], check=False, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_real_model(tmp_path: Path) -> None:
    """Llama's frame of the golden corpus, by the command line; `replay` says what is left of it."""
    output = tmp_path / "small.fkf"
    source = str(GOLDEN / "model_llama.fkf")
    assert main(["minify", source, "--backend", "bug_llama", "-o", str(output), "--no-script"]) == 0
    small = read_capture(output)
    assert len(operations(small.graph)) == 2
    assert small.failure is not None
    assert small.failure.message.endswith(f"of {len(small.graph.nodes)} nodes")  # its own words
    verdict = replay(output, backend="bug_llama")
    assert (verdict.word, verdict.holds) == ("reproduced", True)


# --- the search -----------------------------------------------------------------------------------


def test_interrupted_and_resumed(frame: Path, tmp_path: Path) -> None:
    """The best frame is on the disk; the same call goes on from it and tries nothing twice."""
    output = tmp_path / "small.fkf"
    seen: list[Progress] = []

    def stop(now: Progress) -> None:
        seen.append(now)
        if now.tried >= 3:
            raise KeyboardInterrupt

    first = minify(frame, output, backend="bug_rejects_pattern", script=False, progress=stop)
    assert not first.finished
    assert "interrupted" in first.lines()[-1]
    assert (tmp_path / "small.fkf.journal").exists()
    with ForkServer() as server:
        kept = fails(server, output, BUGS[1])
    assert kept is not None
    assert kept.same_as(first.failure)
    lines = (tmp_path / "small.fkf.journal").read_text().splitlines()[1:]
    tried = [line for line in lines if not line.startswith("best ")]
    assert len(set(tried)) == len(tried)
    second = minify(
        frame, output, backend="bug_rejects_pattern", script=False, progress=seen.append
    )
    assert second.finished
    assert second.after.operations == 2
    assert second.before == first.before
    assert not (tmp_path / "small.fkf.journal").exists()
    assert second.tried > len(tried) >= 3
    extents = [now.extent for now in seen]
    assert extents == sorted(extents, reverse=True)


@pytest.mark.sweep
def test_several_at_a_time_find_the_same(frame: Path, tmp_path: Path) -> None:
    """How many candidates are tried ahead changes nothing."""
    one, two = (
        minify(
            frame, tmp_path / f"{jobs}.fkf", backend="bug_rejects_pattern", script=False, jobs=jobs
        )
        for jobs in (1, 2)
    )
    assert one.desc == two.desc
    assert (tmp_path / "1.fkf").read_bytes() == (tmp_path / "2.fkf").read_bytes()


@pytest.mark.parametrize("backend", ["bug_none", "bug_each_time_another"])
def test_a_frame_that_does_not_fail(
    frame: Path, tmp_path: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 1, and what was there stays."""
    output = tmp_path / "small.fkf"
    output.write_bytes(b"kept")
    assert main(["minify", str(frame), "--backend", backend, "-o", str(output)]) == 1
    assert "does not fail" in capsys.readouterr().err
    assert output.read_bytes() == b"kept"
    assert [path.name for path in tmp_path.iterdir()] == ["small.fkf"]


def test_what_is_wrong_with_the_question(
    frame: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown backend or file is bad usage, and not a failure of the frame."""
    output = ["-o", str(tmp_path / "small.fkf")]
    assert main(["minify", str(frame), "--backend", "no_such_backend", *output]) == 2
    assert "no_such_backend" in capsys.readouterr().err
    assert main(["minify", str(tmp_path / "none.fkf"), *output]) == 2
    with pytest.raises(SystemExit, match="2"):
        main(["minify", str(frame), "--sizes", "none.json", *output])
    assert not list(tmp_path.iterdir())


def test_sizes_of_fuzz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `fuzz` saves `minify` takes, and sizes by name."""
    asked: list[dict[str, Any]] = []

    def stand_in(*_args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs)
        raise NotFailingError("it does not fail")

    monkeypatch.setattr("torch_fakeify.minify.minify", stand_in)
    failure = SizeFailure({"s77": 3, "s1": 4}, "wrong", "result 0")
    report = FuzzReport({"s77": "x.size(0)", "s1": "x.size(1)"}, 5, [failure], failure)
    report.save(tmp_path / "sizes.json", backend="bug_miscompiles")
    for sizes in (str(tmp_path / "sizes.json"), "s77=3, s1=4"):
        assert main(["minify", "a.fkf", "--accuracy", "--sizes", sizes]) == 1
    assert [each["sizes"] for each in asked] == [failure.sizes] * 2
    assert all(each["accuracy"] and each["script"] for each in asked)


# --- the same failure -----------------------------------------------------------------------------


def raised(message: str = "no lane 3", kind: str = "builtins.ValueError", **more: Any) -> Failure:
    """An exception of a backend's."""
    frames = more.get("frames", ("/a/x.py:1 in one", "/a/y.py:2 in two", "/b/z.py:3 in three"))
    return Failure("raises", "compile", kind, message, frames)


@pytest.mark.parametrize(
    "other",
    [
        raised("no lane 71"),
        raised("no lane s0"),
        raised("no lane 3\n\n  target: aten.add.Tensor\n  args[0]: 8"),
        raised(
            frames=("/q/w.py:7 in zero", "/c/x.py:1 in one", "/a/y.py:9 in two", "/z.py in three")
        ),
    ],
)
def test_the_same_failure(other: Failure) -> None:
    """Numbers, symbols, folders, lines, outer frames and what a message goes on with are no matter."""
    assert raised().same_as(other)


@pytest.mark.parametrize(
    "other",
    [
        raised("no line 3"),
        raised(kind="builtins.TypeError"),
        raised(frames=("/a/x.py:1 in one", "/a/y.py:2 in two", "/b/z.py:3 in four")),
        raised("no lane 3\nadd.cpp:7: error: expected ';'"),
        Failure("wrong", "forward", message="result 0: 3 of 4 elements are off, by up to 1"),
        Failure("crashes", type="SIGSEGV"),
        Failure("hangs"),
    ],
)
def test_another_failure(other: Failure) -> None:
    """The type, the words, the lines that tell of errors, the innermost frames and the kind are."""
    assert not raised().same_as(other)


def test_wrong_is_not_wrong() -> None:
    """Off numbers are not a wrong shape, nor forward backward."""
    off = Failure("wrong", "forward", message="result 0: 3 of 4 elements are off, by up to 1")
    assert off.same_as(Failure("wrong", "forward", message="result 3: 1 of 9 elements differ"))
    assert not off.same_as(Failure("wrong", "backward", message=off.message))
    assert not off.same_as(Failure("wrong", "forward", message="result 0: shape [1], not [2]"))


def test_crashes_are_told_apart_by_their_frames() -> None:
    """As `faulthandler` tells them, most recent first."""
    tail = ("Fatal Python error: Segmentation fault", "", 'Thread 0x1 (most recent call first):',
            '  File "/a/b.py", line 3 in kernel', '  File "/a/c.py", line 9 in compile')  # fmt: skip
    one = failure_of(Answer("crashed", {}, -11, tail))
    assert one == Failure("crashes", type="SIGSEGV", frames=("c.py in compile", "b.py in kernel"))
    other = failure_of(Answer("crashed", {}, -11, (*tail[:3], tail[4])))
    assert other is not None
    assert not one.same_as(other)
    assert not one.same_as(Failure("crashes", type="SIGABRT", frames=one.frames))


# --- judging numbers ------------------------------------------------------------------------------


def cancelling(tmp_path: Path) -> tfk.Capture:
    """A sum whose rounding is larger than itself."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return (x * 1e7 - x * 9999999.0).sum()

    torch._dynamo.reset()
    torch.compile(program, backend=tfk.record(tmp_path))(torch.randn(64, 64))
    return tfk.Capture.load(next(tmp_path.glob("*.fkf")))


@pytest.mark.parametrize(("factor", "outcome"), [(1.0, "passed"), (1000.0, "wrong")])
def test_double_precision_is_the_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, outcome: str
) -> None:
    """Code that is nearer to it than eager is right, however far it is from eager."""
    frame = cancelling(tmp_path)

    def exact(gm: Any, _inputs: Any) -> Any:
        return lambda x: [(x.double().sum() * factor).float()]

    backends(monkeypatch, exact=exact)
    told = run_trial(frame, "exact", runs=True)
    assert told["outcome"] == outcome
    assert told["stage"] == ("forward" if outcome == "wrong" else "backward")


class _Halved(torch.autograd.Function):
    """The sine, and half of its derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.cos() / 2


@pytest.mark.parametrize(("function", "outcome"), [(_Halved.apply, "wrong"), (torch.sin, "passed")])
def test_gradients_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: Any, outcome: str
) -> None:
    """Values that are right do not make the derivative so."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x.sin(), backend=tfk.record(tmp_path))
    compiled(torch.ones(8, requires_grad=True))
    frame = tfk.Capture.load(next(tmp_path.glob("*.fkf")))
    backends(monkeypatch, other=lambda _gm, _inputs: lambda x: [function(x)])
    told = run_trial(frame, "other", runs=True)
    assert (told["outcome"], told["stage"]) == (outcome, "backward")


def backends(patch: pytest.MonkeyPatch, **named: Any) -> None:
    """Make functions backends in this process; any other name is eager."""

    def find(backend: Any) -> Any:
        return named.get(backend, lambda gm, _: gm) if isinstance(backend, str) else backend

    patch.setattr("torch_fakeify._torch.resolve_backend", find)


def test_random_numbers_are_not_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler may draw other ones."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    torch._dynamo.reset()
    torch.compile(program, backend=tfk.record(tmp_path))(torch.zeros(8))
    frame = tfk.Capture.load(next(tmp_path.glob("*.fkf")))
    other = lambda gm, _inputs: lambda *args: [args[0] + 0.25]  # noqa: E731
    backends(monkeypatch, other=other)
    assert run_trial(frame, "other", runs=True)["outcome"] == "passed"
