"""Laws 4 to 8 over random programs of shape arithmetic (`shape_programs`, `replay_checks`).

Plain pytest takes a few programs; ``pytest -m sweep tests/replay/test_guard_node_laws.py -s`` takes hundreds
and prints how many comparisons were proved.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import sympy
import torch
from fact_values import implied
from guard_equivalence import assert_equivalent
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from processes import python
from replay_checks import (
    Tally,
    check_code,
    check_fingerprint,
    check_insert,
    check_learn,
    check_minimal,
    check_retrace,
    check_run,
    check_values,
    insert,
)
from replay_frames import Frame, input_facts
from shape_programs import (
    Program,
    ScalarArg,
    TensorArg,
    branch,
    check,
    compiled,
    programs,
    variations,
)
from strategies import drawn
from torch._dynamo.source import LocalSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.functions import FloorDiv

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SHARDS = 10
PROGRAMS = 25

_CHECKS: tuple[Callable[[Frame, Tally], None], ...] = (
    check_insert,
    check_values,
    check_learn,
    check_code,
    check_minimal,
    check_fingerprint,
    check_retrace,
)


def check_program(program: Program, tally: Tally, *checks: Callable[[Frame, Tally], None]) -> None:
    """Compile a program and check each frame that the backend gets.

    Raises:
        AssertionError: a law does not hold.
    """
    args = {**{arg.name: arg.make() for arg in program.args}, "warm": False}

    def use(frame: Frame) -> None:
        tally["frames"] += 1
        for law in checks or _CHECKS:
            law(frame, tally)
        if not checks:
            check_run(frame, args, tally, list(variations(program, 8)))

    tally["programs"] += 1
    if not frames_of(program, use):
        tally["programs: not traced"] += 1


def frames_of(program: Program, use: Callable[[Frame], None]) -> bool:
    """Call a function with every frame of a program, while the backend has it.

    Returns:
        Whether torch traces the program.
    """
    failed: list[Exception] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        try:
            use(Frame.of(gm, inputs))
        except Exception as error:  # noqa: BLE001 - Dynamo would wrap it
            failed.append(error)
        return gm.forward

    try:
        compiled(program, backend)
        is_traced = True
    except Exception:  # noqa: BLE001
        is_traced = False
    if failed:
        raise failed[0]
    return is_traced


def run_programs(number: int, count: int) -> Tally:
    """Check that many random programs and return the tally."""
    tally = Tally()
    for program in drawn(programs(), number, count):
        check_program(program, tally)
    return tally


def test_laws_hold_for_random_programs() -> None:
    """Insert, learn, roll back, restore, capture and run: see the checks for the laws."""
    tally = run_programs(0, 8)
    assert tally["facts inserted"]
    assert tally["values compared"]
    assert not tally["programs: not traced"]


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "shard", [0, *(pytest.param(i, marks=pytest.mark.long) for i in range(1, SHARDS))]
)
def test_laws_hold_for_many_random_programs(
    shard: int, record_property: Callable[[str, object], None]
) -> None:
    """Of hundreds of programs few have conditions left that z3 derives from the others."""
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
    """An input that is made after its size became a number still has its strides and offset."""
    x, i = TensorArg("x", (1,), "offset"), TensorArg("i", (2,), "plain", (1, 5))
    program = Program((x, i), (check("x.storage_offset() == 2"),), ("x + 1", "i + 1", "n"))
    check_program(program, Tally(), check_insert, check_learn)


def test_inserting_does_not_change_how_axioms_are_simplified() -> None:
    """A question about whether a guard is known does not change torch's later answers."""
    x, y = TensorArg("x", (12,)), TensorArg("y", (12, 1, 1))
    i, a = TensorArg("i", (2,), "plain", (12, 1)), ScalarArg("a", 2)
    one = "(y.storage_offset() + 4) * y.shape[2] != max(y.stride(2) % y.size(1), x.shape[0])"
    two = "y.size(0) - (x.shape[0] // 3) != x.stride(0) // y.size(2)"
    lines = (
        check("x.numel() * x.storage_offset() <= y.shape[0] * 6 + 2"),
        branch(f"{one} or {two}", "n + x.numel() % 4", "n"),
        branch("(y.shape[1] // 4) - (a - 5) < a + 8", "n", "n - 1"),
    )
    result = ("x + 1", "y + 1", "i + 1", "n")
    program = Program((x, y, i, a), lines, result, "mark", (("i", 0), ("y", 0)))
    check_program(program, Tally(), check_insert)


def test_a_quotient_by_a_contradictory_divisor_is_no_error() -> None:
    """Bounds of a divisor that exclude one another are a contradiction."""
    a, b = sympy.symbols("a b", integer=True)
    quotient = sympy.Le(FloorDiv(a, b, evaluate=False), 3, evaluate=False)
    facts = [a >= 1, b >= 1, b <= 0, quotient]
    assert implied(facts, sympy.Ge(FloorDiv(a, b, evaluate=False), 7, evaluate=False))


def test_learning_does_not_change_stacks() -> None:
    """Symbols and runtime asserts have the stacks of their origin."""
    y = TensorArg("y", (12, 3))
    program = Program((y,), (check("y.size(0) <= 16"),), ("y + 1",), "unbacked", (("y", 0),))
    check_program(program, Tally(), check_learn)


# --- other processes, other names, contradictions ----------------------------------------------------


