"""Meta tensors of symbolic sizes, whose storage size is computed in sympy.

``torch.empty_strided`` runs a dozen symbolic operators to compute a storage's size and to check that
the sizes are not negative. Sizes that are backed symbols with positive lower bounds need no check.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import sympy
import torch

from torch_fakeify.compat import torch_dispatch
from torch_fakeify.compat.torch_dispatch import empty_strided, make_subclass, make_wrapper_subclass
from torch_fakeify.compat.torch_symbols import ShapeEnv, SymNode
from torch_fakeify.records.predicates import is_plain_whole
from torch_fakeify.records.tensor import SymDesc

from .fake_tensors import META
from .size_symbols import is_symbol_creation_observed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch_fakeify.records.tensor import IntLike, MetaTensorDesc

    from .size_symbols import Geometry


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


def empty_meta(shape_env: ShapeEnv | None, geometry: Geometry, dtype: torch.dtype) -> torch.Tensor:
    """A meta tensor on a new storage, equal to that of ``torch.empty_strided``.

    The caller has switched off dispatch to Python.
    """
    env: Any = shape_env
    size, stride, itemsize = geometry.size, geometry.stride, dtype.itemsize
    cached = geometry.nbytes
    nbytes = None if cached is None else cached.get(itemsize)
    if env is not None and nbytes is None and not is_symbol_creation_observed(env):
        nbytes = _storage_nbytes(env, size, stride, itemsize)
        if cached is not None:
            cached[itemsize] = nbytes
    if nbytes is not None:
        return meta_of(size, stride, dtype, torch.SymInt(SymNode(nbytes[0], env, int, nbytes[1])))
    return empty_strided(size, stride, dtype=dtype, device=META)


def _storage_nbytes(
    shape_env: Any, sizes: Sequence[Any], strides: Sequence[Any], itemsize: int
) -> tuple[Any, int] | None:
    """Expression and hint of a storage's size in bytes; ``None`` where torch has to compute it.

    That is where it is a number, or where a check of torch could add a guard.

    Args:
        shape_env: of the symbols.
        sizes: of a tensor, in elements.
        strides: likewise.
        itemsize: bytes of an element.
    """
    terms: list[Any] = [itemsize]
    hint = itemsize
    for size, stride in zip(sizes, strides, strict=True):
        (n, size_hint), (step, step_hint) = _expr_and_hint(size), _expr_and_hint(stride)
        if n is None or step is None or not _is_positive(shape_env, n):
            return None
        terms.append(sympy.Mul(itemsize, step, sympy.Add(n, -1)))
        hint += itemsize * step_hint * (size_hint - 1)
    total = sympy.Add(*terms)
    return None if total.is_number else (total, hint)


def _expr_and_hint(n: Any) -> tuple[Any, Any]:
    """Expression after replacements, and hint; ``None`` for both where there is no integer hint."""
    if type(n) is int:
        return n, n
    node = n.node
    is_plain = type(node) is SymNode and type(node.hint) is int
    return (node.expr, node.hint) if is_plain else (None, None)


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
    storage: torch.UntypedStorage, geometry: Geometry, dtype: torch.dtype
) -> torch.Tensor:
    """Return a meta tensor of any size, stride and offset on a storage, without a question about them."""
    empty = torch.empty(0, dtype=dtype, device=META).set_(storage, 0, (0,), (1,))
    with torch_dispatch.views_tracked(False):
        return empty.as_strided(*geometry[:3])


def suppressed(shape_env: Any) -> AbstractContextManager[Any]:
    """Inside, questions about sizes add no guards to the ``ShapeEnv``, if there is one."""
    if shape_env is None or shape_env._suppress_guards_tls():
        return nullcontext()
    return shape_env.suppress_guards()


class ValueLayout(NamedTuple):
    """Sizes, strides and storage size that the fake values of one layout share."""

    size: Any
    stride: Any
    nbytes: torch.SymInt
    records: tuple[Any, ...]
    """Strong references to the records whose ids are in the key."""


class ValueLayouts:
    """Cache of the layouts of a graph's values, over existing or carried symbols.

    Tracers identify an input's sizes by their nodes, so that inputs have layouts of their own.
    """

    def __init__(self, shape_env: ShapeEnv) -> None:
        self._env = shape_env
        self._layouts: dict[Any, ValueLayout] = {}

    def find(self, d: MetaTensorDesc) -> ValueLayout | None:
        """Return the layout of a plain value that fills its storage, if one like it was added."""
        if not d.is_fake or not is_plain_whole(d):
            return None
        return self._layouts.get(_key_of(d))

    def add(self, d: MetaTensorDesc, meta: torch.Tensor) -> None:
        """Add the layout of a meta tensor that was made from a record."""
        if not is_plain_whole(d) or is_symbol_creation_observed(self._env):
            return
        size, stride = tuple(meta.size()), meta.stride()
        nbytes: Any = meta.untyped_storage().nbytes()
        symbolic: list[Any] = [n for n in (*size, *stride, nbytes) if type(n) is not int]
        if type(nbytes) is not int and all(
            type(n.node) is SymNode and type(n.node.hint) is int for n in symbolic
        ):
            self._layouts[_key_of(d)] = ValueLayout(size, stride, nbytes, (d.size, d.stride))


def _key_of(d: MetaTensorDesc) -> tuple[Any, ...]:
    env = d.symbols[0].shape_env if d.symbols else None
    return d.dtype, env, _number_key(d.size), _number_key(d.stride)


def _number_key(numbers: tuple[IntLike, ...]) -> tuple[Any, ...]:
    """Key of numbers: integers by value, symbolic ones by the identity of their expression."""
    return tuple([(id(n.expr), n.hint, type(n.hint)) if type(n) is SymDesc else n for n in numbers])
