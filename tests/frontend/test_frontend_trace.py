"""``frontend.Trace``: results, gradients, AOTAutograd and errors, through public names alone."""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import gc
import re
import runpy
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from functorch.compile import make_boxed_func
from hypothesis import given, reject, settings
from places import HARNESS, ROOT
from shape_programs import Program, programs, variations
from small_frontend import Jit
from torch.utils import _pytree as pytree

import torch_fakeify as tfk
from torch_fakeify import frontend
from torch_fakeify.frontend import Dim, Policy

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
from frontend_cases import (
    CASES,
    DUCK,
    DYNAMIC,
    UNBACKED,
    Tied,
    branches,
    call_module,
    checked,
    close,
    grown,
    same_twice,
    some,
)

EXAMPLE = ROOT / "examples" / "jit.py"


PRIVATE = re.compile(r"torch\._|torch\.(fx\.experimental|utils\._|\w+\._)")


def dense(t: torch.Tensor) -> torch.Tensor:
    """Return the data of a tensor of any layout."""
    return t.to_dense() if t.is_sparse else t.values() if t.is_nested else t


# --- the boundary -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [HARNESS / "small_frontend.py", EXAMPLE], ids=lambda p: p.name)
def test_a_frontend_needs_no_private_module(path: Path) -> None:
    """Apart from ``make_fx`` the small frontends import only public names."""
    names: set[str] = set()
    for entry in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(entry, ast.Import):
            names |= {alias.name for alias in entry.names}
        elif isinstance(entry, ast.ImportFrom):
            names |= {f"{entry.module}.{alias.name}" for alias in entry.names}
        elif isinstance(entry, ast.Attribute):
            assert (
                not entry.attr.startswith("_")
                or entry.attr.startswith("__")
                or (isinstance(entry.value, ast.Name) and entry.value.id == "self")
            ), entry.attr
    assert {name for name in names if PRIVATE.match(name)} == set()
    ours = {name for name in names if name.startswith("torch_fakeify")}
    assert ours <= {"torch_fakeify", "torch_fakeify.frontend"}
    assert "functorch.make_fx" in names


def test_frontend_is_an_attribute_of_the_package() -> None:
    """``tfk.frontend`` is the module, and its public names are documented."""
    assert tfk.frontend is frontend
    for name in frontend.__all__:
        assert getattr(frontend, name).__doc__, name


def test_the_arguments_are_not_held() -> None:
    """The described arguments can be freed before the trace begins."""
    x, y = torch.randn(4, 3), torch.randn(3)
    inputs = frontend.describe({"x": x, "more": [y]}, DYNAMIC)
    refs = [weakref.ref(x), weakref.ref(y)]
    del x, y
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
    assert [str(n) for n in frontend.Trace(inputs).inputs[-2].size()] == ["s77", "s27"]


# --- guards choose ----------------------------------------------------------------------------------


def test_a_violated_guard_compiles_again() -> None:
    """Each branch of the function has one entry, and the guard that fails is named."""
    fn = Jit(branches, DUCK)
    for rows, columns, count in ((6, 5, 1), (8, 3, 1), (7, 4, 2), (4, 3, 3), (2, 7, 3), (9, 2, 3)):
        x, y = grown(rows, columns), grown(rows * columns)
        close(fn(x, y), branches(x, y))
        assert fn.count == count
    assert fn.missed == [
        [],
        ["(L['x'].size()[0] % 2) == 0"],
        ["2*L['x'].size()[0] > 9", "(L['x'].size()[0] % 2) != 0"],
    ]


def test_conditions_of_the_backend_are_guarded() -> None:
    """A condition that only the backend evaluates makes the next call compile again."""

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        (x,) = (value for value in inputs if isinstance(value, torch.Tensor))
        bool(x.size(0) ** 2 <= 4096)
        return gm.forward

    fn = Jit(lambda x: x + 1, DYNAMIC, backend)
    for n, count in ((8, 1), (64, 1), (65, 2)):
        close(fn(torch.zeros(n))[0], torch.tensor(1.0))
        assert fn.count == count
    assert fn.missed[1] == ["L['x'].size()[0]*L['x'].size()[0] <= 4096"]


