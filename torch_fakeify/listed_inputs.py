"""Inputs of a graph that are lists of tensors, each tensor as an input of its own.

Compiled autograd gives a graph the tensors of a backward as one list, which is emptied when the graph
runs. Dynamo has a policy and a fake for each of them, and the nodes that read them out of the list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from . import _torch
from .sources import source_of

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ListedInputs"]


class ListedInputs:
    """The inputs of a graph as rows: one for each placeholder, or for each item of its list.

    Attributes:
        placeholders: of each row: the graph's own, or one that stands for an item of a list.

    Args:
        gm: the graph.
        inputs: what it is called with.
    """

    def __init__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.placeholders: list[torch.fx.Node] = []
        self._lengths: list[int | None] = []
        apart = torch.fx.Graph()
        for fx_node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
            is_list = isinstance(value, list)
            self._lengths.append(len(value) if is_list else None)
            self.placeholders += _items(fx_node, len(value), apart) if is_list else [fx_node]

    def rows(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs with the items of lists in their places."""
        rows: list[Any] = []
        for value, length in zip(inputs, self._lengths, strict=True):
            rows += [value] if length is None else value
        return rows

    def inputs(self, rows: Sequence[Any]) -> list[Any]:
        """The inputs as the graph takes them: `rows` backwards."""
        left = iter(rows)
        return [
            next(left) if length is None else [next(left) for _ in range(length)]
            for length in self._lengths
        ]


def _items(fx_node: torch.fx.Node, length: int, apart: torch.fx.Graph) -> list[torch.fx.Node]:
    """Placeholders of another graph that know of items what the nodes that read them know."""
    source = source_of(fx_node)
    made: list[torch.fx.Node] = []
    for i in range(length):
        item: Any = apart.placeholder(f"{fx_node.name}_{i}")
        if source is not None:
            item._dynamo_source = _torch.dynamo_source().GetItemSource(source, i)
        made.append(item)
    for user in fx_node.users:
        if user.op == "call_function" and user.args[0] is fx_node and type(user.args[1]) is int:
            made[user.args[1]].meta["example_value"] = user.meta.get("example_value")
    return made
