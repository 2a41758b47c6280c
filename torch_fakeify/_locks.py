"""Locks that are released in a forked child, with their state consistent."""

from __future__ import annotations

import os
import threading


def fork_safe_lock() -> threading.RLock:
    """Return a reentrant lock that is never freed.

    ``os.fork`` waits until no other thread holds the lock: that thread does not exist in the child,
    which would deadlock, or see state that is half changed.
    """
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
        )
    return lock