def base_and_alias() -> list[Any]:
    """Return a tensor and another one on the same storage."""
    x = grown(5)
    return [x, x.view(5)]


@pytest.mark.parametrize("name", some(CASES))
def test_results_and_arguments_are_those_of_eager(name: str) -> None:
    """Results, arguments afterwards and the number of compilations are compared."""
    case = CASES[name]
    fn = Jit(case.fn, case.policy)
    for make in case.calls:
        ours, theirs = make(), make()
        found, expected = fn(*ours), case.fn(*theirs)
        assert pytree.tree_structure(found) == pytree.tree_structure(expected)
        for a, b in zip(
            pytree.tree_leaves((found, ours)), pytree.tree_leaves((expected, theirs)), strict=True
        ):
            assert type(a) is type(b)
            if isinstance(a, torch.Tensor):
                close(dense(a), dense(b))
            else:
                assert a == b or (a != a and b != b)
    assert fn.count == case.count


def test_one_object_in_two_arguments_is_guarded() -> None:
    """A graph for two tensors on one storage is not used for one tensor passed twice."""
    entry = Jit(lambda x, y: x + y, DYNAMIC, "eager").entry(
        dict(zip("xy", base_and_alias(), strict=False))
    )
    failing = entry.guards.failing(dict(zip("xy", same_twice(), strict=False)))
    assert failing is not None
    assert failing.text == "L['y'] is not L['x']"


def test_a_runtime_assert_is_checked_in_the_graph() -> None:
    """An assert on unbacked inputs holds or raises, and nothing is compiled again."""
    fn = Jit(checked, UNBACKED)
    fn(grown(4), 2)
    with pytest.raises(RuntimeError, match=r"the graph assumes l_n <= l_x\.size\(0\)"):
        fn(grown(4), 5)
    assert fn.count == 1


def test_asserts_of_the_backend_on_inputs_are_guarded() -> None:
    """A runtime assert that only the backend states is in no graph, so it becomes a guard."""

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        x, n = inputs[-2:]
        torch._check(x.size(0) + n <= 10)
        return gm.forward

    fn = Jit(lambda x, n: x.sum() * n, UNBACKED, backend)
    entry = fn.entry(fn.scope(grown(4), 3))
    assert entry.guards[-1].text == "L['n'] + L['x'].size()[0] <= 10"
    assert entry.guards.check(fn.scope(grown(5), 5))
    assert not entry.guards.check(fn.scope(grown(5), 6))


def test_placeholders_are_named_after_sources() -> None:
    """Placeholders are named after their sources, and the symbols of sizes come first."""
    fn = Jit(lambda xs, scale: xs[0]["a"] * scale, DUCK, "eager")
    entry = fn.entry(fn.scope([{"a": grown(4, 6)[2:]}], 2))
    names = [node.name for node in entry.gm.graph.find_nodes(op="placeholder")]
    sizes = [str(n) for n in entry.trace.inputs[-2].size()]
    assert names[:2] == sizes
    assert names[-2:] == ["l_xs_0_a", "l_scale"]
    assert len(names) == 5  # and the symbol of the offset


# --- modules and gradients --------------------------------------------------------------------------


MODULES: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "tied weights and buffers": (Tied, (4,)),
    "an RNN": (lambda: torch.nn.GRU(4, 3), (2, 4)),
    "attention": (lambda: torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), (2, 4)),
}


@pytest.mark.parametrize("name", some(MODULES))
def test_gradients_are_those_of_eager(name: str) -> None:
    """Gradients of parameters and input, and the buffers, are compared for two sizes."""
    make, sizes = MODULES[name]
    torch.manual_seed(0)
    ours = make()
    theirs = copy.deepcopy(ours)
    fn = Jit(call_module, Policy(named={"x": {0: Dim("DYNAMIC", warn_only=True)}}))
    for rows in (5, 7):
        results: list[Any] = []
        for call, model in ((fn, ours), (call_module, theirs)):
            x = grown(rows, *sizes).requires_grad_()
            loss = call(model, x)
            results.append((loss, torch.autograd.grad(loss, [x, *model.parameters()])))
        torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()))
    assert fn.count <= (2 if name == "an RNN" else 1)


