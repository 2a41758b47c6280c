"""Other sizes that a frame was compiled for: they satisfy all its guards and ranges.

Each symbol is tried at the ends of its range, at 0 and 1 where they are allowed, at primes and powers
of two, at what guards compare it with and that plus and minus one, and at multiples of what must divide
it: one symbol at a time, the others as in the example, then several at once. What the frame knows to
be equal follows. Where a choice violates a fact, other symbols are moved until all facts hold, each time
by the smallest number of facts that are violated then (the min-conflicts heuristic of Minton et al.,
1992); it is incomplete, so not everything that guards admit is found.
"""

from __future__ import annotations

import random
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import sympy

from .errors import CaptureError
from .exprs import decode_expr
from .materialize import Symbols

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .desc import ExprDesc
    from .desc_env import ShapeEnvDesc, SymbolDesc
    from .desc_frame import CaptureDesc

__all__ = ["SizeSearch"]

_COMMON = (0, 1, 2, 3, 5, 7, 8, 9, 13, 16, 17, 31, 32, 33, 61, 64, 65, 127, 128, 129, 251, 257)
_LARGE = (512, 1009, 1024, 1025, 4099)
_MOST = 1 << 14
"""The largest size that is tried, unless a range or a guard names a larger one."""
_TRIES = 60
"""Random choices of all symbols together for each value of one."""
_EFFORT = 20_000
"""So often facts are tried without finding sizes before no more choices are repaired."""
_MOVES = 12
"""So often a symbol is moved for one of them."""
_NEAR = (*range(1, 41), 48, 64, 96, 128, 192, 256, 512, 1024, 4096)
"""How far a symbol is moved, up and down."""


