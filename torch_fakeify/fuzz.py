"""Compiled code at other sizes than those of the example, beside eager.

A frame is compiled once, as its program compiles it, and the code runs for every size that the guards
admit: `fuzz` looks for sizes at which it is wrong, raises, hangs or crashes. Each batch of sizes runs in
a process of its own. What fails is made small.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .errors import CaptureError
from .fork_server import ForkServer
from .size_search import SizeSearch
from .user_words import Words
from .whole_files import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .desc_frame import CaptureDesc
    from .isolation import Answer

__all__ = ["FuzzReport", "SizeFailure", "fuzz"]

_BATCH = 20
_ROUNDS = 24
"""Of making a failure small."""

Kind = Literal["wrong", "raises", "hangs", "crashes", "out of memory"]


@dataclass(frozen=True)
class SizeFailure:
    """Sizes that a frame was compiled for, and what goes wrong there."""

    sizes: dict[str, int]
    """By symbol."""
    kind: Kind
    text: str


@dataclass
class FuzzReport:
    """What came of running a frame at many sizes."""

    words: dict[str, str]
    """The symbols in the words of the user's program."""
    tried: int = 0
    failures: list[SizeFailure] = field(default_factory=list[SizeFailure])
    """In the order in which they were found."""
    smallest: SizeFailure | None = None

    def lines(self) -> list[str]:
        """The report, line by line."""
        if self.smallest is None:
            return [f"{self.tried} sizes tried, none fails"]
        first = self.smallest
        return [
            f"{self.tried} sizes tried, {len(self.failures)} fail",
            f"smallest: {self._sizes(first)}",
            *(f"  {line}" for line in f"{first.kind}: {first.text}".splitlines()),
            *(f"also: {self._sizes(each)}" for each in self.failures[:8] if each != first),
        ]

    def save(self, path: str | Path, *, backend: str) -> None:
        """Write what fails as JSON: ``backend``, ``smallest`` and ``failures``, each with ``sizes``.

        Raises:
            WriteError: the file cannot be written.
        """
        smallest = None if self.smallest is None else asdict(self.smallest)
        failures = [asdict(failure) for failure in self.failures]
        told = {"backend": backend, "tried": self.tried, "smallest": smallest, "failures": failures}
        write_whole(path, (json.dumps(told, indent=1) + "\n").encode())

    def _sizes(self, failure: SizeFailure) -> str:
        named = {self.words[name]: value for name, value in failure.sizes.items()}
        return ", ".join(f"{name} = {value}" for name, value in named.items()) or "as recorded"


def fuzz(
    path: str | Path,
    desc: CaptureDesc,
    *,
    backend: str,
    runs: int = 60,
    seed: int = 0,
    timeout: float = 600.0,
    memory: int | None = None,
    trust: bool = False,
) -> FuzzReport:
    """Run a frame at other sizes that its guards admit, compiled and in eager mode.

    Args:
        path: the capture file.
        desc: what it holds.
        backend: name of a Dynamo backend.
        runs: how many sizes to try at most.
        seed: of the choice of sizes, and of the inputs' data.
        timeout: seconds for each batch of sizes, compiling included.
        memory: bytes that a process may hold; ``None`` for no limit.
        trust: let the file ask for whatever it wants.

    Raises:
        CaptureError: the frame cannot be run at all: it has tensors whose data is not on record, or
            the backend fails to compile it.
    """
    search = SizeSearch(desc, seed=seed)
    words = Words(desc)
    report = FuzzReport({name: words.symbol(name) for name in _names(desc)})
    with ForkServer() as server:
        request = {"backend": backend, "seed": seed, "trust": trust}
        runner = _Runner(server, Path(path), request, timeout, memory)
        sizes = iter(islice(search, runs))
        while batch := list(islice(sizes, _BATCH)):
            report.tried += len(batch)
            report.failures += runner.failures(batch)
        if report.failures:
            report.smallest = min(report.failures, key=_extent)
            for _ in range(_ROUNDS):
                found = runner.failures(search.smaller(report.smallest.sizes, _BATCH))
                if not found:
                    break
                report.smallest = min(found, key=_extent)
    return report


def _names(desc: CaptureDesc) -> Iterable[str]:
    return () if desc.shape_env is None else (s.name for s in desc.shape_env.symbols)


def _extent(failure: SizeFailure) -> tuple[int, ...]:
    return sum(failure.sizes.values()), *failure.sizes.values()


class _Runner:
    """Runs batches of sizes."""

    def __init__(
        self,
        server: ForkServer,
        path: Path,
        request: dict[str, Any],
        timeout: float,
        memory: int | None,
    ) -> None:
        self._server = server
        self._file = str(path.absolute())
        self._request = {"task": "sizes", "file": self._file, **request}
        self._timeout = timeout
        self._memory = memory

    def failures(self, batch: Sequence[dict[str, int]]) -> list[SizeFailure]:
        """What goes wrong at each of some sizes.

        A batch that ends in a crash is divided until the sizes are found at which it does.
        """
        if not batch:
            return []
        answer = self._server.ask(
            {**self._request, "sizes": list(batch)}, timeout=self._timeout, memory=self._memory
        )
        if answer.ending == "replied":
            return self._of_reply(answer.reply, batch)
        if len(batch) > 1:
            middle = len(batch) // 2
            return self.failures(batch[:middle]) + self.failures(batch[middle:])
        return [SizeFailure(batch[0], *_ending(answer, self._timeout))]

    def _of_reply(self, reply: Any, batch: Sequence[dict[str, int]]) -> list[SizeFailure]:
        if reply["outcome"] != "ran":
            raise CaptureError(
                "the frame cannot be run",
                where=self._file,
                found=f"{reply.get('type') or reply.get('error')}: {reply['message']}",
            )
        return [
            SizeFailure(sizes, kind, text)
            for sizes, (kind, text) in zip(batch, reply["results"], strict=True)
            if kind != "same"
        ]


def _ending(answer: Answer, timeout: float) -> tuple[Kind, str]:
    tail = "\n".join(answer.tail)
    if answer.ending == "hung":
        return "hangs", f"killed after {timeout:g} s\n{tail}"
    if answer.ending == "out of memory":
        return "out of memory", tail
    how = answer.signal_name if answer.ending == "crashed" else f"exit status {answer.status}"
    return "crashes", f"{how}\n{tail}"
