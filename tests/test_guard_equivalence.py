"""The helper that decides whether two sets of shape facts say the same: what it must notice."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import guard_equivalence
import pytest
import sympy
import torch
import z3
from guard_equivalence import (
    Facts,
    assert_equivalent,
    by_sources,
    equivalent,
    facts_of,
    not_implied,
)
from guard_sampling import Found, search
from guard_terms import (
    Point,
    Undefined,
    Z3Terms,
    confirmed,
    holds,
    nested_int,
    plain,
    python_function,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo import config as dynamo_config
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    _sympy_cast_symbool_to_symint_guardless,
)
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._sympy import functions as tf
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PythonMod
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.singleton_int import SingletonInt

if TYPE_CHECKING:
    import random

S0, S1, S2 = SYMBOLS = sympy.symbols("s0 s1 s2", integer=True)
F0, F1 = sympy.symbols("f0 f1", real=True)
SIZES = tuple(sympy.Ge(s, 2) for s in SYMBOLS)


def raw(cls: Any, *args: Any) -> Any:
    """An application that sympy leaves alone."""
    return cls(*map(sympy.sympify, args), evaluate=False)


def facts(*exprs: Any) -> Facts:
    """A set of facts without labels."""
    return Facts(tuple(map(sympy.sympify, exprs)))


# --- what each function means -------------------------------------------------------------------

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
TORCH_SAYS_MORE = (
    "ModularIndexing",  # (0 // 0) % 3 is 0; the code printed for it divides
    "ModularIndexing by variables",
    "Or of an undefined",
)
TORCH_SAYS_LESS = (
    "Piecewise that guards a division",  # sympy computes both branches
    "floor of floats",  # not evaluated
)


def points_for(expr: sympy.Basic) -> list[Point]:
    """A grid over the variables."""
    symbols = sorted(expr.free_symbols, key=str)
    grid = itertools.product(*(INTS if s.is_integer else FLOATS for s in symbols))
    return [dict(zip(map(str, symbols), values, strict=True)) for values in grid]


def put_in(expr: sympy.Basic, point: Point) -> Any:
    """What torch's and sympy's own evaluation gives; ``None`` where they refuse.

    torch's ``Mod`` is stated for numbers that are not negative; ``PythonMod`` says what the code
    printed for it computes elsewhere.
    """
    values = {s: sympy.sympify(point[str(s)]) for s in expr.free_symbols}
    expr = expr.replace(Mod, lambda p, q: raw(PythonMod, p, q))
    try:
        value = expr.xreplace(values).doit()
    except (ZeroDivisionError, ValueError, TypeError):
        return None
    if value in (sympy.true, sympy.false):
        return bool(value)
    try:
        number = float(value)
    except TypeError:
        return None
    return number if math.isfinite(number) else None


def in_python(expr: sympy.Basic, point: Point) -> Any:
    """What the helper computes; ``None`` if undefined."""
    try:
        return python_function(expr)(point)
    except (ArithmeticError, ValueError):
        return None


def in_z3(terms: Z3Terms, condition: sympy.Basic, point: Point) -> bool | None:
    """What z3 makes of a condition with numbers for variables; ``None`` if it leaves it open."""
    values = [
        (
            terms.var(s),
            z3.IntVal(point[str(s)]) if s.is_integer else z3.RealVal(repr(point[str(s)])),
        )
        for s in condition.free_symbols
    ]
    done = z3.simplify(z3.substitute(terms.fact(condition), *values))
    return True if z3.is_true(done) else False if z3.is_false(done) else None


@pytest.mark.parametrize("name", [*MEANINGS, *OPAQUE, *CONDITIONS])
def test_python_and_torch_compute_the_same(name: str) -> None:
    """The Python function of an expression gives what torch's class gives for the numbers."""
    expr = {**MEANINGS, **OPAQUE, **CONDITIONS}[name]
    for point in points_for(expr):
        expected, found = put_in(expr, point), in_python(expr, point)
        if found is None:
            assert expected is None or name in TORCH_SAYS_MORE, (point, expected)
        elif expected is None:
            assert name in TORCH_SAYS_LESS, (point, found)
        else:
            assert float(found) == expected, (point, expected, found)


@pytest.mark.parametrize("name", MEANINGS)
def test_z3_and_python_compute_the_same(name: str) -> None:
    """At each point of a grid z3 finds the same number, and undefined what is undefined."""
    expr, terms = MEANINGS[name], Z3Terms(real_floats=True)
    value = sympy.Symbol("value", integer=True if expr.is_integer else None, real=True)
    equal = sympy.Eq(expr, value, evaluate=False)
    for point in points_for(expr):
        expected = in_python(expr, point)
        if expected is None:
            assert in_z3(terms, equal, {**point, "value": 0}) is False, point
            continue
        if not expr.is_integer and float(expected) != expected:
            continue  # a fraction that no float is
        if name in ("IntTrueDiv", "FloatTrueDiv") and not (expected * 8).is_integer():
            continue  # Python has rounded
        expected = int(expected) if expr.is_integer else float(expected)
        assert in_z3(terms, equal, {**point, "value": expected}) is True, point
        assert in_z3(terms, equal, {**point, "value": expected + 1}) is False, point


