"""Write the script of a frame, run it, and say whether it fails as the frame does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_fakeify._atomic_write import write_atomic
from torch_fakeify.errors import FakeifyError
from torch_fakeify.frames.captures import Capture

from .repro_script import check_script, script_of

if TYPE_CHECKING:
    from torch_fakeify.records.frame import CaptureDesc

    from .failures import Failure, Outcome
    from .repro_script import BackendCode

START = 30.0
"""Seconds for a process to import torch."""


class CheckedScript(NamedTuple):
    """A script that was written and run."""

    path: Path | None
    """``None`` if the frame cannot be written as a script."""
    outcome: Outcome | None
    """Whether it fails as the frame does; ``None`` if there is no script."""
    state: str
    """The same in words, or why there is no script."""


def write_checked_script(
    path: Path,
    desc: CaptureDesc,
    failure: Failure,
    backend: BackendCode,
    *,
    timeout: float,
    stubs: bool = False,
    **options: Any,
) -> CheckedScript:
    """Write a script that Dynamo traces; if it does not fail like the frame, one that calls the backend itself.

    Dynamo cannot trace to a graph of AOTAutograd. The names in it are made of those of the program; where only torch's own names fail like the frame, it
    has these.

    Args:
        path: of the script.
        desc: the frame.
        failure: how it fails.
        backend: the backend.
        timeout: seconds to compile and run the frame once.
        stubs: whether the script defines stubs of the operators that this process lacks.
        **options: the other options of `script_of`.
    """
    found = CheckedScript(None, None, "")
    ways = ((False, False), (True, False), (True, True))
    for direct, torch_names in ways if desc.aot is None else ways[1:]:
        try:
            with Capture(desc).operator_stubs() as missing:
                defined = missing if stubs else ()
                text = script_of(
                    desc, failure, backend, direct=direct, torch_names=torch_names, stubs=defined,
                    **options,
                )  # fmt: skip
        except FakeifyError as error:
            return found if found.path is not None else CheckedScript(None, None, f"none: {error}")
        write_atomic(path, text.encode())
        outcome = check_script(
            path, failure, timeout=timeout + START, folder=run_folder(bool(backend.lines()))
        )
        state = "fails in the same way" if outcome.fails else outcome.text
        found = CheckedScript(path, outcome, state)
        if outcome.fails:
            break
    return found


def run_folder(imports: bool) -> Path | None:
    """Return where a script is run: the current folder if it imports modules from there, else an empty one."""
    return Path.cwd() if imports else None
