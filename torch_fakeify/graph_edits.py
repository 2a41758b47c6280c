"""Edits of recorded graphs: nodes taken out, replaced by inputs or by one another, outputs dropped.

An edit gives another record and leaves the names of what stays as they were, so that errors which
name a node can be compared. Values that a graph needs and no longer computes become inputs, by what
the record says of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from .desc import (
    FunctionValue,
    ListValue,
    MetaStorageDesc,
    MetaTensorDesc,
    NodeValue,
    OpaqueValue,
    SourceDesc,
    SymValue,
    TensorValue,
    TupleValue,
    Value,
)
from .desc_frame import InputDesc
from .desc_graph import NodeDesc
from .rewriting import Rewriter, parts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from .desc_frame import CaptureDesc
    from .desc_graph import GraphModuleDesc

__all__ = [
    "FreshIds",
    "drop_outputs",
    "graph_outputs",
    "inline_body",
    "operations",
    "plain_tensor",
    "remove_nodes",
    "replace_inputs",
    "replace_nodes",
    "uses_of",
    "value_of",
    "with_nodes",
]

_VALUES = ("example_value", "val")
_NO_VALUES = frozenset({"placeholder", "output"})


def operations(graph: GraphModuleDesc) -> list[int]:
    """Positions of the nodes that are neither inputs nor the output."""
    return [i for i, n in enumerate(graph.nodes) if n.op not in _NO_VALUES]


def value_of(graph: GraphModuleDesc, position: int) -> Value:
    """What the record says of a node's value; ``None`` if it says nothing."""
    for key, value in graph.nodes[position].meta:
        if key in _VALUES:
            return shared_of(graph, value)
    return None


def shared_of(graph: GraphModuleDesc, value: Value) -> Value:
    """A value, also one that stands in the metadata of many nodes."""
    if isinstance(value, OpaqueValue) and value.kind == "shared" and isinstance(value.data, int):
        return graph.shared[value.data]
    return value


def uses_of(fx_node: NodeDesc) -> list[int]:
    """Positions of the nodes that a node's arguments name."""
    found = parts_of((fx_node.args, tuple(v for _, v in fx_node.kwargs)), NodeValue)
    return [value.index for value in found]


def graph_outputs(graph: GraphModuleDesc) -> list[Value] | None:
    """What a graph returns, if it is a tuple or list."""
    returned = graph.nodes[-1].args[0] if graph.nodes[-1].args else None
    return list(returned.items) if isinstance(returned, (TupleValue, ListValue)) else None


# --- edits ----------------------------------------------------------------------------------------


def remove_nodes(desc: CaptureDesc, positions: Collection[int]) -> CaptureDesc | None:
    """The frame without some nodes.

    What the rest needs of them becomes an input. What nobody else used than they becomes an
    output, in place of theirs, so that it is not dead.

    Args:
        desc: the frame.
        positions: of operations, or of placeholders that nothing uses.

    Returns:
        The frame; ``None`` if a value is needed that no input can have.
    """
    graph = desc.graph
    gone = set(positions)
    users = _users(graph)
    last = len(graph.nodes) - 1
    wanted: set[int] = set()
    for i, fx_node in enumerate(graph.nodes[:-1]):
        if i not in gone:
            wanted.update(at for at in uses_of(fx_node) if at in gone)
    inputs: dict[int, InputDesc] = {}
    ids = FreshIds(desc)
    while wanted:
        at = wanted.pop()
        made = _as_input(graph, at, ids)
        if made is not None:
            inputs[at] = made
            continue
        items = {user for user in users[at] if user != last}
        if not all(_is_item(graph.nodes[user]) for user in items):
            return None
        wanted |= items - gone - inputs.keys()
        gone |= items
    returned = graph_outputs(graph)
    if returned is None:
        return None
    kept = [v for v in returned if not (isinstance(v, NodeValue) and v.index in gone)]
    present = {v.index for v in kept if isinstance(v, NodeValue)}
    for i, fx_node in enumerate(graph.nodes):
        if i in gone or i in present or fx_node.op in _NO_VALUES:
            continue
        if users[i] and users[i] <= gone | {last} and users[i] != {last} and _is_value(graph, i):
            kept.append(NodeValue(index=i))
    return _rebuilt(desc, gone, inputs, {}, kept)


def replace_nodes(desc: CaptureDesc, by: Mapping[int, Value]) -> CaptureDesc | None:
    """The frame with values in the place of nodes: other nodes that come earlier, or constants."""
    returned = graph_outputs(desc.graph)
    if returned is None:
        return None
    return _rebuilt(desc, set(by), {}, dict(by), returned)


