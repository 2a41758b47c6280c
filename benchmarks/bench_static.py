"""Records to fake tensors of static shapes, per tensor, beside torch's ``from_tensor``.

Run: ``python -m benchmarks.bench_static [--rounds N] [--counts N...]``. Torch's ``from_tensor``
describes and rebuilds in one call; ours starts at records. Lines of both, the same work on both sides,
follow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._subclasses.fake_tensor import FakeTensorMode

from torch_fakeify.convert.converter import MetaConverter
from torch_fakeify.describe.describer import MetaTensorDescriber

from .run import main
from .table import Row, at_least, timed
from .tensors import COUNTS, KINDS, bench, growth, make_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

BUDGET = at_least(6)


def rebuild(tensors: Sequence[torch.Tensor]) -> Callable[[], float]:
    """Ours, from records, in a new mode each time."""
    describer = MetaTensorDescriber()
    records = [describer.describe_tensor(t) for t in tensors]
    return lambda: timed(MetaConverter(FakeTensorMode()).from_desc, records)


def both(tensors: Sequence[torch.Tensor]) -> Callable[[], float]:
    """Ours, from tensors."""

    def ours() -> float:
        describer, converter = MetaTensorDescriber(), MetaConverter(FakeTensorMode())

        def again(t: torch.Tensor) -> Any:
            return converter.from_desc(describer.describe_tensor(t))

        return timed(again, tensors)

    return ours


def lines(kind: str, count: int, rounds: int) -> Iterator[Row]:
    """The line of rebuilding, and that of both."""
    tensors = make_tensors(kind, count)

    def theirs() -> float:
        return timed(FakeTensorMode().from_tensor, tensors)

    what = f"rebuild {kind}, static"
    yield bench(what, theirs, rebuild(tensors), rounds=rounds, count=count, budget=BUDGET)
    if count == COUNTS[1]:
        yield bench(f"describe and {what}", theirs, both(tensors), rounds=rounds, count=count)


def rows(rounds: int, counts: Sequence[int] = COUNTS) -> Iterator[Row]:
    """Every line of the table."""
    for kind in KINDS:
        yield growth(
            f"rebuild {kind}, static",
            lambda count, kind=kind: rebuild(make_tensors(kind, count)),
            rounds,
        )
    for kind in KINDS:
        for count in counts:
            yield from lines(kind, count, rounds)


if __name__ == "__main__":
    main(__doc__, rows, counts=True)
