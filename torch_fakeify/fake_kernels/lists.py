"""Search for the simplest formula of a list of integers, such as the sizes of a result.

A list is the beginning of one that the arguments have, then single integers, then the end of another
one: ``[*x.shape[:-1], weight.shape[0]]``.
"""

from __future__ import annotations

from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_fakeify.records import fake_kernel as fk

from .integers import IntegerSearch, cost_of
from .observed import TensorFacts, is_integer, is_integer_list, is_tensor_list

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from .evaluating import Evaluation

_MOST_ITEMS = 6
"""Most items of a list that are used one by one."""
_MOST_MIDDLE = 6
"""Most single integers between the beginning and the end of a list."""
_MOST_TRIED = 60
_LARGEST = 1 << 40


class Arguments:
    """What some observed calls have in common: which arguments are tensors, integers, lists."""

    def __init__(self, rows: Sequence[Evaluation]) -> None:
        self.rows = rows

    def names(self, is_wanted: Callable[[Any], bool]) -> list[str]:
        """Return the arguments of which all rows have a value of some kind."""
        first = self.rows[0].args if self.rows else {}
        return [name for name in first if all(is_wanted(row.args.get(name)) for row in self.rows)]

    @cached_property
    def tensors(self) -> list[fk.Arg]:
        """The tensors that all rows have, those of lists by position."""
        found = [fk.Arg(name) for name in self.names(lambda value: isinstance(value, TensorFacts))]
        for name in self.names(is_tensor_list):
            shortest = min(len(row.args[name]) for row in self.rows)
            found += [fk.Arg(name, at) for at in range(min(shortest, 3))]
            if any(len(row.args[name]) != shortest for row in self.rows):
                found.append(fk.Arg(name, -1))
        return found

    @cached_property
    def lists(self) -> list[str]:
        """The arguments that are lists of integers."""
        return self.names(is_integer_list)

    @cached_property
    def numbers(self) -> list[fk.Arg]:
        """The integers among the arguments, those of lists by position."""
        found = [fk.Arg(name) for name in self.names(is_integer)]
        for name in self.lists:
            shortest = min(len(row.args[name]) for row in self.rows)
            found += [fk.Arg(name, at) for at in range(min(shortest, _MOST_ITEMS))]
        return found

    @property
    def plain_numbers(self) -> list[fk.Arg]:
        """The integers among the arguments that are no items of lists."""
        return [number for number in self.numbers if number.item is None]

    def rank(self, of: fk.Arg) -> tuple[int, int]:
        """Return the smallest and largest number of dims of a tensor."""
        ranks = [len(row.tensor(of).size) for row in self.rows]
        return min(ranks), max(ranks)

    def values(self, part: fk.Int) -> NDArray[np.int64] | None:
        """Return the values of a formula; ``None`` if a row has none."""
        found: list[int] = []
        for row in self.rows:
            value = row.known(row.int, part)
            if value is None or not -_LARGEST < value < _LARGEST:
                return None
            found.append(value)
        return np.array(found, np.int64)


