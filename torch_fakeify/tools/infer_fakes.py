"""Infer fake kernels of operators that have none: ``infer_fake`` and ``inferring_fakes``.

The operators run in a forked process, which may crash, hang or run out of memory.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import warnings
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from torch_fakeify._atomic_write import write_atomic
from torch_fakeify.compat import torch_library
from torch_fakeify.compat.torch_dispatch import disable_current_modes
from torch_fakeify.errors import FakeKernelError, check_integer, check_type
from torch_fakeify.fake_kernels.evaluating import bound
from torch_fakeify.fake_kernels.inferring import infer
from torch_fakeify.fake_kernels.kernels import note_inferred
from torch_fakeify.fake_kernels.observed import Outcome
from torch_fakeify.fake_kernels.specs import CallSpec, run_call, spec_of

from .worker.limits import (
    can_count_memory,
    check_bounds,
    enforce,
    forbid_core_dumps,
    memory_of,
)
from .worker.replies import Ended

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence
    from multiprocessing.connection import Connection
    from pathlib import Path

    from torch_fakeify.fake_kernels.kernels import FakeKernel

_BLOCKS = ExitStack()
"""Blocks that end with the process."""
_MEMORY = 4 << 30
_MOST_SAMPLES = 16
"""Most calls of a program from which a kernel is inferred."""


def infer_fake(
    op: Any,
    samples: Sequence[Any],
    *,
    sizes: Sequence[int] = (),
    isolate: bool = True,
    timeout: float = 20.0,
    memory: int | None = _MEMORY,
    seed: int = 0,
) -> FakeKernel:
    """Infer the fake kernel of an operator by running it on made-up inputs.

    The sizes, strides, dtypes and devices of the results become formulas over those of the arguments: the
    simplest that fit, kept only if no further call refutes them. Sizes that depend on data become
    unbacked ones.

    Args:
        op: the operator: ``torch.ops.namespace.name``, what ``torch.library.custom_op`` returned, or
            ``"namespace::name"``.
        samples: calls that the operator accepts, each a tuple of arguments, or a pair of such a tuple and
            a dictionary of keyword arguments; two or more with different flags and numbers of dims are
            best. Calls with other sizes, numbers, strides and dtypes are made from them, with data in
            the range of the sample's.
        sizes: more sizes to try, beside those from 0 to 13.
        isolate: run the operator in a forked process, so that a crash, a hang or too much memory is a result
            and not the end of this one.
        timeout: seconds for one call there.
        memory: bytes that the process may hold beyond what this one holds; ``None`` for no limit.
        seed: of the made-up inputs.

    Raises:
        FakeKernelError: there is no such operator, it refuses every sample, it breaks its schema, or
            its results follow no formula.

    Example:
        >>> @torch.library.custom_op("docs::outer", mutates_args=())
        ... def outer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ...     return x[:, None] * y
        >>> kernel = tfk.infer_fake(outer, [(torch.ones(3), torch.ones(4))])
        >>> kernel.register()
        >>> torch.compile(outer, backend="aot_eager", dynamic=True)(
        ...     torch.ones(5), torch.ones(2)
        ... ).shape
        torch.Size([5, 2])
    """
    _check_options(sizes, timeout, memory, seed)
    overload = torch_library.overload_of(op)
    specs = [_spec(overload._schema, sample) for sample in samples]
    if not specs:
        raise FakeKernelError(
            f"there are no samples of {overload}",
            expected="at least one call that the operator accepts",
        )
    runner = nullcontext(partial(run_call, overload))
    if isolate:
        runner = OperatorProcess(overload, timeout=timeout, memory=memory)
    with disable_current_modes(), runner as run:
        return infer(overload._schema, run, specs, sizes=sizes, seed=seed)


def _check_options(sizes: Any, timeout: float, memory: int | None, seed: int = 0) -> None:
    check_bounds(timeout, memory)
    check_integer(seed, "seed", FakeKernelError)
    check_type(sizes, (tuple, list, range), "a list of sizes", FakeKernelError)
    for each in sizes:
        check_integer(each, "sizes", FakeKernelError, least=0)


def _spec(schema: Any, sample: Any) -> CallSpec:
    if isinstance(sample, CallSpec):
        return sample
    if not isinstance(sample, (tuple, list)):
        raise FakeKernelError(
            "a sample is a call",
            expected="a tuple of arguments, or a pair of it and keyword arguments",
            found=f"a value of {type(sample).__name__}",
            fix="Write (x,) for a call with one argument",
        )
    is_pair = len(sample) == 2 and isinstance(sample[0], tuple) and isinstance(sample[1], dict)
    args, kwargs = sample if is_pair else (sample, {})
    return _spec_of_call(schema, args, kwargs)


def _spec_of_call(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallSpec:
    return CallSpec({name: spec_of(value) for name, value in bound(schema, args, kwargs).items()})


class InferredFakes:
    """The fake kernels that were inferred in a block of `inferring_fakes`, by operator.

    Example:
        >>> with tfk.inferring_fakes() as fakes:
        ...     torch.compile(torch.exp, backend="aot_eager")(torch.ones(2)).shape
        torch.Size([2])
        >>> fakes, fakes.lines()
        (<InferredFakes none>, [])
    """

    def __init__(
        self, options: Mapping[str, Any], changed: Callable[[InferredFakes], None] = lambda _: None
    ) -> None:
        self._changed = changed
        self.kernels: dict[str, FakeKernel] = {}
        """By the name of the operator, ``namespace::name``."""
        self.failures: dict[str, FakeKernelError] = {}
        """Why there is none, by the name of the operator."""
        self._options = options
        self._samples: dict[str, list[CallSpec]] = {}
        self._lock = threading.RLock()

    @property
    def source(self) -> str:
        """The kernels as a module that registers them; empty if there are none."""
        return "\n\n".join(kernel.source for kernel in self.kernels.values())

    def lines(self) -> list[str]:
        """Format the reports of the kernels, and why there are none."""
        found = [line for kernel in self.kernels.values() for line in kernel.report.lines()]
        return [*found, *(f"{name}: {error}" for name, error in self.failures.items())]

    def __repr__(self) -> str:
        return f"<InferredFakes {', '.join(self.kernels) or 'none'}>"

    def _result(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the fake result of a call, by a kernel that is inferred if there is none for such a call."""
        name = torch_library.full_name(op._schema)
        with self._lock:
            if name in self.kernels:
                try:
                    return self.kernels[name](*args, **kwargs)
                except FakeKernelError:
                    pass  # the call is unlike those before
            spec = _spec_of_call(op._schema, args, kwargs)
            samples = self._samples.setdefault(name, [])
            if spec not in samples and len(samples) < _MOST_SAMPLES:
                samples.append(spec)
            try:
                self.kernels[name] = infer_fake(op, [*samples], **self._options)
            except FakeKernelError as error:
                self.failures[name] = error
                self._changed(self)
                raise
            self.failures.pop(name, None)
            note_inferred(self.kernels[name].desc)
            self._changed(self)
            return self.kernels[name](*args, **kwargs)


