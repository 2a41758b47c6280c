"""Polynomials, conditions and replacement, compared with the values of the expressions."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
import sympy
from fact_values import (
    NAMES,
    Point,
    conditions,
    expressions,
    expressions_over_real,
    points,
    truth,
    value,
)
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._sympy.functions import (
    CeilDiv,
    CleanDiv,
    FloorDiv,
    Identity,
    Max,
    Min,
    Mod,
    ModularIndexing,
    PowByNatural,
    PythonMod,
)
from torch.utils._sympy.numbers import int_oo

from torch_fakeify.prover.polynomials import FLOOR, MAX, AtomTable, Either, Equal, Part, add
from torch_fakeify.prover.simplex import Row

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

S0, S1, S2 = (sympy.Symbol(name, integer=True) for name in NAMES)
Z = sympy.Symbol("zf0", real=True)


def poly_value(table: AtomTable, poly: Mapping[Any, Any], point: Point) -> Any:
    """Return the value of a polynomial, atom by atom."""
    total: Any = 0
    for mono, factor in poly.items():
        for at in mono:
            factor = factor * atom_value(table, at, point)
        total += factor
    return total


def atom_value(table: AtomTable, at: int, point: Point) -> Any:
    """Return the value of one atom."""
    atom = table.atoms[at]
    args = [poly_value(table, dict(arg), point) for arg in atom.args]
    if atom.head == FLOOR:
        return args[0] // args[1]
    if atom.head == MAX:
        return max(args)
    if isinstance(atom.head, type):  # the function of the atom, applied to values
        return value(atom.head(*map(sympy.Rational, args), evaluate=False), point)
    return value(atom.head, point)


def parts_hold(table: AtomTable, parts: Sequence[Part], point: Point) -> bool:
    """Return whether a point satisfies all parts."""
    return all(part_holds(table, part, point) for part in parts)


def part_holds(table: AtomTable, part: Part, point: Point) -> bool:
    """Return whether a point satisfies one part."""
    match part:
        case Either(options):
            return any(parts_hold(table, option, point) for option in options)
        case Equal(coeffs, bound):
            return poly_value(table, dict(coeffs), point) == bound
        case Row(coeffs, bound, strict):
            left = poly_value(table, dict(coeffs), point)
            return left < bound if strict else left <= bound


@pytest.mark.parametrize("kind", [expressions, expressions_over_real])
@given(data=st.data(), point=points())
def test_polynomial_has_the_value_of_the_expression(
    kind: Any, data: st.DataObject, point: Point
) -> None:
    """An expression and its polynomial have the same value everywhere; that of floats is exact."""
    expr, table = data.draw(kind()), AtomTable()
    assert poly_value(table, table.read(expr), point) == value(expr, point)


@given(expressions(), expressions(), points())
def test_a_replaced_symbol_has_the_value_of_its_polynomial(
    expr: Any, by: Any, point: Point
) -> None:
    """The value is that at the point where the symbol has the polynomial's value."""
    table = AtomTable()
    ((symbol,),) = table.read(S0)
    replaced = table.replace(table.read(expr), symbol, table.read(by))
    moved = {**point, "s0": value(by, point)}
    assert poly_value(table, replaced, point) == value(expr, moved)


@given(conditions(), points(), st.booleans())
def test_parts_hold_where_the_condition_does(expr: Any, point: Point, negated: bool) -> None:
    """The parts of a condition, or of its negation, hold at the same points as it does."""
    table = AtomTable()
    parts = table.condition(expr, negated)
    assert parts_hold(table, parts, point) == (truth(expr, point) != negated)


