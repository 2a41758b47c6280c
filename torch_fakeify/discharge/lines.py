"""The user's lines at which the facts of a ``ShapeEnv`` were stated."""

from __future__ import annotations

import re
import weakref
from typing import TYPE_CHECKING, Any

from torch_fakeify._user_lines import calling_line, own_line
from torch_fakeify.compat.torch_dynamo import TracingContext

if TYPE_CHECKING:
    import sympy

_TORCHS_LINE = re.compile(r"^(?P<code>.*)  # (?P<line>.+:\d+) in [^ ]+$", re.DOTALL)
"""A location as torch writes it: the code, the end of the path with the line, the function."""

_stated: weakref.WeakKeyDictionary[Any, dict[sympy.Basic, str]] = weakref.WeakKeyDictionary()
"""Of each environment the lines of its runtime asserts, which torch does not record for Dynamo."""


def current_line() -> str | None:
    """Return the user's line that is traced or executed now, as ``file:line``."""
    entries = [(entry.filename, entry.lineno or 0) for entry in TracingContext.extract_stack()]
    found = own_line(entries) or calling_line()
    return None if found is None else f"{found[0]}:{found[1]}"


def note_line(env: Any, expr: sympy.Basic) -> None:
    """Record the current line as that of a runtime assert; the first line of a condition remains."""
    lines = _stated.setdefault(env, {})
    if expr not in lines:
        line = current_line()
        if line is not None:
            lines[expr] = line


def stated_line(env: Any, expr: sympy.Basic) -> str | None:
    """Return the line that `note_line` recorded for a condition."""
    return _stated.get(env, {}).get(expr)


def line_of(location: Any) -> str | None:
    """Return the user's line of an ``SLoc`` or a ``RuntimeAssert``, as ``file:line``.

    The stack of a runtime assert has it only if Python itself executed the line: the frames of what
    Dynamo traces are not in it.
    """
    if location is None:
        return None
    if hasattr(location, "stack"):
        entries = [(entry.filename, entry.lineno or 0) for entry in location.stack.summary()]
        if any("_dynamo" in file for file, _ in entries):
            return None
        found = own_line(entries)
        return None if found is None else f"{found[0]}:{found[1]}"
    text = location.maybe_user_loc
    if text is None:
        return None
    found = _TORCHS_LINE.match(text)
    if found is None:
        return str(text)
    code = found["code"].strip()
    return f"{found['line']}: {code}" if code else found["line"]
