"""Runs operators on fake tensors so that their results have requested unbacked symbols.

An operator with a size that depends on data makes a symbol for it, unless the tensor has a memo
(``nonzero_memo``, ``item_memo``, ... of torch 2.13, which end with ``FakeTensorMode.epoch``). Here an
operator is run so that it gives the symbols of an earlier run, or a new one in spite of a memo.

Method: a first run records at which place of the result each new symbol occurs. The ``ShapeEnv`` is
rolled back, and in a second run it allocates the requested numbers in the same order.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import sympy
import torch
from torch.types import py_sym_types

from torch_fakeify.compat import torch_fakes, torch_graphs, torch_symbols
from torch_fakeify.replay.bindings import (
    PathEntry,
    atom_of,
    decode_path,
    expr_of,
    raw_path,
    symbols_in,
)
from torch_fakeify.shape_env.rollback import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Set
    from contextlib import AbstractContextManager

_MAKERS = ("create_unbacked_symint", "create_unbacked_symfloat", "create_unbacked_symbool")
_MEMOS = tuple(
    name
    for name, value in vars(torch_fakes.FakeTensor).items()
    if isinstance(value, torch_fakes.SymNumberMemoDescriptor) and name != "nested_int_memo"
)

_SLOTS = [f"_{memo}{end}" for memo in _MEMOS for end in ("", "_vc", "_epoch")]
"""The attributes that hold memos, the versions of the data and the epochs."""


class AllocationLog(NamedTuple):
    """The numbers that a run of an operator allocated, to replay it in an equal environment."""

    clears_memos: bool = False
    """Whether the memos of the tensors were cleared before the run."""
    numbers: tuple[tuple[str, Any] | None, ...] = ()
    """The numbers in order: kind and expression, ``None`` for a new symbol."""


class RunResult(NamedTuple):
    """The result of one run of an operator."""

    value: Any
    bound: dict[sympy.Symbol, tuple[PathEntry, ...]]
    """The symbols that the operator binds, with their paths in the value."""
    paths: dict[sympy.Symbol, Any]
    """The paths in torch's form, for ``meta["unbacked_bindings"]``."""
    log: AllocationLog
    """The allocations of the run."""


class RequestedSymbols(NamedTuple):
    """The symbols that the result of a run must have."""

    numbers: Mapping[tuple[PathEntry, ...], Any]
    """A symbolic number of the environment for each path in the result."""
    binds: frozenset[sympy.Symbol] = frozenset()
    """Those of the symbols that the operator binds."""


# --- memos ----------------------------------------------------------------------------------------


class Memos:
    """The memos of a pytree of fake tensors for unbacked symbols (``nonzero_memo`` and others)."""

    def __init__(self, values: Any) -> None:
        self._tensors = list(_fakes_in(values))
        self._saved = [[(n, getattr(t, n, None)) for n in _SLOTS] for t in self._tensors]

    def restore(self) -> None:
        """Restore the memos that the tensors had at first."""
        for t, saved in zip(self._tensors, self._saved, strict=True):
            for name, value in saved:
                setattr(t, name, value)

    def drop(self, symbols: Set[sympy.Symbol] | None = None) -> None:
        """Drop all unbacked memos, or those that contain certain symbols."""
        for t in self._tensors:
            for name in _MEMOS:
                memo = getattr(t, f"_{name}", None)
                if not isinstance(memo, py_sym_types) or memo.node.hint is not None:
                    continue
                expr = expr_of(memo)
                if expr is not None and (symbols is None or symbols & expr.free_symbols):
                    setattr(t, name, None)


def _fakes_in(values: Any) -> Generator[Any, None, None]:
    for leaf in torch_graphs.tree_leaves(values):
        if isinstance(leaf, torch_fakes.FakeTensor):
            yield leaf
        elif isinstance(leaf, torch.Tensor) and torch_fakes.is_traceable_wrapper_subclass(leaf):
            wrapper: Any = leaf
            for name in wrapper.__tensor_flatten__()[0]:
                yield from _fakes_in(getattr(wrapper, name))


# --- runs -----------------------------------------------------------------------------------------

