"""Run calls of an operator in a forked process, which may crash, hang or run out of memory."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import warnings
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from torch_fakeify.errors import FakeKernelError
from torch_fakeify.fake_kernels.observed import Outcome
from torch_fakeify.fake_kernels.specs import run_call

from .worker.limits import can_count_memory, enforce, forbid_core_dumps, memory_of
from .worker.replies import Ended

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from torch_fakeify.fake_kernels.specs import CallSpec


class OperatorProcess:
    """Runs each call in a process that has the operators of this one, without changing this one.

    The process is forked at the first call, and again after one that it does not survive.

    ``timeout`` is in seconds for one call; ``memory`` are the bytes that the process may hold beyond what
    this one holds, ``None`` for no limit.

    Raises:
        FakeKernelError: this system cannot fork, or CUDA was used in this process.
    """

    def __init__(self, op: Any, *, timeout: float = 20.0, memory: int | None = 4 << 30) -> None:
        self._op = op
        self._timeout = timeout
        self._memory = memory if can_count_memory() else None
        self._pid: int | None = None
        self._pipe: Connection[CallSpec, Outcome]
        self._limit: int | None = None
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
        pid = self._start() if self._pid is None else self._pid
        ending = "ended"
        try:
            self._pipe.send(spec)
            ending = enforce(pid, self._pipe.poll, timeout=self._timeout, memory=self._limit)
            if ending == "ended":
                return self._pipe.recv()
        except (EOFError, ConnectionError):
            pass
        except BaseException:
            self.close()
            raise
        reason = f"its process ended: {Ended('crashes', self._end()).how}"
        if ending == "hangs":
            reason = f"it ran longer than {self._timeout:g} s"
        elif self._memory is not None and ending == "out of memory":
            reason = f"it held more than {self._memory >> 20} MiB"
        return Outcome(error=reason, has_survived=False)

    def __enter__(self) -> OperatorProcess:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        if self._pid is not None:
            self._end()

    def _start(self) -> int:
        self._pipe, other = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # there may be other threads
            self._pid = pid = os.fork()
        if pid == 0:
            self._pipe.close()
            _serve(self._op, other)
        other.close()
        if self._memory is not None:
            self._limit = memory_of(pid) + self._memory
        return pid

    def _end(self) -> int:
        """Kill the process, unless it has ended, and return its exit status."""
        assert self._pid is not None
        self._pipe.close()
        os.kill(self._pid, signal.SIGKILL)  # it is there until it is waited for
        _, status = os.waitpid(self._pid, 0)
        self._pid = None
        return os.waitstatus_to_exitcode(status)


def _serve(op: Any, pipe: Connection[Outcome, CallSpec]) -> NoReturn:
    """Answer calls until the pipe is closed; never returns to the code that forked."""
    try:
        faulthandler.disable()
        forbid_core_dumps()
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
