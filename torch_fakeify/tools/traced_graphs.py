"""A graph as a capture: its fake values are those of a trace, or are made from its inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torch_fakeify.compat import torch_dynamo, torch_fakes, torch_symbols
from torch_fakeify.errors import CaptureError
from torch_fakeify.frames.recording import capture
from torch_fakeify.replay.lowering import value_of
from torch_fakeify.unbacked.fx_runs import attribute_of
from torch_fakeify.unbacked.repropagation import repropagate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_fakeify.frames.captures import Capture


def capture_of_graph(gm: torch.fx.GraphModule, inputs: Sequence[Any] | None) -> Capture:
    """Return the capture of a graph.

    Args:
        gm: with fake values in the metadata of its nodes, or without.
        inputs: one for each placeholder, real or fake; ``None`` for the fake values of the placeholders.
            Without fake values of the nodes, all sizes of real tensors become symbols.

    Raises:
        CaptureError: there are neither fake values nor inputs.
    """
    nodes = nodes_of(gm) or gm.graph.find_nodes(op="placeholder")
    if any(value_of(fx_node) is not None for fx_node in nodes):
        is_traced = inputs is not None and torch_dynamo.detect_fake_mode(list(inputs)) is not None
        # Real inputs have no symbols, except where Dynamo has just traced them.
        return capture(gm, inputs if is_traced else None, constants="small")
    if inputs is None:
        raise CaptureError(
            "the graph has no fake values", where="inputs", fix="Pass inputs for its placeholders"
        )
    copy = torch.fx.GraphModule(gm, _copied(gm.graph))
    placeholders = copy.graph.find_nodes(op="placeholder")
    if len(placeholders) != len(inputs):
        raise CaptureError(
            "the inputs do not fit the graph",
            where="inputs",
            expected=f"{len(placeholders)}, one for each placeholder",
            found=str(len(inputs)),
        )
    mode = torch_dynamo.detect_fake_mode(list(inputs))
    if mode is None:
        env = torch_symbols.ShapeEnv()
        mode = torch_fakes.FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    fakes = [_fake(mode, n.name, v) for n, v in zip(placeholders, inputs, strict=True)]
    for fx_node, value in zip(placeholders, fakes, strict=True):
        fx_node.meta["val"] = value
    for fx_node in copy.graph.find_nodes(op="get_attr"):
        value = attribute_of(copy, str(fx_node.target))
        if isinstance(value, torch.Tensor):  # with the ``requires_grad`` of a parameter
            fx_node.meta["val"] = mode.from_tensor(value, static_shapes=True)
    repropagate(copy, [n for n in nodes_of(copy) if "val" not in n.meta], mode=mode)
    with torch.no_grad():  # as `repropagate` makes the values
        return capture(copy, fakes, constants="small")


def nodes_of(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Return the nodes of a graph whose values follow from those of its placeholders."""
    return [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]


def _copied(graph: torch.fx.Graph) -> torch.fx.Graph:
    """Return a copy of a graph whose nodes have metadata of their own."""
    made = torch.fx.Graph()
    output = made.graph_copy(graph, val_map := {})
    made.output(output)
    for old, new in val_map.items():
        new.meta = dict(old.meta)
    return made


def _fake(mode: Any, name: str, value: Any) -> Any:
    """Return a fake tensor whose sizes are symbols; other values are unchanged."""
    if not isinstance(value, torch.Tensor) or isinstance(value, torch_fakes.FakeTensor):
        return value
    dims = [torch_symbols.DimDynamic.DYNAMIC] * value.ndim
    context = torch_symbols.StatelessSymbolicContext(dims)
    source = torch_dynamo.dynamo_source().LocalSource(name, is_input=True)
    return mode.from_tensor(value, source=source, symbolic_context=context)