SAME = [
    (FloorDiv(FloorDiv(S0, 2), 3), FloorDiv(S0, 6)),
    (FloorDiv(FloorDiv(S0, 2) + 1, 3), FloorDiv(S0 + 2, 6)),
    (CeilDiv(S0, 4), FloorDiv(S0 + 3, 4)),
    (CleanDiv(S0, 4), FloorDiv(S0, 4)),
    (FloorDiv(S0 * 4 + S1 + 9, 4), S0 + 2 + FloorDiv(S1 + 1, 4)),
    (FloorDiv(2 * S0 + 1, 4, evaluate=False), FloorDiv(S0, 2)),
    (FloorDiv(S0 * S1, S1, evaluate=False), S0),
    (Mod(S0 + 4, 4), Mod(S0, 4)),
    (PythonMod(S0, 4), Mod(S0, 4)),
    (sympy.Mod(S0, 4), Mod(S0, 4)),
    (ModularIndexing(S0, 2, 3), Mod(FloorDiv(S0, 2), 3)),
    (Min(S0, S1), -Max(-S0, -S1)),
    (Max(S0, S1, evaluate=False), Max(S1, S0, evaluate=False)),
    (Max(S0, S0 + 1, evaluate=False), S0 + 1),
    (sympy.Max(S0, S1), Max(S0, S1)),
    (sympy.Abs(S0), Max(S0, -S0)),
    (Identity(S0), S0),
    (PowByNatural(S0, 2), S0 * S0),
    ((S0 + S1) ** 2, S0**2 + 2 * S0 * S1 + S1**2),
    (sympy.Rational(1, 2) * (2 * Z), Z),
    (sympy.Float(0.5) * Z, Z / 2),
]


@pytest.mark.parametrize(("left", "right"), SAME, ids=str)
def test_equal_expressions_are_one_polynomial(left: Any, right: Any) -> None:
    """Equal expressions that are written differently have the same polynomial."""
    table = AtomTable()
    assert table.read(left) == table.read(right)


def test_floats_are_exact() -> None:
    """A float is the fraction that it represents."""
    assert AtomTable().read(sympy.Float(0.1)) == {(): Fraction(0.1)}


def test_large_powers_are_not_expanded() -> None:
    """A power with very many terms is one atom, and equal powers are equal atoms."""
    table = AtomTable()
    for big in (S0**1000, (S0 + S1 + S2 + 1) ** 16):
        read = table.read(big)
        assert len(read) == 1
        assert add(read, table.read(big), -1) == {}


TIGHT = [
    (2 * S0 > 9, S0 >= 5),
    (S0 < S1, S0 + 1 <= S1),
    (6 * S0 - 4 * S1 <= 5, 3 * S0 - 2 * S1 <= 2),
    (sympy.Not(S0 <= 3), S0 >= 4),
    (sympy.Eq(2 * S0, 2 * S1), sympy.Eq(S1, S0)),
    (sympy.Eq(2 * S0, 3), sympy.false),
    (sympy.Ne(2 * S0, 3), sympy.true),
    (2 * Z > 9, sympy.Rational(9, 2) < Z),
    (sympy.Implies(S0 < 2, S1 < 2), sympy.Or(S0 >= 2, S1 < 2)),
    (sympy.Not(sympy.And(S0 < 2, S1 < 2)), sympy.Or(S0 >= 2, S1 >= 2)),
]


@pytest.mark.parametrize(("left", "right"), TIGHT, ids=str)
def test_equal_conditions_have_equal_parts(left: Any, right: Any) -> None:
    """Inequalities of integers are as tight as their divisors allow; those of reals stay strict."""
    table = AtomTable()
    assert table.condition(left) == table.condition(right)


INFINITE = [
    (sympy.Le(S0, int_oo, evaluate=False), sympy.true),
    (sympy.Lt(S0, int_oo, evaluate=False), sympy.true),
    (sympy.Ge(S0, int_oo, evaluate=False), sympy.false),
    (sympy.Ge(S0, -int_oo, evaluate=False), sympy.true),
    (sympy.Le(S0, -sympy.oo, evaluate=False), sympy.false),
    (sympy.Le(int_oo, S0, evaluate=False), sympy.false),
    (sympy.Gt(sympy.oo, Z, evaluate=False), sympy.true),
    (sympy.Eq(S0, int_oo, evaluate=False), sympy.false),
    (sympy.Ne(S0, int_oo, evaluate=False), sympy.true),
]


@pytest.mark.parametrize(("expr", "expected"), INFINITE, ids=str)
def test_symbols_are_finite(expr: Any, expected: Any) -> None:
    """A condition that compares a symbol with infinity always holds or never holds."""
    table = AtomTable()
    assert table.condition(expr) == table.condition(expected)
