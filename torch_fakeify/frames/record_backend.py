"""The Dynamo backend ``record``, which saves a capture of every frame."""

from __future__ import annotations

import itertools
import os
import re
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import msgspec
import torch

from torch_fakeify._atomic_write import reason_of
from torch_fakeify._user_lines import calling_line, line_of_message
from torch_fakeify.compat import torch_dynamo
from torch_fakeify.compat.aot_compilers import AotGraph, flat_copy, watch_aot_graphs
from torch_fakeify.compat.backends import (
    Compiled,
    Compiler,
    backend_name,
    backend_place,
    compile_options,
    compiler_of,
    reset_backend,
)
from torch_fakeify.encoding.surroundings import with_options, with_packages
from torch_fakeify.errors import (
    TRUST,
    CaptureError,
    FakeifyError,
    LimitError,
    WriteError,
    check_choice,
)
from torch_fakeify.records.fingerprint import compile_key
from torch_fakeify.records.frame import AotGraphDesc, Constants, Paths
from torch_fakeify.records.redact_paths import short_message
from torch_fakeify.render.code import operator_counts
from torch_fakeify.serialization.capture_file import check_version
from torch_fakeify.serialization.container import VERSION, Limits

from .capture_folders import CaptureFolder, make_folder
from .notes import FrameReport, RecordWarning
from .recording import capture_of, describe_frame, traced_code

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .captures import Capture

OnError: TypeAlias = Literal["warn", "raise"]
Level: TypeAlias = Literal["dynamo", "aot"]


_CAPTURING = ("torch._dynamo.convert_frame", "torch._dynamo.eval_frame")
"""Modules of torch whose functions are used as a backend that only captures."""


class _Frame(NamedTuple):
    """What a backend is called with, or a graph that AOTAutograd makes of it."""

    compiler_fn: Compiler
    gm: torch.fx.GraphModule
    inputs: Sequence[Any]
    kwargs: Mapping[str, Any]
    aot: AotGraph | None = None

    def compile(self) -> Compiled:
        """Call the backend."""
        return self.compiler_fn(self.gm, self.inputs, **self.kwargs)


