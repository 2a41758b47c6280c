"""Lines of text in the width of a terminal: tables, and long lines at their spaces.

A word is never divided, except in a table that does not fit otherwise.
"""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FRAME_COLUMNS = ("file", "function", "ops", "ms", "result")
"""The head of a table of frames."""

_COLUMN = 56
"""Most characters of a cell that widens its column."""
_NUMBER = re.compile(r"-|[0-9][0-9.,e+-]*")
_MILLISECONDS = 5
"""Digits of a time, so that tables of one frame are alike."""
_GAP = "  "
_INDENT = "  "
_HANG = 4
"""Spaces by which the rest of a long line is indented more than its beginning."""
_HEAD = re.compile(r" *\S+(?: \S+)*?  +")
"""The first column of a table, of which a line is the text."""
_HEAD_WIDTH = 20
_PART = re.compile(r"[^\s/.,_=(\[]*[/.,_=(\[]?")


def frame_row(
    file: str, function: str, operators: int, milliseconds: float | None, result: str
) -> tuple[str, ...]:
    """Return a row of a table of frames; ``milliseconds`` is what the backend took, if it is known."""
    if milliseconds is None:
        time = "-"
    else:  # a file may say any number
        time = f"{milliseconds:.0f}" if abs(milliseconds) < 1e12 else f"{milliseconds:.3g}"
    return file, function, str(operators), time.rjust(_MILLISECONDS), result


def table_lines(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns, separated by two spaces, numbers on the right.

    Cells of more than 56 characters do not widen their column.
    """
    rows = [tuple(row) for row in rows]
    widths: dict[int, int] = {}
    for row in rows:
        for at, cell in enumerate(row):
            if len(cell) <= _COLUMN:
                widths[at] = max(widths.get(at, 0), len(cell))
    texts = _text_columns(rows)
    return [_line(row, widths, texts) for row in rows]


def fitted_table(rows: Iterable[Sequence[str]], columns: int | None) -> list[str]:
    """Return a table in lines of at most ``columns`` characters; ``None`` for no limit.

    The cells of a table that is too wide are wrapped; where that does not help, the first cell of each
    row has a line of its own.
    """
    rows = [tuple(row) for row in rows]
    widths = {at: max(map(len, cells)) for at, cells in enumerate(zip(*rows, strict=True))}
    texts = _text_columns(rows)
    if columns is None or _width(widths) <= columns:
        return [_line(row, widths, texts) for row in rows]
    narrow = _narrowed(rows, widths, texts, columns)
    if narrow is not None:
        return [line for row in rows for line in _wrapped_row(row, narrow, texts)]
    rest = [row[1:] for row in rows]
    lines = fitted_table(rest, max(columns - len(_INDENT), 1)) if len(widths) > 1 else []
    if len(lines) == len(rows):
        pairs = zip(rows, lines, strict=True)
        return [
            part
            for row, line in pairs
            for part in (*_pieces(row[0], columns), f"{_INDENT}{line}".rstrip())
        ]
    return [line for row in rows[1:] for line in _as_text(row, rows[0], texts, columns)]


def fitted_lines(lines: Iterable[str], columns: int | None, *, divide: bool = False) -> list[str]:
    """Return lines of at most ``columns`` characters; the rest of a long one is indented below it.

    A word that is longer, such as a path, keeps its line, unless ``divide`` is given.
    """
    if columns is None:
        return list(lines)
    found: list[str] = []
    for line in lines:
        found.extend([line] if len(line) <= columns else _wrapped(line, columns, divide))
    return found


def _wrapped(line: str, columns: int, divide: bool) -> list[str]:
    text = line.lstrip(" ")
    indent = len(line) - len(text)
    head = _HEAD.match(line)
    if head and len(head[0]) <= _HEAD_WIDTH:
        hang = len(head[0])
    else:  # a deep line is itself the rest of another one
        hang = indent if indent > 2 * _HANG else indent + _HANG
    hang = min(hang, columns // 2)
    indent = min(indent, hang)
    again = " " * indent + "#   " if text.startswith("# ") and columns > _HANG else " " * hang
    width = max(columns - len(again), 1)
    # The gaps of a table are kept.
    words = re.split(r"(?<=\S) (?=\S)", text)
    if divide:
        words = [part for word in words for part in _pieces(word, width)]
    found: list[str] = []
    current = " " * indent
    for word in words:
        start = not current.strip()
        if start or len(current) + 1 + len(word) <= columns:
            current += word if start else f" {word}"
        else:
            found.append(current.rstrip())
            current = again + word
    return [*found, current.rstrip()]


def _text_columns(rows: Sequence[Sequence[str]]) -> set[int]:
    return {
        at for row in rows[1:] for at, cell in enumerate(row) if not _NUMBER.fullmatch(cell.strip())
    }


def _line(cells: Sequence[str], widths: dict[int, int], texts: set[int]) -> str:
    aligned = (
        cell.ljust(widths.get(at, 0)) if at in texts else cell.rjust(widths.get(at, 0))
        for at, cell in enumerate(cells)
    )
    return _GAP.join(aligned).rstrip()


def _width(widths: dict[int, int]) -> int:
    return sum(widths.values()) + len(_GAP) * (len(widths) - 1)


def _narrowed(
    rows: Sequence[Sequence[str]], widths: dict[int, int], texts: set[int], columns: int
) -> dict[int, int] | None:
    """Return widths that fit without dividing a word; ``None`` if there are none."""
    narrow = dict(widths)
    for at in texts:
        narrow[at] = max(len(word) for row in rows for word in (row[at].split() or [""]))
    room = columns - _width(narrow)
    if room < 0:
        return None
    for at in sorted(texts, key=lambda at: widths[at] - narrow[at]):
        more = min(widths[at] - narrow[at], room)
        narrow[at], room = narrow[at] + more, room - more
    return narrow


def _wrapped_row(row: Sequence[str], widths: dict[int, int], texts: set[int]) -> list[str]:
    cells = [
        textwrap.wrap(cell, widths[at], break_on_hyphens=False, break_long_words=False) or [""]
        for at, cell in enumerate(row)
    ]
    height = max(map(len, cells))
    parts = zip(*([*cell, *[""] * (height - len(cell))] for cell in cells), strict=True)
    return [_line(each, widths, texts) for each in parts]


def _as_text(row: Sequence[str], head: Sequence[str], texts: set[int], columns: int) -> list[str]:
    """Return a row as text, for a terminal too narrow for the table; a number has its name."""
    cells = [
        cell.strip() if at in texts else f"{cell.strip()} {head[at]}"
        for at, cell in enumerate(row)
        if at and cell.strip() != "-"
    ]
    return [*_pieces(row[0], columns), *_wrapped(_INDENT + ", ".join(cells), columns, True)]


def _pieces(word: str, width: int) -> list[str]:
    """Divide a word that is longer than ``width``, if possible behind a separator."""
    if len(word) <= width:
        return [word]
    found = [""]
    for part in _PART.findall(word) if " " not in word else [word]:
        for start in range(0, len(part), width):
            piece = part[start : start + width]
            if len(found[-1]) + len(piece) <= width:
                found[-1] += piece
            else:
                found.append(piece)
    return [piece for piece in found if piece]
