"""View functions as records, against torch's own view functions."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensor_facts import text
from torch._dynamo.source import LocalSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    SubclassSymbolicContext,
)
from torch.testing._internal.two_tensor import TwoTensor
from view_zoo import (
    JAGGED_VIEWS,
    VIEWS,
    Reshape,
    Traced,
    aten,
    check,
    jagged,
    metadata,
    stub,
    trace,
    two,
    visited_by_torch,
)

import torch_fakeify as tfk
from torch_fakeify.encoding.exprs import encode_int
from torch_fakeify.encoding.views.replay import replay_view_calls
from torch_fakeify.encoding.views.trace import trace_view_calls
from torch_fakeify.errors import UnsupportedTensorError
from torch_fakeify.records.tensor import (
    ListValue,
    SymValue,
    TensorValue,
    ViewCallDesc,
)

if TYPE_CHECKING:
    from collections.abc import Callable

MAX = 2**63 - 1


# --- equal to torch's own view function ---------------------------------------------------------


@pytest.mark.parametrize("name", VIEWS)
def test_views_equal_torchs(name: str) -> None:
    """Numbers, order and result are those of the C++ view function, where torch has one.

    It has one for a view of a subclass, and of a dense tensor if it is set to record them.
    """
    check(VIEWS[name](two(4, 6)))
    with torch.autograd._force_original_view_tracking(True):
        check(VIEWS[name](torch.zeros(4, 6)))
    t = VIEWS[name](torch.zeros(4, 6))
    assert metadata(Traced(t).replay()) == metadata(t)


@pytest.mark.parametrize("name", VIEWS)
def test_replay_is_a_view_of_the_new_base(name: str) -> None:
    """The result has the base that it was made of, and its version."""
    base = two(4, 6)
    t = Traced(VIEWS[name](two(4, 6))).replay(base)
    assert t._base is base
    base.mul_(2)
    assert t._version == base._version == 1


@pytest.mark.parametrize("name", JAGGED_VIEWS)
def test_jagged_views_equal_torchs(name: str) -> None:
    """Their view functions have tensors as arguments; the calls are equal after serialization."""
    t = JAGGED_VIEWS[name]()
    check(t)
    d = msgspec.structs.replace(stub(99), is_view=True, base=stub(98), view_calls=Traced(t).calls)
    assert tfk.loads(tfk.dumps(d)) == d


CHAINED: dict[str, Callable[[Any, int, int], Any]] = {
    "unsqueeze": lambda t, dim, _: t.unsqueeze(dim),
    "alias": lambda t, *_: aten.alias(t),
    "neg": lambda t, *_: torch._neg_view(t),
    "unbind": lambda t, dim, n: t.unbind(dim)[n],
    "select": lambda t, dim, n: t.select(dim, n),
    "split": lambda t, dim, n: t.split(n, dim)[-1],
    "slice": lambda t, dim, n: aten.slice.Tensor(t, dim, n, n + 3, 2),
    "slice to the end": lambda t, dim, n: aten.slice.Tensor(t, dim, n),
    "transpose": lambda t, dim, _: t.transpose(dim, 0),
    "flatten": lambda t, *_: t.view(-1),
    "diagonal": lambda t, *_: t.diagonal(0, 0, 1),
    "expand": lambda t, _, n: t.unsqueeze(0).expand(n, *t.size()),
    "conj": lambda t, *_: torch.conj(t),
    "as real": lambda t, *_: torch.view_as_real(t),
    "as complex": lambda t, *_: t if t.is_neg() else torch.view_as_complex(t),
}
"""Views of a tensor, by a dim and another number."""
STEPS = st.tuples(st.sampled_from(sorted(CHAINED)), st.integers(-3, 2), st.integers(-4, 6))


def chained(t: Any, steps: list[tuple[str, int, int]]) -> Any:
    """Return the view by those of the steps that fit one another."""
    for name, dim, n in steps:
        with suppress(RuntimeError, IndexError):
            t = CHAINED[name](t, dim, n)
    return t


@given(st.sampled_from((torch.float32, torch.complex64)), st.lists(STEPS, min_size=1, max_size=6))
def test_any_chain_equals_torchs(dtype: torch.dtype, steps: list[tuple[str, int, int]]) -> None:
    """Chains of view operators on a subclass and on a dense tensor are compared."""
    for base in (two(4, 6, 2, dtype=dtype), torch.zeros(4, 6, 2, dtype=dtype)):
        with torch.autograd._force_original_view_tracking(True):
            t = chained(base, steps)
        if t._is_view():
            assert t._base is base
            check(t)
    t = chained(torch.zeros(4, 6, 2, dtype=dtype), steps)
    if t._is_view():
        assert metadata(Traced(t).replay()) == metadata(t)


# --- the same fakes, symbols and guards as torch's converter --------------------------------------


def ours(mode: FakeTensorMode, t: Any, **policy: Any) -> Any:
    """Return the fake tensor of a record, with the arguments of torch's ``from_tensor``."""
    record = tfk.loads(tfk.dumps(tfk.describe_tensor(t, **policy)))
    return tfk.MetaConverter(mode).from_desc(record)


