"""The reductions of `minify`: kinds of items that can be removed from a frame.

A reduction lists its items and builds the frame without some of them; `search` checks whether that
frame still fails in the same way. `Extent` orders frames by size.
"""

from __future__ import annotations

import math
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from torch_fakeify.records.frame import CaptureDesc, FakeModeDesc, ModesDesc
from torch_fakeify.records.symbol_names import has_number
from torch_fakeify.records.tensor import (
    ListValue,
    MetaTensorDesc,
    NodeValue,
    SymValue,
    TensorValue,
    TupleValue,
)
from torch_fakeify.render.nested_graphs import used_nodes
from torch_fakeify.tools.graph_edits import (
    FreshIds,
    drop_outputs,
    graph_outputs,
    inline_body,
    leaf_tensor,
    operations,
    remove_nodes,
    replace_nodes,
    users_of,
    with_nodes,
)
from torch_fakeify.tools.size_edits import (
    contiguous,
    drop_facts,
    drop_symbols,
    is_strided_base,
    shared_storages,
    size_hint,
    specialize,
    used_symbols,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

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
    return Extent(
        sum(len(operations(each)) for each in desc.graph.graphs()),
        len(desc.symbols),
        len(desc.guards) + len(desc.runtime_asserts),
        len(desc.inputs),
        len(graph_outputs(desc.graph) or ()),
        len(_keywords(desc)) + len(_floats(desc)) + len(_features(desc)) + len(_mode_items(desc)),
        sum(math.prod(map(size_hint, e.tensor.size)) for e in desc.inputs if e.tensor is not None),
    )


class Reduction(NamedTuple):
    """A kind of items that can be removed from a frame."""

    name: str
    """Printed in progress lines."""
    items: Callable[[CaptureDesc], Sequence[Hashable]]
    """The removable items, in the frame's order."""
    without: Callable[[CaptureDesc, Sequence[Any]], CaptureDesc | None]
    """The frame without some items; ``None`` if there is no such frame."""
    propagates: bool = False
    """Whether the values in the graph must be propagated again afterwards."""


# --- nodes ----------------------------------------------------------------------------------------


def _bypassable(desc: CaptureDesc) -> list[int]:
    graph = desc.graph
    return [i for i in operations(graph) if _replacement_for(graph, i) is not None]


def _bypassed(desc: CaptureDesc, positions: Sequence[int]) -> CaptureDesc:
    """Replace nodes by their replacements, or by ``None``."""
    by: dict[int, Value] = {}
    for at in positions:
        replacement = _replacement_for(desc.graph, at)
        by[at] = None if replacement is None else NodeValue(index=replacement)
    return replace_nodes(desc, by)


def _replacement_for(graph: GraphModuleDesc, position: int) -> int | None:
    """Position of the first argument with the same kind of value as a node; ``None`` if there is none."""
    kind = _kind_of(graph, position)
    if kind is None:
        return None
    return next(
        (at for at in used_nodes(graph.nodes[position]) if _kind_of(graph, at) == kind), None
    )


def _kind_of(graph: GraphModuleDesc, position: int) -> Any:
    match graph.nodes[position].value:
        case TensorValue(tensor=tensor):
            inside = (tensor.subclass, tensor.functorch, tensor.functional, tensor.sparse)
            cls = None if tensor.subclass is None else tensor.subclass.cls
            kinds = tuple(type(part) for part in inside)
            return tensor.dtype, tensor.device, tensor.layout, tensor.size, cls, kinds
        case SymValue(sym=sym):
            return sym
        case _:
            return None


def _inlined(desc: CaptureDesc, positions: Sequence[int]) -> CaptureDesc | None:
    made: CaptureDesc | None = desc
    for name in [desc.graph.nodes[i].name for i in positions]:  # which does not change
        if made is not None:
            made = inline_body(made, [n.name for n in made.graph.nodes].index(name))
    return made


def _nodes_of_bodies(desc: CaptureDesc) -> list[tuple[int, int]]:
    """Numbers of bodies among the graphs of a frame, and positions in them."""
    return [
        (number, i)
        for number, graph in enumerate(desc.graph.graphs())
        for users in [users_of(graph)]
        for i in operations(graph)
        if number and (_replacement_for(graph, i) is not None or not users[i])
    ]


def _without_nodes_of_bodies(
    desc: CaptureDesc, items: Sequence[tuple[int, int]]
) -> CaptureDesc | None:
    """Bypass nodes in the bodies of a frame."""
    numbers = count()  # as `GraphModuleDesc.graphs` counts

    def edited(graph: GraphModuleDesc) -> GraphModuleDesc:
        number = next(numbers)
        made = tuple((name, edited(body)) for name, body in graph.submodules)
        graph = msgspec.structs.replace(graph, submodules=made)
        positions = [at for of, at in items if of == number]
        if not positions:
            return graph
        # Edited as the graph of a temporary frame.
        frame = CaptureDesc(graph=graph, inputs=(), modes=ModesDesc(), fake_mode=FakeModeDesc())
        return _bypassed(frame, positions).graph

    return msgspec.structs.replace(desc, graph=edited(desc.graph))


# --- inputs ---------------------------------------------------------------------------------------


def _unused_inputs(desc: CaptureDesc) -> list[int]:
    users = users_of(desc.graph)
    return [i for i, n in enumerate(desc.graph.nodes) if n.op == "placeholder" and not users[i]]


_FEATURES: Mapping[str, Any] = {
    "is_parameter": False,
    "is_buffer": False,
    "requires_grad": False,
    "marks": None,
    "is_pinned": False,
    "grad": None,
}
"""Removable properties of inputs, with their defaults."""


def _features(desc: CaptureDesc) -> list[tuple[str, str]]:
    """Properties beyond those of a contiguous tensor that owns its storage, by input and property."""
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


def _without_features(desc: CaptureDesc, items: Sequence[tuple[str, str]]) -> CaptureDesc | None:
    inputs: list[InputDesc] = []
    ids = FreshIds(desc)
    for entry in desc.inputs:
        tensor = entry.tensor
        for name, feature in items:
            if name == entry.name and tensor is not None:
                tensor = _without_feature(tensor, feature)
                if tensor is None:
                    return None
                tensor = ids.renumbered(tensor, storage=feature == "alias")
        inputs.append(msgspec.structs.replace(entry, tensor=tensor))
    return msgspec.structs.replace(desc, inputs=tuple(inputs))


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


# --- symbols --------------------------------------------------------------------------------------


def _unused_symbols(desc: CaptureDesc) -> list[str]:
    used = used_symbols(desc)
    return [s.name for s in desc.symbols if s.name not in used]


# --- constants and modes --------------------------------------------------------------------------


def _keywords(desc: CaptureDesc) -> list[tuple[str, str]]:
    return [(n.name, key) for n in desc.graph.nodes for key, _ in n.kwargs]


def _without_keywords(desc: CaptureDesc, items: Sequence[tuple[str, str]]) -> CaptureDesc | None:
    removed = set(items)

    def kwargs(n: NodeDesc) -> Any:
        return tuple((key, value) for key, value in n.kwargs if (n.name, key) not in removed)

    return with_nodes(desc, lambda n: msgspec.structs.replace(n, kwargs=kwargs(n)))


def _optional(desc: CaptureDesc) -> list[tuple[str, int]]:
    nodes = desc.graph.nodes
    return [
        (n.name, at)
        for n in nodes
        if n.op == "call_function"
        for at, arg in enumerate(n.args)
        if at and isinstance(arg, NodeValue) and nodes[arg.index].op == "placeholder"
    ]


def _without_optional(desc: CaptureDesc, items: Sequence[tuple[str, int]]) -> CaptureDesc | None:
    removed = set(items)

    def args(n: NodeDesc) -> Any:
        return tuple(None if (n.name, at) in removed else arg for at, arg in enumerate(n.args))

    made = with_nodes(desc, lambda n: msgspec.structs.replace(n, args=args(n)))
    return remove_nodes(made, set(_unused_inputs(made)) - set(_unused_inputs(desc)))


def _floats(desc: CaptureDesc) -> list[str]:
    return [n.name for n in desc.graph.nodes if _as_ones(n.args) != n.args]


def _without_floats(desc: CaptureDesc, names: Sequence[str]) -> CaptureDesc | None:
    changed = set(names)

    def args(n: NodeDesc) -> Any:
        return _as_ones(n.args) if n.name in changed else n.args

    return with_nodes(desc, lambda n: msgspec.structs.replace(n, args=args(n)))


def _as_ones(values: Sequence[Value]) -> tuple[Value, ...]:
    """Values with 1 for each float in them."""
    return tuple(map(_as_one, values))


def _as_one(value: Value) -> Value:
    match value:
        case float():
            return 1.0
        case TupleValue(items=items) | ListValue(items=items):
            return msgspec.structs.replace(value, items=_as_ones(items))
        case _:
            return value


def _mode_items(desc: CaptureDesc) -> list[str]:
    default = ModesDesc()
    fields = ModesDesc.__struct_fields__
    return [name for name in fields if getattr(desc.modes, name) != getattr(default, name)]


def _without_modes(desc: CaptureDesc, names: Sequence[str]) -> CaptureDesc | None:
    default = ModesDesc()
    changes = {name: getattr(default, name) for name in names}
    return msgspec.structs.replace(desc, modes=msgspec.structs.replace(desc.modes, **changes))


REDUCTIONS: tuple[Reduction, ...] = (
    # Values of nodes that are still needed become inputs.
    Reduction("nodes", lambda desc: operations(desc.graph), remove_nodes),
    Reduction(
        "outputs",
        lambda desc: range(len(graph_outputs(desc.graph) or ())),
        drop_outputs,
    ),
    Reduction("inputs", _unused_inputs, remove_nodes),
    # One of their arguments, with the same kind of value, replaces them.
    Reduction("nodes bypassed", _bypassable, _bypassed),
    # Higher-order operators get the nodes of their bodies.
    Reduction(
        "bodies inlined",
        lambda desc: [i for i in operations(desc.graph) if inline_body(desc, i) is not None],
        _inlined,
    ),
    # Bypassed, or removed if unused.
    Reduction("nodes of bodies", _nodes_of_bodies, _without_nodes_of_bodies),
    # Their sizes become static.
    Reduction(
        "dynamic dims",
        lambda desc: [s.name for s in desc.symbols if has_number(s)],
        specialize,
    ),
    Reduction(
        "guards",
        lambda desc: range(len(desc.guards)),
        lambda desc, positions: drop_facts(desc, guards=positions),
    ),
    Reduction(
        "runtime asserts",
        lambda desc: range(len(desc.runtime_asserts)),
        lambda desc, positions: drop_facts(desc, asserts=positions),
    ),
    Reduction("unused symbols", _unused_symbols, drop_symbols),
    Reduction("input properties", _features, _without_features, propagates=True),
    Reduction("keywords", _keywords, _without_keywords, propagates=True),
    # Inputs among the arguments of a call become ``None``.
    Reduction("optional arguments", _optional, _without_optional, propagates=True),
    # Floats other than 1 become 1.
    Reduction("constants", _floats, _without_floats, propagates=True),
    Reduction("modes", _mode_items, _without_modes, propagates=True),
)
"""All reductions, in the order in which they are tried."""
