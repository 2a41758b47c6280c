"""Sources and symbolic contexts: every class of torch crosses as it is, or is refused by name."""

from __future__ import annotations

import copy
import dataclasses
import re
import subprocess
import sys
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from source_examples import ARGUMENTS, X, cases, make, source_classes
from source_strategies import SOURCES, contexts
from torch._dynamo import source as S
from torch._guards import ChainedSource, Source
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    RelaxedUnspecConstraint,
    ShapeEnv,
    StatefulSymbolicContext,
    StatelessSymbolicContext,
    StrictMinMaxConstraint,
    SymbolicContext,
    SymIntSymbolicContext,
)
from torch.utils._sympy.value_ranges import ValueRanges

from torch_fakeify import sources
from torch_fakeify.codec import dumps, loads
from torch_fakeify.conditions import DIM
from torch_fakeify.contexts import (
    ContextRecords,
    Contexts,
    decode_context,
    encode_context,
    plain_sizes,
)
from torch_fakeify.desc import (
    ConstraintDesc,
    ContextDesc,
    EnumValue,
    FunctionValue,
    SliceValue,
    SourceDesc,
    SourceValue,
    TupleValue,
)
from torch_fakeify.errors import (
    FakeifyError,
    FormatError,
    LimitError,
    UnknownNameError,
    UnsupportedValueError,
)
from torch_fakeify.exprs import encode_expr
from torch_fakeify.sources import DecodeMemo, decode_source, encode_source


def instances() -> list[Any]:
    """One or more instances of each class."""
    return [pytest.param(cls, arguments, id=cls.__name__) for cls, arguments in cases().items()]


def asked(source: Source, what: str) -> object:
    """A property, or the class of the exception that it raises."""
    try:
        return getattr(source, what)
    except (AssertionError, RuntimeError, KeyError) as error:
        return type(error)


# --- sources --------------------------------------------------------------------------------------


def shown(source: Source) -> str:
    """The ``repr`` of a source, without the order of a frozenset, which is not a property of it."""
    return re.sub(
        r"frozenset\(\{(.*?)\}\)",
        lambda m: f"frozenset({sorted(m[1].split(', '))})",
        repr(source),
    )


@pytest.mark.parametrize(("cls", "arguments_of"), instances())
def test_every_source_class_crosses(cls: type[Any], arguments_of: list[dict[str, Any]]) -> None:
    """A class that torch defines comes back as the same class with the same fields and name."""
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
    """The arguments above name classes that exist, and there are as many as torch has."""
    names = {cls.__name__ for cls in source_classes()}
    assert set(ARGUMENTS) - names <= {"ContextVarGetSource"}
    assert len(names) >= 58


@given(SOURCES)
@settings(max_examples=150, deadline=None)
def test_source_trees_round_trip(source: Source) -> None:
    """Any tree of sources is equal after the boundary, down to types that Python finds equal."""
    desc = encode_source(source)
    back = decode_source(loads(dumps(desc)))
    assert back == source
    assert shown(back) == shown(source)
    assert encode_source(back) == desc


def test_the_record_of_a_source() -> None:
    """The fields that are not at their default, by name; the base as a record."""
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
    """Sources over one base share its record; with one memo, the decoded share the object."""
    base = S.LocalSource("self")
    sources = [S.AttrSource(base, name) for name in "ab"]
    one, two = map(encode_source, sources)
    assert one.base is two.base is encode_source(base)
    encoded: Any = {}
    third, fourth = (encode_source(source, memo=encoded) for source in sources)
    assert (third, fourth) == (one, two)
    assert third.base is fourth.base is not one.base
    decoded = DecodeMemo()
    first, second = (decode_source(desc, memo=decoded) for desc in (one, two))
    assert first.base is second.base  # pyright: ignore


def test_a_kept_record_changes_nothing_of_the_source() -> None:
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
    """A deep module's source is a chain; both directions walk it."""
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
    """As encode_source, for a chain whose names torch itself cannot compute."""
    chain: list[Any] = []
    while isinstance(source, ChainedSource):
        chain.append(source)
        source = source.base
    desc = encode_source(source)
    for link in reversed(chain):
        desc = SourceDesc(cls=type(link).__name__, name="n", base=desc)
    return desc


