"""All benchmarks, one table: ``python -m benchmarks [--rounds N] [--json] [SCRIPT...]``.

The figures are medians of the rounds; beside them stands half the distance of the quartiles in per
cent. Lines with a budget say whether it is met. It needs the ``test`` extra; captures and the handoff
need ``models`` too.
"""

from __future__ import annotations

import argparse

from . import (
    bench_capture,
    bench_checkpoint,
    bench_describe,
    bench_dropin,
    bench_dynamic,
    bench_guards,
    bench_handoff,
    bench_load_memory,
    bench_memory,
    bench_shape_env,
    bench_start,
    bench_static,
)
from .run import ROUNDS, show

SCRIPTS = {
    "describe": bench_describe.rows,
    "static": bench_static.rows,
    "dynamic": bench_dynamic.rows,
    "capture": bench_capture.rows,
    "guards": bench_guards.rows,
    "checkpoint": bench_checkpoint.rows,
    "handoff": bench_handoff.rows,
    "start": bench_start.rows,
    "memory": bench_memory.rows,
    "load_memory": bench_load_memory.rows,
    "dropin": bench_dropin.rows,
    "shape_env": bench_shape_env.rows,
}


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
    some = {name: SCRIPTS[name] for name in args.scripts or SCRIPTS}
    show(some, args.rounds, as_json=args.json)


if __name__ == "__main__":
    main()
