"""Meta tensors of symbolic sizes, without computing each time what is known of their layout.

``torch.empty_strided`` runs a dozen symbolic operators to find a storage's size and to check that the
sizes are not negative. Tensors of one layout have one answer, and of sizes that are plain symbols the
checks are known to hold.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import sympy
import torch

from ._torch import (
    DispatchKey,
    DispatchKeySet,
    ShapeEnv,
    SymNode,
    dispatch_modes_active,
    empty_strided,
    key_excluded,
    key_included,
    make_subclass,
    make_wrapper_subclass,
    set_key_excluded,
    without_keys,
)
from .fakes import META
from .fresh_sizes import symbols_are_watched
from .size_exprs import storage_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .fresh_sizes import FreshGeometry

__all__ = ["ABOVE_META", "Layouts", "Shell", "Stock", "aliases_of", "holder_of", "is_alone"]
__all__ += ["meta_of", "on_own_storages", "set_storage"]

_T = TypeVar("_T")
_SymInt = torch.SymInt

# Below them nothing of autograd, of a dispatch mode or of a Python dispatcher sees an operator.
ABOVE_META = (
    DispatchKeySet(DispatchKey.AutogradFunctionality)
    | DispatchKeySet(DispatchKey.ADInplaceOrView)
    | DispatchKeySet(DispatchKey.Python)
    | DispatchKeySet(DispatchKey.PythonTLSSnapshot)
    | DispatchKeySet(DispatchKey.PythonDispatcher)
)
_VIEWS, _PYTHON_DISPATCHER = DispatchKey.ADInplaceOrView, DispatchKey.PythonDispatcher


class Shell(torch.Tensor):
    """What torch makes of given sizes, strides and storage size; an alias of it is used."""

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        raise NotImplementedError(f"{func} on a shell")


def meta_of(
    size: Sequence[Any],
    stride: Sequence[Any],
    dtype: torch.dtype,
    nbytes: Any,
    *,
    storage_offset: Any = 0,
) -> torch.Tensor:
    """A meta tensor of these sizes and strides on a storage of that many bytes; nothing is asked.

    Called where nothing dispatches.
    """
    shell = make_wrapper_subclass(
        Shell,
        size,
        strides=stride,
        storage_offset=storage_offset,
        dtype=dtype,
        layout=torch.strided,
        device=META,
        requires_grad=False,
        storage_size=nbytes,
    )
    return make_subclass(torch.Tensor, shell)


def is_alone() -> bool:
    """Whether neither a dispatch mode nor a Python dispatcher sees an operator."""
    return not (dispatch_modes_active() or key_included(_PYTHON_DISPATCHER))


def aliases_of(shape: torch.Tensor, count: int, *, quiet: bool = False) -> list[torch.Tensor]:
    """Meta tensors of that shape; ``quiet`` if it was just seen that nothing else sees the operator."""
    if not (quiet or (is_alone() and not key_excluded(_VIEWS))):
        guard = without_keys(ABOVE_META)
        try:
            # Below autograd these are no views: their version counters are their own.
            return [shape[...] for _ in range(count)]
        finally:
            del guard
    # Where nothing else sees the operator, without the guard: to make one takes as long as the alias.
    set_key_excluded(_VIEWS, True)
    try:
        return [shape[...] for _ in range(count)]
    finally:
        set_key_excluded(_VIEWS, False)


# By place: arguments by name are looked up one by one.
_UP_TO_STORAGE_SIZE = (
    *(Shell, (0,), None, None, None, torch.uint8, torch.strided, META),
    *(False, False, None, False, False, None),
)
holder_of = functools.partial(make_wrapper_subclass, *_UP_TO_STORAGE_SIZE)
"""A tensor on a storage of that many bytes."""

_torch_functions: Any = torch
set_storage = _torch_functions._functionalize_unsafe_set
"""Gives a tensor the storage of another one, and changes nothing else."""

_MOST = 24
"""How many meta tensors are made before they are asked for: more of them save no more time."""


class Stock(Generic[_T]):
    """Meta tensors of one shape, each of which is given once.

    Those that are asked for again and again are made some at a time: for the processor, which has the
    code at hand then, each takes half as long.

    Args:
        make: makes as many as it is told, ``quiet`` as for `aliases_of`.
    """

    __slots__ = ("_made", "_make", "_ready")

    def __init__(self, make: Callable[[int, bool], list[_T]]) -> None:
        self._make = make
        self._ready: list[_T] = []
        self._made = 0

    def take(self, *, quiet: bool = False) -> _T:
        """One of them."""
        try:
            return self._ready.pop()
        except IndexError:
            pass
        # No more in stock than were taken.
        count = 1 + min(_MOST, self._made)
        self._made += count
        made = self._make(count, quiet)
        last = made.pop()
        self._ready += made
        return last


def on_own_storages(
    shape: torch.Tensor, nbytes: Any, count: int, quiet: bool
) -> list[torch.Tensor]:
    """Meta tensors of a shape, each on a storage of that many bytes."""
    made = aliases_of(shape, count, quiet=quiet)
    for meta, holder in zip(made, [holder_of(nbytes) for _ in made], strict=True):
        set_storage(meta, holder)
    return made


class Layouts:
    """Makes meta tensors on storages of their own, as ``torch.empty_strided`` does."""

    def __init__(self, shape_env: ShapeEnv) -> None:
        self._env: Any = shape_env
        self._nbytes: dict[tuple[Any, ...], tuple[Any, int | None]] = {}

    def meta(
        self, size: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """A meta tensor, or ``None`` where torch's own way has to be taken.

        The caller has switched off dispatch to Python.
        """
        if type(self._env) is not ShapeEnv or symbols_are_watched(self._env):
            return None
        parts: list[Any] = [dtype.itemsize, len(size)]
        symbolic = False
        for n in (*size, *stride):
            if type(n) is int:
                parts.append(n)
                continue
            sym_node = n.node
            if type(sym_node) is not SymNode or type(sym_node.hint) is not int:
                return None
            symbolic = True
            parts.append((sym_node.expr, sym_node.hint))
        if not symbolic:
            return None
        key = tuple(parts)
        known = self._nbytes.get(key)
        if known is None:
            known = self._computed(size, stride, dtype.itemsize)
            if known is None:
                meta = empty_strided(size, stride, dtype=dtype, device=META)
                nbytes: Any = meta.untyped_storage().nbytes()
                if type(nbytes) is int:
                    return meta
                self._nbytes[key] = nbytes.node.expr, nbytes.node.hint
                return meta
            self._nbytes[key] = known
        expr, hint = known
        return meta_of(size, stride, dtype, _SymInt(SymNode(expr, self._env, int, hint)))

    def fresh(
        self, made: FreshGeometry, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """The same of sizes that have just been made for these numbers, while nobody watches."""
        if self._env.replacements:
            return self.meta(made.size, made.stride, dtype)
        sizes, steps = ([int(n) if n.is_Integer else n for n in exprs] for exprs in made.exprs)
        known = self._total(sizes, steps, dtype.itemsize, size, stride)
        if known is None:
            return None
        nbytes = _SymInt(SymNode(known[0], self._env, int, known[1]))
        return meta_of(made.size, made.stride, dtype, nbytes)

    def _computed(
        self, size: Sequence[Any], stride: Sequence[Any], itemsize: int
    ) -> tuple[Any, int] | None:
        """The storage's size in bytes and its hint, if no check of torch's could add a guard."""
        numbers = [
            [(n, n) if type(n) is int else (n.node.expr, n.node.hint) for n in of]
            for of in (size, stride)
        ]
        (sizes, hints), (steps, step_hints) = (zip(*of, strict=True) for of in numbers)
        return self._total(sizes, steps, itemsize, hints, step_hints)

    def _total(
        self,
        sizes: Sequence[Any],
        steps: Sequence[Any],
        itemsize: int,
        hints: Sequence[int],
        step_hints: Sequence[int],
    ) -> tuple[Any, int] | None:
        """The same of integers and expressions."""
        for n in sizes:
            if n < 1 if type(n) is int else not self._is_positive(n):
                return None
        hint = 1
        for n, step in zip(hints, step_hints, strict=True):
            hint += step * (n - 1)
        total = storage_size(sizes, steps, itemsize)
        if total is None:
            total = 1
            for n, step in zip(sizes, steps, strict=True):
                total = total + step * (n - 1)
            total = total * itemsize
            if not isinstance(total, sympy.Expr) or total.is_number:
                return None
        return None if isinstance(total, sympy.Integer) else (total, hint * itemsize)

    def _is_positive(self, expr: Any) -> bool:
        if not isinstance(expr, sympy.Symbol) or expr not in self._env.backed_var_to_val:
            return False
        known = self._env.var_to_range.get(expr)
        return known is not None and isinstance(known.lower, sympy.Integer) and known.lower.p >= 1
