"""Submit the captures of a corpus to an executor and turn the results into rows.

Nothing here imports torch.
"""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Future, wait
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from torch_fakeify.errors import CaptureError, FakeifyError, FormatError, class_name
from torch_fakeify.records.fingerprint import compile_key
from torch_fakeify.render.text import class_text
from torch_fakeify.serialization.capture_file import read_capture
from torch_fakeify.tools.replaying import judge, masked, recorded_result
from torch_fakeify.tools.worker.replies import Compiled, Ended, Found, Raised, Refused

from .jobs import Job, carry_out
from .results import BAD_FILE, LOST, NOT_REBUILT, Row

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from concurrent.futures import Executor
    from pathlib import Path

    from torch_fakeify.records.frame import CaptureDesc
    from torch_fakeify.tools.capture_files import CorpusFile

    from .jobs import Done


@dataclass(frozen=True)
class FrameKey:
    """The key under which captures of one frame are compiled once."""

    fingerprint: str
    """Of the frame's structure and, if there are any, its settings."""
    failure: tuple[str, str] | None
    """Type and masked message of the recorded failure."""
    backend: str
    """That compiles it."""


def frame_key(desc: CaptureDesc, backend: str | None) -> FrameKey:
    """Return what all captures of a frame that are compiled with one backend, or the recorded one, share."""
    return FrameKey(
        compile_key(desc, "structure"), _failure_key(desc), backend or desc.backend_name
    )


def _failure_key(desc: CaptureDesc) -> tuple[str, str] | None:
    if desc.failure is not None:
        return desc.failure.type or desc.failure.kind, masked(desc.failure.message)
    return (desc.state, "") if desc.state == "not finished" else None


def read_keyed(path: Path, job: Job) -> tuple[CaptureDesc, FrameKey]:
    """Read a capture for a job and compute the key of its frame, see `frame_key`.

    Raises:
        FormatError: as of `read_capture`.
    """
    desc = read_capture(path, limits=job.limits)
    return desc, frame_key(desc, job.backend)


def check_backend(executor: Executor, job: Job) -> None:
    """Check once, on a worker, that the backend of a job exists.

    Raises:
        FakeifyError: there is no such backend, or the worker cannot compile captures.
    """
    try:
        done = executor.submit(carry_out, replace(job, task="backend")).result()
    except (FakeifyError, CancelledError, BrokenExecutor):
        raise
    except Exception as error:
        raise CaptureError(
            "the workers cannot compile captures",
            expected="torch_fakeify and torch, of the same releases as here, on every worker",
            found=f"{type(error).__name__}: {error}",
        ) from error
    match done.answer.outcome:
        case Found():
            return
        case Refused() | Raised() as reply:
            raise CaptureError(reply.message)
        case Ended() as end:
            raise CaptureError(
                "a worker's interpreter ends before it compiles anything",
                expected="an interpreter that imports torch",
                found="; ".join(end.tail) or end.how,
            )
        case outcome:
            raise CaptureError("a worker could not look for the backend", found=str(outcome))


def replay_all(
    files: Iterable[CorpusFile],
    executor: Executor,
    job: Job,
    *,
    window: int,
    send_files: bool = False,
    every: bool = False,
    earlier: Mapping[str, Row] | None = None,
) -> Iterator[Row]:
    """Compile the captures of a corpus and yield a row for each, as results arrive.

    Args:
        files: submitted in this order.
        executor: runs `carry_out`. It is not shut down.
        job: the common settings: backend, device, limits.
        window: largest number of captures submitted at a time; the others are not read yet.
        send_files: send a capture's bytes instead of its path, to workers that do not share the file
            system.
        every: compile each capture, even if its frame was compiled for another one.
        earlier: rows of an earlier run by name; a row of the same frame, backend and device is reused.

    Raises:
        FakeifyError: the executor has stopped.
    """
    return _Run(executor, job, window, send_files, every, earlier or {}).rows(files)


@dataclass
class _Frame:
    """A submitted frame, and the rows of other captures that wait for its result."""

    file: CorpusFile
    desc: CaptureDesc
    key: FrameKey
    others: list[Row] = field(default_factory=list[Row])


