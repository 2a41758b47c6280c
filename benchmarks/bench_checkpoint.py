"""``checkpoint`` and ``rollback`` of a ``ShapeEnv``, beside ``copy.deepcopy`` of it.

Run: ``python -m benchmarks.bench_checkpoint [--rounds N]``. Torch offers only the
copy: it is taken before the guards, and replaces the environment to drop them.
"""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING, Any

import torch_fakeify as tfk

from .bench_shape_env import make_env
from .run import main
from .table import Figure, Row, at_least, compare, timed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.fx.experimental.symbolic_shapes import ShapeEnv

SIZES = (100, 1000, 10_000)
GUARDS = 10
REPEATS = 10
BUDGETS = {1000: at_least(50)}


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
            budget=BUDGETS.get(symbols),
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
        # A copy is taken before the guards.
        copied = straight.theirs
        assert isinstance(copied, Figure)
        yield guarded._replace(theirs=Figure((copied.median,) * len(guarded.ours.values)))


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
    """Seconds of CPU for a checkpoint and for the rollback; the work between is not counted."""
    seconds = 0.0
    for _ in range(REPEATS):
        start = time.process_time()
        point = tfk.checkpoint(env)
        seconds += time.process_time() - start
        work()
        start = time.process_time()
        point.rollback()
        del point
        seconds += time.process_time() - start
    return seconds / REPEATS


if __name__ == "__main__":
    main(__doc__, rows)
