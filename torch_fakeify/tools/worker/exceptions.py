"""Exceptions of a worker as plain data."""

from __future__ import annotations

import traceback

import torch

from torch_fakeify.errors import FakeifyError, class_name
from torch_fakeify.frames.operator_stubs import stub_refusal

from .replies import Failed, Thrown

_FRAMES = 8
_OUT_OF_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "std::bad_alloc")


def failed(error: BaseException) -> Failed:
    """Return the reply for an exception of a backend.

    Raises:
        StubError: the backend failed because a stub of an operator cannot do what it was called for.
    """
    refusal = stub_refusal(error)
    if refusal is not None:
        raise refusal from error
    return Failed(thrown(error))


def thrown(error: BaseException) -> Thrown:
    """Describe an exception, with the innermost frames of its traceback."""
    kind = type(error)
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    return Thrown(
        class_name(kind),
        str(error),
        _is_out_of_memory(error),
        tuple(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames),
    )


def first_line(error: Exception) -> str:
    """Format an exception in one line; errors of this package without their type."""
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return text if isinstance(error, FakeifyError) else f"{type(error).__name__}: {text}"


def _is_out_of_memory(error: BaseException) -> bool:
    is_memory_error = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return is_memory_error or any(text in str(error) for text in _OUT_OF_MEMORY)
