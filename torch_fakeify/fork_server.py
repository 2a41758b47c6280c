"""A process that has imported torch and forks for each request: milliseconds instead of seconds."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .isolation import Answer, Files, answer_of, start
from .watching import watch

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ForkServer"]

_READY = 600.0
"""Seconds for a request that only waits for the interpreter."""


class ForkServer:
    """Carries out requests as `isolation.ask` does, each in a forked child of one interpreter.

    A child begins where torch is imported and nothing else has happened. Whatever becomes of one, the
    next one begins there again; the interpreter itself is started at the first request, and again
    if something has killed it. Threads that share a server wait for one another. If the process that
    asks is killed, the interpreter ends, and with it the child.

    In a ``with`` statement the interpreter ends with the block.
    """

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._stopped = False

    def ask(
        self, request: Mapping[str, Any], *, timeout: float, memory: int | None = None
    ) -> Answer:
        """Have a fresh child carry out a request; see `isolation.ask`.

        The time begins when there is a child, not while the interpreter starts.
        """
        with self._lock, tempfile.TemporaryDirectory(prefix="torch-fakeify-") as name:
            files = Files(Path(name))
            if self._stopped:
                return Answer("crashed", {}, -signal.SIGKILL, ())
            files.ask(request)
            server = self._started()
            try:
                job = _Job(server, files)
            except _Gone:
                self._end()
                return Answer("crashed", {}, server.returncode, files.tail())
            try:
                ending = watch(job.pid, job.ended, timeout=timeout, memory=memory)
            except _Gone:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(job.pid, signal.SIGKILL)
                self._end()
                return Answer("crashed", {}, server.returncode, files.tail())
            except BaseException:  # also the caller's KeyboardInterrupt takes the child along
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(job.pid, signal.SIGKILL)
                self._end()
                raise
            return answer_of(ending, job.status, files)

    def start(self) -> None:
        """Have the interpreter ready, so that the next request does not wait for it."""
        with self._lock:
            if self._server is not None and self._server.poll() is None:
                return
        self.ask({"task": "none"}, timeout=_READY)

    def stop(self) -> None:
        """End it for good, from any thread: a request that it carries out ends at once.

        What that answers, and what later ones do, is that the process was killed.
        """
        self._stopped = True
        server = self._server
        if server is not None:
            server.kill()
        self.close()

    def close(self) -> None:
        """End the interpreter; another request starts another one."""
        with self._lock:
            self._end()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._server is None or self._server.poll() is not None:
            self._end()
            self._server = start(
                ["--serve"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=Path(tempfile.gettempdir()),
            )
            if self._stopped:  # while it was started
                self._server.kill()
        return self._server

    def _end(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        server.kill()
        server.wait()
        for pipe in (server.stdin, server.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class _Gone(Exception):  # noqa: N818 - nobody sees it
    """The interpreter has ended."""


class _Job:
    """A request that a server has been given: it says a child's number, then its exit status."""

    def __init__(self, server: subprocess.Popen[bytes], files: Files) -> None:
        assert server.stdin is not None
        assert server.stdout is not None
        self._said = server.stdout.fileno()
        self._rest = b""
        self.status = 0
        try:
            server.stdin.write(json.dumps(files.names()).encode() + b"\n")
            server.stdin.flush()
        except OSError as error:
            raise _Gone from error
        while (pid := self._number(None)) is None:
            pass
        self.pid: int = pid

    def ended(self, seconds: float) -> bool:
        status = self._number(seconds)
        if status is None:
            return False
        self.status = status
        return True

    def _number(self, seconds: float | None) -> int | None:
        """The next number that the server says, waiting so long for it."""
        if b"\n" not in self._rest:
            if not select.select([self._said], [], [], seconds)[0]:
                return None
            said = os.read(self._said, 1 << 10)
            if not said:
                raise _Gone
            self._rest += said
        line, found, rest = self._rest.partition(b"\n")
        if not found:
            return None
        self._rest = rest
        return int(line)
