"""Other sizes that a frame was compiled for: they satisfy all its guards and ranges.

Each symbol is tried at the ends of its range, at 0 and 1 where they are allowed, at primes and powers
of two, at what guards compare it with and that plus and minus one, and at multiples of what must divide
it: one symbol at a time, the others as in the example, then several at once. What the frame knows to
be equal follows. Where a choice violates a fact, other symbols are moved until all facts hold, each time
by the smallest number of facts that are violated then (the min-conflicts heuristic of Minton et al.,
1992); it is incomplete, so not everything that guards admit is found.

A size of which no data can satisfy the runtime asserts is none that is found: unbacked symbols are
searched together with the sizes, and `data_search` makes data that gives their values.
"""

from __future__ import annotations

import math
import random
import re
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import sympy

from torch_fakeify.encoding.exprs import decode_expr
from torch_fakeify.errors import CaptureError
from torch_fakeify.records.aliasing import itemsize
from torch_fakeify.records.rewrite import walk
from torch_fakeify.records.symbol_names import has_number
from torch_fakeify.records.tensor import MetaTensorDesc, SymDesc
from torch_fakeify.render.readable_names import readable_source

from .requirements import (
    Fact,
    asserts_of,
    data_symbols,
    guards_of,
    is_integer,
    ranges_of,
)
from .size_names import requested_sizes
from .symbol_values import Symbols, default_of, integer_of, substituted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from torch_fakeify.records.frame import CaptureDesc
    from torch_fakeify.records.shape_env import SymbolDesc

    from .size_names import RequestedSize

_COMMON = (0, 1, 2, 3, 5, 7, 8, 9, 13, 16, 17, 31, 32, 33, 61, 64, 65, 127, 128, 129, 251, 257)
_LARGE = (512, 1009, 1024, 1025, 4099)
_MOST = 1 << 14
"""The largest size that is tried, unless a range or a guard contains a larger one."""
_TRIES = 60
"""Random choices of all symbols for each value of one symbol."""
_EFFORT = 20_000
"""Number of evaluated facts without success after which choices are no longer repaired."""
_MOVES = 12
"""Largest number of moves in one repair."""
_NEAR = (*range(1, 41), 48, 64, 96, 128, 192, 256, 512, 1024, 4096)
"""Distances by which a symbol is moved, up and down."""
_ROUNDS = 24
"""Number of starting points in the search for sizes that fit the requested ones."""


class Chosen(NamedTuple):
    """Values of all symbols of a frame that its guards and runtime asserts admit together."""

    sizes: dict[str, int]
    """Values of the symbols of inputs, by name; see `size_edits.rehint`."""
    data: dict[str, int]
    """Values of the unbacked symbols that the frame computes from data, by name."""
    requested: frozenset[str] = frozenset()
    """Names of the symbols whose value was requested."""


def choose_sizes(desc: CaptureDesc, sizes: Mapping[str, int]) -> Chosen:
    """Find sizes for a frame with some requested values by name; others stay as recorded if possible.

    Raises:
        CaptureError: a name is unknown, or no sizes were found with which all facts hold; the error
            names the fact and the user's line.
    """
    return SizeSearch(desc, elements=None).choose(requested_sizes(desc, sizes))


