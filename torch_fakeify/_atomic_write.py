"""Write files atomically.

Method: write and sync a temporary file in the same directory, then rename it. A writer that is killed
leaves ``.NAME.HEX.tmp`` (the target's name, sixteen hexadecimal digits). Writers lock their temporary
files, so the next writer of the same name removes those without a lock.
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
except ImportError:  # Windows: leftovers cannot be recognized, and are not removed
    fcntl = None

_STEM_BYTES = 80
"""Most bytes of the target's name in that of the temporary file; the limit for names is 255."""


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file atomically.

    An existing file is replaced, with its permissions. The target of a symbolic link is written, not
    the link. A device or a pipe is refused.

    Raises:
        WriteError: the file cannot be written; an existing file is unchanged.
    """
    with _wrap_os_errors(path):
        target, mode = _destination(path)
        _remove_leftovers(target)
        with _locked_temporary(target) as (file, temporary):
            _fill(file, data, mode)
            temporary.replace(target)
    _sync_directory(target.parent)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Check that a file can be written, before the work that produces its content.

    Raises:
        WriteError: as for `write_atomic`.
    """
    with _wrap_os_errors(path), _locked_temporary(_destination(path)[0]):
        pass


@contextlib.contextmanager
def _wrap_os_errors(path: str | os.PathLike[str]) -> Generator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise WriteError(
            "the file cannot be written",
            where=str(path),
            found=reason_of(error),
            fix=_REMEDIES.get(getattr(error, "errno", None) or 0, "Choose another path"),
        ) from error


def check_not_input(output: str | os.PathLike[str], *inputs: str | os.PathLike[str]) -> None:
    """Refuse an output that is an input, also through a symbolic or hard link.

    Raises:
        WriteError: the output is one of the inputs.
    """
    for name in inputs:
        if is_same_file(output, name):
            raise WriteError(
                "the output is an input",
                where=str(output),
                found=f"the same file as {name}",
                fix="Give another path",
            )


def is_same_file(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Return whether two paths refer to one file, existing or not."""
    try:
        return Path(one).samefile(other)
    except (OSError, ValueError):
        return os.path.realpath(one) == os.path.realpath(other)


def reason_of(error: OSError | ValueError) -> str:
    """Return the system's error message, without the path."""
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
    """Return the resolved path, and the permissions of an existing file."""
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
    """Sync the directory, so that the new name survives a crash, where the system supports that."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# --- temporary files ------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked_temporary(target: Path) -> Generator[tuple[BinaryIO, Path]]:
    """Make a locked temporary file in the target's directory, removed at the end unless renamed."""
    while True:
        temporary = target.with_name(f".{_stem(target)}.{os.urandom(8).hex()}.tmp")
        try:
            with temporary.open("xb") as file:
                if _lock_new(file):
                    yield file, temporary
                    return
        finally:
            with contextlib.suppress(OSError, ValueError):
                temporary.unlink()


def _stem(target: Path) -> str:
    return target.name.encode("utf-8", "ignore")[:_STEM_BYTES].decode("utf-8", "ignore")


def _lock_new(file: BinaryIO) -> bool:
    """Lock a new file; return ``False`` if another writer has locked or removed it before."""
    if fcntl is not None:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            pass
    return os.fstat(file.fileno()).st_nlink != 0


def _remove_leftovers(target: Path) -> None:
    """Remove the temporary files of earlier writers of this name that have ended."""
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
