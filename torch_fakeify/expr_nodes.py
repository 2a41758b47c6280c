"""Sympy expressions as FX nodes that compute them.

Method: what ``insert_deferred_runtime_asserts`` of torch 2.13 does through
``torch.utils._sympy.interp``, over a table of one function for each class of expression. A
sub-expression is computed once. Every node gets the symbolic value that it has, so that what runs
over the graph next needs no propagation, and a mark by which it is known again.
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

from ._torch import is_dense_and_non_overlapping
from ._torch import sympy_functions as functions
from .desc import (
    ApplyNode,
    ExprDesc,
    ExprNode,
    FloatNode,
    IntNode,
    RationalNode,
    SymbolNode,
)
from .errors import UnsupportedValueError
from .exprs import encode_expr
from .text import expr_text

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

__all__ = [
    "ASSERTS",
    "MARK",
    "ExprNodes",
    "Operand",
    "bodies",
    "function_of",
    "keeping_axioms",
    "mark_of",
    "set_mark",
    "strip_marked",
    "value_key",
    "value_of",
]

Operand: TypeAlias = torch.fx.Node | int | float | bool

MARK = "torch_fakeify"
"""The key of the mark in ``meta["custom"]``, which torch's retraces copy to the nodes they make."""

ASSERTS = frozenset({"assert", "size_like"})
"""What the marks of `insert_runtime_asserts` say; all others but ``compute`` are of guards."""

_aten: Any = torch.ops.aten
_functions: Any = torch


def mark_of(fx_node: torch.fx.Node) -> Mapping[str, str] | None:
    """What an inserted node is for; ``None`` of every other node."""
    custom = fx_node.meta.get("custom")
    mark = custom.get(MARK) if isinstance(custom, dict) else None
    if not isinstance(mark, str):
        return None
    what, _, expr = mark.partition(": ")
    return {"what": what, "expr": expr}


def set_mark(fx_node: torch.fx.Node, mark: Mapping[str, str]) -> None:
    """Say what an inserted node is for: ``what`` it is, and the ``expr`` that it is about."""
    fx_node.meta["custom"] = {MARK: f"{mark['what']}: {mark['expr']}"}


def bodies(gm: torch.fx.GraphModule) -> list[torch.fx.GraphModule]:
    """The graphs that a graph hands to higher-order operators, each one once."""
    found: dict[int, torch.fx.GraphModule] = {}
    for fx_node in gm.graph.find_nodes(op="get_attr"):
        value: Any = gm
        for name in str(fx_node.target).split("."):
            value = getattr(value, name, None)
        if isinstance(value, torch.fx.GraphModule):
            found[id(value)] = value
    return list(found.values())


