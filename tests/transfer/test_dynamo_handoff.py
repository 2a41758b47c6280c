"""``handoff``: the backend gets a fresh ``ShapeEnv`` with the facts and values of Dynamo's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode, maybe_get_fake_mode
from torch.utils import _pytree as pytree

import torch_fakeify as tfk
from torch_fakeify.transfer.dynamo_handoff import Handoff

if TYPE_CHECKING:
    from collections.abc import Callable


class Inner:
    """A backend that calls a function with its arguments and then runs the graph as it is."""

    def __init__(self, does: Callable[..., Any] = lambda *_: None) -> None:
        self.does = does
        self.count = 0
        self.envs: list[Any] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Call the function, and return the graph."""
        self.count += 1
        mode = TracingContext.get().fake_mode
        assert mode is not None
        self.envs.append(mode.shape_env)
        self.does(gm, inputs)
        return gm.forward


class Outer:
    """A backend that stores the environment that Dynamo traces with."""

    def __init__(self, backend: Callable[..., Any]) -> None:
        self.backend = backend
        self.envs: list[Any] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """Call the inner backend."""
        mode = TracingContext.get().fake_mode
        assert mode is not None
        self.envs.append(mode.shape_env)
        return self.backend(gm, inputs)


def compiled(fn: Callable[..., Any], backend: Any, **options: Any) -> Callable[..., Any]:
    """Compile the function without earlier state."""
    torch._dynamo.reset()
    return torch.compile(fn, backend=backend, **options)


def plus_one(x: torch.Tensor) -> torch.Tensor:
    """Add one."""
    return x + 1


def tensor_of(inputs: list[Any]) -> Any:
    """Return the first tensor among the inputs."""
    return next(x for x in inputs if isinstance(x, torch.Tensor))


def test_the_backend_gets_a_fresh_environment() -> None:
    """Inputs are fake tensors over a new ``ShapeEnv`` with the facts of the frame."""

    def look(_gm: Any, inputs: list[Any]) -> None:
        size = tensor_of(inputs).size(0)
        env = size.node.shape_env
        assert env is TracingContext.get().fake_mode.shape_env
        assert env.bound_sympy(size.node.expr).lower == 6
        assert [s.name for s in env.var_to_sources[size.node.expr]] == ["L['x'].size()[0]"]

    inner = Inner(look)
    outer = Outer(tfk.handoff(inner))
    fn = compiled(lambda x: x + 1 if x.shape[0] > 5 else x, outer, dynamic=True)
    assert torch.equal(fn(torch.zeros(7)), torch.ones(7))
    assert inner.count == 1
    assert inner.envs[0] is not outer.envs[0]


def test_an_assumption_on_a_number_of_the_backend_is_an_error() -> None:
    """The guard is on a symbol that only the backend has, and that has no value."""

    def assume(_gm: Any, inputs: list[Any]) -> None:
        env = tensor_of(inputs).size(0).node.shape_env
        u = env.create_unbacked_symint()
        location = env._get_sloc()
        env.guards.append(torch._guards.ShapeGuard(u.node.expr > 3, location, False))

    fn = compiled(plus_one, tfk.handoff(Inner(assume)), dynamic=True)
    with pytest.raises(Exception, match=r"a number that Dynamo does not know.* found u0"):
        fn(torch.zeros(4))


def test_results_of_operators_are_cached() -> None:
    """The new environment has the cached outputs of Dynamo's operators over the same symbols."""
    found: list[int] = []

    def again(_gm: Any, inputs: list[Any]) -> None:
        with TracingContext.get().fake_mode:
            found.append(FakeTensorMode.cache_hits)
            tensor_of(inputs).reshape(-1).sin()
            found.append(FakeTensorMode.cache_hits)

    compiled(lambda x: x.reshape(-1).sin(), tfk.handoff(Inner(again)), dynamic=True)(
        torch.ones(3, 4)
    )
    before, after = found
    assert after > before


