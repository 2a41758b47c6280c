"""The reductions of `minify`: kinds of items that can be removed from a frame.

A reduction lists its items and builds the frame without some of them; `search` checks whether that
frame still fails in the same way. `Extent` orders frames by size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from torch_fakeify.errors import CaptureError
from torch_fakeify.records.frame import CaptureDesc, FakeModeDesc, ModesDesc
from torch_fakeify.records.symbol_names import has_number
from torch_fakeify.records.tensor import (
    ListValue,
    MetaTensorDesc,
    NodeValue,
    SymDesc,
    SymValue,
    TensorValue,
    TupleValue,
)
from torch_fakeify.tools.graph_edits import (
    FreshIds,
    drop_outputs,
    graph_outputs,
    inline_body,
    leaf_tensor,
    operations,
    recorded_value,
    remove_nodes,
    replace_inputs,
    replace_nodes,
    uses_of,
    with_nodes,
)
from torch_fakeify.tools.size_edits import (
    contiguous,
    drop_facts,
    drop_symbols,
    is_strided_base,
    shared_storages,
    specialize,
    used_symbols,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch_fakeify.records.frame import InputDesc
    from torch_fakeify.records.graph import GraphModuleDesc, NodeDesc
    from torch_fakeify.records.tensor import Value


class Extent(NamedTuple):
    """The size of a frame; sizes are compared as tuples."""

    operations: int
    """Nodes that are neither inputs nor the output, including those of bodies."""
    symbols: int
    facts: int
    """Guards and runtime asserts."""
    inputs: int
    outputs: int
    details: int
    """Keywords, floats other than 1, properties of inputs and modes other than the defaults."""
    elements: int
    """Elements of all inputs together."""


def extent(desc: CaptureDesc) -> Extent:
    """Measure a frame."""
    env = desc.shape_env
    return Extent(
        _operations(desc.graph),
        0 if env is None else len(env.symbols),
        0 if env is None else len(env.guards) + len(env.runtime_asserts),
        len(desc.inputs),
        len(graph_outputs(desc.graph) or ()),
        len(_keywords(desc)) + len(_floats(desc)) + len(_features(desc)) + len(_mode_items(desc)),
        sum(_elements(entry.tensor) for entry in desc.inputs if entry.tensor is not None),
    )


def _operations(graph: GraphModuleDesc) -> int:
    return len(operations(graph)) + sum(_operations(sub) for _, sub in graph.submodules)


def _elements(tensor: MetaTensorDesc) -> int:
    count = 1
    for n in tensor.size:
        hint = n.hint if isinstance(n, SymDesc) else n
        count *= hint if isinstance(hint, int) else 1
    return count


class Reduction(Protocol):
    """A kind of items that can be removed from a frame.

    Attributes:
        name: printed in progress lines.
        propagates: whether the values in the graph must be propagated again afterwards.
    """

    name: str
    propagates: bool

    def items(self, desc: CaptureDesc) -> Sequence[Hashable]:
        """The removable items, in the frame's order."""
        ...

    def without(self, desc: CaptureDesc, items: Sequence[Any]) -> CaptureDesc | None:
        """The frame without some items; ``None`` if there is no such frame."""
        ...


def _positions(graph: GraphModuleDesc) -> dict[str, int]:
    return {fx_node.name: i for i, fx_node in enumerate(graph.nodes)}


# --- nodes ----------------------------------------------------------------------------------------


class _Nodes:
    """Operations, by name; values that are still needed become inputs."""

    name, propagates = "nodes", False

    def items(self, desc: CaptureDesc) -> list[str]:
        return [desc.graph.nodes[i].name for i in operations(desc.graph)]

    def without(self, desc: CaptureDesc, items: Sequence[str]) -> CaptureDesc | None:
        at = _positions(desc.graph)
        return remove_nodes(desc, {at[name] for name in items})


class _Bypasses:
    """Operations with the same kind of value as one of their arguments, which replaces them."""

    name, propagates = "nodes bypassed", False

    def items(self, desc: CaptureDesc) -> list[str]:
        graph = desc.graph
        return [
            graph.nodes[i].name for i in operations(graph) if _replacement_for(graph, i) is not None
        ]

    def without(self, desc: CaptureDesc, items: Sequence[str]) -> CaptureDesc | None:
        at = _positions(desc.graph)
        by: dict[int, Value] = {}
        for name in items:
            replacement = _replacement_for(desc.graph, at[name])
            if replacement is not None:
                by[at[name]] = NodeValue(index=replacement)
        return replace_nodes(desc, by)


