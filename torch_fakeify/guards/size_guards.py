"""The facts of a ``ShapeEnv`` about the inputs of a graph, as guards over their sources.

Method: the three parts of ``ShapeEnv.produce_guards`` (torch 2.13): each number of an input equals its
expression, each guard holds, each symbol is in its range. The conditions are those of
`assumed_facts`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import sympy
import torch

from torch_fakeify._version import PACKAGE_DIR
from torch_fakeify.compat import torch_dynamo, torch_fakes, torch_symbols
from torch_fakeify.encoding.exprs import decode_expr, encode_expr
from torch_fakeify.encoding.sources import decode_source, encode_source
from torch_fakeify.encoding.stacks import decode_location, encode_location
from torch_fakeify.errors import FormatError, ShapeEnvError, wrap_torch_errors
from torch_fakeify.records.guards import SizeGuardDesc
from torch_fakeify.replay.bindings import expr_of, tensor_numbers
from torch_fakeify.replay.facts import Fact, assumed_facts
from torch_fakeify.replay.lowering import function_of
from torch_fakeify.serialization.limits import check_exponents

from .conditions import Guard, check_guard
from .scope import reader_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class Number(NamedTuple):
    """A number of an input: the input itself, or a size, stride, offset or item of it."""

    source: Any
    expr: sympy.Basic
    """Its expression in the ``ShapeEnv``, before replacements."""


def numbers_of(source: Any, value: Any) -> Iterator[Number]:
    """All numbers of an input at the start of the trace: itself, or its sizes, strides, offset, ``item()``."""
    sources = torch_dynamo.dynamo_source()
    expr: Any = expr_of(value)
    if isinstance(value, torch.SymBool):
        yield Number(sources.ConvertIntSource(source), expr.args[0])
    elif not isinstance(value, torch.Tensor):
        yield Number(source, expr)
    else:
        yield from _tensor_numbers(source, value)
        base = value._base if value._is_view() else None
        if base is not None:  # only symbolic numbers, as in Dynamo
            numbers = _tensor_numbers(sources.AttrSource(source, "_base"), base)
            yield from (number for number in numbers if number.expr.free_symbols)
        if isinstance(value, torch_fakes.FakeTensor) and value.item_memo is not None:
            memo: Any = expr_of(value.item_memo)
            yield Number(sources.CallMethodItemSource(source), memo)


def _tensor_numbers(source: Any, t: torch.Tensor) -> Iterator[Number]:
    sources = torch_dynamo.dynamo_source()
    for (*inner, (prop, *dim)), n in tensor_numbers(t):
        expr = expr_of(n)
        if expr is None or prop == "getattr":
            continue  # a nested int, or no number of a tensor
        tensor = source
        for _, name in inner:
            tensor = sources.AttrSource(tensor, name)
        kind = sources.TensorProperty[prop.upper()]
        yield Number(sources.TensorPropertySource(tensor, kind, *dim), expr)


def shape_guards(
    env: Any,
    numbers: Sequence[Number],
    asserts: Mapping[Any, int] | None = None,
    *,
    whole: bool = True,
) -> Iterator[Guard]:
    """Guards for the facts of an environment.

    Facts about numbers that a graph computes are not guards: the graph asserts them.

    Args:
        env: the environment.
        numbers: the numbers of all inputs.
        asserts: how many runtime asserts of each symbol the graph has; later ones become guards if
            inputs hold their symbols. By default no runtime assert becomes a guard.
        whole: whether the environment is that of these inputs alone. Else a fact about a symbol that
            none of them holds is left out: it is about other inputs.

    Raises:
        ShapeEnvError: a fact is about a symbol that no input holds.
    """
    writer = _Writer(env, numbers, whole=whole)
    for number in numbers:
        yield from writer.equality(number)
    for fact in assumed_facts(env):
        yield from writer.fact(fact)
    if asserts is not None:
        for symbol, group in env.deferred_runtime_asserts.items():
            for one in group[asserts.get(symbol, 0) :]:
                yield from writer.fact(Fact("assert", one.expr))


class _Writer:
    """Writes conditions over symbols as guards over the sources of these symbols."""

    def __init__(self, env: Any, numbers: Sequence[Number], *, whole: bool) -> None:
        self._env = env
        self._whole = whole
        self._sources: dict[sympy.Basic, Any] = {}
        for number in numbers:
            if isinstance(number.expr, sympy.Symbol):
                self._sources.setdefault(number.expr, number.source)
        for symbol, sources in env.var_to_sources.items() if whole else ():
            lasting = [source for source in sources if not source.is_ephemeral()]
            if lasting and _is_argument(lasting[0]):
                self._sources.setdefault(symbol, lasting[0])
        self._names: dict[sympy.Basic, Any] = {
            symbol: self._name(symbol, source) for symbol, source in self._sources.items()
        }
        """What each symbol is over the sources."""
        self._named: dict[sympy.Basic, Any] = {
            self._names[symbol]: source for symbol, source in self._sources.items()
        }
        self._done: set[str] = set()

    @staticmethod
    def _name(symbol: sympy.Basic, source: Any) -> sympy.Symbol:
        return sympy.Symbol(source.name, **{"integer" if symbol.is_integer else "real": True})

    def equality(self, number: Number) -> Iterator[Guard]:
        """The guard that a number of an input equals its expression; for a float, that it is no NaN."""
        expr, source = number.expr, number.source
        if expr in self._sources and self._sources[expr].name == source.name:
            if torch_symbols.is_float_symbol(expr):
                yield check_guard("not nan", [source], None)
            return
        name = self._name(expr, source)
        self._solve(expr, name, source)
        if not self._can_read(expr):
            if not self._whole:
                return
            raise self._unguardable(sympy.Eq(name, expr, evaluate=False))
        equal = sympy.Eq(name, expr.xreplace(self._names), evaluate=False)
        location = _user_location(self._env.replacements_slocs.get(expr))
        yield from self._unless_done(_size_guard(equal, {**self._named, name: source}, location))

    def _solve(self, expr: Any, name: sympy.Symbol, source: Any) -> None:
        """Express a dim of ``torch.export`` that no input holds, as in sizes of ``2*half``, by this number."""
        unknown = expr.free_symbols - self._names.keys()
        symbol: Any = next(iter(unknown), None)
        if len(unknown) != 1 or not all(map(_is_dim, self._env.var_to_sources.get(symbol, [None]))):
            return
        factor = expr.coeff(symbol)
        rest = expr - factor * symbol
        if not isinstance(factor, sympy.Integer) or factor == 0 or rest.has(symbol):
            return
        quotient: Any = torch_symbols.sympy_functions.FloorDiv
        self._names[symbol] = quotient(name - rest.xreplace(self._names), factor)
        self._named[name] = source

    def fact(self, fact: Fact) -> Iterator[Guard]:
        """The guard for a fact, unless the graph must assert it."""
        expr: Any = fact.expr
        if not self._can_read(expr):
            expr = self._env.replace(expr)
        is_trivial = expr == sympy.true or (isinstance(expr, sympy.Eq) and expr.lhs == expr.rhs)
        if is_trivial or self._is_jagged(fact):
            return
        if not self._can_read(expr):
            if fact.what == "range":
                return  # the symbol is of conversion alone, such as one of a jagged tensor's views
            known = self._env.backed_var_to_val.keys() | self._sources.keys()
            if self._whole and expr.free_symbols <= known:
                raise self._unguardable(expr)
            return  # it is about numbers that the graph computes
        location = _user_location(fact.location)
        yield from self._unless_done(_size_guard(expr.xreplace(self._names), self._named, location))

    def _unless_done(self, guard: Guard) -> Iterator[Guard]:
        if guard.text not in self._done:
            self._done.add(guard.text)
            yield guard

    def _can_read(self, expr: sympy.Basic) -> bool:
        return expr.free_symbols <= self._names.keys()

    def _is_jagged(self, fact: Fact) -> bool:
        """Whether a fact is the range of a jagged dim's size, a nested int."""
        hint = self._env.backed_var_to_val.get(fact.symbol)
        return fact.what == "range" and isinstance(hint, torch_symbols.SingletonInt)

    def _unguardable(self, expr: sympy.Basic) -> ShapeEnvError:
        readable = {*self._sources.keys(), *self._names.values()}
        unknown = sorted(
            str(s) for s in expr.free_symbols if s in self._env.var_to_range and s not in readable
        )
        return ShapeEnvError(
            "the trace assumes something of what no input holds",
            where=str(expr),
            expected="symbols of inputs",
            found=", ".join(unknown),
            fix="Make that input's dims static in the policy",
        )


