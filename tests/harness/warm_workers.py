"""Interpreters that the tests of a module share, where a command would start one and import torch.

Under the fixture `warm_workers` the commands get an idle `ForkServer` that an earlier command has
left; each request still runs in a forked child of its own. How interpreters start and end is tested
without it, in ``tests/tools/test_worker.py`` and ``tests/test_cli.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from torch_fakeify.corpus import jobs
from torch_fakeify.tools import replaying, size_runs
from torch_fakeify.tools.demo import runner
from torch_fakeify.tools.minify import search
from torch_fakeify.tools.worker import client
from torch_fakeify.tools.worker.fork_server import ForkServer

if TYPE_CHECKING:
    from collections.abc import Generator, Hashable, Mapping

    from torch_fakeify.tools.worker.replies import Answer

HARNESS = Path(__file__).parent
_MOST = 2
"""How many idle interpreters there are at most."""


class _Idle:
    """Interpreters without a request, each with what it was started with, the oldest first."""

    def __init__(self) -> None:
        self._entries: list[tuple[Hashable, subprocess.Popen[bytes]]] = []
        self._lock = threading.Lock()

    def take(self, key: Hashable) -> subprocess.Popen[bytes] | None:
        """Return an interpreter that was started with the same, if there is one."""
        with self._lock:
            for at, (other, _) in enumerate(self._entries):
                if other == key:
                    return self._entries.pop(at)[1]
        return None

    def give(self, key: Hashable, process: subprocess.Popen[bytes]) -> None:
        """Add an interpreter; ends the oldest one if there are too many."""
        with self._lock:
            self._entries.append((key, process))
            old = self._entries[:-_MOST]
            del self._entries[:-_MOST]
        _end(old)

    def clear(self) -> None:
        """End all interpreters."""
        with self._lock:
            old, self._entries = self._entries, []
        _end(old)


def _end(entries: list[tuple[Hashable, subprocess.Popen[bytes]]]) -> None:
    for _, process in entries:
        server = ForkServer()
        server._server = process
        server.close()


idle = _Idle()


_READ_AT_START = ("CUDA", "LD_", "MKL", "OMP", "PYTHON", "PYTORCH", "TORCH")
"""What the names of variables begin with that an interpreter, or torch, may read when it starts."""


class WarmServer(ForkServer):
    """A fork server that takes an idle interpreter, and leaves its own for others.

    The child of a request gets the environment and the import path that a new interpreter would have
    (``warm_main.py``), and imports the modules that the request names, so that another child does not
    have them.
    """

    _key: Hashable = None

    def ask(
        self, request: Mapping[str, Any], *, timeout: float, memory: int | None = None
    ) -> Answer:
        """Run a request in a fresh child."""
        environment = client._environment(request.get("python"))
        return super().ask({**request, "environment": environment}, timeout=timeout, memory=memory)

    def _started(self, request: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        own = {
            name: text
            for name, text in request["environment"].items()
            if name.startswith(_READ_AT_START) and name != "PYTHONPATH"
        }
        self._key = (request.get("python"), *sorted(own.items()))
        if self._server is None:
            self._server = idle.take(self._key)
        return super()._started(request)

    def _start(self, request: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        environment = request["environment"]
        package = environment["PYTHONPATH"].split(os.pathsep)[0]
        return subprocess.Popen(
            [
                request.get("python") or sys.executable,
                "-X",
                "faulthandler",
                HARNESS / "warm_main.py",
            ],
            env={**environment, "PYTHONPATH": package},
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=tempfile.gettempdir(),
        )

    def close(self) -> None:
        """Leave the interpreter for others, unless it is to be killed."""
        with self._lock:
            server = self._server
            if server is None or self._stopped or server.poll() is not None:
                self._end()
            else:
                self._server = None
                idle.give(self._key, server)

    def stop(self) -> None:
        """Leave the interpreter for others, or kill it during a request."""
        if not self._lock.acquire(blocking=False):
            super().stop()
            return
        self._lock.release()
        self.close()
        self._stopped = True


def _ask(
    request: Mapping[str, Any],
    *,
    timeout: float,
    memory: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Answer:
    if environment:  # which torch reads when it is imported
        return client.ask(request, timeout=timeout, memory=memory, environment=environment)
    with WarmServer() as server:
        return server.ask(request, timeout=timeout, memory=memory)


@pytest.fixture(scope="session")
def _idle_interpreters() -> Generator[None]:
    yield
    idle.clear()


@pytest.fixture(scope="module")
def warm_workers(_idle_interpreters: None) -> Generator[None]:
    """The commands of this process fork an interpreter that has imported torch."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (replaying, runner, search):
            patch.setattr(module, "ask", _ask)
        for module in (size_runs, search, jobs):
            patch.setattr(module, "ForkServer", WarmServer)
        yield


@pytest.fixture
def cold_worker(warm_workers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """``replay`` starts an interpreter, as it does for users."""
    monkeypatch.setattr(replaying, "ask", client.ask)
