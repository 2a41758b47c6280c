"""The code of a recorded graph as text, without torch or sympy.

It reads like the Python that the graph came from. It is for people: nothing ever parses or runs it.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from .desc import FunctionValue, ListValue, OpaqueValue, SymValue, TensorValue, TupleValue
from .text import clip, shape_text, sym_text, tensor_text, user_line, value_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .desc import StackDesc, Value
    from .desc_graph import GraphModuleDesc, NodeDesc

_WIDTH = 100
_WIDEST = 2000
"""Characters of one statement that are shown."""
_ITEMS = 6
"""Items of a tuple of values whose shapes are shown."""

_OPERATORS = {
    "add": "+", "iadd": "+=", "sub": "-", "isub": "-=", "mul": "*", "imul": "*=", "matmul": "@",
    "truediv": "/", "itruediv": "/=", "floordiv": "//", "mod": "%", "pow": "**", "and_": "&",
    "or_": "|", "xor": "^", "lshift": "<<", "rshift": ">>", "eq": "==", "ne": "!=", "lt": "<",
    "le": "<=", "gt": ">", "ge": ">=", "is_": "is", "is_not": "is not",
}  # fmt: skip


def code_lines(graph: GraphModuleDesc, name: str = "forward") -> list[str]:
    """A graph and the graphs inside it, one statement a line, user lines as comments."""
    lines = [*_graph_lines(graph, name)]
    for inner_name, inner in graph.submodules:
        lines.extend(["", *code_lines(inner, inner_name)])
    return lines


def _graph_lines(graph: GraphModuleDesc, name: str) -> Iterator[str]:
    names = tuple(fx_node.name for fx_node in graph.nodes)
    yield from _signature(name, [n.name for n in graph.nodes if n.op == "placeholder"])
    for attribute, tensor in graph.tensors:
        yield f"    # self.{attribute}: {clip(tensor_text(tensor), _WIDEST)}"
    place: StackDesc | None = None
    for fx_node in graph.nodes:
        if fx_node.op == "placeholder":
            continue
        if fx_node.stack is not None and fx_node.stack != place:
            yield f"    # {user_line(fx_node.stack)}"
            place = fx_node.stack
        statement = clip(_statement(fx_node, names), _WIDEST)
        shape = clip(_shape(fx_node, graph), _WIDEST)
        yield f"    {statement}" + (f"  # {shape}" if shape else "")


def _signature(name: str, inputs: Sequence[str]) -> list[str]:
    line = f"def {name}({', '.join(inputs)}):"
    if len(line) <= _WIDTH:
        return [line]
    wrapped = textwrap.wrap(", ".join(inputs), _WIDTH - 8, break_on_hyphens=False)
    return [f"def {name}(", *(f"        {part}" for part in wrapped), "):"]


def _statement(fx_node: NodeDesc, names: tuple[str, ...]) -> str:
    args = [value_text(arg, names=names) for arg in fx_node.args]
    kwargs = [f"{key}={value_text(value, names=names)}" for key, value in fx_node.kwargs]
    target = fx_node.target.name if isinstance(fx_node.target, FunctionValue) else fx_node.target
    target = target if isinstance(target, str) else value_text(target)
    match fx_node.op:
        case "output":
            return f"return {args[0] if args else ''}".rstrip()
        case "get_attr":
            result = f"self.{target}"
        case "call_method" if args:
            result = f"{args[0]}.{target}({', '.join([*args[1:], *kwargs])})"
        case "call_module":
            result = f"self.{target}({', '.join([*args, *kwargs])})"
        case _:
            result = _call(fx_node.target, target, args, kwargs)
    return f"{fx_node.name} = {result}"


def _call(function: Value, target: str, args: list[str], kwargs: list[str]) -> str:
    kind = function.kind if isinstance(function, FunctionValue) else ""
    plain = target.removeprefix("operator.").removeprefix("_operator.")
    if plain != target and not kwargs:
        if plain == "getitem" and len(args) == 2:
            return f"{args[0]}[{args[1]}]"
        if plain in _OPERATORS and len(args) == 2:
            return f"{args[0]} {_OPERATORS[plain]} {args[1]}"
    if kind in {"op", "packet"}:
        target = f"torch.ops.{target}"
    elif kind == "hop":
        target = f"torch.ops.higher_order.{target}"
    return f"{target}({', '.join([*args, *kwargs])})"


def _shape(fx_node: NodeDesc, graph: GraphModuleDesc) -> str:
    """Dtype and sizes of the result, as far as they were recorded."""
    for key, value in fx_node.meta:
        if key in {"example_value", "val"}:
            return _shape_of(value, graph, 0)
    return ""


def _shape_of(value: Value, graph: GraphModuleDesc, depth: int) -> str:
    match value:
        case TensorValue(tensor=tensor):
            return shape_text(tensor)
        case SymValue(sym=sym):
            return f"{sym.kind} {sym_text(sym)}"
        case OpaqueValue(kind="shared", data=int(index)) if 0 <= index < len(graph.shared):
            return "" if depth else _shape_of(graph.shared[index], graph, depth + 1)
        case TupleValue(items=items) | ListValue(items=items) if depth < 2:
            shapes = [_shape_of(item, graph, depth + 1) or "..." for item in items[:_ITEMS]]
            return f"({', '.join(shapes)}{', ...' if len(items) > _ITEMS else ''})"
        case _:
            return ""
