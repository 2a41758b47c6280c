"""Rows of tables: what is written once, what edited rows are read as, and how they are bounded."""

from __future__ import annotations

import re
import typing
from typing import Any

import msgspec
import pytest
from codec_records import chain_of_sources, similar_tensors, tensor
from hypothesis import example, given, settings
from hypothesis import strategies as st
from record_facts import sharing
from record_strategies import linked_tensor_descs

from torch_fakeify.errors import FakeifyError, FormatError, LimitError, UnsupportedValueError
from torch_fakeify.records.frame import CaptureDesc, FakeModeDesc, InputDesc, ModesDesc
from torch_fakeify.records.graph import GraphModuleDesc, NodeDesc
from torch_fakeify.records.tensor import (
    ConstraintDesc,
    ContextDesc,
    ExprDesc,
    MarksDesc,
    MetaStorageDesc,
    MetaTensorDesc,
    SourceDesc,
    SymbolNode,
    SymDesc,
    TensorValue,
    TupleValue,
)
from torch_fakeify.serialization import decoder, encoder, limits
from torch_fakeify.serialization.document import Decoder, Encoder, dumps, loads
from torch_fakeify.serialization.format import DELTA_ENCODED, SHARED

X = ExprDesc(nodes=(SymbolNode("x", (("integer", True),)),))


def outcome(data: bytes) -> str:
    """What reading gives, or how it is refused."""
    try:
        return repr(loads(data))
    except FakeifyError as error:
        return f"{type(error).__name__}: {error}"


# --- writing --------------------------------------------------------------------------------------


@given(linked_tensor_descs())
@example(similar_tensors())
@settings(max_examples=100, deadline=None)
def test_tensors_share_what_they_shared(tensors: list[MetaTensorDesc]) -> None:
    """Two references are one object after reading if and only if they were before."""
    found = loads(dumps(tensors))
    assert found == tensors
    assert sharing(found) == sharing(tensors)


@pytest.mark.parametrize(
    "rare",
    [
        {"scalar_hint": 1},
        {"scalar_hint": 1.0},
        {"item_memo": SymDesc(expr=X, hint=1)},
        {"nested_int": 3},
        {"marks": MarksDesc(specialize_on=((0, (X,)),))},
        {"storage_offset": SymDesc(expr=X, hint=2)},
        {"symbolic_context": ContextDesc(kind="stateless", specialize_on=((X,),))},
        {"dtype": "100%d"},
        *[
            {"storage": MetaStorageDesc(id=number, nbytes=nbytes)}
            for number in (0, -5, 2**63)
            for nbytes in (0, 4, 2**63, -(2**63), 2**64, -(2**64), SymDesc(expr=X, hint=2**63))
        ],
    ],
    ids=lambda rare: next(iter(rare)),
)
def test_rare_values_of_rows_round_trip(rare: dict[str, Any]) -> None:
    """Also in several rows that are equal but for their ids, or in Python but not in JSON."""
    tensors = [tensor(**{"id": i, **rare}) for i in range(3)]
    tensors += [tensor(id=5 + i, scalar_hint=hint) for i, hint in enumerate((1, 1.0, 1))]
    assert repr(loads(dumps(tensors))) == repr(tensors)


@pytest.mark.parametrize("nbytes", [4.0, None, "4", True], ids=repr)
def test_storages_that_cannot_be_written_are_named(nbytes: Any) -> None:
    """The error has their place in the tree."""
    tensors = [tensor(), tensor(id=1, storage=MetaStorageDesc(id=1, nbytes=nbytes))]
    with pytest.raises(UnsupportedValueError, match=r"^some.json \$\[1\]\.storage\.nbytes: "):
        Encoder().add("some", tensors)


def test_a_storage_is_written_once() -> None:
    """However many tensors are on it."""
    storages = [MetaStorageDesc(id=i, nbytes=n) for i, n in enumerate((4, SymDesc(expr=X, hint=3)))]
    tensors = [tensor(id=i, storage=storages[i % 2]) for i in range(6)]
    members = Encoder().add("some", tensors).members()
    assert len(msgspec.json.decode(members["tables.json"])["storages"]) == 2
    assert Decoder(members).get("some", list) == tensors


def over(base: SourceDesc, field: Any, name: str = ".w") -> SourceDesc:
    """A source over another one, with one field."""
    return SourceDesc(
        cls="AttrSource", name=base.name + name, base=base, fields=(("member", field),)
    )


