"""Carrying the state of a ``ShapeEnv`` of many symbols, beside ``copy.deepcopy`` of it.

Run: ``python -m benchmarks.bench_shape_env [--rounds N]``. The bytes of a snapshot
are beside those of a pickle.
"""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

from torch._dynamo.source import LocalSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

import torch_fakeify as tfk

from .run import main
from .table import Figure, Row, compare, timed

if TYPE_CHECKING:
    from collections.abc import Iterator

SYMBOLS = 1000


def make_env(count: int) -> ShapeEnv:
    """A ``ShapeEnv`` with that many symbols; every tenth has a guard."""
    env = ShapeEnv()
    for i in range(count):
        source = LocalSource(f"n{i}")
        expr = env.create_symbol(i + 10, source, dynamic_dim=DimDynamic.DYNAMIC)
        n: Any = env.create_symintnode(expr, hint=i + 10, source=source)
        if i % 10 == 0:
            assert n > 5
    return env


def rows(rounds: int, symbols: int = SYMBOLS) -> Iterator[Row]:
    """Every line of the table."""
    env = make_env(symbols)
    desc = tfk.snapshot(env)
    what = f"ShapeEnv of {symbols} symbols"
    yield compare(
        f"{what}: copy",
        lambda: timed(lambda _: copy.deepcopy(env)),
        lambda: timed(lambda _: tfk.restore(tfk.snapshot(env))),
        rounds=rounds,
        unit="ms",
    )
    yield compare(
        f"{what}: write",
        lambda: timed(lambda _: pickle.dumps(vars(env))),
        lambda: timed(lambda _: tfk.dumps(tfk.snapshot(env))),
        rounds=rounds,
        unit="ms",
    )
    theirs, ours = pickle.dumps(vars(env)), tfk.dumps(desc)
    yield compare(
        f"{what}: load",
        lambda: timed(lambda _: pickle.loads(theirs)),  # noqa: S301 - its own bytes
        lambda: timed(lambda _: tfk.restore(tfk.loads(ours))),
        rounds=rounds,
        unit="ms",
    )
    yield Row(f"{what}: size", "KB", Figure((len(theirs) / 1024,)), Figure((len(ours) / 1024,)))


if __name__ == "__main__":
    main(__doc__, rows)
