"""The command ``run``: run an unchanged script in a new process and record the frames it compiles.

However the process ends, the report has the frames that it began, and the capture of the frame that it
was compiling has the cause. Nothing here imports torch.
"""

from __future__ import annotations

import json
import linecache
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from torch_fakeify import errors
from torch_fakeify._version import PACKAGE_DIR
from torch_fakeify.errors import FakeifyError, MissingScriptError, ScriptError, check_texts
from torch_fakeify.frames.capture_folders import new_folder
from torch_fakeify.frames.capture_sequence import CaptureSequence, load_captures
from torch_fakeify.frames.notes import FrameReport, Notes
from torch_fakeify.records.frame import FailureDesc
from torch_fakeify.records.redact_paths import short_paths
from torch_fakeify.records.tensor import FrameDesc, StackDesc
from torch_fakeify.render.diff import difference_lines, differences, recompilations
from torch_fakeify.render.notebook import InNotebook
from torch_fakeify.render.tables import FRAME_COLUMNS, fitted_table, frame_row
from torch_fakeify.render.text import count_text, death_text, stack_lines
from torch_fakeify.serialization.capture_file import read_capture, write_capture
from torch_fakeify.serialization.container import VERSION, Limits
from torch_fakeify.tools.worker.client import backend_request, without_recording
from torch_fakeify.tools.worker.limits import signal_name

from .run_failures import (
    HowCompiled,
    compiled_again,
    failed_frames,
    failure_lines,
    is_of_the_script,
    short_name,
    short_path,
    untraced_lines,
)
from .script_process import FAKES, FAULTS, NOTES, REQUEST

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from torch_fakeify.frames.captures import Capture
    from torch_fakeify.frames.notes import NotesRead
    from torch_fakeify.records.frame import CaptureDesc, Constants, Paths

_CHILD = (
    "import sys; sys.path = [sys.argv[1], *filter(None, sys.path)]; import torch_fakeify; "
    "del sys.path[0]; from torch_fakeify.tools.script_process import main; main(sys.argv[2])"
)
"""Imports this package, then restores the ``sys.path`` of ``python SCRIPT``, without the script's folder."""
_FROM_OUTSIDE = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
"""Signals by which a user ends a program: none of them is a failure of a backend."""
_FORWARDED = {signal.Signals[n] for n in (*_FROM_OUTSIDE, "SIGUSR1", "SIGUSR2", "SIGCHLD")}
_INTERVAL = 0.2
"""Seconds between two polls of the process, in case no SIGCHLD arrives."""
_LAST = 3
"""Number of Ctrl-C after which a script that ignores them is killed."""
_SI_KERNEL = 0x80
"""``si_code`` of a signal that the terminal sends to all foreground processes."""
_SHOWN = 8
"""Number of innermost stack entries that are printed."""
_RECOMPILES = 8
"""Most recompilations that are printed."""
_FAULT = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')
_RECORDER = str(PACKAGE_DIR / "frames" / "record_backend.py")


