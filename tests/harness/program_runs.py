"""The small programs' recordings, each made once for all tests and all workers of pytest.

A recording is the folder that ``program_record.py`` fills in a process of its own; what
``program_replay.py`` finds of it in another one stands beside it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from filelock import FileLock
from processes import python
from program_zoo import programs

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

_QUICK = [p for p in programs().values() if not p.slow]
FAST = [p for i, p in enumerate(_QUICK) if i % 6 == 0 or p.name == "custom_op"]
"""A sixth of the programs that need no compiler: what plain pytest runs."""
SLOW = [p for p in programs().values() if p not in FAST]
"""All others, which `.ci/run` runs too."""


def recorded(factory: pytest.TempPathFactory, *, slow: bool) -> Path:
    """The recording of ``SLOW``, or of ``FAST``."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    directory = shared / ("slow_programs" if slow else "programs")
    directory.mkdir(exist_ok=True)
    with FileLock(directory / "recording"):
        if not (directory / "recorded").exists():
            python("program_record.py", directory, *(p.name for p in (SLOW if slow else FAST)))
            (directory / "recorded").touch()
    return directory


def replayed(factory: pytest.TempPathFactory, *, slow: bool) -> Path:
    """The same, with what another process made of it."""
    directory = recorded(factory, slow=slow)
    with FileLock(directory / "replaying"):
        if not (directory / "replayed").exists():
            chosen = SLOW if slow else FAST
            entries = [f"{p.name}:{p.backend}:{'ops' if p.ops else ''}" for p in chosen]
            python("program_replay.py", "programs", directory, *entries)
            (directory / "replayed").touch()
    return directory
