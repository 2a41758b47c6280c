"""FX graphs <-> records: ``torch.fx.GraphModule`` to ``GraphModuleDesc`` and back.

Both the graphs that Dynamo gives to a backend (torch level, with nested graphs for higher-order
operators) and those of AOTAutograd and ``make_fx`` (ATen level, with symbolic scalars). Decoding
builds nodes and modules, it calls nothing that the graph names. FX turns names and targets into
Python source, so every one of them must be an identifier before it gets there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import sympy
import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list

from torch_fakeify.compat import torch_dynamo, torch_graphs, torch_symbols
from torch_fakeify.encoding import names
from torch_fakeify.encoding.exprs import decode_expr, encode_expr, encode_sym
from torch_fakeify.encoding.meshes import Meshes
from torch_fakeify.encoding.opaque_values import (
    decode_constant,
    decode_opaque,
    encode_constant,
    encode_opaque,
    is_opaque,
)
from torch_fakeify.encoding.sources import DecodeMemo, decode_source, encode_source, source_of
from torch_fakeify.encoding.values import decode_value, encode_value
from torch_fakeify.errors import (
    FormatError,
    LimitError,
    UnknownNameError,
    UnsupportedTensorError,
    UnsupportedValueError,
)
from torch_fakeify.records.graph import GraphModuleDesc, NodeDesc
from torch_fakeify.records.metadata_keys import MODULE_CARRIED, MODULE_DROPPED
from torch_fakeify.records.tensor import (
    DictValue,
    ExprValue,
    FunctionValue,
    ListValue,
    NestedIntDesc,
    NodeValue,
    OpaqueValue,
    SizeValue,
    SourceValue,
    StackDesc,
    SymValue,
    TensorValue,
    TorchConstValue,
    TupleValue,
    TypeValue,
    Value,
)
from torch_fakeify.render.text import user_line
from torch_fakeify.replay.lowering import value_of

from .calling import decode_calling, encode_calling
from .devices import Devices
from .meta import (
    MetaDecoder,
    MetaEncoder,
    SharedValues,
    decode_meta_dataclass,
    encode_meta_dataclass,
)
from .modules import attach, collect, read_tensors
from .validate import MAX_NESTING, READS_ATTRIBUTE, check_attributes, check_node, check_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch_fakeify.describe.describer import MetaTensorDescriber
    from torch_fakeify.records.frame import Constants
    from torch_fakeify.records.tensor import MetaTensorDesc, SymDesc

_CLASS_NAME = re.compile(r"[A-Za-z_<][A-Za-z0-9_.<>]*")

_NOT_HOOKED = frozenset({tuple, list, dict, torch.Size, torch.dtype, torch.device})
"""Frequent types of constants that the hook does not handle, tested first."""

_PLAIN = frozenset({type(None), bool, int})
"""Types whose values are also their records."""

_CONTAINERS = frozenset({TupleValue, ListValue, DictValue, SizeValue, FunctionValue})
"""Records that the decoder of values handles, with the hook for their items."""


_NOTHING: Mapping[int, torch.Tensor] = MappingProxyType({})

_is_view = operator.attrgetter("is_view")


# --- encode ---------------------------------------------------------------------------------------


def encode_graph(
    gm: torch.fx.GraphModule,
    describer: MetaTensorDescriber,
    *,
    constants: Constants = "none",
    file_name: Callable[[str], str] | None = None,
    inputs: Iterable[tuple[Any, MetaTensorDesc | None]] = (),
) -> GraphModuleDesc:
    """Encode a graph with the tensors and nested graphs of its module.

    Args:
        gm: the graph.
        describer: describes the tensors of the module and of the metadata.
        constants: whether to record the data of tensor constants of at most 4096 bytes.
            ``GraphModuleDesc.without_data`` names the tensors without data.
        file_name: applied to every file name in a stack, for example to make it relative.
        inputs: for each placeholder the input and, if it is a tensor, its record, which is reused
            for the value of the placeholder unless tracing changed it.

    Raises:
        UnsupportedValueError: a target or constant has no record; the error has its path.
        UnsupportedTensorError: a tensor on the module has no record.
    """
    meta = MetaEncoder(_first_seq_nr(gm), file_name or str)
    placeholders = gm.graph.find_nodes(op="placeholder")
    with describer.assume_unchanged():
        describer.register_inputs(
            (value_of(fx_node), value, d)
            for fx_node, (value, d) in zip(placeholders, inputs)  # noqa: B905 - inputs may be empty
            if d is not None
        )
        return _Encoder(describer, constants, meta).encode(gm, "$", 0)


def _first_seq_nr(gm: torch.fx.GraphModule) -> int:
    """The lowest sequence number of autograd in a graph; records have numbers relative to it."""
    graphs = [m.graph for m in gm.modules() if isinstance(m, torch.fx.GraphModule)]
    numbers = [n.meta.get("seq_nr") for graph in graphs for n in graph.nodes]
    return min((n for n in numbers if type(n) is int), default=0)


_Call: TypeAlias = tuple[Value, tuple[Value, ...], tuple[tuple[str, Value], ...]]
"""The target of a node and its arguments."""


_NUMBERS = "a tensor that the graph holds: its sizes are numbers here, and symbols in the frame"


def _has_symbols(t: torch.Tensor) -> bool:
    """Whether the frontend has symbols for the sizes of a tensor that the graph holds."""
    context = torch_dynamo.TracingContext.try_get()
    policy = None if context is None else context.tensor_to_context.get(t)
    caches = getattr(policy, "shape_env_to_source_to_symbol_cache", {}).values()
    return any(isinstance(expr, sympy.Symbol) for cache in caches for expr in cache.values())


class _Encoder:
    def __init__(
        self, describer: MetaTensorDescriber, constants: Constants, meta: MetaEncoder
    ) -> None:
        self.describer = describer
        self.constants = constants
        self.meta = meta
        # By the id of a target; the entry holds a reference to it.
        self._functions: dict[int, tuple[Any, Value]] = {}
        self._tensors: dict[int, TensorValue] = {}
        self._alive: list[torch.Tensor] = []
        """The tensors whose ids are keys of ``_tensors``."""

    def encode(self, gm: torch.fx.GraphModule, where: str, depth: int) -> GraphModuleDesc:
        if depth > MAX_NESTING:
            raise UnsupportedValueError(
                "graphs are nested too deeply", where=where, expected=f"at most {MAX_NESTING}"
            )
        parts = collect(gm, where)
        shared = SharedValues()
        positions = {fx_node: i for i, fx_node in enumerate(gm.graph.nodes)}
        hook = self._hook(positions)
        fx_nodes = tuple(gm.graph.nodes)
        self._describe_values(fx_nodes)
        calls = [
            self._encode_call(fx_node, hook, f"{where}.nodes[{i}]")
            for i, fx_node in enumerate(fx_nodes)
        ]
        metas = [
            self.meta.encode(fx_node.meta, hook, shared, values=self._tensors)
            for fx_node in fx_nodes
        ]
        nodes = tuple(map(self._node, fx_nodes, calls, metas, itertools.repeat(positions)))
        try:
            check_attributes(nodes, fx_nodes, where)
        except UnknownNameError as error:
            raise UnsupportedValueError(f"a node cannot be recorded: {error}") from error
        meta, dropped = self.meta.encode(
            gm.meta, hook, shared, carried=MODULE_CARRIED, dropped=MODULE_DROPPED
        )
        submodules = tuple(
            (name, self.encode(sub, f"{where}.submodules[{name!r}]", depth + 1))
            for name, sub in parts.graphs.items()
        )
        data = read_tensors(parts.tensors) if self.constants == "small" else {}
        symbolic = ((name, _NUMBERS) for name, t in parts.tensors.items() if _has_symbols(t))
        function_name = vars(gm).get("__name__")
        return GraphModuleDesc(
            nodes=nodes,
            class_name=_class_name(gm, where),
            function_name=function_name if isinstance(function_name, str) else None,
            training=gm.training,
            calling=encode_calling(gm.graph, where),
            force_dynamic=bool(vars(gm).get("torchdynamo_force_dynamic", False)),
            modules=tuple((n, m.training) for n, m in parts.modules.items()),
            submodules=submodules,
            submodule_aliases=tuple(parts.aliases.items()),
            tensors=tuple((n, self.describer.describe_tensor(t)) for n, t in parts.tensors.items()),
            plain_tensors=tuple(parts.plain_tensors),
            transient_buffers=tuple(parts.transient_buffers),
            tensor_data=tuple(data.items()),
            values=tuple((n, encode_constant(v, f"{where}.{n}")) for n, v in parts.values.items()),
            meta=meta,
            dropped_meta=(*dropped, *symbolic),
            shared=shared.values,
        )

    def _hook(self, positions: dict[torch.fx.Node, int]) -> Callable[[object], Value]:
        def hook(obj: object) -> Value:
            if type(obj) in _NOT_HOOKED:
                return None
            if isinstance(obj, torch.fx.Node):
                if obj not in positions:
                    raise UnsupportedValueError(
                        "an FX node of another graph is used", found=repr(obj.name)
                    )
                return NodeValue(index=positions[obj])
            if isinstance(obj, torch.Tensor):
                cached = self._tensors.get(id(obj))
                return (
                    TensorValue(tensor=self.describer.describe_tensor(obj))
                    if cached is None
                    else cached
                )
            if isinstance(obj, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                return SymValue(sym=encode_sym(obj))
            if isinstance(obj, sympy.Basic):
                return ExprValue(expr=encode_expr(obj))
            if isinstance(obj, torch_dynamo.Source):
                return SourceValue(source=encode_source(obj))
            record = encode_meta_dataclass(obj, hook)
            return encode_opaque(obj, None, hook) if record is None else record

        return hook

    def _describe_values(self, fx_nodes: tuple[torch.fx.Node, ...]) -> None:
        """Describe the values of nodes; those that cannot be described raise where they are encoded."""
        cached = self._tensors
        for fx_node in fx_nodes:
            value = value_of(fx_node)
            if isinstance(value, torch.Tensor) and id(value) not in cached:
                try:
                    cached[id(value)] = TensorValue(tensor=self.describer.describe_tensor(value))
                except (UnsupportedTensorError, UnsupportedValueError):
                    continue
                self._alive.append(value)

    def _encode_call(
        self,
        fx_node: torch.fx.Node,
        hook: Callable[[object], Value],
        where: str,
    ) -> _Call:
        try:
            args = tuple([
                hook(arg)
                if type(arg) is torch.fx.Node
                else encode_value(_thaw(arg), where=f"{where}.args[{i}]", hook=hook)
                for i, arg in enumerate(fx_node.args)
            ])  # fmt: skip
            kwargs = tuple([
                (key, encode_value(_thaw(arg), where=f"{where}.kwargs[{key!r}]", hook=hook))
                for key, arg in fx_node.kwargs.items()
            ])  # fmt: skip
            target = self._encode_target(fx_node, f"{where}.target")
            check_node(fx_node.op, fx_node.name, target, args, kwargs, where)
        except FormatError as error:
            raise UnsupportedValueError(
                f"a node cannot be recorded: {error}", where=self._line_of(fx_node)
            ) from error
        except UnsupportedValueError as error:
            line, place = self._line_of(fx_node), error.where or where
            error.where = place if line is None else f"{line} ({place})"
            raise
        return target, args, kwargs

    def _line_of(self, fx_node: torch.fx.Node) -> str | None:
        stack = self.meta.stack(fx_node.meta.get("stack_trace"))
        return user_line(stack) or None if isinstance(stack, StackDesc) else None

    def _node(
        self,
        fx_node: torch.fx.Node,
        call: _Call,
        encoded: tuple[tuple[tuple[str, Value], ...], tuple[tuple[str, str], ...]],
        positions: dict[torch.fx.Node, int],
    ) -> NodeDesc:
        target, args, kwargs = call
        meta, dropped = encoded
        stack = self.meta.stack(fx_node.meta.get("stack_trace"))
        source = source_of(fx_node)
        node_type, lost_type = _encode_type(fx_node.type)
        return NodeDesc(
            op=fx_node.op,  # pyright: ignore[reportArgumentType]
            name=fx_node.name,
            target=target,
            args=args,
            kwargs=kwargs,
            type=node_type,
            users=_user_order(fx_node, positions),
            source=None if source is None else encode_source(source),
            stack=stack if not isinstance(stack, str) else None,
            meta=meta,
            dropped_meta=dropped + lost_type,
        )

    def _encode_target(self, fx_node: torch.fx.Node, where: str) -> Value:
        if fx_node.op != "call_function":
            return str(fx_node.target)
        entry = self._functions.get(id(fx_node.target))
        if entry is None:
            value = names.encode_function(fx_node.target, where=where)
            entry = self._functions[id(fx_node.target)] = (fx_node.target, value)
        return entry[1]


def _thaw(arg: Any) -> Any:
    """Replace FX's immutable lists and dicts by ordinary ones."""
    kind = type(arg)
    if kind is immutable_list:
        return [_thaw(item) for item in arg]
    if kind is immutable_dict:
        return {key: _thaw(item) for key, item in arg.items()}
    if kind is tuple:
        return tuple(_thaw(item) for item in arg)
    return arg


