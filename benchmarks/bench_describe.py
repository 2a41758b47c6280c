"""Real tensors to records, per tensor: torch's describer beside ours.

Run: ``python -m benchmarks.bench_describe [--rounds N] [--counts N...]``.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from torch._subclasses.meta_utils import MetaTensorDescriber as TorchDescriber

from torch_fakeify.describe.describer import MetaTensorDescriber

from .run import main
from .table import Row, at_least, timed
from .tensors import COUNTS, KINDS, bench, growth, growth_alone, make_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

BUDGET = at_least(5)


def describe(
    tensors: list[torch.Tensor], describer: Callable[[], Any] = MetaTensorDescriber
) -> Callable[[], float]:
    """By a new describer each time."""
    return lambda: timed(describer().describe_tensor, tensors)


def read(t: torch.Tensor) -> Any:
    """What a record is made of, without one: among many tensors each is out of the processor's cache."""
    base: Any = t._base
    storage = t.untyped_storage()
    return (
        weakref.ref(t),
        weakref.ref(storage),
        (t.shape, t.stride(), t.storage_offset(), storage.nbytes(), t.dtype, t.device),
        (t.requires_grad, t.is_leaf, t.grad, t.grad_dtype, t.__dict__),
        base if base is None else read(base),
    )


def rows(rounds: int, counts: Sequence[int] = COUNTS) -> Iterator[Row]:
    """Every line of the table."""
    for kind in KINDS:
        yield growth(
            f"describe {kind}", lambda count, kind=kind: describe(make_tensors(kind, count)), rounds
        )
        yield growth_alone(
            f"{kind}, calls of torch alone",
            lambda count, kind=kind: functools.partial(timed, read, make_tensors(kind, count)),
            rounds,
        )
    for kind in KINDS:
        for count in counts:
            tensors = make_tensors(kind, count)
            theirs, ours = describe(tensors, TorchDescriber), describe(tensors)
            budget = BUDGET
            yield bench(f"describe {kind}", theirs, ours, rounds=rounds, count=count, budget=budget)


if __name__ == "__main__":
    main(__doc__, rows, counts=True)
