"""Run compiled code at sizes other than the recorded ones and compare it with eager.

A frame is compiled once, with its recorded symbols, and the code must work for every size that the
guards admit. `fuzz` searches for sizes at which it is wrong, raises, hangs or crashes, and shrinks
them. Each batch of sizes runs in its own process.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from torch_fakeify._atomic_write import check_not_input, write_atomic
from torch_fakeify.frames.inputs.size_names import sizes_text
from torch_fakeify.render.summary import command_line
from torch_fakeify.render.text import class_text, compiler_text
from torch_fakeify.tools.capture_files import path_of
from torch_fakeify.tools.checking_fakes import first_difference
from torch_fakeify.tools.replaying import count_alike
from torch_fakeify.tools.size_runs import SizeRuns, SizesReport, extent, size_runs
from torch_fakeify.tools.worker.replies import Compared, Failed, NotCompared, Passed, Wrong

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

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
class FuzzReport(SizesReport):
    """The result of running a frame at many sizes.

    Example:
        >>> capture = tfk.capture(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(2)])
        >>> found = tfk.fuzz(capture, backend="eager")
        >>> found.tried, found.compared, found.failures, found.is_static
        (1, 1, (), True)
    """

    failures: tuple[SizeFailure, ...] = ()
    """In the order in which they were found."""
    smallest: SizeFailure | None = None
    fake: FakeDifference | None = None
    """Where code is wrong or raises: the first operator that differs from its fake value at the smallest sizes."""

    source: Path | None = None
    """The capture file, which `save` never overwrites."""
    backend: str = "inductor"
    compiler: str = ""
    """Backend, torch and devices, in one line."""
    next_command: str = ""
    """The command that makes the frame small at the smallest sizes; empty if none fail, or there is no file."""

    @property
    def compared(self) -> int:
        """Number of sizes that were compared with eager."""
        return self.tried - self.not_compared.total()

    def lines(self) -> list[str]:
        """Format the report."""
        tried = f"{self._tried}, {self.compared} compared"
        notes = self._notes("not compared", self.compiler, every=self.smallest is None)
        if not self.compared:
            first = count_alike(self.not_compared).most_common(1)
            return [f"{tried}: {first[0][0]}" if first else tried, *notes[1 if first else 0 :]]
        if self.smallest is None:
            return [f"{tried}, none fails{self._so_far}", *notes]
        smallest = self.smallest
        return [
            f"{tried}, {len(self.failures)} fail{'s' if len(self.failures) == 1 else ''}",
            f"smallest: {self.describe(smallest)}",
            *(f"  {line}" for line in f"{smallest.kind}: {smallest.text}".splitlines()),
            *self._fake_lines(),
            *(f"also: {self.describe(each)}" for each in self.failures[:8] if each != smallest),
            *notes,
            *(["", "next", f"  {self.next_command}"] if self.next_command else []),
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
        return self._described(failure.sizes, "as recorded")


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
    with size_runs(
        capture, backend, imports, runs=runs, seed=seed, timeout=timeout, memory=memory, trust=trust
    ) as sizes_run:
        found = _Search(sizes_run)
        fake: FakeDifference | None = None
        try:
            found.run(runs, progress or (lambda _text: None))
            failure = found.smallest
            if failure is not None and failure.kind in ("wrong", "raises"):
                fake = first_difference(sizes_run, failure.sizes)
        except KeyboardInterrupt:
            sizes_run.interrupted = True
    desc, source = sizes_run.desc, path_of(capture)
    command = ""
    if source is not None and found.smallest is not None:
        options = ["--trust"] if trust else []
        options += ["--seed", str(seed)] if seed else []
        if sizes := found.smallest.sizes:
            options += ["--sizes", sizes_text(desc, sizes)]
        command = command_line("minify --accuracy", str(source), backend, imports, options)
    return FuzzReport(
        **sizes_run.results(),
        failures=tuple(found.failures),
        smallest=found.smallest,
        fake=fake,
        source=source,
        next_command=command,
        backend=backend or desc.backend_name,
        compiler=compiler_text(desc, sizes_run.torch, backend),
    )


class _Search:
    """Compares compiled code with eager at batches of sizes; what was found until now."""

    def __init__(self, runs: SizeRuns) -> None:
        self._runs = runs
        self.failures: list[SizeFailure] = []
        self.smallest: SizeFailure | None = None

    def run(self, most: int, progress: Callable[[str], None]) -> None:
        """Try sizes, then shrink the smallest failure."""
        runs = self._runs
        for batch in runs.batches(None, most):
            not_compared = Counter[str]()
            self.failures += self._failures(batch, not_compared)
            runs.tried += len(batch)
            runs.not_compared += not_compared
            self.smallest = min(self.failures, key=lambda each: extent(each.sizes), default=None)
            progress(f"{runs.tried} of at most {most} sizes tried, {len(self.failures)} fail")
        for round_ in range(_ROUNDS if self.smallest else 0):
            assert self.smallest is not None
            progress(f"making the sizes small, round {round_ + 1}")
            found = self._failures(runs.smaller(self.smallest.sizes), Counter())
            if not found:
                break
            self.smallest = min(found, key=lambda each: extent(each.sizes))

    def _failures(
        self, batch: Sequence[dict[str, int]], not_compared: Counter[str]
    ) -> list[SizeFailure]:
        """Run a batch of sizes and return the failures; count in ``not_compared`` why others were skipped.

        A batch that crashes is bisected.
        """
        if not batch:
            return []
        outcome = self._runs.ask(batch, task="sizes").outcome
        if isinstance(outcome, Compared):
            pairs = zip(batch, outcome.results, strict=True)
            found = [_failure(*pair, not_compared) for pair in pairs]
            return [each for each in found if each is not None]
        if len(batch) > 1:
            middle = len(batch) // 2
            halves = (batch[:middle], batch[middle:])
            return [each for half in halves for each in self._failures(half, not_compared)]
        kind, lines = self._runs.ended(outcome)
        return [SizeFailure(batch[0], kind, "\n".join(lines))]


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