def _encode_type(annotation: Any) -> tuple[Value, tuple[tuple[str, str], ...]]:
    if annotation is None:
        return None, ()
    if isinstance(annotation, type):
        with contextlib.suppress(UnsupportedValueError):
            return TypeValue(name=names.encode_class(annotation)), ()
    return None, (("type", "the annotation is no class that a reader could find"),)


def _user_order(
    fx_node: torch.fx.Node, positions: dict[torch.fx.Node, int]
) -> tuple[int, ...] | None:
    if len(fx_node.users) < 2:
        return None
    order = [positions[user] for user in fx_node.users]
    return None if order == sorted(order) else tuple(order)


def _class_name(gm: torch.fx.GraphModule, where: str) -> str:
    name = type(gm).__name__
    if _CLASS_NAME.fullmatch(name) is None:
        raise UnsupportedValueError("not a class name", where=where, found=repr(name))
    return name


# --- decode ---------------------------------------------------------------------------------------


def decode_graph(
    d: GraphModuleDesc,
    *,
    convert: Callable[[MetaTensorDesc], torch.Tensor],
    sym: Callable[[SymDesc], Any],
    retarget: Callable[[str], str] | None = None,
    sources: DecodeMemo | None = None,
    made: Mapping[int, torch.Tensor] = _NOTHING,
    meshes: Meshes | None = None,
) -> torch.fx.GraphModule:
    """Decode a graph. Nothing that the record names is called.

    Args:
        d: the record.
        convert: makes the tensors of the module and of the metadata.
        sym: makes symbolic scalars.
        retarget: maps device names of constants and calls; ``convert`` must map those of tensors.
        sources: memo of decoded sources; see `sources.decode_source`.
        made: tensors that were converted before, by the ids of their records.
        meshes: the meshes rebuilt so far.

    Raises:
        FormatError: the record is malformed; the error has its ``$.path``.
        UnknownNameError: an operator, function, class or method is unknown or not allowed here.
    """
    memo = DecodeMemo() if sources is None else sources
    decoder = _Decoder(convert, sym, Devices(retarget), memo, made, meshes or Meshes())
    return decoder.decode(d, "$", 0)


