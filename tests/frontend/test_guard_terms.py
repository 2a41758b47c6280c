"""The functions in facts: Python, torch and z3 compute the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import sympy
import z3
from equivalence_checks import CONDITIONS, MEANINGS, OPAQUE, points_for, raw
from guard_terms import (
    Point,
    holds,
    python_function,
)
from guard_z3 import Z3Terms
from torch.utils._sympy.functions import Mod, PythonMod

DEFINED_ONLY_BY_TORCH = (
    "ModularIndexing",  # (0 // 0) % 3 is 0; the code printed for it divides
    "ModularIndexing by variables",
    "Or of an undefined",
)


UNDEFINED_IN_TORCH = (
    "Piecewise that guards a division",  # sympy computes both branches
    "floor of floats",  # not evaluated
)


def put_in(expr: sympy.Basic, point: Point) -> Any:
    """Return what torch and sympy evaluate, ``None`` where they refuse.

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
    """Return what the helper computes, ``None`` if it is undefined."""
    try:
        return python_function(expr)(point)
    except (ArithmeticError, ValueError):
        return None


def in_z3(terms: Z3Terms, condition: sympy.Basic, point: Point) -> bool | None:
    """Return what z3 decides of a condition at a point, ``None`` if it does not."""
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
    """The Python function of an expression gives what torch's class gives for numbers."""
    expr = {**MEANINGS, **OPAQUE, **CONDITIONS}[name]
    for point in points_for(expr):
        expected, found = put_in(expr, point), in_python(expr, point)
        if found is None:
            assert expected is None or name in DEFINED_ONLY_BY_TORCH, (point, expected)
        elif expected is None:
            assert name in UNDEFINED_IN_TORCH, (point, found)
        else:
            assert float(found) == expected, (point, expected, found)


@pytest.mark.parametrize("name", MEANINGS)
def test_z3_and_python_compute_the_same(name: str) -> None:
    """At each point of a grid z3 finds the same number, and undefined values undefined."""
    expr, terms = MEANINGS[name], Z3Terms(real_floats=True)
    value = sympy.Symbol("value", integer=True if expr.is_integer else None, real=True)
    equal = sympy.Eq(expr, value, evaluate=False)
    for point in points_for(expr):
        expected = in_python(expr, point)
        if expected is None:
            assert in_z3(terms, equal, {**point, "value": 0}) is False, point
            continue
        if not expr.is_integer and float(expected) != expected:
            continue  # a fraction that is no float
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
def test_z3_assumes_nothing_of_an_opaque_function(name: str) -> None:
    """Neither its value nor whether it has one is assumed."""
    expr, terms = OPAQUE[name], Z3Terms()
    defined = raw(sympy.Or, raw(sympy.Ge, expr, 0), raw(sympy.Le, expr, 1))
    for condition in (raw(sympy.Gt, expr, 0), defined):
        for constraint in (terms.fact(condition), z3.Not(terms.fact(condition))):
            solver = z3.Solver()
            solver.add(constraint)
            assert solver.check() == z3.sat


@pytest.mark.parametrize("name", ["IntTrueDiv", "FloatTrueDiv", "float add", "float mul"])
def test_rounding_functions_are_opaque_at_first(name: str) -> None:
    """A proof about floats must not assume the exactness of real numbers."""
    terms = Z3Terms()
    point = {"s0": 5, "s1": 2, "f0": 2.5, "f1": 4.0}
    assert in_z3(terms, raw(sympy.Gt, MEANINGS[name], 0), point) is None
    assert terms.rounds
