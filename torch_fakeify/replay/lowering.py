"""Lowering of sympy expressions to FX nodes that compute them.

Method: that of ``insert_deferred_runtime_asserts`` (``torch.utils._sympy.interp``, torch 2.13), with
a table of one function for each class of expression. A sub-expression is computed once. Every node
gets its symbolic value, so that later passes need no propagation, and a mark that identifies it.
"""

from __future__ import annotations

import functools
import hashlib
import math
import operator
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import sympy
import torch
from sympy.functions.elementary.piecewise import ExprCondPair
from torch.types import py_sym_types

from torch_fakeify.compat import torch_symbols
from torch_fakeify.compat.torch_symbols import is_dense_and_non_overlapping
from torch_fakeify.compat.torch_symbols import sympy_functions as functions
from torch_fakeify.encoding.exprs import encode_expr
from torch_fakeify.errors import UnsupportedValueError
from torch_fakeify.records.tensor import (
    ApplyNode,
    ExprDesc,
    ExprNode,
    FloatNode,
    IntNode,
    RationalNode,
    SymbolNode,
)
from torch_fakeify.render.text import expr_text

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

Operand: TypeAlias = torch.fx.Node | int | float | bool

MARK = "torch_fakeify"
"""The key of the mark in ``meta["custom"]``, which torch's retraces copy to new nodes."""

ASSERTS = frozenset({"assert", "size_like"})
"""The ``what`` of the marks of `insert_runtime_asserts`; others, but ``compute``, are of guards."""

_aten: Any = torch.ops.aten
ASSERT_SCALAR = _aten._assert_scalar.default
"""The operator of inserted assertions."""

_functions: Any = torch


def mark_of(fx_node: torch.fx.Node) -> Mapping[str, str] | None:
    """The mark of an inserted node; ``None`` for other nodes."""
    custom = fx_node.meta.get("custom")
    mark = custom.get(MARK) if isinstance(custom, dict) else None
    if not isinstance(mark, str):
        return None
    what, _, expr = mark.partition(": ")
    return {"what": what, "expr": expr}


def set_mark(fx_node: torch.fx.Node, mark: Mapping[str, str]) -> None:
    """Mark an inserted node with its kind (``what``) and its expression (``expr``)."""
    fx_node.meta["custom"] = {MARK: f"{mark['what']}: {mark['expr']}"}


def bodies(gm: torch.fx.GraphModule) -> list[torch.fx.GraphModule]:
    """The bodies of a graph's higher-order operators, each one once."""
    found: dict[int, torch.fx.GraphModule] = {}
    for fx_node in gm.graph.find_nodes(op="get_attr"):
        value = attribute_of(gm, str(fx_node.target))
        if isinstance(value, torch.fx.GraphModule):
            found[id(value)] = value
    return list(found.values())


def graphs_of(gm: torch.fx.GraphModule) -> Iterator[torch.fx.Graph]:
    """A graph and those of the bodies of its higher-order operators, at any depth."""
    yield gm.graph
    for body in bodies(gm):
        yield from graphs_of(body)


def attribute_of(module: Any, target: str) -> Any:
    """The attribute at a dotted path; ``None`` if it is missing."""
    for name in target.split("."):
        module = getattr(module, name, None)
    return module


def strip_marked(gm: torch.fx.GraphModule, drop: Callable[[str], bool]) -> int:
    """Remove the nodes whose ``what`` is to be dropped, also from bodies; returns how many.

    A node with users remains; a ``compute`` node is removed when its last user is.
    """
    count = sum(strip_marked(body, drop) for body in bodies(gm))
    stripped = 0
    for fx_node in reversed(list(gm.graph.nodes)):
        mark = mark_of(fx_node)
        if mark is None or fx_node.users or fx_node.op != "call_function":
            continue
        what = mark.get("what", "")
        if what == "compute" or drop(what):
            gm.graph.erase_node(fx_node)
            stripped += 1
    if stripped:
        gm.recompile()
    return count + stripped


