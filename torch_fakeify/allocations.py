"""The unbacked symbols that an operator makes when it runs on fake tensors, and which it shall give.

An operator with a size that depends on data makes a symbol for it, unless the tensor remembers one
(``nonzero_memo``, ``item_memo``, ... of torch 2.13, which end with ``FakeTensorMode.epoch``). Here
an operator can be run again so that it gives other symbols than it would by itself: those of an
earlier run, or one of its own although the tensor remembers one.

Method: a first run tells which of the symbols that it makes stands where in the result. What it did
to the ``ShapeEnv`` is rolled back, and in a last run the environment hands out the numbers that are
wanted, in the same order.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from . import _torch
from .binding_sites import Step, atom_of, expr_of, path_steps, place_of, symbols_in
from .checkpoints import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence

    import sympy

__all__ = ["Given", "Memos", "Plan", "Wanted", "forget", "run_again", "run_for"]

_MAKERS = ("create_unbacked_symint", "create_unbacked_symfloat", "create_unbacked_symbool")
_MEMOS = tuple(
    name
    for name, value in vars(_torch.FakeTensor).items()
    if isinstance(value, _torch.SymNumberMemoDescriptor) and name != "nested_int_memo"
)


class Plan(NamedTuple):
    """How a run of an operator came to its symbols; it holds in an environment that makes the same."""

    forgets: bool = False
    """Whether the tensors first forgot what they remembered."""
    numbers: tuple[tuple[str, Any] | None, ...] = ()
    """What the environment gave it, in order: kind and expression, ``None`` for a new symbol."""


class Given(NamedTuple):
    """What one run of an operator gave."""

    value: Any
    bound: dict[sympy.Symbol, tuple[Step, ...]]
    """The symbols that the result shows and that the run made, or was handed as its own."""
    paths: dict[sympy.Symbol, Any]
    """The same as torch's paths, for ``meta["unbacked_bindings"]``."""
    plan: Plan
    """How to come to it again."""


class Wanted(NamedTuple):
    """The symbols that a run shall give."""

    numbers: Mapping[tuple[Step, ...], Any]
    """By the place in the result: a symbolic number of the environment."""
    own: frozenset[sympy.Symbol] = frozenset()
    """Of these symbols, those that the operator then binds."""


# --- memos ----------------------------------------------------------------------------------------