@pytest.mark.parametrize("name", CONDITIONS)
def test_z3_and_python_decide_the_same(name: str) -> None:
    """At each point of a grid z3 finds a condition true where Python does."""
    expr, terms = CONDITIONS[name], Z3Terms()
    for point in points_for(expr):
        assert in_z3(terms, expr, point) is holds(python_function(expr), point), point


@pytest.mark.parametrize("name", OPAQUE)
def test_z3_says_nothing_of_an_opaque_function(name: str) -> None:
    """Neither of its value nor of whether it has one."""
    expr, terms = OPAQUE[name], Z3Terms()
    defined = raw(sympy.Or, raw(sympy.Ge, expr, 0), raw(sympy.Le, expr, 1))
    for condition in (raw(sympy.Gt, expr, 0), defined):
        for wanted in (terms.fact(condition), z3.Not(terms.fact(condition))):
            solver = z3.Solver()
            solver.add(wanted)
            assert solver.check() == z3.sat


@pytest.mark.parametrize("name", ["IntTrueDiv", "FloatTrueDiv", "float add", "float mul"])
def test_what_rounds_is_opaque_at_first(name: str) -> None:
    """A proof about floats must not use that real numbers are exact."""
    terms = Z3Terms()
    point = {"s0": 5, "s1": 2, "f0": 2.5, "f1": 4.0}
    assert in_z3(terms, raw(sympy.Gt, MEANINGS[name], 0), point) is None
    assert terms.rounds


# --- the same in other words --------------------------------------------------------------------

