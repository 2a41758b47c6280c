"""``insert_runtime_asserts``: order, scope, sizes and inputs of the inserted assertions."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import sympy
import torch
from assert_frames import (
    ASSERT,
    CASES,
    CONFIG,
    SIZE,
    V4,
    V6,
    Frame,
    T,
    advised,
    asserts_of,
    aten,
    bounded,
    calls,
    dynamo_frame,
    everything,
    fresh_inputs,
    nonzero_of_three,
    product,
    raises,
    retraced,
    three,
    traced,
    unbacked_of,
)
from observe import env_of_frame
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    RuntimeAssert,
    ShapeEnv,
    guard_size_oblivious,
)
from torch.utils._traceback import CapturedTraceback

import torch_fakeify as tfk
from torch_fakeify.replay.lowering import mark_of

# --- order, messages, stacks ------------------------------------------------------------------------


def test_ranges_come_first() -> None:
    """The limits of a symbol come before facts that a ShapeEnv could make a replacement of."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        n = x.nonzero().shape[0]
        torch._check(n != 7)
        torch._check(n % 3 == 1)
        torch._check(n < 100)
        return x + 1

    gm, env = traced(fn, V4)
    tfk.insert_runtime_asserts(gm, env)
    marks = [mark_of(n) for n in gm.graph.nodes if n.target in (ASSERT, SIZE)]
    assert [(m["what"], m["expr"]) for m in marks if m] == [
        ("assert", "nonzero.size(0) >= 0"),
        ("assert", "nonzero.size(0) < 100"),
        ("size_like", "nonzero.size(0)"),
        ("assert", "nonzero.size(0) != 7"),
        ("assert", "nonzero.size(0) % 3 == 1"),
    ]


def test_nodes_have_values_and_marks() -> None:
    """Each inserted node has its mark, and its value if it computes one."""
    gm, env = traced(nonzero_of_three, *CASES["nonzero"][1])
    before = set(gm.graph.nodes)
    tfk.insert_runtime_asserts(gm, env)
    new = [n for n in gm.graph.nodes if n not in before]
    assert [(mark_of(n) or {})["what"] for n in new] == [
        "compute", "compute", "compute", "assert", "size_like", "compute", "compute", "assert",
    ]  # fmt: skip
    assert [str(n.meta["val"]) for n in new if n.target is not ASSERT and n.target is not SIZE] == [
        "s27", "u0", "u0 >= 0", "u0 + 2", "u0 + 2 <= s27",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("the list is too long", "the list is too long"),
        ("at 12:30", "at 12:30"),
        (f"{torch.__file__}:12", "the graph assumes 2 <= _local_scalar_dense (torch/__init__.py:12)"),
        ("/__w/aten/src/Sort.cpp:502", "the graph assumes 2 <= _local_scalar_dense (Sort.cpp:502)"),
        (":0", "the graph assumes 2 <= _local_scalar_dense"),
    ],
)  # fmt: skip
def test_messages_are_inserted(message: str, expected: str) -> None:
    """A message is unchanged, but torch's own location is replaced by the condition."""
    gm, env = traced(bounded, *CASES["lower"][1])
    for group in env.deferred_runtime_asserts.values():
        group[:] = [RuntimeAssert(ra.expr, message, ra.stack) for ra in group]
    tfk.insert_runtime_asserts(gm, env)
    assert raises(gm, *CASES["lower"][2]) == expected


def test_the_stack_of_an_assertion_has_the_users_frames() -> None:
    """The stack has the user's frames only, with the line of the check as the last."""
    gm, env = traced(three, *CASES["constant"][1])
    tfk.insert_runtime_asserts(gm, env)
    (fx_node,) = gm.graph.find_nodes(op="call_function", target=ASSERT)
    stack = fx_node.meta["stack_trace"]
    assert stack.endswith("in three\n    torch._check(z == 3)\n")
    assert "site-packages/torch/" not in stack


