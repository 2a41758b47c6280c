"""The only module that imports torch's private modules, and the place of version differences.

What is cheap stands at module level. ``torch._dynamo`` and ``torch._functorch.aot_autograd`` take
as long to import as a good part of torch itself, so they are reached through functions.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch._guards import ChainedSource, CompileContext, Source, TracingContext, detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    RelaxedUnspecConstraint,
    ShapeEnv,
    StatefulSymbolicContext,
    StatelessSymbolicContext,
    StrictMinMaxConstraint,
    SubclassSymbolicContext,
    SymbolicContext,
    SymIntSymbolicContext,
)

__all__ = [
    "ChainedSource",
    "CompileContext",
    "DimDynamic",
    "FakeTensor",
    "FakeTensorMode",
    "RelaxedUnspecConstraint",
    "ShapeEnv",
    "Source",
    "StatefulSymbolicContext",
    "StatelessSymbolicContext",
    "StrictMinMaxConstraint",
    "SubclassSymbolicContext",
    "SymIntSymbolicContext",
    "SymbolicContext",
    "TracingContext",
    "detect_fake_mode",
    "dynamo_source",
    "torch_version",
]


def torch_version() -> str:
    """The installed torch's version, without the local build suffix."""
    return torch.__version__.partition("+")[0]


def dynamo_source() -> ModuleType:
    """``torch._dynamo.source``, imported on first use."""
    import torch._dynamo.source as module

    return module
