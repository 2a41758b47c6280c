"""Questions to the prover, and compiling real architectures with `tfk.entailment` beside without it.

Run: ``python -m benchmarks.bench_entailment [--rounds N]``; the models need the ``models`` extra, and a
checkout. The first line has a question at 300 facts beside torch's own method for it, which looks a
condition up among the axioms and computes ranges. The line of a model is the CPU time of compiling it
anew for inputs of three sizes, without and with entailment.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from sympy.core.cache import clear_cache
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torch_fakeify as tfk

from .checkout import import_from_tests
from .run import main
from .table import Figure, Row, at_most, compare, figures, timed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MODELS = ("llama", "bert", "vit", "resnet")
FACTS = 300
QUESTIONS = 100
BUDGET = at_most(1.01)
"""Compile time with entailment by that without."""


def questions(seed: int) -> tuple[ShapeEnv, list[Any]]:
    """Return an environment with many facts about unbacked symbols, and open and provable conditions.

    Args:
        seed: of the random numbers.
    """
    rng, env = Random(seed), ShapeEnv()
    symbols = [env.create_unbacked_symint().node.expr for _ in range(FACTS // 3)]
    while env.num_deferred_runtime_asserts < FACTS:
        at = rng.randrange(len(symbols) - 4)
        a, b = symbols[at], symbols[at + rng.randint(1, 4)]
        fact = rng.choice([a <= b, a + rng.randint(0, 3) <= b, 2 * a <= b + rng.randint(0, 9)])
        env.guard_or_defer_runtime_assert(fact, "")
    asked: list[Any] = []
    for _ in range(QUESTIONS):
        at = rng.randrange(len(symbols) - 4)
        a, b = symbols[at], symbols[at + rng.randint(1, 4)]
        asked.append(rng.choice([a <= b + 1, 2 * a <= 2 * b + 5, b < a, a + 7 <= b]))
    return env, asked


def _ask_torch(pair: tuple[ShapeEnv, Sequence[Any]]) -> float:
    env, asked = pair
    env._maybe_evaluate_static.cache_clear()
    return timed(env._maybe_evaluate_static, asked)


def _ask_prover(pair: tuple[ShapeEnv, Sequence[Any]]) -> float:
    from torch_fakeify.discharge.known_facts import knowledge_of

    env, asked = pair
    knowledge_of(env).forget_answers()
    return timed(lambda condition: tfk.entails(env, condition), asked)


def _compile(name: str, *, entailment: bool) -> float:
    """The CPU seconds of compiling a model."""
    import model_zoo
    from compiled_programs import Model
    from observe import observed

    torch._dynamo.reset()
    clear_cache()
    gc.collect()
    program = Model(model=model_zoo.MODELS[name], training=False)
    with tfk.entailment() if entailment else nullcontext():
        return timed(lambda _: observed(program, "aot_eager", direct=True, record=False))


def rows(rounds: int) -> Iterator[Row]:
    """Every line of the table."""
    pair = questions(0)
    tfk.entails(*pair[:1], pair[1][0])  # the facts are indexed once
    yield compare(
        f"a question at {FACTS} facts",
        lambda: _ask_torch(pair),
        lambda: _ask_prover(pair),
        rounds=rounds,
        count=QUESTIONS,
    )
    import_from_tests()
    theirs, ours = [0.0] * rounds, [0.0] * rounds
    for name in MODELS:
        pairs = figures(
            lambda name=name: _compile(name, entailment=False),
            lambda name=name: _compile(name, entailment=True),
            rounds=rounds,
        )
        for sums, figure in zip((theirs, ours), pairs, strict=True):
            for number, value in enumerate(figure.values[:rounds]):
                sums[number] += value
        yield Row(f"compile {name}: without, with entailment", "s", *pairs)
    yield Row(
        f"compile {len(MODELS)} models: without, with entailment",
        "s",
        Figure(tuple(theirs)),
        Figure(tuple(ours)),
        BUDGET,
    )


if __name__ == "__main__":
    main(__doc__, rows)
