"""Commands of the command line that compile with other interpreters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_fakeify.tools.command_options import compile_options

if TYPE_CHECKING:
    import argparse

    from torch_fakeify.corpus.jobs import Job

_DONE, _DOES_NOT_HOLD, _BAD = 0, 1, 2


def executable_of(args: argparse.Namespace) -> str | None:
    """Return the first interpreter that the options name.

    Raises:
        CaptureError: it cannot compile captures.
    """
    from torch_fakeify.tools.worker.interpreters import find_interpreter

    return find_interpreter(args.pythons[0]).executable if args.pythons else None


def replay_side_by_side(args: argparse.Namespace, job: Job, *, jobs: int) -> tuple[int, list[str]]:
    """Compile captures with several interpreters; returns the exit status and the table."""
    from torch_fakeify.corpus.side_by_side import replay_side_by_side
    from torch_fakeify.tools.worker.interpreters import find_interpreter

    for name in ("jsonl", "junit", "against", "resume", "dask"):
        if getattr(args, name):
            args.parser.error(f"--{name} takes one --python")
    found = replay_side_by_side(
        args.files,
        job,
        [find_interpreter(each) for each in args.pythons],
        jobs=jobs,
        every=args.all,
        tolerance=args.tolerance,
    )
    if any(row.is_error for rows in found.rows for row in rows):
        return _BAD, found.lines()
    return _DONE if found.holds else _DOES_NOT_HOLD, found.lines()


def bisect(args: argparse.Namespace) -> tuple[int, list[str]]:
    """Find the interpreter at which a verdict changes; returns the exit status and the verdicts."""
    from torch_fakeify.tools.bisecting import bisect

    if len(args.pythons) < 2:
        args.parser.error("--python is needed at least twice")
    found = bisect(args.file, args.pythons, **compile_options(args))
    return _DOES_NOT_HOLD if found.first is None else _DONE, found.lines()