ROOT = SourceDesc(cls="LocalSource", name="L['a']", fields=(("local_name", "a"),))
TEXTS = ("w", "é\u2028", "a\nb", "100%d", "1", 1, True, 1.0, None, 'quo"te\\')


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(TEXTS), st.booleans())))
@settings(max_examples=200, deadline=None)
def test_equal_sources_have_one_row(drawn: list[tuple[int, Any, bool]]) -> None:
    """Whether their names begin with those of their bases or not."""
    sources = [ROOT]
    for under, value, begins in drawn:
        made = over(sources[under % len(sources)], value)
        sources.append(made if begins else msgspec.structs.replace(made, name="other"))
    data = dumps(sources)
    assert repr(loads(data)) == repr(sources)
    texts = list(map(msgspec.json.encode, msgspec.json.decode(data)["sources"]))
    assert len(set(texts)) == len(texts)


def test_a_source_that_cannot_be_written_takes_no_other_with_it() -> None:
    """It is named with its path in the tree, and others are written afterwards."""
    good, bad = over(ROOT, "w"), over(ROOT, "\ud800")
    writer = Encoder()
    with pytest.raises(
        UnsupportedValueError, match=r"^some.json \$\[1\]: a value cannot be written"
    ):
        writer.add("some", [good, bad])
    assert Decoder(writer.add("some", [good]).members()).get("some", list) == [good]


def test_chains_are_bounded_in_rows_that_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The expression of a storage's size is below the storage, which is below the tensor."""
    symbolic = MetaStorageDesc(id=0, nbytes=SymDesc(expr=X, hint=4))
    for rows, most in (
        ([tensor(storage=symbolic), tensor(id=1, storage=symbolic)], 3),
        ([tensor(storage=MetaStorageDesc(id=0, nbytes=4))], 2),
        ([tensor(source=chain_of_sources(4))], 5),
        ([chain_of_sources(4)], 4),
    ):
        monkeypatch.setattr(encoder, "MAX_CHAIN", most)
        dumps(rows)
        monkeypatch.setattr(encoder, "MAX_CHAIN", most - 1)
        with pytest.raises(LimitError, match="rows in a chain"):
            dumps(rows)


# --- reading --------------------------------------------------------------------------------------

DATA = dumps(similar_tensors(2))
EDITS: dict[str, tuple[bytes, bytes]] = {
    "blanks": (b'"dtype":', b'"dtype": '),
    "another order of keys": (
        b'"dtype":"float32","device":"cpu"',
        b'"device":"cpu","dtype":"float32"',
    ),
    "a key that occurs twice": (b'"dtype":"float32"', b'"dtype":"float32","dtype":"float32"'),
    "a field that is not known": (b'"dtype":"float32"', b'"dtypo":1,"dtype":"float32"'),
    "a default that is written": (b'"dtype":"float32"', b'"dtype":"float32","is_view":false'),
    "an id of another type": (b'{"id":10,', b'{"id":"10",'),
    "an id as a float": (b'{"id":10,', b'{"id":10.0,'),
    "no id": (b'{"id":10,', b"{"),
    "no dtype": (b'"dtype":"float32",', b""),
    "a step to nowhere": (b'"storage":1', b'"storage":99'),
    "a step back to nowhere": (b'"storage":1', b'"storage":-99'),
    "a step that is no number": (b'"storage":1', b'"storage":"1"'),
    "a position to nowhere": (b'"expr":0', b'"expr":9'),
    "a base to nowhere": (b'"base":0', b'"base":77'),
    "a source over a later one": (b'"base":0,', b'"base":4,'),
    "a source without a name": (b'"more":', b'"less":'),
    "a name and more": (b'"more":', b'"name":"n","more":'),
    "a root of no type": (b'"name":"MetaTensorDesc"', b'"name":"MetaTensor"'),
    "a root to nowhere": (b'"body":0', b'"body":50'),
    "not UTF-8": (b"float32", b"float\xff2"),
    "an unfinished text": (DATA[-20:], b""),
}
REFUSED: dict[str, str] = {
    "a key that occurs twice": "$.tensors[0]: the key 'dtype' occurs twice in one object",
    "a field that is not known": "$.tensors[0]: object contains unknown field `dtypo`",
    "an id of another type": "$.tensors[3].id: a value has the wrong type; expected int; found str",
    "an id as a float": "$.tensors[3].id: a value has the wrong type; expected int; found float",
    "no id": "$.tensors[3]: object missing required field `id`",
    "no dtype": "$.tensors[0]: object missing required field `dtype`",
    "a step to nowhere": "$.tensors[2].storage: there is no such row of storages yet; expected a position below 4; found 99",
    "a step back to nowhere": "$.tensors[2].storage: there is no such row of storages yet; expected a position below 4; found -99",
    "a step that is no number": "$.tensors[2].storage: a value has the wrong type; expected int | null; found str",
    "a position to nowhere": "$.storages[0].nbytes.expr: there is no such row of exprs yet; expected a position below 1; found 9",
    "a base to nowhere": "$.sources[1].base: there is no such row of sources yet; expected a position below 1; found 77",
    "a source over a later one": "$.tensors[1].base: there is no such row of tensors yet; expected a position below 1; found 4",
    "a source without a name": "$.sources[3]: object contains unknown field `less`",
    "a name and more": "$.sources[3]: a source has a name, or a base and what follows the base's name",
    "a root of no type": "UnknownNameError: $.root.items[0].name: no such record type; found 'MetaTensor'",
    "a root to nowhere": "$.root.items[0].body: there is no such row of tensors yet; expected a position below 6; found 50",
    "not UTF-8": "$ byte 507: not UTF-8 text",
    "an unfinished text": "$: not data of torch_fakeify; expected torch_fakeify.records; found the data is truncated",
}

