"""The code of a recorded graph as text, without torch or sympy.

It resembles the Python source of the graph, for people: it is never parsed or run.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from typing import TYPE_CHECKING

from torch_fakeify.records.tensor import (
    ApplyNode,
    ExprDesc,
    FrameDesc,
    FunctionValue,
    ListValue,
    NamedTupleValue,
    NestedIntDesc,
    NodeValue,
    SliceValue,
    StackDesc,
    SymbolNode,
    SymDesc,
    SymValue,
    TensorValue,
    TupleValue,
)

from .text import clip, shape_text, sym_text, tensor_text, user_line, value_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch_fakeify.records.graph import GraphModuleDesc, NodeDesc
    from torch_fakeify.records.shape_env import SymbolDesc
    from torch_fakeify.records.tensor import Value

_WIDTH = 100
_WIDEST = 2000
"""Most characters of a statement."""
_ITEMS = 6
"""Most items of a tuple whose shapes are shown."""

_ENTRY = re.compile(r'^ *File "(.*)", line (\d+), in (.*)\n? *(.*)$', re.MULTILINE)

_MIRRORED = {"Ge": "Le", "Gt": "Lt"}

_OPERATORS = {
    "add": "+", "iadd": "+=", "sub": "-", "isub": "-=", "mul": "*", "imul": "*=", "matmul": "@",
    "truediv": "/", "itruediv": "/=", "floordiv": "//", "mod": "%", "pow": "**", "and_": "&",
    "or_": "|", "xor": "^", "lshift": "<<", "rshift": ">>", "eq": "==", "ne": "!=", "lt": "<",
    "le": "<=", "gt": ">", "ge": ">=", "is_": "is", "is_not": "is not",
}  # fmt: skip


def code_lines(graph: GraphModuleDesc, name: str = "forward") -> list[str]:
    """Return a graph and its nested graphs as lines of code, with the user's lines as comments."""
    lines = [*_graph_lines(graph, name)]
    for inner_name, inner in graph.submodules:
        lines.extend(["", *code_lines(inner, inner_name)])
    return lines


def _graph_lines(graph: GraphModuleDesc, name: str) -> Iterator[str]:
    names = tuple(fx_node.name for fx_node in graph.nodes)
    inputs = [n.name for n in graph.nodes if n.op == "placeholder"]
    # `self.fc.weight` is no argument.
    yield from _signature(name, [each for each in inputs if each.isidentifier()])
    for attribute, tensor in graph.tensors:
        yield f"    # self.{attribute}: {clip(tensor_text(tensor), _WIDEST)}"
    last = ""
    for fx_node in graph.nodes:
        if fx_node.op == "placeholder":
            continue
        place = user_line(node_stack(fx_node))
        if place and place != last:
            yield f"    # {place}"
            last = place
        line = clip(statement(fx_node, names), _WIDEST)
        shape = clip(result_text(fx_node), _WIDEST)
        yield f"    {line}" + (f"  # {shape}" if shape else "")


class SourceLines:
    """An index from expressions to the user's stacks at which a graph computes or asserts them.

    The stack of a runtime assert takes precedence.
    """

    def __init__(self, graph: GraphModuleDesc) -> None:
        self._ids: dict[object, int] = {}
        self._stacks: dict[int, StackDesc] = {}
        for fx_node in graph.nodes:
            expr = _symbolic_result(fx_node)
            if expr is not None and (stack := node_stack(fx_node)) and stack.frames:
                self._stacks.setdefault(self._id(expr), stack)
        for fx_node in graph.nodes:
            expr = asserted_expr(fx_node, graph)
            if expr is not None and (stack := node_stack(fx_node)) and stack.frames:
                self._stacks[self._id(expr)] = stack

    def find(self, expr: ExprDesc, other: StackDesc | None = None) -> str | None:
        """Return the user's line of an expression, or of one with its sides swapped; else that of another stack."""
        return user_line(self.stack(expr) or other) or None

    def of_symbol(self, symbol: SymbolDesc) -> StackDesc | None:
        """Return the stack at which a graph computes a symbol, else that of the symbol."""
        expr = ExprDesc(nodes=(SymbolNode(symbol.name, symbol.assumptions),))
        return self.stack(expr) or symbol.stack

    def stack(self, expr: ExprDesc) -> StackDesc | None:
        """Return the stack of an expression, or of one with its sides swapped."""
        return self._stacks.get(self._id(expr))

    def _id(self, expr: ExprDesc) -> int:
        """Return a number that is equal for equivalent forms, such as ``a <= b`` and ``b >= a``."""
        ids: list[int] = []
        for expr_node in expr.nodes:
            key: object = expr_node
            if isinstance(expr_node, ApplyNode):
                function, args = expr_node.function, [ids[at] for at in expr_node.args]
                if function in _MIRRORED:
                    function = _MIRRORED[function]
                    args.reverse()
                key = (function, *(sorted(args) if function in {"And", "Or"} else args))
            ids.append(self._ids.setdefault(key, len(self._ids)))
        return ids[-1] if ids else -1