def test_a_source_class_of_somebody_else_is_refused() -> None:
    """A user's subclass is named, also deep in a tree, and also if it takes a name of torch's."""

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
    """What is no constant is named with source, class and field."""
    with pytest.raises(UnsupportedValueError) as error:
        encode_source(S.GetItemSource(X, object()))
    assert "(GetItemSource.index)" in str(error.value)


LOCAL = SourceDesc(cls="LocalSource", name="L['x']", fields=(("local_name", "x"),))


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
    """Each way to be wrong has its error."""
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
def test_names_that_torch_would_run_are_refused(cls: str, field: str, text: str) -> None:
    """Torch renders these fields into Python text: neither side lets anything but names pass."""
    kind = getattr(S, cls)
    more = (("is_kw", True),) if cls == "DefaultsSource" else ()
    base = LOCAL if issubclass(kind, ChainedSource) else None
    with pytest.raises(FormatError, match="a field of a source is no identifier"):
        decode_source(SourceDesc(cls=cls, name="n", base=base, fields=((field, text), *more)))
    with pytest.raises(UnsupportedValueError, match="a field of a source is no identifier"):
        encode_source(make(kind, {field: text, **dict(more)}))


def test_functions_as_an_index_are_data_or_refused() -> None:
    """No field calls or imports what a record names."""
    evil = FunctionValue(kind="function", name="os.system")
    desc = SourceDesc(cls="GetItemSource", name="n", base=LOCAL, fields=(("index", evil),))
    with pytest.raises(FormatError):
        decode_source(desc)


def test_sources_inside_fields_are_bounded() -> None:
    """A source in a field of a source in a field ... ends."""
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


def test_a_fresh_process_reads_sources_without_a_frame() -> None:
    """Sources whose construction leaves a guard on the frame are read where there is no frame."""
    sources = [make(S.ImportSource, {"module_name": "torch.nn"}), S.GradSource(X)]
    script = (
        "import sys; from torch_fakeify.codec import loads\n"
        "from torch_fakeify.sources import decode_source\n"
        "print(*(decode_source(d).name for d in loads(sys.stdin.buffer.read())))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        input=dumps([encode_source(source) for source in sources]),
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        check=True,
    )
    assert run.stdout.decode().split() == ["__import__('torch.nn')", "L['x'].grad"]


# --- contexts -------------------------------------------------------------------------------------


@given(contexts())
@settings(max_examples=150, deadline=None)
def test_contexts_round_trip(ctx: SymbolicContext) -> None:
    """The record of what was decoded is the record; what can be compared is equal."""
    desc = encode_context(ctx)
    back = decode_context(loads(dumps(desc)))
    assert encode_context(back) == desc
    assert type(back) is type(ctx)
    for field in dataclasses.fields(ctx):
        if field.name in ("specialize_on", "view_base_context", "inner_contexts"):
            continue
        assert getattr(back, field.name) == getattr(ctx, field.name), field.name


@given(st.lists(contexts(), min_size=1, max_size=3), st.lists(SOURCES, min_size=2, max_size=2))
@settings(max_examples=60, deadline=None)
def test_contexts_of_an_example_are_those_made_alone(
    some: list[SymbolicContext], sources: list[Source]
) -> None:
    """Records and contexts, in any order and with other sources, are equal to those without memory."""
    records, made = ContextRecords(), Contexts(DecodeMemo())
    both = [
        dataclasses.replace(ctx, tensor_source=source) if hasattr(ctx, "tensor_source") else ctx
        for ctx in some
        for source in sources
    ]
    for ctx in [*both, *both]:
        desc = encode_context(ctx)
        assert records.of(ctx) == desc
        again = made.make(desc)
        assert type(again) is type(ctx)
        assert encode_context(again) == desc


def test_contexts_of_an_example_own_what_can_be_changed() -> None:
    """Lists of dims and the cache of symbols are of one context alone, also of the first one."""
    made = Contexts(DecodeMemo())
    desc = encode_context(
        StatefulSymbolicContext([DimDynamic.DUCK], tensor_source=X, unbacked_bounds={0: (1, 2)})
    )
    first, second, third = (made.make(desc) for _ in range(3))
    first.dynamic_sizes[0] = DimDynamic.STATIC
    first.shape_env_to_source_to_symbol_cache[1] = {}
    second.constraint_sizes[0] = StrictMinMaxConstraint(vr=ValueRanges(1, 2), warn_only=False)
    second.unbacked_bounds[0] = (3, 4)
    assert encode_context(third) == desc
    assert encode_context(made.make(desc)) == desc
    assert third.shape_env_to_source_to_symbol_cache == {}