class Formulas:
    """The formulas over the arguments of some rows, with strides and offsets if they are for views."""

    def __init__(self, arguments: Arguments, *, strides: bool = False) -> None:
        self._arguments = arguments
        self._has_strides = strides
        self._found: dict[bytes, fk.Int | None] = {}

    def integer(self, target: Sequence[int]) -> fk.Int | None:
        """Return the simplest formula of an integer."""
        values = np.array(target, np.int64)
        key = values.tobytes()
        if key not in self._found:
            self._found[key] = self._search.find(values)
        return self._found[key]

    def list_of(self, target: Sequence[tuple[int, ...]]) -> fk.Ints | None:
        """Return the simplest formula of a list."""
        if not target:
            return None
        found = self._joined(target)
        if found is not None:
            return found
        shortest = min(map(len, target))
        for count in range(1, min(shortest, 2) + 1):
            for is_end in (True, False):
                ends = [each[-count:] if is_end else each[:count] for each in target]
                items = [self.integer([end[at] for end in ends]) for at in range(count)]
                if any(item is None for item in items):
                    continue
                rest = self._joined([each[:-count] if is_end else each[count:] for each in target])
                if rest is not None:
                    fixed = fk.Items(tuple(item for item in items if item is not None))
                    parts = rest.parts if isinstance(rest, fk.Concat) else (rest,)
                    return fk.Concat((*parts, fixed) if is_end else (fixed, *parts))
        return None

    def _joined(self, target: Sequence[tuple[int, ...]]) -> fk.Ints | None:
        """Return the simplest formula of a beginning, single integers, and an end."""
        heads = [(fk.Items(()), [()] * len(target)), *self._matching(target, is_head=True)]
        tails = [(fk.Items(()), [()] * len(target)), *self._matching(target, is_head=False)]
        pairs: list[tuple[float, int, Any, Any]] = []
        for head, start in heads:
            for tail, end in tails:
                missing = {
                    len(whole) - len(a) - len(b)
                    for whole, a, b in zip(target, start, end, strict=True)
                }
                if len(missing) == 1 and 0 <= (count := missing.pop()) <= _MOST_MIDDLE:
                    cost = cost_of(head) + cost_of(tail) + 2.0 * count
                    pairs.append((cost, count, (head, start), tail))
        pairs.sort(key=lambda each: each[0])
        best: tuple[float, fk.Ints] | None = None
        for cost, count, (head, start), tail in pairs[:_MOST_TRIED]:
            if best is not None and cost - count > best[0]:
                continue
            middle: list[fk.Int] = []
            for at in range(count):
                part = self.integer(
                    [whole[len(a) + at] for whole, a in zip(target, start, strict=True)]
                )
                if part is None:
                    break
                middle.append(part)
            else:
                made = _concat(head, middle, tail)
                if best is None or cost_of(made) < best[0]:
                    best = cost_of(made), made
        return None if best is None else best[1]

    def _matching(
        self, target: Sequence[tuple[int, ...]], *, is_head: bool
    ) -> list[tuple[fk.Ints, list[tuple[int, ...]]]]:
        """Return the lists that all targets begin or end with, of equal ones the simplest."""
        found: dict[tuple[tuple[int, ...], ...], fk.Ints] = {}
        for part in self._lists:
            lists: list[tuple[int, ...]] = []
            for whole, row in zip(target, self._arguments.rows, strict=True):
                each = row.known(row.ints, part)
                if each is None or len(each) > len(whole):
                    break
                if (whole[: len(each)] if is_head else whole[len(whole) - len(each) :]) != each:
                    break
                lists.append(each)
            else:
                if any(lists):
                    found.setdefault(tuple(lists), part)
        return [(part, list(lists)) for lists, part in found.items()]

    @cached_property
    def _lists(self) -> list[fk.Ints]:
        """The lists that are used in whole, the simplest first."""
        return sorted(dict.fromkeys(self._candidates()), key=cost_of)

    def _candidates(self) -> Iterator[fk.Ints]:
        known = self._arguments
        tensors = known.tensors
        bases: list[tuple[fk.Ints, fk.Arg]] = [(fk.Shape(of), of) for of in tensors]
        if self._has_strides:
            bases += [(fk.Strides(of), of) for of in tensors]
        for part, of in bases:
            yield part
            yield from self._sliced(part, of)
        for name in known.lists:
            whole = fk.Numbers(name)
            yield whole
            for at in (1, 2, 3):
                yield fk.Slice(whole, None, fk.Integer(at))
                yield fk.Slice(whole, fk.Integer(at), None)
            for part, _ in bases:
                yield fk.Picked(part, whole)
        ranks = {of: known.rank(of) for of in tensors}
        some = tensors[:4]
        for left, right in combinations(some, 2):
            yield fk.Broadcast((fk.Shape(left), fk.Shape(right)))
            for keep in (1, 2):
                if ranks[left][0] >= keep or ranks[right][0] >= keep:
                    end = fk.Integer(-keep)
                    parts = (fk.Shape(left), fk.Shape(right))
                    yield fk.Broadcast(tuple(fk.Slice(part, None, end) for part in parts))
        if len(some) > 2:
            yield fk.Broadcast(tuple(map(fk.Shape, some)))
        for name in known.names(_is_dims):
            for of in tensors:
                for keep in (False, True):
                    yield fk.Reduced(fk.Shape(of), name, keep)

    def _sliced(self, part: fk.Ints, of: fk.Arg) -> Iterator[fk.Ints]:
        low, high = self._arguments.rank(of)
        for other in self._arguments.tensors:
            if other != of and self._arguments.rank(other)[0] != self._arguments.rank(other)[1]:
                yield fk.Slice(part, fk.Ndim(other), None)
                yield fk.Slice(part, None, fk.Ndim(other))
        plain = self._arguments.plain_numbers
        for first, second in combinations(map(fk.Number, plain[:4]), 2):
            yield fk.Swapped(part, first, second)
        for at in range(1, min(high, 4) + 1):
            yield fk.Slice(part, None, fk.Integer(-at))
            yield fk.Slice(part, fk.Integer(at), None)
            if low != high or low > at:
                yield fk.Slice(part, None, fk.Integer(at))
                yield fk.Slice(part, fk.Integer(-at), None)
        for number in plain:
            for count in (fk.Ndim(of), fk.Binary("+", fk.Ndim(of), fk.Integer(1))):
                dim = fk.Binary("%", fk.Number(number), count)
                values = self._arguments.values(dim)
                if values is None or bool((values > 8).any()):
                    continue
                after = fk.Binary("+", dim, fk.Integer(1))
                yield fk.Slice(part, None, dim)
                yield fk.Slice(part, dim, None)
                yield fk.Slice(part, after, None)
                yield fk.Slice(part, None, after)

    @cached_property
    def _search(self) -> IntegerSearch:
        known = self._arguments
        atoms = [
            (part, values) for part in self._atoms() if (values := known.values(part)) is not None
        ]
        sizes = [part for part, _ in atoms if isinstance(part, fk.Size)][:10]
        numbers = [part for part, _ in atoms if isinstance(part, fk.Number)][:16]
        return IntegerSearch(atoms, len(known.rows), (sizes, numbers))

    def _positions(self) -> Iterator[fk.Int]:
        """Yield what depends on the position in a list: the items there, and what is left of a size."""
        known = self._arguments
        yield fk.Index()
        for number in known.plain_numbers:
            yield fk.Binary("*", fk.Index(), fk.Number(number))
        for name in known.lists:
            yield fk.ItemAt(name, fk.Index())
            yield fk.Total(fk.Slice(fk.Numbers(name), None, fk.Index()))
        for of in known.tensors:
            low, _ = known.rank(of)
            dims: list[fk.Int] = [fk.Size(of, dim) for dim in range(low)]
            dims += [fk.SizeAt(of, fk.Number(number)) for number in known.plain_numbers]
            for size in dims:
                for number in known.numbers:
                    if number.item is None:
                        yield fk.Binary("-", size, fk.Binary("*", fk.Index(), fk.Number(number)))

    def _atoms(self) -> Iterator[fk.Int]:
        known = self._arguments
        if any(row.index is not None for row in known.rows):
            yield from self._positions()
        for at in range(min((len(row.sizes) for row in known.rows), default=0)):
            yield fk.DataSize(at)
        yield from map(fk.Number, known.numbers)
        for of in known.tensors:
            low, high = known.rank(of)
            for dim in range(low):
                yield fk.Size(of, dim)
            if low != high:
                for dim in range(1, low + 1):
                    yield fk.Size(of, -dim)
        for name in known.names(is_tensor_list):
            yield fk.Length(name)
        for of in known.tensors:
            low, high = known.rank(of)
            for number in known.numbers if low == high else known.plain_numbers:
                yield fk.SizeAt(of, fk.Number(number))
            if self._has_strides:
                for dim in range(low):
                    yield fk.Stride(of, dim)
                for number in known.plain_numbers:
                    yield _stride_at(of, number)
                yield fk.Offset(of)
            if low != high:
                yield fk.Ndim(of)
            if high > 1 or low != high:
                yield fk.Product(fk.Shape(of))
            for at in (1, 2):
                if low > at:
                    yield fk.Product(fk.Slice(fk.Shape(of), None, fk.Integer(-at)))
                    yield fk.Product(fk.Slice(fk.Shape(of), fk.Integer(at), None))
        for name in known.names(is_tensor_list):
            for number in known.plain_numbers:
                yield fk.SizesTotal(name, fk.Number(number))
            for dim in (0, 1, 2, -1):
                yield fk.SizesTotal(name, fk.Integer(dim))
        for name in known.lists:
            yield fk.Length(name)
            yield fk.Total(fk.Numbers(name))
            yield fk.Product(fk.Numbers(name))


def _stride_at(of: fk.Arg, number: fk.Arg) -> fk.Int:
    """Return the stride of the dim that an argument says: the sum of a list of one."""
    dim = fk.Binary("%", fk.Number(number), fk.Ndim(of))
    return fk.Total(fk.Slice(fk.Strides(of), dim, fk.Binary("+", dim, fk.Integer(1))))


def _is_dims(value: Any) -> bool:
    return value is None or is_integer(value) or is_integer_list(value)


def _concat(head: fk.Ints, middle: Sequence[fk.Int], tail: fk.Ints) -> fk.Ints:
    parts: list[fk.Ints] = [head, fk.Items(tuple(middle)), tail]
    some = [part for part in parts if part != fk.Items(())]
    if not some:
        return fk.Items(())
    return some[0] if len(some) == 1 else fk.Concat(tuple(some))
