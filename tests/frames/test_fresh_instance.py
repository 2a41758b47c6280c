"""``Capture.instantiate(fresh=True)``: facts, names and errors of the new ``ShapeEnv``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import sympy
import torch
from fresh_checks import differences, env_of, guard_code
from fresh_frames import CASES, again, automatic, capture_of, case, facts_by_source, found_elsewhere
from guard_code import evaluate_code
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torch_fakeify as tfk
from torch_fakeify.records.tensor import ExprDesc, IntNode
from torch_fakeify.replay.lowering import mark_of
from torch_fakeify.transfer import fresh_env
from torch_fakeify.transfer.fresh_env import FreshEnv

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What one fresh interpreter finds in the files of all frames."""
    directory = tmp_path_factory.mktemp("fresh")
    for name in CASES:
        case(name).save(directory / f"{name}.fkf")
    return found_elsewhere(directory, "fresh")


@pytest.mark.parametrize("name", CASES)
def test_a_fresh_instance_has_the_facts_of_the_record(name: str) -> None:
    """Guards, ranges, replacements, sources, hints, asserts and lines of code are equal."""
    assert differences(case(name)) == []


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_a_fresh_instance_has_the_facts_in_another_process(
    name: str, elsewhere: dict[str, list[str]]
) -> None:
    """The facts are equal also where the code that made the frame is missing."""
    assert elsewhere[name] == []


def test_every_guard_has_its_line_of_code() -> None:
    """Guards that a node caused and guards that were stated have the line that caused them."""
    assert facts_by_source(case("branch").instantiate(fresh=True)) == {
        "L['x'].size()[0] >= 6": "return x + 1 if x.shape[0] > 5 else x - 1"
    }
    line = "if 2 * y.shape[0] > 9 + x.shape[0] and n % 3 == 2 and y.shape[1] % 4 == 0:"
    assert facts_by_source(case("pruned").instantiate(fresh=True)) == {
        "2*L['y'].size()[0] > L['x'].size()[0] + 9": line,
        "Eq(Mod(L['y'].size()[1], 4), 0)": line,
        "Eq(PythonMod(L['n'], 3), 2)": line,
    }


