"""A graph traced with decompositions, as ``make_fx`` does, while something else runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import _torch
from .graph_runs import attribute_of, set_attribute

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Tracee", "decomposed"]


class Tracee(NamedTuple):
    """What is traced."""

    run: Callable[[Sequence[Any]], Any]
    """Runs the graph on its inputs; what it returns."""
    tensors: Mapping[str, torch.Tensor]
    """The tensors of its module that it uses, as fake tensors."""


def decomposed(
    known: torch.fx.GraphModule,
    tracee: Tracee,
    inputs: Sequence[Any],
    decompositions: Mapping[Any, Callable[..., Any]],
) -> torch.fx.GraphModule:
    """The graph of what the operators of a graph decompose to.

    Args:
        known: the graph with its values.
        tracee: how it runs.
        inputs: one for each placeholder.
        decompositions: by operator.
    """
    table: Any = dict(decompositions)
    names = tracee.tensors
    with _torch.preserve_node_meta():
        # Tensors of the module as inputs: else the tracer would take the fakes for constants.
        trace = _torch.make_fx(
            lambda *args: tracee.run(args[: len(inputs)]), decomposition_table=table
        )
        made = trace(*inputs, *names.values())
    extra = made.graph.find_nodes(op="placeholder")[len(inputs) :]
    for placeholder, name in zip(extra, names, strict=True):
        path, _, _ = name.rpartition(".")
        if path:
            made.add_submodule(path, torch.nn.Module())
        set_attribute(made, name, attribute_of(known, name))
        with made.graph.inserting_before(placeholder):
            fx_node = made.graph.get_attr(name)
        fx_node.meta = placeholder.meta
        placeholder.replace_all_uses_with(fx_node)
        made.graph.erase_node(placeholder)
    pairs = [gm.graph.find_nodes(op="placeholder") for gm in (made, known)]
    for new, old in zip(*pairs, strict=True):
        kept = {k: v for k, v in old.meta.items() if k not in ("example_value", "val")}
        with made.graph.inserting_before(new):
            fx_node = made.graph.placeholder(str(old.target))
        fx_node.meta = {**kept, **new.meta}
        new.replace_all_uses_with(fx_node)
        made.graph.erase_node(new)
    made.recompile()
    return made
