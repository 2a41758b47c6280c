"""The drop-in: what torch's converter and describer give, ours give in their place."""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._subclasses.meta_utils as meta_utils
from converted_checks import assert_same, contexts, in_place
from dropin_kinds import (
    KINDS,
    OURS,
    both,
    told,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import tensor_groups
from tensor_facts import relations
from torch._dynamo.source import AttrSource, LocalSource
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    SubclassSymbolicContext,
)
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from torch_fakeify import dropin

if TYPE_CHECKING:
    from collections.abc import Callable

# torch's own describer asks for the gradient of non-leaves.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]


# --- descriptions and events --------------------------------------------------------------------


class Events(logging.Handler):
    """Collects what torch's structured trace is told."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []
        self.setFormatter(logging.Formatter())

    def emit(self, record: Any) -> None:
        """Keeps what was said, without the describer's number and the time."""
        said = {
            key: {k: v for k, v in value.items() if k != "describer_id"}
            for key, value in record.metadata.items()
            if key.startswith("describe_")
        }
        if said:
            self.found.append(said)


def traced(function: Callable[[], Any]) -> list[Any]:
    """The events that are written while the function runs."""
    logger = logging.getLogger("torch.__trace")
    handler = Events()
    logger.addHandler(handler)
    try:
        function()
    finally:
        logger.removeHandler(handler)
    return handler.found


@pytest.mark.parametrize("kind", KINDS)
def test_events_are_torchs(kind: str) -> None:
    """The trace events of a tensor are torch's: the same fields in the same order, and once."""
    t = KINDS[kind]()

    def events() -> list[Any]:
        describer = meta_utils.MetaTensorDescriber()
        found = traced(lambda: describer.describe_tensor(t, trace=True))
        again = traced(lambda: describer.describe_tensor(t, trace=True))
        if not meta_utils.is_sparse_compressed(t):  # its components are other tensors each time
            assert again == []
            assert describer.traced_tensors == set(describer.lookup_tensor.values())
        return [list(event.items()) for event in found]

    ours, theirs = both(events)
    # Functional tensors have another inside each time they are asked.
    ours, theirs = ([re.sub("0x[0-9a-f]+", "#", str(e)) for e in found] for found in (ours, theirs))
    assert ours == theirs
    assert len(ours) >= 1


def test_source_event() -> None:
    """A tensor with a source is said to be it, unless the caller has said so before."""
    t = torch.empty(3)

    def events() -> list[Any]:
        mode = FakeTensorMode()
        return traced(lambda: mode.from_tensor(t, source=LocalSource("x"))) + traced(
            lambda: mode.from_tensor(torch.empty(2), source=LocalSource("y"), trace=False)
        )

    ours, theirs = both(events)
    assert ours == theirs
    assert ours[-1] == {"describe_source": {"id": 0, "source": "L['x']"}}


def test_descriptions_are_dataclasses() -> None:
    """``replace``, ``shape``, equality and JSON work as on torch's."""
    d = OURS["MetaTensorDescriber"]().describe_tensor(torch.empty(3, 4)[1:])
    other = dataclasses.replace(d, fake_mode=None, ndim=7)
    assert (other.ndim, other.base, other.is_view, other.shape) == (7, d.base, True, (2, 4))
    assert dataclasses.replace(d) == d
    assert other != d
    assert d.as_json(5)["describer_id"] == 5
    assert d.base.storage is not d.storage
    assert d.base.storage == d.storage
    with pytest.raises(dataclasses.FrozenInstanceError):
        d.ndim = 3


