"""Sources and symbolic contexts: every class of torch is encoded unchanged or refused by name."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from processes import piped
from source_examples import ARGUMENTS, X, cases, make, source_classes
from source_strategies import LOCAL, SOURCES, shown
from torch._dynamo import source as S
from torch._guards import ChainedSource, Source

from torch_fakeify.encoding import sources
from torch_fakeify.encoding.sources import DecodeMemo, decode_source, encode_source
from torch_fakeify.errors import (
    FakeifyError,
    FormatError,
    LimitError,
    UnknownNameError,
    UnsupportedValueError,
)
from torch_fakeify.records.tensor import (
    EnumValue,
    FunctionValue,
    SliceValue,
    SourceDesc,
    SourceValue,
    TupleValue,
)
from torch_fakeify.serialization.document import dumps, loads


def instances() -> list[Any]:
    """Return one or more instances of each class."""
    return [pytest.param(cls, arguments, id=cls.__name__) for cls, arguments in cases().items()]


def asked(source: Source, what: str) -> object:
    """Return a property, or the class of the exception that it raises."""
    try:
        return getattr(source, what)
    except (AssertionError, RuntimeError, KeyError) as error:
        return type(error)


# --- sources --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cls", "arguments_of"), instances())
def test_every_source_class_round_trips(cls: type[Any], arguments_of: list[dict[str, Any]]) -> None:
    """A class that torch defines is decoded as the same class with the same fields and name."""
    assert arguments_of, f"{cls.__name__} is new in torch: give its arguments in ARGUMENTS"
    for arguments in arguments_of:
        source = make(cls, arguments)
        desc = encode_source(source)
        back = decode_source(loads(dumps(desc)))
        assert type(back) is cls
        assert back == source
        assert hash(back) == hash(source)
        assert shown(back) == shown(source)
        assert encode_source(back) == desc
        for what in ("name", "guard_source"):
            assert asked(back, what) == asked(source, what)
        name = asked(source, "name")
        assert desc.name == (name if isinstance(name, str) else cls.__name__)


def test_the_table_has_every_class_and_no_other() -> None:
    """The arguments above are of classes that exist, and there are as many as torch has."""
    names = {cls.__name__ for cls in source_classes()}
    assert set(ARGUMENTS) - names <= {"ContextVarGetSource"}
    assert len(names) >= 58


@given(SOURCES)
@settings(max_examples=150, deadline=None)
def test_source_trees_round_trip(source: Source) -> None:
    """Any tree of sources is equal once decoded, also in types that Python compares equal."""
    desc = encode_source(source)
    back = decode_source(loads(dumps(desc)))
    assert back == source
    assert shown(back) == shown(source)
    assert encode_source(back) == desc


def test_the_record_of_a_source_has_its_fields() -> None:
    """The record has the fields that are not default, by name, and the base as a record."""
    source = S.TensorPropertySource(S.GetItemSource(X, slice(1, 3)), S.TensorProperty.SIZE, 0)
    local = SourceDesc(
        cls="LocalSource", name="L['x']", fields=(("local_name", "x"), ("is_input", True))
    )
    item = SourceDesc(
        cls="GetItemSource",
        name="L['x'][slice(1, 3, None)]",
        base=local,
        fields=(("index", SliceValue(start=1, stop=3)),),
    )
    size = EnumValue(cls="torch._dynamo.source.TensorProperty", name="SIZE")
    assert encode_source(source) == SourceDesc(
        cls="TensorPropertySource",
        name="L['x'][slice(1, 3, None)].size()[0]",
        base=item,
        fields=(("prop", size), ("idx", 0)),
    )


def test_common_bases_are_shared() -> None:
    """Sources over one base share its record; those decoded with one memo share the object."""
    base = S.LocalSource("self")
    sources = [S.AttrSource(base, name) for name in "ab"]
    one, two = map(encode_source, sources)
    assert one.base is two.base is encode_source(base)
    decoded = DecodeMemo()
    first, second = (decode_source(desc, memo=decoded) for desc in (one, two))
    assert first.base is second.base  # pyright: ignore


def test_a_cached_record_does_not_change_the_source() -> None:
    """Equality, hash, text and copies of a source are as before it was encoded."""
    new, used = (S.AttrSource(S.LocalSource("m"), "w") for _ in range(2))
    encode_source(used)
    assert (used, hash(used), repr(used), str(used.__reduce__())) == (
        new,
        hash(new),
        repr(new),
        str(new.__reduce__()),
    )
    assert "_fakeify_record" not in vars(dataclasses.replace(used, member="v"))
    assert "_fakeify_record" not in vars(copy.copy(used))


def test_long_chains_need_no_recursion() -> None:
    """The chain of a deep module's source is walked without recursion in both directions."""
    source: Source = X
    for _ in range(3000):
        source = S.NNModuleSource(source)
    desc = encode_source_without_names(source)
    back: Any = decode_source(desc)
    length = 0
    while isinstance(back, ChainedSource):
        back, length = back.base, length + 1
    assert (length, back) == (3000, X)


