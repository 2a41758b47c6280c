"""Edits of recorded sizes: specialize dynamic dims, change example sizes, drop facts.

Expressions are rewritten wherever a frame has them: in its inputs, its graph and its ``ShapeEnv``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import sympy

from torch_fakeify.encoding.exprs import decode_expr, encode_expr
from torch_fakeify.frames.inputs.size_names import symbol_of
from torch_fakeify.records.aliasing import hint_of, itemsize
from torch_fakeify.records.rewrite import Rewriter, walk
from torch_fakeify.records.symbol_names import has_number, lone_symbol, names_in
from torch_fakeify.records.tensor import (
    ApplyNode,
    ExprDesc,
    MetaStorageDesc,
    MetaTensorDesc,
    SymbolFactDesc,
    SymbolNode,
    SymDesc,
    SymValue,
)

from .graph_edits import FreshIds, replace_nodes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from torch_fakeify.records.frame import CaptureDesc, InputDesc
    from torch_fakeify.records.graph import NodeDesc
    from torch_fakeify.records.shape_env import ShapeEnvDesc, SymbolDesc
    from torch_fakeify.records.tensor import IntLike

# --- which symbols --------------------------------------------------------------------------------


def used_symbols(desc: CaptureDesc) -> set[str]:
    """Names of the symbols in a frame's inputs and graph."""
    return names_in((desc.inputs, desc.graph))


def bound_symbols(desc: CaptureDesc) -> set[str]:
    """Names of the symbols that an input's sizes or a node of the graph binds."""
    numbers: list[Any] = []
    for entry in desc.inputs:
        numbers.append(entry.sym)
        for tensor in walk(entry.tensor, MetaTensorDesc):
            numbers += (*tensor.size, *tensor.stride, tensor.storage_offset, tensor.item_memo)
            inner = (tensor.base, tensor.subclass, tensor.functional, tensor.functorch)
            for part in walk(inner, MetaTensorDesc):
                numbers += (*part.size, *part.stride)
    return _bound_by(desc.graph.nodes) | set(filter(None, map(lone_symbol, numbers)))


def _bound_by(nodes: Iterable[NodeDesc]) -> set[str]:
    """Names of the unbacked symbols that nodes bind."""
    return names_in(tuple(v for n in nodes for key, v in n.meta if key == "unbacked_bindings"))


# --- dynamic to static ----------------------------------------------------------------------------


def specialize(desc: CaptureDesc, names: Collection[str]) -> CaptureDesc | None:
    """Replace symbols of a frame by their recorded values.

    Symbols whose value follows from these are replaced too, and scalar inputs that become constant are
    removed. The result is ``None`` if a symbol has no hint, or a guard does not hold at the hints.
    """
    env = desc.shape_env
    if env is None:
        return None
    values: dict[Any, Any] = {}
    for symbol in env.symbols:
        if symbol.name in names:
            if symbol.hint is None or not has_number(symbol):
                return None
            values[symbol_of(symbol)] = decode_expr(symbol.hint)
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


def fix_unbacked(desc: CaptureDesc, values: Mapping[str, int]) -> CaptureDesc | None:
    """Replace unbacked sizes of a frame's inputs by numbers, by the name of the symbol.

    The result is ``None`` if a fact does not hold, or the graph itself binds such a symbol.
    """
    env = desc.shape_env
    bound = _bound_by(n for n in desc.graph.nodes if n.op != "placeholder")
    if env is None or bound & values.keys():
        return None
    nodes = tuple(
        msgspec.structs.replace(n, meta=tuple(m for m in n.meta if m[0] != "unbacked_bindings"))
        if n.op == "placeholder" and names_in(n.meta) & values.keys()
        else n
        for n in desc.graph.nodes
    )
    frame = msgspec.structs.replace(
        desc,
        graph=msgspec.structs.replace(desc.graph, nodes=nodes),
        shape_env=msgspec.structs.replace(env, symbols=_hinted(env, values)),
    )
    made = specialize(frame, values.keys())
    return None if made is None else _with_storages(made, desc.inputs)