POLICY = ContextDesc(
    kind="stateful", dynamic_sizes=("DUCK", "DUCK"), tensor_source=chain_of_sources(2)
)
TREE = dumps([POLICY, ConstraintDesc(kind="strict", lower=X, upper=X)])
EDITS_OF_TREE: dict[str, tuple[bytes, bytes]] = {
    "blanks": (b'"kind":"strict"', b'"kind": "strict"'),
    "another order of keys": (b'"lower":0,"upper":0', b'"upper":0,"lower":0'),
    "a key that occurs twice": (b'"lower":0', b'"lower":0,"lower":0'),
    "a field that is not known": (b'"lower":0', b'"lowest":0'),
    "a default that is written": (b'"lower":0', b'"warn_only":false,"lower":0'),
    "no field": (b'"kind":"strict",', b""),
    "a step to nowhere": (b'"tensor_source":1', b'"tensor_source":7'),
    "a step that is a float": (b'"tensor_source":1', b'"tensor_source":1.0'),
    "a position to nowhere": (b'"lower":0', b'"lower":1'),
    "a position below zero": (b'"lower":0', b'"lower":-1'),
    "a name that is none": (b'"DUCK"', b'"DUKE"'),
}
REFUSED_TREE: dict[str, str] = {
    "a key that occurs twice": "$.root.items[1].body: the key 'lower' occurs twice in one object",
    "a field that is not known": "$.root.items[1].body: object contains unknown field `lowest`",
    "no field": "$.root.items[1].body: object missing required field `kind`",
    "a step to nowhere": "$.root.items[0].body.tensor_source: there is no such row of sources yet; expected a position below 2; found 7",
    "a step that is a float": "$.root.items[0].body.tensor_source: a value has the wrong type; expected int | null; found float",
    "a position to nowhere": "$.root.items[1].body.lower: there is no such row of exprs yet; expected a position below 1; found 1",
    "a position below zero": "$.root.items[1].body.lower: a value is out of range; expected int >= 0",
    "a name that is none": "$.root.items[0].body.dynamic_sizes[0]: invalid enum value 'DUKE'",
}


@pytest.mark.parametrize(
    ("data", "edits", "refused", "edit"),
    [
        (data, edits, refused, edit)
        for data, edits, refused in ((DATA, EDITS, REFUSED), (TREE, EDITS_OF_TREE, REFUSED_TREE))
        for edit in edits
    ],
)
def test_an_edited_row_or_tree_is_read_or_refused(
    data: bytes, edits: Any, refused: Any, edit: str
) -> None:
    """Blanks, the order of keys and written defaults change nothing; the rest has its error."""
    edited = data.replace(*edits[edit], 1)
    assert edited != data
    found = outcome(edited).removeprefix("FormatError: ")
    assert found == refused.get(edit, outcome(data))


