"""``entailment``: a ``ShapeEnv`` asks the prover where torch itself has no answer.

One method of ``ShapeEnv`` gives torch's answers without a guard: ``_maybe_evaluate_static`` (torch
2.13). It is called before a guard is added, before a data-dependent error, before a runtime assert is
deferred, and by ``statically_known_true``, ``guard_or_false`` and ``guard_or_true``. It is wrapped:
where torch's method has no answer, the facts of the environment may have one.
"""

from __future__ import annotations

import functools
import threading
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import sympy
from sympy.logic.boolalg import Boolean

from torch_fakeify._locks import fork_safe_lock
from torch_fakeify.compat.torch_fakes import FakeTensorMode
from torch_fakeify.compat.torch_graphs import HigherOrderOperator
from torch_fakeify.compat.torch_symbols import (
    ShapeEnv,
    canonicalize_bool_expr,
    uninteresting_files,
)
from torch_fakeify.shape_env.rollback import clear_method_caches

from .advice import advice_text
from .known_facts import is_provable, knowledge_of, symbols_of_integers
from .lines import note_line
from .operator_facts import SIZE_FACTS, state_facts_of
from .value_facts import forget_values, note_values

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

MAX_PARTS = 500
"""The most operations, symbols and numbers of a condition that the prover is asked about."""

_CACHE_METHODS = ("cache_clear", "cache_info", "cumulative_cache_info")


class Entailment:
    """The switch of `entailment`.

    Inside ``with entailment():``, or from `install` to `uninstall`, a ``ShapeEnv`` asks a prover where
    torch has no answer of its own: before a data-dependent error, in ``guard_or_false``,
    ``guard_or_true`` and ``statically_known_true``, and before it adds a guard or runtime assert. What
    follows from its facts is answered without one; value ranges and replacements are learnt from it as
    from the guard. What torch can answer is answered by torch.

    The facts are those of `entails`, and what operators guarantee about their results: no more
    nonzeros, selected or distinct elements than elements; positions that are smaller than what they
    point into; counts. A condition about the sizes of inputs alone follows only from facts about
    these, which the guards at entry check: it never rests on a runtime assert.

    It holds for the whole process, in all threads and all environments. Blocks nest, also with
    `install`: the last one that ends restores torch's methods. Caches of torch's methods are cleared
    where it begins and ends.

    Example:
        >>> from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true
        >>> env = ShapeEnv()
        >>> u0, u1 = env.create_unbacked_symint(), env.create_unbacked_symint()
        >>> torch._check(u0 <= u1)
        >>> torch._check(u1 <= 16)
        >>> statically_known_true(u0 <= u1 + 1)
        False
        >>> with tfk.entailment():
        ...     statically_known_true(u0 <= u1 + 1)
        True
    """

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._blocks = 0
        self._is_permanent = False
        self._originals: dict[tuple[type[Any], str], Any] = {}
        """Torch's methods while they are wrapped."""

    @contextmanager
    def __call__(self) -> Generator[None, None, None]:
        """Have the prover asked inside a block."""
        self._change(blocks=1)
        try:
            yield
        finally:
            self._change(blocks=-1)

    def install(self) -> None:
        """Have the prover asked until `uninstall`; no effect if it is installed."""
        self._change(permanent=True)

    def uninstall(self) -> None:
        """Undo `install`; blocks that have begun are not affected."""
        self._change(permanent=False)

    def is_installed(self) -> bool:
        """Return whether the prover is asked now."""
        return bool(self._originals)

    def _change(self, *, blocks: int = 0, permanent: bool | None = None) -> None:
        with self._lock:
            self._blocks += blocks
            if permanent is not None:
                self._is_permanent = permanent
            is_wanted = self._is_permanent or self._blocks > 0
            if is_wanted and not self._originals:
                self._wrap()
            elif not is_wanted and self._originals:
                self._unwrap()

    def _wrap(self) -> None:
        uninteresting_files().add(__file__)
        for (owner, name), wrapper in _WRAPPERS.items():
            original = self._originals[owner, name] = vars(owner)[name]
            setattr(owner, name, _around(original, wrapper))
        clear_method_caches(ShapeEnv)

    def _unwrap(self) -> None:
        for (owner, name), original in self._originals.items():
            setattr(owner, name, original)
        self._originals.clear()
        uninteresting_files().discard(__file__)
        clear_method_caches(ShapeEnv)  # they hold answers of the prover


entailment = Entailment()
"""The switch of this process."""


# --- the wrappers ---------------------------------------------------------------------------------


def _around(original: Any, wrapper: Callable[[Any], Any]) -> Any:
    method: Any = functools.wraps(original)(wrapper(original))
    for name in _CACHE_METHODS:  # which torch, and a rollback, call on the method
        if hasattr(original, name):
            setattr(method, name, getattr(original, name))
    return method


class _Busy(threading.local):
    """Whether torch is inside a method whose own questions remain its own, and the latest answer."""

    depth = 0
    answered: tuple[Any, bool] | None = None
    """A condition and the prover's answer to it."""
    example: tuple[Any, bool] | None = None
    """The condition that torch evaluates, and its value for the hints."""


