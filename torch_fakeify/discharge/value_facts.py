"""Facts that operators guarantee about the numbers in their results, stated where ``item`` reads one.

A position is smaller than the size that it points into, and a count is at most what is counted. The
range is noted for the storage of the result, so its views have it, too. Operators that copy values pass
it on; a write to the storage removes it. Under Dynamo it is used only in the graph, of a frame or of the
body of a control-flow operator, in which it was noted: a loop's body is traced once, with the values of
its first iteration as example.
"""

from __future__ import annotations

import operator
import weakref
from functools import cache, lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import sympy
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_fakeify.compat.torch_dynamo import traced_graph
from torch_fakeify.compat.torch_fakes import FakeTensor, is_traceable_wrapper_subclass
from torch_fakeify.compat.torch_graphs import tree_leaves
from torch_fakeify.compat.torch_symbols import sympy_functions

from .operator_facts import element_count, size_expr, state_operator_fact

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MAX_COUNT = 2**52
"""More elements than an operator reads or makes: it would take hours."""

LARGEST = {torch.int64: 2**63 - 1, torch.int32: 2**31 - 1}
"""By dtype the largest number; integers of other dtypes have no range."""


class Range(NamedTuple):
    """The least and the greatest number of a storage, both included; ``None`` is not known."""

    low: Any
    high: Any
    most: int | None = None
    """The largest magnitude that a number can have, for all sizes; ``None`` if it is not known.

    A result that is known to fit its dtype has not wrapped around.
    """


class Call(NamedTuple):
    """A call of an operator with fake tensors."""

    env: Any
    """The ``ShapeEnv``."""
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Any

    def argument(self, at: int, name: str, default: Any) -> Any:
        """Return an argument that is given by position or name."""
        return self.args[at] if len(self.args) > at else self.kwargs.get(name, default)


class Noted(NamedTuple):
    """The range of a storage, and where it holds."""

    range: Range
    graph: Callable[[], Any]
    """Returns the graph that Dynamo was tracing, ``None`` outside of it."""


_ranges: weakref.WeakKeyDictionary[Any, dict[StorageWeakRef, Noted]] = weakref.WeakKeyDictionary()
"""By environment the ranges of the storages that are alive."""