def test_the_guards_of_inputs_come_from_running_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its nodes a fresh environment has no guard: none is copied from the record."""
    monkeypatch.setattr(fresh_env, "learn", lambda _gm, _inputs: 0)
    assert env_of(case("twice").instantiate(fresh=True)).guards == []
    assert len(env_of(case("pruned").instantiate(fresh=True)).guards) == 3


def test_a_divisible_size_refuses_others() -> None:
    """The guards of ``x.reshape(100, -1)`` hold for 2000 and 300, and not for 2099."""
    code = guard_code(case("divisible").instantiate(fresh=True))
    held = {n: evaluate_code(code, {"L['x'].size()[0]": n}) for n in (2000, 300, 2099, 0)}
    assert held == {2000: True, 300: True, 2099: False, 0: False}


def test_symbols_have_the_names_that_a_new_environment_gives() -> None:
    """A name in the record may be the name of another symbol in a fresh environment."""
    capture = case("other_names")
    restored, fresh = capture.instantiate(), capture.instantiate(fresh=True)
    old, new = (list(env_of(i).backed_var_to_val) for i in (restored, fresh))
    assert (str(old[0]), str(new[0])) == ("s78", "s77")
    assert str(old[2]) == "s79"
    assert str(new[2]) == "s78"  # the name of another symbol in the record
    assert [str(s) for s in env_of(restored).var_to_stack] == ["u5"]
    assert [str(s) for s in env_of(fresh).var_to_stack] == ["u0"]
    (nonzero,) = fresh.gm.graph.find_nodes(
        op="call_function", target=torch.ops.aten.nonzero.default
    )
    assert str(nonzero.meta["val"].shape) == "torch.Size([u0, 1])"


def test_a_fresh_environment_has_no_recorded_history() -> None:
    """Counters start anew, no symbol is pending, and the environment is not frozen."""
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
    """Without ``fresh`` the environment equals the recorded one, entry by entry."""
    capture = case("strides")
    assert tfk.snapshot(env_of(capture.instantiate())) == capture.desc.shape_env
    assert tfk.snapshot(env_of(capture.instantiate(fresh=True))) != capture.desc.shape_env
    x = FakeTensorMode().from_tensor(torch.randn(2))
    static = tfk.capture(torch.fx.symbolic_trace(lambda x: x + 1), [x])
    assert static.instantiate(fresh=True).shape_env is None


def test_every_table_has_the_new_symbols() -> None:
    """Entries of inputs and operators are copied, table by table, under the new names."""
    env = ShapeEnv(co_fields={"co_name": "f"}, specialize_zero_one=False)
    env.unbacked_symint_counter = 5
    with env.ignore_fresh_unbacked_symbols():
        old, other = (env.create_unbacked_symint().node.expr for _ in range(2))
        number = env.create_unbacked_symfloat().node.expr
    spec = sympy.Symbol("n", integer=True)
    tables: dict[str, Callable[[Any, Any], Any]] = {
        "unbacked_renamings": lambda old, other: {old: other},
        "unbacked_alloc_order": lambda old, _: {old: 3},
        "real_tensor_prop_unbacked_vals": lambda old, _: {old: sympy.Integer(4)},
        "var_to_hint_override": lambda old, _: {old: 9},
        "_shape_id_to_unbacked_symbol": lambda old, _: {"rows": old},
        "_spec_symbol_to_compile_symbol": lambda old, _: {spec: old},
        "source_to_symbol": lambda *_: {"x": spec},
        "source_name_to_debug_name": lambda *_: {"L['x']": "x"},
        "specialization_stacks": lambda *_: {LocalSource("x"): None},
    }
    for name, table in tables.items():
        getattr(env, name).update(table(old, other))
    env._shape_spec_pending_assumptions.append(({spec}, old > spec))
    env.size_like.add(old)
    env.axioms[sympy.Eq(old, old, evaluate=False)] = sympy.true
    graph = torch.fx.Graph()
    graph.output(None)

    fresh = FreshEnv(env)
    fresh.derive_facts(torch.fx.GraphModule(torch.nn.Module(), graph), [], [])
    made, new = fresh.env, fresh.symbols[old]
    assert [str(s) for s in fresh.symbols] == ["u5", "u6", "zuf0"]
    assert [str(s) for s in fresh.symbols.values()] == ["u0", "u1", "zuf0"]
    for name, table in tables.items():
        assert getattr(made, name) == table(new, fresh.symbols[other]), name
    assert made._shape_spec_pending_assumptions == [({spec}, new > spec)]
    stacks = {s: env.var_to_stack[s].format() for s in (old, other, number)}
    assert {s: at.format() for s, at in made.var_to_stack.items()} == {
        fresh.symbols[s]: text for s, text in stacks.items()
    }
    made.cleanup()  # torch removes the stacks of an environment that is no longer used
    assert {s: at.format() for s, at in env.var_to_stack.items()} == stacks
    assert all(stacks.values())
    assert made.size_like == {new}
    assert [str(condition) for condition in made.axioms] == ["Eq(u0, u0)"]  # not evaluated
    assert made.co_fields == env.co_fields
    assert made.settings == env.settings
    assert not made.pending_fresh_unbacked_symbols


def test_a_symbol_that_a_new_environment_would_not_make_is_refused() -> None:
    """The error names a backed symbol without a hint."""
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
    """The source by which it is made is removed again."""
    env = ShapeEnv()
    symbol = env.create_symbol(5, LocalSource("x"))
    env.var_to_sources[symbol] = []
    env.source_to_var.clear()
    fresh = FreshEnv(env)
    assert fresh.env.var_to_sources == {fresh.symbols[symbol]: []}
    assert fresh.env.source_to_var == {}


def test_asserts_of_a_fresh_instance_have_their_messages_and_stacks() -> None:
    """A failed assert shows the line that asked for it."""
    capture = case("nonzero")
    (old,), (new,) = (
        group
        for fresh in (False, True)
        for group in env_of(capture.instantiate(fresh=fresh)).deferred_runtime_asserts.values()
    )
    assert new.msg == old.msg
    assert [f.line for f in new.stack.summary()] == [f.line for f in old.stack.summary()]


def test_a_graph_gets_its_missing_asserts() -> None:
    """A graph with all asserts has the recorded nodes; one that lacks some gets more nodes."""
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


def test_the_exclusion_of_automatic_dynamic_shapes_is_stated_once() -> None:
    """The exclusion comes with the input and is no guard besides."""
    with torch._dynamo.config.patch(automatic_dynamic_exclusion_guard=True):
        capture = automatic()
        assert differences(capture) == []
        env = env_of(capture.instantiate(fresh=True))
        assert {n for _, n in env.exclusion_constraints} == {4, 7}
        assert not any(guard.expr.has(sympy.Ne) for guard in env.guards)


def test_a_specialized_graph_has_its_assumptions() -> None:
    """Conditions of ``specialize_on`` stay with the input, and the graph's own one is assumed."""
    x = torch.randn(32, 3)
    torch._dynamo.mark_dynamic(x, 0, specialize_on=[lambda n: n % 16 == 0])
    capture = capture_of(lambda x: x * 2, (x,))
    env = env_of(capture.instantiate(fresh=True))
    (specialization,) = env.specializations
    assert [specialization.check_fn(n) for n in (32, 33)] == [True, False]
    assert env.axioms == env_of(capture.instantiate()).axioms
    assert len(env.axioms) == 8
    assert env.guards == []


def test_a_contradictory_record_is_refused() -> None:
    """The error for a guard that the recorded inputs violate has the guard and the numbers."""
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
