"""A fresh interpreter for one request: what a parent process needs to ask ``child.py``.

Nothing here imports torch: the parent stays light, and a child that crashes, hangs or eats the
memory takes nothing with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import msgspec

from .versions import TorchVersionWarning, accepted_text, standing_of
from .watching import watch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .watching import Ending

_PACKAGE_PARENT = str(Path(__file__).resolve().parent.parent)
_KEPT = 12
"""Lines of a dead child's output that are kept."""
_BEFORE = 4
"""How many of them stand before Python's own report of a crash, if there is one."""


class Answer(msgspec.Struct, frozen=True):
    """How a child ended."""

    ending: Literal["replied", "hung", "out of memory", "crashed", "exited"]
    """``crashed`` by a signal, ``exited`` without a reply; the others by a limit."""
    reply: Mapping[str, Any]
    """What it wrote; empty unless ``ending`` is ``replied``."""
    status: int
    """Its exit status, negative the signal that ended it."""
    tail: tuple[str, ...]
    """What it printed last."""

    @property
    def signal_name(self) -> str:
        """Name of the signal that ended the child."""
        try:
            return signal.Signals(-self.status).name
        except ValueError:
            return f"signal {-self.status}"


def ask(request: Mapping[str, Any], *, timeout: float, memory: int | None = None) -> Answer:
    """Have a fresh interpreter carry out a request.

    Whatever becomes of it (an error, a hang, a signal, memory without end), the caller gets an answer.

    Args:
        request: for ``child.py``; paths in it must be absolute.
        timeout: seconds after which the child and all its processes are killed.
        memory: bytes; they are killed when they hold more. ``None`` lets them.
    """
    with tempfile.TemporaryDirectory(prefix="torch-fakeify-") as name:
        files = Files(Path(name))
        files.ask(request)
        with files.log.open("wb") as output:
            child = start(
                [str(files.asked), str(files.answered)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=files.directory,
            )
            ending = _wait(child, timeout, memory)
        return answer_of(ending, child.returncode, files)


class Files:
    """The files through which a child is asked and answers."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.asked, self.answered, self.log = (
            directory / part for part in ("request", "reply", "log")
        )

    def ask(self, request: Mapping[str, Any]) -> None:
        """Put down what is asked."""
        self.asked.write_text(json.dumps(dict(request)), encoding="utf-8")

    def tail(self) -> tuple[str, ...]:
        """What the child printed last."""
        if not self.log.exists():
            return ()
        return last_words(self.log.read_text(encoding="utf-8", errors="replace").splitlines())

    def names(self) -> dict[str, str]:
        """Their absolute paths by name."""
        return {name: str(path) for name, path in vars(self).items()}


def start(
    arguments: Sequence[str],
    *,
    stdin: int,
    stdout: int | IO[bytes],
    stderr: int | IO[bytes],
    cwd: Path,
) -> subprocess.Popen[bytes]:
    """Start ``child.py`` in a session of its own; it dumps no core, however it ends."""
    child = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-m", "torch_fakeify.child", *arguments],
        env=_environment(),
        start_new_session=True,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        cwd=cwd,
    )
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            resource.prlimit(child.pid, resource.RLIMIT_CORE, (0, 0))
    return child


def answer_of(ending: Ending, status: int, files: Files) -> Answer:
    """What a child answered that ended so; that its torch is not a known one is a warning here too."""
    if ending != "ended":
        return Answer(ending, {}, status, files.tail())
    if status == 0 and files.answered.exists():
        reply = json.loads(files.answered.read_text(encoding="utf-8"))
        if standing_of(torch := reply.get("torch", "")) == "unknown" and torch:
            warnings.warn(accepted_text(torch), TorchVersionWarning, stacklevel=2)
        return Answer("replied", reply, 0, files.tail())
    return Answer("crashed" if status < 0 else "exited", {}, status, files.tail())


def last_words(lines: Sequence[str]) -> tuple[str, ...]:
    """The lines of an output that tell how it ended.

    Of a crash these are the last ones before Python's report and the report's beginning, which has
    the innermost frames.
    """
    crash = (at for at, line in enumerate(lines) if line.startswith("Fatal Python error"))
    start = max(next(crash, len(lines) - _KEPT + _BEFORE) - _BEFORE, 0)
    return tuple(lines[start : start + _KEPT])


def _wait(child: subprocess.Popen[bytes], timeout: float, memory: int | None) -> Ending:
    """Wait for the child; an exception here, such as ``KeyboardInterrupt``, takes it along."""

    def ended(seconds: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(seconds)
        return child.returncode is not None

    try:
        return watch(child.pid, ended, timeout=timeout, memory=memory)
    finally:
        if child.returncode is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


_NO_GRAPH_CACHES = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
"""What the child says of a compilation, it says of one made now."""


def _environment() -> dict[str, str]:
    """The environment, with this very package found first and the working directory not at all."""
    path = os.pathsep.join(filter(None, [_PACKAGE_PARENT, os.environ.get("PYTHONPATH")]))
    return {**os.environ, **_NO_GRAPH_CACHES, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
