"""The metadata of FX nodes <-> records: what is carried, what is not, and why.

Compilers leave notes for one another in ``Node.meta``. One table says of each key of torch 2.13
whether a record carries it. A key that the table does not know, or whose value has no record, is
named with the reason in ``dropped_meta`` of the node's record.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import sympy
import torch
from torch.fx.traceback import NodeSource

from . import _torch, names
from .desc import (
    DictValue,
    FunctionValue,
    ListValue,
    OpaqueValue,
    StackDesc,
    TensorValue,
    TupleValue,
    Value,
)
from .errors import (
    FormatError,
    UnknownNameError,
    UnsupportedTensorError,
    UnsupportedValueError,
)
from .stacks import parse_stack, stack_text
from .values import decode_value, encode_value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .values import DecodeHook, EncodeHook

__all__ = [
    "CARRIED",
    "DROPPED",
    "MODULE_CARRIED",
    "MODULE_DROPPED",
    "MetaDecoder",
    "MetaEncoder",
    "SharedValues",
    "decode_note",
    "encode_note",
]

_Types: TypeAlias = "Mapping[str, type | tuple[type, ...]]"

CARRIED: _Types = {
    # what a node computes
    "example_value": object,
    "val": object,
    "tensor_meta": object,
    "eager_input_vals": tuple,
    "arg_kwarg_vals": tuple,
    "unbacked_bindings": dict,
    "only_clone_these_tensors": (list, tuple),
    "original_output_strides": (list, tuple),
    # where it comes from
    "stack_trace": str,
    "nn_module_stack": dict,
    "fwd_nn_module_stack": (dict, type(None)),
    "source_fn_stack": list,
    "fwd_source_fn_stack": (list, type(None)),
    "torch_fn": tuple,
    "from_node": list,
    "original_aten": object,
    "desc": object,
    "output_stack_traces": (list, tuple),
    # what a compiler is told to do with it
    "custom": dict,
    "recompute": object,
    "ac_graph_id": int,
    "partitioner_tag": str,
    "autograd_backward": bool,
    "is_gradient_acc": bool,
    "is_functional_regenerated": bool,
    "has_backward_hook": bool,
    "has_with_effects": bool,
    "seq_nr": int,
    "memory_budget": (int, float),
    "user_visible_output_idxs": (list, tuple, range),
    "saved_tensor_with_no_vc_check": bool,
    "should_fallback": bool,
    "steal_arg": bool,
    "is_static_input": bool,
    "aot_runtime_epilogue_input_mutation": bool,
    "user_cache_hash": str,
    "tensor_dict": dict,
    "_fx_runtime_assert_preserve": bool,
    "nested_region_config": object,
    "_checkpoint_context_fn": object,
    "local_map_kwargs": object,
}
"""Keys that a record carries, and what type the value must have in a file."""

DROPPED: Mapping[str, str] = {
    "grapharg": "it holds the real input; its source is kept in the node's record",
    "creation_timestamp": "a count of Dynamo's tracer, which orders nodes only while it traces",
    "is_wrapped": "torch.fx.wrap rewrites a module's globals; the target is called all the same",
    "fake_result": "a copy of `val` that inductor remakes",
    "mutation_region_id": "remade by inductor's pattern matcher",
    "inductor_realize_to_strides": "remade by inductor",
    "dislike_padding": "remade by inductor",
    "low_precision_pointwise_barrier": "remade by inductor",
    "produced_by_chunker": "remade by inductor",
    "chunking": "remade by inductor",
    "fusion_meta": "remade by inductor",
    "cudagraph_annotation": "remade by inductor",
    "extern_semantic_key": "of inductor's log of kernels",
    "saved_for_offloading": "remade by the partitioner",
    "saved_for_quantization": "remade by the partitioner",
    "should_offload": "remade by the partitioner",
    "cpu_offload_reload_node": "remade by the partitioner",
    "original_device": "remade by the partitioner",
    "dequant_type": "remade by the partitioner",
    "is_backward": "remade by AOTAutograd",
    "_observed_graph_module_attrs": "of eager-mode FX quantization",
    "target_dtype_info": "of eager-mode FX quantization",
    "quantization_annotation": "of export quantization",
    "quantization_tag": "of export quantization",
    "_numeric_debug_handle": "of export quantization",
    "type": "a copy of the annotation",
    "annotation": "of FX pattern matching",
    "symbol": "of the graph in which translation validation rebuilds guards",
    "broadcast": "of the gradual type checker",
    "buf_meta": "of drawings of graphs",
    "node_idx": "of the reinplacing pass, which remakes it",
    "view_of": "of the reinplacing pass, which remakes it",
    "concrete_value": "of the minifier, which remakes it",
    "original_size": "remade by activation offloading",
    "original_stride": "remade by activation offloading",
    "value": "of the streams pass, which remakes it",
    "quant_options": "remade by inductor",
    "extra_options": "of generated Triton calls",
    "_allow_mixed_dtype_folding": "remade by inductor",
}
"""Keys that no compiler needs from a record, and why."""

MODULE_CARRIED: _Types = {
    "dynamo_flat_name_to_original_fqn": dict,
    "_checkpoint_context_fn": object,
    "locals_to_steal": list,
    "num_activations": int,
}
"""Keys of ``GraphModule.meta`` that a record carries."""

MODULE_DROPPED: Mapping[str, str] = {
    "dynamo_compile_id": "of one process; an instance gets its own",
    "backend_id": "random; of one process",
    "specialization": "a function of Dynamo's, for one of several graphs of a frame",
    "mutated_named_buffers": "remade by inductor",
    "partition_names": "of one splitting pass",
    "fake_mode": "of export; an instance has its own",
    "tracing_context": "of export; an instance has its own",
    "module_call_specs": "of export",
    "inline_constraints": "of export; the shape environment has them",
    "unflattened_module": "of export",
    "args": "of export's retracing passes",
}
"""Keys of ``GraphModule.meta`` that are of one process."""

_MODULE_STACKS = frozenset({"nn_module_stack", "fwd_nn_module_stack"})
_FUNCTION_STACKS = frozenset({"source_fn_stack", "fwd_source_fn_stack"})
_SHARED_KEYS = _MODULE_STACKS | _FUNCTION_STACKS | {"from_node", "output_stack_traces", "custom"}
"""Keys whose values many nodes have in common."""

_CHECKED = frozenset({"from_node", "custom", "unbacked_bindings"})
"""Keys whose values are read part by part, beside their type."""

_VALUES = frozenset({"example_value", "val"})
"""Keys that nearly every node has; their values need nothing but their record."""

_TENSOR_ATTRIBUTES = frozenset({"_dynamo_static_input_type"})
"""What compilers read of the Python attributes of an input (``meta["tensor_dict"]``)."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

