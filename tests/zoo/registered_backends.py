"""Backends in a folder of their own, as an installed package has them: found where that is on the path."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

BACKENDS = """
import os, signal, sys, time

def dies(gm, inputs):
    os.kill(os.getpid(), getattr(signal, os.environ["HOW"]))

def later(gm, inputs):
    return lambda *args: dies(gm, args)

def leaves(gm, inputs):
    os._exit(int(os.environ["HOW"]))

def hangs(gm, inputs):
    print("hanging", flush=True)
    while True:
        time.sleep(0.01)

def deaf(gm, inputs):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hangs(gm, inputs)

def fails(gm, inputs):
    raise ValueError("cannot")

def wrong(gm, inputs):
    return lambda *args: [value + 1 for value in gm.forward(*args)]

def good(gm, inputs):
    return gm.forward
"""


def write_backends(folder: Path) -> None:
    """Write the module ``mine`` into a folder and register its functions as Dynamo backends."""
    info = folder / "mine-1.dist-info"
    info.mkdir(parents=True)
    (folder / "mine.py").write_text(BACKENDS)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    entries = "".join(f"{name} = mine:{name}\n" for name in re.findall(r"def (\w+)", BACKENDS))
    (info / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{entries}")