@dataclass(frozen=True, repr=False)
class ScriptReport(InNotebook, CaptureSequence):
    """The result of running a script: a sequence of the captures, its frames, and how it ended.

    Each access to a capture reads its file.

    Example:
        >>> from pathlib import Path
        >>> size = Path("train.py").write_text(
        ...     "import torch; torch.compile(torch.exp, backend='eager')(torch.zeros(2))"
        ... )
        >>> captures = tfk.run("train.py")
        >>> len(captures), captures[0].backend, captures.ending
        (1, 'eager', 'finished')
    """

    frames: Sequence[FrameReport] = ()
    """A report on each frame, also on those that could not be recorded."""
    ending: Literal["finished", "exited", "raised", "interrupted", "killed"] = "finished"
    """``interrupted`` by a signal in `_FROM_OUTSIDE`, such as Ctrl-C; ``killed`` by any other signal."""
    status: int = 0
    """The script's exit status; 128 plus the number of the signal that ended it."""
    cause: str = ""
    """The exception in one line, the argument of ``sys.exit``, or the signal that ended the script."""
    stack: StackDesc | None = None
    """The stack at the signal that killed it, if ``faulthandler`` printed one."""
    during: FrameReport | None = None
    """The frame that was being compiled when the script ended."""
    at_its_end: bool = False
    """Whether it ended by its last line, an exception or ``sys.exit``."""
    folder: Path = Path()
    """Where the captures are."""
    untraced: dict[str, Any] | None = None
    """The failure of Dynamo that ended the script before a backend was called."""
    how: HowCompiled = field(default_factory=HowCompiled)
    """Options of the run."""
    fakes: tuple[str, ...] = ()
    """The reports of the fake kernels that were inferred, and why others were not, in lines."""

    @property
    def paths(self) -> list[Path]:
        """The files of the captures."""
        return [frame.path for frame in self.frames if frame.path is not None]

    @property
    def failed(self) -> list[Capture]:
        """The captures of the frames that failed, then of those that were not finished."""
        return load_captures(
            [frame.path for frame in failed_frames(self.frames) if frame.path is not None]
        )

    def __repr__(self) -> str:
        return f"<ScriptReport {self.folder.name}: {count_text(len(self), 'capture')}, {self._ended()}>"

    def __str__(self) -> str:
        parts = [
            *self.lines(),
            *self.fake_lines(),
            *self.crash_lines(),
            *self.failure_lines(),
            self._ended(),
        ]
        return "\n".join(parts)

    def _ended(self) -> str:
        return self.summary() or "the script finished"

    @property
    def is_well(self) -> bool:
        """Whether the script finished and compiled frames, which all succeeded and were recorded."""
        well = self.ending == "finished" and all(frame.is_well for frame in self.frames)
        return well and bool(self.frames)

    def lines(self, columns: int | None = None) -> list[str]:
        """Format the frames as a table, and the reasons of recompilations.

        Args:
            columns: width of the terminal; ``None`` for no limit.
        """
        if not self.frames:
            return []
        recorded = {f.path: f.fingerprint for f in self.frames if f.path and f.fingerprint}
        same = same_frames(recorded)
        rows = [_row(frame, same, self.folder) for frame in self.frames]
        of_process: dict[int, list[Path]] = {}
        for frame in self.frames:
            if frame.path is not None:
                of_process.setdefault(frame.pid, []).append(frame.path)
        again = (line for paths in of_process.values() for line in _recompile_lines(paths))
        return [*fitted_table([FRAME_COLUMNS, *rows], columns), *again]

    def next_lines(self) -> list[str]:
        """Format where the captures are and how to look at them; empty if a frame failed."""
        count = len(self.paths)
        if not count or failed_frames(self.frames) or self.untraced is not None:
            return []
        folder = short_path(str(self.folder))
        verb = "show --trust" if any(frame.exceeds for frame in self.frames) else "show"
        return [
            "",
            f"{count_text(count, 'capture')} in {folder}",
            f"  next        torch-fakeify {verb} {shlex.quote(folder)}",
        ]

    def fake_lines(self) -> list[str]:
        """Format which fake kernels were inferred, and where they are; empty if there are none."""
        if not self.fakes:
            return []
        path = self.folder / FAKES
        next_line = f"  next        read and import {short_path(str(path))}, which registers them"
        return ["", "inferred fake kernels:", *self.fakes, *([next_line] if path.exists() else [])]

    def crash_lines(self) -> list[str]:
        """Format the stack of a crash as a traceback; empty if there is none."""
        if self.stack is None:
            return []
        innermost = msgspec.structs.replace(self.stack, frames=self.stack.frames[-_SHOWN:])
        lines = (f"  {line}" for line in stack_lines(innermost))
        return ["Traceback of the crash (most recent call last):", *lines]

    def failure_lines(self) -> list[str]:
        """Format the frame that failed, the user's line, the error, and what to do next."""
        if self.untraced is not None:
            return untraced_lines(self.untraced, self.frames, self.folder)
        return failure_lines(self.frames, self.folder, self.how)

    def failing(self) -> tuple[Path, HowCompiled] | None:
        """The capture of the first frame that failed, and the options that compile it again.

        Raises:
            ScriptError: the script itself defines the backend.
        """
        found = failed_frames(self.frames)
        if not found or found[0].path is None:
            return None
        if is_of_the_script(found[0], self.how):
            raise ScriptError(
                f"the script itself defines the backend {found[0].backend!r}",
                where=str(found[0].path),
                fix="Move it into a module that the script imports",
            )
        return found[0].path, compiled_again(found[0], self.how)

    def summary(self) -> str:
        """Format how the script ended and how many frames failed; empty if all is well."""
        if not self.frames and self.untraced is None:
            return "the script compiled nothing"
        if self.ending == "finished":
            found = self._bad_frames()
            return found and f"{found}; the script finished, exit status 0"
        how = f"was {death_text(self.cause)}" if self.ending == "killed" else self.ending
        if self.during is not None:
            how += f" while {short_name(self.during, self.folder)} was compiled"
        return f"the script {how}, exit status {self.status}"

    def _bad_frames(self) -> str:
        counts = {
            "failed": sum(frame.state == "failed" for frame in self.frames),
            "not finished": sum(frame.state == "not finished" for frame in self.frames),
            "not recorded": sum(frame.problem is not None for frame in self.frames),
        }
        found = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        return f"of {count_text(len(self.frames), 'frame')} {found}" if found else ""