_ADDRESS_KEY = re.compile(r"(\d{6,})(|@\d+)")

_NO_VALUES: Mapping[int, Value] = MappingProxyType({})

_CONFIGS = "inductor_configs"

_MAX_PROVENANCE = 16
"""How deep ``NodeSource`` may be nested."""


# --- encode ---------------------------------------------------------------------------------------


class MetaEncoder:
    """Encodes the metadata of the nodes of one graph, with its submodules.

    Args:
        first_seq_nr: what autograd's sequence numbers are counted from.
        file_name: applied to every file name of a stack.
    """

    def __init__(self, first_seq_nr: int, file_name: Callable[[str], str]) -> None:
        self._first_seq_nr = first_seq_nr
        self._file_name = file_name
        self._stacks: dict[str, StackDesc | str] = {}
        self._graphs: dict[int, int] = {}
        self._modules: dict[str, int] = {}
        self._module_keys: dict[str, str] = {}
        self._known_modules: dict[tuple[str, type], Value] = {}
        # By the id of a function, which the entry keeps alive.
        self._functions: dict[int, tuple[Any, Any]] = {}
        # Whether the value at hand has the record of all values that equal it, as 1 equals True.
        self._is_usual = True

    def stack(self, text: object) -> StackDesc | str | None:
        """``meta["stack_trace"]`` as frames, or as text where it has another form."""
        if not isinstance(text, str):
            return None
        if text not in self._stacks:
            self._stacks[text] = parse_stack(text, self._file_name)
        return self._stacks[text]

    def encode(
        self,
        meta: Mapping[Any, Any],
        hook: EncodeHook,
        shared: SharedValues,
        *,
        carried: Mapping[str, Any] = CARRIED,
        dropped: Mapping[str, str] = DROPPED,
        values: Mapping[int, Value] = _NO_VALUES,
    ) -> tuple[tuple[tuple[str, Value], ...], tuple[tuple[str, str], ...]]:
        """The carried entries, and the dropped ones with their reasons.

        Args:
            meta: of a node or a module.
            hook: as for `encode_value`.
            shared: has what many nodes have in common.
            carried: keys, with the types of their values.
            dropped: keys that are left out without a word.
            values: records that are known, by the id of what they are of.
        """
        kept: list[tuple[str, Value]] = []
        lost: list[tuple[str, str]] = []
        pairs = shared.pairs
        for key, value in meta.items():
            if key not in carried:
                if key not in dropped:
                    lost.append((str(key), "unknown to this version"))
                continue
            memo: Any = None
            if key in _VALUES:
                known = values.get(id(value))
                if known is not None:
                    kept.append((key, known))
                    continue
            elif key == "stack_trace" and isinstance(value, str):
                stack = self.stack(value)
                if isinstance(stack, str):  # else it has a field of its own
                    kept.append((key, stack))
                continue
            elif key in _MODULE_STACKS:
                memo = (key, *value, *value.values()) if isinstance(value, dict) else None
            elif key in _FUNCTION_STACKS:
                memo = (key, *value) if isinstance(value, list) else None
            elif key == "tensor_dict" and isinstance(value, dict):
                memo = (key, *value.items()) if value.keys() <= _TENSOR_ATTRIBUTES else None
            try:
                pair = pairs.get(memo)
            except TypeError:
                pair = memo = None
            if pair is not None:
                kept.append(pair)
                continue
            self._is_usual = True
            try:
                record = self._encode_entry(key, value, hook, lost)
            except (UnsupportedValueError, UnsupportedTensorError) as error:
                lost.append((key, _ADDRESS.sub("", str(error))))
                continue
            pair = (key, shared.put(record) if key in _SHARED_KEYS else record)
            if memo is not None and self._is_usual:
                pairs[memo] = pair
            kept.append(pair)
        return tuple(kept), tuple(lost)

    def _encode_entry(
        self, key: str, value: Any, hook: EncodeHook, lost: list[tuple[str, str]]
    ) -> Value:
        if key in _MODULE_STACKS and isinstance(value, dict):
            return self._module_stack(value, hook)
        if key in _FUNCTION_STACKS and isinstance(value, list):
            return ListValue(items=tuple([self._source_fn(entry, hook) for entry in value]))
        if key == "tensor_dict":
            return self._attributes(value, hook, lost)
        where = f"meta[{key!r}]"
        match key:
            case "from_node" if isinstance(value, list):
                return encode_value([self._provenance(s) for s in value], where=where, hook=hook)
            case "seq_nr" if type(value) is int:
                return value - self._first_seq_nr
            case "custom" if _has_text_configs(value, 0):
                raise UnsupportedValueError(
                    "settings of inductor that are no numbers stay behind",
                    where=where,
                    fix="They may name programs to run",
                )
            case "original_aten" if isinstance(value, _torch.OpOverload):
                # Passes deep-copy metadata, operators included: here the name decides.
                return names.encode_operator(value)
            case "original_aten" if isinstance(value, _torch.HigherOrderOperator):
                return FunctionValue(kind="hop", name=value.name())
            case _:
                return encode_value(value, where=where, hook=hook)

    def _attributes(
        self, value: dict[str, Any], hook: EncodeHook, lost: list[tuple[str, str]]
    ) -> Value:
        """``meta["tensor_dict"]`` without what only the user's program reads."""
        known = {k: v for k, v in value.items() if k in _TENSOR_ATTRIBUTES}
        if len(known) < len(value):
            lost.extend(
                (f"tensor_dict.{k}", "an attribute of the user's tensor")
                for k in value
                if k not in known
            )
        self._is_usual = all(type(v) is str for v in known.values())
        return encode_value(known, where="meta['tensor_dict']", hook=hook)

    def _module_key(self, key: Any) -> Any:
        """The key of a module, counted in the order seen where Dynamo uses the address."""
        if not isinstance(key, str):
            return key
        known = self._module_keys.get(key)
        if known is None:
            match = _ADDRESS_KEY.fullmatch(key)
            known = key
            if match is not None:
                known = f"{self._modules.setdefault(match[1], len(self._modules))}{match[2]}"
            self._module_keys[key] = known
        return known

    def _module_stack(self, value: dict[Any, Any], hook: EncodeHook) -> Value:
        items: dict[str, Value] = {}
        for key, entry in value.items():
            record = self._known_modules.get(entry) if _is_module(entry) else None
            if record is None:
                record = self._module(entry, hook)
            known = self._module_keys.get(key) or self._module_key(key)
            if record is None or type(known) is not str or not known.isascii():
                self._is_usual = False
                entries = {self._module_key(k): _module_entry(e) for k, e in value.items()}
                return encode_value(entries, hook=hook)
            items[known] = record
        return DictValue(items=tuple(items.items()))

    def _module(self, entry: Any, hook: EncodeHook) -> Value:
        """The record of a module's path and class; ``None`` for anything else."""
        if not _is_module(entry):
            return None
        try:
            record = _pair(_module_entry(entry), hook)
        except UnsupportedValueError:
            return None  # where the stack is encoded as a whole, the error has its path
        self._known_modules[entry] = record
        return record

    def _source_fn(self, entry: Any, hook: EncodeHook) -> Value:
        if not (isinstance(entry, tuple) and len(entry) == 2):
            self._is_usual = False
            return encode_value(entry, hook=hook)
        name, fn = entry
        if type(name) is not str or not (callable(fn) or type(fn) is str):
            self._is_usual = False
        known = self._functions.get(id(fn))
        if known is None:
            known = self._functions[id(fn)] = (fn, _source_fn(fn))
        return _pair((name, known[1]), hook)

    def _provenance(self, source: Any, depth: int = 0) -> OpaqueValue:
        if not isinstance(source, NodeSource) or depth > _MAX_PROVENANCE:
            raise UnsupportedValueError("not the provenance of a node", found=type(source).__name__)
        info = source.node_info
        # Graphs are numbered in the order seen: torch's number is an address.
        graph = -1 if info is None else self._graphs.setdefault(info.graph_id, len(self._graphs))
        return OpaqueValue(
            kind="NodeSource",
            data=TupleValue(
                items=(
                    None if info is None else info.name,
                    "" if info is None else _ADDRESS.sub("", info.target),
                    graph,
                    source.pass_name,
                    source._get_action_string(),
                    TupleValue(
                        items=tuple(self._provenance(s, depth + 1) for s in source.from_node)
                    ),
                )
            ),
        )


