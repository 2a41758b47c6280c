"""Equivalence of two sets of shape facts: the differences that the helper must find."""

from __future__ import annotations

import itertools
import math
from typing import Any

import guard_equivalence
import pytest
import sympy
import z3
from equivalence_checks import F0, RANDOM_FACTS, S0, S1, S2, SYMBOLS, facts, raw
from guard_equivalence import (
    Facts,
    assert_equivalent,
    equivalent,
)
from guard_sampling import Found, search
from guard_terms import (
    Undefined,
    confirmed,
    holds,
    plain,
    python_function,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._sympy import functions as tf
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod

SIZES = tuple(sympy.Ge(s, 2) for s in SYMBOLS)


# --- differences ------------------------------------------------------------------------------------


# the fact, a weaker one, a stronger one
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
    """Check that the verdict has that fact alone, on that side, with a valid counterexample."""
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
def test_a_lost_weakened_or_strengthened_fact_is_found(name: str) -> None:
    """What only the left set implies is lost, what only the right one implies is new."""
    exact, weaker, stronger = KINDS[name]
    whole, rest = facts(*AROUND, exact), facts(*AROUND)
    noticed(equivalent(whole, rest), "lost", exact, rest)
    noticed(equivalent(rest, whole), "new", exact, rest)
    weak, strong = facts(*AROUND, weaker), facts(*AROUND, stronger)
    noticed(equivalent(whole, weak), "lost", exact, weak)
    noticed(equivalent(whole, strong), "new", stronger, whole)


def test_floats_round() -> None:
    """A law of real numbers alone is not proved, and its counterexample is found."""
    sum_ = raw(sympy.Add, raw(sympy.Add, F0, 1.0), -1.0)
    same = raw(sympy.Eq, sum_, F0)
    verdict = equivalent(facts(F0 > 0.0), facts(F0 > 0.0, same))
    noticed(verdict, "new", same, facts(F0 > 0.0))
    verdict = equivalent(facts(2 * F0 > 1.0), facts(F0 > 0.5))
    assert verdict.how == "sampled"
    assert "2*f0 > 1.0: sampled, proved over the real numbers" in str(verdict)


def test_a_search_that_finds_no_point_is_undecided() -> None:
    """The verdict is neither equivalent nor different, which is an error."""
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
    """No point of the domain was found, or sympy and Python disagree on one."""
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


def test_a_name_is_an_integer_or_a_float() -> None:
    """A name that is an integer in one fact and a float in another is an error."""
    clash = sympy.Symbol("s0", real=True)
    with pytest.raises(ValueError, match="s0 is an integer in one fact and a float in another"):
        equivalent(facts(S0 > 3), facts(clash > 3))


def test_assumptions_of_a_symbol_are_no_facts() -> None:
    """A positive symbol is the one with that name, and its sign must be a fact."""
    positive = sympy.Symbol("s0", positive=True, integer=True)
    assert equivalent(facts(positive > 5), facts(S0 > 5)).how == "proved"
    assert (
        equivalent(facts(positive > -1), facts(S0 > -1)).how == "differs"
    )  # sympy evaluates it to true


# --- random facts -----------------------------------------------------------------------------------


BOX = [dict(zip(("s0", "s1", "s2"), p, strict=True)) for p in itertools.product(range(4), repeat=3)]


IN_BOX = [b for s in SYMBOLS for b in (raw(sympy.Le, 0, s), raw(sympy.Le, s, 3))]


def inside(exprs: Any) -> list[bool]:
    """Return the points of the box where all facts hold."""
    functions = [python_function(e) for e in exprs]
    return [all(holds(f, p) for f in functions) for p in BOX]


@settings(max_examples=50)
@given(st.lists(RANDOM_FACTS, max_size=3), st.lists(RANDOM_FACTS, max_size=3))
def test_the_verdict_agrees_with_every_point_of_a_small_box(a: list[Any], b: list[Any]) -> None:
    """Facts that bound the variables are equivalent if and only if all points agree."""
    verdict = equivalent(facts(*IN_BOX, *a), facts(*IN_BOX, *b), timeout_ms=500)
    assert verdict.how != "undecided", verdict
    assert bool(verdict) is (inside(a) == inside(b)), verdict


@pytest.mark.parametrize("name", KINDS)
def test_the_search_alone_finds_a_weaker_fact(name: str) -> None:
    """Without z3, a point is found where the weaker fact holds and the exact one does not."""
    exact, weaker, _ = KINDS[name]
    others = [plain(e, {}) for e in (*AROUND, weaker)]
    found = search(others, plain(exact, {}), hints={}, tries=100)
    assert found.point is not None
    assert all(holds(python_function(e), found.point) for e in others)
    assert not holds(python_function(plain(exact, {})), found.point)
    assert found == search(others, plain(exact, {}), hints={}, tries=100)


def test_python_and_sympy_must_agree() -> None:
    """Torch lets large powers be infinite, Python computes them: no such point is confirmed."""
    power = raw(sympy.Lt, tf.PowByNatural(2, S0), 2**71)
    assert confirmed(power, {"s0": 8}) is True
    assert confirmed(power, {"s0": 72}) is False
    assert confirmed(power, {"s0": 70}) is None
    assert confirmed(power, {"s0": 10**6}) is None  # too large
    assert confirmed(power, {"s0": -1}) is False


@pytest.mark.parametrize("name", ["inequality", "Mod", "product bound", "range end", "float bound"])
def test_what_z3_leaves_open_is_searched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where z3 does not decide, a difference is found, and equal sets are sampled, not proved."""
    monkeypatch.setattr(z3.Solver, "check", lambda self: z3.unknown)
    exact, weaker, _ = KINDS[name]
    around = (*SIZES, S0 <= 200)
    a, b = facts(*around, exact), facts(*around, weaker)
    noticed(equivalent(a, b), "lost", exact, b)
    negated = plain(sympy.Not(exact), {})
    verdict = equivalent(a, facts(*around, raw(sympy.Not, raw(sympy.And, negated, S1 >= 2))))
    assert verdict.how == "sampled", verdict
    assert "z3 does not know" in verdict.open[0]


def test_an_undefined_function_is_an_error() -> None:
    """A condition without a value does not hold, nor does its opposite."""
    division = python_function(raw(sympy.Ge, raw(FloorDiv, S0, S1), 0))
    with pytest.raises(ZeroDivisionError):
        division({"s0": 1, "s1": 0})
    with pytest.raises(Undefined, match="no condition holds"):
        python_function(raw(sympy.Piecewise, (S0, S0 > 1)))({"s0": 0})
    assert not holds(division, {"s0": 1, "s1": 0})
