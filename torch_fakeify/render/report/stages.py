"""The section of a report on how a frame was compiled here: graphs, code and times of each stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch_fakeify.render.surroundings import seconds_text
from torch_fakeify.render.text import clip

from .html import Html, joined, lines, tag

if TYPE_CHECKING:
    from collections.abc import Iterator

_LONGEST = 2_000_000
"""Most characters of a stage."""


class Stage(NamedTuple):
    """What a compiler logged of a stage."""

    title: str
    text: str
    """A graph as code, or code that was generated."""


class Phase(NamedTuple):
    """A part of the compile time."""

    name: str
    depth: int
    """In how many phases it is."""
    times: int
    seconds: float


class Stages(NamedTuple):
    """How a frame was compiled in a process of its own."""

    verdict: tuple[str, ...]
    """How the compilation ended, and with what."""
    stages: tuple[Stage, ...]
    phases: tuple[Phase, ...]
    """Each after the phase that contains it."""


def stages_html(found: Stages) -> Iterator[Html]:
    """Yield the parts of the section."""
    yield tag("p", joined([lines(clip(each, _LONGEST)) for each in found.verdict], Html("<br>")))
    if not found.stages:
        yield tag("p", "The backend logged no graph and no code.", class_="note")
    for stage in found.stages:
        code = tag("pre", tag("code", lines(clip(stage.text, _LONGEST))), tabindex=0)
        yield tag("details", tag("summary", stage.title), code)
    if found.phases:
        total = sum(phase.seconds for phase in found.phases if phase.depth == 0)
        rows = [
            f"{seconds_text(phase.seconds):>8} {phase.seconds / total:>5.0%}  {'  ' * phase.depth}"
            f"{phase.name}{f', {phase.times} times' if phase.times > 1 else ''}"
            for phase in found.phases
        ]
        table = tag("pre", lines("\n".join(rows)), tabindex=0)
        yield tag("details", tag("summary", f"Compile time: {seconds_text(total)}"), table)
