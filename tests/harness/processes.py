"""Scripts of the harness in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from places import HARNESS, IMPORTABLE, ROOT

if TYPE_CHECKING:
    from pathlib import Path


def python(script: str | Path, *args: str | Path, interpreter: str = sys.executable) -> str:
    """Run a script, which can import what the tests can, and return what it prints.

    Args:
        script: its path from the harness.
        args: of the script.
        interpreter: the Python that runs it.
    """
    path = [*IMPORTABLE, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [interpreter, str(HARNESS / script), *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(path),
        },
        cwd=HARNESS,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