class SizeSearch:
    """Searches sizes of one frame that its guards and asserts admit, with inputs of at most ``elements``.

    Attributes:
        example: the recorded values of the symbols that can be chosen.
    """

    def __init__(self, desc: CaptureDesc, *, elements: int | None = 1 << 22, seed: int = 0) -> None:
        self._desc = desc
        self._elements = elements
        self._random = random.Random(seed)
        self._replaced = _replacements(desc)
        self._of_data = data_symbols(desc)
        """Unbacked symbols that the graph computes from data."""
        free = (s for s in desc.symbols if s.name not in self._replaced)
        chosen = [s for s in free if s.name in self._of_data or _is_size(s)]
        self._symbols = {s.name: s for s in chosen if s.name not in self._of_data}
        self.example = {name: _example(s) for name, s in self._symbols.items()}
        found = [s for s in chosen if s.name in self._of_data and is_integer(s)]
        self._data = {s.name: default_of(s) for s in found}
        """A value of each symbol from data that can be chosen."""
        self._left = _EFFORT

    @cached_property
    def _values(self) -> dict[str, list[int]]:
        return {name: self._candidates(s) for name, s in self._symbols.items()}

    def __iter__(self) -> Iterator[dict[str, int]]:
        """Yield distinct values of all sizes by symbol, the example first."""
        seen: set[tuple[int, ...]] = set()

        def is_new(chosen: dict[str, int]) -> bool:
            before = len(seen)
            seen.add(tuple(chosen.values()))
            return len(seen) > before

        self._left = _EFFORT
        for chosen, fixed in self._choices():
            if not is_new(chosen):
                continue
            found = self.completed(chosen)
            if found is None and fixed and self._left > 0:
                repaired = self._repaired({**chosen, **self._data}, (fixed,))
                repaired = repaired and {name: repaired[name] for name in chosen}
                if repaired and is_new(repaired):
                    found = self.completed(repaired)
                    self._left = _EFFORT if found else self._left
            if found is not None:
                yield found

    def _choices(self) -> Iterator[tuple[dict[str, int], str]]:
        """Yield values of the symbols, and the name of one whose value must not change."""
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
    def _guards(self) -> list[Fact]:
        return guards_of(self._desc)

    @cached_property
    def _not_chosen(self) -> dict[str, Any]:
        """The replacements, and the recorded values of symbols that cannot be chosen, by name."""
        found = dict(self._replaced)
        names = self._symbols.keys() | self._data.keys() | found.keys()
        for symbol in self._desc.symbols:
            if symbol.name not in names and has_number(symbol):
                assert symbol.hint is not None
                found[symbol.name] = decode_expr(symbol.hint)
        for name, expr in self._replaced.items():
            found[name] = substituted(expr, found)
        return found

    @cached_property
    def _facts(self) -> list[Fact]:
        """The guards, ranges and runtime asserts of the frame, over the symbols that are chosen."""
        ranges = (fact for _, fact in ranges_of(self._desc))
        found = [
            fact._replace(expr=substituted(fact.expr, self._not_chosen))
            for fact in (*self._guards, *ranges, *asserts_of(self._desc))
        ]
        found += _view_facts(self._desc, self._not_chosen, self.example)
        return [fact for fact in found if fact.expr != sympy.true]

    @cached_property
    def _facts_of(self) -> dict[str, list[int]]:
        """Positions of the facts about each symbol."""
        found: dict[str, list[int]] = {name: [] for name in (*self._symbols, *self._data)}
        for i, fact in enumerate(self._facts):
            for symbol in fact.expr.free_symbols:
                found.get(symbol.name, []).append(i)
        return found

    def _violated(self, chosen: dict[str, int], facts: Iterable[int]) -> set[int]:
        return {i for i in facts if not self._holds(self._facts[i].expr, chosen)}

    def _holds(self, fact: Any, chosen: dict[str, int]) -> bool:
        self._left -= 1
        return _holds(fact, chosen)

    def _repaired(self, chosen: dict[str, int], fixed: Collection[str]) -> dict[str, int] | None:
        """Move symbols until no fact is violated, except those in ``fixed``; ``None`` if not found."""
        chosen = dict(chosen)
        violated = self._violated(chosen, range(len(self._facts)))
        for _ in range(_MOVES):
            if not violated or self._left <= 0:
                break
            fact = self._facts[min(violated)].expr
            moves = [
                (name, value)
                for name in sorted(s.name for s in fact.free_symbols)
                if name in chosen and name not in fixed
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
        """Some values of a symbol with which a fact holds: near ones and a few far ones."""
        record = self._symbols.get(name) or self._of_data[name]
        least = min(0, integer_of(record.lower, 0))

        def holding(distances: tuple[int, ...]) -> Iterator[int]:
            for distance in distances:
                for value in (chosen[name] + distance, chosen[name] - distance):
                    if value >= least and self._holds(fact, {**chosen, name: value}):
                        yield value

        roots = _roots(fact, name, chosen) if isinstance(fact, sympy.Eq) else []
        return [*roots, *islice(holding(_NEAR), 3), *islice(holding(_NEAR[::-1]), 2)]

    def smaller(self, sizes: dict[str, int], most: int) -> list[dict[str, int]]:
        """Return at most ``most`` sizes in which one value is smaller, in ascending order of their sum."""
        found: list[dict[str, int]] = []
        for name, symbol in self._symbols.items():
            lower, size = max(integer_of(symbol.lower, 0), 0), sizes[name]
            parts = [lower + (size - lower) * part // 8 for part in (1, 2, 4, 6)]
            values = {lower, lower + 1, lower + 2, lower + 4, *parts}
            values |= {size - step for step in (1, 2, 3, 4, 8)}
            for value in sorted(n for n in values if lower <= n < size):
                chosen = {n: sizes[n] for n in self.example} | {name: value}
                if (complete := self.completed(chosen)) is not None:
                    found.append(complete)
        return sorted(found, key=lambda each: sum(each.values()))[:most]

    def completed(self, chosen: Mapping[str, int]) -> dict[str, int] | None:
        """Add the sizes that follow from chosen ones; ``None`` if the facts do not admit them."""
        made = self._all(chosen, {})
        return None if made is None else made.sizes

    def _all(self, chosen: Mapping[str, int], data: Mapping[str, int]) -> Chosen | None:
        """Compute the values of all symbols; ``None`` if a fact is violated."""
        values = self._with_data(dict(chosen), data)
        if values is None:
            return None
        for name, expr in self._replaced.items():
            value = substituted(expr, values)
            if getattr(value, "is_Float", False) or value.free_symbols:
                continue  # a scalar of the program, or a ragged size
            if not getattr(value, "is_Integer", False):
                return None
            values[name] = int(value)
        found = {n: value for n, value in values.items() if n not in self._of_data}
        try:
            if self._elements is not None and self._most_elements(values) > self._elements:
                return None
        except (CaptureError, ArithmeticError, AssertionError, TypeError, ValueError):
            return None  # a size has no value
        return Chosen(found, {n: value for n, value in values.items() if n in self._of_data})

    def _with_data(self, chosen: dict[str, int], data: Mapping[str, int]) -> dict[str, int] | None:
        """Add values of symbols from data with which the facts hold; ``None`` if not found."""
        full = {**chosen, **self._data, **data}
        if all(_holds(fact.expr, full) for fact in self._facts):
            return full
        left, self._left = self._left, _EFFORT
        fixed = {*chosen, *data}
        found = None if fixed >= full.keys() else self._repaired(full, fixed)
        self._left = left
        return found

    def _most_elements(self, values: Mapping[str, int]) -> int:
        """Number of elements of the largest input."""
        symbols = Symbols(self._desc.shape_env, values)
        sizes = [each.tensor.size for each in self._desc.inputs if each.tensor is not None]
        return max((math.prod(symbols.integer(n, "") for n in size) for size in sizes), default=0)

    # --- requested sizes ---

    def choose(self, requested: Sequence[RequestedSize]) -> Chosen:
        """Find values of all symbols with the requested ones; see `choose_sizes`."""
        fixed = self._fixed(requested)
        start = {**self.example, **self._data, **fixed}
        for tried in self._starts(start, fixed):
            sizes = {n: value for n, value in tried.items() if n not in self._data}
            found = self._all(sizes, {n: value for n, value in fixed.items() if n in self._data})
            if found is not None:
                return found._replace(requested=self._requested_symbols(requested))
        raise self._refusal(start, fixed)

    def _requested_symbols(self, requested: Sequence[RequestedSize]) -> frozenset[str]:
        exprs = [self._replaced.get(str(each.expr), each.expr) for each in requested]
        names = {s.name for expr in exprs for s in expr.free_symbols}
        return frozenset(names | {str(each.expr) for each in requested})

    def _fixed(self, requested: Sequence[RequestedSize]) -> dict[str, int]:
        """The values of requested symbols; a requested expression becomes a further fact."""
        fixed: dict[str, int] = {}

        def fix(name: str, each: RequestedSize) -> None:
            value = fixed.setdefault(name, each.value)
            if value != each.value:
                found = f"{value}, {each.value}"
                raise CaptureError("a size has two values", where=each.name, found=found)

        for each in requested:
            record = next((s for s in self._desc.symbols if s.name == str(each.expr)), None)
            if record is not None and record.name not in self._replaced:
                self._admit(record, each.name)
                fix(record.name, each)
        for each in requested:
            expr = substituted(each.expr, self._not_chosen)
            if expr.is_Symbol:
                fix(expr.name, each)
            elif not expr.is_Integer:
                fact = sympy.Eq(expr, each.value)
                self._facts.append(Fact(fact, f"{each.name} = {expr} = {each.value}"))
                self._follow(fact, fixed, each.value)
            elif int(expr) != each.value:
                raise CaptureError(
                    "a size is the same at each call of the frame",
                    where=each.name,
                    expected=str(expr),
                    found=str(each.value),
                    fix=None if str(each.expr) in self._of_data else "Record it with a dynamic dim",
                )
        return fixed

    def _follow(self, fact: Any, fixed: dict[str, int], value: int) -> None:
        """Solve an equation for its symbol, if it has exactly one."""
        names = {s.name for s in getattr(fact, "free_symbols", ())}
        if len(names) == 1 and not names & fixed.keys():
            (name,) = names
            for root in _roots(fact, name, {name: 0}, max(_MOST, 4 * abs(value)))[:1]:
                fixed[name] = root

    def _admit(self, record: SymbolDesc, name: str) -> None:
        """Make a symbol choosable that a search would not change."""
        if record.name in self._symbols or record.name in self._data:
            return
        if not is_integer(record) or (record.hint is not None and not has_number(record)):
            raise CaptureError(
                "a number of the program is not a size", where=name, found=record.name
            )
        self._symbols[record.name] = record
        self.example[record.name] = integer_of(record.hint, 0)

    def _starts(
        self, start: dict[str, int], fixed: Mapping[str, int]
    ) -> Iterator[Mapping[str, int]]:
        """Yield starting values with which the facts hold, near the recorded ones first."""
        every = range(len(self._facts))
        if not self._violated(start, every):
            yield start
        self._left = 4 * _EFFORT
        for at in range(_ROUNDS):
            unchanged = {*fixed, *self._symbols} if at == 0 else fixed
            begun = dict(start)
            if at > 4:
                begun.update({n: self._random.choice(v) for n, v in self._values.items() if v})
                begun.update(fixed)
            repaired = self._repaired(begun, unchanged)
            if repaired is not None:
                yield repaired

    def _readable_names(self) -> dict[str, str]:
        return {
            s.name: readable_source(s.sources[0].name) if s.sources else s.name
            for s in self._desc.symbols
        }

    def _refusal(self, start: dict[str, int], fixed: Mapping[str, int]) -> CaptureError:
        """The error for sizes that violate a fact; names the most relevant one."""

        def rank(at: int) -> tuple[int, bool, int]:
            names = {s.name for s in self._facts[at].expr.free_symbols}
            far = 0 if names <= fixed.keys() else 1 if names & fixed.keys() else 2
            return far, self._facts[at].line is None, at

        violated = sorted(self._violated(start, range(len(self._facts))), key=rank)
        names = sorted(fixed) or sorted(start)
        words = self._readable_names()
        if not violated:
            requested = ", ".join(f"{words[n]}={start[n]}" for n in names)
            return CaptureError(
                "no sizes were found that the frame was compiled for", found=requested
            )
        fact = self._facts[violated[0]]
        names = sorted({s.name for s in fact.expr.free_symbols} & start.keys())
        alone = rank(violated[0])[0] == 0
        return CaptureError(
            "the sizes violate what the frame was compiled for"
            if alone
            else "no other sizes were found that fit the requested ones",
            where=fact.line,
            expected=re.sub(r"\w+", lambda word: words.get(word[0], word[0]), fact.text),
            found=", ".join(f"{words[n]}={start[n]}" for n in names) or None,
            fix="Choose sizes that satisfy the guards; `torch-fakeify show FILE` lists them",
        )

    def _candidates(self, symbol: SymbolDesc) -> list[int]:
        """Values to try for one symbol, error-prone ones first."""
        lower, upper = integer_of(symbol.lower, 0), integer_of(symbol.upper, None)
        named = {
            int(n)
            for guard in self._guards
            if symbol.name in {s.name for s in guard.expr.free_symbols}
            for n in guard.expr.atoms(sympy.Integer)
            if 0 <= n < 1 << 31
        }
        near = [n + step for n in sorted(named) for step in (0, 1, -1)]
        ends = [lower, lower + 1, *([] if upper is None else [upper, upper - 1])]
        factors = [n for n in named if 1 < n <= _MOST]
        multiples = [n * k for n in sorted(factors) for k in (1, 2, 3, 5)]
        found = dict.fromkeys([*ends, *near, *_COMMON, *multiples, *_LARGE])
        most = max([_MOST, *near])
        return [n for n in found if lower <= n <= most and (upper is None or n <= upper)]


def _is_size(symbol: SymbolDesc) -> bool:
    """Whether a symbol is a size of an input or an integer input."""
    if symbol.hint is None:
        return is_integer(symbol)
    return bool(symbol.sources) and integer_of(symbol.hint, -1) >= 0


def _example(symbol: SymbolDesc) -> int:
    return default_of(symbol) if symbol.hint is None else integer_of(symbol.hint, -1)


def _replacements(desc: CaptureDesc) -> dict[str, Any]:
    """The replacements of symbols, over symbols without replacements."""
    direct: dict[Any, Any] = {decode_expr(r.symbol): decode_expr(r.expr) for r in desc.replacements}
    found: dict[str, Any] = {}
    for symbol, expr in direct.items():
        for _ in direct:
            if not expr.free_symbols & direct.keys():
                break
            expr = expr.xreplace(direct)
        found[symbol.name] = expr
    return found


def _view_facts(
    desc: CaptureDesc, values: Mapping[str, Any], example: Mapping[str, int]
) -> list[Fact]:
    """The facts that views lie inside their bases, if the example satisfies them.

    A base of static sizes that is not an input grows with its views, see `materialize`.
    """
    found: list[Fact] = []
    inputs = {entry.tensor.id for entry in desc.inputs if entry.tensor is not None}
    for entry in desc.inputs:
        for view in walk(entry.tensor, MetaTensorDesc):
            if view.base is None or (grows(view.base) and view.base.id not in inputs):
                continue
            ends = (_end(view, values), _end(view.base, values))
            if ends[0] is None or ends[1] is None:
                continue
            fact = sympy.Le(*ends)
            text = f"`{entry.name}` lies inside its base: {fact}"
            if fact.free_symbols and _holds(fact, example):
                found.append(Fact(fact, text))
    return found


def grows(base: MetaTensorDesc) -> bool:
    """Whether a base has only static sizes, so that its size is derived from its views."""
    return all(isinstance(n, int) for n in (*base.size, *base.stride, base.storage_offset))


def _end(tensor: MetaTensorDesc, values: Mapping[str, Any]) -> Any:
    """Bytes from the start of the storage to the end of a nonempty tensor; ``None`` if not computable."""
    if tensor.layout != "strided" or tensor.subclass is not None:
        return None
    numbers = (tensor.storage_offset, *tensor.size, *tensor.stride)
    exprs: list[Any] = [
        decode_expr(n.expr) if isinstance(n, SymDesc) else sympy.Integer(n)
        for n in numbers
        if isinstance(n, (int, SymDesc))
    ]
    if len(exprs) < len(numbers):
        return None
    offset, *rest = exprs
    pairs: Any = zip(rest[: tensor.ndim], rest[tensor.ndim :], strict=True)
    end: Any = sum(((n - 1) * step for n, step in pairs), offset + 1)
    return substituted(end * itemsize(tensor.dtype), values)


def _holds(fact: Any, chosen: Mapping[str, int]) -> bool:
    """Whether a fact is not false; an error in its evaluation counts as false."""
    try:
        return bool(substituted(fact, chosen) != sympy.false)
    except (ArithmeticError, AssertionError, TypeError, ValueError):
        return False


def _roots(fact: Any, name: str, chosen: dict[str, int], most: int = _MOST) -> list[int]:
    """Solutions of an equation for one symbol, by bisection between 1 and ``most``."""

    def sign(value: int) -> int:
        values = {**chosen, name: value}
        difference = substituted(fact.lhs, values) - substituted(fact.rhs, values)
        return int(sympy.sign(difference))

    low, high = 1, most
    try:
        at_low, at_high = sign(low), sign(high)
        while at_low * at_high < 0 and high - low > 1:
            middle = (low + high) // 2
            at_middle = sign(middle)
            if at_middle == 0:
                return [middle]
            low, high = (middle, high) if at_middle == at_low else (low, middle)
    except (ArithmeticError, AssertionError, TypeError, ValueError):
        return []
    return [n for n, found in ((low, at_low), (high, at_high)) if found == 0]
