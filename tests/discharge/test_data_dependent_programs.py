"""The programs whose sizes come from data: compiled with right results where it is provable."""

from __future__ import annotations

import pytest
from data_dependent import PROGRAMS
from data_dependent.verdicts import VERDICTS
from data_dependent_runs import Verdict, table, verdict
from places import ROOT

FEW = ("common_multiple", "nonzero_is_at_most_all", "row_of_a_jagged_batch", "unknown_sum")
"""The programs that every run compiles."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FEW else [pytest.mark.sweep]) for n in PROGRAMS]
)
def test_a_program_has_its_verdict_with_entailment(name: str) -> None:
    """Right results for each input and the wrong one refused, or an error with a check."""
    _, state, check = VERDICTS[name]
    assert verdict(PROGRAMS[name], entailment=True) == Verdict(state, check)


@pytest.mark.sweep
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_has_its_verdict_with_torch_alone(name: str) -> None:
    """What torch compiles by itself, it compiles with right results."""
    assert verdict(PROGRAMS[name], entailment=False).state == VERDICTS[name][0]


@pytest.mark.sweep
@pytest.mark.long
@pytest.mark.parametrize("name", [n for n in PROGRAMS if VERDICTS[n][1] == "compiles"])
def test_inductor_gives_right_results(name: str) -> None:
    """The default backend relies on what was proved, and refuses the wrong input."""
    assert verdict(PROGRAMS[name], entailment=True, backend="inductor") == Verdict("compiles")


def test_no_provable_program_fails() -> None:
    """Those left open are the ones that are called unknown, each with a check; nothing that compiled fails."""
    assert VERDICTS.keys() == PROGRAMS.keys()
    for name, (alone, ours, check) in VERDICTS.items():
        assert alone in ("compiles", "open")
        assert ours == ("open" if name.startswith("unknown") else "compiles"), name
        assert bool(check) == (ours == "open")


def test_the_page_has_the_table() -> None:
    """docs/entailment.md has a row for each program."""
    page = (ROOT / "docs" / "entailment.md").read_text(encoding="utf-8")
    assert "\n".join(table(VERDICTS.items())) in page
