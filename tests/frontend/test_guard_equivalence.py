"""Equivalence of two sets of shape facts: the differences that the helper must find."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import guard_equivalence
import pytest
import sympy
import z3
from guard_equivalence import (
    Facts,
    assert_equivalent,
    equivalent,
    not_implied,
)
from guard_sampling import Found, search
from guard_terms import (
    Undefined,
    confirmed,
    holds,
    nested_int,
    plain,
    python_function,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._sympy import functions as tf
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PythonMod
from torch.utils._sympy.singleton_int import SingletonInt

if TYPE_CHECKING:
    import random
from equivalence_checks import F0, F1, RANDOM_FACTS, S0, S1, S2, SYMBOLS, facts, raw

SIZES = tuple(sympy.Ge(s, 2) for s in SYMBOLS)


# --- the same in other words ------------------------------------------------------------------------


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
def test_equal_sets_that_are_written_differently_are_proved(name: str) -> None:
    """z3 proves in both directions that equal facts in another form are equivalent."""
    a, b = SAME[name]
    verdict = assert_equivalent(a, b)
    assert verdict.how == "proved"
    assert str(verdict) == "proved"


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
def test_a_lost_fact_is_found(name: str) -> None:
    """A fact is lost from the right set if only the left has it, and new if only the right has."""
    exact = KINDS[name][0]
    whole, rest = facts(*AROUND, exact), facts(*AROUND)
    noticed(equivalent(whole, rest), "lost", exact, rest)
    noticed(equivalent(rest, whole), "new", exact, rest)


@pytest.mark.parametrize("name", KINDS)
def test_a_weakened_fact_is_found(name: str) -> None:
    """The first set has a fact that does not follow; the weaker one does."""
    exact, weaker, _ = KINDS[name]
    a, b = facts(*AROUND, exact), facts(*AROUND, weaker)
    noticed(equivalent(a, b), "lost", exact, b)


@pytest.mark.parametrize("name", KINDS)
def test_a_strengthened_fact_is_found(name: str) -> None:
    """The second set has a fact that does not follow from the first."""
    exact, _, stronger = KINDS[name]
    a, b = facts(*AROUND, exact), facts(*AROUND, stronger)
    noticed(equivalent(a, b), "new", stronger, a)


def test_the_report_is_readable() -> None:
    """The report has facts, labels and a counterexample for each."""
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
    """A law of real numbers alone is not proved, and its counterexample is found."""
    sum_ = raw(sympy.Add, raw(sympy.Add, F0, 1.0), -1.0)
    same = raw(sympy.Eq, sum_, F0)
    verdict = equivalent(facts(F0 > 0.0), facts(F0 > 0.0, same))
    noticed(verdict, "new", same, facts(F0 > 0.0))
    verdict = equivalent(facts(2 * F0 > 1.0), facts(F0 > 0.5))
    assert verdict.how == "sampled"
    assert "2*f0 > 1.0: sampled, proved over the real numbers" in str(verdict)


def test_what_z3_cannot_decide_is_sampled() -> None:
    """The sets differ in an opaque function, which equals another one at all sizes."""
    a = facts(S0 >= 0, tf.BitwiseFn_bitwise_and(S0, 7) > 3)
    b = facts(S0 >= 0, Mod(S0, 8) > 3)
    verdict = assert_equivalent(a, b)
    assert verdict.how == "sampled"
    assert len(verdict.open) == 2


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


def test_everything_follows_from_a_contradiction() -> None:
    """The verdict has a note, also for a fact that shares no variable with it."""
    contradiction = facts(S0 > 3, S0 < 2)
    assert equivalent(contradiction, facts(S1 > 3)).how == "differs"
    verdict = equivalent(contradiction, facts(*contradiction.exprs, S1 > 3))
    assert verdict.how == "proved"
    assert verdict.open == ("s1 > 3: proved, the other facts contradict each other",)


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


@settings(max_examples=25)
@given(st.lists(RANDOM_FACTS, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_names_and_order_do_not_matter(exprs: list[Any], rng: random.Random) -> None:
    """A set is equivalent to itself in another order, and with symbols renamed and renamed back."""
    shuffled = rng.sample(exprs, len(exprs))
    assert equivalent(facts(*exprs), facts(*shuffled)).how == "proved"
    there = dict(zip(SYMBOLS, sympy.symbols("x y z", integer=True, positive=True), strict=True))
    back = {new: old for old, new in there.items()}
    renamed = [plain(plain(e, there), back) for e in shuffled]
    assert equivalent(facts(*exprs), facts(*renamed)).how == "proved"


@settings(max_examples=25)
@given(st.lists(RANDOM_FACTS, min_size=2, max_size=4))
def test_a_dropped_independent_fact_is_found(exprs: list[Any]) -> None:
    """If points of a box show that the rest does not imply a fact, the sets differ without it."""
    whole = facts(*IN_BOX, *exprs)
    for index in range(len(IN_BOX), len(whole.exprs)):
        rest = whole.without(index)
        if inside(rest.exprs) != inside(whole.exprs):
            verdict = equivalent(whole, rest, timeout_ms=500)
            assert verdict.how == "differs", verdict
            assert not verdict.new, verdict


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


def test_the_search_uses_divisors_and_hints() -> None:
    """Quotients and lines are solved in a few steps; other points are found by a hint."""
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
