"""Closures that turn the parts of a record into their wire form and back.

Each is made once for a type and called as ``(state, value) -> value``: the state is the encoder or
the decoder of ``codec.py``, which writes and reads the rows of shared objects.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from .errors import FakeifyError, LimitError

MAX_NESTING = 100
"""Levels of records, values and rows inside one another."""

Closure = Callable[[Any, Any], Any]


class Fault(Exception):  # noqa: N818 - never leaves the package
    """An error on its way out, to which each level adds its part of the path.

    Args:
        what: as ``FakeifyError``, like ``expected`` and ``found``.
        kind: the error to raise in the end, if not the one for its direction.
    """

    def __init__(
        self,
        what: str,
        expected: str | None = None,
        found: str | None = None,
        *,
        kind: type[FakeifyError] | None = None,
    ) -> None:
        super().__init__(what)
        self.what, self.expected, self.found, self.kind = what, expected, found, kind
        self.path: list[str] = []

    def at(self, part: str) -> Fault:
        """Put ``part`` before the path."""
        self.path.append(part)
        return self

    def error(self, where: str, kind: type[FakeifyError]) -> FakeifyError:
        """The public error at ``where`` and this path."""
        where += "".join(reversed(self.path))
        return (self.kind or kind)(self.what, where=where, expected=self.expected, found=self.found)


def same(_state: Any, value: Any) -> Any:
    """For what is its own wire form."""
    return value


def wrong_type(closures: dict[type, Closure], value: object) -> Fault:
    """The error for a value of a type that has no closure."""
    names = " | ".join(sorted({kind.__name__ for kind in closures}))
    return Fault("a value has the wrong type", names, type(value).__qualname__)


def encode_float(_state: Any, value: float) -> float | str:
    """JSON has no infinities: their names stand for them."""
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def decode_float(_state: Any, wire: float | str) -> float:
    """The float that a number or a name stands for."""
    return float(wire)


def finite_float(_state: Any, value: float) -> float:
    """For a union with texts, where a name would be one of them."""
    if not math.isfinite(value):
        raise Fault("JSON has no such number", "a finite float or a FloatValue", repr(value))
    return value


class _Dispatch(NamedTuple):
    """The closures of a union by the value's exact type."""

    closures: dict[type, Closure]

    def of(self, value: object) -> Closure:
        """The closure for a value."""
        closure = self.closures.get(type(value))
        if closure is None:
            raise wrong_type(self.closures, value)
        return closure

    def __call__(self, state: Any, value: Any) -> Any:
        return self.of(value)(state, value)


def dispatch(closures: dict[type, Closure]) -> Closure:
    """Choose by the value's exact type."""
    if all(closure is same for closure in closures.values()):
        return same
    if len(closures) == 2 and type(None) in closures:
        (closure,) = (closure for kind, closure in closures.items() if kind is not type(None))
        return lambda state, value: None if value is None else closure(state, value)
    return _Dispatch(closures)


def _by_type(closure: Closure) -> dict[type, Closure]:
    """The closures of a union, to choose from without a call; none of other types."""
    return closure.closures if isinstance(closure, _Dispatch) else {}


def each(closure: Closure) -> Closure:
    """Apply to every item of a tuple."""
    if closure is same:
        return same
    # Most items of sizes and arguments are plain: one call less for each of them.
    closures = _by_type(closure)
    all_plain = _plain_types(closures).issuperset

    def convert(state: Any, items: Any) -> tuple[Any, ...]:
        if all_plain(map(type, items)):
            return items
        out: list[Any] = []
        changed = False
        try:
            for item in items:
                found = closures.get(type(item), closure)
                if found is same:
                    out.append(item)
                    continue
                new = found(state, item)
                changed = changed or new is not item
                out.append(new)
        except Fault as fault:
            raise fault.at(f"[{len(out)}]") from fault.__cause__
        return tuple(out) if changed else items

    return convert


def each_text(closure: Closure) -> Closure:
    """As `each`, for records: the text of one is written before the next one is looked at.

    So what it is written from is gone by then, and its memory is that of the next one.
    """

    def convert(state: Any, items: Any) -> msgspec.Raw:
        out = bytearray(b"[")
        number = 0
        try:
            for number, item in enumerate(items):  # noqa: B007 - of the item at fault
                state.write_into(closure(state, item), out)
                out += b","
        except Fault as fault:
            raise fault.at(f"[{number}]") from fault.__cause__
        out[-1 if items else 1 :] = b"]"
        return msgspec.Raw(out)

    return convert


