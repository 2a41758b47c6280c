"""What ``run`` prints of a failure: the frame, the user's line, the error, and what to do next."""

from __future__ import annotations

import linecache
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_fakeify._user_lines import is_of_library
from torch_fakeify.errors import FakeifyError
from torch_fakeify.render.data_dependent import advice_in
from torch_fakeify.render.failing_nodes import failing_stacks
from torch_fakeify.render.readable_names import readable_text
from torch_fakeify.render.summary import (
    command_line,
    is_entry_point,
    is_of_script,
    named_backend,
)
from torch_fakeify.render.text import code_line, count_text
from torch_fakeify.serialization.capture_file import read_capture
from torch_fakeify.serialization.container import Limits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_fakeify.frames.notes import FrameReport
    from torch_fakeify.records.frame import CaptureDesc
    from torch_fakeify.records.tensor import FrameDesc, StackDesc


class HowCompiled(NamedTuple):
    """The options of ``run`` that the next command needs too."""

    backend: str | None = None
    imports: tuple[str, ...] = ()


def failure_lines(frames: Sequence[FrameReport], folder: Path, how: HowCompiled) -> list[str]:
    """Format the first frame of a run that failed, with the command that makes it small.

    There are no lines if no recorded frame failed.
    """
    failed = failed_frames(frames)
    if not failed:
        return []
    first = failed[0]
    name, desc = short_name(first, folder), _capture_of(first)
    text = first.failure or first.state
    message = "" if desc is None or desc.failure is None else desc.failure.message
    is_own = is_of_the_script(first, how)
    needed = compiled_again(first, how)
    verb = "minify" if first.state == "failed" else "replay"
    verb += " --trust" if first.exceeds else ""
    path = short_path(str(first.path))
    rows = [
        ("frame", f"{name}: {first.title}{_at(', ', first.defined)}"),
        ("your line", _line_of(desc) or _line(first.line)),
        ("error", text if desc is None else readable_text(text, desc)),
        *(("", line) for line in advice_in(message)),
        ("first", "move the backend from the script into a module, which is MODULE below" * is_own),
        ("next", command_line(verb, path, needed.backend, needed.imports)),
    ]
    others = [short_name(frame, folder) for frame in failed[1:]]
    if others:
        rows.append(("failed too", ", ".join(others)))
    return _block(rows)


def failed_frames(frames: Sequence[FrameReport]) -> list[FrameReport]:
    """Return the recorded frames that failed, then those that were not finished."""
    recorded = [frame for frame in frames if frame.path is not None]
    return [f for state in ("failed", "not finished") for f in recorded if f.state == state]


def untraced_lines(
    found: Mapping[str, Any], frames: Sequence[FrameReport], folder: Path
) -> list[str]:
    """Format a failure of Dynamo before it called a backend, which no capture has.

    ``found`` is the note of the process, see `script_process`.
    """
    count = sum(frame.path is not None for frame in frames)
    captures = f"{count_text(count, 'capture')} in {folder}" if count else "nothing"
    rows = [
        ("frame", "none: torch.compile failed before it called a backend"),
        ("your line", _line(found["line"])),
        ("error", found["error"]),
        ("", found["explanation"]),
        *(("", line) for line in found["advice"]),
        ("recorded", f"{captures} until then"),
        ("next", _advice(found)),
    ]
    return _block(rows)


def _advice(found: Mapping[str, Any]) -> str:
    classes, error = found["classes"], found["error"]
    no_fake = "no fake impl registered|nsupported operator|not support running with fake tensors"
    cases = (
        (found["advice"], "Add the check that holds before that line"),
        (
            "data-dependent expression" in error,
            "Run it with TORCH_FAKEIFY_ENTAILMENT=1: what follows from your checks needs no other, "
            "and the error names one that would do",
        ),
        (
            re.search(no_fake, error + found["explanation"]),
            "Run it with --infer-fakes, which writes a fake kernel of that operator",
        ),
        (
            "TorchRuntimeError" in classes,
            "Correct that operator's fake kernel (torch.library.register_fake), or the call of it",
        ),
        (
            "Unsupported" in classes,
            "Change that line, or compile without fullgraph=True: "
            "the graphs before and after it are then recorded",
        ),
        (True, "Run it with TORCHDYNAMO_VERBOSE=1 for Dynamo's own stack"),
    )
    return next(text for applies, text in cases if applies)


def _block(rows: Sequence[tuple[str, str]]) -> list[str]:
    return [f"  {head:<10}  {text}" for head, text in rows if text]


def short_name(frame: FrameReport | Path, folder: Path) -> str:
    """Return the file of a frame with the folder of the run, and with that of its process if it is a child.

    A frame that is not on record has its title.
    """
    path = frame if isinstance(frame, Path) else frame.path
    if path is None:
        assert not isinstance(frame, Path)
        return frame.title
    return path.relative_to(folder.absolute().parent).as_posix()


def _at(before: str, place: tuple[str, int] | None) -> str:
    return "" if place is None else f"{before}{short_path(place[0])}:{place[1]}"


def _line(place: tuple[str, int] | None, code: str | None = None) -> str:
    """A place, with its code, by default as it is in the file."""
    if place is None:
        return ""
    code = linecache.getline(*place).strip() if code is None else code
    return _at("", place) + (f": {code}" if code else "")


def _line_of(desc: CaptureDesc | None) -> str:
    """The line of the program at which its nodes failed, as recorded; empty if the message does not tell it."""
    frames = [] if desc is None else [_own_frame(stack) for stack in failing_stacks(desc)]
    lines = {None if frame is None else (frame.file, frame.line) for frame in frames}
    if len(lines) != 1 or frames[0] is None:
        return ""
    (place,) = lines
    return _line(place, code_line(frames[0]) if frames[0].code else "")


def _own_frame(stack: StackDesc | None) -> FrameDesc | None:
    """The innermost entry of a stack that is in no installed package."""
    own = (f for f in reversed(stack.frames if stack else ()) if not is_of_library(f.file))
    return next(own, None)


def short_path(file: str) -> str:
    """Return a path as it is shortest from the working directory, if it is below that."""
    here = f"{Path.cwd()}{os.sep}"
    return file.removeprefix(here)


def compiled_again(frame: FrameReport, how: HowCompiled) -> HowCompiled:
    """Return the options with which another command compiles a frame as the run did.

    The module of a backend in the script itself is ``MODULE``, as it cannot be imported.
    """
    if how.backend is not None or is_entry_point(frame.backend):
        return how
    backend, module = named_backend(frame.backend_place)
    imports = how.imports if module is None else (*how.imports, module)
    return how._replace(backend=backend, imports=imports)


def is_of_the_script(frame: FrameReport, how: HowCompiled) -> bool:
    """Whether the script itself defines the backend, so that no other command can import it."""
    return how.backend is None and is_of_script(frame.backend_place)


def _capture_of(frame: FrameReport) -> CaptureDesc | None:
    """Return the capture of a frame, for names and its whole message; ``None`` if it cannot be read."""
    try:
        return None if frame.path is None else read_capture(frame.path, limits=Limits.none())
    except FakeifyError:
        return None
