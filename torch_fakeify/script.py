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

import runpy
import sys
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from . import _torch
from .backend import Compiled, Compiler, Constants, FrameReport, Paths, Recorder, error_summary
from .container import VERSION
from .errors import ScriptError
from .page import table_lines
from .recompiles import recompile_lines, same_frames

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    import torch

    from .frame import Capture


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
        """The frames as a table, and why functions were compiled again."""
        if not self.frames:
            return []
        head = "file function nodes inputs symbols guards asserts bytes ms result"
        recorded = {f.path: f.fingerprint for f in self.frames if f.path and f.fingerprint}
        same = same_frames(recorded)
        rows = [_row(frame, same) for frame in self.frames]
        again = recompile_lines([frame.path for frame in self.frames if frame.path is not None])
        return [*table_lines([head.split(), *rows]), *again]


def run_script(
    script: str | Path,
    args: Sequence[str],
    directory: str | Path,
    *,
    backend: str | None = None,
    constants: Constants = "none",
    paths: Paths = "short",
    version: int = VERSION,
) -> ScriptReport:
    """Run a script as ``__main__`` and save a capture of every frame that it compiles.

    Args:
        script: a Python file, or a directory or ZIP file with a ``__main__.py``.
        args: the script's own arguments.
        directory: where the captures go.
        backend: compiles every frame instead of the backend that the script asks for.
        constants: as for `capture`.
        paths: as for `capture`.
        version: of the files' format, as for `Capture.save`.

    Raises:
        WriteError: the directory cannot be written, or there is no writer for the version; the
            script has not been started.
        CaptureError: no backend has that name; the script has not been started.
        ScriptError: there is no such script, or it ended with an error before it compiled anything.
    """
    if not Path(script).exists():
        raise ScriptError("there is no such script", where=str(script), fix="Check the path")
    override = None if backend is None else _torch.resolve_backend(backend)
    recorder = ScriptRecorder(
        Path(directory).absolute(), override, constants=constants, paths=paths, version=version
    )
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
        report.message, report.cause = _script_traceback(error, script), error_summary(error)


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

    Args:
        directory: where the files go.
        override: compiles every frame instead of the script's own backend.
        constants: as for `capture`.
        paths: as for `capture`.
        version: as for `Capture.save`.
    """

    def __init__(
        self,
        directory: str | Path,
        override: Compiler | None = None,
        *,
        constants: Constants = "none",
        paths: Paths = "short",
        version: int = VERSION,
    ) -> None:
        super().__init__(directory, constants=constants, paths=paths, version=version)
        self.override = override

    def call(
        self,
        compiler_fn: Compiler,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        **kwargs: Any,
    ) -> Compiled:
        """Record one frame and pass it on to the script's backend, or the one that replaces it."""
        return super().call(self.override or compiler_fn, gm, example_inputs, **kwargs)

    def keep(
        self,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        backend: str,
        report: FrameReport,
    ) -> Capture | None:
        """Capture one frame if possible."""
        try:
            return super().keep(gm, example_inputs, backend, report)
        except Exception as error:  # noqa: BLE001 - whatever it is, the script goes on
            report.problem = error_summary(error)
            return None


def _row(report: FrameReport, same: Mapping[Path, Path]) -> list[str]:
    """A frame as a row of the table.

    Args:
        report: of the frame.
        same: captures that have the frame of another one.
    """
    result = "compiled" if report.failure is None else f"failed: {report.failure}"
    if report.problem is not None:
        result += f"; not recorded: {report.problem}"
    if report.path is not None and report.path in same:
        result += f"; the same frame as {same[report.path].name}"
    name = "-" if report.path is None else report.path.name
    numbers = [*report.counts, report.bytes, round(report.milliseconds)]
    return [name, report.function, *map(str, numbers), result]


class _StandIn:
    """Answers like a backend in all but the call, which is recorded."""

    def __init__(self, recorder: ScriptRecorder, compiler_fn: Compiler) -> None:
        self._recorder = recorder
        self._compiler_fn = compiler_fn

    def __call__(self, gm: Any, example_inputs: Sequence[Any], **kwargs: Any) -> Compiled:
        return self._recorder.call(self._compiler_fn, gm, example_inputs, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiler_fn, name)


@contextmanager
def recording(recorder: ScriptRecorder) -> Generator[None, None, None]:
    """Within the block, every frame that Dynamo hands to a backend is recorded."""
    module: Any = _torch.dynamo().output_graph
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
