"""A browser for the tests of pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from report_pages import Browser, start

if TYPE_CHECKING:
    from collections.abc import Generator


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    """One browser for all tests of a file."""
    browser = start()
    try:
        yield browser
    finally:
        browser.driver.quit()
