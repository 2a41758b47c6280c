"""Guard nodes in graphs of other tracers and backends, across processes, and errors of ``learn``."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from assert_frames import CONFIG, everything
from observe import env_of_frame
from processes import fresh
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._guards import TracingContext
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    ShapeEnv,
)
from torch.testing._internal.two_tensor import TwoTensor

import torch_fakeify as tfk
from torch_fakeify.replay.lowering import MARK, mark_of

if TYPE_CHECKING:
    from pathlib import Path
from guard_frames import (
    CASES,
    env_after_learn,
    frame_of,
    new_inputs,
    over_branch,
    over_flatten,
    over_reshape,
    over_twice,
)

# --- errors -----------------------------------------------------------------------------------------


def test_inputs_that_contradict_are_refused() -> None:
    """The error contains the violated assumption and the sizes."""
    frame = frame_of(over_branch, torch.randn(7))
    tfk.insert_guards(frame.gm, frame.env)
    env = ShapeEnv()
    inputs = new_inputs(frame._replace(inputs=[4, torch.randn(4)]), env)
    with pytest.raises(tfk.ShapeEnvError) as raised:
        tfk.learn(frame.gm, inputs)
    assert str(raised.value) == (
        "l_x_.size(0) >= 6: the inputs contradict what the graph assumes; "
        f"expected l_x_.size(0) >= 6; found {inputs[0].node.expr} = 4. "
        "Make the inputs of the frame that the graph was traced for"
    )


def test_contradicting_facts_are_reported() -> None:
    """Without hints, the error contains the assertion and the earlier one that excludes it."""
    graph = torch.fx.Graph()
    n = graph.placeholder("n")
    for target, value in (("ge", 5), ("le", 3)):
        text = f"n {'>=' if target == 'ge' else '<='} {value}"
        fact = graph.call_function(getattr(operator, target), (n, value))
        call = graph.call_function(torch.ops.aten._assert_scalar.default, (fact, text))
        fact.meta["custom"] = {MARK: f"compute: {text}"}
        call.meta["custom"] = {MARK: f"range: {text}"}
    graph.output(n)
    gm = torch.fx.GraphModule({}, graph)
    env = ShapeEnv()
    with pytest.raises(tfk.ShapeEnvError) as raised:
        tfk.learn(gm, [env.create_unbacked_symint()])
    assert str(raised.value) == (
        "n <= 3: two facts contradict one another; expected n <= 3, which the graph assumes; "
        "found n >= 5, which the ShapeEnv knows. "
        "Make the inputs of the frame that the graph was traced for"
    )


def test_contradicting_facts_of_several_symbols_are_reported() -> None:
    """Facts are found whose contradiction neither a range nor a hint shows."""
    env = ShapeEnv()
    a, b = env.create_unbacked_symint(), env.create_unbacked_symint()
    torch._check(a + 2 * b > 710)
    graph = torch.fx.Graph()
    n = graph.placeholder("n")
    fact = graph.call_function(operator.lt, (n, 700))
    call = graph.call_function(torch.ops.aten._assert_scalar.default, (fact, "n < 700"))
    fact.meta["custom"] = {MARK: "compute: n < 700"}
    call.meta["custom"] = {MARK: "guard: n < 700"}
    graph.output(n)
    gm = torch.fx.GraphModule({}, graph)
    with pytest.raises(
        tfk.ShapeEnvError, match=r"found 710 < u0 \+ 2\*u1, which the ShapeEnv knows"
    ):
        tfk.learn(gm, [a + 2 * b])


def test_the_number_of_inputs_must_fit() -> None:
    """`learn` refuses fewer inputs than the graph has placeholders."""
    frame = frame_of(over_branch, torch.randn(7))
    with pytest.raises(tfk.ShapeEnvError, match="2 inputs, one for each placeholder; found 1"):
        tfk.learn(frame.gm, [3])


def test_inputs_of_two_modes_are_refused() -> None:
    """`learn` refuses inputs of two fake modes."""
    frame = frame_of(over_flatten, torch.randn(3, 4), torch.randn(12))
    ours, theirs = (new_inputs(frame, ShapeEnv()) for _ in range(2))
    with pytest.raises(tfk.ShapeEnvError, match=r"several fake modes; .* found 2 modes, 2 shape"):
        tfk.learn(frame.gm, [*ours[:3], theirs[3]])


def test_another_environment_is_refused() -> None:
    """The ``ShapeEnv`` must be that of the graph's fake values."""
    frame = frame_of(over_branch, torch.randn(7))
    with pytest.raises(tfk.ShapeEnvError, match=r"another ShapeEnv.* found s77"):
        tfk.insert_guards(frame.gm, ShapeEnv())


