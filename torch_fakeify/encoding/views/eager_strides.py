"""View operators on fake tensors with the strides of real tensors.

Strides of dims of size 0 or 1 are arbitrary, and torch 2.13's fake ``view``
(``torch._refs._reshape_view_helper``) chooses others than ``computeStride`` in ATen: an expanded or
permuted tensor without elements becomes contiguous, and some strides stay unchanged that the real
operator computes. A wrapper subclass runs ``view`` on its inner tensors, whose fakes would differ from
the real ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torch_fakeify.compat import torch_dispatch, torch_fakes, torch_symbols

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    _Exchange = Callable[[Any], Any]

_aten: Any = torch.ops.aten


class EagerViews(torch_dispatch.TorchDispatchMode):
    """Dispatch mode in which view operators on fake tensors return the strides of real tensors."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Let a subclass handle the operator first, so that operators on its inner tensors come here."""
        if any(not issubclass(cls, torch_fakes.FakeTensor) for cls in types):
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        if func is _aten._reshape_alias.default:
            return _with_strides(made, args[0], args[2])
        if func is _aten.view.default:
            return _viewed(made, args[0])
        return made


def _viewed(made: Any, base: Any) -> Any:
    """The result of ``view`` with ATen's strides, from the result of torch's fake operator."""
    size, stride, new_size = (_hints(of) for of in (base.size(), base.stride(), made.size()))
    if None in (*size, *stride, *new_size):
        return made  # computing strides would guard on unbacked symbols
    strides = torch_fakes.compute_stride(size, stride, new_size)
    if strides is None or not hints_differ(made.stride(), strides):
        return made
    return _with_strides(
        made, base, torch_fakes.compute_stride(base.size(), base.stride(), made.size())
    )


def _with_strides(made: Any, base: Any, strides: Any) -> Any:
    if not hints_differ(made.stride(), strides):
        return made
    return _aten.as_strided.default(base, made.size(), strides, base.storage_offset())


def view_with_eager_strides(
    view: Callable[[_Exchange, _Exchange], Any],
    symint: _Exchange,
    tensor: _Exchange,
    stride: Sequence[Any],
) -> Any:
    """Make a view of a fake tensor with recorded strides, by fake operators or with eager strides.

    Args:
        view: makes the view, from functions that replace numbers and tensors.
        symint: replaces numbers; called once for each, also if the view is made twice.
        tensor: replaces tensors.
        stride: the recorded strides.
    """
    replaced: list[Any] = []

    def noting(make: _Exchange) -> _Exchange:
        def replacement(value: Any) -> Any:
            replaced.append(make(value))
            return replaced[-1]

        return replacement

    made = view(noting(symint), noting(tensor))
    if not hints_differ(made.stride(), stride):
        return made
    again = iter(replaced)  # the same calls ask for them in the same order
    with EagerViews():
        return view(lambda _: next(again), lambda _: next(again))


def hints_differ(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Whether numbers differ, by their hints and without a guard."""
    if len(found) != len(expected):
        return True
    pairs = zip(_hints(found), _hints(expected), strict=True)
    return any(a != b for a, b in pairs if a is not None and b is not None)


def identity_view(base: Any) -> Any:
    """An alias of a fake tensor, with its strides."""
    made = base.view(base.shape)
    if preserves_strides(base) and not hints_differ(made.stride(), base.stride()):
        return made
    return _aten.alias.default(base)


def preserves_strides(t: torch.Tensor) -> bool:
    """Whether ``t.view(t.size())`` has the strides of ``t`` on a real tensor."""
    sizes, steps = _hints(t.size()), _hints(t.stride())
    if None in sizes or None in steps:
        return True  # unbacked strides cannot be compared
    strides = torch_fakes.compute_stride(sizes, steps, sizes)
    return strides is not None and not hints_differ(strides, t.stride())


def _hints(numbers: Sequence[Any]) -> list[Any]:
    """Hints of numbers; ``None`` for unbacked symbols and nested ints."""
    return [n if type(n) is int else _hint(n) for n in numbers]


def _hint(n: Any) -> int | None:
    sym_node = n.node
    hint = sym_node.hint if isinstance(sym_node, torch_symbols.SymNode) else None
    return hint if type(hint) is int else None
