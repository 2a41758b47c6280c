"""The program of the process in which ``run`` executes a user's script.

``main(FOLDER)`` reads the request from a file in the folder and writes notes there. The script sees the
process of ``python SCRIPT ARGS``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_fakeify.errors import FakeifyError
from torch_fakeify.frames.notes import Notes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

__all__ = ["FAULTS", "NOTES", "REQUEST", "main"]

REQUEST, NOTES, FAULTS = "request", "notes", "faults"
"""Files in the folder: the request, `frames.notes.Notes`, and the output of ``faulthandler``."""


def main(folder: str) -> None:
    """Run the script of a request and record its frames; the process ends as the script ends.

    Args:
        folder: ``request`` there is a JSON object: ``script``, ``args``, and what `ScriptRecorder` takes.
    """
    request: dict[str, Any] = json.loads(Path(folder, REQUEST).read_text(encoding="utf-8"))
    notes = Notes(Path(folder, NOTES))
    script, args = Path(request.pop("script")), request.pop("args")
    mask = request.pop("mask")
    try:
        _start_recording(request, notes)
    except FakeifyError as error:
        parts = ("what", "where", "expected", "found", "fix")
        content = {part: getattr(error, part) for part in parts}
        notes.write("refused", {"error": type(error).__name__, **content})
        sys.exit(2)
    if not faulthandler.is_enabled():  # the user may have enabled it
        faulthandler.enable(Path(folder, FAULTS).open("wb"))  # noqa: SIM115 - open until the process ends
    _set_main(script, args)
    notes.write("started", os.getpid())
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _run(script, notes)


def _start_recording(request: Mapping[str, Any], notes: Notes) -> None:
    from .script_recorder import ScriptRecorder, start_recording  # raises if this torch is refused

    start_recording(ScriptRecorder(notes=notes, **request))


def _set_main(script: Path, args: Sequence[str]) -> None:
    """Set ``sys.argv`` and ``sys.path[0]`` like ``python /path/of/script.py args``."""
    sys.argv = [str(script), *args]
    safe = sys.flags.isolated or getattr(sys.flags, "safe_path", False)
    if script.is_file() and script.suffix not in {".zip", ".pyz"} and not safe:
        sys.path.insert(0, str(script.resolve().parent))


def _run(script: Path, notes: Notes) -> None:
    """Run the script, note how it ended, and exit like Python."""
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        notes.write("ended", "exited")
        if error.code is not None and not isinstance(error.code, int):
            notes.write("cause", str(error.code))
        raise
    except KeyboardInterrupt:
        notes.write("ended", "interrupted")
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        sys.exit(130)
    except BaseException as error:  # noqa: BLE001 - a user's script may raise anything
        notes.write("ended", "raised")
        notes.write("cause", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        shown = _traceback_of(error, script)
        sys.excepthook(type(error), error.with_traceback(shown), shown)
        sys.exit(1)
    notes.write("ended", "finished")


def _traceback_of(error: BaseException, script: Path) -> TracebackType | None:
    """The part of a traceback that begins in the script, as ``python script.py`` prints it."""
    entry = error.__traceback__
    while entry is not None and entry.tb_frame.f_code.co_filename != str(script):
        entry = entry.tb_next
    return entry
