"""Why a program compiled one function more than once, and which frames were on record before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .diff import difference_lines, differences
from .errors import FakeifyError
from .files import read_capture
from .fingerprint import fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from .desc_frame import CaptureDesc

__all__ = ["recompile_lines", "same_frames"]

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


def same_frames(recorded: Mapping[Path, str]) -> dict[Path, Path]:
    """For each new capture of a frame that is on record already, the capture that has it.

    That is an earlier one of the same run, or one that was in the directory before.

    Args:
        recorded: fingerprints by file, in the order in which the files were made.
    """
    first: dict[str, Path] = {}
    found: dict[Path, Path] = {}
    for path, key in recorded.items():
        other = first.setdefault(key, path)
        known = other if other != path else _found_before(path, key, recorded)
        if known is not None:
            found[path] = known
    return found


def _found_before(path: Path, key: str, recorded: Mapping[Path, str]) -> Path | None:
    """A file of another run with the same frame: its name ends as this one's does."""
    for other in sorted(path.parent.glob(f"*-{key[:8]}.fkf")):
        if other in recorded:
            continue
        try:
            if fingerprint(read_capture(other)) == key:
                return other
        except FakeifyError:  # it has the name of a capture, and is none
            continue
    return None