def note_values(
    env: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> None:
    """Note the ranges of the numbers in an operator's result, and state the range of a number that is read."""
    known = _ranges.get(env)
    if func is _aten._local_scalar_dense.default:
        if known and isinstance(result, torch.SymInt):
            _state(env, result.node.expr, _range_of(env, args[0]))
    elif known and _changes_numbers(func):
        forget_values((args, kwargs, result))
    elif func in VALUE_RANGES and (known or func not in _CARRY):
        found = VALUE_RANGES[func](Call(env, args, kwargs, result))
        pairs = [(result, found)] if isinstance(found, Range) else zip(result, found, strict=False)
        for tensor, range_ in pairs:
            _note(env, tensor, range_)


@cache
def _changes_numbers(func: Any) -> bool:
    """Whether an operator writes to its arguments, or reads their bytes as other numbers."""
    return func._schema.is_mutable or func is _aten.view.dtype


def forget_values(arguments: Any) -> None:
    """Forget the ranges of all tensors in a pytree, as something may write to them."""
    for leaf in tree_leaves(arguments):
        if isinstance(leaf, FakeTensor):
            env = leaf.fake_mode.shape_env
            known = None if env is None else _ranges.get(env)
            if known:
                known.pop(_storage(leaf), None)
        elif is_traceable_wrapper_subclass(leaf):
            forget_values([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])


def _state(env: Any, number: Any, range_: Range) -> None:
    if range_.low is not None:
        state_operator_fact(env, sympy.Ge(number, range_.low))
    if range_.high is not None:
        state_operator_fact(env, sympy.Le(number, range_.high))


def _note(env: Any, tensor: Any, range_: Range) -> None:
    if range_ != _UNKNOWN and _fits(tensor.dtype, range_.most):
        known = _ranges.setdefault(env, {})
        for storage in [storage for storage in tuple(known) if storage.expired()]:
            del known[storage]
        graph = traced_graph()
        known[_storage(tensor)] = Noted(
            range_, (lambda: None) if graph is None else weakref.ref(graph)
        )


def _fits(dtype: torch.dtype, most: int | None) -> bool:
    """Whether numbers are not wrapped around in a dtype; of an int64 it is asked where one is computed."""
    return dtype is torch.int64 or (
        dtype in LARGEST and most is not None and most <= LARGEST[dtype]
    )


def _range_of(env: Any, tensor: Any) -> Range:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in LARGEST:
        return _UNKNOWN
    noted = _ranges.get(env, {}).get(_storage(tensor))
    return _UNKNOWN if noted is None or noted.graph() is not traced_graph() else noted.range


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


_UNKNOWN = Range(None, None)


# --- positions and counts -------------------------------------------------------------------------


def _below(count: Any) -> Range:
    return Range(sympy.Integer(0), count - 1, MAX_COUNT)


def _up_to(count: Any) -> Range:
    return Range(sympy.Integer(0), count, MAX_COUNT)


def _between(low: Any, high: Any) -> Range:
    """The numbers between two limits; of constant ones the magnitude is known."""
    ends = [int(end) for end in (low, high) if end.is_Integer]
    return Range(low, high, max(map(abs, ends)) if len(ends) == 2 else None)


def _insertion(tensor: torch.Tensor, boundaries: Any) -> Range:
    """The positions at which numbers are inserted; as int32 they are refused where these are too many."""
    low, high, most = _up_to(boundaries)
    return Range(low, high, LARGEST[torch.int32] if tensor.dtype is torch.int32 else most)


def _length(tensor: torch.Tensor, dim: int | None) -> Any:
    """The number of elements along a dimension, or of all; one of a tensor without dimensions."""
    if dim is None or tensor.dim() == 0:
        return element_count(tensor)
    return size_expr(tensor.shape[dim])


def _position(call: Call, *, dim_at: int, dim: int | None) -> Range:
    """Positions along the argument ``dim``, which is at a position and has a default."""
    return _below(_length(call.args[0], call.argument(dim_at, "dim", dim)))


def _nonzero(call: Call) -> Range:
    sizes = [size_expr(size) for size in call.args[0].shape]
    if not sizes:
        return _UNKNOWN
    return _below(sympy_functions.Max(*sizes) if len(sizes) > 1 else sizes[0])


def _count_nonzero(call: Call) -> Range:
    tensor = call.args[0]
    dims = call.argument(1, "dim", None)
    if dims is None or dims == [] or tensor.dim() == 0:
        return _up_to(element_count(tensor))
    return _up_to(prod((size_expr(tensor.shape[dim]) for dim in dims), start=sympy.Integer(1)))


def _sum(call: Call) -> Range:
    return _count_nonzero(call) if call.args[0].dtype is torch.bool else _UNKNOWN


def _cumsum(call: Call) -> Range:
    is_count = call.args[0].dtype is torch.bool
    return _up_to(_length(call.args[0], call.args[1])) if is_count else _UNKNOWN


def _bincount(call: Call) -> Range:
    has_weights = call.argument(1, "weights", None) is not None
    return _UNKNOWN if has_weights else _up_to(element_count(call.args[0]))


def _unique(call: Call) -> tuple[Range, ...]:
    counts = _up_to(element_count(call.args[0]))
    return _UNKNOWN, _below(size_expr(call.result[0].shape[0])), counts


def _randint(call: Call) -> Range:
    low, high = (0, call.args[0]) if len(call.args) < 3 else call.args[:2]
    return _between(size_expr(low), size_expr(high) - 1)


def _remainder(call: Call) -> Range:
    divisor = call.args[1]
    if isinstance(divisor, (int, torch.SymInt)) and not isinstance(divisor, bool):
        number = size_expr(divisor)
        if number.is_positive:  # a GPU does not refuse to divide by zero
            return _between(sympy.Integer(0), number - 1)
    return _UNKNOWN


# --- what keeps, joins or moves values --------------------------------------------------------------


def _kept(call: Call) -> Range:
    """Values of the first argument alone; those of an int64 are in an int32 only if they fit."""
    return _range_of(call.env, call.args[0])


def _picked(call: Call, *, dim_at: int) -> tuple[Range, Range]:
    """Values of the first argument, and their positions."""
    return _kept(call), _position(call, dim_at=dim_at, dim=-1)


def _clamp(call: Call) -> Range:
    range_ = _kept(call)
    low, high = (call.argument(at, name, None) for at, name in ((1, "min"), (2, "max")))
    if not all(limit is None or isinstance(limit, (int, torch.SymInt)) for limit in (low, high)):
        return _UNKNOWN
    limits = [size_expr(limit) for limit in (low, high) if limit is not None]
    mosts = [abs(int(limit)) if limit.is_Integer else None for limit in limits]
    most = _most(max, *mosts) if len(limits) == 2 else _most(max, *mosts, range_.most)
    if low is not None:
        low = size_expr(low)
        range_ = Range(low, _of_both(sympy_functions.Max, low, range_.high))
    if high is not None:  # it wins where the limits contradict each other
        high = size_expr(high)
        range_ = Range(_of_both(sympy_functions.Min, high, range_.low), high)
    return range_._replace(most=most)


@lru_cache(maxsize=4096)
def _of_both(function: Any, first: Any, second: Any) -> Any:
    return None if first is None or second is None else function(first, second)


def _most(function: Any, *mosts: int | None) -> int | None:
    known = [most for most in mosts if most is not None]
    return None if len(known) < len(mosts) else function(known)


def _cat(call: Call) -> Range:
    ranges = [_range_of(call.env, tensor) for tensor in call.args[0]]
    low, high, most = ranges[0]
    for other in ranges[1:]:
        low = _of_both(sympy_functions.Min, low, other.low)
        high = _of_both(sympy_functions.Max, high, other.high)
        most = _most(max, most, other.most)
    return Range(low, high, most)


def _operands(call: Call) -> tuple[Range, Range]:
    """The ranges of two operands, of which the second may be an integer."""
    first, second = call.args[:2]
    if call.argument(2, "alpha", 1) != 1:
        return _UNKNOWN, _UNKNOWN
    if type(second) is int:
        number = sympy.Integer(second)
        return _range_of(call.env, first), _between(number, number)
    return _range_of(call.env, first), _range_of(call.env, second)


def _computed(call: Call, low: Any, high: Any, most: int | None) -> Range:
    """The range of the result, if no number in it has wrapped around."""
    is_exact = most is not None and most <= LARGEST.get(call.result.dtype, -1)
    return Range(low, high, most) if is_exact else _UNKNOWN


def _add(call: Call) -> Range:
    a, b = _operands(call)
    low, high = (_of_both(operator.add, *ends) for ends in ((a.low, b.low), (a.high, b.high)))
    return _computed(call, low, high, _most(sum, a.most, b.most))


def _sub(call: Call) -> Range:
    a, b = _operands(call)
    low, high = (_of_both(operator.sub, *ends) for ends in ((a.low, b.high), (a.high, b.low)))
    return _computed(call, low, high, _most(sum, a.most, b.most))


def _mul(call: Call) -> Range:
    a, b = operands = _operands(call)
    if not all(each.low is not None and each.low.is_nonnegative for each in operands):
        return _UNKNOWN
    high = _of_both(operator.mul, a.high, b.high)
    return _computed(call, a.low * b.low, high, _most(prod, a.most, b.most))


_aten = torch.ops.aten


_CARRY: dict[Any, Callable[[Call], Any]] = {
    **dict.fromkeys(
        (
            _aten.clone.default,
            _aten._to_copy.default,
            _aten.lift_fresh_copy.default,
            _aten.index.Tensor,
            _aten.index_select.default,
            _aten.gather.default,
            _aten.take.default,
            _aten.flip.default,
            _aten.roll.default,
            _aten.repeat.default,
            _aten.max.default,
            _aten.min.default,
            _aten.amax.default,
            _aten.amin.default,
        ),
        _kept,
    ),
    _aten.cat.default: _cat,
    _aten.stack.default: _cat,
    _aten.add.Tensor: _add,
    _aten.sub.Tensor: _sub,
    _aten.mul.Tensor: _mul,
}
"""By operator how ranges of its arguments carry on."""

VALUE_RANGES: dict[Any, Callable[[Call], Any]] = {
    **dict.fromkeys(
        (_aten.argmax.default, _aten.argmin.default), partial(_position, dim_at=1, dim=None)
    ),
    **dict.fromkeys(
        (
            _aten.max.dim,
            _aten.min.dim,
            _aten.median.dim,
            _aten.mode.default,
            _aten.sort.default,
            _aten.sort.stable,
        ),
        partial(_picked, dim_at=1),
    ),
    **dict.fromkeys((_aten.topk.default, _aten.kthvalue.default), partial(_picked, dim_at=2)),
    _aten.nonzero.default: _nonzero,
    **dict.fromkeys(
        (_aten.searchsorted.Tensor, _aten.searchsorted.Scalar),
        lambda call: _insertion(call.result, size_expr(call.args[0].shape[-1])),
    ),
    **dict.fromkeys(
        (_aten.bucketize.Tensor, _aten.bucketize.Scalar),
        lambda call: _insertion(call.result, element_count(call.args[1])),
    ),
    **dict.fromkeys((_aten.count_nonzero.default, _aten.count_nonzero.dim_IntList), _count_nonzero),
    **dict.fromkeys((_aten.sum.default, _aten.sum.dim_IntList), _sum),
    _aten.cumsum.default: _cumsum,
    _aten.bincount.default: _bincount,
    **dict.fromkeys((_aten._unique.default, _aten._unique2.default), _unique),
    _aten.randperm.default: lambda call: _below(size_expr(call.args[0])),
    **dict.fromkeys((_aten.randint.default, _aten.randint.low), _randint),
    _aten.clamp.default: _clamp,
    _aten.remainder.Scalar: _remainder,
    **_CARRY,
}
"""By operator the range of the numbers in its result, or a range for each of its results."""