def _hinted(env: ShapeEnvDesc, values: Mapping[str, int]) -> tuple[SymbolDesc, ...]:
    return tuple(
        msgspec.structs.replace(s, hint=encode_expr(sympy.Integer(values[s.name])))
        if s.name in values
        else s
        for s in env.symbols
    )


def _without_constant_inputs(desc: CaptureDesc) -> CaptureDesc:
    constants = {
        i: entry.sym for i, entry in enumerate(desc.inputs) if isinstance(entry.sym, (int, float))
    }
    return replace_nodes(desc, constants) if constants else desc


class _Substitution:
    def __init__(self, values: Mapping[Any, Any]) -> None:
        self._values = values
        self._names = {symbol.name for symbol in values}

    def expr(self, desc: ExprDesc) -> ExprDesc:
        if not self._names_of(desc):
            return desc
        return encode_expr(decode_expr(desc).xreplace(self._values))

    def part(self, part: Any) -> Any:
        """Substitute in a part of a record whose children were already rewritten."""
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
        """The remaining facts of a ``ShapeEnv``; ``None`` if one is false."""
        changes: dict[str, Any] = {
            "symbols": tuple(s for s in env.symbols if s.name not in self._names),
            "orders": tuple(
                msgspec.structs.replace(
                    order, keys=tuple(k for k in order.keys if not self._names_of(k))
                )
                for order in env.orders
            ),
            "counter": (),
        }
        for field in ("guards", "runtime_asserts"):
            facts = [
                msgspec.structs.replace(f, expr=self.expr(f.expr)) for f in getattr(env, field)
            ]
            if any(decode_expr(fact.expr) == sympy.false for fact in facts):
                return None
            changes[field] = tuple(f for f in facts if decode_expr(f.expr) != sympy.true)
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
        for field in env.__struct_fields__:
            entries: Any = getattr(env, field)
            if field not in changes and isinstance(entries, tuple):
                changes[field] = tuple(entry for entry in entries if not self._names_of(entry))
        return msgspec.structs.replace(env, **changes)

    def _names_of(self, record: Any) -> bool:
        return bool(names_in(record) & self._names)


def _number_of(sym: SymDesc) -> Any:
    """A symbolic scalar, or its number if it became constant."""
    if sym.constant or any(isinstance(n, (SymbolNode, ApplyNode)) for n in sym.expr.nodes):
        return sym
    value: Any = decode_expr(sym.expr)
    if sym.kind == "int" and not value.is_Integer:
        return sym
    return _KINDS[sym.kind](value)


_KINDS = {"int": int, "float": float, "bool": bool}


# --- other example sizes --------------------------------------------------------------------------


def rehint(desc: CaptureDesc, values: Mapping[str, int]) -> CaptureDesc | None:
    """Change the example sizes of a frame to others that its guards admit.

    ``values`` has all symbols that are sizes, by name. The result is ``None`` if the storage size of a
    tensor cannot be computed.
    """
    env = desc.shape_env
    if env is None:
        return None
    numbers = {symbol_of(s): sympy.Integer(values[s.name]) for s in env.symbols if s.name in values}
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
        return msgspec.structs.replace(part, hint=_KINDS[part.kind](made))

    rewrite = Rewriter(part)
    backed = {
        s.name: values[s.name] for s in env.symbols if s.name in values and s.hint is not None
    }
    # A duck-shaped size shares the symbol of an equal size, which may differ now.
    facts = msgspec.structs.replace(env, symbols=_hinted(env, backed), duck_shapes=())
    made = msgspec.structs.replace(
        desc, inputs=rewrite(desc.inputs), graph=rewrite(desc.graph), shape_env=facts
    )
    return _with_storages(made, desc.inputs)


