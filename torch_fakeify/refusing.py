"""One error for whatever torch raises of a record."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from .errors import CaptureError, FakeifyError

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["refusing"]


@contextmanager
def refusing(where: str) -> Generator[None, None, None]:
    """Says of whatever torch or a tensor subclass raises which part of the capture it is about.

    Each room checks what it can know of a record. What is left is known to torch's own code alone,
    which does not expect to be called with such values and fails in any way.
    """
    try:
        yield
    except (FakeifyError, MemoryError):
        raise
    except Exception as error:
        raise CaptureError(
            "torch cannot rebuild what the capture says",
            where=where,
            found=f"{type(error).__name__}: {error}",
            fix="The file is damaged, or made for another version of torch",
        ) from error
