"""The conditions that a graph asserts already, in a canonical form.

The fake value of a condition may be ``True``, because the ``ShapeEnv`` has assumed the assertion
after tracing it. So the condition is computed again by its nodes, over symbols of an environment
without facts.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import sympy
import torch
from torch.types import py_sym_types

from torch_fakeify.compat import torch_symbols
from torch_fakeify.compat.torch_symbols import canonicalize_bool_expr

from .bindings import canonical_symbol, expr_of, is_flag
from .lowering import value_of

if TYPE_CHECKING:
    from collections.abc import Iterator

Key: TypeAlias = sympy.Basic

_aten: Any = torch.ops.aten
_functions: Any = torch

# --- the form of a condition ------------------------------------------------------------------------


def condition_keys(expr: sympy.Basic, env: Any) -> tuple[Key, ...]:
    """The canonical forms of a condition: as it is, and after replacements.

    Two conditions are equal if they share a key. A condition that replacements make trivial has only
    the first key, since the replacement rests on it.
    """
    renamings = {
        s: canonical_symbol(s, env) for s in expr.free_symbols if s in env.unbacked_renamings
    }
    plain = _canonical(expr.xreplace(renamings) if renamings else expr)
    replaced: Any = env.replace(expr)
    if replaced in (sympy.true, sympy.false) or not replaced.free_symbols:
        return (plain,)
    return (plain, _canonical(replaced))


def _canonical(expr: sympy.Basic) -> Key:
    """A condition as ``<=``, ``==`` or ``!=``, each term on the side where it is positive."""
    if isinstance(expr, (sympy.Lt, sympy.Gt)):
        low, high = cast("tuple[Any, Any]", expr.args[:: 1 if isinstance(expr, sympy.Lt) else -1])
        if low.is_integer and high.is_integer:
            expr = sympy.Le(low + 1, high, evaluate=False)
    if not isinstance(expr, (sympy.Rel, sympy.And, sympy.Or)):
        return expr
    expr = canonicalize_bool_expr(expr)
    if isinstance(expr, (sympy.Eq, sympy.Ne)):
        sides = cast("list[Any]", sorted(expr.args, key=str))
        return type(expr)(*sides, evaluate=False)
    return expr


# --- the conditions of a graph ----------------------------------------------------------------------

_CHECKS = frozenset(
    {
        torch._check,
        torch._check_index,
        torch._check_value,
        torch._check_type,
        torch._check_not_implemented,
        _functions._assert,
        _functions._assert_scalar,
        _functions._functional_assert_scalar,
        _aten._assert_scalar.default,
        _aten._functional_assert_scalar.default,
    }
)
_SIZES = frozenset(
    {
        _functions._check_is_size,
        _functions.sym_constrain_range_for_size,
        _aten.sym_constrain_range_for_size.default,
    }
)
_RANGES = frozenset({_functions.sym_constrain_range, _aten.sym_constrain_range.default})


def asserted_by(graph: torch.fx.Graph, env: Any) -> tuple[set[Key], set[sympy.Symbol]]:
    """The keys of all conditions that a graph asserts, and the symbols that it makes size-like."""
    evaluator = _SymbolicEvaluator(env)
    keys: set[Key] = set()
    sizes: set[sympy.Symbol] = set()
    for fx_node in graph.nodes:
        if fx_node.op != "call_function":
            continue
        if fx_node.target in _CHECKS:
            arg = _argument(fx_node, 0, "cond", "self", "condition")
            for part in _parts(evaluator.expr(arg)):
                keys.update(condition_keys(part, env))
        elif fx_node.target in _SIZES or fx_node.target in _RANGES:
            expr = evaluator.expr(_argument(fx_node, 0, "size", "i"))
            if expr is None:
                continue
            for part in _bounds(fx_node, expr):
                keys.update(condition_keys(part, env))
            if _makes_size(fx_node) and isinstance(expr, sympy.Symbol):
                sizes.add(expr)
    return keys, sizes


def _argument(fx_node: torch.fx.Node, position: int, *names: str) -> Any:
    if len(fx_node.args) > position:
        return fx_node.args[position]
    return next((fx_node.kwargs[name] for name in names if name in fx_node.kwargs), None)


def _parts(expr: sympy.Basic | None) -> Iterator[sympy.Basic]:
    if isinstance(expr, sympy.And):
        for arg in expr.args:
            yield from _parts(arg)
    elif expr is not None and expr.free_symbols:
        yield expr


def _bounds(fx_node: torch.fx.Node, expr: sympy.Basic) -> Iterator[sympy.Basic]:
    number = cast("Any", expr)
    if not number.free_symbols:
        return
    low, high = fx_node.kwargs.get("min"), fx_node.kwargs.get("max")
    if low is None and fx_node.target in _SIZES:
        low = 0
    if isinstance(low, int):
        yield sympy.Ge(number, low, evaluate=False)
    if isinstance(high, int):
        yield sympy.Le(number, high, evaluate=False)


def _makes_size(fx_node: torch.fx.Node) -> bool:
    if fx_node.target not in _SIZES:
        return False
    # Without a limit the operator only checks that the size is not negative (torch 2.13).
    limits = fx_node.kwargs.get("min"), fx_node.kwargs.get("max")
    return fx_node.target is _functions._check_is_size or limits != (None, None)


# --- expressions of nodes ---------------------------------------------------------------------------

_OPERATORS = (
    "abs", "add", "and_", "eq", "floordiv", "ge", "gt", "le", "lshift", "lt", "mod", "mul", "ne",
    "neg", "or_", "pos", "pow", "rshift", "sub", "truediv", "xor",
)  # fmt: skip
_COMPUTES = frozenset(
    {
        *(getattr(operator, name) for name in _OPERATORS),
        math.floor,
        math.ceil,
        math.trunc,
        torch.sym_float,
        torch.sym_ite,
        torch.sym_max,
        torch.sym_min,
        torch.sym_not,
    }
)


class _SymbolicEvaluator:
    """Runs the nodes that compute numbers over symbols without facts."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._scratch: Any = torch_symbols.unvalidated_shape_env()
        self._scratch.var_to_range.update(
            env.var_to_range
        )  # which decides between remainder functions
        self._values: dict[torch.fx.Node, Any] = {}

    def expr(self, operand: Any) -> sympy.Basic | None:
        """The expression of an operand; ``None`` if it is not a symbolic number."""
        value = self.value(operand)
        return value.node.expr if isinstance(value, py_sym_types) else None

    def value(self, operand: Any) -> Any:
        """The value of an operand in the scratch environment; ``None`` if it is not a number."""
        if not isinstance(operand, torch.fx.Node):
            return operand if isinstance(operand, (int, float)) else None
        todo = [operand]
        while todo:
            fx_node = todo[-1]
            if fx_node in self._values:
                todo.pop()
                continue
            if fx_node.op == "call_function" and fx_node.target in _COMPUTES:
                open_args = [arg for arg in fx_node.all_input_nodes if arg not in self._values]
                if open_args:
                    todo += open_args
                    continue
            self._values[fx_node] = self._result(fx_node)
            todo.pop()
        return self._values[operand]

    def _result(self, fx_node: torch.fx.Node) -> Any:
        if fx_node.op == "call_function" and fx_node.target in _COMPUTES:
            args = [self.value(arg) for arg in fx_node.args]
            if None not in args and not fx_node.kwargs:
                target: Any = fx_node.target
                return self._flag(target(*args))
        return self._leaf(value_of(fx_node))

    def _leaf(self, value: Any) -> Any:
        if not isinstance(value, py_sym_types):
            return value if isinstance(value, (int, float)) else None
        expr = expr_of(value)
        if expr is None:
            return None
        renamings = {s: canonical_symbol(s, self._env) for s in expr.free_symbols}
        return self._make(value, expr.xreplace(renamings))

    def _flag(self, value: Any) -> Any:
        """Simplify an unbacked boolean that was converted to an integer to its symbol."""
        if not isinstance(value, torch.SymInt):
            return value
        expr: Any = cast("Any", value.node).expr
        if isinstance(expr, sympy.Piecewise) and len(expr.args) == 2:
            (one, condition), (zero, _) = cast("Any", expr.args)
            if (one, zero) == (1, 0) and is_flag(condition):
                return self._make(value, condition.args[0])
        return value

    def _make(self, value: Any, expr: sympy.Basic) -> Any:
        return torch_symbols.make_sym(value.node.pytype.__name__, expr, self._scratch, None)
