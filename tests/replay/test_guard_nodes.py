"""``insert_guards``, ``learn`` and ``strip_guards``: facts as nodes, and into a fresh ``ShapeEnv``."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import sympy
import torch
from guard_frames import (
    CASES,
    Frame,
    env_after_learn,
    frame_of,
    over_branch,
    over_flatten,
    over_reshape,
    over_twice,
)
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    StrictMinMaxConstraint,
)
from torch.utils._sympy.value_ranges import ValueRanges

import torch_fakeify as tfk
from torch_fakeify.replay.lowering import mark_of


def accepts(frame: Frame, *args: Any) -> bool:
    """Return whether the guards of a fresh environment hold for other inputs of the graph."""
    env, inputs = env_after_learn(frame)
    return env.evaluate_guards_for_args(inputs, list(args), ignore_static=False)


# --- what is inserted -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_the_facts_of_a_frame_are_asserted(name: str) -> None:
    """Exactly what the frame assumes is inserted, over the inputs' names; the results are the same."""
    fn, args, expected = CASES[name]
    frame = frame_of(fn, *args)
    results = frame.gm(*frame.inputs)
    assert list(tfk.insert_guards(frame.gm, frame.env).inserted) == expected
    torch.testing.assert_close(frame.gm(*frame.inputs), results)


@pytest.mark.parametrize(
    ("specialize", "bounds"),
    [*((True, (n, 8)) for n in range(4)), *((False, (n, 8)) for n in range(4)), (False, (0, 1))],
)
def test_a_bounds_node_has_the_value_that_its_operator_gives(
    specialize: bool, bounds: tuple[int, int]
) -> None:
    """A bound that the sign of a size decides is a constant by now, any other one is symbolic."""
    env: Any = ShapeEnv(specialize_zero_one=specialize)
    policy = StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DYNAMIC],
        constraint_sizes=[StrictMinMaxConstraint(warn_only=False, vr=ValueRanges(*bounds))],
    )
    t, source = torch.empty(min(bounds[1], 5)), LocalSource("x")
    graph = torch.fx.Graph()
    placeholder = graph.placeholder("x")
    placeholder.meta["val"] = FakeTensorMode(shape_env=env).from_tensor(
        t, source=source, symbolic_context=policy
    )
    graph.output(placeholder)
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    tfk.insert_guards(gm, env, minimal=False)
    compared = graph.find_nodes(op="call_function", target=operator.ge)
    for bound in [*compared, *graph.find_nodes(op="call_function", target=operator.le)]:
        size: Any = bound.args[0]
        expected = bound.target(size.meta["val"], bound.args[1])
        assert bound.meta["val"].node.expr == expected.node.expr
    least = max(bounds[0], 2 * specialize)
    assert str(compared[0].meta["val"]) == ("True" if least < 2 else f"s77 >= {least}")


