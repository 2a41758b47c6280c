"""A corpus: thousands of captures compiled by a backend, each in a process of its own.

The work is written against `concurrent.futures.Executor`: threads of this process with a fork server
each (`corpus_jobs.local_executor`), a Dask cluster (`dask_cluster`), or any other one. Captures of one
frame are compiled once. Nothing here imports torch.
"""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Future, wait
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from .container import Limits
from .corpus_files import read_keyed
from .corpus_jobs import Job, carry_out
from .corpus_results import BAD_FILE, LOST, NOT_REBUILT, Row
from .errors import CaptureError, FakeifyError, FormatError
from .verdict import judge

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from concurrent.futures import Executor

    from .corpus_files import CorpusFile, FrameKey
    from .corpus_jobs import Done
    from .desc_frame import CaptureDesc

__all__ = ["check_backend", "judged", "replay_all", "row_of_bad_file"]


def check_backend(executor: Executor, job: Job) -> None:
    """Have a worker find the backend, before thousands of captures are refused for lack of it.

    Args:
        executor: that is to do the work.
        job: its backend counts.

    Raises:
        FakeifyError: there is no such backend, or the worker cannot do such work at all.
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
    answer = done.answer
    if answer.ending != "replied":
        raise CaptureError(
            "a fresh interpreter ends before it compiles anything",
            expected="an interpreter that imports torch",
            found="; ".join(answer.tail) or f"{answer.ending}, exit status {answer.status}",
        )
    if answer.reply["outcome"] != "found":
        raise CaptureError(answer.reply["message"])


def replay_all(
    files: Iterable[CorpusFile],
    executor: Executor,
    job: Job,
    *,
    window: int,
    send_files: bool = False,
    every: bool = False,
    known: Mapping[str, Row] | None = None,
) -> Iterator[Row]:
    """Compile the captures of a corpus; each gives a row, as soon as there is one.

    Args:
        files: in the order in which they are to begin.
        executor: carries out `carry_out`. It is left open.
        job: what is the same for all: backend, device, limits.
        window: how many captures are on their way at a time at most; of the others nothing is held.
        send_files: send a capture's bytes instead of its path, to workers that do not share the file
            system.
        every: compile each capture, also of a frame that another one has.
        known: rows of an earlier run by name: one of the same frame, backend and device is taken over.

    Raises:
        FakeifyError: the executor has stopped.
    """
    return _Run(executor, job, window, send_files, every, known or {}).rows(files)


@dataclass
class _Frame:
    """A frame that is on its way, and the captures that wait for it."""

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
    known: Mapping[str, Row]
    pending: dict[Future[Done], _Frame] = field(default_factory=dict)
    frames: dict[FrameKey, _Frame | Row] = field(default_factory=dict)
    """What became of each frame so far."""

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
        limits = Limits.none() if self.job.trust else None
        try:
            desc, key = read_keyed(file.path, limits=limits)
            data = file.path.read_bytes() if self.send_files else str(file.path)
        except (FormatError, OSError) as error:
            yield row_of_bad_file(file.name, error, self.job)
            return
        row = _row_of(file.name, desc, key, self.job)
        frame = None if self.every else self.frames.get(key)
        earlier = self.known.get(file.name)
        if isinstance(frame, Row):
            yield _copied(row, frame)
        elif frame is not None:
            frame.others.append(row)
        elif earlier is not None and _takes_over(earlier, row):
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
            yield from (_copied(other, row) for other in frame.others)

    def _row(self, future: Future[Done], frame: _Frame) -> Row:
        try:
            done = future.result()
        except (CancelledError, BrokenExecutor) as error:
            raise _stopped(error) from error
        except Exception as error:  # noqa: BLE001 - whatever a worker or its cluster ends with
            row = _row_of(frame.file.name, frame.desc, frame.key, self.job)
            found = (f"{type(error).__module__}.{type(error).__qualname__}: {error}",)
            return msgspec.structs.replace(row, verdict=LOST, details=found)
        return judged(frame.file.name, frame.desc, frame.key, self.job, done)


def _stopped(error: BaseException) -> FakeifyError:
    return FakeifyError(
        "the executor has stopped before all captures were compiled",
        found=f"{type(error).__name__}: {error}".removesuffix(": "),
    )


# --- rows -----------------------------------------------------------------------------------------


def judged(name: str, desc: CaptureDesc, key: FrameKey, job: Job, done: Done) -> Row:
    """The row of a capture that was compiled.

    Args:
        name: of the capture.
        desc: what it holds.
        key: of its frame.
        job: how it was compiled.
        done: what came of it.
    """
    reply = done.answer.reply
    row = msgspec.structs.replace(
        _row_of(name, desc, key, job),
        torch=reply.get("torch"),
        seconds=round(done.seconds, 3),
    )
    try:
        verdict = judge(desc, done.answer, timeout=job.timeout, memory=done.memory)
    except FakeifyError as error:
        details = tuple(str(error).splitlines())
        return msgspec.structs.replace(row, verdict=NOT_REBUILT, details=details)
    details = tuple(_utf8(line) for line in verdict.details)
    return msgspec.structs.replace(row, verdict=verdict.word, holds=verdict.holds, details=details)


def row_of_bad_file(name: str, error: FormatError | OSError, job: Job) -> Row:
    """The row of a file that is no capture, or cannot be read."""
    return Row(
        file=name,
        verdict=BAD_FILE,
        holds=False,
        backend=job.backend,
        device=job.device,
        details=tuple(str(error).splitlines()),
    )


def _row_of(name: str, desc: CaptureDesc, key: FrameKey, job: Job) -> Row:
    """What is known of a capture before it is compiled."""
    failure = desc.failure
    return Row(
        file=name,
        verdict="",
        holds=False,
        backend=job.backend,
        device=job.device,
        fingerprint=key.fingerprint,
        recorded=None if failure is None else _utf8(f"{failure.type}: {failure.message}"),
    )


def _utf8(text: str) -> str:
    """Text that JSON can hold: a message may have lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()


def _copied(row: Row, first: Row) -> Row:
    """The row of another capture of a frame that was compiled."""
    return msgspec.structs.replace(
        first, file=row.file, recorded=row.recorded, same_as=first.file, seconds=0.0
    )


def _takes_over(earlier: Row, row: Row) -> bool:
    same = ("fingerprint", "recorded", "backend", "device")
    return (
        earlier.verdict != LOST
        and earlier.same_as is None
        and all(getattr(earlier, name) == getattr(row, name) for name in same)
    )
