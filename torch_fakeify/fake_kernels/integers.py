"""Search for the simplest formula of an integer that has the observed value in every row.

Formulas are enumerated from the sizes and numbers of the arguments upwards; of those with equal values
in all rows the simplest stays. Larger ones are found from both ends: what an operation must have on one
side, given the other, is looked up among those with one operation.
"""

from __future__ import annotations

import functools
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_fakeify.records import fake_kernel as fk

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    Values = NDArray[np.int64]

_MOST_ATOMS = 56
_CONSTANTS = (1, 2, 0, -1, 3, 4, 8)
_LARGEST = 1 << 40


@functools.lru_cache(maxsize=1 << 16)
def cost_of(part: Any) -> float:
    """Return how complicated a formula is: the number of its parts, more for unusual ones."""
    if isinstance(part, fk.Integer):
        return 1.0 if part.value in (0, 1, 2) else 1.3
    if isinstance(part, tuple):
        return sum(map(cost_of, part))
    fields = getattr(type(part), "__struct_fields__", None)
    if fields is None:
        return 0.0
    parts = sum(cost_of(getattr(part, name)) for name in fields)
    weight = _operation_weight(part.op, part.left) if isinstance(part, fk.Binary) else 0.0
    return parts + _WEIGHTS.get(type(part).__name__, 1.0) + weight


_WEIGHTS = {
    "Arg": 0.0, "Stride": 2.0, "Offset": 2.0, "Strides": 2.0, "DataSize": 0.5, "Slice": 0.6, "Concat": 0.2, "Items": 0.2,
    "SizeAt": 0.5, "Case": 3.0, "IsContiguous": 3.0, "Compared": 1.5,
}  # fmt: skip
_DIVISIONS = ("//", "ceil", "%")
_OPERATIONS = {
    "+": 0.0,
    "-": 0.0,
    "*": 0.0,
    "//": 0.2,
    "ceil": 0.6,
    "%": 0.6,
    "min": 0.5,
    "max": 0.5,
}


def _operation_weight(op: str, left: fk.Int) -> float:
    """Return the weight of an operation; constants are better on its right."""
    return _OPERATIONS[op] + (0.3 if isinstance(left, fk.Integer) else 0.0)


