"""The record of a program, and the decorator that makes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAMS: dict[str, Program] = {}
"""The programs by name."""


class Program(NamedTuple):
    """A function whose sizes come from data."""

    name: str
    kind: str
    """The last part of its module's name."""
    function: Callable[..., Any]
    inputs: Callable[[], list[tuple[Any, ...]]]
    """Makes arguments with which it runs."""
    wrong: Callable[[], tuple[Any, ...]] | None
    """Makes arguments that it refuses, in Python and compiled; ``None`` if it takes all."""


def program(
    inputs: Callable[[], list[tuple[Any, ...]]], wrong: Callable[[], tuple[Any, ...]] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a function as a program."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        kind = function.__module__.rpartition(".")[2]
        made = Program(function.__name__, kind, function, inputs, wrong)
        assert made.name not in PROGRAMS
        PROGRAMS[made.name] = made
        return function

    return register


def checked(n: torch.Tensor, *, least: int = 0, most: Any = None) -> Any:
    """Return a number from data that is checked to be between two others."""
    number = n.item()
    torch._check(number >= least)
    if most is not None:
        torch._check(number <= most)
    return number


def in_order(n: torch.Tensor, most: Any) -> Any:
    """Return numbers from data that are checked to rise from 0 to another number."""
    numbers = n.tolist()
    for low, high in zip([0, *numbers], [*numbers, most], strict=True):
        torch._check(low <= high)
    return numbers


def ints(*values: int) -> torch.Tensor:
    """Return a tensor of integers."""
    return torch.tensor(values, dtype=torch.int64)


def rows(count: int, width: int = 4) -> torch.Tensor:
    """Return a matrix of distinct numbers."""
    return torch.arange(count * width, dtype=torch.float32).reshape(count, width)
