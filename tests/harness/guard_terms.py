"""A sympy expression of shape facts as a Python function; `guard_z3` has the z3 term.

Both follow the code that ``produce_guards`` prints: Python's ``//`` and ``%``, also where a sign is
negative and torch's ``Mod`` says nothing, and Python's float64. An expression that divides by
zero, or is otherwise without a value, is *undefined*, and a fact that contains one does not hold,
whatever stands around it; only the branches of a condition that are not taken do not matter.
"""

from __future__ import annotations

import math
import operator
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeAlias

import sympy
from sympy.logic.boolalg import BooleanAtom
from torch.utils._sympy import functions as torch_functions
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.singleton_int import SingletonInt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Number: TypeAlias = "int | float | Fraction"
Point: TypeAlias = "dict[str, int | float]"
"""Values of variables by name."""

INFINITIES = (sympy.oo, -sympy.oo, int_oo, -int_oo)
MAX_EXPONENT = 64
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


def pieces(expr: sympy.Basic) -> list[tuple[sympy.Basic, sympy.Basic]]:
    """The values and conditions of a case distinction."""
    if isinstance(expr, sympy.Piecewise):
        pairs: Any = expr.args
        return [(pair.expr, pair.cond) for pair in pairs]
    condition, yes, no = expr.args
    return [(yes, condition), (no, sympy.true)]


# --- Python -------------------------------------------------------------------------------------


def python_function(expr: sympy.Basic, *, exact: bool = False) -> Callable[[Point], Any]:
    """The expression as a function of a point, which computes with floats or with fractions.

    It raises an `ArithmeticError` or `ValueError` where undefined, `TooLarge` where unknown.
    """
    namespace: dict[str, Any] = {**_HELPERS, "number": Fraction if exact else float}
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
        return f"number({float(expr)!r})"
    if isinstance(expr, (sympy.Piecewise, torch_functions.Where, sympy.ITE)):
        code = "undefined()"
        for value, condition in reversed(pieces(expr)):
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
        cls: f"math.{name.removeprefix('OpaqueUnaryFn_')}"
        for name, cls in vars(torch_functions).items()
        if name.startswith("OpaqueUnaryFn_")
    }
)
