"""Other Python interpreters that compile captures, with their own torch and the caller's torch_fakeify.

Parent and child exchange requests of one release, so an interpreter does not use a torch_fakeify of its
own: a folder that has only the caller's package comes first on its path. Nothing here imports torch.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import msgspec

from torch_fakeify._version import PACKAGE_DIR
from torch_fakeify.errors import CaptureError

_OLDEST = (3, 10)
_NEEDED = ("torch", "msgspec", "typing_extensions")
_PROBE = f"""
import json, sys
from importlib.util import find_spec
version = ".".join(map(str, sys.version_info[:3]))
found = {{"python": version, "torch": None, "missing": []}}
if sys.version_info >= {_OLDEST}:
    from importlib.metadata import PackageNotFoundError, version
    found["missing"] = [name for name in {_NEEDED} if find_spec(name) is None]
    try:
        found["torch"] = version("torch")
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""
_SECONDS = 60.0
_LONGEST = 160
"""Most characters of what a program that is no interpreter printed."""


class Interpreter(msgspec.Struct, frozen=True):
    """An interpreter that can compile captures."""

    executable: str
    """Its absolute path."""
    python: str
    """The version of Python."""
    torch: str
    """The version of torch, as of its distribution."""

    @property
    def text(self) -> str:
        """The versions, for people."""
        return f"Python {self.python}, torch {self.torch}"


@functools.cache
def find_interpreter(executable: str) -> Interpreter:
    """Start an interpreter once and ask for its versions.

    Args:
        executable: a path, relative to the working directory, or a name on ``PATH``.

    Raises:
        CaptureError: it cannot be started, is older than Python 3.10, or has no torch or msgspec.
    """
    path = _path(executable)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(
            [path, "-c", _PROBE],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=_SECONDS,
            cwd=tempfile.gettempdir(),
        )
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["it ended without output"])[-1]
            raise ValueError(last if len(last) <= _LONGEST else f"{last[: _LONGEST - 3]}...")
        found = json.loads(done.stdout.splitlines()[-1])
        python, torch, missing = found["python"], found["torch"], found["missing"]
    except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError) as error:
        raise CaptureError(
            "the interpreter cannot be started",
            where=executable,
            expected="a Python executable",
            found=f"{type(error).__name__}: {error}",
        ) from error
    if tuple(map(int, python.split(".")[:2])) < _OLDEST:
        raise CaptureError(
            "the interpreter is too old", where=executable, expected="Python 3.10", found=python
        )
    if missing:
        raise CaptureError(
            f"the interpreter has no {', no '.join(missing)}",
            where=executable,
            expected=", ".join(_NEEDED),
            found=f"Python {python}",
            fix=f"Install it there: {executable} -m pip install {' '.join(missing)}",
        )
    return Interpreter(path, python, torch or "of unknown version")


def _path(executable: str) -> str:
    """Return the absolute path; links are not resolved, as those of virtual environments matter."""
    if os.sep not in executable:
        return shutil.which(executable) or executable
    return os.path.abspath(executable)  # noqa: PTH100 - `resolve` would follow links


@functools.cache
def package_folder() -> str:
    """Return a folder with this package alone, which is removed when the process exits."""
    folder = tempfile.TemporaryDirectory(prefix="torch-fakeify-package-")
    atexit.register(folder.cleanup)
    Path(folder.name, "torch_fakeify").symlink_to(PACKAGE_DIR.resolve(), target_is_directory=True)
    return folder.name