SAME: dict[str, tuple[Facts, Facts]] = {
    "a strict bound": (facts(S0 > 5), facts(sympy.Le(6, S0, evaluate=False))),
    "a guard and a range": (facts(S0 > 5, S0 >= 2), facts(S0 >= 6)),
    "a product and a replacement": (
        facts(*SIZES, sympy.Eq(S0 * S1, S2), S2 > 11),
        facts(*SIZES, sympy.Eq(S2, S0 * S1), sympy.Ge(S0 * S1, 12)),
    ),
    "a factor that is not zero": (
        facts(*SIZES, sympy.Eq(S0 * S1, S0 * S2)),
        facts(*SIZES, sympy.Eq(S1, S2)),
    ),
    "Mod and FloorDiv": (
        facts(sympy.Eq(Mod(S0, 100), 0)),
        facts(sympy.Eq(S0, 100 * FloorDiv(S0, 100))),
    ),
    "Mod by a variable and FloorDiv": (
        facts(*SIZES, sympy.Eq(Mod(S0, S1), 0)),
        facts(*SIZES, sympy.Eq(S0, S1 * FloorDiv(S0, S1))),
    ),
    "two divisors and their multiple": (
        facts(sympy.Eq(Mod(S0, 4), 0), sympy.Eq(Mod(S0, 6), 0)),
        facts(sympy.Eq(Mod(S0, 12), 0)),
    ),
    "FloorDiv and a bound": (facts(FloorDiv(S0, 3) >= 2), facts(S0 >= 6)),
    "CeilDiv and a bound": (facts(tf.CeilDiv(S0, 3) >= 2), facts(S0 >= 4)),
    "CleanDiv": (
        facts(sympy.Eq(Mod(S0, 8), 0), sympy.Eq(raw(tf.CleanDiv, S0, 8), S1)),
        facts(sympy.Eq(S0, 8 * S1)),
    ),
    "Max": (facts(Max(S0, S1) <= 7), facts(S0 <= 7, S1 <= 7)),
    "Min": (facts(sympy.Eq(Min(S0, S1), S1)), facts(S1 <= S0)),
    "Abs": (facts(raw(sympy.Lt, sympy.Abs(S0), 3)), facts(S0 > -3, S0 < 3)),
    "Not and Or": (facts(sympy.Not(sympy.Or(S0 > 5, S1 > 5))), facts(S0 <= 5, S1 < 6)),
    "a bool as a number": (
        facts(sympy.Eq(sympy.Piecewise((1, sympy.Eq(S0, 4)), (0, True)), 1)),
        facts(sympy.Eq(S0, 4)),
    ),
    "Where": (facts(tf.Where(S0 > 4, S1, S2) > 3, S0 > 4), facts(S0 >= 5, S1 >= 4)),
    "ModularIndexing": (
        facts(sympy.Eq(tf.ModularIndexing(S0, 4, 8), 7), S0 >= 0, S0 < 32),
        facts(S0 >= 28, S0 <= 31),
    ),
    "PowByNatural": (facts(raw(tf.PowByNatural, S0, 2) < 10), facts(S0 >= -3, S0 <= 3)),
    "duck shape and a guard": (
        facts(S0 > 4, sympy.Eq(S0, S1)),
        facts(S1 > 4, S0 > 4, S0 >= S1, S1 >= S0),
    ),
    "a replacement applied": (
        facts(*SIZES, sympy.Eq(S1, 2 * S0), sympy.Eq(Mod(S1, 8), 0)),
        facts(*SIZES, sympy.Eq(S1, 2 * S0), sympy.Eq(Mod(S0, 4), 0)),
    ),
    "a float and an int": (facts(tf.ToFloat(S0) > 2.5), facts(S0 >= 3)),
    "float bounds": (facts(F0 > 1.5, F0 > 1.25, -F0 < 0), facts(F0 > 1.5)),
    "an opaque function twice": (
        facts(tf.OpaqueUnaryFn_sqrt(F0) > 2, sympy.Eq(F0, F1)),
        facts(tf.OpaqueUnaryFn_sqrt(F1) > 2, sympy.Eq(F1, F0)),
    ),
    "the same rounding": (
        facts(raw(tf.IntTrueDiv, S0, 3) > 1.5, sympy.Eq(S0, S1)),
        facts(raw(tf.IntTrueDiv, S1, 3) > 1.5, sympy.Eq(S1, S0)),
    ),
    "nested ints": (
        facts(sympy.Eq(S0, nested_int(SingletonInt(3, coeff=2)))),
        facts(sympy.Eq(S0, nested_int(SingletonInt(3)) * 2), S0 > 2),
    ),
    "a definition and a division": (
        facts(raw(sympy.Ge, FloorDiv(S0, S1), 0), S0 > 0),
        facts(S0 >= 1, S1 > 0),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_equal_sets_in_other_words_are_proved(name: str) -> None:
    """z3 proves both directions."""
    a, b = SAME[name]
    verdict = assert_equivalent(a, b)
    assert verdict.how == "proved"
    assert str(verdict) == "proved"


# --- what must be noticed -----------------------------------------------------------------------

# the fact, what is weaker, what is stronger
KINDS: dict[str, tuple[Any, Any, Any]] = {
    "inequality": (S0 > 5, S0 > 4, S0 > 6),
    "linear inequality": (2 * S0 + S1 > 9, 2 * S0 + S1 > 8, 2 * S0 + S1 > 10),
    "inequality far out": (S0 > 10**12, S0 >= 10**12, S0 > 10**12 + 1),
    "Eq": (sympy.Eq(S0, 6), S0 >= 6, sympy.false),
    "Ne": (sympy.Ne(S0, 6), sympy.Ne(S0, 6) | (S1 > 4), sympy.Ne(S0, 6) & sympy.Ne(S0, 7)),
    "Mod": (sympy.Eq(Mod(S0, 4), 0), sympy.Eq(Mod(S0, 2), 0), sympy.Eq(Mod(S0, 8), 0)),
    "Mod 100": (
        sympy.Eq(Mod(S0, 100), 0),
        sympy.Eq(Mod(S0, 50), 0),
        sympy.Eq(Mod(S0, 2100), 0),
    ),
    "FloorDiv": (FloorDiv(S0, 3) > 2, S0 > 7, FloorDiv(S0, 3) > 3),
    "CleanDiv": (
        sympy.Eq(raw(tf.CleanDiv, S0, 8), S1),
        raw(tf.CleanDiv, S0, 8) >= S1,
        sympy.Eq(S0, 8 * S1),
    ),
    "Max": (Max(S0, S1) <= 7, Min(S0, S1) <= 7, Max(S0, S1) < 7),
    "Min": (Min(S0, S1) >= 7, Max(S0, S1) >= 7, Min(S0, S1) >= 8),
    "product": (sympy.Eq(S0 * S1, S2), S0 * S1 <= S2, sympy.Eq(S0 * S1, S2) & (S0 < S1)),
    "product bound": (S0 * S1 > 12, S0 * S1 > 11, S0 * S1 > 14),
    "range end": (S0 <= 100, S0 <= 101, S0 <= 99),
    "duck equality": (sympy.Eq(S0, S1), S0 <= S1, sympy.Eq(S0, S1) & sympy.Eq(S1, S2)),
    "replacement": (sympy.Eq(S1, 3 * S0 + 1), S1 > 3 * S0, sympy.Eq(S1, 3 * S0 + 1) & (S0 > 2)),
    "float bound": (F0 <= 1.5, math.nextafter(1.5, 2) >= F0, F0 < 1.5),
    "float equality": (sympy.Eq(F0, 0.1), F0 >= 0.1, sympy.false),
    "float of an int": (
        tf.OpaqueUnaryFn_sqrt(tf.ToFloat(S0)) > 3,
        tf.OpaqueUnaryFn_sqrt(tf.ToFloat(S0)) >= 3,
        tf.OpaqueUnaryFn_sqrt(tf.ToFloat(S0)) > 3.2,
    ),
    "true division": (
        raw(tf.IntTrueDiv, S0, S1) > 1.5,
        raw(tf.IntTrueDiv, S0, S1) >= 1.5,
        raw(tf.IntTrueDiv, S0, S1) > 1.75,
    ),
    "truncation": (
        tf.TruncToInt(raw(tf.IntTrueDiv, S0, 2)) > 3,
        tf.TruncToInt(raw(tf.IntTrueDiv, S0, 2)) > 2,
        tf.TruncToInt(raw(tf.IntTrueDiv, S0, 2)) > 4,
    ),
    "bitwise": (
        raw(sympy.Eq, tf.BitwiseFn_bitwise_and(S0, 7), 0),
        raw(sympy.Eq, tf.BitwiseFn_bitwise_and(S0, 3), 0),
        raw(sympy.Eq, tf.BitwiseFn_bitwise_and(S0, 15), 0),
    ),
    "power": (
        raw(tf.PowByNatural, 2, S0) > 30,
        raw(tf.PowByNatural, 2, S0) > 10,
        raw(tf.PowByNatural, 2, S0) > 40,
    ),
    "ModularIndexing": (
        tf.ModularIndexing(S0, 4, 8) > 3,
        tf.ModularIndexing(S0, 4, 8) > 2,
        tf.ModularIndexing(S0, 4, 8) > 4,
    ),
    "Piecewise": (
        sympy.Eq(sympy.Piecewise((S1, S0 > 3), (S2, True)), 4),
        sympy.Piecewise((S1, S0 > 3), (S2, True)) >= 4,
        sympy.Eq(sympy.Piecewise((S1, S0 > 3), (S2, True)), 4) & (S0 > 4),
    ),
}
AROUND = (*SIZES, S0 <= 10**13, F0 > -100.0, sympy.Ne(S2, 5))


def noticed(verdict: Any, side: str, expr: Any, others: Facts) -> None:
    """The verdict names that fact, alone and on that side, with a true counterexample."""
    assert verdict.how == "differs", verdict
    here, there = (verdict.lost, verdict.new) if side == "lost" else (verdict.new, verdict.lost)
    assert not there, verdict
    assert [d.fact for d in here] == [plain(expr, {})], verdict
    point = here[0].counterexample
    values = {s: sympy.sympify(point.get(str(s), 1)) for s in (*SYMBOLS, F0)}
    assert expr.xreplace(values) == sympy.false, verdict
    shared = [e for e in others.exprs if {str(s) for s in e.free_symbols} <= set(point)]
    assert all(e.xreplace(values) == sympy.true for e in shared), verdict


@pytest.mark.parametrize("name", KINDS)
def test_a_lost_fact_is_noticed(name: str) -> None:
    """It is lost from the right, new from the left."""
    exact = KINDS[name][0]
    whole, rest = facts(*AROUND, exact), facts(*AROUND)
    noticed(equivalent(whole, rest), "lost", exact, rest)
    noticed(equivalent(rest, whole), "new", exact, rest)


@pytest.mark.parametrize("name", KINDS)
def test_a_weakened_fact_is_noticed(name: str) -> None:
    """The first set has a fact that does not follow; the weaker one in its place does."""
    exact, weaker, _ = KINDS[name]
    a, b = facts(*AROUND, exact), facts(*AROUND, weaker)
    noticed(equivalent(a, b), "lost", exact, b)


@pytest.mark.parametrize("name", KINDS)
def test_a_strengthened_fact_is_noticed(name: str) -> None:
    """The second set has a fact that does not follow from the first."""
    exact, _, stronger = KINDS[name]
    a, b = facts(*AROUND, exact), facts(*AROUND, stronger)
    noticed(equivalent(a, b), "new", stronger, a)


def test_the_report_can_be_read() -> None:
    """Facts, labels and a counterexample for each."""
    a = Facts((S0 > 5, S0 > 3), ("guard", "range of s0"))
    with pytest.raises(AssertionError) as caught:
        assert_equivalent(a, Facts((S0 >= 6, S0 <= 8), ("guard", "guard")))
    text = str(caught.value)
    assert text.startswith(
        "the facts are not the same: differs\n  new: s0 <= 8 (guard), not at s0 = "
    )
    assert not_implied(a, by=facts(S0 > 5)) == ()
    (lost,) = not_implied(a, by=facts(S0 > 4))
    assert str(lost) == "s0 > 5 (guard), not at s0 = 5"


def test_floats_round() -> None:
    """What holds of real numbers alone is not proved, and its counterexample is found."""
    sum_ = raw(sympy.Add, raw(sympy.Add, F0, 1.0), -1.0)
    same = raw(sympy.Eq, sum_, F0)
    verdict = equivalent(facts(F0 > 0.0), facts(F0 > 0.0, same))
    noticed(verdict, "new", same, facts(F0 > 0.0))
    verdict = equivalent(facts(2 * F0 > 1.0), facts(F0 > 0.5))
    assert verdict.how == "sampled"
    assert "2*f0 > 1.0: sampled, proved over the real numbers" in str(verdict)


def test_what_z3_cannot_know_is_sampled() -> None:
    """An opaque function, equal to something else over all sizes."""
    a = facts(S0 >= 0, tf.BitwiseFn_bitwise_and(S0, 7) > 3)
    b = facts(S0 >= 0, Mod(S0, 8) > 3)
    verdict = assert_equivalent(a, b)
    assert verdict.how == "sampled"
    assert len(verdict.open) == 2


def test_a_search_that_never_enters_the_domain_says_nothing() -> None:
    """Not equivalent, not different: undecided, which is an error."""
    cubes = facts(*SIZES, sympy.Eq(S0**3, S1**3 + S2**3))
    verdict = equivalent(cubes, facts(*cubes.exprs, S0 > S1), timeout_ms=1, samples=5)
    assert verdict.how in ("undecided", "proved")
    odd = raw(sympy.Eq, tf.BitwiseFn_bitwise_xor(S0, 123456789), 987654321123)
    hidden = facts(odd, raw(sympy.Eq, tf.BitwiseFn_bitwise_or(S0, 1), S0))
    verdict = equivalent(hidden, facts(*hidden.exprs, S0 > 7), samples=5)
    assert verdict.how == "undecided"
    with pytest.raises(AssertionError, match="undecided, nothing is known to make the other"):
        assert_equivalent(hidden, facts(*hidden.exprs, S0 > 7), samples=5)


def test_doubtful_answers_are_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that saw no point of the domain; a point that sympy and Python do not agree on."""
    a = facts(S0 >= 0, Mod(S0, 8) > 3)
    b = facts(*a.exprs, tf.BitwiseFn_bitwise_and(S0, 7) > 3)
    with monkeypatch.context() as patch:
        patch.setattr(guard_equivalence, "search", lambda *_, **__: Found(None, 0))
        verdict = equivalent(a, b)
        assert verdict.how == "undecided"
        assert "and no point was found where the others hold" in verdict.open[0]
    doubtful = S0 > 70
    monkeypatch.setattr(
        guard_equivalence, "confirmed", lambda e, p: None if e == doubtful else confirmed(e, p)
    )
    verdict = equivalent(a, facts(*a.exprs, doubtful))
    assert verdict.how == "undecided"
    assert "Python and sympy are at odds at {'s0': " in verdict.open[0]


def test_all_follows_from_a_contradiction() -> None:
    """Also what shares no variable with it; the verdict says so."""
    contradiction = facts(S0 > 3, S0 < 2)
    assert equivalent(contradiction, facts(S1 > 3)).how == "differs"
    verdict = equivalent(contradiction, facts(*contradiction.exprs, S1 > 3))
    assert verdict.how == "proved"
    assert verdict.open == ("s1 > 3: proved, the other facts contradict each other",)


def test_a_name_is_an_integer_or_a_float() -> None:
    """Not one in the one set and the other in the other."""
    clash = sympy.Symbol("s0", real=True)
    with pytest.raises(ValueError, match="s0 is an integer in one fact and a float in another"):
        equivalent(facts(S0 > 3), facts(clash > 3))


def test_assumptions_of_a_symbol_are_no_facts() -> None:
    """A positive symbol is one with that name; that it is positive must be said."""
    positive = sympy.Symbol("s0", positive=True, integer=True)
    assert equivalent(facts(positive > 5), facts(S0 > 5)).how == "proved"
    assert equivalent(facts(positive > -1), facts(S0 > -1)).how == "differs"  # sympy says true


# --- random facts -------------------------------------------------------------------------------

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
BOX = [dict(zip(("s0", "s1", "s2"), p, strict=True)) for p in itertools.product(range(4), repeat=3)]
IN_BOX = [b for s in SYMBOLS for b in (raw(sympy.Le, 0, s), raw(sympy.Le, s, 3))]


def inside(exprs: Any) -> list[bool]:
    """Where in the box all of the facts hold."""
    functions = [python_function(e) for e in exprs]
    return [all(holds(f, p) for f in functions) for p in BOX]


@settings(max_examples=50)
@given(st.lists(RANDOM_FACTS, max_size=3), st.lists(RANDOM_FACTS, max_size=3))
def test_the_verdict_agrees_with_every_point_of_a_small_box(a: list[Any], b: list[Any]) -> None:
    """Facts that keep the variables in a box: equivalent if and only if all points agree."""
    verdict = equivalent(facts(*IN_BOX, *a), facts(*IN_BOX, *b), timeout_ms=500)
    assert verdict.how != "undecided", verdict
    assert bool(verdict) is (inside(a) == inside(b)), verdict


@settings(max_examples=25)
@given(st.lists(RANDOM_FACTS, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_names_and_order_do_not_matter(exprs: list[Any], rng: random.Random) -> None:
    """A set is equivalent to itself, shuffled; and with other names, named back."""
    shuffled = rng.sample(exprs, len(exprs))
    assert equivalent(facts(*exprs), facts(*shuffled)).how == "proved"
    there = dict(zip(SYMBOLS, sympy.symbols("x y z", integer=True, positive=True), strict=True))
    back = {new: old for old, new in there.items()}
    renamed = [plain(plain(e, there), back) for e in shuffled]
    assert equivalent(facts(*exprs), facts(*renamed)).how == "proved"


@settings(max_examples=25)
@given(st.lists(RANDOM_FACTS, min_size=2, max_size=4))
def test_a_dropped_fact_that_is_independent_is_noticed(exprs: list[Any]) -> None:
    """If points of a box show that the rest does not imply a fact, the sets differ without it."""
    whole = facts(*IN_BOX, *exprs)
    for index in range(len(IN_BOX), len(whole.exprs)):
        rest = whole.without(index)
        if inside(rest.exprs) != inside(whole.exprs):
            verdict = equivalent(whole, rest, timeout_ms=500)
            assert verdict.how == "differs", verdict
            assert not verdict.new, verdict


@pytest.mark.parametrize("name", KINDS)
def test_the_search_alone_finds_what_is_weaker(name: str) -> None:
    """Without z3's help: a point where the weaker fact holds and the exact one does not."""
    exact, weaker, _ = KINDS[name]
    known = [plain(e, {}) for e in (*AROUND, weaker)]
    found = search(known, plain(exact, {}), hints={}, tries=100)
    assert found.point is not None
    assert all(holds(python_function(e), found.point) for e in known)
    assert not holds(python_function(plain(exact, {})), found.point)
    assert found == search(known, plain(exact, {}), hints={}, tries=100)


def test_the_search_uses_divisors_and_hints() -> None:
    """Quotients and lines are met in a few steps; what nothing else leads to is known by a hint."""
    quotient = raw(sympy.Eq, FloorDiv(S0, 977), 3100)
    found = search([quotient], sympy.false, hints={}, tries=5)
    assert found.point is not None
    assert found.point["s0"] // 977 == 3100
    line = raw(sympy.Eq, 3 * S0 + 1, 370372)
    assert search([line], sympy.false, hints={}, tries=5).point == {"s0": 123457}
    value = 555555
    hidden = raw(sympy.Eq, raw(PythonMod, S0**2, 1000003), value**2 % 1000003)
    assert search([hidden], sympy.false, hints={}, tries=5).point is None
    assert search([hidden], sympy.false, hints={"s0": value}, tries=5).point == {"s0": value}
    assert search([S0 > 3, S0 < 2], S0 > 1, hints={}, tries=5) == Found(None, 0)


def test_python_and_sympy_must_agree() -> None:
    """Torch lets large powers be infinite, the code computes them: nothing is confirmed there."""
    power = raw(sympy.Lt, tf.PowByNatural(2, S0), 2**71)
    assert confirmed(power, {"s0": 8}) is True
    assert confirmed(power, {"s0": 72}) is False
    assert confirmed(power, {"s0": 70}) is None
    assert confirmed(power, {"s0": 10**6}) is None  # too large
    assert confirmed(power, {"s0": -1}) is False


@pytest.mark.parametrize("name", ["inequality", "Mod", "product bound", "range end", "float bound"])
def test_what_z3_leaves_open_is_searched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where z3 does not know: a difference is found, and equal sets are sampled, not proved."""
    monkeypatch.setattr(z3.Solver, "check", lambda self: z3.unknown)
    exact, weaker, _ = KINDS[name]
    around = (*SIZES, S0 <= 200)
    a, b = facts(*around, exact), facts(*around, weaker)
    noticed(equivalent(a, b), "lost", exact, b)
    negated = plain(sympy.Not(exact), {})
    verdict = equivalent(a, facts(*around, raw(sympy.Not, raw(sympy.And, negated, S1 >= 2))))
    assert verdict.how == "sampled", verdict
    assert "z3 does not know" in verdict.open[0]


def test_an_undefined_function_says_so() -> None:
    """A condition without a value does not hold, nor does its opposite."""
    division = python_function(raw(sympy.Ge, raw(FloorDiv, S0, S1), 0))
    with pytest.raises(ZeroDivisionError):
        division({"s0": 1, "s1": 0})
    with pytest.raises(Undefined, match="no condition holds"):
        python_function(raw(sympy.Piecewise, (S0, S0 > 1)))({"s0": 0})
    assert not holds(division, {"s0": 1, "s1": 0})


# --- environments -------------------------------------------------------------------------------


def fakes(shape_env: ShapeEnv, **tensors: Any) -> dict[str, Any]:
    """Fake tensors of local variables, all dims dynamic."""
    mode = FakeTensorMode(shape_env=shape_env)
    return {n: mode.from_tensor(t, source=LocalSource(n)) for n, t in tensors.items()}


def named(shape_env: ShapeEnv, **kinds: bool) -> Facts:
    """The facts of an environment over its sources."""
    return facts_of(shape_env, by_sources(shape_env), **kinds)


def pair(second: bool, *, duck: bool = True) -> tuple[ShapeEnv, Any, Any]:
    """An environment with two inputs of one size; the second one asked for may come first."""
    shape_env = ShapeEnv(duck_shape=duck)
    names = ("y", "x") if second else ("x", "y")
    made = fakes(shape_env, **{n: torch.zeros(8) for n in names})
    return shape_env, made["x"], made["y"]


def test_duck_shape_is_an_equality_of_sources() -> None:
    """One symbol for two sources says what two symbols and a guard say."""
    duck, _, _ = pair(False)
    plain_env, x, y = pair(True, duck=False)
    verdict = equivalent(named(duck), named(plain_env))
    assert [d.what for d in verdict.lost] == ["duck shape"]
    assert str(verdict.lost[0]).startswith(
        "Eq(L['x'].size()[0], L['y'].size()[0]) (duck shape), not at L['x'].size()[0] = "
    )
    assert not verdict.new
    assert x.shape[0] == y.shape[0]
    assert assert_equivalent(named(duck), named(plain_env)).how == "proved"
    both = facts_of(duck), facts_of(plain_env)
    assert not equivalent(*both)  # the symbols have other names
    assert named(duck).hints == (("L['x'].size()[0]", 8),)


def _asked(question: Any, size: int = 8) -> tuple[Facts, Facts]:
    """The facts of an environment before and after it was asked for something."""
    shape_env = ShapeEnv(duck_shape=False)
    made = fakes(shape_env, x=torch.zeros(size, 6), y=torch.zeros(size * 6), z=torch.zeros(size))
    before = named(shape_env)
    assert question(made["x"].shape, made["y"].shape[0], made["z"].shape[0])
    return before, named(shape_env)


@pytest.mark.parametrize(
    ("question", "what"),
    [
        (lambda x, y, z: 2 * x[0] > 9, "guard"),
        (lambda x, y, z: x[0] * x[1] == y, "guard"),
        (lambda x, y, z: x[0] % 4 == 0, "guard"),
        (lambda x, y, z: x[0] // 3 == 2, "guard"),
        (lambda x, y, z: torch.sym_max(x[0], x[1]) > 7, "guard"),
        (lambda x, y, z: x[0] == z, "guard"),
        (lambda x, y, z: x[0] > 5, "range of"),
        (lambda x, y, z: x[0] == 8, "guard"),
    ],
)
def test_what_an_environment_was_asked_for_is_noticed(question: Any, what: str) -> None:
    """A guard, a range, a replacement, a divisible expression: without it, the facts differ."""
    before, after = _asked(question)
    verdict = equivalent(after, before)
    assert verdict.how == "differs"
    assert not verdict.new
    assert any(d.what.startswith(what) for d in verdict.lost), verdict
    assert equivalent(after, _asked(question)[1]).how == "proved"


def test_facts_come_from_every_place_and_each_can_be_left_out() -> None:
    """Guards, ranges, replacements, divisible expressions, runtime asserts."""
    shape_env = ShapeEnv(duck_shape=False)
    made = fakes(shape_env, x=torch.zeros(12, 6), y=torch.zeros(12))
    s, t = made["x"].shape
    assert s == made["y"].shape[0]
    assert s % 4 == 0
    assert s * t > 5
    u = shape_env.create_unbacked_symint()
    torch._check(u * u <= s)

    def kinds(**flags: bool) -> set[str]:
        return {w.split()[0] for w in facts_of(shape_env, **flags).what}

    assert kinds() == {"guard", "range"}  # the others say no more
    others = {"range", "replacement", "divisible"}
    assert kinds(guards=False) == others
    assert kinds(guards=False, ranges=False) == others - {"range"}
    assert kinds(guards=False, replacements=False) == others - {"replacement"}
    assert kinds(guards=False, divisible=False) == others - {"divisible"}
    assert kinds(asserts=True) == {"guard", "range", "runtime"}


def test_numbers_of_the_inputs_are_facts() -> None:
    """Sizes and strides equal their expressions; constants of tensors only if asked for."""
    shape_env = ShapeEnv()
    x = fakes(shape_env, x=torch.zeros(5, 7))["x"]
    inputs = [(LocalSource("x"), x), ("L['n']", 3), ("L['m']", x.shape[0] + 1), ("L['f']", 1.5)]
    found = facts_of(shape_env, by_sources(shape_env, inputs=inputs))
    texts = [str(e) for e, w in zip(found.exprs, found.what, strict=True) if w == "input"]
    assert texts == [
        "Eq(L['x'].stride()[0], L['x'].size()[1])",
        "Eq(L['n'], 3)",
        "Eq(L['m'], L['x'].size()[0] + 1)",
        "Eq(L['f'], 1.5)",
    ]
    static = facts_of(shape_env, by_sources(shape_env, inputs=inputs, static=True))
    more = sorted(str(e) for e in set(static.exprs) - set(found.exprs))
    assert more == ["Eq(L['x'].storage_offset(), 0)", "Eq(L['x'].stride()[1], 1)"]


def test_inner_tensors_of_a_subclass_are_inputs() -> None:
    """By the path to them."""
    shape_env = ShapeEnv()
    two = fakes(shape_env, x=TwoTensor(torch.zeros(5, 7), torch.zeros(5, 7)))["x"]
    naming = by_sources(shape_env, inputs=[(LocalSource("x"), two)])
    texts = {str(e) for w, e in naming.equalities if w == "input"}
    assert "Eq(L['x'].b.stride()[0], L['x'].size()[1])" in texts


def test_sources_that_nobody_can_guard_on_are_no_variables() -> None:
    """A symbol with none but an ephemeral source keeps its name, as an unbacked one does."""
    from torch._dynamo.source import EphemeralSource

    shape_env = ShapeEnv()
    symbol = shape_env.create_symbol(7, EphemeralSource("base"), DimDynamic.DYNAMIC)
    shape_env.create_unbacked_symint()
    naming = by_sources(shape_env)
    assert symbol not in naming
    assert {str(s) for e in facts_of(shape_env, naming).exprs for s in e.free_symbols} == {
        str(symbol)
    }


def test_unbacked_symbols_keep_their_names() -> None:
    """Ranges of theirs are facts; a size-like one may be 0."""
    a, b = ShapeEnv(), ShapeEnv()
    for shape_env, low, high in ((a, 0, 9), (b, 2, 8)):
        u = shape_env.create_unbacked_symint()
        torch._check(u >= low)
        torch._check(u <= high)
    verdict = equivalent(named(a), named(b))
    assert [str(d.fact) for d in verdict.new] == ["2 <= u0", "u0 <= 8"]
    assert not verdict.lost


def test_runtime_asserts_are_compared_if_asked_for() -> None:
    """An assert on an unbacked symbol that the other side does not have is lost."""
    a, b = ShapeEnv(), ShapeEnv()
    for shape_env in (a, b):
        u, v = shape_env.create_unbacked_symint(), shape_env.create_unbacked_symint()
        if shape_env is a:
            torch._check(u * v == 12)
    assert assert_equivalent(named(a), named(b)).how == "proved"
    verdict = equivalent(named(a, asserts=True), named(b, asserts=True))
    assert [d.what for d in verdict.lost] == ["runtime assert"]


def test_float_inputs_are_reals() -> None:
    """A bound of a float is compared as one."""

    def env(limit: float) -> Facts:
        shape_env = ShapeEnv()
        source = LocalSource("f")
        symbol = shape_env.create_symbol(2.5, source, DimDynamic.DYNAMIC, positive=None)
        f = shape_env.create_symfloatnode(symbol, hint=2.5, source=source)
        assert f > limit
        return named(shape_env)

    assert equivalent(env(1.5), env(1.5)).how == "proved"
    verdict = equivalent(env(1.5), env(1.25))
    assert [str(d.fact) for d in verdict.lost] == ["L['f'] > 1.5"]
    assert not verdict.new


def test_bools_are_zero_or_one() -> None:
    """A condition used as a number."""

    def env(answer: bool) -> Facts:
        shape_env = ShapeEnv()
        x = fakes(shape_env, x=torch.zeros(8 if answer else 3))["x"]
        condition = (x.shape[0] > 5).node.expr
        number = _sympy_cast_symbool_to_symint_guardless(condition)
        assert shape_env.create_symintnode(number, hint=int(answer)) == int(answer)
        return named(shape_env)

    (fact,) = (e for e in env(True).exprs if e.has(sympy.Piecewise))
    size = next(iter(fact.free_symbols))
    assert equivalent(facts(fact), facts(size > 5)).how == "proved"
    verdict = equivalent(env(True), env(False))
    assert verdict.lost
    assert verdict.new


def test_nested_ints_are_distinct_constants() -> None:
    """A replacement by one of them is not one by another, nor by a multiple, nor by a size."""

    def env(value: Any) -> Facts:
        shape_env = ShapeEnv()
        fakes(shape_env, x=torch.zeros(8))
        (symbol,) = shape_env.var_to_range
        shape_env.replacements[symbol] = value
        return facts_of(shape_env)

    three = env(SingletonInt(3))
    assert assert_equivalent(three, env(SingletonInt(3))).how == "proved"
    for other in (SingletonInt(4), SingletonInt(3, coeff=2), sympy.Integer(8)):
        assert equivalent(three, env(other)).how == "differs"


def test_the_exclusion_guard_is_a_fact_where_torch_writes_it() -> None:
    """Where the setting is on, and an example value is not the excluded one."""
    shape_env = ShapeEnv()
    fakes(shape_env, x=torch.zeros(8, 6))
    symbols = list(shape_env.var_to_range)
    shape_env.exclusion_constraints = [(symbols[0], 4), (symbols[1], 6)]
    assert "exclusion" not in named(shape_env).what
    with dynamo_config.patch(automatic_dynamic_exclusion_guard=True):
        (excluded,) = (e for e, w in zip(*named(shape_env)[:2], strict=True) if w == "exclusion")
        x0, x1 = (by_sources(shape_env)[s] for s in symbols)
        assert equivalent(facts(excluded), facts(sympy.Ne(x0, 4) | sympy.Ne(x1, 6))).how == "proved"
        shape_env.exclusion_constraints = [(symbols[0], 8), (symbols[1], 6)]
        assert "exclusion" not in named(shape_env).what


def test_facts_without_a_common_variable_are_asked_apart() -> None:
    """Many guards are many small questions, not one large one."""
    symbols = sympy.symbols("s0:75", integer=True)
    guards = [symbols[i] * symbols[i - i % 5] > i for i in range(75)]
    other = [sympy.Gt(2 * g.lhs, 2 * g.rhs) for g in guards]
    assert equivalent(facts(*guards), facts(*other)).how == "proved"
    (lost,) = not_implied(facts(*guards), by=facts(*other[:-1]))
    assert set(lost.counterexample) <= {"s70", "s71", "s72", "s73", "s74"}
