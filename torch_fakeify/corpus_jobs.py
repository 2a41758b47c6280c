"""One capture's compilation as a job: a function of plain data, for any executor.

A job needs neither this process nor its files: a worker on another machine gets the capture's bytes.
Each thread that carries out jobs has a `ForkServer`, so that a job takes milliseconds and ends nothing
but itself. Nothing here imports torch.
"""

from __future__ import annotations

import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .fork_server import ForkServer
from .verdict import allowed_memory

if TYPE_CHECKING:
    from collections.abc import Generator
    from concurrent.futures import Executor

    from .isolation import Answer

__all__ = ["Done", "Job", "carry_out", "end_server", "local_executor"]


@dataclass(frozen=True)
class Job:
    """What is to be done, all of it plain data."""

    task: Literal["backend", "compile"]
    """Of `child`: find the backend, or compile a capture with it."""
    backend: str
    file: str | bytes = ""
    """The capture: an absolute path, or the file's bytes."""
    device: str | None = None
    timeout: float = 600.0
    memory: int | None = None
    """Bytes that the compilation may hold; by default a part of what is free where it runs."""
    share: int = 1
    """How many jobs run at a time where this one runs: by default it gets that part of the memory."""
    trust: bool = False


@dataclass(frozen=True)
class Done:
    """What came of a job."""

    answer: Answer
    memory: int | None
    """The limit that it had."""
    seconds: float


class _OfThread(threading.local):
    server: ForkServer | None = None


_OF_THREAD = _OfThread()


def carry_out(job: Job) -> Done:
    """Do a job in this process, in a forked child of this thread's server.

    Raises:
        FakeifyError: memory is to be counted where it cannot be.
    """
    memory = job.memory
    if (allowed := allowed_memory(memory)) is not None and memory is None:
        memory = allowed // job.share
    server = _OF_THREAD.server
    if server is None:
        server = _OF_THREAD.server = ForkServer()
    server.start()
    started = time.perf_counter()
    answer = _ask(server, job, memory)
    return Done(answer, memory, time.perf_counter() - started)


def end_server() -> None:
    """End what this thread has started for its jobs."""
    server, _OF_THREAD.server = _OF_THREAD.server, None
    if server is not None:
        server.stop()


def _ask(server: ForkServer, job: Job, memory: int | None) -> Answer:
    request: dict[str, Any] = {
        "task": job.task,
        "file": job.file,
        "backend": job.backend,
        "device": job.device,
        "trust": job.trust,
    }
    if isinstance(job.file, str):
        return server.ask(request, timeout=job.timeout, memory=memory)
    with tempfile.NamedTemporaryFile(prefix="torch-fakeify-", suffix=".fkf") as file:
        file.write(job.file)
        file.flush()
        return server.ask({**request, "file": file.name}, timeout=job.timeout, memory=memory)


@contextmanager
def local_executor(jobs: int) -> Generator[Executor]:
    """An executor that carries out so many jobs at a time on this machine.

    When the block ends, by an exception too, what still runs is killed.
    """
    servers: list[ForkServer] = []

    def equip() -> None:
        server = _OF_THREAD.server = ForkServer()
        servers.append(server)

    executor = ThreadPoolExecutor(jobs, "torch-fakeify", initializer=equip)
    try:
        yield executor
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        for server in servers:
            server.stop()
        executor.shutdown()
