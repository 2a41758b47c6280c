"""Profile of the work whose lines miss their budget, by file.

Run: ``python -m benchmarks.profile [write|load|view|parameter] [--frame Llama|linears]``. A timer of
CPU time samples the innermost Python frame every half millisecond; C code counts for its caller. The
garbage collector is off, as in the table.
"""

from __future__ import annotations

import argparse
import collections
import gc
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch_fakeify as tfk

from . import bench_dynamic
from .bench_capture import LAYERS, LINEARS, in_backend, linears, llama

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_PERIOD = 0.0005
"""Seconds."""
_SECONDS = 10.0


def shares(work: Callable[[], object]) -> tuple[float, list[tuple[str, float]]]:
    """Milliseconds of one run of a work, and of each file, in descending order."""
    counts: collections.Counter[str] = collections.Counter()
    signal.signal(signal.SIGPROF, lambda _, frame: counts.update([_file(frame)]))
    for _ in range(3):
        work()
    gc.collect()
    gc.disable()
    runs, start = 0, time.process_time()
    signal.setitimer(signal.ITIMER_PROF, _PERIOD, _PERIOD)
    while time.process_time() - start < _SECONDS:
        work()
        runs += 1
    signal.setitimer(signal.ITIMER_PROF, 0)
    each = (time.process_time() - start) / runs * 1e3
    gc.enable()
    total = sum(counts.values())
    return each, [(file, each * n / total) for file, n in counts.most_common()]


def _file(frame: FrameType | None) -> str:
    """The path of a file below the package, or else the name of the library."""
    parts = Path(frame.f_code.co_filename).parts if frame is not None else ()
    for library in ("torch_fakeify", "torch", "sympy", "msgspec"):
        if library in parts:
            start = len(parts) - 1 - parts[::-1].index(library)
            return "/".join(parts[start:]) if library == "torch_fakeify" else library
    return "python"


def main() -> None:
    """Print the profile of one work."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__)
    parser.add_argument("work", nargs="?", default="write", choices=("write", "load", *_KINDS))
    parser.add_argument("--frame", default="Llama", choices=("Llama", "linears"))
    args = parser.parse_args()
    if args.work in _KINDS:
        inputs = bench_dynamic.inputs_of(args.work, 1000, distinct=False)
        found = shares(bench_dynamic.ours(inputs))
    else:
        model = llama(LAYERS) if args.frame == "Llama" else linears(LINEARS)
        found = in_backend(model, lambda gm, inputs: shares(_frame_work(args.work, gm, inputs)))
    each, files = found
    print(f"{each:7.1f} ms")
    for file, part in files:
        if part >= each / 100:
            print(f"{part:7.1f} ms {part / each:4.0%}  {file}")


_KINDS = ("parameter", "plain", "view")


def _frame_work(work: str, gm: Any, inputs: list[Any]) -> Callable[[], object]:
    path = Path(tempfile.mkdtemp()) / "frame.fkf"
    tfk.capture(gm, inputs).save(path)
    if work == "write":
        return lambda: tfk.capture(gm, inputs).save(path)
    return lambda: tfk.Capture.load(path).instantiate()


if __name__ == "__main__":
    main()
