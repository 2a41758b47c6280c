"""Progress of a long run on standard error: a bar on a terminal, else a line from time to time."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager

    Step = Callable[[bool], None]

_PARTS = 10


@contextmanager
def progress(total: int, stream: TextIO | None = None) -> Generator[Step]:
    """Show progress within the block.

    The bar needs the extra ``rich``. Without it, and where the stream is no terminal, it writes a line
    for each tenth, without control characters.

    Args:
        total: number of items.
        stream: by default standard error.

    Yields:
        A function to call with each finished item, with whether it holds.
    """
    out: TextIO = sys.stderr if stream is None else stream
    bar = _bar(total, out) if out.isatty() else None
    if bar is None:
        yield _lines(total, out)
        return
    with bar as step:
        yield step


def _lines(total: int, stream: TextIO) -> Step:
    done = wrong = 0

    def step(holds: bool) -> None:
        nonlocal done, wrong
        done, wrong = done + 1, wrong + (not holds)
        if done * _PARTS // total != (done - 1) * _PARTS // total:
            print(_text(done, total, wrong), file=stream, flush=True)

    return step


def _text(done: int, total: int, wrong: int) -> str:
    return f"{done} of {total}, {wrong} do not hold"


def _bar(total: int, stream: TextIO) -> AbstractContextManager[Step] | None:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return None

    @contextmanager
    def bar() -> Generator[Step]:
        columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        shown = Progress(*columns, console=Console(file=stream), transient=True)
        done = wrong = 0
        with shown:
            task = shown.add_task(_text(0, total, 0), total=total)

            def step(holds: bool) -> None:
                nonlocal done, wrong
                done, wrong = done + 1, wrong + (not holds)
                shown.update(task, completed=done, description=_text(done, total, wrong))

            yield step

    return bar()
