"""Random facts and conditions, a kind at a time, for comparing the prover with z3.

About half of the conditions are made from the facts, so that many follow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import sympy
from sympy import And, Eq, Ne, Not, Or
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Max, Min, PythonMod

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

U = sympy.symbols("u0:5", integer=True)
S = sympy.symbols("s0:3", integer=True, positive=True)


class Pair(NamedTuple):
    """Facts and a condition."""

    kind: str
    facts: tuple[Any, ...]
    condition: Any


def pair(rng: Random, kind: str) -> Pair:
    """Make facts and a condition of a kind, with the ranges of sizes.

    Args:
        rng: the source of random numbers.
        kind: a key of `KINDS`.
    """
    while True:
        facts, condition = KINDS[kind](rng)
        facts = [fact for fact in facts if fact != sympy.true]
        if condition not in (sympy.true, sympy.false) and sympy.false not in facts:
            used = condition.free_symbols.union(*(fact.free_symbols for fact in facts))
            ranges = [sympy.Ge(s, 1, evaluate=False) for s in S if s in used]
            return Pair(kind, (*ranges, *facts), condition)


def _relation(rng: Random, left: Any, right: Any) -> Any:
    kind = rng.choice([sympy.Le, sympy.Ge, sympy.Lt, sympy.Gt, sympy.Le, sympy.Ge, Eq, Ne])
    return kind(left, right)


def _linear(rng: Random, symbols: Any, most: int = 3) -> Any:
    chosen = rng.sample(symbols, rng.randint(1, min(most, len(symbols))))
    return sum(rng.choice([1, 1, -1, 2, -2, 3]) * s for s in chosen) + rng.randint(-4, 6)


def _bounds(rng: Random, symbols: Any, low: int = -3, high: int = 12) -> list[Any]:
    facts: list[Any] = []
    for symbol in symbols:
        least = rng.randint(low, high)
        if rng.random() < 0.8:
            facts.append(symbol >= least)
        if rng.random() < 0.6:
            facts.append(symbol <= least + rng.randint(0, 10))
    return facts


def _chain(rng: Random) -> tuple[list[Any], Any]:
    length = rng.randint(2, 5)
    symbols = rng.sample([*U, *S], length)
    steps = [rng.randint(-2, 3) for _ in symbols[1:]]
    facts = [a + step <= b for a, b, step in zip(symbols, symbols[1:], steps, strict=False)]
    if rng.random() < 0.5:
        facts += _bounds(rng, symbols[:2])
    rng.shuffle(facts)
    slack = rng.randint(-1, 1)
    return facts, symbols[0] + sum(steps) + slack <= symbols[-1]


def _combined(rng: Random) -> tuple[list[Any], Any]:
    symbols = rng.sample([*U, *S], 4)
    rows = [_linear(rng, symbols) for _ in range(rng.randint(2, 4))]
    facts = [row <= 0 for row in rows]
    total = sum(rng.choice([0, 1, 1, 2, 3]) * row for row in rows)
    scaled = sympy.expand(total) + rng.randint(-3, 1)
    return facts + _bounds(rng, symbols[:1]), scaled <= 0


def _linear_pair(rng: Random) -> tuple[list[Any], Any]:
    symbols = rng.sample([*U, *S], 3)
    facts = [
        _relation(rng, _linear(rng, symbols), _linear(rng, symbols, 1))
        for _ in range(rng.randint(1, 4))
    ]
    facts += _bounds(rng, symbols)
    return facts, _relation(rng, _linear(rng, symbols, 2), rng.randint(-6, 12))


def _equalities(rng: Random) -> tuple[list[Any], Any]:
    symbols = rng.sample(U, 4)
    facts = [Eq(symbols[at], _linear(rng, symbols[at + 1 :], 2)) for at in range(rng.randint(1, 2))]
    function = rng.choice(
        [
            lambda e: e,
            lambda e: FloorDiv(e, 3),
            lambda e: PythonMod(e, 4),
            lambda e: 2 * e,
            lambda e: e * symbols[3],
        ]
    )
    left = function(symbols[0])
    right = function(facts[0].rhs if isinstance(facts[0], Eq) else symbols[1])
    facts += _bounds(rng, symbols[1:3])
    return facts, _relation(rng, left, right + rng.choice([0, 0, 0, 1, -1]))


def _floors(rng: Random) -> tuple[list[Any], Any]:
    x, y = rng.sample([*U, *S], 2)
    k, m = rng.randint(2, 8), rng.randint(2, 4)
    divide = rng.choice([FloorDiv, FloorDiv, CeilDiv])
    facts = [_relation(rng, divide(x, k), rng.choice([y, rng.randint(0, 5)]))]
    facts += _bounds(rng, [x, y], 0)
    bound = rng.randint(0, 12)
    asked = rng.choice(
        [
            lambda: _relation(rng, x, k * y + rng.randint(-2, k)),
            lambda: _relation(rng, FloorDiv(x, k * m), bound),
            lambda: _relation(rng, k * FloorDiv(x, k), x + rng.randint(-k, k)),
            lambda: _relation(rng, x, bound * k),
            lambda: _relation(rng, FloorDiv(x + rng.randint(0, k), m), bound),
            lambda: FloorDiv(x, k) <= FloorDiv(x + rng.randint(0, 2 * k), k),
            lambda: FloorDiv(FloorDiv(x, k), m) <= FloorDiv(x, k * m),
        ]
    )()
    return facts, asked


def _moduli(rng: Random) -> tuple[list[Any], Any]:
    x, y = rng.sample([*U, *S], 2)
    k = rng.choice([2, 3, 4, 6, 8, 12, 16])
    facts = [Eq(PythonMod(x, k), rng.choice([0, 0, 0, rng.randrange(k)]))]
    if rng.random() < 0.6:
        facts.append(Eq(PythonMod(y, rng.choice([k, 2, 4, 6])), rng.choice([0, 0, 1])))
    if rng.random() < 0.3:
        facts += _bounds(rng, [x], 0)
    d = rng.choice([2, 3, 4, 6, k])
    asked = rng.choice(
        [
            lambda: Eq(PythonMod(x, d), rng.choice([0, 0, 1])),
            lambda: Eq(PythonMod(x * rng.randint(1, 6), d), 0),
            lambda: Eq(PythonMod(x + rng.choice([0, k, 1, d]), d), 0),
            lambda: Eq(PythonMod(x + rng.choice([1, 2, -1]) * y, d), rng.choice([0, 0, 1])),
            lambda: Eq(k * FloorDiv(x, k), x),
            lambda: PythonMod(y, d) < rng.randint(1, d + 1),
            lambda: PythonMod(x + y, d) >= rng.randint(-1, 1),
            lambda: Ne(x, rng.randint(0, 20)),
            lambda: Eq(PythonMod(x * y, d), 0),
        ]
    )()
    return facts, asked


def _extremes(rng: Random) -> tuple[list[Any], Any]:
    x, y, z = rng.sample([*U, *S], 3)
    kind = rng.choice([Max, Min])
    n = rng.randint(-2, 6)
    facts = [_relation(rng, kind(x, y), rng.choice([z, n]))]
    facts += _bounds(rng, [x, z]) if rng.random() < 0.6 else []
    asked = rng.choice(
        [
            lambda: _relation(rng, kind(x, y + n), x + rng.randint(-2, 2)),
            lambda: _relation(rng, x, rng.choice([z, n]) + rng.randint(-1, 1)),
            lambda: _relation(rng, Max(x, y) + Min(x, y), x + y),
            lambda: Min(x, y) <= Max(y, z),
            lambda: _relation(rng, kind(x, z), rng.choice([y, n])),
        ]
    )()
    return facts, asked


def _products(rng: Random) -> tuple[list[Any], Any]:
    x, y, z = rng.sample([*U, *S], 3)
    least = rng.choice([0, 0, -3])
    a, b = rng.randint(least, 4), rng.randint(least, 4)
    facts = [x >= a, y >= b]
    if rng.random() < 0.5:
        facts += [x <= a + rng.randint(0, 6), y <= b + rng.randint(0, 6)]
    if rng.random() < 0.5:
        facts.append(_relation(rng, rng.choice([x, y, x * y]), z))
    asked = rng.choice(
        [
            lambda: x * y >= a * b + rng.randint(-1, 1),
            lambda: x * y >= x,
            lambda: _relation(rng, x * y, rng.randint(0, 80)),
            lambda: _relation(rng, x * z, y * z),
            lambda: x * x >= a * a,
            lambda: Eq(FloorDiv(x * y, y), x) if b > 0 else x * y >= y,
            lambda: (x + 1) * y >= x * y,
            lambda: _relation(rng, z, x + rng.randint(-2, 2)),
        ]
    )()
    return facts, asked


def _disjunctions(rng: Random) -> tuple[list[Any], Any]:
    symbols = rng.sample([*U, *S], 3)

    def atom() -> Any:
        a, b = rng.sample(symbols, 2)
        return _relation(rng, a + rng.randint(-2, 2), rng.choice([b, rng.randint(-1, 6)]))

    facts = [
        Or(atom(), rng.choice([atom(), And(atom(), atom())])) for _ in range(rng.randint(1, 2))
    ]
    facts += [atom() for _ in range(rng.randint(0, 2))]
    asked = rng.choice([atom, lambda: Or(atom(), atom()), lambda: Not(And(atom(), atom()))])()
    if rng.random() < 0.4 and isinstance(facts[0], Or):
        asked = Or(*facts[0].args[:1], *(arg for arg in facts[0].args[1:]), atom())
    return facts, asked


def _divisors(rng: Random) -> tuple[list[Any], Any]:
    x, y, z = rng.sample([*U, *S], 3)
    d = rng.choice(S)
    if d in (x, y, z):
        x, y, z = rng.sample(U, 3)
    facts = [rng.choice([Eq(PythonMod(x, d), 0), x >= 0, Eq(x, d * y), x <= z])]
    facts += _bounds(rng, [y], 0) if rng.random() < 0.5 else [d >= rng.randint(1, 4)]
    asked = rng.choice(
        [
            lambda: Eq(PythonMod(x * y, d), 0),
            lambda: Eq(PythonMod(x + d, d), rng.choice([0, PythonMod(x, d)])),
            lambda: Eq(d * FloorDiv(x, d), x),
            lambda: d * FloorDiv(x, d) <= x + rng.randint(-1, 1),
            lambda: PythonMod(x, d) < d + rng.randint(-1, 1),
            lambda: PythonMod(x, d) >= rng.randint(-1, 1),
            lambda: FloorDiv(x, d) <= x,
            lambda: FloorDiv(x, d) >= rng.randint(-1, 1),
            lambda: Eq(FloorDiv(x * d, d), x),
            lambda: Eq(FloorDiv(x, d), y),
            lambda: _relation(rng, FloorDiv(x, d), FloorDiv(z, d)),
        ]
    )()
    return facts, asked


def _nested(rng: Random) -> tuple[list[Any], Any]:
    x, y, z = rng.sample([*U, *S], 3)

    def grown(depth: int) -> Any:
        if depth == 0:
            return rng.choice([x, y, z, x + y, x - z, 2 * y])
        inner, k = grown(depth - 1), rng.randint(2, 6)
        return rng.choice(
            [
                lambda: FloorDiv(inner + rng.randint(-2, 4), k),
                lambda: PythonMod(inner, k),
                lambda: Max(inner, rng.choice([x, y, k])),
                lambda: Min(inner, rng.choice([y, z, k])),
                lambda: inner * rng.randint(2, 3) + rng.randint(-3, 3),
                lambda: CeilDiv(inner, k),
            ]
        )()

    facts = [_relation(rng, grown(rng.randint(1, 2)), rng.choice([x, y, z, rng.randint(0, 9)]))]
    facts += _bounds(rng, [x, y, z], 0)
    asked = grown(rng.randint(1, 3))
    if rng.random() < 0.3:
        equal = Eq(rng.choice([x, y]), z + rng.randint(0, 2))
        return [*facts, equal], _relation(rng, asked, asked.xreplace({equal.lhs: equal.rhs}))
    return facts, _relation(rng, asked, rng.choice([x, y, rng.randint(-2, 12)]))


def _many(rng: Random) -> tuple[list[Any], Any]:
    symbols = [*U, *S]
    facts = [
        rng.choice([1, 1, 2]) * a + rng.randint(-2, 3) <= rng.choice([1, 1, 2]) * b
        for a, b in (sorted(rng.sample(symbols, 2), key=str) for _ in range(rng.randint(6, 12)))
    ]
    facts += _bounds(rng, rng.sample(symbols, 3), 0)
    a, b, c = rng.sample(symbols, 3)
    asked = rng.choice([lambda: a + rng.randint(-1, 1) <= b, lambda: a + c <= 2 * b + 1])()
    return facts, asked


def _mixed(rng: Random) -> tuple[list[Any], Any]:
    kinds = [_chain, _equalities, _floors, _moduli, _extremes, _products, _linear_pair, _divisors]
    first, second = rng.choice(kinds)(rng), rng.choice(kinds)(rng)
    return [*first[0], *second[0]], rng.choice([first, second])[1]


KINDS: dict[str, Callable[[Random], tuple[list[Any], Any]]] = {
    "chains": _chain,
    "sums of facts": _combined,
    "linear": _linear_pair,
    "equalities": _equalities,
    "floor division": _floors,
    "modulo": _moduli,
    "min and max": _extremes,
    "products": _products,
    "disjunctions": _disjunctions,
    "symbolic divisors": _divisors,
    "nested functions": _nested,
    "many facts": _many,
    "mixed": _mixed,
}
"""The kinds, each with a function that makes facts and a condition."""
