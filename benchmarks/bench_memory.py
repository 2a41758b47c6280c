"""Memory of describing and rebuilding 50,000 parameters, in processes of their own.

Run: ``python -m benchmarks.bench_memory [--rounds N]``. The parameters are those of a
mixture of experts with 671 billion of them: 61 layers of 256 experts with three matrices each, a
router, attention and norms, on the meta device, so that they have no bytes themselves. Figures are
the growth of the resident memory from the parameters to all their fakes: torch's ``from_tensor`` with
its memo, against our records and fakes, all alive. The budget is 2 KB a tensor beyond torch's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_fakeify.convert.converter import MetaConverter
from torch_fakeify.describe.describer import MetaTensorDescriber

from .memory import high_water, measured
from .run import main
from .table import Figure, Row, at_most

if TYPE_CHECKING:
    from collections.abc import Iterator

LAYERS, EXPERTS = 61, 256
WIDTH, INNER, LATENT = 7168, 2048, 512
BEYOND = 2048
"""Bytes a tensor."""


def parameters() -> list[torch.nn.Parameter]:
    """About 48,000 parameters."""
    sizes: list[tuple[int, ...]] = []
    for _ in range(LAYERS):
        sizes += [(INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER)] * (EXPERTS + 1)
        sizes += [(EXPERTS, WIDTH), (EXPERTS,), (WIDTH,), (WIDTH,), (LATENT,), (LATENT,)]
        sizes += [(LATENT, WIDTH), (128 * 192, LATENT), (LATENT, WIDTH), (WIDTH, 128 * 128)]
    sizes += [(129280, WIDTH)] * (50_000 - len(sizes))
    return [torch.nn.Parameter(torch.empty(size, device="meta")) for size in sizes]


def measure(side: str) -> None:
    """Print how many bytes this process grew by, and how many tensors there were."""
    tensors = parameters()
    alive: list[Any] = []
    mode = FakeTensorMode()
    before = high_water()
    if side == "torch":
        alive += [mode.from_tensor(t) for t in tensors]
    else:
        describer, converter = MetaTensorDescriber(), MetaConverter(mode)
        alive += [describer.describe_tensor(t) for t in tensors]
        alive += [converter.from_desc(d) for d in list(alive)]
    print(high_water() - before, len(tensors))


def rows(rounds: int) -> Iterator[Row]:
    """The peak of both, and what ours has beyond torch's, a tensor."""
    sides: dict[str, list[int]] = {"torch": [], "ours": []}
    count = 0
    for _ in range(min(rounds, 3)):
        for side, values in sides.items():
            grown, count = measured("bench_memory", side)
            values.append(grown)
    mega = [Figure(tuple(n / 2**20 for n in values)) for values in sides.values()]
    yield Row(f"{count} parameters, described and rebuilt: peak", "MB", *mega)
    beyond = Figure(
        tuple((b - a) / count for a, b in zip(sides["torch"], sides["ours"], strict=True))
    )
    allowed = Figure((float(BEYOND),) * len(beyond.values))
    yield Row("bytes a tensor: allowed, beyond torch's", "B", allowed, beyond, at_most(1))


if __name__ == "__main__":
    main(__doc__, rows, child=measure)
