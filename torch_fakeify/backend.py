"""Dynamo backends: ``record`` saves a capture of every frame it is given."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import _torch
from .errors import WriteError
from .frame import Capture, capture

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


class Recorder:
    """A Dynamo backend that saves a capture of every frame and passes it on.

    The capture is described before the inner backend is called, so that what the inner backend does
    to the graph or to the shape environment is not in it. When the inner backend raises, the file
    also has the exception as text, and the exception goes on to Dynamo unchanged.

    Attributes:
        paths: the files written so far.
    """

    def __init__(self, directory: str | Path, inner: str | Callable[..., Any] = "eager") -> None:
        self.directory = _make_directory(Path(directory))
        self.inner = inner
        self.paths: list[Path] = []
        self.__name__ = f"record({_backend_name(inner)})"

    def __call__(
        self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Callable[..., Any]:
        """Record the frame, then compile it with the inner backend."""
        name = _backend_name(self.inner)
        captured = capture(gm, example_inputs).with_backend(name)
        path = self.directory / self._file_name(captured)
        captured.save(path)
        self.paths.append(path)
        compiler_fn = _torch.resolve_backend(self.inner)
        try:
            return compiler_fn(gm, example_inputs, **kwargs)
        except _torch.dynamo_control_flow():
            # Dynamo traces the frame again; what it then hands over takes this one's place.
            self.paths.remove(path)
            path.unlink(missing_ok=True)
            raise
        except Exception as error:
            captured.with_failure(error, backend=name).save(path)
            raise

    def _file_name(self, captured: Capture) -> str:
        function = re.sub(r"\W+", "_", captured.desc.frame or "frame")
        return f"{len(self.paths):03d}-{function}-{captured.fingerprint()[:8]}.fkf"


def record(directory: str | Path, inner: str | Callable[..., Any] = "eager") -> Recorder:
    """A Dynamo backend that saves a capture of every frame as ``NNN-function-fingerprint.fkf``.

    Args:
        directory: where the files go; made if it is not there.
        inner: the backend that then compiles the frame, by name or callable.

    Raises:
        WriteError: the directory cannot be written.
    """
    return Recorder(directory, inner)


def _backend_name(backend: str | Callable[..., Any]) -> str:
    if isinstance(backend, str):
        return backend
    return str(getattr(backend, "__name__", type(backend).__name__))


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
