"""The command line: each command parses its arguments, calls one function and prints the result.

Exit status 0 done, 1 the thing checked does not hold, 2 bad usage or bad file, 130 interrupted (143 by
SIGTERM, 129 by SIGHUP). Commands import torch only if they need it, so ``show`` and ``--help`` are fast.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import zipfile
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from torch_fakeify.render.text import count_text, escape
from torch_fakeify.serialization.capture_file import read_capture
from torch_fakeify.serialization.container import Limits
from torch_fakeify.serialization.document import dumps
from torch_fakeify.tools.parser import make_parser
from torch_fakeify.tools.terminal import print_lines, status, terminal_columns
from torch_fakeify.tools.worker.client import RECORDING

from ._atomic_write import check_not_input, check_writable, write_atomic
from .errors import FakeifyError, NotFailingError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Generator, Sequence
    from typing import Any

    from torch_fakeify.corpus.jobs import Job
    from torch_fakeify.render.show import Part
    from torch_fakeify.tools.run_script import ScriptReport

DONE, DOES_NOT_HOLD, BAD = 0, 1, 2
INTERRUPTED = 130
_COMPILING = ("backend", "imports", "device", "timeout", "memory", "trust")
"""The options by which a command compiles a capture."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets its escape, not a UnicodeEncodeError.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with _ending_signals() as ended_by:
        try:
            status = _carry_out(argv)
        except KeyboardInterrupt:
            _print_error(f"torch-fakeify: interrupted{_by(ended_by)}")
            status = INTERRUPTED
        else:
            if ended_by and status < INTERRUPTED:
                # C++ that imports a module, as torch's does, drops a `KeyboardInterrupt` of the import.
                _print_error(
                    f"torch-fakeify: interrupted{_by(ended_by)}; torch ignored it, so what is printed "
                    "may be wrong: run the command again"
                )
                status = INTERRUPTED
    return 128 + ended_by[0] if ended_by and status == INTERRUPTED else status


def _by(signals: list[int]) -> str:
    """How a message names the first of the received signals; Ctrl-C has no name."""
    named = signals[:1] not in ([], [signal.SIGINT])
    return f" by {signal.Signals(signals[0]).name}" if named else ""


@contextmanager
def _ending_signals() -> Generator[list[int]]:
    """Turn SIGTERM and SIGHUP into ``KeyboardInterrupt`` too, so that child processes are ended.

    Yields the list of received signals, SIGINT among them. A handler that the program has set stays.
    """
    came: list[int] = []

    def interrupt(number: int, _frame: object) -> None:
        came.append(number)
        raise KeyboardInterrupt

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                before[number] = signal.signal(number, interrupt)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _carry_out(argv: Sequence[str] | None) -> int:
    args = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = args.command
    for name in RECORDING:  # some commands compile in this process
        os.environ.pop(name, None)
    try:
        status = command(args)
        sys.stdout.flush()
    except FakeifyError as error:
        _print_error(f"torch-fakeify: error: {error}")
        return BAD
    except BrokenPipeError:
        # The reader has closed the pipe; flushing at exit must not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    else:
        return status


def _parser() -> argparse.ArgumentParser:
    return make_parser(
        {
            "run": _run, "show": _show, "replay": _replay, "bisect": _bisect, "diff": _diff,
            "fuzz": _fuzz, "fakes": _fakes, "report": _report, "minify": _minify, "issue": _issue,
            "doctor": _doctor, "demo": _demo,
        }
    )  # fmt: skip


