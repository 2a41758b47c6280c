"""The form that JSON sees of each record type, derived from the record type itself.

For every record type there is a wire type: the same fields, but a position where the record
holds an object of a shared type. msgspec reads and validates wire types in C. What turns records
into wire objects and back is compiled once per type to closures that visit only the fields which
can differ; the rest is copied as it is.
"""

from __future__ import annotations

import functools
import types
import typing
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypedDict, TypeVar, Union

import msgspec

from .closures import (
    Closure,
    Fault,
    decode_float,
    dispatch,
    each,
    each_pair,
    each_text,
    encode_float,
    finite_float,
    getter,
    normalized,
    once_decoder,
    once_encoder,
    once_text,
    row_decoder,
    row_of_dict,
    row_text,
    same,
    step_decoder,
    struct_decoder,
    struct_encoder,
    zipped,
)
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
from .errors import UnknownNameError
from .fork_locks import fork_safe_lock

if typing.TYPE_CHECKING:
    from collections.abc import Callable

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

LONG = frozenset({"NodeDesc", "InputDesc"})
"""Names of types of which a record may hold very many: these are read one by one."""

LONGEST = frozenset({"NodeDesc"})
"""Those that are written one by one, too."""

TABLES = ("exprs", "stacks", "sources", "storages", "tensors")
"""The names of their tables."""

STEPPED: tuple[type[Record], ...] = (SourceDesc, MetaStorageDesc, MetaTensorDesc)
"""Those to which most references go one by one: such a reference is written as the step from the
last one, so that what is alike is written alike and is small when compressed.

Steps are counted in each member, and in the table of tensors. Rows of sources and what is `FREQUENT`
have positions.
"""

Position = Annotated[int, msgspec.Meta(ge=0)]
"""Stands on the wire for an object of a shared type."""

RECORD_MODULES = ("desc", "desc_env", "desc_graph", "desc_frame")
_NON_FINITE = Literal["inf", "-inf", "nan"]
_T = TypeVar("_T")


class Swap(NamedTuple):
    """How values of one type cross: the wire type, and the closures ``(state, value) -> value``."""

    wire: Any
    encode: Closure
    decode: Closure


class Plan:
    """How one record type crosses. Filled in two steps, because record types are recursive."""

    __slots__ = ("chain", "children", "decode", "decode_row", "encode", "plain", "row", "wire")

    wire: Any
    encode: Closure
    decode: Closure
    row: Any
    """Of a shared type: the wire type as a dictionary of the fields that are written."""
    decode_row: Closure
    """What reads such a dictionary."""
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


