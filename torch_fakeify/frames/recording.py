"""Recording one frame, inside a compiler backend or from any FX graph with fake inputs.

Replay does not import this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import msgspec
from torch.export import ExportedProgram

from torch_fakeify.compat import torch_dynamo
from torch_fakeify.compat.arguments import check_graph, placeholders_of
from torch_fakeify.compat.torch_graphs import operator_modules
from torch_fakeify.describe.describer import MetaTensorDescriber
from torch_fakeify.describe.inputs import INPUTS_FIX, describe_inputs, traced_values
from torch_fakeify.encoding.fake_modes import describe_fake_mode
from torch_fakeify.encoding.modes import describe_modes
from torch_fakeify.encoding.operators import describe_operators
from torch_fakeify.encoding.sources import encode_source
from torch_fakeify.encoding.surroundings import describe_surroundings
from torch_fakeify.errors import CaptureError, check_choice
from torch_fakeify.fake_kernels.kernels import INFERRED
from torch_fakeify.frames.graph.codec import encode_graph
from torch_fakeify.records.frame import CaptureDesc, Constants, FakeModeDesc, Paths
from torch_fakeify.records.redact_paths import short_path
from torch_fakeify.records.redact_scalars import redact_scalars
from torch_fakeify.serialization.capture_file import encode_with_short_paths
from torch_fakeify.shape_env.snapshot import snapshot

from .captures import Capture
from .exported import describe_export, shared_weights, with_guard_nodes, with_sources
from .process_groups import describe_world
from .ranks import calls_for_part, calls_for_rank, without_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import CodeType

    import torch

    from torch_fakeify.records.frame import InputDesc
    from torch_fakeify.records.shape_env import ShapeEnvDesc
    from torch_fakeify.records.tensor import SourceDesc


def capture(
    gm: torch.fx.GraphModule | ExportedProgram,
    example_inputs: Sequence[Any] | None = None,
    *,
    constants: Constants = "none",
    paths: Paths = "short",
) -> Capture:
    """Record a frame: its graph, its inputs and their shape environment.

    Inside a Dynamo backend the inputs are the real tensors of the frame, and their symbols come from
    the frame's symbolic contexts; elsewhere they may be fake tensors of one mode. No guard is added.
    Of tensor data only the elements of 0-dim tensors that torch tracks as symbols are read.

    Of an ``ExportedProgram`` the signature and the ranges are recorded too: `Capture.exported_program` makes
    it again. In the graph of its ``module()`` the call that checks the guards becomes nodes.

    Args:
        gm: the graph, at torch level (Dynamo's) or at ATen level, or an exported program.
        example_inputs: one for each placeholder; by default the placeholders' ``meta["val"]`` or
            ``meta["example_value"]``.
        constants: ``"small"`` also records the data of tensors of at most 4096 bytes that are
            attributes of the graph (``make_fx`` makes such); without their data the graph compiles
            from its capture but does not run. So it does for the constants of an exported program. It
            also records the values of 0-dim inputs that the frame does not depend on, which ``"none"``
            replaces (`redact_scalars`).
        paths: ``"full"`` leaves absolute paths unchanged, in stacks and all other texts.

    Raises:
        CaptureError: the inputs do not fit the graph, a placeholder has no value and there are no
            ``example_inputs``, or their mode is not torch's own.
        UnsupportedTensorError: a tensor has a property that a record cannot carry.
        UnsupportedValueError: a target, constant, source or expression has no record.

    Example:
        >>> size = tfk.capture(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(2)]).save(
        ...     "frame.fkf"
        ... )
    """
    check_choice(constants, get_args(Constants), "constants", CaptureError)
    check_choice(paths, get_args(Paths), "paths", CaptureError)
    return capture_of(
        describe_frame(gm, example_inputs, constants=constants, paths=paths), paths=paths
    )


def capture_of(desc: CaptureDesc, *, paths: Paths) -> Capture:
    """Return the capture of a described frame, with absolute paths shortened unless ``paths`` is ``"full"``."""
    if paths == "full":
        return Capture(desc)
    desc, members = encode_with_short_paths(desc)
    return Capture(desc, members=members)


def describe_frame(
    gm: torch.fx.GraphModule | ExportedProgram,
    example_inputs: Sequence[Any] | None,
    *,
    constants: Constants,
    paths: Paths,
) -> CaptureDesc:
    """Return the record of a frame; stacks may have absolute paths. Arguments and errors are those of `capture`."""
    export = None
    if isinstance(gm, ExportedProgram):
        program, gm = gm, gm.graph_module
        export = describe_export(program, data=constants == "small")
    else:
        check_graph(gm, CaptureError)
        program, gm = None, with_guard_nodes(gm)
    if example_inputs is None:
        example_inputs = traced_values(gm.graph.find_nodes(op="placeholder"))
    placeholders = placeholders_of(gm, example_inputs, CaptureError, fix=INPUTS_FIX)
    codes = _traced_codes()
    fake_mode = torch_dynamo.detect_fake_mode(list(example_inputs))
    shape_env = None if fake_mode is None else fake_mode.shape_env
    describer = MetaTensorDescriber(keep_nested_ints=True, keep_alive=True)
    try:
        inputs = describe_inputs(placeholders, example_inputs, describer, shape_env)
        if program is not None:
            inputs = with_sources(program, inputs)
        graph = encode_graph(
            gm,
            describer,
            constants=constants,
            file_name=_file_name(paths),
            inputs=[(value, d.tensor) for value, d in zip(example_inputs, inputs, strict=True)],
        )
    finally:
        describer.forget()
    param_sources: Mapping[str, Any] = getattr(gm, "_param_name_to_source", None) or {}
    desc = CaptureDesc(
        graph=graph,
        inputs=inputs,
        modes=describe_modes(),
        fake_mode=FakeModeDesc() if fake_mode is None else describe_fake_mode(fake_mode),
        parameter_sources=tuple((n, encode_source(s)) for n, s in param_sources.items()),
        same_objects=(
            _same_objects(inputs) if program is None else shared_weights(program, inputs)
        ),
        shape_env=None if shape_env is None else _snapshot(shape_env, paths),
        torch_version=torch_dynamo.torch_version(),
        operator_modules=operator_modules(gm),
        operators=describe_operators(gm, INFERRED),
        export=export,
        frame=str(codes[0].co_name) if codes else None,
        world=describe_world(graph, inputs, calls_for_rank(codes)),
        surroundings=describe_surroundings(graph, inputs, paths=paths),
        state="not compiled",
    )
    desc = without_rank(desc, calls_for_part(codes))
    return redact_scalars(desc) if constants == "none" else desc


def _traced_codes() -> Sequence[CodeType]:
    """Return the code of the functions that Dynamo has traced for the frame."""
    context = torch_dynamo.TracingContext.try_get()
    return () if context is None else context.traced_code


def _same_objects(inputs: Sequence[InputDesc]) -> tuple[tuple[SourceDesc, SourceDesc], ...]:
    """Return the pairs of sources with one object that is an input, or that has inputs as parts."""
    names: set[str] = set()
    for each in inputs:
        source = each.source
        while source is not None:
            names.add(source.name)
            source = source.base
    pairs = torch_dynamo.same_objects(torch_dynamo.TracingContext.try_get())
    return tuple(
        (encode_source(one), encode_source(other))
        for one, other in pairs
        if one.name in names or other.name in names
    )


def _file_name(paths: Paths) -> Callable[[str], str]:
    return str if paths == "full" else short_path


def _snapshot(shape_env: Any, paths: Paths) -> ShapeEnvDesc:
    desc, shorten = snapshot(shape_env), _file_name(paths)
    co_fields = tuple(
        (name, shorten(value) if isinstance(value, str) else value)
        for name, value in desc.co_fields
    )
    return msgspec.structs.replace(desc, co_fields=co_fields)


def traced_code() -> CodeType | None:
    """Code of the function that Dynamo is tracing."""
    return next(iter(_traced_codes()), None)
