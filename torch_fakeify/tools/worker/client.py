"""Run one request in a fresh interpreter: the parent's side of ``tools.worker.main``.

Nothing here imports torch: the parent stays light, and survives a child that crashes, hangs or runs
out of memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from torch_fakeify._version import PACKAGE_DIR
from torch_fakeify.errors import FakeifyError, check_texts, check_type
from torch_fakeify.versions import TorchVersionWarning, accepted_text, support_status

from .interpreters import package_folder
from .limits import enforce, forbid_core_dumps
from .replies import Answer, Ended, Here

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence
    from types import FrameType

    from .limits import Ending

RECORDING = tuple(f"TORCH_FAKEIFY_RECORD{end}" for end in ("", "_FILTER", "_LIMIT", "_REQUEST"))
"""Variables that no child gets: `run` has options, and other commands compile what is recorded already."""
_TAIL_LINES = 12
"""Lines of a child's output in `output_tail`."""
_BEFORE_CRASH = 4
"""How many of them precede the report of ``faulthandler``, if there is one."""


def ask(
    request: Mapping[str, Any],
    *,
    timeout: float,
    memory: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Answer:
    """Run a request in a fresh interpreter and return how that ended.

    An error, a hang, a signal and excessive memory all give an `Answer`; none of them raises.

    Args:
        request: see ``tools.worker.tasks``; paths in it must be absolute.
        timeout: seconds until the child and its descendants are killed.
        memory: bytes that they may hold together; ``None`` for no limit.
        environment: variables of the child beside those of this process.
    """
    with tempfile.TemporaryDirectory(prefix="torch-fakeify-") as name:
        exchange = Exchange(Path(name), request)
        with exchange.log.open("wb") as output:
            ending, status = run_limited(
                lambda: start(
                    [str(exchange.request), str(exchange.reply)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=exchange.directory,
                    python=request.get("python"),
                    environment=environment,
                ),
                timeout=timeout,
                memory=memory,
            )
        return answer_of(ending, status, exchange)


def run_limited(
    started: Callable[[], subprocess.Popen[bytes]], *, timeout: float, memory: int | None = None
) -> tuple[Ending, int]:
    """Start a process in a new session and wait for it; return how it ended, and its exit status.

    The limits are as for `ask`.
    """
    child = None

    def ended(seconds: float) -> bool:
        assert child is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(seconds)
        return child.returncode is not None

    try:
        with deferred_interrupts():
            child = started()
        forbid_core_dumps(child.pid)
        return enforce(child.pid, ended, timeout=timeout, memory=memory), child.wait()
    finally:  # on an exception, such as `KeyboardInterrupt`, kill the child
        if child is not None and child.returncode is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def backend_request(backend: str | None, imports: Sequence[str] = ()) -> dict[str, Any]:
    """Return the part of a request that says how the worker gets its backend.

    Args:
        backend: a name or ``MODULE:ATTR``; ``None`` for the recorded backend of a frame.
        imports: modules that the worker imports first. For these and for ``MODULE:ATTR`` the working
            directory of this process comes first on the worker's path.

    Raises:
        FakeifyError: an argument has another class.
    """
    check_type(
        backend,
        (str, type(None)),
        "the name of a backend",
        FakeifyError,
        fix="A worker process finds it by name: put the function into a module, and give 'MODULE:ATTR'",
    )
    check_texts(imports, "imports", FakeifyError, such_as="['my_operators']")
    module, colon, _ = (backend or "").partition(":")
    modules = [*imports, *([module] if colon else [])]
    return {
        "backend": backend,
        "imports": modules,
        "directory": str(Path.cwd()) if modules else None,
    }


def device_request(device: str | None) -> dict[str, Any]:
    """Return the part of a request that names the new device of a frame; ``None`` for the recorded ones.

    Raises:
        FakeifyError: it is no name.
    """
    check_type(
        device, (str, type(None)), "the name of a device", FakeifyError, fix="Give str(device)"
    )
    return {"device": device}


@contextlib.contextmanager
def deferred_interrupts() -> Generator[None]:
    """Defer SIGINT, SIGTERM and SIGHUP to the end of the block, so that no started process is lost."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[tuple[int, FrameType | None]] = []
    handlers: dict[int, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if callable(handler := signal.getsignal(number)):
            handlers[number] = handler
            signal.signal(number, lambda *arguments: received.append(arguments))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number, frame in received[:1]:
        handlers[number](number, frame)


class Exchange:
    """The files of one request: the request, which is written, the reply and the child's log."""

    def __init__(self, directory: Path, request: Mapping[str, Any]) -> None:
        self.directory = directory
        self.request, self.reply, self.log, self.here = (
            directory / part for part in ("request", "reply", "log", "here")
        )
        text = json.dumps({**request, "here": str(self.here)})
        self.request.write_text(text, encoding="utf-8")

    def tail(self) -> tuple[str, ...]:
        """The end of the child's output."""
        if not self.log.exists():
            return ()
        return output_tail(self.log.read_text(encoding="utf-8", errors="replace").splitlines())

    def read_here(self) -> Here | None:
        """How the child's surroundings differ, which it wrote before it compiled."""
        try:
            return msgspec.json.decode(self.here.read_bytes(), type=Here)
        except (OSError, msgspec.DecodeError):
            return None


def start(
    arguments: Sequence[str],
    *,
    stdin: int,
    stdout: int | IO[bytes],
    stderr: int | IO[bytes],
    cwd: Path,
    python: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``tools.worker.main`` in a new session.

    ``python`` is the executable of another interpreter; ``environment`` is added to that of this process.
    """
    options = ("-X", "faulthandler", "-m", "torch_fakeify.tools.worker.main")
    return subprocess.Popen(
        [python or sys.executable, *options, *arguments],
        env={**_environment(python), **(environment or {})},
        start_new_session=True,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        cwd=cwd,
    )


def answer_of(ending: Ending, status: int, exchange: Exchange) -> Answer:
    """Build the `Answer` of a child that has ended; warn if its version of torch is not supported."""
    here = exchange.read_here()
    if ending != "ended":
        return Answer(Ended(ending, tail=exchange.tail()), here=here)
    if status != 0 or not exchange.reply.exists():
        return Answer(Ended("crashes", status, exchange.tail()), here=here)
    text = exchange.reply.read_text(encoding="utf-8")
    answer = msgspec.structs.replace(msgspec.convert(json.loads(text), Answer), here=here)
    if answer.torch is not None and support_status(answer.torch) == "unknown":
        warnings.warn(accepted_text(answer.torch), TorchVersionWarning, stacklevel=2)
    return answer


def output_tail(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the lines of an output that show how the process ended.

    After a crash these are the last lines before the report of ``faulthandler`` and the first lines of
    the report, which list the innermost frames.
    """
    crash = (at for at, line in enumerate(lines) if line.startswith("Fatal Python error"))
    start = max(next(crash, len(lines) - _TAIL_LINES + _BEFORE_CRASH) - _BEFORE_CRASH, 0)
    return tuple(lines[start : start + _TAIL_LINES])


_NO_GRAPH_CACHES = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
"""The child compiles anew: a cached compilation would hide a failure."""


def _environment(python: str | None) -> dict[str, str]:
    """The environment of a child: this package comes first on its path, then `import_path`.

    Beside this package there may be packages of this interpreter, which another one must not import.
    """
    own = str(PACKAGE_DIR.resolve().parent) if python is None else package_folder()
    path = os.pathsep.join([own, *import_path()])
    return {**without_recording(), **_NO_GRAPH_CACHES, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def without_recording() -> dict[str, str]:
    """Return the environment of this process without the variables that have a process record what it compiles."""
    return {name: text for name, text in os.environ.items() if name not in RECORDING}


def import_path() -> list[str]:
    """Entries for a child's ``sys.path`` before the standard library, from which it imports a user's backend.

    The working directory if this process has it on its path (after ``python -m``, not for an installed
    command), then the entries of ``PYTHONPATH``, relative ones below the working directory. So a file
    shadows a module in the child exactly if it does in this process.
    """
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it was removed
        return []
    search_path = os.environ.get("PYTHONPATH")
    entries = [str(here / entry) for entry in search_path.split(os.pathsep)] if search_path else []
    is_on_path = any(entry == "" or Path(entry) == here for entry in sys.path)
    return [str(here), *entries] if is_on_path and str(here) not in entries else entries
