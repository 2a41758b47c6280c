"""The only module that imports torch's private modules, and the place of version differences.

What is cheap stands at module level. ``torch._dynamo`` and ``torch._functorch.aot_autograd`` take
as long to import as a good part of torch itself, so they are reached through functions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
from torch._functorch import config as _functorch_config
from torch._guards import (
    ChainedSource,
    CompileContext,
    CompileId,
    Source,
    TracingContext,
    compile_context,
    detect_fake_mode,
    tracing,
)
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
from torch.utils._sympy import functions as sympy_functions
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.singleton_int import SingletonInt
from torch.utils._sympy.value_ranges import ValueRanges

from .errors import CaptureError

__all__ = [
    "ChainedSource",
    "CompileContext",
    "CompileId",
    "DimDynamic",
    "FakeTensor",
    "FakeTensorMode",
    "RelaxedUnspecConstraint",
    "ShapeEnv",
    "SingletonInt",
    "Source",
    "StatefulSymbolicContext",
    "StatelessSymbolicContext",
    "StrictMinMaxConstraint",
    "SubclassSymbolicContext",
    "SymIntSymbolicContext",
    "SymbolicContext",
    "TracingContext",
    "ValueRanges",
    "compile_context",
    "detect_fake_mode",
    "dynamo_control_flow",
    "dynamo_source",
    "functorch_config_patch",
    "int_oo",
    "resolve_backend",
    "sympy_functions",
    "torch_version",
    "tracing",
]


def torch_version() -> str:
    """The installed torch's version, without the local build suffix."""
    return torch.__version__.partition("+")[0]


def dynamo_source() -> ModuleType:
    """``torch._dynamo.source``, imported on first use."""
    import torch._dynamo.source as module

    return module


def functorch_config_patch(**changes: Any) -> AbstractContextManager[Any]:
    """``torch._functorch.config.patch``."""
    return _functorch_config.patch(**changes)


def resolve_backend(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """The Dynamo backend of that name, or the callable itself.

    Raises:
        CaptureError: no backend has that name.
    """
    if not isinstance(backend, str):
        return backend
    from torch._dynamo.backends.registry import list_backends, lookup_backend
    from torch._dynamo.exc import InvalidBackend

    try:
        return lookup_backend(backend)
    except InvalidBackend as error:
        raise CaptureError(
            f"there is no Dynamo backend {backend!r}",
            expected=f"one of {', '.join(sorted(list_backends(exclude_tags=())))}, or a callable",
            fix="Import the package that registers it first",
        ) from error


def dynamo_control_flow() -> tuple[type[BaseException], ...]:
    """Exceptions by which a backend steers Dynamo; they are not failures."""
    from torch._dynamo.exc import RestartAnalysis, SkipFrame, TensorifyScalarRestartAnalysis

    return (RestartAnalysis, SkipFrame, TensorifyScalarRestartAnalysis)
