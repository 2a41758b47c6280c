"""Metadata of FX nodes (``Node.meta``) <-> records.

The tables in ``records/metadata_keys.py`` define for each key of torch 2.13 whether it is carried; under
other keys plain data is carried. Dropped entries are listed with the reason in ``dropped_meta`` of the
node's record.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
import sympy
import torch
from torch.fx.traceback import NodeSource

from torch_fakeify.compat import torch_graphs
from torch_fakeify.encoding import names
from torch_fakeify.encoding.stacks import parse_stack, stack_text
from torch_fakeify.encoding.values import decode_value, encode_value
from torch_fakeify.errors import (
    FormatError,
    UnknownNameError,
    UnsupportedTensorError,
    UnsupportedValueError,
    class_name,
)
from torch_fakeify.records.graph import VALUE_KEYS
from torch_fakeify.records.metadata_keys import (
    CARRIED,
    DROPPED,
    Types,
    is_plain,
)
from torch_fakeify.records.tensor import (
    DictValue,
    FunctionValue,
    ListValue,
    OpaqueValue,
    StackDesc,
    TensorValue,
    TupleValue,
    Value,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch_fakeify.encoding.values import DecodeHook, EncodeHook

_MODULE_STACKS = frozenset({"nn_module_stack", "fwd_nn_module_stack"})
_FUNCTION_STACKS = frozenset({"source_fn_stack", "fwd_source_fn_stack"})
_SHARED_KEYS = _MODULE_STACKS | _FUNCTION_STACKS | {"from_node", "output_stack_traces", "custom"}
"""Keys whose values are shared by many nodes."""

_TENSOR_ATTRIBUTES = frozenset({"_dynamo_static_input_type"})
"""Python attributes of an input (``meta["tensor_dict"]``) that compilers read."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

_ADDRESS_KEY = re.compile(r"(\d{6,})(|@\d+)")

_NO_VALUES: Mapping[int, Value] = MappingProxyType({})

_CONFIGS = "inductor_configs"

_PLAIN_TYPES = frozenset({
    type(None), bool, float, torch.dtype, torch.device, torch.layout, torch.memory_format,
})  # fmt: skip
"""Types of plain data besides ``str``, ``int`` and containers."""
_MAX_PLAIN = 1 << 16
"""Largest number of parts of one entry of plain data, and of characters in its texts."""
_MAX_BITS = 256

_MAX_PROVENANCE = 16
"""Largest nesting depth of ``NodeSource`` and plain data."""


# --- encode ---------------------------------------------------------------------------------------


