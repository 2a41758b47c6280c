"""Implication of shape facts: compared with brute force and z3, minimal, of linear cost."""

from __future__ import annotations

from itertools import pairwise, product
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
import sympy
import z3
from fact_values import NAMES, SYMBOLS, Point, conditions, implied, truth
from guard_z3 import Z3Terms
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from sympy import And, Eq, Ne, Not, Or
from torch.utils._sympy.functions import (
    CeilDiv,
    CleanDiv,
    FloorDiv,
    IntTrueDiv,
    Max,
    Min,
    Mod,
    ModularIndexing,
    PowByNatural,
    PythonMod,
)

from torch_fakeify.prover.implication import FactIndex, WorkCounter, conflict, redundant

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

S0, S1, S2, S3, S4 = sympy.symbols("s0:5", integer=True)
U0, U1 = sympy.symbols("u0 u1", integer=True)
Z0, Z1 = sympy.symbols("zf0 zf1", real=True)
P = sympy.Symbol("p")
FLAG = sympy.Function("flag")

FEW = 40
"""Examples of the laws that need brute force or z3; the sweeps take more."""

LOW, HIGH = -3, 5
BOX: list[Point] = [
    dict(zip(NAMES, found, strict=True))
    for found in product(range(LOW, HIGH + 1), repeat=len(NAMES))
]

DIVISIBLE = Eq(Mod(S0, 4), 0)
POSITIVE = [S0 >= 1, S1 >= 1, S2 >= 1]

