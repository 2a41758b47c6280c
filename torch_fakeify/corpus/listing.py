"""The captures of a directory as a table, for ``show DIR``. Nothing here imports torch."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, NamedTuple

from torch_fakeify.errors import FormatError
from torch_fakeify.render.text import clip, escape
from torch_fakeify.serialization.capture_file import read_capture

from .files import find_captures

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch_fakeify.records.frame import CaptureDesc
    from torch_fakeify.serialization.container import Limits

    from .files import CorpusFile

__all__ = ["Listing", "list_captures"]

_HEAD = (
    "file", "function", "nodes", "inputs", "symbols", "guards", "asserts", "bytes", "result",
)  # fmt: skip
_TEXTS = frozenset({"file", "function", "result"})
_NARROWEST = 8
"""Smallest width of a text column, in characters; longer texts are wrapped."""
_WIDEST = 200
"""Largest number of characters printed of a cell."""


class Listing(NamedTuple):
    """The captures of a directory."""

    rows: list[tuple[str, ...]]
    """The cells of each readable capture."""
    errors: list[tuple[str, str]]
    """Name and error of each file that cannot be read."""

    def lines(self, columns: int) -> list[str]:
        """Format the table and the unreadable files, in lines of at most ``columns`` characters."""
        lines = _table([_HEAD, *self.rows], columns) if self.rows else []
        if self.errors:
            lines += [*([""] if lines else []), f"not read ({len(self.errors)})"]
            for name, error in self.errors:
                lines += _wrapped(f"{name}: {error}", columns, indent="  ")
        if self.rows:
            lines += ["", *_wrapped("`torch-fakeify show FILE` prints one of them.", columns)]
        return lines


def list_captures(directory: str, *, limits: Limits | None = None) -> Listing:
    """Read every capture in a directory and below.

    Args:
        directory: where; its files ``*.fkf`` count.
        limits: what a file may ask for.

    Raises:
        FormatError: the directory cannot be read, or there is no capture in it.
    """
    listing = Listing([], [])
    for file in find_captures([directory]):
        found = _read(file, limits)
        if isinstance(found, FormatError):
            text = str(found).removeprefix(f"{found.where}: ")
            listing.errors.append((escape(file.name), escape(text)))
        else:
            row = _row(file.name, file.path, found)
            listing.rows.append(tuple(escape(clip(cell, _WIDEST)) for cell in row))
    return listing


def _read(file: CorpusFile, limits: Limits | None) -> CaptureDesc | FormatError:
    try:
        return read_capture(file.path, limits=limits)
    except FormatError as error:
        return error


def _row(name: str, path: Path, desc: CaptureDesc) -> tuple[str, ...]:
    env = desc.shape_env
    counts = (
        len(desc.graph.nodes),
        len(desc.inputs),
        0 if env is None else len(env.symbols),
        0 if env is None else len(env.guards),
        0 if env is None else len(env.runtime_asserts),
        path.stat().st_size,
    )
    failure = desc.failure
    result = "compiled" if failure is None else f"failed: {failure.type.removeprefix('builtins.')}"
    return (name, desc.frame or "?", *map(str, counts), result)


def _table(rows: Sequence[tuple[str, ...]], columns: int) -> list[str]:
    """Align rows; if they are too wide, put each file name on its own line."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEAD))]
    if sum(widths) + 2 * (len(widths) - 1) <= columns:
        return [_line(row, widths, _HEAD) for row in rows]
    room = columns - sum(widths[2:-1]) - 2 * (len(widths) - 1)
    if room < 2 * _NARROWEST:
        return [line for row in rows[1:] for line in _in_words(row, columns)]
    for left, at in zip((2, 1), sorted((1, -1), key=widths.__getitem__), strict=True):
        widths[at] = min(widths[at], room // left)
        room -= widths[at]
    return [line for row in rows for line in _lines_of(row, widths, columns)]


def _lines_of(row: tuple[str, ...], widths: Sequence[int], columns: int) -> list[str]:
    """Format a row as a line with the file name and, below it, lines with the wrapped cells."""
    cells = [_pieces(cell, width) for cell, width in zip(row[1:], widths[1:], strict=True)]
    height = max(map(len, cells))
    below = zip(*([*cell, *[""] * (height - len(cell))] for cell in cells), strict=True)
    lines = [f"  {_line(parts, widths[1:], _HEAD[1:])}" for parts in below]
    return [*_pieces(row[0], columns), *lines]


def _line(cells: Sequence[str], widths: Sequence[int], head: Sequence[str]) -> str:
    aligned = [
        cell.ljust(width) if name in _TEXTS else cell.rjust(width)
        for cell, width, name in zip(cells, widths, head, strict=True)
    ]
    return "  ".join(aligned).rstrip()


def _pieces(cell: str, width: int) -> list[str]:
    return [cell[at : at + width] for at in range(0, len(cell), width)] or [""]


def _in_words(row: tuple[str, ...], columns: int) -> list[str]:
    """Format one capture as text, for a terminal too narrow for the table."""
    name, function, *counts, result = row
    counts = [
        f"{count} {what if count != '1' else what[:-1]}"
        for count, what in zip(counts, _HEAD[2:-1], strict=True)
    ]
    text = ", ".join([function, *counts, result])
    return [*_pieces(name, max(columns, 1)), *_wrapped(text, columns, indent="  ")]


def _wrapped(text: str, columns: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, max(columns, len(indent) + 1), initial_indent=indent, subsequent_indent=indent,
        break_on_hyphens=False,
    )  # fmt: skip
