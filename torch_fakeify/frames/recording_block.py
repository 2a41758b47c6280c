"""``recording``: record what is compiled in a block."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torch_fakeify.serialization.container import VERSION

from .capture_folders import CaptureFolder, make_folder
from .capture_sequence import CaptureSequence
from .dynamo_recorder import DynamoRecorder, start_recording, stop_recording

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch_fakeify.records.frame import Constants, Paths

    from .record_backend import Level, OnError, Recorder


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
        recorder = DynamoRecorder(
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
