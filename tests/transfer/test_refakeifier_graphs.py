"""``refakeify`` of subclasses, wrappers, graphs and modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from assert_frames import dynamo_frame
from refakeify_checks import (
    SYMBOLIC,
    check_symbols,
    check_untouched,
    exprs,
    fake,
    hints,
    renaming,
    symbolic_mode,
    values,
)
from tensor_facts import relations
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
)
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import torch_fakeify as tfk

# --- subclasses and wrappers ------------------------------------------------------------------------


def inner_fakes(t: Any) -> list[Any]:
    """Return the fake tensors inside nested wrapper subclasses."""
    if not is_traceable_wrapper_subclass(t):
        return [t]
    return [leaf for name in t.__tensor_flatten__()[0] for leaf in inner_fakes(getattr(t, name))]


def two(mode: FakeTensorMode) -> list[Any]:
    """Return TwoTensors of symbolic sizes, nested too, and a plain fake tensor that they share."""
    x = fake(mode, torch.empty(4, 6), "x")
    y = fake(mode, torch.empty(4, 6), "y", DimDynamic.DUCK)
    with mode:
        picked = x.nonzero()
        plain = TwoTensor(x, x.clone())
        nested = TwoTensor(TwoTensor(y, y.clone()), TwoTensor(y.clone(), y))
        unbacked = TwoTensor(TwoTensor(picked, picked), TwoTensor(picked, picked))
    return [x, plain, nested, unbacked, y]


def test_subclasses_are_rebuilt_around_new_fakes() -> None:
    """Outer sizes and inner tensors have the same new symbols, also of nested ones."""
    mode, other = symbolic_mode(), symbolic_mode()
    tree = two(mode)
    made = tfk.refakeify(tree, other)
    check_untouched(other.shape_env)
    old = [leaf for t in tree for leaf in inner_fakes(t)]
    new = [leaf for t in made for leaf in inner_fakes(t)]
    assert all(t.fake_mode is other for t in new)
    wrappers = [[t.a for t in side[2:4]] + side for side in (tree, made)]
    check_symbols(renaming(wrappers[0] + old, wrappers[1] + new), mode.shape_env, other.shape_env)
    assert [type(t) for t in made] == [type(t) for t in tree]
    assert relations(new) == relations(old)
    assert made[1].a is made[0]


def test_subclasses_of_the_mode_are_reused() -> None:
    """If all inner tensors are of the mode, the wrapper is the same object."""
    mode = symbolic_mode()
    tree = two(mode)
    assert all(a is b for a, b in zip(tfk.refakeify(tree, mode), tree, strict=True))


def test_inner_tensors_of_several_modes_are_refused() -> None:
    """A wrapper whose inner tensors are of several modes is refused with a description of it."""
    a, b = (FakeTensorMode().from_tensor(torch.empty(3)) for _ in range(2))
    mixed = TwoTensor(a, b)
    with pytest.raises(tfk.UnsupportedTensorError) as error:
        tfk.refakeify([mixed], FakeTensorMode())
    assert str(error.value) == (
        "leaf [0], a TwoTensor: the inner tensors of a wrapper subclass are of several fake modes."
        " Make one of inner tensors of one mode"
    )


def test_functional_tensors_are_wrapped_again() -> None:
    """The wrapper of C++ has a new fake tensor of the same formula."""
    mode, other = symbolic_mode(), symbolic_mode()
    x = fake(mode, torch.empty(4, 6), "x")
    with mode:
        flat = torch.cat([x, x]).flatten()
    wrapped = torch._to_functional_tensor(flat)
    torch._sync(wrapped)
    made, y = tfk.refakeify([wrapped, x], other)
    assert torch._is_functional_tensor(made)
    inner = torch._from_functional_tensor(made)
    assert inner.fake_mode is other
    check_symbols(renaming([x, flat], [y, inner]), mode.shape_env, other.shape_env)
    check_untouched(other.shape_env)


def test_python_functional_tensors_are_wrapped_again() -> None:
    """The wrapper class of Python has a new fake tensor."""
    mode, other = symbolic_mode(), symbolic_mode()
    x = fake(mode, torch.empty(4, 6), "x")
    with mode, FunctionalTensorMode():
        wrapped = FunctionalTensor.to_functional(x)
    made = tfk.refakeify(wrapped, other)
    assert type(made) is FunctionalTensor
    inner = torch._from_functional_tensor(made.elem)
    assert inner.fake_mode is other
    assert hints(inner) == hints(x)


# --- graphs -----------------------------------------------------------------------------------------


def program(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Compute views, formulas and sizes from data."""
    picked = (x @ y).nonzero()
    flat = torch.cat([x, x]).flatten()
    return flat, picked + 1, picked.shape[0] * x.shape[0], x.sum(0)


