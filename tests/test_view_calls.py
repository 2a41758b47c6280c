"""View functions as records, against torch's own view functions."""

from __future__ import annotations

import re
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._subclasses.meta_utils as meta_utils
from hypothesis import given
from hypothesis import strategies as st
from subclass_zoo import fake_world
from torch._dynamo.source import LocalSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    SubclassSymbolicContext,
)
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from view_zoo import (
    JAGGED_VIEWS,
    VIEWS,
    Traced,
    aten,
    jagged,
    metadata,
    stub,
    two,
    visited_by_torch,
    visited_by_us,
)

import torch_fakeify as tfk
from torch_fakeify.desc import ListValue, MetaTensorDesc, SymValue, TensorValue, ViewCallDesc
from torch_fakeify.errors import UnsupportedTensorError
from torch_fakeify.exprs import encode_int
from torch_fakeify.view_calls import trace_view_calls
from torch_fakeify.view_replay import replay_view_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

MAX = 2**63 - 1


def trace(t: Any) -> tuple[ViewCallDesc, ...]:
    """The calls of a view whose operators were given no tensors and no symbols."""

    def none(_: object) -> Any:
        raise AssertionError

    return trace_view_calls(t, part=none, ints=none, where="t")


def check(t: Any) -> None:
    """The replay visits what torch's view function visits, in its order, and gives the same."""
    traced = Traced(t)
    expected_ints, expected_tensors, expected = visited_by_torch(t)
    ints, tensors, result = visited_by_us(traced)
    # Nested ints are compared by text: torch wraps each into a new object.
    assert list(map(str, ints)) == list(map(str, expected_ints))
    assert [id(part) for part in tensors] == [id(part) for part in expected_tensors]
    assert metadata(result) == metadata(expected) == metadata(t)


# --- equal to torch's own view function ---------------------------------------------------------


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_a_subclass(name: str) -> None:
    """Numbers, order and result are those of the C++ view function."""
    check(VIEWS[name](two(4, 6)))


@pytest.mark.parametrize("name", VIEWS)
def test_dense_views_with_a_view_function(name: str) -> None:
    """The same for dense tensors, where torch is told to keep view functions."""
    with torch.autograd._force_original_view_tracking(True):
        check(VIEWS[name](torch.zeros(4, 6)))


@pytest.mark.parametrize("name", JAGGED_VIEWS)
def test_jagged_views(name: str) -> None:
    """The same between dense and jagged tensors, with the tensors that the operators were given."""
    check(JAGGED_VIEWS[name]())


@pytest.mark.parametrize("name", VIEWS)
def test_dense_views_without_a_view_function(name: str) -> None:
    """Torch makes those by as_strided, as far as no other operator is needed."""
    base = torch.zeros(4, 6)
    t = VIEWS[name](base)
    assert metadata(Traced(t).replay()) == metadata(t)


def test_a_dense_view_is_one_as_strided() -> None:
    """However many operators made it: torch keeps no view function there."""
    t = torch.zeros(4, 6)[1:].t().unsqueeze(0)
    sizes = [ListValue(items=(1, 6, 3)), ListValue(items=(6, 1, 6)), 6]
    assert trace(t) == (ViewCallDesc(op="aten.as_strided.default", args=tuple(sizes)),)


_Step = tuple[str, Any]


@st.composite
def chains(draw: st.DrawFn, dtype: torch.dtype) -> list[_Step]:
    """Names and arguments of view operators that fit one another, for a base of size (4, 6, 2)."""
    probe = torch.zeros(4, 6, 2, dtype=dtype)
    steps: list[_Step] = []
    for _ in range(draw(st.integers(1, 5))):
        choices: list[_Step] = [("unsqueeze", 0), ("alias", None), ("neg", None)]
        if probe.dim():
            dim = draw(st.integers(-probe.dim(), probe.dim() - 1))
            n = probe.size(dim)
            choices += [("unbind", (dim, n - 1))] if n else []
            choices += [("select", (dim, draw(st.integers(-n, n - 1))))] if n else []
            choices += [("split", (dim, draw(st.integers(1, n))))] if n else []
            start = draw(st.integers(-n - 1, n + 1))
            choices += [("slice", (dim, start, start + draw(st.integers(0, 4)), 2))]
            choices += [("transpose", (dim, 0)), ("flatten", None), ("diagonal", dim)]
            choices += [("expand", draw(st.integers(1, 3))), ("conj", None), ("real", None)]
        step = draw(st.sampled_from(choices))
        after = _apply(probe, step)
        if after is not None:
            probe = after
            steps.append(step)
    return steps


