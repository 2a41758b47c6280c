"""A search for values that make some facts true and another one false.

Each try starts somewhere in the domain: at 0, 1, 2, at constants of the facts, at their multiples, one
off each of these, at hints, at random. It then moves one variable at a time to a border of a fact
that stands wrong, to the place with the fewest wrong facts (as WalkSAT does, Selman, Kautz and
Cohen 1993). The same facts give the same points.
"""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import sympy
from guard_terms import INFINITIES, Point, TooLarge, holds, python_function

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_LARGE = 10**6
_STEPS = 20
_CANDIDATES = 24


class Found(NamedTuple):
    """What a search came to."""

    point: Point | None
    """Where the facts hold and the other one does not."""
    domain: int
    """How many points were found where the facts hold."""


class _Constraint:
    """A fact that must hold, or one that must not."""

    def __init__(self, expr: sympy.Basic, *, wanted: bool) -> None:
        self.wanted = wanted
        self.fact = python_function(expr)
        self.names = names_in(expr)
        relations = expr.atoms(sympy.core.relational.Relational)
        self.gaps = [g for r in sorted(relations, key=str) if (g := _gap(r)) is not None]
        self.steps = _steps(expr)

    def met(self, point: Point) -> bool:
        return holds(self.fact, point) is self.wanted

    def borders(self, name: str, point: Point) -> list[Any]:
        """Values of a variable where a relation of the fact turns, all else as it is."""
        here = point[name]
        values: list[Any] = []
        for gap in self.gaps:
            at = _value(gap, point)
            if at is None:
                continue
            values += [here - at, here + at, *(here - at * step for step in self.steps)]
            beside = _value(gap, {**point, name: here + 1})
            if beside is not None and beside != at:
                exact = isinstance(at, int) and isinstance(beside, int)
                slope = beside - at
                values.append(here - (Fraction(at, slope) if exact else at / slope))
        return values


def search(
    facts: Sequence[sympy.Basic],
    other: sympy.Basic,
    *,
    hints: Mapping[str, int | float],
    start: Sequence[Point] = (),
    tries: int = 200,
) -> Found:
    """A point where ``facts`` hold and ``other`` does not, if one turns up.

    Args:
        facts: conditions over plain variables.
        other: the condition to be false.
        hints: a value of a variable, by its name, that is worth a try.
        start: points to start from before all others.
        tries: how many starts.
    """
    constraints = [_Constraint(fact, wanted=True) for fact in facts]
    goal = _Constraint(other, wanted=False)
    symbols = sorted(
        {s for e in (*facts, other) for s in e.free_symbols if isinstance(s, sympy.Symbol)}, key=str
    )
    floats = {s.name for s in symbols if not s.is_integer}
    pools = {s.name: _pool(s.name, [*facts, other], hints) for s in symbols}
    walk = _Walk([*constraints, goal], floats, pools)
    domain = 0
    for count in range(max(tries, len(start))):
        point = dict(start[count]) if count < len(start) else {}
        for name, pool in pools.items():
            point.setdefault(name, walk.near(name, pool[count % len(pool)], keep=count < len(pool)))
        found, inside = walk.go(point)
        domain += inside
        if found is not None:
            return Found(found, domain)
        if not symbols:
            break
    return Found(None, domain)