def strip_marked(gm: torch.fx.GraphModule, drop: Callable[[str], bool]) -> int:
    """Take out marked nodes, also of the bodies of higher-order operators.

    A node that another one uses stays; what computes a condition goes with the last that uses it.

    Args:
        gm: the graph.
        drop: whether nodes of a kind go, by ``what`` their mark says; ``compute`` is not asked.

    Returns:
        How many nodes were taken out.
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
    """Where the graph's nodes have their fake values: Dynamo's key, or that of ATen graphs."""
    dynamo = any("example_value" in fx_node.meta for fx_node in graph.nodes)
    return "example_value" if dynamo else "val"


def value_of(operand: Any) -> Any:
    """The fake value of a node; anything else is its own value."""
    if not isinstance(operand, torch.fx.Node):
        return operand
    meta = operand.meta
    return meta["example_value"] if "example_value" in meta else meta.get("val")


@contextmanager
def keeping_axioms(shape_env: Any) -> Generator[None, None, None]:
    """Around questions to a ``ShapeEnv`` that it should not remember.

    Any question marks all axioms as simplified, also one that looks at none (torch 2.13).
    """
    simplified = shape_env._resimplify_floor_div_axioms
    try:
        yield
    finally:
        shape_env._resimplify_floor_div_axioms = simplified


class ExprNodes:
    """Computes expressions at the insertion point of a graph.

    What was computed stays known: later insertion points must come after earlier ones.

    Args:
        graph: where to insert.
        shape_env: of the symbols; no guard is added to it.
    """

    def __init__(self, graph: torch.fx.Graph, shape_env: Any) -> None:
        self.graph = graph
        self._env = shape_env
        self._key = value_key(graph)
        self._known: dict[sympy.Basic, Operand] = {}
        self._names: dict[str, str] = {}
        self.stack_trace: str | None = None
        """The user's line that new nodes are for, as ``meta["stack_trace"]`` has it."""

    def bind(self, symbol: sympy.Symbol, operand: Operand, text: str | None = None) -> None:
        """Say what holds the value of a symbol from here on, and how a person calls it."""
        self._known[symbol] = operand
        if text is not None:
            self.name(symbol, text)

    def name(self, symbol: sympy.Symbol, text: str) -> None:
        """Say how a person calls the value of a symbol."""
        self._names[symbol.name] = text

    def know(self, expr: sympy.Basic, operand: Operand) -> None:
        """Say what holds the value of an expression from here on."""
        self._known[expr] = operand

    def is_bound(self, symbol: sympy.Basic) -> bool:
        """Whether the value of the symbol is known."""
        return symbol in self._known

    def text(self, expr: sympy.Basic) -> str:
        """The expression over what holds its symbols, as Python."""
        return expr_text(_arranged(encode_expr(expr), self._names))

    def in_order(self, args: Sequence[sympy.Basic]) -> list[sympy.Basic]:
        """Arguments of a commutative function, in an order that no symbol's own name decides."""
        return sorted(args, key=self.text)

    def call(self, target: Any, args: tuple[Any, ...], mark: Mapping[str, str]) -> torch.fx.Node:
        """A new node that calls a function, marked and with its value."""
        fx_node = self.graph.call_function(target, args)
        set_mark(fx_node, mark)
        if self.stack_trace is not None:
            fx_node.meta["stack_trace"] = self.stack_trace
        values = [value_of(arg) for arg in args]
        if None not in values:
            with self._env.suppress_guards(), keeping_axioms(self._env):
                fx_node.meta[self._key] = target(*values)
        return fx_node

    def can_compute(self, expr: sympy.Basic) -> bool:
        """Whether functions of a graph compute an expression, given its symbols."""
        try:
            _check(expr)
        except UnsupportedValueError:
            return False
        return True

    def compute(self, expr: sympy.Basic) -> Operand:
        """The node that has the value of an expression, or a number.

        Raises:
            UnsupportedValueError: no function of a graph computes it; nothing was inserted.
        """
        _check(expr)
        return self._compute(expr)

    def _compute(self, expr: sympy.Basic) -> Operand:
        known = self._known.get(expr)
        if known is not None:
            return known
        constant = _constant(expr)
        if constant is not None:
            return constant
        args: Sequence[sympy.Basic] = expr.args
        mark = {"what": "compute", "expr": self.text(expr)}
        build = _Build(self, mark)
        if type(expr) in _COMMUTATIVE:
            args = self.in_order(args)
        found = self._known[expr] = _table()[type(expr)](build, expr, args)
        return found


_COMMUTATIVE = frozenset({
    sympy.Add, sympy.Mul, sympy.And, sympy.Or, sympy.Max, sympy.Min, functions.Max, functions.Min
})  # fmt: skip
_COMMUTATIVE_NAMES = frozenset({"Add", "Mul", "And", "Or", "Max", "Min", "sympy.Max", "sympy.Min"})


