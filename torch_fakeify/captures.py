"""Recording one frame: what it takes to describe is not loaded to replay one.

A capture is made where a compiler backend is called, or from any FX graph with fake inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from . import _torch
from .desc_frame import CaptureDesc, FakeModeDesc
from .describe import MetaTensorDescriber
from .fake_modes import describe_fake_mode
from .frame import Capture
from .frame_inputs import describe_inputs
from .graph import encode_graph
from .modes import describe_modes
from .paths import short_path
from .scalars import without_scalars
from .shape_env import snapshot
from .sources import encode_source

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from .desc_env import ShapeEnvDesc

__all__ = ["capture"]


def capture(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    constants: Literal["none", "small"] = "none",
    paths: Literal["short", "full"] = "short",
) -> Capture:
    """Record a frame: the graph, its inputs and the shape environment they live in.

    Inside a Dynamo backend the inputs are the real tensors that the frame began with, and their
    symbols come from the frame's symbolic contexts; elsewhere they may be fake tensors of one mode.
    Nothing is changed: no guard is added; of tensor data nothing is read but the elements of 0-dim
    tensors that torch tracks as symbols.

    Args:
        gm: the graph, at torch level (Dynamo's) or at ATen level.
        example_inputs: one for each placeholder.
        constants: ``"small"`` also records the data of tensors of at most 4096 bytes that the graph
            itself holds, as ``make_fx`` makes them; without it such a graph compiles from its
            capture but does not run. It also keeps the values of 0-dim tensors among the inputs
            that nothing in the frame asks for; else they become other numbers (`scalars`).
        paths: ``"full"`` keeps absolute paths as they are, in stacks and in all texts.

    Raises:
        CaptureError: the inputs do not fit the graph, or their mode is not torch's own.
        UnsupportedTensorError: a tensor has a property that a record cannot carry.
        UnsupportedValueError: a target, constant, source or expression has no record.
    """
    tracing_context = _torch.TracingContext.try_get()
    fake_mode = _torch.detect_fake_mode(list(example_inputs))
    shape_env = None if fake_mode is None else fake_mode.shape_env
    describer = MetaTensorDescriber(keep_nested_ints=True, keep_alive=True)
    placeholders = [fx_node for fx_node in gm.graph.nodes if fx_node.op == "placeholder"]
    inputs = describe_inputs(placeholders, example_inputs, describer, shape_env)
    graph = encode_graph(
        gm,
        describer,
        constants=constants,
        file_name=_file_name(paths),
        inputs=[(value, d.tensor) for value, d in zip(example_inputs, inputs, strict=True)],
    )
    param_sources: Mapping[str, Any] = getattr(gm, "_param_name_to_source", None) or {}
    desc = CaptureDesc(
        graph=graph,
        inputs=inputs,
        modes=describe_modes(),
        fake_mode=FakeModeDesc() if fake_mode is None else describe_fake_mode(fake_mode),
        parameter_sources=tuple((n, encode_source(s)) for n, s in param_sources.items()),
        shape_env=None if shape_env is None else _snapshot(shape_env, paths),
        torch_version=_torch.torch_version(),
        frame=_frame_name(tracing_context),
    )
    if constants == "none":
        desc = without_scalars(desc)
    return Capture(desc, paths=paths)


def _file_name(paths: Literal["short", "full"]) -> Callable[[str], str]:
    return str if paths == "full" else short_path


def _snapshot(shape_env: Any, paths: Literal["short", "full"]) -> ShapeEnvDesc:
    desc, shorten = snapshot(shape_env), _file_name(paths)
    co_fields = tuple(
        (name, shorten(value) if isinstance(value, str) else value)
        for name, value in desc.co_fields
    )
    return msgspec.structs.replace(desc, co_fields=co_fields)


def _frame_name(tracing_context: Any | None) -> str | None:
    """Name of the user's function that Dynamo traces now."""
    if tracing_context is None or not tracing_context.traced_code:
        return None
    return str(tracing_context.traced_code[0].co_name)
