"""Replay many captures through a `concurrent.futures.Executor`, each in a process of its own.

The executor is a thread pool with fork servers (`jobs.local_executor`), a Dask cluster
(`dask_cluster`), or any other one. Captures of one frame are compiled once. Nothing here imports torch.
"""

from __future__ import annotations

from .runner import check_backend, replay_all

__all__ = ["check_backend", "replay_all"]
