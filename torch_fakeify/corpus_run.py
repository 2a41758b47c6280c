"""The command ``replay`` over a corpus: who does the work, where results go, and the report."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .corpus import check_backend, replay_all
from .corpus_files import find_captures
from .corpus_jobs import local_executor
from .corpus_results import ResultFile, Row, compare, read_rows
from .dask_cluster import dask_cluster
from .errors import FakeifyError
from .junit import junit_xml
from .page import table_lines
from .progress import progress
from .text import clip
from .whole_files import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .corpus_jobs import Job
    from .corpus_results import Comparison

__all__ = ["CorpusReport", "Outputs", "replay_corpus"]

_AHEAD = 2
"""Captures read for each local job: it never waits for the next one."""
_WIDEST = 160


@dataclass(frozen=True)
class Outputs:
    """Where results go, and what they are held against."""

    jsonl: str | None = None
    """JSON lines, written as results come."""
    junit: str | None = None
    against: str | None = None
    """An earlier result, as JSON lines."""
    resume: bool = False
    """Take over what ``jsonl`` has."""


@dataclass
class CorpusReport:
    """What came of a corpus."""

    total: int
    rows: list[Row] = field(default_factory=list[Row])
    """In the order of the files."""
    seconds: float = 0.0
    comparison: Comparison | None = None
    stopped: BaseException | None = None
    """What ended the run early: ``KeyboardInterrupt``, or a ``FakeifyError`` of the executor."""

    @property
    def wrong(self) -> list[Row]:
        """The captures that fail the run: that do not hold, or newly, if there is a comparison."""
        if self.comparison is None:
            return [row for row in self.rows if not row.holds]
        return [c.after for c in self.comparison.newly_fails if c.after is not None]

    def lines(self) -> list[str]:
        """The captures that do not hold, the comparison, and how many have which verdict."""
        lines: list[str] = []
        bad = [row for row in self.rows if not row.holds]
        if bad:
            rows = [(row.file, row.verdict, _found(row)) for row in bad]
            lines += [*table_lines([("file", "verdict", "found"), *rows]), ""]
        if self.comparison is not None:
            lines += [*self.comparison.lines(), ""]
        copies = sum(row.same_as is not None for row in self.rows)
        done = (
            str(self.total) if len(self.rows) == self.total else f"{len(self.rows)} of {self.total}"
        )
        noun = "capture" if self.total == 1 else "captures"
        lines.append(f"{done} {noun} in {self.seconds:.1f} s, {len(bad)} do not hold")
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
    outputs: Outputs | None = None,
) -> CorpusReport:
    """Compile every capture of a corpus, and keep the results.

    Args:
        paths: capture files, and directories of them.
        job: backend, device, limits.
        jobs: how many captures are compiled at a time on this machine.
        dask: address of a Dask scheduler, whose workers then do the work instead.
        every: compile each capture, also of a frame that another one has.
        outputs: where the results go.

    Raises:
        FormatError: there are no captures, or an earlier result is none.
        WriteError: a result cannot be written.
        FakeifyError: there is no such backend or no such cluster.
    """
    outputs = outputs or Outputs()
    files = find_captures(paths)
    earlier = None if outputs.against is None else read_rows(outputs.against)
    known = _known(outputs)
    names = [file.name for file in files]
    report = CorpusReport(len(files))
    started = time.monotonic()
    with ExitStack() as stack:
        if dask is None:
            jobs = min(jobs, len(files))
            executor, window, share = stack.enter_context(local_executor(jobs)), _AHEAD * jobs, jobs
        else:
            cluster = stack.enter_context(dask_cluster(dask))
            executor, window, share = cluster.executor, cluster.window, cluster.share
        job = replace(job, share=share)
        check_backend(executor, job)
        rows = replay_all(
            files,
            executor,
            job,
            window=window,
            send_files=dask is not None,
            every=every,
            known=known,
        )
        if outputs.junit is not None:
            write_whole(outputs.junit, junit_xml([], backend=job.backend))  # that it can be
        result = None
        if outputs.jsonl is not None:
            result = stack.enter_context(ResultFile(outputs.jsonl, names, known.values()))
        _collect(rows, report, result)
    report.seconds = time.monotonic() - started
    order = {name: number for number, name in enumerate(names)}
    report.rows.sort(key=lambda row: order[row.file])
    if outputs.junit is not None:
        write_whole(outputs.junit, junit_xml(report.rows, backend=job.backend))
    if earlier is not None:
        report.comparison = compare(earlier, report.rows)
    return report


def _collect(rows: Iterable[Row], report: CorpusReport, result: ResultFile | None) -> None:
    """Take the rows as they come, until there are no more or the run is ended."""
    with progress(report.total) as step:
        try:
            for row in rows:
                report.rows.append(row)
                if result is not None:
                    result.add(row)
                step(row.holds)
        except (KeyboardInterrupt, FakeifyError) as error:
            report.stopped = error


def _known(outputs: Outputs) -> dict[str, Row]:
    """What an earlier run of the same command has left behind."""
    if not outputs.resume or outputs.jsonl is None or not Path(outputs.jsonl).exists():
        return {}
    return {row.file: row for row in read_rows(outputs.jsonl, whole=False)}
