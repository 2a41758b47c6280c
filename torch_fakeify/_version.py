"""The version of this package, and where it is installed."""

from pathlib import Path

__version__ = "0.1.0"
PACKAGE_DIR = Path(__file__).parent
