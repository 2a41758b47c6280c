"""Limits of time and memory on a process, kept by the one that started it.

The memory is looked at from outside, on Linux. A limit that the kernel keeps is none for torch:
``RLIMIT_AS`` counts addresses, of which a CUDA context reserves hundreds of gigabytes; ``RLIMIT_DATA``
counts what was asked for, touched or not, each process for itself; and what an allocation does that
fails at such a limit is up to whoever made it: an exception, ``abort`` or a wild pointer. Counted
here is what a process and its descendants really hold, and whoever holds too much says where it is,
by ``faulthandler``, before it is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Ending", "can_count_memory", "free_memory", "memory_of", "watch"]

Ending: TypeAlias = Literal["ended", "hung", "out of memory"]

_PROC = Path("/proc")
_INTERVAL = 0.05
"""Seconds between two looks."""
_GRACE = 0.5
"""Seconds for saying where it is."""


def can_count_memory() -> bool:
    """Whether the memory of other processes can be told here."""
    return (_PROC / "self" / "status").exists()


def watch(
    pid: int, ended: Callable[[float], bool], *, timeout: float, memory: int | None
) -> Ending:
    """Wait for a process, and kill it and its group where it goes over a limit.

    Args:
        pid: of the leader of a process group, in which `faulthandler` is on.
        ended: waits for so many seconds at most, and tells whether the process has ended.
        timeout: seconds from now.
        memory: bytes, for it and its descendants together; ``None`` does not look.
    """
    deadline = time.monotonic() + timeout
    while not ended(max(0.0, min(_INTERVAL, deadline - time.monotonic()))):
        if memory is not None and memory_of(pid) > memory:
            _kill(pid, ended)
            return "out of memory"
        if time.monotonic() >= deadline:
            _kill(pid, ended)
            return "hung"
    return "ended"


def _kill(pid: int, ended: Callable[[float], bool]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGABRT)
    said = ended(_GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    while not said:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # it may have had no group yet
        said = ended(_GRACE)


# --- memory ---------------------------------------------------------------------------------------


def memory_of(pid: int) -> int:
    """Bytes that a process and its descendants hold, without the files that they have mapped."""
    return sum(_held(number) for number in _family(pid))


def _family(pid: int) -> Iterator[int]:
    todo = [pid]
    while todo:
        number = todo.pop()
        yield number
        with contextlib.suppress(OSError):
            for thread in (_PROC / str(number) / "task").iterdir():
                todo += map(int, (thread / "children").read_text().split())


def _held(pid: int) -> int:
    try:
        status = (_PROC / str(pid) / "status").read_text()
    except OSError:
        return 0  # it has ended
    lines = (line.split() for line in status.splitlines())
    return 1024 * sum(int(line[1]) for line in lines if line[0] in ("RssAnon:", "RssShmem:"))


def free_memory() -> int | None:
    """Bytes that could be taken without others losing theirs; ``None`` where that cannot be told."""
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
"""Where a control group, of version 2 or 1, has its limit and what it uses, seen from a container."""


def _free_of_machine() -> int | None:
    with contextlib.suppress(OSError):
        for line in (_PROC / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return None


def _free_of_group(group: tuple[str, str, Path]) -> int | None:
    limit, used, folder = group
    with contextlib.suppress(OSError, ValueError):  # without a limit it says "max"
        return int((folder / limit).read_text()) - int((folder / used).read_text())
    return None
