"""Runs a user's unchanged script and records every frame that it compiles.

The hook sits where Dynamo calls a backend, ``OutputGraph._call_user_compiler`` of torch 2.13, so it
sees every way to ask for a compilation: ``torch.compile`` with a name, a callable, a mode or
options, ``nn.Module.compile``, a stance, export and compiled autograd. For the length of that
call the output graph's ``compiler_fn`` is a stand-in that answers like the backend itself; what
Dynamo keys its caches and guards on is the user's own backend throughout.

What goes through ``aot_compile`` is recorded before its backend runs, so a failure of that backend
is not in the record.
"""

from __future__ import annotations

import re
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from . import _torch
from .backend import Recorder
from .errors import FakeifyError, ScriptError
from .frame import capture
from .page import table_lines

if TYPE_CHECKING:
    from .desc_frame import CaptureDesc

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

Compiled = Callable[..., Any]
CompilerFn = Callable[..., Compiled]


@dataclass
class FrameReport:
    """What became of one frame of a script."""

    function: str
    path: Path | None = None
    """The file that was written; ``None`` if the frame could not be recorded."""
    counts: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    """FX nodes, inputs, symbols, guards, runtime asserts."""
    bytes: int = 0
    milliseconds: float = 0.0
    """How long the backend took, without the recording."""
    failure: str | None = None
    """``Type: first line of the message``, if the backend raised."""
    problem: str | None = None
    """Why the frame could not be recorded."""

    def row(self) -> list[str]:
        """The frame as a row of the table."""
        result = "compiled" if self.failure is None else f"failed: {self.failure}"
        if self.problem is not None:
            result += f"; not recorded: {self.problem}"
        name = "-" if self.path is None else self.path.name
        numbers = [*self.counts, self.bytes, round(self.milliseconds)]
        return [name, self.function, *map(str, numbers), result]


@dataclass
class ScriptReport:
    """How a script ended and what it compiled."""

    frames: list[FrameReport] = field(default_factory=list[FrameReport])
    ending: Literal["finished", "exited", "raised", "interrupted"] = "finished"
    status: int = 0
    """The script's own exit status."""
    message: str = ""
    """The script's traceback, or what it passed to ``sys.exit``."""
    cause: str = ""
    """Its exception in one line."""

    def lines(self) -> list[str]:
        """The frames as a table."""
        if not self.frames:
            return []
        head = "file function nodes inputs symbols guards asserts bytes ms result"
        return table_lines([head.split(), *(frame.row() for frame in self.frames)])


def run_script(
    script: str | Path,
    args: Sequence[str],
    directory: str | Path,
    *,
    backend: str | None = None,
) -> ScriptReport:
    """Run a script as ``__main__`` and save a capture of every frame that it compiles.

    Args:
        script: a Python file, or a directory or ZIP file with a ``__main__.py``.
        args: the script's own arguments.
        directory: where the captures go.
        backend: compiles every frame instead of the backend that the script asks for.

    Raises:
        WriteError: the directory cannot be written; the script has not been started.
        CaptureError: no backend has that name; the script has not been started.
        ScriptError: there is no such script, or it ended with an error before it compiled anything.
    """
    if not Path(script).exists():
        raise ScriptError("there is no such script", where=str(script), fix="Check the path")
    override = None if backend is None else _torch.resolve_backend(backend)
    recorder = ScriptRecorder(Path(directory).absolute(), override)
    report = ScriptReport(recorder.frames)
    path = Path(script).absolute()
    with recording(recorder), _as_main(path, args):
        _run(path, report)
    if not report.frames and report.ending != "finished":
        raise ScriptError(
            "the script ended before it compiled anything",
            where=str(script),
            found=report.cause or f"exit status {report.status}",
            fix="Run it without recording first",
        ) from _Shown(report.message)
    return report


class _Shown(Exception):  # noqa: N818 - it carries text to show, it is never raised by itself
    """The script's own traceback, as the cause of a ``ScriptError``."""


def _run(script: Path, report: ScriptReport) -> None:
    """Run the script and write down how it ended; nothing that it raises gets out."""
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        report.status, report.message = _exit_status(error.code)
        report.cause = report.message
        report.ending = "exited" if report.status else "finished"
    except KeyboardInterrupt:
        report.ending, report.status = "interrupted", 130
        report.message = report.cause = "KeyboardInterrupt"
    except BaseException as error:  # noqa: BLE001 - a user's script may raise anything
        report.ending, report.status = "raised", 1
        report.message, report.cause = _script_traceback(error, script), _summary(error)


def _exit_status(code: object) -> tuple[int, str]:
    """Exit status and message of ``SystemExit(code)``, as Python's own."""
    if code is None:
        return 0, ""
    if isinstance(code, int):
        return code & 0xFF, ""
    return 1, str(code)


