"""A torch of another version, played by the one that is here: for fresh interpreters.

Put this folder's `PRELUDE` in front of a program, or `sitecustomize` into a folder of ``PYTHONPATH`` where
children are to see the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

NEWER = "import torch; torch.__version__ = '2.17.0.dev20270101+cpu'\n"
"""Nothing is unknown in it."""

PLANTED = """
import torch._functorch.aot_autograd
from torch.fx.experimental.symbolic_shapes import ShapeEnv
def planted(self, *args, known=ShapeEnv.__init__, **more):
    known(self, *args, **more)
    self.tempo = 3
ShapeEnv.__init__ = planted
del torch._logging._internal.LazyTraceHandler
"""
"""After `NEWER`: an attribute that no table has, and a private name that is gone."""

FINDINGS = (
    "torch._logging._internal.LazyTraceHandler: a name that is missing",
    "ShapeEnv.tempo: an attribute that no table has",
)
"""What the census says of `PLANTED`."""

OLDER = "import torch; torch.__version__ = '2.12.1'\n"


def fresh(program: str, *args: str | Path, **environment: str) -> str:
    """What a program prints in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
