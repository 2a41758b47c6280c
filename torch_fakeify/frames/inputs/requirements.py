"""Requirements on a frame's inputs: guards, ranges, runtime asserts, and symbols that come from data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import sympy

from torch_fakeify.encoding.exprs import decode_expr
from torch_fakeify.records.rewrite import walk
from torch_fakeify.records.symbol_names import lone_symbol, names_in
from torch_fakeify.records.tensor import MetaTensorDesc
from torch_fakeify.render.code import SourceLines, asserted_expr
from torch_fakeify.render.text import expr_text, user_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch_fakeify.records.frame import CaptureDesc
    from torch_fakeify.records.shape_env import SymbolDesc
    from torch_fakeify.records.tensor import ExprDesc


class Fact(NamedTuple):
    """A condition on the symbols of a frame."""

    expr: Any
    text: str
    line: str | None = None
    """The user's line that it comes from, if recorded."""


def guards_of(desc: CaptureDesc) -> list[Fact]:
    """The guards of a frame."""
    found: list[Fact] = []
    for guard in desc.guards:
        frames = () if guard.user_stack is None else guard.user_stack.frames[-1:]
        line = next((f"{frame.file}:{frame.line}" for frame in frames), None)
        found.append(Fact(decode_expr(guard.expr), expr_text(guard.expr), line))
    return found


def ranges_of(desc: CaptureDesc) -> Iterator[tuple[SymbolDesc, Fact]]:
    """The ends of the ranges of a frame's symbols."""
    for symbol in desc.symbols:
        lone = sympy.Symbol(symbol.name, integer=True)
        for end, relation, sign, location in (
            (symbol.lower, sympy.Ge, ">=", symbol.lower_location),
            (symbol.upper, sympy.Le, "<=", symbol.upper_location),
        ):
            if end is not None:
                line = None if location is None else user_line(location.user) or None
                text = f"{symbol.name} {sign} {expr_text(end)}"
                yield symbol, Fact(relation(lone, decode_expr(end)), text, line)


def asserts_of(desc: CaptureDesc) -> list[Fact]:
    """The runtime asserts of a frame: of its ``ShapeEnv`` and in its graph."""
    if desc.shape_env is None:
        return []
    origins = SourceLines(desc.graph)
    lines: dict[ExprDesc, str | None] = {
        each.expr: origins.find(each.expr) or user_line(each.stack) or None
        for each in desc.runtime_asserts
    }
    for fx_node in desc.graph.nodes:
        expr = asserted_expr(fx_node, desc.graph)
        if expr is not None and expr not in lines:
            lines[expr] = origins.find(expr)
    return [Fact(decode_expr(expr), expr_text(expr), line) for expr, line in lines.items()]


def data_symbols(desc: CaptureDesc) -> dict[str, SymbolDesc]:
    """The unbacked symbols whose value the graph computes from data, by name.

    The other symbols without a hint are sizes of inputs, or inputs themselves.
    """
    unbacked = [
        s for s in desc.symbols if s.hint is None and not s.sources and not s.unbacked_input
    ]
    if not unbacked:
        return {}
    from_inputs: set[str | None] = set()
    for fx_node in desc.graph.nodes:
        if fx_node.op == "placeholder":
            from_inputs |= names_in(
                tuple(v for key, v in fx_node.meta if key == "unbacked_bindings")
            )
    for entry in desc.inputs:
        from_inputs.add(lone_symbol(entry.sym))
        for tensor in walk(entry.tensor, MetaTensorDesc):
            from_inputs.update(
                map(lone_symbol, (*tensor.size, *tensor.stride, tensor.storage_offset))
            )
    return {s.name: s for s in unbacked if s.name not in from_inputs}


def is_integer(symbol: SymbolDesc) -> bool:
    """Whether a symbol is an integer, by its sympy assumptions."""
    return dict(symbol.assumptions).get("integer") is True
