"""Symbolic contexts and their records."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from source_examples import X
from source_strategies import LOCAL, SOURCES, contexts
from torch._dynamo import source as S
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

from torch_fakeify.encoding.conditions import DIM
from torch_fakeify.encoding.contexts import decode_context, encode_context
from torch_fakeify.encoding.exprs import encode_expr
from torch_fakeify.encoding.sources import DecodeMemo
from torch_fakeify.errors import FormatError, LimitError, UnsupportedValueError
from torch_fakeify.records.tensor import ConstraintDesc, ContextDesc
from torch_fakeify.serialization.document import dumps, loads

if TYPE_CHECKING:
    from torch._guards import Source


@given(contexts())
@settings(max_examples=150, deadline=None)
def test_contexts_round_trip(ctx: SymbolicContext) -> None:
    """A decoded context has the record that it was decoded from, and equal fields."""
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
def test_contexts_do_not_depend_on_those_made_before(
    some: list[SymbolicContext], sources: list[Source]
) -> None:
    """In any order and with other sources, records and contexts equal those made alone."""
    memo = DecodeMemo()
    both = [
        dataclasses.replace(ctx, tensor_source=source) if hasattr(ctx, "tensor_source") else ctx
        for ctx in some
        for source in sources
    ]
    for ctx in [*both, *both]:
        desc = encode_context(ctx)
        again = decode_context(desc, memo=memo)
        assert type(again) is type(ctx)
        assert encode_context(again) == desc


def test_every_context_class_and_field_is_covered() -> None:
    """A class or a field that torch adds must be added to the record or listed here as left out."""
    left_out = {"shape_env_to_source_to_symbol_cache"}  # not policy: the symbols of an env
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


def test_contexts_of_a_record_share_nothing_mutable() -> None:
    """Each has its own lists of dims, and a cache of symbols of its own, which is not recorded."""
    ctx = StatefulSymbolicContext(
        [DimDynamic.DYNAMIC], tensor_source=X, unbacked_bounds={0: (1, 2)}
    )
    FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.ones(3), symbolic_context=ctx, source=X)
    assert ctx.shape_env_to_source_to_symbol_cache
    memo = DecodeMemo()
    desc = encode_context(ctx)
    first, second, third = (decode_context(desc, memo=memo) for _ in range(3))
    first.dynamic_sizes[0] = DimDynamic.STATIC
    first.shape_env_to_source_to_symbol_cache[1] = {}
    second.constraint_sizes[0] = StrictMinMaxConstraint(vr=ValueRanges(1, 2), warn_only=False)
    second.unbacked_bounds[0] = (3, 4)
    assert encode_context(third) == desc
    assert encode_context(decode_context(desc, memo=memo)) == desc
    assert third.shape_env_to_source_to_symbol_cache == {}


def test_a_decoded_context_makes_the_same_symbols() -> None:
    """Torch makes a fake tensor with it as with the original: sizes, ranges and guards agree."""
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


def test_specializations_round_trip() -> None:
    """A condition is an expression in the record, and decoded a predicate on ints and symbols."""
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
    axioms: list[str] = []
    for each in (lambda n: n % 8 == 0, check):
        with env.patch_source_specialization(source, each):
            axioms.append(str(env.axioms))
    assert axioms[0] == axioms[1] != "{}"
    assert str(check(fake.size(0))) == str(fake.size(0) % 8 == 0)
    assert env.guards == []


def branches(n: Any) -> Any:
    """Branch on the size."""
    return n == 4 if n > 3 else n == 2


class MyContext(StatelessSymbolicContext):
    """A class whose meaning is unknown."""


@dataclasses.dataclass(frozen=True)
class MyConstraint(RelaxedUnspecConstraint):
    """A class whose meaning is unknown."""


@pytest.mark.parametrize(
    ("ctx", "message"),
    [
        (
            StatelessSymbolicContext([DimDynamic.DYNAMIC], specialize_on=[[branches]]),
            r"^symbolic context.specialize_on\[0\]\[0\] \(branches\)",
        ),
        (MyContext([]), "MyContext"),
        (SymIntSymbolicContext(MyConstraint(warn_only=False)), "MyConstraint"),
    ],
)
def test_contexts_without_a_record_are_refused(ctx: SymbolicContext, message: str) -> None:
    """The error names a function that branches on the size, or the class."""
    with pytest.raises(UnsupportedValueError, match=message):
        encode_context(ctx)


NUMBER = encode_expr(sympy.Integer(3))
SMALLER = encode_expr(sympy.Integer(2))


def dim(**fields: Any) -> ContextDesc:
    """Return a record of a stateless context of one dim."""
    return ContextDesc(kind="stateless", dynamic_sizes=("DUCK",), **fields)


def number(**fields: Any) -> ContextDesc:
    """Return a record of a context of a number with a constraint."""
    return ContextDesc(kind="symint", constraint=ConstraintDesc(**fields))


WRONG = {
    ".dynamic_sizes: a symint context has no such field": (
        ContextDesc(kind="symint", dynamic_sizes=("DUCK",))
    ),
    ".tensor_source: a stateless context has no such field": dim(tensor_source=LOCAL),
    ".tensor_source: a stateful context lacks its source": ContextDesc(kind="stateful"),
    ".dynamic_strides: a context has a wrong number of dims; expected 1; found 2": (
        dim(dynamic_strides=("DUCK", "DUCK"))
    ),
    ".dynamic_strides: a stride has a policy that torch does not know for strides; expected "
    "INFER_STRIDE | DYNAMIC | DUCK; found STATIC": dim(dynamic_strides=("STATIC",)),
    ".shape_ids: a dim occurs twice": dim(shape_ids=((0, "a"), (0, "b"))),
    ".shape_ids: there is no such dim; found 1": dim(shape_ids=((1, "a"),)),
    ".constraint: a strict constraint lacks its range": number(kind="strict", lower=NUMBER),
    ".constraint: a relaxed constraint has no range": number(kind="relaxed", lower=NUMBER),
    ".constraint: a range is empty; found Invalid ranges [3:2]": (
        number(kind="strict", lower=NUMBER, upper=SMALLER)
    ),
    ".specialize_on[0][0]: a condition to specialize on is no predicate of the size; "
    "expected a comparison of the symbol dim; found 3": dim(specialize_on=((NUMBER,),)),
    ".inner_contexts: an inner tensor occurs twice": ContextDesc(
        kind="subclass", tensor_source=LOCAL, inner_contexts=(("a", None), ("a", None))
    ),
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_contexts_are_refused(text: str) -> None:
    """Each error contains the path into the context."""
    with pytest.raises(FormatError) as error:
        decode_context(WRONG[text])
    assert str(error.value) == f"symbolic context{text}"


def test_nested_contexts_are_bounded() -> None:
    """A long chain of contexts for bases is refused when encoded and when decoded."""
    desc = ContextDesc(kind="stateless")
    ctx: Any = StatelessSymbolicContext([])
    for _ in range(60):
        desc = ContextDesc(kind="stateless", view_base_context=desc)
        ctx = StatelessSymbolicContext([], view_base_context=ctx)
    with pytest.raises(LimitError):
        decode_context(desc)
    with pytest.raises(LimitError):
        encode_context(ctx)