def graph(depth: int = 1) -> GraphModuleDesc:
    """Similar nodes, as in a model and its submodules."""
    tensors = similar_tensors(6)
    nodes = [
        NodeDesc(
            op="placeholder",
            name=f"x{i}",
            target=f"x{i}",
            source=tensors[3 * i].source,
            args=(TensorValue(tensor=tensors[3 * i + 1]),),
            meta=(("val", TensorValue(tensor=tensors[3 * i])), ("eps", 10.0 ** (-4 - i))),
        )
        for i in range(6)
    ]
    inner = () if depth == 0 else ((f"m{depth}", graph(depth - 1)),)
    return GraphModuleDesc(nodes=tuple(nodes), submodules=inner)


FRAME = CaptureDesc(
    graph=graph(),
    inputs=tuple([InputDesc(name=f"x{i}", tensor=t) for i, t in enumerate(similar_tensors(4))]),
    modes=ModesDesc(),
    fake_mode=FakeModeDesc(),
)
TWICE = r"occurs twice in one object"
EDITS_OF_NODES: dict[str, tuple[bytes, bytes, str | None]] = {
    "blanks": (rb'"op":', rb'"op" :', None),
    "blanks between rows": (rb'\},\{"op"', rb'}, {"op"', None),
    "another order of keys": (rb'"op":"(\w+)","name":"(\w+)"', rb'"name":"\2","op":"\1"', None),
    "another order of steps": (rb'("args":\[.*?\]),(.*?)("meta":.*?\]\])', rb"\3,\2\1", None),
    "another order in an input": (rb'("name":"x\d+"),("tensor":-?\d+)', rb"\2,\1", None),
    "a key twice": (rb'"name":"(\w+)","target"', rb'"name":"y","name":"\1","target"', TWICE),
    "a step twice": (rb'"source":(-?\d+)', rb'"source":0,"source":\1', TWICE),
    "a step of an input twice": (rb'"tensor":(-?\d+)\}', rb'"tensor":1,"tensor":\1}', TWICE),
    "a key with a digit": (rb'"name":', rb'"name1":', "unknown field `name1`"),
    "a key that is escaped": (rb'"name":', rb'"n\\u0061me":', None),
    "a text that is escaped": (rb'"name":"x', rb'"name":"\\u0078', None),
    "a default that is written": (rb'"op":', rb'"type":null,"op":', None),
    "no name": (rb'"name":"x\d+",', rb"", "missing required field `name`"),
    "a step to nowhere": (rb'"source":(\d+)', rb'"source":-\g<1>77', "no such row of sources"),
    "a number in another form": (rb"1e-05|0\.0001", rb"0.1e-4", None),
    "a step that is a float": (rb'"source":(-?\d+)', rb'"source":\1.0', "found float"),
    "a large number": (rb'"source":-?\d+', b'"source":' + b"9" * 30, "no such row of sources"),
}


def frame_members(frame: CaptureDesc = FRAME) -> dict[str, bytes]:
    """The members of a frame."""
    return Encoder().add("frame", frame).members()


@pytest.mark.parametrize("edit", EDITS_OF_NODES)
def test_an_edited_node_is_read_or_refused(edit: str) -> None:
    """The steps of references are counted in the order of fields, whatever that of the keys."""
    old, new, error = EDITS_OF_NODES[edit]
    members = frame_members()
    text = members["frame.json"]
    places = list(re.finditer(old, text))
    assert len(places) > 1
    for place in places:
        edited = text[: place.start()] + place.expand(new) + text[place.end() :]
        assert edited != text
        changed = {**members, "frame.json": edited}
        if error is None:
            found = Decoder(changed).get("frame", CaptureDesc)
            assert edit.startswith("a number") or found == FRAME
            assert sharing([found]) == sharing([FRAME])
        else:
            with pytest.raises(FormatError, match=error):
                Decoder(changed).get("frame", CaptureDesc)


@pytest.mark.parametrize("end", [b"]", b"}}", b"", b"} ", b"}\n", b"1", b",", b'"'])
def test_the_end_of_a_member_is_looked_at(end: bytes) -> None:
    """Its last bracket closes the object around the record; blanks may follow."""
    members = frame_members()
    members["frame.json"] = members["frame.json"][:-1] + end
    if end.strip() == b"}":
        assert Decoder(members).get("frame", CaptureDesc) == FRAME
    else:
        with pytest.raises(FormatError, match=r"not valid JSON|truncated"):
            Decoder(members).get("frame", CaptureDesc)


