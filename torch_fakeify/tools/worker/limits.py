"""Limits of time and memory on a process, enforced by its parent.

The parent polls the resident memory of the process and its descendants (on Linux), because the
kernel's limits do not suit torch: ``RLIMIT_AS`` counts addresses, of which a CUDA context reserves
hundreds of gigabytes; ``RLIMIT_DATA`` counts requested pages, touched or not, of one process; and an
allocation that fails at such a limit ends in an exception, ``abort`` or a wild pointer, depending on
its caller. A process over a limit first gets SIGABRT, so that ``faulthandler`` prints its stack.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from torch_fakeify.errors import FakeifyError, check_integer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Ending: TypeAlias = Literal["ended", "hangs", "out of memory"]

_PROC = Path("/proc")
_INTERVAL = 0.05
"""Seconds between two polls."""
_GRACE = 0.5
"""Seconds between SIGABRT and SIGKILL, in which ``faulthandler`` prints the stack."""


def signal_name(status: int) -> str:
    """Name of the signal that ended a process with this (negative) exit status."""
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def can_count_memory() -> bool:
    """Whether the memory of other processes can be read here."""
    return (_PROC / "self" / "status").exists()


def forbid_core_dumps(pid: int = 0) -> None:
    """Keep a process from writing a core file when it gets SIGABRT at a limit.

    Args:
        pid: of the process, on Linux; 0 for this one, on any system.
    """
    with contextlib.suppress(OSError):
        if pid == 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        elif sys.platform == "linux":
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))


def check_bounds(timeout: object, memory: object = None) -> None:
    """Raise ``FakeifyError`` unless these are limits that `enforce` can have."""
    if not isinstance(timeout, (int, float)) or not timeout > 0:
        raise FakeifyError(
            "invalid value", where="timeout", expected="seconds, above 0", found=repr(timeout)
        )
    if memory is not None:
        check_integer(memory, "memory", FakeifyError, least=1)


def enforce(
    pid: int, ended: Callable[[float], bool], *, timeout: float, memory: int | None
) -> Ending:
    """Wait for a process; kill it and its process group if it exceeds a limit.

    Args:
        pid: of the leader of a process group; ``faulthandler`` is enabled in it.
        ended: waits at most that many seconds and returns whether the process has ended.
        timeout: seconds from now.
        memory: bytes that it and its descendants may hold together; ``None`` for no limit.
    """
    deadline = time.monotonic() + timeout
    while not ended(max(0.0, min(_INTERVAL, deadline - time.monotonic()))):
        if memory is not None and memory_of(pid) > memory:
            _kill(pid, ended)
            return "out of memory"
        if time.monotonic() >= deadline:
            _kill(pid, ended)
            return "hangs"
    return "ended"


def _kill(pid: int, ended: Callable[[float], bool]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGABRT)
    has_ended = ended(_GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    while not has_ended:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # it may not lead a group yet
        has_ended = ended(_GRACE)


# --- memory ---------------------------------------------------------------------------------------


def memory_of(pid: int) -> int:
    """Resident bytes of a process and its descendants, without mapped files."""
    return sum(_resident_bytes(number) for number in _process_tree(pid))


def _process_tree(pid: int) -> Iterator[int]:
    todo = [pid]
    while todo:
        number = todo.pop()
        yield number
        with contextlib.suppress(OSError):
            for thread in (_PROC / str(number) / "task").iterdir():
                todo += map(int, (thread / "children").read_text().split())


def _resident_bytes(pid: int) -> int:
    try:
        status = (_PROC / str(pid) / "status").read_text()
    except OSError:
        return 0  # it has ended
    lines = (line.split() for line in status.splitlines())
    return 1024 * sum(int(line[1]) for line in lines if line[0] in ("RssAnon:", "RssShmem:"))


def free_memory() -> int | None:
    """Bytes available without swapping; ``None`` if the system does not report them."""
    free = [
        number
        for number in (_free_of_machine(), *map(_free_of_group, _GROUPS))
        if number is not None
    ]
    return min(free, default=None)


_GROUPS = (
    ("memory.max", "memory.current", Path("/sys/fs/cgroup")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", Path("/sys/fs/cgroup/memory")),
)
"""File of the limit, file of the usage, and folder of a control group (version 2 and 1), inside a container."""


def _free_of_machine() -> int | None:
    with contextlib.suppress(OSError):
        for line in (_PROC / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return None


def _free_of_group(group: tuple[str, str, Path]) -> int | None:
    limit, used, folder = group
    with contextlib.suppress(OSError, ValueError):  # it is "max" without a limit
        return int((folder / limit).read_text()) - int((folder / used).read_text())
    return None
