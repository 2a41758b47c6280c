"""Record every frame for which Dynamo calls a backend in this process.

The hook is where Dynamo calls a backend, ``OutputGraph._call_user_compiler`` of torch 2.13, so it
covers ``torch.compile`` with a name, a callable, a mode or options, ``nn.Module.compile``, a stance,
export and compiled autograd. During that call the output graph's ``compiler_fn`` is a proxy of the
backend; the keys of Dynamo's caches and guards still use the backend itself.

For ``aot_compile`` and ``torch.export`` Dynamo only captures the graph, so the frame is recorded as *not
compiled*.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_fakeify.compat import torch_dynamo
from torch_fakeify.serialization.container import VERSION

from .capture_folders import CaptureFolder, make_folder
from .capture_sequence import CaptureSequence
from .record_backend import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from torch_fakeify.compat.backends import Compiled, Compiler
    from torch_fakeify.records.frame import Constants, Paths

    from .record_backend import Level, OnError


class _RecordingProxy:
    """Proxy of a backend that records the call and forwards attributes."""

    def __init__(self, recorder: Recorder, compiler_fn: Compiler) -> None:
        self._recorder = recorder
        self._compiler_fn = compiler_fn
        self.__module__ = getattr(compiler_fn, "__module__", "")

    def __call__(self, gm: Any, example_inputs: Sequence[Any], **kwargs: Any) -> Compiled:
        return self._recorder.call(self._compiler_fn, gm, example_inputs, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiler_fn, name)


class _Hook:
    """The recorders of this process, and the functions of torch that call them while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recorders: tuple[Recorder, ...] = ()
        self._restore: Callable[[], None] | None = None

    def add(self, recorder: Recorder) -> None:
        """Record every frame for which Dynamo calls a backend from now on, in any thread."""
        with self._lock:
            if self._restore is None:
                self._restore = self._install()
            self._recorders = (*self._recorders, recorder)

    def remove(self, recorder: Recorder) -> None:
        """Record no more frames; torch's functions are put back after the last recorder."""
        with self._lock:
            self._recorders = tuple(other for other in self._recorders if other is not recorder)
            if not self._recorders and self._restore is not None:
                self._restore()
                self._restore = None

    def _install(self) -> Callable[[], None]:
        """Replace torch's functions; return the function that puts them back."""
        module: Any = torch_dynamo.dynamo().output_graph
        owner = module.OutputGraph
        call, find_override = owner._call_user_compiler, module.get_backend_override_for_compile_id

        def recorded_call(output_graph: Any, gm: Any, example_inputs: Any) -> Any:
            compiler_fn = output_graph.compiler_fn
            output_graph.compiler_fn = self._recorded(compiler_fn)
            try:
                return call(output_graph, gm, example_inputs)
            finally:
                output_graph.compiler_fn = compiler_fn

        def recorded_override(*args: Any) -> Any:
            compiler_fn = find_override(*args)
            return None if compiler_fn is None else self._recorded(compiler_fn)

        def restore() -> None:
            owner._call_user_compiler = call
            module.get_backend_override_for_compile_id = find_override

        owner._call_user_compiler = recorded_call
        module.get_backend_override_for_compile_id = recorded_override
        return restore

    def _recorded(self, compiler_fn: Compiler) -> Compiler:
        for recorder in self._recorders:
            compiler_fn = _RecordingProxy(recorder, compiler_fn)
        return compiler_fn


_HOOK = _Hook()
start_recording, stop_recording = _HOOK.add, _HOOK.remove


# --- a block --------------------------------------------------------------------------------------


class Recording(CaptureSequence):
    """The captures of a `recording` block so far, in the order in which their compilation began.

    Each access reads the file.

    Example:
        >>> with tfk.recording("captures") as frames:
        ...     y = torch.compile(torch.exp, backend="eager")(torch.zeros(2))
        >>> frames.paths[0].name[:4], frames[0].desc.backend
        ('000-', 'eager')
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._pid = os.getpid()

    @property
    def paths(self) -> list[Path]:
        """The files of the captures."""
        frames = self._recorder.frames
        return [f.path for f in frames if f.path is not None and f.pid == self._pid]

    def __repr__(self) -> str:
        return f"Recording({[path.name for path in self.paths]})"


@contextmanager
def recording(
    directory: str | Path,
    *,
    constants: Constants = "none",
    paths: Paths = "short",
    version: int = VERSION,
    on_error: OnError = "warn",
    level: Level = "dynamo",
) -> Generator[Recording]:
    """Save a capture of every frame that is compiled in the block, with any backend.

    Frames of all threads of the process are recorded. What was compiled before is not compiled again,
    so it is not recorded. A process that is forked in the block writes into a folder ``PID`` in the
    directory; its captures are not in the sequence. Blocks may be nested: each records the frame.

    Args:
        directory: for the files, which are named as by `record`; it is removed if it was made here and
            stays empty.
        constants: as for `capture`.
        paths: as for `capture`.
        version: of the files' format, as for `Capture.save`.
        on_error: as for `record`.
        level: as for `record`.

    Yields:
        The captures so far, a sequence that also has ``paths``.

    Raises:
        WriteError: the directory cannot be written, or there is no writer for the version.
        CaptureError: an option has another value.

    Example:
        >>> with tfk.recording("captures") as frames:
        ...     y = torch.compile(torch.cos, backend="eager")(torch.zeros(2))
        >>> len(frames)
        1
    """
    folder = make_folder(Path(directory))
    try:
        recorder = Recorder(
            CaptureFolder(folder.path, owner=os.getpid()),
            constants=constants,
            paths=paths,
            version=version,
            on_error=on_error,
            level=level,
        )
        start_recording(recorder)
        try:
            yield Recording(recorder)
        finally:
            stop_recording(recorder)
    finally:
        folder.remove_if_empty()