def first_dim_dynamic(t: Any, dynamic: DimDynamic) -> Any:
    """Return a context by which only the first dim of each tensor is dynamic."""
    sizes = [dynamic if i == 0 else DimDynamic.STATIC for i in range(t.dim())]
    for i, n in enumerate(t.size()):
        if isinstance(n, torch.SymInt):
            sizes[i] = DimDynamic.DYNAMIC  # a nested int is never static
    inner = t.__tensor_flatten__()[0] if hasattr(t, "__tensor_flatten__") else None
    common: Any = {
        "dynamic_sizes": sizes,
        "constraint_sizes": [None] * t.dim(),
        "view_base_context": first_dim_dynamic(t._base, dynamic) if t._is_view() else None,
    }
    if inner is None:
        return StatelessSymbolicContext(**common)
    contexts = {name: first_dim_dynamic(getattr(t, name), dynamic) for name in inner}
    return SubclassSymbolicContext(
        **common, inner_contexts=contexts, tensor_source=LocalSource("t")
    )


def fake_state(make: Any, t: Any, dynamic: DimDynamic | None) -> dict[str, Any]:
    """Return the fake tensor that is made of a tensor, and the facts of its ShapeEnv."""
    env = ShapeEnv()
    context = None if dynamic is None else first_dim_dynamic(t, dynamic)
    fake = make(FakeTensorMode(shape_env=env), t, source=LocalSource("t"), symbolic_context=context)
    return {
        "fake": text(metadata(fake)),
        "guards": [str(guard.expr) for guard in env.guards],
        "hints": text(env.backed_var_to_val),
        "replacements": str(env.replacements),
        "ranges": str(env.var_to_range),
        "sources": {str(k): [s.name for s in v] for k, v in env.var_to_sources.items()},
    }


SYMBOLIC: dict[str, Callable[[], Any]] = {
    "view": lambda: two(4, 15).view(4, 3, 5),
    "slice": lambda: two(4, 15)[1:3],
    "split": lambda: two(4, 15).split(2)[1],
    "unbind": lambda: two(4, 15).unbind()[1],
    "chain": lambda: two(4, 15)[1:].t().unsqueeze(0),
    "as_strided": lambda: two(4, 15).as_strided((3, 5), (5, 1), 2),
    "expand": lambda: two(4, 15)[1:].unsqueeze(0).expand(2, 3, 15),
    "conj": lambda: two(4, 15, dtype=torch.complex64).conj()[1:],
    "neg": lambda: torch._neg_view(two(4, 15))[1:],
    **{f"jagged, {name}": make for name, make in JAGGED_VIEWS.items()},
}


@pytest.mark.parametrize("dynamic", [None, DimDynamic.DYNAMIC, DimDynamic.DUCK, DimDynamic.STATIC])
@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbols_and_guards_are_torchs(name: str, dynamic: DimDynamic | None) -> None:
    """The record's fake tensor equals torch's, which is made with its own view function."""
    t = SYMBOLIC[name]()
    assert fake_state(ours, t, dynamic) == fake_state(FakeTensorMode.from_tensor, t, dynamic)