def encode_source_without_names(source: Source) -> SourceDesc:
    """Encode a chain whose names torch itself cannot compute."""
    chain: list[Any] = []
    while isinstance(source, ChainedSource):
        chain.append(source)
        source = source.base
    desc = encode_source(source)
    for link in reversed(chain):
        desc = SourceDesc(cls=type(link).__name__, name="n", base=desc)
    return desc


def test_a_source_class_of_another_package_is_refused() -> None:
    """The error names a user's subclass, also deep in a tree, and also with a name of torch's."""

    @dataclasses.dataclass(frozen=True)
    class MySource(ChainedSource):
        @property
        def _name_template(self) -> str:
            return "mine({0})"

    class AttrSource(S.AttrSource):
        pass

    for cls, source in (
        (MySource, S.GradSource(MySource(X))),
        (MySource, S.GetItemSource(X, MySource(X))),
        (AttrSource, AttrSource(X, "a")),
    ):
        with pytest.raises(UnsupportedValueError) as error:
            encode_source(source)
        assert error.value.found == f"{cls.__module__}.{cls.__qualname__}"
        assert "a source class has no record; expected a class of torch._dynamo.source" in str(
            error.value
        )


def test_an_index_without_a_record_is_refused_with_its_path() -> None:
    """The error contains the source, its class and the field of an index that is no constant."""
    with pytest.raises(UnsupportedValueError) as error:
        encode_source(S.GetItemSource(X, object()))
    assert "(GetItemSource.index)" in str(error.value)


@pytest.mark.parametrize(
    ("desc", "kind", "text"),
    [
        (
            SourceDesc(cls="EvilSource", name="n"),
            UnknownNameError,
            "n: no such source class; expected a class of torch._dynamo.source; found EvilSource",
        ),
        (
            SourceDesc(cls="Source", name="n", fields=(("x", 1),)),
            FormatError,
            "n (Source): a source has a field that is unknown or occurs twice; "
            "expected no field; found x",
        ),
        (
            SourceDesc(cls="LocalSource", name="n"),
            FormatError,
            "n (LocalSource): a source lacks a field; expected local_name",
        ),
        (
            SourceDesc(cls="LocalSource", name="n", base=LOCAL, fields=LOCAL.fields),
            FormatError,
            "n (LocalSource): a source has the wrong base; expected no base; found one",
        ),
        (
            SourceDesc(cls="GradSource", name="n"),
            FormatError,
            "n (GradSource): a source has the wrong base; expected a base; found none",
        ),
        (
            SourceDesc(cls="AttrSource", name="n", base=LOCAL, fields=(("member", 3),)),
            FormatError,
            "n (AttrSource).member: a field of a source has the wrong type; expected str; found int",
        ),
        (
            SourceDesc(cls="AttrSource", name="n", base=LOCAL, fields=(("base", 3),)),
            FormatError,
            "n (AttrSource): a source has a field that is unknown or occurs twice; "
            "expected member; found base",
        ),
        (
            SourceDesc(cls="RandomValueSource", name="n", fields=(("random_call_index", True),)),
            FormatError,
            "n (RandomValueSource).random_call_index: a field of a source has the wrong type; "
            "expected int; found bool",
        ),
        (
            SourceDesc(
                cls="TensorPropertySource",
                name="n",
                base=LOCAL,
                fields=(("prop", EnumValue(cls="torch._dynamo.source.TensorProperty", name="X")),),
            ),
            UnknownNameError,
            "n (TensorPropertySource).prop: no such tensor property; found X",
        ),
        (
            SourceDesc(
                cls="TensorPropertySource",
                name="n",
                base=LOCAL,
                fields=(
                    ("prop", EnumValue(cls="torch._dynamo.source.TensorProperty", name="SIZE")),
                ),
            ),
            FormatError,
            "n (TensorPropertySource): a source cannot be made; "
            "found idx must not be None for TensorProperty.SIZE TensorProperty",
        ),
    ],
)
def test_wrong_records_are_refused(desc: SourceDesc, kind: type[FakeifyError], text: str) -> None:
    """Each malformed record has its error."""
    with pytest.raises(kind) as error:
        decode_source(desc)
    assert type(error.value) is kind
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("cls", "field", "text"),
    [
        ("ImportSource", "module_name", "os').system('true"),
        ("ImportSource", "module_name", "os system"),
        ("GradSource", "member", "grad.__class__()"),
        ("DefaultsSource", "idx_key", "k'] + f()['"),
        ("ConstantSource", "source_name", "__import__('os').system('true')"),
    ],
)
def test_names_that_torch_would_evaluate_are_refused(cls: str, field: str, text: str) -> None:
    """Torch prints these fields as Python, so writer and reader allow only names."""
    kind = getattr(S, cls)
    more = (("is_kw", True),) if cls == "DefaultsSource" else ()
    base = LOCAL if issubclass(kind, ChainedSource) else None
    with pytest.raises(FormatError, match="a field of a source is no identifier"):
        decode_source(SourceDesc(cls=cls, name="n", base=base, fields=((field, text), *more)))
    with pytest.raises(UnsupportedValueError, match="a field of a source is no identifier"):
        encode_source(make(kind, {field: text, **dict(more)}))