def _replacement_for(graph: GraphModuleDesc, position: int) -> int | None:
    """Position of the first argument with the same kind of value as a node; ``None`` if there is none."""
    kind = _kind_of(graph, position)
    if kind is None:
        return None
    return next((at for at in uses_of(graph.nodes[position]) if _kind_of(graph, at) == kind), None)


def _kind_of(graph: GraphModuleDesc, position: int) -> Any:
    match recorded_value(graph, position):
        case TensorValue(tensor=tensor):
            inside = (tensor.subclass, tensor.functorch, tensor.functional, tensor.sparse)
            cls = None if tensor.subclass is None else tensor.subclass.cls
            kinds = tuple(type(part) for part in inside)
            return tensor.dtype, tensor.device, tensor.layout, tensor.size, cls, kinds
        case SymValue(sym=sym):
            return sym
        case _:
            return None


class _Calls:
    """Higher-order operators, by name; they are inlined."""

    name, propagates = "bodies inlined", False

    def items(self, desc: CaptureDesc) -> list[str]:
        graph = desc.graph
        return [graph.nodes[i].name for i in operations(graph) if inline_body(desc, i) is not None]

    def without(self, desc: CaptureDesc, items: Sequence[str]) -> CaptureDesc | None:
        made: CaptureDesc | None = desc
        for name in items:
            made = None if made is None else inline_body(made, _positions(made.graph)[name])
        return made


class _Bodies:
    """Operations in the bodies of higher-order operators; they are bypassed, or removed if unused."""

    name, propagates = "nodes of bodies", False

    def items(self, desc: CaptureDesc) -> list[tuple[str, ...]]:
        return [
            (*path, graph.nodes[i].name)
            for path, graph in _bodies(desc.graph, ())
            for i in operations(graph)
            if _replacement_for(graph, i) is not None or _is_unused(graph, i)
        ]

    def without(self, desc: CaptureDesc, items: Sequence[tuple[str, ...]]) -> CaptureDesc | None:
        by_body: dict[tuple[str, ...], list[str]] = {}
        for *path, name in items:
            by_body.setdefault(tuple(path), []).append(name)
        return msgspec.structs.replace(desc, graph=_with_bodies(desc.graph, (), by_body))


def _bodies(
    graph: GraphModuleDesc, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], GraphModuleDesc]]:
    for name, body in graph.submodules:
        yield (*path, name), body
        yield from _bodies(body, (*path, name))


def _with_bodies(
    graph: GraphModuleDesc, path: tuple[str, ...], by_body: Mapping[tuple[str, ...], list[str]]
) -> GraphModuleDesc:
    """Bypass nodes in the bodies of a graph, by the body's path."""
    submodules: list[tuple[str, GraphModuleDesc]] = []
    for name, body in graph.submodules:
        here = (*path, name)
        made = _with_bodies(body, here, by_body)
        if here in by_body:
            made = _bypassed(made, by_body[here])
        submodules.append((name, made))
    return msgspec.structs.replace(graph, submodules=tuple(submodules))


def _is_unused(graph: GraphModuleDesc, position: int) -> bool:
    return all(position not in uses_of(fx_node) for fx_node in graph.nodes)


def _bypassed(graph: GraphModuleDesc, names: Sequence[str]) -> GraphModuleDesc:
    """Bypass nodes of a body, by editing it as the graph of a temporary frame."""
    frame = CaptureDesc(graph=graph, inputs=(), modes=ModesDesc(), fake_mode=FakeModeDesc())
    at = _positions(graph)
    by: dict[int, Value] = {}
    for name in names:
        replacement = _replacement_for(graph, at[name])
        by[at[name]] = None if replacement is None else NodeValue(index=replacement)
    return replace_nodes(frame, by).graph


# --- outputs and inputs ---------------------------------------------------------------------------


class _Outputs:
    """Outputs, by position."""

    name, propagates = "outputs", False

    def items(self, desc: CaptureDesc) -> list[int]:
        return list(range(len(graph_outputs(desc.graph) or ())))

    def without(self, desc: CaptureDesc, items: Sequence[int]) -> CaptureDesc | None:
        return drop_outputs(desc, set(items))


