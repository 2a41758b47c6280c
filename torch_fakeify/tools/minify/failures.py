"""Failures of a frame, and whether two of them are the same.

Compared are the kind, the exception's type, its message and the innermost frames. Of the message only
the first line and the lines that name an error count, with numbers, addresses and folders masked: the
rest (the graph, its arguments) changes with the graph.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Literal, get_args

from torch_fakeify.render.text import class_text
from torch_fakeify.tools.replaying import masked
from torch_fakeify.tools.worker.replies import Ended, Failed, Wrong

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch_fakeify.tools.worker.replies import Answer

Kind = Literal["raises", "wrong", "crashes", "hangs", "out of memory"]

_INNERMOST = 3
_ERROR = re.compile(r"\b(?:\w*(?:Error|Exception)|error|fatal)\b")
_SYMBOL = re.compile(r"\b(?:s|u|zf|zuf)\d+\b")
_QUOTED = re.compile(r"`[^`]*`")
"""Masked like numbers: a static dim has a number where a dynamic one has a symbol."""
_FRAME = re.compile(r"^(?P<file>.+?)(?::\d+)? in (?P<name>.+)$")
_FAULT = re.compile(r'^\s*File "(?P<file>.+)", line \d+ in (?P<name>.+)$')


@dataclass(frozen=True)
class Outcome:
    """The result of checking that a capture or script fails as expected."""

    fails: bool | None
    """Whether it fails as expected; ``None`` if that could not be determined."""
    text: str
    """The observed failure, or why there is none."""


_LINES = re.compile(
    r"(?P<kind>wrong numbers|raises|crashes|hangs|out of memory)(?: in the (?P<stage>\w+) pass)?:? ?"
)


@dataclass(frozen=True)
class Failure:
    """A failure of a frame."""

    kind: Kind
    stage: str = ""
    """``compile``, ``forward`` or ``backward``; empty if the process ended without a reply."""
    type: str = ""
    """Qualified class name of an exception; the signal or exit status of a crash."""
    message: str = ""
    frames: tuple[str, ...] = ()
    """The innermost frames, the innermost last."""

    def same_as(self, other: Failure) -> bool:
        """Whether another failure is the same, perhaps of another graph."""
        return self.key == other.key

    @property
    def key(self) -> tuple[object, ...]:
        """The parts that are equal in two failures that are the same."""
        if self.kind in ("hangs", "out of memory"):
            return (self.kind,)
        if self.kind == "wrong":
            return self.kind, self.stage, _kind_of_difference(self.message)
        places = tuple(_places(self.frames, _FRAME))[-_INNERMOST:]
        return self.kind, self.type, normalized_message(self.message), places

    @property
    def lines(self) -> list[str]:
        """Format the failure."""
        where = f" in the {self.stage} pass" if self.stage in ("forward", "backward") else ""
        if self.kind == "wrong":
            return [f"wrong numbers{where}: {self.message}"]
        if self.kind == "raises":
            first, *rest = f"{class_text(self.type)}: {self.message}".splitlines()
            return [f"raises{where}: {first}", *(f"  {line}" for line in rest)]
        return [
            f"{self.kind} {class_text(self.type)}".rstrip(),
            *(f"  {line}" for line in self.frames),
        ]


def failure_in(lines: Sequence[str]) -> Failure | None:
    """Return the failure that `Failure.lines` formatted; its frames are not read."""
    found = _LINES.match(lines[0]) if lines else None
    if found is None:
        return None
    rest = lines[0][found.end() :]
    kinds: dict[str, Kind] = {kind: kind for kind in get_args(Kind)}
    kind, stage = kinds.get(found["kind"], "wrong"), found["stage"] or ""
    if kind == "wrong":
        return Failure(kind, stage, message=rest)
    if kind != "raises":
        return Failure(kind, stage, rest)
    name, _, message = rest.partition(": ")
    name = name if "." in name else f"builtins.{name}"  # printed without module
    more = [line.removeprefix("  ") for line in lines[1:]]
    return Failure(kind, stage or "compile", name, "\n".join([message, *more]))


def failure_of(answer: Answer) -> Failure | None:
    """The failure in a worker's answer; ``None`` if the trial did not fail."""
    match answer.outcome:
        case Ended(kind="crashes", how=how, tail=tail):
            return Failure("crashes", type=how, frames=_crash_frames(tail))
        case Ended(kind=kind):
            return Failure(kind)
        case Failed(error=error) if error.memory:
            return Failure("out of memory")
        case Failed(error=error, stage=stage):
            return Failure("raises", stage, error.type, error.message, error.frames)
        case Wrong(stage=stage, text=text):
            return Failure("wrong", stage, message=text)
        case _:
            return None


def normalized_message(message: str) -> tuple[str, ...]:
    """The first line and the error lines of a message, masked."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    selected = lines[:1] + [line for line in lines[1:] if _ERROR.search(line)]
    return tuple(dict.fromkeys(map(masked_line, selected)))


def masked_line(line: str) -> str:
    """Mask the numbers, symbols, addresses and folders in a line."""
    return masked(_SYMBOL.sub("0", line))


def _kind_of_difference(text: str) -> str:
    text = _QUOTED.sub("", text)  # names of inputs
    for word in ("shape", "dtype", "device", "layout", "results", "infinite"):
        if word in text:
            return word
    return "numbers"


def _places(lines: Iterable[str], pattern: re.Pattern[str]) -> Iterable[str]:
    """Yield the file and function names in the lines of frames."""
    for line in lines:
        found = pattern.match(line)
        if found is not None:
            yield f"{PurePath(found['file']).name} in {found['name']}"


def _crash_frames(tail: Sequence[str]) -> tuple[str, ...]:
    """The innermost frames of a crashed process, from the report of ``faulthandler``."""
    return tuple(reversed([*_places(tail, _FAULT)][:_INNERMOST]))
