"""What a person sees: lines in the width of the terminal, in colours, and what is going on.

Colours need the extra ``rich``. Nothing but the lines is written where the stream is no terminal;
``NO_COLOR`` and ``TERM=dumb`` are respected.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from torch_fakeify.render.tables import fitted_lines
from torch_fakeify.render.text import escape

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

_COMMAND = re.compile(r"^ *(?:next +)?torch-fakeify \w")
"""A line that is there to be copied."""
_WORD = re.compile(r"(?:'[^']*'|\S)+")
_STYLES = (
    (r"^(?:failed|not reproduced|does not compile|hangs|crashes|out of memory)\b", "bold red"),
    (r"^(?:reproduced|compiles|compiled)\b", "bold green"),
    (r"^ *\S*\.fkf\b", "cyan"),
    (r"^  \w[\w-]*(?=  )", "cyan"),
    (r"\bfailed\b(?=: )|\bnot finished\b", "red"),
    (r"^\S[^:]{0,30}(?: \(\d+\))(?:[:,].*)?$", "bold"),
    (
        r"^(?:symbols|inputs|guards|aliasing|code|next|surroundings|modes|stack|versions)(?= \(|,|$)",
        "bold",
    ),
    (r"^ +#.*$|  # .*$", "dim"),
    (r"^ *torch-fakeify .*$|`torch-fakeify [^`]*`", "bold cyan"),
)
_FIRST, _INTERVAL = 1.0, 1.0
"""Seconds until a status is shown, and between two times."""


def terminal_columns(stream: TextIO | None = None) -> int | None:
    """Return the width in which to print: of the terminal, or of ``COLUMNS``; ``None`` for a pipe."""
    out = sys.stdout if stream is None else stream
    if os.environ.get("COLUMNS", "").isdecimal() or out.isatty():
        return max(shutil.get_terminal_size().columns, 1)
    return None


def print_lines(lines: Iterable[str], stream: TextIO | None = None) -> None:
    """Print lines, escaped, in the width of the terminal, and in colours if it has them."""
    out = sys.stdout if stream is None else stream
    columns = terminal_columns(out)
    printed: list[str] = []
    for line in map(escape, lines):
        if columns is not None and _COMMAND.match(line):
            printed += _continued(line, columns)
        elif line.lstrip(" ").startswith('File "'):  # of a traceback, which tools read
            printed.append(line)
        else:
            printed += fitted_lines([line], columns)
    console = _console(out)
    if console is None:
        out.writelines(f"{line}\n" for line in printed)
        return
    from rich.text import Text

    for line in printed:
        text = Text(line)
        for pattern, style in _STYLES:
            text.highlight_regex(pattern, style)
        console.print(text, soft_wrap=True)


def _continued(line: str, columns: int) -> list[str]:
    """Return a command in lines that end with a backslash, so that a shell takes them as one."""
    start, _, command = line.partition("torch-fakeify")
    lines, hang = [f"{start}torch-fakeify"], " " * min(len(start) + 2, columns // 4)
    for word in _WORD.findall(command):
        if len(lines[-1]) + len(word) + 3 <= columns:
            lines[-1] += f" {word}"
        else:
            lines[-1] += " \\"
            lines.append(f"{hang}{word}")
    return lines


def _console(out: TextIO) -> Any:
    """Return a console of rich for a terminal with colours, else ``None``."""
    if not out.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=out, highlight=False)


@contextmanager
def status(text: str, stream: TextIO | None = None) -> Generator[Callable[[str], None]]:
    """Show in the last line of a terminal what is going on, and since how many seconds.

    It has no control sequences, and is removed at the end. Nothing is shown where the stream, by default
    standard error, is no terminal, nor in the first second. Yields a function that replaces the text.
    """
    out: TextIO = sys.stderr if stream is None else stream
    if not out.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda _text: None
        return
    line = _StatusLine(text, out)
    line.start()
    try:
        yield line.change
    finally:
        line.end()


class _StatusLine(threading.Thread):
    """Writes a line again each second, with the seconds since its beginning."""

    def __init__(self, text: str, out: TextIO) -> None:
        super().__init__(daemon=True)
        self._text, self._out = text, out
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._width = 0

    def change(self, text: str) -> None:
        self._text = text

    def run(self) -> None:
        pause = _FIRST
        while not self._ended.wait(pause):
            seconds = time.monotonic() - self._began
            self._write(escape(self._text), f", {seconds:.0f} s")
            pause = _INTERVAL

    def end(self) -> None:
        self._ended.set()
        self.join()
        if self._width:
            self._write("")
            self._out.write("\r")
            self._out.flush()

    def _write(self, text: str, end: str = "") -> None:
        """Write a line in place of the last one; a long text is cut, its end is not."""
        columns = max(shutil.get_terminal_size().columns - 1, 0)
        if len(text) + len(end) > columns:
            text = f"{text[: max(columns - len(end) - 3, 0)]}..."
        line = f"{text}{end}"[:columns]
        self._out.write(f"\r{line.ljust(self._width)}")
        self._out.flush()
        self._width = len(line)
