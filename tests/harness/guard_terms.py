"""A sympy expression of shape facts as a z3 term and as a Python function.

Both follow the code that ``produce_guards`` prints: Python's ``//`` and ``%``, also where a sign is
negative and torch's ``Mod`` says nothing, and Python's float64. An expression that divides by
zero, or is otherwise without a value, is *undefined*, and a fact that contains one does not hold,
whatever stands around it; only the branches of a condition that are not taken do not matter.
"""

from __future__ import annotations

import math
import operator
from fractions import Fraction
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeAlias

import sympy
import z3
from sympy.logic.boolalg import Boolean, BooleanAtom
from torch.utils._sympy import functions as torch_functions
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.singleton_int import SingletonInt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Number: TypeAlias = "int | float | Fraction"
Point: TypeAlias = "dict[str, int | float]"
"""Values of variables by name."""

INFINITIES = (sympy.oo, -sympy.oo, int_oo, -int_oo)
_MAX_EXPONENT = 64
_MAX_SHIFT = 4096


class Undefined(ArithmeticError):
    """An expression has no value at a point."""


class TooLarge(Exception):
    """The value at a point is too large to compute: nothing is known there."""


# --- plain variables ----------------------------------------------------------------------------

_NESTED_BASE = 10**15
_NESTED_STEP = 1_000_003


def nested_int(value: SingletonInt) -> sympy.Integer:
    """A nested int as a number: far beyond any size, and another one for every nested int."""
    numbered: Any = value
    return sympy.Integer(int(numbered._coeff) * (_NESTED_BASE + _NESTED_STEP * int(numbered._val)))


def variable(name: str, *, is_float: bool = False) -> sympy.Symbol:
    """The variable of that name: an integer or a real, with no other assumption."""
    return sympy.Symbol(name, real=True) if is_float else sympy.Symbol(name, integer=True)


def plain(expr: sympy.Basic, rename: Mapping[sympy.Symbol, sympy.Symbol]) -> sympy.Basic:
    """The expression over plain variables and without nested ints; nothing is simplified.

    The assumptions of a symbol (``positive``) are not carried over: what holds of a variable must
    be among the facts.
    """
    if isinstance(expr, SingletonInt):
        return nested_int(expr)
    if isinstance(expr, sympy.Symbol):
        return rename.get(expr) or variable(expr.name, is_float=not expr.is_integer)
    if not expr.args:
        return expr
    args = [plain(arg, rename) for arg in expr.args]
    if isinstance(expr, (sympy.Add, sympy.Mul)):
        args = sorted(args, key=sympy.default_sort_key)
    cls: Any = expr.func
    if cls is sympy.functions.elementary.piecewise.ExprCondPair:
        return cls(*args)
    return cls(*args, evaluate=False)