def test_a_dynamic_dim_stays_dynamic() -> None:
    """A view of sizes (t.size(0), 3, 5) does not specialize the first dim."""
    env = ShapeEnv()
    t = two(4, 15)
    view = t.view(t.size(0), 3, 5)
    context = first_dim_dynamic(view, DimDynamic.DUCK)
    mode = FakeTensorMode(shape_env=env)
    fake = ours(mode, view, source=LocalSource("t"), symbolic_context=context)
    symbol = fake.size(0).node.expr
    assert symbol.is_Symbol
    assert fake.size()[1:] == (3, 5)
    assert env.guards
    others = {key: hint for key, hint in env.backed_var_to_val.items() if key != symbol}
    for n in range(2, 20):
        assert all(guard.expr.subs({**others, symbol: n}) == True for guard in env.guards)  # noqa: E712


# --- records -------------------------------------------------------------------------------------


RECORDS: list[tuple[Callable[[Any], Any], list[ViewCallDesc]]] = [
    (
        lambda t: t[1:].t().select(0, -1),
        [
            ViewCallDesc(op="aten.slice.Tensor", args=(0, 1, MAX)),
            ViewCallDesc(op="aten.t.default"),
            ViewCallDesc(op="aten.select.int", args=(0, -1)),
        ],
    ),
    (
        lambda t: t.split(2)[1].unbind(1)[3],
        [
            ViewCallDesc(op="aten.split.Tensor", args=(2,), output=1),
            ViewCallDesc(op="aten.unbind.int", args=(1,), output=3),
        ],
    ),
    (
        lambda t: aten.expand.default(t, (2, 4, 6), implicit=True),
        [
            ViewCallDesc(
                op="aten.expand.default",
                args=(ListValue(items=(2, 4, 6)),),
                kwargs=(("implicit", True),),
            )
        ],
    ),
    (
        lambda _: torch.zeros(4, 6)[1:].t().unsqueeze(0),  # dense, so without a view function
        [
            ViewCallDesc(
                op="aten.as_strided.default",
                args=(ListValue(items=(1, 6, 3)), ListValue(items=(6, 1, 6)), 6),
            )
        ],
    ),
]


@pytest.mark.parametrize(("view", "calls"), RECORDS, ids=["chain", "output", "keyword", "dense"])
def test_the_record_of_a_view(view: Callable[[Any], Any], calls: list[ViewCallDesc]) -> None:
    """It has operators with overloads, arguments without the tensor, and the index of the used result."""
    assert trace(view(two(4, 6))) == tuple(calls)


def test_the_record_of_tensor_arguments() -> None:
    """An offsets tensor is recorded as its description, and omitted arguments are left out."""
    t = jagged()
    traced = Traced(t)
    assert traced.calls == (
        ViewCallDesc(
            op="aten._nested_view_from_jagged.default",
            args=(TensorValue(tensor=stub(0)), TensorValue(tensor=stub(1))),
        ),
    )
    assert traced.tensors[0] is t._offsets


