"""The short ways to write and to read a document give what the plain ones give, and refuse alike."""

from __future__ import annotations

import contextlib
import math
import re
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from record_facts import sharing
from record_strategies import linked_tensor_descs, records
from test_codec import RECORD_TYPES, chain_of_sources, tensor

from torch_fakeify import bounds, fast_reader, reader, row_texts, wire, writer
from torch_fakeify.codec import Decoder, Encoder, dumps, loads
from torch_fakeify.container import Limits, read_container
from torch_fakeify.desc import (
    ConstraintDesc,
    ContextDesc,
    ExprDesc,
    MarksDesc,
    MetaStorageDesc,
    MetaTensorDesc,
    Record,
    SourceDesc,
    SymbolFactDesc,
    SymbolNode,
    SymDesc,
    TensorValue,
    TupleValue,
)
from torch_fakeify.desc_frame import CaptureDesc, FakeModeDesc, InputDesc, ModesDesc
from torch_fakeify.desc_graph import GraphModuleDesc, NodeDesc
from torch_fakeify.errors import FakeifyError, UnsupportedValueError
from torch_fakeify.reader import Reader

GOLDEN = sorted((Path(__file__).parent / "golden" / "v1").glob("*.fkf"))
X = ExprDesc(nodes=(SymbolNode("x", (("integer", True),)),))


def alike(count: int = 5) -> list[MetaTensorDesc]:
    """Tensors as a model has them: few layouts, each on a storage of its own, with policies."""
    size, facts = (SymDesc(expr=X, hint=3), 8), (SymbolFactDesc(name="x", hint=3),)
    nbytes, base = SymDesc(expr=X, hint=96), chain_of_sources(3)
    found: list[MetaTensorDesc] = []
    for i in range(count):
        source = SourceDesc(cls="AttrSource", name=f"{base.name}.w{i}", base=base)
        context = ContextDesc(kind="stateful", dynamic_sizes=("DUCK", "STATIC"), tensor_source=base)
        found.append(
            tensor(
                id=10 * i,
                size=size,
                stride=(8, 1),
                storage=MetaStorageDesc(id=i, nbytes=nbytes),
                symbols=facts,
                source=source,
                symbolic_context=context,
                marks=MarksDesc(static_input_type="unguarded"),
            )
        )
        found.append(
            tensor(
                id=10 * i + 1, size=(4,), stride=(1,), is_view=True, base=found[-1], is_fake=True
            )
        )
        found.append(tensor(id=10 * i + 2, storage=MetaStorageDesc(id=i + 99, nbytes=4)))
    return found


def outcome(data: bytes, *, fast: bool) -> str:
    """What reading gives, or how it is refused."""
    try:
        return repr(loads(data, fast=fast))
    except FakeifyError as error:
        return f"{type(error).__name__}: {error}"


