"""The Dynamo backend ``record``, which saves a capture of every frame."""

from __future__ import annotations

import itertools
import os
import re
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch_fakeify.compat import torch_dynamo
from torch_fakeify.compat.backends import (
    Compiled,
    Compiler,
    backend_name,
    compiler_of,
    reset_backend,
)
from torch_fakeify.errors import CaptureError, FakeifyError, WriteError
from torch_fakeify.records.redact_paths import short_message
from torch_fakeify.serialization.capture_file import check_version
from torch_fakeify.serialization.container import VERSION

from .notes import FrameReport, RecordWarning
from .recording import capture, frame_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from torch_fakeify.records.frame import CaptureDesc

    from .captures import Capture

Constants: TypeAlias = Literal["none", "small"]
OnError: TypeAlias = Literal["warn", "raise"]
Paths: TypeAlias = Literal["short", "full"]


class Recorder:
    """A Dynamo backend that saves a capture of every frame and then calls an inner backend.

    The capture is written before the inner backend is called, as *not finished*: it has no changes by
    the inner backend, and it exists if the process ends there. When the inner backend raises, the
    exception is added to the file as text and raised again.

    Attributes:
        frames: one report for each frame so far.
    """

    def __init__(
        self,
        directory: str | Path,
        inner: str | Compiler = "eager",
        *,
        constants: Constants = "none",
        paths: Paths = "short",
        version: int = VERSION,
        on_error: OnError = "warn",
    ) -> None:
        check_version(version)
        if on_error not in ("warn", "raise"):
            raise CaptureError(
                "unknown value of on_error", expected="'warn' or 'raise'", found=repr(on_error)
            )
        self.version = version
        self.constants: Constants = constants
        self.path_style: Paths = paths
        self.on_error: OnError = on_error
        self.directory = _make_directory(Path(directory))
        self.inner = inner
        self.frames: list[FrameReport] = []
        self.__name__ = f"record({backend_name(inner)})"

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
        with torch_dynamo.compile_lock():  # Dynamo holds it too: file numbers are unique
            return self._call(compiler_fn, gm, example_inputs, **kwargs)

    def _call(
        self,
        compiler_fn: Compiler,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        **kwargs: Any,
    ) -> Compiled:
        report = FrameReport(backend=self._named(compiler_fn))
        captured = self._try_capture(gm, example_inputs, report)
        self.frames.append(report)
        self.note(report)
        started = time.perf_counter()
        try:
            compiled = compiler_fn(gm, example_inputs, **kwargs)
        except torch_dynamo.dynamo_control_flow():
            # Dynamo traces the frame again or leaves it to Python: nothing was compiled.
            self.frames.remove(report)
            report.state = "left out"
            if report.path is not None:
                report.path.unlink(missing_ok=True)
            raise
        except KeyboardInterrupt:
            report.failure = "interrupted"  # its capture is *not finished*
            raise
        except BaseException as error:
            report.state, report.failure = "failed", error_summary(error)
            if captured is not None:
                failed = captured.with_failure(error, backend=report.backend, paths=self.path_style)
                try:
                    self._save(failed, report)
                except WriteError as problem:  # raise `error`, not the problem
                    report.problem = error_summary(problem)
            raise
        else:
            if os.getpid() == report.pid:  # false in a child that the backend forked
                report.state = self.state_after(compiler_fn)
                if captured is not None:
                    state = None if report.state == "compiled" else report.state
                    self._saved(captured.with_state(state), report)
            return compiled
        finally:
            report.milliseconds = (time.perf_counter() - started) * 1e3
            if os.getpid() == report.pid:
                self.note(report)

    def state_after(self, _compiler_fn: Compiler, /) -> Literal["compiled", "not compiled"]:
        """The state of a frame after its backend returned."""
        return "compiled"

    def note(self, report: FrameReport) -> None:
        """Called with each report before and after its backend is called."""

    def warn(self, text: str) -> None:
        """Warn that a frame was not recorded."""
        warnings.warn(text, RecordWarning, stacklevel=2)

    def capture_and_save(
        self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], report: FrameReport
    ) -> Capture:
        """Capture one frame, save it as not finished, and fill in its report.

        Raises:
            FakeifyError: the frame cannot be recorded or the file not written.
        """
        recorded = capture(gm, example_inputs, constants=self.constants, paths=self.path_style)
        captured = recorded.with_backend(report.backend)
        report.counts = _counts(captured.desc)
        function = re.sub(r"\W+", "_", report.function)
        report.fingerprint = captured.fingerprint()
        report.path = self._free_path(f"{function}-{report.fingerprint[:8]}.fkf")
        self._save(captured.with_state("not finished"), report)
        return captured

    def _try_capture(
        self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], report: FrameReport
    ) -> Capture | None:
        """Capture and save a frame; ``None`` if that failed and the frame is only compiled."""
        report.function = frame_name(torch_dynamo.TracingContext.try_get()) or report.function
        try:
            return self.capture_and_save(gm, example_inputs, report)
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

    def _saved(self, captured: Capture, report: FrameReport) -> None:
        try:
            self._save(captured, report)
        except WriteError as error:  # the file exists, as *not finished*
            self._report_problem(report, error)

    def _report_problem(self, report: FrameReport, error: Exception) -> None:
        """Raise the error that prevented a recording, or warn of it."""
        report.problem = error_summary(error)
        if self.on_error == "raise":
            raise error
        self.warn(
            f"the frame of {report.function!r} is not on record: {report.problem.rstrip('.')}. "
            "It is compiled all the same"
        )

    def _save(self, captured: Capture, report: FrameReport) -> None:
        assert report.path is not None
        report.bytes = captured.save(report.path, version=self.version)

    def _named(self, compiler_fn: Compiler) -> str:
        name = backend_name(compiler_fn)
        return name if self.path_style == "full" else short_message(name)

    def _free_path(self, name: str) -> Path:
        """A path that does not exist yet: files of earlier runs are never overwritten."""
        numbers = itertools.count(len(self.frames))
        return next(
            path
            for number in numbers
            if not os.path.lexists(path := self.directory / f"{number:03d}-{name}")
        )


