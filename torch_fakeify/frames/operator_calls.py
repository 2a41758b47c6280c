"""The recorded calls of an operator, and what they say about the result of another call.

A result is a formula over the sizes of the arguments: of the record of a node, each symbol that is
the size, the stride or the number of an argument stands for what the argument of another call has
there. Symbols of no argument are unbacked sizes, which each call makes anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import sympy
import torch

from torch_fakeify.compat import torch_library, torch_symbols
from torch_fakeify.encoding.exprs import decode_expr
from torch_fakeify.encoding.operators import bound_arguments, written_argument
from torch_fakeify.encoding.values import decode_value
from torch_fakeify.errors import FakeifyError, StubError
from torch_fakeify.records.graph import VALUE_KEYS
from torch_fakeify.records.tensor import (
    FloatValue,
    FunctionValue,
    ListValue,
    NodeValue,
    SizeValue,
    SymDesc,
    SymValue,
    TensorValue,
    TupleValue,
)

from .inputs.symbol_values import integer_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch_fakeify.records.frame import CaptureDesc
    from torch_fakeify.records.graph import GraphModuleDesc
    from torch_fakeify.records.tensor import IntLike, MetaTensorDesc, Value

_SEQUENCES = (ListValue, TupleValue, SizeValue)


class OperatorCall(NamedTuple):
    """One recorded call: the values of its arguments and its result, without nodes."""

    args: tuple[Value, ...]
    kwargs: Mapping[str, Value]
    result: Value
    has_result: bool
    """Whether the node has a value on record."""


def calls_of(graph: GraphModuleDesc, operator: str) -> list[OperatorCall]:
    """Return the calls of an operator, ``namespace.name`` without overload, in a graph and its bodies."""
    return [call for each in graph.graphs() for call in _calls(each, operator)]


def _calls(graph: GraphModuleDesc, operator: str) -> Iterator[OperatorCall]:
    tensors = {name: TensorValue(tensor=tensor) for name, tensor in graph.tensors}
    values = [
        tensors.get(str(n.target)) if n.op == "get_attr" and n.value is None else n.value
        for n in graph.nodes
    ]

    def resolved(value: Value) -> Value:
        if isinstance(value, NodeValue):
            return values[value.index] if 0 <= value.index < len(values) else None
        if isinstance(value, (ListValue, TupleValue)):
            return type(value)(items=tuple(map(resolved, value.items)))
        return value

    for fx_node in graph.nodes:
        target = fx_node.target
        if not isinstance(target, FunctionValue) or target.kind not in ("op", "packet"):
            continue
        name = target.name.rpartition(".")[0] if target.kind == "op" else target.name
        if name == operator:
            kwargs = {key: resolved(value) for key, value in fx_node.kwargs}
            has_result = any(key in VALUE_KEYS for key, _ in fx_node.meta)
            yield OperatorCall(
                tuple(map(resolved, fx_node.args)), kwargs, fx_node.value, has_result
            )


def fake_result(
    schema: Any,
    desc: CaptureDesc,
    calls: Sequence[OperatorCall],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Return the fake result of a call, by the first recorded call that it is like.

    The frame has the ranges of unbacked symbols; the arguments are fake.

    Raises:
        StubError: no recorded call is like it, or its result is of a kind that a stub cannot make.
    """
    given = bound_arguments(schema, args, kwargs)
    reasons: list[str] = []
    for call in calls:
        expected = bound_arguments(schema, call.args, call.kwargs)
        if given is None or expected is None:
            continue
        match = _Match(desc)
        reason = (
            next(filter(None, (match.compare(expected[n], given[n], n) for n in given)), None)
            or match.solve()
        )
        if reason is None and (call.has_result or not schema.returns):
            return _Result(schema, match, given).make(call.result)
        reasons.append(reason or "the node has no value on record")
    name = schema.name
    raise StubError(
        f"the stub of {name} has no result for this call",
        expected="a call like a recorded one",
        found="; ".join(dict.fromkeys(reasons)) or "no recorded call",
        fix="Import the module that registers the operator (--import MODULE)",
    )


