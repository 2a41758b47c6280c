"""The captures of a directory as a table, for ``show DIR``. Nothing here imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch_fakeify.render.summary import capture_row
from torch_fakeify.render.tables import FRAME_COLUMNS, fitted_lines, fitted_table
from torch_fakeify.render.text import clip, escape
from torch_fakeify.tools.capture_files import read_captures

if TYPE_CHECKING:
    from torch_fakeify.serialization.container import Limits

_WIDEST = 200
"""Largest number of characters printed of a cell."""


class Listing(NamedTuple):
    """The captures of a directory."""

    rows: list[tuple[str, ...]]
    """The cells of each readable capture."""
    errors: list[tuple[str, str]]
    """Name and error of each file that cannot be read."""

    def lines(self, columns: int | None) -> list[str]:
        """Format the table and the unreadable files, in lines of at most ``columns`` characters."""
        lines = fitted_table([FRAME_COLUMNS, *self.rows], columns) if self.rows else []
        if self.errors:
            lines += [*([""] if lines else []), f"not read ({len(self.errors)})"]
            errors = (f"  {name}: {error}" for name, error in self.errors)
            lines += fitted_lines(errors, columns, divide=True)
        if self.rows:
            lines += ["", *fitted_lines(["`torch-fakeify show FILE` prints one of them."], columns)]
        return lines


def list_captures(directory: str, *, limits: Limits | None = None) -> Listing:
    """Read every capture in a directory and below: the files ``*.fkf``.

    Raises:
        FormatError: the directory cannot be read, or there is no capture in it.
    """
    listing = Listing([], [])
    for file, found in read_captures(directory, limits=limits):
        if isinstance(found, str):
            listing.errors.append((escape(file.name), escape(found)))
        else:
            row = capture_row(file.name, found)
            listing.rows.append(tuple(escape(clip(cell, _WIDEST)) for cell in row))
    return listing