def test_every_context_class_and_field_is_covered() -> None:
    """A class or a field that torch adds must be put into the record or named here as left out."""
    left_out = {"shape_env_to_source_to_symbol_cache"}  # not policy: which symbols an env has
    renamed = {"constraint", "kind"}
    known = set(ContextDesc.__struct_fields__) | left_out | renamed
    todo = [SymbolicContext]
    seen: set[str] = set()
    while todo:
        cls = todo.pop()
        todo += [c for c in cls.__subclasses__() if c.__module__.startswith("torch.")]
        seen.add(cls.__name__)
        assert {f.name for f in dataclasses.fields(cls)} - known == set(), cls
    assert seen == {
        "SymbolicContext",
        "SymIntSymbolicContext",
        "StatelessSymbolicContext",
        "StatefulSymbolicContext",
        "SubclassSymbolicContext",
    }


def test_the_symbol_cache_stays_behind() -> None:
    """A decoded stateful context has a cache of its own, and it is empty."""
    ctx = StatefulSymbolicContext([DimDynamic.DYNAMIC], tensor_source=X)
    env = ShapeEnv()
    FakeTensorMode(shape_env=env).from_tensor(torch.ones(3), symbolic_context=ctx, source=X)
    assert ctx.shape_env_to_source_to_symbol_cache
    one, two = (decode_context(encode_context(ctx)) for _ in range(2))
    assert one.shape_env_to_source_to_symbol_cache == {}  # pyright: ignore
    assert (
        one.shape_env_to_source_to_symbol_cache  # pyright: ignore
        is not two.shape_env_to_source_to_symbol_cache  # pyright: ignore
    )


def test_a_decoded_context_makes_the_same_symbols() -> None:
    """Torch fakeifies with it as with the original: sizes, ranges and guards agree."""
    ctx = StatefulSymbolicContext(
        [DimDynamic.DYNAMIC, DimDynamic.DUCK, DimDynamic.STATIC],
        constraint_sizes=[
            StrictMinMaxConstraint(warn_only=False, vr=ValueRanges(2, 64)),
            RelaxedUnspecConstraint(warn_only=True),
            None,
        ],
        tensor_source=X,
    )
    shown: list[object] = []
    for each in (ctx, decode_context(encode_context(ctx))):
        env = ShapeEnv()
        fake = FakeTensorMode(shape_env=env).from_tensor(
            torch.ones(4, 5, 6), symbolic_context=each, source=X
        )
        ranges = {str(symbol): str(vr) for symbol, vr in env.var_to_range.items()}
        shown.append((str(fake.size()), str(fake.stride()), ranges))
    assert shown[0] == shown[1]


def test_specializations_are_found_again() -> None:
    """A condition is an expression in the record, a predicate on ints and on symbols after."""
    ctx = StatelessSymbolicContext([DimDynamic.DYNAMIC], specialize_on=[[lambda n: n % 8 == 0]])
    desc = encode_context(ctx)
    ((condition,),) = desc.specialize_on
    assert condition.nodes[0] == encode_expr(DIM).nodes[0]
    ((check,),) = decode_context(loads(dumps(desc))).specialize_on  # pyright: ignore
    assert [n for n in range(2, 30) if check(n)] == [8, 16, 24]
    env = ShapeEnv()
    fake = FakeTensorMode(shape_env=env).from_tensor(
        torch.ones(16), symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC]), source=X
    )
    source = S.TensorPropertySource(X, S.TensorProperty.SIZE, 0)
    learned: list[str] = []
    for each in (lambda n: n % 8 == 0, check):
        with env.patch_source_specialization(source, each):
            learned.append(str(env.axioms))
    assert learned[0] == learned[1] != "{}"
    assert str(check(fake.size(0))) == str(fake.size(0) % 8 == 0)
    assert env.guards == []


def test_a_condition_that_is_no_expression_is_refused_by_name() -> None:
    """A function that branches on the size cannot be written down."""

    def branches(n: Any) -> Any:
        return n == 4 if n > 3 else n == 2

    with pytest.raises(UnsupportedValueError) as error:
        encode_context(StatelessSymbolicContext([DimDynamic.DYNAMIC], specialize_on=[[branches]]))
    assert "symbolic context.specialize_on[0][0]" in str(error.value)
    assert "branches" in str(error.value)