def env_of(t: Any) -> Any:
    """Return the ShapeEnv of a value in metadata."""
    return t.node.shape_env if isinstance(t, SYMBOLIC) else t.fake_mode.shape_env


def check_graph(old: torch.fx.GraphModule, new: torch.fx.GraphModule, mode: FakeTensorMode) -> Any:
    """Check that the new graph has other symbols, and that the old one is not changed."""
    before, after = values(old), values(new)
    assert before
    assert all(env_of(t) is mode.shape_env for t in after)
    assert all(env_of(t) is not mode.shape_env for t in before)
    names = renaming(before, after)
    check_symbols(names, env_of(before[0]), mode.shape_env)
    assert [hints(t) for t in after] == [hints(t) for t in before]
    check_untouched(mode.shape_env)
    assert [str(n) for n in new.graph.nodes] == [str(n) for n in old.graph.nodes]
    assert new.code == old.code
    assert type(new).__name__ == type(old).__name__
    assert new.graph.owning_module is new
    assert old.graph.owning_module is old
    for a, b in zip(old.graph.nodes, new.graph.nodes, strict=True):
        assert a.meta is not b.meta
        assert list(a.meta) == list(b.meta)
        bound = a.meta.get("unbacked_bindings", {})
        assert {names.get(s, s): p for s, p in bound.items()} == b.meta.get("unbacked_bindings", {})
    return names


