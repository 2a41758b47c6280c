"""The command ``replay`` over a corpus: its executor, its result files, its report, and several interpreters."""

from __future__ import annotations

import sys
import time
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from torch_fakeify._atomic_write import check_not_input, is_same_file, write_atomic
from torch_fakeify.errors import FakeifyError, WriteError
from torch_fakeify.render.tables import fitted_table, table_lines
from torch_fakeify.render.text import clip, count_text
from torch_fakeify.tools.capture_files import find_captures

from .dask_cluster import dask_cluster
from .jobs import local_executor
from .results import ResultFile, Row, compare, junit_xml, read_rows
from .runner import check_backend, replay_all

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence
    from contextlib import AbstractContextManager

    from torch_fakeify.tools.worker.interpreters import Interpreter

    from .jobs import Job
    from .results import Comparison

_AHEAD = 2
"""Captures submitted for each local job, so that a worker need not wait for the next one."""
_WIDEST = 160
_PARTS = 10
"""How often progress is printed where there is no bar."""


@dataclass
class CorpusReport:
    """The results of a corpus."""

    total: int
    rows: list[Row] = field(default_factory=list[Row])
    """In the order of the files."""
    paths: dict[str, Path] = field(default_factory=dict[str, "Path"])
    """Of the files, by the names in the rows."""
    seconds: float = 0.0
    comparison: Comparison | None = None
    stopped: BaseException | None = None
    """The exception that ended the run early: ``KeyboardInterrupt``, or the executor's ``FakeifyError``."""

    @property
    def wrong(self) -> list[Row]:
        """The captures that do not hold; with a comparison, those that held or did not exist earlier."""
        if self.comparison is None:
            return [row for row in self.rows if not row.holds]
        return [c.after for c in self.comparison.changes["newly fails"] if c.after is not None]

    def lines(self, columns: int | None = None) -> list[str]:
        """Format the captures that do not hold, the comparison, and the counts by verdict, for a terminal."""
        lines: list[str] = []
        bad = [row for row in self.rows if not row.holds]
        if bad:
            rows = [(row.file, row.verdict, _found(row)) for row in bad]
            lines += [*fitted_table([("file", "verdict", "found"), *rows], columns), ""]
        if self.comparison is not None:
            lines += [*self.comparison.lines(), ""]
        copies = sum(row.same_as is not None for row in self.rows)
        of = "" if len(self.rows) == self.total else f"{len(self.rows)} of "
        lines.append(
            f"{of}{count_text(self.total, 'capture')} in {self.seconds:.1f} s, {len(bad)} do not hold"
        )
        lines.append(f"with {', '.join(sorted({row.backend for row in self.rows}))}")
        if copies:
            lines.append(f"{copies} of them are the same frame as another one")
        counts = Counter(row.verdict for row in self.rows)
        width = max(map(len, counts), default=0)
        lines += [f"  {word:{width}}  {n:>6}" for word, n in sorted(counts.items())]
        return lines


def _found(row: Row) -> str:
    if row.same_as is not None:
        return f"the same frame as {row.same_as}"
    return clip(row.summary, _WIDEST)


def replay_corpus(
    paths: Sequence[str],
    job: Job,
    *,
    jobs: int,
    dask: str | None = None,
    every: bool = False,
    jsonl: str | None = None,
    junit: str | None = None,
    against: str | None = None,
    resume: bool = False,
) -> CorpusReport:
    """Compile every capture of a corpus and write the results.

    Args:
        paths: capture files, and directories of them.
        job: backend, device, limits.
        jobs: how many captures are compiled at a time on this machine.
        dask: address of a Dask scheduler, whose workers then do the work instead.
        every: compile each capture, even if its frame was compiled for another one.
        jsonl: where to write the results as JSON lines, as they arrive.
        junit: where to write them as JUnit XML.
        against: an earlier result to compare with, as JSON lines.
        resume: reuse the rows in ``jsonl``.

    Raises:
        FormatError: there are no captures, or the earlier result cannot be read.
        WriteError: a result cannot be written, or would be written over a capture, the earlier
            result, or the other one.
        FakeifyError: there is no such backend or no such cluster.
    """
    files = find_captures(paths)
    read = [*(file.path for file in files), *filter(None, [against])]
    for output in filter(None, (jsonl, junit)):
        check_not_input(output, *read)
    if jsonl is not None and junit is not None and is_same_file(junit, jsonl):
        raise WriteError(
            "two results cannot be in one file",
            where=junit,
            found=f"--jsonl {jsonl} and --junit {junit}",
            fix="Give each its own path",
        )
    earlier = None if against is None else read_rows(against)
    resumed = read_rows(jsonl, whole=False) if resume and jsonl and Path(jsonl).exists() else []
    reusable = {row.file: row for row in resumed}
    names = [file.name for file in files]
    report = CorpusReport(len(files), paths={file.name: file.path for file in files})
    started = time.monotonic()
    with ExitStack() as stack:
        if dask is None:
            jobs = min(jobs, len(files))
            executor, window, share = stack.enter_context(local_executor(jobs)), _AHEAD * jobs, jobs
        else:
            executor, window, share = stack.enter_context(dask_cluster(dask))
        job = replace(job, share=share)
        check_backend(executor, job)
        rows = replay_all(
            files,
            executor,
            job,
            window=window,
            send_files=dask is not None,
            every=every,
            earlier=reusable,
        )
        if junit is not None:
            write_atomic(junit, junit_xml([]))  # fail now if it cannot be written
        result = None
        if jsonl is not None:
            result = stack.enter_context(ResultFile(jsonl, names, reusable.values()))
        _collect(rows, report, result)
    report.seconds = time.monotonic() - started
    order = {name: number for number, name in enumerate(names)}
    report.rows.sort(key=lambda row: order[row.file])
    if junit is not None:
        write_atomic(junit, junit_xml(report.rows))
    if earlier is not None:
        report.comparison = compare(earlier, report.rows)
    return report


def _collect(rows: Iterable[Row], report: CorpusReport, result: ResultFile | None) -> None:
    """Collect the rows as they arrive, until the end or an interruption."""
    with progress(report.total) as step:
        try:
            for row in rows:
                report.rows.append(row)
                if result is not None:
                    result.add(row)
                step(row.holds)
        except (KeyboardInterrupt, FakeifyError) as error:
            report.stopped = error


# --- progress ---------------------------------------------------------------------------------------


@contextmanager
def progress(total: int, stream: TextIO | None = None) -> Generator[Callable[[bool], None]]:
    """Show the progress of a long run within the block, by default on standard error.

    On a terminal it is a bar, which needs the extra ``rich``; else a line for each tenth, without control
    characters. Yields a function to call with each finished item, with whether it holds.
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


# --- captures compiled by several interpreters -------------------------------------------------------


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
