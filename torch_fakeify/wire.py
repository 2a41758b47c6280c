"""The form that JSON sees of each record type, derived from the record type itself.

For every record type there is a wire type: the same fields, but a position where the record
holds an object of a shared type. msgspec reads and validates wire types in C. What turns records
into wire objects and back is compiled once per type to closures that visit only the fields which
can differ; the rest is copied as it is.
"""

from __future__ import annotations

import functools
import math
import operator
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar, Union

import msgspec

from .desc import (
    ExprDesc,
    MetaStorageDesc,
    MetaTensorDesc,
    Record,
    SourceDesc,
    StackDesc,
    SymbolFactDesc,
    SymDesc,
)
from .errors import FakeifyError, LimitError, UnknownNameError
from .fork_locks import fork_safe_lock

SHARED: tuple[type[Record], ...] = (
    ExprDesc,
    StackDesc,
    SourceDesc,
    MetaStorageDesc,
    MetaTensorDesc,
)
"""The shared types in the order of their tables: a row refers to its own and earlier tables."""

FREQUENT: tuple[type[Record], ...] = (SymDesc, SymbolFactDesc)
"""Small types of which tensors have many equal ones: each is turned once, and comes back shared.

None of them holds one of another of them.
"""

TABLES = ("exprs", "stacks", "sources", "storages", "tensors")
"""The names of their tables."""

MAX_NESTING = 100
"""Levels of records, values and rows inside one another."""

Position = Annotated[int, msgspec.Meta(ge=0)]
"""Stands on the wire for an object of a shared type."""

RECORD_MODULES = ("desc", "desc_env", "desc_graph", "desc_frame")
_NON_FINITE = Literal["inf", "-inf", "nan"]
_Closure = Callable[[Any, Any], Any]
_T = TypeVar("_T")


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


class Swap(NamedTuple):
    """How values of one type cross: the wire type, and the closures ``(state, value) -> value``."""

    wire: Any
    encode: _Closure
    decode: _Closure


class Plan:
    """How one record type crosses. Filled in two steps, because record types are recursive."""

    __slots__ = ("chain", "children", "decode", "encode", "plain", "wire")

    wire: Any
    encode: _Closure
    decode: _Closure
    chain: tuple[str, ...]
    """Fields that hold the type itself or None."""
    children: Callable[[Any], tuple[Any, ...]]
    """The values of these fields."""
    plain: bool
    """Whether the record is its own wire form."""


def plan_of(cls: type[Any]) -> Plan:
    """The plan of a record type, compiled on first use."""
    return _COMPILER.plan(cls)


@functools.cache
def swap_of(hint: Any) -> Swap:
    """How values of any type that a record field may have cross."""
    return _COMPILER.swap(hint)


@functools.cache
def table_of(cls: type[Any]) -> int | None:
    """Position of a shared type's table, ``None`` for other types."""
    return next((i for i, shared in enumerate(SHARED) if shared is cls), None)


def record_name(cls: type[Any]) -> str:
    """The name under which a record type is written.

    Raises:
        Fault: it is not a type of this package's record modules.
    """
    _, _, module = cls.__module__.rpartition(".")
    if module not in RECORD_MODULES or records_of(module).get(cls.__name__) is not cls:
        raise Fault("not a record type of torch_fakeify", found=cls.__qualname__)
    return cls.__name__


@functools.cache
def record_type(name: str) -> type[Record]:
    """The record type of a name; imports record modules in turn until one has it.

    Raises:
        Fault: there is none.
    """
    for module in RECORD_MODULES:
        if name in records_of(module):
            return records_of(module)[name]
    raise Fault("no such record type", found=repr(name), kind=UnknownNameError)


@functools.cache
def records_of(module: str) -> dict[str, type[Record]]:
    """The record types that a record module defines, by name."""
    found = _record_module(module)
    return {
        cls.__name__: cls
        for cls in vars(found).values()
        if isinstance(cls, type) and issubclass(cls, Record) and cls.__module__ == found.__name__
    }