def value_key(graph: torch.fx.Graph) -> str:
    """The metadata key of a graph's fake values: ``example_value`` (Dynamo) or ``val`` (ATen)."""
    dynamo = any("example_value" in fx_node.meta for fx_node in graph.nodes)
    return "example_value" if dynamo else "val"


def value_of(operand: Any) -> Any:
    """The fake value of a node; any other operand itself."""
    if not isinstance(operand, torch.fx.Node):
        return operand
    meta = operand.meta
    return meta["example_value"] if "example_value" in meta else meta.get("val")


@contextmanager
def keeping_axioms(shape_env: Any) -> Generator[None, None, None]:
    """Evaluate expressions inside without changing which axioms count as simplified.

    Any evaluation marks all axioms as simplified, also one that uses none (torch 2.13).
    """
    simplified = shape_env._resimplify_floor_div_axioms
    try:
        yield
    finally:
        shape_env._resimplify_floor_div_axioms = simplified


class ExprLowering:
    """Inserts nodes that compute expressions at the insertion point of a graph.

    Computed expressions are cached: later insertion points must come after earlier ones. No guard is
    added to the environment.
    """

    def __init__(self, graph: torch.fx.Graph, shape_env: Any) -> None:
        self.graph = graph
        self._env = shape_env
        self._key = value_key(graph)
        self._cached: dict[sympy.Basic, Operand] = {}
        self._names: dict[str, str] = {}
        self._texts: dict[sympy.Basic, str] = {}
        self.stack_trace: str | None = None
        """``meta["stack_trace"]`` of new nodes: the user's line that caused them."""

    def bind(self, expr: sympy.Basic, operand: Operand) -> None:
        """Set the operand that holds the value of an expression."""
        self._cached[expr] = operand

    def name(self, symbol: sympy.Symbol, text: str) -> None:
        """Set the readable name of a symbol."""
        if self._names.get(symbol.name) != text:
            self._names[symbol.name] = text
            self._texts.clear()

    def is_bound(self, symbol: sympy.Basic) -> bool:
        """Whether an operand holds the value of a symbol."""
        return symbol in self._cached

    def text(self, expr: sympy.Basic) -> str:
        """An expression as Python over the readable names of its symbols."""
        text = self._texts.get(expr)
        if text is None:
            text = self._texts[expr] = expr_text(_arranged(encode_expr(expr), self._names))
        return text

    def call(self, target: Any, args: tuple[Any, ...], mark: Mapping[str, str]) -> torch.fx.Node:
        """Insert a node that calls a function, with a mark and its fake value."""
        fx_node = self.insert(target, args, mark)
        self.run(fx_node)
        return fx_node

    def insert(self, target: Any, args: tuple[Any, ...], mark: Mapping[str, str]) -> torch.fx.Node:
        """Insert a node that calls a function, with a mark and without a value."""
        fx_node = self.graph.call_function(target, args)
        set_mark(fx_node, mark)
        if self.stack_trace is not None:
            fx_node.meta["stack_trace"] = self.stack_trace
        return fx_node

    def run(self, fx_node: torch.fx.Node) -> None:
        """Set the fake value of a node by running it on the values of its arguments.

        An assertion, whose value is ``None``, does not run: the environment has its fact.
        """
        values = [value_of(arg) for arg in fx_node.args]
        if None in values:
            return
        if fx_node.target is ASSERT_SCALAR:
            fx_node.meta[self._key] = None
        else:
            target: Any = fx_node.target
            with self._env.suppress_guards(), keeping_axioms(self._env):
                fx_node.meta[self._key] = target(*values)

    def run_as(self, fx_node: torch.fx.Node, expr: sympy.Basic) -> None:
        """Set the fake value of a node that computes an expression which sympy has evaluated.

        Torch's operations would evaluate it anew, which takes most of their time. They run where the
        example inputs give the node no number.
        """
        values: list[Any] = [value_of(arg) for arg in fx_node.args]
        numbers = [n.node.hint if isinstance(n, py_sym_types) else n for n in values]
        target: Any = fx_node.target
        is_known = all(isinstance(number, (int, float)) for number in numbers)
        number = target(*numbers) if is_known else None
        if type(number) not in (int, float, bool):
            self.run(fx_node)
            return
        kind = type(number).__name__
        fx_node.meta[self._key] = torch_symbols.make_sym(kind, expr, self._env, number)

    def can_compute(self, expr: sympy.Basic) -> bool:
        """Whether graph functions can compute an expression from its symbols."""
        try:
            _check(expr)
        except UnsupportedValueError:
            return False
        return True

    def compute(self, expr: sympy.Basic, *, is_evaluated: bool = False) -> Operand:
        """Insert the nodes that compute an expression; returns the last one, or a constant.

        Args:
            expr: the expression.
            is_evaluated: whether sympy has evaluated all of it, as a guard of the environment.

        Raises:
            UnsupportedValueError: no graph function computes it; nothing was inserted.
        """
        _check(expr)
        return self._compute(expr, is_evaluated=is_evaluated)

    def _compute(self, expr: sympy.Basic, *, is_evaluated: bool) -> Operand:
        cached = self._cached.get(expr)
        if cached is not None:
            return cached
        constant = _constant(expr)
        if constant is not None:
            return constant
        args: Sequence[sympy.Basic] = expr.args
        mark = {"what": "compute", "expr": self.text(expr)}
        emitter = _NodeEmitter(self, mark, is_evaluated=is_evaluated)
        if type(expr) in _COMMUTATIVE:
            args = sorted(args, key=self.text)  # not by symbol names
        found = self._cached[expr] = _table()[type(expr)](emitter, expr, args)
        for fx_node in emitter.inserted:
            if is_evaluated and fx_node is found:
                self.run_as(fx_node, expr)
            else:
                self.run(fx_node)
        return found


