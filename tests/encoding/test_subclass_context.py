"""Contexts of subclasses: dataclasses filled without their code, and which classes are allowed."""

from __future__ import annotations

import abc
import collections
import dataclasses
import enum
import functools
import sys
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.tensor._ops._mask_buffer import MaskBuffer

from torch_fakeify.encoding.subclass_context import ContextDecoder, ContextEncoder
from torch_fakeify.errors import FormatError, LimitError, UnknownNameError, UnsupportedValueError
from torch_fakeify.records.tensor import (
    DictValue,
    MetaTensorDesc,
    NamedTupleValue,
    NestedIntDesc,
    OpaqueValue,
    SymValue,
    TupleValue,
    Value,
)
from torch_fakeify.serialization import document

HERE = __name__
RAN: list[str] = []
"""The code of the classes below that has run."""


class Color(enum.Enum):
    """An enumeration."""

    RED = 1


class Pair(NamedTuple):
    """A named tuple."""

    first: Any
    second: Any


@dataclasses.dataclass
class Plain:
    """A dataclass with a default."""

    number: Any
    name: str = "default"


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A frozen dataclass that contains other objects."""

    inner: Any
    size: Any = None


@dataclasses.dataclass(slots=True)
class Slotted:
    """A dataclass without a dictionary."""

    number: int
    later: Any = dataclasses.field(default=None)


@dataclasses.dataclass(slots=True, frozen=True)
class FrozenBase:
    """A frozen dataclass without a dictionary."""

    number: int


@dataclasses.dataclass(slots=True, frozen=True)
class FrozenSlotted(FrozenBase):
    """A dataclass with slots of two classes."""

    more: Any = ()


@dataclasses.dataclass
class Derived:
    """A dataclass that computes in ``__post_init__`` and has more than its fields."""

    number: int
    twice: int = dataclasses.field(init=False)
    never: int = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        RAN.append("__post_init__")
        self.twice = 2 * self.number
        self.extra = torch.float16

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Derived) and vars(self) == vars(other)

    @functools.cached_property
    def slow(self) -> int:
        """A cached property."""
        RAN.append("slow")
        return 3


@dataclasses.dataclass
class Guarded:
    """A dataclass that runs code when it is made and when it is changed."""

    number: int

    def __new__(cls, *args: Any) -> Any:
        """Record the call, which no reader may make."""
        RAN.append("__new__")
        return super().__new__(cls)

    def __setattr__(self, name: str, value: object) -> None:
        RAN.append("__setattr__")
        object.__setattr__(self, name, value)


@dataclasses.dataclass
class Finalized:
    """A dataclass with a finalizer."""

    number: int

    def __del__(self) -> None:
        RAN.append("__del__")


class FinalizedPair(NamedTuple):
    """A named tuple with a finalizer."""

    number: int

    def __del__(self) -> None:
        RAN.append("__del__")


@dataclasses.dataclass
class Computed:
    """A dataclass with a property as a field."""

    number: int

    @property
    def _number(self) -> int:
        return 1

    @_number.setter
    def _number(self, value: int) -> None:
        RAN.append("setter")


Computed.number = Computed._number


@dataclasses.dataclass
class Dictionary(collections.OrderedDict):
    """A dataclass that is a container too."""

    number: int = 1


@dataclasses.dataclass
class Methodical:
    """A dataclass with a method."""

    number: int

    def method(self) -> int:
        """The method."""
        return self.number


@dataclasses.dataclass
class Abstract(abc.ABC):
    """A dataclass that has no instances."""

    number: int

    @abc.abstractmethod
    def method(self) -> int:
        """Nothing."""


def encode(obj: object) -> Value:
    """Return the record."""
    return ContextEncoder(HERE).encode(obj, "c")


def there_and_back(obj: object) -> Any:
    """Encode and decode through bytes."""
    return ContextDecoder(HERE).decode(document.loads(document.dumps(encode(obj))), "c")


def instance(name: str, /, **fields: Value) -> OpaqueValue:
    """Return the record of a dataclass instance, as a file might have it."""
    data = TupleValue(items=(name, DictValue(items=tuple(fields.items()))))
    return OpaqueValue(kind="dataclass", data=data)


def decode(v: Value) -> Any:
    """Return the object."""
    return ContextDecoder(HERE).decode(v, "c")


# --- what is carried ------------------------------------------------------------------------------


@pytest.mark.parametrize("obj", [
    None, 3, "s", 0.5, True, [1, (2, {"k": None})], torch.Size([2, 3]), torch.bfloat16,
    torch.device("cuda:1"), torch.jagged, torch.channels_last, Color.RED, Pair(1, Color.RED),
    Plain(1), Plain([Plain(2)], "n"), Frozen(Plain(1)), Frozen({"k": Frozen(None)}, torch.Size([4])),
    Slotted(3, Slotted(4)), FrozenSlotted(1, (2,)), Pair(Plain(1), Frozen(Pair(2, 3))), Guarded(3),
    torch.Tensor, torch.nn.functional.relu, torch.ops.aten.add.Tensor, MaskBuffer(None, 2),
], ids=lambda obj: type(obj).__name__)  # fmt: skip
def test_contexts_round_trip(obj: Any) -> None:
    """Plain data, torch's constants, enumerations, named tuples, nested dataclasses are equal."""
    found = there_and_back(obj)
    assert found == obj
    assert type(found) is type(obj)