def record_frames(programs_: list[Program], directory: Path) -> list[str]:
    """Save a capture with guard nodes of each frame that has guards."""
    paths: list[str] = []

    def save(frame: Frame) -> None:
        if not frame.env.guards:
            return
        insert(frame)
        path = directory / f"{len(paths)}.fkf"
        tfk.capture(frame.gm, frame.example_inputs).save(path)
        paths.append(str(path))

    for program in programs_:
        assert frames_of(program, save)
    return paths


@pytest.mark.sweep
@pytest.mark.parametrize("count", [4, pytest.param(20, marks=pytest.mark.long)])
def test_another_process_learns_the_facts(count: int, tmp_path: Path) -> None:
    """Law 5 across processes: the reader has captures with guard nodes and nothing else."""
    paths = record_frames(drawn(programs(), 20, count), tmp_path)
    assert paths
    found = json.loads(python("program_replay.py", "learned", *paths))
    assert found == {path: [] for path in paths}


@pytest.mark.parametrize("count", [2, pytest.param(30, marks=pytest.mark.sweep)])
def test_names_of_symbols_do_not_change_the_fingerprint(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 6: a frame with guard nodes has one fingerprint for any names of its symbols."""
    prints: list[list[str]] = []
    own = ShapeEnv._generate_unique_id
    chosen = drawn(programs(), 30, count)
    for offset in (0, 1000):
        found: list[str] = []

        def take(frame: Frame, found: list[str] = found) -> None:
            insert(frame)
            found.append(tfk.capture(frame.gm, frame.example_inputs).fingerprint())

        with monkeypatch.context() as patch:
            patch.setattr(
                ShapeEnv, "_generate_unique_id", lambda env, name, o=offset: own(env, name) + o
            )
            for program in chosen:
                assert frames_of(program, take)
        prints.append(found)
    assert prints[0] == prints[1]
    assert prints[0]


class Numbers:
    """Integer inputs of a graph, symbols of a ``ShapeEnv``, and facts about them."""

    def __init__(self, count: int) -> None:
        self.graph = torch.fx.Graph()
        self.gm = torch.fx.GraphModule(torch.nn.Module(), self.graph)
        self.names = [f"n{i}" for i in range(count)]
        self.nodes = [self.graph.placeholder(name) for name in self.names]
        self.graph.output(())
        self.env, self.values = self.fresh()
        for fx_node, value in zip(self.nodes, self.values, strict=True):
            fx_node.meta["example_value"] = value

    def fresh(self, first: int = 50) -> tuple[ShapeEnv, list[Any]]:
        """Return a new environment with such inputs and without facts about them."""
        env = ShapeEnv(duck_shape=False)
        make = env.create_unspecified_symint_and_symbol
        return env, [
            make(first + i, LocalSource(name), DimDynamic.DYNAMIC)
            for i, name in enumerate(self.names)
        ]


@pytest.mark.parametrize(
    ("guards", "symbols"), [(100, 30), pytest.param(1000, 300, marks=pytest.mark.sweep)]
)
def test_many_guards_over_many_symbols(guards: int, symbols: int) -> None:
    """A fresh environment gets all of them, and nothing else."""
    numbers = Numbers(symbols)
    n = numbers.values
    for i in range(guards):
        turn = i // symbols
        a, b = n[i % symbols], n[(i + 1 + turn) % symbols]
        bool(2 * a + 3 * b < 400 + i if i % 2 else a - b + i > -400)
    assert len(numbers.env.guards) == guards
    done = tfk.insert_guards(numbers.gm, numbers.env)
    assert len(done.inserted) + len(done.implied) == guards
    env, values = numbers.fresh()
    assert tfk.learn(numbers.gm, values) == len(done.inserted)
    original, _ = input_facts(numbers.env, numbers.names, numbers.values)
    transferred, _ = input_facts(env, numbers.names, values)
    assert assert_equivalent(original, transferred).how == "proved"


@settings(max_examples=10, deadline=None, phases=(Phase.generate,))
@given(st.data())
def test_an_injected_contradiction_is_reported(data: st.DataObject) -> None:
    """The error contains two facts that exclude one another, among any other facts."""
    numbers = Numbers(4)
    n = numbers.values
    for _ in range(data.draw(st.integers(0, 5))):
        a, b = data.draw(st.permutations(n))[:2]
        k, m = data.draw(st.integers(1, 5)), data.draw(st.integers(150, 400))
        bool(a + k * b > -m)
    i, j = data.draw(st.permutations(range(4)))[:2]
    k = data.draw(st.integers(2, 4))
    limit = data.draw(st.integers(600, 900))
    bool(n[i] + k * n[j] < limit)
    inserted = tfk.insert_guards(numbers.gm, numbers.env).inserted
    env, values = numbers.fresh(first=1000)
    bool(values[i] + k * values[j] > limit + data.draw(st.integers(0, 50)))
    known = str(env.guards[0].expr)
    (violated,) = [text for text in inserted if text.endswith(f"< {limit}")]
    with pytest.raises(tfk.ShapeEnvError) as caught:
        tfk.learn(numbers.gm, values)
    assert str(caught.value) == (
        f"{violated}: two facts contradict one another"
        f"; expected {violated}, which the graph assumes"
        f"; found {known}, which the ShapeEnv knows"
        ". Make the inputs of the frame that the graph was traced for"
    )
