"""Edits of recorded sizes: a dynamic dim made static, other example sizes, facts left out.

Expressions are rewritten wherever a frame has them: in its inputs, its graph and its ``ShapeEnv``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import sympy

from .desc import (
    ApplyNode,
    ExprDesc,
    FloatNode,
    IntNode,
    MetaTensorDesc,
    RationalNode,
    SymbolFactDesc,
    SymbolNode,
    SymDesc,
    SymValue,
)
from .exprs import decode_expr, encode_expr
from .graph_edits import FreshIds, replace_nodes
from .rewriting import Rewriter, parts_of
from .storage_map import hint_of, itemsize

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from .desc import IntLike
    from .desc_env import ShapeEnvDesc, SymbolDesc
    from .desc_frame import CaptureDesc, InputDesc

__all__ = ["bound_symbols", "drop_facts", "names_in", "rehint", "specialize", "used_symbols"]


# --- which symbols --------------------------------------------------------------------------------


def names_in(record: Any) -> set[str]:
    """Names of the symbols in the expressions of a record."""
    found: set[str] = set()
    for expr in parts_of(record, ExprDesc):
        found.update(n.name for n in expr.nodes if isinstance(n, SymbolNode))
    return found


def used_symbols(desc: CaptureDesc) -> set[str]:
    """The symbols of a frame's inputs and graph."""
    return names_in((desc.inputs, desc.graph))


def bound_symbols(desc: CaptureDesc) -> set[str]:
    """The symbols whose value a frame can know: from an input's sizes, or from a node that binds it."""
    found: set[str] = set()
    for entry in desc.inputs:
        for tensor in parts_of(entry.tensor, MetaTensorDesc):
            numbers = (*tensor.size, *tensor.stride, tensor.storage_offset, tensor.item_memo)
            found.update(filter(None, map(_lone_symbol, numbers)))
            found |= _parts_bound(tensor)
        name = _lone_symbol(entry.sym)
        if name is not None:
            found.add(name)
    for fx_node in desc.graph.nodes:
        for key, value in fx_node.meta:
            if key == "unbacked_bindings":
                found |= names_in(value)
    return found


def _parts_bound(tensor: MetaTensorDesc) -> set[str]:
    """What the inner tensors of a subclass bind."""
    inner = (tensor.base, tensor.subclass, tensor.functional, tensor.functorch)
    return {
        name
        for part in parts_of(inner, MetaTensorDesc)
        for name in map(_lone_symbol, (*part.size, *part.stride))
        if name is not None
    }


def _lone_symbol(number: Any) -> str | None:
    if isinstance(number, SymDesc) and len(number.expr.nodes) == 1:
        expr_node = number.expr.nodes[0]
        if isinstance(expr_node, SymbolNode):
            return expr_node.name
    return None


# --- dynamic to static ----------------------------------------------------------------------------


def specialize(desc: CaptureDesc, names: Collection[str]) -> CaptureDesc | None:
    """The frame with the recorded values in the place of symbols.

    A symbol whose value follows from these goes with them. An input that is such a symbol goes, too.

    Args:
        desc: the frame.
        names: of symbols that have a hint.

    Returns:
        The frame; ``None`` if a symbol has no hint, or a guard does not hold at the hints.
    """
    env = desc.shape_env
    if env is None:
        return None
    values: dict[Any, Any] = {}
    for symbol in env.symbols:
        if symbol.name in names:
            if symbol.hint is None or not has_number(symbol):
                return None
            values[_sympy_symbol(symbol)] = decode_expr(symbol.hint)
    by_symbol = [
        (decode_expr(entry.symbol), decode_expr(entry.expr).xreplace(values))
        for entry in env.replacements
    ]
    values.update((s, e) for s, e in by_symbol if not e.free_symbols)
    edit = _Substitution(values)
    facts = edit.env(env)
    if facts is None:
        return None
    rewrite = Rewriter(edit.part)
    desc = msgspec.structs.replace(
        desc, inputs=rewrite(desc.inputs), graph=rewrite(desc.graph), shape_env=facts
    )
    return _without_constant_inputs(desc)


