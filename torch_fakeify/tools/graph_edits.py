"""Edits of recorded graphs: remove or replace nodes, drop outputs.

An edit returns a new record. Names of the remaining nodes do not change, so that errors which
name a node can be compared. Values that the graph needs and no longer computes become inputs, described by the
nodes' metadata.
"""

from __future__ import annotations

from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from torch_fakeify.records.frame import InputDesc
from torch_fakeify.records.graph import VALUE_KEYS, NodeDesc
from torch_fakeify.records.rewrite import Rewriter, walk
from torch_fakeify.records.tensor import (
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
from torch_fakeify.render.nested_graphs import used_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from torch_fakeify.records.frame import CaptureDesc
    from torch_fakeify.records.graph import GraphModuleDesc

_NO_VALUES = frozenset({"placeholder", "output"})


def operations(graph: GraphModuleDesc) -> list[int]:
    """Positions of the nodes that are neither inputs nor the output."""
    return [i for i, n in enumerate(graph.nodes) if n.op not in _NO_VALUES]


def _shared_position(value: Any) -> int | None:
    is_shared = isinstance(value, OpaqueValue) and value.kind == "shared"
    return value.data if is_shared and isinstance(value.data, int) else None


def _moved_shared(value: Any, place: Callable[[int], int]) -> Any:
    """Return a reference to ``GraphModuleDesc.shared`` by its new place; any other value unchanged."""
    at = _shared_position(value)
    return value if at is None else OpaqueValue(kind="shared", data=place(at))


def has_calls(graph: GraphModuleDesc) -> bool:
    """Whether a graph has a call. Dynamo calls no backend for a graph without one."""
    return any(fx_node.op.startswith("call_") for fx_node in graph.nodes)


def graph_outputs(graph: GraphModuleDesc) -> list[Value] | None:
    """The outputs of a graph that returns a tuple or list; else ``None``."""
    returned = graph.nodes[-1].args[0] if graph.nodes[-1].args else None
    return list(returned.items) if isinstance(returned, (TupleValue, ListValue)) else None


# --- edits ----------------------------------------------------------------------------------------


def remove_nodes(desc: CaptureDesc, positions: Collection[int]) -> CaptureDesc | None:
    """Remove operations, or placeholders that nothing uses; ``None`` if a needed value cannot be an input.

    Removed values that other nodes use become inputs. Values that only removed nodes used become
    outputs, so that they are not dead code.
    """
    graph = desc.graph
    removed = set(positions)
    users = users_of(graph)
    last = len(graph.nodes) - 1
    needed = {at for at in removed if users[at] - removed - {last}}
    inputs: dict[int, InputDesc] = {}
    ids = FreshIds(desc)
    while needed:
        at = needed.pop()
        made = _as_input(graph, at, ids)
        if made is not None:
            inputs[at] = made
            continue
        items = {user for user in users[at] if user != last}
        if not all(_is_item(graph.nodes[user]) for user in items):
            return None
        needed |= items - removed - inputs.keys()
        removed |= items
    returned = graph_outputs(graph)
    if returned is None:
        return None
    remaining = [v for v in returned if not (isinstance(v, NodeValue) and v.index in removed)]
    present = {v.index for v in remaining if isinstance(v, NodeValue)}
    for i, fx_node in enumerate(graph.nodes):
        if i in removed or i in present or fx_node.op in _NO_VALUES:
            continue
        is_value = isinstance(fx_node.value, (TensorValue, SymValue))
        if users[i] and users[i] <= removed | {last} and users[i] != {last} and is_value:
            remaining.append(NodeValue(index=i))
    return _rebuilt(desc, removed, inputs, {}, remaining)


def replace_nodes(desc: CaptureDesc, by: Mapping[int, Value]) -> CaptureDesc:
    """Replace nodes of a frame by earlier nodes or constants."""
    return _rebuilt(desc, set(by), {}, dict(by), graph_outputs(desc.graph))


def inline_body(desc: CaptureDesc, position: int) -> CaptureDesc | None:
    """Inline the body of a higher-order operator; of ``cond``, the first branch.

    The result is ``None`` if the node calls no body, the operands do not match its placeholders, or the
    body has attributes.
    """
    graph = desc.graph
    found = _call_of_body(graph, position)
    returned = graph_outputs(graph)
    if found is None or returned is None:
        return None
    body, operands = found
    inner = graph_outputs(body)
    takes = sum(1 for n in body.nodes if n.op == "placeholder")
    attributes = (body.tensors, body.values, body.submodules)
    if inner is None or takes != len(operands) or any(attributes):
        return None
    names = {n.name for n in graph.nodes}
    start, shared = len(graph.nodes), len(graph.shared)

    def changed(part: Any) -> Any:
        if isinstance(part, NodeValue):
            at = part.index
            return operands[at] if at < takes else NodeValue(index=start + at - takes)
        return _moved_shared(part, lambda at: at + shared)

    rewrite = Rewriter(changed)
    extra: list[NodeDesc] = []
    for fx_node in body.nodes[takes:-1]:
        name = fx_node.name
        while name in names:
            name = f"{fx_node.name}_{len(names)}"
        names.add(name)
        extra.append(msgspec.structs.replace(_moved(fx_node, rewrite), name=name))
    results = [rewrite(value) for value in inner]
    by: dict[int, Value] = {position: None}
    users = users_of(graph)
    for user in users[position]:
        fx_node = graph.nodes[user]
        item = fx_node.args[1] if _is_item(fx_node) and len(fx_node.args) == 2 else None
        if not isinstance(item, int) or not 0 <= item < len(results):
            return None
        by[user] = results[item]
    for at in used_nodes(graph.nodes[position]):
        if graph.nodes[at].op == "get_attr" and users[at] == {position}:
            by[at] = None
    whole = msgspec.structs.replace(graph, shared=(*graph.shared, *map(rewrite, body.shared)))
    desc = msgspec.structs.replace(desc, graph=whole)
    return _rebuilt(desc, set(by), {}, by, returned, {position: extra})


_BODY_AND_OPERANDS = {"tag_activation_checkpoint": 1, "wrap": 1, "invoke_subgraph": 2}
"""Higher-order operators whose first argument is a body: the position of the first operand."""


def _call_of_body(
    graph: GraphModuleDesc, position: int
) -> tuple[GraphModuleDesc, tuple[Value, ...]] | None:
    """The body that a node calls, and its operands; ``None`` if it calls none."""
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
    """Drop outputs of a frame, by position."""
    returned = graph_outputs(desc.graph)
    if returned is None:
        return None
    remaining = [value for i, value in enumerate(returned) if i not in positions]
    return _rebuilt(desc, set(), {}, {}, remaining)


def with_nodes(desc: CaptureDesc, change: Callable[[NodeDesc], NodeDesc]) -> CaptureDesc:
    """Change each node of a frame, except those of bodies."""
    graph = msgspec.structs.replace(desc.graph, nodes=tuple(map(change, desc.graph.nodes)))
    return msgspec.structs.replace(desc, graph=graph)


def leaf_tensor(tensor: MetaTensorDesc) -> MetaTensorDesc:
    """Make the record of an intermediate a leaf that owns its storage, for use as an input."""
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
    """Allocates unused tensor and storage ids of a frame."""

    def __init__(self, desc: CaptureDesc) -> None:
        tensors = walk(desc, MetaTensorDesc, inside=True)
        self._tensor = 1 + max((t.id for t in tensors), default=0)
        self._storage = 1 + max((s.id for s in walk(desc, MetaStorageDesc)), default=0)

    def renumbered(self, tensor: MetaTensorDesc, *, storage: bool = True) -> MetaTensorDesc:
        """Give a tensor a fresh id and, with ``storage``, a storage with a fresh id."""
        changes: dict[str, Any] = {"id": self._tensor}
        self._tensor += 1
        if storage and tensor.storage is not None:
            changes["storage"] = msgspec.structs.replace(tensor.storage, id=self._storage)
            self._storage += 1
        return msgspec.structs.replace(tensor, **changes)


# --- implementation ------------------------------------------------------------------------------------------


def users_of(graph: GraphModuleDesc) -> list[set[int]]:
    """Positions of the nodes that use each node."""
    users: list[set[int]] = [set() for _ in graph.nodes]
    for i, fx_node in enumerate(graph.nodes):
        for at in used_nodes(fx_node):
            users[at].add(i)
    return users


def _is_item(fx_node: NodeDesc) -> bool:
    target = fx_node.target
    return isinstance(target, FunctionValue) and target.name in _GETITEM


_GETITEM = frozenset({"operator.getitem", "_operator.getitem"})


def _as_input(graph: GraphModuleDesc, position: int, ids: FreshIds) -> InputDesc | None:
    """Make an input of a node's recorded value; ``None`` if it cannot be one."""
    name = graph.nodes[position].name
    fields = (("local_name", name), ("is_input", True))
    source = SourceDesc(cls="LocalSource", name=f"L['{name}']", fields=fields)
    match graph.nodes[position].value:
        case TensorValue(tensor=tensor) if tensor.functorch is None and tensor.functional is None:
            return InputDesc(name=name, tensor=ids.renumbered(leaf_tensor(tensor)), source=source)
        case SymValue(sym=sym) if isinstance(sym, msgspec.Struct):
            return InputDesc(name=name, sym=sym, source=source)
        case _:
            return None


def _rebuilt(
    desc: CaptureDesc,
    removed: set[int],
    inputs: Mapping[int, InputDesc],
    by: Mapping[int, Value],
    returned: Collection[Value] | None,
    extra: Mapping[int, list[NodeDesc]] = MappingProxyType({}),
) -> CaptureDesc:
    """Remove nodes, with ``inputs`` for some of them and replacement values ``by`` for others.

    ``returned`` are the new outputs, ``None`` for the old ones. ``extra`` are nodes to insert at the
    position of a removed one; their indices continue those of the graph. Bodies and constants that
    lose their last user are removed too.
    """
    nodes = desc.graph.nodes
    removed = removed | _unread(desc.graph, removed, by, returned)
    first = sum(1 for fx_node in nodes if fx_node.op == "placeholder")
    order = [i for i in range(first) if i not in removed]
    order += sorted(inputs)
    for i in range(first, len(nodes)):
        inserted = range(len(nodes), len(nodes) + len(extra.get(i, ())))
        order += inserted if i in removed else [i]
    nodes = (*nodes, *chain.from_iterable(extra.values()))
    place = {old: new for new, old in enumerate(order)}

    def changed(part: Any) -> Any:
        if not isinstance(part, NodeValue):
            return part
        value: Value = part
        while isinstance(value, NodeValue) and value.index in by:
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
        elif fx_node.op == "output" and returned is not None:
            kind = ListValue if isinstance(fx_node.args[0], ListValue) else TupleValue
            wrapped = kind(items=tuple(map(rewrite, returned)))
            made.append(msgspec.structs.replace(fx_node, args=(wrapped,), meta=()))
        else:
            made.append(_moved(fx_node, rewrite))
    taken = [entry for i, entry in enumerate(desc.inputs) if i not in removed]
    taken += [inputs[i] for i in sorted(inputs)]
    graph = _without_unused_attributes(msgspec.structs.replace(desc.graph, nodes=tuple(made)))
    names = {name for name, _ in graph.tensors}
    sources = tuple((n, s) for n, s in desc.parameter_sources if n in names)
    return msgspec.structs.replace(
        desc, graph=graph, inputs=tuple(taken), parameter_sources=sources
    )


def _unread(
    graph: GraphModuleDesc,
    removed: set[int],
    by: Mapping[int, Value],
    returned: Iterable[Value] | None,
) -> set[int]:
    """Positions of the ``get_attr`` nodes whose last user is removed."""
    results = graph.nodes[-1].args if returned is None else tuple(returned)
    used = {part.index for part in walk((results, tuple(by.values())), NodeValue)}
    gone = removed | {len(graph.nodes) - 1}
    return {
        i
        for i, users in enumerate(users_of(graph))
        if graph.nodes[i].op == "get_attr" and users and users <= gone and i not in used
    }


_LOST = NodeValue(index=-1)
"""Replaces a removed node in metadata; entries that contain it are dropped."""


def _moved(fx_node: NodeDesc, rewrite: Rewriter) -> NodeDesc:
    return msgspec.structs.replace(
        fx_node,
        args=rewrite(fx_node.args),
        kwargs=rewrite(fx_node.kwargs),
        users=None,
        meta=tuple((k, v) for k, v in rewrite(fx_node.meta) if _LOST not in walk(v, NodeValue)),
    )


def _placeholder(fx_node: NodeDesc, entry: InputDesc, rewrite: Rewriter) -> NodeDesc:
    return NodeDesc(
        op="placeholder",
        name=fx_node.name,
        target=fx_node.name,
        source=entry.source,
        stack=fx_node.stack,
        meta=tuple((key, rewrite(value)) for key, value in fx_node.meta if key in VALUE_KEYS),
    )


def _without_unused_attributes(graph: GraphModuleDesc) -> GraphModuleDesc:
    """Drop the attributes of a graph's module that no node reads."""
    named = {str(n.target) for n in graph.nodes if n.op in ("get_attr", "call_module")}
    aliases = tuple((name, of) for name, of in graph.submodule_aliases if name in named)
    remaining = named | {of for _, of in aliases}

    def inside(name: str) -> bool:
        return name in remaining or any(one.startswith(f"{name}.") for one in remaining)

    changes: dict[str, Any] = {
        field: tuple(entry for entry in getattr(graph, field) if entry[0] in remaining)
        for field in ("submodules", "tensors", "tensor_data", "values")
    }
    for field in ("plain_tensors", "transient_buffers"):
        changes[field] = tuple(name for name in getattr(graph, field) if name in remaining)
    modules = tuple((n, t) for n, t in graph.modules if inside(n))
    graph = msgspec.structs.replace(graph, modules=modules, submodule_aliases=aliases, **changes)
    return _without_unused_shared(graph)


def _without_unused_shared(graph: GraphModuleDesc) -> GraphModuleDesc:
    used: set[int] = set()
    pending: list[Any] = [(tuple(n.meta for n in graph.nodes), graph.meta)]
    while pending:
        for part in walk(pending.pop(), OpaqueValue):
            at = _shared_position(part)
            if at is None:
                pending.append(part.data)
            elif at not in used:
                used.add(at)
                pending.append(graph.shared[at])
    if len(used) == len(graph.shared):
        return graph
    place = {old: new for new, old in enumerate(sorted(used))}
    rewrite = Rewriter(lambda part: _moved_shared(part, place.__getitem__))
    return msgspec.structs.replace(
        graph,
        nodes=tuple(msgspec.structs.replace(n, meta=rewrite(n.meta)) for n in graph.nodes),
        meta=rewrite(graph.meta),
        shared=tuple(rewrite(graph.shared[old]) for old in sorted(used)),
    )
