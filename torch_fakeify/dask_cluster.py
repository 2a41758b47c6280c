"""A Dask cluster as the executor of a corpus: the extra ``dask``."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import FakeifyError

if TYPE_CHECKING:
    from collections.abc import Generator
    from concurrent.futures import Executor

__all__ = ["Cluster", "dask_cluster"]

_CONNECTING = 30.0
"""Seconds for it."""
_JOINING = 30.0
"""Seconds for the first worker: a cluster that has just been started has none yet."""
_AHEAD = 4
"""Jobs on their way for each thread of the cluster: a worker has the next one when it needs it."""
_LEAST = 64
"""Jobs on their way at least: workers may join later."""


@dataclass(frozen=True)
class Cluster:
    """A cluster that jobs can be submitted to."""

    executor: Executor
    window: int
    """How many jobs to have on their way."""
    share: int
    """How many jobs run at a time on one of its machines, at most."""


@contextmanager
def dask_cluster(address: str) -> Generator[Cluster]:
    """Connect to a cluster.

    Jobs of a worker that is killed begin again on another one; a job that `distributed` has seen kill
    several (``distributed.scheduler.allowed-failures``) ends with ``KilledWorker``.

    Args:
        address: of the scheduler, as ``tcp://host:8786``.

    Raises:
        FakeifyError: `distributed` is not installed, nobody is at the address, or there are no workers.
    """
    try:
        from distributed import Client
    except ImportError as error:
        raise FakeifyError(
            "Dask is not installed", fix="Install it: pip install 'torch_fakeify[dask]'"
        ) from error
    try:
        client = Client(address, timeout=_CONNECTING, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise FakeifyError(
            "there is no Dask scheduler",
            where=address,
            found=str(error).partition("\n")[0] or type(error).__name__,
            fix="Start one: dask scheduler",
        ) from error
    with client:
        try:
            client.wait_for_workers(1, timeout=_JOINING)
        except TimeoutError as error:
            raise FakeifyError(
                "the Dask cluster has no workers",
                where=address,
                fix=f"Start some: dask worker {address}",
            ) from error
        threads: Any = client.nthreads()
        on_host: dict[str, int] = {}
        for worker, count in threads.items():
            host = worker.rpartition(":")[0]
            on_host[host] = on_host.get(host, 0) + count
        window = max(_LEAST, _AHEAD * sum(threads.values()))
        # Not pure: a job of the same words is another job.
        yield Cluster(client.get_executor(pure=False), window, max(on_host.values()))
