"""The calls that a path through the package makes, and those that a drawing of it shows."""

from __future__ import annotations

import inspect
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

PACKAGE = Path(tfk.__file__).parent
_PREFIX = f"{PACKAGE}{os.sep}"
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
NAME = re.compile(rf"(?<![\w./])(?:{'|'.join(ROOMS)})(?:\.[A-Za-z_]\w*)+")
"""A dotted name of the package, without the package's name."""


class Call(NamedTuple):
    """One call of a function of the package."""

    caller: str | None
    """The room of the closest caller in the package; ``None`` for a call from outside."""
    code: CodeType


class Arrow(NamedTuple):
    """One call in a drawing."""

    caller: str | None
    callee: str
    """A dotted name, without the package's name."""


def find_name(name: str) -> Any:
    """Return the object that a dotted name of the package denotes; raise if there is none."""
    found: Any = tfk
    path = "torch_fakeify"
    for part in name.split("."):
        path = f"{path}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            found = import_module(path)
    return found


def code_of(name: str) -> CodeType:
    """Return the code of a function, method or constructor, which has to be defined under that name."""
    found = find_name(name)
    function = inspect.unwrap(found.__init__ if inspect.isclass(found) else found)
    defined = f"{function.__module__}.{function.__qualname__}".removesuffix(".__init__")
    assert defined == f"torch_fakeify.{name}"
    return getattr(function, "__func__", function).__code__


def calls_of(run: Callable[[], object]) -> list[Call]:
    """Run a function and return the calls of functions of the package, in their order."""
    calls: list[Call] = []

    def profile(frame: FrameType, event: str, _arg: object) -> None:
        if event != "call" or _room(frame) is None:
            return
        back = frame.f_back
        while back is not None and _room(back) is None:
            back = back.f_back
        calls.append(Call(None if back is None else _room(back), frame.f_code))

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def _room(frame: FrameType) -> str | None:
    path = frame.f_code.co_filename
    return path[len(_PREFIX) :].partition(os.sep)[0] if path.startswith(_PREFIX) else None


def arrows_of(drawing: str) -> list[Arrow]:
    """Return the calls that a sequence diagram shows, from the top to the bottom.

    The first line names the columns: who calls, and rooms. A name behind an arrow to the right is called
    by the room where the arrow begins, a name without an arrow by the room of its column, which is that
    of the last arrow to it if it stands for several. An arrow to the left is a return.
    """
    head, *lines = drawing.splitlines()
    columns = [(entry.start(), entry[0]) for entry in re.finditer(r"\S+(?: \S+)*", head)]
    rooms = [name if name in ROOMS else None for _, name in columns]

    def column_at(place: int) -> int:
        return max(at for at, (start, _) in enumerate(columns) if start <= place)

    arrows: list[Arrow] = []
    for line in lines:
        name = NAME.search(line)
        if name is None or "<-" in line:
            continue
        at = column_at(line.rindex("|", 0, name.start()))
        arrow = re.search(r"\|-+>", line)
        arrows.append(Arrow(rooms[column_at(arrow.start()) if arrow else at], name[0]))
        if columns[at][1] not in ROOMS:
            rooms[at] = name[0].partition(".")[0]
    return arrows


def first_missing(arrows: list[Arrow], calls: list[Call]) -> Arrow | None:
    """Return the first arrow that has no call after those of the arrows before it."""
    left = iter(calls)
    for arrow in arrows:
        call = Call(arrow.caller, code_of(arrow.callee))
        if call not in left:
            return arrow
    return None
