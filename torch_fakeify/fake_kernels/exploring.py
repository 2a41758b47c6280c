"""Call an operator with other sizes, numbers, strides and dtypes than those of its samples.

First it is found out which sizes may change alone and which only together, then calls are drawn at
random. What the operator refuses is a result as well.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from .observed import NamedValue, is_integer, item_of
from .specs import CallSpec, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .observed import Outcome

_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13)
_MOST_DIMS = 2
"""Most dims of tensors of which still other numbers of dims are tried."""
_STARTS = 12
"""Accepted calls near which others are tried."""
_MOST_ENDED = 8
"""Calls that a process did not survive, after which no random ones follow: each may take long."""
_MOST_SAMPLES = 24
"""Most calls from which other ones are drawn."""
_FLOATS = ("float32", "float64", "float16", "bfloat16")
_INTEGERS = ("int64", "int32", "uint8")
_COMPLEX = ("complex64", "complex128")
_ANY = (*_FLOATS, "int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "complex128")


class Tried(NamedTuple):
    """A call and what it gave."""

    spec: CallSpec
    outcome: Outcome


class _Slot(NamedTuple):
    """An integer of the arguments: a size of a tensor, an argument, or an item of one."""

    name: str
    item: int | None
    dim: int | None


class _Move(NamedTuple):
    """Integers that change together: all become one number, or are multiplied by one."""

    slots: tuple[_Slot, ...]
    is_scaled: bool


class Exploration:
    """Calls of one operator and what they gave.

    Args:
        run: runs a call.
        samples: calls that the operator accepts.
        sizes: more sizes to try.
        seed: of the random calls.
    """

    def __init__(
        self,
        run: Callable[[CallSpec], Outcome],
        samples: Sequence[CallSpec],
        *,
        sizes: Sequence[int] = (),
        seed: int = 0,
    ) -> None:
        self._run = run
        self._random = random.Random(seed)
        self._sizes = (*_SIZES, *sizes, *sizes)
        self.seen: list[Tried] = []
        self._known: dict[bytes, Outcome] = {}
        self.samples = samples
        self._starts: list[tuple[CallSpec, list[_Move]]] = []
        """Accepted calls from which others are drawn, and which integers of each may change."""
        self._share = 0.6
        """The share of sizes and numbers that a random call changes."""
        self._ended = 0
        self.is_random = False
        """Whether equal calls gave different data."""

    @property
    def has_stopped(self) -> bool:
        """Whether no more random calls are drawn, as the operator did not survive several."""
        return self._ended >= _MOST_ENDED

    def call(self, spec: CallSpec) -> Outcome:
        """Run a call once, and note what it gave."""
        key = msgspec.msgpack.encode(spec)
        if key not in self._known:
            self._known[key] = self._run(spec)
            self._ended += not self._known[key].has_survived
            self.seen.append(Tried(spec, self._known[key]))
        return self._known[key]

    def begin(self) -> None:
        """Run the samples, with other data too, and find out which integers may change."""
        for sample in list(self.samples):
            outcome = self.call(sample)
            if outcome.results is None:
                continue
            again = self.call(CallSpec(sample.args, sample.seed, noise=1))
            self.is_random = self.is_random or again.values != outcome.values
            for seed in (1, 2):
                self.call(CallSpec(sample.args, seed))
            for fill in (0.0, 1.0):
                self.call(_filled(sample, fill))
            self._starts.append((sample, self._find_moves(sample)))
            ranks = [*self._other_ranks(sample)]
            while ranks and len(self._starts) < _MOST_SAMPLES:
                other = ranks.pop(0)
                is_new = all(other != start for start, _ in self._starts)
                if is_new and self.call(other).results is not None:
                    self._starts.append((other, self._find_moves(other)))
                    if all(len(each.size) <= _MOST_DIMS for each in _tensors(other)):
                        ranks += self._other_ranks(other)

    @staticmethod
    def _other_ranks(sample: CallSpec) -> Iterator[CallSpec]:
        """Yield calls with tensors that have one dim more or less, one tensor alone and all together."""

        def resized(each: TensorSpec, *size: int) -> TensorSpec:
            return msgspec.structs.replace(each, size=size, order=None, spread=None)

        changes: tuple[Callable[[TensorSpec], TensorSpec], ...] = (
            lambda each: resized(each, 2, *each.size),
            lambda each: resized(each, *each.size, 2),
            lambda each: resized(each, *each.size[1:]),
            lambda each: resized(each, *each.size[:-1]),
        )
        names = [name for name, value in sample.args.items() if isinstance(value, TensorSpec)]
        for change in changes:
            yield _mapped(sample, change)
            if len(names) > 1:
                for name in names:
                    value = sample.args[name]
                    yield CallSpec({**sample.args, name: change(value)}, sample.seed)

    def draw(self, count: int) -> None:
        """Run that many random calls."""
        if not self._starts:
            return
        for at in range(count):
            if self.has_stopped:
                return
            spec = self._drawn(*self._starts[at % len(self._starts)])
            outcome = self.call(spec)
            # Fewer changes at a time where most calls are refused.
            self._share = (
                min(0.7, self._share * 1.05)
                if outcome.results is not None
                else max(0.15, self._share * 0.95)
            )
            if outcome.results is not None and at % 3 == 0:
                self.call(CallSpec(spec.args, spec.seed + 1))
                if at % 9 == 0:
                    self.call(_filled(spec, 0.0))
                    self.call(_filled(spec, 1.0))

    def probe(self, parts: Sequence[tuple[str, int | None, int | None]]) -> None:
        """Run calls in which some integers have other values, to find out whether they may have them.

        They start from the samples, from the samples with all numbers 1 where that is accepted, and from
        some accepted calls.

        Args:
            parts: the integers: argument, position in a list, dim.
        """
        for sample, moves in [*self._starts, *self._of_ones()]:
            for slot in _slots_of(sample, parts):
                together = next((move.slots for move in moves if slot in move.slots), (slot,))
                for value in (0, 1, 2, 3, 5, 8, 12, 17):
                    self.call(_changed(sample, [(each, value) for each in together]))
        calls = [each.spec for each in self.seen if each.outcome.results is not None]
        calls = [spec for spec in calls if all(_get(spec, s) > 1 for s in _slots_of(spec, parts))]
        for spec in calls[:: max(1, len(calls) // _STARTS)][:_STARTS]:
            for slot in _slots_of(spec, parts):
                for step in (-2, -1, 1, 2):
                    self.call(_changed(spec, [(slot, max(_get(spec, slot) + step, 1))]))

    def _of_ones(self) -> Iterator[tuple[CallSpec, list[_Move]]]:
        for sample, moves in self._starts:
            numbers = [slot for slot in _slots(sample) if slot.dim is None]
            ones = [(slot, 1) for slot in numbers if _get(sample, slot) > 1]
            if ones and self._works(sample, ones):
                yield _changed(sample, ones), moves

    # --- which integers may change -----------------------------------------------------------------

    def _find_moves(self, sample: CallSpec) -> list[_Move]:
        """Find the integers of a sample that may change alone or together."""
        found: list[_Move] = []
        stuck: list[_Slot] = []
        for slot in _slots(sample):
            value = _get(sample, slot)
            others = (
                (value + 3, value + 1, value * 2)
                if slot.dim is not None
                else (value + 1, value - 1, value + 2)
            )
            accepted = [other for other in others if self._works(sample, [(slot, other)])]
            if accepted:
                found.append(
                    _Move((slot,), is_scaled=others[0] not in accepted and value * 2 in accepted)
                )
            else:
                stuck.append(slot)
        by_value: dict[int, list[_Slot]] = {}
        for slot in stuck:
            by_value.setdefault(_get(sample, slot), []).append(slot)
        left: list[_Slot] = []
        for value, slots in by_value.items():
            pool = list(slots)
            while pool:
                first = pool.pop(0)
                group = self._group_of(sample, first, pool, value)
                if group is None:
                    left.append(first)
                else:
                    pool = [slot for slot in pool if slot not in group]
                    found.append(_Move(tuple(group), is_scaled=False))
        found += self._scaled(sample, left)
        return found

    def _group_of(
        self, sample: CallSpec, first: _Slot, pool: list[_Slot], value: int
    ) -> list[_Slot] | None:
        """Return the smallest group of integers of one value that may change together."""
        new = value + 3
        for other in pool:
            if self._works(sample, [(first, new), (other, new)]):
                return [first, other]
        whole = [first, *pool]
        if len(whole) > 2 and self._works(sample, [(slot, new) for slot in whole]):
            for slot in whole[1:]:
                smaller = [each for each in whole if each != slot]
                if self._works(sample, [(each, new) for each in smaller]):
                    whole = smaller
            return whole
        return None

    def _scaled(self, sample: CallSpec, slots: list[_Slot]) -> Iterator[_Move]:
        """Yield pairs of integers of different values that may be multiplied together."""
        everything = _slots(sample)

        def may_double(group: Sequence[_Slot]) -> bool:
            return self._works(sample, [(slot, 2 * _get(sample, slot)) for slot in group])

        for at, first in enumerate(slots):
            for other in everything:
                if other not in slots[: at + 1] and may_double((first, other)):
                    yield _Move((first, other), is_scaled=True)
                    break
            else:
                shapes = [
                    slot for slot in everything if slot.dim == first.dim and first.dim is not None
                ]
                if len(shapes) > 2 and may_double(shapes):
                    yield _Move(tuple(shapes), is_scaled=True)

    def _works(self, sample: CallSpec, changes: list[tuple[_Slot, int]]) -> bool:
        return self.call(_changed(sample, changes)).results is not None

    # --- random calls -------------------------------------------------------------------------------

    def _drawn(self, sample: CallSpec, moves: Sequence[_Move]) -> CallSpec:
        draw = self._random
        spec = sample
        if len(self._starts) > 1 and draw.random() < 0.15:
            spec = self._crossed(spec)
        for move in moves:
            if draw.random() > self._share:
                continue
            slots = [slot for slot in move.slots if _has(spec, slot)]
            if move.is_scaled:
                factor = draw.choice((2, 3, 4))
                changes = [(slot, factor * _get(spec, slot)) for slot in slots]
            else:
                value = self._value(spec, slots)
                changes = [(slot, value) for slot in slots]
            spec = _changed(spec, changes)
        for share, change in (
            (0.15, self._one_size),
            (0.2, self._lengths),
            (0.4, self._flags),
            (0.35, self._layouts),
            (0.35, self._dtypes),
        ):
            if draw.random() < share:
                spec = change(spec)
        return CallSpec(spec.args, draw.randrange(1 << 30))

    def _value(self, spec: CallSpec, slots: Sequence[_Slot]) -> int:
        if any(slot.dim is not None for slot in slots):
            return 0 if self._random.random() < 0.04 else self._random.choice(self._sizes)
        value = _get(spec, slots[0]) if slots else 1
        rank = max((len(each.size) for each in _tensors(spec)), default=1)
        return self._random.choice([*range(-rank, rank + 1), value + 1, 2 * value, value + 2, 5])

    def _one_size(self, spec: CallSpec) -> CallSpec:
        """Change one size alone: to 1, for broadcasting, or to another one, which may be refused."""
        slots = [slot for slot in _slots(spec) if slot.dim is not None]
        if not slots:
            return spec
        slot = self._random.choice(slots)
        return _changed(spec, [(slot, self._random.choice((1, 1, _get(spec, slot) + 1)))])

    def _flags(self, spec: CallSpec) -> CallSpec:
        args = dict(spec.args)
        for name, value in args.items():
            if isinstance(value, bool) and self._random.random() < 0.5:
                args[name] = not value
            choices = [each.args[name] for each, _ in self._starts if name in each.args]
            is_word = isinstance(value, (str, NamedValue)) or value is None
            if is_word and choices and self._random.random() < 0.5:
                args[name] = self._random.choice(choices)
            elif value is not None and None in choices and self._random.random() < 0.3:
                args[name] = None
        return CallSpec(args, spec.seed)

    def _lengths(self, spec: CallSpec) -> CallSpec:
        """Give a list one item more or less."""
        names = [name for name, value in spec.args.items() if isinstance(value, list) and value]
        if not names:
            return spec
        name = self._random.choice(names)
        items = list(spec.args[name])
        if self._random.random() < 0.5:
            items.pop()
        else:
            last = items[-1]
            items.append(last + self._random.choice((0, 1, 2)) if is_integer(last) else last)
        return CallSpec({**spec.args, name: items}, spec.seed)

    def _crossed(self, spec: CallSpec) -> CallSpec:
        """Take some arguments that are no tensors from another sample."""
        other, _ = self._random.choice(self._starts)
        args = dict(spec.args)
        for name in args:
            value = other.args.get(name, args[name])
            is_plain = not isinstance(value, TensorSpec) and not isinstance(args[name], TensorSpec)
            if is_plain and self._random.random() < 0.5:
                args[name] = value
        return CallSpec(args, spec.seed)

    def _layouts(self, spec: CallSpec) -> CallSpec:
        def other(each: TensorSpec) -> TensorSpec:
            rank = len(each.size)
            if rank == 0 or self._random.random() < 0.4:
                return each
            kind = self._random.random()
            if kind < 0.35 and rank > 1:
                order = list(range(rank))
                self._random.shuffle(order)
                return msgspec.structs.replace(each, order=tuple(order), spread=None)
            if kind < 0.65 and rank in (4, 5):
                order = [0, *range(2, rank), 1]
                return msgspec.structs.replace(each, order=tuple(order), spread=None)
            return msgspec.structs.replace(each, order=None, spread=self._random.randrange(rank))

        return _mapped(spec, other)

    def _dtypes(self, spec: CallSpec) -> CallSpec:
        families = (_FLOATS, _INTEGERS, _COMPLEX)
        chosen = {family: self._random.choice(family) for family in families}
        is_joint = self._random.random() < 0.6
        anything = self._random.random() < 0.2

        def other(each: TensorSpec) -> TensorSpec:
            for family in families:
                if each.dtype in family:
                    if anything:
                        dtype = self._random.choice(_ANY)
                    else:
                        dtype = chosen[family] if is_joint else self._random.choice(family)
                    return msgspec.structs.replace(each, dtype=dtype)
            return each

        return _mapped(spec, other)


def _filled(spec: CallSpec, fill: float) -> CallSpec:
    return _mapped(spec, lambda each: msgspec.structs.replace(each, fill=fill))


def _mapped(spec: CallSpec, change: Callable[[TensorSpec], TensorSpec]) -> CallSpec:
    def part(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return change(value)
        if isinstance(value, (list, tuple)):
            return [part(each) for each in value]
        return value

    return CallSpec({name: part(value) for name, value in spec.args.items()}, spec.seed)


def _tensors(spec: CallSpec) -> Iterator[TensorSpec]:
    for value in spec.args.values():
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(each, TensorSpec):
                yield each


def _slots(spec: CallSpec) -> list[_Slot]:
    """Return the integers of a call."""
    found: list[_Slot] = []
    for name, value in spec.args.items():
        items = enumerate(value) if isinstance(value, (list, tuple)) else [(None, value)]
        for item, each in items:
            if isinstance(each, TensorSpec):
                found += [_Slot(name, item, dim) for dim in range(len(each.size))]
            elif is_integer(each):
                found.append(_Slot(name, item, None))
    return found


def _has(spec: CallSpec, slot: _Slot) -> bool:
    value = item_of(spec.args, slot.name, slot.item)
    if slot.dim is None:
        return is_integer(value)
    return isinstance(value, TensorSpec) and 0 <= slot.dim < len(value.size)


def _slots_of(
    spec: CallSpec, parts: Sequence[tuple[str, int | None, int | None]]
) -> Iterator[_Slot]:
    """Yield the integers of a call that are named, with dims counted from the first."""
    for slot in [_Slot(*part) for part in parts]:
        value = item_of(spec.args, slot.name, slot.item)
        if slot.dim is not None and slot.dim < 0 and isinstance(value, TensorSpec):
            slot = slot._replace(dim=slot.dim + len(value.size))
        if _has(spec, slot):
            yield slot


def _get(spec: CallSpec, slot: _Slot) -> int:
    value = item_of(spec.args, slot.name, slot.item)
    return value if slot.dim is None else value.size[slot.dim]


def _changed(spec: CallSpec, changes: Sequence[tuple[_Slot, int]]) -> CallSpec:
    args = dict(spec.args)
    for slot, number in changes:
        value: Any = number
        if slot.dim is not None:
            tensor = item_of(args, slot.name, slot.item)
            size = list(tensor.size)
            size[slot.dim] = number
            value = msgspec.structs.replace(tensor, size=tuple(size))
        if slot.item is not None:
            items = list(args[slot.name])
            items[slot.item] = value
            value = items
        args[slot.name] = value
    return CallSpec(args, spec.seed)
