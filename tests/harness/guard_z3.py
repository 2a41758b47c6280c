"""A sympy expression of shape facts as a z3 term; `guard_terms` says which value it has."""

from __future__ import annotations

import operator
from fractions import Fraction
from functools import reduce
from typing import TYPE_CHECKING, Any

import sympy
import z3
from guard_terms import INFINITIES, MAX_EXPONENT, pieces
from sympy.logic.boolalg import Boolean, BooleanAtom
from torch.utils._sympy import functions as torch_functions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_ORDER: dict[type, Callable[[Any, Any], Any]] = {
    sympy.Lt: operator.lt,
    sympy.Le: operator.le,
    sympy.Gt: operator.gt,
    sympy.Ge: operator.ge,
}
_LOGIC: dict[type, Callable[..., Any]] = {
    sympy.And: z3.And,
    sympy.Or: z3.Or,
    sympy.Not: z3.Not,
    sympy.Xor: lambda *args: reduce(z3.Xor, args),
    sympy.Nand: lambda *args: z3.Not(z3.And(*args)),
    sympy.Nor: lambda *args: z3.Not(z3.Or(*args)),
    sympy.Implies: z3.Implies,
}


class Z3Terms:
    """Translates expressions to z3, each distinct one once.

    A function that z3 does not know is an uninterpreted one: what is proved then holds for it too,
    a counterexample need not be one. With ``real_floats`` off, so is every float operation that
    rounds. With it on, they are exact, and a proof is one over the real numbers only.
    """

    def __init__(self, *, real_floats: bool = False) -> None:
        self.real_floats = real_floats
        self.rounds = False
        """Whether an operation that rounds was translated."""
        self._memo: dict[sympy.Basic, tuple[Any, tuple[Any, ...]]] = {}

    def fact(self, expr: sympy.Basic) -> z3.BoolRef:
        """That the expression is defined and true."""
        term, needs = self._visit(expr)
        if not z3.is_bool(term):
            raise TypeError(f"not a condition: {expr}")
        return z3.And(*needs, term) if needs else term

    def var(self, symbol: sympy.Symbol) -> z3.ArithRef:
        """The variable of a symbol."""
        return z3.Int(symbol.name) if symbol.is_integer else z3.Real(symbol.name)

    def _visit(self, expr: sympy.Basic) -> tuple[Any, tuple[Any, ...]]:
        found = self._memo.get(expr)
        if found is None:
            found = self._memo[expr] = self._translate(expr)
        return found

    def _translate(self, expr: sympy.Basic) -> tuple[Any, tuple[Any, ...]]:
        if isinstance(expr, sympy.Symbol):
            return self.var(expr), ()
        if isinstance(expr, BooleanAtom):
            return z3.BoolVal(bool(expr)), ()
        if isinstance(expr, sympy.Number) and expr not in INFINITIES:
            return _z3_number(expr), ()
        if isinstance(expr, (sympy.Piecewise, torch_functions.Where, sympy.ITE)):
            return self._branches(pieces(expr))
        if isinstance(expr, sympy.core.relational.Relational):
            infinite = _infinite_relation(expr)
            if infinite is not None:
                other, holds = infinite
                return z3.BoolVal(holds), self._visit(other)[1]
        parts = [self._visit(arg) for arg in expr.args]
        needs = tuple(dict.fromkeys(need for _, inner in parts for need in inner))
        term, own = self._apply(expr, [term for term, _ in parts])
        return term, (*needs, *own)

    def _branches(
        self, pieces: list[tuple[sympy.Basic, sympy.Basic]]
    ) -> tuple[Any, tuple[Any, ...]]:
        done: Any = None
        needs: tuple[Any, ...] = (z3.BoolVal(False),)  # no condition holds
        for value, condition in reversed(pieces):
            term, inner = self._visit(value)
            test, tested = self._visit(condition)
            yes, no = z3.And(*inner), z3.And(*needs)
            needs = (*tested, z3.If(test, yes, no))
            done = term if done is None else z3.If(test, *_same_sort(term, done))
        return done, tuple(z3.simplify(need) for need in needs)

    def _apply(self, expr: sympy.Basic, args: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        for classes, method in _Z3_METHODS:
            if isinstance(expr, classes):
                return method(self, expr, args)
        for classes, term in _ALWAYS_DEFINED:
            if isinstance(expr, classes):
                return term(*args), ()
        return self._opaque(expr, args)

    def _opaque(self, expr: sympy.Basic, args: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        name = f"{type(expr).__name__}/{len(args)}"
        args = [_number(arg) for arg in args]
        sorts = [arg.sort() for arg in args]
        result = z3.IntSort() if expr.is_integer else z3.RealSort()
        if isinstance(expr, Boolean):
            result = z3.BoolSort()
        name = f"{name}:{sorts}"
        if not args:
            return z3.Const(name, result), (z3.Bool(f"{name}?"),)
        defined = z3.Function(f"{name}?", *sorts, z3.BoolSort())(*args)
        return z3.Function(name, *sorts, result)(*args), (defined,)

    def _rounding(
        self, expr: sympy.Basic, args: list[Any], exact: Callable[[], tuple[Any, tuple[Any, ...]]]
    ) -> tuple[Any, tuple[Any, ...]]:
        self.rounds = True
        return exact() if self.real_floats else self._opaque(expr, args)

    def _sum(self, expr: sympy.Basic, args: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        return self._arithmetic(expr, args, operator.add)

    def _product(self, expr: sympy.Basic, args: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        if len(args) == 2 and expr.args[0] == -1:
            return -args[1], ()  # exact for floats too
        return self._arithmetic(expr, args, operator.mul)

    def _arithmetic(
        self, expr: sympy.Basic, args: list[Any], op: Callable[[Any, Any], Any]
    ) -> tuple[Any, tuple[Any, ...]]:
        if all(map(z3.is_int, args)) or expr.is_rational:
            return reduce(op, _same_sort(*args)), ()
        return self._rounding(expr, args, lambda: (reduce(op, map(_real, args)), ()))

    def _power(self, expr: sympy.Basic, args: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        base, exponent = expr.args
        if not isinstance(exponent, sympy.Integer) or abs(int(exponent)) > MAX_EXPONENT:
            return self._opaque(expr, args)
        if exponent < 0 and isinstance(expr, torch_functions.PowByNatural):
            return args[0], (z3.BoolVal(False),)

        def exact() -> tuple[Any, tuple[Any, ...]]:
            one = z3.IntVal(1) if args[0].is_int() else z3.RealVal(1)
            power = reduce(operator.mul, [args[0]] * abs(int(exponent)), one)
            if exponent >= 0:
                return power, ()
            return z3.RealVal(1) / _real(power), (args[0] != 0,)

        rational = z3.is_int(args[0]) or base.is_rational
        return exact() if rational else self._rounding(expr, args, exact)

    def _floordiv(self, expr: sympy.Basic, args: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        if not all(arg.is_int() for arg in args):
            return self._opaque(expr, args)
        return _z3_floordiv(*args), (args[1] != 0,)

    def _mod(self, expr: sympy.Basic, args: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        if not all(arg.is_int() for arg in args):
            return self._opaque(expr, args)
        return _z3_mod(*args), (args[1] != 0,)

    def _modular_indexing(self, expr: sympy.Basic, args: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        base, divisor, modulus = args
        return _z3_mod(_z3_floordiv(base, divisor), modulus), (divisor != 0, modulus != 0)

    def _true_div(self, expr: sympy.Basic, args: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        return self._rounding(
            expr, args, lambda: (_real(args[0]) / _real(args[1]), (args[1] != 0,))
        )

    def _shift(self, expr: sympy.Basic, args: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        shift = expr.args[1]
        if not isinstance(shift, sympy.Integer) or not 0 <= shift <= MAX_EXPONENT:
            return self._opaque(expr, args)
        by = z3.IntVal(2 ** int(shift))
        left = isinstance(expr, torch_functions.LShift)
        return args[0] * by if left else args[0] / by, ()


_Z3_METHODS: list[tuple[Any, Callable[..., tuple[Any, tuple[Any, ...]]]]] = [
    (sympy.Add, Z3Terms._sum),
    (sympy.Mul, Z3Terms._product),
    ((sympy.Pow, torch_functions.PowByNatural), Z3Terms._power),
    (torch_functions.FloorDiv, Z3Terms._floordiv),  # and CleanDiv
    ((torch_functions.Mod, torch_functions.PythonMod, sympy.Mod), Z3Terms._mod),
    (torch_functions.ModularIndexing, Z3Terms._modular_indexing),
    ((torch_functions.IntTrueDiv, torch_functions.FloatTrueDiv), Z3Terms._true_div),
    ((torch_functions.LShift, torch_functions.RShift), Z3Terms._shift),
]


def _round(number: Any) -> Any:
    number = _real(number)
    down = _z3_floor(number)
    rest = number - _real(down)
    up = z3.Or(rest > z3.Q(1, 2), z3.And(rest == z3.Q(1, 2), down % 2 == 1))
    return z3.If(up, down + 1, down)


def _trunc(number: Any) -> Any:
    return z3.If(number >= 0, _z3_floor(number), -_z3_floor(-number))


def _equal(*sides: Any) -> Any:
    left, right = sides if all(map(z3.is_bool, sides)) else _same_sort(*map(_number, sides))
    return left == right


def _larger(a: Any, b: Any) -> Any:
    return z3.If(a >= b, a, b)


def _smaller(a: Any, b: Any) -> Any:
    return z3.If(a <= b, a, b)


_ALWAYS_DEFINED: list[tuple[Any, Callable[..., Any]]] = [
    ((torch_functions.Max, sympy.Max), lambda *args: reduce(_larger, _same_sort(*args))),
    ((torch_functions.Min, sympy.Min), lambda *args: reduce(_smaller, _same_sort(*args))),
    (sympy.Abs, lambda x: z3.If(x >= 0, x, -x)),
    (sympy.sign, lambda x: z3.If(x > 0, z3.IntVal(1), z3.If(x < 0, z3.IntVal(-1), z3.IntVal(0)))),
    (torch_functions.Identity, lambda x: x),
    (torch_functions.ToFloat, lambda x: _real(x)),
    ((torch_functions.FloorToInt, sympy.floor), lambda x: _z3_floor(x)),
    ((torch_functions.CeilToInt, sympy.ceiling), lambda x: -_z3_floor(-x)),
    (torch_functions.TruncToInt, _trunc),
    (torch_functions.TruncToFloat, lambda x: _real(_trunc(x))),
    (torch_functions.RoundToInt, _round),
    (sympy.Eq, _equal),
    (sympy.Ne, lambda *sides: z3.Not(_equal(*sides))),
    *(
        (cls, lambda *sides, holds=holds: holds(*_same_sort(*sides)))
        for cls, holds in _ORDER.items()
    ),
    *_LOGIC.items(),
]


def _z3_number(number: sympy.Number) -> z3.ArithRef:
    if isinstance(number, sympy.Integer):
        return z3.IntVal(int(number))
    exact = Fraction(float(number)) if isinstance(number, sympy.Float) else Fraction(str(number))
    return z3.RealVal(str(exact))


def _real(term: Any) -> Any:
    return z3.ToReal(term) if z3.is_int(term) else term


def _number(term: Any) -> Any:
    """A condition as 0 or 1."""
    return z3.If(term, z3.IntVal(1), z3.IntVal(0)) if z3.is_bool(term) else term


def _same_sort(*terms: Any) -> Sequence[Any]:
    if all(map(z3.is_bool, terms)) or all(map(z3.is_int, terms)):
        return terms
    return [_real(_number(term)) for term in terms]


def _z3_floordiv(p: Any, q: Any) -> Any:
    # z3's division leaves a remainder that is never negative: the floor for positive divisors.
    if z3.is_int_value(q) and q.as_long() > 0:
        return p / q
    return z3.If(q > 0, p / q, (-p) / (-q))


def _z3_mod(p: Any, q: Any) -> Any:
    if z3.is_int_value(q) and q.as_long() > 0:
        return p % q
    return z3.If(q > 0, p % q, -((-p) % (-q)))


def _z3_floor(number: Any) -> Any:
    return number if z3.is_int(number) else z3.ToInt(number)


def _infinite_relation(expr: sympy.Basic) -> tuple[sympy.Basic, bool] | None:
    """A relation of a finite number with infinity: the finite side, and whether it holds."""
    left, right = expr.args
    if (left in INFINITIES) == (right in INFINITIES):
        return None
    sides = (float(left), 0.0) if left in INFINITIES else (0.0, float(right))
    compare = _ORDER.get(type(expr), operator.eq if isinstance(expr, sympy.Eq) else operator.ne)
    return (right if left in INFINITIES else left), bool(compare(*sides))
