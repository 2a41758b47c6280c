"""The command ``replay``: compile a capture and compare the result with the recorded one."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from typing_extensions import assert_never

from torch_fakeify.errors import (
    CaptureError,
    ConvertError,
    FakeifyError,
    StubError,
    UnknownNameError,
    VersionError,
    check_type,
)
from torch_fakeify.records.redact_paths import short_message
from torch_fakeify.render.notebook import InNotebook
from torch_fakeify.render.text import class_text, compiler_text, failure_text
from torch_fakeify.serialization.capture_file import read_capture
from torch_fakeify.serialization.container import Limits
from torch_fakeify.tools.capture_files import as_file
from torch_fakeify.tools.worker.client import ask, backend_request, device_request
from torch_fakeify.tools.worker.interpreters import find_interpreter
from torch_fakeify.tools.worker.limits import can_count_memory, check_bounds, free_memory
from torch_fakeify.tools.worker.replies import Compiled, Ended, Failed, Raised, Refused

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch_fakeify.records.frame import CaptureDesc
    from torch_fakeify.tools.capture_files import CaptureLike
    from torch_fakeify.tools.worker.replies import Answer, Thrown

_Verdict: TypeAlias = tuple[str, tuple[str, ...]]
"""A word and details."""

_MASKED = r"0x[0-9a-fA-F]+|\d+"
_FOLDERS = r"(?:[\w.@+~-]*[\\/])+(?=[\w.@+~-])"

FAILURES = frozenset({"does not compile", "hangs", "crashes", "out of memory"})
"""Verdicts on a frame that fails here and did not fail so when it was recorded."""


class ReplayReport(InNotebook, msgspec.Struct, frozen=True):
    """The result of compiling a capture in a fresh interpreter.

    Example:
        >>> capture = tfk.capture(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(2)])
        >>> result = capture.replay(backend="eager")
        >>> result.verdict, result.holds
        ('compiles', True)
    """

    verdict: str
    """``reproduced``, ``not reproduced``, ``compiles``, ``does not compile``, ``hangs``,
    ``crashes`` or ``out of memory``."""
    holds: bool
    """Whether the frame fails or compiles as recorded."""
    details: tuple[str, ...]
    """Lines that describe the result."""

    def lines(self) -> list[str]:
        """Format the verdict, then its details."""
        return [self.verdict, *(f"  {line}" for line in self.details)]


def replay_capture(
    capture: CaptureLike,
    *,
    backend: str | None = None,
    imports: Sequence[str] = (),
    device: str | None = None,
    timeout: float = 600.0,
    memory: int | None = None,
    trust: bool = False,
    python: str | None = None,
    time: bool = False,
    trace: Path | None = None,
) -> ReplayReport:
    """Compile a capture in a fresh interpreter and compare the result with the recorded one.

    Two failures are the same when the exceptions have one type and their messages are equal after
    numbers and addresses are masked, or when the same signal or exit status ended both processes. A
    frame recorded as not finished is reproduced by a backend that does not return.

    Args:
        capture: a capture, or the path of its file.
        backend: name of a Dynamo backend, or ``MODULE:ATTR``; by default the recorded one.
        imports: modules that the interpreter imports first, such as one that registers operators.
        device: as of ``Capture.instantiate``.
        timeout: seconds after which the compilation counts as hanging.
        memory: bytes that the compilation and its processes may hold; by default nine tenths of the
            free memory, or no limit where memory cannot be counted.
        trust: read the file without limits, and set also the settings that could run or write something.
        python: the executable of another interpreter, which has its own torch; see `find_interpreter`.
        time: also run the compiled code on synthetic inputs and time it.
        trace: a folder for the log that torch writes with ``TORCH_TRACE``; the backward is then compiled at once,
            not at the first call of ``backward``.

    Raises:
        MissingFileError: there is no such file.
        FormatError: the file is no capture.
        FakeifyError: the frame cannot be rebuilt here, there is no such backend, or a memory limit is
            requested where memory cannot be counted.

    Example:
        >>> capture = tfk.capture(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(2)])
        >>> size = capture.save("frame.fkf")
        >>> tfk.replay_capture("frame.fkf", backend="eager").verdict
        'compiles'
    """
    check_bounds(timeout, memory)
    request: dict[str, Any] = {
        "task": "compile",
        **backend_request(backend, imports),
        **device_request(device),
        "trust": trust,
        "stubs": True,
        "time": time,
        "backward": trace is not None,
    }
    check_type(python, (str, type(None)), "the path of an interpreter", FakeifyError)
    interpreter = None if python is None else find_interpreter(python)
    if interpreter is not None:
        request["python"] = interpreter.executable
    memory = allowed_memory(memory)
    environment = {} if trace is None else {"TORCH_TRACE": str(trace)}
    with as_file(capture) as path:
        desc = read_capture(path, limits=Limits.none() if trust else None)
        request["file"] = str(path.absolute())
        answer = ask(request, timeout=timeout, memory=memory, environment=environment)
    verdict = judge(desc, answer, timeout=timeout, memory=memory)
    text = compiler_text(desc, answer.torch, backend, device)
    text += "" if interpreter is None else f", Python {interpreter.python}"
    return msgspec.structs.replace(verdict, details=(text, *verdict.details))


def allowed_memory(memory: int | None) -> int | None:
    """Bytes that a compilation may hold: the requested limit, or nine tenths of the free memory.

    Raises:
        FakeifyError: a limit is requested and memory cannot be counted here.
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
) -> ReplayReport:
    """Judge the answer of a worker.

    The verdict names the settings that are not set and, unless it is the recorded one, everything in
    which the worker's surroundings differ.

    Raises:
        FakeifyError: the worker could not rebuild the frame.
    """
    verdict, details = _judge(desc, answer, timeout=timeout, memory=memory)
    holds = verdict in ("compiles", "reproduced")
    here = [] if answer.here is None else answer.here.lines(every=not holds)
    if answer.here is not None and verdict == "not reproduced" and not here:
        here = ["nothing that is on record differs here"]
    return ReplayReport(verdict, holds, (*details, *here))


