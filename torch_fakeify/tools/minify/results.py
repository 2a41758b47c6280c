"""What a search for the smallest failing frame reports, while it runs and at its end."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_fakeify.render.notebook import InNotebook

if TYPE_CHECKING:
    from pathlib import Path

    from torch_fakeify.frames.captures import Capture
    from torch_fakeify.records.frame import CaptureDesc
    from torch_fakeify.tools.worker.replies import Here

    from .failures import Failure, Outcome
    from .reductions import Extent


@dataclass(frozen=True)
class Progress:
    """The state of a search."""

    reduction: str
    """What is removed or checked now."""
    extent: Extent
    tried: int
    """Candidates that were compiled."""


@dataclass(frozen=True)
class MinifyReport(InNotebook):
    """The result of minifying a frame.

    Example:
        >>> small = tfk.minify("failing.fkf")  # doctest: +SKIP
        >>> print(small.script.read_text())  # doctest: +SKIP
    """

    failure: Failure
    before: Extent
    after: Extent
    desc: CaptureDesc = field(repr=False)
    path: Path
    """The file of the smaller frame."""
    compiler: str = ""
    """Backend, torch and devices, in one line."""
    tried: int = 0
    """Candidates that were compiled, in this and earlier runs."""
    seconds: float = 0.0
    finished: bool = False
    """Whether the frame is 1-minimal; if not, the search was interrupted."""
    interrupted: bool = False
    """Whether the search, or the check of what it wrote, was interrupted."""
    sizes: dict[str, int] = field(default_factory=dict[str, int])
    """Sizes at which the frame must run to fail, by symbol name, where they are not its hints."""
    capture_outcome: Outcome | None = None
    """The check of the written capture, run without further options than the backend."""
    script: Path | None = None
    """The script of the frame, which uses torch alone; ``None`` if there is none."""
    script_outcome: Outcome | None = None
    """The check of the script."""
    here: Here | None = None
    """How the surroundings of the trials differ from the recorded ones."""
    script_state: str = ""
    """Whether the script fails as the frame does, or why there is none."""

    @property
    def capture(self) -> Capture:
        """The smaller frame, read from its file."""
        from torch_fakeify.frames.captures import Capture

        return Capture.load(self.path)

    @property
    def holds(self) -> bool | None:
        """Whether capture and script fail like the frame; ``None`` if that could not be determined."""
        outcomes = (self.capture_outcome, self.script_outcome)
        fails = [outcome.fails for outcome in outcomes if outcome is not None]
        if False in fails:
            return False
        return None if self.capture_outcome is None or None in fails else True

    def lines(self) -> list[str]:
        """Format the report, warnings first."""
        state = "1-minimal" if self.finished else "interrupted: run the same command to resume"
        rows = [
            f"{name}: {was} -> {now}"
            for name, was, now in zip(self.before._fields, self.before, self.after, strict=True)
            if was or now
        ]
        took = f"{self.tried} candidates in {self.seconds:.0f} s, {state}"
        script = [f"script: {self.script_state}"] if self.script_state else []
        here = [] if self.here is None else self.here.lines(every=False)
        lines = [*self._warnings(), *self.failure.lines, self.compiler]
        return [*lines, *rows, took, *script, *here]

    def _warnings(self) -> list[str]:
        if self.interrupted and not self.finished:
            return [
                "interrupted: the smallest frame so far is written; run the same command to resume"
            ]
        if self.interrupted:
            return ["interrupted: the written capture was not checked; see `torch-fakeify replay`"]
        warnings: list[str] = []
        for what, outcome in (("capture", self.capture_outcome), ("script", self.script_outcome)):
            if outcome is None or outcome.fails:
                continue
            does = "does not fail in the same way" if outcome.fails is False else "was not checked"
            warnings.append(f"the {what} that was written {does}: {outcome.text}")
        if self.sizes and self.capture_outcome is not None and not self.capture_outcome.fails:
            from torch_fakeify.frames.inputs.size_names import (
                sizes_text,  # lazy: it imports torch
            )

            named = shlex.quote(sizes_text(self.desc, self.sizes))
            warnings[0] += f"; it does with --sizes {named}"
        return warnings
