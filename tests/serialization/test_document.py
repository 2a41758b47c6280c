"""Records to bytes and back: the round trip, sharing, determinism, and every kind of bad input."""

from __future__ import annotations

import json
import math
from typing import Any, get_args

import msgspec
import pytest
from codec_records import RECORD_TYPES, X, chain_of_sources, tensor
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from processes import piped
from record_strategies import expr_descs, linked_tensor_descs, records, with_own_ids

from torch_fakeify.errors import (
    FormatError,
    UnsupportedValueError,
)
from torch_fakeify.records.graph import GraphModuleDesc, NodeDesc
from torch_fakeify.records.record import Record
from torch_fakeify.records.tensor import (
    ApplyNode,
    ExprDesc,
    ExprNode,
    FloatValue,
    FrameDesc,
    IntNode,
    MetaStorageDesc,
    MetaTensorDesc,
    SourceDesc,
    StackDesc,
    SubclassDesc,
    SymbolFactDesc,
    SymbolNode,
    SymDesc,
    TensorValue,
    TupleValue,
)
from torch_fakeify.serialization import decoder as reading
from torch_fakeify.serialization import encoder as writing
from torch_fakeify.serialization.document import Decoder, Encoder, dumps, loads
from torch_fakeify.serialization.format import record_type

# --- the round trip -------------------------------------------------------------------------------


def written(record: Record) -> bytes:
    """Return the bytes of a generated record, unless one of its sources holds a tensor."""
    try:
        return dumps(record)
    except UnsupportedValueError as error:
        # No source of torch holds a tensor: the one thing that types alone do not exclude.
        assume("a row of sources cannot hold one of tensors" not in str(error))
        raise


def with_copied_defaults(value: Any) -> Any:
    """Replace texts, large numbers and empty tuples by equal objects that are not identical."""
    if isinstance(value, msgspec.Struct):
        names = [field.name for field in msgspec.structs.fields(type(value))]
        parts = {name: with_copied_defaults(getattr(value, name)) for name in names}
        return msgspec.structs.replace(value, **parts)
    if type(value) is tuple:
        return tuple(with_copied_defaults(item) for item in value)
    if type(value) is str:
        return "".join([*value])
    return int(str(value)) if type(value) is int else value


@pytest.mark.parametrize("cls", RECORD_TYPES, ids=lambda cls: cls.__name__)
def test_every_record_type_round_trips(cls: type[Record]) -> None:
    """For any values of the fields, reading gives an equal record, and equal records have equal bytes.

    Values that equal a default are left out, also where they are other objects than the default. Msgspec
    makes records without a call of their own, and refuses unknown fields.
    """
    assert not hasattr(cls, "__post_init__")
    assert cls.__struct_config__.forbid_unknown_fields

    @given(records(cls).map(with_own_ids))
    @settings(max_examples=20, deadline=None, database=None)
    def law(record: Record) -> None:
        data = written(record)
        back = loads(data)
        assert back == record
        assert repr(back) == repr(record)
        assert dumps(back) == dumps(with_copied_defaults(record)) == data

    law()


def test_record_names_are_unique() -> None:
    """The written name identifies the record type."""
    assert len({cls.__name__ for cls in RECORD_TYPES}) == len(RECORD_TYPES)
    assert {record_type(cls.__name__) for cls in RECORD_TYPES} == set(RECORD_TYPES)


TREES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False),
        st.text(st.characters(exclude_categories=["Cs"])),
        records(MetaTensorDesc, 1),
        records(FloatValue),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text("ab", max_size=2), st.integers(0, 3)), inner, max_size=3),
    ),
    max_leaves=8,
)


@given(TREES.map(with_own_ids))
@settings(max_examples=100, deadline=None)
def test_trees_round_trip_with_their_types(tree: Any) -> None:
    """Lists stay lists, tuples tuples, ``1`` no ``True``; order and sign of zero survive."""
    assert repr(loads(dumps(tree))) == repr(tree)


def test_numbers_that_json_lacks() -> None:
    """Infinities and nan cross in trees and in float fields."""
    assert math.isnan(loads(dumps([math.nan]))[0])
    assert loads(dumps(tensor(scalar_hint=-math.inf))).scalar_hint == -math.inf
    assert math.isnan(loads(dumps(tensor(scalar_hint=math.nan))).scalar_hint)


