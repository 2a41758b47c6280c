"""Fixtures of the tests of the drop-in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from torch_fakeify import dropin

if TYPE_CHECKING:
    from collections.abc import Generator


@pytest.fixture(autouse=True)
def _as_before() -> Generator[None]:
    """Each test begins and ends without the drop-in."""
    assert not dropin.is_installed()
    yield
    dropin.uninstall()
