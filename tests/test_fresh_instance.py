"""``Capture.instantiate(fresh=True)``: a frame in a ``ShapeEnv`` that has learned the facts."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import sympy
import torch
from fresh_checks import differences, env_of, guard_code, named
from guard_code import evaluate_code
from program_runs import FAST, SLOW, python, recorded
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.source import LocalSource
from torch._dynamo.symbolic_convert import TensorifyState
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.two_tensor import TwoTensor

import torch_fakeify as tfk
from torch_fakeify import fresh_env
from torch_fakeify.desc import ExprDesc, IntNode
from torch_fakeify.expr_nodes import mark_of
from torch_fakeify.fresh_env import FreshEnv

if TYPE_CHECKING:
    from collections.abc import Callable

CONFIG = {
    "capture_scalar_outputs": True,
    "capture_dynamic_output_shape_ops": True,
    "specialize_float": False,
}


def capture_of(fn: Callable[..., Any], *calls: tuple[Any, ...], **options: Any) -> tfk.Capture:
    """The last frame of a function that Dynamo compiles for some calls."""
    captures: list[tfk.Capture] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        captures.append(tfk.capture(gm, inputs))
        return gm.forward

    torch._dynamo.reset()
    with torch._dynamo.config.patch(**CONFIG):
        compiled = torch.compile(fn, backend=backend, **options)
        for args in calls:
            compiled(*args)
    return captures[-1]


# --- the frames -----------------------------------------------------------------------------------


def product() -> tfk.Capture:
    """One size is a product of two others."""
    return capture_of(
        lambda x, y: x.flatten() + y, (torch.randn(3, 4), torch.randn(12)), dynamic=True
    )


def divisible() -> tfk.Capture:
    """A size is divisible by a number."""
    return capture_of(lambda x: x.reshape(100, -1), (torch.randn(2000),), dynamic=True)


def divisible_twice() -> tfk.Capture:
    """What was found out second says what was found out first."""

    def f(x: torch.Tensor) -> Any:
        return x.reshape(50, -1), x.reshape(100, -1), x[::2].reshape(25, -1)

    return capture_of(f, (torch.randn(2000),), dynamic=True)


def branch() -> tfk.Capture:
    """A Python branch on a size leaves nothing in the graph."""

    def f(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 5:
            return x + 1
        return x - 1

    return capture_of(f, (torch.randn(7),), dynamic=True)


def twice() -> tfk.Capture:
    """A guard that no range says."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y if 2 * x.shape[0] > 9 + y.shape[0] else x - y

    return capture_of(f, (torch.randn(17, 3), torch.randn(3)), dynamic=True)


def strides() -> tfk.Capture:
    """Strides, an offset and the sizes of a base."""

    def f(x: torch.Tensor) -> torch.Tensor:
        if x.stride(0) * 2 > x.size(1) and x.storage_offset() > 2:
            return x + 1
        return x - 1

    return capture_of(f, (torch.randn(100)[5:].as_strided((4, 5), (13, 2), 7),), dynamic=True)


def item() -> tfk.Capture:
    """A number inside an input is specialized."""

    def f(x: torch.Tensor) -> torch.Tensor:
        z = x.item()
        torch._check(z == 3)
        return torch.zeros(z)

    return capture_of(f, (torch.tensor(3),), dynamic=True)