def has_number(symbol: SymbolDesc) -> bool:
    """Whether a symbol's hint is a number, and not that of a ragged dim."""
    return symbol.hint is not None and isinstance(symbol.hint.nodes[-1], _NUMBERS)


_NUMBERS = (IntNode, FloatNode, RationalNode)


def _without_constant_inputs(desc: CaptureDesc) -> CaptureDesc | None:
    """The frame without inputs that are symbolic scalars no more."""
    constants = {
        i: entry.sym for i, entry in enumerate(desc.inputs) if isinstance(entry.sym, (int, float))
    }
    if not constants:
        return desc
    cleared = tuple(
        msgspec.structs.replace(entry, sym=None) if i in constants else entry
        for i, entry in enumerate(desc.inputs)
    )
    return replace_nodes(msgspec.structs.replace(desc, inputs=cleared), constants)


def _sympy_symbol(symbol: SymbolDesc) -> sympy.Symbol:
    record = ExprDesc(nodes=(SymbolNode(symbol.name, symbol.assumptions),))
    return decode_expr(record)  # pyright: ignore[reportReturnType]


class _Substitution:
    """Values in the place of symbols."""

    def __init__(self, values: Mapping[Any, Any]) -> None:
        self._values = values
        self._names = {symbol.name for symbol in values}
        self._done: dict[ExprDesc, ExprDesc] = {}

    def expr(self, desc: ExprDesc) -> ExprDesc:
        """An expression with the values in it."""
        made = self._done.get(desc)
        if made is None:
            made = desc
            if names_in(desc) & self._names:
                made = encode_expr(decode_expr(desc).xreplace(self._values))
            self._done[desc] = made
        return made

    def part(self, part: Any) -> Any:
        """A part of a record, whose own parts have the values already."""
        match part:
            case ExprDesc():
                return self.expr(part)
            case SymDesc():
                return _number_of(part)
            case SymValue(sym=int() | float() as number):
                return number
            case MetaTensorDesc():
                return self._tensor(part)
            case _:
                return part

    def _tensor(self, tensor: MetaTensorDesc) -> MetaTensorDesc:
        facts = tuple(f for f in tensor.symbols if f.name not in self._names)
        changes: dict[str, Any] = {}
        if len(facts) != len(tensor.symbols):
            changes["symbols"] = facts
        if isinstance(tensor.item_memo, (int, float)):
            changes["item_memo"] = None
        context = tensor.symbolic_context
        if context is not None and context.dynamic_sizes:
            dims = zip(context.dynamic_sizes, tensor.size, strict=False)
            policy = tuple("STATIC" if isinstance(n, int) else dim for dim, n in dims)
            if len(policy) == len(context.dynamic_sizes) and policy != context.dynamic_sizes:
                changes["symbolic_context"] = msgspec.structs.replace(context, dynamic_sizes=policy)
        return msgspec.structs.replace(tensor, **changes) if changes else tensor

    def env(self, env: ShapeEnvDesc) -> ShapeEnvDesc | None:
        """The facts about the other symbols; ``None`` if one does not hold."""
        changes: dict[str, Any] = {
            "symbols": tuple(s for s in env.symbols if s.name not in self._names),
            "orders": tuple(
                msgspec.structs.replace(
                    order, keys=tuple(k for k in order.keys if k is None or not self._names_of(k))
                )
                for order in env.orders
            ),
            "counter": (),
        }
        guards = [msgspec.structs.replace(g, expr=self.expr(g.expr)) for g in env.guards]
        asserts = [msgspec.structs.replace(a, expr=self.expr(a.expr)) for a in env.runtime_asserts]
        if any(_truth(fact.expr) is False for fact in (*guards, *asserts)):
            return None
        changes["guards"] = tuple(g for g in guards if _truth(g.expr) is None)
        changes["runtime_asserts"] = tuple(a for a in asserts if _truth(a.expr) is None)
        changes["axioms"] = tuple(a for a in env.axioms if not self._names_of(a))
        changes["divisible"] = tuple(
            made
            for made in map(self.expr, env.divisible)
            if any(isinstance(n, SymbolNode) for n in made.nodes)
        )
        changes["replacements"] = tuple(
            msgspec.structs.replace(r, expr=self.expr(r.expr))
            for r in env.replacements
            if not self._names_of(r.symbol)
        )
        for field in _TABLES:
            entries = getattr(env, field)
            changes[field] = tuple(entry for entry in entries if not self._names_of(entry))
        return msgspec.structs.replace(env, **changes)

    def _names_of(self, record: Any) -> bool:
        return bool(names_in(record) & self._names)


