"""The calling convention of a graph: flat, boxed, or with structured inputs and outputs.

``make_fx`` of a function with nested arguments leaves a graph that flattens its inputs and
unflattens its outputs by two ``TreeSpec`` s. Names and dictionary keys of such a graph end in its
generated code, so they are checked.
"""

from __future__ import annotations

import collections
import re
from typing import TYPE_CHECKING, Any

from torch.fx.graph import CodeGen
from torch.fx.immutable_collections import immutable_dict, immutable_list

from torch_fakeify.compat import torch_graphs
from torch_fakeify.encoding import names
from torch_fakeify.errors import FormatError, LimitError, UnsupportedValueError, class_name
from torch_fakeify.records.graph import CallingDesc
from torch_fakeify.records.tensor import ListValue, OpaqueValue, TupleValue, TypeValue

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from torch_fakeify.records.tensor import Value

_MAX_DEPTH = 32

_KEY = re.compile(r"[A-Za-z0-9_.:/ -]*")
"""Allowed keys of dictionaries: they are printed in quotes, unescaped."""

_CONTAINERS: dict[str, type] = {
    "dict": dict,
    "immutable_dict": immutable_dict,
    "immutable_list": immutable_list,
    "list": list,
    "ordered_dict": collections.OrderedDict,
    "tuple": tuple,
}
_DICTS = frozenset({"dict", "immutable_dict", "ordered_dict"})
_NAMED_TUPLE = "namedtuple"


def encode_calling(graph: torch.fx.Graph, where: str) -> CallingDesc | None:
    """Encode a calling convention; ``None`` for the default, one argument for each input.

    Raises:
        UnsupportedValueError: the convention is export's, or the code is transformed by a function.
    """
    codegen: Any = graph._codegen
    kind = type(codegen)
    if getattr(codegen, "_body_transformer", None) is not None:
        raise UnsupportedValueError(
            "the graph's code is transformed by a function", where=where, found="on_generate_code"
        )
    if kind is CodeGen:
        return None
    if kind is torch_graphs.BoxedCodeGen:
        return CallingDesc(boxed=True)
    if kind is not torch_graphs.PyTreeCodeGen:
        raise UnsupportedValueError(
            "the graph has a calling convention of its own",
            where=where,
            expected="torch.fx.graph.CodeGen",
            found=kind.__name__,
            fix="Flatten it: gm.graph.set_codegen(torch.fx.graph.CodeGen()).",
        )
    info = codegen.pytree_info
    return encode_structure(info.orig_args, info.in_spec, info.out_spec, where)


def encode_structure(
    arguments: Sequence[str], in_spec: Any, out_spec: Any | None, where: str
) -> CallingDesc:
    """Encode the names of arguments, their ``TreeSpec``, and that of a result; ``None`` if it is flat.

    Raises:
        UnsupportedValueError: a container, or a key of a dict, has no record.
    """
    for name in arguments:
        names.check_identifier(name, where=where)
    return CallingDesc(
        arguments=tuple(arguments),
        in_spec=_encode_spec(in_spec, where, 0),
        out_spec=None if out_spec is None else TupleValue(
            items=(_encode_spec(out_spec, where, 0),)
        ),
    )  # fmt: skip


def decode_calling(d: CallingDesc, where: str) -> CodeGen:
    """Decode a calling convention to a code generator.

    Raises:
        FormatError: a name is no identifier, or a structure is malformed.
    """
    if d.boxed:
        return torch_graphs.BoxedCodeGen()
    arguments, in_spec, out_spec = decode_structure(d, where)
    info = torch_graphs.PyTreeInfo(arguments, in_spec, out_spec)
    return torch_graphs.PyTreeCodeGen(info)


def decode_structure(d: CallingDesc, where: str) -> tuple[list[str], Any, Any | None]:
    """Decode the names of arguments, their ``TreeSpec``, and that of the result.

    Raises:
        FormatError: a name is no identifier, or a structure is malformed.
    """
    for i, name in enumerate(d.arguments):
        names.check_identifier(name, where=f"{where}.arguments[{i}]")
    if len(set(d.arguments)) != len(d.arguments):
        raise FormatError("two arguments have one name", where=f"{where}.arguments")
    out_spec = None
    if d.out_spec is not None:
        if not isinstance(d.out_spec, TupleValue) or len(d.out_spec.items) != 1:
            raise FormatError("not a structure", where=f"{where}.out_spec")
        out_spec = _decode_spec(d.out_spec.items[0], f"{where}.out_spec", 0)
    return list(d.arguments), _decode_spec(d.in_spec, f"{where}.in_spec", 0), out_spec


def _encode_spec(spec: Any, where: str, depth: int) -> Value:
    if spec.type is None:
        return None
    if depth > _MAX_DEPTH:
        raise UnsupportedValueError("a structure is nested too deeply", where=where)
    children = TupleValue(
        items=tuple(_encode_spec(child, where, depth + 1) for child in spec._children)
    )
    kind, context = _encode_container(spec, where)
    return OpaqueValue(kind="TreeSpec", data=TupleValue(items=(kind, context, children)))


def _encode_container(spec: Any, where: str) -> tuple[str, Value]:
    context = spec._context
    for kind, cls in _CONTAINERS.items():
        if spec.type is not cls:
            continue
        if kind not in _DICTS:
            return kind, None
        if all(isinstance(key, str) and _KEY.fullmatch(key) for key in context):
            return kind, ListValue(items=tuple(context))
    if isinstance(context, type) and names.is_record_tuple(context):
        return _NAMED_TUPLE, TypeValue(name=names.encode_class(context, where=where))
    raise UnsupportedValueError(
        "an input or output has a structure without a record",
        where=where,
        expected="nested tuples, lists, named tuples, dicts with names as keys",
        found=class_name(spec.type),
    )


def _decode_spec(record: Value, where: str, depth: int) -> Any:
    if record is None:
        return torch_graphs.leaf_spec()
    if depth > _MAX_DEPTH:
        raise LimitError("a structure is nested too deeply", where=where)
    match record:
        case OpaqueValue(kind="TreeSpec",
                         data=TupleValue(items=(str() as kind, context,
                                                TupleValue(items=items)))):  # fmt: skip
            children = [_decode_spec(item, where, depth + 1) for item in items]
        case _:
            raise FormatError("not a structure", where=where)
    if kind == _NAMED_TUPLE and isinstance(context, TypeValue):
        cls: Any = names.decode_class(context.name, where=where)
        if not names.is_record_tuple(cls) or len(children) != torch_graphs.field_count(cls):
            raise FormatError("not the structure of a named tuple", where=where, found=context.name)
        return torch_graphs.TreeSpec(torch_graphs.tree_type(cls), cls, children)
    if kind in _DICTS and isinstance(context, ListValue):
        keys = [k for k in context.items if isinstance(k, str) and _KEY.fullmatch(k)]
        if not len(set(keys)) == len(children) == len(context.items):
            raise FormatError("not the keys of a structure", where=where)
        return torch_graphs.TreeSpec(_CONTAINERS[kind], keys, children)
    if kind in _CONTAINERS and kind not in _DICTS and context is None:
        return torch_graphs.TreeSpec(_CONTAINERS[kind], None, children)
    raise FormatError("not a structure", where=where, found=repr(kind))