class MetaEncoder:
    """Encodes the metadata of the nodes of one graph, with its submodules.

    Args:
        first_seq_nr: subtracted from autograd's sequence numbers.
        file_name: applied to every file name of a stack.
    """

    def __init__(self, first_seq_nr: int, file_name: Callable[[str], str]) -> None:
        self._first_seq_nr = first_seq_nr
        self._parse_stack = functools.cache(lambda text: parse_stack(text, file_name))
        self._graphs: dict[int, int] = {}
        self._modules: dict[str, int] = {}
        self._module_records: dict[tuple[str, type], Value] = {}
        # By the id of a function; the entry holds a reference to it.
        self._functions: dict[int, tuple[Any, Any]] = {}

    def stack(self, text: object) -> StackDesc | str | None:
        """Parse ``meta["stack_trace"]``; returns the text if it has another form."""
        return self._parse_stack(text) if isinstance(text, str) else None

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
        """Encode metadata: the carried entries, and the dropped keys with the reasons.

        ``dropped`` are keys that are omitted without a reason in the record; ``values`` are cached
        records of values, by the id of the value.
        """
        entries: list[tuple[str, Value]] = []
        lost: list[tuple[str, str]] = []
        pairs = shared.pairs
        for key, value in meta.items():
            if key not in carried:
                if key in dropped:
                    continue
                if not _is_text(key):
                    lost.append((_text_of(key), "the key is no text"))
                elif (reason := _not_plain(value)) is not None:
                    lost.append((key, f"not plain data: {reason}"))
                else:
                    entries.append((key, encode_value(value, where=f"meta[{key!r}]")))
                continue
            if key in VALUE_KEYS:
                cached = values.get(id(value))
                if cached is not None:
                    entries.append((key, cached))
                    continue
            elif key == "stack_trace" and isinstance(value, str):
                stack = self.stack(value)
                if isinstance(stack, str):  # frames are in `NodeDesc.stack`
                    entries.append((key, stack))
                continue
            memo = _memo_of(key, value)
            try:
                pair = pairs.get(memo)
            except TypeError:
                pair = memo = None
            if pair is not None:
                entries.append(pair)
                continue
            try:
                record = self._encode_entry(key, value, hook, lost)
            except (UnsupportedValueError, UnsupportedTensorError) as error:
                lost.append((key, _ADDRESS.sub("", str(error))))
                continue
            pair = (key, shared.add(record) if key in _SHARED_KEYS else record)
            if memo is not None and _has_shared_record(key, value):
                pairs[memo] = pair
            entries.append(pair)
        return tuple(entries), tuple(lost)

    def _encode_entry(
        self, key: str, value: Any, hook: EncodeHook, lost: list[tuple[str, str]]
    ) -> Value:
        if key in _MODULE_STACKS and isinstance(value, dict):
            return self._module_stack(value, hook)
        if key in _FUNCTION_STACKS and isinstance(value, list):
            return ListValue(items=tuple([self._source_fn(entry, hook) for entry in value]))
        if key == "tensor_dict":  # without the attributes of the user's program
            others = [k for k in value if k not in _TENSOR_ATTRIBUTES]
            lost.extend((f"tensor_dict.{k}", "an attribute of the user's tensor") for k in others)
            value = {k: v for k, v in value.items() if k in _TENSOR_ATTRIBUTES}
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
            case "original_aten" if isinstance(value, torch_graphs.OpOverload):
                # Passes deep-copy metadata with its operators: encode by name, not by identity.
                return names.encode_operator(value)
            case "original_aten" if isinstance(value, torch_graphs.HigherOrderOperator):
                return FunctionValue(kind="hop", name=value.name())
            case _:
                return encode_value(value, where=where, hook=hook)

    def _module_key(self, key: Any) -> Any:
        """The key of a module; addresses are replaced by numbers in order of first use."""
        match = _ADDRESS_KEY.fullmatch(key) if isinstance(key, str) else None
        if match is None:
            return key
        return f"{self._modules.setdefault(match[1], len(self._modules))}{match[2]}"

    def _module_stack(self, value: dict[Any, Any], hook: EncodeHook) -> Value:
        items: dict[str, Value] = {}
        for key, entry in value.items():
            name, record = self._module_key(key), self._module(entry, hook)
            if record is None or type(name) is not str or not name.isascii():
                entries = {self._module_key(k): _module_entry(e) for k, e in value.items()}
                return encode_value(entries, hook=hook)
            items[name] = record
        return DictValue(items=tuple(items.items()))

    def _module(self, entry: Any, hook: EncodeHook) -> Value:
        """Encode a module's path and class; ``None`` for any other value."""
        if not _is_module(entry):
            return None
        if entry not in self._module_records:
            try:
                self._module_records[entry] = _pair(_module_entry(entry), hook)
            except UnsupportedValueError:
                return None  # raised with a path when the whole stack is encoded
        return self._module_records[entry]

    def _source_fn(self, entry: Any, hook: EncodeHook) -> Value:
        if not (isinstance(entry, tuple) and len(entry) == 2):
            return encode_value(entry, hook=hook)
        name, fn = entry
        cached = self._functions.get(id(fn))
        if cached is None:
            cached = self._functions[id(fn)] = (fn, _source_fn(fn))
        return _pair((name, cached[1]), hook)

    def _provenance(self, source: Any, depth: int = 0) -> OpaqueValue:
        if not isinstance(source, NodeSource) or depth > _MAX_PROVENANCE:
            raise UnsupportedValueError("not the provenance of a node", found=type(source).__name__)
        info = source.node_info
        # Graphs are numbered in order of first use: torch's number is an address.
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


def _memo_of(key: str, value: Any) -> Any:
    """The key of an entry in the cache of records, or ``None``."""
    if key in _FUNCTION_STACKS and isinstance(value, list):
        return (key, *value)
    if not isinstance(value, dict):
        return None
    # Other attributes of a tensor are objects of the user's program, which are not hashed.
    is_of_torch = key == "tensor_dict" and value.keys() <= _TENSOR_ATTRIBUTES
    return (key, *value, *value.values()) if key in _MODULE_STACKS or is_of_torch else None