def inline_body(desc: CaptureDesc, position: int) -> CaptureDesc | None:
    """The frame with the nodes of a body in the place of the operator that calls it.

    Of ``cond`` it is the body of the first branch.

    Returns:
        The frame; ``None`` if the node calls no body, not one by one, or the body holds attributes.
    """
    graph = desc.graph
    found = _call_of_body(graph, position)
    returned = graph_outputs(graph)
    if found is None or returned is None:
        return None
    body, operands = found
    inner = graph_outputs(body)
    takes = sum(1 for n in body.nodes if n.op == "placeholder")
    held = (body.tensors, body.values, body.submodules)
    if inner is None or takes != len(operands) or any(held):
        return None
    names = {n.name for n in graph.nodes}
    start, shared = len(graph.nodes), len(graph.shared)

    def changed(part: Any) -> Any:
        if isinstance(part, NodeValue):
            at = part.index
            return operands[at] if at < takes else NodeValue(index=start + at - takes)
        if isinstance(part, OpaqueValue) and part.kind == "shared" and isinstance(part.data, int):
            return OpaqueValue(kind="shared", data=part.data + shared)
        return part

    rewrite = Rewriter(changed)
    extra: list[NodeDesc] = []
    for fx_node in body.nodes[takes:-1]:
        name = fx_node.name
        while name in names:
            name = f"{fx_node.name}_{len(names)}"
        names.add(name)
        extra.append(
            msgspec.structs.replace(
                fx_node,
                name=name,
                args=rewrite(fx_node.args),
                kwargs=tuple((key, rewrite(value)) for key, value in fx_node.kwargs),
                users=None,
                meta=tuple((key, rewrite(value)) for key, value in fx_node.meta),
            )
        )
    results = [rewrite(value) for value in inner]
    by: dict[int, Value] = {position: None}
    for user, fx_node in enumerate(graph.nodes):
        if position not in uses_of(fx_node):
            continue
        item = fx_node.args[1] if _is_item(fx_node) and len(fx_node.args) == 2 else None
        if not isinstance(item, int) or not 0 <= item < len(results):
            return None
        by[user] = results[item]
    users = _users(graph)
    for at in uses_of(graph.nodes[position]):
        if graph.nodes[at].op == "get_attr" and users[at] == {position}:
            by[at] = None
    whole = msgspec.structs.replace(
        graph,
        shared=(*graph.shared, *(rewrite(value) for value in body.shared)),
    )
    desc = msgspec.structs.replace(desc, graph=whole)
    return _rebuilt(desc, set(by), {}, by, returned, {position: extra})


_BODY_AND_OPERANDS = {"tag_activation_checkpoint": 1, "wrap": 1, "invoke_subgraph": 2}
"""Higher-order operators whose first argument is a body, and where its operands begin."""


def _call_of_body(
    graph: GraphModuleDesc, position: int
) -> tuple[GraphModuleDesc, tuple[Value, ...]] | None:
    """The body that a node calls, and what it is called with."""
    target, args = graph.nodes[position].target, graph.nodes[position].args
    if not isinstance(target, FunctionValue) or target.kind != "hop":
        return None
    operands: tuple[Value, ...]
    if target.name == "cond" and len(args) == 4 and isinstance(args[3], (TupleValue, ListValue)):
        called, operands = args[1], args[3].items
    elif target.name in _BODY_AND_OPERANDS and args:
        called, operands = args[0], args[_BODY_AND_OPERANDS[target.name] :]
    else:
        return None
    if not isinstance(called, NodeValue):
        return None
    name = str(graph.nodes[called.index].target)
    name = dict(graph.submodule_aliases).get(name, name)
    body = dict(graph.submodules).get(name)
    return None if body is None else (body, operands)


def drop_outputs(desc: CaptureDesc, positions: Collection[int]) -> CaptureDesc | None:
    """The frame without some of its outputs."""
    returned = graph_outputs(desc.graph)
    if returned is None:
        return None
    kept = [value for i, value in enumerate(returned) if i not in positions]
    return _rebuilt(desc, set(), {}, {}, kept)


def with_nodes(desc: CaptureDesc, change: Callable[[NodeDesc], NodeDesc]) -> CaptureDesc:
    """The frame with each node changed, those of bodies excepted."""
    graph = msgspec.structs.replace(desc.graph, nodes=tuple(map(change, desc.graph.nodes)))
    return msgspec.structs.replace(desc, graph=graph)


