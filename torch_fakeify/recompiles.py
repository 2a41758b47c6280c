"""Why a program compiled one function more than once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .diff import difference_lines, differences
from .errors import FakeifyError
from .files import read_capture

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from .desc_frame import CaptureDesc

__all__ = ["recompile_lines"]

_MOST = 8


def recompile_lines(paths: Sequence[Path]) -> list[str]:
    """For each frame of a function that was compiled before, what tells it from the last one.

    Args:
        paths: captures in the order in which they were made.
    """
    lines: list[str] = []
    found = list(_recompiles(paths))
    for before, after, differ in found[:_MOST]:
        what = "the same frame again" if not differ else "A is the former, B the latter"
        lines += ["", f"{after.name} after {before.name}: {what}"]
        lines += [f"  {line}" for line in differ]
    if len(found) > _MOST:
        lines += ["", f"... and {len(found) - _MOST} more: see `torch-fakeify diff A B`"]
    return lines


def _recompiles(paths: Sequence[Path]) -> Iterator[tuple[Path, Path, list[str]]]:
    last: dict[tuple[object, ...], tuple[Path, CaptureDesc]] = {}
    for path in paths:
        try:
            desc = read_capture(path)
        except FakeifyError:  # somebody took it away, or changed it
            continue
        key = _code(desc)
        if key in last:
            before, known = last[key]
            yield before, path, difference_lines(differences(known, desc))
        last[key] = path, desc


def _code(desc: CaptureDesc) -> tuple[object, ...]:
    """The code object that was compiled, as far as the record tells."""
    fields = {} if desc.shape_env is None else dict(desc.shape_env.co_fields)
    return (
        desc.frame,
        *(fields.get(name) for name in ("co_name", "co_filename", "co_firstlineno")),
    )