_TABLES = (
    "unbacked_renamings",
    "hint_overrides",
    "duck_shapes",
    "source_to_var",
    "source_to_symbol",
    "pending_fresh_unbacked_symbols",
    "ignorable_fresh_unbacked_symbols",
    "exclusion_constraints",
    "specializations",
    "shape_ids",
    "spec_symbols",
    "pending_assumptions",
)
"""Tables whose entries go with the symbols that they name."""


def _truth(expr: ExprDesc) -> bool | None:
    decoded = decode_expr(expr)
    if decoded == sympy.true:
        return True
    return False if decoded == sympy.false else None


def _number_of(sym: SymDesc) -> Any:
    """A symbolic scalar, or the number that it has become."""
    nodes = sym.expr.nodes
    if any(isinstance(n, SymbolNode) for n in nodes):
        return sym
    if any(isinstance(n, ApplyNode) for n in nodes) or sym.constant:
        return sym
    value: Any = decode_expr(sym.expr)
    if sym.kind == "int":
        return int(value) if value.is_Integer else sym
    if sym.kind == "bool":
        return bool(value)
    return float(value)


# --- other example sizes --------------------------------------------------------------------------


def rehint(desc: CaptureDesc, values: Mapping[str, int]) -> CaptureDesc | None:
    """The frame as if it had been recorded at other sizes that its guards admit.

    Args:
        desc: the frame.
        values: of all symbols that are sizes, by name; they satisfy the guards.

    Returns:
        The frame; ``None`` if a tensor is of a kind whose number of bytes is not known.
    """
    env = desc.shape_env
    if env is None:
        return None
    numbers = {
        _sympy_symbol(s): sympy.Integer(values[s.name]) for s in env.symbols if s.name in values
    }
    hints: dict[ExprDesc, Any] = {}

    def part(part: Any) -> Any:
        if isinstance(part, SymbolFactDesc) and part.name in values:
            return msgspec.structs.replace(part, hint=values[part.name])
        if not isinstance(part, SymDesc) or part.hint is None or isinstance(part.hint, tuple):
            return part
        if not names_in(part.expr) & values.keys():
            return part
        if part.expr not in hints:
            hints[part.expr] = decode_expr(part.expr).xreplace(numbers)
        made = hints[part.expr]
        if made.free_symbols:
            return part
        kind = {"int": int, "float": float, "bool": bool}[part.kind]
        return msgspec.structs.replace(part, hint=kind(made))

    rewrite = Rewriter(part)
    inputs: list[InputDesc] = []
    for entry in rewrite(desc.inputs):
        if entry.tensor is None or not names_in(entry.tensor):
            inputs.append(entry)
            continue
        tensor = with_bytes(entry.tensor)
        if tensor is None:
            return None
        inputs.append(msgspec.structs.replace(entry, tensor=tensor))
    symbols = tuple(
        msgspec.structs.replace(s, hint=encode_expr(sympy.Integer(values[s.name])))
        if s.name in values and s.hint is not None
        else s
        for s in env.symbols
    )
    # A size has no symbol of its own because it was equal to another; what it is now is another.
    facts = msgspec.structs.replace(env, symbols=symbols, duck_shapes=())
    return msgspec.structs.replace(
        desc, inputs=tuple(inputs), graph=rewrite(desc.graph), shape_env=facts
    )


