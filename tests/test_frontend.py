"""``frontend``: what another frontend than Dynamo needs, used by one that has nothing else."""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import gc
import math
import re
import runpy
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import pytest
import torch
from functorch.compile import make_boxed_func
from guard_code import equivalent_code
from guard_runs import Run, env_of_frame
from hypothesis import given, reject, settings
from shape_programs import Program, programs, variations
from small_frontend import Jit
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, ShapeEnv
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

import torch_fakeify as tfk
from torch_fakeify import frontend
from torch_fakeify.frontend import Dim, Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "jit.py"
PRIVATE = re.compile(r"torch\._|torch\.(fx\.experimental|utils\._|\w+\._)")

DYNAMIC = Policy(dims="DYNAMIC", scalars="DYNAMIC")
DUCK = Policy(dims="DUCK", scalars="DYNAMIC")


def close(ours: Any, theirs: Any) -> None:
    """Fails if two results differ."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def dense(t: torch.Tensor) -> torch.Tensor:
    """The data of a tensor of any layout."""
    return t.to_dense() if t.is_sparse else t.values() if t.is_nested else t


def grown(*sizes: int) -> torch.Tensor:
    """A tensor of these sizes, filled by position."""
    return torch.arange(math.prod(sizes), dtype=torch.float32).reshape(sizes) / 7


# --- the boundary ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", [ROOT / "tests" / "small_frontend.py", EXAMPLE], ids=lambda p: p.name
)
def test_a_frontend_needs_no_private_module(path: Path) -> None:
    """Beside ``make_fx`` the small frontends import nothing but the public names."""
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


def test_it_is_reached_from_the_package() -> None:
    """``tfk.frontend`` is the module, and what it gives is documented."""
    assert tfk.frontend is frontend
    for name in frontend.__all__:
        assert getattr(frontend, name).__doc__, name


def test_the_arguments_are_not_kept() -> None:
    """What is described can be freed before the trace begins."""
    x, y = torch.randn(4, 3), torch.randn(3)
    inputs = frontend.describe({"x": x, "more": [y]}, DYNAMIC)
    gone = [weakref.ref(x), weakref.ref(y)]
    del x, y
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert [str(n) for n in frontend.Trace(inputs).inputs[-2].size()] == ["s77", "s27"]


def test_the_records_are_data() -> None:
    """What is described crosses the boundary as bytes."""
    inputs = frontend.describe({"x": torch.randn(4, 3)}, DYNAMIC)
    (record,) = inputs.records
    assert tfk.loads(tfk.dumps([record.tensor])) == [record.tensor]


# --- guards choose --------------------------------------------------------------------------------


def branches(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Branches on sizes."""
    z = x.flatten() + y
    if x.shape[0] % 2 == 0:
        z = z * 2
    return z.relu() if 2 * x.shape[0] > 9 else z


def test_it_compiles_again_where_a_guard_is_broken() -> None:
    """One entry for each way through the function; the guard that fails is named."""
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


def test_what_the_backend_finds_out_is_guarded() -> None:
    """A condition that only the backend asks about makes the next call compile again."""

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        (x,) = (value for value in inputs if isinstance(value, torch.Tensor))
        bool(x.size(0) ** 2 <= 4096)
        return gm.forward

    fn = Jit(lambda x: x + 1, DYNAMIC, backend)
    for n, count in ((8, 1), (64, 1), (65, 2)):
        close(fn(torch.zeros(n))[0], torch.tensor(1.0))
        assert fn.count == count
    assert fn.missed[1] == ["L['x'].size()[0]*L['x'].size()[0] <= 4096"]


def test_the_backend_has_a_shape_env_of_its_own() -> None:
    """It is a fresh one, which knows what was found out while tracing."""
    seen: list[Any] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        env = env_of_frame()
        size = inputs[-1].size(0)
        seen.append((env, env.bound_sympy(size.node.expr).lower))
        assert size.node.shape_env is env
        return gm.forward

    fn = Jit(lambda x: x + 1 if x.shape[0] > 5 else x, DYNAMIC, backend)
    fn(torch.zeros(7))
    ((env, lower),) = seen
    assert env is not fn.entries[0].trace.shape_env
    assert lower == 6


class Case(NamedTuple):
    """A function and one list of arguments for each call, and how often it compiles."""

    fn: Callable[..., Any]
    calls: list[Callable[[], list[Any]]]
    count: int
    policy: Policy = DYNAMIC


