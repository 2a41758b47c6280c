"""What a ``ShapeEnv`` knows at this moment, as facts for the prover.

A fact is stated if the environment holds it now: value ranges, replacements, divisibility, guards and
deferred runtime asserts. Hints are examples and not facts. A size-like symbol is at least zero by its
value range; that it is at least two, which torch assumes in size-oblivious questions, is not a fact.

Only facts over integer symbols without floats are used: the prover takes other symbols for real
numbers, which floats are not.
"""

from __future__ import annotations

import sys
import weakref
from functools import lru_cache
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import sympy
from sympy.printing.str import StrPrinter

from torch_fakeify.compat.torch_symbols import PythonPrinter, SingletonInt, int_oo
from torch_fakeify.prover.implication import FactIndex, WorkCounter

from .lines import line_of, stated_line
from .operator_facts import operator_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Origin: TypeAlias = Literal[
    "range", "replacement", "divisible", "guard", "runtime assert", "operator"
]

_NO_LIMITS: tuple[Any, ...] = (sympy.oo, -sympy.oo, int_oo, -int_oo, sys.maxsize - 1, sys.maxsize)
_ENDLESS = frozenset(map(sympy.S, _NO_LIMITS))
"""Bounds that are no limits; the last two are those that torch gives to sizes."""

MAX_LEFT_OVER = 1000
"""The most removed facts of an index; then it is made anew."""

MAX_ATOMS = 20_000
"""The most atoms of an index; then it is made anew."""


MAX_FOUND = 20_000
"""The most answers that environments share; then they are found anew."""

MAX_AROUND = 40
"""The most facts that `Knowledge.around` returns."""


class _Printer(PythonPrinter):
    """Torch's printer of Python code, with names for symbols."""

    def __init__(self, name: Callable[[sympy.Symbol], str]) -> None:
        super().__init__()
        self._name = name

    def _print_Symbol(self, expr: sympy.Symbol) -> str:  # noqa: N802
        return self._name(expr)

    def _print_Add(self, expr: Any, order: Any = None) -> str:  # noqa: N802
        return StrPrinter._print_Add(self, expr, order)  # with minus signs, numbers last

    def _print_Relational(self, expr: Any) -> str:  # noqa: N802
        return f"{self._print(expr.lhs)} {expr.rel_op} {self._print(expr.rhs)}"

    def _print_Equality(self, expr: Any) -> str:  # noqa: N802
        return self._print_Relational(expr)


def condition_text(expr: Any, name: Callable[[sympy.Symbol], str] = str) -> str:
    """Return a sympy condition as Python code; ``name`` gives the text of a symbol."""
    return _Printer(name).doprint(expr)


class KnownFact(NamedTuple):
    """A fact that a ``ShapeEnv`` knows.

    Example:
        >>> from torch.fx.experimental.symbolic_shapes import ShapeEnv
        >>> env = ShapeEnv()
        >>> u0 = env.create_unbacked_symint()
        >>> env.constrain_symbol_range(u0.node.expr, compiler_min=8, compiler_max=100)
        >>> [fact.text for fact in tfk.why(env, u0 >= 4)]
        ['u0 >= 8']
    """

    origin: Origin
    """Its kind: where the environment holds it."""
    expr: sympy.Basic
    """The condition."""
    line: str | None
    """The user's line that stated it, as ``file:line``, with its code where torch has it."""

    @property
    def text(self) -> str:
        """The condition as Python code."""
        return condition_text(self.expr)

    def __str__(self) -> str:
        where = "" if self.line is None else f"  # {self.line}"
        return f"{self.text}  ({self.origin}){where}"


_Key: TypeAlias = tuple[Origin, sympy.Basic]
"""A fact: where an environment holds it, and the condition."""

_found: dict[tuple[tuple[_Key, ...], sympy.Basic], bool | None] = {}
"""The answers to conditions, each with the facts in their order."""


def is_provable(env: Any, expr: Any) -> bool:
    """Return whether a condition is about integers alone: no floats, no sizes of jagged tensors."""
    symbols = symbols_of_integers(expr)
    return symbols is not None and not any(
        isinstance(env.backed_var_to_val.get(symbol), SingletonInt) for symbol in symbols
    )