def with_bytes(tensor: MetaTensorDesc) -> MetaTensorDesc | None:
    """A plain tensor whose storage is as large as its sizes need; ``None`` for another kind."""
    if not is_plain(tensor) or tensor.storage is None:
        return None
    extent = 1 + _hint(tensor.storage_offset)
    for n, step in zip(tensor.size, tensor.stride, strict=True):
        if _hint(n) == 0:
            extent = 0
            break
        extent += (_hint(n) - 1) * _hint(step)
    storage = msgspec.structs.replace(tensor.storage, nbytes=extent * itemsize(tensor.dtype))
    return msgspec.structs.replace(tensor, storage=storage)


def is_plain(tensor: MetaTensorDesc) -> bool:
    """Whether a tensor is strided, no view, and nothing is inside it or around it."""
    others = (
        tensor.base, tensor.sparse, tensor.subclass, tensor.functorch, tensor.functional,
        tensor.nested_int, tensor.grad, tensor.view_calls,
    )  # fmt: skip
    return tensor.layout == "strided" and not any(part is not None for part in others)


def _hint(n: IntLike) -> int:
    """A size as a number; 1 where there is none."""
    known = hint_of(n)
    return 1 if known is None else known


# --- facts ----------------------------------------------------------------------------------------


def drop_facts(
    desc: CaptureDesc, *, guards: Collection[int] = (), asserts: Collection[int] = ()
) -> CaptureDesc | None:
    """The frame without some guards and runtime asserts, and without what follows from them.

    What the ``ShapeEnv`` concluded (axioms, what divides what) cannot be told apart by the guard
    that it came from, so it goes with the first; ranges and equal sizes stay.
    """
    env = desc.shape_env
    if env is None:
        return None
    return msgspec.structs.replace(
        desc,
        shape_env=msgspec.structs.replace(
            env,
            guards=tuple(g for i, g in enumerate(env.guards) if i not in guards),
            runtime_asserts=tuple(a for i, a in enumerate(env.runtime_asserts) if i not in asserts),
            num_deferred_runtime_asserts=0 if asserts else env.num_deferred_runtime_asserts,
            axioms=(),
            divisible=(),
        ),
    )


def drop_symbols(desc: CaptureDesc, names: Collection[str]) -> CaptureDesc | None:
    """The frame without symbols that neither its inputs nor its graph have, and all facts about them."""
    env = desc.shape_env
    if env is None or used_symbols(desc) & set(names):
        return None
    symbols = {_sympy_symbol(s): sympy.Integer(0) for s in env.symbols if s.name in names}
    edit = _Substitution(symbols)
    known = set(names)
    facts = msgspec.structs.replace(
        env,
        guards=tuple(g for g in env.guards if not names_in(g.expr) & known),
        runtime_asserts=tuple(
            a for a in env.runtime_asserts if not names_in((a.symbol, a.expr)) & known
        ),
        divisible=tuple(d for d in env.divisible if not names_in(d) & known),
        replacements=tuple(r for r in env.replacements if not names_in((r.symbol, r.expr)) & known),
    )
    made = edit.env(facts)
    return None if made is None else msgspec.structs.replace(desc, shape_env=made)


def is_bound(desc: CaptureDesc) -> bool:
    """Whether every symbol of the graph, and of guards and runtime asserts, has what binds it."""
    env = desc.shape_env
    facts = () if env is None else (env.guards, env.runtime_asserts)
    return used_symbols(desc) | names_in(facts) <= bound_symbols(desc) | _replaced(desc)


