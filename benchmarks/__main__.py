"""All benchmarks, one table: ``python -m benchmarks [--rounds N] [--json] [SCRIPT...]``.

The figures are medians over the rounds (short lines have up to three times as many), with half the
interquartile range in per cent. Lines with a budget show whether it is met. Each script runs in its own
process, because the heap of one slows down the next. The ``test`` extra is required; captures and the
handoff also need ``models``.
"""

from __future__ import annotations

import argparse

from .run import ROUNDS, alone, show

SCRIPTS = (
    "describe",
    "static",
    "dynamic",
    "capture",
    "guards",
    "checkpoint",
    "handoff",
    "entailment",
    "start",
    "memory",
    "load_memory",
    "dropin",
    "shape_env",
    "diff",
    "scale",
)


def main() -> None:
    """Print the whole table, or the lines of some scripts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help=", ".join(SCRIPTS))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    args = parser.parse_args()
    unknown = [name for name in args.scripts if name not in SCRIPTS]
    if unknown:
        parser.error(f"no such script: {', '.join(unknown)}; there are {', '.join(SCRIPTS)}")
    names = args.scripts or SCRIPTS
    show({name: alone(f"bench_{name}") for name in names}, args.rounds, as_json=args.json)


if __name__ == "__main__":
    main()
