"""Expressions of strides and storage sizes are the very trees that sympy makes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_fakeify._torch import make_size_symbol
from torch_fakeify.size_exprs import product, storage_size, symbols_like

SYMBOLS = [make_size_symbol(number) for number in (3, 27, 77, 5, 100)]
NUMBERS = st.integers(0, 6)


@st.composite
def steps(draw: st.DrawFn) -> Any:
    """A stride: a number times symbols, of which some may occur twice."""
    expr: Any = sympy.Integer(draw(NUMBERS))
    for symbol in draw(st.lists(st.sampled_from(SYMBOLS), max_size=3)):
        expr = expr * symbol
    return expr


def tree(expr: Any) -> Any:
    """Classes and parts in their order."""
    return type(expr), expr.is_commutative, hash(expr), [tree(arg) for arg in expr.args]


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.one_of(st.sampled_from(SYMBOLS), NUMBERS), steps()), max_size=4),
    st.sampled_from([1, 2, 8]),
)
def test_a_storage_size_is_what_sympy_makes(dims: list[tuple[Any, Any]], itemsize: int) -> None:
    """Of any numbers and products of symbols, or there is none."""
    found = storage_size([n for n, _ in dims], [step for _, step in dims], itemsize)
    expected: Any = sympy.Integer(1)
    for n, step in dims:
        expected = expected + step * (n - 1)
    if found is None:
        assert any(step.atoms(sympy.Pow) for _, step in dims)
    else:
        assert tree(found) == tree(expected * itemsize)


@settings(max_examples=300)
@given(steps(), steps())
def test_a_product_is_what_sympy_makes(a: Any, b: Any) -> None:
    """Also where a symbol occurs in both."""
    assert tree(product(a, b)) == tree(a * b)


@pytest.mark.parametrize(
    "assumed", [{"positive": True, "integer": True}, {"real": True}, {"commutative": True}, {}]
)
def test_symbols_made_alike_are_sympys(assumed: dict[str, bool]) -> None:
    """Equal in every way in which sympy tells symbols apart, and in what they make."""
    make = symbols_like(sympy.Symbol("a", **assumed))
    assert make is not None
    symbol, expected = make("x9"), sympy.Symbol("x9", **assumed)
    assert tree(symbol) == tree(expected)
    assert symbol == expected
    assert sympy.srepr(symbol) == sympy.srepr(expected)
    assert symbol.assumptions0 == expected.assumptions0
    assert symbol.sort_key() == expected.sort_key()
    assert {symbol: 1}[expected] == 1
    assert symbol - expected == 0
    assert symbol.free_symbols == {expected}
    assert (symbol.is_positive, symbol.is_nonzero) == (expected.is_positive, expected.is_nonzero)
    assert (symbol + 1).subs(expected, 3) == 4
    assert copy.deepcopy(symbol) == expected
    assert make("x10") != expected