# --- conversion ---------------------------------------------------------------------------------


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_equal_torchs(kind: str, symbolic: bool) -> None:
    """A tensor of each kind becomes what torch makes of it, or the same exception."""
    t = KINDS[kind]()
    envs: list[ShapeEnv] = []

    def make() -> Any:
        mode = FakeTensorMode(shape_env=ShapeEnv() if symbolic else None)
        envs.append(mode.shape_env)
        fake = mode.from_tensor(t)
        converter = mode.fake_tensor_converter.meta_converter
        counts = converter.hit, converter.miss, converter.arg_cnt, converter.successful()
        assert mode.from_tensor(t) is fake
        return told(fake), counts, len(converter.tensor_memo), len(converter.storage_memo)

    ours, theirs = both(make)
    assert ours == theirs
    if symbolic:
        envs[0].check_equal(envs[1])


def dynamic(t: Any, source: Any) -> Any:
    """The policy by which every dim of a tensor, of its base and of its inner tensors is dynamic."""
    base = dynamic(t._base, AttrSource(source, "_base")) if t._is_view() else None
    dims = [DimDynamic.DYNAMIC] * t.dim()
    if not is_traceable_wrapper_subclass(t):
        return StatelessSymbolicContext(dynamic_sizes=dims, view_base_context=base)
    parts = {name: getattr(t, name) for name in t.__tensor_flatten__()[0]}
    return SubclassSymbolicContext(
        dynamic_sizes=dims,
        constraint_sizes=[None] * t.dim(),
        view_base_context=base,
        tensor_source=source,
        inner_contexts={name: dynamic(p, AttrSource(source, name)) for name, p in parts.items()},
    )


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"nested"}))  # it has no sizes
def test_dynamic_kinds_equal_torchs(kind: str) -> None:
    """With every dim dynamic a tensor of each kind has torch's symbols, at all depths."""
    t, source = KINDS[kind](), LocalSource("x")
    policy = dynamic(t, source)
    envs: list[Any] = []

    def make() -> Any:
        envs.append(ShapeEnv())
        fake = FakeTensorMode(shape_env=envs[-1]).from_tensor(
            t, source=source, symbolic_context=policy
        )
        return told(fake)

    ours, theirs = both(make)
    assert ours == theirs
    envs[0].check_equal(envs[1])
    assert [str(g.expr) for g in envs[0].guards] == [str(g.expr) for g in envs[1].guards]