FOLLOWS: dict[str, tuple[list[Any], Any]] = {
    "transitive": ([S0 < S1, S1 < S2], S0 <= S2),
    "integers leave gaps": ([S0 < S1, S1 < S2], S0 + 2 <= S2),
    "tighter bound": ([2 * S0 > 9], S0 >= 5),
    "the same tightened": ([S0 >= 5], 2 * S0 > 9),
    "other side": ([S0 < S1], S1 > S0),
    "moved and scaled": ([S0 - S1 <= 3], 2 * S0 <= 2 * S1 + 7),
    "sum of rows": ([S0 + S1 <= 10, S0 - S1 <= 2], S0 <= 6),
    "three variables": ([2 * S0 + 3 * S1 <= 12, S1 >= 2], S0 <= 3),
    "bound by a multiple": ([3 * S0 + S1 <= 20, S1 >= 2], S0 <= 6),
    "bound by another's multiple": ([S0 + 3 * S1 <= 20, S1 >= 2], S0 <= 14),
    "bound by a difference": ([S0 - 3 * S1 <= 20, S1 <= 2], S0 <= 26),
    "strict bound by a sum": ([Z0 + Z1 < 5, Z1 >= 2], Z0 < 3),
    "between two integers": ([3 * S0 >= 7 + S1, 3 * S0 <= 8 + S1, Eq(S1, 0)], S0 >= 17),
    "no integer in between": ([2 * S0 + 2 * S1 >= 5 - 2 * S2], S0 + S1 + S2 >= 3),
    "fraction split": ([S0 + S1 <= 3, S0 - S1 <= 0, S1 - S0 <= 0], S0 <= 1),
    "equality turned": ([Eq(S0, S1)], Eq(S1, S0)),
    "equality chain": ([Eq(S0, S1), Eq(S1, S2)], Eq(S0, S2)),
    "two bounds": ([S0 >= 5, S0 <= 5], Eq(S0, 5)),
    "replacement": ([Eq(S0 * S1, S2), S2 <= 100], S0 * S1 <= 100),
    "replaced factor": ([Eq(S2, S0), S2 * S1 <= 100], S0 * S1 <= 100),
    "replaced in a function": ([Eq(S2, S0 * S1), Eq(Mod(S2, 4), 0)], Eq(Mod(S0 * S1, 4), 0)),
    "replaced twice": (
        [Eq(S2, S0), Eq(S3, S1), Eq(FloorDiv(S2 * S3, 3), S4)],
        Eq(FloorDiv(S0 * S1, 3), S4),
    ),
    "divisor of a divisor": ([Eq(Mod(S0, 8), 0)], DIVISIBLE),
    "multiple": ([Eq(Mod(S0, 2), 0)], Eq(Mod(2 * S0, 4), 0)),
    "product": ([DIVISIBLE], Eq(Mod(S0 * S1, 4), 0)),
    "sum": ([DIVISIBLE, Eq(Mod(S1, 4), 0)], Eq(Mod(S0 + S1, 4), 0)),
    "common multiple": ([DIVISIBLE, Eq(Mod(S0, 6), 0)], Eq(Mod(S0, 12), 0)),
    "coprime factor": ([Eq(Mod(3 * S0, 4), 0)], DIVISIBLE),
    "factor and rest": ([Eq(Mod(3 * S0 + 5, 7), 0)], Eq(Mod(S0, 7), 3)),
    "no coprime factor": ([Eq(Mod(2 * S0 + 3 * S1, 6), 0), Eq(S1, 2)], Eq(Mod(S0, 3), 0)),
    "remainder": ([Eq(Mod(S0, 4), 2)], Eq(Mod(S0, 2), 0)),
    "odd": ([Eq(Mod(S0, 4), 1)], Ne(Mod(S0, 2), 0)),
    "symbolic divisor": ([*POSITIVE, Eq(Mod(S0, S1), 0)], Eq(Mod(S0 * S2, S1), 0)),
    "exact": ([Eq(Mod(S0, 100), 0)], Eq(100 * FloorDiv(S0, 100), S0)),
    "clean": ([Eq(Mod(S0, 100), 0)], Eq(100 * CleanDiv(S0, 100), S0)),
    "size after reshape": ([DIVISIBLE, FloorDiv(S0, 4) <= 7], S0 <= 28),
    "mod below": ([], PythonMod(U0, 4) <= 3),
    "mod above": ([], PythonMod(U0, 4) >= 0),
    "floor of a bound": ([U0 <= 99], FloorDiv(U0, 4) <= 24),
    "floor and itself": ([Eq(FloorDiv(S0, 2), S1)], S0 <= 2 * S1 + 1),
    "floor at least": ([Eq(FloorDiv(S0, 2), S1), S0 >= 2], S1 >= 1),
    "floors of one": ([FloorDiv(S0, 4) >= 4], FloorDiv(S0, 8) >= 2),
    "floor by symbol": ([S0 <= 10, S1 >= 1], FloorDiv(S0, S1) <= 10),
    "ceil": ([CeilDiv(S0, 4) <= 3], S0 <= 12),
    "modular indexing": ([U0 >= 0, U0 <= 9], ModularIndexing(U0, 2, 8) <= 4),
    "max of one": ([S0 <= S1], Max(S0, S1) <= S1),
    "max above": ([], Max(S0, S1) >= S1),
    "max below": ([S0 <= 5, S1 <= 5], Max(S0, S1) <= 5),
    "max is one": ([Max(S0, S1) >= 7, S0 <= 5], S1 >= 7),
    "min above": ([S0 >= 5, S1 >= 5], Min(S0, S1) >= 5),
    "min below": ([S0 <= 5], Min(S0, S1) <= 5),
    "product above": ([S0 >= 2, S1 >= 2], S0 * S1 >= 4),
    "product below": ([U0 >= 0, U0 <= 4, U1 <= 4], U0 * U1 <= 16),
    "product of signs": ([U0 >= -3, U0 <= 2, U1 >= -5, U1 <= 4], U0 * U1 <= 15),
    "three factors": ([S0 >= 2, S1 >= 2, S2 >= 2], S0 * S1 * S2 >= 8),
    "factor of a positive product": ([S0 * S1 > S2, S2 >= 1, S1 >= 0], S1 >= 1),
    "factor of a product": ([S1 >= 2, S0 * S1 <= 100], S0 <= 50),
    "products compared": ([S1 <= S2, S0 >= 2], S0 * S1 <= S0 * S2),
    "products passed on": ([S0 * S1 >= 7, S1 * S2 <= 5], S1 * S2 <= S0 * S1),
    "bounds passed on": ([S0 >= 3, S1 > S0, S2 >= S1], S1 * S2 >= 16),
    "square": ([S0 >= 2, S0 <= 64], S0**2 <= 4096),
    "natural power": ([S0 >= 2, S0 <= 64], PowByNatural(S0, 2) <= 4096),
    "square of both signs": ([U0 >= -3, U0 <= 3], U0**2 <= 9),
    "square not negative": ([], U0**2 >= 0),
    "too large to replace": ([Eq(S0, S1 + S2 + S3 + S4)], S0**12 >= 0),
    "or is itself": ([Or(S0 < 3, S0 > 7)], Or(S0 > 7, S0 < 3)),
    "or, one is out": ([Or(S0 < 3, S0 > 7), S0 >= 3], S0 >= 8),
    "or by cases": ([Or(And(S0 < 3, S1 < 3), S1 < 2)], S1 < 3),
    "or has one": ([S0 < 3], Or(S0 < 3, S1 > 7)),
    "two ors": ([Or(S0 < 3, S1 < 3), Or(S0 >= 3, S1 < 3)], S1 < 3),
    "not and": ([Not(And(S0 < 3, S1 < 3)), S0 < 3], S1 >= 3),
    "and": ([S0 < S1, S1 < S2], And(S0 < S2, S1 < S2)),
    "part of an and": ([And(S0 < S1, S1 < S2)], S0 < S2),
    "ne turned": ([Ne(S0, S1)], Ne(S1, S0)),
    "ne of less": ([S0 < S1], Ne(S1, S0)),
    "ne at the border": ([S0 >= 2, Ne(S0, 2)], S0 >= 3),
    "ne of eq": ([Ne(S0, 3), Eq(S0, S1)], Ne(S1, 3)),
    "unknown condition": ([FLAG(S0) > 2], FLAG(S0) >= 1),
    "equal arguments": ([Eq(S0, S1), FLAG(S0) > 2], FLAG(S1) > 2),
    "true division": ([IntTrueDiv(S0, S1) > 2.0, Eq(S1, S2)], IntTrueDiv(S0, S2) > 1.5),
    "boolean": ([Or(P, S0 > 3), S0 < 2], P),
    "float bound": ([Z0 < 0.5], Z0 <= 0.5),
    "float chain": ([Z0 < Z1, Z1 <= 0.25], Z0 < 0.5),
    "float strict": ([Z0 < Z1, Z1 <= 0.25], Z0 < 0.25),
    "float sum": ([Z0 + Z1 <= 1.0, Z0 - Z1 <= 0.5], Z0 <= 0.75),
    "float equality": ([Eq(Z0, Z1), Z1 <= 0.5], Z0 <= 0.5),
    "floats that add up to an integer": (
        [2 * Z0 + 2 * Z1 > 5, Eq(Z0 + Z1, S0)],
        Z0 + Z1 >= 3,
    ),
    "float and integer": ([Z0 >= S0, S0 >= 2], Z0 > 1.5),
    "contradiction": ([S0 >= 5, S0 <= 4], Eq(S0, 17)),
    "false": ([sympy.false], S0 >= 17),
    "true": ([], sympy.true),
    "nothing asked": ([], S0 <= S0 + 1),
}

