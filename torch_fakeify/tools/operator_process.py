"""Run calls of an operator in a forked process, which may crash, hang or run out of memory."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
import warnings
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from torch_fakeify.errors import FakeKernelError
from torch_fakeify.fake_kernels.observed import Outcome
from torch_fakeify.fake_kernels.specs import run_call

from .worker.limits import can_count_memory, memory_of, signal_name

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from torch_fakeify.fake_kernels.specs import CallSpec

_INTERVAL = 0.1
"""Seconds between two looks at the memory of the process."""


class OperatorProcess:
    """Runs each call in a process that has the operators of this one, without changing this one.

    The process is forked at the first call, and again after one that it does not survive.

    Args:
        op: the operator.
        timeout: seconds for one call.
        memory: bytes that the process may hold beyond what this one holds; ``None`` for no limit.

    Raises:
        FakeKernelError: this system cannot fork, or CUDA was used in this process.
    """

    def __init__(self, op: Any, *, timeout: float = 20.0, memory: int | None = 4 << 30) -> None:
        self._op = op
        self._timeout = timeout
        self._memory = memory if can_count_memory() else None
        self._pid: int | None = None
        self._pipe: Connection[CallSpec, Outcome]
        self._limit = 0
        if not hasattr(os, "fork"):
            raise FakeKernelError(
                "operators run in a forked process, which this system does not have",
                expected="Linux or macOS",
                found=sys.platform,
                fix="Pass isolate=False to run it in this process",
            )
        if torch.cuda.is_initialized():
            raise FakeKernelError(
                "operators run in a forked process, where CUDA does not work once it was used here",
                fix="Call infer_fake before CUDA is used, or with isolate=False",
            )

    def __call__(self, spec: CallSpec) -> Outcome:
        """Run a call; what it raises and how its process ends are results."""
        if self._pid is None:
            self._start()
        reason = None
        try:
            self._pipe.send(spec)
            reason = self._wait()
            if reason is None:
                return self._pipe.recv()
        except (EOFError, ConnectionError):
            pass
        except BaseException:
            self.close()
            raise
        status = self._end()
        how = signal_name(status) if status < 0 else f"exit status {status}"
        return Outcome(error=reason or f"its process ended: {how}", has_survived=False)

    def __enter__(self) -> OperatorProcess:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        if self._pid is not None:
            self._kill()
            self._end()

    def _start(self) -> None:
        self._pipe, other = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # there may be other threads
            self._pid = os.fork()
        if self._pid == 0:
            self._pipe.close()
            _serve(self._op, other)
        other.close()
        self._limit = memory_of(self._pid) + (self._memory or 0)

    def _wait(self) -> str | None:
        """Wait for a reply; return why the process was killed, if it was."""
        assert self._pid is not None
        deadline = time.monotonic() + self._timeout
        while not self._pipe.poll(_INTERVAL):
            if self._memory is not None and memory_of(self._pid) > self._limit:
                self._kill()
                return f"it held more than {self._memory >> 20} MiB"
            if time.monotonic() > deadline:
                self._kill()
                return f"it ran longer than {self._timeout:g} s"
        return None

    def _kill(self) -> None:
        assert self._pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def _end(self) -> int:
        assert self._pid is not None
        self._pipe.close()
        _, status = os.waitpid(self._pid, 0)
        self._pid = None
        return os.waitstatus_to_exitcode(status)


def _serve(op: Any, pipe: Connection[Outcome, CallSpec]) -> NoReturn:
    """Answer calls until the pipe is closed; never returns to the code that forked."""
    try:
        if faulthandler.is_enabled():
            faulthandler.disable()
        null = os.open(os.devnull, os.O_RDWR)
        for target in (0, 1, 2):
            os.dup2(null, target)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                pipe.send(run_call(op, pipe.recv()))
    finally:
        os._exit(0)