def test_a_graph_without_values_is_refused() -> None:
    """A plainly traced graph has no values of its inputs."""
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    with pytest.raises(
        tfk.ShapeEnvError, match=r"^x: an input of the graph has no fake value; exp"
    ):
        tfk.insert_guards(gm, ShapeEnv())


# --- other graphs -----------------------------------------------------------------------------------


def test_guards_are_inserted_into_graphs_of_make_fx() -> None:
    """A symbolically traced ATen graph has guards inserted and stripped as well."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.flatten() + y if x.shape[0] > 2 else x

    gm = make_fx(fn, tracing_mode="symbolic")(torch.randn(3, 4), torch.randn(12))
    env = gm.shape_env
    before = everything(gm.graph)
    report = tfk.insert_guards(gm, env)
    assert "x_1.size(0) >= 3" in report.inserted
    assert "y_1.size(0) == x_1.size(0)*x_1.size(1)" in report.inserted
    torch.testing.assert_close(gm(torch.ones(5, 2), torch.ones(10)), torch.full((10,), 2.0))
    with pytest.raises(RuntimeError, match=r"x_1.size\(0\) >= 3"):
        gm(torch.ones(2, 5), torch.ones(10))
    tfk.strip_guards(gm)
    assert everything(gm.graph) == before


@pytest.mark.parametrize("grad", [False, True])
def test_guards_survive_aot_autograd(grad: bool) -> None:
    """After functionalization and a retrace all assertions exist, marked, and can be stripped."""
    frame = frame_of(over_flatten, torch.randn(3, 4, requires_grad=grad), torch.randn(12))
    count = len(tfk.insert_guards(frame.gm, frame.env).inserted)
    seen: list[torch.fx.GraphModule] = []

    def compiler(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        seen.append(gm)
        return make_boxed_func(gm.forward)

    env = ShapeEnv()
    fakes = new_inputs(frame, env)
    mode = torch._guards.detect_fake_mode(fakes)
    with torch._guards.tracing(TracingContext(mode)):
        aot_module_simplified(frame.gm, fakes, fw_compiler=compiler)
    gm = seen[0]
    asserts = [n for n in gm.graph.nodes if n.target is torch.ops.aten._assert_scalar.default]
    assert len(asserts) == count
    assert all(mark_of(n) is not None for n in asserts)
    tfk.strip_guards(gm)
    gm.graph.lint()
    targets = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    assert torch.ops.aten._assert_scalar.default not in targets
    assert torch.ops.aten.add.Tensor in targets


@pytest.mark.parametrize("functional", [False, True])
def test_guards_survive_a_retrace(functional: bool) -> None:
    """``make_fx`` retains all assertions, also over functionalization, and they still raise."""
    frame = frame_of(over_reshape, torch.randn(2000))
    count = len(tfk.insert_guards(frame.gm, frame.env).inserted)
    fn: Any = torch.func.functionalize(frame.gm) if functional else frame.gm
    gm = make_fx(fn, tracing_mode="symbolic")(300, torch.randn(300))
    asserts = [n for n in gm.graph.nodes if n.target is torch.ops.aten._assert_scalar.default]
    assert len(asserts) == count
    assert gm(500, torch.ones(500))[0].shape == (100, 5)
    with pytest.raises(RuntimeError, match=r"^the graph assumes l_x_.size\(0\) % 100 == 0$"):
        gm(2099, torch.ones(2099))


def test_guards_of_a_wrapper_subclass_reach_the_inner_tensors() -> None:
    """Guards on inner tensors of a wrapper are asserted on sizes that are read by attribute."""
    frame = frame_of(over_branch, TwoTensor(torch.randn(7), torch.randn(7)))
    inserted = tfk.insert_guards(frame.gm, frame.env).inserted
    assert "l_x_.a.size(0) == l_x_.size(0)" in inserted
    assert "l_x_.b.size(0) == l_x_.size(0)" in inserted
    env, inputs = env_after_learn(frame)
    x = inputs[-1]
    assert env.replace(x.a.size(0).node.expr) == env.replace(x.size(0).node.expr)
    assert env.bound_sympy(env.replace(x.a.size(0).node.expr)).lower == 6


def over_item_and_sizes(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Check an element, beside equalities of sizes."""
    z = y[0].item()
    torch._check(z == 3)
    return x.flatten() + x.shape[0], torch.zeros(z)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_checks_of_data_are_not_removed(backend: str) -> None:
    """Assertions on sizes do not replace the check that an element is 3."""

    def inner(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        report = tfk.insert_guards(gm, env_of_frame())
        assert "l_x_.size(0) == s77" in report.inserted
        return torch._dynamo.lookup_backend(backend)(gm, inputs)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(**CONFIG):
        compiled = torch.compile(over_item_and_sizes, backend=inner, dynamic=True)
        compiled(torch.randn(5, 3), torch.tensor([3, 9]))
        with pytest.raises(RuntimeError):
            compiled(torch.randn(5, 3), torch.tensor([4, 9]))


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.sweep)]
)
@pytest.mark.parametrize("name", ["product", "divisible", "strides", "float", "item"])
def test_backends_compile_graphs_with_guards(name: str, backend: str) -> None:
    """A graph with guard nodes gives the same results when a backend has compiled it."""
    fn, args, _ = CASES[name]

    def inner(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        tfk.insert_guards(gm, env_of_frame())
        return torch._dynamo.lookup_backend(backend)(gm, inputs)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(**CONFIG):
        compiled = torch.compile(fn, backend=inner, dynamic=True)
        torch.testing.assert_close(compiled(*args), fn(*args))


# --- across processes -------------------------------------------------------------------------------


READER = """
import sys, torch
import torch_fakeify as tfk
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

instance = tfk.Capture.load(sys.argv[1]).instantiate()
inputs = tfk.refakeify(instance.inputs, FakeTensorMode(shape_env=ShapeEnv()))
print(tfk.learn(instance.gm, inputs))
env = next(x for x in inputs if isinstance(x, torch.SymInt)).node.shape_env
for guard in env.guards:
    print(guard.expr.func.__name__, guard.sloc.maybe_user_loc.partition("  #")[0])
print(tfk.strip_guards(instance.gm))
print([n.op for n in instance.gm.graph.nodes])
"""


@pytest.mark.sweep
def test_guard_nodes_cross_processes(tmp_path: Path) -> None:
    """A fresh interpreter learns from a file the facts of the frame, with the user's line."""
    frame_path = tmp_path / "frame.fkf"

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        tfk.insert_guards(gm, env_of_frame())
        tfk.capture(gm, inputs).save(frame_path)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(over_twice, backend=backend, dynamic=True)(torch.randn(7))
    out = fresh("-c", READER, frame_path)
    line = "return x + 1 if 2 * x.shape[0] > 9 else x - 1"
    assert out.stdout.splitlines() == [
        "3",
        f"StrictGreaterThan {line}",
        "9",
        "['placeholder', 'placeholder', 'call_function', 'output']",
    ]


def test_a_fingerprint_does_not_depend_on_the_messages() -> None:
    """Assertions that differ only in the names of symbols and nodes are one frame."""
    prints = []
    for name in ("s77", "s3"):
        graph = torch.fx.Graph()
        graph.call_function(torch.ops.aten._assert_scalar.default, (True, f"{name} >= 2"))
        graph.output(())
        prints.append(tfk.capture(torch.fx.GraphModule({}, graph), []).fingerprint())
    assert prints[0] == prints[1]
