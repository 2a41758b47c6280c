"""Requirements on a frame's inputs: its runtime asserts, and its symbols that come from data."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch_fakeify.records.rewrite import walk
from torch_fakeify.records.symbol_names import lone_symbol, names_in
from torch_fakeify.records.tensor import MetaTensorDesc
from torch_fakeify.render.code import SourceLines, asserted_expr
from torch_fakeify.render.text import user_line

if TYPE_CHECKING:
    from torch_fakeify.records.frame import CaptureDesc
    from torch_fakeify.records.shape_env import GuardDesc, SymbolDesc
    from torch_fakeify.records.tensor import ExprDesc


class Assert(NamedTuple):
    """A condition that the frame checks at runtime."""

    expr: ExprDesc
    line: str | None
    """The user's line that it comes from, if recorded."""


def asserts_of(desc: CaptureDesc) -> list[Assert]:
    """The runtime asserts of a frame: of its ``ShapeEnv`` and in its graph."""
    env = desc.shape_env
    if env is None:
        return []
    origins = SourceLines(desc.graph)
    found = {
        each.expr: Assert(each.expr, origins.find(each.expr) or user_line(each.stack) or None)
        for each in env.runtime_asserts
    }
    for fx_node in desc.graph.nodes:
        expr = asserted_expr(fx_node, desc.graph)
        if expr is not None:
            found.setdefault(expr, Assert(expr, origins.find(expr)))
    return list(found.values())


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
            from_inputs |= names_in([v for key, v in fx_node.meta if key == "unbacked_bindings"])
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


def guard_line(guard: GuardDesc | None) -> str | None:
    """The user's line that a guard comes from; ``None`` if not recorded."""
    stack = None if guard is None else guard.user_stack
    if stack is None or not stack.frames:
        return None
    frame = stack.frames[-1]
    return f"{frame.file}:{frame.line}"
