"""Run a frame at batches of sizes that its guards admit, each batch in its own process."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal

from torch_fakeify.errors import CaptureError, check_integer
from torch_fakeify.frames.inputs.size_search import SizeSearch
from torch_fakeify.render.notebook import InNotebook
from torch_fakeify.render.readable_names import ReadableNames
from torch_fakeify.render.text import class_text, count_text
from torch_fakeify.serialization.capture_file import read_capture
from torch_fakeify.serialization.container import Limits
from torch_fakeify.tools.capture_files import as_file, path_of
from torch_fakeify.tools.replaying import count_alike
from torch_fakeify.tools.worker.client import backend_request, device_request
from torch_fakeify.tools.worker.fork_server import ForkServer
from torch_fakeify.tools.worker.limits import check_bounds
from torch_fakeify.tools.worker.replies import Ended, Failed, Here, Raised, Refused

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch_fakeify.records.frame import CaptureDesc
    from torch_fakeify.tools.capture_files import CaptureLike
    from torch_fakeify.tools.worker.replies import Answer, Outcome

_BATCH = 20
"""Most sizes that a process runs."""

EndKind = Literal["hangs", "crashes", "out of memory"]


def extent(sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return what is compared to find the smallest sizes: their sum, then each."""
    return sum(sizes.values()), *sizes.values()


@dataclass(frozen=True)
class SizesReport(InNotebook):
    """What the results of running a frame at many sizes have in common."""

    words: dict[str, str] = field(repr=False)
    """Readable names of the symbols."""
    tried: int = 0
    """Number of sizes."""
    _: KW_ONLY
    interrupted: bool = False
    """Whether Ctrl-C ended the search; the report has the results until then."""
    not_compared: Counter[str] = field(default_factory=Counter[str])
    """Number of sizes that were not compared to the end, by reason, such as an exception in eager."""
    is_static: bool = False
    """Whether the frame has no dynamic sizes, so that only the recorded ones were tried."""
    here: Here | None = None
    """How the surroundings of the runs differ from the recorded ones."""

    def _described(self, sizes: Mapping[str, int], recorded: str) -> str:
        """Return sizes in one line, by readable names; ``recorded`` stands for none."""
        return ", ".join(f"{self.words[name]} = {n}" for name, n in sizes.items()) or recorded

    def _notes(self, not_compared: str, compiler: str, *, every: bool) -> list[str]:
        """Format why sizes were not compared, with what they ran, and how that differs from the record."""
        reasons = count_alike(self.not_compared).most_common(4)
        return [
            *(f"{n} {not_compared}: {why}" for why, n in reasons),
            *(["the frame has no dynamic sizes: only the recorded one was tried"] * self.is_static),
            *filter(None, [compiler]),
            *([] if self.here is None else self.here.lines(every=every)),
        ]

    @property
    def _tried(self) -> str:
        return f"{count_text(self.tried, 'size')} tried"

    @property
    def _so_far(self) -> str:
        return " so far" if self.interrupted else ""


@dataclass
class SizeRuns:
    """Asks processes to run a frame at some sizes, and notes what they ran with."""

    _server: ForkServer
    path: Path
    desc: CaptureDesc
    _request: Mapping[str, Any]
    """What they are asked besides the sizes."""
    _timeout: float
    """Seconds for each batch."""
    _memory: int | None
    """Bytes."""
    _where: str
    """Names the frame in errors."""
    sizes: SizeSearch
    torch: str | None = None
    """The version of torch, as of the first reply."""
    _here: Here | None = None
    tried: int = 0
    interrupted: bool = False
    not_compared: Counter[str] = field(default_factory=Counter[str])
    """Number of sizes that were not compared, by reason."""

    def ask(self, batch: Sequence[Mapping[str, int]], **more: Any) -> Answer:
        """Run a batch of sizes; ``more`` is added to the request, or replaces parts of it.

        Raises:
            CaptureError: the frame runs at no sizes.
        """
        request = {**self._request, **more, "sizes": list(batch)}
        answer = self._server.ask(request, timeout=self._timeout, memory=self._memory)
        self.torch = self.torch or answer.torch
        self._here = answer.here or self._here
        match answer.outcome:
            case Refused(error=kind, message=message):
                raise self.cannot_run(kind, message)
            case Failed(error=error) | Raised(error=error):
                raise self.cannot_run(error.type, error.message)
            case _:
                return answer

    def ended(self, outcome: Outcome) -> tuple[EndKind, list[str]]:
        """Return how a process ended without a reply, with the lines that describe it."""
        if not isinstance(outcome, Ended):
            raise AssertionError(f"no reply to a batch of sizes: {outcome}")
        first = {"hangs": [f"killed after {self._timeout:g} s"], "crashes": [outcome.how]}
        return outcome.kind, [*first.get(outcome.kind, []), *outcome.tail]

    def cannot_run(self, kind: str, message: str) -> CaptureError:
        """Make the error for a frame that runs at no sizes."""
        return CaptureError(
            "the frame cannot be run", where=self._where, found=f"{class_text(kind)}: {message}"
        )

    def batches(
        self, sizes: Iterable[dict[str, int]] | None, most: int
    ) -> Iterator[list[dict[str, int]]]:
        """Yield sizes in batches; ``None`` for at most ``most`` that are searched."""
        found = iter(islice(self.sizes, most) if sizes is None else sizes)
        found = chain([next(found, {})], found)  # as recorded, where no others are found
        while batch := list(islice(found, _BATCH)):
            yield batch

    def smaller(self, sizes: dict[str, int]) -> list[dict[str, int]]:
        """Return a batch of smaller sizes."""
        return self.sizes.smaller(sizes, _BATCH)

    def results(self) -> dict[str, Any]:
        """Return the fields of a `SizesReport`."""
        words = ReadableNames(self.desc)
        return {
            "words": {s.name: words.symbol(s.name) for s in self.desc.symbols},
            "tried": self.tried,
            "interrupted": self.interrupted,
            "not_compared": self.not_compared,
            "is_static": not self.sizes.example,
            "here": self._here,
        }


@contextmanager
def size_runs(
    capture: CaptureLike,
    backend: str | None,
    imports: Sequence[str],
    *,
    runs: int,
    seed: int,
    device: str | None = None,
    timeout: float,
    memory: int | None,
    trust: bool,
) -> Generator[SizeRuns]:
    """Read a capture and yield what runs it at sizes; the arguments are as for `fuzz` and `check_fakes`.

    Raises:
        FormatError: the file is no capture.
        CaptureError: ``runs`` is less than 1.
    """
    check_integer(runs, "runs", CaptureError, least=1)
    check_integer(seed, "seed", CaptureError)
    check_bounds(timeout, memory)
    request = {**backend_request(backend, imports), **device_request(device)}
    with as_file(capture) as path, ForkServer() as server:
        desc = read_capture(path, limits=Limits.none() if trust else None)
        request |= {"file": str(path.absolute()), "seed": seed, "trust": trust}
        where = str(path_of(capture) or desc.frame or "frame")
        sizes = SizeSearch(desc, seed=seed)
        yield SizeRuns(server, path, desc, request, timeout, memory, where, sizes)
