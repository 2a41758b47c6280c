"""Records to bytes and back: the round trip, sharing, determinism, and every kind of bad input."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from record_strategies import expr_descs, linked_tensor_descs, records

from torch_fakeify import chains, closures, codec, reader, strict_json, wire
from torch_fakeify.codec import Decoder, Encoder, dumps, loads
from torch_fakeify.desc import (
    ApplyNode,
    ContextDesc,
    ExprDesc,
    ExprNode,
    FloatValue,
    FrameDesc,
    IntNode,
    ListValue,
    MetaStorageDesc,
    MetaTensorDesc,
    Record,
    SourceDesc,
    SourceValue,
    StackDesc,
    SubclassDesc,
    SymbolFactDesc,
    SymbolNode,
    SymDesc,
    TensorValue,
    TupleValue,
)
from torch_fakeify.errors import (
    FakeifyError,
    FormatError,
    LimitError,
    UnknownNameError,
    UnsupportedValueError,
    VersionError,
)

RECORD_TYPES: list[type[Record]] = sorted(
    {cls for module in wire.RECORD_MODULES for cls in wire.records_of(module).values()},
    key=lambda cls: cls.__name__,
)
X = SymbolNode("x", (("integer", True),))


def tensor(**fields: Any) -> MetaTensorDesc:
    """A tensor record with what matters to a test."""
    given_fields = {"id": 0, "dtype": "float32", "device": "cpu", "size": (), "stride": ()}
    return MetaTensorDesc(**{**given_fields, **fields})


def chain_of_sources(length: int) -> SourceDesc:
    """A source over its base over its base."""
    source = SourceDesc(cls="LocalSource", name="0", fields=(("local_name", "x"),))
    for i in range(1, length):
        source = SourceDesc(cls="TypeSource", name=str(i), base=source)
    return source


def nested_tuples(depth: int) -> TupleValue:
    """A value inside a value."""
    value = TupleValue(items=())
    for _ in range(depth - 1):
        value = TupleValue(items=(value,))
    return value


# --- the round trip -------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", RECORD_TYPES, ids=lambda cls: cls.__name__)
def test_every_record_type_round_trips(cls: type[Record]) -> None:
    """Whatever a record's fields hold, reading gives an equal record and writing equal bytes."""

    @given(records(cls))
    @settings(max_examples=20, deadline=None, database=None)
    def law(record: Record) -> None:
        try:
            data = dumps(record)
        except UnsupportedValueError as error:
            # No source of torch holds a tensor: the one thing that types alone do not exclude.
            assume("a row of sources cannot hold one of tensors" not in str(error))
            raise
        back = loads(data)
        assert back == record
        assert repr(back) == repr(record)
        assert dumps(back) == data

    law()


def test_record_names_are_unique() -> None:
    """The name on the wire tells the record type."""
    assert len({cls.__name__ for cls in RECORD_TYPES}) == len(RECORD_TYPES)
    assert {wire.record_type(cls.__name__) for cls in RECORD_TYPES} == set(RECORD_TYPES)


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


@given(TREES)
@settings(max_examples=100, deadline=None)
def test_trees_round_trip_with_their_types(tree: Any) -> None:
    """Lists stay lists, tuples tuples, ``1`` no ``True``; order and sign of zero survive."""
    assert repr(loads(dumps(tree))) == repr(tree)


def test_numbers_that_json_lacks() -> None:
    """Infinities and nan cross in trees and in float fields."""
    assert math.isnan(loads(dumps([math.nan]))[0])
    assert loads(dumps(tensor(scalar_hint=-math.inf))).scalar_hint == -math.inf
    assert math.isnan(loads(dumps(tensor(scalar_hint=math.nan))).scalar_hint)


@given(linked_tensor_descs())
@settings(max_examples=100, deadline=None)
def test_identity_survives(tensors: list[MetaTensorDesc]) -> None:
    """Two references are one object before if and only if they are one object after."""

    def reachable(roots: list[MetaTensorDesc]) -> list[object]:
        out: list[object] = []
        for root in roots:
            out += [root, root.storage]
            out += reachable([t for t in (root.base, root.grad) if t is not None])
        return out

    def pattern(objects: list[object]) -> list[int]:
        seen: dict[int, int] = {}
        return [seen.setdefault(id(obj), len(seen)) for obj in objects]

    back = loads(dumps(tensors))
    assert back == tensors
    assert pattern(reachable(back)) == pattern(reachable(tensors))


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