OTHERS: dict[str, tuple[list[Any], list[Any]]] = {
    "product": (
        [3, 5, torch.randn(3, 5), torch.randn(15)],
        [3, 5, torch.randn(3, 5), torch.randn(16)],
    ),
    "divisible": ([300, torch.randn(300)], [2099, torch.randn(2099)]),
    "branch": ([6, torch.randn(6)], [5, torch.randn(5)]),
    "twice": ([5, torch.randn(5)], [4, torch.randn(4)]),
    "number": ([4, torch.randn(4), 3], [4, torch.randn(4), 5]),
    "max": ([2, torch.randn(2), 8, torch.randn(8)], [2, torch.randn(2), 7, torch.randn(7)]),
    "constant": ([torch.randn(7)], [torch.randn(8)]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_guards_decide_about_other_inputs(name: str) -> None:
    """Those that a fresh environment learns, and the graph, whose error has the broken assumption."""
    fn, args, expected = CASES[name]
    frame = frame_of(fn, *args)
    tfk.insert_guards(frame.gm, frame.env)
    good, bad = OTHERS[name]
    assert accepts(frame, *good)
    assert not accepts(frame, *bad)
    frame.gm(*good)
    with pytest.raises(RuntimeError, match=r"^the graph assumes ") as raised:
        frame.gm(*bad)
    assert str(raised.value).partition("assumes ")[2] in expected


def test_learn_makes_a_replacement() -> None:
    """`Eq(s0*s1, s2)` is a replacement in the fresh environment, too."""
    frame = frame_of(over_flatten, torch.randn(3, 4), torch.randn(12))
    tfk.insert_guards(frame.gm, frame.env)
    env, inputs = env_after_learn(frame)
    x, y = inputs[2:]
    product = x.size(0).node.expr * x.size(1).node.expr
    assert env.simplify(y.size(0).node.expr) == product
    assert len(env.replacements) == 3 + 1  # one for each scalar input, the product, the stride


def test_learn_runs_no_tensor_operator() -> None:
    """Only reads of sizes run on tensors before the facts are stated."""
    frame = frame_of(over_reshape, torch.randn(2000))
    tfk.insert_guards(frame.gm, frame.env)
    for fx_node in frame.gm.graph.nodes:
        if mark_of(fx_node) is None and fx_node.op == "call_method":
            fx_node.target = "no_such_method"
    env, _ = env_after_learn(frame)
    assert [str(g.expr) for g in env.guards][-1].startswith("Eq(Mod(")


# --- marks, values and lines ------------------------------------------------------------------------


def test_nodes_have_marks() -> None:
    """The mark of each inserted node has its kind and expression."""
    frame = frame_of(over_reshape, torch.randn(2000))
    tfk.insert_guards(frame.gm, frame.env)
    marks = [(n.name, *mark_of(n).values()) for n in frame.gm.graph.nodes if mark_of(n) is not None]
    assert marks == [
        ("ge", "compute", "l_x_.size(0) >= 2"),
        ("_assert_scalar_default", "range", "l_x_.size(0) >= 2"),
        ("sym_size_int", "compute", "l_x_.size(0)"),
        ("eq", "compute", "l_x_.size(0) == l_x_.size(0)"),
        ("truth", "compute", "l_x_.size(0) == s77"),
        ("_assert_scalar_default_1", "equality", "l_x_.size(0) == s77"),
        ("mod", "compute", "l_x_.size(0) % 100"),
        ("eq_1", "compute", "l_x_.size(0) % 100 == 0"),
        ("_assert_scalar_default_2", "divisible", "l_x_.size(0) % 100 == 0"),
    ]


def test_sub_expressions_are_shared() -> None:
    """A product that two conditions need is computed once."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0] * x.shape[1]
        return x + 1 if n % 3 == 0 and n > 100 else x

    frame = frame_of(fn, torch.randn(30, 4))
    tfk.insert_guards(frame.gm, frame.env)
    assert str(frame.gm.code).count("s77 * s27") + str(frame.gm.code).count("s27 * s77") == 1


def test_the_users_line_is_recorded() -> None:
    """The guard in the fresh environment names the line that caused the original."""
    frame = frame_of(over_twice, torch.randn(7))
    (first,) = frame.env.guards
    tfk.insert_guards(frame.gm, frame.env)
    (fx_node,) = [n for n in frame.gm.graph.nodes if (mark_of(n) or {}).get("what") == "guard"]
    condition = fx_node.args[0]
    assert condition.meta["stack_trace"] == fx_node.meta["stack_trace"]
    assert "2 * x.shape[0] > 9" in fx_node.meta["stack_trace"]
    assert "in over_twice" in fx_node.meta["stack_trace"]
    env, _ = env_after_learn(frame)
    assert env.guards[-1].sloc.maybe_user_loc == first.sloc.maybe_user_loc


def test_static_sizes_are_asserted_on_request() -> None:
    """With ``static=True`` sizes, strides and offsets that are integers are asserted too."""
    frame = frame_of(over_branch, torch.randn(7), dynamic=False)
    assert tfk.insert_guards(frame.gm, frame.env).inserted == ()
    inserted = tfk.insert_guards(frame.gm, frame.env, static=True).inserted
    assert inserted == (
        "l_x_.size(0) == 7",
        "l_x_.stride(0) == 1",
        "l_x_.storage_offset() == 0",
    )


def test_what_follows_is_reported_as_implied() -> None:
    """A comparison that follows from two others is reported as implied and not asserted."""

    def fn(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
        a, b, c = x.shape[0], y.shape[0], z.shape[0]
        return (x + 1 if a < c and a < b and b < c else x), y + 1, z + 1

    frame = frame_of(fn, torch.randn(3), torch.randn(5), torch.randn(8))
    report = tfk.insert_guards(frame.gm, frame.env)
    assert "l_x_.size(0) < l_z_.size(0)" in report.implied
    assert "l_x_.size(0) < l_y_.size(0)" in report.inserted
    assert "l_y_.size(0) < l_z_.size(0)" in report.inserted


def test_a_range_that_the_environment_derives_is_not_asserted() -> None:
    """`b >= 3` follows from `a < b` and `a >= 2`, and a ``ShapeEnv`` derives it by itself."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        return (x + 1 if x.shape[0] < y.shape[0] else x), y + 1

    frame = frame_of(fn, torch.randn(3), torch.randn(5))
    report = tfk.insert_guards(frame.gm, frame.env)
    assert report.implied == ("l_y_.size(0) >= 3",)
    env, inputs = env_after_learn(frame)
    y = inputs[3].size(0).node.expr
    assert env.bound_sympy(env.replace(y)).lower == 3


# --- facts about no input ---------------------------------------------------------------------------


def test_facts_about_other_things_are_reported() -> None:
    """A guard on the size of an input that the graph does not have stays in the environment."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + 1 if y.shape[0] % 4 == 0 else x

    frame = frame_of(fn, torch.randn(3), torch.randn(8))
    report = tfk.insert_guards(frame.gm, frame.env)
    assert report.unreachable == ("s17 >= 2", "Eq(Mod(s17, 4), 0)")
    assert report.inserted == ("l_x_.size(0) >= 2", "l_x_.size(0) == s77")


def test_a_fact_about_a_replaced_symbol_is_asserted() -> None:
    """The symbol of an input that equals the guarded one is used instead."""
    env = ShapeEnv()
    here, absent = (
        env.create_symintnode(env.create_symbol(8, LocalSource(name), DimDynamic.DYNAMIC), hint=8)
        for name in ("here", "gone")
    )
    assert absent % 4 == 0
    assert here == absent
    (replaced,) = env.replacements
    if replaced == here.node._expr:
        here, absent = absent, here
    report = tfk.insert_guards(graph_of(here, int), env)
    assert report.inserted == ("n >= 2", "n % 4 == 0")
    assert report.unreachable == (str(sympy.Eq(replaced, here.node.expr)),)


# --- kinds of inputs --------------------------------------------------------------------------------


def graph_of(value: Any, dtype: type) -> torch.fx.GraphModule:
    """Return a graph that has one input and does nothing."""
    graph = torch.fx.Graph()
    placeholder = graph.placeholder("n", dtype)
    placeholder.meta["val"] = value
    graph.output(())
    return torch.fx.GraphModule({}, graph)


def test_a_number_that_is_two_inputs_is_equated() -> None:
    """The second input is asserted to equal the first one, though no tensor has the symbol."""
    env = ShapeEnv()
    symbol = env.create_symbol(8, LocalSource("n"), DimDynamic.DYNAMIC)
    number = env.create_symintnode(symbol, hint=8)
    gm = graph_of(number, int)
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.placeholder("m", int).meta["val"] = number
    assert tfk.insert_guards(gm, env).inserted == ("n >= 2", "m == n")


def test_guards_on_booleans_are_asserted() -> None:
    """A boolean input is asserted as 0 or 1, as Dynamo's symbol for it is."""
    env = ShapeEnv()
    symbol = env.create_symbol(
        1, LocalSource("b"), DimDynamic.DYNAMIC, do_not_specialize_zero_one=True
    )
    flag = env.create_symboolnode(sympy.Eq(symbol, 1))
    assert bool(flag)
    gm = graph_of(flag, bool)
    assert tfk.insert_guards(gm, env).inserted == ("int(n) == 1",)
    gm(True)
    with pytest.raises(RuntimeError, match=r"^the graph assumes int\(n\) == 1$"):
        gm(False)
    fresh = ShapeEnv()
    other = fresh.create_symbol(
        1, LocalSource("c"), DimDynamic.DYNAMIC, do_not_specialize_zero_one=True
    )
    tfk.learn(gm, [fresh.create_symboolnode(sympy.Eq(other, 1))])
    assert fresh.replacements == {other: 1}


def test_a_size_without_a_hint_has_its_range() -> None:
    """A size-like unbacked input stays in ``[0, inf)`` and is not assumed to be two or more."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        torch._check(x.shape[0] <= y.shape[0])
        return x.sum() + y

    x = torch.randn(5)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    frame = frame_of(fn, x, torch.randn(9), dynamic=True)
    report = tfk.insert_guards(frame.gm, frame.env)
    assert report.inserted[:2] == ("l_x_.size(0) >= 0", "l_y_.size(0) >= 2")
    values = [n.meta["example_value"] for n in frame.gm.graph.find_nodes(op="placeholder")]
    env = ShapeEnv()
    inputs = tfk.refakeify(values, FakeTensorMode(shape_env=env))
    tfk.learn(frame.gm, inputs)
    (size,) = env.size_like
    assert str(env.var_to_range[size]) == "VR[0, int_oo]"


def test_ragged_sizes_are_equated() -> None:
    """If torch guards it, jagged tensors with shared offsets have one ragged size."""

    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b if a.size(0) > 1 else a

    first = torch.nested.nested_tensor([torch.randn(3, 5), torch.randn(4, 5)], layout=torch.jagged)
    second = torch.nested.nested_tensor_from_jagged(
        torch.randn_like(first.values()), offsets=first.offsets()
    )
    frame = frame_of(fn, first, second)
    inserted = tfk.insert_guards(frame.gm, frame.env).inserted
    a, b = (frame.env.source_to_var[f"L['{name}'].size()[1]"] for name in "ab")
    if sympy.Eq(a, b) not in {guard.expr for guard in frame.env.guards}:
        # Torch 2.15 and later compares the nested ints without a guard.
        assert "l_a_.size(1) == l_b_.size(1)" not in inserted
        return
    assert "l_a_.size(1) == l_b_.size(1)" in inserted
    frame.gm(*frame.inputs)
    other = torch.nested.nested_tensor([torch.randn(4, 5), torch.randn(3, 5)], layout=torch.jagged)
    inputs = [other if x is second else x for x in frame.inputs]
    with pytest.raises(RuntimeError, match=r"l_a_.size\(1\) == l_b_.size\(1\)"):
        frame.gm(*inputs)
