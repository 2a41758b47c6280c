"""Where the checkout is whose tests have the models and programs that are measured."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["ROOT", "TESTS", "import_from_tests"]

ROOT = Path(__file__).parents[1]
TESTS = [str(ROOT / "tests" / name) for name in ("harness", "zoo")]


def import_from_tests() -> None:
    """Let the modules of the tests be imported, after all others."""
    sys.path.extend(path for path in TESTS if path not in sys.path)