def replace_inputs(desc: CaptureDesc, inputs: Mapping[int, InputDesc]) -> CaptureDesc:
    """The frame with other inputs at some positions among the inputs."""
    changed = tuple(inputs.get(i, entry) for i, entry in enumerate(desc.inputs))
    return msgspec.structs.replace(desc, inputs=changed)


def plain_tensor(tensor: MetaTensorDesc) -> MetaTensorDesc:
    """A tensor with its own storage and no history: what an input is that was an intermediate."""
    return msgspec.structs.replace(
        tensor,
        is_leaf=True,
        is_view=False,
        base=None,
        creation_meta=None,
        grad=None,
        retains_grad=False,
        is_fake=False,
        item_memo=None,
        symbols=(),
    )


class FreshIds:
    """Ids for tensors that are others than a frame had, and for their storages."""

    def __init__(self, desc: CaptureDesc) -> None:
        tensors = parts_of(desc, MetaTensorDesc, inside=True)
        self._tensor = 1 + max((t.id for t in tensors), default=0)
        self._storage = 1 + max((s.id for s in parts_of(desc, MetaStorageDesc)), default=0)

    def renumbered(self, tensor: MetaTensorDesc, *, storage: bool = True) -> MetaTensorDesc:
        """The tensor as another one, with a ``storage`` of its own if that is wanted."""
        changes: dict[str, Any] = {"id": self._tensor}
        self._tensor += 1
        if storage and tensor.storage is not None:
            changes["storage"] = msgspec.structs.replace(tensor.storage, id=self._storage)
            self._storage += 1
        return msgspec.structs.replace(tensor, **changes)


# --- how ------------------------------------------------------------------------------------------


def _users(graph: GraphModuleDesc) -> list[set[int]]:
    users: list[set[int]] = [set() for _ in graph.nodes]
    for i, fx_node in enumerate(graph.nodes):
        for at in uses_of(fx_node):
            users[at].add(i)
    return users


def _is_item(fx_node: NodeDesc) -> bool:
    target = fx_node.target
    return isinstance(target, FunctionValue) and target.name in _GETITEM


_GETITEM = frozenset({"operator.getitem", "_operator.getitem"})


def _is_value(graph: GraphModuleDesc, position: int) -> bool:
    return isinstance(value_of(graph, position), (TensorValue, SymValue))


def _as_input(graph: GraphModuleDesc, position: int, ids: FreshIds) -> InputDesc | None:
    """The input that has a node's value."""
    fx_node = graph.nodes[position]
    source = local_source(fx_node.name)
    match value_of(graph, position):
        case TensorValue(tensor=tensor) if tensor.functorch is None and tensor.functional is None:
            made = ids.renumbered(plain_tensor(tensor))
            return InputDesc(name=fx_node.name, tensor=made, source=source)
        case SymValue(sym=sym) if isinstance(sym, msgspec.Struct):
            return InputDesc(name=fx_node.name, sym=sym, source=source)
        case _:
            return None


def local_source(name: str) -> SourceDesc:
    """The source of a local variable."""
    fields = (("local_name", name), ("is_input", True))
    return SourceDesc(cls="LocalSource", name=f"L['{name}']", fields=fields)


def _rebuilt(
    desc: CaptureDesc,
    gone: set[int],
    inputs: Mapping[int, InputDesc],
    by: Mapping[int, Value],
    returned: Iterable[Value],
    extra: Mapping[int, list[NodeDesc]] | None = None,
) -> CaptureDesc:
    """The frame without the nodes ``gone``, with new ``inputs`` for some, values ``by`` for others.

    ``extra`` nodes stand in the place of one that is gone; they are counted on from the graph's own.
    """
    nodes = desc.graph.nodes
    first = sum(1 for fx_node in nodes if fx_node.op == "placeholder")
    order = [i for i in range(first) if i not in gone]
    order += sorted(inputs)
    for i in range(first, len(nodes)):
        order += (
            [i] if i not in gone else range(len(nodes), len(nodes) + len((extra or {}).get(i, ())))
        )
    nodes = (*nodes, *(fx_node for some in (extra or {}).values() for fx_node in some))
    place = {old: new for new, old in enumerate(order)}

    def changed(part: Any) -> Any:
        if not isinstance(part, NodeValue):
            return part
        seen: set[int] = set()
        value: Value = part
        while isinstance(value, NodeValue) and value.index in by and value.index not in seen:
            seen.add(value.index)
            value = by[value.index]
        if not isinstance(value, NodeValue):
            return value
        at = place.get(value.index)
        return _LOST if at is None else NodeValue(index=at)

    rewrite = Rewriter(changed)
    made: list[NodeDesc] = []
    for i in order:
        fx_node = nodes[i]
        if i in inputs:
            made.append(_placeholder(fx_node, inputs[i], rewrite))
        elif fx_node.op == "output":
            kind = type(fx_node.args[0])
            items = tuple(rewrite(value) for value in returned)
            wrapped = ListValue(items=items) if kind is ListValue else TupleValue(items=items)
            made.append(msgspec.structs.replace(fx_node, args=(wrapped,), meta=()))
        else:
            made.append(_moved(fx_node, rewrite))
    source_of = {entry.name: entry for entry in inputs.values()}
    taken = [entry for i, entry in enumerate(desc.inputs) if i not in gone]
    taken += [source_of[nodes[i].name] for i in sorted(inputs)]
    graph = tidied(msgspec.structs.replace(desc.graph, nodes=tuple(made)))
    known = {name for name, _ in graph.tensors}
    sources = tuple((n, s) for n, s in desc.parameter_sources if n in known)
    return msgspec.structs.replace(
        desc, graph=graph, inputs=tuple(taken), parameter_sources=sources
    )