class _Match:
    """What the symbols of a recorded call are in another call."""

    def __init__(self, desc: CaptureDesc) -> None:
        self.desc = desc
        self.env: Any = None
        self.symbols: dict[Any, Any] = {}
        """Expressions of the call by recorded symbol."""
        self.devices: dict[str, torch.device] = {}
        self._pairs: list[tuple[Any, Any, str]] = []

    def compare(self, expected: Any, given: Any, where: str) -> str | None:
        """Compare an argument with the recorded one; return why they differ."""
        if isinstance(expected, TensorValue):
            return self._compare_tensors(expected.tensor, given, where)
        if isinstance(expected, _SEQUENCES) or isinstance(given, (list, tuple)):
            items = expected.items if isinstance(expected, _SEQUENCES) else expected
            if not isinstance(items, (list, tuple)) or not isinstance(given, (list, tuple)):
                return f"{where} is another kind of value"
            if len(items) != len(given):
                return f"{where} has {len(given)} items, {len(items)} recorded"
            parts = zip(items, given, strict=True)
            found = (self.compare(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(parts))
            return next(filter(None, found), None)
        if isinstance(expected, SymValue) and isinstance(expected.sym, SymDesc):
            expected = expected.sym
        if isinstance(expected, SymDesc) or type(expected) is int:
            if isinstance(given, (int, torch.SymInt)) and not isinstance(given, bool):
                self._pair(expected, given, where)
                return None
            is_number = isinstance(given, (float, torch.SymFloat, torch.SymBool))
            return None if is_number else f"{where} is another kind of value"
        if isinstance(expected, (float, FloatValue)):  # sizes of results do not depend on it
            is_number = isinstance(given, (int, float, torch.SymFloat))
            return None if is_number else f"{where} is another kind of value"
        if isinstance(given, torch.Tensor):
            return f"{where} is a tensor"
        return None if _is_equal(expected, given) else f"{where} is {given}, not as recorded"

    def _compare_tensors(self, expected: MetaTensorDesc, given: Any, where: str) -> str | None:
        if not isinstance(given, torch.Tensor):
            return f"{where} is no tensor"
        if str(given.dtype) != f"torch.{expected.dtype}":
            return f"{where} is of {given.dtype}, torch.{expected.dtype} recorded"
        if given.ndim != expected.ndim:
            return f"{where} has {given.ndim} dims, {expected.ndim} recorded"
        for dim, (size, n) in enumerate(zip(expected.size, given.shape, strict=True)):
            self._pair(size, n, f"{where}.size({dim})")
        if given.layout is torch.strided:
            for stride, n in zip(expected.stride, given.stride(), strict=False):
                if isinstance(stride, SymDesc):
                    self._bind(decode_expr(stride.expr), _expr(n))
        self.devices.setdefault(expected.device, given.device)
        return None

    def _pair(self, expected: IntLike, given: Any, where: str) -> None:
        if isinstance(given, torch.SymInt) and self.env is None:
            self.env = given.node.shape_env
        found = _size_expr(expected)
        self._bind(found, _expr(given))
        self._pairs.append((found, _expr(given), where))

    def _bind(self, expected: Any, given: Any) -> None:
        if isinstance(expected, sympy.Symbol):
            self.symbols.setdefault(expected, given)

    def solve(self) -> str | None:
        """Check that all sizes follow from the symbols; return why they do not."""
        for expected, given, _ in self._pairs:
            if expected == given:  # a size that is an expression, of the same symbols
                for symbol in expected.free_symbols:
                    self.symbols.setdefault(symbol, symbol)
        for expected, given, where in self._pairs:
            if not self._is_same(self.expr(expected), given):
                return f"{where} is {given}, {expected} recorded"
        return None

    def expr(self, recorded: Any) -> Any:
        """Return an expression of the call for a recorded one."""
        return recorded.xreplace(self.symbols)

    def _is_same(self, a: Any, b: Any) -> bool:
        if a == b:
            return True
        return self.env is not None and self.env.simplify(a - b) == 0


def _size_expr(size: IntLike) -> Any:
    if isinstance(size, SymDesc):
        return decode_expr(size.expr)
    if isinstance(size, int):
        return sympy.Integer(size)
    raise StubError("a stub cannot take jagged tensors", found=str(size))


def _expr(size: Any) -> Any:
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def _is_equal(expected: Any, given: Any) -> bool:
    try:
        found = decode_value(expected) if expected is not None else None
    except FakeifyError:
        return False
    if isinstance(found, torch.device):
        return isinstance(given, torch.device)  # a frame may be moved to another one
    return type(found) is type(given) and found == given


class _Result:
    def __init__(self, schema: Any, match: _Match, given: Mapping[str, Any]) -> None:
        self._schema = schema
        self._match = match
        self._given = given

    def make(self, value: Value) -> Any:
        """Make the result from the recorded one."""
        count = len(self._schema.returns)
        if count == 0:
            return None
        if count == 1:
            return self._returned(value, 0)
        if not isinstance(value, _SEQUENCES) or len(value.items) != count:
            raise self._no_result(f"a value of {type(value).__name__} for {count} results")
        return tuple(self._returned(item, at) for at, item in enumerate(value.items))

    def _returned(self, value: Value, position: int) -> Any:
        argument = written_argument(self._schema, position)
        return self._part(value) if argument is None else self._given[argument]

    def _part(self, value: Value) -> Any:
        match value:
            case TensorValue(tensor=tensor):
                return self._tensor(tensor)
            case SymValue(sym=SymDesc(kind="int") as sym):
                return self._size(sym)
            case ListValue(items=items) | TupleValue(items=items):
                return [self._part(item) for item in items]
            case None | bool() | int() | float():
                return value
            case _:
                raise self._no_result(f"a value of {type(value).__name__}")

    def _tensor(self, d: MetaTensorDesc) -> torch.Tensor:
        if d.layout != "strided" or d.subclass is not None or d.functorch is not None:
            raise self._no_result(f"a tensor of {d.layout} layout, or of a subclass")
        size, stride = (tuple(map(self._size, each)) for each in (d.size, d.stride))
        device = self._match.devices.get(d.device, d.device)
        dtype = _dtype(d.dtype)
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    def _size(self, size: IntLike) -> Any:
        recorded = _size_expr(size)
        for symbol in sorted(recorded.free_symbols - self._match.symbols.keys(), key=str):
            self._match.symbols[symbol] = _expr(self._new_size(symbol))
        expr = self._match.expr(recorded)
        if expr.is_Integer:
            return int(expr)
        env: Any = self._match.env
        try:
            return env.create_symintnode(expr, hint=None)  # torch computes it
        except Exception as error:  # of torch or sympy: a division by zero, a number too large
            raise self._no_result(f"a size {recorded} that is no integer") from error

    def _new_size(self, symbol: Any) -> torch.SymInt:
        if not torch_symbols.is_unbacked(symbol):
            raise self._no_result(f"a size with {symbol}, which no argument has")
        low, high = range_of(self._match.desc, symbol.name)
        made = torch_library.result_context().new_dynamic_size(min=low, max=high)
        self._match.env = made.node.shape_env
        return made

    def _no_result(self, found: str) -> StubError:
        return StubError(
            f"the stub of {self._schema.name} cannot make its result",
            expected="strided tensors whose sizes follow from those of the arguments",
            found=found,
            fix="Import the module that registers the operator (--import MODULE)",
        )


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise StubError("torch has no such dtype", found=name)
    return found


def range_of(desc: CaptureDesc, name: str) -> tuple[int, int | None]:
    """Return the recorded range of an unbacked size."""
    for symbol in desc.symbols:
        if symbol.name == name:
            return max(integer_of(symbol.lower, 0), 0), integer_of(symbol.upper, None)
    return 0, None