def test_contexts_and_constraints_of_somebody_else_are_refused() -> None:
    """A subclass may mean anything; it is named."""

    class MyContext(StatelessSymbolicContext):
        pass

    @dataclasses.dataclass(frozen=True)
    class MyConstraint(RelaxedUnspecConstraint):
        pass

    with pytest.raises(UnsupportedValueError, match="MyContext"):
        encode_context(MyContext([]))
    with pytest.raises(UnsupportedValueError, match="MyConstraint"):
        encode_context(SymIntSymbolicContext(MyConstraint(warn_only=False)))


NUMBER = encode_expr(sympy.Integer(3))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"kind": "symint", "dynamic_sizes": ("DUCK",)},
            ".dynamic_sizes: a symint context has no such field",
        ),
        (
            {"kind": "stateless", "tensor_source": LOCAL},
            ".tensor_source: a stateless context has no such field",
        ),
        ({"kind": "stateful"}, ".tensor_source: a stateful context lacks its source"),
        (
            {"kind": "stateless", "dynamic_sizes": ("DUCK",), "dynamic_strides": ("DUCK", "DUCK")},
            ".dynamic_strides: a context has a wrong number of dims; expected 1; found 2",
        ),
        (
            {"kind": "stateless", "dynamic_sizes": ("DUCK",), "dynamic_strides": ("STATIC",)},
            ".dynamic_strides: a stride has a policy that torch does not know for strides; "
            "expected INFER_STRIDE | DYNAMIC | DUCK; found STATIC",
        ),
        (
            {"kind": "stateless", "dynamic_sizes": ("DUCK",), "shape_ids": ((0, "a"), (0, "b"))},
            ".shape_ids: a dim occurs twice",
        ),
        (
            {"kind": "stateless", "dynamic_sizes": ("DUCK",), "shape_ids": ((1, "a"),)},
            ".shape_ids: there is no such dim; found 1",
        ),
        (
            {"kind": "symint", "constraint": ConstraintDesc(kind="strict", lower=NUMBER)},
            ".constraint: a strict constraint lacks its range",
        ),
        (
            {"kind": "symint", "constraint": ConstraintDesc(kind="relaxed", lower=NUMBER)},
            ".constraint: a relaxed constraint has no range",
        ),
        (
            {
                "kind": "symint",
                "constraint": ConstraintDesc(
                    kind="strict", lower=NUMBER, upper=encode_expr(sympy.Integer(2))
                ),
            },
            ".constraint: a range is empty; found Invalid ranges [3:2]",
        ),
        (
            {"kind": "stateless", "dynamic_sizes": ("DUCK",), "specialize_on": ((NUMBER,),)},
            ".specialize_on[0][0]: a condition to specialize on is no predicate of the size; "
            "expected a comparison of the symbol dim; found 3",
        ),
        (
            {
                "kind": "subclass",
                "tensor_source": LOCAL,
                "inner_contexts": (("a", None), ("a", None)),
            },
            ".inner_contexts: an inner tensor occurs twice",
        ),
    ],
)
def test_wrong_contexts_are_refused(fields: dict[str, Any], text: str) -> None:
    """Each way to be wrong has its error, with the path into the context."""
    with pytest.raises(FormatError) as error:
        decode_context(ContextDesc(**fields))
    assert str(error.value) == f"symbolic context{text}"


def test_nested_contexts_are_bounded() -> None:
    """A context for the base of a base of a base ... ends, on both sides."""
    desc = ContextDesc(kind="stateless")
    ctx: Any = StatelessSymbolicContext([])
    for _ in range(60):
        desc = ContextDesc(kind="stateless", view_base_context=desc)
        ctx = StatelessSymbolicContext([], view_base_context=ctx)
    with pytest.raises(LimitError):
        decode_context(desc)
    with pytest.raises(LimitError):
        encode_context(ctx)


