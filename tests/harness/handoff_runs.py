"""Backends that read sizes of their inputs, and so assume facts, with and without a handoff."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from observe import Run, backend_of
from torch.utils import _pytree as pytree

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Callable


class Asking:
    """A backend that calls a function with its inputs, and then lets another one compile.

    Args:
        asks: gets the tensors among the inputs.
        inner: compiles.
    """

    def __init__(self, asks: Callable[..., Any], inner: Any = "eager") -> None:
        self.asks = asks
        self.inner = backend_of(inner)

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """Ask and compile."""
        self.asks(*(x for x in inputs if isinstance(x, torch.Tensor)))
        return self.inner(gm, inputs)


class Faked:
    """Gives a backend Dynamo's own fakes of the inputs, as AOTAutograd would make them.

    A handoff does so too: without one, a backend that reads sizes needs it.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """Compile."""
        fakes = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
        return self.inner(gm, fakes)


def one(x: torch.Tensor) -> torch.Tensor:
    """Adds one."""
    return x + 1


def each(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Adds one to each."""
    return [x + 1 for x in tensors]


def symbol(x: torch.Tensor, dim: int = 0) -> Any:
    """The expression of a size."""
    n: Any = x.size(dim)
    return n.node.expr


def tensors(*sizes: int) -> list[torch.Tensor]:
    """Vectors of such sizes, which are one symbol each."""
    made = [torch.zeros(n) for n in sizes]
    for x in made:
        torch._dynamo.maybe_mark_dynamic(x, 0)
    return made


def both_ways(fn: Any, asks: Any, *calls: list[Any], **options: Any) -> list[Run]:
    """A backend that asks, without a handoff and with it, called several times."""
    runs: list[Run] = []
    for way in (Faked, tfk.handoff):
        run = Run.of(fn, way(Asking(asks)), **options)
        for args in calls:
            run(*args)
        runs.append(run)
    return runs


def same(ours: Any, theirs: Any) -> None:
    """Fails if results differ in one bit."""
    for a, b in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
        if isinstance(a, np.ndarray):
            assert np.array_equal(a, b)
        elif not isinstance(a, torch.Tensor):
            assert a == b
        elif a.is_nested:
            assert torch.equal(a.values(), b.values())
        elif a.dtype.itemsize == 1 and a.dtype.is_floating_point:
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        else:
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