def test_the_context_is_restored() -> None:
    """Afterwards Dynamo has its own fake mode, and what AOTAutograd stored in the context."""
    seen: list[Any] = []

    def outer(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        context = TracingContext.get()
        mode = context.fake_mode
        out = tfk.handoff("aot_eager")(gm, inputs)
        assert TracingContext.get() is context
        assert context.fake_mode is mode
        seen.append((context.fw_metadata, context.params_flat))
        return out

    compiled(plus_one, outer, dynamic=True)(torch.zeros(3))
    assert all(part is not None for part in seen[0])


def test_a_handoff_outside_of_dynamo_is_refused() -> None:
    """A handoff outside of Dynamo has no frame whose facts could be transferred."""
    with pytest.raises(tfk.CaptureError, match="takes place where Dynamo calls a backend"):
        tfk.handoff("eager")(torch.fx.symbolic_trace(plus_one), [torch.zeros(3)])


def test_the_handoff_is_a_registered_backend() -> None:
    """``backend="fakeify"`` is the handoff to inductor."""
    backend = torch._dynamo.lookup_backend("fakeify")
    assert isinstance(backend, Handoff)
    assert backend.inner == "inductor"


# --- values ---------------------------------------------------------------------------------------


def values_of(gm: torch.fx.GraphModule) -> list[tuple[str, Any]]:
    """Return the fake tensors and symbolic scalars in the metadata of a graph and its bodies."""
    found: list[tuple[str, Any]] = []
    for module in gm.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for fx_node in module.graph.nodes:
            found += [
                (fx_node.name, leaf)
                for leaf in pytree.tree_leaves(list(fx_node.meta.values()))
                if isinstance(leaf, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))
            ]
    return found


def env_of(value: Any) -> Any:
    """Return the ``ShapeEnv`` of a fake tensor or a symbolic scalar, ``None`` for a real tensor."""
    if not isinstance(value, torch.Tensor):
        return value.node.shape_env
    mode = maybe_get_fake_mode(value)
    return None if mode is None else mode.shape_env


def test_all_values_of_the_graph_have_the_new_environment() -> None:
    """Values of nodes, of called graphs, and of functorch wrappers have the new environment."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = torch.vmap(lambda a: a.sin() * y.sum())(x)
        w = torch.cond(x.sum() > 0, lambda a: a.sin() + y.shape[0], lambda a: a.cos(), (z,))
        return w.t().reshape(-1)[: y.shape[0]]

    def look(gm: torch.fx.GraphModule, _inputs: Any) -> None:
        env = TracingContext.get().fake_mode.shape_env  # type: ignore[union-attr]
        values = values_of(gm)
        assert len(values) > 20
        assert {name for name, value in values if env_of(value) not in (env, None)} == set()

    inner = Inner(look)
    fn_ = compiled(fn, tfk.handoff(inner), dynamic=True)
    x, y = torch.randn(3, 4), torch.randn(5)
    assert torch.equal(fn_(x, y), fn(x, y))
    assert inner.count == 1


def test_values_of_nodes_equal_dynamos() -> None:
    """Sizes, strides, views and ``requires_grad`` are equal; views of inputs have new bases."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.t()[1:] @ w).unflatten(1, (2, -1)).sum(0)

    def facts(gm: torch.fx.GraphModule) -> list[Any]:
        return [
            (
                fx_node.name,
                [str(n) for n in (*value.size(), *value.stride(), value.storage_offset())],
                value.requires_grad,
                value.is_leaf,
                value._base is not None and value._base is inputs.get("x"),
            )
            for inputs in [
                {
                    n.name[2:3]: n.meta["example_value"]
                    for n in gm.graph.nodes
                    if n.op == "placeholder"
                }
            ]
            for fx_node in gm.graph.nodes
            if isinstance(value := fx_node.meta.get("example_value"), torch.Tensor)
        ]

    seen: list[list[Any]] = []

    def direct(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        seen.append(facts(gm))
        return gm.forward

    def both(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        direct(gm, inputs)
        return tfk.handoff(direct)(gm, inputs)

    x, w = torch.randn(3, 4), torch.randn(3, 6, requires_grad=True)
    compiled(fn, both, dynamic=True)(x, w)
    before, after = seen
    assert before == after
    assert any(row[-1] for row in after)
