"""An exception as plain data, for another process."""

from __future__ import annotations

import traceback
from typing import Any

import torch

__all__ = ["told"]

_FRAMES = 8
_LACKS = ("DefaultCPUAllocator: can't allocate memory", "std::bad_alloc")


def told(error: BaseException) -> dict[str, Any]:
    """An exception's ``type`` and ``message``, whether it is for lack of ``memory``, and ``frames``.

    The innermost ones of its traceback, the innermost last.
    """
    kind = type(error)
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    return {
        "type": f"{kind.__module__}.{kind.__qualname__}",
        "message": str(error),
        "memory": _is_lack_of_memory(error),
        "frames": [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames],
    }


def _is_lack_of_memory(error: BaseException) -> bool:
    known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return known or any(lack in str(error) for lack in _LACKS)