DOES_NOT_FOLLOW: dict[str, tuple[list[Any], Any]] = {
    "weaker bound": ([S0 >= 2], S0 >= 3),
    "chain too short": ([S0 < S1, S1 < S2], S0 + 3 <= S2),
    "wrong way": ([S0 <= S1], S1 <= S0),
    "bound by a multiple": ([3 * S0 + S1 <= 20, S1 >= 2], S0 <= 5),
    "bound by another's multiple": ([S0 + 3 * S1 <= 20, S1 >= 2], S0 <= 13),
    "bound by a difference": ([S0 - 3 * S1 <= 20, S1 <= 2], S0 <= 25),
    "strict bound by a sum": ([Z0 + Z1 <= 5, Z1 >= 2], Z0 < 3),
    "half an equality": ([S0 <= S1], Eq(S0, S1)),
    "other symbols": ([S0 <= S1], S2 <= S3),
    "multiple of a divisor": ([DIVISIBLE], Eq(Mod(S0, 8), 0)),
    "factor not coprime": ([Eq(Mod(2 * S0, 4), 0)], DIVISIBLE),
    "a multiple of a floor": ([Eq(S0, 2 * FloorDiv(S0, 4))], DIVISIBLE),
    "other remainder": ([Eq(Mod(S0, 4), 1)], Eq(Mod(S0, 2), 0)),
    "no bound below": ([U0 <= 64], U0**2 <= 4096),
    "size-like is not two": ([U0 >= 0], U0 >= 2),
    "floor just above": ([U0 >= 0, U0 <= 100], FloorDiv(U0, 4) <= 24),
    "product too large": ([S0 >= 2, S1 >= 2], S0 * S1 >= 5),
    "factor too small": ([S0 >= 2, S1 >= 2, S0 * S1 <= 100], S0 <= 49),
    "factor of a product that may be zero": ([S0 * S1 >= 0, S1 >= 0], S1 >= 1),
    "negative factor": ([S1 <= S2], S0 * S1 <= S0 * S2),
    "product of any signs": ([], U0 * U1 >= 0),
    "cube": ([], U0**3 >= 0),
    "bounds below zero": ([U0 >= -3, U1 >= -2], U0 * U1 >= 6),
    "divisor of any sign": ([S0 >= 1, S1 >= -2], PythonMod(S0, S1) >= 0),
    "floor of any sign": ([S0 >= -3, S0 <= 10, S1 >= 1], FloorDiv(S0, S1) >= 0),
    "min of one": ([S0 >= 5], Min(S0, S1) >= 5),
    "or has more": ([Or(S0 < 3, S1 > 7)], S0 < 3),
    "unknown condition": ([FLAG(S0) > 2], FLAG(S1) > 2),
    "not the opposite": ([Or(P, S0 > 3)], P),
    "floats have no gaps": ([Z0 < Z1], Z0 + 1 <= Z1),
    "float not strict": ([Z0 <= 0.5], Z0 < 0.5),
    "float of the next": ([2 * Z0 > 9], Z0 >= 5),
    "what sympy knows is no fact": ([], sympy.Symbol("s9", integer=True, positive=True) >= 2),
    "no facts, no contradiction": ([S0 >= 5, S0 <= 4], sympy.false),
}


