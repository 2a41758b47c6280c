"""A corpus: thousands of captures compiled by any executor, each once and in its own process."""

from __future__ import annotations

import random
import shlex
import shutil
import signal
from concurrent.futures import Executor, Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest
import torch
from captured_frames import captures_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from places import GOLDEN
from planting import plant
from processes import is_there, started, until

import torch_fakeify as tfk
from torch_fakeify import cli
from torch_fakeify.corpus import check_backend, replay_all
from torch_fakeify.corpus import command as corpus_run
from torch_fakeify.corpus.jobs import Done, Job, local_executor
from torch_fakeify.corpus.results import ResultFile, Row, read_rows
from torch_fakeify.tools.capture_files import CorpusFile, find_captures
from torch_fakeify.tools.worker.replies import Answer, Compiled, Failed, Found, Thrown

if TYPE_CHECKING:
    from collections.abc import Generator

pytestmark = pytest.mark.usefixtures("warm_workers")

SAME = ("symbol_facts", "tensor_detached_symbolic", "tensor_strided_symbolic")
"""Captures of one frame."""

BACKENDS = '''
def planted_raises(gm, inputs):
    raise ValueError("\\udc80 is no text")


def planted_fifth(gm, inputs):
    """The fifth one waits while there is a file that says so."""
    folder = Path(os.environ["PLANTED_FOLDER"])
    with (folder / "log").open("a") as log:
        log.write(f"{os.getpid()}\\n")
    lines = (folder / "log").read_text().split()
    while len(lines) == 5 and (folder / "wait").exists():
        (folder / "waits").touch()
        time.sleep(1)
    return gm
'''


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    """A folder of the planted backends, where processes that are started from here find them."""
    folder = tmp_path_factory.mktemp("planted")
    with pytest.MonkeyPatch.context() as patch:
        plant(folder, BACKENDS, patch)
        patch.setenv("PLANTED_FOLDER", str(folder))
        yield folder


@pytest.fixture(scope="module")
def local(planted: Path) -> Generator[Executor]:
    """An executor of one job at a time, whose next job a fault of the last one could affect."""
    assert planted.exists()
    with local_executor(1) as executor:
        yield executor


def corpus(folder: Path, *names: str) -> Path:
    """Write some of the golden captures to a folder."""
    folder.mkdir(exist_ok=True, parents=True)
    for name in names:
        shutil.copy(GOLDEN / f"{name}.fkf", folder)
    return folder


def job(backend: str = "eager", **fields: Any) -> Job:
    """Return a job that compiles with a backend."""
    return Job("compile", backend, **fields)


# --- the real thing -------------------------------------------------------------------------------


