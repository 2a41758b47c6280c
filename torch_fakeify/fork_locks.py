"""Locks of state that the whole process shares, which a forked child finds open and its state whole."""

from __future__ import annotations

import os
import threading

__all__ = ["fork_safe_lock"]


def fork_safe_lock() -> threading.RLock:
    """A reentrant lock that lives as long as the process.

    A fork waits until no other thread holds it: else the child would wait for ever for a thread that
    it does not have, over state that this thread left half changed.
    """
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
        )
    return lock
