"""Reports on recorded frames, and the notes file that passes them to the parent process.

A recorder notes a frame before and after its backend is called, so that the notes of a killed process
show which frame it was compiling. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping


class RecordWarning(UserWarning):
    """Warns that a frame could not be recorded; it is compiled all the same.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", tfk.RecordWarning)  # raise where a frame is not recorded
    """


class SettingsWarning(UserWarning):
    """Warns that a capture is compiled without some of its recorded settings.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", tfk.SettingsWarning)  # raise instead
    """


@dataclass
class FrameReport:
    """The report on one frame."""

    function: str = "frame"
    path: Path | None = None
    """The file that was written; ``None`` if the frame could not be recorded."""
    graph: Literal["", "joint", "forward", "backward", "inference"] = ""
    """Which graph of AOTAutograd it is; empty for the frame itself."""
    operators: int = 0
    """How many operators its graph calls, with those of the bodies of higher-order operators."""
    bytes: int = 0
    milliseconds: float = 0.0
    """Duration of the backend, without the recording."""
    failure: str | None = None
    """The exception of the backend, or how its process ended, in one line."""
    problem: str | None = None
    """Why the frame could not be recorded."""
    exceeds: str | None = None
    """The default limit of readers that the file exceeds: it is read with ``--trust`` or higher `Limits`."""
    fingerprint: str | None = None
    """Fingerprint of the frame and, if there are any, its settings; ``None`` if it was not recorded."""
    backend: str = ""
    """The backend's name."""
    backend_place: str | None = None
    """Where a backend outside of torch is defined, see `CaptureDesc.backend_place`."""
    state: Literal["not finished", "compiled", "not compiled", "failed", "left out"] = (
        "not finished"
    )
    """``not finished`` until the backend returns; ``not compiled`` if Dynamo only captures, as for export;
    ``left out`` if the backend returned the frame to Dynamo."""
    pid: int = field(default_factory=os.getpid)
    """Id of the process that compiled it."""
    defined: tuple[str, int] | None = None
    """File and first line of the function."""
    line: tuple[str, int] | None = None
    """The user's line: of the node that the failure names, else the call that compiled the frame."""

    @property
    def title(self) -> str:
        """The function, and which graph of it."""
        return f"{self.function} ({self.graph})" if self.graph else self.function

    @property
    def is_well(self) -> bool:
        """Whether the frame was recorded and nothing failed."""
        return self.state in ("compiled", "not compiled") and self.problem is None

    @property
    def result(self) -> str:
        """The result in one line."""
        text = self.state if self.failure is None else f"{self.state}: {self.failure}"
        return text + self.of_record

    @property
    def of_record(self) -> str:
        """What a table says of the record: that there is none, or how its file is read; usually nothing."""
        if self.problem is not None:
            return f"; not recorded: {self.problem}"
        return "" if self.exceeds is None else f"; read it with --trust: {self.exceeds}"


@dataclass
class NotesRead:
    """The notes of a process so far."""

    frames: list[FrameReport] = field(default_factory=list[FrameReport])
    """In the order in which their compilations began."""
    script: dict[str, Any] = field(default_factory=dict[str, Any])
    """Notes on the process itself, by topic."""


class Notes:
    """A file of JSON lines, each written at once, so that it survives the end of the process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, topic: str, content: object) -> None:
        """Write a note on the process. Errors are ignored, to not disturb the program."""
        self._append({"topic": topic, "content": content})

    def frame(self, report: FrameReport) -> None:
        """Write a note on a frame; the last note on a frame counts."""
        self._append({"frame": [os.getpid(), id(report)], "content": asdict(report)})

    def _append(self, note: Mapping[str, Any]) -> None:
        line = json.dumps(note, default=str).encode("utf-8", "backslashreplace") + b"\n"
        with contextlib.suppress(OSError), self.path.open("ab", buffering=0) as file:
            file.write(line)

    def read(self) -> NotesRead:
        """Read all notes, except a truncated last line."""
        read, frames = NotesRead(), dict[tuple[int, int], dict[str, Any]]()
        lines = self.path.read_bytes().split(b"\n")[:-1] if self.path.exists() else []
        for note in map(json.loads, lines):
            if "frame" not in note:
                read.script[note["topic"]] = note["content"]
            elif note["content"]["state"] == "left out":
                frames.pop(tuple(note["frame"]), None)
            else:
                frames[tuple(note["frame"])] = note["content"]
        types: dict[str, Any] = {"path": Path, "defined": tuple, "line": tuple}  # what JSON has not
        for row in frames.values():
            made: dict[str, Any] = {
                n: types[n](v) for n, v in row.items() if n in types and v is not None
            }
            read.frames.append(FrameReport(**{**row, **made}))
        return read
