"""What a ``ShapeEnv`` assumes of its inputs, as a list of conditions.

The conditions are those that ``ShapeEnv.produce_guards`` consults (torch 2.13): the ranges of
symbols, replacements, divisibility, guards, and the exclusion guard of automatic dynamic shapes.
What follows from the others is left out, by `implied.redundant`. A range stays if a ``ShapeEnv``
that is told the rest would not find it by itself, even where arithmetic could: what an environment
knows of a symbol decides what it can answer without a guard.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import sympy

from . import _torch
from ._torch import int_oo
from .expr_nodes import keeping_axioms
from .implied import redundant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Fact", "Kind", "assumed_facts", "needed_facts"]

Kind: TypeAlias = Literal["range", "equality", "divisible", "guard", "exclusion", "assert"]

_NO_LIMIT = sys.maxsize - 1
"""The upper end that torch gives to unbacked sizes, which says nothing."""


class Fact(NamedTuple):
    """A condition on the inputs of a graph, or on what it computes."""

    what: Kind
    expr: sympy.Basic
    """True where the condition holds."""
    location: Any = None
    """The ``SLoc`` of what caused it."""
    symbol: sympy.Symbol | None = None
    """Of a range: whose."""


def assumed_facts(env: Any) -> list[Fact]:
    """All conditions, in an order in which a new ``ShapeEnv`` learns them best.

    Ranges come first: a replacement is taken only if it keeps the range of what it replaces.
    """
    return [
        *_ranges(env),
        *_replacements(env),
        *_divisible(env),
        *_guards(env),
        *_exclusions(env),
    ]


def _ranges(env: Any) -> Iterator[Fact]:
    for symbol, bounds in env.var_to_range.items():
        lower, upper = bounds.lower, bounds.upper
        if symbol in env.replacements:
            implied = env.bound_sympy(env.replace(symbol))
            if implied.issubset(bounds):
                continue
        locations = env.var_to_range_sloc.get(symbol)
        if lower not in (-sympy.oo, -int_oo):
            location = None if locations is None else locations.lower
            expr = sympy.Ge(symbol, lower, evaluate=False)
            yield Fact("range", expr, location, symbol)
        if upper not in (sympy.oo, int_oo, _NO_LIMIT):
            location = None if locations is None else locations.upper
            expr = sympy.Le(symbol, upper, evaluate=False)
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
        for part in guard.expr.atoms(_torch.sympy_functions.Mod):
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
    """Whether a guard does not follow from what else the environment knows."""
    with keeping_axioms(env):
        known = env._maybe_evaluate_static(
            guard.expr, axioms=(), size_oblivious=guard.size_oblivious
        )
    return known is None


def _exclusions(env: Any) -> Iterator[Fact]:
    pairs = [(s, n) for s, n in env.exclusion_constraints if env.var_to_sources.get(s)]
    if not pairs or not _excludes_old_sizes():
        return
    if all(env.backed_var_to_val.get(symbol) == n for symbol, n in pairs):
        return  # the inputs themselves are excluded: torch leaves the guard out
    differs: list[Any] = [sympy.Ne(symbol, n, evaluate=False) for symbol, n in pairs]
    yield Fact("exclusion", sympy.Or(*differs))


def _excludes_old_sizes() -> bool:
    config: Any = _torch.dynamo().config
    return config.automatic_dynamic_exclusion_guard and not config.enable_compiler_collectives


# --- only what is needed --------------------------------------------------------------------------


def needed_facts(facts: Sequence[Fact], env: Any) -> tuple[list[Fact], list[Fact]]:
    """The facts that do not follow from the others, and those that do.

    A condition on an unbacked symbol stays: no guard can make up for it later.

    Args:
        facts: of `assumed_facts`, in that order.
        env: the environment that they are of.
    """
    removable = [_backed(fact, env) for fact in facts]
    gone = set(redundant([fact.expr for fact in facts], removable=removable))
    ranges = {i for i in gone if facts[i].what == "range"}
    if ranges:
        kept = [fact for i, fact in enumerate(facts) if i not in gone]
        known = _learned_ranges(kept, env)
        gone -= {i for i in ranges if not _holds(facts[i], known)}
    return (
        [fact for i, fact in enumerate(facts) if i not in gone],
        [fact for i, fact in enumerate(facts) if i in gone],
    )


def _backed(fact: Fact, env: Any) -> bool:
    return fact.expr.free_symbols <= env.backed_var_to_val.keys()


def _learned_ranges(facts: Sequence[Fact], env: Any) -> Callable[[sympy.Symbol], Any]:
    """The ranges that a ``ShapeEnv`` finds for the symbols if it is told just these facts."""
    scratch: Any = _torch.unvalidated_shape_env()
    here = scratch._get_sloc()
    scratch._get_sloc = lambda *_args, **_kwargs: here  # nobody reads these
    for symbol, bounds in env.var_to_range.items():
        scratch.var_to_range[symbol] = bounds.unknown_int() if bounds.is_int else bounds.unknown()
        scratch.var_to_range_sloc[symbol] = _torch.ValueRangesSLoc(here, here)
        scratch.var_to_sources[symbol] = env.var_to_sources.get(symbol, [])
    scratch.backed_var_to_val.update(env.backed_var_to_val)
    for fact in facts:
        if _backed(fact, env):
            scratch.evaluate_expr(fact.expr)
    return lambda symbol: scratch.bound_sympy(scratch.replace(symbol))


def _holds(fact: Fact, known: Callable[[sympy.Symbol], Any]) -> bool:
    assert fact.symbol is not None
    bounds = known(fact.symbol)
    limit = fact.expr.args[1]
    return bool(bounds.lower >= limit if isinstance(fact.expr, sympy.Ge) else bounds.upper <= limit)