@pytest.mark.sweep
def test_the_command_replays_a_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A corpus has real frames, a model, a copy, a frame that lacks an operator and a bad file."""
    place = corpus(tmp_path / "c", "model_vit", "dtypes", "program_failed", *SAME)
    corpus(place / "sub", "program_custom_op", "jagged_values_symbolic", "tensor_strided_symbolic")
    (place / "bad.fkf").write_text("no capture")
    outputs = ("--jsonl", str(tmp_path / "r.jsonl"), "--junit", str(tmp_path / "r.xml"))
    assert cli.main(["replay", str(place), "--backend", "aot_eager", "--jobs", "2", *outputs]) == 2
    captured = capsys.readouterr()
    rows = read_rows(tmp_path / "r.jsonl")
    assert [row.file for row in rows] == [file.name for file in find_captures([place])]
    assert {row.file: row.verdict for row in rows if row.verdict != "compiles"} == {
        "bad.fkf": "bad file",
        "program_failed.fkf": "not reproduced",
        "sub/program_custom_op.fkf": "cannot be rebuilt",
    }
    copies = {row.file: row.same_as for row in rows if row.same_as is not None}
    assert copies == {f"{name}.fkf": "sub/tensor_strided_symbolic.fkf" for name in SAME}
    assert all(
        (row.seconds > 0) == (row.fingerprint is not None) for row in rows if not row.same_as
    )
    (suite,) = ET.parse(tmp_path / "r.xml").getroot()
    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": str(len(rows)),
        "failures": "1",
        "errors": "2",
        "skipped": "3",
    }
    lines = captured.out.splitlines()
    assert [line.split("  ")[0] for line in lines[:4]] == [
        "file", "bad.fkf", "program_failed.fkf", "sub/program_custom_op.fkf",
    ]  # fmt: skip
    assert "3 of them are the same frame as another one" in lines
    assert all(line.isprintable() for line in (*lines, *captured.err.splitlines()))
    assert captured.err.splitlines()[-1] == "10 of 10, 3 do not hold"


@pytest.mark.parametrize(
    ("backend", "limits", "word", "detail"),
    [
        pytest.param(
            "planted_hangs", {"timeout": 1.0}, "hangs", "killed after 1 s", marks=pytest.mark.sweep
        ),
        ("planted_segfaults", {}, "crashes", "the process was ended by SIGSEGV"),
        ("planted_eats", {"memory": 700 << 20}, "out of memory", "killed at more than 700 MiB"),
        ("planted_raises", {}, "does not compile", "  ValueError: \\udc80 is no text"),
        ("eager", {}, "compiles", "compiled in"),
    ],
)
def test_a_fault_ends_only_its_own_capture(
    local: Executor,
    tmp_path: Path,
    backend: str,
    limits: dict[str, Any],
    word: str,
    detail: str,
) -> None:
    """Each way to fail has its verdict and its row, and does not affect the next capture."""
    files = find_captures([corpus(tmp_path / "c", "aliases", "boxed")])
    rows = list(replay_all(files, local, job(backend, **limits), window=2))
    assert [row.verdict for row in rows] == [word, word]
    assert all(row.details[0].startswith(detail) for row in rows), rows
    with ResultFile(tmp_path / "r.jsonl", []) as result:
        for row in rows:
            result.add(row)
    assert read_rows(tmp_path / "r.jsonl") == rows


def test_bytes_are_compiled_as_a_path_is(local: Executor) -> None:
    """A worker on another machine, which does not have the file, gives the same verdict."""
    files = find_captures([GOLDEN / "aliases.fkf"])
    (sent,) = replay_all(files, local, job(), window=1, send_files=True)
    (read,) = replay_all(files, local, job(), window=1)
    assert (sent.verdict, sent.torch) == (read.verdict, read.torch) == ("compiles", read.torch)
    assert read.torch is not None


def test_an_unknown_backend_is_refused_once(local: Executor) -> None:
    """The error is raised for the corpus and not for each capture."""
    with pytest.raises(tfk.CaptureError, match="nosuch"):
        check_backend(local, job("nosuch"))
    check_backend(local, job("aot_eager"))


@pytest.mark.sweep
def test_an_interrupted_run_is_resumed(planted: Path, tmp_path: Path) -> None:
    """Ctrl-C ends every process and saves the rows so far; `--resume` compiles only the others."""
    names = ("aliases", "boxed", "callables", "contexts", "dtypes", "tensor_strided")
    place, total = corpus(tmp_path / "c", *names), len(names)
    (planted / "wait").touch()
    command = ("replay", str(place), "--backend", "planted_fifth", "--jsonl", str(tmp_path / "r"))
    run = started(*command, "--jobs", "1")
    with run:
        try:
            until((planted / "waits").exists)
            until(lambda: (tmp_path / "r").read_bytes().count(b"\n") == 4)
            run.send_signal(signal.SIGINT)
            out, err = run.communicate(timeout=120)
        finally:
            run.kill()
    assert run.returncode == 130, err
    assert f"4 of {total} captures" in out
    assert err.splitlines()[-1] == (
        "torch-fakeify: interrupted; run it with --resume to go on from there"
    )
    pids = [int(line) for line in (planted / "log").read_text().split()]
    until(lambda: not any(is_there(pid) for pid in pids))
    before = read_rows(tmp_path / "r")
    assert [row.verdict for row in before] == ["compiles"] * 4
    assert cli.main([*command, "--resume"]) == 0
    after = read_rows(tmp_path / "r")
    assert len(after) == total
    assert [row for row in after if row in before] == before
    assert len((planted / "log").read_text().split()) == total + 1, "the fifth one twice"


@pytest.mark.sweep
def test_a_killed_caller_ends_its_children(planted: Path, tmp_path: Path) -> None:
    """No process compiles any longer once its caller has ended."""
    (planted / "log").write_text("1\n" * 4)
    (planted / "waits").unlink(missing_ok=True)
    (planted / "wait").touch()
    command = ("replay", str(GOLDEN / "aliases.fkf"), "--backend", "planted_fifth", "--jobs", "1")
    with started(*command, cwd=tmp_path) as run:
        until((planted / "waits").exists)
        run.kill()
    pid = int((planted / "log").read_text().split()[-1])
    until(lambda: not is_there(pid))


# --- any executor ---------------------------------------------------------------------------------

NAMES = ("aliases", "boxed", "callables", *SAME, "tensor_strided", "tensor_detached")


class Pretended(Executor):
    """An executor that compiles nothing and answers jobs in a random order."""

    def __init__(self, seed: int = 0, words: dict[str, str] | None = None) -> None:
        self.random = random.Random(seed)
        self.words = words or {}
        self.open: dict[Future[Any], Job] = {}
        self.asked: list[str] = []
        self.most = 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Store the job; the task of finding a backend is answered at once."""
        future: Future[Any] = Future()
        (job,) = args
        if job.task == "backend":
            future.set_result(Done(Answer(Found()), None, 0.0))
            return future
        self.open[future] = job
        self.most = max(self.most, len(self.open))
        return future

    def wait(self, pending: Any, return_when: str) -> SimpleNamespace:
        """Answer some of the pending jobs."""
        assert set(pending) == set(self.open)
        done = self.random.sample([*self.open], self.random.randint(1, len(self.open)))
        for future in done:
            self._answer(future, Path(str(self.open.pop(future).file)).stem)
        return SimpleNamespace(done=set(done))

    def _answer(self, future: Future[Any], name: str) -> None:
        self.asked.append(name)
        word = self.words.get(name, "compiled")
        if word == "dies":
            future.set_exception(RuntimeError("the worker has died"))
        elif word == "stops":
            future.cancel()
            future.set_running_or_notify_cancel()
        else:
            failed = Failed(Thrown("E", "m", memory=False, frames=()))
            answer = Answer(Compiled(1.0) if word == "compiled" else failed)
            future.set_result(Done(answer, None, 0.5))


