"""Find the capture files in directories. Nothing here imports torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch_fakeify._atomic_write import reason_of
from torch_fakeify.errors import FormatError
from torch_fakeify.serialization.capture_file import read_capture

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch_fakeify.records.frame import CaptureDesc
    from torch_fakeify.serialization.container import Limits

_SUFFIX = ".fkf"


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