def run(
    script: str | Path | None,
    args: Sequence[str] = (),
    directory: str | Path = "captures",
    *,
    module: str | None = None,
    backend: str | None = None,
    imports: Sequence[str] = (),
    constants: Constants = "none",
    paths: Paths = "short",
    version: int = VERSION,
    on_error: Literal["warn", "raise"] = "warn",
    level: Literal["dynamo", "aot"] = "dynamo",
    infer_fakes: bool = False,
) -> ScriptReport:
    """Run a script as ``__main__`` of a new process and save a capture of every frame it compiles.

    The process has this one's standard streams, environment and working directory, and gets the
    signals that this one gets; Ctrl-C ends it as in a terminal, and its ending is ``interrupted``. Its
    captures go into a new folder ``SCRIPT`` of the directory, those of
    a child process into ``SCRIPT/PID``; ``SCRIPT-2`` and so on if there is one.

    Args:
        script: a Python file, or a directory or ZIP file with a ``__main__.py``; ``None`` with a module.
        args: the script's own arguments.
        directory: where the folder is made; it is left as it was if there are no captures.
        module: is run in place of a script, as by ``python -m``.
        backend: compiles every frame instead of the script's own backend, by name or ``MODULE:ATTR``.
        imports: modules that the process imports before the script, with the working directory first
            on its path.
        constants: as for `capture`.
        paths: as for `capture`.
        version: of the files' format, as for `Capture.save`.
        on_error: as for `record`.
        level: as for `record`.
        infer_fakes: infer the fake kernels of operators that have none, as `inferring_fakes` does, and write
            them to ``fake_kernels.py`` in the folder of the captures.

    Raises:
        WriteError: the directory cannot be written, or there is no writer for the version; the
            script has not been started.
        CaptureError: no backend has that name; the script has not been started.
        MissingScriptError: there is no such script.
        ScriptError: it ended with an error before it compiled anything.
        KeyboardInterrupt: before the script was started.

    Example:
        >>> from pathlib import Path
        >>> size = Path("train.py").write_text(
        ...     "import torch; torch.compile(torch.exp, backend='eager')(torch.zeros(2))"
        ... )
        >>> tfk.run("train.py")
        <ScriptReport train: 1 capture, the script finished>
    """
    if script is not None and not Path(script).exists():
        raise MissingScriptError("there is no such script", where=str(script), fix="Check the path")
    check_texts(args, "args", ScriptError, such_as="['--steps', '3']")
    captures = new_folder(Path(directory), _folder_name(script, module))
    try:
        report = _run_and_report(
            {
                "script": None if script is None else str(Path(script).absolute()),
                "module": module,
                "args": list(args),
                "captures": str(captures.path.absolute()),
                **backend_request(backend, imports),
                "constants": constants,
                "paths": paths,
                "version": version,
                "on_error": on_error,
                "level": level,
                "infer_fakes": infer_fakes,
            },
            str(module or script),
        )
    finally:
        captures.remove_if_empty()
    return replace(report, folder=captures.path, how=HowCompiled(backend, tuple(imports)))


def _folder_name(script: str | Path | None, module: str | None) -> str:
    name = module or Path(script or "").absolute().stem
    return re.sub(r"[^\w.-]+", "_", name).strip(".") or "script"


