"""The wire form of nodes of a graph, of which most have nothing but values that are their own.

What a node has beside them is its source, its stack and the tensors of its metadata, which have
their rows already. Nodes with more are left to the closures of ``closures.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from .closures import MAX_NESTING
from .desc import FunctionValue, NodeValue, OpaqueValue, TensorValue
from .desc_graph import NodeDesc
from .wire import TABLES

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NodeTexts"]

_STACKS, _SOURCES, _TENSORS = map(TABLES.index, ("stacks", "sources", "tensors"))
_PLAIN = frozenset({bool, int, str, type(None), FunctionValue, NodeValue})
_is_plain = _PLAIN.issuperset
_put = msgspec.structs.force_setattr
_copy = NodeDesc.__copy__


class NodeTexts:
    """Makes wire forms of nodes, each good until the next one is made.

    Args:
        positions: of each table the positions by the ids of objects.
    """

    def __init__(self, positions: Sequence[dict[int, int]]) -> None:
        self._stacks = positions[_STACKS]
        self._sources = positions[_SOURCES]
        self._tensors = positions[_TENSORS]

    def of(self, n: NodeDesc, last: list[int], same: dict[int, Any]) -> NodeDesc | None:
        meta: list[Any] = []
        tensors: list[int] = []
        for pair in n.meta:
            value = pair[1]
            kind = type(value)
            if kind is TensorValue:
                position = self._tensors.get(id(value.tensor))
                if position is None:
                    return None
                pair = (pair[0], TensorValue(tensor=position - last[_TENSORS]))
                last[_TENSORS] = position
            elif not (kind in _PLAIN or id(value) in same or (kind is OpaqueValue and type(value.data) is int)):
                return None
            meta.append(pair)
        if not (_is_plain(map(type, n.args)) and not n.kwargs):
            return None
        wire = _copy(n)
        _put(wire, "meta", tuple(meta))
        source = n.source
        if source is not None:
            position = self._sources.get(id(source))
            _put(wire, "source", position - last[_SOURCES])
            last[_SOURCES] = position
        if n.stack is not None:
            position = self._stacks.get(id(n.stack))
            _put(wire, "stack", position)
        return wire