def test_equal_tensors_stay_two_and_equal_sources_become_one() -> None:
    """Identity matters for tensors and storages, content for expressions, stacks and sources."""
    frame = FrameDesc("a.py", 1, "f", "x + 1")
    parts = [
        (tensor(source=chain_of_sources(3)), StackDesc(frames=(frame,)), ExprDesc(nodes=(X,)))
        for _ in range(2)
    ]
    (t1, stack1, expr1), (t2, stack2, expr2) = loads(dumps(parts))
    assert t1 == t2
    assert t1 is not t2
    assert t1.source is t2.source
    assert stack1 is stack2
    assert expr1 is expr2


@given(linked_tensor_descs())
@settings(max_examples=60, deadline=None)
def test_sizes_that_tensors_share_are_written_as_each_alone(
    tensors: list[MetaTensorDesc],
) -> None:
    """The bytes do not depend on which tuples were one object."""
    size = (SymDesc(expr=ExprDesc(nodes=(X,)), hint=3), 4)
    tensors = [msgspec.structs.replace(t, id=1000 + i) for i, t in enumerate(tensors)]
    shared = [msgspec.structs.replace(t, size=size, stride=size) for t in tensors]
    apart = [
        msgspec.structs.replace(t, size=(*size[:1], *size[1:]), stride=(*size[:1], *size[1:]))
        for t in tensors
    ]
    assert dumps(shared) == dumps(apart)


@given(st.lists(expr_descs(), max_size=6))
@settings(max_examples=100, deadline=None)
def test_expressions_share_their_nodes(exprs: list[ExprDesc]) -> None:
    """Every expression comes back as it was, and no sub-expression is written twice."""
    data = dumps(exprs)
    assert loads(data) == exprs
    nodes = json.loads(data).get("nodes", [])
    assert len({json.dumps(node) for node in nodes}) == len(nodes)


def test_a_shared_expression_costs_its_nodes_once() -> None:
    """A thousand expressions over one big one are written in linear size."""
    big: tuple[ExprNode, ...] = (X, *(ApplyNode("Add", (i, i)) for i in range(200)))
    exprs = [ExprDesc(nodes=(*big, IntNode(i), ApplyNode("Mul", (200, 201)))) for i in range(200)]
    data = dumps(exprs)
    assert loads(data) == exprs
    assert len(json.loads(data)["nodes"]) == 201 + 2 * 200


def test_deep_expressions_need_no_recursion() -> None:
    """An expression far deeper than the interpreter's stack crosses."""
    nodes = (X, *(ApplyNode("Neg", (i,)) for i in range(20_000)))
    assert loads(dumps(ExprDesc(nodes=nodes))) == ExprDesc(nodes=nodes)


def test_bytes_are_the_same_in_every_process_and_for_every_equal_record() -> None:
    """Hash seeds and the identity of strings leave no trace."""
    script = (
        "import sys; from codec_records import *\n"
        "from torch_fakeify.serialization.document import dumps\n"
        "t = tensor(layout=''.join(['str', 'ided']), device=''.join(['c', 'pu']), id=10**3)\n"
        "sys.stdout.buffer.write(dumps({'a': [t, t], 2: chain_of_sources(4)}))"
    )
    here = dumps({"a": [(t := tensor(id=1000)), t], 2: chain_of_sources(4)})
    for seed in ("1", "2"):
        assert piped(script, inherits=False, PYTHONHASHSEED=seed) == here


def test_tensors_inside_of_tensors_come_back_as_they_were() -> None:
    """A row in whose midst others are written, which refer to other rows than it does."""

    def stored(number: int) -> MetaTensorDesc:
        source = SourceDesc(cls="AttrSource", name=f"x.{number}", base=chain_of_sources(2))
        return tensor(id=number, storage=MetaStorageDesc(id=number, nbytes=4), source=source)

    def wrapper(number: int, *parts: MetaTensorDesc) -> MetaTensorDesc:
        inner = SubclassDesc(cls="x.Y", tensors=tuple([(f"_{t.id}", t) for t in parts]))
        return msgspec.structs.replace(stored(number), subclass=inner)

    one, two = stored(1), stored(2)
    deep = wrapper(5, one, wrapper(6, stored(3), two), one, stored(4))
    found = loads(dumps([stored(7), deep, two, wrapper(8, two, deep)]))
    assert found == [stored(7), deep, two, wrapper(8, two, deep)]
    assert found[1] is found[3].subclass.tensors[1][1]


# --- members --------------------------------------------------------------------------------------


