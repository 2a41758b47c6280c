"""The scope of a traced function: named arguments, and the values in containers and modules.

A scope is a mapping from names to values, such as ``inspect.signature(fn).bind(...).arguments``. Its
leaves are tensors and Python numbers. Each has a source of torch's classes, so that guards on it apply
to other scopes: ``L['xs'][0]``, ``L['m']._parameters['weight']``, ``L['out'].logits``. Containers are
Python's, modules, and classes registered with torch's pytree.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torch_fakeify.compat import torch_dynamo, torch_graphs
from torch_fakeify.encoding.values import encode_value
from torch_fakeify.errors import UnsupportedValueError, class_name
from torch_fakeify.guards.conditions import Guard, check_guard
from torch_fakeify.guards.scope import Scope, reader_of
from torch_fakeify.guards.tensor_guards import constant_guard, type_guard

from .pytree_nodes import (
    PLAIN,
    access_text,
    attributes_of,
    children_of,
    copy_constants,
    flattened,
    node_of,
    plain_attributes,
    set_part,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence, Set

    from .pytree_nodes import Access

_TABLES = ("_parameters", "_buffers", "_modules")
"""The attributes of a module with its parameters, buffers and submodules."""

_NUMBERS = (bool, int, float)
_KEYS = (str, int, bool, float, bytes, type(None), torch.dtype)
"""Supported types of dictionary keys."""

_SINGLE = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, *PLAIN)

_DICTS = (dict, OrderedDict, defaultdict)

_CONFIGURES = (bool, int, float, str, type(None))
"""Types of a module's attributes that are guarded as its configuration."""

_FIXES = {
    "numpy": "Give torch.from_numpy of it",
    "transformers.cache_utils": "Register it first, by "
    "transformers.integrations.executorch.register_dynamic_cache_export_support()",
}
"""Advice in errors about a value, by the module of its class."""


class Part(NamedTuple):
    """A value in a scope, with its source."""

    source: Any
    value: Any


def scope_source(name: str) -> Any:
    """The source of a name of the scope."""
    return torch_dynamo.dynamo_source().LocalSource(name)


def walk(scope: Mapping[str, Any]) -> Iterator[Part]:
    """Every value of a scope in pre-order: containers before their contents.

    Raises:
        UnsupportedValueError: a value is neither a tensor nor a number, a constant, a list, a tuple,
            a dictionary or a module; or it contains itself.
    """
    for name, value in scope.items():
        yield from _walk(scope_source(name), value, ())


def _walk(source: Any, value: Any, around: tuple[int, ...]) -> Iterator[Part]:
    if is_leaf(value):
        yield Part(source, value)
        return
    if id(value) in around:
        raise UnsupportedValueError(
            "a value contains itself", where=source.name, found=type(value).__qualname__
        )
    parts = parts_of(value, source.name)
    if parts is None:
        _check_constant(source, value)
    yield Part(source, value)
    for path, part in parts or ():
        yield from _walk(after(source, path), part, (*around, id(value)))


def is_leaf(value: Any) -> bool:
    """Whether a value can be an input of a graph."""
    return isinstance(value, torch.Tensor) or type(value) in _NUMBERS


def is_of_module(source: Any) -> bool:
    """Whether a source is that of a parameter or buffer of a module."""
    base = getattr(source, "base", None)
    return getattr(base, "member", None) in _TABLES


def after(source: Any, path: Sequence[Access]) -> Any:
    """The source at the end of a path from another source."""
    sources = torch_dynamo.dynamo_source()
    for kind, key in path:
        cls = sources.AttrSource if kind == "attr" else sources.GetItemSource
        source = cls(source, key)
    return source


def _check_constant(source: Any, value: Any) -> None:
    try:
        encode_value(value, where=source.name)
    except UnsupportedValueError as error:
        raise UnsupportedValueError(
            "a value of the scope is neither an input nor a constant",
            where=source.name,
            expected="a tensor, a number, a constant, a list, tuple or dict of them, or a module",
            found=class_name(type(value)),
            fix=_fix_of(value, "Give what the function reads of it as names of the scope"),
        ) from error


def _fix_of(value: Any, otherwise: str) -> str:
    module = type(value).__module__
    for name, fix in _FIXES.items():
        if module == name or module.startswith(f"{name}."):
            return fix
    if isinstance(value, dict):
        return f"{otherwise}, or use keys that are texts or numbers"
    how = "register_dataclass" if hasattr(value, "__dataclass_fields__") else "register_pytree_node"
    return f"{otherwise}, or register its class by torch.utils._pytree.{how}"