def _plain_types(closures: dict[type, Closure]) -> frozenset[type]:
    """Types whose values are their own wire form."""
    return frozenset([kind for kind, closure in closures.items() if closure is same])


def each_pair(first: Closure, second: Closure) -> Closure:
    """Apply to every item of a tuple of pairs."""
    firsts, seconds = _by_type(first), _by_type(second)
    name_alone = first is same

    def convert(state: Any, items: Any) -> tuple[Any, ...]:
        out: list[Any] = []
        changed = False
        part = ""
        try:
            for pair in items:
                part = ""
                if len(pair) != 2:
                    raise Fault("a tuple has the wrong length", "2", str(len(pair)))
                key, value = pair
                new_key = key
                if not name_alone:
                    part = "[0]"
                    found = firsts.get(type(key), first)
                    new_key = key if found is same else found(state, key)
                part = "[1]"
                found = seconds.get(type(value), second)
                new = value if found is same else found(state, value)
                if new is not value or new_key is not key:
                    changed = True
                    pair = (new_key, new)
                out.append(pair)
        except Fault as fault:
            if part:
                fault.at(part)
            raise fault.at(f"[{len(out)}]") from fault.__cause__
        return tuple(out) if changed else items

    return convert


def zipped(closures: list[Closure]) -> Closure:
    """Apply one closure to each item of a tuple of fixed length."""
    if len(closures) == 2 and closures[0] is same:
        return _named(closures[1])

    def convert(state: Any, items: Any) -> tuple[Any, ...]:
        out: list[Any] = []
        if len(items) != len(closures):
            raise Fault("a tuple has the wrong length", str(len(closures)), str(len(items)))
        try:
            for closure, item in zip(closures, items, strict=True):
                out.append(closure(state, item))
        except Fault as fault:
            raise fault.at(f"[{len(out)}]") from fault.__cause__
        return tuple(out)

    return convert


def _named(closure: Closure) -> Closure:
    """Apply to the second item of a pair, as records have for named values."""
    closures = _by_type(closure)

    def convert(state: Any, items: Any) -> tuple[Any, ...]:
        if len(items) != 2:
            raise Fault("a tuple has the wrong length", "2", str(len(items)))
        name, value = items
        try:
            found = closures.get(type(value), closure)
            if found is same:
                return items
            new = found(state, value)
            return items if new is value else (name, new)
        except Fault as fault:
            raise fault.at("[1]") from fault.__cause__

    return convert


def struct_encoder(cls: type[Any], fields: list[tuple[str, Closure, Any]]) -> Closure:
    """Puts the wire form of fields into a copy of the record, which JSON writes as the wire type.

    A record of which no field changes is its own wire form.
    """
    if len(fields) == 1:
        return _field_encoder(cls, *fields[0])
    replace = msgspec.structs.replace
    values_of = getter([name for name, _, _ in fields])
    visited = [(name, _by_type(closure), closure, default) for name, closure, default in fields]

    def encode(state: Any, record: Any) -> Any:
        if type(record) is not cls:
            raise Fault("a value has the wrong type", cls.__name__, type(record).__qualname__)
        state.level = level = state.level + 1
        if level > MAX_NESTING:
            raise too_nested()
        changes: dict[str, Any] = {}
        name = ""
        try:
            for value, (name, kinds, closure, default) in zip(values_of(record), visited):  # noqa: B905
                if value is not default:
                    found = kinds.get(type(value), closure)
                    if found is not same:
                        wire = found(state, value)
                        if wire is not value:
                            changes[name] = wire
        except Fault as fault:
            raise fault.at(f".{name}") from fault.__cause__
        state.level = level - 1
        return replace(record, **changes) if changes else record

    return encode


def _field_encoder(cls: type[Any], name: str, closure: Closure, default: Any) -> Closure:
    """The encoder of a record with one field to visit, as most values of graphs have."""
    replace = msgspec.structs.replace
    value_of = operator.attrgetter(name)
    kinds = _by_type(closure)

    def encode(state: Any, record: Any) -> Any:
        if type(record) is not cls:
            raise Fault("a value has the wrong type", cls.__name__, type(record).__qualname__)
        state.level = level = state.level + 1
        if level > MAX_NESTING:
            raise too_nested()
        wire = value = value_of(record)
        if value is not default:
            try:
                found = kinds.get(type(value), closure)
                if found is not same:
                    wire = found(state, value)
            except Fault as fault:
                raise fault.at(f".{name}") from fault.__cause__
        state.level = level - 1
        return record if wire is value else replace(record, **{name: wire})

    return encode


def getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """All of these attributes at once, a single one twice: a pair is what C gives at once."""
    if not names:
        return lambda _record: ()
    return operator.attrgetter(*(names if len(names) > 1 else names * 2))