class SharedValues:
    """Values that many nodes have in common, each held once."""

    def __init__(self) -> None:
        self.pairs: dict[Any, tuple[str, Value]] = {}
        """Of metadata: keys with the records of their values, by what equal ones have in common."""
        self._positions: dict[bytes, int] = {}
        self._values: list[Value] = []
        self._write = msgspec.json.Encoder().encode

    def put(self, value: Value) -> Value:
        """A reference to the value, or the value if it is no larger than that."""
        if not isinstance(value, (TupleValue, ListValue, DictValue)):
            return value
        # By text: records that compare equal may differ (True and 1, 0.0 and -0.0).
        position = self._positions.setdefault(self._write(value), len(self._values))
        if position == len(self._values):
            self._values.append(value)
        return OpaqueValue(kind="shared", data=position)

    @property
    def values(self) -> tuple[Value, ...]:
        """The values by position."""
        return tuple(self._values)


def encode_note(obj: object, hook: EncodeHook) -> Value:
    """The record of one of torch's small dataclasses in metadata; ``None`` for anything else.

    What is a record already stays it.
    """
    cls = type(obj)
    if isinstance(obj, (OpaqueValue, FunctionValue)):
        return obj
    if cls.__name__ not in _torch.note_classes() or _torch.note_classes()[cls.__name__] is not cls:
        return None
    fields = tuple(
        (f.name, encode_value(getattr(obj, f.name), where=f"{cls.__name__}.{f.name}", hook=hook))
        for f in dataclasses.fields(obj)  # pyright: ignore[reportArgumentType]
    )
    return OpaqueValue(kind=cls.__name__, data=DictValue(items=fields))