def _judge(desc: CaptureDesc, answer: Answer, *, timeout: float, memory: int | None) -> _Verdict:
    match answer.outcome:
        case Refused(error=name, message=message):
            raise _refusal(name)(message)
        case Raised(error=error):
            frames = (f"  {frame}" for frame in error.frames)
            word = "out of memory" if error.memory else "crashes"
            return word, (*_indented(f"{class_text(error.type)}: {error.message}"), *frames)
        case Compiled() as compiled:
            return _on_success(desc, compiled)
        case Failed(error=error):
            return _on_failure(desc, error)
        case Ended() as end:
            return _on_end(desc, end, timeout=timeout, memory=memory)
        case outcome:
            raise AssertionError(f"no reply to a compilation: {outcome}")


def _on_end(desc: CaptureDesc, end: Ended, *, timeout: float, memory: int | None) -> _Verdict:
    """Judge a worker that a limit, a signal or the backend ended without a reply."""
    word: str = end.kind
    if end.kind == "hangs":
        found = f"killed after {timeout:g} s"
    elif end.kind == "out of memory":
        found = f"killed at more than {(memory or 0) >> 20} MiB"
    elif end.how == "SIGKILL":
        word = "out of memory"
        found = "the process was killed from outside (SIGKILL), as when memory runs out"
    else:
        found = f"the process {'was ended by' if end.status < 0 else 'ended with'} {end.how}"
    if _ends_as_recorded(desc, end):
        return "reproduced", (found, *end.tail)
    if desc.failure is not None and desc.failure.kind == word:
        word = "not reproduced"  # another signal
    return word, (found, *end.tail, *_recorded(desc))


def _ends_as_recorded(desc: CaptureDesc, end: Ended) -> bool:
    """Whether a worker ended like the recorded process, as far as that was recorded."""
    if desc.failure is None:
        return desc.state == "not finished"
    match desc.failure.kind:
        case "raises":
            return False
        case "hangs":
            return end.kind == "hangs"
        case "out of memory":
            return end.kind == "out of memory" or end.how == "SIGKILL"
        case "crashes":
            # Out of memory: our limit ends the worker, the system's ended the recorded process.
            memory = end.kind == "out of memory" and desc.failure.type == "SIGKILL"
            return memory or end.how == desc.failure.type
        case _:
            assert_never(desc.failure.kind)


def _refusal(name: str) -> type[FakeifyError]:
    classes = (CaptureError, ConvertError, StubError, UnknownNameError, VersionError)
    return next((cls for cls in classes if cls.__name__ == name), FakeifyError)


def _on_success(desc: CaptureDesc, compiled: Compiled) -> _Verdict:
    details = (f"compiled in {compiled.milliseconds:.0f} ms",)
    if compiled.run is not None:
        details = (*details, f"a call takes {compiled.run:.3g} ms")
    elif compiled.not_run:
        details = (*details, f"not timed: {compiled.not_run}")
    if desc.failure is None and desc.state != "not finished":
        return "compiles", details
    return "not reproduced", (*details, *_recorded(desc))


def _on_failure(desc: CaptureDesc, error: Thrown) -> _Verdict:
    recorded = desc.failure
    found = _indented(f"{class_text(error.type)}: {error.message}")
    if recorded is None:
        same = desc.state == "not finished" and error.type == "builtins.KeyboardInterrupt"
    elif recorded.kind == "out of memory":
        same = error.memory
    else:
        same = recorded.type == error.type and masked(recorded.message) == masked(error.message)
    if same:
        return "reproduced", found
    expected = _recorded(desc)
    if error.memory:
        return "out of memory", (*found, *expected)
    if not expected:
        return "does not compile", found
    return "not reproduced", (*expected, "now:", *found)


def recorded_result(desc: CaptureDesc) -> str | None:
    """The recorded failure, type and message; ``None`` if the frame compiled."""
    if desc.failure is not None:
        return f"{failure_text(desc.failure)}: {desc.failure.message}".removesuffix(": ")
    if desc.state == "not finished":
        return "not finished: the backend was called, and its process ended or was interrupted"
    return None


def _recorded(desc: CaptureDesc) -> tuple[str, ...]:
    text = recorded_result(desc)
    return () if text is None else ("recorded:", *_indented(text))


def _indented(text: str) -> tuple[str, ...]:
    first, *rest = text.splitlines() or [""]
    return (f"  {first}", *(f"    {line}" for line in rest))


def masked(message: str) -> str:
    """Mask the parts of a message that differ between runs: folders, numbers and addresses.

    Absolute paths and the names of user and host are shortened as in a recorded message.
    """
    return re.sub(_MASKED, "#", re.sub(_FOLDERS, "", short_message(message))).strip()


def count_alike(reasons: Mapping[str, int]) -> Counter[str]:
    """Add the counts of messages that differ in what `masked` marks alone, under the first of them."""
    first: dict[str, str] = {}
    counts = Counter[str]()
    for text, count in reasons.items():
        counts[first.setdefault(masked(text), text)] += count
    return counts