def _script_traceback(error: BaseException, script: Path) -> str:
    """The traceback as ``python script.py`` shows it: it begins in the script."""
    start = error.__traceback__
    entry = start
    while entry is not None and entry.tb_frame.f_code.co_filename != str(script):
        entry = entry.tb_next
    shown = traceback.TracebackException(type(error), error, entry)
    return "".join(shown.format()).rstrip("\n")


def _summary(error: BaseException) -> str:
    """The exception's type and the first line of its message."""
    if isinstance(error, FakeifyError):
        return str(error)
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


@contextmanager
def _as_main(script: Path, args: Sequence[str]) -> Generator[None, None, None]:
    """``sys.argv`` and ``sys.path[0]`` as ``python /path/of/script.py args`` sets them."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *args]
    if script.is_file() and script.suffix not in {".zip", ".pyz"}:
        sys.path[:1] = [str(script.resolve().parent)]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


# --- the hook -----------------------------------------------------------------------------------


class ScriptRecorder(Recorder):
    """Saves every frame, and lets the script go on where a frame cannot be recorded.

    Attributes:
        frames: one report for every call of a backend.
    """

    def __init__(self, directory: str | Path, override: CompilerFn | None = None) -> None:
        super().__init__(directory)
        self.override = override
        self.frames: list[FrameReport] = []

    def call(
        self, compiler_fn: CompilerFn, gm: Any, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Compiled:
        """Record one frame and pass it on to its backend."""
        compiler_fn = self.override or compiler_fn
        name = _name_of(compiler_fn)
        report = FrameReport(function="frame")
        captured = None
        try:
            captured = capture(gm, example_inputs).with_backend(name)
            report.function = captured.desc.frame or "frame"
            report.counts = _counts(captured.desc)
            report.path = self.directory / self._file_name(captured)
            self.paths.append(report.path)
            report.bytes = captured.save(report.path)
        except Exception as error:  # noqa: BLE001 - whatever it is, the script goes on
            report.problem = _summary(error)
        started = time.perf_counter()
        try:
            compiled = compiler_fn(gm, example_inputs, **kwargs)
        except _torch.dynamo_control_flow():
            # Dynamo traces the frame again or leaves it to Python: there is no compilation to record.
            if report.path is not None:
                self.paths.remove(report.path)
                report.path.unlink(missing_ok=True)
            raise
        except Exception as error:
            report.milliseconds = (time.perf_counter() - started) * 1e3
            report.failure = _summary(error)
            if captured is not None and report.path is not None:
                report.bytes = captured.with_failure(error, backend=name).save(report.path)
            self.frames.append(report)
            raise
        report.milliseconds = (time.perf_counter() - started) * 1e3
        self.frames.append(report)
        return compiled


def _name_of(compiler_fn: CompilerFn) -> str:
    """The backend's name; torch gives a nameless object its ``repr``, without the address here."""
    name = str(getattr(compiler_fn, "__name__", type(compiler_fn).__name__))
    return _ADDRESS.sub("", name)


def _counts(desc: CaptureDesc) -> tuple[int, int, int, int, int]:
    env = desc.shape_env
    if env is None:
        return len(desc.graph.nodes), len(desc.inputs), 0, 0, 0
    known = (len(env.symbols), len(env.guards), len(env.runtime_asserts))
    return len(desc.graph.nodes), len(desc.inputs), *known


class _StandIn:
    """Answers like a backend in all but the call, which is recorded."""

    def __init__(self, recorder: ScriptRecorder, compiler_fn: CompilerFn) -> None:
        self._recorder = recorder
        self._compiler_fn = compiler_fn

    def __call__(self, gm: Any, example_inputs: Sequence[Any], **kwargs: Any) -> Compiled:
        return self._recorder.call(self._compiler_fn, gm, example_inputs, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiler_fn, name)


@contextmanager
def recording(recorder: ScriptRecorder) -> Generator[None, None, None]:
    """Within the block, every frame that Dynamo hands to a backend is recorded."""
    module: Any = _torch.dynamo_output_graph()
    owner = module.OutputGraph
    call, find_override = owner._call_user_compiler, module.get_backend_override_for_compile_id

    def recorded_call(output_graph: Any, gm: Any, example_inputs: Any) -> Any:
        compiler_fn = output_graph.compiler_fn
        output_graph.compiler_fn = _StandIn(recorder, compiler_fn)
        try:
            return call(output_graph, gm, example_inputs)
        finally:
            output_graph.compiler_fn = compiler_fn

    def recorded_override(*args: Any) -> Any:
        compiler_fn = find_override(*args)
        return None if compiler_fn is None else _StandIn(recorder, compiler_fn)

    owner._call_user_compiler = recorded_call
    module.get_backend_override_for_compile_id = recorded_override
    try:
        yield
    finally:
        owner._call_user_compiler = call
        module.get_backend_override_for_compile_id = find_override