def nonzero() -> tfk.Capture:
    """A computed size with a check, and three inputs that share a dim."""

    def f(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
        n = y.nonzero()
        torch._check(n.shape[0] <= x.shape[0], lambda: "too many")
        return n * 2, z + x

    return capture_of(f, (torch.randn(7), torch.ones(7), torch.ones(7)), dynamic=True)


def products_of_items() -> tfk.Capture:
    """Unbacked numbers whose product is a size."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b = y.tolist()
        torch._check(a * b == x.shape[0])
        return x.view(a, b)

    return capture_of(f, (torch.randn(12), torch.tensor([3, 4])), dynamic=True)


def scalars() -> tfk.Capture:
    """An integer, a float and a boolean among the inputs."""

    def f(x: torch.Tensor, n: int, s: float, b: bool) -> torch.Tensor:
        if n * x.shape[0] % 3 == 0 and s > 1.5:
            return x * n * s
        return x + s if b else x

    return capture_of(f, (torch.randn(6), 5, 2.5, True), dynamic=True)


def symbolic_boolean() -> tfk.Capture:
    """A boolean that is a symbol."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.randn(4), source=LocalSource("x"))
    flag = env.create_symbol(1, LocalSource("b"), positive=None, do_not_specialize_zero_one=True)
    gm = torch.fx.symbolic_trace(lambda x, b: x + 1)
    return tfk.capture(gm, [x, env.create_symboolnode(sympy.Eq(flag, 1))])


def jagged() -> tfk.Capture:
    """Jagged nested tensors: nested ints, sizes of inner tensors."""
    a = torch.nested.nested_tensor([torch.randn(n, 5) for n in (2, 3, 4)], layout=torch.jagged)
    return capture_of(lambda a, b: (a * b).sin(), (a, a.clone()), dynamic=True)


def wrapper() -> tfk.Capture:
    """Wrapper subclasses with a guard on their size."""

    def f(t: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return (t @ u).sin() if t.shape[0] % 2 == 0 else t @ u

    t = TwoTensor(torch.randn(6, 4), torch.randn(6, 4))
    return capture_of(f, (t, TwoTensor(torch.randn(4, 3), torch.randn(4, 3))), dynamic=True)


def pruned() -> tfk.Capture:
    """Guards on a tensor and a number that are no inputs of the graph."""

    def f(x: torch.Tensor, y: torch.Tensor, n: int) -> torch.Tensor:
        if 2 * y.shape[0] > 9 + x.shape[0] and n % 3 == 2 and y.shape[1] % 4 == 0:
            return x + 1
        return x - 1

    return capture_of(f, (torch.randn(5), torch.randn(13, 8), 5), dynamic=True)


def view() -> tfk.Capture:
    """A view whose base is no input."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1) if x.shape[0] > 3 else x

    return capture_of(f, (torch.randn(10, 6)[2:, 1:],), dynamic=True)


def marked() -> tfk.Capture:
    """A range that the user gave, and a hint of its own."""
    x = torch.randn(9, 4)
    torch._dynamo.mark_dynamic(x, 0, min=8, max=64, hint_override=16)
    return capture_of(lambda x: x * 2, (x,))


def unbacked() -> tfk.Capture:
    """Sizes of inputs without hints, with bounds and a shared name."""
    x, y = torch.randn(6, 3), torch.randn(6)
    mark_unbacked(x, 0, min=2, max=99, shape_id="rows")
    mark_unbacked(y, 0, shape_id="rows")
    return capture_of(lambda x, y: (x.sum(1) + y, x.shape[0]), (x, y))


def specialized() -> tfk.Capture:
    """A dynamic size that tracing made a number."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x + x.shape[0] if x.shape[0] == 4 else x

    return capture_of(f, (torch.randn(4, 5),), dynamic=True)


def automatic() -> tfk.Capture:
    """A size that became dynamic at the second call."""

    def f(x: torch.Tensor, n: int) -> torch.Tensor:
        return x + n if x.shape[0] > 4 else x

    return capture_of(f, (torch.randn(7, 3), 4), (torch.randn(9, 3), 6))


def other_names() -> tfk.Capture:
    """Symbols that a new environment would call otherwise, also one by the name of another."""
    env = ShapeEnv(duck_shape=False)
    env.unique_ids.add(77)  # what a new environment takes for x.size()[0]
    env.unbacked_symint_counter = 5
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.randn(6, 4), source=LocalSource("x"))
    names = (f"y{i}" for i in itertools.count())
    name = next(n for n in names if ShapeEnv()._generate_unique_id(f"L['{n}'].size()[0]") == 78)
    y = mode.from_tensor(torch.randn(8), source=LocalSource(name))

    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        n = y.nonzero()
        assert x.shape[0] + 3 > x.shape[1] + 2
        assert y.shape[0] % 4 == 0
        return n + 1, x.reshape(-1), x.shape[0] * y.shape[0]

    return tfk.capture(make_fx(f, tracing_mode="real")(x, y), [x, y])


CASES = {
    f.__name__: f
    for f in (
        product, divisible, divisible_twice, branch, twice, strides, item, nonzero, products_of_items, scalars,
        symbolic_boolean, jagged, wrapper, pruned, view, marked, unbacked, specialized, automatic,
        other_names,
    )
}  # fmt: skip


@functools.cache
def case(name: str) -> tfk.Capture:
    """The capture of one frame, made once."""
    return CASES[name]()


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What one fresh interpreter finds in the files of all frames."""
    directory = tmp_path_factory.mktemp("fresh")
    for name in CASES:
        case(name).save(directory / f"{name}.fkf")
    return found_elsewhere(directory)


def found_elsewhere(directory: Path, *options: str) -> dict[str, list[str]]:
    """What a fresh interpreter finds in the captures of a directory, by their names."""
    files = sorted(map(str, directory.glob("*.fkf")))
    found = json.loads(python("fresh_checks.py", *options, *files).splitlines()[-1])
    return {Path(path).stem: differences for path, differences in found.items()}


@pytest.mark.parametrize("name", CASES)
def test_a_fresh_instance_knows_what_the_recorded_one_knows(name: str) -> None:
    """Guards, ranges, replacements, sources, hints, asserts and lines of code are the same."""
    assert differences(case(name)) == []


@pytest.mark.parametrize("name", CASES)
def test_it_knows_so_in_another_process(name: str, elsewhere: dict[str, list[str]]) -> None:
    """The same from a file, where none of the code is that made the frame."""
    assert elsewhere[name] == []


# --- what is new ----------------------------------------------------------------------------------


def facts_by_source(instance: Any) -> dict[str, str]:
    """The guards over sources, and the user's line of each."""
    names = named(instance)
    return {
        str(guard.expr.xreplace(names)): (guard.sloc.maybe_user_loc or "").split("  #")[0]
        for guard in env_of(instance).guards
    }


def test_every_guard_has_its_line_of_code() -> None:
    """A guard that a node told and one that was stated both name the line that caused them."""
    assert facts_by_source(case("branch").instantiate(fresh=True)) == {
        "L['x'].size()[0] >= 6": "if x.shape[0] > 5:"
    }
    line = "if 2 * y.shape[0] > 9 + x.shape[0] and n % 3 == 2 and y.shape[1] % 4 == 0:"
    assert facts_by_source(case("pruned").instantiate(fresh=True)) == {
        "2*L['y'].size()[0] > L['x'].size()[0] + 9": line,
        "Eq(Mod(L['y'].size()[1], 4), 0)": line,
        "Eq(PythonMod(L['n'], 3), 2)": line,
    }


def test_what_the_inputs_tell_is_learned_from_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the nodes, a fresh environment has no guard; it is not copied from the record."""
    monkeypatch.setattr(fresh_env, "learn", lambda _gm, _inputs: 0)
    assert env_of(case("twice").instantiate(fresh=True)).guards == []
    assert len(env_of(case("pruned").instantiate(fresh=True)).guards) == 3


def test_a_divisible_size_refuses_another() -> None:
    """The guards of ``x.reshape(100, -1)`` hold for 2000 and 300, and not for 2099."""
    code = guard_code(case("divisible").instantiate(fresh=True))
    held = {n: evaluate_code(code, {"L['x'].size()[0]": n}) for n in (2000, 300, 2099, 0)}
    assert held == {2000: True, 300: True, 2099: False, 0: False}


def test_symbols_have_the_names_that_a_new_environment_gives() -> None:
    """Names of the record are free again, also for another symbol."""
    capture = case("other_names")
    restored, fresh = capture.instantiate(), capture.instantiate(fresh=True)
    old, new = (list(env_of(i).backed_var_to_val) for i in (restored, fresh))
    assert (str(old[0]), str(new[0])) == ("s78", "s77")
    assert str(old[2]) == "s79"
    assert str(new[2]) == "s78"  # which was another one's
    assert [str(s) for s in env_of(restored).var_to_stack] == ["u5"]
    assert [str(s) for s in env_of(fresh).var_to_stack] == ["u0"]
    (nonzero,) = fresh.gm.graph.find_nodes(
        op="call_function", target=torch.ops.aten.nonzero.default
    )
    assert str(nonzero.meta["val"].shape) == "torch.Size([u0, 1])"


def test_nothing_of_the_recorded_history_is_left() -> None:
    """Counters begin anew, nothing is pending, and the environment is not frozen."""
    capture = case("other_names")
    desc = capture.desc.shape_env
    assert desc is not None
    frozen = msgspec.structs.replace(
        desc, frozen=True, error_on_new_guards=True, runtime_asserts_frozen=True
    )
    damaged = msgspec.structs.replace(capture.desc, shape_env=frozen)
    env = env_of(tfk.Capture(damaged).instantiate(fresh=True))
    assert env.unbacked_symint_counter == 1
    assert env.unique_ids == {int(s.name[1:]) for s in env.backed_var_to_val}
    assert not env.pending_fresh_unbacked_symbols
    assert [env.frozen, env._error_on_new_guards, env.runtime_asserts_frozen] == [False] * 3


def test_the_default_is_the_recorded_state() -> None:
    """Without ``fresh`` the environment has the recorded state, entry by entry."""
    capture = case("strides")
    assert tfk.snapshot(env_of(capture.instantiate())) == capture.desc.shape_env
    assert tfk.snapshot(env_of(capture.instantiate(fresh=True))) != capture.desc.shape_env


def test_a_frame_without_an_environment_has_none() -> None:
    """Static fakes stay static."""
    x = FakeTensorMode().from_tensor(torch.randn(2))
    capture = tfk.capture(torch.fx.symbolic_trace(lambda x: x + 1), [x])
    assert capture.instantiate(fresh=True).shape_env is None


def test_every_table_of_symbols_is_over_the_new_ones() -> None:
    """What comes with inputs and operators is carried, table by table, under the new names."""
    env = ShapeEnv(co_fields={"co_name": "f"}, specialize_zero_one=False)
    env.unbacked_symint_counter = 5
    with env.ignore_fresh_unbacked_symbols():
        old, other = (env.create_unbacked_symint().node.expr for _ in range(2))
        number = env.create_unbacked_symfloat().node.expr
    spec = sympy.Symbol("n", integer=True)
    env.unbacked_renamings[old] = other
    env.unbacked_alloc_order[old] = 3
    env.real_tensor_prop_unbacked_vals[old] = sympy.Integer(4)
    env.var_to_hint_override[old] = 9
    env._shape_id_to_unbacked_symbol["rows"] = old
    env._spec_symbol_to_compile_symbol[spec] = old
    env._shape_spec_pending_assumptions.append(({spec}, old > spec))
    env.source_to_symbol["x"] = spec
    env.source_name_to_debug_name["L['x']"] = "x"
    env.specialization_stacks[LocalSource("x")] = None
    env.size_like.add(old)
    env.axioms[sympy.Eq(old, old, evaluate=False)] = sympy.true
    graph = torch.fx.Graph()
    graph.output(None)

    fresh = FreshEnv(env)
    fresh.learn(torch.fx.GraphModule(torch.nn.Module(), graph), [], [])
    made, new = fresh.env, fresh.symbols[old]
    assert [str(s) for s in fresh.symbols] == ["u5", "u6", "zuf0"]
    assert [str(s) for s in fresh.symbols.values()] == ["u0", "u1", "zuf0"]
    assert made.unbacked_renamings == {new: fresh.symbols[other]}
    assert made.unbacked_alloc_order == {new: 3}
    assert made.real_tensor_prop_unbacked_vals == {new: 4}
    assert made.var_to_hint_override == {new: 9}
    assert made._shape_id_to_unbacked_symbol == {"rows": new}
    assert made._spec_symbol_to_compile_symbol == {spec: new}
    assert made._shape_spec_pending_assumptions == [({spec}, new > spec)]
    assert made.source_to_symbol == env.source_to_symbol
    assert made.source_name_to_debug_name == env.source_name_to_debug_name
    assert made.specialization_stacks == env.specialization_stacks
    stacks = {s: env.var_to_stack[s].format() for s in (old, other, number)}
    assert {s: at.format() for s, at in made.var_to_stack.items()} == {
        fresh.symbols[s]: text for s, text in stacks.items()
    }
    made.cleanup()  # torch forgets the stacks of an environment that is not used any more
    assert {s: at.format() for s, at in env.var_to_stack.items()} == stacks
    assert all(stacks.values())
    assert made.size_like == {new}
    assert [str(condition) for condition in made.axioms] == ["Eq(u0, u0)"]  # not evaluated
    assert made.co_fields == env.co_fields
    assert made.settings == env.settings
    assert not made.pending_fresh_unbacked_symbols


def test_a_symbol_that_nobody_makes_is_refused() -> None:
    """A backed symbol without a hint; the error names it."""
    env = ShapeEnv()
    symbol = env.create_symbol(5, LocalSource("x"))
    del env.backed_var_to_val[symbol]
    with pytest.raises(tfk.ShapeEnvError) as info:
        FreshEnv(env)
    assert str(info.value) == (
        f"{symbol}: a symbol that a new ShapeEnv would not make; expected a symbol of an input, or "
        "of what an operator gives; found it is backed and has no hint. Use the environment in its "
        "recorded state: instantiate()"
    )


def test_a_symbol_without_a_source_gets_none() -> None:
    """The source by which it is made is not left behind."""
    env = ShapeEnv()
    symbol = env.create_symbol(5, LocalSource("x"))
    env.var_to_sources[symbol] = []
    env.source_to_var.clear()
    fresh = FreshEnv(env)
    assert fresh.env.var_to_sources == {fresh.symbols[symbol]: []}
    assert fresh.env.source_to_var == {}


def test_asserts_keep_their_messages_and_stacks() -> None:
    """Whoever reads a failed assert finds the line that asked for it."""
    capture = case("nonzero")
    (old,), (new,) = (
        group
        for fresh in (False, True)
        for group in env_of(capture.instantiate(fresh=fresh)).deferred_runtime_asserts.values()
    )
    assert new.msg == old.msg
    assert [f.line for f in new.stack.summary()] == [f.line for f in old.stack.summary()]


def test_a_graph_gets_the_asserts_that_it_lacks() -> None:
    """Nodes of a graph that asserts all already are those of the record; else there are more."""
    capture = case("nonzero")
    fresh = capture.instantiate(fresh=True)
    names = [fx_node.name for fx_node in capture.instantiate().gm.graph.nodes]
    assert [fx_node.name for fx_node in fresh.gm.graph.nodes] == names
    bare = capture.instantiate()
    for fx_node in reversed(list(bare.gm.graph.nodes)):
        if not fx_node.users and fx_node.op == "call_function":
            bare.gm.graph.erase_node(fx_node)
    lacking = again(bare).instantiate(fresh=True)
    marks = [mark_of(fx_node) for fx_node in lacking.gm.graph.nodes]
    assert "n.size(0) <= l_y_.size(0)" in [m["expr"] for m in marks if m and m["what"] == "assert"]


def test_old_sizes_are_excluded_once() -> None:
    """The exclusion of automatic dynamic shapes comes with the input, and is no guard beside it."""
    with torch._dynamo.config.patch(automatic_dynamic_exclusion_guard=True):
        capture = automatic()
        assert differences(capture) == []
        env = env_of(capture.instantiate(fresh=True))
        assert {n for _, n in env.exclusion_constraints} == {4, 7}
        assert not any(guard.expr.has(sympy.Ne) for guard in env.guards)


def test_a_specialized_graph_keeps_what_it_assumes() -> None:
    """``specialize_on``: conditions stay with the input, and what one graph assumes is known."""
    x = torch.randn(32, 3)
    torch._dynamo.mark_dynamic(x, 0, specialize_on=[lambda n: n % 16 == 0])
    capture = capture_of(lambda x: x * 2, (x,))
    env = env_of(capture.instantiate(fresh=True))
    (specialization,) = env.specializations
    assert [specialization.check_fn(n) for n in (32, 33)] == [True, False]
    assert env.axioms == env_of(capture.instantiate()).axioms
    assert len(env.axioms) == 8
    assert env.guards == []


def test_a_record_that_contradicts_itself_is_refused() -> None:
    """A guard that the recorded inputs violate is an error, with the guard and the numbers."""
    capture = case("pruned")
    desc = capture.desc.shape_env
    assert desc is not None
    hints = [
        msgspec.structs.replace(s, hint=s.hint and ExprDesc(nodes=(IntNode(value=4),)))
        for s in desc.symbols
    ]
    damaged = msgspec.structs.replace(desc, symbols=tuple(hints))
    with pytest.raises(tfk.ShapeEnvError) as info:
        tfk.Capture(msgspec.structs.replace(capture.desc, shape_env=damaged)).instantiate(
            fresh=True
        )
    assert str(info.value) == (
        "2*s17 > s77 + 9: a recorded fact does not hold for the recorded inputs; expected "
        "2*s17 > s77 + 9; found s17 = 4, s77 = 4. The capture is damaged: record the frame again"
    )


# --- compiling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("other_names", "symbolic_boolean")])
def test_a_fresh_instance_compiles(name: str) -> None:
    """AOTAutograd takes it, and it gives the results of the restored instance."""
    capture = case(name)
    theirs = capture.instantiate().compile("aot_eager")(*inputs_of(name))
    ours = capture.instantiate(fresh=True).compile("aot_eager")(*inputs_of(name))
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(one, torch.Tensor) and one.is_nested:
            assert torch.equal(one.values(), other.values())
        elif isinstance(one, torch.Tensor):
            assert torch.equal(one, other)
        else:
            assert one == other


def inputs_of(name: str) -> list[Any]:
    """Real inputs; numbers that a program reads from its data as it had them."""
    sizes = {"unbacked": {"u0": 6, "u1": 6}, "marked": {"s77": 9}}.get(name)
    inputs = case(name).materialize(seed=3, sizes=sizes)
    numbers = {"item": [3], "products_of_items": [3, 4]}.get(name)
    if numbers is not None:
        tensor = next(
            x for x in inputs if isinstance(x, torch.Tensor) and not x.is_floating_point()
        )
        tensor.copy_(torch.tensor(numbers).reshape(tensor.shape))
    return inputs


def test_training_through_a_fresh_instance() -> None:
    """Gradients are eager's, at other sizes too."""
    linear = torch.nn.Linear(5, 3)
    capture = capture_of(lambda x: linear(x).relu().flatten(), (torch.randn(4, 5),), dynamic=True)
    compiled = capture.instantiate(fresh=True).compile("aot_eager")
    restored = env_of(capture.instantiate())
    rows = restored.source_to_var["L['x'].size()[0]"]
    inputs = capture.materialize(seed=1, sizes={str(rows): 9})
    weight, bias = sorted(
        (x for x in inputs if isinstance(x, torch.nn.Parameter)), key=lambda p: -p.dim()
    )
    (x,) = (i for i in inputs if isinstance(i, torch.Tensor) and not i.requires_grad)
    assert x.shape == (9, 5)
    (out,) = compiled(*inputs)
    expected = torch.nn.functional.linear(x, weight, bias).relu().flatten()
    ours = torch.autograd.grad(out.square().sum(), (weight, bias))
    theirs = torch.autograd.grad(expected.square().sum(), (weight, bias))
    assert all(torch.allclose(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_float_that_the_backend_wants_as_a_constant() -> None:
    """The instance is built again, fresh again, with the constant in its graph."""
    instance = case("scalars").instantiate(fresh=True)
    environments: list[Any] = []

    def backend(gm: torch.fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
        environments.append(instance.shape_env)
        if len(environments) == 1:
            (symbol,) = (s for s in env_of(instance).backed_var_to_val if str(s).startswith("zf"))
            TensorifyState.specialize(str(symbol))
            raise TensorifyScalarRestartAnalysis(restart_reason="a float")
        return gm.forward

    instance.compile(backend)
    assert list(instance.specialized.values()) == [2.5]
    first, second = environments
    assert first is not second
    assert [g.expr for g in first.guards] == [g.expr for g in second.guards]
    assert len(second.guards) == 2
    assert not instance.gm.graph.find_nodes(op="call_method", target="item")


def test_a_fresh_instance_on_another_device() -> None:
    """What was recorded on an accelerator learns the same on the CPU."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    rows = mode.from_tensor(torch.empty(8, 6), source=LocalSource("x")).shape[0]
    with mode:
        x = torch.empty((rows, 6), device="cuda:0")

    assert rows % 4 == 0
    capture = tfk.capture(torch.fx.symbolic_trace(lambda x: x.reshape(4, -1) + 1), [x])
    instance = capture.instantiate(device="cpu", fresh=True)
    assert instance.inputs[0].device.type == "cpu"
    assert list(facts_by_source(instance)) == ["Eq(Mod(L['x'].size()[0], 4), 0)"]
    (real,) = capture.materialize(device="cpu")
    assert torch.equal(instance.compile("eager")(real), real.reshape(4, -1) + 1)


# --- captured again -------------------------------------------------------------------------------


def again(instance: Any) -> tfk.Capture:
    """The capture of an instance."""
    with instance.active():
        return tfk.capture(instance.gm, instance.inputs)


@pytest.mark.parametrize("name", CASES)
def test_a_fresh_instance_is_a_frame_like_any_other(name: str) -> None:
    """Law 6: captured again and made fresh again, its fingerprint does not change any more.

    The first time it may: the fingerprint has the guards as they are written, and of guards that
    follow from others a fresh environment has none.
    """
    once = again(case(name).instantiate(fresh=True))
    assert again(once.instantiate(fresh=True)).fingerprint() == once.fingerprint()
    assert again(once.instantiate()).fingerprint() == once.fingerprint()


def test_where_guards_are_written_alike_the_fingerprint_is_the_same() -> None:
    """Law 6 for a frame whose guards are all needed."""
    for name in ("product", "twice", "nonzero", "scalars", "wrapper", "specialized"):
        capture = case(name)
        assert again(capture.instantiate(fresh=True)).fingerprint() == capture.fingerprint()


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("slow", [False, True])
def test_every_program_is_the_same_frame_in_a_fresh_environment(
    slow: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """All frames of the program zoo: what is known, and what AOTAutograd's code computes."""
    found = found_elsewhere(recorded(tmp_path_factory, slow=slow), "--run")
    assert len(found) >= sum(p.refused is None for p in (SLOW if slow else FAST))
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_tensors_inside_a_transform_keep_their_facts() -> None:
    """No operator reads their sizes outside of it: what is known of these is stated instead."""
    found: list[tfk.Capture] = []

    def body(x: Any, y: Any) -> Any:
        if x.shape[0] > 3:
            y = y * 2
        found.append(tfk.capture(torch.fx.symbolic_trace(lambda a, b: a + b.sin()), [x, y]))
        return (x * y).sum()

    mode = FakeTensorMode(shape_env=ShapeEnv())
    x, y = mode.from_tensor(torch.randn(3, 4)), mode.from_tensor(torch.randn(4))
    with mode:
        torch.func.vmap(torch.func.grad(body), in_dims=(0, None))(x, y)
    kept, fresh = found[0].instantiate(), found[0].instantiate(fresh=True)
    ranges = [
        {str(s): (str(r.lower), str(r.upper)) for s, r in env_of(i).var_to_range.items()}
        for i in (kept, fresh)
    ]
    assert ranges[0] == ranges[1]
    assert ("4", "int_oo") in ranges[0].values()