@dataclass
class _Run:
    executor: Executor
    job: Job
    window: int
    send_files: bool
    every: bool
    earlier: Mapping[str, Row]
    pending: dict[Future[Done], _Frame] = field(default_factory=dict)
    frames: dict[FrameKey, _Frame | Row] = field(default_factory=dict)
    """The result of each frame so far, or the submitted frame."""

    def rows(self, files: Iterable[CorpusFile]) -> Iterator[Row]:
        try:
            for file in files:
                while len(self.pending) >= self.window:
                    yield from self._completed()
                yield from self._begin(file)
            while self.pending:
                yield from self._completed()
        finally:
            for future in self.pending:
                future.cancel()

    def _begin(self, file: CorpusFile) -> Iterator[Row]:
        try:
            desc, key = read_keyed(file.path, self.job)
            data = file.path.read_bytes() if self.send_files else str(file.path)
        except (FormatError, OSError) as error:
            yield Row(
                file=file.name,
                verdict=BAD_FILE,
                holds=False,
                backend=self.job.backend or "recorded",
                device=self.job.device,
                details=tuple(str(error).splitlines()),
            )
            return
        row = _row_of(file.name, desc, key, self.job)
        frame = None if self.every else self.frames.get(key)
        earlier = self.earlier.get(file.name)
        if isinstance(frame, Row):
            yield _duplicate_row(row, frame)
        elif frame is not None:
            frame.others.append(row)
        elif earlier is not None and _is_reusable(earlier, row):
            self.frames[key] = earlier
            yield earlier
        else:
            frame = self.frames[key] = _Frame(file, desc, key)
            self.pending[self._submit(replace(self.job, file=data))] = frame

    def _submit(self, job: Job) -> Future[Done]:
        try:
            return self.executor.submit(carry_out, job)
        except RuntimeError as error:  # also BrokenExecutor
            raise _stopped(error) from error

    def _completed(self) -> Iterator[Row]:
        for future in wait(self.pending, return_when=FIRST_COMPLETED).done:
            frame = self.pending.pop(future)
            row = self._row(future, frame)
            if self.frames[frame.key] is frame:
                self.frames[frame.key] = row
            yield row
            yield from (_duplicate_row(other, row) for other in frame.others)

    def _row(self, future: Future[Done], frame: _Frame) -> Row:
        try:
            done = future.result()
        except (CancelledError, BrokenExecutor) as error:
            raise _stopped(error) from error
        except Exception as error:  # noqa: BLE001 - any failure of a worker is a result
            row = _row_of(frame.file.name, frame.desc, frame.key, self.job)
            found = f"{class_text(class_name(type(error)))}: {error}"
            return msgspec.structs.replace(row, verdict=LOST, details=(found,))
        return result_row(frame.file.name, frame.desc, frame.key, self.job, done)


def _stopped(error: BaseException) -> FakeifyError:
    return FakeifyError(
        "the executor has stopped before all captures were compiled",
        found=f"{type(error).__name__}: {error}".removesuffix(": "),
    )


# --- rows -----------------------------------------------------------------------------------------


def result_row(name: str, desc: CaptureDesc, key: FrameKey, job: Job, done: Done) -> Row:
    """Build the row of a capture that was compiled."""
    changes: dict[str, Any] = {"torch": done.answer.torch, "seconds": round(done.seconds, 3)}
    if isinstance(outcome := done.answer.outcome, Compiled):
        took = None if outcome.run is None else round(outcome.run, 4)
        changes.update(compile_ms=round(outcome.milliseconds, 1), run_ms=took)
    try:
        found = judge(desc, done.answer, timeout=job.timeout, memory=done.memory)
        details = tuple(_utf8(line) for line in found.details)
        changes.update(verdict=found.verdict, holds=found.holds, details=details)
    except FakeifyError as error:
        changes.update(verdict=NOT_REBUILT, details=tuple(str(error).splitlines()))
    return msgspec.structs.replace(_row_of(name, desc, key, job), **changes)


def _row_of(name: str, desc: CaptureDesc, key: FrameKey, job: Job) -> Row:
    """Build the row of a capture before it is compiled."""
    recorded = recorded_result(desc)
    return Row(
        file=name,
        verdict="",
        holds=False,
        backend=job.backend or desc.backend_name,
        device=job.device,
        python=job.python,
        fingerprint=key.fingerprint,
        recorded=None if recorded is None else _utf8(recorded),
    )


def _utf8(text: str) -> str:
    """Escape lone surrogates, which JSON cannot contain."""
    return text.encode("utf-8", "backslashreplace").decode()


def _duplicate_row(row: Row, first: Row) -> Row:
    return msgspec.structs.replace(
        first, file=row.file, recorded=row.recorded, same_as=first.file, seconds=0.0
    )


def _is_reusable(earlier: Row, row: Row) -> bool:
    same = ("fingerprint", "recorded", "backend", "device", "python")
    return (
        earlier.verdict != LOST
        and earlier.same_as is None
        and all(getattr(earlier, name) == getattr(row, name) for name in same)
    )