def test_under_dynamo_the_stack_is_that_of_the_binding_node() -> None:
    """No user code runs in Dynamo while a check is recorded."""

    def fn(x: torch.Tensor, n: torch.Tensor) -> Any:
        return torch.split(x, n.tolist())

    gm, env = dynamo_frame(fn, V6, T([2, 4]))
    tfk.insert_runtime_asserts(gm, env)
    stacks = [n.meta["stack_trace"] for n in gm.graph.find_nodes(op="call_function", target=ASSERT)]
    assert len(stacks) == 3
    assert all("torch.split(x, n.tolist())" in stack for stack in stacks)
    assert not [stack for stack in stacks if "dynamo_frame" in stack]


# --- symbols in scope -------------------------------------------------------------------------------


def two_sizes(bound_by: int = 1) -> Frame:
    """Return a graph whose count is at most an input's size, which then equals another's."""

    def fn(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        n = z.nonzero()
        torch._check(n.shape[0] <= (x, y)[bound_by].shape[0])
        torch._check(x.shape[0] == y.shape[0])
        return n + 1

    return traced(fn, V4, V4, torch.arange(5.0), env=ShapeEnv(duck_shape=False))


def drop_input(gm: torch.fx.GraphModule, index: int) -> None:
    """Remove an unused input from a graph."""
    gm.graph.erase_node(gm.graph.find_nodes(op="placeholder")[index])
    gm.recompile()


@pytest.mark.parametrize("bound_by", [0, 1])
@pytest.mark.parametrize(("dropped", "bound"), [(0, "y_1.size(0)"), (1, "x_1.size(0)")])
def test_replaced_symbols_are_read_from_an_input(dropped: int, bound: str, bound_by: int) -> None:
    """An input may have the recorded symbol, its replacement, or an equal symbol."""
    gm, env = two_sizes(bound_by)
    assert env.replacements
    drop_input(gm, dropped)
    report = tfk.insert_runtime_asserts(gm, env)
    assert report.inserted == ("nonzero.size(0) >= 0", f"nonzero.size(0) <= {bound}")
    assert report.unplaced == ()
    gm(torch.ones(3), torch.ones(3))
    assert f"nonzero.size(0) <= {bound}" in raises(gm, torch.ones(3), torch.ones(4))


def test_an_assertion_about_nothing_in_the_graph_is_reported() -> None:
    """An assertion on symbols that the graph does not have is neither dropped nor guessed."""
    gm, env = two_sizes()
    (expr,) = asserts_of(env)
    drop_input(gm, 1)
    drop_input(gm, 0)
    report = tfk.insert_runtime_asserts(gm, env)
    assert report.inserted == ("nonzero.size(0) >= 0",)
    assert report.unplaced == (str(expr),)


def test_an_equality_without_its_number_is_reported() -> None:
    """The remaining graph has the symbol, but computes it from the other side."""
    gm, env = traced(three, *CASES["constant"][1])
    gm.graph.eliminate_dead_code()
    for fx_node in reversed(gm.graph.nodes):
        if fx_node.target in (aten._local_scalar_dense.default, aten.sum.default):
            gm.graph.erase_node(fx_node)
    assert tfk.insert_runtime_asserts(gm, env).unplaced == ("Eq(u0, 3)",)


def test_a_condition_with_an_unknown_function_is_reported() -> None:
    """An assertion with an unknown function is reported and stays in the environment."""
    gm, env = traced(bounded, *CASES["lower"][1])
    group = next(iter(env.deferred_runtime_asserts.values()))
    symbol = next(iter(group[0].expr.free_symbols))
    strange = sympy.Eq(sympy.Function("strange")(symbol), 1)
    group.append(RuntimeAssert(strange, "", CapturedTraceback(None)))
    report = tfk.insert_runtime_asserts(gm, env)
    assert report.inserted == ("2 <= _local_scalar_dense", "_local_scalar_dense <= 10")
    assert report.unplaced == ("Eq(strange(u0), 1)",)


@pytest.mark.parametrize("keep_torchs", [False, True])
def test_assertions_have_renamed_symbols(keep_torchs: bool) -> None:
    """Symbols of AOTAutograd's graph are new names of those in Dynamo's environment."""
    seen: list[Any] = []

    def compiler(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        env = env_of_frame()
        for fx_node in reversed(gm.graph.nodes):  # torch's own assertions
            if fx_node.target is ASSERT and not keep_torchs:
                gm.graph.erase_node(fx_node)
        assert env.unbacked_renamings
        assert not set(env.unbacked_renamings.values()) & set(env.unbacked_renamings)
        seen.append(tfk.insert_runtime_asserts(gm, env))
        return make_boxed_func(gm.forward)

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return aot_module_simplified(gm, inputs, fw_compiler=compiler)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(**CONFIG):
        compiled = torch.compile(product, backend=backend, dynamic=True)
        compiled(V6, T([2, 3]))
        (report,) = seen
        assert report.unplaced == ()
        assert (len(report.inserted), len(report.present)) == ((0, 3) if keep_torchs else (3, 0))
        message = raises(compiled, V6, T([2, 4]))
    asserted = (
        "Eq(u0*u1, s77)" if keep_torchs else "_local_scalar_dense*_local_scalar_dense_1 == arg2_1"
    )
    assert asserted in message


# --- sizes ------------------------------------------------------------------------------------------


def test_sizes_are_sizes_in_a_fresh_environment() -> None:
    """The range stays ``[0, inf]``, and questions about 0 and 1 have the same answers."""
    gm, env = traced(advised, T([1, 2]))
    tfk.insert_runtime_asserts(gm, env)
    again = retraced(gm)
    for found in (env, again.env):
        (symbol,) = found.size_like
        assert str(found.var_to_range[symbol]) == "VR[0, int_oo]"
        n: Any = found.create_symintnode(symbol, hint=None)
        for few in (0, 1):
            with pytest.warns(FutureWarning):
                assert not guard_size_oblivious(n == few)
        with pytest.raises(GuardOnDataDependentSymNode):
            bool(n == 0)
    assert "_local_scalar_dense >= 0" in raises(again.gm, T([1, -2]))
    again.gm(T([0, 0]))


def test_a_number_is_no_size_by_its_range() -> None:
    """A number that is checked not to be negative is no size."""
    gm, env = traced(product, *CASES["product"][1])
    tfk.insert_runtime_asserts(gm, env)
    assert not gm.graph.find_nodes(op="call_function", target=SIZE)
    assert not retraced(gm).env.size_like


def test_infinite_ranges_are_not_checked() -> None:
    """Neither infinity nor the largest size of torch is a limit."""
    gm, env = traced(lambda x: x.nonzero(), V4)
    assert list(map(str, unbacked_of(env).values())) == [f"VR[0, {sys.maxsize - 1}]"]
    assert tfk.insert_runtime_asserts(gm, env).inserted == ("nonzero.size(0) >= 0",)


def test_the_range_of_a_boolean_is_not_checked() -> None:
    """The range of a boolean, which is 0 or 1 by its type, is not asserted."""
    gm, env = traced(lambda x, b: x + b.any().item(), V4, T([True]))
    assert list(map(str, unbacked_of(env).values())) == ["VR[0, 1]"]
    assert tfk.insert_runtime_asserts(gm, env) == ((), (), (), ())


def test_equalities_that_became_facts_are_all_checked() -> None:
    """For the environment each is trivial, but one does not imply the other in the graph."""

    def fn(n: torch.Tensor) -> torch.Tensor:
        a, b = n.tolist()
        torch._check(a == 3)
        torch._check(b == 5)
        return n + 1

    gm, env = traced(fn, T([3, 5]))
    report = tfk.insert_runtime_asserts(gm, env)
    assert report.inserted == ("_local_scalar_dense == 3", "_local_scalar_dense_1 == 5")


def test_what_follows_from_a_range_is_reported_as_implied() -> None:
    """A weaker limit than the one that is asserted is not inserted."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        k = x.sum().item()
        torch._check(k <= 20)
        torch._check(k <= 10)
        torch._check(k >= -5)
        torch._check(k > 2)
        return x * k

    gm, env = traced(fn, T([4]))
    report = tfk.insert_runtime_asserts(gm, env)
    assert report.inserted == ("2 < _local_scalar_dense", "_local_scalar_dense <= 10")
    assert report.implied == ("_local_scalar_dense <= 20", "0 <= _local_scalar_dense + 5")
    assert str(list(unbacked_of(retraced(gm).env).values())) == "[VR[3, 10]]"


# --- inputs -----------------------------------------------------------------------------------------


def test_unbacked_inputs_are_bound_at_the_placeholders() -> None:
    """Sizes without a hint are read right after the placeholders, and stated by ``learn``."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] > 3)
        torch._check(x.shape[0] % 2 == 0)
        return x + x.shape[0]

    x = torch.randn(8)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    gm, env = dynamo_frame(fn, x, dynamic=False)
    for fx_node in gm.graph.find_nodes(op="call_function", target=torch._check):
        gm.graph.erase_node(fx_node)
    gm.graph.eliminate_dead_code()
    report = tfk.insert_runtime_asserts(gm, env)
    assert report.inserted == ("3 < l_x_.size(0)", "l_x_.size(0) % 2 == 0")
    ops = [mark_of(n) is not None for n in gm.graph.nodes if n.op == "call_function"]
    assert ops.index(False) == len([op for op in ops if op])
    assert "3 < l_x_.size(0)" in raises(gm, 2, torch.ones(2))
    fresh = ShapeEnv()
    n = fresh.create_unbacked_symint()
    mode = FakeTensorMode(shape_env=fresh)
    with mode:
        fake = torch.empty(n)
    assert tfk.learn(gm, [n, fake]) == 2
    (symbol,) = fresh.var_to_range
    assert fresh.var_to_range[symbol].lower == 4
    assert [str(e) for e in asserts_of(fresh)][-2:] == ["3 < u0", "Eq(Mod(u0, 2), 0)"]


def test_deferred_guards_follow_the_placeholders() -> None:
    """With ``prefer_deferred_runtime_asserts_over_guards`` asserts are about inputs alone."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] % 2 == 0)
        torch._check(x.shape[0] + 1 == y.shape[0])
        return x + 1

    env = ShapeEnv(prefer_deferred_runtime_asserts_over_guards=True)
    gm, env = traced(fn, V4, torch.arange(5.0), env=env)
    assert list(env.deferred_runtime_asserts) == [None]
    report = tfk.insert_runtime_asserts(gm, env)
    assert report.inserted == ("x_1.size(0) % 2 == 0", "x_1.size(0) + 1 == y_1.size(0)")
    assert [mark_of(n) is not None for n in gm.graph.nodes][-3:] == [True, False, False]
    gm(torch.ones(6), torch.ones(7))
    assert "x_1.size(0) % 2 == 0" in raises(gm, torch.ones(3), torch.ones(4))
    assert "x_1.size(0) + 1 == y_1.size(0)" in raises(gm, torch.ones(6), torch.ones(6))


def test_an_input_that_changes_is_read_before_it_does() -> None:
    """The sizes of inputs are those at the entry, at any place in the graph."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.unsqueeze_(0)
        n = y.nonzero()
        torch._check(n.shape[0] < x.shape[1])
        return n

    gm, env = dynamo_frame(fn, torch.arange(4.0), torch.arange(3.0), torch_pass=True)
    for fx_node in reversed(gm.graph.find_nodes(op="call_function", target=ASSERT)):
        gm.graph.erase_node(fx_node)
    for placeholder in gm.graph.find_nodes(op="placeholder"):
        if not placeholder.users:
            gm.graph.erase_node(placeholder)
    tfk.insert_runtime_asserts(gm, env)
    reads = gm.graph.find_nodes(op="call_function", target=aten.sym_size.int)
    unsqueeze = gm.graph.find_nodes(op="call_method", target="unsqueeze_")
    order = list(gm.graph.nodes)
    inputs = [n for n in reads if n.args[0].op == "placeholder"]
    assert all(order.index(n) < order.index(unsqueeze[0]) for n in inputs)


def test_a_number_is_read_from_the_data_once() -> None:
    """An input has the number that ``item()`` gave, but the node that called it binds it."""

    def fn(n: torch.Tensor) -> torch.Tensor:
        k = n.item()
        torch._check(k >= 2)
        return n * k

    gm, env = traced(fn, T(5))
    (n,) = gm.graph.find_nodes(op="placeholder")
    (item,) = gm.graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default)
    n.meta["val"].item_memo = item.meta["val"]
    assert n.meta["val"].item_memo is not None
    tfk.insert_runtime_asserts(gm, env)
    assert (
        len(gm.graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default)) == 1
    )


