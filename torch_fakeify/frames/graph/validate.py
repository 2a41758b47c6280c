"""Validation of a graph's nodes, before FX generates Python source from them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.graph import inplace_methods, magic_methods

from torch_fakeify.encoding import names
from torch_fakeify.encoding.allowlist import CALLS_ARGUMENTS, DENIED_KEYWORDS
from torch_fakeify.errors import FormatError, UnknownNameError
from torch_fakeify.records.rewrite import walk
from torch_fakeify.records.tensor import FunctionValue, NodeValue, TensorValue, TypeValue, Value
from torch_fakeify.replay.lowering import value_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_fakeify.records.graph import GraphModuleDesc, NodeDesc

MAX_NESTING = 32
"""Largest nesting depth of graphs in graphs."""

READS_ATTRIBUTE = frozenset({
    "builtins.getattr", "builtins.hasattr", "torch._dynamo.utils.numpy_attr_wrapper",
})  # fmt: skip
"""Functions that read an attribute by name."""

_TEMPLATES = {**magic_methods, **inplace_methods}
"""The templates with which FX prints functions of ``operator``."""


def check_node(
    op: str,
    name: str,
    target: Value,
    args: tuple[Value, ...],
    kwargs: tuple[tuple[str, Value], ...],
    where: str,
) -> None:
    """Raise a ``FormatError`` if a part of a node cannot appear in generated code."""
    names.check_identifier(name, where=f"{where}.name")
    for key, _ in kwargs:
        names.check_identifier(key, where=f"{where}.kwargs[{key!r}]")
    if len({key for key, _ in kwargs}) != len(kwargs):
        raise FormatError("a keyword occurs twice", where=f"{where}.kwargs")
    if op == "call_function":
        if not isinstance(target, FunctionValue):
            raise FormatError("not a function", where=f"{where}.target", found=repr(target))
        return _check_call(target, args, kwargs, where)
    if not isinstance(target, str):
        raise FormatError("not a name", where=f"{where}.target", found=type(target).__name__)
    match op:
        case "placeholder":
            argument = re.sub(r"^\*{1,2}", "", target)
            names.check_identifier(argument, where=f"{where}.target")
            if target == "self" or len(args) > 1 or kwargs:
                raise FormatError("not a placeholder", where=where, found=repr(target))
        case "call_method":
            names.check_method(target, where=f"{where}.target")
            if not args:
                raise FormatError("a method has no object", where=f"{where}.args")
        case "output":
            if target != "output" or len(args) != 1 or kwargs:
                raise FormatError("not an output", where=where, found=repr(target))
        case _:
            names.check_path(target, where=f"{where}.target")
    return None


def _check_call(
    target: FunctionValue,
    args: tuple[Value, ...],
    kwargs: tuple[tuple[str, Value], ...],
    where: str,
) -> None:
    module, _, function = target.name.rpartition(".")
    if target.name in READS_ATTRIBUTE:
        attribute = args[1] if len(args) > 1 else None
        if kwargs or not isinstance(args[0] if args else None, NodeValue):
            raise FormatError("not the reading of an attribute", where=f"{where}.args")
        if not isinstance(attribute, str):
            raise FormatError(
                "not the name of an attribute", where=f"{where}.args[1]", found=repr(attribute)
            )
        names.check_identifier(attribute, where=f"{where}.args[1]")
    called = DENIED_KEYWORDS.get(target.name)
    if called is not None and any(key == called for key, _ in kwargs):
        raise UnknownNameError(f"{target.name} may not have a function as argument", where=where)
    if target.kind == "hop" or target.name in CALLS_ARGUMENTS:
        for i, arg in enumerate((*args, *(arg for _, arg in kwargs))):
            # The record of a tensor may name the class of its context.
            if any(type(part) is TypeValue for part in walk(arg, (TypeValue, TensorValue))):
                raise UnknownNameError(
                    f"{target.name} may not have a class as argument", where=f"{where}.args[{i}]"
                )
    if module == "operator" and target.kind == "function":
        template = _TEMPLATES.get(function)
        # FX prints operators by these templates.
        if template is not None and (kwargs or template.count("{}") != len(args)):
            raise FormatError(f"wrong number of arguments for {target.name}", where=f"{where}.args")


def check_attributes(
    nodes: Sequence[NodeDesc], fx_nodes: Sequence[torch.fx.Node], where: str
) -> None:
    """Raise an ``UnknownNameError`` if a node reads an attribute that is not allowed."""
    for i, desc in enumerate(nodes):
        if not isinstance(desc.target, FunctionValue) or desc.target.name not in READS_ATTRIBUTE:
            continue
        owner, attribute = fx_nodes[i].args[:2]
        here = f"{where}.nodes[{i}].args[1]"
        names.check_attribute(str(attribute), where=here, inner=_inner_names(owner))


def _inner_names(owner: Any) -> Sequence[str]:
    """Names of the inner tensors of a node's value."""
    value: Any = value_of(owner)
    if not (isinstance(value, torch.Tensor) and hasattr(type(value), "__tensor_flatten__")):
        return ()
    wrapper: Any = value
    return wrapper.__tensor_flatten__()[0]


def check_order(d: GraphModuleDesc, where: str) -> None:
    """Raise a ``FormatError`` unless placeholders come first, one output last, and names are unique."""
    seen: set[str] = set()
    targets: set[Value] = set()
    for i, desc in enumerate(d.nodes):
        if desc.name in seen:
            raise FormatError(
                "two nodes have one name", where=f"{where}.nodes[{i}].name", found=repr(desc.name)
            )
        seen.add(desc.name)
        if desc.op == "output" and i + 1 != len(d.nodes):
            raise FormatError("an output is not the last node", where=f"{where}.nodes[{i}]")
        if desc.op == "placeholder":
            if desc.target in targets:
                raise FormatError("two inputs have one name", where=f"{where}.nodes[{i}].target")
            targets.add(desc.target)