def test_functions_as_an_index_are_data_or_refused() -> None:
    """A function as an index is decoded as data or refused; no name in a record is called."""
    evil = FunctionValue(kind="function", name="os.system")
    desc = SourceDesc(cls="GetItemSource", name="n", base=LOCAL, fields=(("index", evil),))
    with pytest.raises(FormatError):
        decode_source(desc)


def test_sources_inside_fields_are_bounded() -> None:
    """A source in a field of a source in a field ... is refused at a depth."""
    desc = LOCAL
    for _ in range(60):
        desc = SourceDesc(
            cls="GetItemSource",
            name="n",
            base=LOCAL,
            fields=(("index", TupleValue(items=(SourceValue(source=desc),))),),
        )
    with pytest.raises(LimitError):
        decode_source(desc)
    source: Source = X
    for _ in range(60):
        source = S.GetItemSource(X, source)
    with pytest.raises(LimitError):
        encode_source(source)


@pytest.mark.sweep
def test_a_fresh_process_reads_sources_without_a_frame() -> None:
    """Sources whose constructors add a guard to the frame are read without a frame."""
    sources = [make(S.ImportSource, {"module_name": "torch.nn"}), S.GradSource(X)]
    script = (
        "import sys; from torch_fakeify.serialization.document import loads\n"
        "from torch_fakeify.encoding.sources import decode_source\n"
        "print(*(decode_source(d).name for d in loads(sys.stdin.buffer.read())))"
    )
    written = piped(script, dumps([encode_source(source) for source in sources]))
    assert written.decode().split() == ["__import__('torch.nn')", "L['x'].grad"]


# --- contexts -------------------------------------------------------------------------------------


def test_sources_made_without_constructors_equal_those_made_with_them() -> None:
    """For every class that is filled directly, fields, hashes and names are equal."""
    seen = 0
    for known in sources._source_classes().values():
        if known.bare is None or not set(known.required) <= known.kinds.keys():
            continue
        values = {name: next(iter(known.kinds[name]))("7") for name in known.required}
        base = sources.torch_dynamo.dynamo_source().LocalSource("x") if known.chained else None
        more = {} if base is None else {"base": base}
        made = known.cls(**more, **values)
        record = encode_source(made)
        again = decode_source(record)
        assert type(again) is type(made)
        assert {name: vars(again)[name] for name in known.bare} == {
            name: vars(made)[name] for name in known.bare
        }
        assert again == made
        assert hash(again) == hash(made)
        seen += 1
    assert seen > 10


NAMES = ["x", "é", "a b", "it's", "{0}", 'a"b', "\\", "class", "", "x1", "\ufb01"]


@pytest.mark.parametrize("text", NAMES)
def test_the_name_of_a_source_is_torchs(text: str) -> None:
    """The name of a decoded source is the one that torch computes."""
    count = 0
    for name, known in sources._source_classes().items():
        fields = [each for each in known.required if known.kinds.get(each) == {str}]
        if known.bare is None or known.chained or len(known.required) != 1 or not fields:
            continue
        count += 1
        decoded = decode_source(loads(dumps(encode_source(known.cls(**{fields[0]: text})))))
        expected = known.cls(**{fields[0]: text})
        assert sources.name_of(expected) == sources.name_of(decoded), name
        assert vars(decoded).items() <= vars(expected).items() | {("_fakeify_record", 0)}, name
    assert count >= 3


def test_the_name_of_a_source_with_more_fields_is_torchs() -> None:
    """Fields beside the text do not change the cached name."""
    for is_input in (True, False):
        made = S.LocalSource("x", is_input=is_input)
        decoded = decode_source(loads(dumps(encode_source(made))))
        assert decoded == made
        assert decoded.name == made.name == "L['x']"


@pytest.mark.parametrize(
    "text", ["w", "0", "a b", "ä", "", "a.b", "a'\"\\\n", 0, -1, 10**30, True, None, 1.5]
)
def test_links_equal_those_that_constructors_make(text: Any) -> None:
    """Links are equal in class, fields, hash and name, or refused with the same text."""
    seen: set[str] = set()
    classes = sources._source_classes()
    for name, known in classes.items():
        if known.bare is None or not known.chained or len(known.required) > 1:
            continue
        seen.add(name)
        base = encode_source(X)
        fields = tuple((needed, text) for needed in known.required)
        desc = SourceDesc(cls=name, name="n", base=base, fields=fields)

        def outcome(desc: SourceDesc = desc) -> Any:
            try:
                made = decode_source(desc)
            except FakeifyError as error:
                return str(error)
            state = {k: v for k, v in vars(made).items() if k != "_hash"}  # computed on first use
            return type(made), made, state, hash(made), sources.name_of(made)

        fast = outcome()
        with pytest.MonkeyPatch.context() as patch:
            slow = msgspec.structs.replace(known, bare=None)
            patch.setattr(
                sources, "_source_classes", lambda slow=slow, n=name: {**classes, n: slow}
            )
            assert fast == outcome(), name
    assert {"AttrSource", "ParamBufferSource", "DictGetItemSource", "GradSource"} <= seen