def add_to_first(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Changes one argument and reads the other."""
    x.add_(1)
    return y * 2


def slices(*ranges: tuple[int, int], size: int = 12) -> Callable[[], list[Any]]:
    """Arguments that are slices of one tensor."""

    def make() -> list[Any]:
        base = grown(size)
        return [base[low:high] for low, high in ranges]

    return make


def same_twice() -> list[Any]:
    """One tensor in two arguments."""
    x = grown(5)
    return [x, x]


def base_and_alias() -> list[Any]:
    """A tensor and another one of the same numbers."""
    x = grown(5)
    return [x, x.view(5)]


def base_and_view() -> list[Any]:
    """A tensor and a view of it."""
    x = grown(6)
    return [x, x.view(3, 2)[1]]


def two_tensors(rows: int) -> Callable[[], list[Any]]:
    """A wrapper subclass and a plain tensor."""
    return lambda: [TwoTensor(grown(rows, 3), grown(rows, 3) + 1), grown(3)]


def jagged(*lengths: int) -> Callable[[], list[Any]]:
    """Two jagged tensors of one raggedness."""

    def make() -> list[Any]:
        parts = [grown(length, 4) for length in lengths]
        t = torch.nested.nested_tensor(parts, layout=torch.jagged)
        return [t, t * 2]

    return make


def transposed(x: torch.Tensor) -> torch.Tensor:
    """Changes the sizes of its argument."""
    y = x * x.shape[0]
    x.t_()
    return y + x.t()


def nested(config: dict[str, Any], parts: tuple[Any, ...], name: str = "sum") -> Any:
    """Takes containers apart and gives back others."""
    x, (y, z) = parts
    out = x * config["scale"] + y[0]
    return {name: out, "sizes": (z.shape[0], None), "rest": [z.sum(), name]}


def containers(rows: int, scale: float = 2.0, name: str = "sum") -> Callable[[], list[Any]]:
    """Nested arguments."""
    return lambda: [
        {"scale": scale, "unused": torch.float64},
        (grown(rows, 3), ([grown(3)], grown(rows + 1))),
        name,
    ]


def checked(x: torch.Tensor, n: int) -> torch.Tensor:
    """Asserts what no guard can know."""
    torch._check(n <= x.shape[0])
    return x.sum() * n


UNBACKED = Policy(named={"x": {0: "UNBACKED"}, "n": "UNBACKED"})

CASES = {
    "disjoint slices, then overlapping ones": Case(
        add_to_first,
        [slices((0, 4), (6, 10)), slices((0, 3), (5, 10)), slices((0, 6), (4, 10))],
        2,
    ),
    "slices that reach to the end": Case(add_to_first, [slices((0, 6), (4, 8), size=8)], 1),
    "separate tensors, then slices of one": Case(
        add_to_first, [lambda: [grown(4), grown(5)], slices((0, 4), (0, 5))], 2
    ),
    "slices of one tensor, then separate ones": Case(
        add_to_first, [slices((0, 4), (0, 5)), lambda: [grown(4), grown(5)]], 2
    ),
    "one tensor twice, then two": Case(
        add_to_first, [same_twice, lambda: [grown(5), grown(5)], same_twice], 2
    ),
    "a tensor and its view": Case(lambda x, y: (y.mul_(2), x + 1)[1], [base_and_view] * 2, 1),
    "wrapper subclasses": Case(
        lambda t, y: t.sin() * t.shape[0] + y, [two_tensors(4), two_tensors(6)], 1,
        Policy(named={"t": {0: "DYNAMIC"}}),
    ),
    "a subclass, then a plain tensor": Case(
        lambda t, y: t.sin() + y, [two_tensors(4), lambda: [grown(4, 3), grown(3)]], 2
    ),
    "sizes that the function changes": Case(
        transposed, [lambda: [grown(3, 4)], lambda: [grown(5, 6)]], 1
    ),
    "integers": Case(
        lambda x, n: x[:n] * n, [lambda: [grown(9), 3], lambda: [grown(7), 5]], 1
    ),
    "constant integers": Case(
        lambda x, n: x * n, [lambda: [grown(9), 3], lambda: [grown(9), 5]], 2, Policy()
    ),
    "floats": Case(
        lambda x, f: x * f, [lambda: [grown(3), 2.5], lambda: [grown(3), -1.5]], 1
    ),
    "constant floats": Case(
        lambda x, f: x * f,
        [lambda: [grown(3), 0.0], lambda: [grown(3), -0.0], lambda: [grown(3), math.nan],
         lambda: [grown(3), math.nan], lambda: [grown(3), math.inf], lambda: [grown(3), 1]],
        5,
        Policy(),
    ),
    "booleans": Case(
        lambda x, flag: x * 2 if flag else x,
        [lambda: [grown(3), True], lambda: [grown(3), False], lambda: [grown(3), True]],
        2,
    ),
    "unbacked dims": Case(
        lambda x: x.sum(0) * x.shape[0],
        [lambda: [grown(4, 2)], lambda: [grown(1, 2)], lambda: [grown(0, 2)]],
        1,
        Policy(named={"x": {0: "UNBACKED"}}),
    ),
    "unbacked integers": Case(
        checked, [lambda: [grown(4), 4], lambda: [grown(1), 0], lambda: [grown(3), 1]], 1, UNBACKED
    ),
    "containers": Case(nested, [containers(4), containers(5), containers(5, 3.0)], 1, DUCK),
    "constants in containers": Case(
        nested, [containers(4), containers(4, name="total"), containers(4, 3.0)], 3, Policy()
    ),
    "a number that is an item": Case(
        lambda x, n: x * n.item() if n.item() < 9 else x,
        [lambda n=n: [grown(4), torch.tensor(n)] for n in (3, 5, 20, 30)],
        2,
    ),
    "sizes of the data": Case(
        lambda x: x[x > 1] * 2, [lambda: [grown(30)], lambda: [grown(3)]], 1
    ),
    "sizes of zero and one": Case(
        lambda x: x + 1, [lambda n=n: [grown(n)] for n in (4, 1, 0, 5)], 3
    ),
    "tensors that the function makes": Case(
        lambda x: x + torch.ones(x.shape[0]), [lambda: [grown(3)], lambda: [grown(5)]], 1
    ),
    "operators that C++ would specialize": Case(
        lambda x: torch.nn.functional.unfold(x, 2),
        [lambda: [grown(2, 3, 4, 5)], lambda: [grown(3, 2, 6, 4)]],
        1,
    ),
    "control flow": Case(
        lambda p, x: torch.cond(p, lambda x: x + x.shape[0], lambda x: x * 2, (x,)),
        [lambda: [torch.tensor(True), grown(4)], lambda: [torch.tensor(False), grown(5)]],
        1,
    ),
    "transforms": Case(
        lambda x: torch.vmap(torch.func.grad(lambda r: r.sin().sum()))(x),
        [lambda: [grown(3, 4)], lambda: [grown(5, 2)]],
        1,
    ),
    "jagged tensors": Case(
        lambda t, u: t.sin() * u, [jagged(3, 5), jagged(2, 4, 7)], 1, Policy(dims="DYNAMIC")
    ),
    "sparse tensors": Case(
        lambda x: x * 2,
        [lambda: [grown(4, 4).to_sparse()], lambda: [grown(5, 5).to_sparse()]],
        1,
        Policy(dims="DYNAMIC"),
    ),
}  # fmt: skip


FEW = frozenset({
    "disjoint slices, then overlapping ones", "separate tensors, then slices of one",
    "slices of one tensor, then separate ones", "one tensor twice, then two",
    "a tensor and its view", "a subclass, then a plain tensor", "sizes that the function changes",
    "integers", "operators that C++ would specialize", "unbacked integers", "containers",
    "arithmetic", "a specialized size", "tied weights and buffers",
})  # fmt: skip


def some(names: Iterable[str], few: frozenset[str] = FEW) -> list[Any]:
    """Parameters of a test, of which a plain run takes a few."""
    return [pytest.param(n, marks=() if n in few else pytest.mark.sweep, id=n) for n in names]


@pytest.mark.parametrize("name", some(CASES))
def test_results_and_arguments_are_those_of_eager(name: str) -> None:
    """What is given back, and what the arguments are afterwards; and how often it compiles."""
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


def test_one_object_is_not_two_that_share_a_storage() -> None:
    """What changes the sizes of one argument would change the other's as well."""
    entry = Jit(lambda x, y: x + y, DYNAMIC, "eager").entry(
        dict(zip("xy", base_and_alias(), strict=False))
    )
    failing = entry.guards.failing(dict(zip("xy", same_twice(), strict=False)))
    assert failing is not None
    assert failing.text == "L['y'] is not L['x']"


def test_a_runtime_assert_is_checked_in_the_graph() -> None:
    """What is asserted of unbacked inputs holds or raises; nothing is compiled again."""
    fn = Jit(checked, UNBACKED)
    fn(grown(4), 2)
    with pytest.raises(RuntimeError, match=r"the graph assumes l_n <= l_x\.size\(0\)"):
        fn(grown(4), 5)
    assert fn.count == 1


def test_what_the_backend_asserts_of_inputs_is_guarded() -> None:
    """No graph checks a runtime assert that only the backend has stated; so a guard does."""

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        x, n = inputs[-2:]
        torch._check(x.size(0) + n <= 10)
        return gm.forward

    fn = Jit(lambda x, n: x.sum() * n, UNBACKED, backend)
    entry = fn.entry(fn.scope(grown(4), 3))
    assert entry.guards[-1].text == "L['x'].size()[0] + L['n'] <= 10"
    assert entry.guards.check(fn.scope(grown(5), 5))
    assert not entry.guards.check(fn.scope(grown(5), 6))


def test_a_graph_calls_its_inputs_what_they_are() -> None:
    """Placeholders are named after sources; symbols of sizes come first."""
    fn = Jit(lambda xs, scale: xs[0]["a"] * scale, DUCK, "eager")
    entry = fn.entry(fn.scope([{"a": grown(4, 6)[2:]}], 2))
    names = [node.name for node in entry.gm.graph.find_nodes(op="placeholder")]
    sizes = [str(n) for n in entry.trace.inputs[-2].size()]
    assert names[:2] == sizes
    assert names[-2:] == ["l_xs_0_a", "l_scale"]
    assert len(names) == 5  # and the offset


# --- modules and gradients ------------------------------------------------------------------------


class Tied(torch.nn.Module):
    """Shares a weight between two layers and counts its calls in a buffer."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm = torch.nn.BatchNorm1d(4)
        self.scale = 3.0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both layers."""
        self.calls.add_(1)
        return self.norm(self.second(self.first(x).relu())) * self.scale


def call_module(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A function with a module among its arguments."""
    out = model(x)
    return (out[0] if isinstance(out, tuple) else out).square().sum()


MODULES: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "tied weights and buffers": (Tied, (4,)),
    "an RNN": (lambda: torch.nn.GRU(4, 3), (2, 4)),
    "attention": (lambda: torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), (2, 4)),
}


@pytest.mark.parametrize("name", some(MODULES))
def test_gradients_are_those_of_eager(name: str) -> None:
    """Of parameters and of the input, for two sizes of it; and the buffers afterwards."""
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


def test_a_module_is_guarded_by_what_it_is() -> None:
    """Another one of its kind does; its mode, its configuration and its parts matter."""
    fn = Jit(call_module, DUCK, "eager")
    x = grown(5, 4)
    model = Tied()
    for change, count in (
        (lambda: None, 1),
        (lambda: model.load_state_dict(Tied().state_dict()), 1),
        (model.eval, 2),
        (lambda: setattr(model, "scale", 4.0), 3),
        (lambda: model.requires_grad_(requires_grad=False), 4),
        (lambda: setattr(model, "second", torch.nn.Identity()), 5),
    ):
        change()
        torch.testing.assert_close(fn(model, x), call_module(copy.deepcopy(model), x))
        assert fn.count == count
    assert fn.entries[0].guards.check(fn.scope(Tied(), x))


def test_inference_and_training_are_two_graphs() -> None:
    """Whether gradients are wanted is guarded: of the argument and of the call."""
    fn = Jit(lambda x: x.sin(), DYNAMIC)
    x = grown(4).requires_grad_()
    assert fn(x).requires_grad
    with torch.no_grad():
        assert not fn(x).requires_grad
    assert not fn(x.detach()).requires_grad
    assert fn.missed[1:] == [
        ["torch.is_grad_enabled() == True"],
        ["L['x'].requires_grad is True", "torch.is_grad_enabled() == False"],
    ]


def test_bits_of_a_tensor_are_guarded() -> None:
    """Whether it is conjugated or negated by a bit, and whether it is an inference tensor."""
    fn = Jit(lambda x: x * 2, DYNAMIC, "eager")
    x = torch.complex(grown(4), grown(4))
    with torch.inference_mode():
        inferred = x * 1
    for t in (x, x.conj(), inferred, x.conj().imag):
        entry = fn.entry({"x": t})
        close(entry.run({"x": t}), t * 2)
    assert [missed[0] for missed in fn.missed[1:]] == [
        "L['x'].is_conj() is False",
        "L['x'].is_inference() is False",
        "L['x'].dtype == torch.complex64",
    ]


def test_a_graph_for_a_view_is_not_for_other_tensors() -> None:
    """A guard on the base of a view fails where there is none."""
    fn = Jit(lambda x: x + 1, DYNAMIC, "eager")
    for x in (grown(12)[:5], grown(5)):
        close(fn(x), x + 1)
    assert fn.missed[1] == ["L['x']._base.size()[0] >= 2"]


def test_autocast_is_guarded() -> None:
    """A graph that was traced under autocast is for calls under the same."""
    fn = Jit(lambda x: x @ x, DYNAMIC)
    x = grown(4, 4)
    for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16):
        with torch.autocast("cpu", enabled=dtype is torch.bfloat16):
            assert fn(x).dtype is dtype
    assert fn.count == 2


# --- AOTAutograd itself ---------------------------------------------------------------------------


def compiler(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
    """Runs a graph as it is."""
    return make_boxed_func(gm.forward)


def half(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss whose graph branches on a size."""
    out = model(x)
    return out.square().mean() if x.shape[0] > 3 else out.sum()


HALF = Policy(named={"x": {0: "DYNAMIC"}})


def expected(model: torch.nn.Module, x: torch.Tensor) -> Any:
    """The loss and the gradients."""
    loss = half(model, x)
    return loss, torch.autograd.grad(loss, list(model.parameters()))


def test_aot_module_simplified_is_called_in_the_handoff() -> None:
    """With compilers of one's own for forward and backward."""
    fn = Jit(half, HALF)
    model, x = torch.nn.Linear(4, 2), grown(5, 4)
    scope = fn.scope(model, x)
    trace, gm = fn.traced(scope)
    graphs: list[str] = []

    def noted(kind: str) -> Any:
        return lambda gm, inputs: (graphs.append(kind), compiler(gm, inputs))[1]

    aot = frontend.aot_autograd()
    with trace.handoff(gm) as (lent, inputs):
        compiled = aot.aot_module_simplified(
            lent, inputs, fw_compiler=noted("forward"), bw_compiler=noted("backward")
        )
    (loss,) = compiled(*trace.flatten(scope))
    found = loss, torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(found, expected(model, x))
    assert graphs == ["forward", "backward"]
    assert trace.guards().failing(fn.scope(model, grown(3, 4))).text == "L['x'].size()[0] >= 4"


def test_the_joint_graph_is_exported_in_the_handoff() -> None:
    """`aot_export_joint_with_descriptors`, and what compiles its graph."""
    fn = Jit(half, HALF)
    model, x = torch.nn.Linear(4, 2), grown(5, 4)
    scope = fn.scope(model, x)
    trace, gm = fn.traced(scope)
    aot = frontend.aot_autograd()
    with trace.handoff(gm) as (lent, inputs), contextlib.ExitStack() as stack:
        joint = aot.aot_export_joint_with_descriptors(stack, lent, tuple(inputs))
        assert any(
            "tangents" in node.name
            for node in joint.graph_module.graph.find_nodes(op="placeholder")
        )
        compiled = aot.aot_compile_joint_with_descriptors(joint)
    (loss,) = compiled(*trace.flatten(scope))
    found = loss, torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(found, expected(model, x))


def test_a_module_is_exported_in_the_handoff() -> None:
    """`aot_export_module`, for inference and with a loss."""
    fn = Jit(half, HALF)
    model, x = torch.nn.Linear(4, 2), grown(5, 4)
    scope = fn.scope(model, x)
    aot = frontend.aot_autograd()
    for joint in (False, True):
        trace, gm = fn.traced(scope, sizes_as_inputs=False)
        with trace.handoff(gm) as (lent, inputs):
            graph, signature = aot.aot_export_module(
                lent, inputs, trace_joint=joint, output_loss_index=0 if joint else None
            )
        loss, *gradients = graph(*trace.flatten(scope))
        torch.testing.assert_close(loss, expected(model, x)[0])
        if joint:
            assert signature.backward_signature is not None
            torch.testing.assert_close(tuple(gradients), expected(model, x)[1])


# --- the policy -----------------------------------------------------------------------------------


def sizes_of(scope: dict[str, Any], policy: Policy | None = None) -> list[list[str]]:
    """The sizes of the fake tensors."""
    trace = frontend.Trace(frontend.describe(scope, policy))
    tensors = [t for t in trace.inputs if isinstance(t, torch.Tensor)]
    backed = {str(n): None for t in tensors for n in t.size() if str(n).startswith("s")}
    names = dict(zip(backed, "abcde", strict=False))
    return [[names.get(str(n), str(n)) for n in t.size()] for t in tensors]


def test_a_policy_for_each_dim() -> None:
    """By default nothing is dynamic; a name of an argument or a source says what is."""
    scope = {"x": grown(4, 6, 4), "more": [grown(4, 9)]}
    assert sizes_of(scope) == [["4", "6", "4"], ["4", "9"]]
    named: dict[str, Any] = {"x": {0: "DYNAMIC", -1: "DUCK"}, "L['more'][0]": {0: "UNBACKED"}}
    assert sizes_of(scope, Policy(named=named)) == [["a", "6", "b"], ["u0", "9"]]
    assert sizes_of(scope, Policy(named={"x": "DYNAMIC"})) == [["a", "b", "c"], ["4", "9"]]
    assert sizes_of({**scope, "n": 3}, Policy(named={"n": "STATIC"})) == sizes_of(scope)
    everything = Policy(dims="DYNAMIC", named={"x": "STATIC"})
    assert sizes_of(scope, everything) == [["4", "6", "4"], ["a", "b"]]


def test_the_policy_of_a_base_is_its_own() -> None:
    """Also where a view of it comes first, which does not say what is wanted of its base."""
    x = grown(4, 6)
    policy = Policy(named={"x": "DYNAMIC"})
    assert sizes_of({"view": x[1:], "x": x}, policy) == [["3", "6"], ["a", "b"]]
    assert sizes_of({"x": x, "view": x[1:]}, policy) == [["a", "b"], ["3", "6"]]


def test_duck_shapes_on_and_off() -> None:
    """Equal sizes share a symbol only if they are ``DUCK`` and the setting is on."""
    scope = {"x": grown(4, 6), "y": grown(6, 4)}
    assert sizes_of(scope, Policy(dims="DUCK")) == [["a", "b"], ["b", "a"]]
    apart = [["a", "b"], ["c", "d"]]
    assert sizes_of(scope, Policy(dims="DUCK", duck_shape=False)) == apart
    assert sizes_of(scope, Policy(dims="DYNAMIC")) == apart


def test_zero_and_one_may_be_symbols() -> None:
    """The setting of the ``ShapeEnv``."""
    scope = {"x": grown(1, 4)}
    assert sizes_of(scope, Policy(dims="DYNAMIC")) == [["1", "a"]]
    free = Policy(dims="DYNAMIC", specialize_zero_one=False)
    assert sizes_of(scope, free) == [["a", "b"]]


def test_marks_on_a_tensor_are_policy() -> None:
    """As Dynamo reads them, unless a frontend says otherwise by name, or wants none."""
    mark = torch._dynamo
    x = grown(4, 5, 6, 7, 8)
    mark.mark_dynamic(x, 0, min=2, max=64)
    mark.mark_static(x, 1)
    mark.maybe_mark_dynamic(x, 2)
    mark.decorators.mark_unbacked(x, 3)
    assert sizes_of({"x": x}) == [["a", "5", "b", "u0", "8"]]
    assert sizes_of({"x": x}, Policy(named={"x": {0: "STATIC"}})) == [["4", "5", "a", "u0", "8"]]
    assert sizes_of({"x": x}, Policy(marks=False)) == [["4", "5", "6", "7", "8"]]
    guards = Jit(lambda x: x + 1).entry({"x": x}).guards
    assert [g.text for g in guards if "size()[0]" in g.text and "stride" not in g.text] == [
        "L['x'].size()[0] >= 2",
        "L['x'].size()[0] <= 64",
    ]


def test_unbacked_dims_have_bounds() -> None:
    """Those of a policy, or of a mark."""
    x = grown(8)
    torch._dynamo.decorators.mark_unbacked(x, 0, min=3, max=9)
    for policy in (Policy(), Policy(named={"x": {0: Dim("UNBACKED", min=3, max=9)}})):
        guards = Jit(lambda x: x + 1, policy).entry({"x": x}).guards
        assert [t for t in (g.text for g in guards) if ">=" in t or "<=" in t] == [
            "L['x'].size()[0] >= 3",
            "L['x'].size()[0] <= 9",
        ]


def test_parameters_have_a_policy_of_their_own() -> None:
    """Also buffers of modules, and parameters that are arguments."""
    model = torch.nn.BatchNorm1d(4)
    scope = {"m": model, "w": torch.nn.Parameter(grown(5)), "x": grown(6)}
    assert sizes_of(scope, Policy(dims="DYNAMIC")) == [*[["4"]] * 4, [], ["5"], ["a"]]
    both = Policy(dims="DYNAMIC", parameters="DUCK")
    found = sizes_of(scope, both)
    assert found[0] == found[3] != ["4"]
    assert found[5] != ["5"]


def test_numbers_become_symbols() -> None:
    """By default for all, or by name."""
    scope = {"n": 5, "m": 7, "f": 2.5, "b": True}
    trace = frontend.Trace(frontend.describe(scope, Policy(scalars="DYNAMIC")))
    assert [type(value) for value in trace.inputs] == [
        torch.SymInt, torch.SymInt, torch.SymFloat, torch.SymBool,
    ]  # fmt: skip
    (flag,) = trace.inputs[3].node.expr.free_symbols
    bounds = trace.shape_env.var_to_range[flag]
    assert (bounds.lower, bounds.upper) == (0, 1)
    some = Policy(named={"n": Dim("UNBACKED", min=0, max=9), "m": Dim(min=2, max=50)})
    trace = frontend.Trace(frontend.describe(scope, some))
    assert [str(value) for value in trace.inputs] == ["u0", str(trace.inputs[1].node.expr)]
    # As torch has it of unbacked dims of inputs: no operator binds them.
    assert list(trace.shape_env.unbacked_inputs) == [trace.inputs[0].node.expr]
    bounds = [trace.shape_env.bound_sympy(value.node.expr) for value in trace.inputs]
    assert [(b.lower, b.upper) for b in bounds] == [(0, 9), (2, 50)]


BROKEN: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "a constant": (
        lambda x: x.reshape(4, 3),
        "DYNAMIC",
        "You marked L['x'].size()[0] as dynamic but your code specialized it to be a constant (4)",
    ),
    "a part of the range": (
        lambda x: x + 1 if x.shape[0] < 10 else x,
        Dim(min=2, max=64),
        "Not all values of L['x'].size()[0] = L['x'].size()[0] in the specified range"
        " L['x'].size()[0] <= 64 satisfy the generated guard"
        " 2 <= L['x'].size()[0] and L['x'].size()[0] <= 9",
    ),
    "not all of its multiples": (
        lambda x: x + 1 if x.shape[0] % 2 == 0 else x,
        Dim(min=2, max=64),
        "Not all values of L['x'].size()[0] = L['x'].size()[0] in the specified range"
        " L['x'].size()[0] <= 64 satisfy the generated guard (L['x'].size()[0] % 2) == 0",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_promise_is_an_error(what: str) -> None:
    """As in ``torch.export``: a dim that was promised to be dynamic may not be a constant."""
    fn, wish, found = BROKEN[what]
    with pytest.raises(tfk.ShapeEnvError) as info:
        Jit(fn, Policy(named={"x": {0: wish}}))(grown(4, 3))
    assert str(info.value) == (
        f"the trace has broken a promise of the policy; found {found}. "
        "Make the dim STATIC, or allow it with Dim(..., warn_only=True)"
    )
    dims = {0: Dim(wish, warn_only=True) if isinstance(wish, str) else
            Dim(wish.kind, wish.min, wish.max, warn_only=True)}  # fmt: skip
    close(Jit(fn, Policy(named={"x": dims}))(grown(4, 3)), fn(grown(4, 3)))


def test_a_number_that_was_promised_is_no_constant() -> None:
    """By default a number may become one; named, it may not."""
    fn = Jit(lambda x, n: x + 1 if n == 5 else x, DYNAMIC)
    close(fn(grown(4), 5), grown(4) + 1)
    named = Policy(named={"n": "DYNAMIC"})
    with pytest.raises(
        tfk.ShapeEnvError,
        match=r"L\['n'\] as dynamic but your code specialized it to be a constant \(5\)",
    ):
        Jit(fn.fn, named)(grown(4), 5)


def test_a_broken_promise_is_found_before_the_backend_is_called() -> None:
    """It may take long."""
    calls: list[Any] = []
    with pytest.raises(tfk.ShapeEnvError):
        Jit(lambda x: x.reshape(4, 3), DYNAMIC, lambda *args: calls.append(args))(grown(4, 3))
    assert calls == []


def test_a_promise_that_the_backend_breaks_is_an_error() -> None:
    """It may specialize no more than the trace."""

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        int(inputs[-1].size(0))
        return gm.forward

    with pytest.raises(tfk.ShapeEnvError, match="specialized it to be a constant \\(4\\)"):
        Jit(lambda x: x + 1, DYNAMIC, backend)(grown(4))


# --- errors ---------------------------------------------------------------------------------------

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
        ' arguments again with a policy that says "STATIC" of it',
    ),
    "a result of an unknown kind": (
        lambda: Jit(lambda x: (x, object()))(grown(3)),
        "the result[1]: a value has no record; expected a constant; found an object of builtins.object",
    ),
}


@pytest.mark.parametrize("what", ERRORS)
def test_errors_say_what_and_where(what: str) -> None:
    """The text of each error."""
    fail, text = ERRORS[what]
    with pytest.raises(tfk.FakeifyError) as info:
        fail()
    assert str(info.value).startswith(text)


def test_a_value_that_contains_itself_is_refused() -> None:
    """Else the walk would not end."""
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(tfk.UnsupportedValueError, match=r"L\['xs'\]\[0\]: a value contains itself"):
        frontend.describe({"xs": loop})


# --- guards say the same in three ways ------------------------------------------------------------

NAMES = {"torch": torch, "math": math, **SYMPY_INTERP, "check_overlapping": lambda **groups: (
    {id(t) for t in groups["non_overlapping"]}.isdisjoint(
        id(t) for t in overlapping([*groups["overlapping"], *groups["non_overlapping"]])
    )
)}  # fmt: skip


def overlapping(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Those of some slices of one storage that share an element with another one."""
    spans = [range(t.storage_offset(), t.storage_offset() + t.numel()) for t in tensors]
    shared = [
        any(set(a) & set(b) for j, b in enumerate(spans) if j != i) for i, a in enumerate(spans)
    ]
    return [t for t, is_shared in zip(tensors, shared, strict=True) if is_shared]


def by_text(guard: frontend.Guard, scope: dict[str, Any]) -> bool:
    """Whether a guard holds, by its text."""
    return eval(guard.text, {**NAMES, "L": scope})


def by_expr(guard: frontend.Guard, scope: dict[str, Any]) -> bool:
    """Whether a guard holds, by its expression."""
    assert guard.expr is not None
    values = {s: eval(s.name, {**NAMES, "L": scope}) for s in guard.expr.free_symbols}
    if any(isinstance(value, torch.SymInt) for value in values.values()):
        return by_text(guard, scope)  # a ragged size is no number of sympy's
    return bool(guard.expr.xreplace(values))


AGREE = frozenset({"constant floats", "containers"})


@pytest.mark.parametrize("name", some(CASES, AGREE))
def test_text_function_and_expression_agree(name: str) -> None:
    """For the arguments of every call; none is evaluated after one that fails."""
    case = CASES[name]
    fn = Jit(case.fn, case.policy, "eager")
    scopes = [fn.scope(*make()) for make in case.calls]
    for make in case.calls:
        fn.entry(fn.scope(*make()))
    checked = 0
    for entry in fn.entries:
        for scope in scopes:
            failing = entry.guards.failing(scope)
            for guard in entry.guards:
                holds = guard is not failing
                assert by_text(guard, scope) is holds, guard.text
                assert guard.expr is None or by_expr(guard, scope) is holds, guard.text
                checked += 1
                if not holds:
                    break
            assert entry.guards.check(scope) is (failing is None)
    assert checked > 10 * len(scopes)


def test_expressions_are_over_sources() -> None:
    """Symbols have the names of sources, so that two traces can be compared."""
    guards = Jit(branches, DUCK, "eager").entry({"x": grown(6, 5), "y": grown(30)}).guards
    assert {str(s) for expr in guards.exprs for s in expr.free_symbols} == {
        "L['x'].size()[0]", "L['x'].size()[1]", "L['x'].stride()[0]", "L['x'].stride()[1]",
        "L['x'].storage_offset()", "L['y'].size()[0]", "L['y'].stride()[0]",
        "L['y'].storage_offset()",
    }  # fmt: skip
    (guard,) = (g for g in guards if g.text == "2*L['x'].size()[0] > 9")
    assert "test_frontend.py" in str(guard)
    assert "in branches" in str(guard)


def test_guards_are_a_sequence_that_grows() -> None:
    """A frontend adds what it alone knows."""
    guards = Jit(lambda x: x + 1, DYNAMIC, "eager").entry({"x": grown(3)}).guards
    own = frontend.Guard("L['x'].sum() < 100", lambda scope: bool(scope["x"].sum() < 100))
    more = guards + [own]  # noqa: RUF005
    assert len(more) == len(guards) + 1
    assert more.failing({"x": grown(3) + 1000}) is own
    assert str(more).endswith("L['x'].sum() < 100")


# --- Dynamo's guards ------------------------------------------------------------------------------


class Same(NamedTuple):
    """A function that both frontends can trace, under one policy."""

    fn: Callable[..., Any]
    args: Callable[[], list[Any]]
    policy: Policy
    dynamic: bool | None = None
    """Dynamo's."""
    backend: str = "aot_eager"


def marked(*marks: tuple[str, int]) -> Callable[[], list[Any]]:
    """A tensor with marks."""

    def make() -> list[Any]:
        x = grown(8, 6)
        for mark, dim in marks:
            getattr(torch._dynamo.decorators, mark)(x, dim)
        return [x]

    return make


def arithmetic(x: torch.Tensor, n: int) -> Any:
    """Conditions of several kinds on sizes and an integer."""
    out = x.sum(0)
    if n % 3 == 0 and x.shape[0] > n:
        out = out + 1
    if x.shape[0] * x.shape[1] != 50:
        out = out * 2
    return out.view(2, -1)


SAME = {
    "branches": Same(branches, lambda: [grown(6, 5), grown(30)], DUCK, dynamic=True),
    "arithmetic": Same(arithmetic, lambda: [grown(8, 6), 3], DUCK, dynamic=True),
    "equal sizes": Same(lambda x, y: x @ y, lambda: [grown(4, 6), grown(6, 4)], DUCK, dynamic=True),
    "broadcast": Same(lambda x, y: x + y, lambda: [grown(4, 6), grown(1, 6)], DUCK, dynamic=True),
    "a specialized size": Same(
        lambda x: x + 1 if int(x.shape[0]) == 8 else x, lambda: [grown(8, 6)], DUCK, dynamic=True
    ),
    "strides": Same(lambda x: x * 2, lambda: [grown(6, 8).t()[1:, ::2]], DUCK, dynamic=True),
    "marks": Same(
        lambda x: x.view(-1) * 2 if x.shape[1] > 4 else x, marked(("mark_dynamic", 1)), Policy()
    ),
    "weak marks": Same(
        lambda x: x.view(4, 2, -1), marked(("maybe_mark_dynamic", 0), ("maybe_mark_dynamic", 1)),
        Policy(),
    ),
    "unbacked marks": Same(lambda x: x.sum(1) + x.shape[0], marked(("mark_unbacked", 0)), Policy()),
    "wrapper subclasses": Same(
        lambda t, y: t * t.shape[0] + y, two_tensors(4), DUCK, dynamic=True
    ),
}  # fmt: skip


def dynamos_guards(fn: Callable[..., Any], args: list[Any], **options: Any) -> list[str]:
    """The guards on shapes that Dynamo installs, those on sizes that are plain numbers as well."""
    produce = ShapeEnv.produce_guards_verbose
    found: list[str] = []

    def noted(env: Any, *args: Any, **kwargs: Any) -> Any:
        whole = {**kwargs, "ignore_static": False, "langs": ("python",)}
        texts = produce(env, *args, **whole)[0].exprs
        # Of the bases of views those are guarded by nobody.
        found.extend(t for t in texts if not re.fullmatch(r".*\._base\S* == \d+", t))
        return produce(env, *args, **kwargs)

    with mock.patch.object(ShapeEnv, "produce_guards_verbose", noted):
        Run(fn, options.pop("backend"), **options)._compiled(*args)
    return found


@pytest.mark.parametrize("name", some(SAME))
def test_guards_are_those_of_dynamo(name: str) -> None:
    """The same function under the same policy: each guard follows from those of the other."""
    case = SAME[name]
    theirs = dynamos_guards(case.fn, case.args(), dynamic=case.dynamic, backend=case.backend)
    fn = Jit(case.fn, case.policy, case.backend)
    entry = fn.entry(fn.scope(*case.args()))
    ours = [guard.text for guard in entry.guards if guard.expr is not None]
    assert theirs
    verdict = equivalent_code(theirs, ours)
    assert verdict.how == "proved", str(verdict)


# --- random programs ------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
@settings(max_examples=150)
@given(programs(policies=("dynamic", "mark", "unbacked")))
def test_guards_let_through_what_the_graph_is_right_for(program: Program) -> None:
    """Where the guards hold for other arguments, results and errors are those of eager."""
    fn = program.function()
    args = dict(zip([arg.name for arg in program.args], program.inputs(), strict=True))
    policy = DUCK if program.policy == "dynamic" else Policy()
    try:
        entry = Jit(fn, policy).compiled({**args, "warm": False})
    except tfk.ShapeEnvError as error:  # unused, or used for what is no tensor
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
    """The result, or ``RuntimeError`` if there is none."""
    try:
        return fn(**scope)
    except (RuntimeError, IndexError, ArithmeticError, ValueError, AssertionError):
        return RuntimeError


# --- the example ----------------------------------------------------------------------------------


def test_the_example_prints_what_the_readme_says(capsys: pytest.CaptureFixture[str]) -> None:
    """With any backend."""
    runpy.run_path(str(EXAMPLE))["main"]("aot_eager")
    printed = capsys.readouterr().out
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"\$ python examples/jit\.py\n(.*?)```", readme, re.DOTALL)
    assert printed == shown
