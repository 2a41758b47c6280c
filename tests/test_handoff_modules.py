"""The handoff with modules of torch and other libraries, and with inputs that are no tensors.

Each example is compiled by a backend and through the handoff to it, and called with three sizes.
Outputs, gradients, parameters and the state of the random numbers are the same bit for bit; so are
the graphs, their breaks, the recompiles, all guards that Dynamo installs, and what its ``ShapeEnv``
knows. What torch cannot do with the direct backend is not among the examples: the backward of an
LSTM, a jagged input of ``MultiheadAttention``, the backward of a sum over a ragged dim.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import jagged_examples
import opaque_examples
import pytest
import subclass_examples
import torch
from backend_runs import Example, Run, check, difference, run
from module_examples import EXAMPLES
from torch import nn
from torch._dynamo import compiled_autograd
from torch._guards import TracingContext
from torch._library.fake_class_registry import FakeScriptObject
from torch.utils import _pytree as pytree

import torch_fakeify as tfk

PLAIN = frozenset({
    "adam", "dtensor_made_inside", "graph_network_inference", "jagged_shared_offsets",
    "nested_two_tensors", "opaque_reference", "torchbind_queue",
})  # fmt: skip

LONG = frozenset({"dropout_inductor", "gru", "jagged_attention_inductor"})
"""Those that ``.ci/run`` has no room for."""

# They enter their examples in the table when they are imported.
ROOMS = (jagged_examples, opaque_examples, subclass_examples)


def checked(name: str) -> Run:
    """The direct backend's run of an example, to which that of the handoff is equal."""
    if name.startswith("torchao"):
        pytest.importorskip("torchao", reason="needs the `torchao` extra", exc_type=ImportError)
    return check(EXAMPLES[name])


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_an_example_is_compiled_as_without_the_handoff(name: str) -> None:
    """Results, graphs, breaks, recompiles and guards of the few that show most."""
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
    """Results, graphs, breaks, recompiles and guards of all others."""
    checked(name)


# --- inputs that are no tensors -------------------------------------------------------------------


class Looking:
    """A backend that looks at its inputs and runs the graph as it is."""

    def __init__(self) -> None:
        self.inputs: list[Any] = []
        self.values: list[Any] = []
        self.mode: Any = None

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """Looks."""
        self.inputs = list(inputs)
        placeholders = gm.graph.find_nodes(op="placeholder")
        self.values = [n.meta["example_value"] for n in placeholders]
        self.mode = TracingContext.get().fake_mode
        return gm.forward


def looked(name: str) -> tuple[Looking, tuple[Any, ...]]:
    """What a backend sees of an example's first call, and the arguments of that call."""
    example, looking = EXAMPLES[name], Looking()
    torch._dynamo.reset()
    with example.around():
        fn, args, *_ = example.make()
        torch.compile(fn, backend=tfk.handoff(looking), **example.options)(*args)
    return looking, args


def test_an_object_reaches_the_backend_as_it_is() -> None:
    """The input is the object itself; the graph says of it what Dynamo does."""
    looking, args = looked("process_group_of_a_mesh")
    x, mesh = looking.inputs
    assert x.fake_mode is looking.mode
    assert mesh is args[1]
    assert type(looking.values[1]) is FakeScriptObject
    assert looking.values[1].real_obj is mesh


def test_a_torchbind_object_stands_as_it_was() -> None:
    """The fakes in its stand-in are of the backend's mode, as many as when the frame began."""
    looking, args = looked("torchbind_queue")
    queue = looking.values[1]
    assert looking.inputs[1] is args[1]
    assert type(queue) is FakeScriptObject
    tensors = pytree.tree_leaves(vars(queue.wrapped_obj))
    assert [t.shape for t in tensors] == [(3, 3)]
    assert all(t.fake_mode is looking.mode for t in tensors)


# --- a list of tensors ----------------------------------------------------------------------------


class Backward:
    """A backend of compiled autograd, whose graphs have a list of tensors as an input."""

    def __init__(self, backend: str, *, handed: bool) -> None:
        self.backend = torch._dynamo.lookup_backend(backend)
        self.calls = 0
        self.compiler = torch.compile(backend=tfk.handoff(self) if handed else self)

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """Compiles one."""
        self.calls += 1
        (listed,) = gm.graph.find_nodes(op="placeholder")[:1]
        self.inputs, self.values = list(inputs[0]), listed.meta["example_value"]
        self.read = [(user.args[1], user.meta["example_value"]) for user in listed.users]
        self.mode = TracingContext.get().fake_mode
        return self.backend(gm, inputs)

    def run(self, *rows: int) -> Run:
        """A program whose backward is compiled with it."""

        def make() -> tuple[Any, ...]:
            return nn.Sequential(nn.Linear(4, 4), nn.ReLU()), *[(torch.randn(n, 4),) for n in rows]

        around = partial(compiled_autograd._enable, self.compiler)
        return run(Example(make=make, grad=True, around=around), "aot_eager")


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_autograd_is_compiled_as_without_the_handoff(backend: str) -> None:
    """The tensors of its list have symbols of their own: no size becomes a constant."""
    ours, theirs = Backward(backend, handed=True), Backward(backend, handed=False)
    assert difference(ours.run(2, 5, 3), theirs.run(2, 5, 3)) is None
    assert ours.calls == theirs.calls == 2
    assert len(ours.inputs) == len(theirs.inputs)


def test_a_list_of_tensors_reaches_the_backend_as_fakes() -> None:
    """Each is a fake of the backend's mode; that is what the list is, and what nodes read from it."""
    backward = Backward("eager", handed=True)
    backward.run(2)
    assert len(backward.inputs) > 3
    assert all(x.fake_mode is backward.mode for x in backward.inputs)
    assert all(map(operator.is_, backward.inputs, backward.values))
    assert all(backward.inputs[i] is value for i, value in backward.read)
    assert len(backward.read) > 3


# --- the comparison -------------------------------------------------------------------------------


def other(change: Any) -> Any:
    """A backend that does something else than AOTAutograd on its own."""
    inner = torch._dynamo.lookup_backend("aot_eager")

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        mode = TracingContext.get().fake_mode
        assert mode is not None
        change(gm, mode.shape_env)
        return inner(gm, inputs)

    return backend


def guarded(_gm: torch.fx.GraphModule, env: Any) -> None:
    """One more guard."""
    symbol = next(iter(env.backed_var_to_val))
    env.evaluate_expr(symbol <= 1000)


def rounded(gm: torch.fx.GraphModule, _env: Any) -> None:
    """A result that is off by a little."""
    (output,) = gm.graph.find_nodes(op="output")
    for fx_node in [n for n in gm.graph.nodes if n.op == "call_function" and output in n.users]:
        with gm.graph.inserting_before(output):
            more = gm.graph.call_function(torch.add, (fx_node, 1e-6))
        output.replace_input_with(fx_node, more)
    gm.recompile()


@pytest.mark.parametrize(
    ("change", "said"), [(guarded, "guards[0] on shapes"), (rounded, "results")]
)
def test_a_difference_is_told(change: Any, said: str) -> None:
    """A guard more and a digit less do not go unseen."""
    example = EXAMPLES["opaque_value"]
    found = difference(run(example, other(change)), run(example, "aot_eager"))
    assert found is not None
    assert found.startswith(said)
