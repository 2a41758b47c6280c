"""Nodes that may write into their arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torch_fakeify.compat.torch_graphs import OpOverload

if TYPE_CHECKING:
    from collections.abc import Iterable

_IN_PLACE = frozenset(
    {
        "setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "iand", "ior", "ixor", "copy",
        "triton_kernel_wrapper_mutation",
    }
)  # fmt: skip
_OF_LAYOUT = frozenset(
    {
        "as_strided_", "detach_", "rename_", "requires_grad_", "resize_", "resize_as_", "set_",
        "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_",
        "inplace_swap", "swap", "_lower_version_count_by_1",
    }
)  # fmt: skip
"""Functions that change sizes, strides or the storage of their argument."""


def may_write(fx_node: torch.fx.Node) -> bool:
    """Return whether a node may write into an argument."""
    return fx_node.op in ("call_method", "call_function") and target_may_write(fx_node.target)


def target_may_write(target: Any) -> bool:
    """Return whether a function, or the method of a name, may write into an argument."""
    if isinstance(target, OpOverload):
        return bool(target._schema.is_mutable)
    name = _name(target)
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE


def _changes_layout(fx_node: torch.fx.Node) -> bool:
    target: Any = fx_node.target
    if isinstance(target, OpOverload):
        return torch.Tag.inplace_view in target.tags or target._schema.name == "aten::set_"
    return _name(target) in _OF_LAYOUT


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", "")


class LastWrites:
    """Positions of the nodes of a graph that write last into each storage.

    The fake value of a node is recorded after the whole graph was traced, with what later nodes did to it.

    Args:
        nodes: the nodes, in order.
        storages: returns keys of the storages of a node's fake value.
    """

    def __init__(self, nodes: Iterable[torch.fx.Node], storages: Any) -> None:
        self._writes: dict[Any, int] = {}
        self._layouts: dict[Any, int] = {}
        for at, fx_node in enumerate(nodes):
            if not may_write(fx_node):
                continue
            keys = [key for arg in (*fx_node.all_input_nodes, fx_node) for key in storages(arg)]
            self._writes.update(dict.fromkeys(keys, at))
            if _changes_layout(fx_node):
                self._layouts.update(dict.fromkeys(keys, at))

    def written_after(self, at: int, key: Any) -> bool:
        """Return whether a node after a position writes into a storage."""
        return self._writes.get(key, -1) > at

    def changed_after(self, at: int, key: Any) -> bool:
        """Return whether a node after a position changes the layout of a tensor on a storage."""
        return self._layouts.get(key, -1) > at
