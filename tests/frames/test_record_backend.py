"""``record`` as a backend: keywords of ``torch.compile``, frames without a record, and states."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch
from captured_frames import captures_of

import torch_fakeify as tfk
from torch_fakeify.corpus.runner import frame_key
from torch_fakeify.frames import record_backend as backends
from torch_fakeify.render.report.page import html_page
from torch_fakeify.render.show import show_lines
from torch_fakeify.serialization.capture_file import WRITERS, read_capture, with_result

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

# --- what torch.compile passes on ---------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [
    {},
    {"mode": "default"},
    {"mode": "max-autotune-no-cudagraphs"},
    {"mode": "reduce-overhead"},
    {"options": {"max_fusion_size": 8}},
    {"options": {"max-fusion-size": 8, "triton.cudagraphs": False}},
    {"options": {}},
]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The settings that inductor is called with, in place of a compilation."""
    found: list[Any] = []
    module = __import__("torch._inductor.compile_fx", fromlist=["compile_fx"])

    def compile_fx(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        kwargs.pop("compile_region_name", None)
        found.append({k: v for k, v in kwargs.items() if v})
        return gm.forward

    monkeypatch.setattr(module, "compile_fx", compile_fx)
    return found


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", ["record", "handoff", "fakeify", "nested"])
def test_inductor_gets_what_torch_compile_gives_it(
    kind: str, settings: dict[str, Any], seen: list[Any], tmp_path: Path
) -> None:
    """``mode`` and ``options`` reach inductor through ``record`` and through a handoff."""
    made: dict[str, Callable[[], Any]] = {
        "record": lambda: tfk.record(tmp_path, inner="inductor"),
        "handoff": lambda: tfk.handoff("inductor"),
        "fakeify": lambda: "fakeify",
        "nested": lambda: tfk.record(tmp_path, inner=tfk.handoff("inductor")),
    }
    for backend in ("inductor", made[kind]()):
        torch._dynamo.reset()
        arguments = {k: dict(v) if isinstance(v, dict) else v for k, v in settings.items()}
        torch.compile(lambda x: x + 1, backend=backend, **arguments)(torch.ones(2))
    direct, ours = seen
    assert ours == direct


def test_a_wrong_option_is_refused_as_by_torch(tmp_path: Path) -> None:
    """The error is torch's own, raised when the frame is compiled."""
    f = torch.compile(
        lambda x: x + 1, backend=tfk.record(tmp_path, inner="inductor"), options={"nonesuch": 1}
    )
    with pytest.raises(Exception, match="Unexpected optimization option nonesuch"):
        f(torch.ones(2))


def test_another_backend_gets_the_keywords_unchanged(tmp_path: Path) -> None:
    """The inner callable gets the keywords that torch passes to a callable."""
    found: list[dict[str, Any]] = []

    def mine(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        found.append(kwargs)
        return gm.forward

    given: list[dict[str, Any]] = [{}, {"mode": "fast"}, {"options": {"level": 3}}]
    for settings in given:
        for backend in (mine, tfk.record(tmp_path, inner=mine), tfk.handoff(mine)):
            torch._dynamo.reset()
            torch.compile(lambda x: x + 1, backend=backend, **settings)(torch.ones(2))
    assert found == [settings for settings in given for _ in range(3)]


# --- a frame without a record -------------------------------------------------------------------


def refuse(*args: Any, **options: Any) -> Any:
    """Raise in place of `capture`."""
    raise tfk.UnsupportedTensorError("no record", where="x")


def doubled(x: torch.Tensor) -> torch.Tensor:
    """Double; the frame has this name."""
    return x * 2


def test_a_frame_without_a_record_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program continues, with a warning that contains the frame and the reason."""
    monkeypatch.setattr(backends, "describe_frame", refuse)
    recorder = tfk.record(tmp_path, inner="eager")
    message = "the frame of 'doubled' is not on record: x: no record. It is compiled all the same"
    with pytest.warns(tfk.RecordWarning, match=message):
        assert torch.compile(doubled, backend=recorder)(torch.ones(2)).tolist() == [2, 2]
    (report,) = recorder.frames
    assert (report.function, report.state, report.problem) == (
        "doubled", "compiled", "x: no record",
    )  # fmt: skip
    assert not report.is_well
    assert recorder.paths == list(tmp_path.iterdir()) == []


def test_a_frame_without_a_record_can_be_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``on_error="raise"`` raises the error, and the backend is not called."""
    monkeypatch.setattr(backends, "describe_frame", refuse)
    called: list[Any] = []
    recorder = tfk.record(tmp_path, inner=lambda *args: called.append(args), on_error="raise")
    with pytest.raises(Exception, match="UnsupportedTensorError: x: no record"):
        torch.compile(doubled, backend=recorder)(torch.ones(2))
    assert called == []
    assert [report.result for report in recorder.frames] == ["failed; not recorded: x: no record"]


def test_a_deleted_directory_does_not_stop_the_program(tmp_path: Path) -> None:
    """A file that cannot be written is reported as a frame without a record is."""
    recorder = tfk.record(tmp_path / "there", inner="eager")
    (tmp_path / "there").rmdir()
    with pytest.warns(tfk.RecordWarning, match="the file cannot be written"):
        assert torch.compile(doubled, backend=recorder)(torch.ones(2)).tolist() == [2, 2]


def test_an_unknown_treatment_of_errors_is_refused(tmp_path: Path) -> None:
    """``on_error`` has to be ``"warn"`` or ``"raise"``; anything else is refused."""
    with pytest.raises(tfk.CaptureError, match="expected 'warn' or 'raise'; found 'ignore'"):
        tfk.record(tmp_path, on_error="ignore")  # type: ignore[arg-type]


# --- states -------------------------------------------------------------------------------------


def recorded(tmp_path: Path, inner: Any) -> tfk.Capture:
    """Return the recorded frame after its backend was called."""
    recorder = tfk.record(tmp_path, inner=inner)
    with suppress(BaseException):
        torch.compile(doubled, backend=recorder)(torch.ones(2))
    (path,) = recorder.paths
    assert recorder.frames[0].bytes == path.stat().st_size
    return tfk.Capture.load(path)


def test_a_frame_is_recorded_before_its_backend_is_called(tmp_path: Path) -> None:
    """The first file is unfinished, and the last equals one without a state, byte for byte."""
    states: list[Any] = []

    def mine(gm: Any, inputs: Any) -> Any:
        (path,) = tmp_path.iterdir()
        states.append(read_capture(path).state)
        return gm.forward

    capture = recorded(tmp_path, mine)
    assert states == ["not finished"]
    assert capture.desc.state is None
    (path,) = tmp_path.iterdir()
    tfk.Capture(capture.desc).save(tmp_path / "again.fkf")
    assert (tmp_path / "again.fkf").read_bytes() == path.read_bytes()


class Broken(Exception):
    """An exception of a backend."""


@pytest.mark.parametrize(
    ("error", "state", "failure"),
    [
        (ValueError("planned"), None, "builtins.ValueError"),
        (Broken("planned"), None, f"{__name__}.Broken"),
        (SystemExit("planned"), None, "builtins.SystemExit"),
        (GeneratorExit("planned"), None, "builtins.GeneratorExit"),
        (KeyboardInterrupt("planned"), "not finished", None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_an_exception_of_the_backend_is_the_failure(
    tmp_path: Path, error: BaseException, state: str | None, failure: str | None
) -> None:
    """Any exception is recorded, except an interruption, which leaves the frame unfinished."""

    def mine(gm: Any, inputs: Any) -> Any:
        raise error

    desc = recorded(tmp_path, mine).desc
    assert desc.state == state
    assert (None if desc.failure is None else desc.failure.type) == failure
    if desc.failure is not None:
        assert desc.failure.message == "planned"
        assert desc.failure.stack is not None
        assert desc.failure.stack.frames[-1].function == "mine"


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_backend_may_fork(tmp_path: Path) -> None:
    """What a child process does is not taken for the end of the compilation."""

    def mine(gm: Any, inputs: Any) -> Any:
        if os.fork() == 0:
            os._exit(0)
        os.wait()
        return gm.forward

    assert recorded(tmp_path, mine).desc.state is None


def test_a_capture_alone_is_not_compiled() -> None:
    """``capture`` calls no backend, and records that."""
    (capture,) = captures_of(doubled, (torch.ones(2),))
    assert capture.desc.state == "not compiled"


def test_an_unfinished_frame_differs_from_a_compiled_one() -> None:
    """A corpus compiles both, and texts and pages show the state."""
    gm = torch.fx.symbolic_trace(doubled)
    capture = tfk.capture(gm, [torch.ones(2)])
    descs = [capture.with_state(s).desc for s in (None, "not compiled", "not finished")]
    compiled, captured, unfinished = (frame_key(desc, "eager") for desc in descs)
    assert compiled == captured
    assert compiled.fingerprint == unfinished.fingerprint
    assert compiled != unfinished
    words = ("compiled", "not compiled", "not finished")
    for desc, word in zip(descs, words, strict=True):
        assert f"result    {word}" in show_lines(desc)
        assert f">{word}<" in html_page(desc)


def test_another_result_is_written_without_the_encoder() -> None:
    """The members equal those of the encoder, from any state and time to any other."""
    gm = torch.fx.symbolic_trace(doubled)
    capture = tfk.capture(gm, [torch.ones(2)])
    states = (None, "not finished", "not compiled")
    descs = [
        capture.with_state(s, seconds=t).desc for s in states for t in (None, 0.0, 1e-3, 70.25)
    ]
    members = [WRITERS[1](desc, tfk.Limits()) for desc in descs]
    for was, before in zip(descs, members, strict=True):
        for desc, after in zip(descs, members, strict=True):
            assert with_result(before, desc, was=was) == after
    assert len({tfk.Capture(desc).fingerprint() for desc in descs}) == 1
