"""Where the time goes in the work of the lines that miss their budget.

Run: ``python -m benchmarks.profile [write|load|view|parameter] [--frame Llama|linears]``. A timer of
the processor's time stops the work every half millisecond; the innermost Python frame tells the room,
and what runs in C counts for the room that called it. Collecting garbage is off, as in the table.
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
    """Milliseconds of one run of a work, and those of each room, most first."""
    counts: collections.Counter[str] = collections.Counter()
    signal.signal(signal.SIGPROF, lambda _, frame: counts.update([_room(frame)]))
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
    return each, [(room, each * n / total) for room, n in counts.most_common()]


def _room(frame: FrameType | None) -> str:
    """The module of the package, or else the name of the library."""
    file = Path(frame.f_code.co_filename) if frame is not None else Path()
    parts = file.parts
    for library in ("torch_fakeify", "torch", "sympy", "msgspec"):
        if library in parts:
            return f"torch_fakeify/{file.name}" if library == "torch_fakeify" else library
    return "python"


def main() -> None:
    """Print the shares of one work."""
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
    each, rooms = found
    print(f"{each:7.1f} ms")
    for room, part in rooms:
        if part >= each / 100:
            print(f"{part:7.1f} ms {part / each:4.0%}  {room}")


_KINDS = ("parameter", "plain", "view")


def _frame_work(work: str, gm: Any, inputs: list[Any]) -> Callable[[], object]:
    path = Path(tempfile.mkdtemp()) / "frame.fkf"
    tfk.capture(gm, inputs).save(path)
    if work == "write":
        return lambda: tfk.capture(gm, inputs).save(path)
    return lambda: tfk.Capture.load(path).instantiate()


if __name__ == "__main__":
    main()
