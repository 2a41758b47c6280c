"""The smallest frame that still fails in the same way.

Method: delta debugging (Zeller and Hildebrandt, 2002) on the record of the frame. Each reduction in
`reductions` has removable items: the search removes all of them, then halves, quarters and so on down
to single items, and accepts a removal if the frame still fails in the same way. When a round of all
reductions removes nothing, the frame is 1-minimal: without any one of the remaining items it does not
fail in the same way.

Each candidate is compiled in its own process, with limits of time and memory, because it may crash or
hang. The best frame so far is always in the output file.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from torch_fakeify._atomic_write import check_not_input, is_same_file
from torch_fakeify.errors import (
    CaptureError,
    FakeifyError,
    NotFailingError,
    WriteError,
    check_integer,
)
from torch_fakeify.frames.inputs.size_search import SizeSearch, choose_sizes
from torch_fakeify.frames.inputs.symbol_values import Symbols
from torch_fakeify.records.frame import FailureDesc
from torch_fakeify.records.redact_paths import short_message
from torch_fakeify.render.text import compiler_text
from torch_fakeify.serialization.capture_file import read_capture, write_capture
from torch_fakeify.serialization.container import Limits
from torch_fakeify.tools.capture_files import as_file, output_beside, path_of
from torch_fakeify.tools.graph_edits import has_calls
from torch_fakeify.tools.replaying import allowed_memory
from torch_fakeify.tools.size_edits import fix_unbacked, is_bound, rehint, resize, static_sizes
from torch_fakeify.tools.worker.client import ask, backend_request, device_request
from torch_fakeify.tools.worker.fork_server import ForkServer
from torch_fakeify.tools.worker.limits import check_bounds
from torch_fakeify.tools.worker.replies import Here, NotCompared, Passed, Raised, Refused

from .failures import Outcome, failure_of
from .journal import Journal
from .reductions import REDUCTIONS, extent
from .repro_script import START, BackendCode, is_script, write_checked_script
from .results import MinifyReport, Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from torch_fakeify.frames.inputs.size_search import Chosen
    from torch_fakeify.records.frame import CaptureDesc
    from torch_fakeify.tools.capture_files import CaptureLike
    from torch_fakeify.tools.worker.replies import Outcome as WorkerOutcome

    from .failures import Failure
    from .reductions import Reduction

_QUICK = 60.0
"""Smallest time limit of a candidate in seconds, unless the frame itself hangs."""
_PATIENCE = 10.0
"""Time limit of a candidate, as a multiple of the time that the frame took."""


def minify(
    capture: CaptureLike,
    output: str | Path | None = None,
    *,
    backend: str | None = None,
    imports: Sequence[str] = (),
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
    """Reduce a failing frame as far as it still fails in the same way, and write a script of it.

    Each candidate is compiled in a process of its own. The best frame so far is always in ``output``.
    Ctrl-C ends the search; the report is then ``interrupted``. An interrupted search resumes from it when it is
    called again with the same arguments. The written files are checked at the end, see
    ``MinifyReport.holds``.

    Args:
        capture: a capture, or the path of its file.
        output: file for the smaller frame; by default beside the file of the capture, with ``.min.fkf``.
            The script is beside it, with ``.py``.
        backend: name of the Dynamo backend that fails, or ``MODULE:ATTR``; by default the recorded one.
        imports: modules that the processes, and the script, import first.
        accuracy: also run the compiled code, forward and backward, and compare it with eager;
            otherwise the frame is only compiled.
        sizes: at which to run it, by name, see `size_names`; the others are as recorded. They become
            the hints of the written frame.
        seed: of the inputs' data.
        device: for candidates, as for ``Capture.instantiate``; the written frame has the recorded
            devices.
        timeout: seconds to compile and run the frame once.
        memory: bytes that a process may hold; by default nine tenths of the free memory.
        jobs: number of candidates to try at a time.
        script: whether to write and check a script too.
        trust: read the file without limits, and set also the settings that could run or write something.
        progress: called after each candidate.

    Raises:
        CaptureError: the frame cannot be rebuilt here, or there is no such backend.
        NotFailingError: the frame does not fail, or not in the same way each time.
        FormatError: the file is not a capture.
        WriteError: the output cannot be written, or it, its script or its journal would overwrite
            the capture or a file that this function did not write.
        KeyboardInterrupt: before there was a result.

    Example:
        >>> from pathlib import Path
        >>> size = Path("chip.py").write_text("def rejects(gm, x): raise ValueError('no relu')")
        >>> capture = tfk.capture(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(2)])
        >>> small = tfk.minify(capture, "small.fkf", backend="chip:rejects")
        >>> small.holds, small.script.name
        (True, 'small.py')
    """
    check_bounds(timeout, memory)
    check_integer(seed, "seed", FakeifyError)
    check_integer(jobs, "jobs", FakeifyError, least=1)
    output = Path(output or output_beside(capture, ".min.fkf"))
    _check_outputs(output, path_of(capture), script=script)
    with as_file(capture) as path:
        desc = read_capture(path, limits=Limits.none() if trust else None)
    if desc.aot is not None and desc.aot.kind == "joint":
        # Its outputs are counted, and the partitioner needs all of them.
        raise CaptureError(
            "a joint graph cannot be minified",
            where=str(path_of(capture) or desc.frame),
            fix="Minify its forward or backward graph, or the frame: record it without --level aot",
        )
    desc = msgspec.structs.replace(desc, export=None)  # a smaller graph has another signature
    chosen = choose_sizes(desc, sizes) if sizes else None
    request = {
        "task": "try",
        **backend_request(backend, imports),
        **device_request(device),
        "runs": accuracy,
        "seed": seed,
        "trust": True,
        "trust_settings": trust,
        "stubs": not accuracy,
    }
    with ExitStack() as stack:
        name = backend or desc.backend_name
        trials = stack.enter_context(_Trials(request, name, jobs, timeout, allowed_memory(memory)))
        failure, desc = _first(trials, desc, chosen, str(path_of(capture) or desc.frame or "frame"))
        head = [_digest(desc), request, trials.sizes, failure.key]
        journal = stack.enter_context(closing(Journal(output, head)))
        progress = progress or (lambda _now: None)
        report = _Search(trials, failure, output, journal, progress).run(desc, trust=trust)
        if report.finished:
            progress(Progress("the written files", report.after, report.tried))
            try:
                again = trials.again(output, report.failure, trust=trust)
                report = replace(report, capture_outcome=again)
                if script:
                    path, outcome, state = write_checked_script(
                        output.with_suffix(".py"),
                        report.desc,
                        report.failure,
                        BackendCode(name, tuple(imports)),
                        timeout=trials.timeout,
                        stubs=report.here is not None and bool(report.here.stubs),
                        sizes=report.sizes,
                        seed=seed,
                        trust=trust,
                    )
                    report = replace(
                        report, script=path, script_outcome=outcome, script_state=state
                    )
            except KeyboardInterrupt:
                report = replace(report, interrupted=True)
    return report


def _first(
    trials: _Trials, desc: CaptureDesc, chosen: Chosen | None, where: str
) -> tuple[Failure, CaptureDesc]:
    """Return how a frame fails at some sizes, and the frame with these sizes as hints if that also fails.

    Sizes that cannot be hints, or as hints prevent the failure, stay sizes of the trials.
    """
    trials.sizes = {} if chosen is None else {**chosen.sizes, **chosen.data}
    failure = trials.first(desc, where)
    env = desc.shape_env
    if chosen is None or env is None:
        return failure, desc
    recorded = Symbols(env, {}).values
    trials.sizes = {name: n for name, n in trials.sizes.items() if recorded.get(name) != n}
    hinted = rehint(desc, chosen.sizes)
    if hinted is None:
        return failure, desc
    every = trials.sizes
    backed = {symbol.name for symbol in env.symbols if symbol.hint is not None}
    trials.sizes = {name: n for name, n in every.items() if name not in backed}
    found = trials.failure(hinted)
    if found is not None and found.same_as(failure):
        return failure, hinted
    trials.sizes = every
    return failure, desc


def _check_outputs(output: Path, source: Path | None, *, script: bool) -> None:
    """Check, before anything is tried, that no unrelated file would be overwritten.

    Raises:
        WriteError: a file that would be written is the capture, or was not written by `minify`.
    """
    written = [(output, None), (Journal.path_of(output), Journal.is_journal)]
    if script:
        written.append((output.with_suffix(".py"), is_script))
    for path, is_ours in written:
        if source is not None:
            check_not_input(path, source)
        if is_ours is None:
            continue
        if is_same_file(path, output):
            raise WriteError(
                "the capture and its script cannot be in one file",
                where=str(output),
                expected="a name that does not end in .py",
                fix="Choose another name, or --no-script",
            )
        if path.exists() and not is_ours(path):
            raise WriteError(
                "the file exists and was not written by minify",
                where=str(path),
                fix=f"Move it, or choose another output than {output}",
            )


@dataclass
class _Search:
    _trials: _Trials
    _failure: Failure
    _output: Path
    _journal: Journal
    _progress: Callable[[Progress], None]
    _reduction: str = ""
    _is_written: bool = False

    def run(self, desc: CaptureDesc, *, trust: bool) -> MinifyReport:
        """Run the search, from the best frame of an interrupted one."""
        started = time.monotonic()
        finished = interrupted = False
        limits = Limits.none() if trust else None
        self._best = self._in_output(self._journal.best, limits) or desc
        try:
            self._set_best(self._best)
            while self._round():
                pass
            self._failure = self._trials.failure(self._best) or self._failure
            self._set_best(self._best)
            finished = True
            self._journal.remove()
        except KeyboardInterrupt:
            # Ctrl-C may come right after the best frame was written.
            if not self._is_written and not self._in_output(_digest(self._best), Limits.none()):
                raise
            interrupted = True  # the best frame is in the output
        return MinifyReport(
            failure=self._failure,
            before=extent(desc),
            after=extent(self._best),
            desc=self._best,
            path=self._output,
            compiler=self._trials.compiler,
            here=self._trials.here,
            sizes=self._trials.sizes_of(self._best),
            tried=self._journal.count,
            seconds=time.monotonic() - started,
            finished=finished,
            interrupted=interrupted,
        )

    def _in_output(self, digest: str | None, limits: Limits | None) -> CaptureDesc | None:
        """The frame in the output; ``None`` if it is not the one with a digest."""
        if digest is None:
            return None
        try:
            desc = read_capture(self._output, limits=limits)
        except FakeifyError:
            return None
        return desc if _digest(desc) == digest else None

    def _round(self) -> bool:
        """Try all reductions once; return whether any removed something."""
        before = extent(self._best)
        steps = (
            *((each.name, partial(self._shrink, each)) for each in REDUCTIONS),
            ("unbacked sizes", self._unbacked),
            ("sizes", self._static),
            ("example sizes", self._hints),
        )
        for name, shrink in steps:
            self._reduction = name
            self._notify()
            shrink()
        return extent(self._best) < before

    def _shrink(self, reduction: Reduction) -> None:
        """Remove items of one reduction by delta debugging, from the end."""
        size = len(reduction.items(self._best))
        while size:
            at = len(reduction.items(self._best))
            while at > 0:
                at = self._try_chunks(reduction, at, size)
            size //= 2

    def _try_chunks(self, reduction: Reduction, at: int, size: int) -> int:
        """Try to remove the chunks that end at ``at`` and before; return the end of the remaining ones."""
        ends = range(at, 0, -size)
        items = list(reduction.items(self._best))

        def candidate(end: int) -> _Candidate | None:
            made = reduction.without(self._best, items[max(0, end - size) : end])
            return self._candidate(made, {} if reduction.propagates else None)

        found = self._first(candidate(end) for end in ends)
        return 0 if found is None else min(ends[found] - size, len(reduction.items(self._best)))

    def _unbacked(self) -> None:
        """Replace sizes without hints by numbers, so that the frame fails without options."""
        unbacked = {s.name for s in self._best.symbols if s.hint is None}
        for name, n in self._trials.sizes_of(self._best).items():
            if name in unbacked:
                self._first([self._candidate(fix_unbacked(self._best, {name: n}), None)])

    def _static(self) -> None:
        for old in static_sizes(self._best):
            smaller = [*(n for n in (1, 2, 3, 4, 8, 16) if n < old), *([old // 2] * (old > 32))]
            self._first(self._candidate(resize(self._best, old, n), {old: n}) for n in smaller)

    def _hints(self) -> None:
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
        """Return a candidate if the frame is smaller than the best one, has calls and was not tried."""
        if desc is None or extent(desc) >= extent(self._best):
            return None
        if not is_bound(desc) and is_bound(self._best):
            return None
        if not has_calls(desc.graph) and has_calls(self._best.graph):
            return None  # Dynamo calls no backend for such a graph
        digest = _digest(desc, constants)
        return None if digest in self._journal else _Candidate(desc, constants, digest)

    def _first(self, candidates: Iterable[_Candidate | None]) -> int | None:
        """Find the first candidate that fails in the same way, make it the best one, return its position."""
        for at, candidate, made in self._trials.in_order(candidates):
            self._journal.add(candidate.digest)
            if made.failure is not None and made.failure.same_as(self._failure):
                self._set_best(made.desc)
                self._notify()
                return at
            self._notify()
        return None

    def _set_best(self, desc: CaptureDesc) -> None:
        trials = self._trials
        self._best = with_failure(desc, self._failure, trials.backend, runs=trials.runs)
        write_capture(self._output, self._best, limits=Limits.none())
        self._is_written = True
        self._journal.set_best(_digest(self._best))

    def _notify(self) -> None:
        self._progress(Progress(self._reduction, extent(self._best), self._journal.count))


def with_failure(
    desc: CaptureDesc, failure: Failure, backend: str, *, runs: bool = False
) -> CaptureDesc:
    """Record the failure in a frame, if replay (which only compiles) can reproduce it.

    If the frame also ``runs``, the stage of a process that ended without a reply is unknown.
    """
    record = None
    if failure.kind != "wrong" and (failure.stage == "compile" or not (failure.stage or runs)):
        message = short_message(failure.message)
        record = FailureDesc(type=failure.type, message=message, backend=backend, kind=failure.kind)
    _, colon, attribute = backend.partition(":")
    return msgspec.structs.replace(
        desc,
        failure=record,
        backend=attribute.rpartition(".")[2] if colon else backend,
        backend_place=backend if colon else desc.backend_place,
        state=None,
    )


# --- trials ---------------------------------------------------------------------------------------


class _Candidate(NamedTuple):
    """A frame to try; with ``constants`` its values are propagated again first."""

    desc: CaptureDesc
    constants: dict[int, int] | None = None
    digest: str = ""


class _Tried(NamedTuple):
    outcome: WorkerOutcome
    failure: Failure | None
    desc: CaptureDesc
    """The candidate, with the values that were propagated."""


def _digest(desc: CaptureDesc, constants: dict[int, int] | None = None) -> str:
    text = msgspec.json.encode([desc, sorted((constants or {}).items())])
    return hashlib.sha256(text).hexdigest()


class _Trials:
    """The worker processes that try candidates, ``jobs`` at a time."""

    def __init__(
        self, request: dict[str, Any], backend: str, jobs: int, timeout: float, memory: int | None
    ) -> None:
        self._request = request
        self.backend = backend
        self.sizes: dict[str, int] = {}
        """Sizes at which to run a frame, by symbol name; the others are its hints."""
        self._torch: str | None = None
        """The version of torch, as of the first reply."""
        self.compiler = ""
        """Backend, torch and devices, in one line."""
        self.runs = bool(request["runs"])
        self.timeout = timeout
        self._memory = memory
        self._servers = tuple(ForkServer() for _ in range(jobs))
        self._free = deque(self._servers)
        self._pool = ThreadPoolExecutor(jobs)
        self._jobs = jobs
        self.here: Here | None = None
        """How the surroundings of the workers differ from those of the frame."""

    def __enter__(self) -> _Trials:
        return self

    def __exit__(self, *args: object) -> None:
        for server in self._servers:
            server.stop()
        self._pool.shutdown(cancel_futures=True)

    def first(self, desc: CaptureDesc, where: str) -> Failure:
        """Try the frame itself twice and return its failure."""
        started = time.monotonic()
        outcome, failure, _ = self._ask(_Candidate(desc))
        self.compiler = compiler_text(desc, self._torch, self.backend, self._request["device"])
        took = time.monotonic() - started
        if isinstance(outcome, (Refused, Raised)):
            raise CaptureError(outcome.message)
        if isinstance(outcome, NotCompared):
            raise CaptureError(
                "the frame was not compared with eager",
                where=where,
                found=outcome.text,
                fix="Try other sizes or another seed",
            )
        if failure is None:
            differences = [] if self.here is None else self.here.lines(every=True)
            raise NotFailingError(
                "the frame does not fail",
                where=where,
                found="\n".join([_result_text(outcome), *differences]),
                fix="Choose the backend that fails; "
                + (
                    "`torch-fakeify fuzz` finds sizes at which it fails"
                    if self.runs
                    else "for wrong numbers and errors of compiled code ask for accuracy"
                ),
            )
        again = self._ask(_Candidate(desc)).failure
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

    def sizes_of(self, desc: CaptureDesc) -> dict[str, int]:
        """The sizes at which to run a frame, without those of dropped symbols."""
        names = {symbol.name for symbol in desc.symbols}
        return {name: n for name, n in self.sizes.items() if name in names}

    def again(self, path: Path, failure: Failure, *, trust: bool) -> Outcome:
        """Check that a written capture fails in the same way, in a fresh interpreter."""
        request = {**self._request, "file": str(path.absolute()), "sizes": {}, "trust": trust}
        answer = ask(request, timeout=self.timeout + START, memory=self._memory)
        found = failure_of(answer)
        if found is not None:
            is_same = found.same_as(failure)
            unsure = found.kind == "hangs" and not is_same
            return Outcome(None if unsure else is_same, found.lines[0])
        match answer.outcome:
            case Refused(message=text) | Raised(message=text) | NotCompared(text=text):
                return Outcome(None, text)
            case outcome:
                return Outcome(False, _result_text(outcome))

    def failure(self, desc: CaptureDesc) -> Failure | None:
        """Try a frame and return its failure."""
        return self._ask(_Candidate(desc)).failure

    def in_order(
        self, candidates: Iterable[_Candidate | None]
    ) -> Iterator[tuple[int, _Candidate, _Tried]]:
        """Yield candidates with their results, in order; some are tried ahead."""
        waiting: deque[tuple[int, _Candidate, Future[_Tried]]] = deque()
        try:
            for at, candidate in chain(enumerate(candidates), [(-1, None)]):
                if candidate is not None:
                    waiting.append((at, candidate, self._pool.submit(self._ask, candidate)))
                while len(waiting) > (self._jobs - 1 if at >= 0 else 0):
                    first, tried, future = waiting.popleft()
                    yield first, tried, future.result()
        finally:
            for _, _, future in waiting:
                future.cancel()

    def _ask(self, candidate: _Candidate) -> _Tried:
        server = self._free.popleft()
        try:
            with tempfile.TemporaryDirectory(prefix="torch-fakeify-") as folder:
                file, saved = Path(folder) / "candidate.fkf", Path(folder) / "propagated.fkf"
                write_capture(file, candidate.desc, limits=Limits.none())
                request = {
                    **self._request,
                    "sizes": self.sizes_of(candidate.desc),
                    "file": str(file),
                    "constants": candidate.constants,
                    "saved": str(saved),
                }
                answer = server.ask(request, timeout=self.timeout, memory=self._memory)
                self._torch = self._torch or answer.torch
                self.here = answer.here or self.here
                failure, desc = failure_of(answer), candidate.desc
                if candidate.constants is not None and failure is not None:
                    if not saved.exists():  # it failed while its values were propagated
                        return _Tried(answer.outcome, None, desc)
                    desc = read_capture(saved, limits=Limits.none())
                return _Tried(answer.outcome, failure, desc)
        finally:
            self._free.append(server)


def _result_text(outcome: WorkerOutcome) -> str:
    is_run = not isinstance(outcome, Passed) or outcome.stage != "compile"
    return "it compiles and runs right" if is_run else "it compiles"