class Recorder:
    """A Dynamo backend that saves a capture of every frame and then calls an inner backend.

    The capture is written before the inner backend is called, as *not finished*: it has no changes by
    the inner backend, and it exists if the process ends there. When the inner backend raises, the
    exception is added to the file as text and raised again.

    At the level ``aot`` the captures are the graphs that AOTAutograd makes of the frame: joint, forward,
    backward, or inference where there is no backward. The frame itself is recorded if AOTAutograd is not
    called or its tracing fails.

    Attributes:
        frames: one report for each frame so far.
    """

    def __init__(
        self,
        folder: CaptureFolder,
        inner: str | Compiler = "eager",
        *,
        constants: Constants = "none",
        paths: Paths = "short",
        version: int = VERSION,
        on_error: OnError = "warn",
        level: Level = "dynamo",
    ) -> None:
        check_version(version)
        for name, value, choices in (
            ("constants", constants, Constants),
            ("paths", paths, Paths),
            ("on_error", on_error, OnError),
            ("level", level, Level),
        ):
            check_choice(value, get_args(choices), name, CaptureError)
        self.version = version
        self.constants: Constants = constants
        self.path_style: Paths = paths
        self.on_error: OnError = on_error
        self.level: Level = level
        self.folder = folder
        self.inner = inner
        self.frames: list[FrameReport] = []
        self.__name__ = f"record({backend_name(inner)})"

    def __repr__(self) -> str:
        return f"<{self.__name__}: {len(self.frames)} frames>"

    @property
    def paths(self) -> list[Path]:
        """The files written so far."""
        return [report.path for report in self.frames if report.path is not None]

    def reset(self) -> None:
        """Reset the inner backend, as ``torch._dynamo.reset`` does."""
        reset_backend(self.inner)

    def __call__(
        self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Compiled:
        """Record the frame, then compile it with the inner backend."""
        inner = compiler_of(self.inner, kwargs)
        return self.call(inner, gm, example_inputs, **kwargs)

    def call(
        self,
        compiler_fn: Compiler,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        **kwargs: Any,
    ) -> Compiled:
        """Record one frame and compile it with a backend."""
        frame = _Frame(compiler_fn, gm, example_inputs, kwargs)
        with torch_dynamo.compile_lock():  # Dynamo holds it too: file numbers are unique
            report = self._new_report(compiler_fn)
            if self.level == "dynamo":
                return self._recorded(frame, report, frame.compile)
            return self._recorded_graphs(frame, report)

    def _recorded_graphs(self, frame: _Frame, report: FrameReport) -> Compiled:
        graphs: list[FrameReport] = []

        def watch(graph: AotGraph, compile_graph: Callable[[], Any]) -> Any:
            with torch_dynamo.compile_lock():  # a backward is compiled by its first call
                below = self._new_report(frame.compiler_fn)
                below.graph = graph.kind
                if report.state == "not finished":  # else the call of the backward compiles it
                    below.line = report.line
                graphs.append(below)
                inside = frame._replace(gm=flat_copy(graph.gm), inputs=graph.inputs, aot=graph)
                return self._recorded(inside, below, compile_graph)

        try:
            with watch_aot_graphs(watch):
                return self._recorded(frame, report, frame.compile)
        finally:
            failed_below = any(below.failure is not None for below in graphs)
            all_recorded = all(below.problem is None for below in graphs)
            if graphs and all_recorded and (report.failure is None or failed_below):
                self._leave_out(report)  # its graphs have all of it
                self.note(report)

    def _new_report(self, compiler_fn: Compiler) -> FrameReport:
        name = backend_name(compiler_fn)
        return FrameReport(
            backend=name if self.path_style == "full" else short_message(name),
            backend_place=backend_place(compiler_fn),
            line=calling_line(),
        )

    def _leave_out(self, report: FrameReport) -> None:
        if report.state != "left out":
            self.frames.remove(report)
            report.state = "left out"
            self._remove_file(report)

    def _recorded(
        self, frame: _Frame, report: FrameReport, compile_frame: Callable[[], Any]
    ) -> Any:
        captured = self._try_capture(frame, report)
        self.frames.append(report)
        self.note(report)
        started = time.perf_counter()
        try:
            compiled = compile_frame()
        except torch_dynamo.dynamo_control_flow():
            # Dynamo traces the frame again or leaves it to Python: nothing was compiled.
            self._leave_out(report)
            raise
        except KeyboardInterrupt:
            report.failure = "interrupted"  # its capture is *not finished*
            raise
        except BaseException as error:
            report.state, report.failure = "failed", error_summary(error)
            report.line = line_of_message(str(error), "Original traceback:") or report.line
            if captured is not None:
                failed = captured.with_failure(
                    error,
                    backend=report.backend,
                    paths=self.path_style,
                    seconds=_seconds_since(started),
                )
                try:
                    self._save(failed, report)
                except WriteError as problem:  # raise `error`, not the problem
                    report.problem = error_summary(problem)
            raise
        else:
            if os.getpid() == report.pid:  # false in a child that the backend forked
                is_compiled = not only_captures(frame.compiler_fn)
                report.state = "compiled" if is_compiled else "not compiled"
                if captured is not None:
                    state = None if is_compiled else "not compiled"
                    done = captured.with_state(state, seconds=_seconds_since(started))
                    try:
                        self._save(done, report)
                    except WriteError as error:  # the file exists, as *not finished*
                        self._report_problem(report, error)
            return compiled
        finally:
            report.milliseconds = (time.perf_counter() - started) * 1e3
            if os.getpid() == report.pid:
                self.note(report)

    def note(self, report: FrameReport) -> None:
        """Called with each report before and after its backend is called."""

    def warn(self, text: str) -> None:
        """Warn that a frame was not recorded."""
        warnings.warn(text, RecordWarning, stacklevel=2)

    def _capture_and_save(self, frame: _Frame, report: FrameReport) -> Capture:
        """Capture one graph, save it as not finished, and fill in its report.

        Raises:
            FakeifyError: the graph cannot be recorded or the file not written.
        """
        inputs, aot = frame.inputs, frame.aot
        if aot is not None:  # AOTAutograd runs its graphs without autograd
            inputs = [v.detach() if isinstance(v, torch.Tensor) else v for v in inputs]
        desc = describe_frame(frame.gm, inputs, constants=self.constants, paths=self.path_style)
        given, of_inductor = compile_options(frame.compiler_fn)
        given = {**frame.kwargs, **given}
        assert desc.surroundings is not None
        found = with_options(
            desc.surroundings, given, of_inductor=of_inductor, paths=self.path_style
        )
        desc = msgspec.structs.replace(
            desc,
            backend=report.backend,
            backend_place=report.backend_place,
            surroundings=with_packages(found, [(report.backend_place or "").partition(":")[0]]),
            aot=None
            if aot is None
            else AotGraphDesc(kind=aot.kind, forward_outputs=aot.forward_outputs),
        )
        captured = capture_of(desc, paths=self.path_style)
        report.operators = operator_counts(captured.desc.graph).total()
        graph = f"_{report.graph}" if report.graph else ""
        function = re.sub(r"\W+", "_", report.function) + graph
        report.fingerprint = compile_key(captured.desc)
        report.path = self._free_path(f"{function}-{report.fingerprint[:8]}.fkf")
        try:
            self._save(captured.with_state("not finished"), report)
        except BaseException:
            self._remove_file(report)
            raise
        return captured

    def _try_capture(self, frame: _Frame, report: FrameReport) -> Capture | None:
        """Capture and save a frame; ``None`` if that failed and the frame is only compiled."""
        code = traced_code()
        if code is not None:
            report.function = str(code.co_name)
            report.defined = code.co_filename, code.co_firstlineno
        try:
            return self._capture_and_save(frame, report)
        except Exception as error:  # noqa: BLE001 - the frame is compiled in any case
            report.path = report.fingerprint = None
            if self.on_error == "raise":
                report.state = "failed"
                self.frames.append(report)
            try:
                self._report_problem(report, error)
            finally:
                self.note(report)
            return None

    def _report_problem(self, report: FrameReport, error: Exception) -> None:
        """Raise the error that prevented a recording, or warn of it."""
        report.problem = error_summary(error)
        if self.on_error == "raise":
            raise error
        self.warn(
            f"the frame of {report.title!r} is not on record: {report.problem.rstrip('.')}. "
            "It is compiled all the same"
        )

    def _save(self, captured: Capture, report: FrameReport) -> None:
        """Save a capture; one that exceeds the default limits of readers, with a note in its report."""
        assert report.path is not None
        limits = None if report.exceeds is None else Limits.none()
        try:
            report.bytes = captured.save(report.path, version=self.version, limits=limits)
        except WriteError as error:
            cause = error.__cause__
            if limits is not None or not isinstance(cause, LimitError) or cause.fix != TRUST:
                raise
            report.exceeds = cause.what
            self._save(captured, report)

    def _remove_file(self, report: FrameReport) -> None:
        if report.path is not None:
            report.path.unlink(missing_ok=True)
        self.folder.remove_if_empty()

    def _free_path(self, name: str) -> Path:
        """Make an empty file ``NNN-name``: no other process writes to it, and no file is overwritten."""
        directory = self.folder.path()
        frames = [frame for frame in self.frames if frame.pid == os.getpid()]
        if self.level == "aot":  # a frame is left out when its graphs are on record
            frames = [f for f in frames if f.graph or f.state != "not finished"]
        numbers = itertools.count(len(frames))
        for number in numbers:
            path = directory / f"{number:03d}-{name}"
            try:
                path.touch(exist_ok=False)
            except FileExistsError:
                continue
            except OSError as error:
                raise WriteError(
                    "the file cannot be written", where=str(path), found=reason_of(error)
                ) from error
            return path
        raise AssertionError("unreachable")


def only_captures(compiler_fn: Any) -> bool:
    """Whether a compiler function is Dynamo's own for capturing a graph."""
    return getattr(compiler_fn, "__module__", "") in _CAPTURING


def _seconds_since(started: float) -> float:
    return round(time.perf_counter() - started, 3)


def record(
    directory: str | Path,
    inner: str | Compiler = "eager",
    *,
    constants: Constants = "none",
    paths: Paths = "short",
    version: int = VERSION,
    on_error: OnError = "warn",
    level: Level = "dynamo",
) -> Recorder:
    """A Dynamo backend that saves a capture of every frame as ``NNN-function-fingerprint.fkf``.

    ``NNN`` counts the frames and skips numbers of existing files: no capture is overwritten. A process
    that is forked from this one writes into a folder ``PID`` in the directory.

    Args:
        directory: for the files; it is created if it does not exist.
        inner: the backend that then compiles the frame, by name or callable.
        constants: as for `capture`: ``"small"`` also records the data of small tensors of the graph.
        paths: as for `capture`: ``"full"`` leaves absolute paths unchanged.
        version: of the files' format, as for `Capture.save`.
        on_error: if a frame cannot be recorded, ``"warn"`` warns with a `RecordWarning` and compiles
            it, ``"raise"`` raises.
        level: ``"aot"`` records the graphs that AOTAutograd makes of a frame and gives to the backend's
            compilers, not the frame: a failure in the backward is a small capture of its own.

    Raises:
        WriteError: the directory cannot be written, or there is no writer for the version.
        CaptureError: an option has another value.

    Example:
        >>> f = torch.compile(torch.sin, backend=tfk.record("captures", inner="eager"))
        >>> f(torch.zeros(2))
        tensor([0., 0.])
    """
    folder = make_folder(Path(directory))
    try:
        return Recorder(
            CaptureFolder(folder.path, owner=os.getpid()),
            inner,
            constants=constants,
            paths=paths,
            version=version,
            on_error=on_error,
            level=level,
        )
    except FakeifyError:
        folder.remove_if_empty()
        raise


def error_summary(error: BaseException) -> str:
    """The exception's type and the first line of its message."""
    if isinstance(error, FakeifyError):
        return str(error)
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