class IntegerSearch:
    """Formulas by their values over some rows.

    Args:
        atoms: the formulas to combine, with their values, the simplest first.
        rows: the number of rows.
        windows: also try the formulas of windows with a step, as of convolutions and pooling, over these
            atoms: sizes, and numbers of the arguments.
    """

    def __init__(
        self,
        atoms: Iterable[tuple[fk.Int, Values]],
        rows: int,
        windows: tuple[Sequence[fk.Int], Sequence[fk.Int]] = ((), ()),
    ) -> None:
        self._rows = rows
        self._atoms: dict[bytes, tuple[fk.Int, Values]] = {}
        for part, values in atoms:
            self._atoms.setdefault(values.tobytes(), (part, values))
            if len(self._atoms) >= _MOST_ATOMS:
                break
        self._constants = [
            (fk.Integer(value), np.full(rows, value, np.int64)) for value in _CONSTANTS
        ]
        self._values = dict(self._atoms.values())
        self._windows = windows
        self._is_positive = [bool((values > 0).all()) for _, values in self._leaves()]
        self._pairs: dict[bytes, fk.Int] | None = None
        self._matrix: Values = np.zeros((0, rows), np.int64)
        self._parts: list[fk.Int] = []

    def find(self, target: Values) -> fk.Int | None:
        """Return the simplest formula with these values, or ``None``."""
        if self._rows == 0:
            return None
        if bool((target == target[0]).all()):
            return fk.Integer(int(target[0]))
        key = target.tobytes()
        if key in self._atoms:
            return self._atoms[key][0]
        pairs = self._all_pairs()
        if key in pairs:
            return pairs[key]
        found = [*self._of_three(target), *self._of_windows(target)]
        if not found:
            found = list(self._of_four(target))
        return min(found, key=cost_of, default=None)

    def _leaves(self) -> list[tuple[fk.Int, Values]]:
        return [*self._atoms.values(), *self._constants]

    def _all_pairs(self) -> dict[bytes, fk.Int]:
        """Return the formulas with one operation."""
        if self._pairs is not None:
            return self._pairs
        leaves = self._leaves()
        costs = [cost_of(part) for part, _ in leaves]
        best: dict[bytes, tuple[float, str, int, int]] = {}
        rows: dict[bytes, Values] = {}
        stacked = np.stack([values for _, values in leaves])
        for at, (a, x) in enumerate(leaves):
            for op, matrix in _operations(x, stacked):
                for other, values in enumerate(matrix):
                    b = leaves[other][0]
                    if not _is_worth(op, a, b, is_ordered=at <= other):
                        continue
                    if op in _DIVISIONS and not self._is_positive[other]:
                        continue
                    key = values.tobytes()
                    if key in self._atoms:
                        continue
                    cost = costs[at] + costs[other] + 1.0 + _operation_weight(op, a)
                    if key not in best or cost < best[key][0]:
                        best[key] = cost, op, at, other
                        rows[key] = values
        made: dict[bytes, fk.Int] = {
            key: fk.Binary(op, leaves[at][0], leaves[other][0])  # type: ignore[arg-type]
            for key, (_, op, at, other) in best.items()
        }
        self._pairs = made
        self._parts = list(made.values())
        if made:
            self._matrix = np.stack([rows[key] for key in made])
        return made

    def _of_three(self, target: Values) -> Iterable[fk.Int]:
        """Yield formulas with two operations."""
        pairs = self._all_pairs()
        matrix, parts = self._matrix, self._parts
        probe = _probe(target)
        for leaf, values in self._leaves():
            for op, other, is_left in _inverses(target, values):
                found = pairs.get(other.tobytes())
                if found is not None:
                    made = (found, leaf) if is_left else (leaf, found)
                    yield fk.Binary(op, *made)  # type: ignore[arg-type]
            if not len(matrix):
                continue
            short, few = matrix[:, probe], values[probe]
            for op in (*_DIVISIONS, "min", "max"):
                if op in _DIVISIONS and not ((values > 0).all() and (values > 1).any()):
                    continue
                hits = (_applied(op, short, few) == target[probe]).all(axis=1)
                for at in np.flatnonzero(hits)[:200]:
                    if bool((_applied(op, matrix[at], values) == target).all()):
                        yield fk.Binary(op, parts[at], leaf)  # type: ignore[arg-type]

    def _of_four(self, target: Values) -> Iterable[fk.Int]:
        """Yield formulas that add, subtract or multiply two formulas with one operation each."""
        pairs = self._all_pairs()
        if not len(self._matrix):
            return
        for at, rest in enumerate(target - self._matrix):
            found = pairs.get(rest.tobytes())
            if found is not None:
                yield fk.Binary("+", self._parts[at], found)
        for at, rest in enumerate(target + self._matrix):
            found = pairs.get(rest.tobytes())
            if found is not None:
                yield fk.Binary("-", found, self._parts[at])
        usable = (self._matrix != 0).all(axis=1)
        for at in np.flatnonzero(usable):
            values = self._matrix[at]
            if bool((target % values == 0).all()):
                found = pairs.get((target // values).tobytes())
                if found is not None:
                    yield fk.Binary("*", self._parts[at], found)

    def _of_windows(self, target: Values) -> Iterable[fk.Int]:
        """Yield the formulas of windows with a step: forwards as of pooling, and transposed."""
        sizes = [part for part in self._windows[0] if part in self._values]
        numbers = [part for part in self._windows[1] if part in self._values]
        if not sizes or not (numbers or len(sizes) > 1):
            return
        places = {part.of.item for part in numbers if isinstance(part, fk.Number)}
        for place in sorted(places - {None}, key=str) or [None]:
            some = [
                p for p in numbers if not isinstance(p, fk.Number) or p.of.item in (place, None)
            ]
            yield from _Windows(sizes, some, self._values, self._rows).find(target)


class _Windows:
    """Formulas of windows over some sizes and the numbers that belong to one dim.

    Args:
        sizes: of tensors.
        numbers: lengths, steps, paddings and gaps of windows.
        values: of the formulas.
        rows: the number of rows.
    """

    def __init__(
        self, sizes: list[fk.Int], numbers: list[fk.Int], values: Mapping[fk.Int, Values], rows: int
    ) -> None:
        ones = np.ones(rows, np.int64)
        self._known = {**values, _ONE: ones, _ZERO: 0 * ones}
        self._sizes = sizes
        self._widths = [*numbers, *sizes]
        self._steps = [_ONE, *numbers]
        self._pads = [_ZERO, *numbers]
        self._padded = list(product(sizes, self._pads))
        self._spans = list(product(self._steps, self._widths))

    def find(self, target: Values) -> Iterable[fk.Int]:
        """Yield the formulas with these values."""
        yield from self._forwards(target)
        yield from self._transposed(target)

    def _forwards(self, target: Values) -> Iterable[fk.Int]:
        known, probe = self._known, _probe(target)
        wanted = target[probe]
        outer = np.stack([known[size] + 2 * known[pad] for size, pad in self._padded])
        inner = np.stack([known[size] + known[pad] for size, pad in self._padded])[:, probe]
        short = outer[:, probe]
        steps = [step for step in self._steps if bool((known[step] > 0).all())]
        for gap, width in self._spans:
            span = known[gap] * (known[width] - 1)
            room = short - span[probe] - 1
            for step in steps:
                by = known[step][probe]
                up = -(-room // by) + 1
                inside = np.minimum(up, -(-inner // by))
                for op, found in (("//", room // by + 1), ("ceil", up), ("min", inside)):
                    for at in np.flatnonzero((found == wanted).all(axis=1)):
                        size, pad = self._padded[at]
                        if size == width:
                            continue
                        whole = outer[at] - span - 1
                        if bool((self._whole(op, whole, size, pad, step) == target).all()):
                            yield _window(op, size, pad, gap, width, step)

    def _whole(self, op: str, room: Values, size: fk.Int, pad: fk.Int, step: fk.Int) -> Values:
        by = self._known[step]
        if op == "//":
            return room // by + 1
        up = -(-room // by) + 1
        if op == "ceil":
            return up
        return np.minimum(up, -(-(self._known[size] + self._known[pad]) // by))

    def _transposed(self, target: Values) -> Iterable[fk.Int]:
        known = self._known
        rests: dict[bytes, tuple[fk.Int, fk.Int, fk.Int, fk.Int]] = {}
        for gap, width in self._spans:
            span = known[gap] * (known[width] - 1) + 1
            for pad, more in product(self._pads, self._pads):
                key = (span + known[more] - 2 * known[pad]).tobytes()
                rests.setdefault(key, (gap, width, pad, more))
        for size, step in product(self._sizes, self._steps):
            found = rests.get((target - (known[size] - 1) * known[step]).tobytes())
            if found is not None:
                yield _transposed_window(size, step, *found)


_ONE, _ZERO = fk.Integer(1), fk.Integer(0)


def _transposed_window(
    size: fk.Int, step: fk.Int, gap: fk.Int, width: fk.Int, pad: fk.Int, more: fk.Int
) -> fk.Int:
    wide = fk.Binary("-", width, _ONE)
    rest: fk.Int = wide if gap == _ONE else fk.Binary("*", gap, wide)
    if more != _ZERO:
        rest = fk.Binary("+", rest, more)
    rest = fk.Binary("+", rest, _ONE)
    if pad != _ZERO:
        rest = fk.Binary("-", rest, fk.Binary("*", fk.Integer(2), pad))
    less = fk.Binary("-", size, _ONE)
    return fk.Binary("+", less if step == _ONE else fk.Binary("*", less, step), rest)


def _window(op: str, size: fk.Int, pad: fk.Int, gap: fk.Int, width: fk.Int, step: fk.Int) -> fk.Int:
    """Return the number of windows; ``min`` has only those that begin inside."""
    padded = size if pad == _ZERO else fk.Binary("+", size, fk.Binary("*", fk.Integer(2), pad))
    if gap == _ONE:
        room = fk.Binary("-", padded, width)
    else:
        room = fk.Binary(
            "-", fk.Binary("-", padded, fk.Binary("*", gap, fk.Binary("-", width, _ONE))), _ONE
        )
    division: Any = "//" if op == "//" else "ceil"
    count = fk.Binary("+", room if step == _ONE else fk.Binary(division, room, step), _ONE)
    if op != "min":
        return count
    begin = size if pad == _ZERO else fk.Binary("+", size, pad)
    return fk.Binary("min", count, fk.Binary("ceil", begin, step))


def _operations(x: Values, others: Values) -> Iterable[tuple[str, Values]]:
    """Yield the values of an integer and each of some others, by operation."""
    safe = np.where(others > 0, others, 1)
    for op in _OPERATIONS:
        yield op, _applied(op, x, safe if op in _DIVISIONS else others)


def _applied(op: str, left: Values, right: Values) -> Values:
    """Return the values of an operation; its divisors are positive."""
    match op:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "min":
            return np.minimum(left, right)
        case "max":
            return np.maximum(left, right)
        case "//":
            return left // right
        case "%":
            return left % right
        case _:
            return -(-left // right)


def _inverses(target: Values, values: Values) -> Iterable[tuple[str, Values, bool]]:
    """Yield what a formula must be, to the left or right of an operation with these values."""
    yield "+", target - values, True
    yield "-", target + values, True
    yield "-", values - target, False
    if bool((values != 0).all()) and bool((target % values == 0).all()):
        yield "*", target // values, True


def _is_worth(op: str, a: fk.Int, b: fk.Int, *, is_ordered: bool) -> bool:
    """Return whether an operation is not another one, or none, in disguise."""
    if isinstance(a, fk.Integer):
        return not isinstance(b, fk.Integer) and op == "-"
    if not isinstance(b, fk.Integer):
        return is_ordered or op not in ("+", "*", "min", "max")
    if b.value == 0:
        return op in ("max", "min")
    return b.value > 0 and not (b.value == 1 and op in ("*", "//", "ceil", "%"))


def _probe(target: Values) -> Values:
    """Return a few rows with different values, to test many formulas quickly."""
    _, first = np.unique(target, return_index=True)
    return np.sort(first[:8]).astype(np.int64)
