"""The tensors that the benchmarks describe and rebuild."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from .table import Budget, Row, at_most, compare

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "COUNTS",
    "GROWTH",
    "KINDS",
    "bench",
    "context_of",
    "growth",
    "growth_alone",
    "make_tensors",
]

KINDS = ("parameter", "plain", "view")
COUNTS = (100, 1000, 10_000)
GROWTH = at_most(1.2)


def make_tensors(kind: str, count: int, *, distinct: bool = False) -> list[torch.Tensor]:
    """Two-dimensional tensors of equal sizes, or each of sizes of its own."""
    tensors: list[torch.Tensor] = []
    for i in range(count):
        size = (i + 2, count + i + 2) if distinct else (64, 32)
        t = torch.empty(size, device="meta") if distinct else torch.empty(size)
        if kind == "parameter":
            t = torch.nn.Parameter(t)
        elif kind == "view":
            t = t[1:]
        tensors.append(t)
    return tensors


def context_of(t: torch.Tensor, *, own: bool = False) -> Any:
    """Every dim dynamic, as by `dynamic=True`: equal sizes share a symbol, unless each has its own."""
    return StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DYNAMIC if own else DimDynamic.DUCK] * t.ndim,
        view_base_context=context_of(t._base, own=own) if t._is_view() else None,
    )


def bench(
    work: str,
    theirs: Callable[[], float],
    ours: Callable[[], float],
    *,
    rounds: int,
    count: int,
    budget: Budget | None = None,
    warm: bool = True,
) -> Row:
    """The line of a work on many tensors, per tensor.

    Few of them are handled several times a round, by us more often than by torch, which takes longer;
    ten thousand in fewer rounds.
    """

    def repeated(run: Callable[[], float], most: int) -> Callable[[], float]:
        repeats = max(1, most // count)
        return lambda: sum(run() for _ in range(repeats)) / repeats

    return compare(
        f"{work}, {count}",
        repeated(theirs, 300),
        repeated(ours, 2000),
        rounds=rounds if count < COUNTS[-1] else max(2, rounds // 2),
        warm=warm,
        count=count,
        budget=budget,
    )


def growth(work: str, run: Callable[[int], Callable[[], float]], rounds: int) -> Row:
    """What a tensor costs among many, beside what it costs among few.

    Args:
        work: what is done with them.
        run: makes that many tensors and returns what handles them and returns the seconds.
        rounds: how often; each handles the few as often as it takes to have a tenth of the many.
    """
    small, large = _of_few_and_many(run)
    what = f"{work}: of {COUNTS[0]}, of {COUNTS[-1]}"
    return compare(what, small, large, rounds=rounds, budget=GROWTH)


def growth_alone(work: str, run: Callable[[int], Callable[[], float]], rounds: int) -> Row:
    """The cost of a tensor among many against that among few, without a budget."""
    small, large = _of_few_and_many(run)
    what = f"{work}: of {COUNTS[-1]}, of {COUNTS[0]}"
    return compare(what, large, small, rounds=rounds)


def _of_few_and_many(
    run: Callable[[int], Callable[[], float]],
) -> tuple[Callable[[], float], Callable[[], float]]:
    few, many = COUNTS[0], COUNTS[-1]
    small, large = run(few), run(many)
    repeats = many // few // 10
    return (lambda: sum(small() for _ in range(repeats)) / repeats / few, lambda: large() / many)
