"""Whether two failures of a frame are the same one.

The kind of failure is, the exception's type, its message, and the innermost frames. Of the message it is
the first line and every line that tells of an error, without numbers, addresses and folders: what
else a backend says (the graph, its arguments) changes with the graph.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

from .verdict import masked

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .isolation import Answer

__all__ = ["Failure", "essence", "failure_of", "masked_line"]

Kind = Literal["raises", "wrong", "crashes", "hangs", "out of memory"]

_INNERMOST = 3
_ERROR = re.compile(r"\b(?:\w*(?:Error|Exception)|error|fatal)\b")
_SYMBOL = re.compile(r"\b(?:s|u|zf|zuf)\d+\b")
"""A symbol stands where a number would, had the dim been static."""
_FRAME = re.compile(r"^(?P<file>.+?)(?::\d+)? in (?P<name>.+)$")
_FAULT = re.compile(r'^\s*File "(?P<file>.+)", line \d+ in (?P<name>.+)$')


@dataclass(frozen=True)
class Failure:
    """How a frame fails."""

    kind: Kind
    stage: str = ""
    """``compile``, ``forward`` or ``backward``; empty where a process ended without telling."""
    type: str = ""
    """Of an exception: qualified name of its class. Of a crash: the signal or the exit status."""
    message: str = ""
    frames: tuple[str, ...] = ()
    """The innermost ones, the innermost last."""

    def same_as(self, other: Failure) -> bool:
        """Whether the other one is this failure, of another graph perhaps."""
        return self.key == other.key

    @property
    def key(self) -> tuple[object, ...]:
        """What two failures have in common that are the same."""
        if self.kind in ("hangs", "out of memory"):
            return (self.kind,)
        if self.kind == "wrong":
            return self.kind, self.stage, _what_is_wrong(self.message)
        return self.kind, self.type, essence(self.message), _places(self.frames)

    @property
    def lines(self) -> list[str]:
        """The failure in words."""
        where = f" in the {self.stage} pass" if self.stage in ("forward", "backward") else ""
        if self.kind == "wrong":
            return [f"wrong numbers{where}: {self.message}"]
        if self.kind == "raises":
            first, *rest = f"{self.type}: {self.message}".splitlines()
            return [f"raises{where}: {first}", *(f"  {line}" for line in rest)]
        return [f"{self.kind} {self.type}".rstrip(), *(f"  {line}" for line in self.frames)]


def failure_of(answer: Answer) -> Failure | None:
    """How a frame fails whose trial in another process had this answer; ``None`` if it does not."""
    match answer.ending:
        case "hung":
            return Failure("hangs")
        case "out of memory":
            return Failure("out of memory")
        case "crashed" | "exited":
            how = answer.signal_name if answer.status < 0 else f"exit status {answer.status}"
            return Failure("crashes", type=how, frames=_crash_frames(answer.tail))
        case "replied":
            return _of_reply(answer.reply)


def _of_reply(reply: Any) -> Failure | None:
    match reply["outcome"]:
        case "failed" if reply["memory"]:
            return Failure("out of memory")
        case "failed":
            frames = tuple(reply["frames"])
            return Failure("raises", reply["stage"], reply["type"], reply["message"], frames)
        case "wrong":
            return Failure("wrong", reply["stage"], message=reply["text"])
        case _:
            return None


def essence(message: str) -> tuple[str, ...]:
    """What a message says, whatever graph it says it of."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    told = lines[:1] + [line for line in lines[1:] if _ERROR.search(line)]
    return tuple(dict.fromkeys(map(masked_line, told)))


def masked_line(line: str) -> str:
    """A line without numbers, symbols, addresses and folders."""
    return masked(_SYMBOL.sub("0", line))


def _what_is_wrong(text: str) -> str:
    """The kind of difference between two results."""
    for word in ("shape", "dtype", "device", "layout", "results", "infinite"):
        if word in text:
            return word
    return "numbers"


def _places(frames: Sequence[str]) -> tuple[str, ...]:
    """Files and functions of the innermost frames."""
    return tuple(_places_in(frames, _FRAME))[-_INNERMOST:]


def _places_in(lines: Iterable[str], pattern: re.Pattern[str]) -> Iterable[str]:
    for line in lines:
        found = pattern.match(line)
        if found is not None:
            yield f"{PurePath(found['file']).name} in {found['name']}"


def _crash_frames(tail: Sequence[str]) -> tuple[str, ...]:
    """The innermost frames of a process that crashed, as ``faulthandler`` told them."""
    return tuple(reversed([*_places_in(tail, _FAULT)][:_INNERMOST]))
