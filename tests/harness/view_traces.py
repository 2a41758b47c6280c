"""Helpers of the tests of view calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from view_zoo import (
    Traced,
    metadata,
    visited_by_torch,
    visited_by_us,
)

from torch_fakeify.encoding.views.trace import trace_view_calls

if TYPE_CHECKING:
    from torch_fakeify.records.tensor import (
        ViewCallDesc,
    )


def trace(t: Any) -> tuple[ViewCallDesc, ...]:
    """The calls of a view whose operators were given no tensors and no symbols."""

    def none(_: object) -> Any:
        raise AssertionError

    return trace_view_calls(t, part=none, ints=none, where="t")


def check(t: Any) -> None:
    """The replay visits what torch's view function visits, in its order, and gives the same."""
    traced = Traced(t)
    expected_ints, expected_tensors, expected = visited_by_torch(t)
    ints, tensors, result = visited_by_us(traced)
    # Nested ints are compared by text: torch wraps each into a new object.
    assert list(map(str, ints)) == list(map(str, expected_ints))
    assert [id(part) for part in tensors] == [id(part) for part in expected_tensors]
    assert metadata(result) == metadata(expected) == metadata(t)


class Reshape(torch.autograd.Function):
    """A view made in an autograd function."""

    @staticmethod
    def forward(_: Any, x: Any) -> Any:
        """Flattens."""
        return x.view(-1)

    @staticmethod
    def backward(_: Any, g: Any) -> Any:
        """Shapes back."""
        return g.view(4, 6)
