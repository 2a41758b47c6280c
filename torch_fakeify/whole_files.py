"""Files that are written whole or not at all, whatever happens to the writer.

Method: the bytes go to a temporary file beside the target, and to the disk; then its name is changed.
A writer that is killed leaves ``.NAME.HEX.tmp`` behind (the target's name, sixteen hexadecimal
digits). Each writer holds a lock on its own, so the next one that writes to the same name can tell
which of them nobody will finish, and removes these.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import WriteError

if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows: nobody's file can be told from a leftover, so all of them stay
    fcntl = None

__all__ = ["reason_of", "write_whole"]

_KEPT = 80
"""Bytes of the target's name in the name of its temporary file: a name has room for 255."""


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file, whole or not at all.

    A file that is there is replaced in one step and keeps its permissions. A symbolic link stays, and
    what it leads to is written. What is neither file nor missing (a device, a pipe) is refused.

    Args:
        path: where.
        data: what the file is to hold.

    Raises:
        WriteError: the file cannot be written; what was there before is untouched.
    """
    try:
        target, mode = _destination(path)
        _remove_leftovers(target)
        with _beside(target) as (file, temporary):
            _fill(file, data, mode)
            temporary.replace(target)
    except (OSError, ValueError) as error:
        raise WriteError(
            "the file cannot be written",
            where=str(path),
            found=reason_of(error),
            fix=_REMEDIES.get(getattr(error, "errno", None) or 0, "Choose another path"),
        ) from error
    _sync_directory(target.parent)


def reason_of(error: OSError | ValueError) -> str:
    """What the system says is wrong, without the path."""
    return getattr(error, "strerror", None) or str(error)


_REMEDIES = {
    errno.ENOENT: "Make the directory first",
    errno.EISDIR: "Give the path of a file",
    errno.EINVAL: "Give the path of a file",
    errno.ENOTDIR: "Give a path below a directory",
    errno.EACCES: "Choose a directory that you may write to",
    errno.EPERM: "Choose a directory that you may write to",
    errno.EROFS: "Choose a directory that you may write to",
    errno.ENOSPC: "Free some space, or choose another disk",
    errno.EDQUOT: "Free some space, or choose another disk",
    errno.EFBIG: "Raise the limit on the size of a file, or choose another disk",
    errno.ENAMETOOLONG: "Choose a shorter name",
    errno.ELOOP: "Mend the link, or choose another path",
}


def _destination(path: str | os.PathLike[str]) -> tuple[Path, int | None]:
    """What a path leads to, and the permissions of the file that is there."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, "a symbolic link leads to itself")
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return target, None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "a directory is in the way")
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "what is there is no file")
    return target, stat.S_IMODE(mode)


def _fill(file: BinaryIO, data: bytes, mode: int | None) -> None:
    if mode is not None:
        with contextlib.suppress(OSError):  # not every file system has permissions
            Path(file.name).chmod(mode)
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    """Make the new name survive a crash, where the system can do that; the file is whole anyway."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# --- temporary files ------------------------------------------------------------------------------


@contextlib.contextmanager
def _beside(target: Path) -> Generator[tuple[BinaryIO, Path]]:
    """A new file beside the target, locked, and gone at the end if it has that name still."""
    while True:
        temporary = target.with_name(f".{_stem(target)}.{os.urandom(8).hex()}.tmp")
        try:
            with temporary.open("xb") as file:
                if _is_claimed(file):
                    yield file, temporary
                    return
        finally:
            with contextlib.suppress(OSError, ValueError):
                temporary.unlink()


def _stem(target: Path) -> str:
    return target.name.encode("utf-8", "ignore")[:_KEPT].decode("utf-8", "ignore")


def _is_claimed(file: BinaryIO) -> bool:
    """Lock a new file; not where somebody took it for a leftover before it was locked."""
    return _lock(file.fileno()) and os.fstat(file.fileno()).st_nlink != 0


def _lock(handle: int) -> bool:
    """Lock an open file for this process; ``False`` if another one has it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks
    return True


def _remove_leftovers(target: Path) -> None:
    """Remove the temporary files of writers of this name that are no more."""
    if fcntl is None:
        return
    name = re.compile(rf"\.{re.escape(_stem(target))}\.[0-9a-f]{{16}}\.tmp")
    with contextlib.suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            if name.fullmatch(entry.name):
                _remove_unlocked(entry.path)


def _remove_unlocked(path: str) -> None:
    assert fcntl is not None
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Path(path).unlink()
        finally:
            os.close(handle)