def _arranged(desc: ExprDesc, names: Mapping[str, str]) -> ExprDesc:
    """An expression over other names, the arguments of commutative functions sorted by these.

    Numbers stand last in a sum and first in a product.
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


class _Build:
    """The hands of one entry of the table."""

    def __init__(self, nodes: ExprNodes, mark: Mapping[str, str]) -> None:
        self._nodes = nodes
        self._mark = mark

    def of(self, expr: sympy.Basic) -> Operand:
        return self._nodes._compute(expr)  # pyright: ignore[reportPrivateUsage]

    def call(self, target: Any, *args: Operand) -> Operand:
        if not any(isinstance(arg, torch.fx.Node) for arg in args):
            return target(*args)
        return self._nodes.call(target, args, self._mark)


_Entry: TypeAlias = "Callable[[_Build, Any, Sequence[Any]], Operand]"


def _plain(target: Any) -> _Entry:
    """A function of exactly the arguments that the expression has."""
    return lambda build, _expr, args: build.call(target, *map(build.of, args))


def _folded(target: Any) -> _Entry:
    """A function of two arguments, applied from left to right."""

    def entry(build: _Build, _expr: Any, args: Sequence[Any]) -> Operand:
        return functools.reduce(functools.partial(build.call, target), map(build.of, args))

    return entry


def _negative(term: Any) -> bool:
    coeff = term.args[0] if isinstance(term, sympy.Mul) else term
    return isinstance(coeff, sympy.Number) and bool(coeff.is_negative)


def _sum(build: _Build, _expr: Any, args: Sequence[Any]) -> Operand:
    # Symbols before constants, and a difference where a term is negative: as a person writes it.
    terms = sorted(args, key=lambda term: (_negative(term), isinstance(term, sympy.Number)))
    total = build.of(terms[0])
    for term in terms[1:]:
        if _negative(term):
            total = build.call(operator.sub, total, build.of(-term))
        else:
            total = build.call(operator.add, total, build.of(term))
    return total


def _product(build: _Build, _expr: Any, args: Sequence[Any]) -> Operand:
    if -1 in args:
        return build.call(operator.neg, build.of(sympy.Mul(*(arg for arg in args if arg != -1))))
    return _folded(operator.mul)(build, _expr, args)


def _power(build: _Build, _expr: Any, args: Sequence[Any]) -> Operand:
    if args[1] == sympy.S.Half:
        return build.call(_functions._sym_sqrt, build.of(args[0]))
    return build.call(operator.pow, build.of(args[0]), build.of(args[1]))


def _ceil_div(build: _Build, _expr: Any, args: Sequence[Any]) -> Operand:
    negated = build.call(operator.neg, build.of(args[0]))
    return build.call(operator.neg, build.call(operator.floordiv, negated, build.of(args[1])))


def _modular_indexing(build: _Build, _expr: Any, args: Sequence[Any]) -> Operand:
    base, divisor, modulus = map(build.of, args)
    return build.call(operator.mod, build.call(operator.floordiv, base, divisor), modulus)


def _trunc_to_float(build: _Build, _expr: Any, args: Sequence[Any]) -> Operand:
    return build.call(torch.sym_float, build.call(math.trunc, build.of(args[0])))


def _piecewise(build: _Build, _expr: Any, args: Sequence[Any]) -> Operand:
    value = build.of(args[-1].args[0])
    for piece in reversed(args[:-1]):
        expr, condition = piece.args
        value = build.call(torch.sym_ite, build.of(condition), build.of(expr), value)
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
        functions.Identity: lambda build, _expr, args: build.of(args[0]),
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
    """A Python function that computes an expression, by the same table.

    Args:
        expr: the expression.
        readers: for each of its symbols, what gives its value of the function's argument.

    Raises:
        UnsupportedValueError: no function of the table computes it.
    """
    _check(expr, (functions.IsNonOverlappingAndDenseIndicator,))
    return _Functions(readers).of(expr)


class _Functions(_Build):
    """The hands of an entry of the table, where functions take the place of nodes."""

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
    """Raises where the expression has a part that no function of the table computes."""
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
