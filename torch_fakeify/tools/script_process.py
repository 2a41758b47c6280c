"""The program of the process in which ``run`` executes a user's script.

``main(FOLDER)`` reads the request from a file in the folder and writes notes there. The script sees the
process of ``python SCRIPT ARGS`` or ``python -m MODULE ARGS``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import runpy
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_fakeify._user_lines import line_of_message
from torch_fakeify.errors import FakeifyError
from torch_fakeify.frames.notes import Notes
from torch_fakeify.render.data_dependent import advice_in

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

__all__ = ["FAKES", "FAULTS", "NOTES", "REQUEST", "main"]

_DYNAMO_ERRORS = "torch._dynamo.exc"
FAKES = "fake_kernels.py"
"""The file of inferred fake kernels, in the folder of the captures."""
REQUEST, NOTES, FAULTS = "request", "notes", "faults"
"""Files in the folder: the request, `frames.notes.Notes`, and the output of ``faulthandler``."""


def main(folder: str) -> None:
    """Run the script of a request and record its frames; the process ends as the script ends.

    Args:
        folder: ``request`` there is a JSON object: ``script`` or ``module``, ``args``, ``mask``, and what
            `frames.process_recorder.record_process` takes.
    """
    request: dict[str, Any] = json.loads(Path(folder, REQUEST).read_text(encoding="utf-8"))
    notes = Notes(Path(folder, NOTES))
    script, module = request.pop("script"), request.pop("module")
    args, mask = request.pop("args"), request.pop("mask")
    infers_fakes = request.pop("infer_fakes")
    try:
        # Each import raises if this torch is refused.
        from torch_fakeify.frames.process_recorder import record_children, record_process

        record_process(request, owner=os.getpid())
        record_children(request)
        if infers_fakes:
            from .infer_fakes import infer_fakes_of_process

            kernels = Path(request["captures"]) / FAKES
            infer_fakes_of_process(kernels, lambda lines: notes.write("fakes", lines))
    except FakeifyError as error:
        parts = ("what", "where", "expected", "found", "fix")
        content = {part: getattr(error, part) for part in parts}
        notes.write("refused", {"error": type(error).__name__, **content})
        sys.exit(2)
    if not faulthandler.is_enabled():  # the user may have enabled it
        faulthandler.enable(Path(folder, FAULTS).open("wb"))  # noqa: SIM115 - open until the process ends
    _set_program(Path(script) if module is None else None, args)
    notes.write("started", os.getpid())
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _run(script, module, notes)


def _set_program(script: Path | None, args: Sequence[str]) -> None:
    """Set ``sys.argv`` and ``sys.path[0]`` like ``python SCRIPT ARGS``, without a script like ``python -m``.

    ``runpy`` sets the ``sys.argv[0]`` of a module.
    """
    sys.argv = ["-m" if script is None else str(script), *args]
    folder = Path.cwd() if script is None else script.resolve().parent
    is_plain = script is None or (script.is_file() and script.suffix not in {".zip", ".pyz"})
    if is_plain and not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path.insert(0, str(folder))


def _run(script: str | None, module: str | None, notes: Notes) -> None:
    """Run the script or module, note how it ended, and exit like Python."""
    try:
        if module is None:
            runpy.run_path(str(script), run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
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
        without_frame = _failure_of_dynamo(error)
        if without_frame is not None:
            notes.write("without frame", without_frame)
        shown = _traceback_of(error)
        sys.excepthook(type(error), error.with_traceback(shown), shown)
        sys.exit(1)
    notes.write("ended", "finished")


def _failure_of_dynamo(error: BaseException | None) -> dict[str, Any] | None:
    """The parts of an error, or of its cause, that Dynamo raised before it called a backend."""
    while error is not None:
        classes = {cls.__name__ for cls in type(error).__mro__ if cls.__module__ == _DYNAMO_ERRORS}
        if "BackendCompilerFailed" in classes:
            return None
        if "TorchDynamoException" in classes:
            message = str(error)
            explained = re.search(r"^  Explanation: (.*)$", message, re.MULTILINE)
            return {
                "classes": sorted(classes),
                "error": f"{type(error).__name__}: {message.partition(chr(10))[0]}",
                "explanation": "" if explained is None else explained[1],
                "line": line_of_message(message, "from user code:"),
                "advice": advice_in(message),
            }
        error = error.__cause__
    return None


def _traceback_of(error: BaseException) -> TracebackType | None:
    """The part of a traceback that begins in the program, as Python prints it."""
    entry, machinery = error.__traceback__, {__file__, runpy.__file__, "<frozen runpy>"}
    while entry is not None and entry.tb_frame.f_code.co_filename in machinery:
        entry = entry.tb_next
    return entry
