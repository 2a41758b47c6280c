"""Constants and their records: exact types, hostile records, refusals."""

from __future__ import annotations

import collections
import enum
import functools
import math
import operator
import re

import hypothesis.strategies as st
import numpy
import pytest
import torch
from hypothesis import given
from torch._C._functorch import TransformType
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import CheckpointPolicy

from torch_fakeify.encoding import values
from torch_fakeify.encoding.values import decode_value, encode_value
from torch_fakeify.errors import FormatError, LimitError, UnknownNameError, UnsupportedValueError
from torch_fakeify.records.tensor import (
    DictValue,
    EnumValue,
    ExprDesc,
    ExprValue,
    IntNode,
    ListValue,
    NamedTupleValue,
    NodeValue,
    OpaqueValue,
    RangeValue,
    SetValue,
    SizeValue,
    TorchConstValue,
    TupleValue,
    TypeValue,
)
from torch_fakeify.serialization import document

Point = collections.namedtuple("Point", "x y")


class Color(enum.Enum):
    """A plain enumeration."""

    RED = 1
    BLUE = "b"


class Mode(enum.Flag):
    """Flags."""

    A = 1
    B = 2


class Dressed(Point):
    """A named tuple that has a `__dict__`."""


class Loud(Point):
    """A named tuple class whose constructor raises."""

    __slots__ = ()

    def __new__(cls, *args):
        """Raise: a file may not call it."""
        raise AssertionError("the class's own __new__ ran")


class LoudColor(str, enum.Enum):
    """An enumeration with a lookup hook."""

    A = "a"

    @classmethod
    def _missing_(cls, value):
        raise AssertionError("a lookup by value ran")


