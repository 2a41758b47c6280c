"""What happens to a frame below Dynamo: graphs of AOTAutograd, graphs and code of inductor, compile time.

A process compiles the frame with ``TORCH_TRACE``, and the log that torch writes is read here. The
backward is compiled at once, not at the first call of ``backward``.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_fakeify.render.report.stages import Phase, Stage, Stages
from torch_fakeify.tools.replaying import replay_capture

if TYPE_CHECKING:
    from collections.abc import Iterator

_TITLES = {
    "aot_inference_graph": "AOTAutograd: inference graph",
    "aot_joint_graph": "AOTAutograd: joint graph",
    "aot_forward_graph": "AOTAutograd: forward graph",
    "aot_backward_graph": "AOTAutograd: backward graph",
    "inductor_post_grad_graph": "Inductor: graph after the post-grad passes",
    "inductor_output_code": "Inductor: output code",
}
"""Titles of the stages, by the names of torch's events."""
_DEEPEST = 5
_LEAST = 0.001
"""Seconds of a phase that has a line of its own."""


def compile_stages(path: str | Path, **options: Any) -> Stages:
    """Compile a capture in a fresh interpreter, and return what torch logged of each stage.

    The options are as of `replay_capture`.

    Raises:
        FormatError: the file is no capture.
        FakeifyError: the frame cannot be rebuilt here, or there is no such backend.
    """
    with tempfile.TemporaryDirectory(prefix="torch-fakeify-") as folder:
        verdict = replay_capture(path, trace=Path(folder), **options)
        log = _Log()
        for file in sorted(Path(folder).glob("*.log")):
            log.read(file)
    return Stages(
        (verdict.verdict, *verdict.details), tuple(log.stages), tuple(_lines_of(log.phases))
    )


class _Log:
    """The stages and phases in a structured log of torch."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self.phases: dict[tuple[str, ...], list[float]] = {}
        """The seconds of each phase, by the names of the phases that contain it and its own."""
        self._open: list[tuple[str, float]] = []

    def read(self, path: Path) -> None:
        """Read a file: after a prefix each event is a line of JSON; lines of its payload follow a tab."""
        event: Any = None
        payload: list[str] = []
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("\t"):
                    payload.append(line[1:])
                    continue
                self._event(event, "".join(payload))
                event, payload = _parsed(line), []
        self._event(event, "".join(payload))

    def _event(self, event: Any, payload: str) -> None:
        if not isinstance(event, dict):
            return
        if "chromium_event" in event:
            self._phase(_parsed(payload))
            return
        artifact = event.get("artifact")
        name = artifact.get("name") if isinstance(artifact, dict) else None
        name = name or next((key for key in event if key in _TITLES), None)
        if name in _TITLES:
            self.stages.append(Stage(f"{_TITLES[name]}{self._direction()}", payload))

    def _phase(self, event: Any) -> None:
        if not isinstance(event, dict) or event.get("cat") != "dynamo_timed":
            return
        name, seconds = str(event.get("name")), float(event.get("ts", 0)) / 1e6
        if event.get("ph") == "B":
            self._open.append((name, seconds))
            self.phases.setdefault(tuple(each for each, _ in self._open), [])
        elif event.get("ph") == "E" and self._open and self._open[-1][0] == name:
            path = tuple(each for each, _ in self._open)
            self.phases[path].append(seconds - self._open.pop()[1])

    def _direction(self) -> str:
        """Return which of the two graphs inductor compiles."""
        names = [name for name, _ in self._open]
        if any("bw_compiler" in name for name in names):
            return ", backward"
        has_backward = any(stage.title == _TITLES["aot_joint_graph"] for stage in self.stages)
        is_forward = any("fw_compiler" in name for name in names)
        return ", forward" if has_backward and is_forward else ""


def _lines_of(phases: dict[tuple[str, ...], list[float]]) -> Iterator[Phase]:
    """Yield the phases that are neither short nor deep, each after the one that contains it."""
    for path, seconds in phases.items():
        if len(path) <= _DEEPEST and sum(seconds) >= _LEAST:
            yield Phase(path[-1].rpartition(">.")[2], len(path) - 1, len(seconds), sum(seconds))


def _parsed(line: str) -> Any:
    """Return the JSON in a line, ``None`` if there is none."""
    start = line.find("{")
    try:
        return json.loads(line[start:]) if start >= 0 else None
    except (ValueError, RecursionError):
        return None
