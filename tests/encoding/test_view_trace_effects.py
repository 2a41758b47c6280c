"""Tracing view operators has no side effects; creation metas of views."""

from __future__ import annotations

import re
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from subclass_zoo import fake_world
from torch._dynamo.source import LocalSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from view_zoo import VIEWS, Reshape, Traced, check, jagged, metadata, stub, trace, two

import torch_fakeify as tfk
from torch_fakeify.encoding.exprs import encode_int
from torch_fakeify.encoding.views.trace import trace_view_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


def test_no_mode_sees_the_trace() -> None:
    """Neither a dispatch mode nor a function mode of the caller is called."""
    seen: list[Any] = []

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Functions(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    t = two(4, 6)[1:]
    with Operators(), Functions():
        trace(t)
        assert seen == []
        torch.ones(2)
    assert len(seen) > 1


@contextmanager
def inside_vmap() -> Generator[None]:
    """Enter a level of vmap."""
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
def test_active_modes_do_not_change_the_trace(ambience: str) -> None:
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
    """Return the autograd state of a tensor, and its attributes."""
    names = [key for key in vars(t) if key != "_metadata_cache"]
    return (t._version, t.requires_grad, t.is_leaf, t.grad_fn, t._is_view(), names)


@pytest.mark.parametrize("name", VIEWS)
def test_view_and_base_are_not_changed(name: str) -> None:
    """Versions, history and attributes are the same before and after."""
    for base in (two(4, 6, grad=True).mul(1), torch.zeros(4, 6, requires_grad=True).mul(1)):
        t = VIEWS[name](base)
        before = [autograd_state(x) for x in (t, t._base, base)]
        Traced(t)
        assert [autograd_state(x) for x in (t, t._base, base)] == before


def test_an_inference_tensor_may_be_the_base() -> None:
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


def state(env: Any) -> str:
    """Return what a ShapeEnv knows, as text."""
    facts = (
        "guards backed_var_to_val replacements var_to_range divisible deferred_runtime_asserts "
        "pending_fresh_unbacked_symbols"
    )
    return str([getattr(env, name) for name in facts.split()])


@pytest.mark.parametrize("name", ["view", "slice", "split", "unbind", "chain", "unbacked"])
def test_the_shape_environment_is_not_changed(name: str) -> None:
    """Tracing a fake tensor's view adds no guard, symbol or replacement, also for sizes from data."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    if name == "unbacked":
        with mode:
            n = env.create_unbacked_symint()
            torch._check(n >= 2)
            t: Any = TwoTensor(torch.zeros(n, 6), torch.zeros(n, 6)).view(n, 2, 3).transpose(0, 1)
    else:
        base: Any = mode.from_tensor(two(4, 15), source=LocalSource("t"))
        with env.suppress_guards():  # otherwise the guards that a trace could add exist already
            t = VIEWS[name](base) if name != "view" else base.view(base.size(0), -1, 3)
    before = state(env)
    calls = trace_view_calls(t, part=lambda _: stub(0), ints=encode_int, where="t")
    if name == "unbacked":
        assert [call.op for call in calls] == ["aten.view.default", "aten.transpose.int"]
    assert calls
    assert state(env) == before


@pytest.fixture(scope="module")
def mesh() -> Generator[Any]:
    """A mesh of four processes that reaches no other process."""
    distributed: Any = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("torch was built without distributed")
    with fake_world():
        yield distributed.init_device_mesh("cpu", (4,))


def sharded(mesh: Any) -> Any:
    """Return a distributed tensor of size (8, 6), two rows on each process."""
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
def test_views_of_distributed_tensors_are_traced(name: str, mesh: Any) -> None:
    """The mesh of a DTensor's view is in its base."""
    check(DISTRIBUTED[name](sharded(mesh)))


def test_no_collective_runs(mesh: Any) -> None:
    """Tracing on one process does not wait for the others."""

    def runs_some(function: Callable[[], Any]) -> bool:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            function()
        return any(event.name.startswith("c10d::") for event in profile.events())

    base = sharded(mesh)
    t = base[1:]
    assert runs_some(lambda: base[1:])
    assert not runs_some(lambda: Traced(t))


def under(context: Callable[[], Any], view: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a maker of the view in a context."""

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
    """Return the exception of a use of a tensor, without the function that made the view."""
    try:
        use(t)
    except Exception as error:  # noqa: BLE001
        return type(error).__name__, re.sub(
            r"Output \d+ of \w+", "Output of a function", str(error)
        )
    return None


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", CREATED)
def test_in_place_operators_raise_as_on_the_real_tensor(
    name: str, base: str, symbolic: bool
) -> None:
    """The rebuilt view has its creation meta, of which none of torch's is missing here."""
    assert set(torch._C._autograd.CreationMeta.__members__) == {
        meta for meta, _ in CREATED.values()
    }
    creation_meta, make = CREATED[name]
    grad_free = base == "without grad"
    for use_name, use in IN_PLACE_USES.items():
        # One mode of gradients with symbols is enough: autograd gets the same tensors.
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
