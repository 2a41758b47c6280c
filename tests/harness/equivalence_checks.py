"""Functions, conditions and random facts for tests of the comparison of shape facts."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import sympy
from guard_equivalence import Facts
from hypothesis import strategies as st
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._sympy import functions as tf
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PythonMod
from torch.utils._sympy.numbers import int_oo

if TYPE_CHECKING:
    from guard_terms import Point
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

S0, S1, S2 = SYMBOLS = sympy.symbols("s0 s1 s2", integer=True)


F0, F1 = sympy.symbols("f0 f1", real=True)


def raw(cls: Any, *args: Any) -> Any:
    """An application that sympy leaves alone."""
    return cls(*map(sympy.sympify, args), evaluate=False)


def facts(*exprs: Any) -> Facts:
    """A set of facts without labels."""
    return Facts(tuple(map(sympy.sympify, exprs)))


INTS = [-7, -4, -3, -2, -1, 0, 1, 2, 3, 5, 8]


FLOATS = [-3.5, -2.5, -1.0, -0.5, 0.0, 0.5, 1.25, 1.5, 2.5, 4.0]


PIECES = sympy.Piecewise((S0 + 1, sympy.Gt(S0, S1)), (S1, sympy.Lt(S0, 0)), (7, True))


MEANINGS: dict[str, Any] = {
    "add": S0 + S1 - 3,
    "mul": S0 * S1 * 2,
    "pow": S0**3,
    "fraction": S0 / 2 + S1,
    "power of minus one": raw(sympy.Pow, S0, -1),
    "FloorDiv": raw(FloorDiv, S0, S1),
    "FloorDiv by a number": raw(FloorDiv, S0, 3),
    "FloorDiv by a negative number": raw(FloorDiv, S0, -3),
    "CleanDiv": raw(tf.CleanDiv, S0, S1),
    "CeilDiv": tf.CeilDiv(S0, sympy.Integer(3)),
    "Mod": raw(Mod, S0, S1),
    "Mod by a number": raw(Mod, S0, 3),
    "PythonMod": raw(PythonMod, S0, S1),
    "PythonMod by a negative number": raw(PythonMod, S0, -3),
    "sympy.Mod": raw(sympy.Mod, S0, 3),
    "ModularIndexing": raw(tf.ModularIndexing, S0, S1, 3),
    "ModularIndexing by variables": raw(tf.ModularIndexing, 7, S0, S1),
    "Max": raw(Max, S0, S1, 2),
    "Min": raw(Min, S0, S1, 2),
    "sympy.Max": raw(sympy.Max, S0, S1),
    "sympy.Min": raw(sympy.Min, S0, S1),
    "Abs": raw(sympy.Abs, S0),
    "sign": raw(sympy.sign, S0),
    "Where": raw(tf.Where, sympy.Gt(S0, S1), S0 * 2, S1),
    "Piecewise": PIECES,
    "Piecewise that guards a division": sympy.Piecewise(
        (raw(FloorDiv, S1, S0), sympy.Ne(S0, 0)), (0, True)
    ),
    "Piecewise without a rest": raw(sympy.Piecewise, (S0, sympy.Gt(S0, 1))),
    "Identity": raw(tf.Identity, S0 + 1),
    "LShift": raw(tf.LShift, S0, 3),
    "RShift": raw(tf.RShift, S0, 2),
    "PowByNatural": raw(tf.PowByNatural, S0, 3),
    "PowByNatural of a negative": raw(tf.PowByNatural, S0, -1),
    "ToFloat": raw(tf.ToFloat, S0),
    "IntTrueDiv": raw(tf.IntTrueDiv, S0, S1),
    "FloatTrueDiv": raw(tf.FloatTrueDiv, F0, F1),
    "float add": raw(sympy.Add, F0, F1),
    "float mul": raw(sympy.Mul, F0, F1),
    "minus": -F0,
    "TruncToInt": raw(tf.TruncToInt, F0),
    "TruncToFloat": raw(tf.TruncToFloat, F0),
    "FloorToInt": raw(tf.FloorToInt, F0),
    "CeilToInt": raw(tf.CeilToInt, F0),
    "floor": raw(sympy.floor, F0),
    "ceiling": raw(sympy.ceiling, F0),
    "RoundToInt": raw(tf.RoundToInt, F0),
    "float Max": raw(Max, F0, S0),
}


OPAQUE: dict[str, Any] = {
    "sqrt": raw(tf.OpaqueUnaryFn_sqrt, F0),
    "log": raw(tf.OpaqueUnaryFn_log, F0),
    "FloatPow": raw(tf.FloatPow, F0, F1),
    "FloatPow by an int": raw(tf.FloatPow, F0, 2.0),
    "RoundDecimal": raw(tf.RoundDecimal, F0, 1),
    "bitwise_and": raw(tf.BitwiseFn_bitwise_and, S0, S1),
    "bitwise_or": raw(tf.BitwiseFn_bitwise_or, S0, 3),
    "bitwise_xor": raw(tf.BitwiseFn_bitwise_xor, S0, S1),
    "PowByNatural of a variable": raw(tf.PowByNatural, 2, S0),
    "LShift by a variable": raw(tf.LShift, 3, S0),
    "RShift by a variable": raw(tf.RShift, 50, S0),
    "dense": raw(tf.IsNonOverlappingAndDenseIndicator, S0, S1, 2, 1),
    "floor of floats": raw(FloorDiv, F0, F1),
    "float Mod": raw(PythonMod, F0, F1),
}


CONDITIONS: dict[str, Any] = {
    "Eq": raw(sympy.Eq, S0, S1),
    "Ne": raw(sympy.Ne, S0, S1),
    "Lt": raw(sympy.Lt, S0, S1),
    "Le": raw(sympy.Le, S0, S1),
    "Gt": raw(sympy.Gt, S0, S1),
    "Ge": raw(sympy.Ge, S0, S1),
    "int and float": raw(sympy.Le, S0, F0),
    "int equal to a float": raw(sympy.Eq, S0, 2.0),
    "below infinity": raw(sympy.Lt, S0, int_oo),
    "above infinity": raw(sympy.Ge, F0, sympy.oo),
    "not minus infinity": raw(sympy.Ne, -sympy.oo, F0),
    "And": raw(sympy.And, S0 > 1, S1 < 2),
    "Or": raw(sympy.Or, S0 > 1, S1 < 2),
    "Not": raw(sympy.Not, raw(sympy.And, S0 > 1, S1 < 2)),
    "Xor": raw(sympy.Xor, S0 > 1, S1 < 2),
    "Nand": raw(sympy.Nand, S0 > 1, S1 < 2),
    "Nor": raw(sympy.Nor, S0 > 1, S1 < 2),
    "Implies": raw(sympy.Implies, S0 > 1, S1 < 2),
    "ITE": raw(sympy.ITE, S0 > 1, S1 < 2, S1 > 4),
    "Eq of conditions": raw(sympy.Eq, S0 > 1, S1 < 2),
    "Or of an undefined": raw(sympy.Or, raw(sympy.Ge, raw(Mod, 5, S0), 0), S1 > 0),
}


def points_for(expr: sympy.Basic) -> list[Point]:
    """A grid over the variables."""
    symbols = sorted(expr.free_symbols, key=str)
    grid = itertools.product(*(INTS if s.is_integer else FLOATS for s in symbols))
    return [dict(zip(map(str, symbols), values, strict=True)) for values in grid]


NUMBERS = st.integers(-3, 6).map(sympy.Integer)


DIVISORS = st.integers(2, 4).map(sympy.Integer)


def _terms(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.tuples(inner, inner)
    return st.one_of(
        pairs.map(lambda p: p[0] + p[1]),
        pairs.map(lambda p: p[0] * p[1]),
        pairs.map(lambda p: raw(Max, *p)),
        pairs.map(lambda p: raw(Min, *p)),
        pairs.map(lambda p: raw(FloorDiv, *p)),
        pairs.map(lambda p: raw(PythonMod, *p)),
        st.tuples(inner, DIVISORS).map(lambda p: raw(FloorDiv, *p)),
        st.tuples(inner, DIVISORS).map(lambda p: raw(PythonMod, *p)),
        inner.map(lambda e: raw(sympy.Abs, e)),
        st.tuples(inner, inner, inner).map(
            lambda p: raw(tf.Where, raw(sympy.Gt, *p[:2]), p[0], p[2])
        ),
    )


TERMS = st.recursive(st.one_of(st.sampled_from(SYMBOLS), NUMBERS), _terms, max_leaves=4)


RELATIONS = st.tuples(
    st.sampled_from([sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le]), TERMS, st.one_of(TERMS, NUMBERS)
).map(lambda p: raw(*p))


RANDOM_FACTS = st.one_of(
    RELATIONS,
    RELATIONS,
    st.tuples(RELATIONS, RELATIONS).map(lambda p: raw(sympy.Or, *p)),
    RELATIONS.map(lambda r: raw(sympy.Not, r)),
).filter(lambda e: e.free_symbols)


def fakes(shape_env: ShapeEnv, **tensors: Any) -> dict[str, Any]:
    """Fake tensors of local variables, all dims dynamic."""
    mode = FakeTensorMode(shape_env=shape_env)
    return {n: mode.from_tensor(t, source=LocalSource(n)) for n, t in tensors.items()}
