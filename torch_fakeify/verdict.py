"""The verdict of ``replay``: does a capture fail today as it failed when it was recorded?"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from .container import Limits
from .errors import CaptureError, ConvertError, FakeifyError, UnknownNameError, VersionError
from .files import read_capture
from .isolation import Answer, ask
from .paths import short_message
from .watching import can_count_memory, free_memory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .desc_frame import CaptureDesc, FailureDesc

_MASKED = r"0x[0-9a-fA-F]+|\d+"
_FOLDERS = r"(?:[\w.@+~-]*[\\/])+(?=[\w.@+~-])"


class Verdict(msgspec.Struct, frozen=True):
    """What came of compiling a capture in a fresh interpreter."""

    word: str
    """``reproduced``, ``not reproduced``, ``compiles``, ``does not compile``, ``hangs``,
    ``crashes`` or ``out of memory``."""
    holds: bool
    """Whether the capture does what its record says: fails the same way, or compiles."""
    details: tuple[str, ...]
    """What was found, line by line."""


def replay(
    path: str | Path,
    *,
    backend: str,
    device: str | None = None,
    timeout: float = 600.0,
    memory: int | None = None,
    trust: bool = False,
) -> Verdict:
    """Compile a capture in a fresh interpreter and compare with its record.

    Two failures are the same when the exceptions have one type and their messages are equal after
    numbers and addresses are masked.

    Args:
        path: the capture file.
        backend: name of a Dynamo backend.
        device: as of ``Capture.instantiate``.
        timeout: seconds after which the compilation counts as hanging.
        memory: bytes that the compilation may hold, with all its processes; by default nine tenths
            of what is free now. Where memory cannot be counted, there is no default.
        trust: let the file ask for whatever it wants.

    Raises:
        FormatError: the file is no capture.
        FakeifyError: the frame cannot be rebuilt here, there is no such backend, or memory is to be
            counted where it cannot be.
    """
    desc = read_capture(path, limits=Limits.none() if trust else None)
    request = {
        "task": "compile",
        "file": str(Path(path).absolute()),
        "backend": backend,
        "device": device,
        "trust": trust,
    }
    memory = allowed_memory(memory)
    answer = ask(request, timeout=timeout, memory=memory)
    return judge(desc, answer, timeout=timeout, memory=memory)


def allowed_memory(memory: int | None) -> int | None:
    """Bytes that a compilation may hold: what is asked for, or nine tenths of what is free now.

    Raises:
        FakeifyError: memory cannot be counted here, and a limit is asked for.
    """
    if not can_count_memory():
        if memory is None:
            return None
        raise FakeifyError(
            "the memory of a process cannot be counted on this system",
            expected="Linux, with /proc",
            fix="Give no limit of memory",
        )
    if memory is not None:
        return memory
    free = free_memory()
    return None if free is None else free // 10 * 9


def judge(
    desc: CaptureDesc, answer: Answer, *, timeout: float, memory: int | None = None
) -> Verdict:
    """The verdict on what a child answered.

    Raises:
        FakeifyError: the child could not rebuild the frame.
    """
    if answer.ending == "hung":
        return Verdict("hangs", False, (f"killed after {timeout:g} s", *answer.tail))
    if answer.ending == "out of memory":
        limit = f"killed at more than {(memory or 0) >> 20} MiB"
        return Verdict("out of memory", False, (limit, *answer.tail))
    if answer.ending == "crashed" and answer.signal_name == "SIGKILL":
        details = ("the process was killed from outside (SIGKILL), as when memory runs out",)
        return Verdict("out of memory", False, (*details, *answer.tail))
    if answer.ending == "crashed":
        details = (f"the process was ended by {answer.signal_name}", *answer.tail)
        return Verdict("crashes", False, details)
    if answer.ending == "exited":
        details = (f"the process ended with exit status {answer.status}", *answer.tail)
        return Verdict("crashes", False, details)
    reply = answer.reply
    match reply["outcome"]:
        case "refused":
            raise _refusal(reply["error"])(reply["message"])
        case "raised":
            word = "out of memory" if reply["memory"] else "crashes"
            frames = (f"  {frame}" for frame in reply["frames"])
            return Verdict(word, False, (*_indented(reply["type"], reply["message"]), *frames))
        case "compiled":
            return _on_success(desc.failure, reply["milliseconds"])
        case _:
            return _on_failure(desc.failure, reply)


def _refusal(name: str) -> type[FakeifyError]:
    known = (CaptureError, ConvertError, UnknownNameError, VersionError)
    return next((cls for cls in known if cls.__name__ == name), FakeifyError)


def _on_success(recorded: FailureDesc | None, milliseconds: float) -> Verdict:
    details = (f"compiled in {milliseconds:.0f} ms",)
    if recorded is None:
        return Verdict("compiles", True, details)
    expected = ("recorded:", *_indented(recorded.type, recorded.message))
    return Verdict("not reproduced", False, (*details, *expected))


def _on_failure(recorded: FailureDesc | None, reply: Mapping[str, Any]) -> Verdict:
    kind, message = reply["type"], reply["message"]
    found = _indented(kind, message)
    if (
        recorded is not None
        and recorded.type == kind
        and masked(recorded.message) == masked(message)
    ):
        return Verdict("reproduced", True, found)
    if reply["memory"]:
        return Verdict("out of memory", False, found)
    if recorded is None:
        return Verdict("does not compile", False, found)
    expected = ("recorded:", *_indented(recorded.type, recorded.message))
    return Verdict("not reproduced", False, (*expected, "now:", *found))


def _indented(kind: str, message: str) -> tuple[str, ...]:
    first, *rest = f"{kind}: {message}".splitlines() or [kind]
    return (f"  {first}", *(f"    {line}" for line in rest))


def masked(message: str) -> str:
    """A message without what differs from run to run: folders, numbers and addresses.

    A recorded message has no absolute paths and no names of user and host.
    """
    return re.sub(_MASKED, "#", re.sub(_FOLDERS, "", short_message(message))).strip()
