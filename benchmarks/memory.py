"""How much memory a process has taken."""

from __future__ import annotations

import resource
from pathlib import Path

__all__ = ["high_water"]


def high_water() -> int:
    """The most bytes that were resident in this process, without what its parent had."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