def test_a_symbolic_graph_is_copied_with_new_metadata() -> None:
    """Every `val` is of the new mode, and the set of expressions is the old one renamed."""
    gm = make_fx(program, tracing_mode="symbolic")(torch.ones(3, 5), torch.ones(5, 7))
    mode = symbolic_mode()
    new = tfk.refakeify(gm, mode)
    check_graph(gm, new, mode)
    assert mode.shape_env.unbacked_inputs == set()  # a node binds it
    inputs = torch.rand(4, 6), torch.rand(6, 8)
    for a, b in zip(new(*inputs), program(*inputs), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_a_graph_runs_in_the_new_mode() -> None:
    """Run on its inputs' `val`s, it returns the formulas of its outputs' `val`s."""
    gm = make_fx(program, tracing_mode="symbolic")(torch.ones(3, 5), torch.ones(5, 7))
    mode = symbolic_mode()
    new = tfk.refakeify(gm, mode)
    inputs = [n.meta["val"] for n in new.graph.nodes if n.op == "placeholder"]
    with mode:
        outputs = new(*inputs)
    expected = [n.meta["val"] for n in new.graph.output_node().args[0]]
    assert [type(t) for t in outputs] == [type(t) for t in expected]
    assert exprs(outputs[0]) == exprs(expected[0])
    assert exprs(outputs[3]) == exprs(expected[3])
    assert outputs[1].fake_mode is mode
    assert mode.shape_env.guards == []


def repeated(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Compute many values of one layout, of which some share a storage, and one of another dtype."""
    a = x + y
    b = a.relu().mul(2)
    return a, b, a.view(-1), b.double(), b.detach(), b.sin_(), x.shape[0] * y.shape[1]


def test_values_of_one_layout_are_related_as_before() -> None:
    """They share storages as before; symbols of equal names in two environments stay apart."""
    graphs = [
        make_fx(repeated, tracing_mode="symbolic", pre_dispatch=True)(
            torch.ones(3, 5), torch.ones(3, 5)
        )
        for _ in range(2)
    ]
    mode = symbolic_mode()
    made = tfk.refakeify(graphs, mode)
    for old, new in zip(graphs, made, strict=True):
        before, after = values(old), values(new)
        names = renaming(before, after)
        check_symbols(names, env_of(before[0]), mode.shape_env)
        tensors = [[t for t in found if isinstance(t, FakeTensor)] for found in (before, after)]
        assert relations(tensors[1]) == relations(tensors[0])
        facts = [[(t.dtype, hints(t), t.requires_grad) for t in found] for found in tensors]
        assert facts[1] == facts[0]
    inputs = [n.meta["val"] for gm in made for n in gm.graph.find_nodes(op="placeholder")]
    sizes = [size.node for t in inputs for size in t.shape]
    assert len(set(map(id, sizes))) == len(sizes)  # tracers tell sizes of inputs apart by them


@pytest.mark.sweep
def test_a_graph_compiles_in_the_new_mode() -> None:
    """Inductor's code for it is right for other sizes."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx

    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        return program(x, y)[:2]

    gm = make_fx(fn, tracing_mode="symbolic")(torch.ones(3, 5), torch.ones(5, 7))
    mode = symbolic_mode()
    new = tfk.refakeify(gm, mode)
    inputs = [n.meta["val"] for n in new.graph.nodes if n.op == "placeholder"]
    with torch._inductor.config.patch(fx_graph_cache=False), tracing(TracingContext(mode)):
        compiled = compile_fx(new, inputs)
    real = torch.rand(4, 6), torch.rand(6, 8)
    for a, b in zip(compiled(*real), fn(*real), strict=True):
        torch.testing.assert_close(a, b)


def test_a_dynamo_graph_is_copied_with_its_bodies() -> None:
    """Bodies of higher-order operators are copied, and Dynamo's own metadata of its inputs."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def larger(a: torch.Tensor) -> torch.Tensor:
            return a.sin() @ y

        z = torch.cond(x.sum() > 0, larger, lambda a: a.cos() @ y, (x,))
        return z.nonzero() + x.shape[0]

    gm, _ = dynamo_frame(fn, torch.ones(3, 5), torch.ones(5, 7))
    bodies = [n for n, m in gm.named_modules() if n and isinstance(m, torch.fx.GraphModule)]
    assert len(bodies) == 2
    mode = symbolic_mode()
    new = tfk.refakeify(gm, mode)
    check_graph(gm, new, mode)
    for name in bodies:
        assert new.get_submodule(name) is not gm.get_submodule(name)
    for a, b in zip(gm.graph.nodes, new.graph.nodes, strict=True):
        if "grapharg" in a.meta and a.meta["grapharg"].fake_tensor is not None:
            assert b.meta["grapharg"].fake_tensor is b.meta["example_value"]
            assert a.meta["grapharg"].fake_tensor.fake_mode is not mode


def test_a_joint_graph_of_aot_autograd_is_copied() -> None:
    """Forward and backward have one symbol where they had one before."""
    from functorch.compile import aot_function, make_boxed_func

    found: list[Any] = []

    def store(gm: torch.fx.GraphModule, _: Any) -> Any:
        found.append(gm)
        return make_boxed_func(gm.forward)

    x = torch.rand(3, 5, requires_grad=True)
    out = aot_function(lambda x: (x @ x.t()).flatten().exp(), store, store, dynamic=True)(x)
    out.sum().backward()
    assert len(found) == 2
    mode = symbolic_mode()
    forward, backward = tfk.refakeify(found, mode)
    check_graph(found[0], forward, mode)
    check_graph(found[1], backward, mode)
    check_symbols(
        renaming(values(found[0]) + values(found[1]), values(forward) + values(backward)),
        env_of(values(found[0])[0]),
        mode.shape_env,
    )


def test_parameters_stay_real_and_fake_constants_are_converted() -> None:
    """The module has its real tensors, fake ones of the new mode, and hooks of its own."""
    mode, other = symbolic_mode(), symbolic_mode()
    root = torch.nn.Module()
    root.weight = torch.nn.Parameter(torch.ones(3))
    root.register_buffer("constant", fake(mode, torch.empty(4), "c"))
    graph = torch.fx.Graph()
    graph.output((graph.get_attr("weight"), graph.get_attr("constant")))
    gm = torch.fx.GraphModule(root, graph)
    gm.meta["fake_mode"] = mode
    new = tfk.refakeify([root, gm], other)
    assert new[0] is not root
    for module in new:
        assert module.weight is root.weight
        assert module.constant.fake_mode is other
    assert new[0].constant is new[1].constant
    assert root.constant.fake_mode is gm.constant.fake_mode is mode
    assert (gm.meta["fake_mode"], new[1].meta["fake_mode"]) == (mode, other)
    new[1].register_forward_hook(lambda *_: None)
    assert not gm._forward_hooks


def test_a_module_without_fakes_is_the_same_object() -> None:
    """A module without fake tensors is returned without a copy."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 3))
    assert tfk.refakeify(module, symbolic_mode()) is module


def test_real_tensors_of_a_graph_stay_real_beside_a_leaf() -> None:
    """A parameter that is a leaf of the tree is fake there only."""
    gm = torch.fx.symbolic_trace(torch.nn.Linear(2, 3))
    weight, new = tfk.refakeify((gm.weight, gm), symbolic_mode())
    assert isinstance(weight, FakeTensor)
    assert new.weight is gm.weight


def test_symbols_in_arguments_are_renamed() -> None:
    """Constants among a node's arguments are values as in metadata."""
    mode, other = symbolic_mode(), symbolic_mode()
    x = fake(mode, torch.empty(4), "x")
    graph = torch.fx.Graph()
    with pytest.warns(UserWarning, match="Raw SymInt"):
        node = graph.call_function(torch.zeros, ([x.shape[0], 3],), {"device": "cpu"})
    node.meta["val"] = [x, {"size": x.shape}]
    graph.output(node)
    new = tfk.refakeify(graph, other)
    first = next(iter(new.nodes))
    assert first.args[0][0].node.shape_env is other.shape_env
    assert first.args[0][1] == 3
    assert first.kwargs == {"device": "cpu"}
    assert exprs(first.args[0][0])[0] == exprs(first.meta["val"][0])[0]
    assert type(first.meta["val"][1]["size"]) is torch.Size
    assert node.args[0][0].node.shape_env is mode.shape_env


def test_the_replacement_of_a_binding_is_copied() -> None:
    """A size from data that equals another has that replacement in the target, too."""

    def fn(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        size = n.sum().item()
        torch._check(size == x.shape[0])
        return x + torch.ones(size)

    gm = make_fx(fn, tracing_mode="symbolic")(torch.ones(4), torch.tensor([4]))
    old = next(n for n in gm.graph.nodes if n.meta.get("unbacked_bindings"))
    (before,) = old.meta["unbacked_bindings"]
    env = old.meta["val"].node.shape_env
    assert before in env.replacements
    mode = symbolic_mode()
    new = tfk.refakeify(gm, mode)
    node = next(n for n in new.graph.nodes if n.meta.get("unbacked_bindings"))
    (after,) = node.meta["unbacked_bindings"]
    assert mode.shape_env.guards == []
    names = renaming(values(gm), values(new))
    assert mode.shape_env.replace(after) == env.replace(before).xreplace(names)
    assert exprs(node.meta["val"])[0] == mode.shape_env.replace(after)
