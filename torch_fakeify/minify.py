"""The smallest frame that still fails in the same way.

Method: delta debugging (Zeller and Hildebrandt, 2002) on the record of the frame. Each step of
`reductions` has things to take away; they are tried all together, then in halves, quarters and so on
down to one by one, and whatever the frame fails without, it goes without. When a whole round of all
steps takes nothing more, the frame is 1-minimal: it does not fail in the same way without any one of
the things that are left.

Each candidate is compiled in a process of its own, with limits of time and memory, so that it may
crash and hang as it likes. The best frame so far is on the disk from the beginning.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from .container import Limits
from .desc_frame import FailureDesc
from .errors import CaptureError, FakeifyError, NotFailingError
from .failures import failure_of
from .files import read_capture, write_capture
from .fork_server import ForkServer
from .graph_edits import operations
from .paths import short_message
from .reductions import STEPS, extent
from .repro_script import check_script, script_of
from .size_edits import is_bound, rehint, resize, static_sizes
from .size_search import SizeSearch
from .verdict import allowed_memory
from .whole_files import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from .desc_frame import CaptureDesc
    from .failures import Failure
    from .isolation import Answer
    from .reductions import Extent, Step

__all__ = ["MinifyReport", "Progress", "minify"]

_QUICK = 60.0
"""Seconds that a candidate may take at least, where the frame itself does not hang."""
_START = 30.0
"""Seconds for a script to import torch."""
_PATIENCE = 10.0
"""So many times what the frame took."""


@dataclass(frozen=True)
class Progress:
    """How far a search is."""

    step: str
    extent: Extent
    tried: int


@dataclass
class MinifyReport:
    """What came of making a frame smaller."""

    failure: Failure
    before: Extent
    after: Extent
    desc: CaptureDesc
    tried: int = 0
    """Candidates that were compiled, in this and earlier runs."""
    seconds: float = 0.0
    finished: bool = False
    """Whether the frame is 1-minimal; else the search was interrupted."""

    script: Path | None = None
    """A script of the frame that uses torch alone, if there is one."""
    script_state: str = ""
    """Whether the script fails as the frame does, or why there is none."""

    def lines(self) -> list[str]:
        """The report, line by line."""
        state = "1-minimal" if self.finished else "interrupted: the same command goes on"
        rows = [
            f"{name}: {was} -> {now}"
            for name, was, now in zip(self.before._fields, self.before, self.after, strict=True)
            if was or now
        ]
        took = f"{self.tried} candidates in {self.seconds:.0f} s, {state}"
        state = [f"script: {self.script_state}"] if self.script_state else []
        return [*self.failure.lines, *rows, took, *state]


def minify(
    path: str | Path,
    output: str | Path,
    *,
    backend: str,
    accuracy: bool = False,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
    device: str | None = None,
    timeout: float = 600.0,
    memory: int | None = None,
    jobs: int = 1,
    script: bool = True,
    trust: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> MinifyReport:
    """Make a failing frame as small as it can be, failing in the same way.

    The best frame so far is always in ``output``. A search that is interrupted, by an exception
    or the end of the process, goes on there when it is called again with the same arguments.

    Args:
        path: the capture file.
        output: where the smaller frame goes.
        backend: name of the Dynamo backend that fails.
        accuracy: also run the compiled code, forward and backward, and compare with eager; without
            it only compiling can fail.
        sizes: at which to run it, by symbol name; as recorded where not given.
        seed: of the inputs' data.
        device: where candidates compile and run what was on an accelerator, as of
            ``Capture.instantiate``; what is left is still on that.
        timeout: seconds for compiling, and running, the frame once.
        memory: bytes that a process may hold; by default nine tenths of what is free now.
        jobs: how many candidates to try at a time.
        script: whether to write a script, too, and run it.
        trust: let the file ask for whatever it wants.
        progress: called now and then.

    Raises:
        CaptureError: the frame cannot be rebuilt here, or there is no such backend.
        NotFailingError: the frame does not fail, or not each time in the same way.
        FormatError: the file is no capture.
        WriteError: the output cannot be written.
    """
    desc = read_capture(path, limits=Limits.none() if trust else None)
    request = {
        "task": "try",
        "backend": backend,
        "runs": accuracy,
        "sizes": dict(sizes or {}),
        "seed": seed,
        "device": device,
        "trust": True,
    }
    with ExitStack() as stack:
        trials = stack.enter_context(_Trials(request, jobs, timeout, allowed_memory(memory)))
        failure = trials.first(desc, str(path))
        journal = stack.enter_context(_Journal(Path(output), [_digest(desc), request, failure.key]))
        search = _Search(trials, failure, Path(output), journal, progress)
        report = search.run(desc, trust=trust)
    if report.finished and script:
        _write_script(report, Path(output), backend, seed=seed, timeout=trials.timeout)
    return report


def _write_script(
    report: MinifyReport, output: Path, backend: str, *, seed: int, timeout: float
) -> None:
    """Write the frame as a script beside the output, and see what it does."""
    path = output.with_suffix(".py")
    for direct in (False, True):
        try:
            text = script_of(report.desc, report.failure, backend, seed=seed, direct=direct)
        except FakeifyError as error:
            report.script_state = f"none: {error}"
            return
        write_whole(path, text.encode())
        report.script = path
        instead = check_script(path, report.failure, timeout=timeout + _START)
        report.script_state = "fails in the same way" if instead is None else instead
        if instead is None:
            return


class _Search:
    """Takes away what can go."""

    def __init__(
        self,
        trials: _Trials,
        failure: Failure,
        output: Path,
        journal: _Journal,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._trials = trials
        self._failure = failure
        self._output = output
        self._journal = journal
        self._progress = progress
        self._step = ""

    def run(self, desc: CaptureDesc, *, trust: bool) -> MinifyReport:
        """The whole search, from the best frame that an earlier one left."""
        started = time.monotonic()
        self._report = MinifyReport(self._failure, extent(desc), extent(desc), desc)
        self._best = self._earlier(trust) or desc
        self._keep(self._best)
        try:
            while self._round():
                pass
            self._report.failure = self._trials.failure(self._best) or self._failure
            self._failure = self._report.failure
            self._keep(self._best)
            self._report.finished = True
            self._journal.remove()
        except KeyboardInterrupt:
            pass  # what there is, is on the disk
        self._report.after, self._report.desc = extent(self._best), self._best
        self._report.tried = self._journal.count
        self._report.seconds = time.monotonic() - started
        return self._report

    def _earlier(self, trust: bool) -> CaptureDesc | None:
        if self._journal.best is None:
            return None
        try:
            desc = read_capture(self._output, limits=Limits.none() if trust else None)
        except FakeifyError:
            return None
        return desc if _digest(desc) == self._journal.best else None

    def _round(self) -> bool:
        """Whether any step took something away."""
        before = extent(self._best)
        for step in STEPS:
            self._step = step.name
            self._tell()
            self._shrink(step)
        for name, shrink in (("sizes", self._static), ("example sizes", self._hints)):
            self._step = name
            self._tell()
            shrink()
        return extent(self._best) < before

    def _shrink(self, step: Step) -> None:
        """Delta debugging over the items of one step, from the end."""
        size = len(step.items(self._best))
        while size:
            at = len(step.items(self._best))
            while at > 0:
                at = self._try_chunks(step, at, size)
            size //= 2

    def _try_chunks(self, step: Step, at: int, size: int) -> int:
        """Try the chunks that end at ``at`` and before; where the first one ended that could go."""
        ends = range(at, 0, -size)
        items = list(step.items(self._best))

        def candidate(end: int) -> _Candidate | None:
            made = step.without(self._best, items[max(0, end - size) : end])
            return self._candidate(made, {} if step.propagates else None)

        found = self._first(candidate(end) for end in ends)
        return 0 if found is None else min(ends[found] - size, len(step.items(self._best)))

    def _static(self) -> None:
        """Smaller numbers in the place of static sizes."""
        for old in static_sizes(self._best):
            for new in _smaller_than(old):
                made = resize(self._best, old, new)
                if self._first([self._candidate(made, {old: new})]) is not None:
                    break

    def _hints(self) -> None:
        """Smaller example sizes of dynamic dims."""
        while True:
            search = SizeSearch(self._best)
            smaller = sorted(search.smaller(search.example, 12), key=lambda s: sum(s.values()))
            made = (self._candidate(rehint(self._best, sizes), None) for sizes in smaller)
            if self._first(made) is None:
                return

    # --- candidates ---

    def _candidate(
        self, desc: CaptureDesc | None, constants: dict[int, int] | None
    ) -> _Candidate | None:
        """A frame to try, if it is smaller and none that has been tried."""
        if desc is None or extent(desc) >= extent(self._best):
            return None
        if not is_bound(desc) and is_bound(self._best):
            return None
        if not operations(desc.graph) and operations(self._best.graph):
            return None  # Dynamo gives no backend an empty graph
        return _Candidate(desc, constants, _digest(desc, constants))

    def _first(self, candidates: Iterable[_Candidate | None]) -> int | None:
        """The position of the first candidate that fails as the frame does; it is the best now."""
        for at, candidate, made in self._trials.in_order(candidates, self._journal):
            failure = made[0]
            self._journal.add(candidate.digest)
            if failure is None or not failure.same_as(self._failure):
                self._tell()
                continue
            self._keep(made[1])
            self._tell()
            return at
        return None

    def _keep(self, desc: CaptureDesc) -> None:
        self._best = with_failure(desc, self._failure, self._trials.backend)
        write_capture(self._output, self._best)
        self._journal.keep(_digest(self._best))

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(Progress(self._step, extent(self._best), self._journal.count))


def _smaller_than(size: int) -> Iterator[int]:
    small = (n for n in (1, 2, 3, 4, 8, 16) if n < size)
    return iter((*small, *((size // 2,) if size > 32 else ())))


def with_failure(desc: CaptureDesc, failure: Failure, backend: str) -> CaptureDesc:
    """A frame with its failure on record, as far as it is an exception while it compiles."""
    record = None
    if failure.kind == "raises" and failure.stage == "compile":
        message = short_message(failure.message)
        record = FailureDesc(type=failure.type, message=message, backend=backend)
    return msgspec.structs.replace(desc, failure=record, backend=backend)


# --- trials ---------------------------------------------------------------------------------------


class _Candidate:
    """A frame to try. Its values are computed again first where ``constants`` is not ``None``."""

    def __init__(self, desc: CaptureDesc, constants: dict[int, int] | None, digest: str) -> None:
        self.desc = desc
        self.constants = constants
        self.digest = digest


def _digest(desc: CaptureDesc, constants: dict[int, int] | None = None) -> str:
    text = msgspec.json.encode([desc, sorted((constants or {}).items())])
    return hashlib.sha256(text).hexdigest()


class _Trials:
    """Processes that candidates are tried in, so many at a time."""

    def __init__(
        self, request: dict[str, Any], jobs: int, timeout: float, memory: int | None
    ) -> None:
        self._request = request
        self.backend = str(request["backend"])
        self.timeout = timeout
        self._memory = memory
        self._servers = tuple(ForkServer() for _ in range(jobs))
        self._free = deque(self._servers)
        self._pool = ThreadPoolExecutor(jobs)
        self._jobs = jobs

    def __enter__(self) -> _Trials:
        return self

    def __exit__(self, *args: object) -> None:
        for server in self._servers:
            server.stop()
        self._pool.shutdown(cancel_futures=True)

    def first(self, desc: CaptureDesc, where: str) -> Failure:
        """How the frame itself fails, twice in the same way."""
        started = time.monotonic()
        answer, failure, _ = self._ask(_Candidate(desc, None, ""))
        took = time.monotonic() - started
        if answer.reply.get("outcome") in ("refused", "raised"):
            raise CaptureError(str(answer.reply["message"]))
        if failure is None:
            raise NotFailingError(
                "the frame does not fail",
                where=where,
                found=_told(answer),
                fix="Name the backend that fails; for wrong numbers and errors of compiled code "
                "ask for accuracy",
            )
        again = self._ask(_Candidate(desc, None, ""))[1]
        if again is None or not again.same_as(failure):
            raise NotFailingError(
                "the frame does not fail in the same way each time",
                where=where,
                expected=failure.lines[0],
                found="no failure" if again is None else again.lines[0],
            )
        if failure.kind != "hangs":
            self.timeout = min(self.timeout, max(_QUICK, _PATIENCE * took))
        return failure

    def failure(self, desc: CaptureDesc) -> Failure | None:
        """How a frame fails."""
        return self._ask(_Candidate(desc, None, ""))[1]

    def in_order(
        self, candidates: Iterable[_Candidate | None], journal: _Journal
    ) -> Iterator[tuple[int, _Candidate, tuple[Failure | None, CaptureDesc]]]:
        """Candidates and how they fail, in their order; some are tried ahead."""
        waiting: deque[Any] = deque()
        try:
            for at, candidate in enumerate(candidates):
                if candidate is None or candidate.digest in journal:
                    continue
                waiting.append((at, candidate, self._pool.submit(self._ask, candidate)))
                if len(waiting) >= self._jobs:
                    yield self._next(waiting)
            while waiting:
                yield self._next(waiting)
        finally:
            for _, _, future in waiting:
                future.cancel()

    @staticmethod
    def _next(waiting: deque[Any]) -> tuple[int, _Candidate, tuple[Failure | None, CaptureDesc]]:
        at, candidate, future = waiting.popleft()
        _, failure, desc = future.result()
        return at, candidate, (failure, desc)

    def _ask(self, candidate: _Candidate) -> tuple[Answer, Failure | None, CaptureDesc]:
        server = self._free.popleft()
        try:
            with tempfile.TemporaryDirectory(prefix="torch-fakeify-") as folder:
                file, saved = Path(folder) / "candidate.fkf", Path(folder) / "propagated.fkf"
                write_capture(file, candidate.desc)
                constants = candidate.constants
                request = {
                    **self._request,
                    "file": str(file),
                    "constants": constants,
                    "saved": str(saved),
                }
                answer = server.ask(request, timeout=self.timeout, memory=self._memory)
                failure = failure_of(answer)
                desc = candidate.desc
                if constants is not None and failure is not None:
                    if not saved.exists():  # it went wrong before there was anything to try
                        return answer, None, desc
                    desc = read_capture(saved, limits=Limits.none())
                return answer, failure, desc
        finally:
            self._free.append(server)


def _told(answer: Answer) -> str:
    """What a trial without failure found."""
    return "it compiles" if answer.reply.get("stage") == "compile" else "it compiles and runs right"


# --- the journal ----------------------------------------------------------------------------------


_KEPT = "best "


class _Journal:
    """What has been tried, in a file beside the output, until the search is at its end.

    Args:
        output: the output; the journal is ``OUTPUT.journal``.
        head: what the search is for: a journal of another one is no use.
    """

    def __init__(self, output: Path, head: Any) -> None:
        self._path = output.with_name(output.name + ".journal")
        self._head = hashlib.sha256(json.dumps(head, sort_keys=True).encode()).hexdigest()
        self._seen: set[str] = set()
        self.best: str | None = None
        """The digest of the best frame of an earlier search."""

    def __enter__(self) -> _Journal:
        lines: list[str] = []
        if self._path.exists():
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        if lines[:1] == [self._head]:
            kept = [line for line in lines[1:] if line.startswith(_KEPT)]
            self._seen = set(lines[1:]).difference(kept)
            self.best = kept[-1].removeprefix(_KEPT) if kept else None
            self._file = self._path.open("a", encoding="utf-8")
        else:
            self._file = self._path.open("w", encoding="utf-8")
            self._write(self._head)
        return self

    def __exit__(self, *args: object) -> None:
        self._file.close()

    def __contains__(self, digest: str) -> bool:
        return digest in self._seen

    @property
    def count(self) -> int:
        """How many candidates have been tried."""
        return len(self._seen)

    def add(self, digest: str) -> None:
        """A candidate that has been tried."""
        self._seen.add(digest)
        self._write(digest)

    def keep(self, digest: str) -> None:
        """The best frame so far, which is in the output."""
        self._write(_KEPT + digest)

    def remove(self) -> None:
        """The search is at its end."""
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _write(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()
