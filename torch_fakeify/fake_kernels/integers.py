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
    from collections.abc import Callable, Iterable, Mapping, Sequence

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
_OPERATIONS: dict[str, tuple[float, Callable[[Values, Values], Values]]] = {
    "+": (0.0, np.add),
    "-": (0.0, np.subtract),
    "*": (0.0, np.multiply),
    "//": (0.2, np.floor_divide),
    "ceil": (0.6, lambda left, right: -(-left // right)),
    "%": (0.6, np.remainder),
    "min": (0.5, np.minimum),
    "max": (0.5, np.maximum),
}
"""The weight of each operation, and how its values are computed; divisors are positive."""


def _operation_weight(op: str, left: fk.Int) -> float:
    """Return the weight of an operation; constants are better on its right."""
    return _OPERATIONS[op][0] + (0.3 if isinstance(left, fk.Integer) else 0.0)


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
        windows: tuple[Sequence[fk.Int], Sequence[fk.Int]],
    ) -> None:
        self._rows = rows
        self._atoms: dict[bytes, tuple[fk.Int, Values]] = {}
        for part, values in atoms:
            self._atoms.setdefault(values.tobytes(), (part, values))
            if len(self._atoms) >= _MOST_ATOMS:
                break
        constants = [(fk.Integer(value), np.full(rows, value, np.int64)) for value in _CONSTANTS]
        self._leaves: list[tuple[fk.Int, Values]] = [*self._atoms.values(), *constants]
        self._values = dict(self._atoms.values())
        self._windows = windows

    def find(self, target: Values) -> fk.Int | None:
        """Return the simplest formula with these values, or ``None``."""
        if self._rows == 0:
            return None
        if bool((target == target[0]).all()):
            return fk.Integer(int(target[0]))
        key = target.tobytes()
        if key in self._atoms:
            return self._atoms[key][0]
        if key in self._pairs:
            return self._pairs[key]
        found = [*self._of_three(target), *self._of_windows(target)]
        if not found:
            found = list(self._of_four(target))
        return min(found, key=cost_of, default=None)

    @functools.cached_property
    def _pairs(self) -> dict[bytes, fk.Int]:
        """The formulas with one operation."""
        leaves = self._leaves
        costs = [cost_of(part) for part, _ in leaves]
        best: dict[bytes, tuple[float, fk.Int]] = {}
        stacked = np.stack([values for _, values in leaves])
        divisors = np.where(stacked > 0, stacked, 1)
        is_positive: Any = (stacked > 0).all(axis=1)
        for at, (a, x) in enumerate(leaves):
            for op, (_, apply) in _OPERATIONS.items():
                matrix = apply(x, divisors if op in _DIVISIONS else stacked)
                for other, values in enumerate(matrix):
                    b = leaves[other][0]
                    if not _is_worth(op, a, b, is_ordered=at <= other):
                        continue
                    if op in _DIVISIONS and not is_positive[other]:
                        continue
                    key = values.tobytes()
                    if key in self._atoms:
                        continue
                    cost = costs[at] + costs[other] + 1.0 + _operation_weight(op, a)
                    if key not in best or cost < best[key][0]:
                        best[key] = cost, fk.Binary(op, a, b)  # type: ignore[arg-type]
        return {key: part for key, (_, part) in best.items()}

    @functools.cached_property
    def _matrix(self) -> Values:
        """The values of `_pairs`, in their order."""
        return np.frombuffer(b"".join(self._pairs), np.int64).reshape(-1, self._rows)

    def _of_three(self, target: Values) -> Iterable[fk.Int]:
        """Yield formulas with two operations."""
        pairs, matrix = self._pairs, self._matrix
        parts = list(pairs.values())
        probe = _probe(target)
        short = matrix[:, probe]
        for leaf, values in self._leaves:
            for op, other, is_left in _inverses(target, values):
                found = pairs.get(other.tobytes())
                if found is not None:
                    made = (found, leaf) if is_left else (leaf, found)
                    yield fk.Binary(op, *made)  # type: ignore[arg-type]
            for op in (*_DIVISIONS, "min", "max"):
                if op in _DIVISIONS and not ((values > 0).all() and (values > 1).any()):
                    continue
                apply = _OPERATIONS[op][1]
                hits = (apply(short, values[probe]) == target[probe]).all(axis=1)
                for at in np.flatnonzero(hits)[:200]:
                    if bool((apply(matrix[at], values) == target).all()):
                        yield fk.Binary(op, parts[at], leaf)  # type: ignore[arg-type]

    def _of_four(self, target: Values) -> Iterable[fk.Int]:
        """Yield formulas that add, subtract or multiply two formulas with one operation each."""
        pairs, matrix = self._pairs, self._matrix
        parts = list(pairs.values())
        for part, rest in zip(parts, target - matrix, strict=True):
            found = pairs.get(rest.tobytes())
            if found is not None:
                yield fk.Binary("+", part, found)
        for part, rest in zip(parts, target + matrix, strict=True):
            found = pairs.get(rest.tobytes())
            if found is not None:
                yield fk.Binary("-", found, part)
        for at in np.flatnonzero((matrix != 0).all(axis=1)):
            if bool((target % matrix[at] == 0).all()):
                found = pairs.get((target // matrix[at]).tobytes())
                if found is not None:
                    yield fk.Binary("*", parts[at], found)

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
        known = self._known
        outer = np.stack([known[size] + 2 * known[pad] for size, pad in self._padded])
        inner = np.stack([known[size] + known[pad] for size, pad in self._padded])
        steps = [step for step in self._steps if bool((known[step] > 0).all())]
        for gap, width in self._spans:
            room = outer - known[gap] * (known[width] - 1) - 1
            for step in steps:
                by = known[step]
                up = -(-room // by) + 1
                inside = np.minimum(up, -(-inner // by))
                for op, found in (("//", room // by + 1), ("ceil", up), ("min", inside)):
                    for at in np.flatnonzero((found == target).all(axis=1)):
                        size, pad = self._padded[at]
                        if size != width:
                            yield _window(op, size, pad, gap, width, step)

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