@pytest.mark.parametrize("case", FOLLOWS)
def test_implied_conditions_are_found(case: str) -> None:
    """The condition follows from the premises."""
    premises, conclusion = FOLLOWS[case]
    assert implied(premises, conclusion)


@pytest.mark.parametrize("case", FOLLOWS)
def test_each_premise_is_needed(case: str) -> None:
    """Without any premise the condition is not implied, except where the case is about that."""
    premises, conclusion = FOLLOWS[case]
    idle = {
        "symbolic divisor",
        "contradiction",
        "fraction split",
        "between two integers",
        "too large to replace",
    }
    if case not in idle:
        for at in range(len(premises)):
            assert not implied([*premises[:at], *premises[at + 1 :]], conclusion)


@pytest.mark.parametrize("case", DOES_NOT_FOLLOW)
def test_other_conditions_are_not_implied(case: str) -> None:
    """The condition does not follow from the premises."""
    premises, conclusion = DOES_NOT_FOLLOW[case]
    assert not implied(premises, conclusion)


def test_one_fact_among_many_gives_a_bound_and_is_its_reason() -> None:
    """Also where a linear program does not get it, as it gets the nearest facts alone."""
    symbols = sympy.symbols("s0:31", integer=True)
    facts = [symbols[0] + each <= 90 - at for at, each in enumerate(symbols[1:])]
    index = FactIndex([*facts, *(each >= 2 for each in symbols[1:])], WorkCounter())
    for bound, follows in ((59, True), (58, False)):
        parts = index.table.condition(symbols[0] <= bound)
        assert index.implies(parts, without=None) == follows
        assert index.reasons(parts) == ((29, 59) if follows else None)
    assert not index.implies(index.table.condition(symbols[0] <= 59), without=29)


