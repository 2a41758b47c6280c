"""The results of a corpus as JSON lines and as JUnit XML, and their comparison with an earlier result."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import msgspec

from torch_fakeify._atomic_write import reason_of, write_atomic
from torch_fakeify.errors import FormatError, WriteError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import BinaryIO

BAD_FILE = "bad file"
NOT_REBUILT = "cannot be rebuilt"
LOST = "lost"
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot contain, not even as references."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one capture: a line of the result file."""

    file: str
    """Name of the capture in the corpus."""
    verdict: str
    """The verdict of a `ReplayReport`; ``bad file``; ``cannot be rebuilt`` (this torch or this process lacks
    something that the frame needs); or ``lost`` (no worker could run the job)."""
    holds: bool
    """Whether the frame fails or compiles as recorded."""
    backend: str
    """That compiled it; ``recorded`` if a bad file was to name it."""
    device: str | None = None
    torch: str | None = None
    """The release of torch that compiled it."""
    fingerprint: str | None = None
    """Fingerprint of the frame and, if there are any, its settings; ``None`` if the file cannot be read."""
    recorded: str | None = None
    """The recorded failure, type and message."""
    same_as: str | None = None
    """The capture of the same frame and recorded failure from which the verdict was copied."""
    seconds: float = 0.0
    """Duration in seconds; 0 for a copied verdict."""
    details: tuple[str, ...] = ()
    """Lines that describe the verdict."""
    python: str | None = None
    """The interpreter that compiled it, if it was not the one of the command."""
    compile_ms: float | None = None
    """Milliseconds of the compilation, if it succeeded."""
    run_ms: float | None = None
    """Milliseconds of a call, if it was timed."""

    @property
    def is_error(self) -> bool:
        """Whether there is no verdict on the backend."""
        return self.verdict in (BAD_FILE, NOT_REBUILT, LOST)

    @property
    def summary(self) -> str:
        """The first informative line of ``details``."""
        lines = (line.strip() for line in self.details)
        return next((line for line in lines if line not in ("", "recorded:", "now:")), "")


# --- files ----------------------------------------------------------------------------------------


class ResultFile:
    """A result file of JSON lines; each line is flushed at once, and on exit they are sorted.

    Args:
        path: an existing file is replaced.
        names: of the captures, in their order.
        earlier: rows that stay until the capture has a new one.

    Raises:
        WriteError: the file cannot be written.
    """

    def __init__(self, path: str | Path, names: Iterable[str], earlier: Iterable[Row] = ()) -> None:
        self._path = Path(path)
        self._order = {name: number for number, name in enumerate(names)}
        self._rows = {row.file: row for row in earlier if row.file in self._order}
        self._file: BinaryIO | None = None
        write_atomic(path, self._lines())
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

    def __exit__(self, *args: object) -> None:
        """Sort the lines."""
        assert self._file is not None
        self._file.close()
        write_atomic(self._path, self._lines())

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
    """Read a result file; unless it is ``whole``, a truncated last line is ignored.

    Raises:
        FormatError: the file cannot be read, or a line is not a row.
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


# --- JUnit XML ---------------------------------------------------------------------------------------


def junit_xml(rows: Sequence[Row]) -> bytes:
    """Format rows as JUnit XML, which Jenkins and GitLab read: one suite, in which each capture is a test case.

    A verdict that does not hold is a failure, a capture without a verdict an error, and one of a frame
    that another capture has is skipped.
    """
    skipped = [row for row in rows if row.same_as is not None]
    wrong = [row for row in rows if row.same_as is None and not row.holds]
    counts = {
        "name": " ".join(["torch-fakeify", *sorted({row.backend for row in rows})]),
        "tests": len(rows),
        "failures": sum(not row.is_error for row in wrong),
        "errors": sum(row.is_error for row in wrong),
        "skipped": len(skipped),
        "time": f"{sum(row.seconds for row in rows):.3f}",
    }
    root = ET.Element("testsuites")
    suite = _element(root, "testsuite", **counts)
    for row in rows:
        _add_case(suite, row)
    return ET.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n"


def _add_case(suite: ET.Element, row: Row) -> None:
    *folders, name = row.file.split("/")
    case = _element(
        suite,
        "testcase",
        classname=".".join([row.backend, *filter(None, folders)]),
        name=name,
        time=f"{row.seconds:.3f}",
    )
    text = "\n".join([row.verdict, *(f"  {line}" for line in row.details)])
    if row.same_as is not None:
        message = f"the same frame as {row.same_as}: {row.verdict}"
        _element(case, "skipped", type="torch_fakeify.duplicate", message=message)
    elif not row.holds:
        kind = "error" if row.is_error else "failure"
        message = f"{row.verdict}: {row.summary}" if row.summary else row.verdict
        _element(case, kind, type=row.verdict, message=message).text = _clean(text)
    else:
        _element(case, "system-out").text = _clean(text)


def _element(parent: ET.Element, tag: str, **attributes: object) -> ET.Element:
    return ET.SubElement(parent, tag, {k: _clean(str(v)) for k, v in attributes.items()})


def _clean(text: str) -> str:
    """Escape the characters that XML cannot contain."""
    return _NOT_IN_XML.sub(lambda found: ascii(found.group())[1:-1], text)


# --- comparison -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """The rows of one capture in two results."""

    before: Row | None
    after: Row | None

    @property
    def line(self) -> str:
        """The capture and its verdicts as text."""
        row = self.after or self.before
        assert row is not None
        before = "not there" if self.before is None else self.before.verdict
        if self.after is None:
            return f"{row.file}: {before}"
        return f"{row.file}: {self.after.verdict}, was {before}"


@dataclass(frozen=True)
class Comparison:
    """The differences from an earlier result, by capture."""

    changes: dict[str, tuple[Change, ...]]
    """By title. What ``newly fails`` held or did not exist earlier; ``new`` captures have any verdict."""
    other: tuple[str, ...]
    """Other differences: backend, device, release of torch."""

    def lines(self) -> list[str]:
        """The comparison, line by line."""
        lines = [f"against the earlier result, {text}" for text in self.other]
        for title, changes in self.changes.items():
            lines.append(f"{title}: {len(changes)}")
            lines += [f"  {change.line}" for change in changes]
        return lines


def compare(earlier: Sequence[Row], rows: Sequence[Row]) -> Comparison:
    """Compare a result with an earlier one.

    Captures are matched by name; those without a match, by frame and recorded failure.
    """
    names = {row.file for row in rows}
    before = {row.file: row for row in earlier}
    moved = {_frame(row): row for row in earlier if row.file not in names and row.fingerprint}
    changes: list[Change] = []
    for row in rows:
        previous = before.pop(row.file, None)
        if previous is None and row.fingerprint is not None:
            previous = moved.pop(_frame(row), None)
            if previous is not None:
                del before[previous.file]
        changes.append(Change(previous, row))
    fails = [c for c in changes if c.after is not None and not c.after.holds]
    found = {
        "newly fails": (c for c in fails if c.before is None or c.before.holds),
        "newly passes": (
            c for c in changes if c.before and c.after and c.after.holds and not c.before.holds
        ),
        "still fails": (c for c in fails if c.before is not None and not c.before.holds),
        "new": (c for c in changes if c.before is None),
        "missing": (Change(row, None) for row in before.values()),
    }
    return Comparison(
        {title: tuple(each) for title, each in found.items()}, tuple(_settings(earlier, rows))
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
