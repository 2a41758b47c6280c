"""The graphs of a frame with their nested graphs, and the nodes that a node uses. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch_fakeify.records.rewrite import parts_of
from torch_fakeify.records.tensor import NodeValue, SymValue, TensorValue

if TYPE_CHECKING:
    from torch_fakeify.records.graph import GraphModuleDesc, NodeDesc


class NodeAt(NamedTuple):
    """A node of one of the frame's graphs."""

    graph: int
    position: int


class NamedGraph(NamedTuple):
    """A graph of a frame: its main graph, or the body of a higher-order operator."""

    name: str
    graph: GraphModuleDesc
    inner: dict[str, int]
    """Numbers of the graphs that it calls, by attribute."""


def all_graphs(graph: GraphModuleDesc) -> list[NamedGraph]:
    """Return a graph and its nested graphs, callers first."""
    found: list[NamedGraph] = []
    todo: list[tuple[str, GraphModuleDesc, dict[str, int], str]] = [("", graph, {}, "")]
    while todo:
        name, graph, outer, attribute = todo.pop()
        outer[attribute] = len(found)
        inner: dict[str, int] = {}
        found.append(NamedGraph(name, graph, inner))
        for key, body in reversed(graph.submodules):
            todo.append((f"{name}.{key}" if name else key, body, inner, key))
    for each in found:
        for alias, key in each.graph.submodule_aliases:
            if key in each.inner:
                each.inner.setdefault(alias, each.inner[key])
    return found


def used_nodes(fx_node: NodeDesc) -> list[int]:
    """Return the positions of the nodes among the arguments of a node, in their order."""
    found: list[int] = []
    pending: list[Any] = [fx_node.kwargs, fx_node.args]
    while pending:
        part = pending.pop()
        if isinstance(part, NodeValue):
            found.append(part.index)
        elif not isinstance(part, (TensorValue, SymValue)):
            pending.extend(reversed(parts_of(part)))
    return found