def _apply(t: Any, step: _Step) -> Any:
    name, data = step
    match name:
        case "unsqueeze":
            return t.unsqueeze(data)
        case "alias":
            return aten.alias(t)
        case "neg":
            return torch._neg_view(t)
        case "unbind":
            return t.unbind(data[0])[data[1]]
        case "select":
            return t.select(*data)
        case "split":
            return t.split(data[1], data[0])[-1]
        case "slice":
            return aten.slice.Tensor(t, *data)
        case "transpose":
            return t.transpose(*data)
        case "flatten":
            return t.view(-1) if t.is_contiguous() else None
        case "diagonal":
            return t.diagonal(0, 0, 1) if t.dim() > 1 else None
        case "expand":
            return t.unsqueeze(0).expand(data, *t.size())
        case "conj":
            return torch._conj(t) if t.dtype.is_complex else None
        case "real":
            if t.dtype.is_complex:
                return None if t.is_conj() else torch.view_as_real(t)
            fits = t.dim() and t.size(-1) == 2 and t.stride(-1) == 1 and t.storage_offset() % 2 == 0
            fits = fits and all(n % 2 == 0 for n in t.stride()[:-1]) and not t.is_neg()
            return torch.view_as_complex(t) if fits else None
        case _:
            raise AssertionError(name)


DTYPES = (torch.float32, torch.complex64)


@given(st.sampled_from(DTYPES).flatmap(lambda dtype: st.tuples(st.just(dtype), chains(dtype))))
def test_any_chain(case: tuple[torch.dtype, list[_Step]]) -> None:
    """Any chain of view operators on a subclass and on a dense tensor."""
    dtype, steps = case
    for base in (two(4, 6, 2, dtype=dtype), torch.zeros(4, 6, 2, dtype=dtype)):
        with torch.autograd._force_original_view_tracking(True):
            t: Any = base
            for step in steps:
                t = _apply(t, step)
        if t._is_view():
            assert t._base is base
            check(t)
    t = base = torch.zeros(4, 6, 2, dtype=dtype)
    for step in steps:
        t = _apply(t, step)
    if t._is_view():
        assert metadata(Traced(t).replay()) == metadata(t)


# --- the same fakes, symbols and guards as torch's converter --------------------------------------


class OurViewFunc(meta_utils.ViewFunc[Any]):
    """A view function that has gone through records, for torch's own converter."""

    def __init__(self, t: Any) -> None:
        self.traced = Traced(t) if t._is_view() else None

    def apply(
        self,
        t: Any,
        new_base: Any,
        symint_visitor_fn: Any = None,
        tensor_visitor_fn: Any = None,
    ) -> Any:
        """Replays."""
        assert self.traced is not None
        return self.traced.replay(new_base, symint_visitor_fn, tensor_visitor_fn)


def first_dim_dynamic(t: Any, dynamic: DimDynamic) -> Any:
    """A context by which the first dim of each tensor in it is dynamic and no other."""
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


