"""After a handoff: no reference to the old state, the context as found, and cache hits."""

from __future__ import annotations

import functools
import gc
import json
import sys
import weakref
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from observe import Run, backend_of, env_of_frame
from processes import piped
from torch._dynamo.utils import counters
from torch._guards import TracingContext
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

INFERENCE = pytest.param(False, marks=pytest.mark.sweep)
INDUCTOR = pytest.param("inductor", marks=pytest.mark.sweep)


def sines(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Compute with guards, a view and a size in the graph."""
    return (x.flatten() + y).sin() * x.shape[0] if x.shape[0] > 2 else x


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Multiply matrices, which inductor compiles without a C++ compiler."""
    return (x @ w) @ w


# --- the old state is not used --------------------------------------------------------------------


class OldEnv(ShapeEnv):
    """A ``ShapeEnv`` that must not be used any more."""

    def __getattribute__(self, name: str) -> Any:
        """Raise for any attribute."""
        if name.startswith("__"):
            return super().__getattribute__(name)
        raise AssertionError(f"{name} of the old ShapeEnv")


class OldMode(FakeTensorMode):
    """A ``FakeTensorMode`` that must not be used any more."""

    def __getattribute__(self, name: str) -> Any:
        """Raise for any attribute."""
        if name in ("__class__", "__dict__"):
            return super().__getattribute__(name)
        raise AssertionError(f"{name} of the old FakeTensorMode")


@contextmanager
def poisoned(env: Any, modes: list[Any]) -> Iterator[None]:
    """Make any use of an environment and of modes raise within a block."""
    env.__class__ = OldEnv
    for mode in modes:
        mode.__class__ = OldMode
    try:
        yield
    finally:
        env.__class__ = ShapeEnv
        for mode in modes:
            mode.__class__ = FakeTensorMode


class Old:
    """The state that Dynamo has traced with, at the call of a backend."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        self.env = env_of_frame()
        values = (n.meta.get("example_value") for n in gm.graph.nodes)
        self.fakes = [value for value in values if isinstance(value, torch.Tensor)]
        modes = [fake.fake_mode for fake in self.fakes]  # type: ignore[attr-defined]
        context = TracingContext.get()
        self.modes = list({id(mode): mode for mode in (*modes, context.fake_mode)}.values())


def watched(backend: Any, states: list[Old]) -> Callable[..., Any]:
    """Return a handoff to a backend during which a use of the old state raises."""

    def inner(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        with poisoned(states[-1].env, states[-1].modes):
            return backend_of(backend)(gm, inputs)

    def outer(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        states.append(Old(gm))
        return tfk.handoff(inner)(gm, inputs)

    return outer


@contextmanager
def without_caches() -> Iterator[None]:
    """Lower every graph."""
    with (
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._inductor.config.patch(fx_graph_cache=False),
    ):
        yield


@pytest.mark.parametrize("train", [INFERENCE, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    ("backend", "fn", "sizes"),
    [
        ("aot_eager", sines, ((3, 4), (12,))),
        ("inductor", product, ((5, 3), (3, 3))),
        pytest.param("inductor", sines, ((3, 4), (12,)), marks=pytest.mark.sweep),
    ],
)
def test_the_old_state_is_not_used(
    backend: str, fn: Any, sizes: tuple[tuple[int, ...], ...], train: bool
) -> None:
    """Neither the compilation nor the compiled code nor its backward use it."""
    states: list[Old] = []
    run = Run.of(fn, watched(backend, states), dynamic=True)
    x, y = (torch.randn(size, requires_grad=train) for size in sizes)
    with without_caches():
        run(x, y)
        (old,) = states
        with poisoned(old.env, old.modes):
            out = run(x, y)
            if train:
                out.sum().backward()
    torch.testing.assert_close(out, fn(x, y))
    if train:
        assert x.grad is not None
        ours = x.grad.clone()
        torch.testing.assert_close(ours, torch.autograd.grad(fn(x, y).sum(), x)[0])
    assert len(states) == 1


def test_a_use_of_the_old_state_raises() -> None:
    """The direct backend uses the old state, so the poisoned state raises."""
    states: list[Old] = []

    def direct(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        states.append(Old(gm))
        with poisoned(states[-1].env, states[-1].modes):
            return backend_of("aot_eager")(gm, inputs)

    with pytest.raises(Exception, match="of the old "):
        Run.of(sines, direct, dynamic=True)(torch.randn(3, 4), torch.randn(12))


# --- no reference to the old state ----------------------------------------------------------------


def forget() -> None:
    """Clear torch's caches of questions and of operators, which hold environments."""
    FakeTensorMode.cache_clear()
    for one in question_caches():
        one.cache_clear()
    for _ in range(2):  # C++ frees an object only after its owner
        gc.collect()


@functools.cache
def question_caches() -> list[Any]:
    """Return the caches of the methods of ``ShapeEnv``."""
    found = [o for o in gc.get_objects() if type(o) is functools._lru_cache_wrapper]
    return [one for one in found if "symbolic_shapes" in (one.__module__ or "")]


class Watch:
    """A backend with weak references to its arguments."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend_of(backend)
        self.alive: dict[str, list[Any]] = {}

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """Make the references, and compile."""
        values = [n.meta.get("example_value") for n in gm.graph.nodes]
        context = TracingContext.get()
        noted = {
            "real tensors": inputs,
            "fake tensors": values,
            "mode": [context.fake_mode],
            "environment": [env_of_frame()],
            "context": [context],
            "graph": [gm],
        }
        self.alive = {
            what: [weakref.ref(o) for o in objects if not isinstance(o, (torch.SymInt, type(None)))]
            for what, objects in noted.items()
        }
        return self.backend(gm, inputs)

    def living(self) -> set[str]:
        """Return the kinds of objects that are still alive."""
        return {what for what, refs in self.alive.items() if any(ref() is not None for ref in refs)}


@pytest.mark.parametrize("train", [INFERENCE, True], ids=["inference", "training"])
@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_the_compiled_function_holds_nothing_of_the_old_state(backend: str, train: bool) -> None:
    """Neither the graph nor a fake tensor is alive, also before the backward is compiled."""
    watch = Watch(tfk.handoff(backend))
    run = Run.of(sines, watch, dynamic=True)
    x, y = torch.randn(3, 4, requires_grad=train), torch.randn(12)
    out = run(x, y)
    # Torch's own cycle, which goes through C++: environment, tracked fake, mode, environment.
    run.envs[0].tracked_fakes = None
    run.envs.clear()
    del x, y
    if not train:
        del out
    forget()
    assert watch.living() == ({"real tensors"} if train else set())  # the leaf of autograd
    if train:
        del out
        gc.collect()
        assert not watch.living()


@pytest.mark.sweep
def test_the_direct_backend_holds_the_old_state() -> None:
    """The weak references show what a backend without a handoff holds."""
    watch = Watch("aot_eager")
    run = Run.of(sines, watch, dynamic=True)
    run(torch.randn(3, 4), torch.randn(12))
    run.envs[0].tracked_fakes = None
    run.envs.clear()
    forget()
    assert {"fake tensors", "mode", "environment", "graph"} <= watch.living()


@pytest.mark.sweep
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_only_the_compiled_function_holds_the_fresh_state(train: bool) -> None:
    """The new fakes, the new context and the copy of the graph are freed with it.

    The mode and its environment stay, as those of a direct backend do: AOTAutograd leaves empty
    fake tensors behind.
    """
    watch = Watch("aot_eager")
    run = Run.of(sines, tfk.handoff(watch), dynamic=True)
    out: Any = run(torch.randn(3, 4, requires_grad=train), torch.randn(12))
    gc.collect()
    assert ("context" in watch.living()) is train  # for a backward that is compiled later
    del run, out
    torch._dynamo.reset()
    forget()
    assert not watch.living() - {"environment", "mode"}


def test_real_tensors_may_be_freed_while_the_backend_compiles() -> None:
    """The handoff holds neither tensors nor parameters once they are described."""
    died: list[bool] = []

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    def outer(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        with torch.no_grad():
            copies = [
                torch.nn.Parameter(x.clone()) if isinstance(x, torch.nn.Parameter)
                else x.clone() if isinstance(x, torch.Tensor) else x
                for x in inputs
            ]  # fmt: skip
        refs = [weakref.ref(x) for x in copies if isinstance(x, torch.Tensor)]

        def inner(gm: torch.fx.GraphModule, fakes: list[Any]) -> Any:
            copies.clear()  # the only list of them
            died.extend(ref() is None for ref in refs)
            return backend_of("aot_eager")(gm, fakes)

        return tfk.handoff(inner)(gm, copies)

    gc.disable()
    try:
        out = Run.of(Own(), outer, dynamic=True)(torch.full((3, 4), 2.0))
    finally:
        gc.enable()
    assert torch.equal(out, torch.full((3, 4), 2.0))
    assert died == [True, True]


@pytest.mark.parametrize("train", [False, True])
def test_parameters_can_be_swapped_after_compiling(train: bool) -> None:
    """No weak reference remains that ``swap_tensors`` refuses; the backend is named by a string.

    In training the context of the backend is kept for the backward. The graph does not take the bias.
    """
    module = torch.nn.Linear(3, 3)

    def f(x: torch.Tensor) -> torch.Tensor:
        return module.weight.sum() * x * module.bias.shape[0]

    torch._dynamo.reset()
    with torch.set_grad_enabled(train):
        torch.compile(f, backend="fakeify", dynamic=not train)(torch.ones(2, 3))
    for parameter in module.parameters():
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(torch.ones(parameter.shape)))
        assert parameter.sum() == parameter.numel()


# --- the context ----------------------------------------------------------------------------------

OWN = {
    "fake_mode": "the fresh one",
    "tensor_to_context": "policies of the fresh inputs",
}
SHARED = {
    "aot_graph_name", "cudagraph_annotation", "ddp_optimizer_ctx", "fakify_first_call",
    "force_unspec_int_unbacked_size_like", "frame_summary_stack", "fw_metadata", "global_context",
    "guards_context", "hop_dispatch_set_cache", "inlined_code_cache", "loc_in_frame",
    "loc_in_frame_positions", "module_context", "output_strides", "params_flat",
    "params_flat_unwrap_subclasses", "params_unwrapped_to_flat_index",
    "previously_cleaned_instructions", "previously_inlined_functions", "traced_code",
}  # fmt: skip
"""Attributes of a ``TracingContext`` that a backend finds as Dynamo left them, and that Dynamo finds
as the backend left them."""


def test_every_attribute_of_a_context_is_shared_or_fresh() -> None:
    """An attribute that torch adds fails here, until it is in a group."""
    assert vars(TracingContext(None)).keys() == OWN.keys() | SHARED


@pytest.mark.parametrize("fails", [False, True])
def test_the_context_of_a_backend_is_copied_to_dynamos(fails: bool) -> None:
    """The context of a backend that fails is copied, too: torch reports the location in it."""
    left: dict[str, Any] = {name: object() for name in SHARED}
    if fails:  # torch asks for the location
        left["frame_summary_stack"] = []
        left["loc_in_frame"] = ("f.py", 1, "f")
        left["loc_in_frame_positions"] = SimpleNamespace(
            col_offset=0, end_col_offset=0, end_lineno=None
        )

    def inner(gm: torch.fx.GraphModule, _: Any) -> Any:
        context = TracingContext.get()
        assert context is not outside[0]
        for name in SHARED:
            assert getattr(context, name) is found[name], name
        vars(context).update(left)
        if fails:
            raise ValueError("no")
        return gm.forward

    outside: list[Any] = []
    found: dict[str, Any] = {}

    def outer(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        context = TracingContext.get()
        mode, policies = context.fake_mode, context.tensor_to_context
        outside.append(context)
        found.update(vars(context))
        try:
            return tfk.handoff(inner)(gm, inputs)
        except ValueError:
            return gm.forward
        finally:
            assert TracingContext.get() is context
            assert context.fake_mode is mode
            assert context.tensor_to_context is policies
            assert {name: getattr(context, name) for name in SHARED} == left
            vars(context).update(found)

    Run.of(lambda x: x + 1, outer, dynamic=True)(torch.zeros(3))
    assert outside


@pytest.mark.parametrize("train", [INFERENCE, True], ids=["inference", "training"])
def test_aotautograd_stores_the_same_in_the_context(train: bool) -> None:
    """Metadata, strides and weights equal those without a handoff."""
    found: list[Any] = []
    for way in (lambda b: b, tfk.handoff):

        def outer(gm: torch.fx.GraphModule, inputs: list[Any], way: Any = way) -> Any:
            made = way("aot_eager")
            out = backend_of(made)(gm, inputs)
            context = TracingContext.get()
            flat: Any = context.params_flat
            meta: Any = context.fw_metadata
            found.append((
                [tuple(t.shape) for t in flat],
                [(type(info).__name__, info.mutates_data) for info in meta.input_info],
                [info.output_type for info in meta.output_info],
                context.output_strides,
                len(context.guards_context.aotautograd_guards),
                context.aot_graph_name,
            ))  # fmt: skip
            return out

        module = torch.nn.Linear(3, 2)
        Run.of(module, outer, dynamic=True)(torch.ones(5, 3, requires_grad=train))
    direct, ours = found
    assert ours == direct


def test_stacks_of_dynamos_symbols_outlive_the_backend() -> None:
    """Torch clears the stacks of the fresh environment, not those that Dynamo's errors print."""
    stacks: list[list[Any]] = []

    def outer(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        env = env_of_frame()
        stacks.append([stack.format() for stack in env.var_to_stack.values()])
        out = tfk.handoff("aot_eager")(gm, inputs)
        stacks.append([stack.format() for stack in env.var_to_stack.values()])
        return out

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        Run.of(lambda x: x.nonzero() + 1, outer)(torch.ones(3))
    assert stacks[0] == stacks[1]
    assert stacks[0]
    assert all(stacks[0])


# --- caches ---------------------------------------------------------------------------------------


def hits() -> dict[str, int]:
    """Return what the caches of AOTAutograd and of inductor counted since the last call."""
    both = (counters["aot_autograd"], counters["inductor"])
    found = {what: n for part in both for what, n in part.items() if "cache" in what}
    counters.clear()
    return found


def biased(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Compute with one graph for small inputs and for others, under different guards."""
    if x.shape[0] > 5:
        return product(x, w)
    return (x @ w) @ w


CALLS: tuple[tuple[Any, int], ...] = ((product, 8), (product, 9), (biased, 9), (biased, 4))


def cached(backend: Any, fn: Any, n: int, *, train: bool = False, dynamic: bool = True) -> Any:
    """Compile without earlier state and call; return the cache counts and the guards."""
    run = Run.of(fn, backend, dynamic=dynamic)
    x = torch.ones(n, 3, requires_grad=train)
    out = run(x, torch.eye(3))
    if train:
        out.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.ones(n, 3))
    assert torch.equal(out, x)
    return hits(), run.guards


@pytest.mark.parametrize(
    ("train", "dynamic"),
    [
        (False, True),
        pytest.param(True, True, marks=pytest.mark.sweep),
        pytest.param(False, False, marks=pytest.mark.sweep),
        pytest.param(True, False, marks=pytest.mark.sweep),
    ],
)
def test_caches_hit_as_without_a_handoff(train: bool, dynamic: bool) -> None:
    """The counts are those of one function, of other sizes, and of a graph under other guards."""
    found: list[Any] = []
    hits()
    for way in (lambda b: b, tfk.handoff):
        with fresh_cache():
            options = {"train": train, "dynamic": dynamic}
            found.append([cached(way("inductor"), fn, n, **options) for fn, n in CALLS])
    direct, ours = found
    assert ours == direct
    if dynamic:
        assert ours[0][0]["autograd_cache_miss"] == 1
        assert all("autograd_cache_hit" in counts for counts, _ in ours[1:])
        assert ours[2][1] != ours[3][1]


def total(x: torch.Tensor) -> torch.Tensor:
    """Sum, for which inductor makes another kernel for more than 4096 elements."""
    return (x * 2).sum()


@pytest.mark.sweep
def test_guards_of_a_cached_graph_are_propagated() -> None:
    """An entry has the guards that inductor found, and is not used for other inputs."""
    found: list[Any] = []
    hits()
    for way in (lambda b: b, tfk.handoff):
        with fresh_cache():
            for _ in range(2):
                run = Run.of(total, way("inductor"), dynamic=True)
                results = [run(torch.ones(n, n)).item() for n in (16, 20, 80)]
                found.append((results, run.count, run.guards, run.explained, hits()))
    (cold, warm), (ours_cold, ours_warm) = found[:2], found[2:]
    assert ours_cold == cold
    assert ours_warm == warm
    assert ours_warm[:3] == ours_cold[:3]
    assert ours_warm[1] == 2
    assert "L['x'].size()[0]*L['x'].size()[0] <= 4096" in ours_warm[2][0]
    assert ours_warm[4] == {"autograd_cache_hit": 2, "fxgraph_cache_hit": 2}


def child() -> None:
    """Compile by a handoff, call, and print the counts and the guards, in another process."""
    json.dump([cached(tfk.handoff("inductor"), fn, n) for fn, n in CALLS], sys.stdout)


@pytest.mark.sweep
def test_another_process_hits_the_same_entries() -> None:
    """Names of symbols, marks and metadata do not depend on the process."""
    hits()
    with fresh_cache():
        direct = [[cached("inductor", fn, n) for fn, n in CALLS] for _ in range(2)]
    found: list[Any] = []
    with fresh_cache():
        for seed in ("1", "2"):
            code = "import test_handoff_caches as t; t.child()"
            found.append(json.loads(piped(code, PYTHONHASHSEED=seed)))
    assert found == json.loads(json.dumps(direct))
    assert all("autograd_cache_hit" in counts for counts, _ in found[1])


def test_inductor_gives_the_fresh_graph_the_key_of_the_old_one() -> None:
    """An entry that was made without a handoff is a hit with one."""
    hits()
    with fresh_cache():
        assert cached("inductor", product, 8)[0]["fxgraph_cache_miss"] == 1
        assert cached(tfk.handoff("inductor"), product, 8)[0]["fxgraph_cache_hit"] == 1