# --- beside guards ----------------------------------------------------------------------------------


def test_guards_and_asserts_are_replaced_separately() -> None:
    """A second insertion replaces only the nodes of its own kind."""
    gm, env = dynamo_frame(lambda x, n: torch.split(x, n.tolist()), V6, T([2, 4]))
    before = everything(gm.graph)
    asserts = tfk.insert_runtime_asserts(gm, env)
    guards = tfk.insert_guards(gm, env)
    assert guards.inserted
    both = calls(gm)
    assert tfk.insert_guards(gm, env) == guards
    assert sorted(map(str, calls(gm))) == sorted(map(str, both))
    assert tfk.insert_runtime_asserts(gm, env) == asserts
    assert sorted(map(str, calls(gm))) == sorted(map(str, both))
    tfk.strip_guards(gm)
    assert everything(gm.graph) == before


def test_learn_omits_asserts_on_data() -> None:
    """Assertions on numbers that the graph computes cannot be run on its inputs alone."""
    gm, env = traced(advised, T([1, 2]))
    tfk.insert_runtime_asserts(gm, env)
    mode, inputs = fresh_inputs(gm)
    assert tfk.learn(gm, inputs) == 0
    assert mode.shape_env is not None
    assert not asserts_of(mode.shape_env)


# --- bodies of higher-order operators ---------------------------------------------------------------


