"""Records to fake tensors with every dim dynamic, per tensor, beside torch's ``from_tensor``.

Run: ``python -m benchmarks.bench_dynamic [--rounds N] [--counts N...]``. Each tensor has a source of
its own; equal sizes share a symbol, by duck shapes, distinct ones have two symbols a tensor, as equal
ones have that are marked dynamic one by one. Sympy's cache is emptied before each run. Growth is
measured first: the heap that torch's own 10,000 tensors leave makes what comes after them slower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sympy.core.cache import clear_cache
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_fakeify.convert.converter import MetaConverter
from torch_fakeify.describe.describer import MetaTensorDescriber

from .run import main
from .table import Row, at_least, timed
from .tensors import COUNTS, KINDS, bench, context_of, growth, make_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

BUDGETS = {False: at_least(10), True: at_least(8)}
"""By whether the sizes are distinct."""


def inputs_of(kind: str, count: int, *, distinct: bool, own: bool = False) -> list[tuple[Any, ...]]:
    """Tensors, each with its source and policy; ``own`` as for `context_of`."""
    tensors = make_tensors(kind, count, distinct=distinct)
    return [(t, LocalSource(f"x{i}"), context_of(t, own=own)) for i, t in enumerate(tensors)]


def _theirs(inputs: Sequence[tuple[Any, ...]]) -> Callable[[], float]:
    def run() -> float:
        mode = FakeTensorMode(shape_env=ShapeEnv())

        def work(item: Any) -> Any:
            t, source, context = item
            return mode.from_tensor(t, source=source, symbolic_context=context)

        clear_cache()
        return timed(work, inputs)

    return run


def ours(inputs: Sequence[tuple[Any, ...]]) -> Callable[[], float]:
    """What rebuilds them of their records in a fresh environment, and gives the time it took."""
    describer = MetaTensorDescriber()
    records = [
        describer.describe_tensor(t, source=source, symbolic_context=context)
        for t, source, context in inputs
    ]

    def run() -> float:
        mode = FakeTensorMode(shape_env=ShapeEnv())
        clear_cache()
        return timed(MetaConverter(mode).from_desc, records)

    return run


def rows(rounds: int, counts: Sequence[int] = COUNTS) -> Iterator[Row]:
    """Every line of the table."""
    sized = ((False, "equal"), (True, "distinct"))
    for distinct, sizes in sized:
        for kind in KINDS:
            yield growth(
                f"rebuild {kind}, {sizes} dynamic sizes",
                lambda count, kind=kind, distinct=distinct: ours(
                    inputs_of(kind, count, distinct=distinct)
                ),
                min(rounds, 3),
            )
    for distinct, sizes in sized:
        for kind in KINDS:
            for count in counts:
                inputs = inputs_of(kind, count, distinct=distinct)
                yield bench(
                    f"rebuild {kind}, {sizes} dynamic sizes",
                    _theirs(inputs),
                    ours(inputs),
                    # Torch takes half a minute for 10,000 tensors.
                    rounds=rounds if count < COUNTS[-1] else 1,
                    warm=count < COUNTS[-1],
                    count=count,
                    budget=BUDGETS[distinct],
                )
    for kind in KINDS:
        inputs = inputs_of(kind, COUNTS[1], distinct=False, own=True)
        what = f"rebuild {kind}, equal sizes with symbols of their own"
        yield bench(
            what,
            _theirs(inputs),
            ours(inputs),
            rounds=rounds,
            count=COUNTS[1],
            budget=BUDGETS[True],
        )


if __name__ == "__main__":
    main(__doc__, rows, counts=True)