def test_sources_that_only_python_finds_equal_stay_apart() -> None:
    """``x[1]`` and ``x[True]`` are not the same source."""
    sources = [SourceDesc(cls="C", name="n", fields=(("index", i),)) for i in (1, True, 1.0)]
    assert repr(loads(dumps(sources))) == repr(sources)


@given(st.lists(records(SourceDesc), max_size=4))
@settings(max_examples=100, deadline=None)
def test_sources_are_written_the_fast_way_as_the_plain_way(sources: list[SourceDesc]) -> None:
    """Fields without a visit give the bytes that a visit gives; so do those that need one."""
    nested = SourceDesc(cls="C", name="m", fields=(("s", SourceValue(source=chain_of_sources(2))),))
    texts = SourceDesc(cls="C", name="m", base=nested, fields=(("a", "b"), ("c", None), ("d", 1.5)))
    sources = [*sources, nested, texts, chain_of_sources(3)]
    try:
        fast = dumps(sources)
    except UnsupportedValueError:
        assume(False)  # it holds a tensor
        raise
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Encoder, "_add_source", Encoder._add_record)
        assert dumps(sources) == fast


@pytest.mark.parametrize("field", [("a",), ("a", 1, 2), ("a", float("inf")), ("a", object())])
def test_a_malformed_field_of_a_source_is_refused(field: Any) -> None:
    """The fast way leaves what it cannot write to the plain one, which names it."""
    with pytest.raises(UnsupportedValueError, match=r"\.fields\[0\]"):
        dumps(SourceDesc(cls="C", name="n", fields=(field,)))


@given(linked_tensor_descs())
@settings(max_examples=60, deadline=None)
def test_sizes_that_tensors_share_are_written_as_each_alone(
    tensors: list[MetaTensorDesc],
) -> None:
    """The bytes do not tell which tuples were one object."""
    size = (SymDesc(expr=ExprDesc(nodes=(X,)), hint=3), 4)
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
        "import sys; from test_codec import *\n"
        "t = tensor(layout=''.join(['str', 'ided']), device=''.join(['c', 'pu']), id=10**3)\n"
        "sys.stdout.buffer.write(dumps({'a': [t, t], 2: chain_of_sources(4)}))"
    )
    here = dumps({"a": [(t := tensor(id=1000)), t], 2: chain_of_sources(4)})
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            check=True,
        )
        assert run.stdout == here


def test_the_wire_is_what_it_was() -> None:
    """The form of a document is frozen: steps to shared objects, defaults left out."""
    size = SymDesc(expr=ExprDesc(nodes=(X, IntNode(2), ApplyNode("Mul", (0, 1)))), hint=6)
    base = tensor(size=(size, 3), stride=(3, 1), storage=MetaStorageDesc(id=0, nbytes=72))
    over = SourceDesc(cls="TypeSource", name="0.1", base=SourceDesc(cls="GlobalSource", name="0"))
    source = SourceDesc(cls="TypeSource", name="type(0.1)", base=over)
    view = tensor(id=1, base=base, storage=base.storage, is_view=True, source=source)
    assert json.loads(dumps((base, view, view))) == {
        "format": "torch_fakeify.records",
        "version": 1,
        "nodes": [["s", "x", [["integer", True]]], ["i", 2], ["a", "Mul", [0, 1]]],
        "exprs": [2],
        "sources": [
            {"cls": "GlobalSource", "name": "0"},
            {"cls": "TypeSource", "more": ".1", "base": 0},
            {"cls": "TypeSource", "name": "type(0.1)", "base": 1},
        ],
        "storages": [{"id": 0, "nbytes": 72}],
        "tensors": [
            {
                "id": 0,
                "dtype": "float32",
                "device": "cpu",
                "size": [{"expr": 0, "hint": 6}, 3],
                "stride": [3, 1],
                "storage": 0,
            },
            {
                "id": 1,
                "dtype": "float32",
                "device": "cpu",
                "size": [],
                "stride": [],
                "storage": 0,
                "is_view": True,
                "base": 0,
                "source": 2,
            },
        ],
        "root": {
            "type": "tuple",
            "items": [
                {"type": "record", "name": "MetaTensorDesc", "body": 0},
                {"type": "record", "name": "MetaTensorDesc", "body": 1},
                {"type": "record", "name": "MetaTensorDesc", "body": 0},
            ],
        },
    }


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
        "expected no position, as there are no rows; found 0"
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