_Request: TypeAlias = "Callable[[RunResult], RequestedSymbols | None]"


def run_with_symbols(
    env: Any, call: Callable[[], Any], args: Any, request: _Request | None
) -> RunResult:
    """Run an operator so that its result has the requested symbols.

    New symbols that do not occur in the result are dropped, since no node can bind them. The memos of
    the arguments are used. ``request`` returns the symbols that a result should have, ``None`` if it
    has the right ones; without it any result is accepted.
    """
    memos = Memos(args)
    if request is None:
        return _run(env, call, memos)
    before = checkpoint(env)
    try:
        result = _run(env, call, memos)
        requested = request(result)
        if requested is None:
            return result
        result = None
        # A run without memos makes a symbol at each place.
        before.rollback()
        memos.restore()
        memos.drop()
        numbers: list[_Number] = []
        with _recorded(env, numbers):
            value = call()
        made = [atom_of(expr_of(one.value)) for one in numbers]
        bound = _bound(env, value, [symbol for symbol in made if symbol is not None])
        places = {symbol: raw_path(path) for symbol, (path, _) in bound.items()}
        log = [
            requested.numbers.get(places[symbol]) if symbol in places else None  # type: ignore[index]
            for symbol in made
        ]
        del value
        before.rollback()
        memos.restore()
        memos.drop()
        with _replayed_allocations(env, log, requested.binds):
            result = _run(env, call, memos)
        return result._replace(log=result.log._replace(clears_memos=True))
    finally:  # an exception that is stored must not hold the checkpoint
        before.commit()


def run_again(
    env: Any,
    call: Callable[[], Any],
    args: Any,
    log: AllocationLog,
    bound_inside: Collection[sympy.Symbol],
) -> RunResult:
    """Replay a run of an operator, in an environment that was rolled back to the state before it.

    The symbols ``bound_inside`` are those that the body of the operator binds during the run.
    """
    memos = Memos(args)
    if log.clears_memos:
        memos.drop()
    numbers = [
        None if number is None else torch_symbols.make_sym(number[0], number[1], env, None)
        for number in log.numbers
    ]
    with _replayed_allocations(env, numbers, ()):
        return _run(env, call, memos, bound_inside)


def _run(
    env: Any, call: Callable[[], Any], memos: Memos, bound_inside: Collection[sympy.Symbol] = ()
) -> RunResult:
    numbers: list[_Number] = []
    count = len(env.pending_fresh_unbacked_symbols)
    with _recorded(env, numbers):
        value = call()
    pending = env.pending_fresh_unbacked_symbols[count:]
    made = [symbol for one in numbers if one.is_new for symbol in symbols_in(one.value)]
    bound = _bound(env, value, [*made, *pending])
    used = symbols_in(value)
    dead = [symbol for symbol in made if symbol not in used and symbol not in bound_inside]
    if dead:
        drop_symbols(env, dead, memos)
    return RunResult(
        value,
        {symbol: path for symbol, (path, _) in bound.items()},
        {symbol: torch_path for symbol, (_, torch_path) in bound.items()},
        AllocationLog(numbers=tuple(one.entry for one in numbers)),
    )


class _Number(NamedTuple):
    """A number that the environment allocated."""

    value: Any
    is_new: bool

    @property
    def entry(self) -> tuple[str, Any] | None:
        return None if self.is_new else (self.value.node.pytype.__name__, expr_of(self.value))


def _bound(
    env: Any, value: Any, made: Iterable[sympy.Symbol]
) -> dict[sympy.Symbol, tuple[tuple[PathEntry, ...], Any]]:
    """The paths of new symbols in a value, also in torch's form; clears the pending symbols."""
    env.pending_fresh_unbacked_symbols.clear()
    env.ignorable_fresh_unbacked_symbols.clear()
    pending = set(made)
    if not pending:
        return {}
    found = torch_symbols.free_unbacked_symbols_with_path(value, (), shape_env=env, pending=pending)
    paths = {symbol: (decode_path(torch_path), torch_path) for symbol, torch_path in found.items()}
    return {symbol: (path, raw) for symbol, (path, raw) in paths.items() if path is not None}


