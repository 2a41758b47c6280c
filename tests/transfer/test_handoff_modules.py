"""Modules of torch and other libraries, and inputs that are no tensors, through the handoff.

Each example is compiled by a backend and through the handoff to it, and called with three sizes; all
that is seen of both is the same. What torch cannot do with the direct backend is not among the
examples: the backward of an LSTM, a jagged input of ``MultiheadAttention``, the backward of a sum over
a ragged dim.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import jagged_examples
import opaque_examples
import pytest
import subclass_examples
import sympy
import torch
from compare import check, difference
from compiled_programs import Example
from module_examples import EXAMPLES
from observe import Run, env_of_frame, observed
from observed_values import tensors_in
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch._guards import TracingContext
from torch._library.fake_class_registry import FakeScriptObject
from torch.utils import _pytree as pytree
from torch.utils._sympy.value_ranges import ValueRanges

import torch_fakeify as tfk

PLAIN = frozenset({
    "adam", "dtensor_made_inside", "graph_network_inference", "jagged_shared_offsets",
    "nested_two_tensors", "opaque_reference", "torchbind_queue",
})  # fmt: skip

LONG = frozenset({
    "dropout_inductor", "dtensor_linear_inductor", "encoder_inductor", "graph_edges_inductor",
    "graph_network_inductor", "gru", "jagged_attention_inductor",
})  # fmt: skip
"""The examples that ``.ci/run`` leaves out."""

# They enter their examples in the table when they are imported.
MODULES = (jagged_examples, opaque_examples, subclass_examples)


def checked(name: str) -> Run:
    """Compare an example with and without the handoff; returns the run without."""
    if name.startswith("torchao"):
        pytest.importorskip("torchao", reason="needs the `torchao` extra", exc_type=ImportError)
    example = EXAMPLES[name]
    found = check(example, example.backend)
    assert not {"raised", "backward raised"} & {entry[0] for entry in found.seen}
    return found


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_an_example_is_compiled_as_without_the_handoff(name: str) -> None:
    """Results, graphs, breaks, recompiles and guards of a few typical examples are equal."""
    checked(name)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name in LONG else ())
        for name in sorted(EXAMPLES.keys() - PLAIN)
    ],
)
def test_every_example_is_compiled_as_without_the_handoff(name: str) -> None:
    """Results, graphs, breaks, recompiles and guards of all other examples are equal."""
    checked(name)


# --- inputs that are no tensors -------------------------------------------------------------------


class Looking:
    """A backend that stores its inputs and runs the graph as it is."""

    def __init__(self) -> None:
        self.inputs: list[Any] = []
        self.values: list[Any] = []
        self.mode: Any = None

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """Store the inputs and the values of placeholders."""
        self.inputs = list(inputs)
        placeholders = gm.graph.find_nodes(op="placeholder")
        self.values = [n.meta["example_value"] for n in placeholders]
        self.mode = TracingContext.get().fake_mode
        return gm.forward


def looked(name: str) -> tuple[Looking, tuple[Any, ...]]:
    """Return what a backend gets at an example's first call, and the arguments of that call."""
    example, looking = EXAMPLES[name], Looking()
    torch._dynamo.reset()
    with example.around():
        fn, args, *_ = example.make()
        torch.compile(fn, backend=tfk.handoff(looking), **example.options)(*args)
    return looking, args


def test_an_object_reaches_the_backend_unchanged() -> None:
    """The input is the object itself, and the graph has Dynamo's stand-in for it."""
    looking, args = looked("process_group_of_a_mesh")
    x, mesh = looking.inputs
    assert x.fake_mode is looking.mode
    assert mesh is args[1]
    assert type(looking.values[1]) is FakeScriptObject
    assert looking.values[1].real_obj is mesh


def test_a_torchbind_object_reaches_the_backend_unchanged() -> None:
    """The stand-in of a torchbind object has as many fakes as before, of the backend's mode."""
    looking, args = looked("torchbind_queue")
    queue = looking.values[1]
    assert looking.inputs[1] is args[1]
    assert type(queue) is FakeScriptObject
    tensors = pytree.tree_leaves(vars(queue.wrapped_obj))
    assert [t.shape for t in tensors] == [(3, 3)]
    assert all(t.fake_mode is looking.mode for t in tensors)


