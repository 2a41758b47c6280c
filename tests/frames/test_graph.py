"""FX graphs of every kind that compilers see, and their records."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from captured_frames import only_capture_of
from functorch.compile import make_boxed_func
from graph_checks import Frames, check, compile_and_run, printed, rebuild
from program_zoo import programs
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch._higher_order_ops.invoke_subgraph import mark_compile_region
from torch._higher_order_ops.out_dtype import out_dtype
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]


class Mlp(torch.nn.Module):
    """A small network with parameters, buffers, normalization and dropout."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.drop = torch.nn.Dropout(0.1)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        """Apply linear, norm, dropout and scale."""
        return self.drop(self.norm(F.gelu(self.a(x)))) * self.scale


def many_constants(x):
    """Use slices, ellipses, dtypes, devices, memory formats, infinities, sizes and nested lists."""
    n = x.shape[0]
    y = x[..., None, 1:3, :].to(torch.float64, memory_format=torch.contiguous_format)
    z = torch.cat([x, x.clone()], dim=-1)[:, ::2].clamp(min=-float("inf"), max=1e30)
    full = torch.full((n, 2), float("nan"), device="cpu", dtype=torch.complex64)
    padded = F.pad(x[None], (0, 1, n - n, 2), value=float("inf"))
    index = torch.tensor([0, 1])
    return y, z.nan_to_num(), full, padded, x[index], x.new_zeros(x.size()), x.max(dim=1).values


def in_place(x):
    """Mutate a copy, assign items, and use views and their methods."""
    y = x.clone()
    y[0] = 1
    y[:, 1:] += 2
    y.add_(1).mul_(2)
    parts = y.view(-1).chunk(2)
    return y.t(), parts[0].unsqueeze(0), x.T.data


def other_dtype(x):
    """Multiply into another dtype."""
    a = (x.detach() * 3).to(torch.int8)
    return out_dtype(torch.ops.aten.mm.default, torch.int32, a, a.t())


@mark_compile_region
def region(x):
    """Compute in a region that Dynamo compiles once."""
    return x.sin() + 1


def regions(x):
    """Call one region twice."""
    return region(region(x))


FUNCTIONS = [many_constants, in_place, other_dtype, regions]


def make_input():
    """Return a matrix that requires grad, without zeros."""
    torch.manual_seed(0)
    return torch.randn(5, 4, requires_grad=True)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_graphs_round_trip(function, dynamic):
    """Nodes, code, printed form, record and results; of AOTAutograd forward and backward graphs."""
    frames = Frames()
    compile_and_run(function, make_input(), backend=frames.dynamo, dynamic=dynamic, backward=False)
    assert frames.runs == 1
    frames = Frames()
    compile_and_run(function, make_input(), backend=frames.aot(), dynamic=dynamic)
    assert frames.runs == len(frames.graphs) >= 1


def test_the_names_and_sources_of_a_module_round_trip():
    """Parameters and buffers are inputs with sources, and Dynamo's table of names is equal."""
    frames, below = Frames(), Frames()
    compile_and_run(Mlp(), make_input(), backend=below.aot(), dynamic=True)
    assert below.runs == 2
    compile_and_run(Mlp(), make_input(), backend=frames.dynamo, dynamic=True)
    (desc,), (gm,) = frames.descs, frames.graphs
    _, rebuilt = rebuild(gm)
    names = "dynamo_flat_name_to_original_fqn"
    assert rebuilt.meta[names] == gm.meta[names]
    sources = [n._dynamo_source.name for n in gm.graph.find_nodes(op="placeholder")]
    again = [n._dynamo_source.name for n in rebuilt.graph.find_nodes(op="placeholder")]
    assert sources == again
    assert sum(n.source is not None for n in desc.nodes) == len(sources) > 4


# --- higher-order operators -----------------------------------------------------------------------

NESTED = {
    "cond": 2, "cond_on_a_size": 2, "while_loop": 2, "scan": 1, "associative_scan": 0,
    "map_over_a_dim": 1, "checkpointing": 1, "autograd_function": 2, "vmap": 0, "grad_transform": 0,
    "flex_attention": 2, "autocast_inside": 0, "no_grad_inside": 0, "item_with_checks": 0,
    "nonzero": 0, "attention": 0,
}  # fmt: skip
"""Programs of the zoo, with the number of graphs inside Dynamo's graph."""


@pytest.mark.parametrize("name", NESTED)
def test_graphs_of_programs_round_trip(name):
    """Bodies are graphs on the module, with names, training flags and captured inputs."""
    program, frames, below = programs()[name], Frames(), Frames()
    for backend in (frames.dynamo, below.aot()):
        with program.active():
            fn, args, *_ = program.make()
            dynamic = program.options.get("dynamic")
            compile_and_run(fn, *args, backend=backend, dynamic=dynamic, backward=program.grad)
    (desc,) = frames.descs
    assert len(desc.submodules) == NESTED[name]
    assert frames.runs == 1
    assert below.runs == len(below.graphs) >= 1


