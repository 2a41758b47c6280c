"""Sources and symbolic contexts: every class of torch is encoded unchanged or refused by name."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from processes import piped
from source_examples import ARGUMENTS, X, cases, make, source_classes
from source_strategies import LOCAL, SOURCES, shown
from torch._dynamo import source as S
from torch._guards import ChainedSource, Source

from torch_fakeify.encoding.sources import DecodeMemo, decode_source, encode_source
from torch_fakeify.errors import (
    FormatError,
    LimitError,
    UnknownNameError,
    UnsupportedValueError,
)
from torch_fakeify.records.tensor import (
    EnumValue,
    FunctionValue,
    ListValue,
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
        for field in {f.name for f in dataclasses.fields(cls)} & vars(source).keys():
            assert vars(back)[field] == vars(source)[field]  # also where the class has a default
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
    assert hash(back) == hash(source)
    assert shown(back) == shown(source)
    assert asked(back, "name") == asked(source, "name")
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
    desc = encode_source(source)
    back: Any = decode_source(desc)
    length = 0
    while isinstance(back, ChainedSource):
        back, length = back.base, length + 1
    assert (length, back) == (3000, X)


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


def local(cls: str, *fields: tuple[str, Any]) -> SourceDesc:
    """Return the record of a source over a local variable."""
    return SourceDesc(cls=cls, name="n", base=LOCAL, fields=fields)


PROPERTY = "torch._dynamo.source.TensorProperty"

WRONG = {
    "n: no such source class; expected a class of torch._dynamo.source; found EvilSource": (
        SourceDesc(cls="EvilSource", name="n")
    ),
    "n (Source): a source has a field that is unknown or occurs twice; expected no field; found x": (
        SourceDesc(cls="Source", name="n", fields=(("x", 1),))
    ),
    "n (LocalSource): a source lacks a field; expected local_name": (
        SourceDesc(cls="LocalSource", name="n")
    ),
    "n (LocalSource): a source has the wrong base; expected no base; found one": (
        local("LocalSource", *LOCAL.fields)
    ),
    "n (GradSource): a source has the wrong base; expected a base; found none": (
        SourceDesc(cls="GradSource", name="n")
    ),
    "n (AttrSource).member: a field of a source has the wrong type; expected str; found int": (
        local("AttrSource", ("member", 3))
    ),
    "n (AttrSource): a source has a field that is unknown or occurs twice; expected member; found base": (
        local("AttrSource", ("base", 3))
    ),
    "n (AttrSource): a source has a field that is unknown or occurs twice; expected member; found member": (
        local("AttrSource", ("member", "a"), ("member", "b"))
    ),
    "n (RandomValueSource).random_call_index: a field of a source has the wrong type; expected int; "
    "found bool": (
        SourceDesc(cls="RandomValueSource", name="n", fields=(("random_call_index", True),))
    ),
    "n (TensorPropertySource).prop: no such tensor property; found X": (
        local("TensorPropertySource", ("prop", EnumValue(cls=PROPERTY, name="X")))
    ),
    "n (TensorPropertySource): a source cannot be made; found idx must not be None for "
    "TensorProperty.SIZE TensorProperty": (
        local("TensorPropertySource", ("prop", EnumValue(cls=PROPERTY, name="SIZE")))
    ),
    "n (GetItemSource): a source cannot be made; found unhashable type: 'list'": (
        local("GetItemSource", ("index", ListValue(items=())))
    ),
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_records_are_refused(text: str) -> None:
    """Each malformed record has its error; one of another torch is an unknown name."""
    with pytest.raises(FormatError) as error:
        decode_source(WRONG[text])
    assert type(error.value) is (UnknownNameError if "no such" in text else FormatError)
    assert str(error.value) == text


MEMBERS = "AttrSource GenericAttrSource ParamBufferSource UnspecializedParamBufferSource CellContentsSource"


@pytest.mark.parametrize("cls", MEMBERS.split())
def test_a_member_is_what_the_constructor_makes_of_it(cls: str) -> None:
    """A file has no source that torch would not make; a constructor may also split a member at dots."""
    more = {"freevar_name": "f"} if cls == "CellContentsSource" else {}
    desc = local(cls, ("member", "a.b"), *more.items())
    try:
        expected = getattr(S, cls)(X, "a.b", *more.values())
    except AssertionError:
        with pytest.raises(FormatError, match="a source cannot be made"):
            decode_source(desc)
    else:
        assert decode_source(desc) == expected


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
    with pytest.raises(FormatError):
        decode_source(local("GetItemSource", ("index", evil)))


def test_sources_inside_fields_are_bounded() -> None:
    """A source in a field of a source in a field ... is refused at a depth."""
    desc = LOCAL
    for _ in range(60):
        desc = local("GetItemSource", ("index", TupleValue(items=(SourceValue(source=desc),))))
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
