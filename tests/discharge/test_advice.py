"""What a data-dependent error says with `entailment`, and the checks that it suggests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import sympy
import torch
from fact_values import implied
from hypothesis import given, settings
from hypothesis import strategies as st
from sympy import And, Eq, Ne, Not
from test_questions import sizes, unbacked
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._sympy.functions import FloorDiv, Max, PythonMod

import torch_fakeify as tfk
from torch_fakeify.discharge.abduction import weakest_checks
from torch_fakeify.discharge.known_facts import condition_text
from torch_fakeify.render.data_dependent import known_in

if TYPE_CHECKING:
    from collections.abc import Callable

U, V, W = sympy.symbols("u v w", integer=True)
S = sympy.Symbol("s", integer=True, positive=True)

CHECKS: dict[str, tuple[list[Any], Any, list[str]]] = {
    "nothing smaller": ([U >= 0], U <= S, ["u <= s"]),
    "common factor": ([], 2 * U + 6 <= 2 * S, ["u + 3 <= s"]),
    "rounded": ([], 2 * U <= 2 * S + 5, ["u <= s + 2"]),
    "divisor": ([U >= 0], Eq(PythonMod(4 * U, 8), 0), ["u % 2 == 0"]),
    "no divisor": ([], Ne(PythonMod(6 * U, 4), 0), ["u % 2 != 0"]),
    "terms that cancel": ([Eq(V, W)], U + V <= S + W, ["u <= s"]),
    "maximum of which one is known": ([V <= S], Max(U, V) <= S, ["u <= s"]),
    "the other half is known": ([V <= U], And(V <= U, U <= S), ["u <= s"]),
    "the stronger of two": ([V <= U], And(V <= S, U <= S), ["u <= s"]),
    "floor division": ([], FloorDiv(U, 4) >= 2, ["u >= 8"]),
    "two checks": ([], And(U >= 0, U <= S), ["u >= 0", "u <= s"]),
}


@pytest.mark.parametrize("case", list(CHECKS))
def test_the_check_is_the_smallest_that_says_as_much(case: str) -> None:
    """Common factors, what cancels and what is known are gone."""
    facts, condition, wanted = CHECKS[case]
    checks = weakest_checks(facts, condition, {})
    assert sorted(map(condition_text, checks)) == sorted(wanted)


def test_a_check_that_the_example_contradicts_is_not_suggested() -> None:
    """The hint of a size, and the facts, must leave a check possible."""
    assert weakest_checks([U >= 9], U <= S, {S: 8}) == ()
    assert weakest_checks([U >= 9], U <= S, {S: 9}) == (U <= S,)
    assert weakest_checks([U >= 9], U <= 3, {}) == ()


def contradict(facts: list[Any]) -> bool:
    """Return whether the negation of a fact follows from the others."""
    return any(implied([*facts[:at], *facts[at + 1 :]], Not(facts[at])) for at in range(len(facts)))


@given(st.data())
@settings(max_examples=15)
def test_checks_are_enough_and_needed(data: st.DataObject) -> None:
    """The condition follows with the checks, each check follows with the condition, none is larger."""
    terms = st.sampled_from([U, V, S, U + V, 2 * U, FloorDiv(U, 2), PythonMod(V, 4), Max(U, V)])
    number = st.integers(-2, 6)
    kind = st.sampled_from([sympy.Le, sympy.Ge, Eq, Ne])

    def drawn() -> Any:
        right = data.draw(st.one_of(terms, number))
        return data.draw(kind)(data.draw(terms) + data.draw(number), right)

    facts = [drawn() for _ in range(data.draw(st.integers(0, 3)))]
    condition = drawn()
    if condition in (sympy.true, sympy.false) or implied(facts, condition):
        return
    checks = weakest_checks(facts, condition, {})
    if not checks:  # none is possible
        assert implied(facts, Not(condition)) or contradict(facts)
        return
    assert implied([*facts, *checks], condition)
    for check in checks:
        assert check == condition or implied([*facts, condition], check)
        assert len(list(sympy.preorder_traversal(check))) <= len(
            list(sympy.preorder_traversal(condition))
        )


def message_of(asked: Callable[[], Any]) -> str:
    """Return what `entailment` adds to the error of a condition, which a function asks."""
    with tfk.entailment(), pytest.raises(GuardOnDataDependentSymNode) as caught:
        bool(asked())
    known = known_in(f"{caught.value}\n\nfrom user code:\n  torch._check(...)")
    assert known is not None
    assert known.text() in str(caught.value), "the text is read back exactly"
    return known.text()


def test_the_error_has_facts_and_checks_in_the_names_of_the_user() -> None:
    """Variables of the code that runs, sources of inputs, and the lines of the facts."""
    env = ShapeEnv()
    (width,) = sizes(env, 8)
    count, limit = unbacked(env, 2)
    torch._check(count >= 0)
    torch._check(count <= limit)
    text = message_of(lambda: bool(2 * count <= 2 * width) or limit)
    assert text.splitlines()[:3] == [
        "What the facts say (torch_fakeify.entailment):",
        "  known: width >= 2",
        "  known: count >= 0",
    ]
    assert "  known: count <= limit  # test_advice.py:" in text
    assert "It would follow with:\n  torch._check(count <= width)  # at test_advice.py:" in text
    assert (
        "Its negation would follow with:\n  torch._check(count > width)" in text
        or "torch._check(width < count)" in text
        or "torch._check(width + 1 <= count)" in text
    )
    assert "torch's symbols" not in text


def test_a_symbol_without_a_variable_is_said_to_be_torchs() -> None:
    """The text says that ``u0`` is no name of the program."""
    env = ShapeEnv()
    held = unbacked(env, 1)
    text = message_of(lambda: bool(held[0] <= 3))
    assert "nothing is known of u0" in text
    assert "(u0: torch's symbols, for which no variable of yours was found.)" in text


def test_without_it_the_error_is_torchs() -> None:
    """The message is torch's alone."""
    env = ShapeEnv()
    (u,) = unbacked(env, 1)
    with pytest.raises(GuardOnDataDependentSymNode) as caught:
        bool(u <= 3)
    assert known_in(str(caught.value)) is None


def test_a_hint_that_is_looked_for_costs_no_advice() -> None:
    """Torch makes the same error where it only looks for a hint; nothing is searched for then."""
    env = ShapeEnv()
    (u,) = unbacked(env, 1)
    with tfk.entailment():
        error = env._make_data_dependent_error(u.node.expr <= 3, u.node.expr <= 3)
    assert known_in(str(error)) is None