def _with_storages(desc: CaptureDesc, before: tuple[InputDesc, ...]) -> CaptureDesc | None:
    """Set the bytes of storages after the sizes of inputs have changed; ``None`` if they are not known."""
    nbytes = _storage_bytes(before, desc.inputs)
    if nbytes is None:
        return None

    def resized(part: Any) -> Any:
        if isinstance(part, MetaStorageDesc) and part.id in nbytes and isinstance(part.nbytes, int):
            return msgspec.structs.replace(part, nbytes=nbytes[part.id])
        return part

    rewrite = Rewriter(resized)
    return msgspec.structs.replace(desc, inputs=rewrite(desc.inputs), graph=rewrite(desc.graph))


def _storage_bytes(
    before: tuple[InputDesc, ...], after: tuple[InputDesc, ...]
) -> dict[int, int] | None:
    """Compute the bytes, by id, of the storages whose tensors changed size; ``None`` if one cannot be.

    Bytes beyond the tensors of a storage are preserved.
    """
    found: dict[int, tuple[int, int, int]] = {}
    moved: set[int] = set()
    pairs = zip(*(walk(each, MetaTensorDesc, inside=True) for each in (before, after)), strict=True)
    for old, new in pairs:
        if any(part is not None for part in (new.subclass, new.functorch, new.functional)):
            continue  # its inner tensors have the bytes
        if new.layout != "strided":
            if names_in((old.size, old.stride)):
                return None
            continue
        if new.storage is None or not isinstance(old.storage.nbytes, int):
            continue
        nbytes, *extents = found.get(new.storage.id, (old.storage.nbytes, 0, 0))
        now = [max(n, _extent_bytes(t)) for n, t in zip(extents, (old, new), strict=True)]
        found[new.storage.id] = nbytes, now[0], now[1]
        if names_in((old.size, old.stride, old.storage_offset)):
            moved.add(new.storage.id)
    return {at: now + max(0, n - was) for at, (n, was, now) in found.items() if at in moved}


def _with_bytes(tensor: MetaTensorDesc) -> MetaTensorDesc | None:
    """Set the storage size of a strided tensor to what its sizes need; ``None`` for another kind."""
    if not is_strided_base(tensor) or tensor.storage is None:
        return None
    storage = msgspec.structs.replace(tensor.storage, nbytes=_extent_bytes(tensor))
    return msgspec.structs.replace(tensor, storage=storage)


def _extent_bytes(tensor: MetaTensorDesc) -> int:
    """Bytes from the start of its storage to the end of a tensor."""
    if 0 in map(size_hint, tensor.size):
        return 0
    return extent_hint(tensor) * itemsize(tensor.dtype)


def extent_hint(tensor: MetaTensorDesc, default: int = 1) -> int:
    """Elements from the start of its storage to the end of a tensor that is not empty, see `size_hint`."""
    dims = zip(tensor.size, tensor.stride, strict=True)
    steps = ((size_hint(n, default) - 1) * size_hint(step, default) for n, step in dims)
    return 1 + size_hint(tensor.storage_offset, default) + sum(steps)


def is_strided_base(tensor: MetaTensorDesc) -> bool:
    """Whether a tensor is strided, not a view, and neither wraps tensors nor is wrapped."""
    others = (
        tensor.base, tensor.sparse, tensor.subclass, tensor.functorch, tensor.functional,
        tensor.nested_int, tensor.grad, tensor.view_calls,
    )  # fmt: skip
    return tensor.layout == "strided" and not any(part is not None for part in others)


def size_hint(n: IntLike, default: int = 1) -> int:
    """The hint of a size; ``default`` if there is none."""
    hint = hint_of(n)
    return default if hint is None else hint


# --- facts ----------------------------------------------------------------------------------------


