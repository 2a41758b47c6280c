"""Functions called in threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def in_threads(job: Callable[[int], T], count: int = 1) -> list[T]:
    """What each of some threads gets for its number, all at once; an exception in one is raised."""
    start = threading.Barrier(count)

    def work(number: int) -> T:
        start.wait()
        return job(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))
