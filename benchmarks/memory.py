"""How much memory a process takes: this one, or one of its own for a script of this folder."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

__all__ = ["high_water", "measured"]


def high_water() -> int:
    """The most bytes that were resident in this process, without what its parent had."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measured(module: str, argument: str) -> list[int]:
    """Return the numbers that a script prints in a process of its own, see ``child`` of `run.main`.

    Args:
        module: the script.
        argument: what it measures.
    """
    command = [sys.executable, "-m", f"benchmarks.{module}", "--child", argument]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return list(map(int, done.stdout.split()))
