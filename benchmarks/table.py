"""Measuring two ways of one work in turns, and the table of what that gave."""

from __future__ import annotations

import gc
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["Figure", "Row", "compare", "print_rows", "timed"]


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
        low, _, high = statistics.quantiles(self.values, n=4)
        return (high - low) / 2 / self.median


class Row(NamedTuple):
    """One line of the table."""

    work: str
    unit: str
    """What both sides count: ``us``, ``ms`` or ``KB``."""
    theirs: Figure | str
    """Torch's own, or the name of the error where it cannot do the work."""
    ours: Figure


def compare(
    work: str,
    theirs: Callable[[], float],
    ours: Callable[[], float],
    *,
    rounds: int,
    unit: str = "us",
    count: int = 1,
) -> Row:
    """Let both sides take turns; garbage is collected before each and not during it.

    Args:
        work: what they do.
        theirs: runs torch's own code and returns the seconds it took.
        ours: the same for ours.
        rounds: how often each; one more round warms up and is not counted.
        unit: ``us`` or ``ms``.
        count: of the things that one run handles; the figures are for one of them.
    """
    scale = {"us": 1e6, "ms": 1e3}[unit] / count
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for run, sink in zip((theirs, ours), times, strict=True):
            gc.collect()
            gc.disable()
            try:
                seconds = run()
            finally:
                gc.enable()
            if number:
                sink.append(seconds * scale)
    return Row(work, unit, Figure(tuple(times[0])), Figure(tuple(times[1])))


def timed(work: Callable[[Any], Any], items: Sequence[Any] = (None,)) -> float:
    """Seconds for the work on every item, results kept alive meanwhile."""
    start = time.perf_counter()
    kept = [work(item) for item in items]
    seconds = time.perf_counter() - start
    del kept
    return seconds


def print_rows(rows: Iterable[Row]) -> None:
    """Print the table, a line as soon as it is there."""
    head = (f"{'work':<46}", f"{'torch':>18}", f"{'torch_fakeify':>18}", f"{'ratio':>7}")
    print(*head, flush=True)
    for row in rows:
        theirs = row.theirs if isinstance(row.theirs, str) else _cell(row.theirs, row.unit)
        ratio = "-"
        if isinstance(row.theirs, Figure):
            ratio = f"{row.theirs.median / row.ours.median:.1f}x"
        ours = _cell(row.ours, row.unit)
        print(f"{row.work:<46} {theirs:>18} {ours:>18} {ratio:>7}", flush=True)


def _cell(figure: Figure, unit: str) -> str:
    spread = f" ±{figure.spread:>3.0%}" if len(figure.values) > 1 else " " * 5
    return f"{figure.median:.1f} {unit}{spread}"