def _run_and_report(request: dict[str, Any], script: str) -> ScriptReport:
    """Run the process of a request; errors name the script."""
    with tempfile.TemporaryDirectory(prefix="torch-fakeify-") as name, _blocked_signals() as mask:
        folder = Path(name)
        notes = Notes(folder / NOTES)
        content = {**request, "mask": mask, "notes": str(notes.path)}
        (folder / REQUEST).write_text(json.dumps(content), encoding="utf-8")
        sys.stdout.flush()
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        command = [sys.executable, *flags, "-c", _CHILD, str(PACKAGE_DIR.resolve().parent), name]
        child = subprocess.Popen(command, close_fds=False, env=without_recording())
        stopped = _wait_for(child, notes)
        report = _report(child.returncode, notes.read(), script, stopped=stopped)
        if report.ending == "killed":
            report = replace(report, stack=_stack_of_crash(folder / FAULTS))
        during = _record_cause(
            report, child.pid, paths=request["paths"], version=request["version"]
        )
        report = replace(report, during=during)
    if (
        not report.frames
        and report.untraced is None
        and report.ending in ("exited", "raised", "killed")
    ):
        found = report.cause or f"exit status {report.status}"
        raise ScriptError(
            "the script ended before it compiled anything",
            where=script,
            found=death_text(found) if report.ending == "killed" else found,
            fix="Run it without recording first",
        )
    return report


def _row(report: FrameReport, same: Mapping[Path, Path], folder: Path) -> tuple[str, ...]:
    """Format a frame as a row of the table, with the earlier capture of the same frame, by path."""
    result = report.state if report.failure is None else f"{report.state}: {_error_class(report)}"
    result += report.of_record
    if report.path is not None and report.path in same:
        result += f"; the same frame as {short_name(same[report.path], folder)}"
    name = "-" if report.path is None else short_name(report.path, folder)
    return frame_row(name, report.title, report.operators, report.milliseconds, result)


def _error_class(report: FrameReport) -> str:
    """Return the class of the exception; its message is in the lines about the failure."""
    name, colon, _ = (report.failure or "").partition(": ")
    return name if colon and re.fullmatch(r"[\w.]+", name) else report.failure or ""


# --- recompilations --------------------------------------------------------------------------------


def _recompile_lines(paths: Sequence[Path]) -> list[str]:
    """Format, for each frame of a function that was compiled before, its difference from the previous one.

    The captures are in the order in which they were made.
    """
    lines: list[str] = []
    found = [*recompilations(_readable(paths))]
    for (before, earlier), (after, later) in found[:_RECOMPILES]:
        differ = difference_lines(differences(earlier, later))
        what = "the same frame again" if not differ else "A is the earlier, B the later"
        lines += ["", f"{after.name} after {before.name}: {what}"]
        lines += [f"  {line}" for line in differ]
    if len(found) > _RECOMPILES:
        lines += ["", f"... and {len(found) - _RECOMPILES} more: see `torch-fakeify diff A B`"]
    return lines


def _readable(paths: Sequence[Path]) -> Iterator[tuple[Path, CaptureDesc]]:
    for path in paths:
        with suppress(FakeifyError):  # it was removed or changed
            yield path, read_capture(path, limits=Limits.none())


def same_frames(recorded: Mapping[Path, str]) -> dict[Path, Path]:
    """Map each capture of an already recorded frame to the first of that frame.

    ``recorded`` has `compile_key` by file, in the order in which the files were made.
    """
    first: dict[str, Path] = {}
    firsts = {path: first.setdefault(key, path) for path, key in recorded.items()}
    return {path: other for path, other in firsts.items() if other != path}


# --- supervising the process -------------------------------------------------------------------------


