"""Describe and rebuild, per tensor: torch's own code beside ours, alternately in one process.

Run: ``python -m benchmarks.bench_tensors [--rounds N] [--counts 100 1000]``. The figures are for one
tensor. Torch's ``from_tensor`` describes and rebuilds in one call; of ours, the rebuilding starts at
records, and one line has both.
"""

from __future__ import annotations

import argparse
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

from .table import Row, compare, print_rows, timed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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


def bench_describe(kind: str, count: int, rounds: int) -> Row:
    """Real tensors to records."""
    tensors = make_tensors(kind, count, distinct=False)

    def theirs() -> float:
        return timed(TorchDescriber().describe_tensor, tensors)

    def ours() -> float:
        return timed(MetaTensorDescriber().describe_tensor, tensors)

    return compare(f"describe {kind}, {count}", theirs, ours, rounds=rounds, count=count)


def bench_static(kind: str, count: int, rounds: int) -> Row:
    """Static rebuild, from records."""
    tensors = make_tensors(kind, count, distinct=False)
    describer = MetaTensorDescriber()
    records = [describer.describe_tensor(t) for t in tensors]

    def theirs() -> float:
        return timed(FakeTensorMode().from_tensor, tensors)

    def ours() -> float:
        return timed(MetaConverter(FakeTensorMode()).from_desc, records)

    return compare(f"rebuild {kind}, static, {count}", theirs, ours, rounds=rounds, count=count)


def bench_both(kind: str, count: int, rounds: int) -> Row:
    """Describe and rebuild, static: the same work on both sides."""
    tensors = make_tensors(kind, count, distinct=False)

    def theirs() -> float:
        return timed(FakeTensorMode().from_tensor, tensors)

    def ours() -> float:
        describer, converter = MetaTensorDescriber(), MetaConverter(FakeTensorMode())
        return timed(lambda t: converter.from_desc(describer.describe_tensor(t)), tensors)

    what = f"describe and rebuild {kind}, static, {count}"
    return compare(what, theirs, ours, rounds=rounds, count=count)


def context_of(t: torch.Tensor) -> Any:
    """Every dim dynamic, as by `dynamic=True`: equal sizes share a symbol."""
    return StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DUCK] * t.ndim,
        view_base_context=context_of(t._base) if t._is_view() else None,
    )


def bench_dynamic(kind: str, count: int, rounds: int, *, distinct: bool) -> Row:
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
    what = f"rebuild {kind}, dynamic, {sizes}, {count}"
    return compare(what, theirs, ours, rounds=rounds, count=count)


def rows(rounds: int, counts: Sequence[int] = (100, 1000)) -> Iterator[Row]:
    """Every line of the table."""
    for count in counts:
        for bench in (bench_describe, bench_static, bench_both):
            for kind in KINDS:
                yield bench(kind, count, rounds)
        for distinct in (False, True):
            for kind in KINDS:
                yield bench_dynamic(kind, count, rounds, distinct=distinct)


def main() -> None:
    """Print the table of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--counts", type=int, nargs="+", default=[100, 1000])
    args = parser.parse_args()
    print_rows(rows(args.rounds, args.counts))


if __name__ == "__main__":
    main()
