"""The call of one node as Python, with records of the tensors that it gets."""

from __future__ import annotations

import keyword
import re
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.node import map_aggregate, map_arg

from torch_fakeify.tools.value_code import ValueCode, unsupported

from .replies import OperatorCall, TensorArgument

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_MOST = 64
"""Largest number of whole numbers that are written out."""
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_WORDS = (
    "torch",
    "call",
    "arguments",
    "facts",
    "inputs",
    "mode",
    "fakes",
    "sys",
    "operator",
    "math",
)


def call_of(fx_node: torch.fx.Node, values: Mapping[torch.fx.Node, Any]) -> OperatorCall:
    """Return the call of a node that calls a function or a method, for real values of its arguments.

    Raises:
        UnsupportedValueError: the function or an argument has no text.
    """
    where = fx_node.name
    tensors = _Tensors(where)
    code = ValueCode()

    def text(arg: Any) -> str:
        named = map_arg(arg, lambda n: tensors.named(values[n], n.name))
        return code.of(named, tensors.names, where)

    args = [text(arg) for arg in fx_node.args]
    kwargs = [f"{name}={text(arg)}" for name, arg in fx_node.kwargs.items()]
    if fx_node.op == "call_method":
        first, *rest = args
        called = f"{first}.{fx_node.target}({', '.join([*rest, *kwargs])})"
    elif fx_node.op == "call_function":
        called = f"{code.function(fx_node.target, where)}({', '.join([*args, *kwargs])})"
    else:
        raise unsupported(_NO_TEXT, where, fx_node.op)
    return OperatorCall(called, tuple(sorted(code.imports)), tuple(tensors.found))


_NO_TEXT = "a call that a script cannot write"


class _Tensors:
    """Names the tensors of a call, and collects records of them."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._graph = torch.fx.Graph()
        self._nodes: dict[int, torch.fx.Node] = {}
        self._storages: dict[int, int] = {}
        self.names: dict[torch.fx.Node, str] = {}
        """By the nodes that stand for the tensors."""
        self.found: list[TensorArgument] = []

    def named(self, value: Any, name: str) -> Any:
        """Return a value with a node in place of each tensor."""
        return map_aggregate(
            value, lambda part: self._node(part, name) if isinstance(part, torch.Tensor) else part
        )

    def _node(self, t: torch.Tensor, name: str) -> torch.fx.Node:
        done = self._nodes.get(id(t))
        if done is not None:
            return done
        if type(t) not in _PLAIN or t.layout is not torch.strided or t.is_conj() or t.is_neg():
            raise unsupported(_NO_TEXT, self._where, f"{type(t).__qualname__} of {t.layout}")
        fx_node = self._nodes[id(t)] = self._graph.placeholder(name)
        name = self.names[fx_node] = _identifier(name, self.names.values())
        storage = t.untyped_storage()
        number = self._storages.setdefault(storage._cdata, len(self._storages))
        numbers, low, high = _whole_numbers(t)
        self.found.append(
            TensorArgument(
                name,
                str(t.dtype).removeprefix("torch."),
                tuple(t.shape),
                tuple(t.stride()),
                int(t.storage_offset()),
                number,
                storage.nbytes() // t.element_size(),
                str(t.device),
                requires_grad=t.requires_grad,
                is_parameter=isinstance(t, torch.nn.Parameter),
                numbers=numbers,
                low=low,
                high=high,
            )
        )
        return fx_node


def _whole_numbers(t: torch.Tensor) -> tuple[Any, int, int]:
    """Return the elements of a tensor of integers, if they are few, and the smallest and largest."""
    try:
        if t.dtype.is_floating_point or t.dtype.is_complex or not t.numel():
            return None, 0, 1
        whole = t.detach().to("cpu", torch.int64)
        low, high = int(whole.min()), int(whole.max())
    except (RuntimeError, NotImplementedError):  # a dtype of bits
        return None, 0, 1
    return (whole.tolist() if t.numel() <= _MOST else None), low, high


def _identifier(name: str, taken: Iterable[str]) -> str:
    name = re.sub(r"\W", "_", name)
    if not name.isidentifier() or keyword.iskeyword(name) or name in _WORDS:
        name = f"{name}_" if name.isidentifier() else f"x_{name}"
    while name in taken:
        name += "_"
    return name
