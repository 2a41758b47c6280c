"""Runtime asserts as nodes in every program, through other tracers, and across processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import sympy
import torch
from assert_frames import (
    ASSERT,
    CASES,
    CONFIG,
    PLACE,
    SIZE,
    Case,
    T,
    asserts_of,
    calls,
    everything,
    fresh_inputs,
    raises,
    retraced,
    traced,
    unbacked_of,
)
from observe import env_of_frame
from processes import fresh
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    ShapeEnv,
)
from torch.utils._pytree import tree_leaves

import torch_fakeify as tfk
from torch_fakeify.replay.bindings import is_unbacked
from torch_fakeify.replay.lowering import mark_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    """A program, data that it accepts, data that it refuses, and the condition."""
    return CASES[request.param]


# --- every program ----------------------------------------------------------------------------------


def test_wrong_data_is_refused_with_the_condition(case: Case) -> None:
    """The graph runs on accepted data, and raises the condition that other data breaks."""
    fn, good, bad, why = case
    gm, env = traced(fn, *good)
    report = tfk.insert_runtime_asserts(gm, env)
    assert why in report.inserted
    assert report.present == report.implied == report.unplaced == ()
    gm.graph.lint()
    torch.testing.assert_close(gm(*good), fn(*good))
    assert raises(gm, *bad).startswith(f"the graph assumes {why} ({PLACE}")


def test_inserting_changes_no_environment_and_stripping_restores_the_graph(case: Case) -> None:
    """A second insertion gives the same nodes; stripped, the graph is equal node for node."""
    gm, env = traced(case[0], *case[1])
    before, facts = everything(gm.graph), tfk.snapshot(env)
    report = tfk.insert_runtime_asserts(gm, env)
    after = calls(gm)
    assert tfk.insert_runtime_asserts(gm, env) == report
    assert calls(gm) == after
    assert tfk.snapshot(env) == facts
    assert tfk.strip_guards(gm) > 0
    assert everything(gm.graph) == before


def test_an_assertion_follows_what_binds_its_last_symbol(case: Case) -> None:
    """No other node is between an assertion and the node that binds a symbol of it."""
    gm, env = traced(case[0], *case[1])
    tfk.insert_runtime_asserts(gm, env)
    last = None
    for fx_node in gm.graph.nodes:
        if mark_of(fx_node) is None:
            last = fx_node
        elif fx_node.target is ASSERT:
            assert last in sources_of(fx_node)


def sources_of(fx_node: torch.fx.Node) -> set[torch.fx.Node]:
    """Return the nodes of the graph itself that an inserted node reads."""
    todo, found = [fx_node], set[torch.fx.Node]()
    while todo:
        for arg in todo.pop().all_input_nodes:
            if mark_of(arg) is None:
                found.add(arg)
            else:
                todo.append(arg)
    return found


def test_a_retrace_has_the_same_facts(case: Case) -> None:
    """A fresh environment has as many symbols, all bound, with the same facts."""
    fn, good, bad, why = case
    gm, env = traced(fn, *good)
    report = tfk.insert_runtime_asserts(gm, env)
    again = retraced(gm)
    assert unbacked_of(again.env) == unbacked_of(env)
    assert {str(s) for s in again.env.size_like} == {str(s) for s in env.size_like}
    assert env_asserts(again.env) == env_asserts(env)
    bound = [s for n in again.gm.graph.nodes for s in n.meta.get("unbacked_bindings") or ()]
    assert [str(s) for s in bound] == list(unbacked_of(env))
    marks = [mark_of(n) for n in again.gm.graph.nodes]
    assert {m["expr"] for m in marks if m and m["what"] == "assert"} == set(report.inserted)
    assert why in raises(again.gm, *bad)
    tfk.strip_guards(again.gm)
    assert not [n for n in again.gm.graph.nodes if n.target in (ASSERT, SIZE)]


def env_asserts(env: ShapeEnv) -> list[str]:
    """Return the deferred runtime asserts, with one name for all inputs."""
    s = sympy.Symbol("s", integer=True, positive=True)
    return sorted(
        str(expr.xreplace({x: s for x in expr.free_symbols if not is_unbacked(x)}))
        for expr in asserts_of(env)
    )


def test_an_interpreter_states_the_facts_in_a_fresh_environment(case: Case) -> None:
    """The nodes, run without a trace, state the same facts."""
    gm, env = traced(case[0], *case[1])
    tfk.insert_runtime_asserts(gm, env)
    mode, inputs = fresh_inputs(gm)
    assert mode.shape_env is not None
    with mode:
        torch.fx.Interpreter(gm).run(*inputs)
    assert unbacked_of(mode.shape_env) == unbacked_of(env)
    assert env_asserts(mode.shape_env) == env_asserts(env)


def compiled_by(backend: str, gm: torch.fx.GraphModule) -> Callable[..., Any]:
    """Compile a graph by a Dynamo backend for inputs of a fresh environment."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    inputs = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    gm, inputs = tfk.refakeify((gm, inputs), mode)
    (output,) = gm.graph.find_nodes(op="output")
    output.args = (tuple(tree_leaves(output.args[0])),)
    gm.recompile()
    with tracing(TracingContext(mode)):
        return torch._dynamo.lookup_backend(backend)(gm, inputs)