def _recorded(env: Any, numbers: list[_Number]) -> AbstractContextManager[None]:
    """Record the unbacked numbers that the environment allocates, in order, and which are new."""

    def record(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = len(env.var_to_range)
        number = make(*args, **kwargs)
        numbers.append(_Number(number, len(env.var_to_range) > before))
        return number

    return _allocating_by(env, record)


def _replayed_allocations(
    env: Any, log: Iterable[Any], binds: Collection[sympy.Symbol]
) -> AbstractContextManager[None]:
    """Let the environment allocate certain numbers instead of new ones, in order.

    For ``None``, and after the last, a new one is made. The symbols in ``binds`` count as pending when
    they are allocated.
    """
    left = iter(log)

    def replay(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        number = next(left, None)
        if number is None:
            return make(*args, **kwargs)
        env.pending_fresh_unbacked_symbols.extend(symbols_in(number) & set(binds))
        return number

    return _allocating_by(env, replay)


@contextmanager
def _allocating_by(env: Any, allocate: Callable[..., Any]) -> Generator[None, None, None]:
    """Call a function for each unbacked number, with the method that makes it and its arguments."""
    before = {name: vars(env)[name] for name in _MAKERS if name in vars(env)}
    vars(env).update({name: partial(allocate, getattr(env, name)) for name in _MAKERS})
    try:
        yield
    finally:
        for name in _MAKERS:
            del vars(env)[name]
        vars(env).update(before)


def number_like(like: Any, expr: Any, env: Any) -> Any:
    """A symbolic number of an expression, of the kind of another one: a boolean is that it is 1."""
    if isinstance(like, torch.SymBool):
        return torch_symbols.make_sym("bool", sympy.Eq(expr, 1), env, None)
    kind = "float" if isinstance(like, torch.SymFloat) else "int"
    return torch_symbols.make_sym(kind, expr, env, None)


# --- unbound symbols ------------------------------------------------------------------------------

_TABLES = (
    "var_to_range", "var_to_range_sloc", "var_to_stack", "var_to_hint_override",
    "unbacked_alloc_order", "real_tensor_prop_unbacked_vals", "replacements", "replacements_slocs",
    "unbacked_renamings", "deferred_runtime_asserts",
)  # fmt: skip


def drop_symbols(env: Any, symbols: Iterable[sympy.Symbol], memos: Memos) -> None:
    """Remove symbols that occur in no value from a ``ShapeEnv``, with the facts about them.

    Torch runs the bodies of higher-order operators once more for their result, and ignores the
    symbols that this makes (``ignore_fresh_unbacked_symbols``). A symbol that replaces another one
    is not removed.
    """
    used = {part for expr in env.replacements.values() for part in expr.free_symbols}
    dropped = {symbol for symbol in symbols if symbol not in used}
    for symbol in dropped:
        env.num_deferred_runtime_asserts -= len(env.deferred_runtime_asserts.get(symbol, ()))
    for name in _TABLES:
        table: dict[Any, Any] = getattr(env, name, {})
        for symbol in dropped & table.keys():
            del table[symbol]
    env.size_like.difference_update(dropped)
    env.divisible.difference_update([d for d in env.divisible if d.free_symbols & dropped])
    memos.drop(dropped)
    drop_asserts(env, dropped, lambda one: not dropped.isdisjoint(one.expr.free_symbols))


def drop_asserts(env: Any, symbols: Set[sympy.Symbol], is_dropped: Callable[[Any], bool]) -> None:
    """Remove runtime asserts from a ``ShapeEnv``, and the axioms about symbols, which rest on them."""
    for key, group in list(env.deferred_runtime_asserts.items()):
        left = [one for one in group if not is_dropped(one)]
        if len(left) != len(group):
            env.deferred_runtime_asserts[key] = left
            env.num_deferred_runtime_asserts -= len(group) - len(left)
    for condition in [c for c in env.axioms if not symbols.isdisjoint(c.free_symbols)]:
        del env.axioms[condition]
    env._update_version_counter()