def test_derived_fields_and_extras() -> None:
    """Fields of ``__post_init__`` are recorded, unset ones stay unset, and caches are left out."""
    obj = Derived(3)
    assert obj.slow == 3
    RAN.clear()
    found = there_and_back(obj)
    assert (found.number, found.twice, found.extra) == (3, 6, torch.float16)
    assert "never" not in vars(found)
    assert "slow" not in vars(found)
    assert RAN == []
    assert found.slow == 3


def test_no_code_of_the_class_runs() -> None:
    """Neither ``__new__`` nor ``__init__`` nor ``__setattr__`` is called."""
    obj = Guarded(3)
    RAN.clear()
    assert there_and_back(obj).number == 3
    assert RAN == []


def test_the_record_has_the_class_and_its_fields() -> None:
    """The record of a dataclass has the name of the class and the fields by name."""
    assert encode(Plain(1, "n")) == instance(f"{HERE}.Plain", number=1, name="n")


# --- what writer and reader refuse ----------------------------------------------------------------


OBJECTIONS = {
    "Finalized": "it has a finalizer",
    "Computed": "its field number is computed by a property",
    "Dictionary": "it derives from a class that is not written in Python",
    "Config": "it is of another package than the tensor subclass",
}


@pytest.mark.parametrize("short", OBJECTIONS)
def test_classes_that_run_code_or_are_of_others_are_refused(
    monkeypatch: pytest.MonkeyPatch, short: str
) -> None:
    """Writer and reader refuse a dataclass whose instances could run code, or of a third package."""
    module: Any = types.ModuleType("another_package")
    module.Config = dataclasses.make_dataclass("Config", [("number", int, 1)])
    module.Config.__module__ = module.__name__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    cls = module.Config if short == "Config" else globals()[short]
    name = f"{cls.__module__}.{short}"
    with pytest.raises(UnsupportedValueError) as written:
        encode(cls(number=1))
    assert str(written.value) == (
        f"c: a dataclass instance cannot be recorded: {OBJECTIONS[short]}; found {name}"
    )
    del written
    RAN.clear()
    record = instance(name, number=3)
    with pytest.raises(UnknownNameError) as read:
        decode(record)
    assert str(read.value) == (
        f"c: no instance of the class {name!r} may be made: {OBJECTIONS[short]}"
    )
    assert RAN == []
    if short == "Config":
        assert ContextDecoder(module.__name__).decode(record, "c").number == 3


def test_a_named_tuple_with_a_finalizer_is_refused() -> None:
    """A file could make its code run."""
    name = f"{HERE}.FinalizedPair"
    with pytest.raises(UnsupportedValueError) as written:
        encode(FinalizedPair(1))
    assert str(written.value) == f"c: a named tuple class has a finalizer; found {name}"
    del written
    RAN.clear()
    with pytest.raises(UnknownNameError) as read:
        decode(NamedTupleValue(cls=name, items=(1,)))
    assert str(read.value) == (
        f"c: no instance of the class {name!r} may be made: it has a finalizer"
    )
    assert RAN == []


# --- what a writer refuses ------------------------------------------------------------------------


def methodical() -> Methodical:
    """Return an instance with an attribute in place of its method."""
    obj = Methodical(1)
    vars(obj)["method"] = 3
    return obj


def half_empty() -> Slotted:
    """Return an instance with a field that was never set."""
    obj = object.__new__(Slotted)
    obj.number = 1
    return obj


def nested(depth: int) -> Any:
    """Return instances inside one another."""
    return functools.reduce(lambda inner, _: Plain(inner), range(depth), 0)


def endless() -> Plain:
    """Return an instance that contains itself."""
    obj = Plain(1)
    obj.number = [obj]
    return obj


def local() -> Any:
    """Return an instance of a class that no reader can find."""

    @dataclasses.dataclass
    class Local:
        number: int = 1

    return Local()