class Memos:
    """What fake tensors remember of unbacked symbols.

    Args:
        values: a tree of tensors, as the arguments of an operator are.
    """

    def __init__(self, values: Any) -> None:
        self._tensors = list(_fakes_in(values))
        self._saved = [
            [(n, getattr(t, n, None)) for memo in _MEMOS for n in _slots(memo)]
            for t in self._tensors
        ]

    @property
    def any(self) -> bool:
        """Whether one of the tensors remembers a symbol now."""
        return any(getattr(t, n, None) is not None for t in self._tensors for n in _MEMOS)

    def restore(self) -> None:
        """As it was."""
        for t, saved in zip(self._tensors, self._saved, strict=True):
            for name, value in saved:
                setattr(t, name, value)

    def clear(self) -> None:
        """Forget what is unbacked."""
        self._drop(lambda _: True)

    def drop(self, symbols: Iterable[sympy.Symbol]) -> None:
        """Forget these symbols."""
        gone = set(symbols)
        self._drop(lambda expr: not gone.isdisjoint(expr.free_symbols))

    def _drop(self, goes: Callable[[sympy.Basic], bool]) -> None:
        for t in self._tensors:
            for name in _MEMOS:
                memo = getattr(t, f"_{name}", None)
                if not isinstance(memo, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                    continue
                expr = expr_of(memo)
                if memo.node.hint is None and expr is not None and goes(expr):
                    setattr(t, name, None)


def _slots(memo: str) -> tuple[str, str, str]:
    return f"_{memo}", f"_{memo}_vc", f"_{memo}_epoch"


def _fakes_in(values: Any) -> Generator[Any, None, None]:
    for leaf in _torch.tree_leaves(values):
        if isinstance(leaf, _torch.FakeTensor):
            yield leaf
        elif isinstance(leaf, torch.Tensor) and _torch.is_traceable_wrapper_subclass(leaf):
            wrapper: Any = leaf
            for name in wrapper.__tensor_flatten__()[0]:
                yield from _fakes_in(getattr(wrapper, name))


# --- runs -----------------------------------------------------------------------------------------

_Judge: TypeAlias = "Callable[[Given], Wanted | None]"


def run_for(env: Any, call: Callable[[], Any], args: Any, judge: _Judge | None) -> Given:
    """Run an operator so that it gives the symbols that are wanted.

    Symbols that a run makes and that its result does not show are forgotten: nobody can bind them.

    Args:
        env: the ``ShapeEnv`` of the fake tensors.
        call: runs the operator, under the fake mode.
        args: its arguments, for what they remember.
        judge: looks at what a run gave; ``None`` if that is right, else what is wanted. No judge:
            whatever it gives is right.
    """
    memos = Memos(args)
    if judge is None:
        return _run(env, call, memos)
    before = checkpoint(env)
    given = _run(env, call, memos)
    wanted = judge(given)
    if wanted is None:
        before.commit()
        return given
    given = None
    # A run on tensors that remember nothing shows where each symbol goes.
    before.rollback()
    memos.restore()
    memos.clear()
    numbers: list[_Number] = []
    with _recorded(env, numbers):
        value = call()
    made = [atom_of(expr_of(one.value)) for one in numbers]
    bound = _bound(env, value, [symbol for symbol in made if symbol is not None])
    places = {symbol: place_of(steps) for symbol, (steps, _) in bound.items()}
    plan = [
        wanted.numbers.get(places[symbol]) if symbol in places else None  # type: ignore[index]
        for symbol in made
    ]
    del value
    before.rollback()
    memos.restore()
    memos.clear()
    with _handed_out(env, plan, wanted.own):
        given = _run(env, call, memos)
    before.commit()
    return given._replace(plan=given.plan._replace(forgets=True))


def run_again(
    env: Any, call: Callable[[], Any], args: Any, plan: Plan, keep: Collection[sympy.Symbol]
) -> Given:
    """Run an operator as it ran before, in an environment that was rolled back to before that.

    Args:
        env: the ``ShapeEnv``.
        call: runs the operator.
        args: its arguments.
        plan: of the run before.
        keep: symbols that were bound while the operator ran, by the body of it.
    """
    memos = Memos(args)
    if plan.forgets:
        memos.clear()
    numbers = [
        None if number is None else _torch.make_sym(number[0], number[1], env, None)
        for number in plan.numbers
    ]
    with _handed_out(env, numbers, ()):
        return _run(env, call, memos, keep)


def _run(
    env: Any, call: Callable[[], Any], memos: Memos, keep: Collection[sympy.Symbol] = ()
) -> Given:
    numbers: list[_Number] = []
    known = len(env.pending_fresh_unbacked_symbols)
    with _recorded(env, numbers):
        value = call()
    own = env.pending_fresh_unbacked_symbols[known:]
    made = [symbol for one in numbers if one.is_new for symbol in symbols_in(one.value)]
    bound = _bound(env, value, [*made, *own])
    shown = symbols_in(value)
    dead = [symbol for symbol in made if symbol not in shown and symbol not in keep]
    if dead:
        forget(env, dead, memos)
    return Given(
        value,
        {symbol: steps for symbol, (steps, _) in bound.items()},
        {symbol: path for symbol, (_, path) in bound.items()},
        Plan(numbers=tuple(one.planned for one in numbers)),
    )


class _Number(NamedTuple):
    """A number that the environment gave."""

    value: Any
    is_new: bool

    @property
    def planned(self) -> tuple[str, Any] | None:
        kinds = {torch.SymInt: "int", torch.SymFloat: "float", torch.SymBool: "bool"}
        return None if self.is_new else (kinds[type(self.value)], expr_of(self.value))


def _bound(
    env: Any, value: Any, made: Iterable[sympy.Symbol]
) -> dict[sympy.Symbol, tuple[tuple[Step, ...], Any]]:
    """Where a value shows new symbols: as steps and as torch's paths. None is pending any more."""
    env.pending_fresh_unbacked_symbols.clear()
    env.ignorable_fresh_unbacked_symbols.clear()
    pending = set(made)
    if not pending:
        return {}
    found = _torch.free_unbacked_symbols_with_path(value, (), shape_env=env, pending=pending)
    bound: dict[sympy.Symbol, tuple[tuple[Step, ...], Any]] = {}
    for symbol, path in found.items():
        steps = path_steps(path)
        if steps is not None:
            bound[symbol] = (steps, path)
    return bound


@contextmanager
def _recorded(env: Any, numbers: list[_Number]) -> Generator[None, None, None]:
    """Note the unbacked numbers that the environment gives, in their order, and which are new."""

    def recording(make: Callable[..., Any]) -> Callable[..., Any]:
        def maker(*args: Any, **kwargs: Any) -> Any:
            before = len(env.var_to_range)
            number = make(*args, **kwargs)
            numbers.append(_Number(number, len(env.var_to_range) > before))
            return number

        return maker

    with _replaced(env, {name: recording(getattr(env, name)) for name in _MAKERS}):
        yield


@contextmanager
def _handed_out(
    env: Any, plan: Sequence[Any], own: Collection[sympy.Symbol]
) -> Generator[None, None, None]:
    """The environment gives planned numbers instead of new ones, in their order.

    Args:
        env: the ``ShapeEnv``.
        plan: symbolic numbers; for ``None``, and after the last, it makes a new one.
        own: symbols that who asks for them binds.
    """
    left = iter(plan)

    def handing(make: Callable[..., Any]) -> Callable[..., Any]:
        def maker(*args: Any, **kwargs: Any) -> Any:
            number = next(left, None)
            if number is None:
                return make(*args, **kwargs)
            env.pending_fresh_unbacked_symbols.extend(symbols_in(number) & set(own))
            return number

        return maker

    with _replaced(env, {name: handing(getattr(env, name)) for name in _MAKERS}):
        yield


@contextmanager
def _replaced(env: Any, methods: Mapping[str, Any]) -> Generator[None, None, None]:
    before = {name: vars(env)[name] for name in methods if name in vars(env)}
    vars(env).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(env)[name]
        vars(env).update(before)


# --- symbols that nobody binds --------------------------------------------------------------------

_TABLES = (
    "var_to_range", "var_to_range_sloc", "var_to_stack", "var_to_hint_override",
    "unbacked_alloc_order", "real_tensor_prop_unbacked_vals", "replacements", "replacements_slocs",
    "unbacked_renamings", "deferred_runtime_asserts",
)  # fmt: skip


def forget(env: Any, symbols: Iterable[sympy.Symbol], memos: Memos) -> None:
    """Take out symbols that no value shows, and what was assumed of them.

    Torch runs the bodies of higher-order operators once more for their result, and ignores what
    they find in their data (``ignore_fresh_unbacked_symbols``). A symbol that another one was
    replaced by stays.
    """
    kept = {part for expr in env.replacements.values() for part in expr.free_symbols}
    gone = {symbol for symbol in symbols if symbol not in kept}
    for symbol in gone:
        env.num_deferred_runtime_asserts -= len(env.deferred_runtime_asserts.get(symbol, ()))
    for name in _TABLES:
        table: dict[Any, Any] = getattr(env, name, {})
        for symbol in gone & table.keys():
            del table[symbol]
    for key, group in list(env.deferred_runtime_asserts.items()):
        left = [one for one in group if gone.isdisjoint(one.expr.free_symbols)]
        if len(left) != len(group):
            env.deferred_runtime_asserts[key] = left
            env.num_deferred_runtime_asserts -= len(group) - len(left)
    for condition in [c for c in env.axioms if not gone.isdisjoint(c.free_symbols)]:
        del env.axioms[condition]
    env.size_like.difference_update(gone)
    env.divisible.difference_update([d for d in env.divisible if d.free_symbols & gone])
    memos.drop(gone)
    env._update_version_counter()
