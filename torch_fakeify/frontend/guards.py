"""Guards over the sources of a scope, each as Python text, as a function and as an expression.

A scope is a mapping ``L`` from names to arguments. The text is Python over ``L``, ``torch`` and
``math``, in the form of torch's guards.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, overload

import torch

from torch_fakeify.compat import torch_dynamo
from torch_fakeify.errors import UnsupportedValueError

from .pytree_nodes import set_part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import sympy

__all__ = ["Guard", "Guards", "Reader", "constant_guard", "reader_of", "type_guard", "writer_of"]

Reader: TypeAlias = "Callable[[Mapping[str, Any]], Any]"
"""A function from a scope to the value of a source."""


class Guard(NamedTuple):
    """One condition on the arguments."""

    text: str
    """The condition as Python over ``L``."""
    holds: Callable[[Mapping[str, Any]], bool]
    """Whether the condition holds for a scope for which all earlier guards hold."""
    expr: sympy.Basic | None = None
    """For a condition on sizes: the condition over symbols with the names of sources."""
    location: Any = None
    """The ``SLoc`` of the traced code that caused it, if any."""

    def __str__(self) -> str:
        return self.text if self.location is None else f"{self.text}  # {self.location}"


class Guards(Sequence[Guard]):
    """Conditions on the arguments, in order: each may assume that the earlier ones hold."""

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
        """These guards and others, such as the frontend's."""
        return Guards((*self._guards, *others))

    def __repr__(self) -> str:
        return f"<Guards: {len(self)}>"

    def __str__(self) -> str:
        return "\n".join(map(str, self._guards))

    def check(self, scope: Mapping[str, Any]) -> bool:
        """Whether all guards hold for a scope."""
        return self.failing(scope) is None

    def failing(self, scope: Mapping[str, Any]) -> Guard | None:
        """The first guard that does not hold for a scope, or ``None``."""
        seen = _Seen(scope)
        guard = None
        try:
            for guard in self._guards:
                if not guard.holds(seen):
                    return guard
        except (ArithmeticError, AttributeError):
            return guard  # a division by zero; the base of a tensor that is no view
        return None

    @property
    def exprs(self) -> tuple[sympy.Basic, ...]:
        """The conditions on sizes, over symbols with the names of sources."""
        return tuple(guard.expr for guard in self._guards if guard.expr is not None)


# --- reading --------------------------------------------------------------------------------------


def reader_of(source: Any) -> Reader:
    """A function that reads the value of a source in a scope.

    Raises:
        UnsupportedValueError: the source does not start in a scope.
    """
    sources = torch_dynamo.dynamo_source()
    match source:
        case sources.LocalSource():
            return operator.itemgetter(source.local_name)
        case sources.GetItemSource():
            access: Any = operator.itemgetter(source.index)
            return _memoized(source.name, reader_of(source.base), access)
        case sources.AttrSource():
            access = operator.attrgetter(source.member)
            return _memoized(source.name, reader_of(source.base), access)
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


def writer_of(source: Any) -> Callable[[Mapping[str, Any], Any], None]:
    """A function that sets the value of an item or attribute source in a scope."""
    is_attribute = isinstance(source, torch_dynamo.dynamo_source().AttrSource)
    access = ("attr", source.member) if is_attribute else ("item", source.index)
    read = reader_of(source.base)
    return lambda scope, value: set_part(read(scope), access, value)


class _Seen(dict[str, Any]):
    """A copy of a scope that also caches the parts read from it, by source name."""


def _memoized(name: str, read: Reader, access: Callable[[Any], Any]) -> Reader:
    """A reader of a part of a value, cached if the scope is a `_Seen`."""
    key = f"\0{name}"  # never a name in a scope

    def found(scope: Mapping[str, Any]) -> Any:
        if type(scope) is not _Seen:
            return access(read(scope))
        if key not in scope:
            scope[key] = access(read(scope))
        return scope[key]

    return found


def _then(read: Reader, access: Callable[[Any], Any]) -> Reader:
    return lambda scope: access(read(scope))


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
    """A guard on the exact type of a value."""
    cls, read = type(value), reader_of(source)
    return Guard(f"type({source.name}) is {type_text(cls)}", lambda scope: type(read(scope)) is cls)


def constant_guard(source: Any, value: Any) -> Guard:
    """A guard on the type and the value of a constant."""
    cls, read, name = type(value), reader_of(source), source.name
    if value is None or cls is bool:
        return Guard(f"{name} is {value}", lambda scope: read(scope) is value)
    if cls is float and math.isnan(value):
        text = f"type({name}) is float and math.isnan({name})"
        return Guard(text, lambda scope: type(read(scope)) is float and math.isnan(read(scope)))
    value = copy.copy(value)  # a set may change
    text = f"type({name}) is {type_text(cls)} and {name} == {value_text(value)}"
    if cls is float and value == 0:  # the sign of a zero matters in a division
        sign = math.copysign(1.0, value)
        return Guard(
            f"{text} and math.copysign(1.0, {name}) == {sign}",
            lambda scope: _is_zero(read(scope)) and math.copysign(1.0, read(scope)) == sign,
        )
    return Guard(text, lambda scope: type(read(scope)) is cls and read(scope) == value)


def _is_zero(value: Any) -> bool:
    return type(value) is float and value == 0


def type_text(cls: type) -> str:
    """The qualified name of a class."""
    if cls.__module__ == "builtins":
        return cls.__qualname__
    return f"{cls.__module__}.{cls.__qualname__}"


def value_text(value: Any) -> str:
    """A constant as Python source text."""
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, float) and math.isinf(value):
        return f"float({str(value)!r})"
    return repr(value)
