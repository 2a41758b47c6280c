"""Examples for the handoff and for captures: a wrapper subclass beside numbers that get symbols.

Dynamo passes a Python float to a graph as a 0-dim tensor, of which the graph takes ``item()``; so
each use of a number here is compiled beside each wrapper, called with three numbers and sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import subclass_zoo
import torch
from subclass_zoo import one_process
from torch.nn import functional as F

Make = Callable[[int], Any]

SIZES = (2, 5, 3)
NUMBERS = (0.31, 0.47, 0.31)

# --- wrappers, of n rows of four ------------------------------------------------------------------


def two(n: int) -> Any:
    """Two plain tensors."""
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(torch.randn(n, 4), torch.randn(n, 4))


def two_of_views(n: int) -> Any:
    """Its inner tensors are views of larger ones."""
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(torch.randn(n + 2, 4)[2:], torch.randn(n + 2, 4)[2:])


def two_of_two(n: int) -> Any:
    """A wrapper of wrappers."""
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(two(n), two(n))


def two_of_numbers(n: int) -> Any:
    """A wrapper of 0-dim tensors of float64, which torch tracks the items of."""
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(torch.tensor(n / 4.0).double(), torch.tensor(n / 3.0).double())


def marked(n: int) -> Any:
    """A dim that the user has marked dynamic."""
    w = two(n)
    torch._dynamo.mark_dynamic(w, 0)
    return w


def with_a_grad(n: int) -> Any:
    """A leaf that has a gradient already."""
    w = two(n).requires_grad_()
    w.grad = two(n)
    return w


def jagged(n: int) -> Any:
    """A jagged tensor, which is a view of its values."""
    offsets = torch.tensor([0, *range(2, 2 * n, 2)])
    return torch.nested.nested_tensor_from_jagged(torch.randn(2 * n - 2, 4), offsets)


def jagged_leaf(n: int) -> Any:
    """A jagged tensor made of a list, which requires a gradient."""
    rows = [torch.randn(i + 1, 4) for i in range(n)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)


def dtensor(n: int) -> Any:
    """A distributed tensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(torch.randn(n, 4), init_device_mesh("cpu", (1,)), [Shard(0)])


def int8(n: int) -> Any:
    """A quantized weight of torchao."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layer = torch.nn.Linear(4, n)
    quantize_(layer, Int8WeightOnlyConfig())
    return layer.weight


_NOT_HERE = ("AsyncCollectiveTensor", "SparseSemiStructuredTensorCUSPARSELT")
"""Of the zoo: what waits for another process, and what this machine cannot compute with."""


WRAPPERS: dict[str, Make] = {
    "two": two,
    "two_of_views": two_of_views,
    "two_of_two": two_of_two,
    "two_of_numbers": two_of_numbers,
    "transposed": lambda n: two(n).t(),
    "leaf": lambda n: two(n).requires_grad_(),
    "non_leaf": lambda n: two(n).requires_grad_() * 2,
    "parameter": lambda n: torch.nn.Parameter(two(n)),
    "with_a_grad": with_a_grad,
    "marked": marked,
    "jagged": jagged,
    "jagged_leaf": jagged_leaf,
    "dtensor": dtensor,
    "int8": int8,
    **{
        name: lambda _, make=make: make()  # type: ignore[misc]
        for name, make in subclass_zoo.PLAIN.items()
        if name not in _NOT_HERE
    },
}

# --- uses of a number -----------------------------------------------------------------------------


def rest(w: Any, q: torch.Tensor) -> Any:
    """What else the frame computes, with the wrapper in it."""
    return F.linear(q, w) if type(w).__name__ == "Int8Tensor" else w.detach()


USES: dict[str, Callable[[Any, torch.Tensor, float], Any]] = {
    "scale": lambda w, q, s: (F.scaled_dot_product_attention(q * 1, q, q, scale=s), rest(w, q)),
    "product": lambda w, q, s: (q * s, rest(w, q)),
    "of_the_wrapper": lambda w, q, s: (w * s, q + 1),
    "power": lambda w, q, s: (q.abs() ** s, rest(w, q)),
    "dropout": lambda w, q, s: (F.dropout(q, p=s), rest(w, q)),
    "filled": lambda w, q, s: (torch.full((3,), s), rest(w, q), q + 1),
    "compared": lambda w, q, s: (q * 2 if s > 0.4 else q * 3, rest(w, q)),
    "rounded": lambda w, q, s: (q * math.floor(s * 10), rest(w, q)),
    "returned": lambda w, q, s: (s * 2, q * s, rest(w, q)),
}

IMPOSSIBLE = frozenset(
    {("int8", "of_the_wrapper"), ("SparseSemiStructuredTensorCUTLASS", "of_the_wrapper")}
)
"""What torch itself cannot compile: the class has no such operator."""

PLAIN = frozenset({
    ("two", "scale"), ("two_of_two", "product"), ("transposed", "scale"), ("jagged", "scale"),
    ("dtensor", "filled"), ("two", "compared"), ("jagged_leaf", "returned"), ("two", "power"),
})  # fmt: skip
"""Those that plain pytest compiles; the sweep has all."""


def around(wrapper: str) -> AbstractContextManager[Any]:
    """What torch is in while a wrapper is made and used."""
    return one_process() if wrapper == "dtensor" else nullcontext()


def calls(wrapper: str) -> list[tuple[Any, torch.Tensor, float]]:
    """The arguments of three calls."""
    make = WRAPPERS[wrapper]
    return [(make(n), torch.randn(1, 2, n, 4), s) for n, s in zip(SIZES, NUMBERS, strict=True)]


_SWEPT = ("compared",)


def cases() -> list[Any]:
    """Wrappers, uses, and ``dynamic``; those beyond one use of each wrapper have no room in every sweep."""
    found: list[Any] = []
    for case in ((w, u) for w in WRAPPERS for u in USES if (w, u) not in IMPOSSIBLE):
        for dynamic in (True, None):
            marks = [] if case in PLAIN and dynamic else [pytest.mark.sweep]
            if case not in PLAIN and not (dynamic and case[1] in _SWEPT):
                marks.append(pytest.mark.long)
            found.append(pytest.param(*case, dynamic, marks=marks))
    return found