@contextmanager
def inferring_fakes(
    *,
    sizes: Sequence[int] = (),
    isolate: bool = True,
    timeout: float = 20.0,
    memory: int | None = _MEMORY,
) -> Generator[InferredFakes, None, None]:
    """Infer the fake kernel of each operator that has none where a trace calls it, inside a block.

    The operator runs on made-up inputs at other sizes than those of the trace; see `infer_fake`, which has
    these options too. It holds for this thread. What was compiled in the block works after it; what is
    compiled again needs the kernels: `FakeKernel.register`, or their source.

    Yields:
        The kernels, as they are inferred.

    Example:
        >>> @torch.library.custom_op("docs::halves", mutates_args=())
        ... def halves(x: torch.Tensor) -> torch.Tensor:
        ...     return x[: len(x) // 2].clone()
        >>> with tfk.inferring_fakes() as fakes:
        ...     torch.compile(halves, backend="aot_eager", dynamic=True)(torch.ones(6)).shape
        torch.Size([3])
        >>> list(fakes.kernels)
        ['docs::halves']
    """
    _check_options(sizes, timeout, memory)
    found = InferredFakes(
        {"sizes": sizes, "isolate": isolate, "timeout": timeout, "memory": memory}
    )
    with torch_library.fake_results_by(found._result):
        yield found


def infer_fakes_of_process(path: Path, note: Callable[[list[str]], None]) -> None:
    """Infer fake kernels for the rest of the process, and write them to a file as they are inferred.

    Args:
        path: a Python module that registers them.
        note: called with the lines of the reports.
    """

    def changed(found: InferredFakes) -> None:
        if found.kernels:
            write_atomic(path, found.source.encode())
        note(found.lines())

    _BLOCKS.enter_context(torch_library.fake_results_by(InferredFakes({}, changed)._result))


# --- the process in which operators run -----------------------------------------------------------


class OperatorProcess:
    """Runs each call in a process that has the operators of this one, without changing this one.

    The process is forked at the first call, and again after one that it does not survive.

    ``timeout`` is in seconds for one call; ``memory`` are the bytes that the process may hold beyond what
    this one holds, ``None`` for no limit.

    Raises:
        FakeKernelError: this system cannot fork, or CUDA was used in this process.
    """

    def __init__(self, op: Any, *, timeout: float = 20.0, memory: int | None = _MEMORY) -> None:
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
        with suppress(EOFError, ConnectionError):
            while True:
                pipe.send(run_call(op, pipe.recv()))
    finally:
        os._exit(0)