def same(a, b):
    """Return whether two constants are equal with equal types at every depth; nan equals nan."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and str(a) == str(b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(map(type, a)) == list(map(type, b)) and same(
            [part for item in a.items() for part in item],
            [part for item in b.items() for part in item],
        )
    if isinstance(a, slice):
        return all(same(getattr(a, f), getattr(b, f)) for f in ("start", "stop", "step"))
    return a == b


ATOMS = [
    None, True, False, 0, 1, -1, 2**63, -(2**80), 0.0, -0.0, 1.5, math.inf, -math.inf, math.nan,
    "", "a", "é\n\x00\u2028", b"", b"\x00\xff", 1 + 2j, complex(math.nan, -0.0), ...,
    slice(None), slice(1, None, -1), range(0), range(3, -9, -2), torch.Size([]), torch.Size([2, 3]),
    torch.float32, torch.bits8, torch.float8_e4m3fn, torch.complex64, torch.device("cpu"),
    torch.device("cuda:1"), torch.device("meta"), torch.strided, torch.sparse_csr,
    torch.channels_last, torch.preserve_format, torch.per_tensor_affine, Color.RED, Color.BLUE,
    Mode.A, LoudColor.A, SDPBackend.MATH, TransformType.Vmap, CheckpointPolicy.MUST_SAVE,
    Point(1, "y"), Dressed(1, 2), torch.return_types.max((1, 2)), int, float, bool, type(None), torch.Tensor,
    torch.nn.Parameter, torch.SymInt, numpy.float32, torch.relu, operator.add,
    torch.ops.aten.add.Tensor, torch.ops.higher_order.cond, set(), {1}, frozenset({"a"}),
]  # fmt: skip


@pytest.mark.parametrize("value", ATOMS, ids=lambda x: re.sub(r" at 0x[0-9a-f]+", "", repr(x)))
def test_a_constant_is_decoded_with_its_exact_type(value):
    """A constant has its exact type when decoded, also after serialization."""
    record = encode_value(value)
    assert same(decode_value(record), value)
    again = document.loads(document.dumps(TupleValue(items=(record,)))).items[0]
    assert same(decode_value(again), value)


HASHABLE = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.floats(allow_nan=False)
    ),
    lambda children: st.lists(children, max_size=3).map(tuple),
    max_leaves=4,
)
CONSTANTS = st.recursive(
    st.one_of(HASHABLE, st.floats(), st.complex_numbers(), st.sampled_from(ATOMS)),
    lambda children: st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        st.lists(children, max_size=4).map(immutable_list),
        st.dictionaries(HASHABLE, children, max_size=3),
        st.dictionaries(HASHABLE, children, max_size=3).map(immutable_dict),
        st.sets(HASHABLE, max_size=3),
        st.frozensets(HASHABLE, max_size=3),
        st.builds(slice, children, children, children),
        st.builds(Point, children, children),
    ),
    max_leaves=12,
)


@given(CONSTANTS)
def test_encode_and_decode_are_inverse(value):
    """Any nesting of containers has a record whose decoded value has the same record."""
    record = encode_value(value)
    again = decode_value(record)
    assert same(again, value)
    assert repr(encode_value(again)) == repr(record)


@given(st.sets(st.one_of(st.integers(), st.text()), max_size=8), st.randoms())
def test_sets_have_one_record_for_any_history(items, random):
    """The record of a set does not depend on the order of insertion."""
    shuffled = list(items)
    random.shuffle(shuffled)
    assert encode_value(set(shuffled)) == encode_value(items)


def test_every_constant_of_torch_has_a_record():
    """Every dtype, layout, memory format and scheme that torch exports, aliases such as `torch.half` too."""
    kinds = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
    found = [v for v in vars(torch).values() if isinstance(v, kinds)]
    assert len(found) > 60
    assert all(decode_value(encode_value(v)) is v for v in found)


class StrSubclass(str):
    """A subclass of str."""

    __slots__ = ()


REFUSED = [
    ((x for x in ()), "builtins.generator", " Make it a list or a tuple first."),
    (torch, "builtins.module", " Pass the function that you need of it."),
    (object(), "builtins.object", ""),
    (torch.ones(1), "torch.Tensor", ""),
    (torch.Generator(), "torch._C.Generator", " Seed the default generator instead."),
    (torch.nn.ReLU(), "torch.nn.modules.activation.ReLU", ""),
    (
        functools.partial(int, base=2),
        "functools.partial",
        " Pass a function that is registered as an operator.",
    ),
    (StrSubclass("a"), f"{__name__}.StrSubclass", ""),
    (collections.OrderedDict(a=1), "collections.OrderedDict", ""),
    (numpy.float32(1), "numpy.float32", ""),
    (bytearray(b"a"), "builtins.bytearray", ""),
    ("a".upper, "builtins.builtin_function_or_method", None),
]


@pytest.mark.parametrize(("value", "name", "fix"), REFUSED, ids=[name for _, name, _ in REFUSED])
def test_other_objects_are_refused_with_their_path(value, name, fix):
    """The error contains the class, the path and, where there is one, the fix."""
    with pytest.raises(UnsupportedValueError) as caught:
        encode_value({"k": [1, (value,)]}, where="$.args[0]")
    if fix is not None:
        end = "." + fix if fix else ""
        assert str(caught.value) == (
            "$.args[0]['k'][1][0]: a value has no record; expected a constant; "
            f"found an object of {name}{end}"
        )
    else:
        assert str(caught.value).startswith("$.args[0]['k'][1][0]: a function cannot be recorded")


LOOP: list[object] = []
LOOP.append(LOOP)
WITHOUT_RECORD = {
    r"nested too deeply": lambda: LOOP,
    r"^\$: a string is not valid Unicode; found '\\ud800'$": lambda: "\ud800",
    r"no named member": lambda: Mode.A | Mode.B,
    r"attributes beside its fields; found note on": lambda: dressed(note=1),
}


@pytest.mark.parametrize("message", WITHOUT_RECORD)
def test_values_without_a_record_are_refused(message):
    """Endless lists, lone surrogates, combined flags, and what a named tuple would lose."""
    with pytest.raises(UnsupportedValueError, match=message):
        encode_value(WITHOUT_RECORD[message]())


def dressed(**attributes):
    """Return one with attributes."""
    value = Dressed(1, 2)
    vars(value).update(attributes)
    return value


# --- hooks ----------------------------------------------------------------------------------------


def test_the_hook_is_called_for_each_part():
    """A part that the hook encodes may be anywhere; others are encoded as without it."""
    tensor = torch.ones(2)

    def hook(obj):
        return NodeValue(index=7) if obj is tensor else None

    record = encode_value((1, [tensor, slice(tensor, None)], {"a": tensor}), hook=hook)
    assert repr(record).count("NodeValue(index=7)") == 3

    def back(v):
        return "owned" if isinstance(v, NodeValue) else NotImplemented

    assert decode_value(record, hook=back) == (
        1, ["owned", slice("owned", None)], {"a": "owned"},
    )  # fmt: skip


def test_a_hook_is_not_called_for_tuples_lists_and_dictionaries():
    """The hook is called for the parts of tuples, lists and dictionaries only."""
    asked = []

    def hook(v):
        asked.append(type(v))
        return "here"

    part = NodeValue(index=0)
    inside = ListValue(items=(TupleValue(items=(part,)), DictValue(items=(("a", part),))))
    assert decode_value(inside, hook=hook) == [("here",), {"a": "here"}]
    assert asked == [NodeValue, NodeValue]
    # Only `NotImplemented` means that the hook does not decode a record.
    assert decode_value(part, hook=lambda _: None) is None


# --- hostile records ------------------------------------------------------------------------------

NAN = ExprDesc(nodes=(IntNode(value=1),))

MALFORMED = {
    "$: torch has no dtype of that name; found 'load'": TorchConstValue(kind="dtype", name="load"),
    "$: torch has no layout of that name; found 'float32'": TorchConstValue(
        kind="layout", name="float32"
    ),
    "$: not a device; found 'a b'": TorchConstValue(kind="device", name="a b"),
    "$.items[1]: not a size; expected an integer; found str": SizeValue(items=(1, "a")),
    "$.items[0]: not a size; expected an integer; found bool": SizeValue(items=(True,)),
    "$: the step of a range is zero": RangeValue(start=0, stop=1, step=0),
    "$: not a bound of a range; expected an integer; found str": RangeValue(
        start=0, stop="a", step=1
    ),
    "$: an item occurs twice in a set": SetValue(items=(1, 1)),
    "$.items[0]: an item occurs twice in a set": TupleValue(items=(SetValue(items=(1, True)),)),
    "$: not the items of a set: unhashable type: 'list'": SetValue(items=(ListValue(items=()),)),
    "$.items[1][0]: a key occurs twice in a dictionary": DictValue(items=((1, 2), (1, 3))),
    "$.items[0][0]: not a key: unhashable type: 'list'": DictValue(
        items=((ListValue(items=()), 2),)
    ),
    "$: a value of this kind has no meaning here; expected a constant; found NodeValue": NodeValue(
        index=0
    ),
    "$: a value of this kind has no meaning here; expected a constant; found ExprValue": ExprValue(
        expr=NAN
    ),
    "$: a value of this kind has no meaning here; expected a constant; found OpaqueValue": OpaqueValue(
        kind="x"
    ),
    "$: not an enumeration; found 'torch.Tensor'": EnumValue(cls="torch.Tensor", name="x"),
    "$: not a named tuple class; found 'torch.Tensor'": NamedTupleValue(
        cls="torch.Tensor", items=()
    ),
    "$: wrong number of fields for torch.return_types.max; expected 2; found 1": NamedTupleValue(
        cls="torch.return_types.max", items=(1,)
    ),
    f"$: wrong number of fields for {__name__}.Point; expected 2; found 3": NamedTupleValue(
        cls=f"{__name__}.Point", items=(1, 2, 3)
    ),
    "$.items[1].items[0].items[0]: not a size; expected an integer; found NoneType": TupleValue(
        items=(1, ListValue(items=(SizeValue(items=(None,)),)))
    ),
}


@pytest.mark.parametrize("message", MALFORMED)
def test_malformed_records_are_format_errors_with_a_path(message):
    """A record that its types allow but that has no meaning is refused."""
    with pytest.raises(FormatError) as caught:
        decode_value(MALFORMED[message])
    assert str(caught.value) == message


def test_unknown_members_and_classes_are_unknown_names():
    """An unknown name may exist elsewhere, so the error lists what this process has."""
    with pytest.raises(UnknownNameError) as caught:
        decode_value(EnumValue(cls=f"{__name__}.Color", name="GREEN"))
    assert str(caught.value) == (
        f"$: the enumeration {__name__}.Color has no member 'GREEN'; expected RED, BLUE"
    )
    with pytest.raises(UnknownNameError, match="is not known in this process"):
        decode_value(TypeValue(name="nosuch.Class"))


def test_user_code_of_a_class_does_not_run():
    """Named tuples are filled, and members looked up, without methods of the class."""
    value = decode_value(NamedTupleValue(cls=f"{__name__}.Loud", items=(1, 2)))
    assert type(value) is Loud
    assert tuple(value) == (1, 2)
    with pytest.raises(UnknownNameError):
        decode_value(EnumValue(cls=f"{__name__}.LoudColor", name="nothing"))


def test_nesting_is_bounded():
    """A deep record is refused before Python's stack overflows."""
    record = TupleValue(items=())
    for _ in range(values.MAX_DEPTH + 2):
        record = TupleValue(items=(record,))
    with pytest.raises(LimitError, match="nested too deeply"):
        decode_value(record)
