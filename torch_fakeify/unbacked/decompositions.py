"""Traces a graph with decompositions, as ``make_fx`` does, while a custom runner executes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torch_fakeify.compat import torch_graphs

from .fx_runs import attribute_of, set_attribute

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class TraceTarget(NamedTuple):
    """A graph to trace."""

    run: Callable[[Sequence[Any]], Any]
    """Runs the graph on its inputs and returns its outputs."""
    tensors: Mapping[str, torch.Tensor]
    """The tensors of its module that the graph uses, as fake tensors, by name."""


def decomposed(
    original: torch.fx.GraphModule,
    target: TraceTarget,
    inputs: Sequence[Any],
    decompositions: Mapping[Any, Callable[..., Any]],
) -> torch.fx.GraphModule:
    """The graph that results from decomposing the operators of a graph.

    Args:
        original: the graph, with values.
        target: runs the graph.
        inputs: one for each placeholder.
        decompositions: by operator.
    """
    table: Any = dict(decompositions)
    names = target.tensors
    with torch_graphs.preserve_node_meta():
        # Tensors of the module become inputs: the tracer would take the fakes for constants.
        trace = torch_graphs.make_fx(
            lambda *args: target.run(args[: len(inputs)]), decomposition_table=table
        )
        made = trace(*inputs, *names.values())
    extra = made.graph.find_nodes(op="placeholder")[len(inputs) :]
    for placeholder, name in zip(extra, names, strict=True):
        path, _, _ = name.rpartition(".")
        if path:
            made.add_submodule(path, torch.nn.Module())
        set_attribute(made, name, attribute_of(original, name))
        with made.graph.inserting_before(placeholder):
            fx_node = made.graph.get_attr(name)
        fx_node.meta = placeholder.meta
        placeholder.replace_all_uses_with(fx_node)
        made.graph.erase_node(placeholder)
    pairs = [gm.graph.find_nodes(op="placeholder") for gm in (made, original)]
    for new, old in zip(*pairs, strict=True):
        metadata = {k: v for k, v in old.meta.items() if k not in ("example_value", "val")}
        with made.graph.inserting_before(new):
            fx_node = made.graph.placeholder(str(old.target))
        fx_node.meta = {**metadata, **new.meta}
        new.replace_all_uses_with(fx_node)
        made.graph.erase_node(new)
    made.recompile()
    return made
