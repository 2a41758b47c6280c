"""The facts of a ``ShapeEnv``: its assumptions about inputs, as a list of conditions.

The conditions are those that ``ShapeEnv.produce_guards`` consults (torch 2.13): the ranges of
symbols, replacements, divisibility, guards, and the exclusion guard of automatic dynamic shapes.
`needed_facts` removes those that follow from others (`implication.redundant`). A range remains if a
``ShapeEnv`` with the other facts would not derive it, even where arithmetic could: the ranges of an
environment decide which questions it answers without a guard.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import sympy

from torch_fakeify.compat import torch_dynamo, torch_symbols
from torch_fakeify.compat.torch_symbols import int_oo
from torch_fakeify.prover.implication import redundant

from .lowering import keeping_axioms

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Kind: TypeAlias = Literal["range", "equality", "divisible", "guard", "exclusion", "assert"]

_SOLVED = 5
"""Most symbols of an inequality from which a ``ShapeEnv`` derives ranges."""
_NO_LIMIT = sys.maxsize - 1
"""The upper bound that torch gives to unbacked sizes, which is no limit."""


class Fact(NamedTuple):
    """A condition on the inputs of a graph, or on what it computes."""

    what: Kind
    expr: sympy.Basic
    """The condition as a sympy boolean."""
    location: Any = None
    """The ``SLoc`` of its cause."""
    symbol: sympy.Symbol | None = None
    """For a range: its symbol."""


def assumed_facts(env: Any) -> list[Fact]:
    """All facts of a ``ShapeEnv``, in the best order for stating them in a new one.

    Ranges come first: torch accepts a replacement only if it is within the range of its symbol.
    """
    return [
        *_ranges(env),
        *_replacements(env),
        *_divisible(env),
        *_guards(env),
        *_exclusions(env),
    ]


def _ranges(env: Any) -> Iterator[Fact]:
    for symbol in env.var_to_range:
        bounds = stated_bounds(symbol, env)
        if bounds is not None:
            yield from range_facts(symbol, bounds, env)


def stated_bounds(symbol: sympy.Symbol, env: Any) -> Any | None:
    """The range of a symbol; ``None`` if it has none, or one that follows from its replacement."""
    bounds = env.var_to_range.get(symbol)
    if bounds is not None and symbol in env.replacements:
        implied = env.bound_sympy(env.replace(symbol))
        return None if implied.issubset(bounds) else bounds
    return bounds


def range_facts(symbol: sympy.Symbol, bounds: Any, env: Any) -> Iterator[Fact]:
    """The finite bounds of a symbol's range as facts."""
    locations = env.var_to_range_sloc.get(symbol)
    if bounds.lower not in (-sympy.oo, -int_oo):
        location = None if locations is None else locations.lower
        expr = sympy.Ge(symbol, bounds.lower, evaluate=False)
        yield Fact("range", expr, location, symbol)
    if bounds.upper not in (sympy.oo, int_oo, _NO_LIMIT):
        location = None if locations is None else locations.upper
        expr = sympy.Le(symbol, bounds.upper, evaluate=False)
        yield Fact("range", expr, location, symbol)


def _replacements(env: Any) -> Iterator[Fact]:
    for symbol in env.replacements:
        expr = env.replace(symbol)
        if expr != symbol:
            location = env.replacements_slocs.get(symbol)
            yield Fact("equality", sympy.Eq(symbol, expr, evaluate=False), location)


def _divisible(env: Any) -> Iterator[Fact]:
    locations: dict[sympy.Basic, Any] = {}
    for guard in env.guards:
        for part in guard.expr.atoms(torch_symbols.sympy_functions.Mod):
            locations.setdefault(part, guard.sloc)
    asked = [part for part in locations if part in env.divisible]  # in the order of the guards
    others = sorted(env.divisible.difference(asked), key=str)
    for part in (*asked, *others):
        yield Fact("divisible", sympy.Eq(part, 0, evaluate=False), locations.get(part))


def _guards(env: Any) -> Iterator[Fact]:
    for guard in env.guards:
        if _is_open(env, guard):
            yield Fact("guard", guard.expr, guard.sloc)


def _is_open(env: Any, guard: Any) -> bool:
    """Whether a guard does not follow from the other facts of the environment."""
    with keeping_axioms(env):
        value = env._maybe_evaluate_static(
            guard.expr, axioms=(), size_oblivious=guard.size_oblivious
        )
    return value is None


def _exclusions(env: Any) -> Iterator[Fact]:
    pairs = [(s, n) for s, n in env.exclusion_constraints if env.var_to_sources.get(s)]
    if not pairs:
        return
    config: Any = torch_dynamo.dynamo().config
    if not config.automatic_dynamic_exclusion_guard or config.enable_compiler_collectives:
        return
    if all(env.backed_var_to_val.get(symbol) == n for symbol, n in pairs):
        return  # the inputs themselves are excluded: torch omits the guard
    differs: list[Any] = [sympy.Ne(symbol, n, evaluate=False) for symbol, n in pairs]
    yield Fact("exclusion", sympy.Or(*differs))


def runtime_asserts(env: Any) -> list[Any]:
    """The deferred runtime asserts of a ``ShapeEnv``, of all symbols."""
    return [one for group in env.deferred_runtime_asserts.values() for one in group]


# --- redundancy -----------------------------------------------------------------------------------


def needed_facts(facts: Sequence[Fact], env: Any) -> tuple[list[Fact], list[Fact]]:
    """Split facts, in the order of `assumed_facts`, into those that are needed and those that follow.

    A condition on an unbacked symbol is always needed: no guard can replace it later.
    """
    removable = [fact.expr.free_symbols <= env.backed_var_to_val.keys() for fact in facts]
    implied = redundant(
        [fact.expr for fact in facts],
        removable=removable,
        is_range=[fact.symbol is not None for fact in facts],
        example=env.backed_var_to_val,
    )
    while lost := [i for i in implied if not _is_derived(i, facts, implied)]:
        for i in lost:
            del implied[i]
    return (
        [fact for i, fact in enumerate(facts) if i not in implied],
        [fact for i, fact in enumerate(facts) if i in implied],
    )


def _is_derived(
    at: int, facts: Sequence[Fact], implied: Mapping[int, tuple[int, ...] | None]
) -> bool:
    """Whether a ``ShapeEnv`` with the facts that are left derives a range; true of all other facts.

    It does from an inequality of up to five symbols that has an integer solution for the symbol, and from
    the ranges of the others at that moment (``ShapeEnv._refine_ranges``, torch 2.13).
    """
    symbol, reasons = facts[at].symbol, implied[at]
    if symbol is None or reasons is None:
        return True
    if not implied.keys().isdisjoint(reasons):
        return False
    first, *others = (facts[i] for i in reasons)
    if any(other.symbol is None for other in others) or len(first.expr.free_symbols) > _SOLVED:
        return False
    if not isinstance(first.expr, (sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge)):
        return False
    left: Any = first.expr.lhs
    difference = left - first.expr.rhs
    factor = difference.coeff(symbol)
    rest = difference - factor * symbol
    return abs(factor) == 1 and not rest.has(symbol) and bool(symbol.is_integer and rest.is_integer)
