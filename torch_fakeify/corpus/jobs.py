"""The compilation of one capture as a picklable job for any executor.

A worker on another machine gets the capture's bytes instead of a path. Each worker thread has a
`ForkServer`, so that a job starts in milliseconds and a crash ends only that job. Nothing here imports
torch.
"""

from __future__ import annotations

import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch_fakeify.serialization.container import Limits
from torch_fakeify.tools.replaying import allowed_memory
from torch_fakeify.tools.worker.client import backend_request
from torch_fakeify.tools.worker.fork_server import ForkServer

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from concurrent.futures import Executor

    from torch_fakeify.tools.worker.replies import Answer


@dataclass(frozen=True)
class Job:
    """One job, picklable."""

    task: Literal["backend", "compile"]
    """A task of ``tools.worker.tasks``: find the backend, or compile a capture with it."""
    backend: str | None
    """A name or ``MODULE:ATTR``; ``None`` for the recorded backend of each capture."""
    imports: tuple[str, ...] = ()
    """Modules that the worker imports first."""
    directory: str | None = None
    """The folder in front of the worker's path, if it imports modules."""
    file: str | bytes = ""
    """The capture: an absolute path, or the file's bytes."""
    device: str | None = None
    timeout: float = 600.0
    memory: int | None = None
    """Bytes that the compilation may hold; by default ``1 / share`` of the free memory of its machine."""
    share: int = 1
    """Number of jobs that run at a time on one machine."""
    trust: bool = False
    python: str | None = None
    """The executable of another interpreter that compiles."""
    time: bool = False
    """Whether to time the compiled code."""

    @property
    def limits(self) -> Limits | None:
        """What the file may ask for; ``None`` for the default."""
        return Limits.none() if self.trust else None

    @classmethod
    def compiling(cls, backend: str | None, imports: Sequence[str] = (), **options: Any) -> Job:
        """Return a job that compiles captures, with what `client.backend_request` gives."""
        request = backend_request(backend, imports)
        directory, modules = request["directory"], tuple(request["imports"])
        return cls("compile", backend, imports=modules, directory=directory, **options)


@dataclass(frozen=True)
class Done:
    """The result of a job."""

    answer: Answer
    memory: int | None
    """Its memory limit in bytes."""
    seconds: float


class _OfThread(threading.local):
    server: ForkServer | None = None


_OF_THREAD = _OfThread()


def carry_out(job: Job) -> Done:
    """Run a job in a forked child of this thread's fork server.

    Raises:
        FakeifyError: a memory limit is requested on a system where memory cannot be counted.
    """
    memory = job.memory
    if (allowed := allowed_memory(memory)) is not None and memory is None:
        memory = allowed // job.share
    server = _OF_THREAD.server
    if server is None:
        server = _OF_THREAD.server = ForkServer()
    server.start({"imports": job.imports, "directory": job.directory, "python": job.python})
    started = time.perf_counter()
    answer = _ask(server, job, memory)
    return Done(answer, memory, time.perf_counter() - started)


def end_server() -> None:
    """Stop this thread's fork server."""
    server, _OF_THREAD.server = _OF_THREAD.server, None
    if server is not None:
        server.stop()


def _ask(server: ForkServer, job: Job, memory: int | None) -> Answer:
    request = {**vars(job), "stubs": True}
    if isinstance(job.file, str):
        return server.ask(request, timeout=job.timeout, memory=memory)
    with tempfile.NamedTemporaryFile(prefix="torch-fakeify-", suffix=".fkf") as file:
        file.write(job.file)
        file.flush()
        return server.ask({**request, "file": file.name}, timeout=job.timeout, memory=memory)


@contextmanager
def local_executor(jobs: int) -> Generator[Executor]:
    """Return an executor that runs at most ``jobs`` jobs at a time on this machine.

    Jobs that still run at the end of the block are killed.
    """
    servers: list[ForkServer] = []

    def start_server() -> None:
        server = _OF_THREAD.server = ForkServer()
        servers.append(server)

    executor = ThreadPoolExecutor(jobs, "torch-fakeify", initializer=start_server)
    try:
        yield executor
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        for server in servers:
            server.stop()
        executor.shutdown()
