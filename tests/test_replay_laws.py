"""Laws 4 to 8 over random programs of shape arithmetic (`shape_programs`, `replay_checks`).

Plain pytest takes a few programs; ``pytest -m sweep tests/test_replay_laws.py -s`` takes hundreds
and says how many comparisons were proved.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from replay_checks import (
    Frame,
    Tally,
    check_code,
    check_fingerprint,
    check_insert,
    check_learn,
    check_minimal,
    check_retrace,
    check_run,
)
from shape_programs import (
    Branch,
    Check,
    Program,
    ScalarArg,
    TensorArg,
    compiled,
    programs,
    variations,
)

if TYPE_CHECKING:
    from collections.abc import Callable

SHARDS = 8
PROGRAMS = 50

_CHECKS: tuple[Callable[[Frame, Tally], None], ...] = (
    check_insert,
    check_learn,
    check_code,
    check_minimal,
    check_fingerprint,
    check_retrace,
)


def check_program(program: Program, tally: Tally, *checks: Callable[[Frame, Tally], None]) -> None:
    """Compile a program and check each frame that the backend sees.

    Raises:
        AssertionError: a law does not hold.
    """
    failed: list[Exception] = []
    args = {**{arg.name: arg.make() for arg in program.args}, "warm": False}

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        frame = Frame.of(gm, inputs)
        tally["frames"] += 1
        try:
            for check in checks or _CHECKS:
                check(frame, tally)
            if not checks:
                check_run(frame, args, tally, list(variations(program, 8)))
        except Exception as error:  # noqa: BLE001 - Dynamo would wrap it
            failed.append(error)
        return gm.forward

    tally["programs"] += 1
    try:
        compiled(program, backend)
    except Exception:  # noqa: BLE001 - not a program that torch traces
        tally["programs: not traced"] += 1
    if failed:
        raise failed[0]


def run_programs(number: int, count: int) -> Tally:
    """Check that many random programs; what was seen."""
    tally = Tally()

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def check(program: Program) -> None:
        check_program(program, tally)

    check()
    return tally


def test_laws_hold_for_random_programs() -> None:
    """Insert, learn, roll back, restore, capture and run: see the checks for the laws."""
    tally = run_programs(0, 8)
    assert tally["facts inserted"]
    assert not tally["programs: not traced"]


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_laws_hold_for_many_random_programs(
    shard: int, record_property: Callable[[str, object], None]
) -> None:
    """The same for hundreds; few conditions that z3 finds in the others are left."""
    tally = run_programs(1 + shard, PROGRAMS)
    sys.stdout.writelines(f"{what}: {count}\n" for what, count in sorted(tally.items()))
    sys.stdout.writelines(f"{note}\n" for note in tally.notes)
    for about in ("nodes", "carried", "fresh", "code", "from a capture"):
        proved, sampled = tally[f"{about}: proved"], tally[f"{about}: sampled"]
        name = f"guards of random programs, {about}, proved"
        record_property("sweep", (name, proved, proved + sampled, sampled))
    assert tally["programs: not traced"] < 0.3 * tally["programs"]
    found = sum(count for what, count in tally.items() if "z3 finds" in what)
    assert found < 0.02 * tally["facts inserted"]


# --- what random programs have found ----------------------------------------------------------------


def test_a_size_that_was_specialized_early_is_still_a_fact() -> None:
    """An input that is made after its size became a number keeps its strides and its offset."""
    x, i = TensorArg("x", (1,), "offset"), TensorArg("i", (2,), "plain", (1, 5))
    program = Program((x, i), (Check("x.storage_offset() == 2"),), ("x + 1", "i + 1", "n"))
    check_program(program, Tally(), check_insert, check_learn)


def test_inserting_leaves_the_axioms_to_be_simplified() -> None:
    """To ask torch whether a guard is known must not change what it answers later."""
    x, y = TensorArg("x", (12,)), TensorArg("y", (12, 1, 1))
    i, a = TensorArg("i", (2,), "plain", (12, 1)), ScalarArg("a", 2)
    one = "(y.storage_offset() + 4) * y.shape[2] != max(y.stride(2) % y.size(1), x.shape[0])"
    two = "y.size(0) - (x.shape[0] // 3) != x.stride(0) // y.size(2)"
    lines = (
        Check("x.numel() * x.storage_offset() <= y.shape[0] * 6 + 2"),
        Branch(f"{one} or {two}", "n + x.numel() % 4", "n"),
        Branch("(y.shape[1] // 4) - (a - 5) < a + 8", "n", "n - 1"),
    )
    result = ("x + 1", "y + 1", "i + 1", "n")
    program = Program((x, y, i, a), lines, result, "mark", (("i", 0), ("y", 0)))
    check_program(program, Tally(), check_insert)


def test_learning_keeps_the_stacks() -> None:
    """Symbols and runtime asserts still tell where they come from."""
    y = TensorArg("y", (12, 3))
    program = Program((y,), (Check("y.size(0) <= 16"),), ("y + 1",), "unbacked", (("y", 0),))
    check_program(program, Tally(), check_learn)
