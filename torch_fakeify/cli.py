"""The command line: each command parses its arguments, calls one function and prints the result.

Exit status 0 done, 1 the thing checked does not hold, 2 bad usage or bad file, 130 interrupted (143 by
SIGTERM, 129 by SIGHUP). Commands import torch only if they need it, so ``show`` and ``--help`` are fast.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import signal
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torch_fakeify.render.text import escape
from torch_fakeify.serialization.capture_file import read_capture
from torch_fakeify.serialization.container import VERSION, Limits
from torch_fakeify.serialization.document import dumps

from ._atomic_write import check_not_input, check_writable
from ._version import __version__
from .errors import FakeifyError, NotFailingError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from torch_fakeify.records.frame import CaptureDesc
    from torch_fakeify.tools.minify.search import Progress

DONE, DOES_NOT_HOLD, BAD = 0, 1, 2
INTERRUPTED = 130


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
            by = f" by {signal.Signals(ended_by[0]).name}" if ended_by else ""
            _print_error(f"torch-fakeify: interrupted{by}")
            status = INTERRUPTED
    return 128 + ended_by[0] if ended_by and status == INTERRUPTED else status


@contextmanager
def _ending_signals() -> Generator[list[int]]:
    """Turn SIGTERM and SIGHUP into ``KeyboardInterrupt``, so that child processes are ended.

    Yields the list of received signals.
    """
    came: list[int] = []

    def interrupt(number: int, _frame: object) -> None:
        came.append(number)
        raise KeyboardInterrupt

    before: dict[int, object] = {}
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) == signal.SIG_DFL:
                before[number] = signal.signal(number, interrupt)
    try:
        yield came
    finally:
        for number in before:
            signal.signal(number, signal.SIG_DFL)


def _carry_out(argv: Sequence[str] | None) -> int:
    args = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = args.command
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
    parser = argparse.ArgumentParser(
        prog="torch-fakeify",
        description="Record a torch.compile frame in one small file, and rebuild it anywhere.",
        epilog="Exit status: 0 done, 1 the thing checked does not hold, 2 bad usage or bad file, "
        "130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"torch-fakeify {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run",
        help="run a script and record every frame that it compiles",
        epilog="Exit status: 0 the script ended well, and every frame was compiled and is on record; 1 the "
        "script or a frame failed, a frame is not on record, or nothing was compiled; 2 it was not "
        "started, or ended before it compiled anything; 130 interrupted.",
    )
    run.add_argument("--out", default="captures", metavar="DIR", help="default: %(default)s")
    run.add_argument("--backend", metavar="NAME", help="instead of the script's own backends")
    run.add_argument(
        "--on-error",
        choices=["warn", "raise"],
        default="warn",
        help="if a frame cannot be recorded: warn and compile it, or raise in the script; "
        "default: %(default)s",
    )
    run.add_argument(
        "--script-status",
        action="store_true",
        help="end with the script's own exit status, as python SCRIPT would",
    )
    run.add_argument(
        "--with-data",
        action="store_true",
        help="also record the elements of tensors of at most 4096 bytes that a graph itself holds, "
        "and of 0-dim inputs",
    )
    run.add_argument(
        "--with-paths",
        action="store_true",
        help="do not shorten absolute paths and messages of exceptions, which may name the user, "
        "the host and folders",
    )
    run.add_argument(
        "--format-version",
        type=int,
        default=VERSION,
        metavar="N",
        help="of the files, for an older reader; default: %(default)s",
    )
    run.add_argument("script", metavar="SCRIPT")
    run.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS")
    run.set_defaults(command=_run)

    show = commands.add_parser(
        "show", help="what a capture holds, or which captures a directory holds"
    )
    show.add_argument(
        "--json", action="store_true", help="the records, as torch_fakeify.loads reads"
    )
    show.add_argument(
        "--privacy",
        action="store_true",
        help="every text in the file that comes from the program that was recorded",
    )
    show.add_argument("file", metavar="FILE|DIR")
    show.set_defaults(command=_show)

    replay = commands.add_parser(
        "replay",
        help="compile a capture, or a corpus of them, in fresh interpreters",
        epilog="Exit status: 0 all hold; 1 some do not: with --against, some that held earlier or were "
        "not there; 2 bad usage, or a capture has no verdict, as a bad file; 130 interrupted.",
    )
    replay.add_argument(
        "--backend", default="inductor", metavar="NAME", help="default: %(default)s"
    )
    replay.add_argument("--device", help="put what was on an accelerator there, e.g. cpu")
    replay.add_argument(
        "--timeout", type=_seconds, default=600.0, metavar="S", help="seconds; default: 600"
    )
    replay.add_argument(
        "--memory",
        type=_mebibytes,
        metavar="MIB",
        help="that the compilation may hold; default: nine tenths of what is free",
    )
    replay.add_argument("files", nargs="+", metavar="FILE|DIR")
    corpus = replay.add_argument_group("for a directory, or several files")
    corpus.add_argument(
        "--jobs", type=_count, metavar="N", help="captures at a time; default: one a core"
    )
    corpus.add_argument(
        "--jsonl", metavar="OUT", help="write a JSON object for each capture when it is done"
    )
    corpus.add_argument("--junit", metavar="OUT", help="write JUnit XML")
    corpus.add_argument(
        "--against",
        metavar="EARLIER",
        help="compare with the --jsonl of an earlier run: only new failures set exit status 1",
    )
    corpus.add_argument(
        "--resume", action="store_true", help="reuse the results in the file of --jsonl"
    )
    corpus.add_argument(
        "--all", action="store_true", help="compile every capture, also several of one frame"
    )
    corpus.add_argument(
        "--dask",
        metavar="ADDRESS",
        help="of a Dask scheduler, whose workers compile (extra: dask)",
    )
    replay.set_defaults(command=_replay, parser=replay)

    diff = commands.add_parser("diff", help="why two frames are not one")
    diff.add_argument("a", metavar="A")
    diff.add_argument("b", metavar="B")
    diff.set_defaults(command=_diff)

    fuzz = commands.add_parser(
        "fuzz",
        help="run a frame at other sizes that its guards admit",
        epilog="Exit status: 0 all that was compared holds; 1 some sizes fail; 2 nothing was compared "
        "with eager, or the frame cannot be run.",
    )
    fuzz.add_argument("--backend", default="inductor", metavar="NAME", help="default: %(default)s")
    fuzz.add_argument("--runs", type=_count, default=60, metavar="N", help="sizes; default: 60")
    fuzz.add_argument("--seed", type=int, default=0, metavar="S", help="default: 0")
    fuzz.add_argument("--timeout", type=_seconds, default=600.0, metavar="S", help="default: 600")
    fuzz.add_argument("--memory", type=_mebibytes, metavar="MIB", help="that a batch may hold")
    fuzz.add_argument("--save", metavar="JSON", help="write the sizes that fail")
    fuzz.add_argument("file", metavar="FILE")
    fuzz.set_defaults(command=_fuzz)

    report = commands.add_parser("report", help="a capture as one page for a browser")
    report.add_argument("-o", "--output", metavar="OUT", help="default: FILE with .html")
    report.add_argument("file", metavar="FILE")
    report.set_defaults(command=_report)

    minify = commands.add_parser("minify", help="the smallest frame that fails in the same way")
    minify.add_argument(
        "--backend", default="inductor", metavar="NAME", help="default: %(default)s"
    )
    minify.add_argument("-o", "--output", metavar="OUT", help="default: FILE with .min.fkf")
    minify.add_argument(
        "--accuracy",
        action="store_true",
        help="also run what was compiled, forward and backward, and compare with eager",
    )
    minify.add_argument(
        "--sizes",
        type=_sizes,
        default={},
        metavar="NAME=N,...",
        help="to run it at, or the file that `fuzz --save` wrote; default: as recorded",
    )
    minify.add_argument("--seed", type=int, default=0, metavar="S", help="default: 0")
    minify.add_argument("--device", help="put what was on an accelerator there, e.g. cpu")
    minify.add_argument(
        "--timeout", type=_seconds, default=600.0, metavar="S", help="for one try; default: 600"
    )
    minify.add_argument("--memory", type=_mebibytes, metavar="MIB", help="that one try may hold")
    minify.add_argument("--jobs", type=_count, default=1, metavar="N", help="default: 1")
    minify.add_argument("--no-script", action="store_true", help="write the capture alone")
    minify.add_argument("file", metavar="FILE")
    minify.set_defaults(command=_minify)

    doctor = commands.add_parser(
        "doctor",
        help="versions, findings about the installed torch, and available features",
        epilog="Exit status: 0 all is known; 1 something is not, or torch is refused or missing.",
    )
    doctor.add_argument("--json", action="store_true", help="the same as a JSON object")
    doctor.set_defaults(command=_doctor)

    demo = commands.add_parser("demo", help="record a small decoder, rebuild and run it elsewhere")
    demo.add_argument("--backend", default="inductor", metavar="NAME", help="default: %(default)s")
    demo.set_defaults(command=_demo)
    for command in (show, replay, diff, fuzz, minify, report):
        command.add_argument(
            "--trust",
            action="store_true",
            help="read a file that asks for more than a capture of its size needs",
        )
    return parser


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds; found {text!r}")
    return value


def _mebibytes(text: str) -> int:
    return _positive(text, "must be a positive number of MiB") << 20


def _count(text: str) -> int:
    return _positive(text, "must be at least 1")


def _positive(text: str, expected: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{expected}; found {text!r}")
    return value


def _sizes(text: str) -> dict[str, int]:
    from torch_fakeify.frames.inputs.size_names import parse_sizes

    try:
        return parse_sizes(text)
    except FakeifyError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


# --- commands -----------------------------------------------------------------------------------


def _run(args: argparse.Namespace) -> int:
    from torch_fakeify.tools.run_script import run_script

    report = run_script(
        args.script,
        args.args,
        args.out,
        backend=args.backend,
        constants="small" if args.with_data else "none",
        paths="full" if args.with_paths else "short",
        version=args.format_version,
        on_error=args.on_error,
    )
    _print(report.lines())
    sys.stdout.flush()
    if report.ending == "interrupted":
        by = "" if report.cause == "SIGINT" else f" by {report.cause}"
        files = sum(frame.path is not None for frame in report.frames)
        noun = "capture" if files == 1 else "captures"
        _print_error(f"torch-fakeify: interrupted{by}; {files} {noun} in {args.out}")
        return report.status
    _print_error("\n".join(report.crash_lines()))
    if report.summary():
        _print_error(f"torch-fakeify: {report.summary()}")
    if args.script_status:
        return report.status
    return DONE if report.is_well else DOES_NOT_HOLD


def _show(args: argparse.Namespace) -> int:
    from torch_fakeify.render.privacy import privacy_lines
    from torch_fakeify.render.show import loss_lines, show_lines

    if Path(args.file).is_dir() and not (args.json or args.privacy):
        return _show_directory(args)
    desc = _read(args.file, args)
    if args.json:
        _print([_escape_json(dumps(desc).decode("utf-8"))])
    elif args.privacy:
        _print(privacy_lines(desc))
    else:
        lines, lost = show_lines(desc), loss_lines(desc)
        _print([*lines, *([""] if lost else []), *lost])
    return DONE


def _show_directory(args: argparse.Namespace) -> int:
    from torch_fakeify.corpus.listing import list_captures

    listing = list_captures(args.file, limits=Limits.none() if args.trust else None)
    _print(listing.lines(shutil.get_terminal_size().columns))
    return BAD if listing.errors else DONE


def _read(path: str, args: argparse.Namespace) -> CaptureDesc:
    return read_capture(path, limits=Limits.none() if args.trust else None)


def _escape_json(text: str) -> str:
    """Return equivalent JSON with printable characters only."""
    if text.isprintable():
        return text
    parts = (c if c.isprintable() else c.encode("utf-16-be", "surrogatepass").hex() for c in text)
    return "".join(
        p if len(p) == 1 else f"\\u{p[:4]}" + (f"\\u{p[4:]}" if p[4:] else "") for p in parts
    )


def _replay(args: argparse.Namespace) -> int:
    from torch_fakeify.tools.replaying import replay

    if _is_corpus(args):
        return _replay_corpus(args)
    verdict = replay(
        args.files[0],
        backend=args.backend,
        device=args.device,
        timeout=args.timeout,
        memory=args.memory,
        trust=args.trust,
    )
    _print([verdict.word, *(f"  {line}" for line in verdict.details)])
    return DONE if verdict.holds else DOES_NOT_HOLD


def _is_corpus(args: argparse.Namespace) -> bool:
    asked = ("jobs", "jsonl", "junit", "against", "resume", "all", "dask")
    several = len(args.files) > 1 or Path(args.files[0]).is_dir()
    return several or any(getattr(args, name) for name in asked)


def _replay_corpus(args: argparse.Namespace) -> int:
    from torch_fakeify.corpus.command import Outputs, replay_corpus
    from torch_fakeify.corpus.jobs import Job

    if args.resume and args.jsonl is None:
        args.parser.error("--resume needs --jsonl")
    if args.dask is not None and args.jobs is not None:
        args.parser.error("--jobs is of this machine: a Dask cluster has as many as its threads")
    report = replay_corpus(
        args.files,
        Job(
            "compile",
            args.backend,
            device=args.device,
            timeout=args.timeout,
            memory=args.memory,
            trust=args.trust,
        ),
        jobs=args.jobs or _cores(),
        dask=args.dask,
        every=args.all,
        outputs=Outputs(args.jsonl, args.junit, args.against, args.resume),
    )
    _print(report.lines())
    sys.stdout.flush()
    if report.stopped is not None:
        error = report.stopped if isinstance(report.stopped, FakeifyError) else "interrupted"
        again = "--resume" if args.jsonl else "--jsonl OUT --resume"
        _print_error(f"torch-fakeify: {error}; run it with {again} to go on from there")
        return BAD if isinstance(error, FakeifyError) else INTERRUPTED
    if any(row.is_error for row in report.wrong):
        return BAD
    return DOES_NOT_HOLD if report.wrong else DONE


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _diff(args: argparse.Namespace) -> int:
    from torch_fakeify.render.diff import difference_lines, differences

    found = differences(_read(args.a, args), _read(args.b, args))
    _print(difference_lines(found) or ["one frame"])
    return DOES_NOT_HOLD if found else DONE


def _fuzz(args: argparse.Namespace) -> int:
    from torch_fakeify.tools.fuzzing import fuzz

    desc = _read(args.file, args)
    if args.save is not None:
        check_not_input(args.save, args.file)  # before the search, which takes a while
        check_writable(args.save)
    report = fuzz(
        args.file,
        desc,
        backend=args.backend,
        runs=args.runs,
        seed=args.seed,
        timeout=args.timeout,
        memory=args.memory,
        trust=args.trust,
    )
    if args.save is not None:
        report.save(args.save, backend=args.backend)
    _print(report.lines())
    if report.interrupted:
        return _interrupted("what it found is above")
    if report.smallest is not None:
        return DOES_NOT_HOLD
    return DONE if report.compared else BAD


def _report(args: argparse.Namespace) -> int:
    from torch_fakeify.render.report.page import write_report

    output = Path(args.output or Path(args.file).with_suffix(".html"))
    write_report(output, _read(args.file, args), source=args.file)
    _print([f"wrote {output}"])
    return DONE


def _minify(args: argparse.Namespace) -> int:
    from torch_fakeify.tools.minify.search import minify

    output = Path(args.output or Path(args.file).with_suffix(".min.fkf"))
    try:
        report = minify(
            args.file,
            output,
            backend=args.backend,
            accuracy=args.accuracy,
            sizes=args.sizes,
            seed=args.seed,
            device=args.device,
            timeout=args.timeout,
            memory=args.memory,
            jobs=args.jobs,
            script=not args.no_script,
            trust=args.trust,
            progress=_progress_line if sys.stderr.isatty() else None,
        )
    except NotFailingError as error:
        _print_error(f"torch-fakeify: {error}")
        return DOES_NOT_HOLD
    except KeyboardInterrupt:  # before there was a result
        _print_error("torch-fakeify: interrupted; nothing was written")
        return INTERRUPTED
    finally:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    _print([*report.lines(), f"wrote {output}"])
    if report.script is not None:
        _print([f"wrote {report.script}"])
    if report.interrupted:
        return INTERRUPTED
    if report.holds is None:
        return BAD
    return DONE if report.holds else DOES_NOT_HOLD


def _progress_line(now: Progress) -> None:
    """Show the state of a search in the last line of a terminal."""
    size = ", ".join(f"{n} {name}" for name, n in zip(now.extent._fields, now.extent, strict=True))
    text = f"{now.tried} tried; {size}; {now.reduction}"
    columns = shutil.get_terminal_size().columns
    print(f"\r\x1b[K{text[: columns - 1]}", end="", file=sys.stderr, flush=True)


def _doctor(args: argparse.Namespace) -> int:
    from torch_fakeify.tools.doctor import doctor

    found = doctor()
    if args.json:
        _print(map(_escape_json, json.dumps(found.as_json(), indent=1).splitlines()))
    else:
        _print(found.lines())
    return DONE if found.is_well else DOES_NOT_HOLD


def _demo(args: argparse.Namespace) -> int:
    from torch_fakeify.tools.demo.runner import run_demo

    report = run_demo(backend=args.backend)
    _print(report.lines())
    return DONE if report.holds else DOES_NOT_HOLD


def _interrupted(text: str) -> int:
    sys.stdout.flush()
    _print_error(f"torch-fakeify: interrupted; {text}")
    return INTERRUPTED


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(escape(line))


def _print_error(text: str) -> None:
    for line in text.splitlines():
        print(escape(line), file=sys.stderr)
