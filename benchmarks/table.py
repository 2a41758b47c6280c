"""Alternating measurement of two implementations of one work, and the table of results.

A budget is a lower bound of the speedup (torch's figure by ours), or an upper bound of the overhead
(ours by the other). Ratios are computed by round; the table has their median.
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = [
    "Budget",
    "Figure",
    "Row",
    "as_data",
    "at_least",
    "at_most",
    "compare",
    "figures",
    "print_rows",
    "timed",
]

_SECONDS = 15
"""How long a line is measured at least, unless it has three times its rounds before: what slows the
machine for a moment would spoil a few short ones."""

_SCALES = {"us": 1e6, "ms": 1e3, "s": 1.0}


class Figure(NamedTuple):
    """The measured values of one side, one a round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle of the rounds."""
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a part of the median."""
        if len(self.values) < 2 or not self.median:
            return 0.0
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return (high - low) / 2 / abs(self.median)


class Budget(NamedTuple):
    """What a ratio must be."""

    limit: float
    most: bool
    """Whether the limit is the most that it may be, of ours by theirs; else the least, of theirs by
    ours."""


def at_least(limit: float) -> Budget:
    """Theirs is at least that many times ours."""
    return Budget(limit, most=False)


def at_most(limit: float) -> Budget:
    """Ours is at most that many times theirs."""
    return Budget(limit, most=True)


class Row(NamedTuple):
    """One line of the table."""

    work: str
    unit: str
    """What both sides count: ``us``, ``ms``, ``s``, ``KB`` or ``MB``."""
    theirs: Figure | str
    """The figure of torch or another baseline; the name of its error if it failed."""
    ours: Figure
    budget: Budget | None = None

    @property
    def ratio(self) -> Figure | None:
        """Of each round, in the direction of the budget."""
        if isinstance(self.theirs, str):
            return None
        pairs = zip(self.theirs.values, self.ours.values, strict=True)
        if self.budget is not None and self.budget.most:
            return Figure(tuple(ours / theirs for theirs, ours in pairs))
        return Figure(tuple(theirs / ours for theirs, ours in pairs))

    @property
    def met(self) -> bool | None:
        """Whether the ratio is within the budget; ``None`` where there is none."""
        ratio = self.ratio
        if self.budget is None or ratio is None:
            return None
        if self.budget.most:
            return ratio.median <= self.budget.limit
        return ratio.median >= self.budget.limit


def figures(
    theirs: Callable[[], float],
    ours: Callable[[], float],
    *,
    rounds: int,
    seconds: float = 0.0,
    scale: float = 1.0,
    warm: bool = True,
) -> tuple[Figure, Figure]:
    """What two functions return, in turns; each round the other one begins.

    Garbage is collected before each and not during it.

    Args:
        theirs: does torch's own work and returns what it took.
        ours: the same for ours.
        rounds: how often each at least.
        seconds: how long there are more rounds, up to three times as many.
        scale: by which what they return is multiplied.
        warm: with one more round before, that is not counted.
    """
    values: tuple[list[float], list[float]] = ([], [])
    start, most = time.monotonic(), 3 * rounds + warm
    for number in range(most):
        if number >= rounds + warm and time.monotonic() - start >= seconds:
            break
        sides = list(zip((theirs, ours), values, strict=True))
        for run, sink in sides if number % 2 else reversed(sides):
            gc.collect()
            gc.disable()
            try:
                taken = run()
            finally:
                gc.enable()
            if number >= warm:
                sink.append(taken * scale)
    return Figure(tuple(values[0])), Figure(tuple(values[1]))


def compare(
    work: str,
    theirs: Callable[[], float],
    ours: Callable[[], float],
    *,
    rounds: int,
    unit: str = "us",
    count: int = 1,
    budget: Budget | None = None,
    warm: bool = True,
) -> Row:
    """A line of two functions that return seconds; see `figures`.

    Args:
        work: what they do.
        theirs: runs torch's own code and returns the seconds it took.
        ours: the same for ours.
        rounds: how often each at least; more often where that takes a short time.
        unit: ``us``, ``ms`` or ``s``.
        count: of the things that one run handles; the figures are for one of them.
        budget: that the ratio must be within.
        warm: with one more round before, that is not counted.
    """
    scale = _SCALES[unit] / count
    pair = figures(theirs, ours, rounds=rounds, seconds=_SECONDS, scale=scale, warm=warm)
    return Row(work, unit, *pair, budget)


def timed(work: Callable[[Any], Any], items: Sequence[Any] = (None,)) -> float:
    """Seconds of CPU for the work on every item, results stay alive meanwhile.

    It is the time of this process alone: what else runs on the machine adds little to it.
    """
    start = time.process_time()
    done = [work(item) for item in items]
    seconds = time.process_time() - start
    del done
    return seconds


def print_rows(rows: Iterable[Row]) -> list[Row]:
    """Print the table, a line as soon as it is there, and return its rows."""
    head = ("torch", "torch_fakeify", "ratio", "budget")
    print(f"{'work':<52} {head[0]:>15} {head[1]:>15} {head[2]:>13} {head[3]:>8}", flush=True)
    done: list[Row] = []
    for row in rows:
        done.append(row)
        theirs = row.theirs if isinstance(row.theirs, str) else _cell(row.theirs, row.unit)
        cells = f"{theirs:>15} {_cell(row.ours, row.unit):>15} {_ratio(row):>13}"
        print(f"{row.work:<52} {cells} {_budget(row):>8} {_MET[row.met]}".rstrip(), flush=True)
    return done


_MET = {None: "", True: "met", False: "not met"}


def _cell(figure: Figure, unit: str) -> str:
    spread = f" ±{figure.spread:.0%}" if len(figure.values) > 1 else ""
    digits = 0 if figure.median >= 1000 else 1 if figure.median >= 10 else 2
    return f"{figure.median:.{digits}f} {unit}{spread:>5}"


def _ratio(row: Row) -> str:
    ratio = row.ratio
    if ratio is None:
        return "-"
    digits = 3 if row.budget is not None and row.budget.most else 1
    spread = f" ±{ratio.spread:.0%}" if len(ratio.values) > 1 else ""
    return f"{ratio.median:.{digits}f}{spread:>5}"


def _budget(row: Row) -> str:
    if row.budget is None:
        return ""
    return f"{'<=' if row.budget.most else '>='} {row.budget.limit:g}"


def as_data(rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """The rows as ``--json`` prints them."""
    for row in rows:
        theirs = row.theirs if isinstance(row.theirs, str) else _numbers(row.theirs)
        yield {
            "work": row.work,
            "unit": row.unit,
            "torch": theirs,
            "torch_fakeify": _numbers(row.ours),
            "ratio": None if row.ratio is None else _numbers(row.ratio),
            "budget": None if row.budget is None else row.budget._asdict(),
            "met": row.met,
        }


def _numbers(figure: Figure) -> dict[str, Any]:
    return {"median": figure.median, "spread": figure.spread, "values": figure.values}