class _Scope(NamedTuple):
    """The nodes and attributes that nodes of one graph may refer to."""

    nodes: list[torch.fx.Node]
    attributes: frozenset[str]
    graphs: frozenset[str]


@dataclasses.dataclass(eq=False)
class _Decoder:
    convert: Callable[[MetaTensorDesc], torch.Tensor]
    sym: Callable[[SymDesc], Any]
    devices: Devices
    sources: DecodeMemo
    made: Mapping[int, torch.Tensor]
    meshes: Meshes
    functions: dict[tuple[str, str], Any] = dataclasses.field(default_factory=dict)

    def decode(self, d: GraphModuleDesc, where: str, depth: int) -> torch.fx.GraphModule:
        if depth > MAX_NESTING:
            raise LimitError(
                "graphs are nested too deeply", where=where, expected=f"at most {MAX_NESTING}"
            )
        if _CLASS_NAME.fullmatch(d.class_name) is None:
            raise FormatError("not a class name", where=where, found=repr(d.class_name))
        gm = torch_graphs.LazyGraphModule(
            torch.nn.Module(), torch.fx.Graph(), class_name=d.class_name
        )
        gm.training = d.training
        attach(
            gm,
            d,
            where,
            convert=self.convert,
            decode_graph=lambda sub, path: self.decode(sub, path, depth + 1),
            decode_constant=lambda v, path: decode_constant(v, path, self.meshes),
        )
        gm.graph = self._decode_nodes(d, where)
        if d.function_name is not None:
            vars(gm)["__name__"] = names.check_identifier(
                d.function_name, where=f"{where}.function_name"
            )
        if d.force_dynamic:
            vars(gm)["torchdynamo_force_dynamic"] = True
        gm.meta = MetaDecoder(d.shared).decode(
            d.meta,
            where=where,
            hook=self._hook([]),
            carried=MODULE_CARRIED,
            dropped=MODULE_DROPPED,
        )
        return gm

    def _decode_nodes(self, d: GraphModuleDesc, where: str) -> torch.fx.Graph:
        graph = torch.fx.Graph()
        if d.calling is not None:
            graph.set_codegen(decode_calling(d.calling, f"{where}.calling"))
        graphs = frozenset(n for n, _ in (*d.submodules, *d.submodule_aliases))
        attributes = graphs.union(n for n, _ in (*d.tensors, *d.values))
        scope = _Scope([], attributes, graphs)
        hook = self._hook(scope.nodes)
        meta = MetaDecoder(d.shared)
        check_order(d, where)
        converted = self._converted(d)
        places = [f"{where}.nodes[{i}]" for i in range(len(d.nodes))]
        for here, desc in zip(places, d.nodes, strict=True):
            check_node(desc.op, desc.name, desc.target, desc.args, desc.kwargs, here)
        for here, desc in zip(places, d.nodes, strict=True):
            scope.nodes.append(self._decode_node(graph, desc, scope, hook, here))
        earlier: list[torch.fx.Node] = []
        hook = self._hook(earlier, converted)
        for here, fx_node, desc in zip(places, scope.nodes, d.nodes, strict=True):
            earlier.append(fx_node)
            fx_node.meta.update(meta.decode(desc.meta, where=here, hook=hook))
            if desc.stack is not None:
                fx_node.meta["stack_trace"] = meta.stack(desc.stack)
            if desc.source is not None:
                source = decode_source(desc.source, memo=self.sources)
                fx_node._dynamo_source = source  # pyright: ignore[reportAttributeAccessIssue]
        converted.clear()
        check_attributes(d.nodes, scope.nodes, where)
        _restore_users(d, scope.nodes, where)
        return graph

    def _converted(self, d: GraphModuleDesc) -> dict[int, torch.Tensor]:
        """Convert the values of nodes; returns the tensors by the ids of their records."""
        tensors = [v.tensor for n in d.nodes for _, v in n.meta if type(v) is TensorValue]
        tensors.sort(key=_is_view)  # bases before views
        converted = dict(self.made)
        for tensor in tensors:
            if id(tensor) not in converted:
                converted[id(tensor)] = self.convert(tensor)
        return converted

    def _decode_node(
        self,
        graph: torch.fx.Graph,
        desc: NodeDesc,
        scope: _Scope,
        hook: Callable[[Value], object],
        where: str,
    ) -> torch.fx.Node:
        self._check_reference(desc, scope, where)
        target: Any = desc.target
        if desc.op == "call_function":
            target = self._decode_function(target, f"{where}.target")
            if desc.kwargs and type(target) is torch_graphs.OpOverload:
                names.check_keywords(target, dict(desc.kwargs), where=f"{where}.kwargs")
        args: tuple[Any, ...] = tuple([
            arg if type(arg) in _PLAIN
            else hook(arg) if type(arg) is NodeValue
            else decode_value(arg, where=f"{where}.args[{i}]", hook=hook)
            for i, arg in enumerate(desc.args)
        ])  # fmt: skip
        kwargs = {
            key: decode_value(arg, where=f"{where}.kwargs[{key!r}]", hook=hook)
            for key, arg in desc.kwargs
        }
        if self.devices:
            target, args, kwargs = self.devices.move_call(desc.op, target, args, kwargs, where)
        annotation: Any = (
            None if desc.type is None else decode_value(desc.type, where=f"{where}.type")
        )
        if annotation is not None and not isinstance(annotation, type):
            raise FormatError("not an annotation", where=f"{where}.type", found=repr(annotation))
        # Set the arguments later: `create_node` warns of symbolic scalars among them.
        fx_node = graph.create_node(desc.op, target, name=desc.name, type_expr=annotation)
        # `Node.__setattr__` would remove and reinsert the node in the graph's table of operators.
        if args:
            object.__setattr__(fx_node, "args", args)
        if kwargs:
            object.__setattr__(fx_node, "kwargs", kwargs)
        if fx_node.name != desc.name:
            _rename(graph, fx_node, desc.name)
        return fx_node

    def _decode_function(self, v: FunctionValue, where: str) -> Any:
        function = self.functions.get((v.kind, v.name))
        if function is None:
            function = names.decode_function(v, where=where)
            self.functions[v.kind, v.name] = function
        return function

    def _check_reference(self, desc: NodeDesc, scope: _Scope, where: str) -> None:
        if desc.op == "get_attr" and desc.target not in scope.attributes:
            raise FormatError(
                "the module has no such attribute", where=f"{where}.target", found=repr(desc.target)
            )
        if desc.op == "call_module" and desc.target not in scope.graphs:
            raise FormatError(
                "the module has no such submodule", where=f"{where}.target", found=repr(desc.target)
            )
        if isinstance(desc.target, FunctionValue) and desc.target.name in READS_ATTRIBUTE:
            owner = desc.args[0]
            assert isinstance(owner, NodeValue)
            if 0 <= owner.index < len(scope.nodes):
                fx_node = scope.nodes[owner.index]
                if fx_node.op == "get_attr" and fx_node.target in scope.graphs:
                    raise FormatError("an attribute of a graph is read", where=f"{where}.args[0]")

    def _hook(
        self, nodes: list[torch.fx.Node], converted: Mapping[int, torch.Tensor] = _NOTHING
    ) -> Callable[[Value], object]:
        def decode(v: Value) -> Any:
            return decode_value(v, hook=hook)

        def hook(v: Value) -> object:
            # Called for each value of a graph: test the most frequent kinds first.
            if type(v) is NodeValue:
                if not 0 <= v.index < len(nodes):
                    raise FormatError(
                        "an FX node refers to none before it",
                        expected=f"a position below {len(nodes)}",
                        found=str(v.index),
                    )
                return nodes[v.index]
            if type(v) is TensorValue:
                made = converted.get(id(v.tensor))
                return self.convert(v.tensor) if made is None else made
            if type(v) in _CONTAINERS:
                return NotImplemented
            if isinstance(v, SymValue):
                if isinstance(v.sym, NestedIntDesc):
                    return torch_symbols.make_nested_int(*v.sym)
                return self.sym(v.sym)
            if isinstance(v, ExprValue):
                return decode_expr(v.expr)
            if isinstance(v, SourceValue):
                return decode_source(v.source, memo=self.sources)
            if isinstance(v, TorchConstValue) and v.kind == "device" and self.devices:
                return torch.device(self.devices.move(v.name))
            if isinstance(v, OpaqueValue):
                if is_opaque(v):
                    return decode_opaque(v, "$", hook, self.meshes)
                return decode_meta_dataclass(v, decode)
            return NotImplemented

        return hook


def _restore_users(d: GraphModuleDesc, nodes: list[torch.fx.Node], where: str) -> None:
    for i, desc in enumerate(d.nodes):
        if desc.users is None:
            continue
        users = nodes[i].users
        if not all(0 <= j < len(nodes) for j in desc.users) or (
            len(desc.users) != len(users) or {nodes[j] for j in desc.users} != set(users)
        ):
            raise FormatError("not the users of the node", where=f"{where}.nodes[{i}].users")
        users.clear()
        users.update(dict.fromkeys(nodes[j] for j in desc.users))


def _rename(graph: torch.fx.Graph, fx_node: torch.fx.Node, name: str) -> None:
    """Rename a node; FX's own numbering of names depends on the graph's history."""
    fx_node.name = name
    namespace: Any = graph._graph_namespace
    namespace._used_names.add(name)
    namespace._obj_to_name[fx_node] = name