def struct_decoder(cls: type[Any], fields: list[tuple[str, Closure, Any]]) -> Closure:
    """Makes the record of a wire object."""
    if len(fields) == 1:
        return _field_decoder(cls, *fields[0])
    asdict = msgspec.structs.asdict
    decode_row = row_of_dict(cls, fields)
    return lambda state, wire: decode_row(state, asdict(wire))


def _field_decoder(cls: type[Any], name: str, closure: Closure, default: Any) -> Closure:
    """The decoder of a record with one field to visit."""
    asdict = msgspec.structs.asdict
    value_of = operator.attrgetter(name)
    kinds = _by_type(closure)
    alone = cls.__struct_fields__ == (name,)

    def decode(state: Any, wire: Any) -> Any:
        state.level = level = state.level + 1
        if level > MAX_NESTING:
            raise too_nested()
        value = value_of(wire)
        if value is not default:
            try:
                found = kinds.get(type(value), closure)
                if found is not same:
                    value = found(state, value)
            except Fault as fault:
                raise fault.at(f".{name}") from fault.__cause__
        state.level = level - 1
        try:
            return cls(**{name: value}) if alone else cls(**{**asdict(wire), name: value})
        except (FakeifyError, TypeError, ValueError) as error:
            raise Fault(f"not a valid {cls.__name__}: {error}") from None

    return decode


def row_of_dict(cls: type[Any], fields: list[tuple[str, Closure, Any]]) -> Closure:
    """Makes the record of a row that was read as a dictionary of the fields it has.

    Of the many fields of a tensor most are not written. The dictionary is used up.
    """
    visited = [(name, _by_type(closure), closure, default) for name, closure, default in fields]

    def decode(state: Any, row: dict[str, Any]) -> Any:
        state.level = level = state.level + 1
        if level > MAX_NESTING:
            raise too_nested()
        name = ""
        try:
            for name, kinds, closure, default in visited:
                value = row.get(name, default)
                if value is not default:
                    found = kinds.get(type(value), closure)
                    if found is not same:
                        row[name] = found(state, value)
        except Fault as fault:
            raise fault.at(f".{name}") from fault.__cause__
        state.level = level - 1
        try:
            return cls(**row)
        except (FakeifyError, TypeError, ValueError) as error:
            raise Fault(f"not a valid {cls.__name__}: {error}") from None

    return decode


def row_decoder(table: int, name: str) -> Closure:
    """Gives the object of a position, and notes how long the chain of rows below it is."""

    def decode(state: Any, position: int) -> Any:
        rows = state.rows[table]
        if not 0 <= position < len(rows):
            raise no_row(name, position, len(rows))
        depth = state.depths[table][position]
        if depth > state.deepest:
            state.deepest = depth
        return rows[position]

    return decode


def step_decoder(table: int, name: str) -> Closure:
    """As `row_decoder`, of a position that is written as the step from the last one."""
    at = row_decoder(table, name)

    def decode(state: Any, step: int) -> Any:
        last = state.last
        if last is None:
            return at(state, step)
        position = last[table] = last[table] + step
        return at(state, position)

    return decode


def no_row(table: str, position: int, below: int) -> Fault:
    """The error for a position at which nothing stands."""
    expected = f"a position below {below}" if below else "no position, as there are no rows"
    return Fault(f"there is no such row of {table} yet", expected, str(position))


def once_encoder(encode: Closure) -> Closure:
    """For values of which many are equal: each object is written once."""
    return lambda state, value: state.once(encode, value)


def once_decoder(decode: Closure) -> Closure:
    """For such values: what is written alike is read once, and is one object."""
    return lambda state, wire: state.once(decode, wire)


def once_text(hint: Any, decode: Closure) -> Closure:
    """As `once_decoder`, for text of a wire type that is parsed only then."""
    return lambda state, text: state.once_text(hint, decode, text)


def row_text(hint: Any, decode: Closure) -> Closure:
    """For text of a wire type that is parsed only when its turn has come."""
    return lambda state, text: decode(state, state.typed(hint, text))


def too_nested() -> Fault:
    """The error for more than ``MAX_NESTING`` levels, which closures and their callers count."""
    return Fault(f"records are nested deeper than {MAX_NESTING} levels", kind=LimitError)


def normalized(closure: Closure, default: Any) -> Closure:
    """Give the default itself for what equals it, so that equal records give equal bytes."""

    def encode(state: Any, value: Any) -> Any:
        if type(value) is type(default) and value == default and repr(value) == repr(default):
            return default
        return closure(state, value)

    return encode
