"""Custom operators without a fake kernel, each with the right one written by hand."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

OPERATORS: dict[str, "ZooOperator"] = {}


@dataclass
class ZooOperator:
    """A custom operator, calls of it, and its right fake kernel."""

    name: str
    op: Any
    samples: Callable[[], Sequence[Any]]
    """Makes calls, each a tuple of arguments."""
    others: Callable[[], Sequence[Any]]
    """Makes calls at other sizes, to hold a kernel against."""
    true_fake: Callable[..., Any]
    depends_on_data: bool = False

    @contextmanager
    def with_true_fake(self) -> Generator[None]:
        """Register the right fake kernel inside of the block."""
        self.op.register_fake(self.true_fake)
        try:
            yield
        finally:
            self.op._abstract_fn = None


def operator(
    samples: Callable[[], Sequence[Any]],
    others: Callable[[], Sequence[Any]],
    fake: Callable[..., Any],
    *,
    mutates: Sequence[str] = (),
    depends_on_data: bool = False,
) -> Callable[[Any], Any]:
    """Register a function as an operator of the namespace ``zoo_ops``, without its fake kernel."""

    def register(function: Any) -> Any:
        name = function.__name__
        op = torch.library.custom_op(f"zoo_ops::{name}", function, mutates_args=tuple(mutates))
        OPERATORS[name] = ZooOperator(name, op, samples, others, fake, depends_on_data)
        return OPERATORS[name]

    return register


def randn(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a random tensor, the same one for equal sizes."""
    generator = torch.Generator().manual_seed(len(size) * 1000 + sum(size))
    return torch.randn(size, generator=generator).to(dtype)


def integers(high: int, *size: int) -> torch.Tensor:
    """Return random integers from 0 up to ``high``, which is not among them."""
    return torch.randint(high, size, generator=torch.Generator().manual_seed(high + sum(size)))
