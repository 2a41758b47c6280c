"""All benchmarks, one table: ``python -m benchmarks [--rounds N]``.

The figures are medians of the rounds; beside them stands half the distance of the quartiles in per
cent. The capture benchmark needs the ``models`` extra. What the handoff costs has a table of its own:
``python -m benchmarks.bench_handoff``.
"""

from __future__ import annotations

import argparse
import itertools
import platform

import torch

from . import (
    bench_capture,
    bench_checkpoint,
    bench_dropin,
    bench_guards,
    bench_shape_env,
    bench_tensors,
)
from .table import print_rows


def main() -> None:
    """Print the whole table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {rounds} rounds")
    print_rows(
        itertools.chain(
            bench_tensors.rows(rounds),
            bench_dropin.rows(rounds),
            bench_shape_env.rows(rounds),
            bench_checkpoint.rows(rounds),
            bench_guards.rows(rounds),
            bench_capture.rows(rounds),
        )
    )


if __name__ == "__main__":
    main()
