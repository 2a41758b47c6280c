"""Options of the command line that choose other interpreters."""

from __future__ import annotations

import argparse


def add_python(command: argparse.ArgumentParser, several: str) -> None:
    """Add ``--python`` to a command; ``several`` is the text about repeating it."""
    command.add_argument(
        "--python",
        action="append",
        default=[],
        dest="pythons",
        metavar="EXE",
        help=f"compile with this interpreter, which has its own torch; {several}",
    )


def add_times(command: argparse.ArgumentParser) -> None:
    """Add ``--time`` and ``--tolerance`` to a command."""
    command.add_argument(
        "--time",
        action="store_true",
        help="also run what was compiled, and print how long a call takes",
    )
    command.add_argument(
        "--tolerance",
        type=_ratio,
        metavar="R",
        help="with several --python: one that takes more than R times as long as the first, to compile or to "
        "run, sets exit status 1",
    )


def _ratio(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a ratio of at least 1; found {text!r}")
    return value