def _size_guard(expr: Any, sources: Mapping[sympy.Basic, Any], location: Any) -> Guard:
    """Return the guard that a condition holds, whose symbols have the names of their sources."""
    used = sorted(expr.free_symbols, key=str)
    compute = function_of(expr, {symbol: reader_of(sources[symbol]) for symbol in used})
    printer: Any = torch_symbols.ShapeGuardPrinter(
        {symbol: [sources[symbol]] for symbol in used}, lambda source: source.name, {}
    )
    if isinstance(expr, sympy.Eq) and isinstance(expr.lhs, sympy.Symbol):
        text = f"{printer.doprint(expr.lhs)} == {printer.doprint(expr.rhs)}"
    else:
        text = printer.doprint(expr)

    def encode() -> SizeGuardDesc:
        return SizeGuardDesc(
            expr=encode_expr(expr),
            sources=tuple(encode_source(sources[symbol]) for symbol in used),
            location=encode_location(location),
        )

    return Guard(text, lambda scope: bool(compute(scope)), expr, location, encode)


def decode_size_guard(desc: SizeGuardDesc, where: str) -> Guard:
    """Return the guard of the record at a path.

    Raises:
        FormatError: it cannot be decoded, or a symbol has no source.
        LimitError: its value may be too large for sympy.
    """
    check_exponents(desc.expr.nodes, (), f"{where}.expr")
    with wrap_torch_errors(f"{where}.expr"):
        expr = decode_expr(desc.expr)
    sources = {source.name: source for source in map(decode_source, desc.sources)}
    names = {symbol.name for symbol in expr.free_symbols}  # type: ignore[attr-defined]
    if names != sources.keys():
        raise FormatError(
            "the symbols of a condition are not those of its sources",
            where=f"{where}.expr",
            expected=", ".join(sorted(sources)) or "no symbols",
            found=", ".join(sorted(names)) or "none",
        )
    named = {symbol: sources[symbol.name] for symbol in expr.free_symbols}  # type: ignore[attr-defined]
    return _size_guard(expr, named, decode_location(desc.location))


def _user_location(location: Any) -> Any | None:
    """A location with torch's text of its frame; ``None`` if it is in this package.

    The text has no path to torch, so that guards are the same text and bytes on all machines.
    """
    frame = getattr(location, "framework_loc", None)
    if frame is None or isinstance(frame, str):
        return location
    if frame.filename.startswith(str(PACKAGE_DIR)):
        return None
    return torch_symbols.SLoc(torch_symbols.format_frame(frame), location.maybe_user_loc)


def _is_dim(source: Any) -> bool:
    """Whether the source of a symbol is a ``Dim`` of ``torch.export``, which is no value of its own."""
    return isinstance(source, torch_dynamo.dynamo_source().ConstantSource)


def _is_argument(source: Any) -> bool:
    """Whether a source starts at an argument."""
    while hasattr(source, "base"):
        source = source.base
    return isinstance(source, torch_dynamo.dynamo_source().LocalSource)
