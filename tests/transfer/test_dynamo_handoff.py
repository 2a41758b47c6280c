"""``handoff``: the backend gets a fresh ``ShapeEnv`` with the facts and values of Dynamo's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from handoff_runs import Asking, one
from observe import Run, env_of_frame
from torch._subclasses.fake_tensor import FakeTensorMode, maybe_get_fake_mode
from torch.utils import _pytree as pytree

import torch_fakeify as tfk
from torch_fakeify.transfer.dynamo_handoff import Handoff


def test_the_backend_gets_a_fresh_environment() -> None:
    """Inputs are fake tensors over a new ``ShapeEnv`` with the facts of the frame."""
    envs: list[Any] = []

    def look(x: Any) -> None:
        size = x.size(0)
        env = size.node.shape_env
        envs.append(env)
        assert env is env_of_frame()
        assert env.bound_sympy(size.node.expr).lower == 6
        assert [s.name for s in env.var_to_sources[size.node.expr]] == ["L['x'].size()[0]"]

    fn = Run.of(lambda x: x + 1 if x.shape[0] > 5 else x, tfk.handoff(Asking(look)), dynamic=True)
    assert torch.equal(fn(torch.zeros(7)), torch.ones(7))
    assert len(envs) == len(fn.envs) == 1
    assert envs[0] is not fn.envs[0]


def test_an_assumption_on_a_number_of_the_backend_is_an_error() -> None:
    """The guard is on a symbol that only the backend has, and that has no value."""

    def assume(x: Any) -> None:
        env = x.size(0).node.shape_env
        u = env.create_unbacked_symint()
        location = env._get_sloc()
        env.guards.append(torch._guards.ShapeGuard(u.node.expr > 3, location, False))

    with pytest.raises(Exception, match=r"a number that Dynamo does not know.* found u0"):
        Run.of(one, tfk.handoff(Asking(assume)), dynamic=True)(torch.zeros(4))


def test_results_of_operators_are_cached() -> None:
    """The new environment has the cached outputs of Dynamo's operators over the same symbols."""
    found: list[int] = []

    def again(x: Any) -> None:
        with x.fake_mode:
            found.append(FakeTensorMode.cache_hits)
            x.reshape(-1).sin()
            found.append(FakeTensorMode.cache_hits)

    Run.of(lambda x: x.reshape(-1).sin(), tfk.handoff(Asking(again)), dynamic=True)(
        torch.ones(3, 4)
    )
    before, after = found
    assert after > before


def test_a_handoff_outside_of_dynamo_is_refused() -> None:
    """A handoff outside of Dynamo has no frame whose facts could be transferred."""
    with pytest.raises(tfk.CaptureError, match="takes place where Dynamo calls a backend"):
        tfk.handoff("eager")(torch.fx.symbolic_trace(one), [torch.zeros(3)])


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

    seen: list[list[tuple[str, Any]]] = []

    def look(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        env, values = env_of_frame(), values_of(gm)
        seen.append(values)
        assert {name for name, value in values if env_of(value) not in (env, None)} == set()
        return gm.forward

    x, y = torch.randn(3, 4), torch.randn(5)
    assert torch.equal(Run.of(fn, tfk.handoff(look), dynamic=True)(x, y), fn(x, y))
    assert [len(values) > 20 for values in seen] == [True]


def test_values_of_nodes_equal_dynamos() -> None:
    """Sizes, strides, views and ``requires_grad`` are equal; views of inputs have new bases."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.t()[1:] @ w).unflatten(1, (2, -1)).sum(0)

    def facts(gm: torch.fx.GraphModule) -> list[Any]:
        values = {n.name: n.meta.get("example_value") for n in gm.graph.nodes}
        return [
            (
                name,
                [str(n) for n in (*value.size(), *value.stride(), value.storage_offset())],
                value.requires_grad,
                value.is_leaf,
                value._base is not None and value._base is values["l_x_"],
            )
            for name, value in values.items()
            if isinstance(value, torch.Tensor)
        ]

    seen: list[list[Any]] = []

    def direct(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        seen.append(facts(gm))
        return gm.forward

    def both(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        direct(gm, inputs)
        return tfk.handoff(direct)(gm, inputs)

    x, w = torch.randn(3, 4), torch.randn(3, 6, requires_grad=True)
    Run.of(fn, both, dynamic=True)(x, w)
    before, after = seen
    assert before == after
    assert any(row[-1] for row in after)
