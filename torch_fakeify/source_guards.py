"""Guards over the sources of a scope: as Python text, as a function, as an expression.

All three say the same of a scope, a mapping ``L`` from names to arguments. The text is Python over
``L``, ``torch`` and ``math``, in the form of torch's own guards.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, overload

import torch

from . import _torch
from .errors import UnsupportedValueError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import sympy

__all__ = ["Guard", "Guards", "Reader", "constant_guard", "reader_of", "type_guard"]

Reader: TypeAlias = "Callable[[Mapping[str, Any]], Any]"
"""What gives the value of a source in a scope."""


class Guard(NamedTuple):
    """One condition on the arguments."""

    text: str
    """As Python over ``L``."""
    holds: Callable[[Mapping[str, Any]], bool]
    """Whether it holds for a scope, given that the guards before it do."""
    expr: sympy.Basic | None = None
    """Of a condition on sizes: the same over symbols that have the names of sources."""
    location: Any = None
    """The ``SLoc`` of what caused it, if it was found out while tracing."""

    def __str__(self) -> str:
        return self.text if self.location is None else f"{self.text}  # {self.location}"


class Guards(Sequence[Guard]):
    """Conditions on the arguments, in an order in which each can rely on those before it."""

    def __init__(self, guards: Iterable[Guard]) -> None:
        self._guards = tuple(guards)

    @overload
    def __getitem__(self, index: int) -> Guard: ...
    @overload
    def __getitem__(self, index: slice) -> Guards: ...
    def __getitem__(self, index: int | slice) -> Guard | Guards:
        found = self._guards[index]
        return found if isinstance(found, Guard) else Guards(found)

    def __len__(self) -> int:
        return len(self._guards)

    def __add__(self, others: Iterable[Guard]) -> Guards:
        """These, and others of the frontend's own."""
        return Guards((*self._guards, *others))

    def __repr__(self) -> str:
        return f"<Guards: {len(self)}>"

    def __str__(self) -> str:
        return "\n".join(map(str, self._guards))

    def check(self, scope: Mapping[str, Any]) -> bool:
        """Whether all of them hold."""
        return self.failing(scope) is None

    def failing(self, scope: Mapping[str, Any]) -> Guard | None:
        """The first that does not hold, or ``None``."""
        seen = _Seen(scope)
        guard = None
        try:
            for guard in self._guards:
                if not guard.holds(seen):
                    return guard
        except (ArithmeticError, AttributeError):
            return guard  # a division by zero; the base of what is no view here
        return None

    @property
    def exprs(self) -> tuple[sympy.Basic, ...]:
        """The conditions on sizes, over symbols that have the names of sources."""
        return tuple(guard.expr for guard in self._guards if guard.expr is not None)


# --- reading --------------------------------------------------------------------------------------


def reader_of(source: Any) -> Reader:
    """A function that gives what a scope has at a source.

    Raises:
        UnsupportedValueError: the source does not start in a scope.
    """
    sources = _torch.dynamo_source()
    match source:
        case sources.LocalSource():
            return operator.itemgetter(source.local_name)
        case sources.GetItemSource():
            step: Any = operator.itemgetter(source.index)
            return _once(source.name, reader_of(source.base), step)
        case sources.AttrSource():
            step = operator.attrgetter(source.member)
            return _once(source.name, reader_of(source.base), step)
        case sources.CallMethodItemSource():
            return _then(reader_of(source.base), torch.Tensor.item)
        case sources.ConvertIntSource():
            return _then(reader_of(source.base), int)
        case sources.TensorPropertySource():
            return _then(reader_of(source.base), _property(source.prop.name, source.idx))
        case _:
            raise UnsupportedValueError(
                "a source that leads to no argument",
                where=source.name,
                expected="a name of the scope, and items, attributes and sizes of it",
                found=type(source).__name__,
            )


class _Seen(dict[str, Any]):
    """A copy of a scope, with the parts that were read of it."""


def _once(name: str, read: Reader, step: Callable[[Any], Any]) -> Reader:
    """Reads a part of a value; of one scope that many guards are asked of, only once."""
    key = f"\0{name}"  # no name of a scope

    def found(scope: Mapping[str, Any]) -> Any:
        if type(scope) is not _Seen:
            return step(read(scope))
        if key not in scope:
            scope[key] = step(read(scope))
        return scope[key]

    return found


def _then(read: Reader, step: Callable[[Any], Any]) -> Reader:
    return lambda scope: step(read(scope))


def _property(name: str, dim: int | None) -> Callable[[torch.Tensor], Any]:
    match name:
        case "SIZE":
            assert dim is not None
            return lambda t: t.size(dim)
        case "STRIDE":
            assert dim is not None
            return lambda t: t.stride(dim)
        case _:
            return torch.Tensor.storage_offset


# --- guards that need no ShapeEnv -----------------------------------------------------------------


def type_guard(source: Any, value: Any) -> Guard:
    """The type of a value, exactly."""
    cls, read = type(value), reader_of(source)
    return Guard(f"type({source.name}) is {type_text(cls)}", lambda scope: type(read(scope)) is cls)


def constant_guard(source: Any, value: Any) -> Guard:
    """The type and the value of a constant."""
    cls, read, name = type(value), reader_of(source), source.name
    if value is None or cls is bool:
        return Guard(f"{name} is {value}", lambda scope: read(scope) is value)
    if cls is float and math.isnan(value):
        text = f"type({name}) is float and math.isnan({name})"
        return Guard(text, lambda scope: type(read(scope)) is float and math.isnan(read(scope)))
    value = copy.copy(value)  # a set may change
    text = f"type({name}) is {type_text(cls)} and {name} == {value_text(value)}"
    if cls is float and value == 0:  # the sign of a zero tells in a division
        sign = math.copysign(1.0, value)
        return Guard(
            f"{text} and math.copysign(1.0, {name}) == {sign}",
            lambda scope: _is_zero(read(scope)) and math.copysign(1.0, read(scope)) == sign,
        )
    return Guard(text, lambda scope: type(read(scope)) is cls and read(scope) == value)


def _is_zero(value: Any) -> bool:
    return type(value) is float and value == 0


def type_text(cls: type) -> str:
    """A class by its qualified name."""
    if cls.__module__ == "builtins":
        return cls.__qualname__
    return f"{cls.__module__}.{cls.__qualname__}"


def value_text(value: Any) -> str:
    """A constant as Python."""
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, float) and math.isinf(value):
        return f"float({str(value)!r})"
    return repr(value)
