"""The names of a script: valid identifiers that are made of the names of the program."""

from __future__ import annotations

import builtins
from typing import TYPE_CHECKING, Any

import msgspec

from torch_fakeify.records.frame import InputDesc
from torch_fakeify.records.graph import GraphModuleDesc
from torch_fakeify.records.rewrite import Rewriter, walk
from torch_fakeify.records.tensor import ExprDesc, SymbolNode
from torch_fakeify.render.readable_names import InputNames, ReadableNames, identifier
from torch_fakeify.render.text import expr_text

if TYPE_CHECKING:
    from torch_fakeify.records.frame import CaptureDesc

RESERVED = frozenset({
    "args", "backend", "backward", "compiled", "compiled_by", "decorators", "device", "dist", "dynamic",
    "eager", "expected", "fake", "fake_inputs", "found", "frame", "function", "graph", "inf", "inputs",
    "leaves", "limit", "made", "math", "mode", "module", "nan", "one", "options", "other", "outputs",
    "program", "results", "self", "size", "sys", "torch", "unbacked", "values", "view", "weights",
    *dir(builtins),
})  # fmt: skip
"""Names that a script itself uses; variables for nodes avoid them."""


def with_identifiers(desc: CaptureDesc) -> CaptureDesc:
    """Return a frame whose inputs have the names of the program: ``self_fc_weight`` for ``self.fc.weight``.

    A frame with a structured calling convention stays as it is, as its arguments have names.
    """
    if desc.graph.calling is not None:
        return desc
    graphs: list[GraphModuleDesc] = list(walk(desc, GraphModuleDesc, inside=True))
    nodes = {n.name for graph in graphs for n in graph.nodes if n.op != "placeholder"}
    symbols = () if desc.shape_env is None else (s.name for s in desc.shape_env.symbols)
    names = InputNames(desc, identifiers=True, reserved={*RESERVED, *nodes, *symbols})

    def changed(part: Any) -> Any:
        match part:
            case InputDesc() if part.name in names.by_torch_name:
                return msgspec.structs.replace(part, name=names.by_torch_name[part.name])
            case GraphModuleDesc():
                found = tuple(
                    [
                        msgspec.structs.replace(n, name=name, target=name)
                        if n.op == "placeholder" and n.name != name
                        else n
                        for n, name in zip(part.nodes, names.of(part), strict=True)
                    ]
                )
                return msgspec.structs.replace(part, nodes=found)
            case _:
                return part

    return Rewriter(changed)(desc)


class ScriptSymbols:
    """The names of symbols in a script, such as ``x_size_0``."""

    def __init__(self, desc: CaptureDesc) -> None:
        words = ReadableNames(desc)
        symbols = () if desc.shape_env is None else desc.shape_env.symbols
        inputs = {e.sym.expr.nodes[-1]: e.name for e in desc.inputs if e.sym is not None}
        used = {*RESERVED, *(entry.name for entry in desc.inputs)}
        self._names: dict[str, str] = {}
        for symbol in symbols:
            node = SymbolNode(symbol.name, symbol.assumptions)
            name = inputs.get(node)  # the variable that is the symbol
            if name is None:
                name = identifier(words.symbol(symbol.name))
                name = symbol.name if name in used else name
                used.add(name)
            self._names[symbol.name] = name

    def text(self, expr: ExprDesc) -> str:
        """Return an expression as text."""
        nodes = tuple(
            [
                SymbolNode(self._names.get(n.name, n.name), n.assumptions)
                if isinstance(n, SymbolNode)
                else n
                for n in expr.nodes
            ]
        )
        return expr_text(ExprDesc(nodes=nodes))
