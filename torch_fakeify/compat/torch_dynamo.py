"""Torch's private compiler front: tracing contexts, sources, Dynamo, AOTAutograd, trace logs.

``torch._dynamo`` and ``torch._functorch.aot_autograd`` are slow to import, and therefore imported by
functions.
"""

# pyright: reportUnusedImport=false
# Other rooms import these names from here; a test finds the ones that none does.
from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import gate

gate.check_installed_torch()  # before anything private is asked for

from torch._guards import (
    CompileContext,
    CompileId,
    Source,
    StorageOverlap,
    TracingContext,
    compile_context,
    detect_fake_mode,
    tracing,
)
from torch._logging._internal import LazyTraceHandler, trace_log, trace_structured

if TYPE_CHECKING:
    from collections.abc import Generator
    from contextlib import AbstractContextManager
    from pathlib import Path
    from types import ModuleType


def torch_version() -> str:
    """Return the version of the installed torch, without the local build suffix."""
    return torch.__version__.partition("+")[0]


def dynamo() -> ModuleType:
    """Import ``torch._dynamo``."""
    return import_module("torch._dynamo")


def dynamo_config_patch(**changes: Any) -> AbstractContextManager[Any]:
    """Return ``torch._dynamo.config.patch(**changes)``."""
    config: Any = dynamo().config
    return config.patch(**changes)


def compile_lock() -> AbstractContextManager[Any]:
    """Return the reentrant lock of the process that ``torch.compile`` holds while it compiles."""
    return import_module("torch._dynamo.convert_frame").compile_lock


@contextmanager
def compiling() -> Generator[None, None, None]:
    """Hold the lock of ``torch.compile``; within the block ``torch.compiler.is_compiling()`` is true.

    Where a graph is traced outside such a block, torch refuses calls of compiled functions, also
    those of other threads: the flag of `torch.fx.Tracer` is global.
    """
    session = getattr(torch.compiler, "_compile_session_context", nullcontext)
    with compile_lock(), session():
        yield


def dynamo_source() -> ModuleType:
    """Import ``torch._dynamo.source``."""
    return import_module("torch._dynamo.source")


def dynamo_control_flow() -> tuple[type[BaseException], ...]:
    """Return the exceptions by which a backend controls Dynamo; they are not failures."""
    from torch._dynamo.exc import RestartAnalysis, SkipFrame, TensorifyScalarRestartAnalysis

    return (RestartAnalysis, SkipFrame, TensorifyScalarRestartAnalysis)


class NumpyWrappers(NamedTuple):
    """The wrapper classes by which Dynamo traces NumPy."""

    function: type[Any]
    method: type[Any]
    operator: type[Any]


def numpy_wrappers() -> NumpyWrappers:
    """Return ``numpy_to_tensor_wrapper``, ``numpy_method_wrapper`` and ``numpy_operator_wrapper``."""
    from torch._dynamo import utils

    return NumpyWrappers(
        utils.numpy_to_tensor_wrapper, utils.numpy_method_wrapper, utils.numpy_operator_wrapper
    )


def dim_range_class() -> Any:
    """Return ``torch._dynamo.decorators._DimRange``, which ``mark_dynamic`` sets on a tensor."""
    return import_module("torch._dynamo.decorators")._DimRange


@contextmanager
def scalar_specializations() -> Generator[tuple[type[BaseException], set[str]], None, None]:
    """Yield the exception and the set by which the tensorify pass requests another attempt.

    The pass turns Python floats into tensors. It adds the names of float symbols that must be constants
    to the set, then raises the exception. The set is restored at the end of the block.
    """
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import TensorifyState

    before = set(TensorifyState.force_specializations)
    try:
        yield TensorifyScalarRestartAnalysis, TensorifyState.force_specializations
    finally:
        TensorifyState.clear()
        for name in before:
            TensorifyState.specialize(name)


def unimplemented(gb_type: str, context: str) -> None:
    """Raise Dynamo's exception for unsupported code, which ends tracing."""
    exc: Any = import_module("torch._dynamo.exc")
    exc.unimplemented(gb_type=gb_type, context=context, explanation="Not supported.", hints=[])


def skip_in_dynamo(folder: Path, *, skip: bool = True) -> None:
    """Exclude the files of a folder from tracing by Dynamo, or with ``skip=False`` include them again."""
    rules: Any = import_module("torch._dynamo.trace_rules")
    (rules.SKIP_DIRS.append if skip else rules.SKIP_DIRS.remove)(f"{folder.as_posix()}/")
    rules._recompile_re()


def aot_autograd() -> ModuleType:
    """Import ``torch._functorch.aot_autograd``."""
    return import_module("torch._functorch.aot_autograd")


def traced_locals() -> dict[str, Any]:
    """Return the local variables of the function that Dynamo traces now, as fake values.

    Only tensors and symbolic numbers; empty if Dynamo traces nothing in this thread.
    """
    symbolic_convert = sys.modules.get("torch._dynamo.symbolic_convert")
    root = getattr(getattr(symbolic_convert, "tls", None), "current_tx", None)
    translator = getattr(getattr(root, "output", None), "current_tx", root)  # of an inlined call
    values: dict[str, Any] = {}
    for name, variable in getattr(translator, "symbolic_locals", {}).items():
        node = getattr(getattr(variable, "proxy", None), "node", None)
        value = getattr(variable, "sym_num", None)
        if value is None and node is not None:
            value = node.meta.get("example_value")
        if isinstance(value, (torch.Tensor, torch.SymInt)):
            values[name] = value
    return values


def traced_graph() -> Any:
    """Return the tracer of the graph that Dynamo adds to in this thread, of a frame or a body; ``None`` outside."""
    translators = sys.modules.get("torch._dynamo.symbolic_convert")
    translator = translators and getattr(translators.tls, "current_tx", None)
    return translator and translator.output.current_tracer


def same_objects(tracing_context: Any | None) -> list[tuple[Any, Any]]:
    """Return the pairs of sources at which Dynamo has found one object, in the order of their names.

    Method: ``GuardBuilder.DUPLICATE_INPUT`` of ``torch/_dynamo/guards.py`` (torch 2.13), which Dynamo
    installs for such a pair, without those that it does not check.
    """
    if tracing_context is None:
        return []
    from torch._dynamo import guards, source

    found: list[tuple[Any, Any]] = []
    for guard in tracing_context.guards_context.dynamo_guards:
        make = guard.create_fn
        if getattr(make, "func", None) is not guards.GuardBuilder.DUPLICATE_INPUT:
            continue
        pair = (guard.originating_source, make.keywords["source_b"])
        if not any(map(source.is_from_skip_guard_source, pair)) and not any(
            map(source.is_from_optimizer_source, pair)
        ):
            found.append(pair)
    return sorted(found, key=lambda pair: (pair[0].name, pair[1].name))