def _record_module(name: str) -> types.ModuleType:
    """One of the record modules, imported on first use."""
    if name == "desc":
        from . import desc as found
    elif name == "desc_env":
        from . import desc_env as found
    elif name == "desc_graph":
        from . import desc_graph as found
    else:
        from . import desc_frame as found
    return found


def _same(_state: Any, value: Any) -> Any:
    return value


class Compiler:
    """Derives plans; one for the process."""

    def __init__(self) -> None:
        self._plans: dict[type, Plan] = {}
        self._partial: dict[type, Plan] = {}
        self._lock = fork_safe_lock()

    def plan(self, cls: type[Any]) -> Plan:
        """The plan of a record type."""
        found = self._plans.get(cls)
        return found if found is not None else self._complete(lambda: self._plan(cls))

    def swap(self, hint: Any) -> Swap:
        """The swap of any type that a field may have."""
        return self._complete(lambda: self._swap(hint))

    def _complete(self, compile_: Callable[[], _T]) -> _T:
        """Compile, and let others see plans only when all that they lead to are there."""
        with self._lock:
            try:
                found = compile_()
            except BaseException:
                self._partial = dict(self._plans)
                raise
            self._plans.update(self._partial)
            return found

    def _plan(self, cls: type[Any]) -> Plan:
        if cls in self._partial:
            return self._partial[cls]
        plan = self._partial[cls] = Plan()
        fields = msgspec.structs.fields(cls)
        plan.wire = _shell(cls, fields)
        plan.chain = tuple(
            field.name
            for field in fields
            if table_of(cls) is not None and set(typing.get_args(field.type)) == {cls, type(None)}
        )
        plan.children = _getter(list(plan.chain))
        swaps = {field.name: self._swap(field.type) for field in fields}
        # msgspec reads annotations when the first decoder is made: here recursion closes.
        plan.wire.__annotations__ = {name: swap.wire for name, swap in swaps.items()}
        plan.encode = _struct_encoder(cls, _field_encoders(fields, swaps))
        plan.decode = _struct_decoder(cls, _field_decoders(fields, swaps))
        plan.plain = cls.__struct_config__.forbid_unknown_fields and all(
            swap.encode is _same and not _needs_care(field.default)
            for field, swap in zip(fields, swaps.values(), strict=True)
        )
        return plan

    def _swap(self, hint: Any) -> Swap:
        """The swap of a field's type; ``_same`` where nothing below it can differ."""
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if hint is float:
            return Swap(float | _NON_FINITE, _encode_float, _decode_float)
        if origin is Annotated:
            inner = self._swap(args[0])
            return Swap(Annotated[(inner.wire, *hint.__metadata__)], inner.encode, inner.decode)
        if origin in (Union, types.UnionType):
            return self._union(args)
        if origin is tuple:
            return self._tuple(args)
        if origin in (list, dict, set, frozenset) and not all(map(_is_plain, args)):
            raise TypeError(f"records hold tuples, not {hint}")
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            return self._struct(hint)
        return Swap(hint, _same, _same)

    def _struct(self, cls: type[Any]) -> Swap:
        table = table_of(cls)
        if table is not None:
            return Swap(Position, lambda state, obj: state.put(table, obj), _row_decoder(table))
        plan = self._plan(cls)
        if getattr(plan, "plain", False):
            return Swap(cls, _same, _same)
        if cls in FREQUENT:
            return Swap(plan.wire, _once_encoder(plan.encode), _once_decoder(plan.decode))
        if not hasattr(plan, "encode"):
            return Swap(
                plan.wire,
                lambda state, obj: plan.encode(state, obj),
                lambda state, wire: plan.decode(state, wire),
            )
        return Swap(plan.wire, plan.encode, plan.decode)

    def _tuple(self, args: tuple[Any, ...]) -> Swap:
        if len(args) == 2 and args[1] is Ellipsis:
            item = self._swap(args[0])
            encode, decode = self._pairs(args[0]) or _each(item.encode), _each(item.decode)
            if not set(FREQUENT).isdisjoint((args[0], *typing.get_args(args[0]))):
                encode, decode = _once_encoder(encode), _once_decoder(decode)
            return Swap(tuple[item.wire, ...], encode, decode)
        items = [self._swap(arg) for arg in args]
        wire = tuple[tuple(item.wire for item in items)]  # pyright: ignore[reportInvalidTypeForm]
        if all(item.encode is _same for item in items):
            return Swap(wire, _same, _same)
        return Swap(
            wire,
            _zipped([item.encode for item in items]),
            _zipped([item.decode for item in items]),
        )

    def _pairs(self, hint: Any) -> _Closure | None:
        """What encodes a tuple of such pairs; ``None`` if they are none, or are written as they are."""
        args = typing.get_args(hint)
        if typing.get_origin(hint) is not tuple or len(args) != 2 or args[1] is Ellipsis:
            return None
        first, second = (self._swap(arg).encode for arg in args)
        return None if first is second is _same else _each_pair(first, second)

    def _union(self, args: tuple[Any, ...]) -> Swap:
        encoders: dict[type, _Closure] = {}
        decoders: dict[type, _Closure] = {}
        wires: list[Any] = []
        has_text = any(_runtime_type(arg) is str for arg in args)
        for arg in args:
            swap = self._swap(arg)
            if arg is float and has_text:
                swap = Swap(float, _finite_float, _same)
            elif arg is float:
                # JSON has no infinities: their names stand for them.
                wires.append(_NON_FINITE)
                decoders[str] = _decode_float
                swap = Swap(float, _encode_float, _same)
            value_type, wire_type = _runtime_type(arg), _runtime_type(swap.wire)
            if value_type in encoders or wire_type in decoders:
                raise TypeError(f"{arg} looks like another member of the union {args}")
            encoders[value_type], decoders[wire_type] = swap.encode, swap.decode
            wires.append(swap.wire)
        wire = Union[tuple(wires)]  # noqa: UP007 - built from a list
        return Swap(wire, _dispatch(encoders), _dispatch(decoders))


