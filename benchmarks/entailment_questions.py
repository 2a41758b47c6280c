"""How long single questions to the prover take: median, 99 of 100, the slowest.

Run: ``python -m benchmarks.entailment_questions [--pairs N] [--seed N]``; it needs a checkout: programs
and random pairs are those of the tests. A question is asked in both directions, as `tfk.entails`
does, of facts that are indexed. The time is the CPU time of the thread; a question that takes more than
10 ms is asked twice more, and the least counts, as a collection of garbage may fall into one.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch

from torch_fakeify.discharge import installing
from torch_fakeify.discharge.known_facts import knowledge_of
from torch_fakeify.prover.implication import FactIndex, WorkCounter

from .bench_entailment import FACTS, questions
from .checkout import import_from_tests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SLOW = 0.010
"""Seconds of a question that is asked again."""


class Asked(NamedTuple):
    """A question."""

    seconds: float
    condition: str


def least(prepare: Callable[[], Callable[[], Any]]) -> float:
    """Return the CPU seconds of a question, which is prepared anew each time."""
    times: list[float] = []
    while not times or (min(times) > SLOW and len(times) < 3):
        ask = prepare()
        start = time.thread_time()
        ask()
        times.append(time.thread_time() - start)
    return min(times)


def of_programs() -> Iterator[Asked]:
    """The questions that torch asks when it compiles the programs whose sizes come from data."""
    from data_dependent import PROGRAMS
    from data_dependent_runs import verdict

    found: list[Asked] = []
    answer = installing._answer

    def timed(env: Any, expr: Any) -> Any:
        def forgotten() -> Callable[[], Any]:
            knowledge_of(env).forget_answers()
            return lambda: answer(env, expr)

        found.append(Asked(least(forgotten), str(expr)))
        return answer(env, expr)

    with mock.patch.object(installing, "_answer", timed):
        for program in PROGRAMS.values():
            verdict(program, entailment=True)
    yield from found


def of_pairs(count: int, seed: int) -> Iterator[Asked]:
    """Random facts and conditions of each kind."""
    from entailment_z3 import pairs

    for pair in pairs(count, seed):

        def indexed(facts: Any = pair.facts, condition: Any = pair.condition) -> Callable[[], Any]:
            index = FactIndex(facts, WorkCounter())

            def ask() -> None:
                for negated in (False, True):
                    index.implies(index.table.condition(condition, negated), without=None)

            return ask

        facts = ", ".join(map(str, pair.facts))
        yield Asked(least(indexed), f"{pair.kind}: {pair.condition}, from {facts}")


def of_many_facts(count: int, seed: int) -> Iterator[Asked]:
    """Conditions at 300 facts."""
    rng = Random(seed)
    done = 0
    while done < count:
        env, asked = questions(rng.randrange(10**6))
        knowledge = knowledge_of(env)
        knowledge.answer(env, asked[0])
        for condition in asked:

            def forgotten(known: Any = knowledge, env: Any = env, asked: Any = condition) -> Any:
                known.forget_answers()
                return lambda: known.answer(env, asked)

            yield Asked(least(forgotten), str(condition))
            done += 1


def main() -> None:
    """Print a line for each kind of questions, and the slowest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=13_000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    import_from_tests()
    print(f"{'questions':<28} {'number':>8} {'median':>9} {'99 %':>9} {'slowest':>9}")
    for name, kind in (
        ("of the programs", of_programs()),
        ("random pairs", of_pairs(args.pairs, args.seed)),
        (f"random, at {FACTS} facts", of_many_facts(args.pairs // 10, args.seed)),
    ):
        gc.collect()
        found = sorted(kind)
        times = [one.seconds * 1e3 for one in found]
        cells = (statistics.median(times), times[len(times) * 99 // 100], times[-1])
        numbers = " ".join(f"{f'{cell:.2f} ms':>9}" for cell in cells)
        print(
            f"{name:<28} {len(times):>8} {numbers}\n  slowest: {found[-1].condition[:300]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