def asserted_expr(fx_node: NodeDesc, graph: GraphModuleDesc) -> ExprDesc | None:
    """Return the condition of a runtime assert in the graph, ``None`` for any other node."""
    target = fx_node.target
    if not isinstance(target, FunctionValue) or "assert_scalar" not in target.name:
        return None
    checked = fx_node.args[0] if fx_node.args else None
    if not isinstance(checked, NodeValue) or not 0 <= checked.index < len(graph.nodes):
        return None
    return _symbolic_result(graph.nodes[checked.index])


def _symbolic_result(fx_node: NodeDesc) -> ExprDesc | None:
    match fx_node.value:
        case SymValue(sym=SymDesc(expr=expr)):
            return expr
        case _:
            return None


def node_stack(fx_node: NodeDesc) -> StackDesc | None:
    """Return the stack of an FX node, also if it was recorded as text."""
    if fx_node.stack is not None:
        return fx_node.stack
    for key, value in fx_node.meta:
        if key == "stack_trace" and isinstance(value, str):
            entries = _ENTRY.findall(value)
            return StackDesc(
                frames=tuple(FrameDesc(f, int(n[:18]), name, code) for f, n, name, code in entries)
            )
    return None


def _signature(name: str, inputs: Sequence[str]) -> list[str]:
    line = f"def {name}({', '.join(inputs)}):"
    if len(line) <= _WIDTH:
        return [line]
    wrapped = textwrap.wrap(", ".join(inputs), _WIDTH - 8, break_on_hyphens=False)
    return [f"def {name}(", *(f"        {part}" for part in wrapped), "):"]


def statement(fx_node: NodeDesc, names: tuple[str, ...]) -> str:
    """Return a node as a line of code, with other nodes by name."""
    args = argument_texts(fx_node, names)
    target = fx_node.target.name if isinstance(fx_node.target, FunctionValue) else fx_node.target
    target = target if isinstance(target, str) else value_text(target)
    match fx_node.op:
        case "output":
            return f"return {args[0] if fx_node.args else ''}".rstrip()
        case "get_attr":
            result = f"self.{target}"
        case "call_method" if fx_node.args:
            result = f"{args[0]}.{target}({', '.join(args[1:])})"
        case "call_module":
            result = f"self.{target}({', '.join(args)})"
        case _:
            result = _call(fx_node, target, args, names)
    return f"{fx_node.name} = {result}"


def argument_texts(fx_node: NodeDesc, names: tuple[str, ...]) -> list[str]:
    """Return the arguments of a node as code, then its keywords."""
    args = [value_text(arg, names=names) for arg in fx_node.args]
    return args + [f"{key}={value_text(value, names=names)}" for key, value in fx_node.kwargs]


def _call(fx_node: NodeDesc, target: str, args: list[str], names: tuple[str, ...]) -> str:
    name = target.removeprefix("operator.").removeprefix("_operator.")
    if name != target and len(args) == 2 and not fx_node.kwargs:
        if name == "getitem":
            return f"{args[0]}[{_index_text(fx_node.args[1], names)}]"
        if name in _OPERATORS:
            return f"{args[0]} {_OPERATORS[name]} {args[1]}"
    kind = fx_node.target.kind if isinstance(fx_node.target, FunctionValue) else ""
    if kind in {"op", "packet"}:
        target = f"torch.ops.{target}"
    elif kind == "hop":
        target = f"torch.ops.higher_order.{target}"
    return f"{target}({', '.join(args)})"


def _index_text(value: Value, names: tuple[str, ...]) -> str:
    """Return an index as written in brackets."""
    match value:
        case SliceValue(start=start, stop=stop, step=step):
            parts = [start, stop] if step is None else [start, stop, step]
            return ":".join("" if p is None else value_text(p, names=names) for p in parts)
        case TupleValue(items=items) if len(items) > 1:
            return ", ".join(
                _index_text(item, names)
                if isinstance(item, SliceValue)
                else value_text(item, names=names)
                for item in items
            )
        case _:
            return value_text(value, names=names)


def operator_name(fx_node: NodeDesc) -> str:
    """Return the last part of the name of what a node calls, without the overload of an operator."""
    target = fx_node.target
    if not isinstance(target, FunctionValue):
        return target.rpartition(".")[2] if isinstance(target, str) else "?"
    name = target.name
    if target.kind == "op":
        name = name.rpartition(".")[0] or name
    return name.rpartition(".")[2]


def operator_counts(graph: GraphModuleDesc) -> Counter[str]:
    """Return how often a graph and its nested graphs call each operator, by the last part of its name."""
    nodes = (fx_node for each in graph.graphs() for fx_node in each.nodes)
    return Counter(operator_name(n) for n in nodes if n.op.startswith("call_"))


def result_text(fx_node: NodeDesc) -> str:
    """Return dtype and sizes of a node's result, empty if they were not recorded."""
    return _shape_of(fx_node.value, 0)


def _shape_of(value: Value, depth: int) -> str:
    match value:
        case TensorValue(tensor=tensor):
            return shape_text(tensor)
        case SymValue(sym=sym):
            return f"{'int' if isinstance(sym, NestedIntDesc) else sym.kind} {sym_text(sym)}"
        case TupleValue(items=items) | ListValue(items=items) | NamedTupleValue(items=items) if (
            depth < 2
        ):
            shapes = [_shape_of(item, depth + 1) or "..." for item in items[:_ITEMS]]
            return f"({', '.join(shapes)}{', ...' if len(items) > _ITEMS else ''})"
        case _:
            return ""