REFUSED = {
    f"c.method: a dataclass instance hides a method of its class; found {HERE}.Methodical": methodical,
    f"c.later: a field of a dataclass instance is not set; found {HERE}.Slotted": half_empty,
    f"c: a dataclass cannot be found by its name; found {HERE}.local.<locals>.Local": local,
    "c.number[0]: a tensor has no record here": lambda: Plain([torch.ones(1)]),
    "c.inner['k'][1].number: a value has no record; expected a constant; found an object of "
    "torch._C.Generator. Seed the default generator instead.": (
        lambda: Frozen({"k": Pair(0, Plain(torch.Generator()))})
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_objects_that_cannot_be_rebuilt_are_refused(message: str) -> None:
    """An object that cannot be rebuilt is refused with its path and class."""
    with pytest.raises(UnsupportedValueError) as error:
        encode(REFUSED[message]())
    assert str(error.value) == message


def test_nesting_is_bounded() -> None:
    """Sixteen levels are written and read; seventeen and infinite ones are refused before a stack overflows."""
    assert there_and_back([nested(16), nested(16)]) == [nested(16), nested(16)]
    for obj in (nested(17), endless()):
        with pytest.raises(UnsupportedValueError) as error:
            encode(obj)
        assert error.value.what == (
            "dataclass instances are nested too deeply (or contain themselves)"
        )
    deep = instance(f"{HERE}.Plain", number=encode(nested(16)), name="")
    with pytest.raises(LimitError) as limit:
        decode(deep)
    assert str(limit.value) == (
        f"c{'.number' * 16}: dataclass instances are nested too deeply; expected at most 16 levels"
    )


# --- what a reader refuses ------------------------------------------------------------------------


UNKNOWN = {
    "subprocess.Popen": "the class 'subprocess.Popen' is no dataclass",
    "builtins.object": "the class 'builtins.object' is no dataclass",
    f"{HERE}.Color": f"the class '{HERE}.Color' is no dataclass",
    "nowhere.C": "the class 'nowhere.C' is not known in this process. Run `import nowhere` first if you "
    "trust it.",
    "C": "the class 'C' is not known in this process",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_classes_that_a_file_may_not_name_are_refused(name: str) -> None:
    """A file may name imported dataclasses alone."""
    with pytest.raises(UnknownNameError) as error:
        decode(instance(name, number=1))
    assert str(error.value) == f"c: {UNKNOWN[name]}"


@pytest.mark.parametrize(("v", "message"), [
    (instance(f"{HERE}.Plain", number=1),
     f"c: a field of {HERE}.Plain is missing; expected name"),
    (instance(f"{HERE}.Methodical", number=1, method=2),
     f"c: {HERE}.Methodical cannot have an attribute 'method'"),
    (instance(f"{HERE}.Methodical", number=1, __class__=2),
     f"c: {HERE}.Methodical cannot have an attribute '__class__'"),
    (instance(f"{HERE}.Plain", **{"number": 1, "name": "", "not a name": 2}),
     f"c: {HERE}.Plain cannot have an attribute 'not a name'"),
    (instance(f"{HERE}.FrozenSlotted", number=1, more=1, other=2),
     f"c: {HERE}.FrozenSlotted cannot have an attribute 'other'"),
    (OpaqueValue(kind="dataclass", data=TupleValue(items=(f"{HERE}.Plain", DictValue(items=(
        ("number", 1), ("number", 2)))))), "c: not the fields of a dataclass"),
    (OpaqueValue(kind="dataclass", data=TupleValue(items=(f"{HERE}.Plain", DictValue(items=(
        (1, 1),))))), "c: not the fields of a dataclass"),
    (instance(f"{HERE}.Plain", number=OpaqueValue(kind="no such kind"), name=""),
     "c.number: a value of this kind has no meaning here; found 'no such kind'"),
    (SymValue(sym=NestedIntDesc(1)),
     "c: a symbolic integer has no meaning here"),
])  # fmt: skip
def test_impossible_fields_are_refused(v: Value, message: str) -> None:
    """Errors name missing, unknown and wrongly typed fields."""
    with pytest.raises(FormatError) as error:
        decode(v)
    assert str(error.value) == message


def test_an_abstract_dataclass_is_refused() -> None:
    """Python has no instances of it, with a message that depends on its version."""
    with pytest.raises(FormatError) as error:
        decode(instance(f"{HERE}.Abstract", number=1))
    assert str(error.value).startswith(
        f"c: no instance of {HERE}.Abstract can be made: Can't instantiate abstract class Abstract"
    )


# --- hooks ----------------------------------------------------------------------------------------


def test_hooks_reach_into_dataclasses() -> None:
    """The caller's hooks get symbolic integers and tensors inside instances, with their paths."""
    inside = torch.ones(1)
    desc = MetaTensorDesc(id=7, dtype="float32", device="cpu", size=(1,), stride=(1,))
    described: list[tuple[torch.Tensor, str]] = []

    def describe(t: torch.Tensor, where: str) -> Any:
        described.append((t, where))
        return desc

    mine = OpaqueValue(kind="mine")
    encoder = ContextEncoder(HERE, lambda obj: mine if obj is Color else None, describe)
    v = encoder.encode(Plain(Pair(inside, Color)), "c")
    assert described == [(inside, "c.number[0]")]
    decoder = ContextDecoder(HERE, lambda v: "sym" if v == mine else NotImplemented, lambda d: d.id)
    assert decoder.decode(v, "c") == Plain(Pair(7, "sym"))
