"""The captures of a corpus: which files there are, and which of them hold the same frame.

Nothing here imports torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import FormatError
from .files import read_capture
from .fingerprint import fingerprint
from .verdict import masked
from .whole_files import reason_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .container import Limits
    from .desc_frame import CaptureDesc, FailureDesc

__all__ = ["SUFFIX", "CorpusFile", "FrameKey", "find_captures", "frame_key", "read_keyed"]

SUFFIX = ".fkf"


@dataclass(frozen=True)
class CorpusFile:
    """A file of a corpus."""

    name: str
    """What a result calls it: the path below the directory that was given, with ``/``."""
    path: Path
    """Absolute."""


@dataclass(frozen=True)
class FrameKey:
    """What two captures have in common that have to be compiled only once."""

    fingerprint: str
    failure: tuple[str, str] | None
    """Type and masked message of the recorded failure."""


def find_captures(paths: Sequence[str | Path]) -> list[CorpusFile]:
    """The files of a corpus, in the order of their names.

    A directory stands for the files ``*.fkf`` in it and below, but those behind links to
    directories; anything else is taken for a capture, whatever its name. With one directory alone
    names begin below it, and so do not depend on where it is. Each file is listed once.

    Raises:
        FormatError: a directory cannot be read, or there is no capture in it.
    """
    found: dict[str, CorpusFile] = {}
    for given in paths:
        if not Path(given).is_dir():
            file = CorpusFile(_text(str(given)), Path(given).absolute())
            found.setdefault(os.path.realpath(given), file)
            continue
        prefix = Path(given) if len(paths) > 1 else Path()
        files = list(_below(Path(given)))
        if not files:
            raise FormatError(
                "no captures in this directory",
                where=str(given),
                expected=f"files *{SUFFIX}",
                fix="Record some with `torch-fakeify run`",
            )
        for path in files:
            name = _text((prefix / path.relative_to(given)).as_posix())
            found.setdefault(os.path.realpath(path), CorpusFile(name, Path(path).absolute()))
    return sorted(found.values(), key=lambda file: file.name.split("/"))


def _below(directory: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise FormatError(
            "the directory cannot be read", where=str(error.filename), found=reason_of(error)
        ) from error

    for folder, _, names in os.walk(directory, onerror=refuse):
        yield from (Path(folder, name) for name in names if name.endswith(SUFFIX))


def _text(name: str) -> str:
    """A name that UTF-8 can say: a file system may hold any bytes."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def frame_key(desc: CaptureDesc) -> FrameKey:
    """What a capture shares with every other one of its frame, from whatever run and machine.

    It is the fingerprint and the recorded failure, without what differs in its message from run to
    run.
    """
    return FrameKey(fingerprint(desc), _failure_key(desc.failure))


def _failure_key(failure: FailureDesc | None) -> tuple[str, str] | None:
    return None if failure is None else (failure.type, masked(failure.message))


def read_keyed(path: Path, *, limits: Limits | None = None) -> tuple[CaptureDesc, FrameKey]:
    """Read a capture, and tell which frame it is of.

    Raises:
        FormatError: as of `read_capture`.
    """
    desc = read_capture(path, limits=limits)
    return desc, frame_key(desc)