class SizeSearch:
    """The sizes of one frame.

    Args:
        desc: the frame.
        elements: how many elements an input may have at most.
        seed: of the random choices.

    Attributes:
        example: the values of the symbols that can be chosen, as recorded.
    """

    def __init__(self, desc: CaptureDesc, *, elements: int = 1 << 22, seed: int = 0) -> None:
        self._desc = desc
        self._elements = elements
        self._random = random.Random(seed)
        env = desc.shape_env
        self._replaced = {} if env is None else _replacements(env)
        chosen = () if env is None else (s for s in env.symbols if _is_size(s))
        self._symbols = {s.name: s for s in chosen if s.name not in self._replaced}
        self.example = {name: _hint(s) for name, s in self._symbols.items()}
        self._values = {name: self._candidates(s) for name, s in self._symbols.items()}
        self._left = _EFFORT

    def __iter__(self) -> Iterator[dict[str, int]]:
        """Values of all sizes by symbol, none twice, the example first."""
        seen: set[tuple[int, ...]] = set()
        self._left = _EFFORT
        for chosen, wanted in self._choices():
            if not _unseen(chosen, seen):
                continue
            found = self.completed(chosen)
            if found is None and wanted and self._left > 0:
                repaired = self._repaired(chosen, wanted)
                if repaired is not None and _unseen(repaired, seen):
                    found = self.completed(repaired)
                    self._left = _EFFORT if found else self._left
            if found is not None:
                yield found

    def _choices(self) -> Iterator[tuple[dict[str, int], str]]:
        """Values of the symbols, and the name of one that is to keep its value."""
        yield dict(self.example), ""
        if not self.example:
            return
        width = max(len(values) for values in self._values.values())
        for at in range(width):
            for name, values in self._values.items():
                if at < len(values):
                    yield {**self.example, name: values[at]}, name
        names = list(self._values)
        for _ in range(_TRIES * width):
            chosen = {n: self._random.choice(values) for n, values in self._values.items()}
            yield chosen, self._random.choice(names)

    @cached_property
    def _facts(self) -> list[Any]:
        env = self._desc.shape_env
        return [] if env is None else _facts(env, self._replaced)

    @cached_property
    def _facts_of(self) -> dict[str, list[int]]:
        """The positions of the facts on each symbol."""
        found: dict[str, list[int]] = {name: [] for name in self._symbols}
        for i, fact in enumerate(self._facts):
            for symbol in fact.free_symbols:
                found.get(symbol.name, []).append(i)
        return found

    def _violated(self, chosen: dict[str, int], facts: Iterable[int]) -> set[int]:
        """The facts that do not hold of these values, of some."""
        return {i for i in facts if not self._holds(self._facts[i], chosen)}

    def _holds(self, fact: Any, chosen: dict[str, int]) -> bool:
        self._left -= 1
        return _holds(fact, chosen)

    def _repaired(self, chosen: dict[str, int], wanted: str) -> dict[str, int] | None:
        """Values of which no fact is violated, with that of one symbol as it is; ``None`` if not found."""
        chosen = dict(chosen)
        violated = self._violated(chosen, range(len(self._facts)))
        for _ in range(_MOVES):
            if not violated or self._left <= 0:
                break
            fact = self._facts[min(violated)]
            moves = [
                (name, value)
                for name in sorted(s.name for s in fact.free_symbols)
                if name in self._symbols and name != wanted
                for value in self._moved(fact, name, chosen)
            ]
            if not moves:
                return None
            self._random.shuffle(moves)
            made = [({**chosen, name: value}, self._facts_of[name]) for name, value in moves]
            left = [violated.difference(on) | self._violated(new, on) for new, on in made]
            violated, (chosen, _) = min(zip(left, made, strict=True), key=lambda each: len(each[0]))
        return None if violated else chosen

    def _moved(self, fact: Any, name: str, chosen: dict[str, int]) -> list[int]:
        """A few other values of a symbol with which a fact holds: near ones, and some far off."""

        def holding(steps: tuple[int, ...]) -> Iterator[int]:
            for step in steps:
                for value in (chosen[name] + step, chosen[name] - step):
                    if value >= 0 and self._holds(fact, {**chosen, name: value}):
                        yield value

        roots = _roots(fact, name, chosen) if isinstance(fact, sympy.Eq) else []
        return [*roots, *islice(holding(_NEAR), 3), *islice(holding(_NEAR[::-1]), 2)]

    def smaller(self, sizes: dict[str, int], most: int) -> list[dict[str, int]]:
        """Some sizes of which one is smaller than in these and the others are the same.

        From the least allowed ones up to the next smaller ones.
        """
        found: list[dict[str, int]] = []
        for name, symbol in self._symbols.items():
            lower, size = max(_bound(symbol.lower, 0), 0), sizes[name]
            parts = [lower + (size - lower) * part // 8 for part in (1, 2, 4, 6)]
            values = {lower, lower + 1, lower + 2, lower + 4, *parts}
            values |= {size - step for step in (1, 2, 3, 4, 8)}
            for value in sorted(n for n in values if lower <= n < size):
                chosen = {n: sizes[n] for n in self.example} | {name: value}
                if (complete := self.completed(chosen)) is not None:
                    found.append(complete)
        return sorted(found, key=lambda each: sum(each.values()))[:most]

    def completed(self, chosen: dict[str, int]) -> dict[str, int] | None:
        """All sizes, those that follow too; ``None`` if the frame was not compiled for them."""
        found: dict[str, int] = dict(chosen)
        values: dict[str, Any] = {n: sympy.Integer(value) for n, value in chosen.items()}
        for name, expr in self._replaced.items():
            value = expr.xreplace(
                {s: values[s.name] for s in expr.free_symbols if s.name in values}
            )
            if getattr(value, "is_Float", False):
                values[name] = value  # a scalar of the program, and no size
                continue
            if not getattr(value, "is_Integer", False):
                return None
            found[name], values[name] = int(value), value
        if any(value < 0 for value in found.values()):
            return None
        symbols = Symbols(self._desc.shape_env, found)
        try:
            if found:
                symbols.check_guards()
            self._check_elements(symbols)
        except (CaptureError, ArithmeticError, TypeError, ValueError):  # no number comes of it
            return None
        return found

    def _check_elements(self, symbols: Symbols) -> None:
        for entry in self._desc.inputs:
            if entry.tensor is not None:
                total = 1
                for n in entry.tensor.size:
                    total *= n if isinstance(n, int) else symbols.integer(n, entry.name)
                if total > self._elements:
                    raise CaptureError("too many elements", where=entry.name)

    def _candidates(self, symbol: SymbolDesc) -> list[int]:
        """Values for one symbol, those at which code is likely to be wrong first."""
        lower, upper = _bound(symbol.lower, 0), _bound(symbol.upper, None)
        named = self._named(symbol.name)
        near = [n + step for n in sorted(named) for step in (0, 1, -1)]
        ends = [lower, lower + 1, *([] if upper is None else [upper, upper - 1])]
        factors = [n for n in named if 1 < n <= _MOST]
        multiples = [n * k for n in sorted(factors) for k in (1, 2, 3, 5)]
        found = dict.fromkeys([*ends, *near, *_COMMON, *multiples, *_LARGE])
        most = max([_MOST, *near])
        return [n for n in found if lower <= n <= most and (upper is None or n <= upper)]

    def _named(self, name: str) -> set[int]:
        """The numbers in guards on a symbol."""
        env = self._desc.shape_env
        found: set[int] = set()
        for guard in env.guards if env is not None else ():
            expr: Any = decode_expr(guard.expr)
            if any(s.name == name for s in expr.free_symbols):
                found |= {int(n) for n in expr.atoms(sympy.Integer) if 0 <= n < 1 << 31}
        return found


def _is_size(symbol: SymbolDesc) -> bool:
    """Whether a symbol stands for an integer that an input brings."""
    return bool(symbol.sources) and _hint(symbol) >= 0


def _hint(symbol: SymbolDesc) -> int:
    """The recorded size; -1 if there is none, or it is no integer."""
    return _bound(symbol.hint, -1)


def _bound(expr: ExprDesc | None, default: Any) -> Any:
    if expr is None:
        return default
    value: Any = decode_expr(expr)
    return int(value) if value.is_Integer else default


def _replacements(env: ShapeEnvDesc) -> dict[str, Any]:
    """What symbols are known to be, over symbols that nothing is known to be of."""
    known: dict[Any, Any] = {decode_expr(r.symbol): decode_expr(r.expr) for r in env.replacements}
    found: dict[str, Any] = {}
    for symbol, expr in known.items():
        for _ in known:
            if not expr.free_symbols & known.keys():
                break
            expr = expr.xreplace(known)
        found[symbol.name] = expr
    return found


def _facts(env: ShapeEnvDesc, replaced: dict[str, Any]) -> list[Any]:
    """Guards and ranges, over the symbols that nothing is known to be of."""
    symbols = {s.name: sympy.Symbol(s.name, integer=True) for s in env.symbols}
    known: dict[Any, Any] = {}

    def plain(expr: Any) -> Any:
        for s in expr.free_symbols - known.keys():
            value = replaced.get(s.name)
            known[s] = s if value is None else value
        return expr.xreplace({s: known[s] for s in expr.free_symbols if known[s] is not s})

    found: list[Any] = [plain(decode_expr(guard.expr)) for guard in env.guards]
    for symbol in env.symbols:
        value = replaced.get(symbol.name, symbols[symbol.name])
        if symbol.lower is not None:
            found.append(sympy.Ge(value, decode_expr(symbol.lower)))
        if symbol.upper is not None:
            found.append(sympy.Le(value, decode_expr(symbol.upper)))
    return [fact for fact in found if getattr(fact, "free_symbols", None)]


def _holds(fact: Any, chosen: dict[str, int]) -> bool:
    """Whether a fact is not violated; what cannot be told is none."""
    try:
        values = {s: sympy.Integer(chosen[s.name]) for s in fact.free_symbols if s.name in chosen}
        return bool(fact.xreplace(values) != sympy.false)
    except (ArithmeticError, TypeError, ValueError):
        return False


def _roots(fact: Any, name: str, chosen: dict[str, int]) -> list[int]:
    """Where both sides of an equation are equal: found by halves, if the sides change places."""

    def sign(value: int) -> int:
        values = {s: sympy.Integer({**chosen, name: value}[s.name]) for s in known}
        difference = fact.lhs.xreplace(values) - fact.rhs.xreplace(values)
        return int(sympy.sign(difference))

    known = [s for s in fact.free_symbols if s.name in chosen]
    low, high = 1, _MOST
    try:
        at_low, at_high = sign(low), sign(high)
        while at_low * at_high < 0 and high - low > 1:
            middle = (low + high) // 2
            at_middle = sign(middle)
            if at_middle == 0:
                return [middle]
            low, high = (middle, high) if at_middle == at_low else (low, middle)
    except (ArithmeticError, TypeError, ValueError):
        return []
    return [n for n, found in ((low, at_low), (high, at_high)) if found == 0]


def _unseen(chosen: dict[str, int], seen: set[tuple[int, ...]]) -> bool:
    """Whether values come for the first time; they are noted."""
    key = tuple(chosen.values())
    if key in seen:
        return False
    seen.add(key)
    return True