def test_members_share_their_tables() -> None:
    """A tensor in two members is one object for one decoder."""
    t = tensor(storage=MetaStorageDesc(id=0, nbytes=4))
    members = Encoder().add("inputs", [t]).add("graph", TensorValue(tensor=t)).members()
    assert list(members) == ["inputs.json", "graph.json", "tables.json"]
    decoder = Decoder(members)
    assert decoder.get("graph", TensorValue).tensor is decoder.get("inputs", list)[0]


def test_member_errors_name_the_member() -> None:
    """A missing, wrong or damaged member is named."""
    members = Encoder().add("graph", tensor()).members()
    decoder = Decoder(members)
    with pytest.raises(FormatError) as error:
        decoder.get("inputs", list)
    assert str(error.value) == "inputs.json: the member is missing"
    with pytest.raises(FormatError) as error:
        decoder.get("graph", SourceDesc)
    assert str(error.value) == (
        "graph.json: the member has the wrong type; expected SourceDesc; found MetaTensorDesc"
    )
    with pytest.raises(FormatError) as error:
        Decoder({**members, "graph.json": b'{"type":"record","name":"SourceDesc","body":0}'}).get(
            "graph", SourceDesc
        )
    assert str(error.value) == (
        "graph.json $.body: there is no such row of sources yet; "
        "expected no position: there are no rows; found 0"
    )
    with pytest.raises(FormatError) as error:
        Decoder({})
    assert str(error.value) == "tables.json: the member is missing"
    with pytest.raises(UnsupportedValueError):
        Encoder().add("tables", 1)
    with pytest.raises(UnsupportedValueError):
        Encoder().add("a", 1).add("a", 1)


# --- what has no record -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("obj", "text"),
    [
        (
            [1, {"a": object()}],
            "$[1][0]: there is no record of this; "
            "expected a record, a plain scalar, or a list, tuple or dict of them; found object",
        ),
        ({(1,): 2}, "$[0]: a key has no JSON form; expected a str or an int; found (1,)"),
        ({True: 2}, "$[0]: a key has no JSON form; expected a str or an int; found True"),
        (
            tensor(storage=3),
            "$.storage: a value has the wrong type; expected MetaStorageDesc; found int",
        ),
        (
            tensor(size=(1, True)),
            "$.size[1]: a value has the wrong type; expected NestedIntDesc | SymDesc | int; found bool",
        ),
        (
            tensor(base=tensor(base=tensor(grad=tensor(storage="s")))),
            "$.base.base.grad.storage: a value has the wrong type; "
            "expected MetaStorageDesc; found str",
        ),
        (
            TupleValue(items=(1, math.inf)),
            "$.items[1]: JSON has no such number; expected a finite float or a FloatValue; found inf",
        ),
        (
            SourceDesc(cls="C", name="n", fields=(("t", TensorValue(tensor=tensor())),)),
            "$.fields[0][1].tensor: a row of sources cannot hold one of tensors",
        ),
        (ExprDesc(nodes=()), "$.nodes: an expression is empty or has two equal nodes"),
        (ExprDesc(nodes=(X, X)), "$.nodes: an expression is empty or has two equal nodes"),
        (
            ExprDesc(nodes=(ApplyNode("Neg", (0,)),)),
            "$.nodes[0].args: an argument is no earlier node",
        ),
    ],
)
def test_what_has_no_record_is_refused_with_its_path(obj: object, text: str) -> None:
    """The error names where in the object the trouble is."""
    with pytest.raises(UnsupportedValueError) as error:
        dumps(obj)
    assert str(error.value) == text


def source(*fields: Any) -> SourceDesc:
    """Return the record of a source with these fields."""
    return SourceDesc(cls="C", name="n", fields=fields)


NODES = [NodeDesc(op="placeholder", name=name, target=name) for name in ("a", "\ud800")]


@pytest.mark.parametrize(
    ("obj", "text"),
    [
        *((source(("a", *rest)), r"\.fields\[0\]") for rest in ((), (1, 2), ("b", "c"))),
        *((source(("a", value)), r"\.fields\[0\]\[1\]") for value in (math.inf, object(), ["b"])),
        (source(("a",), 1), r"^\$\.fields"),
        (msgspec.structs.replace(source(), fields=[("a", "b")]), r"^\$\.fields"),
        (tensor(device="\ud800"), "surrogates not allowed"),
        (GraphModuleDesc(nodes=tuple(NODES)), r"^\$\.nodes\[1\]: "),
    ],
)
def test_what_is_malformed_is_refused(obj: object, text: str) -> None:
    """Fields are a tuple of pairs; a lone surrogate has no UTF-8 form, and one of many nodes is named."""
    with pytest.raises(UnsupportedValueError, match=text):
        dumps(obj)