def test_text_that_is_not_unicode_is_refused() -> None:
    """A lone surrogate has no UTF-8 form."""
    with pytest.raises(UnsupportedValueError, match="surrogates not allowed"):
        dumps(tensor(device="\ud800"))


def test_a_record_type_of_somebody_else_is_refused() -> None:
    """Only the package's own record types are known."""

    class Mine(Record):
        pass

    with pytest.raises(UnsupportedValueError, match="not a record type of torch_fakeify"):
        dumps(Mine())


# --- bad bytes ------------------------------------------------------------------------------------


def document(**changes: Any) -> bytes:
    """The bytes of a small document with some members changed."""
    view = tensor(base=tensor(storage=MetaStorageDesc(id=0, nbytes=4)), source=chain_of_sources(2))
    parts = json.loads(dumps([view, nested_tuples(2), ExprDesc(nodes=(X, IntNode(3)))]))
    return json.dumps({**parts, **changes}).encode()


TENSOR: dict[str, Any] = {"id": 0, "dtype": "f", "device": "cpu", "size": [], "stride": []}


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        (
            {"tensors": [{**TENSOR, "base": 0}]},
            FormatError,
            "$.tensors[0].base: there is no such row of tensors yet; "
            "expected no position, as there are no rows; found 0",
        ),
        (
            {"tensors": [TENSOR, {**TENSOR, "base": 7}]},
            FormatError,
            "$.tensors[1].base: there is no such row of tensors yet; "
            "expected a position below 1; found 7",
        ),
        (
            {"tensors": [TENSOR, {**TENSOR, "base": -1}]},
            FormatError,
            "$.tensors[1].base: there is no such row of tensors yet; "
            "expected a position below 1; found -1",
        ),
        (
            {"tensors": [{**TENSOR, "base": "x"}]},
            FormatError,
            "$.tensors[0].base: a value has the wrong type; expected int | null; found str",
        ),
        (
            {"tensors": [{**TENSOR, "bases": 1}]},
            FormatError,
            "$.tensors[0]: object contains unknown field `bases`",
        ),
        (
            {"tensors": [{"id": 0}]},
            FormatError,
            "$.tensors[0]: object missing required field `dtype`",
        ),
        (
            {
                "sources": [
                    {"cls": "C", "name": "n", "fields": [["t", {"type": "tensor", "tensor": 0}]]}
                ]
            },
            FormatError,
            "$.sources[0].fields[0][1].tensor: there is no such row of tensors yet; "
            "expected no position, as there are no rows; found 0",
        ),
        (
            {"nodes": [["a", "Neg", [0]]]},
            FormatError,
            "$.nodes[0].args[0]: there is no such row of nodes yet; "
            "expected no position, as there are no rows; found 0",
        ),
        ({"nodes": [["i", 3, 4]]}, FormatError, None),
        ({"nodes": [["i", 3], ["i", 3]]}, FormatError, "$.nodes: two expression nodes are equal"),
        (
            {"exprs": [[0, 0]]},
            FormatError,
            "$.exprs[0]: an expression is empty or has two equal nodes",
        ),
        ({"exprs": [[]]}, FormatError, "$.exprs[0]: an expression is empty or has two equal nodes"),
        (
            {"exprs": [9]},
            FormatError,
            "$.exprs[0]: there is no such row of nodes yet; expected a position below 2; found 9",
        ),
        (
            {"stacks": [[0]]},
            FormatError,
            "$.stacks[0]: there is no such row of frames yet; "
            "expected no position, as there are no rows; found 0",
        ),
        (
            {"root": {"type": "record", "name": "os.system", "body": 0}},
            UnknownNameError,
            "$.root.name: no such record type; found 'os.system'",
        ),
        (
            {
                "root": {
                    "type": "list",
                    "items": [1, {"type": "record", "name": "SourceDesc", "body": []}],
                }
            },
            FormatError,
            "$.root.items[1].body: a value has the wrong type; expected int; found array",
        ),
        (
            {"root": {"type": "record", "name": "ContextDesc", "body": {"kind": "x"}}},
            FormatError,
            "$.root.body.kind: invalid enum value 'x'",
        ),
        (
            {
                "root": {
                    "type": "record",
                    "name": "TensorValue",
                    "body": {"type": "tensor", "tensor": 9},
                }
            },
            FormatError,
            "$.root.body.tensor: there is no such row of tensors yet; "
            "expected a position below 2; found 9",
        ),
        (
            {"root": {"type": "dict", "items": [["a", 1], ["a", 2]]}},
            FormatError,
            "$.root: a key occurs twice",
        ),
        (
            {"version": 2},
            VersionError,
            "$: a newer version of torch_fakeify wrote this; "
            "expected version 1 or older; found version 2. Upgrade torch_fakeify",
        ),
        ({"version": 0}, VersionError, "$: no such version; found 0"),
        (
            {"format": "zip"},
            FormatError,
            "$: not data of torch_fakeify; expected torch_fakeify.records; found 'zip'",
        ),
        ({"extra": 1}, FormatError, "$: object contains unknown field `extra`"),
    ],
)
def test_ill_typed_bytes_name_the_path(
    changes: dict[str, Any], kind: type[FakeifyError], text: str | None
) -> None:
    """Each kind of wrong content has its error, with where, expected and found."""
    with pytest.raises(kind) as error:
        loads(document(**changes))
    assert type(error.value) is kind
    if text is not None:
        assert str(error.value) == text


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "found the data is truncated"),
        (b"{", "found the data is truncated"),
        (b"PK\x03\x04", "found not valid JSON"),
        (b"\xff\xfe", "$ byte 0: not UTF-8 text"),
        (b'{"format":"torch_fakeify.records","version":1}', "the document has no root"),
        (document().replace(b'"id": 0', b'"id": NaN'), "not valid JSON"),
        (document().replace(b'"id": 0', b'"id": 0, "id": 0'), "the key 'id' occurs twice"),
        (document().replace(b'"root"', b'"root": 1, "root"'), "the key 'root' occurs twice"),
    ],
)
def test_bytes_that_are_no_document(data: bytes, text: str) -> None:
    """What is not strict JSON of ours is refused."""
    with pytest.raises(FormatError) as error:
        loads(data)
    assert text in str(error.value)


