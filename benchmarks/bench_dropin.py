"""``FakeTensorMode.from_tensor`` with torch's converter and with the drop-in's, per tensor.

Run: ``python -m benchmarks.bench_dropin [--rounds N] [--counts N...]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_fakeify import dropin

from .run import main
from .table import Row, timed
from .tensors import KINDS, bench, context_of, make_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SIZES = ("static", "equal dynamic sizes", "distinct dynamic sizes")


def line(kind: str, sizes: str, count: int, rounds: int) -> Row:
    """One call for each tensor, in a new mode; a mode uses the converter it was made with."""
    static = sizes == "static"
    tensors = make_tensors(kind, count, distinct="distinct" in sizes)
    inputs = [
        (t, LocalSource(f"x{i}"), None if static else context_of(t)) for i, t in enumerate(tensors)
    ]

    def theirs() -> float:
        mode = FakeTensorMode(shape_env=None if static else ShapeEnv())

        def work(item: Any) -> Any:
            t, source, context = item
            return mode.from_tensor(t, source=source, symbolic_context=context)

        return timed(work, inputs)

    def ours() -> float:
        with dropin.installed():
            return theirs()

    what = f"drop-in: {kind}, {sizes}"
    return bench(what, theirs, ours, rounds=rounds, count=count)


def rows(rounds: int, counts: Sequence[int] = (1000,)) -> Iterator[Row]:
    """Every line of the table."""
    for count in counts:
        for sizes in SIZES:
            for kind in KINDS:
                yield line(kind, sizes, count, rounds)


if __name__ == "__main__":
    main(__doc__, rows, counts=True)