_busy = _Busy()


def _without_asking(original: Any) -> Any:
    """Have torch's own questions inside a method remain its own."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        _busy.depth += 1
        try:
            return original(self, *args, **kwargs)
        finally:
            _busy.depth -= 1

    return method


def _asking(original: Any) -> Any:
    alone = _without_asking(original)

    def _maybe_evaluate_static(self: Any, expr: Any, **options: Any) -> Any:
        answer = alone(self, expr, **options)
        if answer is not None or _busy.depth or not _may_ask(self, expr, **options):
            return answer
        found = _answer(self, expr)
        if found is not None:
            _busy.answered = (expr, found)
        return answer if found is None else sympy.true if found else sympy.false

    return _maybe_evaluate_static


def _may_ask(
    env: Any,
    expr: Any,
    *,
    unbacked_only: bool = False,
    compute_hint: bool = False,
    size_oblivious: bool = False,
    axioms: Any = None,
    var_to_range: Any = None,
) -> bool:
    """Whether a question without an answer is about the facts of the environment, and a condition."""
    del size_oblivious  # what follows from facts also holds under a further assumption
    if unbacked_only or axioms is not None or var_to_range is not None:
        return False
    if compute_hint and not env._translation_validation_enabled:
        return (
            False  # a question about the example; translation validation asks the condition itself
        )
    return isinstance(expr, Boolean)


def _answer(env: Any, expr: Any) -> bool | None:
    if not (is_provable(env, expr) and _is_small(expr)):
        return None
    symbols = symbols_of_integers(expr) or ()
    is_about_inputs = all(symbol in env.backed_var_to_val for symbol in symbols)
    known = _busy.example
    example = known[1] if known is not None and known[0] is expr else None
    return knowledge_of(env, inputs_only=is_about_inputs).answer(env, expr, example)


@functools.lru_cache(maxsize=4096)
def _is_small(expr: Any) -> bool:
    return sum(1 for _ in islice(sympy.preorder_traversal(expr), MAX_PARTS + 1)) <= MAX_PARTS


def _learning(original: Any) -> Any:
    """Have the environment learn ranges and replacements from a condition, as from the guard left out."""

    def _evaluate_expr(
        self: Any, orig_expr: Any, hint: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        _busy.answered = None
        _busy.example = (orig_expr, hint) if isinstance(hint, bool) else None
        try:
            result = original(self, orig_expr, hint, *args, **kwargs)
        finally:
            _busy.example = None
        answered, _busy.answered = _busy.answered, None
        if (
            answered is not None
            and answered[0] is orig_expr
            and orig_expr.free_symbols <= self.backed_var_to_val.keys()
            and not (self.frozen or self._suppress_guards_tls())
        ):
            self._maybe_guard_rel(orig_expr if answered[1] else sympy.Not(orig_expr))
        return result

    return _evaluate_expr


def _noting_lines(original: Any) -> Any:
    def guard_or_defer_runtime_assert(self: Any, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        before = self.num_deferred_runtime_asserts
        answer = original(self, orig_expr, *args, **kwargs)
        if self.num_deferred_runtime_asserts > before:
            note_line(self, canonicalize_bool_expr(orig_expr))
        return answer

    return guard_or_defer_runtime_assert


def _advising(original: Any) -> Any:
    def _make_data_dependent_error(
        self: Any, expr: Any, unhinted_expr: Any, **options: Any
    ) -> Exception:
        error: Exception = original(self, expr, unhinted_expr, **options)
        if options:  # raised for a condition, not where torch looks for a hint
            text = advice_text(self, unhinted_expr)
            if text:
                error.args = (f"{error.args[0]}\n{text}\n", *error.args[1:])
        return error

    return _make_data_dependent_error


def _stating_facts(original: Any) -> Any:
    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = original(self, func, types, args, kwargs)
        env = self.shape_env
        if env is not None and result is not NotImplemented:
            if func in SIZE_FACTS:
                state_facts_of(env, func, args, result)
            note_values(env, func, args, kwargs or {}, result)
        return result

    return dispatch


def _forgetting_values(original: Any) -> Any:
    def dispatch(self: Any, key: Any, /, *args: Any, **kwargs: Any) -> Any:
        forget_values((args, kwargs))  # it may write to its arguments
        result = original(self, key, *args, **kwargs)
        forget_values(result)  # that of one branch or iteration stands for all
        return result

    return dispatch


_WRAPPERS: dict[tuple[type[Any], str], Callable[[Any], Any]] = {
    (ShapeEnv, "_maybe_evaluate_static"): _asking,
    (ShapeEnv, "_evaluate_expr"): _learning,
    (ShapeEnv, "simplify"): _without_asking,
    (ShapeEnv, "guard_or_defer_runtime_assert"): _noting_lines,
    (ShapeEnv, "_make_data_dependent_error"): _advising,
    (FakeTensorMode, "dispatch"): _stating_facts,
    (HigherOrderOperator, "dispatch"): _forgetting_values,
}
"""The methods of torch that are wrapped."""
