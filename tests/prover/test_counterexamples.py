"""Counterexamples: the answers are those of the prover alone, which is asked much less often."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import sympy
from fact_values import REALS, SYMBOLS, Point, conditions, points, truth
from hypothesis import event, given, settings
from hypothesis import strategies as st
from sympy import Eq, Ne, Or
from torch.utils._sympy.functions import FloorDiv, Max, Mod

from torch_fakeify.prover.counterexamples import Counterexamples
from torch_fakeify.prover.implication import FactIndex, WorkCounter, redundant

if TYPE_CHECKING:
    from collections.abc import Callable

S0, S1, S2 = SYMBOLS
U0 = sympy.Symbol("u0", integer=True)
Z0 = REALS[0]


def found(facts: list[Any], at: int, values: dict[sympy.Symbol, Any]) -> bool:
    """Return whether a point is found that violates one fact and satisfies the others."""
    work = WorkCounter()
    index = FactIndex(facts, work)
    search = Counterexamples(index.table, index.parts, values, work)
    return search.violates(at, set(range(len(facts))))


FOUND: dict[str, tuple[list[Any], dict[sympy.Symbol, Any]]] = {
    "a bound": ([S0 <= 9], {S0: 4}),
    "a bound below": ([S0 >= 2, S0 <= 9], {S0: 4}),
    "a sum": ([S0 + S1 < 100, S0 >= 2, S1 >= 2], {S0: 4, S1: 5}),
    "both are moved": ([S0 + S1 < 15, S0 <= 9, S1 <= 9], {S0: 4, S1: 5}),
    "back to another limit": ([S0 + S1 < 15, S0 + S2 <= 9, S1 <= 9], {S0: 4, S1: 5, S2: 0}),
    "a product": ([S0 * S1 <= 100, S0 >= 2, S1 >= 2], {S0: 4, S1: 5}),
    "not equal": ([Ne(S0 * S1 + 3, S2), S0 >= 2], {S0: 4, S1: 5, S2: 7}),
    "equal": ([Eq(S0, S1), S0 >= 2, S1 >= 2], {S0: 4, S1: 4}),
    "a multiple": ([Eq(Mod(S0, 8), 0), S0 >= 2], {S0: 16}),
    "a remainder": ([Mod(S0 + S1 * S2, 13) < 12, S0 >= 2], {S0: 4, S1: 5, S2: 7}),
    "a quotient": ([FloorDiv(S0, 4) <= 7, S0 >= 2], {S0: 9}),
    "a maximum": ([Max(S0, S1) <= 20, S0 <= 18], {S0: 4, S1: 5}),
    "around a hole": ([S0 + S1 < 14, Ne(S0, 9), S0 <= 9, S1 <= 6], {S0: 4, S1: 5}),
    "another symbol follows": ([S0 <= 20, Eq(Mod(S0 + S2, 5), 1)], {S0: 4, S2: 2}),
    "one of two": ([Or(S0 <= 9, S1 <= 9), S0 >= 2], {S0: 4, S1: 12}),
    "all of three": ([sympy.And(S0 <= 9, S1 <= 9, S2 <= 9), S1 <= 2], {S0: 4, S1: 1, S2: 3}),
}

NOT_FOUND: dict[str, tuple[list[Any], dict[sympy.Symbol, Any]]] = {
    "it follows": ([S0 <= 9, S0 <= 7], {S0: 4}),
    "no value": ([S0 <= 9], {}),
    "no value in another fact": ([S0 <= 9, S0 <= U0], {S0: 4}),
    "a fact that does not hold": ([S0 <= 9, S0 >= 5], {S0: 4}),
    "no integer": ([S0 <= 9], {S0: 4.5}),
    "an unknown function": ([S0 <= 9, sympy.Function("f")(S0) <= 2], {S0: 4}),
    "division by zero": ([S0 >= 1, Eq(FloorDiv(12, S0), 3)], {S0: 4}),
    "the other symbol has a limit": ([S0 <= 20, S0 - S2 <= 16, S2 <= 4], {S0: 4, S2: 2}),
    "a real number": ([Z0 <= 5], {Z0: 4}),
    "symbols of many facts": ([S0 <= 9, *(100 + n >= S0 for n in range(64))], {S0: 4}),
}


@pytest.mark.parametrize("case", FOUND)
def test_a_counterexample_is_found(case: str) -> None:
    """A point violates the first fact and satisfies the others."""
    facts, values = FOUND[case]
    assert found(facts, 0, values)
    assert 0 not in redundant(facts)


@pytest.mark.parametrize("case", NOT_FOUND)
def test_none_is_found(case: str) -> None:
    """The first fact follows, or the values do not suffice."""
    facts, values = NOT_FOUND[case]
    assert not found(facts, 0, values)


def test_a_removed_fact_does_not_matter() -> None:
    """The second fact would follow from the third one, which is not among the others."""
    work = WorkCounter()
    index = FactIndex([S1 >= 2, S0 <= 9, S0 <= 7], work)
    search = Counterexamples(index.table, index.parts, {S0: 4, S1: 3}, work)
    assert search.violates(1, {0, 1})
    assert not search.violates(1, {0, 1, 2})


# --- the same answers -----------------------------------------------------------------------------


def facts_at(point: Point) -> st.SearchStrategy[tuple[list[Any], dict[sympy.Symbol, Any]]]:
    """Draw facts that hold at a point, and the values of its symbols."""
    bounds = st.one_of(
        st.builds(lambda s, n: s <= point[s.name] + n, st.sampled_from(SYMBOLS), st.integers(0, 5)),
        st.builds(lambda s, n: s >= point[s.name] - n, st.sampled_from(SYMBOLS), st.integers(0, 5)),
    )
    others = conditions().map(lambda c: c if truth(c, point) else sympy.Not(c))
    facts = st.lists(st.one_of(others, bounds), min_size=2, max_size=8)
    return facts.map(lambda found: (found, {s: point[s.name] for s in SYMBOLS}))


def the_answers_are_the_same(drawn: tuple[list[Any], dict[sympy.Symbol, Any]]) -> None:
    """Check that a search for counterexamples changes no answer, and count what it saves."""
    facts, values = drawn
    alone, helped = WorkCounter(), WorkCounter()
    assert redundant(facts, example=values, work=helped) == redundant(facts, work=alone)
    event(f"{alone.questions - helped.questions} questions fewer")


def the_answers_are_the_same_with_some_values(
    drawn: tuple[list[Any], dict[sympy.Symbol, Any]],
) -> None:
    """Check that a symbol without a value changes no answer."""
    facts, values = drawn
    del values[S0]
    assert redundant(facts, example=values) == redundant(facts)


LAWS: list[Callable[[Any], None]] = [
    the_answers_are_the_same,
    the_answers_are_the_same_with_some_values,
]


@pytest.mark.parametrize(
    "examples",
    [
        40,
        pytest.param(100, marks=pytest.mark.sweep),
        pytest.param(1000, marks=[pytest.mark.sweep, pytest.mark.long]),
    ],
)
@pytest.mark.parametrize("law", LAWS)
def test_the_answers_are_the_same_for_random_facts(law: Any, examples: int) -> None:
    """Each law of `LAWS` holds for random facts."""
    settings(max_examples=examples)(given(points().flatmap(facts_at))(law))()


# --- cost -----------------------------------------------------------------------------------------


def independent_facts(count: int) -> tuple[list[Any], dict[sympy.Symbol, Any]]:
    """Return facts of which none follows from the others, over three symbols for ten facts."""
    symbols = sympy.symbols(f"s0:{count * 3 // 10}", integer=True)
    values = {symbol: 20 + at for at, symbol in enumerate(symbols)}
    facts: list[Any] = [symbol >= 2 for symbol in symbols]
    at = 0
    while len(facts) < count:
        turn = at // len(symbols)
        a, b, c = (symbols[(at + step) % len(symbols)] for step in (0, 1 + turn, 2 + 3 * turn))
        kinds = [
            a + b < 10_000 + at,
            Ne(a * b + at, c),
            Mod(a + b * c, at + 5) < at + 4,
        ]
        fact: Any = kinds[at % len(kinds)]
        facts.append(fact if fact.subs(values) == sympy.true else sympy.Not(fact))
        at += 1
    return facts, values


def test_the_prover_is_asked_seldom() -> None:
    """Of 100 facts of which none follows, the prover is asked about less than ten."""
    facts, values = independent_facts(100)
    alone, helped = WorkCounter(), WorkCounter()
    assert redundant(facts, work=alone) == redundant(facts, example=values, work=helped) == {}
    assert alone.questions >= 100
    assert helped.questions < 10
    assert helped.total < alone.total / 3


def facts_of_one_symbol(count: int) -> tuple[list[Any], dict[sympy.Symbol, Any]]:
    """Return facts that all have one symbol, which is then not moved, and values."""
    hub, *others = sympy.symbols(f"s0:{count}", integer=True)
    facts = [hub <= 1000, *(other <= hub + at for at, other in enumerate(others, 1))]
    return facts, dict.fromkeys((hub, *others), 1)


@pytest.mark.parametrize(("make", "count"), [(independent_facts, 50), (facts_of_one_symbol, 100)])
def test_the_cost_is_linear(make: Any, count: int) -> None:
    """Four times the facts take at most 4.8 times the steps."""
    efforts = [WorkCounter(), WorkCounter()]
    for work, number in zip(efforts, (count, 4 * count), strict=True):
        facts, values = make(number)
        redundant(facts, example=values, work=work)
    assert efforts[1].total <= 4.8 * efforts[0].total


def test_evaluations_are_counted() -> None:
    """The sum of the work includes the facts that were evaluated."""
    facts, values = independent_facts(50)
    work = WorkCounter()
    redundant(facts, example=values, work=work)
    assert work.evaluations > 0
    assert work.total - replace(work, evaluations=0).total == work.evaluations