def _module_entry(entry: Any) -> Any:
    """``(path, class)`` with the class as text: a reader has no need to import it."""
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], type):
        return (entry[0], _class_text(entry[1]))
    return entry


def _is_module(entry: Any) -> bool:
    """Whether it is such a pair as Dynamo makes: equal ones have equal records."""
    return (
        type(entry) is tuple
        and len(entry) == 2
        and type(entry[0]) is str
        and isinstance(entry[1], type)
    )


def _class_text(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _source_fn(fn: Any) -> Any:
    """A function, as text where it has no record."""
    if isinstance(fn, type):
        return _class_text(fn)
    if isinstance(fn, str):
        return fn
    try:
        return names.encode_function(fn)
    except UnsupportedValueError:
        module = getattr(fn, "__module__", None)
        qualname = getattr(fn, "__qualname__", None)
        if isinstance(qualname, str):
            return f"{module}.{qualname}"
        return _ADDRESS.sub("", str(fn))


def _pair(entry: tuple[Any, Any], hook: EncodeHook) -> Value:
    """The record of a pair, nearly always of two texts or of one and a function."""
    name, value = entry
    plain = type(value) is FunctionValue or (type(value) is str and value.isascii())
    if plain and type(name) is str and name.isascii():
        return TupleValue(items=(name, value))
    return encode_value(entry, hook=hook)


# --- decode ---------------------------------------------------------------------------------------


class MetaDecoder:
    """Decodes the metadata of one graph's nodes."""

    def __init__(self, shared: tuple[Value, ...]) -> None:
        self._shared = shared
        self._decoded: dict[tuple[str, int], Any] = {}
        self._functions: dict[tuple[str, str], object] = {}
        # By the id of a record, which the entry keeps alive.
        self._stacks: dict[int, tuple[StackDesc, str]] = {}
        _torch.note_classes()  # named tuples in metadata are found only if their class is imported

    def stack(self, d: StackDesc) -> str:
        """`stack_text`, once for each record: most nodes share theirs."""
        known = self._stacks.get(id(d))
        if known is None:
            known = self._stacks[id(d)] = (d, stack_text(d))
        return known[1]

    def decode(
        self,
        meta: tuple[tuple[str, Value], ...],
        *,
        where: str,
        hook: DecodeHook,
        carried: _Types = CARRIED,
    ) -> dict[str, Any]:
        """A dictionary for ``Node.meta``; ``where`` is the path of the node.

        Raises:
            FormatError: an entry is unknown or of the wrong type.
        """
        result: dict[str, Any] = {}
        for i, (key, record) in enumerate(meta):
            shared = record if type(record) is OpaqueValue and record.kind == "shared" else None
            if shared is not None and type(shared.data) is int and key not in result:
                known = self._decoded.get((key, shared.data))
                if known is not None:
                    result[key] = _own(known)
                    continue
            # What nearly every node has needs no more than this.
            kind = type(record)
            if kind is str and carried.get(key) is str and key not in result:
                result[key] = record
                continue
            if kind is TensorValue and key in _VALUES and key in carried and key not in result:
                result[key] = hook(record)
                continue
            here = f"{where}.meta[{i}]"
            if key not in carried or key in result:
                raise FormatError("not a metadata key", where=here, found=repr(key))
            if shared is not None:
                result[key] = self._decode_shared(key, shared.data, here, hook, carried)
            else:
                result[key] = self._decode_entry(key, record, here, hook, carried)
        return result

    def _decode_shared(
        self, key: str, position: Value, where: str, hook: DecodeHook, carried: _Types
    ) -> Any:
        if key not in _SHARED_KEYS or type(position) is not int:
            raise FormatError("not a shared value", where=where, found=repr(position))
        if not 0 <= position < len(self._shared):
            raise FormatError("no such shared value", where=where, found=repr(position))
        known = self._decode_entry(key, self._shared[position], where, hook, carried)
        self._decoded[key, position] = known
        return _own(known)

    def _decode_entry(
        self, key: str, record: Value, where: str, hook: DecodeHook, carried: _Types
    ) -> Any:
        if key in ("source_fn_stack", "fwd_source_fn_stack", "original_aten"):
            # Notes may name an operator that no longer is in the graph and that nobody has here.
            hook = self._lenient(hook)
        value = decode_value(record, where=where, hook=hook)
        if not isinstance(value, carried[key]):
            raise FormatError(
                f"metadata {key!r} has the wrong type", where=where, found=type(value).__name__
            )
        if key not in _CHECKED:
            return value
        if key == "from_node" and not all(isinstance(s, NodeSource) for s in value):
            raise FormatError("not the provenance of a node", where=where)
        if key == "custom" and not all(isinstance(k, str) for k in value):
            raise FormatError("annotations are named by strings", where=where)
        if key == "custom" and _has_text_configs(value, 0):
            raise FormatError(
                "settings of inductor may name programs to run", where=where, expected="numbers"
            )
        if key == "unbacked_bindings":
            _check_bindings(value, where)
        return value

    def _lenient(self, hook: DecodeHook) -> DecodeHook:
        def lenient(record: Value) -> object:
            if type(record) is not FunctionValue:
                return hook(record)
            key = record.kind, record.name
            if key not in self._functions:
                try:
                    self._functions[key] = names.decode_function(record)
                except UnknownNameError:
                    self._functions[key] = record.name
            return self._functions[key]

        return lenient


def _own(shared: Any) -> Any:
    """A copy, as passes change the metadata of one node: the outer container must be its own."""
    return shared.copy() if type(shared) in (dict, list) else copy.copy(shared)


def _has_text_configs(value: Any, depth: int) -> bool:
    """Whether an annotation would set what inductor runs, such as the name of a compiler.

    ``torch.fx.passes.regional_inductor`` compiles the marked part of a graph with the settings in
    ``custom["compile_with_inductor"]["inductor_configs"]``.
    """
    if depth > _MAX_PROVENANCE or not isinstance(value, dict):
        return False
    for key, item in value.items():  # pyright: ignore[reportUnknownVariableType]
        if key != _CONFIGS:
            if _has_text_configs(item, depth + 1):
                return True
        elif not isinstance(item, dict) or not all(
            setting is None or isinstance(setting, (bool, int, float))
            for setting in item.values()  # pyright: ignore[reportUnknownVariableType]
        ):
            return True
    return False


def _check_bindings(value: Any, where: str) -> None:
    keys = tuple(_torch.note_classes()[name] for name in _torch.PATH_KEYS)
    for symbol, path in value.items():
        if not (isinstance(symbol, sympy.Symbol) and isinstance(path, tuple)):
            raise FormatError("not a binding of an unbacked symbol", where=where)
        if not all(isinstance(key, keys) for key in path):
            raise FormatError("not a path into a value", where=where, found=repr(symbol))


def decode_note(v: OpaqueValue, decode: Callable[[Value], Any], *, where: str = "$") -> Any:
    """The object of :func:`encode_note`, or a ``NodeSource``.

    Raises:
        FormatError: no such class, or not its fields.
    """
    if v.kind == "NodeSource":
        return _decode_provenance(v, where)
    cls = _torch.note_classes().get(v.kind)
    if cls is None or not isinstance(v.data, DictValue):
        raise FormatError("unknown kind of metadata", where=where, found=repr(v.kind))
    expected = [f.name for f in dataclasses.fields(cls)]
    if [k for k, _ in v.data.items] != expected:
        raise FormatError(
            f"wrong fields for {v.kind}", where=where, expected=", ".join(expected) or "none"
        )
    fields = {str(k): decode(item) for k, item in v.data.items}
    if v.kind == "CallMethodKey":
        names.check_method(_text(fields["name"], where), where=where)
    elif v.kind in ("GetAttrKey", "InnerTensorKey"):
        names.check_attribute(_text(next(iter(fields.values())), where), where=where)
    elif v.kind == "SequenceKey" and type(fields["idx"]) is not int:
        raise FormatError("not a position", where=where, found=repr(fields["idx"]))
    elif v.kind == "DivideByKey" and not isinstance(fields["divisor"], (int, torch.SymInt)):
        raise FormatError("not a divisor", where=where, found=repr(fields["divisor"]))
    return cls(**fields)


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise FormatError("not a name", where=where, found=type(value).__name__)
    return value


def _decode_provenance(v: OpaqueValue, where: str, depth: int = 0) -> Any:
    match v.data:
        case TupleValue(items=(None | str() as name, str() as target, int() as graph,
                               str() as pass_name, str() as action,
                               TupleValue(items=parents))) if depth <= _MAX_PROVENANCE:  # fmt: skip
            pass
        case _:
            raise FormatError("not the provenance of a node", where=where)
    fields: dict[str, Any] = {"pass_name": pass_name, "action": action}
    if name is not None:
        fields.update(name=name, target=target, graph_id=graph)
    source: Any = NodeSource._from_dict(fields)
    source.from_node = []
    for parent in parents:
        if not (isinstance(parent, OpaqueValue) and parent.kind == "NodeSource"):
            raise FormatError("not the provenance of a node", where=where)
        source.from_node.append(_decode_provenance(parent, where, depth + 1))
    return source