@pytest.mark.sweep
@pytest.mark.parametrize("through", [False, True])
def test_the_mesh_of_a_distributed_result_is_the_mesh(through: bool) -> None:
    """The result has the device mesh itself, not the fake object that torch traces with."""
    example = EXAMPLES["dtensor_inputs"]
    torch._dynamo.reset()
    with example.around(), torch.no_grad():
        fn, args, *_ = example.make()
        backend = tfk.handoff("aot_eager") if through else "aot_eager"
        found = torch.compile(fn, backend=backend)(*args)
        assert not isinstance(found[0].device_mesh, FakeScriptObject)


# --- a list of tensors ----------------------------------------------------------------------------


class Total(nn.Module):
    """One number of all elements."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add their cosines."""
        return x.cos().sum()


class Backward:
    """A backend of compiled autograd, whose graphs have a list of tensors as an input."""

    def __init__(self, backend: str, *, through_handoff: bool) -> None:
        self.backend = torch._dynamo.lookup_backend(backend)
        self.calls = 0
        self.compiler = torch.compile(backend=tfk.handoff(self) if through_handoff else self)

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """Compile a graph."""
        self.calls += 1
        (listed,) = gm.graph.find_nodes(op="placeholder")[:1]
        self.inputs, self.values = list(inputs[0]), listed.meta["example_value"]
        self.read = [(user.args[1], user.meta["example_value"]) for user in listed.users]
        self.mode = TracingContext.get().fake_mode
        return self.backend(gm, inputs)

    def run(self, *rows: int) -> Run:
        """Run a program whose backward is compiled by this backend."""

        def make() -> tuple[Any, ...]:
            module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Total())
            return module, *[(torch.randn(n, 4),) for n in rows]

        around = partial(compiled_autograd._enable, self.compiler)
        return observed(Example(make=make, grad=True, around=around), "aot_eager", direct=True)


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_autograd_is_compiled_as_without_the_handoff(backend: str) -> None:
    """The tensors of its list have symbols of their own, and no size becomes a constant."""
    ours, theirs = Backward(backend, through_handoff=True), Backward(backend, through_handoff=False)
    assert difference(ours.run(2, 5, 3), theirs.run(2, 5, 3)) is None
    assert ours.calls == theirs.calls == 2
    assert len(ours.inputs) == len(theirs.inputs)


def test_a_list_of_tensors_reaches_the_backend_as_fakes() -> None:
    """Tensors in a list are fakes of the backend's mode, and so is what nodes read from it."""
    backward = Backward("eager", through_handoff=True)
    backward.run(2)
    assert len(backward.inputs) > 3
    assert all(x.fake_mode is backward.mode for x in backward.inputs)
    assert all(map(operator.is_, backward.inputs, backward.values))
    assert all(backward.inputs[i] is value for i, value in backward.read)
    assert len(backward.read) > 3


# --- the comparison -------------------------------------------------------------------------------


def changed(change: Any) -> Any:
    """A backend that changes the graph, the inputs' environment or what comes of them."""
    inner = torch._dynamo.lookup_backend("aot_eager")

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return change(gm, env_of_frame(), lambda: inner(gm, inputs))

    return backend


def unchanged(_gm: torch.fx.GraphModule, _env: Any, compile_it: Any) -> Any:
    """Nothing."""
    return compile_it()


def guarded(_gm: torch.fx.GraphModule, env: Any, compile_it: Any) -> Any:
    """One more guard."""
    symbol = next(iter(env.backed_var_to_val))
    env.evaluate_expr(symbol <= 1000)
    return compile_it()


def learned(_gm: torch.fx.GraphModule, env: Any, compile_it: Any) -> Any:
    """A fact that no guard states."""
    symbol = next(iter(env.backed_var_to_val))
    env._update_var_to_range(symbol, ValueRanges(2, 1000))
    return compile_it()