# --- z3 -----------------------------------------------------------------------------------------


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
            return self._branches(_pieces(expr))
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
        if not isinstance(exponent, sympy.Integer) or abs(int(exponent)) > _MAX_EXPONENT:
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
        if not isinstance(shift, sympy.Integer) or not 0 <= shift <= _MAX_EXPONENT:
            return self._opaque(expr, args)
        by = z3.IntVal(2 ** int(shift))
        left = isinstance(expr, torch_functions.LShift)
        return args[0] * by if left else args[0] / by, ()

    def _max(self, expr: sympy.Basic, args: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        return reduce(lambda a, b: z3.If(a >= b, a, b), _same_sort(*args)), ()

    def _min(self, expr: sympy.Basic, args: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        return reduce(lambda a, b: z3.If(a <= b, a, b), _same_sort(*args)), ()

    def _abs(self, expr: sympy.Basic, args: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        return z3.If(args[0] >= 0, args[0], -args[0]), ()

    def _sign(self, expr: sympy.Basic, args: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        return z3.If(args[0] > 0, z3.IntVal(1), z3.If(args[0] < 0, z3.IntVal(-1), z3.IntVal(0))), ()

    def _same(self, expr: sympy.Basic, args: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        return args[0], ()

    def _to_float(self, expr: sympy.Basic, args: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        return _real(args[0]), ()

    def _floor(self, expr: sympy.Basic, args: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        return _z3_floor(args[0]), ()

    def _ceil(self, expr: sympy.Basic, args: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        return -_z3_floor(-args[0]), ()

    def _trunc(self, expr: sympy.Basic, args: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        number = args[0]
        whole = z3.If(number >= 0, _z3_floor(number), -_z3_floor(-number))
        return _real(whole) if isinstance(expr, torch_functions.TruncToFloat) else whole, ()

    def _round(self, expr: sympy.Basic, args: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        number = _real(args[0])
        down = _z3_floor(number)
        rest = number - _real(down)
        up = z3.Or(rest > z3.Q(1, 2), z3.And(rest == z3.Q(1, 2), down % 2 == 1))
        return z3.If(up, down + 1, down), ()

    def _equal(self, expr: sympy.Basic, args: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        left, right = args if all(map(z3.is_bool, args)) else _same_sort(*map(_number, args))
        return left == right if isinstance(expr, sympy.Eq) else left != right, ()

    def _order(self, expr: sympy.Basic, args: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        return _ORDER[type(expr)](*_same_sort(*args)), ()

    def _logic(self, expr: sympy.Basic, args: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        return _Z3_LOGIC[type(expr)](*args), ()


_Z3_METHODS: list[tuple[Any, Callable[..., tuple[Any, tuple[Any, ...]]]]] = [
    (sympy.Add, Z3Terms._sum),
    (sympy.Mul, Z3Terms._product),
    ((sympy.Pow, torch_functions.PowByNatural), Z3Terms._power),
    (torch_functions.FloorDiv, Z3Terms._floordiv),  # and CleanDiv
    ((torch_functions.Mod, torch_functions.PythonMod, sympy.Mod), Z3Terms._mod),
    (torch_functions.ModularIndexing, Z3Terms._modular_indexing),
    ((torch_functions.IntTrueDiv, torch_functions.FloatTrueDiv), Z3Terms._true_div),
    ((torch_functions.LShift, torch_functions.RShift), Z3Terms._shift),
    ((torch_functions.Max, sympy.Max), Z3Terms._max),
    ((torch_functions.Min, sympy.Min), Z3Terms._min),
    (sympy.Abs, Z3Terms._abs),
    (sympy.sign, Z3Terms._sign),
    (torch_functions.Identity, Z3Terms._same),
    (torch_functions.ToFloat, Z3Terms._to_float),
    ((torch_functions.FloorToInt, sympy.floor), Z3Terms._floor),
    ((torch_functions.CeilToInt, sympy.ceiling), Z3Terms._ceil),
    ((torch_functions.TruncToInt, torch_functions.TruncToFloat), Z3Terms._trunc),
    (torch_functions.RoundToInt, Z3Terms._round),
    ((sympy.Eq, sympy.Ne), Z3Terms._equal),
    (sympy.core.relational.Relational, Z3Terms._order),
    (
        (sympy.And, sympy.Or, sympy.Not, sympy.Xor, sympy.Nand, sympy.Nor, sympy.Implies),
        Z3Terms._logic,
    ),
]
_ORDER: dict[type, Callable[[Any, Any], Any]] = {
    sympy.Lt: operator.lt,
    sympy.Le: operator.le,
    sympy.Gt: operator.gt,
    sympy.Ge: operator.ge,
}
_Z3_LOGIC: dict[type, Callable[..., Any]] = {
    sympy.And: z3.And,
    sympy.Or: z3.Or,
    sympy.Not: z3.Not,
    sympy.Xor: lambda *args: reduce(z3.Xor, args),
    sympy.Nand: lambda *args: z3.Not(z3.And(*args)),
    sympy.Nor: lambda *args: z3.Not(z3.Or(*args)),
    sympy.Implies: z3.Implies,
}


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


def _pieces(expr: sympy.Basic) -> list[tuple[sympy.Basic, sympy.Basic]]:
    if isinstance(expr, sympy.Piecewise):
        pairs: Any = expr.args
        return [(pair.expr, pair.cond) for pair in pairs]
    condition, yes, no = expr.args
    return [(yes, condition), (no, sympy.true)]


def _infinite_relation(expr: sympy.Basic) -> tuple[sympy.Basic, bool] | None:
    """A relation of a finite number with infinity: the finite side, and whether it holds."""
    left, right = expr.args
    if (left in INFINITIES) == (right in INFINITIES):
        return None
    sides = (float(left), 0.0) if left in INFINITIES else (0.0, float(right))
    compare = _ORDER.get(type(expr), operator.eq if isinstance(expr, sympy.Eq) else operator.ne)
    return (right if left in INFINITIES else left), bool(compare(*sides))


# --- Python -------------------------------------------------------------------------------------


def python_function(expr: sympy.Basic) -> Callable[[Point], Any]:
    """The expression as a function of a point.

    It raises an `ArithmeticError` or `ValueError` where undefined, `TooLarge` where unknown.
    """
    namespace: dict[str, Any] = dict(_HELPERS)
    code = _python(expr, namespace)
    function: Callable[[Point], Any] = eval(f"lambda p: {code}", namespace)
    return function


def holds(fact: Callable[[Point], Any], point: Point) -> bool | None:
    """Whether a fact is defined and true at a point; ``None`` if that is too large to compute."""
    try:
        return bool(fact(point))
    except (ArithmeticError, ValueError):
        return False
    except TooLarge:
        return None


def confirmed(expr: sympy.Basic, point: Point) -> bool | None:
    """The same, if sympy does not say otherwise with the same numbers put in."""
    function = python_function(expr)
    value = holds(function, point)
    if value is False:
        try:
            function(point)
        except (ArithmeticError, ValueError):
            return False  # sympy computes some of these, such as (0 // 0) % 3 in torch's functions
    return value if _sympy_holds(expr, point) in (value, None) else None


def _sympy_holds(expr: sympy.Basic, point: Point) -> bool | None:
    """What sympy makes of an expression with numbers in it; ``None`` where it does not say.

    torch's functions assert their domains (``Mod`` that no number is negative), and sympy computes
    also the branches of a condition that are not taken.
    """
    values = {
        s: sympy.Integer(point[s.name]) if s.is_integer else sympy.Float(point[s.name])
        for s in expr.free_symbols
        if isinstance(s, sympy.Symbol)
    }
    try:
        value = expr.xreplace(values)
        value = value if isinstance(value, BooleanAtom) else value.doit()
    except (AssertionError, ArithmeticError, ValueError, TypeError):
        return None
    return bool(value) if isinstance(value, BooleanAtom) else None


def _python(expr: sympy.Basic, namespace: dict[str, Any]) -> str:
    if isinstance(expr, sympy.Symbol):
        return f"p[{expr.name!r}]"
    if isinstance(expr, BooleanAtom):
        return str(bool(expr))
    if expr in INFINITIES:
        return f"float('{'' if expr in (sympy.oo, int_oo) else '-'}inf')"
    if isinstance(expr, sympy.Integer):
        return f"({int(expr)})"
    if isinstance(expr, sympy.Rational):
        return f"Fraction({int(expr.p)}, {int(expr.q)})"
    if isinstance(expr, sympy.Float):
        return f"({float(expr)!r})"
    if isinstance(expr, (sympy.Piecewise, torch_functions.Where, sympy.ITE)):
        code = "undefined()"
        for value, condition in reversed(_pieces(expr)):
            test = _python(condition, namespace)
            code = f"({_python(value, namespace)} if {test} else {code})"
        return code
    args = [_python(arg, namespace) for arg in expr.args]
    if type(expr) in _INFIX:
        return f"({_INFIX[type(expr)].join(args)})"
    if type(expr) in _CALLS:
        return f"{_CALLS[type(expr)]}({', '.join(args)})"
    if isinstance(expr, (sympy.Add, sympy.Mul)):
        code = f"({(' + ' if isinstance(expr, sympy.Add) else ' * ').join(args)})"
        return code if expr.is_rational else f"finite({code})"
    name = f"f{len(namespace)}"
    namespace[name] = _by_sympy(type(expr))
    return f"{name}({', '.join(args)})"


def _by_sympy(cls: type[sympy.Basic]) -> Callable[..., Any]:
    """A function of which the class alone knows the value."""

    def value_of(*args: Any) -> Any:
        made: Any = cls
        value = made(*map(sympy.sympify, args))
        if isinstance(value, BooleanAtom):
            return bool(value)
        if isinstance(value, (sympy.Integer, int)):
            return int(value)
        number = sympy.N(value)
        if not isinstance(number, sympy.Number) or not number.is_finite:
            raise Undefined(f"{cls.__name__}{args}")
        return float(number)

    return value_of


def _undefined() -> Any:
    raise Undefined("no condition holds")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise Undefined("not finite")
    return value


def _pow(base: Any, exponent: Any) -> Any:
    if isinstance(exponent, int) and abs(exponent) > _MAX_SHIFT:
        raise TooLarge
    if isinstance(base, int) and isinstance(exponent, int) and exponent < 0:
        return Fraction(base) ** exponent
    value = base**exponent
    if isinstance(value, complex):
        raise Undefined("a complex number")
    return _finite(value)


def _natural_pow(base: int, exponent: int) -> int:
    if exponent < 0:
        raise Undefined("a negative exponent")
    return _pow(base, exponent)


def _shift_by(base: int, exponent: int) -> int:
    if exponent < 0:
        raise Undefined("a negative shift")
    if exponent > _MAX_SHIFT:
        raise TooLarge
    return base << exponent


_HELPERS: dict[str, Any] = {
    "Fraction": Fraction,
    "math": math,
    "undefined": _undefined,
    "finite": _finite,
    "pow_": _pow,
    "natural_pow": _natural_pow,
    "mod_index": lambda base, divisor, modulus: (base // divisor) % modulus,
    "lshift": _shift_by,
    "rshift": lambda base, shift: base // _shift_by(1, shift),
    "xor": lambda *args: sum(map(bool, args)) % 2 == 1,
    # Every argument is computed first, so that an undefined one shows.
    "all_": lambda *args: all(args),
    "any_": lambda *args: any(args),
    "nand": lambda *args: not all(args),
    "nor": lambda *args: not any(args),
    "implies": lambda a, b: not a or bool(b),
    "not_": operator.not_,
    "same": lambda x: x,
    "sign": lambda x: (x > 0) - (x < 0),
    "truediv": lambda p, q: _finite(p / q),
    "round_to": lambda x, digits: round(x, int(digits)),
    "trunc_float": lambda x: float(math.trunc(x)),
}
_INFIX: dict[type, str] = {
    sympy.Eq: " == ",
    sympy.Ne: " != ",
    sympy.Lt: " < ",
    sympy.Le: " <= ",
    sympy.Gt: " > ",
    sympy.Ge: " >= ",
    torch_functions.FloorDiv: " // ",
    torch_functions.CleanDiv: " // ",
    torch_functions.Mod: " % ",
    torch_functions.PythonMod: " % ",
    sympy.Mod: " % ",
    torch_functions.BitwiseFn_bitwise_and: " & ",
    torch_functions.BitwiseFn_bitwise_or: " | ",
    torch_functions.BitwiseFn_bitwise_xor: " ^ ",
}
_CALLS: dict[type, str] = {
    sympy.And: "all_",
    sympy.Or: "any_",
    sympy.Nand: "nand",
    sympy.Nor: "nor",
    sympy.Not: "not_",
    sympy.Xor: "xor",
    sympy.Implies: "implies",
    sympy.Pow: "pow_",
    sympy.Abs: "abs",
    sympy.Max: "max",
    sympy.Min: "min",
    sympy.sign: "sign",
    sympy.floor: "math.floor",
    sympy.ceiling: "math.ceil",
    torch_functions.Max: "max",
    torch_functions.Min: "min",
    torch_functions.ModularIndexing: "mod_index",
    torch_functions.PowByNatural: "natural_pow",
    torch_functions.FloatPow: "pow_",
    torch_functions.IntTrueDiv: "truediv",
    torch_functions.FloatTrueDiv: "truediv",
    torch_functions.ToFloat: "float",
    torch_functions.FloorToInt: "math.floor",
    torch_functions.CeilToInt: "math.ceil",
    torch_functions.TruncToInt: "math.trunc",
    torch_functions.TruncToFloat: "trunc_float",
    torch_functions.RoundToInt: "round",
    torch_functions.RoundDecimal: "round_to",
    torch_functions.LShift: "lshift",
    torch_functions.RShift: "rshift",
    torch_functions.Identity: "same",
}
_CALLS.update(
    {
        getattr(torch_functions, f"OpaqueUnaryFn_{name}"): f"math.{name}"
        for name in [
            "sqrt",
            "cos",
            "cosh",
            "sin",
            "sinh",
            "tan",
            "tanh",
            "asin",
            "acos",
            "atan",
            "exp",
            "log",
            "asinh",
            "log2",
        ]
    }
)