class Below(TorchDispatchMode):
    """Does some work where operators are dispatched to Python, below autograd."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self.work = work
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Does the work once, and what was asked for."""
        if not self.found:
            self.found.append(self.work())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("place", ["no_grad", "inference", "below autograd"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_active_says_nothing(kind: str, place: str) -> None:
    """The modes around a conversion change its result no more than they change torch's."""
    t = KINDS[kind]()

    def work() -> Any:
        return told(FakeTensorMode(shape_env=ShapeEnv()).from_tensor(t))

    def make() -> Any:
        if place == "below autograd":
            with Below(work) as below:
                torch.ones(2, requires_grad=True).sin()
            return below.found
        with torch.no_grad() if place == "no_grad" else torch.inference_mode():
            return work()

    ours, theirs = both(make)
    assert ours == theirs


@settings(max_examples=40)
@given(st.data(), tensor_groups(marks=True), st.booleans())
def test_groups_equal_torchs(data: Any, group: list[torch.Tensor], static: bool) -> None:
    """Tensors that share storages and bases, under any policy: equal fakes, equal ShapeEnvs."""
    sources = [LocalSource(f"x{i}") for i in range(len(group))]
    policies = [data.draw(contexts(t, source)) for t, source in zip(group, sources, strict=True)]
    named = data.draw(st.booleans())

    def make() -> Any:
        mode = FakeTensorMode(shape_env=None if static else ShapeEnv())
        fakes = [
            mode.from_tensor(
                t, source=source if named else None, symbolic_context=None if static else policy
            )
            for t, source, policy in zip(group, sources, policies, strict=True)
        ]
        return mode, fakes

    ours, theirs = both(make)
    if isinstance(ours, str) or isinstance(theirs, str):
        assert ours == theirs
        return
    for a, b in zip(ours[1], theirs[1], strict=True):
        assert_same(a, b)
        assert str(a.untyped_storage().nbytes()) == str(b.untyped_storage().nbytes())
    assert relations(ours[1]) == relations(theirs[1])
    if not static:
        ours[0].shape_env.check_equal(theirs[0].shape_env)
    assert [in_place(t) for t in ours[1]] == [in_place(t) for t in theirs[1]]


def test_fakes_of_other_modes() -> None:
    """Fake tensors of this ShapeEnv, of another, and of none: reused, carried over, kept."""
    x = torch.empty(6, 4)

    def make() -> Any:
        here, there = ShapeEnv(), ShapeEnv()
        mode = FakeTensorMode(shape_env=here)
        t = FakeTensorMode(shape_env=there).from_tensor(x, source=LocalSource("x"))
        twin = FakeTensorMode(shape_env=here).from_tensor(x, source=LocalSource("y"))
        static, again = (FakeTensorMode().from_tensor(x) for _ in range(2))
        policy = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
        fakes = [(t, None), (t[1:], None), (twin, None), (static, None), (again, policy)]
        made = [
            mode.fake_tensor_converter.meta_converter(
                fake,
                here,
                callback=lambda m, device: FakeTensor(mode, m(), device),
                source=LocalSource(f"a{i}"),
                symbolic_context=context,
            )
            for i, (fake, context) in enumerate(fakes)
        ]
        return [str((m.shape, m.stride(), m.storage_offset())) for m in made], here

    ours, theirs = both(make)
    assert ours[0] == theirs[0]
    assert "s" not in ours[0][3]
    assert "s" in ours[0][4]
    ours[1].check_equal(theirs[1])


def layers(t: torch.Tensor) -> list[Any]:
    """The wrappers of functorch around a tensor, and what is inside."""
    c = torch._C._functorch
    if not c.is_functorch_wrapped_tensor(t):
        return [told(t)]
    bdim = c.maybe_get_bdim(t)
    grad = t.requires_grad, t.is_leaf
    found = [c.is_batchedtensor(t), c.maybe_get_level(t), bdim, t.shape, grad]
    return [found, *layers(c.get_unwrapped(t))]


def test_functorch() -> None:
    """Batched and grad-tracking tensors become wrapped fakes of the same levels."""

    def make() -> Any:
        found: list[Any] = []
        mode = FakeTensorMode()

        def seen(t: torch.Tensor) -> torch.Tensor:
            try:
                found.append(layers(mode.from_tensor(t)))
            except AssertionError as error:
                found.append(str(error))
            return t.sum()

        torch.vmap(seen, in_dims=1)(torch.randn(3, 4))
        torch.func.grad(seen)(torch.randn(3))
        torch.vmap(torch.func.grad(seen))(torch.randn(3, 4))
        torch.func.functionalize(seen)(torch.randn(3))
        torch.func.grad(torch.func.grad(seen))(torch.tensor(1.0))
        torch.func.grad(torch.func.grad(lambda t: seen(t.sin())))(torch.tensor(1.0))
        torch.func.grad(lambda t: seen(t.sin()))(torch.randn(3))
        with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
            torch.func.grad(lambda t: mode.from_tensor(t[1:]).sum())(torch.randn(4))
        return [*found, str(caught.value).partition("\n")[0]]

    ours, theirs = both(make)
    assert ours == theirs
    assert ours[-1] == "attempted to apply meta conversion to view functorch tensor"
    assert [len(found) for found in ours[:5]] == [2, 2, 3, 2, 3]
    assert ours[-2] == "False != True"  # torch makes no non-leaf of it, and says so


def test_copy_data() -> None:
    """With ``copy_data`` fakes have real tensors with the same data, on shared real storages."""
    x = torch.arange(6.0)
    group = [
        x,
        x.view(2, 3),
        x[2:].detach(),
        torch.eye(2).to_sparse(),
        torch.eye(2).to_sparse_csr(),
    ]

    def make() -> Any:
        mode = FakeTensorMode()
        mode.fake_tensor_converter = fake_tensor.FakeTensorConverter(copy_data=True)
        fakes = [mode.from_tensor(t) for t in group]
        real = [fake.real_tensor for fake in fakes]
        storages = [t.untyped_storage() for t in real[:3] if t is not None]
        assert all(s.data_ptr() != x.untyped_storage().data_ptr() for s in storages)
        own = [getattr(f.untyped_storage(), "real_storage", None) is not None for f in fakes[:3]]
        first = [a.data_ptr() == storages[0].data_ptr() for a in storages]
        return str(real), own, first, [told(f) for f in fakes]

    ours, theirs = both(make)
    assert ours == theirs
    assert "0., 1., 2." in ours[0]
    with dropin.installed():
        mode = FakeTensorMode()
        mode.fake_tensor_converter = fake_tensor.FakeTensorConverter(copy_data=True)
        made = mode.from_tensor(torch.nn.Parameter(torch.ones(3)))
    assert made.real_tensor.tolist() == [1.0, 1.0, 1.0]  # torch leaves it uninitialized


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"no bytes"}))  # torch crashes at that
def test_real_tensors_equal_torchs(kind: str) -> None:
    """With real tensors propagated, fakes of each kind have the real tensors that torch gives them."""
    t = KINDS[kind]()

    def make() -> Any:
        with torch._functorch.config.patch(fake_tensor_propagate_real_tensors=True):
            mode = FakeTensorMode(shape_env=ShapeEnv())
        fake: Any = mode.from_tensor(t, source=LocalSource("x"))
        real = getattr(fake, "real_tensor", None)
        if real is None or real.layout is not torch.strided:
            return told(fake), None if real is None else (real.shape, real.layout)
        storage = fake.untyped_storage().real_storage.data_ptr()
        place = real.stride(), real.storage_offset(), real.untyped_storage().data_ptr() == storage
        return told(fake), real.shape, place

    ours, theirs = both(make)
    assert ours == theirs