def test_edited_documents_are_read() -> None:
    """White space, key order and explicit defaults are the editor's."""
    t = tensor(layout="strided", size=(1,))
    parts = json.loads(dumps(t))
    parts["tensors"][0] = dict(reversed({**parts["tensors"][0], "layout": "strided"}.items()))
    assert loads(json.dumps(parts, indent=2).encode()) == t


VALID = document()


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_bytes_never_crash(data: st.DataObject) -> None:
    """Any truncation or change of bytes gives a good result or an error of the package."""
    raw = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        with_ = data.draw(
            st.sampled_from([b"", b"[", b"}", b"9", b'"', b"\x00", b"\xff", b"null", b"-1"])
        )
        raw[at : at + data.draw(st.sampled_from([0, 1, 5, len(raw)]))] = with_
        if not raw:
            break
    with contextlib.suppress(FakeifyError):
        loads(bytes(raw))


# --- limits ---------------------------------------------------------------------------------------


def test_chains_are_bounded_on_both_sides() -> None:
    """The longest chain that is written is read; one more is refused, without recursion."""
    longest = chain_of_sources(chains.MAX_CHAIN)
    assert loads(dumps(longest)).name == longest.name
    with pytest.raises(LimitError):
        dumps(chain_of_sources(chains.MAX_CHAIN + 1))
    with pytest.raises(LimitError):
        dumps(chain_of_sources(100_000))
    row = {"cls": "TypeSource", "name": "n"}
    rows = [row] + [{**row, "base": i} for i in range(chains.MAX_CHAIN)]
    with pytest.raises(LimitError) as error:
        loads(document(sources=rows))
    assert str(error.value) == "$.sources[250]: more than 250 rows in a chain"


def test_chains_through_several_fields_cost_their_length() -> None:
    """Diamonds of base and grad are walked once each, not once a path."""
    t = tensor()
    for i in range(60):
        t = tensor(id=i, base=t, grad=t)
    back = loads(dumps(t))
    assert back.base is back.grad