def parts_of(value: Any, where: str = "a value") -> list[tuple[tuple[Access, ...], Any]] | None:
    """The contents of a container with their paths; ``None`` for a value that is no container.

    Raises:
        UnsupportedValueError: torch cannot flatten it, no path leads to a tensor in it, or it is a
            TorchScript module.
    """
    if isinstance(value, torch.jit.ScriptModule):
        raise UnsupportedValueError(
            "a TorchScript module is compiled already",
            where=where,
            found=type(value).__qualname__,
            fix="Give the module that it was made from",
        )
    if isinstance(value, torch.nn.Module):
        return [
            ((("attr", table), ("item", name)), part)
            for table in _TABLES
            for name, part in getattr(value, table).items()
        ]
    if type(value) in (list, tuple):
        return [((("item", i),), part) for i, part in enumerate(value)]
    if _is_named_tuple(value):
        return [((("attr", name),), getattr(value, name)) for name in value._fields]  # type: ignore[attr-defined]
    if isinstance(value, dict) and (type(value) in _DICTS or children_of(value, where) is None):
        if not all(map(_is_key, value)):
            return None
        return [((("item", key),), part) for key, part in value.items()]
    node = None if isinstance(value, torch.Size) else node_of(value, where)
    return None if node is None else node.parts


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _is_key(key: Any) -> bool:
    return type(key) in _KEYS or (type(key) is tuple and all(map(_is_key, key)))


# --- replacing values -----------------------------------------------------------------------------