def _replaced(desc: CaptureDesc) -> set[str]:
    env = desc.shape_env
    return set() if env is None else names_in(tuple(r.symbol for r in env.replacements))


# --- other static sizes ---------------------------------------------------------------------------


def static_sizes(desc: CaptureDesc) -> list[int]:
    """The numbers above 2 among the static sizes of plain inputs, largest first."""
    tensors = [entry.tensor for entry in desc.inputs if entry.tensor is not None]
    found = {n for t in tensors if is_plain(t) for n in t.size if isinstance(n, int) and n > 2}
    return sorted(found, reverse=True)


def resize(desc: CaptureDesc, old: int, new: int) -> CaptureDesc | None:
    """The frame with one number in the place of another among the sizes of its inputs.

    The graph stays: its values have to be propagated again.

    Returns:
        The frame; ``None`` if an input with such a size is no plain tensor without gaps.
    """
    ids = FreshIds(desc)
    shared = shared_storages(desc)
    inputs: list[InputDesc] = []
    for entry in desc.inputs:
        tensor = entry.tensor
        if tensor is None or old not in tensor.size:
            inputs.append(entry)
            continue
        made = _dense(tensor, tuple(new if n == old else n for n in tensor.size))
        if made is None or (tensor.storage is not None and tensor.storage.id in shared):
            return None
        inputs.append(msgspec.structs.replace(entry, tensor=ids.renumbered(made)))
    return msgspec.structs.replace(desc, inputs=tuple(inputs))


def shared_storages(desc: CaptureDesc) -> set[int]:
    """Ids of the storages that several inputs have."""
    tensors = [entry.tensor for entry in desc.inputs if entry.tensor is not None]
    ids = [t.storage.id for t in tensors if t.storage is not None]
    return {one for one in ids if ids.count(one) > 1}


def contiguous(tensor: MetaTensorDesc) -> MetaTensorDesc | None:
    """A plain tensor with its dims in row-major order and no gaps; ``None`` for another kind."""
    order = list(range(tensor.ndim))
    steps = _steps(tensor.size, order)
    return with_bytes(
        msgspec.structs.replace(tensor, stride=tuple(steps[at] for at in order), storage_offset=0)
    )


def _dense(tensor: MetaTensorDesc, size: tuple[IntLike, ...]) -> MetaTensorDesc | None:
    """A tensor of another size whose dims lie in memory in the same order; it must have no gaps."""
    order = sorted(range(tensor.ndim), key=lambda at: (-_hint(tensor.stride[at]), at))
    before = _steps(tensor.size, order)
    gaps = any(
        before[at] != tensor.stride[at] and _hint(tensor.size[at]) > 1 for at in range(tensor.ndim)
    )
    if gaps or not is_plain(tensor) or _hint(tensor.storage_offset):
        return None
    steps = _steps(size, order)
    made = msgspec.structs.replace(
        tensor, size=size, stride=tuple(steps[at] for at in range(tensor.ndim))
    )
    return with_bytes(made)


def _steps(size: tuple[IntLike, ...], order: list[int]) -> dict[int, IntLike]:
    """Strides of a tensor without gaps whose dims lie in this order, the outermost first."""
    steps: dict[int, IntLike] = {}
    step: IntLike = 1
    for at in reversed(order):
        steps[at] = step
        step = _times(step, size[at])
    return steps


def _times(a: IntLike, b: IntLike) -> IntLike:
    if isinstance(a, int) and isinstance(b, int):
        return a * max(b, 1)
    exprs: list[Any] = [
        decode_expr(n.expr) if isinstance(n, SymDesc) else sympy.Integer(_hint(n)) for n in (a, b)
    ]
    known = all(not isinstance(n, SymDesc) or n.hint is not None for n in (a, b))
    hint = _hint(a) * _hint(b) if known else None
    return SymDesc(expr=encode_expr(exprs[0] * exprs[1]), hint=hint)