def test_the_record_of_symbols() -> None:
    """The numbers of a fake tensor's view operators are symbolic where they were."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = mode.from_tensor(two(4, 15), source=LocalSource("t"))
    n = fake.size(0)
    calls = trace_view_calls(fake.view(n, 3, 5), part=lambda _: stub(0), ints=encode_int, where="t")
    (sizes,) = calls[0].args
    assert isinstance(sizes, ListValue)
    assert sizes.items[1:] == (3, 5)
    assert sizes.items[0] == SymValue(sym=encode_int(n))  # type: ignore[arg-type]


# --- views whose view function is not enough ------------------------------------------------------


IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "t_": lambda t: t.t_(),
    "transpose_": lambda t: t.transpose_(0, 1),
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    "squeeze_": lambda t: t[:1].squeeze_(),
    "swapdims_": lambda t: t.swapdims_(0, 1),
    "unsqueeze_, then a view": lambda t: t.unsqueeze_(0)[0],
    "as_strided_": lambda t: t.as_strided_((2, 2), (1, 2), 3),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_view_operators_are_an_as_strided(name: str) -> None:
    """In-place view operators change a tensor without its view function."""
    t: Any = IN_PLACE[name](two(4, 6)[1:])
    assert metadata(visited_by_torch(t)[2]) != metadata(t)
    traced = Traced(t)
    assert traced.calls[-1].op == "aten.as_strided.default"
    assert metadata(traced.replay()) == metadata(t)


class Same(Reshape):
    """A function that returns its input, of which torch makes a view."""

    @staticmethod
    def forward(_: Any, x: Any) -> Any:
        """Return the input."""
        return x


@pytest.mark.parametrize("function", [Reshape, Same])
@pytest.mark.parametrize("dense", [True, False])
def test_views_made_in_an_autograd_function_are_recorded(function: Any, dense: bool) -> None:
    """Views that are made in an autograd function have a view function as other views have."""
    base = torch.zeros(4, 6, requires_grad=True) if dense else two(4, 6, grad=True)
    for t in (function.apply(base), function.apply(base)[1:]):
        assert metadata(Traced(t).replay()) == metadata(t)
        if not dense:
            check(t)


class Stubborn(TwoTensor):
    """A subclass that can refuse slices."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Raise for a slice if slices are refused."""
        if func is aten.slice.Tensor and cls.refuses:
            raise TypeError("no slices today. Try again tomorrow")
        return super().__torch_dispatch__(func, types, args, kwargs)

    refuses = False


def test_a_view_function_that_raises_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """An as_strided of the base is recorded instead."""
    t: Any = Stubborn(torch.zeros(4, 6), torch.zeros(4, 6))[1:]
    monkeypatch.setattr(Stubborn, "refuses", True)
    (call,) = trace(t)
    assert call.op == "aten.as_strided.default"
    assert metadata(replay_view_calls((call,), t._base, where="t")) == metadata(t)


def with_a_replaced_part() -> Any:
    """Return a view with an inner tensor that was set by hand, and is no view of the base's part."""
    t = two(4, 6)[1:]
    t.a = torch.zeros(3, 5)
    return t


NOT_MADE = "t: the view function does not make the tensor; expected view operators that make it from its base; "
REFUSED: dict[str, Callable[[], Any]] = {
    "t: the tensor is no view; expected a tensor with a `_base`": lambda: torch.zeros(3),
    # Torch's own converter fails too.
    f"{NOT_MADE}found NotImplementedError: Could not run 'aten::as_strided' with arguments from the "
    "'SparseCsrCPU' backend. Describe its clone(), which is not a view": (
        lambda: torch.eye(3).to_sparse_csr().values()
    ),
    f"{NOT_MADE}found a tensor that differs from it. Describe its clone(), which is not a view": (
        with_a_replaced_part
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("text", REFUSED)
def test_a_tensor_that_no_view_operators_make_is_refused(text: str) -> None:
    """The error contains what was made instead, or why nothing was."""
    with pytest.raises(UnsupportedTensorError) as caught:
        trace(REFUSED[text]())
    assert str(caught.value) == text


def test_views_by_operators_of_other_packages_are_recorded() -> None:
    """A dense view by a user's operator has no view function and is an as_strided."""
    with torch.library._scoped_library("tfk_views", "DEF") as library:
        library.define("flat(Tensor(a) x) -> Tensor(a)")
        library.impl("flat", lambda x: x.view(-1), "CompositeExplicitAutograd")
        ops: Any = torch.ops
        t = ops.tfk_views.flat(torch.zeros(4, 6))
        (call,) = trace(t)
        assert call.op == "aten.as_strided.default"
        # A record may contain it nevertheless, if the operator is registered.
        call = ViewCallDesc(op="tfk_views.flat.default")
        assert replay_view_calls((call,), torch.zeros(2, 3), where="t").size() == (6,)