_COMMUTATIVE = frozenset({
    sympy.Add, sympy.Mul, sympy.And, sympy.Or, sympy.Max, sympy.Min, functions.Max, functions.Min
})  # fmt: skip
_COMMUTATIVE_NAMES = frozenset({"Add", "Mul", "And", "Or", "Max", "Min", "sympy.Max", "sympy.Min"})


def _arranged(desc: ExprDesc, names: Mapping[str, str]) -> ExprDesc:
    """An expression with renamed symbols, the arguments of commutative functions sorted.

    Numbers come last in a sum and first in a product.
    """
    nodes: list[ExprNode] = []
    keys: list[str] = []
    for part in desc.nodes:
        if isinstance(part, SymbolNode):
            part = SymbolNode(names.get(part.name, part.name), ())
            key = part.name
        elif isinstance(part, ApplyNode):
            args = part.args
            if part.function in _COMMUTATIVE_NAMES:
                last = part.function == "Add"
                args = tuple(
                    sorted(
                        args,
                        key=lambda i: (_is_number(nodes[i]) == last, keys[i]),
                    )
                )
            part = ApplyNode(part.function, args)
            key = f"{part.function}({','.join(keys[i] for i in args)})"
        else:
            key = str(part)
        nodes.append(part)
        keys.append(key if len(key) <= 64 else hashlib.sha256(key.encode()).hexdigest())
    return ExprDesc(nodes=tuple(nodes))


def _is_number(part: ExprNode) -> bool:
    return isinstance(part, (IntNode, FloatNode, RationalNode))


class _NodeEmitter:
    """Emits FX nodes; passed to the functions of the table."""

    def __init__(
        self, lowering: ExprLowering, mark: Mapping[str, str], *, is_evaluated: bool
    ) -> None:
        self.inserted: list[torch.fx.Node] = []
        """The new nodes, which have no values yet."""
        self._lowering = lowering
        self._mark = mark
        self._is_evaluated = is_evaluated

    def of(self, expr: sympy.Basic) -> Operand:
        return self._lowering._compute(  # pyright: ignore[reportPrivateUsage]
            expr, is_evaluated=self._is_evaluated
        )

    def call(self, target: Any, *args: Operand) -> Operand:
        if not any(isinstance(arg, torch.fx.Node) for arg in args):
            return target(*args)
        fx_node = self._lowering.insert(target, args, self._mark)
        self.inserted.append(fx_node)
        return fx_node