def branches(x: torch.Tensor, n: torch.Tensor) -> Any:
    """Read a number in one branch."""

    def yes(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        k = n.sum().item()
        torch._check(k >= 2)
        torch._check(k < x.shape[0])
        return x * k

    def no(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return x.clone()

    return torch.cond(x.sum() > 0, yes, no, (x, n))


def test_bodies_get_the_assertions_on_what_they_bind() -> None:
    """The branch that reads a number from data checks it."""
    gm, env = dynamo_frame(branches, V4, T([1, 2]))
    body: Any = gm.cond_true_0
    for fx_node in body.graph.find_nodes(op="call_function", target=torch._check):
        body.graph.erase_node(fx_node)
    body.graph.eliminate_dead_code()
    body.recompile()
    before = everything(gm.graph), everything(body.graph)
    report = tfk.insert_runtime_asserts(gm, env)
    assert report.inserted == ("2 <= item", "item < l_x__1.size(0)")
    gm(4, V4, 2, T([1, 2]))
    gm(4, -V4, 2, T([2, 2]))
    assert "item < l_x__1.size(0)" in raises(gm, 4, V4, 2, T([2, 2]))
    assert tfk.insert_runtime_asserts(gm, env) == report
    tfk.strip_guards(gm)
    assert (everything(gm.graph), everything(body.graph)) == before