def test_a_record_type_of_another_package_is_refused() -> None:
    """Only the package's own record types are known."""

    class Mine(Record):
        pass

    with pytest.raises(UnsupportedValueError, match="not a record type of torch_fakeify"):
        dumps(Mine())


def test_records_of_two_describers_are_not_written_together() -> None:
    """What they give belongs to two sets of ids, also where no id is there twice."""
    import torch

    from torch_fakeify.describe.describer import MetaTensorDescriber

    first, second = MetaTensorDescriber(), MetaTensorDescriber()
    d = first.describe_tensor(torch.empty(3))
    for other in (second.describe_tensor(torch.empty(3)), second.describe_tensor(torch.empty(3))):
        with pytest.raises(UnsupportedValueError) as error:
            dumps([d, other])
        assert str(error.value).startswith(
            f"$[1]: tensor {other.id}: the records are of two describers; "
            f"expected tensor 0, float32 of size (3,) on cpu; found tensor {other.id}, float32"
        )
    with pytest.raises(UnsupportedValueError, match="the records are of two describers"):
        dumps({"a": first.describe_storage(torch.empty(3).untyped_storage()), "b": other.storage})


@pytest.mark.parametrize("change", [{"storage_offset": 1}, {"dtype": "int8"}, {"is_conj": True}])
def test_two_contents_of_one_id_are_not_written(change: dict[str, Any]) -> None:
    """They would be read as one tensor; the error names both."""
    with pytest.raises(UnsupportedValueError, match="two different records have the same id"):
        dumps([tensor(), tensor(**change)])
    storages = MetaStorageDesc(id=3, nbytes=4), MetaStorageDesc(id=3, nbytes=8)
    with pytest.raises(UnsupportedValueError, match="two different storages have the same id"):
        dumps([tensor(storage=storages[0]), tensor(id=1, storage=storages[1])])


def test_one_tensor_may_be_written_by_two_policies() -> None:
    """A source and a symbolic context are policy, not state of the tensor."""
    records = [tensor(), tensor(source=chain_of_sources(2), scalar_hint=3)]
    assert loads(dumps(records)) == records


# --- the derived wire types -----------------------------------------------------------------------


class Ambiguous(Record):
    """A union whose members have one wire type."""

    field: int | ExprDesc


class Listed(Record):
    """A mutable field of shared objects."""

    field: list[ExprDesc]


def test_record_types_that_cannot_cross_are_found_when_compiled() -> None:
    """A position and an int have one JSON form, and lists of records are not supported."""
    for cls in (Ambiguous, Listed):
        with pytest.raises(TypeError):
            reading.decode_types(cls)
    with pytest.raises(TypeError):
        writing.hooks_of(list[ExprDesc])


@pytest.mark.parametrize("cls", [FrameDesc, *get_args(ExprNode)])
def test_parts_of_rows_refuse_unknown_fields(cls: type[Any]) -> None:
    """What is written as an array has no more items than fields."""
    assert cls.__struct_config__.forbid_unknown_fields


def test_sizes_with_equal_text_are_one_object() -> None:
    """Sizes, strides and facts of symbols, of which many tensors have equal ones."""

    def tensor(number: int, *hints: float) -> MetaTensorDesc:
        exprs = [ExprDesc(nodes=(SymbolNode(f"s{i}", ()),)) for i in range(len(hints))]
        size = tuple([SymDesc(expr=e, hint=n) for e, n in zip(exprs, hints, strict=True)])
        facts = tuple([SymbolFactDesc(name=f"s{i}", hint=int(n)) for i, n in enumerate(hints)])
        return MetaTensorDesc(
            id=number, dtype="float32", device="cpu", size=size, stride=size, symbols=facts
        )

    tensors = [tensor(0, 3, 4), tensor(1, 3, 4), tensor(2, 3, True), tensor(3, 3, 1)]
    first, second, third, fourth = found = loads(dumps(tensors))
    assert found == tensors
    assert first.size is second.size
    assert first.symbols is second.symbols
    assert (third.size[1].hint, fourth.size[1].hint) == (True, 1)
    assert type(third.size[1].hint) is bool
    assert type(fourth.size[1].hint) is int
    assert dumps(found) == dumps(tensors)
