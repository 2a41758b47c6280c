"""Describe and rebuild, per tensor: torch's own code beside ours, alternately in one process.

Run: ``python -m benchmarks.bench_tensors [--rounds N] [--counts 100 1000]``. Each line is the
median over the rounds in microseconds a tensor, of torch and of ours, and their ratio.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.meta_utils import MetaTensorDescriber as TorchDescriber
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from torch_fakeify.convert import MetaConverter
from torch_fakeify.describe import MetaTensorDescriber

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KINDS = ("parameter", "plain", "view")


def make_tensors(kind: str, count: int, *, distinct: bool) -> list[torch.Tensor]:
    """Two-dimensional tensors of equal sizes, or each of sizes of its own."""
    tensors: list[torch.Tensor] = []
    for i in range(count):
        size = (i + 2, count + i + 2) if distinct else (64, 32)
        t = torch.empty(size, device="meta") if distinct else torch.empty(size)
        if kind == "parameter":
            t = torch.nn.Parameter(t)
        elif kind == "view":
            t = t[1:]
        tensors.append(t)
    return tensors


def measure(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The median of each run's seconds, the runs taking turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            gc.collect()
            gc.disable()
            times[name].append(run())
            gc.enable()
    return {name: statistics.median(values) for name, values in times.items()}


def timed(work: Callable[[Any], Any], items: Sequence[Any]) -> float:
    """Seconds for the work on every item, results kept alive meanwhile."""
    start = time.perf_counter()
    kept = [work(item) for item in items]
    seconds = time.perf_counter() - start
    del kept
    return seconds


def report(what: str, count: int, medians: dict[str, float]) -> None:
    """Prints one line."""
    theirs, ours = (medians[name] / count * 1e6 for name in ("torch", "ours"))
    print(f"{what:<42} {count:>5}  {theirs:>9.1f}  {ours:>8.1f}  {theirs / ours:>6.1f}x")


def bench_describe(kind: str, count: int, rounds: int) -> None:
    """Real tensors to records."""
    tensors = make_tensors(kind, count, distinct=False)

    def theirs() -> float:
        return timed(TorchDescriber().describe_tensor, tensors)

    def ours() -> float:
        return timed(MetaTensorDescriber().describe_tensor, tensors)

    report(f"describe {kind}", count, measure({"torch": theirs, "ours": ours}, rounds))


def bench_static(kind: str, count: int, rounds: int) -> None:
    """Static rebuild; torch's from_tensor describes in the same call, ours starts at records."""
    tensors = make_tensors(kind, count, distinct=False)
    describer = MetaTensorDescriber()
    records = [describer.describe_tensor(t) for t in tensors]

    def theirs() -> float:
        return timed(FakeTensorMode().from_tensor, tensors)

    def ours() -> float:
        return timed(MetaConverter(FakeTensorMode()).from_desc, records)

    report(f"rebuild {kind}, static", count, measure({"torch": theirs, "ours": ours}, rounds))


def context_of(t: torch.Tensor) -> Any:
    """Every dim dynamic, as by `dynamic=True`: equal sizes share a symbol."""
    return StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DUCK] * t.ndim,
        view_base_context=context_of(t._base) if t._is_view() else None,
    )


def bench_dynamic(kind: str, count: int, rounds: int, *, distinct: bool) -> None:
    """Rebuild with every dim dynamic."""
    tensors = make_tensors(kind, count, distinct=distinct)
    inputs = [(t, LocalSource(f"x{i}"), context_of(t)) for i, t in enumerate(tensors)]
    describer = MetaTensorDescriber()
    records = [
        describer.describe_tensor(t, source=source, symbolic_context=context)
        for t, source, context in inputs
    ]

    def theirs() -> float:
        mode = FakeTensorMode(shape_env=ShapeEnv())

        def work(item: Any) -> Any:
            t, source, context = item
            return mode.from_tensor(t, source=source, symbolic_context=context)

        return timed(work, inputs)

    def ours() -> float:
        mode = FakeTensorMode(shape_env=ShapeEnv())
        return timed(MetaConverter(mode).from_desc, records)

    sizes = "distinct sizes" if distinct else "equal sizes"
    medians = measure({"torch": theirs, "ours": ours}, rounds)
    report(f"rebuild {kind}, dynamic, {sizes}", count, medians)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--counts", type=int, nargs="+", default=[100, 1000])
    args = parser.parse_args()
    print(f"{'µs a tensor':<42} {'count':>5}  {'torch':>9}  {'ours':>8}  {'ratio':>7}")
    for count in args.counts:
        for kind in KINDS:
            bench_describe(kind, count, args.rounds)
        for kind in KINDS:
            bench_static(kind, count, args.rounds)
        for distinct in (False, True):
            for kind in KINDS:
                bench_dynamic(kind, count, args.rounds, distinct=distinct)


if __name__ == "__main__":
    main()