_COMPILER = Compiler()
"""Made before any thread can ask: plans of two of them would not fit together."""


def _wrong_type(closures: dict[type, _Closure], value: object) -> Fault:
    names = " | ".join(sorted({kind.__name__ for kind in closures}))
    return Fault("a value has the wrong type", names, type(value).__qualname__)


# --- closures -------------------------------------------------------------------------------------


def _encode_float(_state: Any, value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def _decode_float(_state: Any, wire: float | str) -> float:
    return float(wire)


def _finite_float(_state: Any, value: float) -> float:
    if not math.isfinite(value):
        raise Fault("JSON has no such number", "a finite float or a FloatValue", repr(value))
    return value


class _Dispatch(NamedTuple):
    """The closures of a union by the value's exact type."""

    closures: dict[type, _Closure]

    def of(self, value: object) -> _Closure:
        """The closure for a value."""
        closure = self.closures.get(type(value))
        if closure is None:
            raise _wrong_type(self.closures, value)
        return closure

    def __call__(self, state: Any, value: Any) -> Any:
        return self.of(value)(state, value)


def _dispatch(closures: dict[type, _Closure]) -> _Closure:
    """Choose by the value's exact type."""
    if all(closure is _same for closure in closures.values()):
        return _same
    if len(closures) == 2 and type(None) in closures:
        (closure,) = (closure for kind, closure in closures.items() if kind is not type(None))
        return lambda state, value: None if value is None else closure(state, value)
    return _Dispatch(closures)


def _by_type(closure: _Closure) -> dict[type, _Closure]:
    """The closures of a union, to choose from without a call; none of other types."""
    return closure.closures if isinstance(closure, _Dispatch) else {}


def _each(closure: _Closure) -> _Closure:
    """Apply to every item of a tuple."""
    if closure is _same:
        return _same
    # Most items of sizes and arguments are plain: one call less for each of them.
    closures = _by_type(closure)

    def convert(state: Any, items: Any) -> tuple[Any, ...]:
        out: list[Any] = []
        changed = False
        try:
            for item in items:
                found = closures.get(type(item), closure)
                if found is _same:
                    out.append(item)
                    continue
                new = found(state, item)
                changed = changed or new is not item
                out.append(new)
        except Fault as fault:
            raise fault.at(f"[{len(out)}]") from fault.__cause__
        return tuple(out) if changed else items

    return convert


def _each_pair(first: _Closure, second: _Closure) -> _Closure:
    """Apply to every item of a tuple of pairs."""
    firsts, seconds = _by_type(first), _by_type(second)

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
                part = "[0]"
                found = firsts.get(type(key), first)
                new_key = key if found is _same else found(state, key)
                part = "[1]"
                found = seconds.get(type(value), second)
                new = value if found is _same else found(state, value)
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


def _zipped(closures: list[_Closure]) -> _Closure:
    """Apply one closure to each item of a tuple of fixed length."""
    if len(closures) == 2 and closures[0] is _same:
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


def _named(closure: _Closure) -> _Closure:
    """Apply to the second item of a pair, as records have for named values."""
    closures = _by_type(closure)

    def convert(state: Any, items: Any) -> tuple[Any, ...]:
        if len(items) != 2:
            raise Fault("a tuple has the wrong length", "2", str(len(items)))
        name, value = items
        try:
            found = closures.get(type(value), closure)
            if found is _same:
                return items
            new = found(state, value)
            return items if new is value else (name, new)
        except Fault as fault:
            raise fault.at("[1]") from fault.__cause__

    return convert


def _struct_encoder(cls: type[Any], fields: list[tuple[str, _Closure, Any]]) -> _Closure:
    """Puts the wire form of fields into a copy of the record, which JSON writes as the wire type.

    A record of which no field changes is its own wire form.
    """
    if len(fields) == 1:
        return _field_encoder(cls, *fields[0])
    replace = msgspec.structs.replace
    values_of = _getter([name for name, _, _ in fields])
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
                    if found is not _same:
                        wire = found(state, value)
                        if wire is not value:
                            changes[name] = wire
        except Fault as fault:
            raise fault.at(f".{name}") from fault.__cause__
        state.level = level - 1
        return replace(record, **changes) if changes else record

    return encode


def _field_encoder(cls: type[Any], name: str, closure: _Closure, default: Any) -> _Closure:
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
                if found is not _same:
                    wire = found(state, value)
            except Fault as fault:
                raise fault.at(f".{name}") from fault.__cause__
        state.level = level - 1
        return record if wire is value else replace(record, **{name: wire})

    return encode


def _getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """All of these attributes at once, a single one twice: a pair is what C gives at once."""
    if not names:
        return lambda _record: ()
    return operator.attrgetter(*(names if len(names) > 1 else names * 2))


def _struct_decoder(cls: type[Any], fields: list[tuple[str, _Closure, Any]]) -> _Closure:
    asdict = msgspec.structs.asdict
    values_of = _getter([name for name, _, _ in fields])
    visited = [(name, _by_type(closure), closure, default) for name, closure, default in fields]

    def decode(state: Any, wire: Any) -> Any:
        state.level = level = state.level + 1
        if level > MAX_NESTING:
            raise too_nested()
        values = asdict(wire)
        name = ""
        try:
            for value, (name, kinds, closure, default) in zip(values_of(wire), visited):  # noqa: B905
                if value is not default:
                    found = kinds.get(type(value), closure)
                    if found is not _same:
                        values[name] = found(state, value)
        except Fault as fault:
            raise fault.at(f".{name}") from fault.__cause__
        state.level = level - 1
        try:
            return cls(**values)
        except (FakeifyError, TypeError, ValueError) as error:
            raise Fault(f"not a valid {cls.__name__}: {error}") from None

    return decode


def _row_decoder(table: int) -> _Closure:
    """Gives the object of a position, and notes how long the chain of rows below it is."""

    def decode(state: Any, position: int) -> Any:
        rows = state.rows[table]
        if not 0 <= position < len(rows):
            raise no_row(TABLES[table], position, len(rows))
        depth = state.depths[table][position]
        if depth > state.deepest:
            state.deepest = depth
        return rows[position]

    return decode


def no_row(table: str, position: int, below: int) -> Fault:
    """The error for a position at which nothing stands."""
    expected = f"a position below {below}" if below else "no position, as there are no rows"
    return Fault(f"there is no such row of {table} yet", expected, str(position))


def _once_encoder(encode: _Closure) -> _Closure:
    return lambda state, value: state.once(encode, value)


def _once_decoder(decode: _Closure) -> _Closure:
    return lambda state, wire: state.once(decode, wire)


def too_nested() -> Fault:
    """The error for more than ``MAX_NESTING`` levels, which closures and their callers count."""
    return Fault(f"records are nested deeper than {MAX_NESTING} levels", kind=LimitError)


_Fields: TypeAlias = "tuple[msgspec.structs.FieldInfo, ...]"


def _field_encoders(fields: _Fields, swaps: dict[str, Swap]) -> list[tuple[str, _Closure, Any]]:
    """The fields to visit on the way out, each with its closure and default."""
    found: list[tuple[str, _Closure, Any]] = []
    for field in fields:
        closure = swaps[field.name].encode
        if _needs_care(field.default):
            closure = _normalized(closure, field.default)
        if closure is not _same:
            found.append((field.name, closure, field.default))
    return found


def _field_decoders(fields: _Fields, swaps: dict[str, Swap]) -> list[tuple[str, _Closure, Any]]:
    """The fields to visit on the way in."""
    return [
        (field.name, swaps[field.name].decode, field.default)
        for field in fields
        if swaps[field.name].decode is not _same
    ]


def _needs_care(default: object) -> bool:
    """Whether equal values may be other objects: msgspec omits a default by identity."""
    return isinstance(default, (str, float)) or (type(default) is int and not -5 <= default <= 256)


def _normalized(closure: _Closure, default: Any) -> _Closure:
    """Give the default itself for what equals it, so that equal records give equal bytes."""

    def encode(state: Any, value: Any) -> Any:
        if type(value) is type(default) and value == default and repr(value) == repr(default):
            return default
        return closure(state, value)

    return encode


def _shell(cls: type[Any], fields: _Fields) -> type[Any]:
    """The wire type of ``cls``, its annotations still to be set."""
    config = cls.__struct_config__
    columns: list[Any] = []
    for field in fields:
        if field.default_factory is not msgspec.NODEFAULT or field.name != field.encode_name:
            raise TypeError(f"{cls.__name__}.{field.name} has a factory or another name")
        columns.append((field.name, Any) if field.required else (field.name, Any, field.default))
    return msgspec.defstruct(
        cls.__name__,
        columns,
        module=__name__,
        tag=config.tag,
        tag_field=None if config.array_like else config.tag_field,
        kw_only=True,
        omit_defaults=config.omit_defaults,
        forbid_unknown_fields=True,
        array_like=config.array_like,
        gc=False,
    )


def _runtime_type(hint: Any) -> type:
    """The class of the values of a type."""
    origin = typing.get_origin(hint)
    if hint is None:
        return type(None)
    if origin is Annotated:
        return _runtime_type(typing.get_args(hint)[0])
    if origin is Literal:
        (kind,) = {type(value) for value in typing.get_args(hint)}
        return kind
    return origin or hint


def _is_plain(hint: Any) -> bool:
    return hint in (bool, int, str, bytes)
