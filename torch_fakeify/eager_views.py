"""View operators on fake tensors with the strides that real tensors get.

Where a dim has one element or none, strides are a matter of taste, and torch 2.13's fake ``view``
(``torch._refs._reshape_view_helper``) has another one than ``computeStride`` in ATen: of an expanded
or permuted tensor without elements it makes a contiguous one, and it leaves a stride alone that the
real operator computes. Inside a wrapper subclass that runs ``view`` on its inner tensors, so no fake
of theirs would be like the real one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from . import _torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    _Exchange = Callable[[Any], Any]

__all__ = ["EagerViews", "as_it_is", "differ", "keeps_strides", "view_alike"]

_aten: Any = torch.ops.aten


class EagerViews(_torch.TorchDispatchMode):
    """Inside, a view operator on a fake tensor gives the strides that it gives on a real one."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Lets a subclass go first, so that operators on its inner tensors come here."""
        if any(not issubclass(cls, _torch.FakeTensor) for cls in types):
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        if func is _aten._reshape_alias.default:
            return _with_strides(made, args[0], args[2])
        if func is _aten.view.default:
            return _viewed(made, args[0])
        return made


def _viewed(made: Any, base: Any) -> Any:
    """What ``view`` has to give where fake tensors get ``made``."""
    size, stride, new_size = (_hints(of) for of in (base.size(), base.stride(), made.size()))
    if None in (*size, *stride, *new_size):
        return made  # torch's own way alone asks no question of unbacked symbols
    strides = _torch.compute_stride(size, stride, new_size)
    if strides is None or not differ(made.stride(), strides):
        return made
    return _with_strides(made, base, _torch.compute_stride(base.size(), base.stride(), made.size()))


def _with_strides(made: Any, base: Any, strides: Any) -> Any:
    if not differ(made.stride(), strides):
        return made
    return _aten.as_strided.default(base, made.size(), strides, base.storage_offset())


def view_alike(
    view: Callable[[_Exchange, _Exchange], Any],
    symint: _Exchange,
    tensor: _Exchange,
    stride: Sequence[Any],
) -> Any:
    """A view of a fake tensor: as torch's fake operators make it, or else as the real ones do.

    Args:
        view: makes it, of what takes the place of each number and each tensor.
        symint: the one; called once for each number, also where the view is made twice.
        tensor: the other.
        stride: which strides it is to have.
    """
    given = _Given()
    made = view(given.by(symint), given.by(tensor))
    if not differ(made.stride(), stride):
        return made
    given.rewind()
    with EagerViews():
        return view(given.by(symint), given.by(tensor))


class _Given:
    """What view operators were given in the place of numbers and tensors, to give it once more."""

    def __init__(self) -> None:
        self._all: list[Any] = []
        self._again: Iterator[Any] = iter(())

    def rewind(self) -> None:
        """The next time everything is given in the same order."""
        self._again = iter(self._all)

    def by(self, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Gives what ``make`` gives, and what it gave once ``rewind`` was called."""

        def give(value: Any) -> Any:
            for known in self._again:
                return known
            made = make(value)
            self._all.append(made)
            return made

        return give


def differ(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Whether numbers are known to be others, by their hints; asking makes no guard."""
    if len(found) != len(expected):
        return True
    pairs = zip(_hints(found), _hints(expected), strict=True)
    return any(a != b for a, b in pairs if a is not None and b is not None)


def as_it_is(base: Any) -> Any:
    """A view of the whole of a fake tensor, with its strides."""
    made = base.view(base.shape)
    if keeps_strides(base) and not differ(made.stride(), base.stride()):
        return made
    return _aten.alias.default(base)


def keeps_strides(t: torch.Tensor) -> bool:
    """Whether a view of a real tensor in its own sizes has its strides too."""
    sizes, steps = _hints(t.size()), _hints(t.stride())
    if None in sizes or None in steps:
        return True  # as far as anybody knows
    strides = _torch.compute_stride(sizes, steps, sizes)
    return strides is not None and not differ(strides, t.stride())


def _hints(numbers: Sequence[Any]) -> list[Any]:
    """The numbers behind symbols; ``None`` for those of unbacked symbols and for nested ints."""
    return [n if type(n) is int else _hint(n) for n in numbers]


def _hint(n: Any) -> int | None:
    sym_node = n.node
    hint = sym_node.hint if isinstance(sym_node, _torch.SymNode) else None
    return hint if type(hint) is int else None
