"""Where the tests, their helpers and the golden corpus are."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
HARNESS = TESTS / "harness"
ZOO = TESTS / "zoo"
GOLDEN = TESTS / "golden" / "v1"
IMPORTABLE = [str(HARNESS), str(ZOO)]
"""Folders that are on the path of the tests, and of the processes that import what is in them."""