@lru_cache(maxsize=4096)
def symbols_of_integers(expr: Any) -> frozenset[Any] | None:
    """Return the symbols of a condition; ``None`` if one of them or a function is no integer.

    Torch rounds quotients and roots.
    """
    symbols: list[Any] = []
    for part in sympy.preorder_traversal(expr):
        if isinstance(part, (sympy.Float, SingletonInt)):
            return None
        if isinstance(part, (sympy.Symbol, sympy.Function)) and not part.is_integer:
            return None
        if isinstance(part, sympy.Symbol):
            symbols.append(part)
    return frozenset(symbols)


def _keys(env: Any) -> dict[_Key, Any]:
    """Return the keys of all facts that an environment holds now, each with its location."""
    keys: dict[_Key, Any] = {}
    places = env.var_to_range_sloc
    for symbol, bounds in env.var_to_range.items():
        if not symbol.is_integer:
            continue
        place = places.get(symbol)
        if bounds.lower not in _ENDLESS:
            keys["range", _compared(sympy.Ge, symbol, bounds.lower)] = place and place.lower
        if bounds.upper not in _ENDLESS:
            keys["range", _compared(sympy.Le, symbol, bounds.upper)] = place and place.upper
    for symbol, expr in env.replacements.items():
        location = env.replacements_slocs.get(symbol)
        keys["replacement", _compared(sympy.Eq, symbol, expr)] = location
    for expr in env.divisible:
        keys["divisible", _compared(sympy.Eq, expr, sympy.S.Zero)] = None
    for guard in env.guards:
        keys.setdefault(("guard", guard.expr), guard.sloc)
    for group in env.deferred_runtime_asserts.values():
        for one in group:
            keys.setdefault(("runtime assert", one.expr), one)
    for expr in operator_facts(env):
        keys["operator", expr] = None
    return keys


@lru_cache(maxsize=1 << 16)
def _compared(relation: Any, left: Any, right: Any) -> Any:
    return relation(left, right, evaluate=False)


def _state(env: Any) -> list[Any]:
    """Return all objects that facts are made of: the facts are the same while these are."""
    return [
        *env.var_to_range,
        *env.var_to_range.values(),
        *env.replacements,
        *env.replacements.values(),
        *env.divisible,
        *env.guards,
        *chain.from_iterable(env.deferred_runtime_asserts.values()),
        *operator_facts(env),
    ]


