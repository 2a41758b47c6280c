"""Folders for captures: a process writes into one of its own, and none is left empty."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from typing import TYPE_CHECKING, NamedTuple

from torch_fakeify._atomic_write import reason_of
from torch_fakeify.errors import WriteError

if TYPE_CHECKING:
    from pathlib import Path


class NewFolder(NamedTuple):
    """A folder, and the folders that were made for it."""

    path: Path
    made: tuple[Path, ...]
    """Those that did not exist, the innermost one first."""

    def remove_if_empty(self) -> None:
        """Remove the folders that were made, from the innermost one up to the first that is not empty."""
        with contextlib.suppress(OSError):
            for folder in self.made:
                folder.rmdir()


def make_folder(path: Path) -> NewFolder:
    """Make a folder if it does not exist, and check that files can be written there.

    Raises:
        WriteError: they cannot.
    """
    folder = NewFolder(path, _missing(path))
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        folder.remove_if_empty()
        raise _not_writable(path, error) from error
    return folder


def new_folder(root: Path, name: str) -> NewFolder:
    """Make a folder ``root/name``; ``name-2``, ``name-3`` and so on if there is one.

    Raises:
        WriteError: none can be made.
    """
    for number in itertools.count(1):
        path = root / (name if number == 1 else f"{name}-{number}")
        made = _missing(path)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise _not_writable(root, error) from error
        return NewFolder(path, made)
    raise AssertionError("unreachable")


def _missing(path: Path) -> tuple[Path, ...]:
    return tuple(itertools.takewhile(lambda folder: not folder.exists(), [path, *path.parents]))


def _not_writable(path: Path, error: OSError) -> WriteError:
    return WriteError(
        "the directory cannot be written",
        where=str(path),
        found=reason_of(error),
        fix="Choose another directory",
    )


class CaptureFolder:
    """The folder of this process: ``root`` in the process that owns it, ``root/PID`` in any other.

    ``root/PID`` is made when it is asked for, and is called ``PID-2`` if another process of that
    number, earlier or on another machine, made ``PID``. A process that was forked has its own.

    Args:
        root: the folder.
        owner: number of the process whose files are in ``root`` itself.
    """

    def __init__(self, root: Path, *, owner: int | None = None) -> None:
        self.root = root
        self._owner = owner
        self._own: tuple[int, NewFolder] | None = None

    def path(self) -> Path:
        """Return the folder of this process, which exists.

        Raises:
            WriteError: it cannot be made.
        """
        pid = os.getpid()
        if pid == self._owner:
            return self.root
        if self._own is None or self._own[0] != pid:
            self._own = pid, new_folder(self.root, str(pid))
        return self._own[1].path

    def remove_if_empty(self) -> None:
        """Remove the folder ``root/PID`` of this process if it is empty."""
        if self._own is not None and self._own[0] == os.getpid():
            self._own[1].remove_if_empty()
            if not self._own[1].path.exists():
                self._own = None
