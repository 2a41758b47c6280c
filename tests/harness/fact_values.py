"""Random conditions over shape symbols, and their values at points, by Python's own arithmetic."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, TypeAlias

import sympy
from guard_terms import python_function
from hypothesis import strategies as st
from torch.utils._sympy.functions import (
    CeilDiv,
    FloorDiv,
    Max,
    Min,
    Mod,
    ModularIndexing,
    PythonMod,
)

from torch_fakeify.prover.implication import FactIndex, WorkCounter

if TYPE_CHECKING:
    from collections.abc import Sequence

Point: TypeAlias = dict[str, Any]
"""Values of symbols by name."""

NAMES = ("s0", "s1", "s2")
SYMBOLS = tuple(sympy.Symbol(name, integer=True) for name in NAMES)
REALS = tuple(sympy.Symbol(name, real=True) for name in ("zf0", "zf1"))

_RELATIONS = (sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge)


def implied(premises: Sequence[Any], conclusion: Any) -> bool:
    """Return whether the prover finds that a condition follows from others."""
    index = FactIndex(premises, WorkCounter())
    return index.implies(index.table.condition(conclusion), without=None)


def value(expr: Any, point: Point) -> Any:
    """The value of an expression, an integer or a fraction."""
    return python_function(expr, exact=True)(point)


def truth(expr: Any, point: Point) -> bool:
    """Whether a condition holds."""
    return bool(value(expr, point))


def points() -> st.SearchStrategy[Point]:
    """Values of all symbols."""
    whole = st.integers(-6, 9)
    reals = st.fractions(-6, 9, max_denominator=4)
    named = dict.fromkeys(NAMES, whole) | {symbol.name: reals for symbol in REALS}
    return st.fixed_dictionaries(named)


def _modulo(base: Any, divisor: int) -> Any:
    # Torch's own simplification takes for granted that the base is not negative.
    return PythonMod(base, divisor) if base.is_number else Mod(base, divisor, evaluate=False)


def _modular_indexing(base: Any, divisor: int, modulus: int) -> Any:
    if base.is_number:
        return PythonMod(base, modulus)
    return ModularIndexing(base, divisor, modulus, evaluate=False)


def _grown(inner: Any) -> Any:
    divisors = st.integers(1, 8)
    return st.one_of(
        st.builds(operator.add, inner, inner),
        st.builds(operator.sub, inner, inner),
        st.builds(operator.mul, inner, inner),
        st.builds(operator.mul, inner, st.integers(-4, 6)),
        st.builds(lambda e, n: e**n, inner, st.integers(1, 3)),
        st.builds(lambda e, k: FloorDiv(e, k), inner, divisors),
        st.builds(lambda e, k: CeilDiv(e, k), inner, divisors),
        st.builds(lambda e, k: PythonMod(e, k), inner, divisors),
        st.builds(_modulo, inner, divisors),
        st.builds(_modular_indexing, inner, divisors, divisors),
        st.builds(lambda a, b: Max(a, b), inner, inner),
        st.builds(lambda a, b: Min(a, b), inner, inner),
    )


def expressions(max_leaves: int = 4) -> st.SearchStrategy[Any]:
    """Integer expressions over `SYMBOLS`; divisors are constants."""
    leaves = st.one_of(st.sampled_from(SYMBOLS), st.integers(-5, 9).map(sympy.Integer))
    return st.recursive(leaves, _grown, max_leaves=max_leaves)


def expressions_over_real() -> st.SearchStrategy[Any]:
    """Linear expressions over `REALS` and `SYMBOLS`, with exact and with float factors."""
    factors = st.one_of(
        st.sampled_from([0.1, 0.5, -1.25]).map(sympy.Float),
        st.fractions(-2, 2, max_denominator=3).map(
            lambda f: sympy.Rational(f.numerator, f.denominator)
        ),
    )
    parts = st.builds(operator.mul, factors, st.sampled_from([*REALS, *SYMBOLS, sympy.Integer(1)]))
    return st.lists(parts, min_size=1, max_size=3).map(lambda found: sympy.Add(*found))


def relations(sides: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Two expressions compared."""
    return st.builds(lambda r, a, b: r(a, b), st.sampled_from(_RELATIONS), sides, sides)


def conditions() -> st.SearchStrategy[Any]:
    """Comparisons of integers, some joined by ``And``, ``Or`` and ``Not``."""
    atoms = relations(expressions(3))
    return st.one_of(
        atoms,
        st.builds(lambda a, b: sympy.And(a, b), atoms, atoms),
        st.builds(lambda a, b: sympy.Or(a, b), atoms, atoms),
        st.builds(lambda a, b: sympy.Not(sympy.And(a, b)), atoms, atoms),
    )