class Knowledge:
    """The facts of one ``ShapeEnv``, brought up to date for each question, and indexed to search for it.

    Facts that the environment does not hold any more, as after a rollback, are removed. An answer is
    shared by all environments with the same facts: Dynamo traces a frame again in a new one.

    Args:
        inputs_only: only the facts about backed symbols, those that guards at entry check.
    """

    def __init__(self, *, inputs_only: bool = False) -> None:
        self._inputs_only = inputs_only
        self.work = WorkCounter()
        """The work of all questions."""
        self._keys: dict[_Key, Any] = {}
        self._used: dict[_Key, None] = {}
        self._unused: set[_Key] = set()
        self._facts: tuple[_Key, ...] = ()
        self._state: list[Any] = []
        self._answers: dict[sympy.Basic, bool | None] = {}
        self._fresh_index()

    def _fresh_index(self) -> None:
        self._index = FactIndex((), self.work)
        self._positions: dict[_Key, int] = {}
        self._key_at: list[_Key] = []

    def update(self, env: Any) -> dict[_Key, Any]:
        """Note the facts that the environment holds now; returns their keys with their locations."""
        state = _state(env)
        if len(state) == len(self._state) and all(map(is_, state, self._state)):
            return self._keys
        self._state = state
        keys = self._keys = _keys(env)
        self._unused &= keys.keys()
        used = {key: None for key in keys if self._is_used(env, key)}
        if self._used.keys() - used.keys():
            self._answers.clear()
        elif len(used) > len(self._used):  # what follows from some facts follows from more
            self._answers = {expr: a for expr, a in self._answers.items() if a is not None}
        self._used, self._facts = used, tuple(used)
        return keys

    def _is_used(self, env: Any, key: _Key) -> bool:
        if key in self._used or key in self._unused:
            return key in self._used
        _, expr = key
        is_used = is_provable(env, expr) and not (
            self._inputs_only and not expr.free_symbols <= env.backed_var_to_val.keys()
        )
        if not is_used:
            self._unused.add(key)
        return is_used

    def _indexed(self) -> FactIndex:
        """Return the index after the facts that are new were added and those that are gone removed."""
        for key in self._positions.keys() - self._used.keys():
            self._index.remove(self._positions.pop(key))
        if (
            len(self._key_at) > len(self._used) + MAX_LEFT_OVER
            or len(self._index.table.atoms) > MAX_ATOMS
        ):
            self._fresh_index()
        for key in self._used:  # in the order of the environment
            if key not in self._positions:
                self._positions[key] = self._index.add(key[1])
                self._key_at.append(key)
        return self._index

    def answer(self, env: Any, expr: Any, example: bool | None = None) -> bool | None:
        """Return whether a condition follows, or its negation (``False``); ``None`` if neither is found.

        Args:
            env: the environment.
            expr: the condition.
            example: its value for the hints, if that is known: what follows from facts holds for them.
        """
        self.update(env)
        try:
            return self._answers[expr]
        except KeyError:
            pass
        question = (self._facts, expr)
        try:
            answer = _found[question]
        except KeyError:
            answer = self._searched(env, expr, example)
            if len(_found) >= MAX_FOUND:
                _found.clear()
            _found[question] = answer
        self._answers[expr] = answer
        return answer

    def _searched(self, env: Any, expr: Any, example: bool | None) -> bool | None:
        index = self._indexed()
        possible = (True, False) if example is None else (example,)
        for wanted in possible:
            if index.implies_by_bounds(index.table.condition(expr, not wanted)):
                return wanted
        for wanted in _possible(env, expr) if example is None else possible:
            if index.implies(index.table.condition(expr, not wanted), without=None):
                return wanted
        return None

    def forget_answers(self) -> None:
        """Forget the answers, also those that environments with the same facts share."""
        self._answers.clear()
        _found.clear()

    def reasons(self, env: Any, expr: Any, *, negated: bool) -> list[KnownFact] | None:
        """Return a minimal set of facts from which a condition, or its negation, follows."""
        keys = self.update(env)
        index = self._indexed()
        found = index.reasons(index.table.condition(expr, negated))
        if found is None:
            return None
        return [_known(self._key_at[at], keys[self._key_at[at]], env) for at in found]

    def around(self, env: Any, expr: Any) -> list[KnownFact]:
        """Return the facts that share symbols with a condition, directly or through others.

        In the order of the environment, at most `MAX_AROUND`.
        """
        keys = self.update(env)
        symbols, taken = set(expr.free_symbols), dict[_Key, None]()
        grows = True
        while grows and len(taken) < MAX_AROUND:
            new = [k for k in self._used if k not in taken and k[1].free_symbols & symbols]
            grows = bool(new)
            for key in new:
                taken[key] = None
                symbols |= key[1].free_symbols
        chosen = set(list(taken)[:MAX_AROUND])
        return [_known(key, keys[key], env) for key in keys if key in chosen]


def _possible(env: Any, expr: Any) -> Iterator[bool]:
    """The answers that the hints do not exclude: what follows from facts holds for the hints."""
    symbols = expr.free_symbols
    if symbols <= env.backed_var_to_val.keys():
        try:
            value = expr.xreplace({symbol: env.backed_var_to_val[symbol] for symbol in symbols})
        except ZeroDivisionError:
            value = None
        if value in (sympy.true, sympy.false):
            yield bool(value)
            return
    yield True
    yield False


def _known(key: _Key, location: Any, env: Any) -> KnownFact:
    origin, expr = key
    return KnownFact(origin, expr, stated_line(env, expr) or line_of(location))


_knowledge: weakref.WeakKeyDictionary[Any, dict[bool, Knowledge]] = weakref.WeakKeyDictionary()


def knowledge_of(env: Any, *, inputs_only: bool = False) -> Knowledge:
    """Return the indexed facts of an environment, or those about backed symbols alone; they live as long as it."""
    found = _knowledge.setdefault(env, {})
    if inputs_only not in found:
        found[inputs_only] = Knowledge(inputs_only=inputs_only)
    return found[inputs_only]