def test_flex_attention_of_aotautograd_round_trips():
    """The tensors of a block mask are inputs, and the mask is a graph."""
    q = torch.randn(1, 2, 128, 16)
    mask = create_block_mask(lambda _b, _h, i, j: i >= j, 1, 2, 128, 128, device="cpu")
    frames = Frames(run=False)
    compile_and_run(
        lambda q: flex_attention(q, q, q, block_mask=mask), q, backend=frames.aot(), backward=False
    )
    assert any(n.target.name == "flex_attention" for d in frames.descs for n in d.nodes
               if n.op == "call_function")  # fmt: skip


def test_numpy_code_in_a_graph_round_trips():
    """Dynamo's wrappers of NumPy functions, methods, operators and attributes are encoded."""

    def function(x):
        y = np.sum(x * 2, axis=0)
        return y.sum() + x.T.mean(), y.astype(np.float32)

    frames = Frames()
    compile_and_run(function, np.arange(6.0).reshape(2, 3), backend=frames.dynamo)
    kinds = {n.target.kind for n in frames.descs[0].nodes if n.op == "call_function"}
    assert kinds >= {"numpy", "numpy_method", "numpy_operator"}


def test_auto_functionalized_operators_round_trip():
    """The overload of a mutating custom operator is an argument of the higher-order operator."""
    with torch.library._scoped_library("fakeify_graph_test", "DEF") as library:
        library.define("bump(Tensor(a!) x, float by) -> ()")
        library.impl("bump", lambda x, by: [x.add_(by)].clear(), "CompositeExplicitAutograd")

        def function(x):
            y = x.clone()
            torch.ops.fakeify_graph_test.bump(y, 2.0)
            return y

        frames = Frames()
        compile_and_run(function, torch.ones(3), backend=frames.aot())
    targets = {n.target.name for n in frames.descs[0].nodes if n.op == "call_function"}
    assert "auto_functionalized_v2" in targets


def test_the_policy_of_selective_checkpoint_is_a_named_loss():
    """The policy is a user's function: the loss has its name and the reason."""

    def policy(_ctx, op, *_args, **_kwargs):
        return op == torch.ops.aten.mm.default

    checkpoint = partial(
        torch.utils.checkpoint.checkpoint,
        lambda y: (y @ y.t()).sin(),
        use_reentrant=False,
        context_fn=partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, policy),
    )
    ((_, body),) = only_capture_of(lambda x: checkpoint(x), make_input()).desc.graph.submodules
    assert list(body.dropped_meta) == [
        (
            "_checkpoint_context_fn",
            "meta['_checkpoint_context_fn']: a value has no record; expected a constant; "
            "found an object of functools.partial. "
            "Pass a function that is registered as an operator.",
        )
    ]


# --- make_fx --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_graphs_of_make_fx_round_trip(mode):
    """The constants on the module are real or fake tensors."""
    x = torch.ones(3, 2)
    gm = make_fx(lambda x: x + torch.tensor([1.0, 2.0]) + x.shape[0], tracing_mode=mode)(x)
    desc, rebuilt = check(gm)
    assert [name for name, _ in desc.tensors] == ["_tensor_constant0"]
    assert desc.without_data == ()
    assert torch.equal(rebuilt(x), gm(x))


def test_unbacked_sizes_of_make_fx_round_trip():
    """The record has where each unbacked symbol is bound, as a path into the value."""

    def function(x):
        n = x.sum().item()
        torch._check(n >= 0)
        return torch.zeros(n), torch.nonzero(x)

    gm = make_fx(function, tracing_mode="symbolic")(torch.tensor([1, 2, 3]))
    _, rebuilt = check(gm)
    paths, again = (
        [n.meta.get("unbacked_bindings") for n in each.graph.nodes] for each in (gm, rebuilt)
    )
    assert len(paths) - paths.count(None) == 2
    assert paths == again


def test_a_joint_graph_round_trips():
    """The graph that the partitioner gets has forward and backward in one."""
    seen = []

    def partition(gm, joint_inputs, **kwargs):
        seen.append(check(gm))
        return default_partition(gm, joint_inputs, **kwargs)

    backend = aot_autograd(
        fw_compiler=lambda gm, _: make_boxed_func(gm.forward), partition_fn=partition
    )
    compile_and_run(Mlp(), make_input(), backend=backend, dynamic=True)
    assert len(seen) == 1


def test_a_symbolically_traced_module_round_trips():
    """Parameters and buffers are on the module, below plain modules that hold them."""
    model = Mlp().eval()
    gm = make_fx(lambda p, x: torch.func.functional_call(model, p, (x,)))(
        dict(model.named_parameters()), torch.ones(2, 4)
    )
    check(gm)

    class Root(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Mlp()
            self.register_buffer("gone", torch.zeros(8), persistent=False)

        def forward(self, x, scale=2.0):
            return (x @ self.inner.a.weight.t() + self.inner.a.bias) * scale - self.gone

    gm = torch.fx.symbolic_trace(Root())
    desc, rebuilt = check(gm)
    assert [name for name, _ in desc.tensors] == ["gone", "inner.a.weight", "inner.a.bias"]
    assert desc.transient_buffers == ("gone",) or desc.transient_buffers == ()
    assert list(rebuilt.state_dict()) == list(gm.state_dict())
    assert [n for n, _ in rebuilt.named_parameters()] == ["inner.a.weight", "inner.a.bias"]
    assert printed(gm) == printed(rebuilt)
