"""Hypothesis strategies for torch's sources and symbolic contexts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import sympy
import torch
from hypothesis import strategies as st
from torch._dynamo import source as S
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    RelaxedUnspecConstraint,
    StatefulSymbolicContext,
    StatelessSymbolicContext,
    StrictMinMaxConstraint,
    SubclassSymbolicContext,
    SymIntSymbolicContext,
)
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from torch_fakeify.records.tensor import SourceDesc

if TYPE_CHECKING:
    from torch._guards import Source

CONSTANTS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 3),
    st.floats(allow_nan=False),
    st.sampled_from(["a", "{0}", "it's", "ä\n", ""]),
    st.sampled_from([torch.float32, torch.device("cuda", 1), ..., 1j, b"x", (1, "a")]),
)

TEXTS = st.sampled_from(
    ["x", "self", "é", "a b", "it's", "{0}", 'a"b', "\\", "class", "", "0", "\ufb01"]
)
ROOTS: st.SearchStrategy[Source] = st.one_of(
    st.builds(
        S.LocalSource,
        TEXTS,
        is_input=st.booleans(),
        dynamism=st.one_of(
            st.none(), st.frozensets(st.sampled_from(["a", ("b", (True, False)), ("c", ())]))
        ),
        is_varargs=st.booleans(),
    ),
    st.builds(S.GlobalSource, TEXTS),
    st.builds(S.ConstantSource, st.sampled_from(["sym_0", "_tensor_constant0"])),
    st.builds(S.TempLocalSource, TEXTS),
    st.builds(S.EphemeralSource, st.sampled_from([None, "symint{}"])),
    st.builds(S.CurrentStreamSource, st.sampled_from(list(map(torch.device, ["cpu", "cuda:1"])))),
)


def _over(bases: st.SearchStrategy[Source]) -> st.SearchStrategy[Source]:
    slices = st.builds(slice, st.integers(0, 3), st.one_of(st.none(), st.integers(1, 4)))
    keys = st.builds(S.ConstDictKeySource, bases, st.integers(0, 3))
    literals = st.one_of(st.integers(0, 3), st.booleans(), st.sampled_from(["k", "{1}"]))
    return st.one_of(
        st.builds(S.AttrSource, bases, TEXTS),
        st.builds(S.CellContentsSource, bases, st.just("cell_contents"), st.just("free")),
        st.builds(S.UnspecializedNNModuleSource, bases),
        st.builds(S.GradSource, bases),
        st.builds(S.GetItemSource, bases, st.one_of(CONSTANTS, slices)),
        st.builds(S.ListGetItemSource, bases, st.one_of(literals, slices)),
        st.builds(S.DictGetItemSource, bases, st.one_of(literals, keys)),
        st.builds(S.DefaultsSource, bases, st.integers(0, 3)),
        st.builds(S.DefaultsSource, bases, st.just("key"), st.just(True)),
        st.builds(S.NegateSource, bases),
        st.builds(
            S.TensorPropertySource, bases, st.just(S.TensorProperty.STRIDE), st.integers(0, 3)
        ),
        st.builds(S.TensorPropertySource, bases, st.just(S.TensorProperty.STORAGE_OFFSET)),
    )


SOURCES: st.SearchStrategy[Source] = st.recursive(ROOTS, _over, max_leaves=4)

BOUNDS = st.one_of(st.none(), st.integers(0, 9))
CONSTRAINTS = st.one_of(
    st.none(),
    st.builds(RelaxedUnspecConstraint, warn_only=st.booleans()),
    st.builds(
        StrictMinMaxConstraint,
        warn_only=st.booleans(),
        vr=st.sampled_from(
            [
                ValueRanges(2, 8),
                ValueRanges(0, int_oo),
                ValueRanges(-int_oo, int_oo),
                ValueRanges(sympy.Integer(3), sympy.oo),
                ValueRanges(0.5, 2.5),
            ]
        ),
    ),
)
CONDITIONS = st.sampled_from(
    [lambda n: n == 8, lambda n: n % 16 == 0, lambda n: n * n + 1 > 40, lambda n: n // 3 != 2]
)


@st.composite
def contexts(draw: st.DrawFn, depth: int = 2) -> Any:
    """A symbolic context of any kind, over zero to three dims."""
    kind = draw(st.sampled_from(["stateless", "stateful", "subclass", "symint"]))
    if kind == "symint":
        return SymIntSymbolicContext(constraint=draw(CONSTRAINTS))
    ndim = draw(st.integers(0, 3))

    def each(items: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(items, min_size=ndim, max_size=ndim))

    def dims(values: st.SearchStrategy[Any]) -> dict[int, Any]:
        keys = st.integers(0, ndim - 1) if ndim else st.nothing()
        return draw(st.dictionaries(keys, values, max_size=ndim))

    strides = st.sampled_from([DimDynamic.INFER_STRIDE, DimDynamic.DYNAMIC, DimDynamic.DUCK])
    optional: dict[str, Any] = {
        "dynamic_strides": each(strides),
        "constraint_sizes": each(CONSTRAINTS),
        "constraint_strides": each(CONSTRAINTS),
        "specialize_on": each(st.lists(CONDITIONS, max_size=2)),
        "shape_ids": dims(st.one_of(st.none(), st.just("batch"))),
        "unbacked_bounds": dims(st.tuples(BOUNDS, BOUNDS)),
    }
    if depth:
        optional["view_base_context"] = draw(contexts(depth=depth - 1))
    chosen = draw(st.sets(st.sampled_from(sorted(optional))))
    fields = {name: optional[name] for name in sorted(chosen)}
    fields["dynamic_sizes"] = each(st.sampled_from(list(DimDynamic)))
    if kind == "stateless":
        return StatelessSymbolicContext(**fields)
    fields["tensor_source"] = draw(SOURCES)
    fields["excluded_sizes"] = draw(st.sampled_from([None, (None,) * ndim, (4,) * ndim]))
    if kind == "stateful":
        return StatefulSymbolicContext(**fields)
    inner = st.one_of(st.none(), contexts(depth=depth - 1)) if depth else st.none()
    return SubclassSymbolicContext(
        **fields,
        inner_contexts=draw(st.dictionaries(st.sampled_from("ab"), inner)),
        track_outer_size_stride=draw(st.booleans()),
    )


def shown(source: Source) -> str:
    """The ``repr`` of a source, without the order of a frozenset, which is not a property of it."""
    return re.sub(
        r"frozenset\(\{(.*?)\}\)", lambda m: f"frozenset({sorted(m[1].split(', '))})", repr(source)
    )


LOCAL = SourceDesc(cls="LocalSource", name="L['x']", fields=(("local_name", "x"),))