def _has_shared_record(key: str, value: Any) -> bool:
    """Whether all entries equal to this one have an equal record (1 equals True, but has another)."""
    if key in _FUNCTION_STACKS:
        return all(map(_is_named_function, value))
    if key in _MODULE_STACKS:
        return all(type(k) is str and _is_module(entry) for k, entry in value.items())
    return all(type(v) is str for v in value.values())


def _is_named_function(entry: Any) -> bool:
    """Whether a value is a pair of a name and a function, or its text, as Dynamo makes it."""
    if type(entry) is not tuple or len(entry) != 2 or type(entry[0]) is not str:
        return False
    return callable(entry[1]) or type(entry[1]) is str


def _not_plain(value: Any) -> str | None:
    """Why a value is not plain data; ``None`` if it is."""
    parts, characters = 0, 0
    pending: list[tuple[Any, int]] = [(value, 0)]
    while pending:
        part, depth = pending.pop()
        kind = type(part)
        parts += 1
        characters += len(part) if kind is str else 0
        if parts > _MAX_PLAIN or characters > _MAX_PLAIN or depth > _MAX_PROVENANCE:
            return f"more than {_MAX_PLAIN} parts or characters, or {_MAX_PROVENANCE} levels"
        if kind is str:
            if not _is_text(part):
                return "a text that is no Unicode"
        elif kind is int:
            if part.bit_length() > _MAX_BITS:
                return "a number of many digits"
        elif kind in (list, tuple):
            pending.extend([(item, depth + 1) for item in part])
        elif kind is dict:
            for key, item in part.items():
                if type(key) not in (str, int, float, bool):
                    return f"a key that is {_article(type(key))}"
                pending += [(key, depth + 1), (item, depth + 1)]
        elif kind not in _PLAIN_TYPES:
            return _article(kind)
    return None


def _article(kind: type) -> str:
    return f"an object of {class_name(kind)}"


def _is_text(value: Any) -> bool:
    """Whether a value is a string without lone surrogates."""
    if type(value) is not str:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text_of(key: Any) -> str:
    text = str(key) if isinstance(key, (str, int, float, bool)) else type(key).__qualname__
    return text.encode("utf-8", "backslashreplace").decode()


class SharedValues:
    """The table of values that nodes of a graph share."""

    def __init__(self) -> None:
        self.pairs: dict[Any, tuple[str, Value]] = {}
        """Encoded entries of metadata, by a memo key that equal entries share."""
        self._positions: dict[bytes, int] = {}
        self._values: list[Value] = []
        self._write = msgspec.json.Encoder().encode

    def add(self, value: Value) -> Value:
        """Add a container and return a reference to it; return any other value itself."""
        if not isinstance(value, (TupleValue, ListValue, DictValue)):
            return value
        # By JSON text: records that compare equal may differ (True and 1, 0.0 and -0.0).
        position = self._positions.setdefault(self._write(value), len(self._values))
        if position == len(self._values):
            self._values.append(value)
        return OpaqueValue(kind="shared", data=position)

    @property
    def values(self) -> tuple[Value, ...]:
        """The values, by position."""
        return tuple(self._values)


def encode_meta_dataclass(obj: object, hook: EncodeHook) -> Value:
    """Encode one of torch's dataclasses in metadata; ``None`` for any other object.

    A record is returned unchanged.
    """
    cls = type(obj)
    if isinstance(obj, (OpaqueValue, FunctionValue)):
        return obj
    if torch_graphs.meta_dataclasses().get(cls.__name__) is not cls:
        return None
    fields = tuple(
        (f.name, encode_value(getattr(obj, f.name), where=f"{cls.__name__}.{f.name}", hook=hook))
        for f in dataclasses.fields(obj)  # pyright: ignore[reportArgumentType]
    )
    return OpaqueValue(kind=cls.__name__, data=DictValue(items=fields))


def _module_entry(entry: Any) -> Any:
    """Replace the class in ``(path, class)`` by text, so that a reader need not import it."""
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], type):
        return (entry[0], class_name(entry[1]))
    return entry


def _is_module(entry: Any) -> bool:
    """Whether a value is a pair ``(path, class)`` as Dynamo makes it."""
    return (
        type(entry) is tuple
        and len(entry) == 2
        and type(entry[0]) is str
        and isinstance(entry[1], type)
    )