@pytest.mark.parametrize("depth", [3, 40, 90, 97, 98, 99, 100, 101, 130])
def test_nesting_in_a_graph_is_bounded(depth: int) -> None:
    """A frame, its graph and a node are three levels of a hundred."""
    value: Any = 1
    for _ in range(3):
        value = TupleValue(items=(value,))
    node = NodeDesc(op="output", name="output", target="output", args=(value,))
    members = frame_members(msgspec.structs.replace(FRAME, graph=GraphModuleDesc(nodes=(node,))))
    opening, closing = b'{"type":"tuple","items":[', b"]}"
    nested = opening * 3 + b"1" + closing * 3
    assert nested in members["frame.json"]
    deeper = opening * depth + b"1" + closing * depth
    members["frame.json"] = members["frame.json"].replace(nested, deeper)
    if depth <= 97:
        assert Decoder(members).get("frame", CaptureDesc).graph.nodes[0].op == "output"
    else:
        with pytest.raises(LimitError, match="nested deeper than 100 levels"):
            Decoder(members).get("frame", CaptureDesc)


def test_nesting_in_lists_counts() -> None:
    """Lists around a record are levels, too."""
    value: Any = TupleValue(items=())
    for _ in range(50):
        value = TupleValue(items=(value,))
    opening, closing = b'{"type":"list","items":[', b"]}"
    inner = dumps(value).partition(b'"root":')[2][:-1]
    for depth, fits in ((49, True), (50, False)):
        root = opening * depth + inner + closing * depth
        data = b'{"format":"torch_fakeify.records","version":1,"root":%b}' % root
        if fits:
            loads(data)
        else:
            with pytest.raises(LimitError, match="nested deeper than 100 levels"):
                loads(data)


def test_chains_are_bounded_in_rows_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources over sources, tensors over sources and over tensors."""
    source = chain_of_sources(3)
    base = tensor(id=1, source=source)
    for tree, rows in (
        ([source], 3),
        ([base, tensor(id=2, source=source)], 4),
        ([tensor(id=3, base=base)], 5),
        ([tensor(storage=MetaStorageDesc(id=0, nbytes=SymDesc(expr=X, hint=4)))], 3),
    ):
        data = dumps(tree)
        monkeypatch.setattr(decoder, "MAX_CHAIN", rows)
        assert loads(data) == tree
        monkeypatch.setattr(decoder, "MAX_CHAIN", rows - 1)
        assert outcome(data).startswith("LimitError: $.")


def test_names_of_sources_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins with that of the source below it."""
    tensors = similar_tensors(3)
    data = dumps(tensors)
    names = {row.name for t in tensors if t.source for row in (t.source,)}
    most = sum(map(len, names))
    monkeypatch.setattr(limits, "allowed_characters", lambda _size: most)
    assert loads(data) == tensors
    monkeypatch.setattr(limits, "allowed_characters", lambda _size: most - 1)
    assert "the names of sources are too long together" in outcome(data)


# --- the types of records -------------------------------------------------------------------------


def reaches(hint: Any, targets: tuple[Any, ...], seen: frozenset[Any] = frozenset()) -> bool:
    """Whether a value of a type may hold one of others, not through a shared object."""
    if hint in targets:
        return True
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        if hint in seen or hint in SHARED:
            return False
        fields = msgspec.structs.fields(hint)
        return any(reaches(field.type, targets, seen | {hint}) for field in fields)
    return any(reaches(arg, targets, seen) for arg in typing.get_args(hint))


def test_interned_fields_hold_no_steps() -> None:
    """Equal texts mean equal objects only where references are positions."""
    hints = {field.name: field.type for field in msgspec.structs.fields(MetaTensorDesc)}
    for name in decoder.INTERNED_FIELDS:
        assert not reaches(hints[name], DELTA_ENCODED)
    (_, nbytes) = msgspec.structs.fields(MetaStorageDesc)
    assert not reaches(nbytes.type, DELTA_ENCODED)


def test_the_types_of_records_stay_what_they_are() -> None:
    """To msgspec itself they have no references, after any document."""
    context = ContextDesc(kind="stateful", tensor_source=chain_of_sources(2))
    (read,) = loads(dumps([context]))
    assert type(read) is ContextDesc
    assert hash(read) == hash(context)
    assert msgspec.structs.replace(read, kind="stateless").kind == "stateless"
    assert msgspec.convert(msgspec.to_builtins(read), ContextDesc) == context
