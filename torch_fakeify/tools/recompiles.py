"""Recompilations of a recorded program: why a function was compiled again, and equal frames."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from torch_fakeify.errors import FakeifyError
from torch_fakeify.render.diff import difference_lines, differences
from torch_fakeify.render.recompiles import recompilations
from torch_fakeify.serialization.capture_file import read_capture

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch_fakeify.records.frame import CaptureDesc

_MOST = 8


def recompile_lines(paths: Sequence[Path]) -> list[str]:
    """Format, for each frame of a function that was compiled before, its difference from the previous one.

    Args:
        paths: captures in the order in which they were made.
    """
    lines: list[str] = []
    found = list(_recompiles(paths))
    for before, after, differ in found[:_MOST]:
        what = "the same frame again" if not differ else "A is the earlier, B the later"
        lines += ["", f"{after.name} after {before.name}: {what}"]
        lines += [f"  {line}" for line in differ]
    if len(found) > _MOST:
        lines += ["", f"... and {len(found) - _MOST} more: see `torch-fakeify diff A B`"]
    return lines


def _recompiles(paths: Sequence[Path]) -> Iterator[tuple[Path, Path, list[str]]]:
    for (before, earlier), (path, desc) in recompilations(_readable(paths)):
        yield before, path, difference_lines(differences(earlier, desc))


def _readable(paths: Sequence[Path]) -> Iterator[tuple[Path, CaptureDesc]]:
    for path in paths:
        with suppress(FakeifyError):  # it was removed or changed
            yield path, read_capture(path)


def same_frames(recorded: Mapping[Path, str]) -> dict[Path, Path]:
    """Map each capture of an already recorded frame to the first capture of that frame.

    Args:
        recorded: `compile_key` by file, in the order in which the files were made.
    """
    first: dict[str, Path] = {}
    firsts = {path: first.setdefault(key, path) for path, key in recorded.items()}
    return {path: other for path, other in firsts.items() if other != path}
