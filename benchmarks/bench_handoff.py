"""Compiling real architectures through ``handoff``, beside the same backend without it.

Run: ``python -m benchmarks.bench_handoff [--backend aot_eager|inductor] [--inference] [--rounds N]
[MODEL...]``; it needs the ``models`` extra, and a checkout: the models are those of the tests. They
are small, with one layer of each kind: the part of the handoff's own code is larger, not smaller, than
of a large one, where the backends compare and rewrite more.

A run compiles a model anew and calls it with inputs of three sizes, with a backward pass unless
``--inference`` is set. The second size makes Dynamo compile again with symbols. What a run costs is
the CPU time of these calls, of this process and the compilers it starts; in other words, without what
else the machine does meanwhile. Before each run Dynamo, inductor's caches and sympy's are emptied and
garbage is collected. Both ways take turns, and each round the other one begins. The time of a model is
the least of its rounds, as all else on the machine only adds to it; the line of the table has the ratio
of each model, and is met by their median. There inductor compiles without a backward pass. The line
below it adds to the direct time the time of the handoff's own code alone.

Beside the time of a model stand its graphs, the guards and runtime asserts in Dynamo's environments
and its recompiles, and how much of the compile time the handoff's own code takes: the time in it,
less the time in the backend that it calls.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import warnings
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sympy.core.cache import clear_cache

from .checkout import import_from_tests
from .table import Figure, Row, at_most

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SOME = ("llama", "bert", "t5", "vit", "resnet", "wav2vec2", "unet", "dit")
"""The models of the table: one of each kind."""

BUDGET = at_most(1.02)


class Compared(NamedTuple):
    """One model, compiled directly and through the handoff."""

    model: str
    direct: Any
    """The first of its runs."""
    ours: Any
    direct_seconds: Figure
    our_seconds: Figure
    ratio: float
    """The handoff's least time by the direct one's."""
    own: Figure
    """The time of the handoff's own code as a part of the direct run's, of each round."""


def compare(
    names: Sequence[str], backend: str, rounds: int, *, training: bool = True
) -> Iterator[Compared]:
    """Measure models, one after the other.

    Args:
        names: which.
        backend: that compiles.
        rounds: how often each way; one more round of the first model warms up and is not counted.
        training: with a backward pass.
    """
    import_from_tests()
    from compiled_programs import Model
    from model_zoo import MODELS
    from observe import observed

    for i, name in enumerate(names):
        found: dict[bool, list[Any]] = {False: [], True: []}
        for number in range(1 if i else 0, rounds + 1):
            for handoff in (False, True) if number % 2 else (True, False):
                with _cold(backend):
                    program = Model(model=MODELS[name], training=training)
                    one = observed(program, backend, direct=not handoff, record=False)
                if number:
                    found[handoff].append(one)
        pairs = list(zip(found[False], found[True], strict=True))
        yield Compared(
            name,
            *(found[handoff][0] for handoff in (False, True)),
            *(Figure(tuple(one.seconds for one in found[handoff])) for handoff in (False, True)),
            min(b.seconds for b in found[True]) / min(a.seconds for a in found[False]),
            Figure(tuple((b.in_backend - b.in_inner) / a.seconds for a, b in pairs)),
        )


def rows(rounds: int) -> Iterator[Row]:
    """Every line of the table: for each backend the times of the models."""
    for backend in ("aot_eager", "inductor"):
        # A run of inductor takes half a minute, and a minute with a backward pass.
        eager = backend == "aot_eager"
        found = list(compare(SOME, backend, min(rounds, 2) if eager else 1, training=eager))
        direct = tuple(min(one.direct_seconds.values) for one in found)
        ours = tuple(min(one.our_seconds.values) for one in found)
        own = tuple(a * (1 + one.own.median) for a, one in zip(direct, found, strict=True))
        work = f"compile {len(SOME)} models, {backend}"
        yield Row(work, "s", Figure(direct), Figure(ours), BUDGET)
        yield Row(f"{work}: with its own code alone", "s", Figure(direct), Figure(own), BUDGET)


def _cold(backend: str) -> ExitStack:
    """Empty caches, and no compilers in background processes."""
    stack = ExitStack()
    if backend == "inductor":
        from torch._inductor import config
        from torch._inductor.utils import fresh_cache

        stack.enter_context(fresh_cache())
        stack.enter_context(config.patch(compile_threads=1))
    clear_cache()
    gc.collect()
    return stack


def print_table(rows: Iterator[Compared]) -> None:
    """Print the table, a line as soon as it is there, and the medians over the models."""
    pair = f"{'direct':>7}{'handoff':>8}"
    counts = ("graphs", "guards", "asserts", "recompiles")
    print(f"{'':<16}" + "".join(f"{what:>15}" for what in counts) + f"{'compile time':>34}")
    times = f"{'direct':>14}{'handoff':>14}{'ratio':>8}{'own':>7}"
    print(f"{'model':<16}" + pair * len(counts) + times, flush=True)
    ratios: list[float] = []
    owns: list[float] = []
    for row in rows:
        ratios.append(row.ratio)
        owns.append(row.own.median)
        print(_line(row), flush=True)
    print(f"median ratio {statistics.median(ratios):.3f}, own {statistics.median(owns):.1%}")


def _line(row: Compared) -> str:
    both = (row.direct, row.ours)
    numbers = "".join(
        f"{a:>7}{b:>8}"
        for a, b in (
            [len(one.envs) for one in both],
            [sum(len(env.guards) for env in one.envs) for one in both],
            [sum(map(len, one.asserts)) for one in both],
            [one.recompiles for one in both],
        )
    )
    seconds = "".join(
        f"{f'{min(figure.values):.2f} s ±{figure.spread:.0%}':>14}"
        for figure in (row.direct_seconds, row.our_seconds)
    )
    return f"{row.model:<16}{numbers}{seconds}{row.ratio:>8.3f}{row.own.median:>7.1%}"


def main() -> None:
    """Print the table of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=SOME, help="default: %(default)s")
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--inference", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print_table(compare(args.models, args.backend, args.rounds, training=not args.inference))


if __name__ == "__main__":
    main()
