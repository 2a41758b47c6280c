"""Meta tensors of symbolic sizes, whose storage size is computed in sympy.

``torch.empty_strided`` runs a dozen symbolic operators to compute a storage's size and to check that
the sizes are not negative. Sizes that are backed symbols with positive lower bounds need no check.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import sympy
import torch

from torch_fakeify.compat import torch_dispatch
from torch_fakeify.compat.torch_dispatch import empty_strided, make_subclass, make_wrapper_subclass
from torch_fakeify.compat.torch_symbols import ShapeEnv, SymNode

from .fake_tensors import META
from .size_symbols import is_symbol_creation_observed

if TYPE_CHECKING:
    from collections.abc import Sequence


class _SizeCarrier(torch.Tensor):
    """Wrapper subclass with sizes, strides and a storage size; only its alias is used."""

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        raise NotImplementedError(f"{func} on a size carrier")


def meta_of(
    size: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype, nbytes: Any
) -> torch.Tensor:
    """A meta tensor with sizes, strides and a new storage of ``nbytes`` bytes, without any check.

    The caller has switched off dispatch to Python.
    """
    carrier = make_wrapper_subclass(
        _SizeCarrier,
        size,
        strides=stride,
        dtype=dtype,
        layout=torch.strided,
        device=META,
        requires_grad=False,
        storage_size=nbytes,
    )
    return make_subclass(torch.Tensor, carrier)


def empty_meta(
    shape_env: ShapeEnv | None, size: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype
) -> torch.Tensor:
    """A meta tensor on a new storage, equal to that of ``torch.empty_strided``.

    The caller has switched off dispatch to Python.
    """
    env: Any = shape_env
    if env is not None and not is_symbol_creation_observed(env):
        sizes, strides = (tuple(map(_expr_and_hint, of)) for of in (size, stride))
        nbytes = storage_nbytes(env, sizes, strides, dtype.itemsize)
        if nbytes is not None:
            return meta_of(
                size, stride, dtype, torch.SymInt(SymNode(nbytes[0], env, int, nbytes[1]))
            )
    return empty_strided(size, stride, dtype=dtype, device=META)


def storage_nbytes(
    shape_env: Any, sizes: Sequence[Any], strides: Sequence[Any], itemsize: int
) -> tuple[Any, int] | None:
    """Expression and hint of a storage's size in bytes; ``None`` where torch has to compute it.

    That is where it is a number, or where a check of torch could add a guard.

    Args:
        shape_env: of the symbols.
        sizes: integers, or expressions with their hints.
        strides: likewise.
        itemsize: bytes of an element.
    """
    terms: list[Any] = [itemsize]
    hint = itemsize
    for size, stride in zip(sizes, strides, strict=True):
        (n, size_hint), (step, step_hint) = _current(shape_env, size), _current(shape_env, stride)
        if n is None or step is None or not _is_positive(shape_env, n):
            return None
        terms.append(sympy.Mul(itemsize, step, sympy.Add(n, -1)))
        hint += itemsize * step_hint * (size_hint - 1)
    total = sympy.Add(*terms)
    return None if total.is_number else (total, hint)


def _expr_and_hint(n: Any) -> Any:
    """An integer as it is, a symbolic size as expression and hint; ``None`` of any other."""
    if type(n) is int:
        return n
    node = n.node
    return (node.expr, node.hint) if type(node) is SymNode and type(node.hint) is int else None


def _current(shape_env: Any, n: Any) -> tuple[Any, Any]:
    """Expression after replacements, and hint."""
    if type(n) is int:
        return n, n
    if n is None:
        return None, None
    return (shape_env.replace(n[0]) if shape_env.replacements else n[0]), n[1]


def _is_positive(shape_env: Any, expr: Any) -> bool:
    if isinstance(expr, (int, sympy.Integer)):
        return expr >= 1
    if not isinstance(expr, sympy.Symbol) or expr not in shape_env.backed_var_to_val:
        return False
    value_range = shape_env.var_to_range.get(expr)
    return (
        value_range is not None
        and isinstance(value_range.lower, sympy.Integer)
        and value_range.lower.p >= 1
    )


def strided_on(
    storage: torch.UntypedStorage, geometry: tuple[Any, Any, Any], dtype: torch.dtype
) -> torch.Tensor:
    """Return a meta tensor of any size, stride and offset on a storage, without a question about them."""
    empty = torch.empty(0, dtype=dtype, device=META).set_(storage, 0, (0,), (1,))
    with torch_dispatch.views_tracked(False):
        return empty.as_strided(*geometry)