def _counts(desc: CaptureDesc) -> tuple[int, int, int, int, int]:
    env = desc.shape_env
    if env is None:
        return len(desc.graph.nodes), len(desc.inputs), 0, 0, 0
    counts = (len(env.symbols), len(env.guards), len(env.runtime_asserts))
    return len(desc.graph.nodes), len(desc.inputs), *counts


def record(
    directory: str | Path,
    inner: str | Compiler = "eager",
    *,
    constants: Constants = "none",
    paths: Paths = "short",
    version: int = VERSION,
    on_error: OnError = "warn",
) -> Recorder:
    """A Dynamo backend that saves a capture of every frame as ``NNN-function-fingerprint.fkf``.

    ``NNN`` counts the frames and skips numbers of existing files: no capture is overwritten.

    Args:
        directory: for the files; it is created if it does not exist.
        inner: the backend that then compiles the frame, by name or callable.
        constants: as for `capture`: ``"small"`` also records the data of small tensors of the graph.
        paths: as for `capture`: ``"full"`` leaves absolute paths unchanged.
        version: of the files' format, as for `Capture.save`.
        on_error: if a frame cannot be recorded, ``"warn"`` warns with a `RecordWarning` and compiles
            it, ``"raise"`` raises.

    Raises:
        WriteError: the directory cannot be written, or there is no writer for the version.
        CaptureError: ``on_error`` has another value.

    Example:
        >>> f = torch.compile(torch.sin, backend=tfk.record("captures", inner="eager"))
        >>> f(torch.zeros(2))
        tensor([0., 0.])
    """
    return Recorder(
        directory, inner, constants=constants, paths=paths, version=version, on_error=on_error
    )


def _make_directory(directory: Path) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise WriteError(
            "the directory cannot be written",
            where=str(directory),
            found=error.strerror or str(error),
            fix="Choose another directory",
        ) from error
    return directory


def error_summary(error: BaseException) -> str:
    """The exception's type and the first line of its message."""
    if isinstance(error, FakeifyError):
        return str(error)
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
