"""What a ``ShapeEnv`` assumes of the inputs of a frontend, as guards over their sources.

Method: the three parts of ``ShapeEnv.produce_guards`` (torch 2.13): each number that an input holds
equals its expression, each guard holds, each symbol is in its range. The conditions are those that
`insert_guards` takes from the environment.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import sympy
import torch

from . import _torch
from .errors import ShapeEnvError
from .expr_nodes import function_of
from .guard_facts import Fact, assumed_facts
from .source_guards import Guard, reader_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from .source_guards import Reader

_HERE = str(Path(__file__).parent)

__all__ = ["Number", "numbers_of", "shape_guards"]


class Number(NamedTuple):
    """A number that an input holds."""

    source: Any
    expr: sympy.Basic
    """What it is in the ``ShapeEnv``, before any replacement."""


def numbers_of(source: Any, value: Any) -> Iterator[Number]:
    """All numbers of an input: itself, or its sizes, strides, offset and ``item()``.

    Args:
        source: where the input is.
        value: a fake tensor as it was when the trace began, or a symbolic number.
    """
    sources = _torch.dynamo_source()
    if isinstance(value, torch.SymBool):
        yield Number(sources.ConvertIntSource(source), _expr(value).args[0])
    elif not isinstance(value, torch.Tensor):
        yield Number(source, _expr(value))
    else:
        yield from _tensor_numbers(source, value)
        base = value._base if value._is_view() else None
        if base is not None:  # as Dynamo has it, which leaves its plain numbers alone
            numbers = _tensor_numbers(sources.AttrSource(source, "_base"), base)
            yield from (number for number in numbers if number.expr.free_symbols)
        if isinstance(value, _torch.FakeTensor) and value.item_memo is not None:
            yield Number(sources.CallMethodItemSource(source), _expr(value.item_memo))


def _tensor_numbers(source: Any, t: torch.Tensor) -> Iterator[Number]:
    sources = _torch.dynamo_source()
    prop, make = sources.TensorProperty, sources.TensorPropertySource
    found: list[tuple[Any, Any]] = [(make(source, prop.SIZE, i), n) for i, n in enumerate(t.size())]
    if t.layout is torch.strided:
        found += [(make(source, prop.STRIDE, i), n) for i, n in enumerate(t.stride())]
        found.append((make(source, prop.STORAGE_OFFSET), t.storage_offset()))
    for part, n in found:
        if not isinstance(n, torch.SymInt) or isinstance(n.node, _torch.SymNode):
            yield Number(part, _expr(n))
    if _torch.is_traceable_wrapper_subclass(t):
        wrapper: Any = t
        for name in wrapper.__tensor_flatten__()[0]:
            inner = getattr(wrapper, name)
            if isinstance(inner, torch.Tensor):
                yield from _tensor_numbers(sources.AttrSource(source, name), inner)


def _expr(number: Any) -> Any:
    sym_node = getattr(number, "node", None)
    return sympy.sympify(number, strict=True) if sym_node is None else sym_node._expr


def shape_guards(
    env: Any, numbers: Sequence[Number], asserts: Mapping[Any, int] | None = None
) -> Iterator[Guard]:
    """The conditions under which what the environment assumes holds for a scope.

    What is about numbers that a graph finds in its data is no guard: the graph asserts it.

    Args:
        env: the environment.
        numbers: of all inputs.
        asserts: how many runtime asserts of each symbol the graph asserts; those that came later
            are guards, if inputs tell their symbols. By default there are none.

    Raises:
        ShapeEnvError: it assumes something of what no input holds.
    """
    writer = _Writer(env, numbers)
    for number in numbers:
        yield from writer.equality(number)
    for fact in assumed_facts(env):
        yield from writer.fact(fact)
    if asserts is not None:
        for symbol, group in env.deferred_runtime_asserts.items():
            for one in group[asserts.get(symbol, 0) :]:
                yield from writer.fact(Fact("assert", one.expr))


class _Writer:
    """Conditions over symbols as conditions over the sources of these symbols."""

    def __init__(self, env: Any, numbers: Sequence[Number]) -> None:
        self._env = env
        self._sources: dict[sympy.Basic, Any] = {}
        for number in numbers:
            if isinstance(number.expr, sympy.Symbol):
                self._sources.setdefault(number.expr, number.source)
        for symbol, sources in env.var_to_sources.items():
            lasting = [source for source in sources if not source.is_ephemeral()]
            if lasting and _leads(lasting[0]):
                self._sources.setdefault(symbol, lasting[0])
        sources = {symbol: [source] for symbol, source in self._sources.items()}
        printer: Any = _torch.ShapeGuardPrinter(sources, lambda source: source.name, {})
        self._print: Callable[[Any], str] = printer.doprint
        self._readers: dict[sympy.Basic, Reader] = {
            symbol: reader_of(source) for symbol, source in self._sources.items()
        }
        self._names = {
            symbol: self._name(symbol, source) for symbol, source in self._sources.items()
        }
        self._done: set[str] = set()

    @staticmethod
    def _name(symbol: sympy.Basic, source: Any) -> sympy.Symbol:
        return sympy.Symbol(source.name, **{"integer" if symbol.is_integer else "real": True})

    def equality(self, number: Number) -> Iterator[Guard]:
        """That an input holds what it should; nothing of the number that a symbol stands for."""
        expr, source = number.expr, number.source
        if self._sources.get(expr) is source:
            if _torch.is_float_symbol(expr):
                read = reader_of(source)
                text = f"not math.isnan({source.name})"
                yield Guard(text, lambda scope: not math.isnan(read(scope)))
            return
        if not self._knows(expr):
            raise self._nobodys(sympy.Eq(self._name(expr, source), expr, evaluate=False))
        read, compute = reader_of(source), function_of(expr, self._readers)
        own = self._name(expr, source)
        yield from self._once(
            Guard(
                f"{source.name} == {self._print(expr)}",
                lambda scope: read(scope) == compute(scope),
                sympy.Eq(own, expr.xreplace(self._names), evaluate=False),
                _users(self._env.replacements_slocs.get(expr)),
            )
        )

    def fact(self, fact: Fact) -> Iterator[Guard]:
        """A condition, unless the graph has to assert it."""
        expr: Any = fact.expr
        if not self._knows(expr):
            expr = self._env.replace(expr)
        if expr == sympy.true or self._is_ragged(fact) or _is_trivial(expr):
            return
        if not self._knows(expr):
            if fact.what == "range":
                return  # of what only conversion has made, such as the views of a jagged tensor
            if expr.free_symbols <= self._env.backed_var_to_val.keys() | self._sources.keys():
                raise self._nobodys(expr)
            return  # it is about data
        compute = function_of(expr, self._readers)
        yield from self._once(
            Guard(
                self._print(expr),
                lambda scope: bool(compute(scope)),
                expr.xreplace(self._names),
                _users(fact.location),
            )
        )

    def _once(self, guard: Guard) -> Iterator[Guard]:
        if guard.text not in self._done:
            self._done.add(guard.text)
            yield guard

    def _knows(self, expr: sympy.Basic) -> bool:
        return expr.free_symbols <= self._sources.keys()

    def _is_ragged(self, fact: Fact) -> bool:
        """Whether it is the range of a ragged size, which is no number."""
        hint = self._env.backed_var_to_val.get(fact.symbol)
        return fact.what == "range" and isinstance(hint, _torch.SingletonInt)

    def _nobodys(self, expr: sympy.Basic) -> ShapeEnvError:
        known = {*self._sources.keys(), *self._names.values()}
        unknown = sorted(
            str(s) for s in expr.free_symbols if s in self._env.var_to_range and s not in known
        )
        return ShapeEnvError(
            "the trace assumes something of what no input holds",
            where=str(expr),
            expected="symbols of inputs",
            found=", ".join(unknown),
            fix="Make that input's dims static in the policy",
        )


def _is_trivial(expr: sympy.Basic) -> bool:
    return isinstance(expr, sympy.Eq) and expr.args[0] == expr.args[1]


def _users(location: Any) -> Any | None:
    """A location, unless this package is where it is."""
    frame = getattr(location, "framework_loc", None)
    return None if getattr(frame, "filename", "").startswith(_HERE) else location


def _leads(source: Any) -> bool:
    """Whether a source leads to an argument."""
    while hasattr(source, "base"):
        source = source.base
    return isinstance(source, _torch.dynamo_source().LocalSource)
