"""The arguments of a function as a frontend finds them: values by name, containers, modules.

A scope is a mapping from names to values, such as ``inspect.signature(fn).bind(...).arguments``.
Its leaves are tensors and Python numbers; each has a source in torch's own classes, so that what is
found out about it can be said of another scope: ``L['xs'][0]``, ``L['m']._parameters['weight']``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from . import _torch
from .errors import UnsupportedValueError
from .values import encode_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = [
    "Part",
    "Structure",
    "flatten",
    "is_leaf",
    "is_of_module",
    "parts_of",
    "replaced",
    "scope_source",
    "walk",
]

Step: TypeAlias = tuple[str, Any]
"""One step from a value to a part of it: ``("item", key)`` or ``("attr", name)``."""

_TABLES = ("_parameters", "_buffers", "_modules")
"""Where a module keeps what belongs to it."""

_NUMBERS = (bool, int, float)


class Part(NamedTuple):
    """A value in a scope."""

    source: Any
    value: Any


def scope_source(name: str) -> Any:
    """The source of a name of the scope."""
    return _torch.dynamo_source().LocalSource(name)


def walk(scope: Mapping[str, Any]) -> Iterator[Part]:
    """Every value of a scope, also those inside of others, each after what it is in.

    Raises:
        UnsupportedValueError: a value is neither a tensor nor a number, a constant, a list, a tuple,
            a dictionary or a module; or it contains itself.
    """
    for name, value in scope.items():
        yield from _walk(scope_source(name), value, ())


def _walk(source: Any, value: Any, around: tuple[int, ...]) -> Iterator[Part]:
    yield Part(source, value)
    if is_leaf(value):
        return
    if id(value) in around:
        raise UnsupportedValueError(
            "a value contains itself", where=source.name, found=type(value).__qualname__
        )
    parts = parts_of(value)
    if parts is None:
        _check_constant(source, value)
        return
    for steps, part in parts:
        yield from _walk(_after(source, steps), part, (*around, id(value)))


def is_leaf(value: Any) -> bool:
    """Whether it can be an input of a graph."""
    return isinstance(value, torch.Tensor) or type(value) in _NUMBERS


def is_of_module(source: Any) -> bool:
    """Whether a module has it as a parameter or buffer."""
    base = getattr(source, "base", None)
    return getattr(base, "member", None) in _TABLES


def _after(source: Any, steps: Sequence[Step]) -> Any:
    sources = _torch.dynamo_source()
    for kind, key in steps:
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
            found=f"{type(value).__module__}.{type(value).__qualname__}",
            fix="Give what the function reads of it as names of the scope",
        ) from error


def parts_of(value: Any) -> list[tuple[tuple[Step, ...], Any]] | None:
    """What a container holds, and how to get there; ``None`` for a value that is no container."""
    if isinstance(value, torch.nn.Module):
        return [
            ((("attr", table), ("item", name)), part)
            for table in _TABLES
            for name, part in getattr(value, table).items()
        ]
    if type(value) in (list, tuple):
        return [((("item", i),), part) for i, part in enumerate(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [((("attr", name),), getattr(value, name)) for name in value._fields]  # type: ignore[attr-defined]
    if isinstance(value, dict) and all(type(key) in (str, int, bool) for key in value):
        return [((("item", key),), part) for key, part in value.items()]
    return None


# --- other values in the same places --------------------------------------------------------------


def replaced(scope: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The scope with other values at the sources that are named.

    Containers are new ones. A module becomes a copy that shares all but its parameters, buffers and
    modules with the original. What is one container or module in the scope is one in the result.

    Args:
        scope: is left as it is.
        values: by the name of a source.
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
    parts = parts_of(value)
    if parts is None:
        return value
    new = [_replaced(_after(source, steps), part, values, made) for steps, part in parts]
    made[id(value)] = _remade(value, new)
    return made[id(value)]


def _remade(value: Any, parts: Sequence[Any]) -> Any:
    """A container like another one, with other parts."""
    if isinstance(value, torch.nn.Module):
        return _copied(value, parts)
    if isinstance(value, dict):
        new = value.copy()  # also of an OrderedDict or defaultdict
        new.update(zip(value, parts, strict=True))
        return new
    cls: Any = type(value)
    return cls(*parts) if hasattr(cls, "_fields") else cls(parts)


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


# --- results --------------------------------------------------------------------------------------


class Structure(NamedTuple):
    """What a function returned, but for the tensors and symbolic numbers in it."""

    build: Callable[[Iterator[Any]], Any]

    def filled(self, leaves: Sequence[Any]) -> Any:
        """The result with these leaves."""
        return self.build(iter(leaves))


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """The tensors and symbolic numbers of a result, and the rest of it.

    Raises:
        UnsupportedValueError: a part of it is neither a tensor nor a number, a constant, a list, a
            tuple or a dictionary.
    """
    leaves: list[Any] = []
    build = _builder(value, leaves, "the result")
    return leaves, Structure(build)


def _builder(value: Any, leaves: list[Any], where: str) -> Callable[[Iterator[Any]], Any]:
    if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        leaves.append(value)
        return next
    parts = None if isinstance(value, torch.nn.Module) else parts_of(value)
    if parts is None:
        encode_value(value, where=where)
        return lambda _: value
    builders = [_builder(part, leaves, f"{where}{_told(steps)}") for steps, part in parts]
    return lambda left: _remade(value, [build(left) for build in builders])


def _told(steps: Sequence[Step]) -> str:
    return "".join(f".{key}" if kind == "attr" else f"[{key!r}]" for kind, key in steps)
