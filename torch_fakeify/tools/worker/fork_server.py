"""A server process that has imported torch and forks for each request, in milliseconds instead of seconds."""

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

from .client import Exchange, answer_of, deferred_interrupts, start
from .limits import enforce, forbid_core_dumps
from .replies import Answer, Ended

if TYPE_CHECKING:
    from collections.abc import Mapping

_GRACE = 0.5
"""Seconds for the interpreter to exit by itself."""
_READY = 600.0
"""Seconds for a request that only waits until the interpreter is ready."""


class ForkServer:
    """Runs each request in a forked child of one interpreter that has imported torch.

    Children share no state with one another. The interpreter starts at the first request, and again if
    it was killed. Threads that share a server wait for one another. If the client is killed, the
    interpreter and its child end too.

    Used as a context manager it ends the interpreter with the block.
    """

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._stopped = False

    def ask(
        self, request: Mapping[str, Any], *, timeout: float, memory: int | None = None
    ) -> Answer:
        """Run a request in a fresh child; see `client.ask`.

        The time is counted from the fork; the start of the interpreter does not count.
        """
        with self._lock, tempfile.TemporaryDirectory(prefix="torch-fakeify-") as name:
            exchange = Exchange(Path(name), request)
            if self._stopped:
                return Answer(Ended("crashes", -signal.SIGKILL))
            server = self._started(request)
            job = None
            try:
                job = _Job(server, exchange)
                ending = enforce(job.pid, job.ended, timeout=timeout, memory=memory)
            except _ServerEnded:
                self._end(job)
                return Answer(Ended("crashes", server.returncode, exchange.tail()))
            except BaseException:  # such as KeyboardInterrupt
                self._end(job, 0.0 if job else _GRACE)  # the child's pid may not have been read
                raise
            return answer_of(ending, job.status, exchange)

    def start(self, imports: Mapping[str, Any] | None = None) -> None:
        """Start the interpreter now, so that the next request does not wait for it.

        It imports first what ``imports`` says as in requests: ``directory``, ``imports``, ``python``.
        """
        with self._lock:
            if self._server is not None and self._server.poll() is None:
                return
        self.ask({"task": "backend", "backend": None, **(imports or {})}, timeout=_READY)

    def stop(self) -> None:
        """Stop the server for good, from any thread.

        The request that is running and all later ones are answered as killed by SIGKILL.
        """
        self._stopped = True
        server = self._server
        if server is not None:
            server.kill()
        self.close()

    def close(self) -> None:
        """End the interpreter; the next request starts a new one."""
        with self._lock:
            self._end()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def _started(self, request: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        """Return the interpreter, started if necessary with the imports of a request."""
        if self._server is None or self._server.poll() is not None:
            self._end()
            with deferred_interrupts():
                self._server = self._start(request)
                forbid_core_dumps(self._server.pid)
            if self._stopped:  # while it was started
                self._server.kill()
        return self._server

    def _start(self, request: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        return start(
            ["--serve", json.dumps([request.get("directory"), request.get("imports", [])])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=Path(tempfile.gettempdir()),
            python=request.get("python"),
        )

    def _end(self, job: _Job | None = None, grace: float = 0.0) -> None:
        """Kill the child of a job, and end the interpreter after ``grace`` seconds to kill one itself."""
        if job is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
        server, self._server = self._server, None
        if server is None:
            return
        if grace and server.stdin is not None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                server.stdin.close()  # the interpreter exits at the end of its input
                server.wait(grace)
        server.kill()
        server.wait()
        for pipe in (server.stdin, server.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class _ServerEnded(Exception):  # noqa: N818 - it is not raised to callers
    """Raised when the interpreter has ended."""


class _Job:
    """A request that was sent to the server, which writes the child's pid, then its exit status."""

    def __init__(self, server: subprocess.Popen[bytes], exchange: Exchange) -> None:
        assert server.stdin is not None
        assert server.stdout is not None
        self._output = server.stdout.fileno()
        self._rest = b""
        self.status = 0
        try:
            server.stdin.write(json.dumps(vars(exchange), default=str).encode() + b"\n")
            server.stdin.flush()
        except OSError as error:
            raise _ServerEnded from error
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
        """The next number that the server writes; ``None`` if none arrives within ``seconds``."""
        if b"\n" not in self._rest:
            if not select.select([self._output], [], [], seconds)[0]:
                return None
            data = os.read(self._output, 1 << 10)
            if not data:
                raise _ServerEnded
            self._rest += data
        line, found, rest = self._rest.partition(b"\n")
        if not found:
            return None
        self._rest = rest
        return int(line)