def is_long(hint: Any) -> bool:
    """Whether a type is one of `LONG`."""
    return getattr(hint, "__name__", "") in LONG


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
        plan.children = getter(list(plan.chain))
        swaps = {field.name: self._swap(field.type) for field in fields}
        # msgspec reads annotations when the first decoder is made: here recursion closes.
        plan.wire.__annotations__ = {name: swap.wire for name, swap in swaps.items()}
        plan.encode = struct_encoder(cls, _field_encoders(fields, swaps))
        decoders = _field_decoders(fields, swaps)
        plan.decode = struct_decoder(cls, decoders)
        if table_of(cls) is not None:
            plan.row = _dictionary(cls, swaps)
            plan.decode_row = row_of_dict(cls, decoders)
        plan.plain = cls.__struct_config__.forbid_unknown_fields and all(
            swap.encode is same and not _needs_care(field.default)
            for field, swap in zip(fields, swaps.values(), strict=True)
        )
        return plan

    def _swap(self, hint: Any) -> Swap:
        """The swap of a field's type; ``same`` where nothing below it can differ."""
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if hint is float:
            return Swap(float | _NON_FINITE, encode_float, decode_float)
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
        return Swap(hint, same, same)

    def _struct(self, cls: type[Any]) -> Swap:
        table = table_of(cls)
        if table is not None:
            return _reference(cls, table)
        plan = self._plan(cls)
        if getattr(plan, "plain", False):
            return Swap(cls, same, same)
        if cls in FREQUENT:
            return Swap(plan.wire, once_encoder(plan.encode), once_decoder(plan.decode))
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
            if is_long(args[0]):
                read = row_text(item.wire, item.decode)
                several = each_text if args[0].__name__ in LONGEST else each
                return Swap(tuple[msgspec.Raw, ...], several(item.encode), each(read))
            encode, decode = self._pairs(args[0]) or each(item.encode), each(item.decode)
            if not set(FREQUENT).isdisjoint((args[0], *typing.get_args(args[0]))):
                encode, decode = once_encoder(encode), once_text(tuple[item.wire, ...], decode)
                return Swap(msgspec.Raw, encode, decode)
            return Swap(tuple[item.wire, ...], encode, decode)
        items = [self._swap(arg) for arg in args]
        wire = tuple[tuple(item.wire for item in items)]  # pyright: ignore[reportInvalidTypeForm]
        if all(item.encode is same for item in items):
            return Swap(wire, same, same)
        return Swap(
            wire,
            zipped([item.encode for item in items]),
            zipped([item.decode for item in items]),
        )

    def _pairs(self, hint: Any) -> Closure | None:
        """What encodes a tuple of such pairs; ``None`` if they are none, or are written as they are."""
        args = typing.get_args(hint)
        if typing.get_origin(hint) is not tuple or len(args) != 2 or args[1] is Ellipsis:
            return None
        first, second = (self._swap(arg).encode for arg in args)
        return None if first is second is same else each_pair(first, second)

    def _union(self, args: tuple[Any, ...]) -> Swap:
        encoders: dict[type, Closure] = {}
        decoders: dict[type, Closure] = {}
        wires: list[Any] = []
        has_text = any(_runtime_type(arg) is str for arg in args)
        for arg in args:
            swap = self._swap(arg)
            if arg is float and has_text:
                swap = Swap(float, finite_float, same)
            elif arg is float:
                # JSON has no infinities: their names stand for them.
                wires.append(_NON_FINITE)
                decoders[str] = decode_float
                swap = Swap(float, encode_float, same)
            value_type, wire_type = _runtime_type(arg), _runtime_type(swap.wire)
            if value_type in encoders or wire_type in decoders:
                raise TypeError(f"{arg} looks like another member of the union {args}")
            encoders[value_type], decoders[wire_type] = swap.encode, swap.decode
            wires.append(swap.wire)
        wire = Union[tuple(wires)]  # noqa: UP007 - built from a list
        return Swap(wire, dispatch(encoders), dispatch(decoders))


_COMPILER = Compiler()
"""Made before any thread can ask: plans of two of them would not fit together."""


def _reference(cls: type[Any], table: int) -> Swap:
    """How an object of a shared type is referred to."""
    name = TABLES[table]
    if cls in STEPPED:
        return Swap(int, lambda state, obj: state.step(table, obj), step_decoder(table, name))
    return Swap(Position, lambda state, obj: state.put(table, obj), row_decoder(table, name))


# --- fields ----------------------------------------------------------------------------------------

_Fields: TypeAlias = "tuple[msgspec.structs.FieldInfo, ...]"


def _field_encoders(fields: _Fields, swaps: dict[str, Swap]) -> list[tuple[str, Closure, Any]]:
    """The fields to visit on the way out, each with its closure and default."""
    found: list[tuple[str, Closure, Any]] = []
    for field in fields:
        closure = swaps[field.name].encode
        if _needs_care(field.default):
            closure = normalized(closure, field.default)
        if closure is not same:
            found.append((field.name, closure, field.default))
    return found


def _field_decoders(fields: _Fields, swaps: dict[str, Swap]) -> list[tuple[str, Closure, Any]]:
    """The fields to visit on the way in."""
    return [
        (field.name, swaps[field.name].decode, field.default)
        for field in fields
        if swaps[field.name].decode is not same
    ]


def _needs_care(default: object) -> bool:
    """Whether equal values may be other objects: msgspec omits a default by identity."""
    return isinstance(default, (str, float)) or (type(default) is int and not -5 <= default <= 256)


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


def _dictionary(cls: type[Any], swaps: dict[str, Swap]) -> Any:
    """The wire type as a dictionary; msgspec passes over keys that it does not have."""
    hints = {name: swap.wire for name, swap in swaps.items()}
    return TypedDict(cls.__name__, hints, total=False)  # pyright: ignore[reportArgumentType,reportGeneralTypeIssues]


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
