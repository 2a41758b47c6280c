"""What came of a corpus, as JSON lines, and the comparison with an earlier result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from .errors import FormatError, WriteError
from .whole_files import reason_of, write_whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType
    from typing import BinaryIO

__all__ = ["BAD_FILE", "LOST", "NOT_REBUILT", "Change", "Comparison", "ResultFile", "Row"]
__all__ += ["compare", "read_rows"]

BAD_FILE = "bad file"
NOT_REBUILT = "cannot be rebuilt"
LOST = "lost"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one capture: a line of the result."""

    file: str
    """Its name in the corpus."""
    verdict: str
    """The word of a `Verdict`; ``bad file``; ``cannot be rebuilt``, if this torch or this process lacks
    something that the frame needs; or ``lost``, if no worker could carry out the job."""
    holds: bool
    """Whether the capture does what its record says."""
    backend: str
    device: str | None = None
    torch: str | None = None
    """The release of torch that compiled it."""
    fingerprint: str | None = None
    """Of the frame; ``None`` if the file cannot be read."""
    recorded: str | None = None
    """The recorded failure, type and message."""
    same_as: str | None = None
    """The capture of the same frame, with the same recorded failure, whose verdict this is."""
    seconds: float = 0.0
    """How long it took, 0 for the verdict of another one."""
    details: tuple[str, ...] = ()
    """What was found, line by line."""

    @property
    def is_error(self) -> bool:
        """Whether there is no verdict: nothing is known of the backend."""
        return self.verdict in (BAD_FILE, NOT_REBUILT, LOST)

    @property
    def summary(self) -> str:
        """The first line of what was found that says something of its own."""
        kept = (line.strip() for line in self.details)
        return next((line for line in kept if line not in ("", "recorded:", "now:")), "")


# --- files ----------------------------------------------------------------------------------------


class ResultFile:
    """A result as JSON lines: each is in the file at once, and at the end they stand in order.

    Whatever ends this process, the file has every line that was added.

    Args:
        path: where; a file that is there is replaced.
        names: of the captures, in their order.
        kept: rows that stay until the capture has another one.

    Raises:
        WriteError: the file cannot be written.
    """

    def __init__(self, path: str | Path, names: Iterable[str], kept: Iterable[Row] = ()) -> None:
        self._path = Path(path)
        self._order = {name: number for number, name in enumerate(names)}
        self._rows = {row.file: row for row in kept if row.file in self._order}
        self._file: BinaryIO | None = None
        write_whole(path, self._lines())
        try:
            self._file = self._path.open("ab")
        except OSError as error:
            raise self._refusal(error) from error

    def add(self, row: Row) -> None:
        """Write one line.

        Raises:
            WriteError: the file cannot be written.
        """
        assert self._file is not None
        if self._rows.get(row.file) == row:
            return
        self._rows[row.file] = row
        try:
            self._file.write(_line(row))
            self._file.flush()
        except OSError as error:
            raise self._refusal(error) from error

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Put the lines in order."""
        assert self._file is not None
        self._file.close()
        write_whole(self._path, self._lines())

    def _lines(self) -> bytes:
        rows = sorted(self._rows.values(), key=lambda row: self._order.get(row.file, -1))
        return b"".join(map(_line, rows))

    def _refusal(self, error: OSError) -> WriteError:
        return WriteError(
            "the result cannot be written", where=str(self._path), found=reason_of(error)
        )


def _line(row: Row) -> bytes:
    return msgspec.json.encode(row) + b"\n"


def read_rows(path: str | Path, *, whole: bool = True) -> list[Row]:
    """Read a result.

    Args:
        path: JSON lines.
        whole: refuse a last line that was cut off; otherwise leave it out.

    Raises:
        FormatError: the file cannot be read, or a line of it is no row.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise FormatError(
            "the result cannot be read", where=str(path), found=reason_of(error)
        ) from error
    if not whole:
        lines.pop()
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(msgspec.json.decode(line, type=Row))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise FormatError(
                "not a line of a result",
                where=f"{path}:{number}",
                expected="a JSON object as `replay --jsonl` writes it",
                found=str(error),
            ) from error
    return rows


# --- comparison -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A capture in two results."""

    before: Row | None
    after: Row | None

    @property
    def line(self) -> str:
        """The capture and its verdicts."""
        row = self.after or self.before
        assert row is not None
        before = "not there" if self.before is None else self.before.verdict
        if self.after is None:
            return f"{row.file}: {before}"
        return f"{row.file}: {self.after.verdict}, was {before}"


@dataclass(frozen=True)
class Comparison:
    """What is different from an earlier result, capture by capture."""

    newly_fails: tuple[Change, ...]
    """Do not hold, and held earlier or were not there."""
    newly_passes: tuple[Change, ...]
    still_fails: tuple[Change, ...]
    new: tuple[Change, ...]
    """Were not there, whatever their verdict."""
    gone: tuple[Change, ...]
    other: tuple[str, ...]
    """What else is not as it was: backend, device, release of torch."""

    def lines(self) -> list[str]:
        """The comparison, line by line."""
        parts = (
            ("newly fails", self.newly_fails),
            ("newly passes", self.newly_passes),
            ("still fails", self.still_fails),
            ("new", self.new),
            ("gone", self.gone),
        )
        lines = [f"against the earlier result, {text}" for text in self.other]
        for title, changes in parts:
            lines.append(f"{title}: {len(changes)}")
            lines += [f"  {change.line}" for change in changes]
        return lines


def compare(earlier: Sequence[Row], rows: Sequence[Row]) -> Comparison:
    """Compare a result with an earlier one.

    A capture is found again by its name; one whose name is gone by its frame, with the same recorded
    failure.
    """
    names = {row.file for row in rows}
    before = {row.file: row for row in earlier}
    moved = {_frame(row): row for row in earlier if row.file not in names and row.fingerprint}
    changes: list[Change] = []
    for row in rows:
        known = before.pop(row.file, None)
        if known is None and row.fingerprint is not None:
            known = moved.pop(_frame(row), None)
            if known is not None:
                del before[known.file]
        changes.append(Change(known, row))
    fails = [c for c in changes if c.after is not None and not c.after.holds]
    return Comparison(
        newly_fails=tuple(c for c in fails if c.before is None or c.before.holds),
        newly_passes=tuple(
            c for c in changes if c.before and c.after and c.after.holds and not c.before.holds
        ),
        still_fails=tuple(c for c in fails if c.before is not None and not c.before.holds),
        new=tuple(c for c in changes if c.before is None),
        gone=tuple(Change(row, None) for row in before.values()),
        other=tuple(_settings(earlier, rows)),
    )


def _frame(row: Row) -> tuple[str | None, str | None]:
    return row.fingerprint, row.recorded


def _settings(earlier: Sequence[Row], rows: Sequence[Row]) -> Iterable[str]:
    for name in ("backend", "device", "torch"):
        before, after = (
            sorted({str(getattr(row, name)) for row in part if getattr(row, name) is not None})
            for part in (earlier, rows)
        )
        if before != after:
            yield f"{name}: {', '.join(after) or 'none'}, was {', '.join(before) or 'none'}"
