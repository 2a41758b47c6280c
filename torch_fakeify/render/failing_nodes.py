"""The nodes of a frame at which its backend failed, found in the text of the exception. Imports no torch.

A message names a node (``While executing %relu_1``), its operator (``no lowering for aten.foo``) or the
user's line (``File "model.py", line 12``). A name alone may be that of another graph, which the backend
made of this one: where the message says the target of the node, it must be the same target.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from torch_fakeify.records.tensor import FunctionValue

from .code import node_stack, statement
from .data_dependent import without_known
from .nested_graphs import NodeAt, all_graphs
from .text import clip, user_line

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch_fakeify.records.frame import CaptureDesc
    from torch_fakeify.records.graph import NodeDesc
    from torch_fakeify.records.tensor import StackDesc

_MOST = 5
"""Most nodes that one message can name; more are no answer."""
_MESSAGE = 100_000
"""Most characters of a message that are read, from each end half of them."""
_LONGEST = 400

_NAME = re.compile(r"([%`'\"]|\bnodes?:? [`'\"%]?|)\b([A-Za-z_]\w*)", re.ASCII)
_EXECUTED = re.compile(
    r"%(\w+) : (?:\[[^\]]*\] )?= \w+\[target=(?:torch\.ops\.)?([\w.]+)\]", re.ASCII
)
_LINE = re.compile(r"(?:File \"([^\"\n]+)\", line (\d+)|([\w./\\-]+\.py):(\d+))")
_TARGET = re.compile(
    r"(?:\b(?:target|operators?|ops?|function|unsupported|unknown)[:=]? *[`'\"]?"
    r"|\b(?:code|kernel|support|lowering|implementation|rule|converter|decomposition|translation)s?"
    r" (?:for|of) [`'\"]?"
    r"|\b(?:compile|lower|support|handle|convert|translate|implement)(?:s|d|ed)? [`'\"]?"
    r"|[`'\"])([A-Za-z_][\w.:]*)",
    re.ASCII | re.IGNORECASE,
)
"""A name of an operator after a word that says it is one, or in quotes."""
_MISSING = re.compile(r"\bha(?:s|ve|d) no [`'\"]?([A-Za-z_][\w.:]*)", re.ASCII)
_DOTTED = re.compile(r"\b[A-Za-z_]\w*(?:(?:\.|::)\w+)+", re.ASCII)


class FailingNodes(NamedTuple):
    """The nodes at which a backend failed, in the order of the graphs."""

    nodes: tuple[NodeAt, ...]
    reason: str
    """How the message tells: ``named in the message``."""


def find_failing_nodes(desc: CaptureDesc) -> FailingNodes | None:
    """Return the nodes at which the backend of a frame failed; ``None`` if its message does not tell."""
    if desc.failure is None or not desc.failure.message:
        return None
    message = without_known(desc.failure.message)
    if len(message) > _MESSAGE:
        message = f"{message[: _MESSAGE // 2]}\n{message[-_MESSAGE // 2 :]}"
    nodes = [
        (NodeAt(number, at), fx_node)
        for number, each in enumerate(all_graphs(desc.graph))
        for at, fx_node in enumerate(each.graph.nodes)
        if fx_node.op != "output"
    ]
    calls = [(node, fx_node) for node, fx_node in nodes if fx_node.op != "placeholder"]
    named, on_line = _named(message, nodes), _on_line(message, calls)
    if on_line:  # the user's lines are those of all graphs that are made of this one
        close = [node for node in on_line if node in named]
        close = close or _of_target(_targets(message, is_loose=True), calls, on_line)
        if close:
            return _found(close, "named in the message, as is its line")
        return _found(on_line, "its line is in the message")
    if named:
        return _found(named, "named in the message")
    of_target = _of_target(_targets(message, is_loose=False), calls)
    return _found(of_target, "the only call of an operator that the message names", most=1)


def failing_lines(desc: CaptureDesc, shown: CaptureDesc) -> list[str]:
    """Return each failing node as code, with how it was found and its line, for the terminal.

    ``shown`` is the same frame with the names to print.
    """
    found = find_failing_nodes(desc)
    if found is None:
        return []
    graphs = all_graphs(shown.graph)
    lines: list[str] = []
    for node in found.nodes:
        graph = graphs[node.graph].graph
        fx_node = graph.nodes[node.position]
        names = tuple([each.name for each in graph.nodes])
        reason = "; ".join(filter(None, [found.reason, user_line(node_stack(fx_node))]))
        lines.append(f"{clip(statement(fx_node, names), _LONGEST)}  ({reason})")
    return lines


def failing_stacks(desc: CaptureDesc) -> list[StackDesc | None]:
    """Return the stack of each failing node, with which the program was traced; none if the message tells none."""
    found = find_failing_nodes(desc)
    graphs = all_graphs(desc.graph)
    nodes = () if found is None else found.nodes
    return [node_stack(graphs[node.graph].graph.nodes[node.position]) for node in nodes]


def _found(nodes: list[NodeAt], reason: str, most: int = _MOST) -> FailingNodes | None:
    return FailingNodes(tuple(nodes), reason) if 0 < len(nodes) <= most else None


_Nodes = list[tuple[NodeAt, "NodeDesc"]]


def _named(message: str, nodes: _Nodes) -> list[NodeAt]:
    """Return the nodes that the message names, operations before placeholders."""
    executed = dict(_EXECUTED.findall(message))
    if executed:  # a node as torch prints it, whose arguments are no answer
        return [
            node
            for node, fx_node in nodes
            if fx_node.name in executed and _is_target(executed[fx_node.name], fx_node)
        ]
    words = {
        name
        for mark, name in _NAME.findall(message)
        if mark or "_" in name or name[-1].isdigit()  # else it may be a word of English
    }
    found = [(node, fx_node.op) for node, fx_node in nodes if fx_node.name in words]
    return [node for node, op in found if op != "placeholder"] or [node for node, _ in found]


def _is_target(said: str, fx_node: NodeDesc) -> bool:
    """Return whether the target that a message says of a node is its target."""
    name = _target(fx_node)
    return said == name or said.rpartition(".")[2] == name.rpartition(".")[2]


def _target(fx_node: NodeDesc) -> str:
    target = fx_node.target
    if isinstance(target, FunctionValue):
        return target.name
    return target if isinstance(target, str) else ""


def _on_line(message: str, nodes: _Nodes) -> list[NodeAt]:
    """Return the nodes of the last line in the message that is a line of any node."""
    said = [found.groups(default="") for found in _LINE.finditer(message)]
    if not said:
        return []
    of_line = _nodes_by_line(nodes)
    for file, line, other, number in reversed(said):
        path = (file or other).replace("\\", "/")
        if len(line or number) >= 10:  # that is no line
            continue
        at_line = of_line.get((path.rpartition("/")[2], int(line or number)), ())
        found = [node for recorded, node in at_line if _is_same_file(recorded, path)]
        if found:
            return found
    return []


def _nodes_by_line(nodes: _Nodes) -> dict[tuple[str, int], list[tuple[str, NodeAt]]]:
    """Return the nodes by base name of the file and number of the line, for all lines of their stacks."""
    found: dict[tuple[str, int], list[tuple[str, NodeAt]]] = {}
    for node, fx_node in nodes:
        stack = node_stack(fx_node)
        for frame in () if stack is None else stack.frames:
            key = frame.file.rpartition("/")[2], frame.line
            found.setdefault(key, []).append((frame.file, node))
    return found


def _is_same_file(a: str, b: str) -> bool:
    """Return whether two paths are of one file, of which one or both may be shortened."""
    return a == b or a.endswith(f"/{b.rpartition('.../')[2]}") or b.endswith(f"/{a}")


def _targets(message: str, *, is_loose: bool) -> set[str]:
    """Return the names of operators in a message; the loose ones without overload and namespace, too."""
    found: set[str] = set()
    for each in (each for one in (_TARGET, _MISSING, _DOTTED) for each in one.findall(message)):
        name = each.replace("::", ".").rstrip(".").removeprefix("torch.ops.")
        base = name.rpartition(".")[0]
        found |= {name, base}
        if is_loose:
            found |= {name.rpartition(".")[2], base.rpartition(".")[2]}
    return found


def _of_target(said: set[str], nodes: _Nodes, among: Collection[NodeAt] = ()) -> list[NodeAt]:
    """Return the nodes whose operator is named, with or without overload and namespace."""
    found: list[NodeAt] = []
    for node, fx_node in nodes:
        name = _target(fx_node)
        target = fx_node.target
        is_overload = isinstance(target, FunctionValue) and target.kind == "op"
        short = name.rpartition(".")[0] if is_overload else name
        if name and said & {name, short, short.rpartition(".")[2]}:
            found.append(node)
    return [node for node in found if node in among] if among else found