@contextmanager
def pretending(executor: Pretended) -> Generator[None]:
    """Within the block, use this executor for all work, also that of the command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_fakeify.corpus.runner.wait", executor.wait)
        patch.setattr(corpus_run, "local_executor", lambda jobs: nullcontext(executor))
        yield


def files_of(names: list[str]) -> list[CorpusFile]:
    """Return golden captures, each under a name of its own."""
    return [
        CorpusFile(f"{number}-{name}", GOLDEN / f"{name}.fkf") for number, name in enumerate(names)
    ]


def replayed(executor: Pretended, names: list[str], **options: Any) -> dict[str, Row]:
    """Return the rows by name; each file has one."""
    with pretending(executor):
        rows = list(replay_all(files_of(names), executor, job(), **{"window": 3, **options}))
    found = {row.file: row for row in rows}
    assert len(found) == len(rows)
    assert sorted(found) == sorted(file.name for file in files_of(names))
    return found


@settings(max_examples=25)
@given(
    names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=12),
    seed=st.integers(0, 1000),
    window=st.integers(1, 5),
    wrong=st.sets(st.sampled_from(NAMES)),
)
def test_every_capture_has_one_row_and_no_frame_is_compiled_twice(
    names: list[str], seed: int, window: int, wrong: set[str]
) -> None:
    """For any order of answers, a capture has its own row or a copy of its frame's row."""
    executor = Pretended(seed, dict.fromkeys(wrong, "failed"))
    found = replayed(executor, names, window=window)
    assert executor.most <= window
    assert not executor.open
    first: dict[str | None, Row] = {}
    for file in files_of(names):
        row = found[file.name]
        other = first.setdefault(row.fingerprint, row)
        assert row.same_as == (None if other is row else other.file)
        assert (row.verdict, row.details) == (other.verdict, other.details)
        assert (row.seconds == 0) == (other is not row)
        if other is row:
            assert row.holds == (file.path.stem not in wrong)
    assert len(executor.asked) == len(first)


