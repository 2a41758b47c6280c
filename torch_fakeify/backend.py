"""Dynamo backends: ``record`` saves a capture of every frame it is given."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from . import _torch
from .captures import capture
from .container import VERSION
from .errors import FakeifyError, WriteError
from .files import check_version
from .paths import short_message

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from .desc_frame import CaptureDesc
    from .frame import Capture

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

Constants: TypeAlias = Literal["none", "small"]
Paths: TypeAlias = Literal["short", "full"]

Compiled = Callable[..., Any]
Compiler = Callable[..., Compiled]


@dataclass
class FrameReport:
    """What became of one frame."""

    function: str = "frame"
    path: Path | None = None
    """The file that was written; ``None`` if the frame could not be recorded."""
    counts: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    """FX nodes, inputs, symbols, guards, runtime asserts."""
    bytes: int = 0
    milliseconds: float = 0.0
    """How long the backend took, without the recording."""
    failure: str | None = None
    """What the backend raised, in one line."""
    problem: str | None = None
    """Why the frame could not be recorded."""
    fingerprint: str | None = None
    """Of the frame, if it was recorded."""


class Recorder:
    """A Dynamo backend that saves a capture of every frame and passes it on.

    The capture is described before the inner backend is called, so that what the inner backend does
    to the graph or to the shape environment is not in it. When the inner backend raises, the file
    also has the exception as text, and the exception goes on to Dynamo unchanged.

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
    ) -> None:
        check_version(version)
        self.version = version
        self.constants: Constants = constants
        self.paths_kept: Paths = paths
        self.directory = _make_directory(Path(directory))
        self.inner = inner
        self.frames: list[FrameReport] = []
        self.__name__ = f"record({backend_name(inner)})"

    @property
    def paths(self) -> list[Path]:
        """The files written so far."""
        return [report.path for report in self.frames if report.path is not None]

    def __call__(
        self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Compiled:
        """Record the frame, then compile it with the inner backend."""
        return self.call(_torch.resolve_backend(self.inner), gm, example_inputs, **kwargs)

    def call(
        self,
        compiler_fn: Compiler,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        **kwargs: Any,
    ) -> Compiled:
        """Record one frame and compile it with a backend."""
        report = FrameReport()
        name = backend_name(compiler_fn)
        captured = self.keep(gm, example_inputs, name, report)
        self.frames.append(report)
        started = time.perf_counter()
        try:
            return compiler_fn(gm, example_inputs, **kwargs)
        except _torch.dynamo_control_flow():
            # Dynamo traces the frame again or leaves it to Python: nothing was compiled.
            self.frames.remove(report)
            if report.path is not None:
                report.path.unlink(missing_ok=True)
            raise
        except Exception as error:
            report.failure = error_summary(error)
            if captured is not None and report.path is not None:
                failed = captured.with_failure(error, backend=name, paths=self.paths_kept)
                try:
                    report.bytes = failed.save(report.path, version=self.version)
                except (
                    WriteError
                ) as problem:  # the frame is on record, and Dynamo waits for `error`
                    report.problem = error_summary(problem)
            raise
        finally:
            report.milliseconds = (time.perf_counter() - started) * 1e3

    def keep(
        self,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        backend: str,
        report: FrameReport,
    ) -> Capture | None:
        """Capture one frame, save it and put into the report what is known of it.

        Raises:
            FakeifyError: the frame cannot be recorded or the file not written.
        """
        recorded = capture(gm, example_inputs, constants=self.constants, paths=self.paths_kept)
        captured = recorded.with_backend(
            backend if self.paths_kept == "full" else short_message(backend)
        )
        report.function = captured.desc.frame or "frame"
        report.counts = _counts(captured.desc)
        function = re.sub(r"\W+", "_", report.function)
        report.fingerprint = captured.fingerprint()
        name = f"{len(self.frames):03d}-{function}-{report.fingerprint[:8]}.fkf"
        path = self.directory / name
        report.bytes = captured.save(path, version=self.version)
        report.path = path
        return captured


def _counts(desc: CaptureDesc) -> tuple[int, int, int, int, int]:
    env = desc.shape_env
    if env is None:
        return len(desc.graph.nodes), len(desc.inputs), 0, 0, 0
    known = (len(env.symbols), len(env.guards), len(env.runtime_asserts))
    return len(desc.graph.nodes), len(desc.inputs), *known


def record(
    directory: str | Path,
    inner: str | Compiler = "eager",
    *,
    constants: Constants = "none",
    paths: Paths = "short",
    version: int = VERSION,
) -> Recorder:
    """A Dynamo backend that saves a capture of every frame as ``NNN-function-fingerprint.fkf``.

    Args:
        directory: where the files go; made if it is not there.
        inner: the backend that then compiles the frame, by name or callable.
        constants: as for `capture`: ``"small"`` also records the data of small tensors of the graph.
        paths: as for `capture`: ``"full"`` keeps absolute paths.
        version: of the files' format, as for `Capture.save`.

    Raises:
        WriteError: the directory cannot be written, or there is no writer for the version.
    """
    return Recorder(directory, inner, constants=constants, paths=paths, version=version)


def backend_name(backend: str | Compiler) -> str:
    """The backend's name; torch names a nameless object by its ``repr``, without the address here."""
    if isinstance(backend, str):
        return backend
    return _ADDRESS.sub("", str(getattr(backend, "__name__", type(backend).__name__)))


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
