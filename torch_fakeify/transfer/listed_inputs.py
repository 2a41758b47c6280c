"""Flattens inputs of a graph that are lists of tensors.

Compiled autograd passes the tensors of a backward to a graph as one list, which the graph empties.
Dynamo has a policy and a fake tensor for each item, and a node that reads it from the list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torch_fakeify.compat import torch_dynamo
from torch_fakeify.compat.arguments import placeholders_of
from torch_fakeify.describe.inputs import INPUTS_FIX
from torch_fakeify.encoding.sources import source_of
from torch_fakeify.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Sequence


class FlattenedInputs:
    """The inputs of a graph as rows: one for each placeholder, or for each item of a list.

    Attributes:
        placeholders: one for each row: that of the graph, or a new one for an item of a list.

    Args:
        gm: the graph.
        inputs: its inputs.

    Raises:
        CaptureError: not a graph, or another number of inputs than of placeholders.
    """

    def __init__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
        placeholders = placeholders_of(gm, inputs, CaptureError, fix=INPUTS_FIX)
        self.placeholders: list[torch.fx.Node] = []
        self._lengths: list[int | None] = []
        apart = torch.fx.Graph()
        for fx_node, value in zip(placeholders, inputs, strict=True):
            is_list = isinstance(value, list)
            self._lengths.append(len(value) if is_list else None)
            self.placeholders += _items(fx_node, len(value), apart) if is_list else [fx_node]

    def rows(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs with each list replaced by its items."""
        rows: list[Any] = []
        for value, length in zip(inputs, self._lengths, strict=True):
            rows += [value] if length is None else value
        return rows

    def inputs(self, rows: Sequence[Any]) -> list[Any]:
        """The inputs as the graph takes them: the inverse of `rows`."""
        left = iter(rows)
        return [
            next(left) if length is None else [next(left) for _ in range(length)]
            for length in self._lengths
        ]


def _items(fx_node: torch.fx.Node, length: int, apart: torch.fx.Graph) -> list[torch.fx.Node]:
    """Placeholders for the items of a list, with the sources and fake values of the items."""
    source = source_of(fx_node)
    made: list[torch.fx.Node] = []
    for i in range(length):
        item: Any = apart.placeholder(f"{fx_node.name}_{i}")
        if source is not None:
            item._dynamo_source = torch_dynamo.dynamo_source().GetItemSource(source, i)
        made.append(item)
    for user in fx_node.users:
        if user.op == "call_function" and user.args[0] is fx_node and type(user.args[1]) is int:
            made[user.args[1]].meta["example_value"] = user.meta.get("example_value")
    return made