class Ways:
    """Counts what was read in the plain way."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.plain = 0
        init, record = Reader.__init__, Reader._record

        def start(reader: Reader, *args: Any) -> None:
            self.plain += type(reader) is Reader
            init(reader, *args)

        def read(reader: Reader, item: Any) -> Any:
            self.plain += wire.record_type(item.name) not in wire.SHARED
            return record(reader, item)

        patch.setattr(Reader, "__init__", start)
        patch.setattr(Reader, "_record", read)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Ways:
    """Counts from here on."""
    return Ways(monkeypatch)


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", RECORD_TYPES, ids=lambda cls: cls.__name__)
def test_every_record_type_is_read_alike(cls: type[Record]) -> None:
    """Whatever its fields hold, types and order included."""

    @given(records(cls))
    @settings(max_examples=20, deadline=None, database=None)
    def law(record: Record) -> None:
        try:
            data = dumps(record)
        except UnsupportedValueError:
            assume(False)  # a source that holds a tensor
            raise
        assert outcome(data, fast=True) == outcome(data, fast=False) == repr(record)

    law()


@given(linked_tensor_descs())
@settings(max_examples=60, deadline=None)
def test_tensors_share_what_they_shared(tensors: list[MetaTensorDesc]) -> None:
    """Two references are one object by the one way as by the other."""
    data = dumps(tensors)
    fast, plain = loads(data), loads(data, fast=False)
    assert fast == plain == tensors
    assert sharing(fast) == sharing(plain) == sharing(tensors)


def test_rows_that_are_alike_are_records_of_their_own(ways: Ways) -> None:
    """A copy of the first one has its own id, storage, source, base and policy."""
    tensors = alike()
    found = loads(dumps(tensors))
    assert found == tensors
    assert sharing(found) == sharing(tensors)
    assert len({id(t.symbolic_context) for t in found if t.symbolic_context}) == 5
    assert ways.plain == 0


def test_rows_beyond_the_templates_are_read_one_by_one(
    ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no more of them are kept, the records are the same."""
    monkeypatch.setattr(fast_reader, "_MAX_TEMPLATES", 1)
    tensors = alike()
    assert loads(dumps(tensors)) == tensors
    assert ways.plain == 0


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_captures_are_read_the_short_way(path: Path, ways: Ways) -> None:
    """All that this package writes is, and gives the same frames."""
    members = read_container(path, limits=Limits()).members
    fast = Decoder(members).get("capture", CaptureDesc)
    taken = ways.plain
    plain = Decoder(members, fast=False).get("capture", CaptureDesc)
    assert repr(fast) == repr(plain)
    # But a number without a JSON form, which is a text.
    assert (taken == 0) is not any(word in members["capture.json"] for word in NON_FINITE)


NON_FINITE = (b'"hint":"inf"', b'"hint":"-inf"', b'"hint":"nan"')


def test_a_number_that_json_lacks_is_read_the_plain_way() -> None:
    """It is a text on the wire, of which msgspec would make no float."""
    (found,) = loads(dumps([SymDesc(expr=X, kind="float", hint=math.inf)]))
    assert found.hint == math.inf


DATA = dumps(alike(2))
EDITS = {
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
    "an id of many digits": (b'{"id":10,', b'{"id":1000000000000000000000,'),
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


@pytest.mark.parametrize(("old", "new"), EDITS.values(), ids=EDITS)
def test_an_edited_text_is_read_or_refused_as_ever(old: bytes, new: bytes) -> None:
    """The short way leaves it to the plain one, whose result or error it is."""
    data = DATA.replace(old, new, 1)
    assert data != DATA
    assert outcome(data, fast=True) == outcome(data, fast=False)


POLICY = ContextDesc(
    kind="stateful", dynamic_sizes=("DUCK", "DUCK"), tensor_source=chain_of_sources(2)
)
TREE = dumps([POLICY, ConstraintDesc(kind="strict", lower=X, upper=X)])
EDITS_OF_TREE = {
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
    "null": (b'"lower":0', b'"lower":null'),
}


@pytest.mark.parametrize(("old", "new"), EDITS_OF_TREE.values(), ids=EDITS_OF_TREE)
def test_an_edited_tree_is_read_or_refused_as_ever(old: bytes, new: bytes) -> None:
    """The same of records that no table has, which msgspec makes itself."""
    data = TREE.replace(old, new, 1)
    assert data != TREE
    assert outcome(data, fast=True) == outcome(data, fast=False)


def graph(depth: int = 1) -> GraphModuleDesc:
    """Nodes of which most are alike, as those of a model; in submodules, too."""
    tensors = alike(6)
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
    inputs=tuple([InputDesc(name=f"x{i}", tensor=t) for i, t in enumerate(alike(4))]),
    modes=ModesDesc(),
    fake_mode=FakeModeDesc(),
)
EDITS_OF_ROWS = {
    "blanks": (rb'"op":', rb'"op" :'),
    "blanks between rows": (rb'\},\{"op"', rb'}, {"op"'),
    "another order of keys": (rb'"op":"(\w+)","name":"(\w+)"', rb'"name":"\2","op":"\1"'),
    "another order of steps": (rb'("args":\[.*?\]),(.*?)("meta":.*?\]\])', rb"\3,\2\1"),
    "another order in an input": (rb'("name":"x\d+"),("tensor":-?\d+)', rb"\2,\1"),
    "a key that occurs twice": (rb'"name":"(\w+)","target"', rb'"name":"y","name":"\1","target"'),
    "a step that occurs twice": (rb'"source":(-?\d+)', rb'"source":0,"source":\1'),
    "an input's step that occurs twice": (rb'"tensor":(-?\d+)\}', rb'"tensor":1,"tensor":\1}'),
    "a name of digits alone": (rb'"name":"x\d+"', rb'"name":"77"'),
    "a key with a digit": (rb'"name":', rb'"name1":'),
    "a key that is escaped": (rb'"name":', rb'"n\\u0061me":'),
    "a text that is escaped": (rb'"name":"x', rb'"name":"\\u0078'),
    "a default that is written": (rb'"op":', rb'"type":null,"op":'),
    "no name": (rb'"name":"x\d+",', rb""),
    "a step to nowhere": (rb'"source":(-?\d+)', rb'"source":-\g<1>77'),
    "a number in another form": (rb"1e-05|0\.0001", rb"0.1e-4"),
    "a number of another type": (rb"1e-05|0\.0001", rb"1"),
    "a step that is a float": (rb'"source":(-?\d+)', rb'"source":\1.0'),
    "a number that is too large": (rb'"source":-?\d+', b'"source":' + b"9" * 30),
}


