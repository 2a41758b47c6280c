"""Progress of a long run on standard error: a bar on a terminal, else a line from time to time."""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager

_PARTS = 10


@contextmanager
def progress(total: int, stream: TextIO | None = None) -> Generator[Callable[[bool], None]]:
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
    done = wrong = 0
    with bar or nullcontext(lambda done, text: _print_tenth(done, total, text, out)) as show:

        def step(holds: bool) -> None:
            nonlocal done, wrong
            done, wrong = done + 1, wrong + (not holds)
            show(done, _text(done, total, wrong))

        yield step


def _print_tenth(done: int, total: int, text: str, stream: TextIO) -> None:
    if done * _PARTS // total != (done - 1) * _PARTS // total:
        print(text, file=stream, flush=True)


def _text(done: int, total: int, wrong: int) -> str:
    return f"{done} of {total}, {wrong} do not hold"


def _bar(total: int, stream: TextIO) -> AbstractContextManager[Callable[[int, str], None]] | None:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return None

    @contextmanager
    def bar() -> Generator[Callable[[int, str], None]]:
        columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        with Progress(*columns, console=Console(file=stream), transient=True) as shown:
            task = shown.add_task(_text(0, total, 0), total=total)
            yield lambda done, text: shown.update(task, completed=done, description=text)

    return bar()
