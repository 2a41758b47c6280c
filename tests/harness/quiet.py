"""Code that warns, where that is not what is tested."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator


@contextmanager
def quiet() -> Generator[None]:
    """No warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