_Entry: TypeAlias = "Callable[[_NodeEmitter, Any, Sequence[Any]], Operand]"


def _plain(target: Any) -> _Entry:
    """A table entry that calls a function with the arguments of the expression."""
    return lambda emitter, _expr, args: emitter.call(target, *map(emitter.of, args))


def _folded(target: Any) -> _Entry:
    """A table entry that applies a binary function to the arguments from left to right."""

    def entry(emitter: _NodeEmitter, _expr: Any, args: Sequence[Any]) -> Operand:
        return functools.reduce(functools.partial(emitter.call, target), map(emitter.of, args))

    return entry


def _negative(term: Any) -> bool:
    coeff = term.args[0] if isinstance(term, sympy.Mul) else term
    return isinstance(coeff, sympy.Number) and bool(coeff.is_negative)


def _sum(emitter: _NodeEmitter, _expr: Any, args: Sequence[Any]) -> Operand:
    # Symbols before constants, and a difference where a term is negative: easier to read.
    terms = sorted(args, key=lambda term: (_negative(term), isinstance(term, sympy.Number)))
    total = emitter.of(terms[0])
    for term in terms[1:]:
        if _negative(term):
            total = emitter.call(operator.sub, total, emitter.of(-term))
        else:
            total = emitter.call(operator.add, total, emitter.of(term))
    return total


def _product(emitter: _NodeEmitter, _expr: Any, args: Sequence[Any]) -> Operand:
    if -1 in args:
        return emitter.call(
            operator.neg, emitter.of(sympy.Mul(*(arg for arg in args if arg != -1)))
        )
    return _folded(operator.mul)(emitter, _expr, args)


def _power(emitter: _NodeEmitter, _expr: Any, args: Sequence[Any]) -> Operand:
    if args[1] == sympy.S.Half:
        return emitter.call(_functions._sym_sqrt, emitter.of(args[0]))
    return emitter.call(operator.pow, emitter.of(args[0]), emitter.of(args[1]))


def _ceil_div(emitter: _NodeEmitter, _expr: Any, args: Sequence[Any]) -> Operand:
    negated = emitter.call(operator.neg, emitter.of(args[0]))
    return emitter.call(operator.neg, emitter.call(operator.floordiv, negated, emitter.of(args[1])))


def _modular_indexing(emitter: _NodeEmitter, _expr: Any, args: Sequence[Any]) -> Operand:
    base, divisor, modulus = map(emitter.of, args)
    return emitter.call(operator.mod, emitter.call(operator.floordiv, base, divisor), modulus)


def _trunc_to_float(emitter: _NodeEmitter, _expr: Any, args: Sequence[Any]) -> Operand:
    return emitter.call(torch.sym_float, emitter.call(math.trunc, emitter.of(args[0])))


def _piecewise(emitter: _NodeEmitter, _expr: Any, args: Sequence[Any]) -> Operand:
    value = emitter.of(args[-1].args[0])
    for piece in reversed(args[:-1]):
        expr, condition = piece.args
        value = emitter.call(torch.sym_ite, emitter.of(condition), emitter.of(expr), value)
    return value