def test_assertions_survive_aot_autograd(case: Case) -> None:
    """Functionalized and traced twice, the graph refuses wrong data with the same message."""
    fn, good, bad, why = case
    gm, env = traced(fn, *good)
    tfk.insert_runtime_asserts(gm, env)
    compiled = compiled_by("aot_eager", gm)
    compiled(*good)
    assert why in raises(compiled, *bad)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name",
    ["constant", *(pytest.param(n, marks=pytest.mark.sweep) for n in ("same", "nonzero", "split"))],
)
def test_inductor_checks_the_data(name: str) -> None:
    """Inductor's own check is that of the runtime asserts of the retrace, over symbols."""
    fn, good, bad, _ = CASES[name]
    gm, env = traced(fn, *good)
    tfk.insert_runtime_asserts(gm, env)
    compiled = compiled_by("inductor", gm)
    compiled(*good)
    assert "u0" in raises(compiled, *bad)


# --- across processes -------------------------------------------------------------------------------


READER = """
import sys, torch
import torch_fakeify as tfk

instance = tfk.Capture.load(sys.argv[1]).instantiate()
gm = instance.gm
print([n.meta["custom"]["torch_fakeify"] for n in gm.graph.nodes if n.meta.get("custom")])
try:
    gm(torch.tensor([1, 2, 3, 4]), torch.tensor([-5]))
except RuntimeError as error:
    print(str(error).partition(" (")[0])
env = instance.fake_mode.shape_env
again = tfk.insert_runtime_asserts(gm, env)
print(again.inserted, again.unplaced)
print(tfk.strip_guards(gm))
print([n.name for n in gm.graph.nodes if n.op.startswith("call")])
"""


@pytest.mark.sweep
def test_assertions_cross_processes(tmp_path: Path) -> None:
    """A fresh interpreter has the nodes with their marks, checks data, and strips them."""
    path = tmp_path / "frame.fkf"

    def fn(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(n.sum().item())

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        tfk.insert_runtime_asserts(gm, env_of_frame())
        tfk.capture(gm, inputs).save(path)
        return gm.forward

    torch._dynamo.reset()
    with torch._dynamo.config.patch(**CONFIG, do_not_emit_runtime_asserts=True):
        torch.compile(fn, backend=backend)(T([1, 2, 3, 4]), T([5]))
    out = fresh("-c", READER, path)
    assert out.stdout.splitlines() == [
        "['compute: 0 <= item', 'assert: 0 <= item']",
        "the graph assumes 0 <= item",
        "('0 <= item',) ()",
        "2",
        "['sum_1', 'item', 'new_zeros']",
    ]
