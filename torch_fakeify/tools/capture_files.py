"""A capture as an argument: the file, or the object, which the processes of a command read from a file."""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from torch_fakeify.errors import CaptureError
from torch_fakeify.serialization.container import Limits

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch_fakeify.frames.captures import Capture

    CaptureLike: TypeAlias = Capture | str | os.PathLike[str]

__all__ = ["CaptureLike", "as_file", "output_beside", "path_of"]


@contextmanager
def as_file(capture: CaptureLike) -> Generator[Path]:
    """Yield the file of a capture; that of an object is written for the time of the block.

    Raises:
        CaptureError: it is neither a path nor a capture.
        WriteError: the object cannot be written as a file.
    """
    if isinstance(capture, (str, os.PathLike)):
        yield Path(capture)
        return
    _check(capture)
    with tempfile.TemporaryDirectory(prefix="torch-fakeify-") as folder:
        path = Path(folder) / output_beside(capture, ".fkf").name
        capture.save(path, limits=Limits.none())
        yield path


def path_of(capture: CaptureLike) -> Path | None:
    """Return the file that was given or that the capture was read from, if any."""
    return Path(capture) if isinstance(capture, (str, os.PathLike)) else _check(capture).path


def output_beside(capture: CaptureLike, suffix: str) -> Path:
    """Return a name for what is made of a capture: beside its file, else its function's in the current folder."""
    found = path_of(capture)
    if found is not None:
        return found.with_suffix(suffix)
    function = "" if isinstance(capture, (str, os.PathLike)) else capture.desc.frame
    return Path((re.sub(r"\W+", "_", function or "").strip("_") or "frame") + suffix)


def _check(capture: Capture) -> Capture:
    if not hasattr(capture, "desc") or not hasattr(capture, "save"):
        raise CaptureError(
            "that is no capture",
            expected="a Capture, or the path of its file",
            found=type(capture).__qualname__,
        )
    return capture
