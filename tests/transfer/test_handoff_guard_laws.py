"""Laws of the handoff: for any questions of a backend, Dynamo has the guards as without it.

Plain pytest takes a few examples; ``pytest -m sweep tests/transfer/test_handoff_guard_laws.py -s`` takes
hundreds and prints how they were compared.
"""

from __future__ import annotations

import operator
import random
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from guard_code import equivalent_code, evaluate_code
from handoff_runs import Asking, Faked, same
from hypothesis import strategies as st
from observe import Run
from shape_programs import Program, programs, tracing_config, variations
from strategies import drawn

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Callable

SHARDS = 2
PROGRAMS = 20
QUESTIONS = 60


def compare(direct: Run, ours: Run, tally: Counter[str]) -> None:
    """Check that both runs have installed the same guards, each time."""
    assert ours.count == direct.count
    assert len(ours.guards) == len(direct.guards)
    for a, b in zip(direct.guards, ours.guards, strict=True):
        if set(a) == set(b):
            tally["guards: word for word"] += 1
            continue
        verdict = equivalent_code(a, b)
        assert verdict, f"{verdict}\ndirect: {a}\nours: {b}"
        tally[f"guards: {verdict.how}"] += 1


# --- random questions -----------------------------------------------------------------------------

Term = Any
"""An atom's number, or an operator and two terms; a negative number is a constant."""

OPS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "%": operator.mod,
    "//": operator.floordiv,
}
RELATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">": operator.gt,
}
SOURCES = (
    "L['x'].size()[0]",
    "L['x'].size()[1]",
    "L['x'].stride()[0]",
    "L['x'].storage_offset()",
    "L['y'].size()[0]",
)


