"""Captures compiled by several interpreters, side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch_fakeify.render.tables import table_lines
from torch_fakeify.render.text import count_text

from .command import replay_corpus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_fakeify.tools.worker.interpreters import Interpreter

    from .command import CorpusReport
    from .jobs import Job
    from .results import Row


@dataclass(frozen=True)
class SideBySide:
    """The results of a corpus by interpreter."""

    interpreters: tuple[Interpreter, ...]
    reports: tuple[CorpusReport, ...]
    """In the order of the interpreters."""
    timed: bool = False
    """Whether run times were requested."""
    tolerance: float | None = None
    """The largest accepted ratio of a time to that of the first interpreter."""

    @property
    def rows(self) -> list[tuple[Row, ...]]:
        """The results of each capture, one an interpreter."""
        return list(zip(*(report.rows for report in self.reports), strict=True))

    def is_slower(self, row: Row, first: Row) -> bool:
        """Whether a capture takes longer than the tolerance admits, to compile or to run."""
        times = ((row.compile_ms, first.compile_ms), (row.run_ms, first.run_ms))
        return self.tolerance is not None and any(
            a is not None and b is not None and a > self.tolerance * b for a, b in times
        )

    @property
    def differing(self) -> list[tuple[Row, ...]]:
        """The captures whose verdicts differ between interpreters."""
        return [rows for rows in self.rows if len({row.verdict for row in rows}) > 1]

    @property
    def slower(self) -> list[tuple[Row, ...]]:
        """The captures that an interpreter takes too long for."""
        return [rows for rows in self.rows if any(self.is_slower(row, rows[0]) for row in rows[1:])]

    @property
    def holds(self) -> bool:
        """Whether each capture fails or compiles as recorded with each interpreter, and none is slower."""
        return all(row.holds for rows in self.rows for row in rows) and not self.slower

    def lines(self) -> list[str]:
        """Format the interpreters, a line for each capture, and the counts."""
        letters = [_letter(at) for at in range(len(self.interpreters))]
        lines = [
            f"{letter}  {each.text}  {each.executable}"
            for letter, each in zip(letters, self.interpreters, strict=True)
        ]
        head = ["file", *letters, *(f"{letter} compile ms" for letter in letters)]
        head += [f"{letter} run ms" for letter in letters] if self.timed else []
        table = [tuple(head)]
        for rows in self.rows:
            marks = [" slower" if self.is_slower(row, rows[0]) else "" for row in rows]
            cells = [rows[0].file, *(r.verdict + m for r, m in zip(rows, marks, strict=True))]
            cells += [_number(row.compile_ms) for row in rows]
            cells += [_number(row.run_ms) for row in rows] if self.timed else []
            table.append(tuple(cells))
        lines += ["", *table_lines(table), ""]
        for rows in self.differing:
            for letter, row in zip(letters, rows, strict=True):
                lines.append(f"{row.file} with {letter}: {row.verdict}: {row.summary}")
        total = count_text(len(self.rows), "capture")
        slower = "" if self.tolerance is None else f", {len(self.slower)} slower"
        lines.append(f"{total}, {len(self.differing)} differ{slower}")
        return lines


def _letter(at: int) -> str:
    return chr(ord("A") + at) if at < 26 else f"#{at + 1}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def replay_side_by_side(
    paths: Sequence[str],
    job: Job,
    interpreters: Sequence[Interpreter],
    *,
    jobs: int,
    every: bool = False,
    tolerance: float | None = None,
) -> SideBySide:
    """Compile every capture of a corpus with each interpreter, one interpreter after the other.

    The arguments are as for `replay_corpus`, and ``tolerance`` is that of the result.

    Raises:
        FormatError: there are no captures.
        FakeifyError: there is no such backend.
    """
    reports: list[CorpusReport] = []
    for each in interpreters:
        report = replay_corpus(paths, replace(job, python=each.executable), jobs=jobs, every=every)
        reports.append(report)
        if report.stopped is not None:  # there is no row for each capture
            raise report.stopped
    return SideBySide(tuple(interpreters), tuple(reports), job.time, tolerance)