def _source_fn(fn: Any) -> Any:
    """A function, or its text if it has no record."""
    if isinstance(fn, type):
        return class_name(fn)
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
    """Encode a pair; fast for two texts, or a text and a function record."""
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
        # By the id of a record; the entry holds a reference to it.
        self._stacks: dict[int, tuple[StackDesc, str]] = {}
        torch_graphs.meta_dataclasses()  # imports the classes of named tuples in metadata

    def stack(self, d: StackDesc) -> str:
        """Format a stack, once for each record."""
        cached = self._stacks.get(id(d))
        if cached is None:
            cached = self._stacks[id(d)] = (d, stack_text(d))
        return cached[1]

    def decode(
        self,
        meta: tuple[tuple[str, Value], ...],
        *,
        where: str,
        hook: DecodeHook,
        carried: Types = CARRIED,
        dropped: Mapping[str, str] = DROPPED,
    ) -> dict[str, Any]:
        """Decode a dictionary for ``Node.meta``; ``where`` is the path of the node.

        Raises:
            FormatError: an entry is unknown or of the wrong type.
        """
        result: dict[str, Any] = {}
        for i, (key, record) in enumerate(meta):
            shared = record if type(record) is OpaqueValue and record.kind == "shared" else None
            if shared is not None and type(shared.data) is int and key not in result:
                cached = self._decoded.get((key, shared.data))
                if cached is not None:
                    result[key] = _shallow_copy(cached)
                    continue
            # Fast path for the keys of nearly every node.
            kind = type(record)
            if kind is str and carried.get(key) is str and key not in result:
                result[key] = record
                continue
            if kind is TensorValue and key in VALUE_KEYS and key in carried and key not in result:
                result[key] = hook(record)
                continue
            here = f"{where}.meta[{i}]"
            is_allowed = key in carried or (key not in dropped and is_plain(record))
            if not is_allowed or key in result:
                raise FormatError("not a metadata key", where=here, found=repr(key))
            if shared is not None:
                result[key] = self._decode_shared(key, shared.data, here, hook, carried)
            else:
                result[key] = self._decode_entry(key, record, here, hook, carried)
        return result

    def _decode_shared(
        self, key: str, position: Value, where: str, hook: DecodeHook, carried: Types
    ) -> Any:
        if key not in _SHARED_KEYS or type(position) is not int:
            raise FormatError("not a shared value", where=where, found=repr(position))
        if not 0 <= position < len(self._shared):
            raise FormatError("no such shared value", where=where, found=repr(position))
        value = self._decode_entry(key, self._shared[position], where, hook, carried)
        self._decoded[key, position] = value
        return _shallow_copy(value)

    def _decode_entry(
        self, key: str, record: Value, where: str, hook: DecodeHook, carried: Types
    ) -> Any:
        if key in ("source_fn_stack", "fwd_source_fn_stack", "original_aten"):
            # Metadata may name an operator that is not in the graph and not registered here.
            hook = self._lenient(hook)
        value = decode_value(record, where=where, hook=hook)
        if not isinstance(value, carried.get(key, object)):
            raise FormatError(
                f"metadata {key!r} has the wrong type", where=where, found=type(value).__name__
            )
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


def _shallow_copy(shared: Any) -> Any:
    """Copy a shared value, because passes change the metadata of single nodes."""
    return shared.copy() if type(shared) in (dict, list) else copy.copy(shared)


def _has_text_configs(value: Any, depth: int) -> bool:
    """Whether an annotation sets inductor options to text, such as the name of a compiler.

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
    keys = tuple(torch_graphs.meta_dataclasses()[name] for name in torch_graphs.PATH_KEYS)
    for symbol, path in value.items():
        if not (isinstance(symbol, sympy.Symbol) and isinstance(path, tuple)):
            raise FormatError("not a binding of an unbacked symbol", where=where)
        if not all(isinstance(key, keys) for key in path):
            raise FormatError("not a path into a value", where=where, found=repr(symbol))


def decode_meta_dataclass(
    v: OpaqueValue, decode: Callable[[Value], Any], *, where: str = "$"
) -> Any:
    """Decode an object of `encode_meta_dataclass`, or a ``NodeSource``.

    Raises:
        FormatError: an unknown class, or wrong fields.
    """
    if v.kind == "NodeSource":
        return _decode_provenance(v, where)
    cls = torch_graphs.meta_dataclasses().get(v.kind)
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
