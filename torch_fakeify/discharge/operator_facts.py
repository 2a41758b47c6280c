"""Facts that operators guarantee about the sizes of their results, where torch does not state them.

Such a fact holds for every input on which the operator succeeds, so nothing checks it when the graph
runs. What an operator requires of its inputs is not one: that an operator which is not needed raises
an error must not decide a branch.
"""

from __future__ import annotations

import weakref
from math import prod
from typing import TYPE_CHECKING, Any

import sympy
import torch

from torch_fakeify.compat.torch_symbols import sympy_functions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_stated: weakref.WeakKeyDictionary[Any, dict[sympy.Basic, None]] = weakref.WeakKeyDictionary()
"""The operator facts of each environment; one that its ``axioms`` lack was rolled back."""


def state_operator_fact(env: Any, expr: Any) -> None:
    """State a condition that always holds: torch looks it up among its axioms, and no check is added.

    A rollback of the environment removes it, as it is in a table of the environment.
    """
    if expr in (sympy.true, sympy.false):
        return
    env.axioms.update(dict(env.get_implications(expr)))
    env.axioms[expr] = sympy.true
    _stated.setdefault(env, {})[expr] = None


def operator_facts(env: Any) -> Iterator[sympy.Basic]:
    """Yield the conditions that operators guarantee in an environment."""
    for expr in tuple(_stated.get(env, ())):
        if env.axioms.get(expr) == sympy.true:
            yield expr
        else:
            del _stated[env][expr]


def state_facts_of(env: Any, operator: Any, args: Sequence[Any], result: Any) -> None:
    """State the facts that an operator guarantees about its result; keywords have no influence on them."""
    for fact in SIZE_FACTS[operator](args, result):
        state_operator_fact(env, fact)


# --- the operators --------------------------------------------------------------------------------


def size_expr(size: Any) -> Any:
    """Return a size as an expression."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def element_count(tensor: torch.Tensor) -> Any:
    """Return the number of elements as an expression."""
    return prod(map(size_expr, tensor.shape), start=sympy.Integer(1))


def _nonzero(args: Sequence[Any], result: torch.Tensor) -> Iterator[Any]:
    yield sympy.Le(size_expr(result.shape[0]), element_count(args[0]))


def _masked_select(args: Sequence[Any], result: torch.Tensor) -> Iterator[Any]:
    tensor, mask = args[:2]
    shapes = [[size_expr(size) for size in t.shape] for t in (tensor, mask)]
    if shapes[0] == shapes[1] or mask.dim() == 0:
        yield sympy.Le(size_expr(result.shape[0]), element_count(tensor))
    elif shapes[1][-len(shapes[0]) :] == shapes[0] or tensor.dim() == 0:
        yield sympy.Le(size_expr(result.shape[0]), element_count(mask))
    elif shapes[0][-len(shapes[1]) :] == shapes[1]:
        yield sympy.Le(size_expr(result.shape[0]), element_count(tensor))


def _distinct(found: Any, count: Any) -> Iterator[Any]:
    """No more than there are, and at least one if there are any."""
    yield sympy.Le(found, count)
    yield sympy.Ge(found, sympy_functions.Min(1, count))


def _unique(args: Sequence[Any], result: Any) -> Iterator[Any]:
    yield from _distinct(size_expr(result[0].shape[0]), element_count(args[0]))


def _unique_dim(args: Sequence[Any], result: Any) -> Iterator[Any]:
    tensor, dim = args[:2]
    yield from _distinct(size_expr(result[0].shape[dim]), size_expr(tensor.shape[dim]))


def _unique_consecutive(args: Sequence[Any], result: Any) -> Iterator[Any]:
    dim = args[3] if len(args) > 3 else None
    if dim is None:
        yield from _unique(args, result)
    else:
        yield from _unique_dim((args[0], dim), result)


_aten = torch.ops.aten

SIZE_FACTS: dict[Any, Callable[[Sequence[Any], Any], Iterator[Any]]] = {
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: _masked_select,
    _aten._unique.default: _unique,
    _aten._unique2.default: _unique,
    _aten.unique_dim.default: _unique_dim,
    _aten.unique_consecutive.default: _unique_consecutive,
}
"""By operator the facts about the sizes of its result; ``index`` with a mask calls ``nonzero``.

Torch itself states those of ``bincount``, ``repeat_interleave``, ``split`` and ``topk``.
"""
