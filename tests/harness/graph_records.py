"""Records of graphs written by hand."""

from __future__ import annotations

from graph_checks import TensorBuilder

from torch_fakeify.records.graph import GraphModuleDesc, NodeDesc
from torch_fakeify.records.tensor import (
    FunctionValue,
    NodeValue,
    TupleValue,
)


def function(name, kind="function"):
    """A target by name."""
    return FunctionValue(kind=kind, name=name)


def node(op, name, target, *args, **kwargs):
    """One node's record; keyword arguments are those of the call."""
    return NodeDesc(op=op, name=name, target=target, args=args, kwargs=tuple(kwargs.items()))


X = node("placeholder", "x", "x")
RELU = node("call_function", "relu", function("torch.relu"), NodeValue(index=0))
OUT = node("output", "output", "output", TupleValue(items=(NodeValue(index=1),)))


def graph(*nodes, **fields):
    """A graph's record."""
    return GraphModuleDesc(nodes=nodes, **fields)


def decode(desc, **kwargs):
    """The graph of a record in an empty mode."""
    return TensorBuilder(None).decode(desc, **kwargs)


def calling(target, *args, **kwargs):
    """A graph of one call, between an input and the output."""
    call = NodeDesc(
        op="call_method" if isinstance(target, str) else "call_function",
        name="call",
        target=target,
        args=args,
        kwargs=tuple(kwargs.items()),
    )
    return graph(X, call, OUT)