class _Walk:
    def __init__(
        self, constraints: list[_Constraint], floats: set[str], pools: dict[str, list[int | float]]
    ) -> None:
        self.constraints = constraints
        self.goal = constraints[-1]
        self.floats = floats
        self.pools = pools
        self.random = random.Random(0)
        self.touching = {n: [c for c in constraints if n in c.names] for n in pools}

    def near(self, name: str, value: int | float, *, keep: bool) -> int | float:
        """A first value: one of the pool in turn, then any."""
        return value if keep else self.random.choice(self.pools[name])

    def go(self, point: Point) -> tuple[Point | None, bool]:
        """Walks; the point where all is as wanted, and whether the facts alone ever held."""
        inside = False
        for _ in range(_STEPS):
            wrong = [c for c in self.constraints if not c.met(point)]
            if not wrong:
                return point, True
            inside = inside or wrong == [self.goal]
            constraint = self.random.choice(wrong)
            if not constraint.names:
                break
            name = self.random.choice(constraint.names)
            point = self._move(point, name, constraint)
        return None, inside

    def _move(self, point: Point, name: str, constraint: _Constraint) -> Point:
        values = self._candidates(point, name, constraint)
        if not values:
            return point
        if self.random.random() < 0.1:
            return {**point, name: self.random.choice(values)}
        touching = self.touching[name]
        best: list[Point] = []
        fewest = len(touching) + 1
        for value in values:
            there = {**point, name: value}
            wrong = sum(not c.met(there) for c in touching)
            if wrong < fewest:
                best, fewest = [], wrong
            if wrong == fewest:
                best.append(there)
        return self.random.choice(best)

    def _candidates(self, point: Point, name: str, constraint: _Constraint) -> list[int | float]:
        borders = [b for b in constraint.borders(name, point) if math.isfinite(b)]
        pool = self.pools[name]
        values = [*borders, *self.random.sample(pool, min(4, len(pool)))]
        if name in self.floats:
            close = [y for x in values for y in _around_float(float(x))]
        else:
            close = [y for x in values for y in (math.floor(x), math.ceil(x))]
            close += [y for x in borders for y in (math.floor(x) - 1, math.ceil(x) + 1)]
        distinct = [x for x in dict.fromkeys(close) if x != point[name]]
        if len(distinct) > _CANDIDATES:
            return self.random.sample(distinct, _CANDIDATES)
        return distinct


def _around_float(x: float) -> tuple[float, ...]:
    return (x, math.nextafter(x, math.inf), math.nextafter(x, -math.inf), x + 0.5, x - 0.5)


def _pool(
    name: str, exprs: Sequence[sympy.Basic], hints: Mapping[str, int | float]
) -> list[int | float]:
    """Values worth a try for a variable."""
    is_float = any(s.name == name and not s.is_integer for e in exprs for s in e.free_symbols)
    seeds: list[int | float] = [0, 1, 2, 3]
    if name in hints:
        seeds.insert(0, hints[name])
    for expr in exprs:
        if name not in names_in(expr):
            continue
        for number in sorted(expr.atoms(sympy.Number), key=str):
            if number in INFINITIES or number is sympy.nan:
                continue
            value = int(number) if isinstance(number, sympy.Integer) else float(number)
            seeds += [value, 2 * value, -value]
        for step in _steps(expr):
            seeds += [k * step for k in (2, 3, 7)]
    rng = random.Random(name)
    spread: list[int | float] = [rng.randrange(2, 64) for _ in range(6)]
    spread += [rng.randrange(-20, 2000) for _ in range(4)]
    spread += [-1, -2, _LARGE, rng.randrange(_LARGE), 2**31, 2**62 + rng.randrange(2**20)]
    values = [y for x in seeds for y in (x, x + 1, x - 1)] + spread
    if is_float:
        values += [x + 0.5 for x in values[:12]] + [1e-3, -1e-3, 0.1, 1e10]
        return list(dict.fromkeys(map(float, values)))
    return list(dict.fromkeys(math.floor(x) for x in values))


def _steps(expr: sympy.Basic) -> list[int]:
    """The whole numbers by which a fact divides, or might: the constants above 1."""
    numbers = sorted({abs(int(n)) for n in expr.atoms(sympy.Integer)})
    return [n for n in numbers if 1 < n < _LARGE][:6]


def names_in(expr: sympy.Basic) -> list[str]:
    """The names of the variables, sorted."""
    return sorted(s.name for s in expr.free_symbols if isinstance(s, sympy.Symbol))


def _gap(relation: Any) -> Callable[[Point], Any] | None:
    """The left side of a relation less the right one."""
    left, right = relation.args
    if left in INFINITIES or right in INFINITIES:
        return None
    if not (isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr)):
        return None
    one, two = python_function(left), python_function(right)
    return lambda point: one(point) - two(point)


def _value(gap: Callable[[Point], Any], point: Point) -> float | int | None:
    try:
        value = gap(point)
    except (ArithmeticError, ValueError, TooLarge):
        return None
    if isinstance(value, int):
        return value if abs(value) < 2**900 else None
    value = float(value)
    return value if math.isfinite(value) else None