@contextmanager
def _blocked_signals() -> Generator[list[int]]:
    """Block the signals that `_wait_for` forwards; yields those that were blocked before.

    The child inherits the block until it restores the mask, so `_wait_for` decides about signals that
    arrive before the script starts.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    try:
        yield [int(number) for number in before]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait_for(child: subprocess.Popen[bytes], notes: Notes) -> bool:
    """Wait for the process and forward signals; return whether this function killed it."""
    interrupts = 0
    stopped = False
    try:
        while child.poll() is None:
            number, has_it = _next_signal()
            if number is None:
                continue
            interrupts += number == signal.SIGINT
            ends = signal.Signals(number).name in _FROM_OUTSIDE
            if (ends and "started" not in notes.read().script) or interrupts >= _LAST:
                stopped = True
                child.kill()
            elif not has_it:
                child.send_signal(number)
    finally:
        if child.returncode is None:
            child.kill()
            child.wait()
    while hasattr(signal, "sigtimedwait") and signal.sigtimedwait(_FORWARDED, 0):
        pass  # drop pending signals, so that the report is printed
    return stopped


def _next_signal() -> tuple[int | None, bool]:
    """Wait for a signal; return its number and whether the process received it already."""
    try:
        if not hasattr(signal, "sigtimedwait"):
            time.sleep(_INTERVAL)
            return None, False
        found = signal.sigtimedwait(_FORWARDED, _INTERVAL)
    except KeyboardInterrupt:  # in another thread, or without `sigtimedwait`
        return signal.SIGINT, not hasattr(signal, "sigtimedwait")
    if found is None or found.si_signo == signal.SIGCHLD:
        return None, False
    return found.si_signo, found.si_code == _SI_KERNEL


# --- how it ended ---------------------------------------------------------------------------------


def _report(status: int, read: NotesRead, script: str, *, stopped: bool) -> ScriptReport:
    """Build the report of a process from its exit status and notes."""
    if "refused" in read.script:
        parts = dict(read.script["refused"])
        cls: type[FakeifyError] = getattr(errors, parts.pop("error"))
        raise cls(parts.pop("what"), **parts)
    name = signal_name(status) if status < 0 else ""
    ended: str = read.script.get("ended", "")
    interrupted = stopped or ended == "interrupted" or name in _FROM_OUTSIDE
    if "started" not in read.script:
        if interrupted:
            raise KeyboardInterrupt
        raise ScriptError(
            "the interpreter ended before the script was started",
            where=script,
            found=death_text(name or f"exit status {status}"),
            fix="See its output, and check that `python -c 'import torch'` works",
        )
    report = ScriptReport(
        tuple(read.frames),
        status=status,
        cause=read.script.get("cause", ""),
        at_its_end=bool(ended),
        untraced=read.script.get("without frame"),
        fakes=tuple(read.script.get("fakes", ())),
    )
    if interrupted:
        cause = name if name in _FROM_OUTSIDE else "SIGINT"
        status = 128 + getattr(signal, cause)
        return replace(report, ending="interrupted", cause=cause, status=status)
    if name:
        return replace(report, ending="killed", cause=name, status=128 - status)
    if ended == "raised":
        return replace(report, ending="raised")
    return replace(report, ending="exited") if status else report


def _record_cause(
    report: ScriptReport, pid: int, *, paths: str, version: int
) -> FrameReport | None:
    """Record in the unfinished frames and their captures what ended the process; return what it was compiling."""
    during = None
    unfinished = [frame for frame in report.frames if frame.state == "not finished"]
    for frame in unfinished:
        if frame.pid != pid:
            frame.failure = f"process {frame.pid} ended while {frame.backend} compiled it"
            continue
        during = frame
        if frame.failure is not None:  # the process noted the interruption itself
            continue
        how = report.cause if report.ending in ("killed", "interrupted") else ""
        how = how or f"exit status {report.status}"
        frame.failure = f"{death_text(how)} while {frame.backend} compiled it"
        if report.ending == "interrupted" or report.at_its_end:
            continue
        frame.state = "failed"
        killed = report.ending == "killed"
        failure = FailureDesc(
            type=how,
            message=(signal.strsignal(report.status - 128) or "") if killed else "",
            stack=report.stack,
            backend=frame.backend,
            kind="crashes",
        )
        _write_failure(frame, short_paths(failure) if paths == "short" else failure, version)
    return during


def _write_failure(frame: FrameReport, failure: FailureDesc, version: int) -> None:
    if frame.path is None:
        return
    try:
        desc = read_capture(frame.path, limits=Limits.none())
        desc = msgspec.structs.replace(desc, failure=failure, state=None)
        frame.bytes = write_capture(frame.path, desc, version=version, limits=Limits.none())
    except FakeifyError as error:
        frame.problem = str(error)


def _stack_of_crash(path: Path) -> StackDesc | None:
    """The stack of the crashed thread in the report of ``faulthandler``, from the backend's call inwards."""
    if not path.exists():
        return None
    _, _, text = path.read_text(encoding="utf-8", errors="replace").rpartition("Current thread")
    frames: list[FrameDesc] = []
    for line in text.splitlines()[1:]:
        found = _FAULT.match(line)
        if found is None or found["file"] == _RECORDER:
            break
        number = int(found["line"])
        code = linecache.getline(found["file"], number).strip()
        frames.append(FrameDesc(found["file"], number, found["name"], code))
    return StackDesc(frames=tuple(reversed(frames))) if frames else None