class Questions(NamedTuple):
    """Inputs of a frame, and conditions that a backend evaluates on them."""

    sizes: tuple[int, int, int, int, int]
    """Sizes of ``x``, its padding, its first row, the size of ``y``."""
    asked: tuple[tuple[str, Term, Term], ...]

    def inputs(self) -> list[torch.Tensor]:
        """Return a view that has symbolic sizes, a stride and an offset; and a vector."""
        rows, columns, padding, first, n = self.sizes
        x = torch.zeros(rows + first, columns + padding)[first:, :columns]
        y = torch.zeros(n)
        torch._dynamo.maybe_mark_dynamic(x, (0, 1))
        torch._dynamo.maybe_mark_dynamic(y, 0)
        return [x, y]

    def ask(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Evaluate them all."""
        atoms = [*x.size(), x.stride(0), x.storage_offset(), y.size(0)]
        for relation, left, right in self.asked:
            bool(RELATIONS[relation](value(left, atoms), value(right, atoms)))


def value(term: Term, atoms: list[Any]) -> Any:
    """Return the value of a term; a remainder or quotient is by a positive number."""
    if isinstance(term, int):
        return atoms[term] if term >= 0 else -term
    op, left, right = term
    return OPS[op](value(left, atoms), value(right, atoms))


@st.composite
def questions(draw: Any) -> Questions:
    """Draw up to five conditions."""
    n = st.integers(2, 12)
    sizes = draw(st.tuples(n, n, st.integers(0, 4), st.integers(0, 3), n))
    atom = st.sampled_from((0, 1, 2, 3, 4, 0, 1, 4))
    constant = st.integers(-9, -2)

    def term(depth: int) -> Any:
        if depth == 0:
            return atom
        inner = term(depth - 1)
        return st.one_of(
            atom,
            st.tuples(st.sampled_from("+-*"), inner, st.one_of(inner, constant)),
            st.tuples(st.sampled_from(("%", "//")), inner, st.one_of(constant, st.just(0))),
        )

    relation = st.sampled_from(tuple(RELATIONS))
    one = st.tuples(relation, term(2), st.one_of(term(1), constant))
    return Questions(sizes, tuple(draw(st.lists(one, min_size=1, max_size=5))))


def check_questions(asked: Questions, tally: Counter[str]) -> None:
    """Check that the guards are equal, and accept and refuse the same inputs."""
    runs: list[Run] = []
    for way in (Faked, tfk.handoff):
        run = Run.of(lambda x, y: (x + 1, y + 1), way(Asking(asked.ask)))
        run(*asked.inputs())
        runs.append(run)
    compare(*runs, tally)
    (direct,), (ours,) = (run.guards for run in runs)
    rng = random.Random(0)
    x, y = asked.inputs()
    now = [*x.size(), x.stride(0), x.storage_offset(), y.size(0)]
    for _ in range(30):
        other = [max(n + rng.choice((0, 0, 0, 1, -1, 2, 5, 12)), 0) for n in now]
        sample = dict(zip(SOURCES, other, strict=True))
        accepted = evaluate_code(direct, sample)
        assert evaluate_code(ours, sample) == accepted
        tally[f"samples: {'accepted' if accepted else 'refused'}"] += 1


def run_questions(number: int, count: int) -> Counter[str]:
    """Evaluate that many random sets of questions and return the tally."""
    tally: Counter[str] = Counter()
    for asked in drawn(questions(), number, count):
        check_questions(asked, tally)
    return tally


def test_random_questions_become_the_same_guards() -> None:
    """Sums, products, quotients and remainders of sizes, strides and offsets are evaluated."""
    tally = run_questions(0, 2)
    assert tally["samples: refused"]


@pytest.mark.sweep
def test_many_random_questions_become_the_same_guards(
    record_property: Callable[[str, object], None],
) -> None:
    """Hundreds of random sets of questions are compared."""
    tally = run_questions(1, QUESTIONS)
    report("random questions of a backend", tally, record_property)


# --- random programs ------------------------------------------------------------------------------


def run_program(program: Program, backend: Any) -> tuple[Run, list[Any], list[int]]:
    """Return the results of a program for several inputs, and the number of compilations."""
    results: list[Any] = []
    counts: list[int] = []
    with tracing_config():
        dynamic = True if program.policy == "dynamic" else None
        run = Run.of(program.function(), backend, dynamic=dynamic)
        if program.policy == "automatic":
            run(*program.other_inputs(), warm=True)
        names = [arg.name for arg in program.args]
        inputs = dict(zip(names, program.inputs(), strict=True))
        for args in (inputs, *variations(program, 4)):
            try:
                results.append(run(**args))
            except Exception as error:  # noqa: BLE001 - not a program that torch traces, or checks fail
                results.append(type(error).__name__)
            counts.append(run.count)
    return run, results, counts


def check_program(program: Program, tally: Counter[str]) -> None:
    """Check that results, guards and recompilations through AOTAutograd are equal."""
    direct, expected, when = run_program(program, "aot_eager")
    ours, results, then = run_program(program, tfk.handoff("aot_eager"))
    assert then == when
    for a, b in zip(results, expected, strict=True):
        same(a, b)
        tally["calls: errors" if isinstance(b, str) else "calls: results"] += 1
    compare(direct, ours, tally)


def run_programs(number: int, count: int) -> Counter[str]:
    """Check that many random programs and return the tally."""
    tally: Counter[str] = Counter()
    for program in drawn(programs(), number, count):
        check_program(program, tally)
    return tally


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "shard", [0, *(pytest.param(i, marks=pytest.mark.long) for i in range(1, SHARDS))]
)
def test_random_programs_are_guarded_the_same(
    shard: int, record_property: Callable[[str, object], None]
) -> None:
    """Branches, checks, views and data-dependent sizes are called with other sizes."""
    tally = run_programs(shard, PROGRAMS)
    report("guards of random programs, handed over", tally, record_property)
    assert tally["calls: errors"] < tally["calls: results"]


def report(name: str, tally: Counter[str], record_property: Callable[[str, object], None]) -> None:
    """Print the tally, and record it for the summary of the run."""
    sys.stdout.writelines(f"{what}: {count}\n" for what, count in sorted(tally.items()))
    total = sum(count for what, count in tally.items() if what.startswith("guards"))
    sampled = tally["guards: sampled"]
    record_property("sweep", (name, total - sampled, total, sampled))