def fake_state(t: Any, dynamic: DimDynamic | None) -> dict[str, Any]:
    """The fake that torch makes of a tensor, and all that its ShapeEnv then knows."""
    env = ShapeEnv()
    context = None if dynamic is None else first_dim_dynamic(t, dynamic)
    fake: Any = FakeTensorMode(shape_env=env).from_tensor(
        t, source=LocalSource("t"), symbolic_context=context
    )
    return {
        "fake": str(metadata(fake)),
        "guards": [str(guard.expr) for guard in env.guards],
        "hints": str(env.backed_var_to_val),
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
def test_symbols_and_guards_are_torchs(
    name: str, dynamic: DimDynamic | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's converter makes the same of our replay as of its own view function."""
    t = SYMBOLIC[name]()
    expected = fake_state(t, dynamic)
    monkeypatch.setattr(meta_utils.ViewFunc, "from_tensor", staticmethod(OurViewFunc))
    assert fake_state(t, dynamic) == expected


def test_a_dynamic_dim_stays_dynamic(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view of sizes (t.size(0), 3, 5) does not fix the first dim."""
    monkeypatch.setattr(meta_utils.ViewFunc, "from_tensor", staticmethod(OurViewFunc))
    env = ShapeEnv()
    t = two(4, 15)
    view = t.view(t.size(0), 3, 5)
    fake = FakeTensorMode(shape_env=env).from_tensor(
        view,
        source=LocalSource("t"),
        symbolic_context=first_dim_dynamic(view, DimDynamic.DUCK),
    )
    symbol = fake.size(0).node.expr
    assert symbol.is_Symbol
    assert fake.size()[1:] == (3, 5)
    assert env.guards
    others = {key: hint for key, hint in env.backed_var_to_val.items() if key != symbol}
    for n in range(2, 20):
        assert all(guard.expr.subs({**others, symbol: n}) == True for guard in env.guards)  # noqa: E712


# --- records -------------------------------------------------------------------------------------


def test_a_chain_as_records() -> None:
    """Operators with their overloads, arguments without the viewed tensor."""
    assert trace(two(4, 6)[1:].t().select(0, -1)) == (
        ViewCallDesc(op="aten.slice.Tensor", args=(0, 1, MAX)),
        ViewCallDesc(op="aten.t.default"),
        ViewCallDesc(op="aten.select.int", args=(0, -1)),
    )


def test_outputs_as_records() -> None:
    """Of several results the record says which one goes on."""
    assert trace(two(4, 6).split(2)[1].unbind(1)[3]) == (
        ViewCallDesc(op="aten.split.Tensor", args=(2,), output=1),
        ViewCallDesc(op="aten.unbind.int", args=(1,), output=3),
    )


def test_names_as_records() -> None:
    """Keyword-only arguments stand by name."""
    t = aten.expand.default(two(4, 6), (2, 4, 6), implicit=True)
    assert trace(t) == (
        ViewCallDesc(
            op="aten.expand.default",
            args=(ListValue(items=(2, 4, 6)),),
            kwargs=(("implicit", True),),
        ),
    )


def test_tensors_as_records() -> None:
    """The offsets are the record that describes them; what was not given is left out."""
    t = jagged()
    traced = Traced(t)
    assert traced.calls == (
        ViewCallDesc(
            op="aten._nested_view_from_jagged.default",
            args=(TensorValue(tensor=stub(0)), TensorValue(tensor=stub(1))),
        ),
    )
    assert traced.tensors[0] is t._offsets


def test_symbols_as_records() -> None:
    """The numbers of a fake tensor's view operators are symbolic where they were."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = mode.from_tensor(two(4, 15), source=LocalSource("t"))
    n = fake.size(0)
    calls = trace_view_calls(fake.view(n, 3, 5), part=lambda _: stub(0), ints=encode_int, where="t")
    (sizes,) = calls[0].args
    assert isinstance(sizes, ListValue)
    assert sizes.items[1:] == (3, 5)
    assert sizes.items[0] == SymValue(sym=encode_int(n))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", JAGGED_VIEWS)
def test_records_cross_the_boundary(name: str) -> None:
    """View calls come back equal from bytes."""
    t = JAGGED_VIEWS[name]()
    d = MetaTensorDesc(
        id=99,
        dtype="float32",
        device="cpu",
        size=(),
        stride=(),
        is_view=True,
        base=stub(98),
        view_calls=Traced(t).calls,
    )
    assert tfk.loads(tfk.dumps(d)) == d


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
def test_in_place_view_operators(name: str) -> None:
    """They change a tensor behind its view function: an as_strided carries what they did."""
    t: Any = IN_PLACE[name](two(4, 6)[1:])
    assert metadata(visited_by_torch(t)[2]) != metadata(t)
    traced = Traced(t)
    assert traced.calls[-1].op == "aten.as_strided.default"
    assert metadata(traced.replay()) == metadata(t)


class Reshape(torch.autograd.Function):
    """A view made in an autograd function."""

    @staticmethod
    def forward(_: Any, x: Any) -> Any:
        """Flattens."""
        return x.view(-1)

    @staticmethod
    def backward(_: Any, g: Any) -> Any:
        """Shapes back."""
        return g.view(4, 6)


class Same(Reshape):
    """A function that gives its input, of which torch makes a view."""

    @staticmethod
    def forward(_: Any, x: Any) -> Any:
        """Gives the input."""
        return x


@pytest.mark.parametrize("function", [Reshape, Same])
@pytest.mark.parametrize("dense", [True, False])
def test_views_made_in_an_autograd_function(function: Any, dense: bool) -> None:
    """They have a view function as others have."""
    base = torch.zeros(4, 6, requires_grad=True) if dense else two(4, 6, grad=True)
    for t in (function.apply(base), function.apply(base)[1:]):
        traced = Traced(t)
        assert metadata(traced.replay()) == metadata(t)
        if not dense:
            check(t)


class Stubborn(TwoTensor):
    """A subclass that does not know slices."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Refuses a slice when it is asked to."""
        if func is aten.slice.Tensor and cls.refuses:
            raise TypeError("no slices today. Try again tomorrow")
        return super().__torch_dispatch__(func, types, args, kwargs)

    refuses = False


def test_a_view_function_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """An as_strided of the base takes its place."""
    t: Any = Stubborn(torch.zeros(4, 6), torch.zeros(4, 6))[1:]
    monkeypatch.setattr(Stubborn, "refuses", True)
    (call,) = trace(t)
    assert call.op == "aten.as_strided.default"
    assert metadata(replay_view_calls((call,), t._base, where="t")) == metadata(t)


def test_no_view() -> None:
    """A tensor without a base has no view function."""
    with pytest.raises(UnsupportedTensorError) as caught:
        trace(torch.zeros(3))
    assert str(caught.value) == "t: the tensor is no view; expected a tensor with a `_base`"


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_views_of_sparse_tensors_are_refused() -> None:
    """Torch has no way to make the values of a CSR tensor again; its own converter fails too."""
    t = torch.eye(3).to_sparse_csr().values()
    with pytest.raises(UnsupportedTensorError) as caught:
        trace(t)
    assert str(caught.value) == (
        "t: the view function does not make the tensor; expected view operators that give it of "
        "its base; found NotImplementedError: Could not run 'aten::as_strided' with arguments from "
        "the 'SparseCsrCPU' backend. Describe its clone(), which is no view"
    )


def test_a_tensor_that_no_operator_gives() -> None:
    """An inner tensor that was put in by hand is no view of the base's."""
    t = two(4, 6)[1:]
    t.a = torch.zeros(3, 5)
    with pytest.raises(UnsupportedTensorError) as caught:
        trace(t)
    assert str(caught.value) == (
        "t: the view function does not make the tensor; expected view operators that give it of "
        "its base; found a tensor that differs from it. Describe its clone(), which is no view"
    )


def test_operators_of_other_packages() -> None:
    """A view made by a user's operator has no view function: dense, it is an as_strided."""
    with torch.library._scoped_library("tfk_views", "DEF") as library:
        library.define("flat(Tensor(a) x) -> Tensor(a)")
        library.impl("flat", lambda x: x.view(-1), "CompositeExplicitAutograd")
        ops: Any = torch.ops
        t = ops.tfk_views.flat(torch.zeros(4, 6))
        (call,) = trace(t)
        assert call.op == "aten.as_strided.default"
        # A record may name it all the same, as long as the operator is registered.
        call = ViewCallDesc(op="tfk_views.flat.default")
        assert replay_view_calls((call,), torch.zeros(2, 3), where="t").size() == (6,)


# --- nothing is left behind -----------------------------------------------------------------------


class SeenOperators(TorchDispatchMode):
    """Notes every operator."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes and runs."""
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class SeenFunctions(TorchFunctionMode):
    """Notes every function."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes and runs."""
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_no_mode_sees_the_trace() -> None:
    """Neither a dispatch mode nor a function mode of the caller's is called."""
    t = two(4, 6)[1:]
    with SeenOperators() as operators, SeenFunctions() as functions:
        trace(t)
    assert operators.seen == []
    assert functions.seen == []


@contextmanager
def inside_vmap() -> Generator[None]:
    """Inside a level of vmap."""
    functorch: Any = torch._C._functorch
    functorch._vmap_increment_nesting(2, "error")
    try:
        yield
    finally:
        functorch._vmap_decrement_nesting()


AMBIENCES: dict[str, Callable[[], Any]] = {
    "fake mode": lambda: FakeTensorMode(),
    "vmap": inside_vmap,
    "inference mode": torch.inference_mode,
    "below autograd": lambda: torch._C._AutoDispatchBelowAutograd(),
    "python dispatcher": lambda: torch._C._EnablePythonDispatcher(),
    "default device": lambda: torch.device("meta"),
    "no grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu"),
}


@pytest.mark.parametrize("ambience", AMBIENCES)
def test_what_is_active_around_the_trace_does_not_matter(ambience: str) -> None:
    """The record is the same in every mode that torch has."""
    for t in (
        two(4, 6, grad=True)[1:].split(2)[0],
        torch.zeros(4, 6)[1:],
        jagged().chunk(2, -1)[1],
    ):
        expected = Traced(t).calls
        with AMBIENCES[ambience]():
            found = Traced(t).calls
        assert found == expected


def autograd_state(t: Any) -> tuple[Any, ...]:
    """What autograd knows of a tensor, and the attributes on it."""
    names = [key for key in vars(t) if key != "_metadata_cache"]
    return (t._version, t.requires_grad, t.is_leaf, t.grad_fn, t._is_view(), names)


@pytest.mark.parametrize("name", VIEWS)
def test_view_and_base_are_untouched(name: str) -> None:
    """Versions, history and attributes stay."""
    for base in (two(4, 6, grad=True).mul(1), torch.zeros(4, 6, requires_grad=True).mul(1)):
        t = VIEWS[name](base)
        before = [autograd_state(x) for x in (t, t._base, base)]
        Traced(t)
        assert [autograd_state(x) for x in (t, t._base, base)] == before


def test_an_inference_tensor_as_base() -> None:
    """A base that was made in inference mode is viewed in inference mode."""
    with torch.inference_mode():
        base = two(4, 6)
    t = base[1:]
    if t._is_view():
        check(t)
    base = two(4, 6)
    dense = torch.zeros(4, 6)
    with torch.inference_mode():
        t = dense[1:]
    assert t._is_view()
    assert metadata(Traced(t).replay()) == metadata(t)
    assert base._version == 0


@pytest.mark.parametrize("name", ["view", "slice", "split", "unbind", "chain"])
def test_the_shape_environment_is_untouched(name: str) -> None:
    """Tracing a fake tensor's view adds no guard, no symbol and no replacement."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    base: Any = mode.from_tensor(two(4, 15), source=LocalSource("t"))
    with env.suppress_guards():  # otherwise the guards that a trace could add are there already
        fake = VIEWS[name](base) if name != "view" else base.view(base.size(0), -1, 3)

    def state() -> tuple[str, ...]:
        known = (env.guards, env.backed_var_to_val, env.replacements, env.var_to_range)
        more = (env.divisible, env.deferred_runtime_asserts, env.pending_fresh_unbacked_symbols)
        return tuple(map(str, known + more))

    before = state()
    calls = trace_view_calls(fake, part=lambda _: stub(0), ints=encode_int, where="t")
    assert calls
    assert state() == before


def test_unbacked_sizes() -> None:
    """The views of a tensor whose size depends on data are traced without a guess."""
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        n = env.create_unbacked_symint()
        torch._check(n >= 2)
        base = TwoTensor(torch.zeros(n, 6), torch.zeros(n, 6))
        t = base.view(n, 2, 3).transpose(0, 1)
    before = (len(env.guards), str(env.deferred_runtime_asserts), str(env.var_to_range))
    calls = trace_view_calls(t, part=lambda _: stub(0), ints=encode_int, where="t")
    assert [call.op for call in calls] == ["aten.view.default", "aten.transpose.int"]
    assert (len(env.guards), str(env.deferred_runtime_asserts), str(env.var_to_range)) == before


@pytest.fixture(scope="module")
def mesh() -> Generator[Any]:
    """A mesh of four processes that does not reach any other."""
    distributed: Any = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("torch was built without distributed")
    with fake_world():
        yield distributed.init_device_mesh("cpu", (4,))


def sharded(mesh: Any) -> Any:
    """A distributed tensor of size (8, 6), two rows on each process."""
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(torch.zeros(2, 6), mesh, [Shard(0)])


DISTRIBUTED: dict[str, Callable[[Any], Any]] = {
    "t": lambda d: d.t(),
    "view": lambda d: d.view(8, 2, 3),
    "slice": lambda d: d[:, 1:],
    "slice of the sharded dim": lambda d: d[1:],
    "split": lambda d: d.split(3, 1)[1],
    "unbind": lambda d: d.unbind(1)[1],
    "chain": lambda d: d.view(8, 2, 3).transpose(0, 1)[1:],
}


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_distributed_tensors(name: str, mesh: Any) -> None:
    """Views of a DTensor; its mesh is in the base."""
    check(DISTRIBUTED[name](sharded(mesh)))


def calls_of_c10d(function: Callable[[], Any]) -> set[str]:
    """The operators on process groups that run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return {event.name for event in profile.events() if event.name.startswith("c10d::")}


def test_no_collective_runs(mesh: Any) -> None:
    """Tracing on one process alone does not wait for the others."""
    base = sharded(mesh)
    t = base[1:]
    assert calls_of_c10d(lambda: base[1:]) != set()
    assert calls_of_c10d(lambda: Traced(t)) == set()


# --- creation meta: whether an in-place operator is an error ---------------------------------------


def under(context: Callable[[], Any], view: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The view, made in a context."""

    def make(base: Any) -> Any:
        with context():
            return view(base)

    return make


CREATED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "slice": ("DEFAULT", lambda b: b[1:]),
    "in-place view": ("DEFAULT", lambda b: b[1:].t_() if not b.is_leaf else b[1:]),
    "requires grad afterwards": ("DEFAULT", lambda b: b[1:].requires_grad_()),
    "unbind": ("MULTI_OUTPUT_NODE", lambda b: b.unbind()[1]),
    "split": ("MULTI_OUTPUT_NODE", lambda b: b.split(2)[1]),
    "split of sizes": ("MULTI_OUTPUT_NODE", lambda b: b.split((1, 3))[1]),
    "chunk": ("MULTI_OUTPUT_NODE", lambda b: b.chunk(2)[0]),
    "view of unbind": ("MULTI_OUTPUT_NODE", lambda b: b.unbind()[1].view(2, 3)),
    "no_grad": ("NO_GRAD_MODE", under(torch.no_grad, lambda b: b[1:])),
    "no_grad, unbind": ("NO_GRAD_MODE", under(torch.no_grad, lambda b: b.unbind()[1])),
    "no_grad, then view": (
        "NO_GRAD_MODE",
        lambda b: under(torch.no_grad, lambda c: c[1:])(b).view(-1),
    ),
    "no_grad, requires grad afterwards": (
        "NO_GRAD_MODE",
        lambda b: under(torch.no_grad, lambda c: c[1:])(b).requires_grad_(),
    ),
    "inference": ("INFERENCE_MODE", under(torch.inference_mode, lambda b: b[1:])),
    "inference, unbind": ("INFERENCE_MODE", under(torch.inference_mode, lambda b: b.unbind()[1])),
    "autograd function": ("IN_CUSTOM_FUNCTION", Reshape.apply),
    "autograd function, then view": ("IN_CUSTOM_FUNCTION", lambda b: Reshape.apply(b)[1:]),
}

IN_PLACE_USES: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda t: t.mul_(2),
    "copy_": lambda t: t.copy_(torch.zeros(())),
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    "detach_": lambda t: t.detach_(),
    "requires_grad_": lambda t: t.requires_grad_(),
    "mul_ of a view of it": lambda t: t[...].mul_(2),
    "mul_ after the base's": lambda t: (t._base.mul_(2), t.mul_(2)),
    "grad_fn after the base's mul_": lambda t: (t._base.mul_(2), t.grad_fn),
}

BASES: dict[str, Callable[[], Any]] = {
    "without grad": lambda: torch.zeros(4, 6),
    "leaf": lambda: torch.zeros(4, 6, requires_grad=True),
    "non-leaf": lambda: torch.zeros(4, 6, requires_grad=True).mul(1),
}


def outcome(use: Callable[[Any], Any], t: Any) -> tuple[str, str] | None:
    """What a use of a tensor raises, without the name of the function that made the view."""
    try:
        use(t)
    except Exception as error:  # noqa: BLE001
        return type(error).__name__, re.sub(
            r"Output \d+ of \w+", "Output of a function", str(error)
        )
    return None


def test_every_creation_meta_is_in_the_table() -> None:
    """Torch has no other ways for a view to come to be."""
    members: Any = torch._C._autograd.CreationMeta
    assert set(members.__members__) == {meta for meta, _ in CREATED.values()}


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", CREATED)
def test_in_place_operators_err_as_on_the_real_tensor(name: str, base: str, symbolic: bool) -> None:
    """The rebuilt view knows how it came to be: same exception, same text."""
    creation_meta, make = CREATED[name]
    grad_free = base == "without grad"
    for use_name, use in IN_PLACE_USES.items():
        # One mode of gradients with symbols is enough: autograd sees the same tensors.
        for context in (nullcontext,) if symbolic else (nullcontext, torch.no_grad):
            t = make(BASES[base]())
            found = torch._C._autograd._get_creation_meta(t).name
            assert found == creation_meta or grad_free
            mode = FakeTensorMode(shape_env=ShapeEnv() if symbolic else None)
            fake = tfk.MetaConverter(mode).from_desc(tfk.loads(tfk.dumps(tfk.describe_tensor(t))))
            assert torch._C._autograd._get_creation_meta(fake).name == found
            with context():
                expected = outcome(use, t)
                with mode:
                    assert outcome(use, fake) == expected, use_name
