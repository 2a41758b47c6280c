"""Compare the prover with z3 on random facts and conditions.

Soundness: what the prover answers must not have a counterexample by z3. Completeness: of what z3
proves, how much the prover answers.

    python tests/harness/entailment_z3.py --pairs 20000 --seed 0
    python tests/harness/entailment_z3.py --pairs 200000 --answered   # z3 checks answers alone
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import sympy
import z3
from entailment_pairs import KINDS, Pair, pair
from guard_z3 import Z3Terms

from torch_fakeify.prover import implication

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SECONDS = 2.0
"""How long z3 may think about one question."""


class Outcome(NamedTuple):
    """What the prover and z3 say of one pair."""

    pair: Pair
    answer: bool | None
    """The prover's: the condition follows, its negation follows, or neither is known."""
    proved: bool | None
    """z3's; ``None`` also if the facts contradict each other."""
    refuted: bool
    """Whether z3 has a counterexample to the prover's answer."""
    seconds: float
    """The CPU time of the prover."""


def answer_of(facts: Sequence[Any], condition: Any, prover: Any = implication) -> bool | None:
    """Return the answer of the prover, as `tfk.entails` has it.

    Args:
        facts: the facts.
        condition: the condition.
        prover: the module ``implication``, or a mutation of it.
    """
    index = prover.FactIndex(facts, prover.WorkCounter())
    for negated in (False, True):
        wanted = index.table.condition(condition, negated)
        if index.implies_by_bounds(wanted) or index.implies(wanted, without=None):
            return not negated
    return None


def verdict(facts: Iterable[Any], condition: Any, seconds: float = SECONDS) -> Any:
    """Return z3's verdict on facts without a condition: ``unsat`` if the condition follows.

    The condition is only asked where it is defined: no division by zero.
    """
    terms = Z3Terms()
    solver = z3.Solver()
    solver.set("timeout", int(seconds * 1000))
    for fact in facts:
        solver.add(terms.fact(fact))
    for symbol in condition.free_symbols.union(*(fact.free_symbols for fact in facts)):
        if symbol.is_positive:  # what sympy may have used
            solver.add(terms.var(symbol) >= 1)
    solver.add(terms.fact(sympy.Not(condition)))
    return solver.check()


def compare(
    asked: Pair, *, answered_only: bool = False, seconds: float = SECONDS, prover: Any = implication
) -> Outcome:
    """Ask the prover and z3 about a pair.

    Args:
        asked: the pair.
        answered_only: ask z3 only where the prover has an answer.
        seconds: how long z3 may think about one question.
        prover: the module ``implication``, or a mutation of it.
    """
    gc.disable()  # z3 and sympy leave much to collect
    start = time.process_time()
    answer = answer_of(asked.facts, asked.condition, prover)
    spent = time.process_time() - start
    gc.enable()
    negated = sympy.Not(asked.condition)
    if answer is not None:
        claim = asked.condition if answer else negated
        found = verdict(asked.facts, claim, seconds)
        is_proved = found == z3.unsat and (answered_only or not _contradict(asked.facts, seconds))
        return Outcome(asked, answer, answer if is_proved else None, found == z3.sat, spent)
    proved: bool | None = None
    if not answered_only and not _contradict(asked.facts, seconds):
        if verdict(asked.facts, asked.condition, seconds) == z3.unsat:
            proved = True
        elif verdict(asked.facts, negated, seconds) == z3.unsat:
            proved = False
    return Outcome(asked, answer, proved, False, spent)


def _contradict(facts: Iterable[Any], seconds: float) -> bool:
    return verdict(facts, sympy.false, seconds) == z3.unsat


def pairs(count: int, seed: int, kinds: Sequence[str] = tuple(KINDS)) -> Iterable[Pair]:
    """Make pairs, of each kind in turn."""
    rng = Random(seed)
    for at in range(count):
        yield pair(rng, kinds[at % len(kinds)])


def main() -> int:
    """Print a table by kind; the exit status is 1 if an answer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=1000, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", choices=list(KINDS))
    parser.add_argument("--answered", action="store_true", help="ask z3 about answers alone")
    parser.add_argument("--misses", type=int, default=0, help="print so many that only z3 proves")
    options = parser.parse_args()
    asked, answered, proved, both, wrong = (Counter[str]() for _ in range(5))
    slowest = (0.0, None)
    times: list[float] = []
    shown = 0
    for one in pairs(options.pairs, options.seed, options.kind or tuple(KINDS)):
        found = compare(one, answered_only=options.answered)
        asked[one.kind] += 1
        answered[one.kind] += found.answer is not None
        proved[one.kind] += found.proved is not None
        both[one.kind] += found.proved is not None and found.answer is not None
        times.append(found.seconds)
        slowest = max(slowest, (found.seconds, one), key=lambda pair: pair[0])
        if found.refuted:
            wrong[one.kind] += 1
            print(f"WRONG: {found.answer} for {one.condition} from {list(one.facts)}")
        if found.proved is not None and found.answer is None and shown < options.misses:
            shown += 1
            print(f"missed: {one.kind}: {found.proved} for {one.condition} from {list(one.facts)}")
    print(f"{'kind':<16}{'pairs':>8}{'answered':>10}{'z3 proves':>11}{'of these':>10}{'wrong':>7}")
    for kind in [*asked, "all"]:
        rows = [c.total() if kind == "all" else c[kind] for c in (asked, answered, proved, both)]
        share = f"{100 * rows[3] / rows[2]:.1f} %" if rows[2] else "-"
        bad = wrong.total() if kind == "all" else wrong[kind]
        print(f"{kind:<16}{rows[0]:>8}{rows[1]:>10}{rows[2]:>11}{share:>10}{bad:>7}")
    times.sort()
    print(
        f"prover: median {1000 * times[len(times) // 2]:.2f} ms, longest {1000 * times[-1]:.1f} ms"
    )
    print(f"longest: {slowest[1]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