def replaced(scope: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a scope with other values at some sources.

    Containers are copied. The copy of a module shares everything but its parameters, buffers and
    submodules with the original. Shared containers and modules remain shared.
    """
    made: dict[int, Any] = {}
    return {
        name: _replaced(scope_source(name), value, values, made) for name, value in scope.items()
    }


def _replaced(source: Any, value: Any, values: Mapping[str, Any], made: dict[int, Any]) -> Any:
    if is_leaf(value):
        return values.get(source.name, value)
    if id(value) in made:
        return made[id(value)]
    parts = parts_of(value, source.name)
    if parts is None:
        return value
    new = [_replaced(after(source, path), part, values, made) for path, part in parts]
    made[id(value)] = _remade(value, new, source.name)
    return made[id(value)]


def _remade(value: Any, parts: Sequence[Any], where: str) -> Any:
    if isinstance(value, torch.nn.Module):
        return _copied(value, parts)
    cls: Any = type(value)
    if cls in (list, tuple):
        return cls(parts)
    if _is_named_tuple(value):
        return cls._make(parts)
    if isinstance(value, dict) and (cls in _DICTS or children_of(value, where) is None):
        new = copy.copy(value)
        for key, part in zip(value, parts, strict=True):
            set_part(new, ("item", key), part)
        return new
    node = node_of(value, where)
    assert node is not None
    return node.remade(parts, where)


def _copied(module: torch.nn.Module, parts: Sequence[Any]) -> torch.nn.Module:
    copy = module.__class__.__new__(module.__class__)
    old = [part for _, part in parts_of(module) or ()]
    new = {id(part): made for part, made in zip(old, parts, strict=True) if part is not None}
    for name, value in vars(module).items():
        if type(value) is list and any(id(item) in new for item in value):
            # Such as the flat weights of an RNN, which are its parameters.
            value = [new.get(id(item), item) for item in value]
        vars(copy)[name] = value
    left = iter(parts)
    for table in _TABLES:  # in the order of `parts_of`
        names = getattr(module, table)
        vars(copy)[table] = {name: next(left) for name in names}
    return copy


# --- writes to arguments ---------------------------------------------------------------------------


def places(scope: Mapping[str, Any]) -> dict[str, Part]:
    """All values in a scope by source names, including constant attributes and symbolic numbers."""
    found: dict[str, Part] = {}
    pending = [Part(scope_source(name), value) for name, value in reversed([*scope.items()])]
    while pending:
        source, value = pending.pop()
        if source.name in found:
            continue
        found[source.name] = Part(source, value)
        if not isinstance(value, _SINGLE):
            inside = [*(parts_of(value, source.name) or ()), *_constants_in(value, source.name)]
            pending += [Part(after(source, path), part) for path, part in reversed(inside)]
    return found


def _constants_in(value: Any, where: str) -> Iterator[tuple[tuple[Access, ...], Any]]:
    """The constant attributes of an object, and of the objects between it and its parts."""
    objects: list[tuple[tuple[Access, ...], Any]] = [((), value)]
    if type(value) not in (list, tuple, *_DICTS) and not isinstance(value, torch.nn.Module):
        node = node_of(value, where)
        objects += [] if node is None else node.between
    for path, held in objects:
        for name, part in attributes_of(held):
            if isinstance(part, _SINGLE) and not isinstance(part, torch.Tensor):
                yield (*path, ("attr", name)), part


def written(before: Mapping[str, Part], now: Mapping[str, Part]) -> tuple[list[Any], list[Any]]:
    """The sources at which a call has changed the `places` of its scope, and the new values.

    Raises:
        UnsupportedValueError: the function has added or removed parts of an argument.
    """
    sources: list[Any] = []
    values: list[Any] = []
    for name, (source, value) in now.items():
        old = before.get(name)
        if old is None or not _is_one(old.value, value):
            if old is None or not isinstance(old.value, _SINGLE) or not isinstance(value, _SINGLE):
                raise _changed(name, "added")
            sources.append(source)
            values.append(value)
    for name in before.keys() - now.keys():
        raise _changed(name, "removed")
    return sources, values


def _is_one(old: Any, new: Any) -> bool:
    """Whether two values of a place are the same object, or equal constants."""
    is_plain = isinstance(new, PLAIN) and type(old) is type(new)
    return old is new or (is_plain and repr(old) == repr(new))


def _changed(name: str, found: str) -> UnsupportedValueError:
    return UnsupportedValueError(
        "the function changes what is in an argument",
        where=name,
        expected="only new tensors and numbers in the same places",
        found=f"a value that is {found}",
        fix="Return it, and change the argument after the call",
    )


# --- results --------------------------------------------------------------------------------------


def flatten(
    value: Any, check: Callable[[torch.Tensor, str], None] | None = None
) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The tensors and symbolic numbers of a result, each once, and a function that sets others.

    Each tensor is checked with its place.

    Raises:
        UnsupportedValueError: a part of it is neither a tensor nor a number, a constant, a list, a
            tuple, a dictionary or registered with torch's pytree.
    """
    leaves: dict[int, Any] = {}
    build = _builder(value, leaves, "the result", (), check)
    keys = list(leaves)
    return list(leaves.values()), lambda new: build(dict(zip(keys, new, strict=True)))


def _builder(
    value: Any,
    leaves: dict[int, Any],
    where: str,
    around: tuple[int, ...],
    check: Callable[[torch.Tensor, str], None] | None,
) -> Callable[[Mapping[int, Any]], Any]:
    """A function that builds the value from new leaves, by the ``id`` of the old ones."""
    key = id(value)
    if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        if check is not None and isinstance(value, torch.Tensor):
            check(value, where)
        leaves[key] = value
        return lambda new: new[key]
    if key in around:
        raise UnsupportedValueError(
            "a value contains itself", where=where, found=type(value).__qualname__
        )
    found = _paths_of_result(value, where)
    if found is None:
        _check_result(value, where)
        return lambda _: value
    parts, make = found
    inside = (*around, key)
    builders = [_builder(part, leaves, f"{where}{path}", inside, check) for path, part in parts]
    return lambda new: make([build(new) for build in builders])


def _paths_of_result(
    value: Any, where: str
) -> tuple[list[tuple[str, Any]], Callable[[list[Any]], Any]] | None:
    """The parts of a container, and a function that builds it from others; ``None`` for a constant."""
    cls: Any = type(value)
    if isinstance(value, torch.nn.Module):
        return None
    if cls in (list, tuple, torch.Size):
        return [(f"[{i}]", part) for i, part in enumerate(value)], cls
    is_builtin = _is_named_tuple(value) or cls in _DICTS
    found = None if is_builtin else children_of(value, where)
    if found is not None:
        children, spec = found
        return [(f"[{i}]", part) for i, part in enumerate(children)], _unflattener(value, spec)
    parts = parts_of(value, where)
    if parts is None:
        return None
    return [(access_text(path), part) for path, part in parts], lambda new: _remade(
        value, new, where
    )


def _unflattener(value: Any, spec: Any) -> Callable[[list[Any]], Any]:
    constants = plain_attributes(value)

    def make(parts: list[Any]) -> Any:
        made = torch_graphs.tree_unflatten(parts, spec)
        copy_constants(made, constants)
        return made

    return make


def writer_of(source: Any) -> Callable[[Mapping[str, Any], Any], None]:
    """A function that sets the value of an item or attribute source in a scope."""
    is_attribute = isinstance(source, torch_dynamo.dynamo_source().AttrSource)
    access = ("attr", source.member) if is_attribute else ("item", source.index)
    read = reader_of(source.base)
    return lambda scope, value: set_part(read(Scope(scope)), access, value)


def _check_result(value: Any, where: str) -> None:
    try:
        encode_value(value, where=where)
    except UnsupportedValueError as error:
        fix = _fix_of(value, "Return tensors, numbers, constants and containers of them")
        raise UnsupportedValueError(
            error.what, where=error.where, expected=error.expected, found=error.found, fix=fix
        ) from error


# --- guards on values -----------------------------------------------------------------------------


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
    for table in _TABLES:
        part = attr_source(source, table)
        names = list(getattr(module, table))
        yield check_guard("keys", [part], names)