def test_real_tensor_of_a_freed_storage() -> None:
    """Data that was freed is not copied; torch reads it and crashes."""
    with dropin.installed(), torch._functorch.config.patch(fake_tensor_propagate_real_tensors=True):
        fake: Any = FakeTensorMode().from_tensor(KINDS["no bytes"]())
    assert fake.real_tensor.shape == (4,)


def test_without_a_mode() -> None:
    """A converter of its own makes meta tensors; what is no tensor it gives back or refuses."""

    class Like:
        def __torch_function__(self, *args: Any, **kwargs: Any) -> Any: ...

    def make() -> Any:
        converter = meta_utils.MetaConverter()
        x = torch.empty(4, 3, requires_grad=True)
        made = [converter(x), converter(x[1:]), converter(x), converter(3), converter(Like())]
        assert converter.get_tensor_memo(converter.describer.describe_tensor(x)) is made[0]
        assert made[1]._base is made[0]
        return [told(m) for m in made], converter.hit, converter.miss, converter.arg_cnt

    ours, theirs = both(make)
    assert ours == theirs
    assert ours[0][3:] == ["3", "NotImplemented"]


def test_dispatch_must_be_on() -> None:
    """Where dispatch to Python is off, conversion says so instead of crashing."""

    def make() -> Any:
        with torch.utils._mode_utils.no_dispatch():
            meta_utils.MetaConverter()(torch.empty(2))

    ours, theirs = both(make)
    assert ours == theirs
    assert ours.startswith("AssertionError:  This indicates you set no_dispatch()")


def test_callback_must_detach() -> None:
    """A callback whose tensors have a history is refused."""
    x = torch.empty(2, requires_grad=True)

    def make() -> Any:
        meta_utils.MetaConverter()(torch.empty(2), callback=lambda m, device: m() + x.to("meta"))

    ours, theirs = both(make)
    assert ours == theirs == "AssertionError: the callback you passed in doesn't detach"
