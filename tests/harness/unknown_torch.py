"""A torch of another version, played by the one that is here: for fresh interpreters.

Put one of these texts in front of a program, or `sitecustomize` into a folder of ``PYTHONPATH`` where
children are to see the same.
"""

from __future__ import annotations

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