def test_all_captures_are_compiled_on_request() -> None:
    """Of two captures of one frame each then has a verdict of its own."""
    executor = Pretended(0, {"tensor_detached": "failed"})
    found = replayed(executor, ["tensor_strided", "tensor_detached"], every=True)
    assert found["0-tensor_strided"].verdict == "compiles"
    assert found["1-tensor_detached"].verdict == "does not compile"
    assert sorted(executor.asked) == ["tensor_detached", "tensor_strided"]
    assert all(row.same_as is None for row in found.values())


def test_a_job_that_no_worker_survives_has_a_row() -> None:
    """The row of a job that kills its workers has that verdict, and other captures have theirs."""
    executor = Pretended(0, {"boxed": "dies"})
    found = replayed(executor, ["aliases", "boxed", "callables"])
    assert [found[name].verdict for name in sorted(found)] == ["compiles", "lost", "compiles"]
    assert found["1-boxed"].details == ("RuntimeError: the worker has died",)
    assert found["1-boxed"].is_error


def test_a_run_whose_executor_stops_can_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names `--resume`; with another backend nothing is taken over."""
    place = corpus(tmp_path / "c", "aliases", "boxed", "callables")
    command = ["replay", str(place), "--jobs", "1", "--jsonl", str(tmp_path / "r")]
    with pretending(Pretended(0, {"callables": "stops"})):
        assert cli.main([*command, "--backend", "b"]) == 2
    captured = capsys.readouterr()
    assert "the executor has stopped before all captures were compiled" in captured.err
    assert "run it with --resume to go on from there" in captured.err
    with pretending(Pretended()):
        assert cli.main([*command, "--backend", "b", "--resume"]) == 0
    with pretending(other := Pretended()):
        cli.main([*command, "--resume"])
    assert len(other.asked) == 3


RESUMED = ("aliases", "boxed", "callables", "tensor_detached", "tensor_strided")
"""Captures of four frames: those of the last two are one."""


def decided(result: Path) -> dict[str, Row]:
    """Return the rows of a result that have a verdict of their own, by capture."""
    rows = read_rows(result) if result.exists() else []
    return {Path(r.file).stem: r for r in rows if r.verdict != "lost" and r.same_as is None}


@settings(max_examples=20)
@given(
    runs=st.lists(
        st.dictionaries(st.sampled_from(RESUMED), st.sampled_from(["failed", "dies", "stops"])),
        max_size=3,
    ),
    gone=st.sampled_from(RESUMED),
    seed=st.integers(0, 1000),
)
@example(
    runs=[dict.fromkeys(RESUMED[:2], "dies"), dict.fromkeys(RESUMED[:2], "stops")],
    gone=RESUMED[0],
    seed=0,
)
def test_a_resumed_run_compiles_what_has_no_verdict_of_its_own(
    runs: list[dict[str, str]], gone: str, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """However the runs before it ended, no verdict is lost, and no other capture is compiled again."""
    place = tmp_path_factory.mktemp("resumed")
    corpus(place / "c", *RESUMED)
    command = ["replay", str(place / "c"), "--jobs", "1", "--jsonl", str(place / "r"), "--resume"]
    for words in runs:
        before = decided(place / "r")
        with pretending(Pretended(seed, words)):
            cli.main(command)
        assert before.items() <= decided(place / "r").items()
    (place / "c" / f"{gone}.fkf").unlink()
    left = [name for name in RESUMED if name != gone]
    before = {name: row for name, row in decided(place / "r").items() if name in left}
    with pretending(again := Pretended()):
        status = cli.main(command)
    rows = read_rows(place / "r")
    assert [row.file for row in rows] == [f"{name}.fkf" for name in left]
    assert status == (not all(row.holds for row in rows))
    assert before.items() <= decided(place / "r").items()
    frames = {name: name.partition("_")[0] for name in left}
    asked = [frames[name] for name in again.asked]
    assert sorted(asked) == sorted({*frames.values()} - {frames[name] for name in before})


def test_ctrl_c_before_the_first_capture_changes_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interruption before the first capture leaves the earlier result file as it was."""

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(corpus_run, "check_backend", interrupted)
    (tmp_path / "r").write_text("as it was")
    with pretending(Pretended()):
        assert cli.main(["replay", str(GOLDEN), "--jsonl", str(tmp_path / "r")]) == 130
    assert capsys.readouterr().err == "torch-fakeify: interrupted\n"
    assert (tmp_path / "r").read_text() == "as it was"


