"""The values of sources: the arguments, globals and parts of them that a graph's inputs are."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from torch_fakeify.compat import torch_dynamo
from torch_fakeify.errors import CaptureError, UnsupportedValueError

if TYPE_CHECKING:
    from collections.abc import Callable

Reader: TypeAlias = "Callable[[Scope], Any]"
"""A function from a scope to the value of a source."""

FIX = "Pass it under that name: the arguments in scope, the globals of the function's module in globals"
_OF_WRAPPER = ("L['fn']", "L['args']", "L['kwargs']")
_FIX_OF_MODULE = (
    'Dynamo calls a module of torch.nn itself by a wrapper: pass {"fn": module, "args": (x, ...), '
    '"kwargs": {...}}'
)


class Scope(dict[str, Any]):
    """The arguments of one call by name (``L`` in guards) and the parts that were read of them.

    It has the globals of the function's module too (``G`` in guards).

    Raises:
        CaptureError: one of them is no mapping.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        globals: Mapping[str, Any] | None = None,  # noqa: A002
    ) -> None:
        for name, values in (("scope", arguments), ("globals", globals)):
            if values is not None and not isinstance(values, Mapping):
                raise CaptureError(
                    f"the {name} is no mapping from names to values",
                    expected='such as {"x": x}',
                    found=type(values).__name__,
                )
        super().__init__(arguments)
        self.globals = globals
        self._parts: dict[str, Any] = {}

    def part(self, name: str, base: Reader, access: Callable[[Any], Any]) -> Any:
        """Return the part of a value that has a source's name; it is read once."""
        parts = self._parts
        if name not in parts:
            parts[name] = access(base(self))
        return parts[name]


_MISSING = (LookupError, AttributeError, TypeError, ValueError, RuntimeError)


def read(source: Any, scope: Scope) -> Any:
    """Return the value of a source in a scope.

    Raises:
        CaptureError: the scope does not have it.
        UnsupportedValueError: the source leads to no argument or global.
    """
    reader = reader_of(source)
    try:
        return reader(scope)
    except _MISSING as error:
        raise _missing(source, scope, error) from error


def _missing(source: Any, scope: Scope, error: Exception) -> CaptureError:
    chain = [source]
    while getattr(chain[-1], "base", None) is not None:
        chain.append(chain[-1].base)
    first = next((part for part in reversed(chain) if not _has(scope, part)), source)
    return CaptureError(
        "a value of the frame is not in the scope",
        where=source.name,
        expected=first.name,
        found=_found(first, scope, error),
        fix=_FIX_OF_MODULE if first.name in _OF_WRAPPER else FIX,
    )


def _has(scope: Scope, source: Any) -> bool:
    try:
        reader_of(source)(scope)
    except _MISSING:
        return False
    return True


def _found(missing: Any, scope: Scope, error: Exception) -> str:
    sources = torch_dynamo.dynamo_source()
    if isinstance(missing, sources.GlobalSource):
        return "no globals" if scope.globals is None else f"{len(scope.globals)} globals without it"
    if isinstance(missing, sources.LocalSource):
        return ", ".join(map(repr, scope)) or "no arguments"
    return f"{type(error).__name__}: {error}"


def reader_of(source: Any) -> Reader:
    """Return a function that reads the value of a source in a scope.

    Method: ``_name_template`` of the classes of ``torch/_dynamo/source.py`` (torch 2.13), which is the
    text that Dynamo evaluates.

    Raises:
        UnsupportedValueError: the source leads to no argument or global, or by a call of its code.
    """
    sources = torch_dynamo.dynamo_source()
    match source:
        case sources.LocalSource():
            name = source.local_name
            return operator.itemgetter(name)
        case sources.GlobalSource():
            name = source.global_name
            return lambda scope: (scope.globals or {})[name]
        case sources.NNModuleSource() | sources.OptimizerSource() | sources.SkipGuardSource():
            return reader_of(source.base)
        case _:
            pass
    access = None if getattr(source, "base", None) is None else _access(source, sources)
    if access is None:
        raise UnsupportedValueError(
            "a source that leads to no argument",
            where=source.name,
            expected="an argument or a global, and items, attributes and sizes of it",
            found=type(source).__name__,
        )
    base, name = reader_of(source.base), source.name
    return lambda scope: scope.part(name, base, access)


def _access(source: Any, sources: Any) -> Callable[[Any], Any] | None:
    """Return how a source reads its base; ``None`` if it does not, or by a call of other code."""
    match source:
        case sources.TensorPropertySource():
            dim = [] if source.idx is None else [source.idx]
            return operator.methodcaller(source.prop.name.lower(), *dim)
        case sources.DictGetItemSource() | sources.DictSubclassGetItemSource():
            index = source.index
            if isinstance(index, sources.ConstDictKeySource):
                position = index.index
                return lambda found: found[list(dict.keys(found))[position]]
            return operator.itemgetter(index)
        case sources.GetItemSource():
            if isinstance(source, sources.TupleIteratorGetItemSource):
                return None
            index = source.unpack_slice() if source.index_is_slice else source.index
            return operator.itemgetter(index)
        case sources.ConstDictKeySource():
            position = source.index
            return lambda found: list(dict.keys(found))[position]
        case sources.NonSerializableSetGetItemSource():
            return None  # the order of a set is of one process
        case sources.DefaultsSource():
            field, key = source.field, source.idx_key
            return lambda found: getattr(found, field)[key]
        case (
            sources.AttrSource()
            | sources.GenericAttrSource()
            | sources.GradSource()
            | sources.ClosureSource()
            | sources.CodeSource()
        ):
            members = {sources.ClosureSource: "__closure__", sources.CodeSource: "__code__"}
            return operator.attrgetter(members.get(type(source)) or source.member)
        case sources.AttrProxySource():
            return lambda found: found.get_base() if hasattr(found, "get_base") else found
        case sources.CallFunctionNoArgsSource():
            return None
        case sources.WeakRefCallSource():
            return lambda found: found() if isinstance(found, weakref.ref) else found
        case _:
            return _converted(source, sources)


def _converted(source: Any, sources: Any) -> Callable[[Any], Any] | None:
    """Return how a source makes a number or tensor of its base; ``None`` if it does not."""
    match source:
        case sources.CallMethodItemSource():
            return torch.Tensor.item
        case sources.ConvertIntSource() | sources.DynamicScalarSource():
            return int
        case sources.NegateSource():
            return operator.neg
        case sources.FloatTensorSource():
            return _as_tensor
        case sources.NumpyTensorSource():
            return torch.as_tensor  # shares the array's memory
        case _:
            return None


def _as_tensor(number: Any) -> torch.Tensor:
    """Return the tensor by which Dynamo passes a number."""
    if isinstance(number, torch.Tensor):
        return number  # refused by the guard on its type
    is_float = isinstance(number, float)
    return torch.tensor(number, dtype=torch.float64 if is_float else torch.int64)
