"""Stacks and source locations <-> records of text.

A traceback of torch refers to live frames; a record has the text of each frame with its line of code,
so that it does not need the file. It is decoded to an object with the interface of torch's
``CapturedTraceback``: ``summary()``, ``format()`` and ``cleanup()``.
"""

from __future__ import annotations

import re
import traceback
from typing import TYPE_CHECKING, Any

import msgspec

from torch_fakeify.compat.torch_symbols import CapturedTraceback, SLoc
from torch_fakeify.errors import UnsupportedValueError
from torch_fakeify.records.shape_env import LocationDesc
from torch_fakeify.records.tensor import FrameDesc, StackDesc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_EMPTY = StackDesc(frames=())

# Torch's rendering of the user's frame of an SLoc: code, short file name, line, function.
_USER_LOCATION = re.compile(r"(?s)(.*)  # (.*):(0|[1-9][0-9]*) in (.*)")


class RecordedTraceback(CapturedTraceback):
    """A traceback of recorded text, with the interface of torch's ``CapturedTraceback``."""

    __slots__ = ("record",)

    def __init__(self, record: StackDesc) -> None:
        super().__init__(None)
        self.record = record

    def summary(self) -> traceback.StackSummary:
        """The frames, outermost first; none after ``cleanup()``."""
        summary = traceback.StackSummary()
        summary.extend(_frame_summary(frame) for frame in self.record.frames)
        return summary

    def cleanup(self) -> None:
        """Forget the frames, as ``CapturedTraceback.cleanup`` does."""
        self.record = _EMPTY

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        return None, {"tb": None, "skip": 0, "record": self.record}


def copy_stack(stack: CapturedTraceback) -> CapturedTraceback:
    """A copy for another ``ShapeEnv``, since each environment clears its stacks at the end."""
    if isinstance(stack, RecordedTraceback):
        return RecordedTraceback(stack.record)
    return CapturedTraceback(stack.tb, stack.skip)


def encode_stack(stack: Any) -> StackDesc | None:
    """The text of a stack, outermost entry first.

    Args:
        stack: a ``CapturedTraceback``, a ``traceback.StackSummary`` or list of
            ``FrameSummary``, or ``None``, which has no record.

    Raises:
        UnsupportedValueError: it is of another type.
    """
    if stack is None:
        return None
    if isinstance(stack, RecordedTraceback):
        return stack.record
    frames: Iterable[Any] = stack.summary() if isinstance(stack, CapturedTraceback) else stack
    if not isinstance(frames, list):
        raise UnsupportedValueError(
            "not a stack", expected="CapturedTraceback or StackSummary", found=type(stack).__name__
        )
    return StackDesc(frames=tuple(_frame_desc(frame) for frame in frames)) if frames else _EMPTY


def decode_stack(d: StackDesc | None) -> RecordedTraceback | None:
    """A traceback with the text of the record; ``None`` for ``None``."""
    return None if d is None else RecordedTraceback(d)


def encode_location(location: Any) -> LocationDesc | None:
    """The record of an ``SLoc``; ``None`` for ``None``."""
    if location is None:
        return None
    framework, framework_text = None, None
    if isinstance(location.framework_loc, str):
        framework_text = location.framework_loc
    elif location.framework_loc is not None:
        framework = StackDesc(frames=(_frame_desc(location.framework_loc),))
    user, user_text = None, location.maybe_user_loc
    parts = None if user_text is None else _USER_LOCATION.fullmatch(user_text)
    if parts is not None and len(parts[3]) < 10:
        frame = FrameDesc(file=parts[2], line=int(parts[3]), function=parts[4], code=parts[1])
        user, user_text = StackDesc(frames=(frame,)), None
    return LocationDesc(
        user=user, user_text=user_text, framework=framework, framework_text=framework_text
    )


def decode_location(d: LocationDesc | None) -> Any:
    """The ``SLoc`` of a record; ``None`` for ``None``."""
    if d is None:
        return None
    framework: Any = d.framework_text
    if d.framework is not None and d.framework.frames:
        framework = _frame_summary(d.framework.frames[0])
    user = d.user_text
    if d.user is not None and d.user.frames:
        frame = d.user.frames[0]
        user = f"{frame.code}  # {frame.file}:{frame.line} in {frame.function}"
    return SLoc(framework, user)


def _frame_desc(frame: Any) -> FrameDesc:
    return FrameDesc(
        file=frame.filename, line=frame.lineno or 0, function=frame.name, code=frame.line or ""
    )


def _frame_summary(frame: FrameDesc) -> traceback.FrameSummary:
    # With its line: a lookup could find another file of the same name.
    code, _, _ = frame.code.partition("\n")
    return traceback.FrameSummary(
        frame.file, frame.line, frame.function, lookup_line=False, line=code
    )


# --- as text ---------------------------------------------------------------------------------------

_FRAME = re.compile(
    r'  File "([^"\n]+)", line (\d{1,9}), in ([^\n]+)\n(?:    (\S[^\n]*(?:\n    [^\n]*)*)\n)?'
)


def parse_stack(text: str, file_name: Callable[[str], str]) -> StackDesc | str:
    """The frames of a stack printed by ``traceback``; any other text is returned unchanged."""
    frames: list[FrameDesc] = []
    position = 0
    while (match := _FRAME.match(text, position)) is not None:
        frames.append(
            FrameDesc(file=match[1], line=int(match[2]), function=match[3], code=match[4] or "")
        )
        position = match.end()
    if not frames or stack_text(StackDesc(frames=tuple(frames))) != text:
        return re.sub(r'File "([^"\n]+)"', lambda m: f'File "{file_name(m[1])}"', text)
    return StackDesc(
        frames=tuple(msgspec.structs.replace(f, file=file_name(f.file)) for f in frames)
    )


def stack_text(d: StackDesc) -> str:
    """The stack in the format of ``traceback``."""
    lines = [
        f'  File "{f.file}", line {f.line}, in {f.function}\n'
        + (f"    {f.code}\n" if f.code else "")
        for f in d.frames
    ]
    return "".join(lines)


def location_text(location: Any) -> str | None:
    """The user's line of an ``SLoc`` as a stack, or ``None``."""
    desc = encode_location(location)
    if desc is None or desc.user is None:
        return None
    return stack_text(desc.user)
