"""Record the frames of a whole process and of its children: for ``run`` and ``TORCH_FAKEIFY_RECORD``.

The environment variables are read here in each process that imports ``torch._dynamo``, which the module
``torch_fakeify_autoload`` sees to.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_fakeify.compat import backends
from torch_fakeify.errors import CaptureError, FakeifyError, WriteError

from .capture_folders import CaptureFolder
from .dynamo_recorder import start_recording
from .notes import Notes
from .record_backend import Recorder, only_captures
from .recording import traced_code

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from torch_fakeify.compat.backends import Compiled, Compiler

    from .notes import FrameReport

_DIRECTORY = "TORCH_FAKEIFY_RECORD"
"""The directory; empty or not set, nothing is recorded."""
_FILTER = f"{_DIRECTORY}_FILTER"
"""A regular expression that is searched in ``FILE:FUNCTION`` of the function that Dynamo compiles."""
_LIMIT = f"{_DIRECTORY}_LIMIT"
"""Largest number of frames that a process records."""
_LEVEL = f"{_DIRECTORY}_LEVEL"
"""``dynamo``, the default, or ``aot``, as for `record`."""
_REQUEST = f"{_DIRECTORY}_REQUEST"
"""For the children of ``run``: a JSON object with what `ProcessRecorder.start` takes."""


class ProcessRecorder(Recorder):
    """A recorder that reports to standard error, and to the process of ``run`` if there is one.

    Args:
        folder: where the files go.
        backend: compiles every frame instead of the program's own backend, inductor with the
            program's ``mode`` and ``options``.
        notes: file of the notes for ``run``.
        pattern: is searched in ``FILE:FUNCTION``; other frames are only compiled.
        limit: largest number of frames that a process records; ``None`` for any number.
        options: as for `Recorder`.
    """

    def __init__(
        self,
        folder: CaptureFolder,
        *,
        backend: str | None = None,
        notes: Notes | None = None,
        pattern: re.Pattern[str] | None = None,
        limit: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(folder, **options)
        self.backend = backend
        self.notes = notes
        self.pattern = pattern
        self.limit = limit
        self._stopped = False

    def call(
        self,
        compiler_fn: Compiler,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        **kwargs: Any,
    ) -> Compiled:
        """Record one frame and compile it with the program's backend or its replacement."""
        if self.backend is not None and not only_captures(compiler_fn):
            compiler_fn = backends.compiler_of(self.backend, _settings(compiler_fn))
        if self._is_recorded():
            return super().call(compiler_fn, gm, example_inputs, **kwargs)
        return compiler_fn(gm, example_inputs, **kwargs)

    def _is_recorded(self) -> bool:
        if self._stopped:
            return False
        if self.pattern is not None:
            code = traced_code()
            place = "" if code is None else f"{code.co_filename}:{code.co_name}"
            if self.pattern.search(place) is None:
                return False
        try:
            self.folder.path()
        except WriteError as error:
            self._stop(f"nothing is recorded in process {os.getpid()}: {error}")
            return False
        if self.limit is None:
            return True
        pid = os.getpid()
        count = sum(
            frame.path is not None and frame.pid == pid and frame.graph not in ("joint", "backward")
            for frame in self.frames
        )
        if count >= self.limit:
            self._stop(
                f"process {pid} has recorded {self.limit} frames, as many as {_LIMIT} says; "
                "later frames are not recorded"
            )
        return not self._stopped

    def _stop(self, text: str) -> None:
        self._stopped = True
        self.warn(text)

    def note(self, report: FrameReport) -> None:
        """Write a note for the process of ``run``."""
        if self.notes is not None:
            self.notes.frame(report)

    def warn(self, text: str) -> None:
        """Print to standard error: the program's warning filters do not apply."""
        _warn(text)


def _settings(compiler_fn: Any) -> dict[str, Any]:
    """The program's ``mode`` and ``options``, read from Dynamo's wrapper of the backend."""
    given, of_inductor = backends.compile_options(compiler_fn)
    return {"options": given} if of_inductor and given else given


def _warn(text: str) -> None:
    sys.stderr.write(f"torch-fakeify: warning: {text}\n")
    sys.stderr.flush()


def record_process(request: Mapping[str, Any], *, owner: int | None = None) -> None:
    """Record what this process compiles from now on.

    Args:
        request: ``captures``, the folder; ``notes``, the file; ``directory`` and ``imports``, a folder
            for ``sys.path`` and modules to import first; the rest is what `ProcessRecorder` takes.
        owner: the process whose captures go into the folder itself.

    Raises:
        WriteError: there is no writer for the version.
        CaptureError: there is no such backend, or a module cannot be imported.
    """
    options = dict(request)
    directory, notes = options.pop("directory"), Notes(Path(options.pop("notes")))
    if directory is not None and directory not in sys.path:
        sys.path.insert(0, directory)
    backends.import_modules(options.pop("imports"))
    if options["backend"] is not None:
        backends.resolve_backend(options["backend"])
    folder = CaptureFolder(Path(options.pop("captures")), owner=owner)
    start_recording(ProcessRecorder(folder, notes=notes, **options))


def record_children(request: Mapping[str, Any]) -> None:
    """Set the environment of this process so that its children record too, each in its own folder."""
    os.environ[_DIRECTORY] = request["captures"]
    os.environ[_REQUEST] = json.dumps(request)


def record_from_environment() -> None:
    """Record what this process compiles, as the environment variables say.

    What prevents it is printed to standard error, and the program continues.
    """
    try:
        if _REQUEST in os.environ:
            record_process(json.loads(os.environ[_REQUEST]))
            return
        folder = CaptureFolder(Path(os.environ[_DIRECTORY]))
        start_recording(ProcessRecorder(folder, **_environment_options()))
    except FakeifyError as error:
        _warn(f"nothing is recorded in process {os.getpid()}: {error}")


def _environment_options() -> dict[str, Any]:
    pattern, limit, level = (os.environ.get(name, "") for name in (_FILTER, _LIMIT, _LEVEL))
    try:
        compiled = re.compile(pattern) if pattern else None
    except re.error as error:
        raise _unusable(_FILTER, "a regular expression", f"{pattern!r}: {error}") from error
    if limit and (not limit.isdecimal() or int(limit) == 0):
        raise _unusable(_LIMIT, "a positive number", repr(limit))
    if level not in ("", "dynamo", "aot"):
        raise _unusable(_LEVEL, "dynamo or aot", repr(level))
    return {"pattern": compiled, "limit": int(limit) if limit else None, "level": level or "dynamo"}


def _unusable(name: str, expected: str, found: str) -> CaptureError:
    return CaptureError(f"{name} cannot be used", expected=expected, found=found)