class _Inputs:
    """Unused inputs, by name."""

    name, propagates = "inputs", False

    def items(self, desc: CaptureDesc) -> list[str]:
        graph = desc.graph
        used = {at for fx_node in graph.nodes for at in uses_of(fx_node)}
        return [
            n.name for i, n in enumerate(graph.nodes) if n.op == "placeholder" and i not in used
        ]

    def without(self, desc: CaptureDesc, items: Sequence[str]) -> CaptureDesc | None:
        at = _positions(desc.graph)
        return remove_nodes(desc, {at[name] for name in items})


_FEATURES: Mapping[str, Any] = {
    "is_parameter": False,
    "is_buffer": False,
    "requires_grad": False,
    "marks": None,
    "is_pinned": False,
    "grad": None,
}
"""Removable properties of inputs, with their defaults."""


class _Features:
    """Properties beyond those of a contiguous tensor that owns its storage, by input and property."""

    name, propagates = "input properties", True

    def items(self, desc: CaptureDesc) -> list[tuple[str, str]]:
        return _features(desc)

    def without(self, desc: CaptureDesc, items: Sequence[tuple[str, str]]) -> CaptureDesc | None:
        changed: dict[int, InputDesc] = {}
        ids = FreshIds(desc)
        for i, entry in enumerate(desc.inputs):
            tensor = entry.tensor
            for name, feature in items:
                if name == entry.name and tensor is not None:
                    tensor = _without_feature(tensor, feature)
                    if tensor is None:
                        return None
                    tensor = ids.renumbered(tensor, storage=feature == "alias")
            if tensor is not entry.tensor:
                changed[i] = msgspec.structs.replace(entry, tensor=tensor)
        return replace_inputs(desc, changed)


def _features(desc: CaptureDesc) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    shared = shared_storages(desc)
    for entry in desc.inputs:
        tensor = entry.tensor
        if tensor is None:
            continue
        found += [(entry.name, n) for n, plain in _FEATURES.items() if getattr(tensor, n) != plain]
        shares = tensor.storage is not None and tensor.storage.id in shared
        if shares or tensor.base is not None:
            found.append((entry.name, "alias"))
        row_major = contiguous(tensor) if is_strided_base(tensor) else None
        if row_major is not None and row_major.stride != tensor.stride:
            found.append((entry.name, "strides"))
    return found


def _without_feature(tensor: MetaTensorDesc, feature: str) -> MetaTensorDesc | None:
    if feature == "strides":
        return contiguous(tensor)
    if feature == "alias":
        return None if tensor.subclass is not None else contiguous(leaf_tensor(tensor))
    changes: dict[str, Any] = {feature: _FEATURES[feature]}
    if feature == "is_buffer":
        changes["persistent"] = None
    if feature == "requires_grad":
        changes.update(is_leaf=True, grad=None, is_parameter=False)
    return msgspec.structs.replace(tensor, **changes)


# --- symbols and facts ----------------------------------------------------------------------------


class _Symbols:
    """Dynamic dims, by symbol; they become static."""

    name, propagates = "dynamic dims", False

    def items(self, desc: CaptureDesc) -> list[str]:
        env = desc.shape_env
        return [] if env is None else [s.name for s in env.symbols if has_number(s)]

    def without(self, desc: CaptureDesc, items: Sequence[str]) -> CaptureDesc | None:
        return specialize(desc, items)


class _Unused:
    """Unused symbols, by name."""

    name, propagates = "unused symbols", False

    def items(self, desc: CaptureDesc) -> list[str]:
        if desc.shape_env is None:
            return []
        used = used_symbols(desc)
        return [s.name for s in desc.shape_env.symbols if s.name not in used]

    def without(self, desc: CaptureDesc, items: Sequence[str]) -> CaptureDesc | None:
        return drop_symbols(desc, items)


class _Guards:
    """Guards, by position."""

    name, propagates = "guards", False

    def items(self, desc: CaptureDesc) -> list[int]:
        return [] if desc.shape_env is None else list(range(len(desc.shape_env.guards)))

    def without(self, desc: CaptureDesc, items: Sequence[int]) -> CaptureDesc | None:
        return drop_facts(desc, guards=set(items))


class _Asserts:
    """Runtime asserts, by position."""

    name, propagates = "runtime asserts", False

    def items(self, desc: CaptureDesc) -> list[int]:
        return [] if desc.shape_env is None else list(range(len(desc.shape_env.runtime_asserts)))

    def without(self, desc: CaptureDesc, items: Sequence[int]) -> CaptureDesc | None:
        return drop_facts(desc, asserts=set(items))


# --- constants and modes --------------------------------------------------------------------------


