"""Captures as arguments: a file, an object, which processes read from a file, or directories of files.

Nothing here imports torch.
"""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from torch_fakeify._atomic_write import reason_of
from torch_fakeify.errors import CaptureError, FormatError
from torch_fakeify.serialization.capture_file import read_capture
from torch_fakeify.serialization.container import Limits

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from torch_fakeify.frames.captures import Capture
    from torch_fakeify.records.frame import CaptureDesc

    CaptureLike: TypeAlias = Capture | str | os.PathLike[str]

_SUFFIX = ".fkf"


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


# --- directories ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CorpusFile:
    """A capture file of a corpus."""

    name: str
    """Its name in results: the path below the directory on the command line, with ``/``."""
    path: Path
    """Absolute path."""


def find_captures(paths: Sequence[str | Path]) -> list[CorpusFile]:
    """Find the capture files of a corpus, sorted by name.

    Directories are searched recursively for ``*.fkf``, without following links to directories; any
    other path is a capture, of any name. With a single directory, names are relative to it. Each file
    is listed once.

    Raises:
        FormatError: a directory cannot be read, or there is no capture in it.
    """
    found: dict[str, CorpusFile] = {}
    for argument in paths:
        if not Path(argument).is_dir():
            file = CorpusFile(_text(str(argument)), Path(argument).absolute())
            found.setdefault(os.path.realpath(argument), file)
            continue
        prefix = Path(argument) if len(paths) > 1 else Path()
        files = list(_below(Path(argument)))
        if not files:
            raise FormatError(
                "no captures in this directory",
                where=str(argument),
                expected=f"files *{_SUFFIX}",
                fix="Record some with `torch-fakeify run`",
            )
        for path in files:
            name = _text((prefix / path.relative_to(argument)).as_posix())
            found.setdefault(os.path.realpath(path), CorpusFile(name, Path(path).absolute()))
    return sorted(found.values(), key=lambda file: file.name.split("/"))


def read_captures(
    directory: str | Path, *, limits: Limits | None = None
) -> Iterator[tuple[CorpusFile, CaptureDesc | str]]:
    """Yield the captures in a directory and below, or why one cannot be read.

    Raises:
        FormatError: the directory cannot be read, or there is no capture in it.
    """
    for file in find_captures([directory]):
        try:
            found = read_capture(file.path, limits=limits)
        except FormatError as error:
            found = str(error).removeprefix(f"{error.where}: ")
        yield file, found


def _below(directory: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise FormatError(
            "the directory cannot be read", where=str(error.filename), found=reason_of(error)
        ) from error

    for folder, _, names in os.walk(directory, onerror=refuse):
        yield from (Path(folder, name) for name in names if name.endswith(_SUFFIX))


def _text(name: str) -> str:
    """Escape the bytes of a file name that are not UTF-8."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