def drop_facts(
    desc: CaptureDesc, *, guards: Collection[int] = (), asserts: Collection[int] = ()
) -> CaptureDesc | None:
    """Drop guards and runtime asserts of a frame, by position.

    The record does not show which guard an axiom or a divisibility came from, so all of these are
    dropped; ranges and replacements stay.
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
    """Drop symbols and the facts about them; ``None`` if the inputs or the graph use one."""
    env = desc.shape_env
    if env is None or used_symbols(desc) & set(names):
        return None
    symbols = {symbol_of(s): sympy.Integer(0) for s in env.symbols if s.name in names}
    edit = _Substitution(symbols)
    facts = {
        field: tuple(fact for fact in getattr(env, field) if not names_in(fact) & set(names))
        for field in ("guards", "runtime_asserts", "divisible", "replacements")
    }
    made = edit.env(msgspec.structs.replace(env, **facts))
    return None if made is None else msgspec.structs.replace(desc, shape_env=made)


def is_bound(desc: CaptureDesc) -> bool:
    """Whether every symbol in the graph, the guards and the runtime asserts is bound."""
    replaced = [r.symbol for r in desc.replacements]
    used = used_symbols(desc) | names_in((desc.guards, desc.runtime_asserts))
    return used <= bound_symbols(desc) | names_in(replaced)


# --- other static sizes ---------------------------------------------------------------------------


def static_sizes(desc: CaptureDesc) -> list[int]:
    """The static sizes above 2 of strided inputs, in descending order."""
    tensors = [entry.tensor for entry in desc.inputs if entry.tensor is not None]
    found = {
        n for t in tensors if is_strided_base(t) for n in t.size if isinstance(n, int) and n > 2
    }
    return sorted(found, reverse=True)


def resize(desc: CaptureDesc, old: int, new: int) -> CaptureDesc | None:
    """Replace one static size by another in all inputs of a frame; its values have to be propagated again.

    The result is ``None`` if an input with such a size is no plain tensor without gaps.
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
    """Ids of the storages that several inputs share."""
    tensors = [entry.tensor for entry in desc.inputs if entry.tensor is not None]
    ids = [t.storage.id for t in tensors if t.storage is not None]
    return {one for one in ids if ids.count(one) > 1}


def contiguous(tensor: MetaTensorDesc) -> MetaTensorDesc | None:
    """Make a strided tensor contiguous; ``None`` for another kind."""
    stride = _dense_strides(tensor.size, range(tensor.ndim))
    return _with_bytes(msgspec.structs.replace(tensor, stride=stride, storage_offset=0))


def _dense(tensor: MetaTensorDesc, size: tuple[IntLike, ...]) -> MetaTensorDesc | None:
    """Resize a dense tensor, keeping the order of its dims in memory; ``None`` if it has gaps."""
    order = sorted(range(tensor.ndim), key=lambda at: (-size_hint(tensor.stride[at]), at))
    before = _dense_strides(tensor.size, order)
    gaps = any(
        before[at] != tensor.stride[at] and size_hint(tensor.size[at]) > 1
        for at in range(tensor.ndim)
    )
    if gaps or not is_strided_base(tensor) or size_hint(tensor.storage_offset):
        return None
    return _with_bytes(
        msgspec.structs.replace(tensor, size=size, stride=_dense_strides(size, order))
    )


def _dense_strides(size: tuple[IntLike, ...], order: Sequence[int]) -> tuple[IntLike, ...]:
    """Strides of a dense tensor; ``order`` lists the dims from the outermost."""
    strides: dict[int, IntLike] = {}
    step: IntLike = 1
    for at in reversed(order):
        strides[at] = step
        step = _times(step, size[at])
    return tuple(strides[at] for at in range(len(size)))


def _times(a: IntLike, b: IntLike) -> IntLike:
    if isinstance(a, int) and isinstance(b, int):
        return a * max(b, 1)
    has_hints = all(not isinstance(n, SymDesc) or n.hint is not None for n in (a, b))
    hint = size_hint(a) * size_hint(b) if has_hints else None
    return SymDesc(expr=encode_expr(size_expr(a) * size_expr(b)), hint=hint)


def size_expr(n: IntLike) -> Any:
    """Convert a size to a sympy expression."""
    return decode_expr(n.expr) if isinstance(n, SymDesc) else sympy.Integer(size_hint(n))