def test_sources_without_their_constructors_are_what_these_make() -> None:
    """Every class of which the fields are set at once: equal fields, hashes and names."""
    seen = 0
    for known in sources._source_classes().values():
        if known.bare is None or not set(known.required) <= known.plain.keys():
            continue
        values = {name: known.plain[name]("7") for name in known.required}
        base = sources._torch.dynamo_source().LocalSource("x") if known.chained else None
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
def test_a_source_is_named_as_torch_names_it(text: str) -> None:
    """What is known of a name when a source is decoded is what torch finds for one of its own."""
    count = 0
    for name, known in sources._source_classes().items():
        if known.naming is None:
            continue
        count += 1
        made = known.cls(**{known.naming.field: text})
        decoded = decode_source(loads(dumps(encode_source(made))))
        expected = known.cls(**{known.naming.field: text})
        assert expected.name == decoded.name, name
        assert vars(decoded).items() <= vars(expected).items() | {("_fakeify_record", 0)}, name
        base = sources.base_source_of(decoded)
        assert base.name == sources._torch.dynamo_source().AttrSource(expected, "_base").name
    assert count >= 3


def test_a_source_with_more_than_a_name_is_named_as_torch_names_it() -> None:
    """Fields beside the text change nothing that is known of the name."""
    for is_input in (True, False):
        made = S.LocalSource("x", is_input=is_input)
        decoded = decode_source(loads(dumps(encode_source(made))))
        assert decoded == made
        assert decoded.name == made.name == "L['x']"


@pytest.mark.parametrize(
    "text", ["w", "0", "a b", "ä", "", "a.b", "a'\"\\\n", 0, -1, 10**30, True, None, 1.5]
)
def test_links_are_made_as_their_constructors_make_them(text: Any) -> None:
    """Without it: equal in class, fields, hash and name, or refused with the same words."""
    seen: set[str] = set()
    for name, known in sources._source_classes().items():
        if known.link is None:
            continue
        seen.add(name)
        base = encode_source(X)
        fields = () if known.link.needed is None else ((known.link.needed, text),)
        desc = SourceDesc(cls=name, name="n", base=base, fields=fields)

        def outcome(desc: SourceDesc = desc) -> Any:
            try:
                made = decode_source(desc)
            except FakeifyError as error:
                return str(error)
            state = {k: v for k, v in vars(made).items() if k != "_hash"}  # known once asked for
            return type(made), made, state, hash(made), sources.name_of(made)

        fast = outcome()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sources, "_links", dict)
            assert fast == outcome(), name
    assert {"AttrSource", "ParamBufferSource", "DictGetItemSource", "GradSource"} <= seen


@given(contexts())
def test_plain_sizes_are_those_of_what_decodes_to_no_more(ctx: Any) -> None:
    """Where they are given, decoding gives a stateless context of these dims and nothing else."""
    desc = encode_context(ctx)
    names = plain_sizes(desc)
    if names is None:
        return
    ndim, inner = len(names), desc.view_base_context
    back: Any = decode_context(desc)
    plain = StatelessSymbolicContext([DimDynamic[name] for name in names])
    assert type(back) is StatelessSymbolicContext
    for field in dataclasses.fields(plain):
        if field.name != "view_base_context":
            assert getattr(back, field.name) == getattr(plain, field.name)
    assert len(back.dynamic_sizes) == ndim
    assert inner is None or plain_sizes(inner) is not None


@pytest.mark.parametrize(
    "more",
    [
        {"dynamic_strides": ("DUCK",)},
        {"constraint_sizes": (None, None)},
        {"specialize_on": ((),)},
        {"shape_ids": ((0, "a"),)},
        {"excluded_sizes": (1,)},
        {"track_outer_size_stride": False},
        {"kind": "symint"},
        {"dynamic_sizes": ("NONE",)},
    ],
)
def test_a_context_that_says_more_has_no_plain_sizes(more: dict[str, Any]) -> None:
    """Nor has one whose base says more: it is decoded, which refuses what is not sound."""
    plain: dict[str, Any] = {"kind": "stateless", "dynamic_sizes": ("DUCK",)}
    assert plain_sizes(ContextDesc(**plain)) == ("DUCK",)
    other = ContextDesc(**{**plain, **more})
    assert plain_sizes(other) is None
    assert plain_sizes(ContextDesc(**plain, view_base_context=other)) is None


def test_contexts_nested_too_deep_have_no_plain_sizes() -> None:
    """Decoding says so."""
    desc = ContextDesc(kind="stateless")
    depth = 0
    while plain_sizes(desc) is not None:
        decode_context(desc)
        desc = ContextDesc(kind="stateless", view_base_context=desc)
        depth += 1
    assert depth <= sources.MAX_NESTING
