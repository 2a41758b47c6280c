"""``checkpoint`` and ``rollback`` of a ``ShapeEnv``, beside ``copy.deepcopy`` of it.

Run: ``python -m benchmarks.bench_checkpoint [--symbols N] [--rounds N]``. Torch has nothing but the
copy: it is taken before the guards, and whoever gives them up goes on with it.
"""

from __future__ import annotations

import argparse
import copy
import time
from typing import TYPE_CHECKING, Any

import torch_fakeify as tfk

from .bench_shape_env import make_env
from .table import Row, compare, print_rows, timed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.fx.experimental.symbolic_shapes import ShapeEnv

SIZES = (100, 1000, 10_000)
GUARDS = 10
REPEATS = 10


def rows(rounds: int, sizes: tuple[int, ...] = SIZES) -> Iterator[Row]:
    """Every line of the table."""
    for symbols in sizes:
        env = make_env(symbols)
        what = f"ShapeEnv of {symbols} symbols"
        straight = compare(
            f"{what}: back",
            lambda env=env: timed(lambda _: copy.deepcopy(env)),
            lambda env=env: rolled_back(env, lambda: None),
            rounds=rounds,
            unit="us",
        )
        yield straight
        add = guards(env)
        guarded = compare(
            f"{what}: {GUARDS} guards, back",
            lambda: 0.0,
            lambda env=env, add=add: rolled_back(env, add),
            rounds=rounds,
            unit="us",
        )
        yield guarded._replace(theirs=straight.theirs)  # a copy is taken before the guards


def guards(env: ShapeEnv) -> Callable[[], None]:
    """Adds some guards; the symbols are chosen outside of the clock."""
    known: Any = env
    symbols = list(known.var_to_range)[1 : GUARDS + 1]
    sizes = [known.create_symintnode(symbol, hint=None) for symbol in symbols]

    def add() -> None:
        for size in sizes:
            assert size > 4

    return add


def rolled_back(env: ShapeEnv, work: Callable[[], None]) -> float:
    """Seconds for a checkpoint and for the rollback; the work between is not counted."""
    seconds = 0.0
    for _ in range(REPEATS):
        start = time.perf_counter()
        point = tfk.checkpoint(env)
        seconds += time.perf_counter() - start
        work()
        start = time.perf_counter()
        point.rollback()
        del point
        seconds += time.perf_counter() - start
    return seconds / REPEATS


def main() -> None:
    """Print the table of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--symbols", type=int, nargs="+", default=SIZES)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print_rows(rows(args.rounds, tuple(args.symbols)))


if __name__ == "__main__":
    main()