def test_nesting_is_bounded_on_both_sides() -> None:
    """Values inside values: the deepest that is written is read, one more is refused."""
    deepest = nested_tuples(closures.MAX_NESTING)
    assert loads(dumps(deepest)) == deepest
    with pytest.raises(LimitError) as error:
        dumps(nested_tuples(closures.MAX_NESTING + 1))
    assert "records are nested deeper than 100 levels" in str(error.value)
    text = '{"type":"list","items":[' * 130 + "]}" * 130
    body = document(root={"type": "record", "name": "ListValue", "body": json.loads(text)})
    with pytest.raises(LimitError):
        loads(body)
    tree: Any = []
    for _ in range(closures.MAX_NESTING):
        tree = [tree]
    with pytest.raises(LimitError):
        dumps(tree)


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"b":['])
@pytest.mark.parametrize("closed", [False, True])
def test_deep_json_is_refused_before_it_is_parsed(opening: str, closed: bool) -> None:
    """No depth reaches the recursive parser's stack, whatever the recursion limit."""
    closing = "".join({"[": "]", "{": "}"}.get(c, "") for c in reversed(opening))
    text = opening * 200_000 + (closing * 200_000 if closed else "")
    with pytest.raises(LimitError, match="JSON is nested deeper than 400 levels"):
        loads(text.encode())


def test_brackets_in_strings_are_no_depth() -> None:
    """Escapes and brackets inside text do not confuse the measure of depth."""
    for text in ("[" * 1000, '"' + "[" * 1000, "\\" + "{" * 1000, '\\"' * 3 + "[" * 1000 + "\\"):
        assert loads(dumps([text, tensor(device=text)]))[0] == text


def test_expressions_cannot_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many expressions over one long pool are bounded by what they would weigh."""
    for module in (codec, reader):
        monkeypatch.setattr(module, "MAX_EXPR_NODES", 1000)
    nodes: list[Any] = [["i", 0]] + [["a", "Neg", [i]] for i in range(100)]
    with pytest.raises(LimitError, match="expressions have more than 1000 nodes"):
        loads(document(nodes=nodes, exprs=[100] * 11))
    exprs = loads(dumps([ExprDesc(nodes=(X,))] * 2000))
    assert len(exprs) == 2000


def test_a_short_stack_is_a_clear_error() -> None:
    """Called from near the interpreter's recursion limit, both sides say what to do."""
    data = dumps(nested_tuples(90))

    def deeper(left: int, call: Any) -> Any:
        return call() if left == 0 else deeper(left - 1, call)

    room = sys.getrecursionlimit() - len(__import__("inspect").stack()) - 120
    for call in (lambda: dumps(nested_tuples(90)), lambda: loads(data)):
        with pytest.raises(LimitError, match="the interpreter's stack is too short"):
            deeper(room, call)
    assert loads(data) == nested_tuples(90)


# --- the derived wire types -----------------------------------------------------------------------


class Ambiguous(Record):
    """A union whose members look alike on the wire."""

    field: int | ExprDesc


class Listed(Record):
    """A mutable field of shared objects."""

    field: list[ExprDesc]


def test_record_types_that_cannot_cross_are_found_when_compiled() -> None:
    """A position and an int are not told apart, and lists of records are not records."""
    for cls in (Ambiguous, Listed):
        with pytest.raises(TypeError):
            wire.Compiler().plan(cls)


def test_wire_types_refuse_unknown_fields_everywhere() -> None:
    """Also records that do not say so themselves are strict on the wire."""
    for cls in (FrameDesc, IntNode, ApplyNode):
        assert wire.plan_of(cls).wire.__struct_config__.forbid_unknown_fields


def test_plain_subtrees_are_not_visited() -> None:
    """A record without shared parts is its own wire form."""
    from torch_fakeify.desc import NodeValue, TorchConstValue

    for cls in (NodeValue, TorchConstValue):
        assert wire.swap_of(cls).wire is cls


def test_decode_is_strict_about_its_own_depth_constant() -> None:
    """The bound on JSON leaves room for the deepest value that is written."""
    assert strict_json.MAX_DEPTH >= 3 * closures.MAX_NESTING
    value: Any = 1
    for _ in range(closures.MAX_NESTING - 1):
        value = ListValue(items=(value,))
    assert loads(dumps([SourceValue(source=chain_of_sources(3)), ContextDesc(kind="symint")]))
    assert loads(dumps(value)) == value
    assert msgspec.json.decode(dumps(value))


def test_sizes_that_were_written_alike_come_back_as_one() -> None:
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