class _Keywords:
    """Keyword arguments, by node and name."""

    name, propagates = "keywords", True

    def items(self, desc: CaptureDesc) -> list[tuple[str, str]]:
        return _keywords(desc)

    def without(self, desc: CaptureDesc, items: Sequence[tuple[str, str]]) -> CaptureDesc | None:
        removed = set(items)

        def change(fx_node: NodeDesc) -> NodeDesc:
            kwargs = tuple((k, v) for k, v in fx_node.kwargs if (fx_node.name, k) not in removed)
            return msgspec.structs.replace(fx_node, kwargs=kwargs)

        return with_nodes(desc, change)


def _keywords(desc: CaptureDesc) -> list[tuple[str, str]]:
    return [(n.name, key) for n in desc.graph.nodes for key, _ in n.kwargs]


class _Optional:
    """Inputs among the arguments of a call, by node and position; they become ``None``."""

    name, propagates = "optional arguments", True

    def items(self, desc: CaptureDesc) -> list[tuple[str, int]]:
        nodes = desc.graph.nodes
        return [
            (n.name, at)
            for n in nodes
            if n.op == "call_function"
            for at, arg in enumerate(n.args)
            if at and isinstance(arg, NodeValue) and nodes[arg.index].op == "placeholder"
        ]

    def without(self, desc: CaptureDesc, items: Sequence[tuple[str, int]]) -> CaptureDesc | None:
        removed = set(items)
        unused = set(_Inputs().items(desc))

        def change(fx_node: NodeDesc) -> NodeDesc:
            args = tuple(
                None if (fx_node.name, at) in removed else arg
                for at, arg in enumerate(fx_node.args)
            )
            return msgspec.structs.replace(fx_node, args=args)

        made = with_nodes(desc, change)
        return _Inputs().without(made, [n for n in _Inputs().items(made) if n not in unused])


class _Floats:
    """Float arguments, by node; they become 1."""

    name, propagates = "constants", True

    def items(self, desc: CaptureDesc) -> list[str]:
        return _floats(desc)

    def without(self, desc: CaptureDesc, items: Sequence[str]) -> CaptureDesc | None:
        names = set(items)

        def change(fx_node: NodeDesc) -> NodeDesc:
            if fx_node.name not in names:
                return fx_node
            return msgspec.structs.replace(fx_node, args=tuple(map(_as_one, fx_node.args)))

        return with_nodes(desc, change)


def _floats(desc: CaptureDesc) -> list[str]:
    return [n.name for n in desc.graph.nodes if any(map(_has_float, n.args))]


def _has_float(value: Value) -> bool:
    match value:
        case float():
            return value != 1.0
        case TupleValue(items=items) | ListValue(items=items):
            return any(map(_has_float, items))
        case _:
            return False


def _as_one(value: Value) -> Value:
    match value:
        case float():
            return 1.0
        case TupleValue(items=items) | ListValue(items=items):
            return msgspec.structs.replace(value, items=tuple(map(_as_one, items)))
        case _:
            return value


class _Modes:
    """Modes other than torch's defaults, by name; they are reset."""

    name, propagates = "modes", True

    def items(self, desc: CaptureDesc) -> list[str]:
        return _mode_items(desc)

    def without(self, desc: CaptureDesc, items: Sequence[str]) -> CaptureDesc | None:
        default = ModesDesc()
        changes = {name: getattr(default, name) for name in items}
        return msgspec.structs.replace(desc, modes=msgspec.structs.replace(desc.modes, **changes))


def _mode_items(desc: CaptureDesc) -> list[str]:
    default = ModesDesc()
    fields = ModesDesc.__struct_fields__
    return [name for name in fields if getattr(desc.modes, name) != getattr(default, name)]


REDUCTIONS: tuple[Reduction, ...] = (
    _Nodes(),
    _Outputs(),
    _Inputs(),
    _Bypasses(),
    _Calls(),
    _Bodies(),
    _Symbols(),
    _Guards(),
    _Asserts(),
    _Unused(),
    _Features(),
    _Keywords(),
    _Optional(),
    _Floats(),
    _Modes(),
)
"""All reductions, in the order in which they are tried."""


def refuse_joint(desc: CaptureDesc, path: Path | None) -> None:
    """Refuse a joint graph: its outputs are counted, and the partitioner needs all of them.

    Raises:
        CaptureError: it is one.
    """
    if desc.aot is not None and desc.aot.kind == "joint":
        raise CaptureError(
            "a joint graph cannot be minified",
            where=str(path or desc.frame),
            fix="Minify its forward or backward graph, or the frame: record it without --level aot",
        )