def test_only_new_failures_decide_the_status_of_a_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With an earlier result, new failures give status 1; without one, any failure does."""
    place = corpus(tmp_path / "c", "aliases", "boxed")

    def status(words: dict[str, str]) -> int:
        results = [str(tmp_path / f"{n}.jsonl") for n in (len(outputs), len(outputs) - 1)]
        options = ["--against", results[1]] if outputs else []
        with pretending(Pretended(0, words)):
            found = cli.main(["replay", str(place), "--jsonl", results[0], *options])
        outputs.append(capsys.readouterr().out)
        return found

    outputs: list[str] = []
    assert status({"boxed": "failed"}) == 1
    said, command = outputs[-1].split("\nnext\n")
    assert "with " in said
    words = ["torch-fakeify", "minify", str(place / "boxed.fkf")]
    assert shlex.split(command.replace("\\\n", " ")) == words
    assert status({"boxed": "failed"}) == 0
    assert "next" not in outputs[-1]
    assert "still fails: 1\n  boxed.fkf: does not compile, was does not compile\n" in outputs[-1]
    assert status({"boxed": "failed", "aliases": "failed"}) == 1
    assert "newly fails: 1\n  aliases.fkf: does not compile, was compiles\n" in outputs[-1]
    assert status({}) == 0
    assert "newly passes: 2\n" in outputs[-1]
    (place / "new.fkf").write_text("no capture")
    assert status({}) == 2
    assert status({}) == 0, "a bad file that was bad before"
    (place / "new.fkf").unlink()
    assert status({}) == 0
    assert "missing: 1\n  new.fkf: bad file\n" in outputs[-1]


def test_results_that_cannot_be_read_or_written_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A result that cannot be read or written is refused, and the error contains its path."""
    (tmp_path / "c").mkdir()
    for options, error in (
        ([str(GOLDEN), "--against", str(tmp_path / "r")], "r: the result cannot be read"),
        ([str(GOLDEN), "--jsonl", str(tmp_path / "no" / "r")], "r: the file cannot be written"),
        ([str(GOLDEN), "--junit", str(tmp_path / "no" / "x")], "x: the file cannot be written"),
        ([str(tmp_path / "c")], "c: no captures in this directory"),
    ):
        with pretending(Pretended()):
            assert cli.main(["replay", *options]) == 2
        assert error in capsys.readouterr().err


def test_equal_layers_are_compiled_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Frames that differ only in where their weights come from are replayed once, and counted so."""
    first, second = (torch.nn.Linear(3, 3) for _ in range(2))
    with torch.no_grad():
        captures = [
            captures_of(fn, (torch.ones(2, 3),))[0]
            for fn in (lambda x: first(x).relu(), lambda x: second(x).relu())
        ]
    for name, capture in zip("ab", captures, strict=True):
        capture.save(tmp_path / f"{name}.fkf")
    assert len({capture.fingerprint() for capture in captures}) == 2
    rows = tmp_path / "rows.jsonl"
    assert cli.main(["replay", str(tmp_path), "--backend", "eager", "--jsonl", str(rows)]) == 0
    assert [row.same_as for row in read_rows(rows)] == [None, "a.fkf"]
    assert "1 of them are the same frame as another one" in capsys.readouterr().out