def member_outcome(members: dict[str, bytes], *, fast: bool) -> str:
    """As `outcome`, of a member with its tables."""
    try:
        return repr(Decoder(members, fast=fast).get("frame", CaptureDesc))
    except FakeifyError as error:
        return f"{type(error).__name__}: {error}"


def written(frame: CaptureDesc) -> dict[str, bytes]:
    """The members of a frame."""
    encoder = Encoder()
    encoder.add("frame", frame)
    return encoder.members()


@pytest.mark.parametrize(
    ("largest", "batch"),
    [(0, 64), (1 << 16, 64), (1 << 16, 2)],
    ids=["each row", "rows that differ", "two at a time"],
)
@pytest.mark.parametrize(("old", "new"), EDITS_OF_ROWS.values(), ids=EDITS_OF_ROWS)
def test_an_edited_row_of_a_graph_is_read_or_refused_as_ever(
    old: bytes, new: bytes, largest: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that differ in digits alone are looked at once; any edit makes another row of one."""
    monkeypatch.setattr(fast_reader, "_LARGEST", largest)
    monkeypatch.setattr(fast_reader, "_BATCH", batch)
    members = written(FRAME)
    text = members["frame.json"]
    places = list(re.finditer(old, text))
    assert len(places) > 1
    for place in places:
        edited = text[: place.start()] + place.expand(new) + text[place.end() :]
        assert edited != text
        changed = {**members, "frame.json": edited}
        assert member_outcome(changed, fast=True) == member_outcome(changed, fast=False)


def test_rows_of_a_graph_are_read_the_short_way(ways: Ways) -> None:
    """What is tested above is not all of it read in the plain way."""
    assert Decoder(written(FRAME)).get("frame", CaptureDesc) == FRAME
    assert ways.plain == 0


@pytest.mark.parametrize("end", [b"]", b"}}", b"", b"} ", b"}\n", b"1", b",", b'"'])
def test_the_end_of_a_member_is_looked_at(end: bytes) -> None:
    """Its last bracket closes the object around the record."""
    members = written(FRAME)
    members["frame.json"] = members["frame.json"][:-1] + end
    assert member_outcome(members, fast=True) == member_outcome(members, fast=False)


@pytest.mark.parametrize("depth", [3, 40, 90, 97, 98, 99, 100, 101, 130])
def test_nesting_in_a_graph_is_bounded_as_ever(depth: int) -> None:
    """Values inside one another, in text that msgspec alone would read."""
    value: Any = 1
    for _ in range(3):
        value = TupleValue(items=(value,))
    node = NodeDesc(op="output", name="output", target="output", args=(value,))
    frame = msgspec.structs.replace(FRAME, graph=GraphModuleDesc(nodes=(node,)))
    members = written(frame)
    opening, closing = b'{"type":"tuple","items":[', b"]}"
    assert opening in members["frame.json"]
    nested = opening * 3 + b"1" + closing * 3
    deeper = opening * depth + b"1" + closing * depth
    members["frame.json"] = members["frame.json"].replace(nested, deeper)
    result = member_outcome(members, fast=True)
    assert result == member_outcome(members, fast=False)
    assert result.startswith("LimitError") == (depth > 97)


@pytest.mark.parametrize("most", [3, 4, 5, 6])
def test_chains_are_bounded_in_rows_that_are_read(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sources over sources, tensors over sources and over tensors: counted as ever."""
    source = chain_of_sources(3)
    base = tensor(id=1, source=source)
    for tree in ([source], [base, tensor(id=2, source=source)], [tensor(id=3, base=base)]):
        data = dumps(tree)
        with monkeypatch.context() as patch:
            for module in (reader, fast_reader):
                patch.setattr(module, "MAX_CHAIN", most)
            assert outcome(data, fast=True) == outcome(data, fast=False)


def test_names_of_sources_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins with that of the source below it."""
    data = dumps(alike(3))
    for allowed in range(0, 60, 5):
        monkeypatch.setattr(bounds, "allowed_characters", lambda _size, most=allowed: most)
        assert outcome(data, fast=True) == outcome(data, fast=False)
    assert outcome(data, fast=True).startswith("[MetaTensorDesc")


@given(st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_change_is_read_or_refused_as_ever(data: st.DataObject) -> None:
    """Some bytes exchanged, left out, doubled or swapped anywhere in the text."""
    text = bytearray(DATA)
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text) - 1))
        end = min(len(text), start + data.draw(st.integers(0, 12)))
        piece = data.draw(
            st.sampled_from([b"", b"1", b"-1", b'"', b",", b"[", b"}", b"null", b"0.5", b"7", b" "])
            | st.just(bytes(text[start:end]) * 2)
        )
        text[start:end] = piece
    assert outcome(bytes(text), fast=True) == outcome(bytes(text), fast=False)


def test_nesting_beyond_the_bound_is_refused_as_ever() -> None:
    """Depth is counted by the plain way alone, which has what is deep."""
    from test_codec import nested_tuples

    for depth in (20, 60, 99):
        value = nested_tuples(depth)
        assert loads(dumps(value)) == value


def test_fields_that_refer_by_steps_are_those_that_templates_know() -> None:
    """A field that a later version adds may hold references, which rows do not have in common."""
    stepped = set(wire.STEPPED)

    def reaches(hint: Any, seen: frozenset[Any]) -> bool:
        if hint in stepped:
            return True
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            if hint in seen or hint in wire.SHARED:
                return False
            fields = msgspec.structs.fields(hint)
            return any(reaches(field.type, seen | {hint}) for field in fields)
        return any(reaches(arg, seen) for arg in typing.get_args(hint))

    def fields_of(cls: type[Any]) -> set[str]:
        return {f.name for f in msgspec.structs.fields(cls) if reaches(f.type, frozenset())}

    direct = {name for name, _ in fast_reader._STEPS}
    assert fields_of(MetaTensorDesc) == {*direct, *fast_reader._OTHER_STEPS, "symbolic_context"}
    assert fields_of(ContextDesc) == {"tensor_source", "view_base_context", "inner_contexts"}
    assert fields_of(MetaStorageDesc) == set()


def test_the_types_of_records_stay_what_they_are() -> None:
    """To msgspec itself they have no references, whatever was read before."""
    context = ContextDesc(kind="stateful", tensor_source=chain_of_sources(2))
    (read,) = loads(dumps([context]))
    assert type(read) is ContextDesc
    assert hash(read) == hash(context)
    assert msgspec.structs.replace(read, kind="stateless").kind == "stateless"
    assert msgspec.convert(msgspec.to_builtins(read), ContextDesc) == context


# --- writing --------------------------------------------------------------------------------------


def documents(tensors: list[MetaTensorDesc]) -> list[dict[str, bytes]]:
    """What is written of tensors: prepared by the short way, by the plain one."""
    sources: list[SourceDesc] = []
    for t in tensors:
        if t.source is not None:
            sources.append(t.source)
        if t.symbolic_context is not None and t.symbolic_context.tensor_source is not None:
            sources.append(t.symbolic_context.tensor_source)
    return [
        Encoder(fast=fast).prepare(sources, tensors).add("some", tensors).members()
        for fast in (True, False)
    ]


def test_rows_that_are_alike_are_written_alike() -> None:
    """Byte by byte what each alone is written as."""
    tensors = alike()
    fast, plain = documents(tensors)
    assert fast == plain
    assert Decoder(fast).get("some", list) == tensors


@given(linked_tensor_descs(), st.data())
@settings(max_examples=60, deadline=None)
def test_tensors_are_written_the_short_way_as_the_plain_way(
    tensors: list[MetaTensorDesc], data: st.DataObject
) -> None:
    """Whatever their fields hold: each of them with some that are like it but for the id."""
    more = [msgspec.structs.replace(t, id=1000 + i) for i, t in enumerate(tensors)]
    changed = data.draw(st.sampled_from(sorted(MetaTensorDesc.__struct_fields__)))
    others = [
        msgspec.structs.replace(t, id=2000 + i, **{changed: getattr(tensors[0], changed)})
        for i, t in enumerate(tensors)
        if changed not in ("id", "base", "grad")
    ]
    fast, plain = documents([*tensors, *more, *others, *more])
    assert fast == plain


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
        {
            "symbolic_context": ContextDesc(
                kind="stateless", view_base_context=ContextDesc(kind="stateless")
            )
        },
        {"id": 2**63},
        {"dtype": "100%d"},
        {"dtype": "81604378617"},
        *[
            {"storage": MetaStorageDesc(id=number, nbytes=nbytes)}
            for number, nbytes in (
                (0, 2**63),
                (0, -(2**63)),
                (2**63, 4),
                (-5, 4),
                (0, 2**64),
                (0, -(2**64)),
                (0, 0),
            )
        ],
        {"storage": MetaStorageDesc(id=0, nbytes=SymDesc(expr=X, hint=2**63))},
        {"storage": MetaStorageDesc(id=2**63, nbytes=SymDesc(expr=X, hint=3))},
    ],
    ids=lambda rare: next(iter(rare)),
)
def test_what_is_rare_is_written_as_ever(rare: dict[str, Any]) -> None:
    """With numbers and texts that a row put together from another one could get wrong."""
    storage = MetaStorageDesc(id=0, nbytes=4)
    tensors = [tensor(**{"id": i, "storage": storage, **rare}) for i in range(3)]
    twice = [tensor(**{"id": 9 + i, "storage": storage, **rare}) for i in range(2)]
    if rare.get("id") == 2**63:
        tensors = tensors[:1]
        twice = []
    fast, plain = documents([*tensors, *twice])
    assert fast == plain


@pytest.mark.parametrize("nbytes", [4.0, None, "4", True], ids=repr)
def test_storages_that_cannot_be_written_are_named_where_they_stand(nbytes: Any) -> None:
    """By both ways, prepared or not."""
    tensors = [tensor(), tensor(id=1, storage=MetaStorageDesc(id=1, nbytes=nbytes))]
    said: set[str] = set()
    for fast, prepared in ((True, tensors), (True, []), (False, tensors)):
        with pytest.raises(UnsupportedValueError) as caught:
            Encoder(fast=fast).prepare([], prepared).add("some", tensors)
        said.add(str(caught.value))
    assert len(said) == 1


def test_a_storage_is_written_once() -> None:
    """However many tensors are on it, and whichever way it is met first."""
    storages = [MetaStorageDesc(id=i, nbytes=n) for i, n in enumerate((4, SymDesc(expr=X, hint=3)))]
    tensors = [tensor(id=i, storage=storages[i % 2]) for i in range(6)]
    for fast in (True, False):
        for prepared in ([], tensors, tensors[3:]):
            members = Encoder(fast=fast).prepare([], prepared).add("some", tensors).members()
            assert len(msgspec.json.decode(members["tables.json"])["storages"]) == 2
            assert Decoder(members).get("some", list) == tensors


@pytest.mark.parametrize("depth", range(94, 102))
def test_nesting_above_a_storage_is_bounded_as_ever(depth: int) -> None:
    """Its size is a record, too."""
    nested: Any = tensor(storage=MetaStorageDesc(id=0, nbytes=SymDesc(expr=X, hint=3)))
    for _ in range(depth):
        nested = [nested]

    def written_or_refused(*, fast: bool) -> bytes | str:
        try:
            return dumps(nested, fast=fast)
        except FakeifyError as error:
            return str(error)

    assert written_or_refused(fast=True) == written_or_refused(fast=False)


def test_a_row_depends_on_types_too() -> None:
    """``1`` and ``1.0`` are equal, and different on the wire."""
    tensors = [tensor(id=i, scalar_hint=hint) for i, hint in enumerate((1, 1.0, 1, 1.0))]
    fast, plain = documents(tensors)
    assert fast == plain


def test_layouts_that_never_come_again_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some of them nothing more is learned."""
    monkeypatch.setattr(row_texts, "_MAX_FOUND_ONCE", 3)
    texts: list[Any] = []
    init = row_texts.RowTexts.__init__

    def note(self: Any) -> None:
        init(self)
        texts.append(self)

    monkeypatch.setattr(row_texts.RowTexts, "__init__", note)
    tensors = [tensor(id=i, size=(i,), stride=(1,)) for i in range(9)]
    Encoder().prepare([], tensors)
    assert len(texts[0]._templates) == 3


def test_what_cannot_be_written_is_named_where_it_stands() -> None:
    """The rows that come first leave it to the tree."""
    tensors = [tensor(), tensor(id=1, storage=tensor())]
    with pytest.raises(UnsupportedValueError, match=r"^some.json \$\[1\]\.storage: "):
        Encoder().prepare([], tensors).add("some", tensors)


def test_chains_are_bounded_in_prepared_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row put together counts what is below it."""
    monkeypatch.setattr(writer, "MAX_CHAIN", 4)
    sources = [chain_of_sources(3), chain_of_sources(4)]
    tensors = [tensor(id=i, source=sources[0]) for i in range(3)]
    Encoder().prepare(sources[:1], tensors).add("some", tensors)
    for nbytes in (4, SymDesc(expr=X, hint=3)):
        row = tensor(id=8, storage=MetaStorageDesc(id=0, nbytes=nbytes))
        for most, fast in ((2, True), (2, False), (3, True), (3, False)):
            monkeypatch.setattr(writer, "MAX_CHAIN", most if nbytes != 4 else most - 1)
            with (
                contextlib.nullcontext()
                if most == 3
                else pytest.raises(FakeifyError, match="rows in a chain")
            ):
                Encoder(fast=fast).prepare([], [row]).add("some", [row])
    monkeypatch.setattr(writer, "MAX_CHAIN", 4)
    tensors.append(tensor(id=9, source=sources[1]))
    for fast in (True, False):
        with pytest.raises(FakeifyError, match="rows in a chain"):
            Encoder(fast=fast).prepare(sources, tensors).add("some", tensors)


def over(base: SourceDesc, field: Any, name: str = ".w") -> SourceDesc:
    """A source over another one, with one field."""
    return SourceDesc(
        cls="AttrSource", name=base.name + name, base=base, fields=(("member", field),)
    )


TEXTS = ("w", "é\u2028", "a\nb", "100%d", "1", 1, True, 1.0, None, 'quo"te\\', "\ud800")
"""Values of a field; the last one cannot be written."""


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(TEXTS[:-1]), st.booleans())))
@settings(max_examples=200, deadline=None)
def test_sources_are_written_the_short_way_as_the_plain_way(
    drawn: list[tuple[int, Any, bool]],
) -> None:
    """All at once or one by one, before the tree or in it: the rows of equal ones are one."""
    sources = [SourceDesc(cls="LocalSource", name="L['a']", fields=(("local_name", "a"),))]
    for under, value, begins in drawn:
        base = sources[under % len(sources)]
        made = over(base, value)
        sources.append(made if begins else msgspec.structs.replace(made, name="other"))
    for prepared in (sources, sources[::2], []):
        fast, plain = (
            Encoder(fast=fast).prepare(prepared, []).add("some", sources).members()
            for fast in (True, False)
        )
        assert fast == plain
        assert Decoder(fast).get("some", list) == sources
    rows = msgspec.json.decode(fast["tables.json"])["sources"]
    texts = list(map(msgspec.json.encode, rows))
    assert len(set(texts)) == len(texts)


def test_a_source_that_cannot_be_written_takes_no_other_with_it() -> None:
    """It is named where it stands in the tree, and what was prepared beside it is written."""
    root = SourceDesc(cls="LocalSource", name="L['a']", fields=(("local_name", "a"),))
    good, bad = over(root, "w"), over(root, TEXTS[-1])
    with pytest.raises(
        UnsupportedValueError, match=r"^some.json \$\[1\]: a value cannot be written"
    ):
        Encoder().prepare([good, bad, over(good, "v")], []).add("some", [good, bad])
    encoder = Encoder().prepare([good, bad, over(good, "v")], [])
    assert Decoder(encoder.add("some", [good]).members()).get("some", list) == [good]


@pytest.mark.parametrize("fields", [(("a",),), (("a", "b", "c"),), [["a", "b"]], (("a", ["b"]),)])
def test_a_source_of_a_wrong_type_is_written_or_refused_as_ever(fields: Any) -> None:
    """Whether it was prepared or not."""
    root = SourceDesc(cls="LocalSource", name="L['a']", fields=(("local_name", "a"),))
    bad = msgspec.structs.replace(over(root, "w"), fields=fields)

    def way(*, fast: bool, prepared: list[SourceDesc]) -> Any:
        try:
            return Encoder(fast=fast).prepare(prepared, []).add("some", [bad]).members()
        except (FakeifyError, TypeError, ValueError) as error:
            return type(error), str(error)

    plain = way(fast=False, prepared=[bad])
    assert way(fast=True, prepared=[bad]) == way(fast=True, prepared=[]) == plain


@pytest.mark.parametrize("bad", [False, True], ids=["good", "beside_a_bad_one"])
@pytest.mark.parametrize("fast", [True, False])
def test_chains_of_texts_are_bounded(
    monkeypatch: pytest.MonkeyPatch, fast: bool, bad: bool
) -> None:
    """Prepared all at once, and in the tree after some could not be prepared."""
    monkeypatch.setattr(writer, "MAX_CHAIN", 4)
    root = SourceDesc(cls="LocalSource", name="L['a']", fields=(("local_name", "a"),))
    first = [over(root, TEXTS[-1]), over(root, "x", ".x")] if bad else []
    chain = [root]
    for _ in range(4):
        chain.append(over(chain[-1], "w"))
    encoder = Encoder(fast=fast).prepare([*first, *chain[:4]], []).add("some", chain[:4])
    assert Decoder(encoder.members()).get("some", list) == chain[:4]
    for prepared in ([*first, *chain], first):
        with pytest.raises(FakeifyError, match="rows in a chain"):
            Encoder(fast=fast).prepare(prepared, []).add("some", chain)


@pytest.mark.parametrize("fast", [True, False])
def test_expressions_count_in_chains(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    """That of a storage's size is below the storage, which is below the tensor."""
    symbolic = MetaStorageDesc(id=0, nbytes=SymDesc(expr=X, hint=4))
    tensors = [tensor(storage=symbolic), tensor(id=1, storage=symbolic)]
    monkeypatch.setattr(writer, "MAX_CHAIN", 3)
    Encoder(fast=fast).prepare([], tensors).add("some", tensors)
    monkeypatch.setattr(writer, "MAX_CHAIN", 2)
    with pytest.raises(FakeifyError, match="rows in a chain"):
        Encoder(fast=fast).prepare([], tensors).add("some", tensors)
