"""A Dask cluster as the executor of a corpus (extra ``dask``)."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_fakeify.errors import FakeifyError

if TYPE_CHECKING:
    from collections.abc import Generator
    from concurrent.futures import Executor

_CONNECTING = 30.0
"""Seconds to connect to the scheduler."""
_JOINING = 30.0
"""Seconds to wait for the first worker."""
_AHEAD = 4
"""Jobs submitted for each thread of the cluster, so that a worker need not wait for the next one."""
_LEAST = 64
"""Smallest number of submitted jobs: workers may join later."""


class Cluster(NamedTuple):
    """A connected cluster."""

    executor: Executor
    window: int
    """Number of jobs to have submitted at a time."""
    share: int
    """Largest number of jobs that run at a time on one of its machines."""


@contextmanager
def dask_cluster(address: str) -> Generator[Cluster]:
    """Connect to a cluster.

    Jobs of a worker that is killed begin again on another one; a job that `distributed` has seen kill
    several (``distributed.scheduler.allowed-failures``) ends with ``KilledWorker``. The address is that of
    the scheduler, as ``tcp://host:8786``.

    Raises:
        FakeifyError: `distributed` is not installed, no scheduler answers at the address, or there are no workers.
    """
    try:
        from distributed import Client
    except ImportError as error:
        raise FakeifyError(
            "Dask is not installed", fix="Install it: pip install 'torch_fakeify[dask]'"
        ) from error
    try:
        client = Client(address, timeout=_CONNECTING, set_as_default=False)
    except (OSError, TimeoutError, asyncio.TimeoutError, ValueError) as error:
        raise FakeifyError(
            "there is no Dask scheduler",
            where=address,
            found=str(error).partition("\n")[0] or type(error).__name__,
            fix="Start one: dask scheduler",
        ) from error
    with client:
        try:
            client.wait_for_workers(1, timeout=_JOINING)
        except (TimeoutError, asyncio.TimeoutError) as error:  # two classes with Python 3.10
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
        # Not pure: equal jobs must both run.
        yield Cluster(client.get_executor(pure=False), window, max(on_host.values()))