def test_an_undecided_condition_is_not_implied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear program that exceeds its limit of pivots decides nothing."""
    premises, conclusion = FOLLOWS["sum of rows"]
    monkeypatch.setattr("torch_fakeify.prover.refutation.MAX_PIVOTS", 0)
    assert not implied(premises, conclusion)


# --- redundant --------------------------------------------------------------------------------


def fact_sets(condition: st.SearchStrategy[Any], most: int) -> st.SearchStrategy[list[Any]]:
    """Draw lists of facts, among them some bounds of symbols."""
    bounds = st.builds(
        lambda s, b, up: s <= b if up else s >= b,
        st.sampled_from(SYMBOLS),
        st.integers(LOW, HIGH),
        st.booleans(),
    )
    return st.lists(st.one_of(condition, bounds), min_size=2, max_size=most)


def differences(symbols: Sequence[Any], span: int) -> st.SearchStrategy[Any]:
    """Draw ``a*s - b*t <= c`` of two symbols, or of one."""
    factors = st.integers(1, 2)
    pairs = st.permutations(symbols).map(lambda found: found[:2])
    return st.one_of(
        st.builds(
            lambda pair, a, b, c: a * pair[0] - b * pair[1] <= c,
            pairs,
            factors,
            factors,
            st.integers(-span, span),
        ),
        st.builds(lambda s, c: s <= c, st.sampled_from(symbols), st.integers(0, span)),
        st.builds(lambda s, c: s >= c, st.sampled_from(symbols), st.integers(-span, 0)),
    )


def z3_verdict(premises: Sequence[Any], conclusion: Any) -> Any:
    """Return ``unsat`` if the conclusion follows."""
    terms, solver = Z3Terms(real_floats=True), z3.Solver()
    solver.set("rlimit", 1_000_000)  # steps, not time: the same answer on a busy machine
    solver.add(*map(terms.fact, premises), terms.fact(sympy.Not(conclusion)))
    return solver.check()


def over_the_rationals(facts: Sequence[Any]) -> list[Any]:
    """Return facts about integers as facts about real numbers of the same names."""
    reals = {s: sympy.Symbol(s.name, real=True) for fact in facts for s in fact.free_symbols}
    return [fact.xreplace(reals) for fact in facts]


def remaining_facts_are_equivalent(facts: list[Any]) -> None:
    """Check on every point of a box that dropped facts follow from the others."""
    removed = [*redundant(facts)]
    event(f"dropped {len(removed)} of {len(facts)}")
    left = [fact for at, fact in enumerate(facts) if at not in removed]
    for point in BOX:
        if all(truth(fact, point) for fact in left):
            assert all(truth(facts[at], point) for at in removed)


def dropped_follows_by_z3(facts: list[Any]) -> None:
    """Check over all integers, where z3 decides, that dropped facts follow from the others."""
    removed = [*redundant(facts)]
    left = [fact for at, fact in enumerate(facts) if at not in removed]
    for at in removed:
        verdict = z3_verdict(left, facts[at])
        event(str(verdict))
        assert verdict != z3.sat


def linear_dropped_follows(facts: list[Any]) -> None:
    """Check by z3, which decides all of these, that dropped differences and bounds follow."""
    removed = [*redundant(facts)]
    left = [fact for at, fact in enumerate(facts) if at not in removed]
    event(f"dropped {len(removed)} of {len(facts)}")
    assert all(z3_verdict(left, facts[at]) == z3.unsat for at in removed)


def linear_left_is_minimal(facts: list[Any]) -> None:
    """Check that no remaining difference or bound follows from the others over the rationals.

    Of facts that contradict each other everything follows, also what has nothing to do with them.
    """
    assume(z3_verdict(over_the_rationals(facts), sympy.false) == z3.sat)
    removed = [*redundant(facts)]
    left = over_the_rationals([fact for at, fact in enumerate(facts) if at not in removed])
    for at, fact in enumerate(left):
        assert z3_verdict([*left[:at], *left[at + 1 :]], fact) == z3.sat


DROPPED: dict[str, tuple[list[Any], list[int]]] = {
    "nothing": ([], []),
    "one of two": ([S0 <= 5, S0 <= 5], [1]),
    "one of two ways to write it": ([Eq(S0, S1), Eq(S1, S0)], [1]),
    "not both of two": ([S0 - S1 <= 0, S0 - S1 <= 0, S1 <= S0], [1]),
    "weaker bounds": ([S0 >= 2, S0 >= 5, S0 >= 3], [0, 2]),
    "a ring": ([S0 <= S1, S1 <= S2, S2 <= S0, Eq(S0, S2), Eq(S1, S2)], [3, 4]),
    "shortcut": ([S0 < S1, S1 < S2, S0 < S2], [2]),
    "first shortcut": ([S0 < S2, S0 < S1, S1 < S2], [0]),
    "true": ([sympy.true, S0 > 2], [0]),
    "multiples": ([Eq(Mod(S0, 4), 0), Eq(Mod(S0, 8), 0), Eq(Mod(S0, 2), 0)], [0, 2]),
    "range of a replaced symbol": (
        [Eq(S2, S0 * S1), S0 >= 2, S1 >= 2, S2 >= 4, Eq(Mod(S2, 2), 0), Eq(Mod(S0 * S1, 2), 0)],
        [3, 5],
    ),
    "an and": ([S0 < S1, S1 < S2, And(S0 < S1, S0 < S2)], [2]),
    "by an and": ([And(S0 < S1, S1 < S2), S1 < S2, S0 < S1], [1, 2]),
    "ne and a bound": ([S0 >= 2, Ne(S0, 2), S0 >= 3], [2]),
    "contradiction": ([S0 >= 3, S0 <= 2, S0 <= 1], [1]),
}


@pytest.mark.parametrize("case", DROPPED)
def test_redundant_facts_are_dropped(case: str) -> None:
    """Later facts are dropped first, and never two that only follow from one another."""
    facts, expected = DROPPED[case]
    assert [*redundant(facts)] == expected


def test_facts_that_are_not_removable_stay() -> None:
    """Facts that follow from one that is not removable are dropped instead of it."""
    facts = [S0 >= 5, S0 >= 2, S0 < S1, S0 <= S1]
    assert [*redundant(facts)] == [1, 3]
    assert [*redundant(facts, removable=[True, False, False, True])] == [3]
    assert [*redundant(facts, removable=[True, True, True, False])] == [1]


def test_a_range_is_dropped_where_one_fact_and_bounds_give_it() -> None:
    """A ``ShapeEnv`` solves an inequality for a symbol with the factor one; it adds no two of them."""
    facts = [S0 >= 2, S1 >= 5, S0 + S1 <= 9, S0 <= 4, S1 <= 9]
    is_range = [True, True, False, True, True]
    assert redundant(facts, is_range=is_range) == {3: (2, 1), 4: (2, 0)}
    assert redundant([S1 >= 5, 2 * S0 <= 9, S0 <= 4]) == {2: None}
    assert redundant([S1 >= 5, 2 * S0 <= 9, S0 <= 4], is_range=[True, False, True]) == {1: None}


def test_the_answer_depends_on_the_facts_alone() -> None:
    """A second run has the same answer and the same work."""
    runs: list[Any] = []
    for _ in range(2):
        work = WorkCounter()
        runs.append((redundant(mixed_facts(50), work=work), work))
    assert runs[0] == runs[1]


# --- conflict ---------------------------------------------------------------------------------

CONFLICTS: dict[str, tuple[list[Any], Any, tuple[int, ...] | None]] = {
    "bound": ([S1 >= 2, S0 >= 5, S0 <= 9], S0 <= 4, (1,)),
    "tightest of two": ([S0 >= 5, S0 >= 7], S0 <= 4, (1,)),
    "chain": ([S0 < S1, S3 >= 2, S1 < S2, S4 > 4], S2 <= S0, (0, 2)),
    "divisor": ([S0 >= 2, Eq(Mod(S0, 100), 0), S0 <= 5000], Eq(S0, 2099), (1,)),
    "replaced": ([Eq(S2, S0 * S1), S0 >= 2, Eq(S0, 3), S2 <= 100], Eq(Mod(S2, 3), 1), (0, 2)),
    "both sides": ([S0 >= 2, S1 >= 3, S1 <= 9], S0 * S1 <= 5, (0, 1)),
    "or": ([Or(S0 < 3, S0 > 7), S0 >= 3, S1 > 4], S0 <= 7, (0, 1)),
    "itself": ([S0 >= 2], And(S1 < S2, S2 < S1), ()),
    "false": ([S0 >= 2], sympy.false, ()),
    "none": ([S0 >= 2, S0 <= 9], S0 <= 4, None),
    "far away": ([S0 >= 2, S1 >= 3, S1 <= 2], S0 >= 4, None),
    "floats": ([Z0 < 0.5, Z1 > 0.25], Z0 >= 0.5, (0,)),
}


@pytest.mark.parametrize("case", CONFLICTS)
def test_the_facts_in_a_conflict_are_found(case: str) -> None:
    """Exactly the facts that contradict the new one are returned."""
    facts, new, expected = CONFLICTS[case]
    assert conflict(facts, new) == expected


def conflict_is_irreducible(facts: list[Any]) -> None:
    """The first fact against the others: the named facts and the new one hold nowhere; with one less, no contradiction is found."""
    new, *facts = facts
    found = conflict(facts, new)
    if found is None:
        return
    culprits = [facts[at] for at in found]
    assert not any(all(truth(fact, point) for fact in (*culprits, new)) for point in BOX)
    for at in range(len(culprits)):
        assert conflict([*culprits[:at], *culprits[at + 1 :]], new) is None


LAWS: dict[Callable[[list[Any]], None], st.SearchStrategy[list[Any]]] = {
    remaining_facts_are_equivalent: fact_sets(conditions(), 7),
    dropped_follows_by_z3: fact_sets(conditions(), 7),
    linear_dropped_follows: st.lists(differences(SYMBOLS, 6), min_size=2, max_size=10),
    linear_left_is_minimal: st.lists(differences((*SYMBOLS, S3), 9), min_size=2, max_size=12),
    conflict_is_irreducible: fact_sets(conditions(), 7),
}


@pytest.mark.parametrize(
    "examples",
    [
        FEW,
        pytest.param(300, marks=pytest.mark.sweep),
        pytest.param(1000, marks=[pytest.mark.sweep, pytest.mark.long]),
    ],
)
@pytest.mark.parametrize("law", LAWS)
def test_a_law_holds_for_random_facts(law: Any, examples: int) -> None:
    """Each law of `LAWS` holds for random facts."""
    settings(max_examples=examples)(given(LAWS[law])(law))()


def test_a_conflict_over_a_long_chain_is_found() -> None:
    """A chain longer than what `redundant` considers is found, complete and alone."""
    symbols = sympy.symbols("s0:40", integer=True)
    chain = [a < b for a, b in pairwise(symbols)]
    noise = [s >= 2 for s in symbols]
    assert conflict([*noise, *chain], symbols[30] <= symbols[0]) == tuple(range(40, 70))


# --- cost -------------------------------------------------------------------------------------


def chain_facts(count: int) -> list[Any]:
    """Return bounds, neighbours and shortcuts along one chain; three facts a symbol."""
    symbols = sympy.symbols(f"s0:{count // 3 + 2}", integer=True)
    facts: list[Any] = []
    for a, b, c in zip(symbols, symbols[1:], symbols[2:], strict=False):
        facts += [a >= 2, a < b, a <= c]
    return facts[:count]


def mixed_facts(count: int) -> list[Any]:
    """Return all kinds of facts, over three symbols for ten facts."""
    random = Random(0)
    symbols = sympy.symbols(f"s0:{count * 3 // 10}", integer=True)
    kinds: list[Callable[[Any, Any, int], Any]] = [
        lambda a, b, n: (1 + n % 3) * a - (1 + n % 2) * b <= n % 60,
        lambda a, b, n: a < b,
        lambda a, b, n: Eq(Mod(a, 2 ** (1 + n % 4)), 0),
        lambda a, b, n: a * b <= 100 + n,
        lambda a, b, n: a <= 100 + n,
        lambda a, b, n: FloorDiv(a, 2 + n % 8) < b,
        lambda a, b, n: Ne(a, b),
    ]
    facts: list[Any] = [s >= 2 for s in symbols]
    while len(facts) < count:
        a, b = random.sample(symbols, 2)
        facts.append(random.choice(kinds)(a, b, random.randrange(10_000)))
    return facts


def hub_facts(count: int) -> list[Any]:
    """Return facts that all have one symbol in common."""
    hub, *others = sympy.symbols(f"s0:{count}", integer=True)
    return [hub <= 1000, *(other <= hub + at for at, other in enumerate(others, 1))]


@pytest.mark.parametrize(
    ("count", "factor"), [(400, 4.8), pytest.param(1000, 12, marks=pytest.mark.sweep)]
)
@pytest.mark.parametrize("make", [chain_facts, mixed_facts, hub_facts])
def test_cost_is_linear(make: Callable[[int], list[Any]], count: int, factor: float) -> None:
    """Ten times the facts take at most 12 times the steps; four times, 4.8 times."""
    efforts = [WorkCounter(), WorkCounter()]
    for work, number in zip(efforts, (100, count), strict=True):
        redundant(make(number), work=work)
    assert efforts[1].total <= factor * efforts[0].total


@pytest.mark.parametrize("field", ["questions", "neighbours", "rows", "programs", "pivots"])
def test_all_steps_are_counted(field: str) -> None:
    """The sum of the work includes each kind of step."""
    work = WorkCounter()
    redundant(mixed_facts(60), work=work)
    assert 0 < getattr(work, field) < work.total


def test_powers_inside_of_powers_are_not_computed() -> None:
    """The bound of 26 nested squares has 2**26 digits; what needs it is not known to follow."""
    tower: Any = S0
    for _ in range(26):
        tower = FloorDiv(tower * tower + 1, 3)
    assert not implied([S0 >= 10], tower >= 1000003)
