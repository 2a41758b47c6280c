"""Backends that are planted: Dynamo finds them in every process that starts from here."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


FAULTS = """
import os, signal, time
from pathlib import Path


def planted_hangs(gm, inputs):
    while True:
        time.sleep(1)


def planted_eats(gm, inputs):
    held = []
    while True:
        held.append(b"x" * (16 << 20))


def planted_segfaults(gm, inputs):
    os.kill(os.getpid(), signal.SIGSEGV)
"""


def plant(folder: Path, source: str, patch: pytest.MonkeyPatch) -> None:
    """Make each function ``NAME(gm, inputs)`` of Python code, and of `FAULTS`, the backend ``NAME``.

    The folder is empty before; ``patch`` takes it back.
    """
    paths = [plant_in(folder, FAULTS + source), *filter(None, [os.environ.get("PYTHONPATH")])]
    patch.setenv("PYTHONPATH", os.pathsep.join(paths))


def plant_in(folder: Path, source: str, module: str = "planted_backends") -> str:
    """Put such backends into a module of a folder, and give what has to be in ``PYTHONPATH``."""
    info = folder / f"{module}-1.dist-info"
    info.mkdir(parents=True)
    (folder / f"{module}.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
    points = [
        f"{name}={module}:{name}" for name in dict.fromkeys(re.findall(r"def (\w+)\(gm", source))
    ]
    (info / "entry_points.txt").write_text("\n".join(["[torch_dynamo_backends]", *points, ""]))
    return str(folder)
