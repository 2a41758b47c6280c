"""The prover against z3 on random facts and conditions of each kind: sound, and rarely silent."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from entailment_pairs import KINDS, Pair, U
from entailment_z3 import compare, pairs

import torch_fakeify.prover
from torch_fakeify.compat.torch_symbols import sympy_functions

if TYPE_CHECKING:
    from types import ModuleType

ROOM = Path(torch_fakeify.prover.__file__).parent

SEED = 20_261_127


@pytest.mark.parametrize(
    "count",
    [len(KINDS) * 3, pytest.param(len(KINDS) * 400, marks=[pytest.mark.sweep, pytest.mark.long])],
)
def test_no_answer_has_a_counterexample(count: int) -> None:
    """z3 finds no values that satisfy the facts and contradict an answer."""
    found = [compare(one, answered_only=True) for one in pairs(count, SEED)]
    assert [one.pair for one in found if one.refuted] == []
    assert sum(one.answer is not None for one in found) > count // 3


@pytest.mark.sweep
def test_what_z3_proves_is_mostly_answered() -> None:
    """Of what z3 proves within its time at least 95 % is answered, of each kind at least 85 %."""
    found = [compare(one) for one in pairs(len(KINDS) * 60, SEED + 1)]
    proved = [one for one in found if one.proved is not None]
    assert sum(one.answer is not None for one in proved) >= 0.95 * len(proved)
    for kind in KINDS:
        of_kind = [one for one in proved if one.pair.kind == kind]
        assert sum(one.answer is not None for one in of_kind) >= 0.85 * len(of_kind), kind


class Mutation(NamedTuple):
    """A change of the prover that makes it unsound."""

    file: str
    old: str
    new: str


BY_HAND = (
    Pair("maximum", (U[0] <= 3, U[1] <= 3), sympy_functions.Max(U[0], U[1], U[2]) <= 3),
    Pair(
        "quotient",
        (U[0] >= 8, U[1] >= 2, U[1] <= 4),
        sympy_functions.FloorDiv(U[0], U[1]) >= 3,
    ),
    Pair("minimum", (U[0] >= 3, U[1] >= 3), sympy_functions.Min(U[0], U[1], U[2]) >= 3),
)
"""Conditions that do not follow, and are seldom among random ones."""

MUTATIONS = {
    "bounds are rounded up": Mutation(
        "polynomials", "bound = floor(bound) - (1 if", "bound = -floor(-bound) - (1 if"
    ),
    "a negation skips a number": Mutation(
        "refutation",
        "(m, -c) for m, c in coeffs), -bound), not strict)",
        "(m, -c) for m, c in coeffs), -bound - 1), not strict)",
    ),
    "an option of a negated equality is lost": Mutation(
        "refutation",
        "return either([table.row(poly, True), table.row(add({}, poly, -1), True)])",
        "return table.row(poly, True)",
    ),
    "a quotient is exact": Mutation(
        "lemmas", "self._add(add(add(rest, b, -1), {(): 1}))", "self._add(rest)"
    ),
    "a maximum is its first argument": Mutation(
        "lemmas",
        "self.splits.extend(p for p in either(least) if",
        "self.splits.extend(p for p in either(least[:2]) if",
    ),
    "products have no signs": Mutation(
        "intervals",
        "if a_low is None or b_low is None or a_low < 0 or b_low < 0:",
        "if a_low is None or b_low is None:",
    ),
    "a power of a negative number is positive": Mutation(
        "intervals",
        "if low is not None and low >= 0:\n            return low**",
        "if low is not None:\n            return low**",
    ),
    "a quotient is of the least divisor": Mutation(
        "intervals", "floor(Fraction(low) / most)", "floor(Fraction(low) / least)"
    ),
    "a maximum has the bound of one argument": Mutation(
        "intervals", "max(known) if len(known) == len(highs) else None", "max(known, default=None)"
    ),
    "an interval ends before its bound": Mutation(
        "intervals", "(strict and low == bound)", "low == bound"
    ),
    "a fraction is rounded down alone": Mutation(
        "refutation",
        "return self._with(rows, choices, (below,)) and self._with(rows, choices, (above,))",
        "return self._with(rows, choices, (below,))",
    ),
    "one option of a disjunction is enough": Mutation(
        "refutation",
        "return all(self._with(rows, left, option) for option in choice.options)",
        "return any(self._with(rows, left, option) for option in choice.options)",
    ),
    "equal bounds contradict": Mutation(
        "refutation",
        "if sum_ < 0 or (sum_ == 0 and (row.strict or not opposite[1])):",
        "if sum_ <= 0:",
    ),
    "quotients are rounded up": Mutation(
        "polynomials", "whole = constant // k", "whole = -(-constant // k)"
    ),
    "the constant of a quotient is lost": Mutation(
        "polynomials", "if constant // shared:\n", "if False:\n"
    ),
}


@pytest.fixture
def mutant(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    """The prover with one change."""
    change = MUTATIONS[request.param]
    name = f"mutant_{list(MUTATIONS).index(request.param)}"
    (tmp_path / name).mkdir()
    for path in ROOM.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.stem == change.file:
            assert text.count(change.old) == 1
            text = text.replace(change.old, change.new)
        (tmp_path / name / path.name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module(f"{name}.implication")


@pytest.mark.sweep
@pytest.mark.parametrize(
    "mutant",
    [pytest.param(n, marks=pytest.mark.long if i % 3 else ()) for i, n in enumerate(MUTATIONS)],
    indirect=True,
)
def test_a_mutation_is_caught(mutant: ModuleType) -> None:
    """z3 refutes an answer of each prover that was made unsound."""
    found = [*BY_HAND, *pairs(len(KINDS) * 100, SEED + 2)]
    assert any(compare(one, answered_only=True, prover=mutant).refuted for one in found)
