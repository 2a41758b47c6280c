"""Find the user's line in stacks that also go through torch, this package and the standard library."""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_fakeify._version import PACKAGE_DIR

if TYPE_CHECKING:
    from collections.abc import Iterable

_ENTRY = re.compile(r'^ *File "(?P<file>.+)", line (?P<line>\d+)', re.MULTILINE)
_PACKAGES = frozenset({"site-packages", "dist-packages"})


def own_line(entries: Iterable[tuple[str, int]]) -> tuple[str, int] | None:
    """Return the innermost line of the user's own code; of a library other than torch if there is none.

    Args:
        entries: file and line, the innermost one last.
    """
    stdlib, found = sysconfig.get_paths()["stdlib"], None
    torch = getattr(sys.modules.get("torch"), "__path__", ["torch"])[0]
    for file, line in reversed([*entries]):
        if file.startswith(("<", torch, str(PACKAGE_DIR))) and file != "<string>":
            continue
        if not _is_in_packages(Path(file)):
            if not file.startswith(stdlib):
                return file, line
        elif found is None:
            found = file, line
    return found


def is_of_library(file: str) -> bool:
    """Whether a recorded file, such as ``torch/nn/functional.py``, is of an installed package."""
    path = Path(file)
    if path.is_absolute() or path.is_file():
        return _is_in_packages(path)
    return any((entry / path).is_file() for entry in filter(_is_in_packages, map(Path, sys.path)))


def _is_in_packages(path: Path) -> bool:
    return not _PACKAGES.isdisjoint(path.parts)


def calling_line() -> tuple[str, int] | None:
    """Return the user's line that is being executed in this thread, such as a call of compiled code."""
    entries: list[tuple[str, int]] = []
    frame = sys._getframe(1)
    while frame is not None:
        entries.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return own_line(reversed(entries))


def calling_locals() -> dict[str, Any]:
    """Return the local variables at the user's line that is being executed in this thread."""
    line, frame = calling_line(), sys._getframe(1)
    while line is not None and frame is not None:
        if (frame.f_code.co_filename, frame.f_lineno) == line:
            return dict(frame.f_locals)
        frame = frame.f_back
    return {}


def line_of_message(message: str, after: str) -> tuple[str, int] | None:
    """Return the user's line in the stack that torch appends to a message.

    Args:
        message: of an exception.
        after: the words before the stack.
    """
    _, found, stack = message.rpartition(after)
    return own_line((e["file"], int(e["line"])) for e in _ENTRY.finditer(stack)) if found else None