_LOST = NodeValue(index=-1)
"""What a note of a node names that is gone; the note goes, too."""


def _moved(fx_node: NodeDesc, rewrite: Rewriter) -> NodeDesc:
    meta = tuple((key, rewrite(value)) for key, value in fx_node.meta)
    return msgspec.structs.replace(
        fx_node,
        args=rewrite(fx_node.args),
        kwargs=tuple((key, rewrite(value)) for key, value in fx_node.kwargs),
        users=None,
        meta=tuple((k, v) for k, v in meta if not _has_lost(v)),
    )


def _has_lost(value: Value) -> bool:
    return any(part == _LOST for part in parts_of(value, NodeValue))


def _placeholder(fx_node: NodeDesc, entry: InputDesc, rewrite: Rewriter) -> NodeDesc:
    return NodeDesc(
        op="placeholder",
        name=fx_node.name,
        target=fx_node.name,
        source=entry.source,
        stack=fx_node.stack,
        meta=tuple((key, rewrite(value)) for key, value in fx_node.meta if key in _VALUES),
    )


def tidied(graph: GraphModuleDesc) -> GraphModuleDesc:
    """A graph whose module holds only what its nodes name."""
    named = {str(n.target) for n in graph.nodes if n.op in ("get_attr", "call_module")}
    aliases = tuple((name, of) for name, of in graph.submodule_aliases if name in named)
    kept = named | {of for _, of in aliases}

    def inside(name: str) -> bool:
        return name in kept or any(one.startswith(f"{name}.") for one in kept)

    graph = msgspec.structs.replace(
        graph,
        modules=tuple((n, t) for n, t in graph.modules if inside(n)),
        submodules=tuple((n, sub) for n, sub in graph.submodules if n in kept),
        submodule_aliases=aliases,
        tensors=tuple((n, t) for n, t in graph.tensors if n in kept),
        plain_tensors=tuple(n for n in graph.plain_tensors if n in kept),
        transient_buffers=tuple(n for n in graph.transient_buffers if n in kept),
        tensor_data=tuple((n, d) for n, d in graph.tensor_data if n in kept),
        values=tuple((n, v) for n, v in graph.values if n in kept),
    )
    return _with_needed_shared(graph)


def _with_needed_shared(graph: GraphModuleDesc) -> GraphModuleDesc:
    """A graph without the shared values that no note names."""

    def is_shared(part: OpaqueValue) -> bool:
        return part.kind == "shared" and isinstance(part.data, int)

    notes = (tuple(n.meta for n in graph.nodes), graph.meta)
    used: set[int] = set()
    pending: list[Any] = [notes]
    while pending:
        for part in parts_of(pending.pop(), OpaqueValue):
            if not is_shared(part):
                pending.append(part.data)
            elif part.data not in used:
                used.add(part.data)
                pending.append(graph.shared[part.data])
    if len(used) == len(graph.shared):
        return graph
    place = {old: new for new, old in enumerate(sorted(used))}

    def changed(part: Any) -> Any:
        if isinstance(part, OpaqueValue) and is_shared(part):
            return OpaqueValue(kind="shared", data=place[part.data])  # pyright: ignore[reportArgumentType]
        return part

    rewrite = Rewriter(changed)
    return msgspec.structs.replace(
        graph,
        nodes=tuple(
            msgspec.structs.replace(n, meta=tuple((k, rewrite(v)) for k, v in n.meta))
            for n in graph.nodes
        ),
        meta=tuple((k, rewrite(v)) for k, v in graph.meta),
        shared=tuple(rewrite(graph.shared[old]) for old in sorted(used)),
    )