# --- AOTAutograd itself -----------------------------------------------------------------------------


def compiler(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
    """Run a graph as it is."""
    return make_boxed_func(gm.forward)


def half(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return a loss whose graph branches on a size."""
    out = model(x)
    return out.square().mean() if x.shape[0] > 3 else out.sum()


HALF = Policy(named={"x": {0: "DYNAMIC"}})


class Lent:
    """A loss of a module, traced, with its graph, arguments and expected results."""

    def __init__(self, **options: Any) -> None:
        self.fn = Jit(half, HALF)
        self.model, x = torch.nn.Linear(4, 2), grown(5, 4)
        self.scope = self.fn.scope(self.model, x)
        self.trace, self.gm = self.fn.traced(self.scope, **options)
        self.arguments = self.trace.flatten(self.scope)
        loss = half(self.model, x)
        self.expected = loss, torch.autograd.grad(loss, list(self.model.parameters()))

    def check(self, loss: torch.Tensor) -> None:
        """Compare a loss and its gradients."""
        found = loss, torch.autograd.grad(loss, list(self.model.parameters()))
        torch.testing.assert_close(found, self.expected)


def test_aot_module_simplified_is_called_in_the_handoff() -> None:
    """The compilers of `aot_module_simplified` for forward and backward are the caller's."""
    one = Lent()
    graphs: list[str] = []

    def noted(kind: str) -> Any:
        return lambda gm, inputs: (graphs.append(kind), compiler(gm, inputs))[1]

    aot = frontend.aot_autograd()
    with one.trace.handoff(one.gm) as (lent, inputs):
        compiled = aot.aot_module_simplified(
            lent, inputs, fw_compiler=noted("forward"), bw_compiler=noted("backward")
        )
    (loss,) = compiled(*one.arguments)
    one.check(loss)
    assert graphs == ["forward", "backward"]
    other = one.fn.scope(one.model, grown(3, 4))
    assert one.trace.guards().failing(other).text == "L['x'].size()[0] >= 4"


def test_the_joint_graph_is_exported_in_the_handoff() -> None:
    """The graph of `aot_export_joint_with_descriptors` is compiled."""
    one, aot = Lent(), frontend.aot_autograd()
    with one.trace.handoff(one.gm) as (lent, inputs), contextlib.ExitStack() as stack:
        joint = aot.aot_export_joint_with_descriptors(stack, lent, tuple(inputs))
        placeholders = joint.graph_module.graph.find_nodes(op="placeholder")
        assert any("tangents" in node.name for node in placeholders)
        compiled = aot.aot_compile_joint_with_descriptors(joint)
    (loss,) = compiled(*one.arguments)
    one.check(loss)


@pytest.mark.parametrize("joint", [False, True])
def test_a_module_is_exported_in_the_handoff(joint: bool) -> None:
    """`aot_export_module` is called for inference and with a loss."""
    one = Lent(sizes_as_inputs=False)
    with one.trace.handoff(one.gm) as (lent, inputs):
        graph, signature = frontend.aot_autograd().aot_export_module(
            lent, inputs, trace_joint=joint, output_loss_index=0 if joint else None
        )
    loss, *gradients = graph(*one.arguments)
    torch.testing.assert_close(loss, one.expected[0])
    if joint:
        assert signature.backward_signature is not None
        torch.testing.assert_close(tuple(gradients), one.expected[1])


# --- errors -----------------------------------------------------------------------------------------


ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "no such input": (
        lambda: frontend.describe({"x": grown(3)}, Policy(named={"z": "DYNAMIC"})),
        "z: the policy names what is no input; expected L['x']. Name an argument, or the source of"
        " a part of one: \"L['xs'][0]\"",
    ),
    "no such dim": (
        lambda: frontend.describe({"x": grown(3)}, Policy(named={"x": {1: "DYNAMIC"}})),
        "L['x']: the policy names a dim that the tensor does not have; expected a dim of 1; found 1",
    ),
    "dims of a number": (
        lambda: frontend.describe({"n": 3}, Policy(named={"n": {0: "DYNAMIC"}})),
        "L['n']: a number has no dims; expected a Dim",
    ),
    "no such policy": (
        lambda: Dim("AUTO"),  # type: ignore[arg-type]
        "there is no such policy for a dim; expected DYNAMIC | DUCK | STATIC | UNBACKED; found AUTO",
    ),
    "a value of an unknown kind": (
        lambda: frontend.describe({"xs": [object()]}),
        "L['xs'][0]: a value of the scope is neither an input nor a constant; expected a tensor, a"
        " number, a constant, a list, tuple or dict of them, or a module; found builtins.object."
        " Give what the function reads of it as names of the scope",
    ),
    "an unbacked float": (
        lambda: frontend.Trace(frontend.describe({"f": 2.5}, Policy(scalars="UNBACKED"))),
        "L['f']: only an integer can be an unbacked input; found float. Make it DYNAMIC or STATIC",
    ),
    "a graph of other inputs": (
        lambda: frontend.Trace(frontend.describe({"x": grown(3)})).compile(
            torch.fx.symbolic_trace(lambda x, y: x + y), "eager"
        ),
        "the graph does not take the inputs of the trace; expected 1 placeholders, one for each"
        " input; found 2. Trace a function of trace.inputs, such as trace.flat(call, scope)",
    ),
    "a float that a backend specializes": (
        lambda: Jit(lambda x, f: x * int(f * 2), DYNAMIC)(grown(3), 2.5),
        "L['f']: the backend cannot have a float as a symbol; expected a constant. Describe the"
        ' arguments again with a policy that makes it "STATIC"',
    ),
    "a result of an unknown kind": (
        lambda: Jit(lambda x: (x, object()))(grown(3)),
        "the result[1]: a value has no record; expected a constant; found an object of builtins.object",
    ),
}


@pytest.mark.parametrize("what", ERRORS)
def test_errors_explain_what_and_where(what: str) -> None:
    """The text of each error explains what is wrong and where."""
    fail, text = ERRORS[what]
    with pytest.raises(tfk.FakeifyError) as info:
        fail()
    assert str(info.value).startswith(text)


# --- random programs --------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
@settings(max_examples=150)
@given(programs(policies=("dynamic", "mark", "unbacked")))
def test_guards_hold_only_where_the_graph_is_right(program: Program) -> None:
    """Where the guards hold for other arguments, results and errors equal eager's."""
    fn = program.function()
    args = dict(zip([arg.name for arg in program.args], program.inputs(), strict=True))
    policy = DUCK if program.policy == "dynamic" else Policy()
    try:
        entry = Jit(fn, policy).compiled({**args, "warm": False})
    except tfk.ShapeEnvError as error:  # unused, or used as what is no tensor
        if error.where != "L['f']":
            raise
        policy = dataclasses.replace(policy, named={"L['f']": "STATIC"})
        entry = Jit(fn, policy).compiled({**args, "warm": False})
    except torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode:
        reject()
    for scope in ({**args, "warm": False}, *variations(program, 6)):
        if entry.guards.check(scope):
            expected, found = outcome(fn, scope), outcome(lambda **scope: entry.run(scope), scope)
            assert type(found) is type(expected), (found, expected)
            if expected is not RuntimeError:
                torch.testing.assert_close(found, expected, equal_nan=True)
        else:
            assert scope["warm"] is False
            assert scope.keys() == {*args, "warm"}


def outcome(fn: Callable[..., Any], scope: dict[str, Any]) -> Any:
    """Return the result, or ``RuntimeError`` if there is none."""
    try:
        return fn(**scope)
    except (RuntimeError, IndexError, ArithmeticError, ValueError, AssertionError):
        return RuntimeError


# --- the example ------------------------------------------------------------------------------------


def test_the_example_prints_what_its_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """The example prints what its documentation page shows, with another backend too."""
    runpy.run_path(str(EXAMPLE))["main"]("aot_eager")
    printed = capsys.readouterr().out
    readme = (ROOT / "docs" / "python" / "frontend.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"\$ python examples/jit\.py\n(.*?)```", readme, re.DOTALL)
    assert printed == shown
