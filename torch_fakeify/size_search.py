"""Other sizes that a frame was compiled for: they satisfy all its guards and ranges.

Each symbol is tried at the ends of its range, at 0 and 1 where they are allowed, at primes and powers
of two, at what guards compare it with and that plus and minus one, and at multiples of what must divide
it: one symbol at a time, the others as in the example, then several at once. What the frame knows to
be equal follows. What violates a guard is left out, so a search over guards that few sizes satisfy
finds few.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import sympy

from .errors import CaptureError
from .exprs import decode_expr
from .materialize import Symbols

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .desc import ExprDesc
    from .desc_env import ShapeEnvDesc, SymbolDesc
    from .desc_frame import CaptureDesc

__all__ = ["SizeSearch"]

_COMMON = (0, 1, 2, 3, 5, 7, 8, 9, 13, 16, 17, 31, 32, 33, 61, 64, 65, 127, 128, 129, 251, 257)
_LARGE = (512, 1009, 1024, 1025, 4099)
_MOST = 1 << 14
"""The largest size that is tried, unless a range or a guard names a larger one."""
_TRIES = 60
"""Random choices of all symbols together for each that is asked for."""


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

    def __iter__(self) -> Iterator[dict[str, int]]:
        """Values of all sizes by symbol, none twice, the example first."""
        seen: set[tuple[int, ...]] = set()
        for chosen in self._choices():
            key = tuple(chosen.values())
            if key in seen:
                continue
            seen.add(key)
            found = self.completed(chosen)
            if found is not None:
                yield found

    def _choices(self) -> Iterator[dict[str, int]]:
        yield dict(self.example)
        if not self.example:
            return
        width = max(len(values) for values in self._values.values())
        for at in range(width):
            for name, values in self._values.items():
                if at < len(values):
                    yield {**self.example, name: values[at]}
        for _ in range(_TRIES * width):
            yield {name: self._random.choice(values) for name, values in self._values.items()}

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
