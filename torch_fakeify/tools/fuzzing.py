"""Run compiled code at sizes other than the recorded ones and compare it with eager.

A frame is compiled once, with its recorded symbols, and the code must work for every size that the
guards admit. `fuzz` searches for sizes at which it is wrong, raises, hangs or crashes, and shrinks
them. Each batch of sizes runs in its own process.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Literal

from torch_fakeify._atomic_write import check_not_input, write_atomic
from torch_fakeify.errors import CaptureError
from torch_fakeify.frames.inputs.size_search import SizeSearch
from torch_fakeify.render.notebook import InNotebook
from torch_fakeify.render.readable_names import ReadableNames
from torch_fakeify.render.text import class_text, compiler_text
from torch_fakeify.serialization.capture_file import read_capture
from torch_fakeify.serialization.container import Limits
from torch_fakeify.tools.capture_files import as_file, path_of
from torch_fakeify.tools.checking_fakes import first_difference
from torch_fakeify.tools.replaying import count_alike
from torch_fakeify.tools.size_runs import BATCH, SizeRuns, extent
from torch_fakeify.tools.worker.client import backend_request
from torch_fakeify.tools.worker.fork_server import ForkServer
from torch_fakeify.tools.worker.replies import (
    Compared,
    Crashed,
    Failed,
    Here,
    Hung,
    NotCompared,
    OutOfMemory,
    Passed,
    Raised,
    Refused,
    Wrong,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from torch_fakeify.records.frame import CaptureDesc
    from torch_fakeify.tools.capture_files import CaptureLike
    from torch_fakeify.tools.checking_fakes import FakeDifference

_ROUNDS = 24
"""Largest number of rounds in which a failure is shrunk."""

Kind = Literal["wrong", "raises", "hangs", "crashes", "out of memory"]


@dataclass(frozen=True)
class SizeFailure:
    """Sizes that the guards admit and at which the compiled code fails."""

    sizes: dict[str, int]
    """Values by symbol name."""
    kind: Kind
    text: str


@dataclass(frozen=True)
class FuzzReport(InNotebook):
    """The result of running a frame at many sizes.

    Example:
        >>> capture = tfk.capture(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(2)])
        >>> found = tfk.fuzz(capture, backend="eager")
        >>> found.tried, found.compared, found.failures, found.is_static
        (1, 1, (), True)
    """

    words: dict[str, str] = field(repr=False)
    """Readable names of the symbols."""
    tried: int = 0
    failures: tuple[SizeFailure, ...] = ()
    """In the order in which they were found."""
    smallest: SizeFailure | None = None
    interrupted: bool = False
    """Whether Ctrl-C ended the search; the report has the results until then."""
    not_compared: Counter[str] = field(default_factory=Counter[str])
    """Number of sizes that were not compared, by reason, such as an exception in eager."""
    is_static: bool = False
    """Whether the frame has no dynamic sizes, so that only the recorded ones were tried."""
    fake: FakeDifference | None = None
    """Where code is wrong or raises: the first operator that differs from its fake value at the smallest sizes."""

    source: Path | None = None
    """The capture file, which `save` never overwrites."""
    backend: str = "inductor"
    compiler: str = ""
    """Backend, torch and devices, in one line."""
    here: Here | None = None
    """How the surroundings of the runs differ from the recorded ones."""

    @property
    def compared(self) -> int:
        """Number of sizes that were compared with eager."""
        return self.tried - self.not_compared.total()

    def lines(self) -> list[str]:
        """Format the report."""
        tried = f"{self.tried} size{'' if self.tried == 1 else 's'} tried, {self.compared} compared"
        reasons = [
            f"{n} not compared: {why}" for why, n in count_alike(self.not_compared).most_common(4)
        ]
        static = ["the frame has no dynamic sizes: only the recorded one was tried"]
        here = [] if self.here is None else self.here.lines(every=self.smallest is None)
        notes = [*reasons, *(static if self.is_static else []), self.compiler, *here]
        if not self.compared:
            first = count_alike(self.not_compared).most_common(1)
            return [f"{tried}: {first[0][0]}" if first else tried, *notes[1 if first else 0 :]]
        if self.smallest is None:
            so_far = " so far" if self.interrupted else ""
            return [f"{tried}, none fails{so_far}", *notes]
        smallest = self.smallest
        return [
            f"{tried}, {len(self.failures)} fail{'s' if len(self.failures) == 1 else ''}",
            f"smallest: {self.describe(smallest)}",
            *(f"  {line}" for line in f"{smallest.kind}: {smallest.text}".splitlines()),
            *self._fake_lines(),
            *(f"also: {self.describe(each)}" for each in self.failures[:8] if each != smallest),
            *notes,
        ]

    def _fake_lines(self) -> list[str]:
        if self.fake is None:
            return []
        what = str(self.fake.parts[0]) if self.fake.parts else self.fake.kind
        return [f"  {self.fake.operator} differs from its fake value there: {what}"]

    def save(self, path: str | Path) -> None:
        """Write the report as JSON.

        It has ``backend``, the counts ``tried``, ``compared`` and ``not_compared`` (by reason),
        ``smallest`` and ``failures``, each with ``sizes`` by symbol name.

        Raises:
            WriteError: the file cannot be written, or is the capture.
        """
        if self.source is not None:
            check_not_input(path, self.source)
        smallest = None if self.smallest is None else asdict(self.smallest)
        failures = [asdict(failure) for failure in self.failures]
        content = {
            "backend": self.backend,
            "tried": self.tried,
            "compared": self.compared,
            "not_compared": dict(self.not_compared),
            "smallest": smallest,
            "failures": failures,
        }
        write_atomic(path, (json.dumps(content, indent=1) + "\n").encode())

    def describe(self, failure: SizeFailure) -> str:
        """Return the sizes of a failure in one line, by readable names."""
        named = {self.words[name]: value for name, value in failure.sizes.items()}
        return ", ".join(f"{name} = {value}" for name, value in named.items()) or "as recorded"


def fuzz(
    capture: CaptureLike,
    *,
    backend: str | None = None,
    imports: Sequence[str] = (),
    runs: int = 60,
    seed: int = 0,
    timeout: float = 600.0,
    memory: int | None = None,
    trust: bool = False,
    progress: Callable[[str], None] | None = None,
) -> FuzzReport:
    """Run a frame at other sizes that its guards admit, compiled and eagerly, in other processes.

    Ctrl-C ends the search; the report has what was found until then and is ``interrupted``.

    Args:
        capture: a capture, or the path of its file.
        backend: name of a Dynamo backend, or ``MODULE:ATTR``; by default the recorded one.
        imports: modules that each process imports first.
        runs: largest number of sizes to try, at least 1.
        seed: seed of the sizes and of the inputs' data.
        timeout: seconds for each batch of sizes, including the compilation.
        memory: bytes that a process may hold; ``None`` for no limit.
        trust: read the file without limits, and set also the settings that could run or write something.
        progress: called with what was tried so far, after each batch.

    Raises:
        MissingFileError: there is no such file.
        FormatError: the file is no capture.
        CaptureError: the frame cannot be run (it has tensors without recorded data, or the backend
            fails to compile it), or ``runs`` is less than 1.

    Example:
        >>> capture = tfk.capture(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(2)])
        >>> print(tfk.fuzz(capture, backend="eager").lines()[0])
        1 size tried, 1 compared, none fails
    """
    if runs < 1:
        raise CaptureError(
            "there are no sizes to try", where="runs", expected="1 or more", found=str(runs)
        )
    request = {
        **backend_request(backend, imports),
        "seed": seed,
        "trust": trust,
        "trust_settings": trust,
    }
    with as_file(capture) as path, ForkServer() as server:
        desc = read_capture(path, limits=Limits.none() if trust else None)
        search = SizeSearch(desc, seed=seed)
        where = str(path_of(capture) or desc.frame or "frame")
        sizes_run = SizeRuns(server, path, request, timeout=timeout, memory=memory, where=where)
        found = _Search(search, _Runner(sizes_run))
        fake: FakeDifference | None = None
        try:
            found.run(runs, progress or (lambda _text: None))
            failure = found.smallest
            if failure is not None and failure.kind in ("wrong", "raises"):
                fake = first_difference(sizes_run, desc, failure.sizes)
        except KeyboardInterrupt:
            found.interrupted = True
    words = ReadableNames(desc)
    return FuzzReport(
        {name: words.symbol(name) for name in _names(desc)},
        tried=found.tried,
        failures=tuple(found.failures),
        smallest=found.smallest,
        interrupted=found.interrupted,
        not_compared=found.not_compared,
        is_static=not search.example,
        fake=fake,
        source=path_of(capture),
        backend=backend or desc.backend_name,
        compiler=compiler_text(desc, sizes_run.torch, backend),
        here=sizes_run.here,
    )


class _Search:
    """What was found until now; it is updated after each batch."""

    def __init__(self, search: SizeSearch, runner: _Runner) -> None:
        self._sizes = search
        self._runner = runner
        self.tried = 0
        self.failures: list[SizeFailure] = []
        self.smallest: SizeFailure | None = None
        self.not_compared = Counter[str]()
        self.interrupted = False

    def run(self, runs: int, progress: Callable[[str], None]) -> None:
        """Try sizes, then shrink the smallest failure."""
        sizes = iter(islice(self._sizes, runs))
        sizes = chain([next(sizes, {})], sizes)  # as recorded, where no others are found
        while batch := list(islice(sizes, BATCH)):
            not_compared = Counter[str]()
            self.failures += self._runner.failures(batch, not_compared)
            self.tried += len(batch)
            self.not_compared += not_compared
            self.smallest = min(self.failures, key=lambda each: extent(each.sizes), default=None)
            progress(f"{self.tried} of at most {runs} sizes tried, {len(self.failures)} fail")
        for round_ in range(_ROUNDS if self.smallest else 0):
            assert self.smallest is not None
            progress(f"making the sizes small, round {round_ + 1}")
            smaller = self._sizes.smaller(self.smallest.sizes, BATCH)
            found = self._runner.failures(smaller, Counter())
            if not found:
                break
            self.smallest = min(found, key=lambda each: extent(each.sizes))


def _names(desc: CaptureDesc) -> Iterable[str]:
    return () if desc.shape_env is None else (s.name for s in desc.shape_env.symbols)


class _Runner:
    """Compares compiled code with eager at batches of sizes.

    Args:
        runs: asks the processes.
    """

    def __init__(self, runs: SizeRuns) -> None:
        self._runs = runs

    def failures(
        self, batch: Sequence[dict[str, int]], not_compared: Counter[str]
    ) -> list[SizeFailure]:
        """Run a batch of sizes and return the failures; count in ``not_compared`` why others were skipped.

        A batch that crashes is bisected.
        """
        if not batch:
            return []
        match self._runs.ask(batch, task="sizes").outcome:
            case Compared(results=results):
                found = [_failure(*pair, not_compared) for pair in zip(batch, results, strict=True)]
                return [each for each in found if each is not None]
            case Refused(error=kind, message=message):
                raise self._runs.cannot_run(kind, message)
            case Failed(error=error) | Raised(error=error):
                raise self._runs.cannot_run(error.type, error.message)
            case _ if len(batch) > 1:
                middle = len(batch) // 2
                halves = (batch[:middle], batch[middle:])
                return [each for half in halves for each in self.failures(half, not_compared)]
            case Hung(tail=tail):
                return [
                    self._ended(batch, "hangs", f"killed after {self._runs.timeout:g} s", *tail)
                ]
            case OutOfMemory(tail=tail):
                return [self._ended(batch, "out of memory", *tail)]
            case Crashed(how=how, tail=tail):
                return [self._ended(batch, "crashes", how, *tail)]
            case outcome:
                raise AssertionError(f"no reply to a batch of sizes: {outcome}")

    @staticmethod
    def _ended(batch: Sequence[dict[str, int]], kind: Kind, *lines: str) -> SizeFailure:
        return SizeFailure(batch[0], kind, "\n".join(lines))


def _failure(
    sizes: dict[str, int],
    result: Passed | Failed | Wrong | NotCompared,
    not_compared: Counter[str],
) -> SizeFailure | None:
    """The failure at some sizes; a reason not to compare is counted."""
    match result:
        case Passed():
            return None
        case NotCompared(text=text):
            not_compared[text] += 1
            return None
        case Wrong(stage=stage, text=text):
            return SizeFailure(sizes, "wrong", _in(stage) + text)
        case Failed(stage=stage, error=error):
            return SizeFailure(
                sizes, "raises", f"{_in(stage)}{class_text(error.type)}: {error.message}"
            )


def _in(stage: str) -> str:
    return "in the backward pass: " if stage == "backward" else ""