@functools.cache
def _table() -> Mapping[type, _Entry]:
    table: dict[type, _Entry] = {
        sympy.Add: _sum,
        sympy.Mul: _product,
        sympy.Pow: _power,
        sympy.Eq: _plain(operator.eq),
        sympy.Ne: _plain(operator.ne),
        sympy.Lt: _plain(operator.lt),
        sympy.Le: _plain(operator.le),
        sympy.Gt: _plain(operator.gt),
        sympy.Ge: _plain(operator.ge),
        sympy.And: _folded(operator.and_),
        sympy.Or: _folded(operator.or_),
        sympy.Not: _plain(torch.sym_not),
        sympy.Mod: _plain(operator.mod),
        sympy.Max: _folded(torch.sym_max),
        sympy.Min: _folded(torch.sym_min),
        sympy.Abs: _plain(operator.abs),
        sympy.floor: _plain(math.floor),
        sympy.ceiling: _plain(math.ceil),
        sympy.Piecewise: _piecewise,
        functions.Max: _folded(torch.sym_max),
        functions.Min: _folded(torch.sym_min),
        functions.Mod: _plain(operator.mod),
        functions.PythonMod: _plain(operator.mod),
        functions.FloorDiv: _plain(operator.floordiv),
        functions.CleanDiv: _plain(operator.floordiv),
        functions.CeilDiv: _ceil_div,
        functions.ModularIndexing: _modular_indexing,
        functions.Where: _plain(torch.sym_ite),
        functions.IntTrueDiv: _plain(operator.truediv),
        functions.FloatTrueDiv: _plain(operator.truediv),
        functions.FloatPow: _plain(operator.pow),
        functions.PowByNatural: _plain(operator.pow),
        functions.LShift: _plain(operator.lshift),
        functions.RShift: _plain(operator.rshift),
        functions.ToFloat: _plain(torch.sym_float),
        functions.FloorToInt: _plain(math.floor),
        functions.CeilToInt: _plain(math.ceil),
        functions.TruncToInt: _plain(math.trunc),
        functions.TruncToFloat: _trunc_to_float,
        functions.RoundToInt: _plain(round),
        functions.RoundDecimal: _plain(round),
        functions.Identity: lambda emitter, _expr, args: emitter.of(args[0]),
    }
    named: Any = functions
    for name in ("and", "or", "xor"):
        target = getattr(operator, name if name == "xor" else f"{name}_")
        table[getattr(named, f"BitwiseFn_bitwise_{name}")] = _plain(target)
    for name in ("sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "asin", "acos", "atan",
                 "log2"):  # fmt: skip
        table[getattr(named, f"OpaqueUnaryFn_{name}")] = _plain(getattr(_functions, f"_sym_{name}"))
    return MappingProxyType(table)


def function_of(
    expr: sympy.Basic, readers: Mapping[sympy.Basic, Callable[[Any], Any]]
) -> Callable[[Any], Any]:
    """A Python function that computes an expression by functions that read its symbols' values.

    Raises:
        UnsupportedValueError: no function of the table computes it.
    """
    _check(expr, (functions.IsNonOverlappingAndDenseIndicator,))
    return _PythonEmitter(readers).of(expr)


class _PythonEmitter(_NodeEmitter):
    """Emits Python functions of one argument instead of FX nodes."""

    def __init__(self, readers: Mapping[sympy.Basic, Callable[[Any], Any]]) -> None:
        self._readers = readers

    def of(self, expr: sympy.Basic) -> Any:
        constant = _constant(expr)
        if constant is not None:
            return lambda _: constant
        if expr in self._readers:
            return self._readers[expr]
        if isinstance(expr, functions.IsNonOverlappingAndDenseIndicator):
            return self.call(is_dense_and_non_overlapping, *map(self.of, expr.args))
        return _table()[type(expr)](self, expr, expr.args)

    def call(self, target: Any, *args: Any) -> Any:
        return lambda scope: target(*[arg(scope) for arg in args])


def _constant(expr: sympy.Basic) -> int | float | bool | None:
    match expr:
        case sympy.Integer():
            return int(expr)
        case sympy.Float():
            return float(expr)
        case _ if expr is sympy.true or expr is sympy.false:
            return bool(expr)
        case _:
            return None


def _check(expr: sympy.Basic, others: tuple[type, ...] = ()) -> None:
    """Raise an error if no function of the table computes a part of an expression."""
    table = {*_table(), *others}
    seen: set[sympy.Basic] = set()
    stack = [expr]
    while stack:
        part = stack.pop()
        if part in seen:
            continue
        seen.add(part)
        stack.extend(part.args)
        if isinstance(part, sympy.Symbol) or _constant(part) is not None or type(part) in table:
            continue
        if isinstance(part, ExprCondPair) or part == sympy.S.Half:
            continue  # of a Piecewise, of a square root
        raise UnsupportedValueError(
            "an expression that no function of a graph computes",
            where=str(expr),
            found=f"{type(part).__name__} ({part})",
        )
