"""Guards on constants, on containers and their lengths, and on the configuration of modules."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from torch_fakeify.compat import torch_dynamo
from torch_fakeify.encoding.values import encode_value
from torch_fakeify.guards.conditions import Guard, check_guard
from torch_fakeify.guards.tensor_guards import constant_guard, type_guard

from .arguments import after, parts_of
from .pytree_nodes import flattened, node_of, plain_attributes

if TYPE_CHECKING:
    from collections.abc import Iterator, Set

_CONFIGURES = (bool, int, float, str, type(None))
"""Types of a module's attributes that are guarded as its configuration."""


def value_guards(source: Any, value: Any) -> Iterator[Guard]:
    """Guards on a constant or container, without its contents."""
    parts = parts_of(value, source.name)
    if parts is None:
        yield constant_guard(source, value)
        return
    yield type_guard(source, value)
    if isinstance(value, torch.nn.Module):
        yield from _module_guards(source, value)
        return
    if isinstance(value, dict):
        yield check_guard("keys", [source], list(value))
    elif type(value) in (list, tuple):
        yield check_guard("length", [source], len(value))
    if not isinstance(value, tuple):
        yield from _attribute_guards(source, value, {path[0][1] for path, _ in parts})
    if type(value) not in _BUILT_IN and not hasattr(value, "_fields"):
        yield from _node_guards(source, value)


_BUILT_IN = (list, tuple, dict, OrderedDict)


def _attribute_guards(source: Any, value: Any, parts: Set[Any]) -> Iterator[Guard]:
    """Guards on the constant attributes of an object, except its parts."""
    attr_source = torch_dynamo.dynamo_source().AttrSource
    for name, held in plain_attributes(value):
        if name not in parts:
            yield constant_guard(attr_source(source, name), held)


def _node_guards(source: Any, value: Any) -> Iterator[Guard]:
    """Guards on the structure of a value whose class is registered with torch's pytree.

    They cover its ``TreeSpec`` and the objects on the paths to its parts.
    """
    node = node_of(value, source.name)
    if node is None:
        return
    for path, part in node.between:
        inner = after(source, path)
        yield type_guard(inner, part)
        if isinstance(part, dict):
            yield check_guard("keys", [inner], list(part))
        elif isinstance(part, (list, tuple)):
            yield check_guard("length", [inner], len(part))
        else:
            yield from _attribute_guards(inner, part, set())
    name = source.name
    leaves, spec = flattened(value, name)
    yield check_guard("tree", [source], spec)
    if not node.is_whole:
        constants = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        for constant in constants:
            encode_value(constant, where=name)
        yield check_guard("tree constants", [source], repr(constants))


def _module_guards(source: Any, module: torch.nn.Module) -> Iterator[Guard]:
    """Guards on the configuration of a module and the names of its parameters and submodules."""
    attr_source = torch_dynamo.dynamo_source().AttrSource
    for name, value in vars(module).items():
        if type(value) in _CONFIGURES:
            yield constant_guard(attr_source(source, name), value)
    for table in ("_parameters", "_buffers", "_modules"):
        part = attr_source(source, table)
        names = list(getattr(module, table))
        yield check_guard("keys", [part], names)