def asserted(_gm: torch.fx.GraphModule, env: Any, compile_it: Any) -> Any:
    """One more runtime assert."""
    symbol = next(s for s in env.var_to_range if s not in env.backed_var_to_val)
    env.guard_or_defer_runtime_assert(sympy.Le(symbol, 1000), "at most a thousand")
    return compile_it()


def rounded(gm: torch.fx.GraphModule, _env: Any, compile_it: Any) -> Any:
    """A result that is off by a little."""
    (output,) = gm.graph.find_nodes(op="output")
    for fx_node in [n for n in gm.graph.nodes if n.op == "call_function" and output in n.users]:
        with gm.graph.inserting_before(output):
            more = gm.graph.call_function(torch.add, (fx_node, 1e-6))
        output.replace_input_with(fx_node, more)
    gm.recompile()
    return compile_it()


def strided(_gm: torch.fx.GraphModule, _env: Any, compile_it: Any) -> Any:
    """Results of other strides."""
    compiled = compile_it()
    return lambda *args: [x.t().clone().t() if x.dim() == 2 else x for x in compiled(*args)]


def wrote(_gm: torch.fx.GraphModule, _env: Any, compile_it: Any) -> Any:
    """An input changes."""
    compiled = compile_it()
    return lambda *args: (tensors_in(args)[0].add_(0), compiled(*args))[1]


def counted(_gm: torch.fx.GraphModule, _env: Any, compile_it: Any) -> Any:
    """One more graph break."""
    counters["graph_break"]["no reason"] += 1
    return compile_it()


def drew(_gm: torch.fx.GraphModule, _env: Any, compile_it: Any) -> Any:
    """A random number is drawn in each call."""
    compiled = compile_it()
    return lambda *args: (torch.rand(()), compiled(*args))[1]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (guarded, "facts"),
        (learned, "facts"),
        (asserted, "asserts"),
        (rounded, "results"),
        (strided, "results"),
        (wrote, "results"),
        (counted, "counters"),
        (drew, "random numbers"),
    ],
)
def test_a_difference_is_found(change: Any, kind: str) -> None:
    """The comparison names the first entry in which two runs differ."""
    example = EXAMPLES["graph_network_inference"]
    ours, theirs = (observed(example, changed(c), direct=True) for c in (change, unchanged))
    assert difference(theirs, theirs) is None
    assert (difference(ours, theirs) or "").partition("[")[0] == kind


def test_a_difference_of_guards_is_found() -> None:
    """A guard more on a shape, a guard less on another input; implied ones need be no text."""
    lines = ["TREE", "+- LAMBDA_GUARD: 2 <= L['x'].size()[0]  # x", "| +- TYPE_MATCH: L['x']"]
    more = [*lines, "+- LAMBDA_GUARD: L['x'].size()[0] <= 9"]
    implied = [*lines, "+- LAMBDA_GUARD: 1 <= L['x'].size()[0]"]
    for guards, strict, loose in (
        (lines, True, True),
        (implied, False, True),
        (more, False, False),
        (lines[:2], False, False),
    ):
        ours, theirs = Run("eager"), Run("eager")
        ours.seen, theirs.seen = [("guards", guards)], [("guards", lines)]
        assert (difference(ours, theirs) is None) is strict
        assert (difference(ours, theirs, implied=True) is None) is loose


def test_a_difference_of_graphs_is_found() -> None:
    """The inner backend's graph, its inputs, and the graph of AOTAutograd."""
    example = EXAMPLES["encoder_inference"]
    theirs = observed(example, "aot_eager", direct=True)
    kinds = {entry[0] for entry in theirs.seen}
    assert {"graph", "graph of AOTAutograd"} <= kinds
    for i, entry in enumerate(theirs.seen):
        if entry[0].startswith("graph"):
            ours = Run("aot_eager")
            ours.seen = [*theirs.seen]
            ours.seen[i] = (entry[0], "another", *entry[2:])
            assert (difference(ours, theirs) or "").startswith(f"{entry[0]}[{i}]")