def _options(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return options as keywords of the function that carries out a command."""
    return {name: getattr(args, name) for name in names}


# --- commands -----------------------------------------------------------------------------------


def _run(args: argparse.Namespace) -> int:
    from torch_fakeify.tools.run_script import run

    if args.minify and args.script_status:
        args.parser.error(
            "--script-status is not for --minify, whose exit status is that of minify"
        )
    report = run(
        args.script,
        args.args,
        args.out,
        **_options(args, "module", "backend", "imports", "on_error", "level", "infer_fakes"),
        constants="small" if args.with_data else "none",
        paths="full" if args.with_paths else "short",
        version=args.format_version,
    )
    status = _print_run(report, args)
    if args.minify and report.ending != "interrupted" and not report.is_well:
        minify = args.parsers["minify"].parse_args(["-"])
        return _minify_failing(report, minify)
    return status


def _print_run(report: ScriptReport, args: argparse.Namespace) -> int:
    print_lines([*report.lines(terminal_columns()), *report.fake_lines(), *report.next_lines()])
    sys.stdout.flush()
    if report.ending == "interrupted":
        by = "" if report.cause == "SIGINT" else f" by {report.cause}"
        files = count_text(len(report.paths), "capture")
        _print_error("\n".join(report.failure_lines()))
        _print_error(f"torch-fakeify: interrupted{by}; {files} in {report.folder}")
        return report.status
    _print_error("\n".join([*report.crash_lines(), *report.failure_lines()]))
    if report.summary():
        _print_error(f"torch-fakeify: {report.summary()}")
    if args.script_status:
        return report.status
    return DONE if report.is_well else DOES_NOT_HOLD


def _minify_failing(report: ScriptReport, args: argparse.Namespace) -> int:
    """Minify the first frame of a run that failed; ``args`` are those of ``minify``."""
    found = report.failing()
    if found is None:
        _print_error("torch-fakeify: no recorded frame failed: there is nothing to minify")
        return DOES_NOT_HOLD
    path, how = found
    args.args = []
    args.file, args.backend, args.imports = os.path.relpath(path), how.backend, list(how.imports)
    return _minify(args)


def _minify_script(args: argparse.Namespace) -> int:
    from torch_fakeify.tools.run_script import run

    report = run(args.file, args.args, backend=args.backend, imports=args.imports)
    args.script_status = False
    status = _print_run(report, args)
    return status if report.ending == "interrupted" else _minify_failing(report, args)


def _show(args: argparse.Namespace) -> int:
    from torch_fakeify.render.privacy import privacy_lines
    from torch_fakeify.render.show import PARTS, loss_lines, section_lines, show_lines
    from torch_fakeify.render.summary import summary_lines

    limits = Limits.none() if args.trust else None
    if Path(args.file).is_dir() and not (args.json or args.privacy):
        from torch_fakeify.corpus.listing import list_captures

        listing = list_captures(args.file, limits=limits)
        print_lines(listing.lines(terminal_columns()))
        return BAD if listing.errors else DONE
    desc = read_capture(args.file, limits=limits)
    parts: list[Part] = [part for part in PARTS if getattr(args, part)]
    if args.json:
        print(_escape_json(dumps(desc).decode("utf-8")))
    elif args.privacy:
        print_lines(privacy_lines(desc))
    elif args.unproved:
        from torch_fakeify.tools.unproved import unproved_of

        print_lines(unproved_of(desc).lines())
    elif args.all:
        lines, lost = show_lines(desc, torch_names=args.torch_names), loss_lines(desc)
        print_lines([*lines, *([""] if lost else []), *lost])
    elif parts:
        print_lines(section_lines(desc, parts, torch_names=args.torch_names))
    else:
        names = args.torch_names
        print_lines(
            summary_lines(desc, file=args.file, columns=terminal_columns(), torch_names=names)
        )
    return DONE


def _escape_json(text: str) -> str:
    """Return equivalent JSON with printable characters only."""
    if text.isprintable():
        return text
    parts = (c if c.isprintable() else c.encode("utf-16-be", "surrogatepass").hex() for c in text)
    return "".join(
        p if len(p) == 1 else f"\\u{p[:4]}" + (f"\\u{p[4:]}" if p[4:] else "") for p in parts
    )


def _replay(args: argparse.Namespace) -> int:
    from torch_fakeify.tools.replaying import FAILURES, replay_capture

    if args.tolerance is not None and len(args.pythons) < 2:
        args.parser.error("--tolerance compares several --python")
    if len(args.pythons) > 1:
        return _replay_side_by_side(args)
    if _is_corpus(args):
        return _replay_corpus(args)
    with status(f"replay: compiling {args.files[0]} in a fresh interpreter"):
        report = replay_capture(
            args.files[0],
            **_options(args, *_COMPILING),
            python=args.pythons[0] if args.pythons else None,
            time=args.time,
        )
    print_lines(report.lines())
    if report.verdict in FAILURES and not args.pythons:
        _print_minify_command(args, args.files[0])
    return DONE if report.holds else DOES_NOT_HOLD


def _print_minify_command(args: argparse.Namespace, file: str) -> None:
    """Print the command that makes a frame small which failed to compile with these options."""
    from torch_fakeify.render.summary import command_line

    options = ["--trust"] if args.trust else []
    if args.device is not None:
        options += ["--device", args.device]
    if args.timeout != args.parser.get_default("timeout"):
        options += ["--timeout", f"{args.timeout:g}"]
    if args.memory is not None:
        options += ["--memory", str(args.memory >> 20)]
    command = command_line("minify", file, args.backend, args.imports, options)
    print_lines(["", "next", f"  {command}"])


def _is_corpus(args: argparse.Namespace) -> bool:
    asked = ("jobs", "jsonl", "junit", "against", "resume", "all", "dask")
    several = len(args.files) > 1 or Path(args.files[0]).is_dir()
    return several or any(getattr(args, name) for name in asked)


def _replay_corpus(args: argparse.Namespace) -> int:
    from torch_fakeify.corpus.command import replay_corpus
    from torch_fakeify.tools.replaying import FAILURES
    from torch_fakeify.tools.run_failures import short_path

    if args.resume and args.jsonl is None:
        args.parser.error("--resume needs --jsonl")
    if args.dask is not None and args.jobs is not None:
        args.parser.error("--jobs is of this machine: a Dask cluster has as many as its threads")
    if args.dask is not None and args.pythons:
        args.parser.error(
            "--python is of this machine: the workers of a Dask cluster have their own"
        )
    report = replay_corpus(
        args.files,
        _job(args),
        jobs=args.jobs or _cores(),
        dask=args.dask,
        every=args.all,
        **_options(args, "jsonl", "junit", "against", "resume"),
    )
    print_lines(report.lines(terminal_columns()))
    failed = next((row.file for row in report.wrong if row.verdict in FAILURES), None)
    if failed is not None and not args.pythons:
        _print_minify_command(args, short_path(str(report.paths[failed])))
    sys.stdout.flush()
    if report.stopped is not None:
        error = report.stopped if isinstance(report.stopped, FakeifyError) else "interrupted"
        again = "--resume" if args.jsonl else "--jsonl OUT --resume"
        _print_error(f"torch-fakeify: {error}; run it with {again} to go on from there")
        return BAD if isinstance(error, FakeifyError) else INTERRUPTED
    if any(row.is_error for row in report.wrong):
        return BAD
    return DOES_NOT_HOLD if report.wrong else DONE


def _replay_side_by_side(args: argparse.Namespace) -> int:
    from torch_fakeify.corpus.command import replay_side_by_side
    from torch_fakeify.tools.worker.interpreters import find_interpreter

    for name in ("jsonl", "junit", "against", "resume", "dask"):
        if getattr(args, name):
            args.parser.error(f"--{name} takes one --python")
    with status(f"replay: compiling with {len(args.pythons)} interpreters"):
        found = replay_side_by_side(
            args.files,
            _job(args),
            [find_interpreter(each) for each in args.pythons],
            jobs=args.jobs or _cores(),
            every=args.all,
            tolerance=args.tolerance,
        )
    print_lines(found.lines())
    if any(row.is_error for rows in found.rows for row in rows):
        return BAD
    return DONE if found.holds else DOES_NOT_HOLD


def _job(args: argparse.Namespace) -> Job:
    from torch_fakeify.corpus.jobs import Job
    from torch_fakeify.tools.worker.interpreters import find_interpreter

    python = find_interpreter(args.pythons[0]).executable if args.pythons else None
    return Job.compiling(**_options(args, *_COMPILING, "time"), python=python)


def _bisect(args: argparse.Namespace) -> int:
    from torch_fakeify.tools.bisecting import bisect

    if len(args.pythons) < 2:
        args.parser.error("--python is needed at least twice")
    with status(f"bisect: compiling {args.file} with {len(args.pythons)} interpreters"):
        found = bisect(args.file, args.pythons, **_options(args, *_COMPILING))
    print_lines(found.lines())
    return DOES_NOT_HOLD if found.first is None else DONE


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _diff(args: argparse.Namespace) -> int:
    from torch_fakeify.tools.diffing import diff

    found = diff(args.a, args.b, trust=args.trust)
    print_lines(found.lines())
    return DONE if found.is_one_frame else DOES_NOT_HOLD


def _fuzz(args: argparse.Namespace) -> int:
    from torch_fakeify.tools.fuzzing import fuzz

    if args.save is not None:
        check_not_input(args.save, args.file)  # before the search, which takes a while
        check_writable(args.save)
    with status(f"fuzz: compiling {args.file}") as show:
        report = fuzz(
            args.file,
            **_options(args, "backend", "imports", "runs", "seed", "timeout", "memory", "trust"),
            progress=lambda text: show(f"fuzz: {text}"),
        )
    if args.save is not None:
        report.save(args.save)
    print_lines(report.lines())
    if report.interrupted:
        return _interrupted("what it found is above")
    if report.smallest is not None:
        return DOES_NOT_HOLD
    return DONE if report.compared else BAD


def _fakes(args: argparse.Namespace) -> int:
    from torch_fakeify.tools.checking_fakes import check_fakes

    script = args.output or str(Path(args.file).with_suffix(".fakes.py"))
    with status(f"fakes: running {args.file}") as show:
        report = check_fakes(
            args.file,
            sizes=[args.sizes] if args.sizes else None,
            script=script,
            **_options(args, "imports", "runs", "seed", "device", "timeout", "memory", "trust"),
            progress=lambda text: show(f"fakes: {text}"),
        )
    print_lines(report.lines())
    if report.interrupted:
        return _interrupted("what it found is above")
    if report.differences:
        return DOES_NOT_HOLD
    return DONE if report.operators else BAD


def _report(args: argparse.Namespace) -> int:
    from torch_fakeify.tools.reporting import report

    with status(f"report: compiling {args.file}") if args.stages else nullcontext():
        written = report(
            args.file,
            args.output,
            **_options(args, "stages", "backend", "imports", "timeout", "trust"),
        )
    print_lines(written.lines())
    return BAD if written.errors else DONE


def _minify(args: argparse.Namespace) -> int:
    from torch_fakeify.tools.minify.search import minify

    if Path(args.file).suffix == ".py" and not zipfile.is_zipfile(args.file):
        return _minify_script(args)
    if args.args:
        args.parser.error("ARGS are for a script, FILE.py")
    try:
        with status(f"minify: compiling {args.file}") as show:
            report = minify(
                args.file,
                args.output,
                **_options(args, *_COMPILING, "accuracy", "sizes", "seed", "jobs"),
                script=not args.no_script,
                progress=lambda now: show(
                    f"minify: {now.tried} tried, {count_text(now.extent.operations, 'operation')} left; "
                    f"now {now.reduction}"
                ),
            )
    except NotFailingError as error:
        _print_error(f"torch-fakeify: {error}")
        return DOES_NOT_HOLD
    except KeyboardInterrupt:  # before there was a result
        _print_error("torch-fakeify: interrupted; nothing was written")
        return INTERRUPTED
    print_lines([*report.lines(), f"wrote {report.path}"])
    if report.script is not None:
        print_lines([f"wrote {report.script}"])
    if report.script is not None and report.holds:
        print_lines(
            ["", "next", f"  python {report.script}", f"  torch-fakeify issue {report.path}"]
        )
    if report.interrupted:
        return INTERRUPTED
    if report.holds is None:
        return BAD
    return DONE if report.holds else DOES_NOT_HOLD


def _issue(args: argparse.Namespace) -> int:
    from torch_fakeify.tools.issue import issue

    if args.output is not None:
        check_not_input(args.output, args.file)
        check_not_input(args.output, Path(args.file).with_suffix(".py"))
        check_writable(args.output)
    try:
        with status(f"issue: running the script of {args.file}"):
            report = issue(args.file, **_options(args, "backend", "imports", "timeout", "trust"))
    except NotFailingError as error:
        _print_error(f"torch-fakeify: {error}")
        return DOES_NOT_HOLD
    if args.output is None:
        print(report.text, end="")
    else:
        write_atomic(args.output, report.text.encode())
        print_lines([f"script: {report.state}", f"wrote {args.output}"])
    if report.outcome is None or report.outcome.fails is None:
        return BAD
    return DONE if report.outcome.fails else DOES_NOT_HOLD


def _doctor(args: argparse.Namespace) -> int:
    from torch_fakeify.tools.doctor import doctor

    with status("doctor: importing torch, trying a C++ compiler and a few tensors"):
        found = doctor()
    if args.json:
        for line in json.dumps(found.as_json(), indent=1).splitlines():
            print(_escape_json(line))
    else:
        print_lines(found.lines(every=args.all))
    return DONE if found.is_well else DOES_NOT_HOLD


def _demo(args: argparse.Namespace) -> int:
    if not args.check:
        from torch_fakeify.tools.demo.tour import show_tour

        if args.backend is not None or args.imports:
            args.parser.error("--backend and --import are for --check: the demo plants a backend")
        _, problem = show_tour(_say)
        return DOES_NOT_HOLD if problem else DONE
    from torch_fakeify.tools.demo.runner import run_demo

    report = run_demo(args.backend or "inductor", args.imports)
    print_lines(report.lines())
    return DONE if report.holds else DOES_NOT_HOLD


def _interrupted(text: str) -> int:
    sys.stdout.flush()
    _print_error(f"torch-fakeify: interrupted; {text}")
    return INTERRUPTED


def _say(text: str) -> None:
    """Print a part of a line at once."""
    print("\n".join(map(escape, text.split("\n"))), end="", flush=True)


def _print_error(text: str) -> None:
    print_lines(text.splitlines(), sys.stderr)
