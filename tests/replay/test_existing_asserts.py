"""``asserted``: the conditions that a graph asserts already."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import pytest
import sympy
import torch
from assert_frames import (
    ASSERT,
    CASES,
    SIZE,
    V4,
    Frame,
    FrameList,
    T,
    advised,
    asserts_of,
    aten,
    bounded,
    dynamo_frame,
    everything,
    must_be_true,
    same_as_size,
    three,
    traced,
)
from program_zoo import programs
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.runtime_assert import insert_deferred_runtime_asserts

import torch_fakeify as tfk
from torch_fakeify.replay.existing_asserts import asserted_by

if TYPE_CHECKING:
    from collections.abc import Callable


def scalar_graph(check: Callable[[torch.fx.Graph, torch.fx.Node], Any]) -> Frame:
    """Return a graph with a number between 2 and 10 and a check of it."""
    gm, env = traced(bounded, *CASES["lower"][1])
    (fx_node,) = gm.graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default)
    with gm.graph.inserting_after(fx_node):
        check(gm.graph, fx_node)
    gm.recompile()
    return Frame(gm, env)


def calling(target: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return a check that calls a function with the number."""

    def check(graph: torch.fx.Graph, n: torch.fx.Node) -> Any:
        return graph.call_function(target, (n, *args), kwargs)

    return check


def checking(target: Any, *conditions: tuple[Any, ...], key: str | None = None) -> Any:
    """Return a check of conditions on the number, each an operator and its arguments."""

    def check(graph: torch.fx.Graph, n: torch.fx.Node) -> None:
        point = n
        for op, *args in conditions:
            with graph.inserting_after(point):
                made = graph.call_function(op, tuple(n if arg is N else arg for arg in args))
            with graph.inserting_after(made):
                if key is None:
                    point = graph.call_function(target, (made, "no"))
                else:
                    point = graph.call_function(target, (), {key: made})

    return check


N = object()
BETWEEN = ((operator.ge, N, 2), (operator.le, N, 10))
functions: Any = torch


@pytest.mark.parametrize(
    "check",
    [
        checking(ASSERT, *BETWEEN),
        checking(ASSERT, (operator.le, 2, N), (operator.gt, 11, N)),
        checking(functions._assert_scalar, *BETWEEN),
        checking(functions._assert_scalar, *BETWEEN, key="self"),
        checking(torch._check, *BETWEEN, key="cond"),
        checking(torch._check_value, *BETWEEN),
        calling(functions.sym_constrain_range, min=2, max=10),
        calling(aten.sym_constrain_range.default, min=2, max=10),
        calling(functions.sym_constrain_range_for_size, min=2, max=10),
        calling(SIZE, min=2, max=10),
    ],
)
def test_nothing_is_asserted_twice(check: Any) -> None:
    """A graph that has the assertions in any form gets no more of them."""
    gm, env = scalar_graph(check)
    before = everything(gm.graph)
    report = tfk.insert_runtime_asserts(gm, env)
    assert report.inserted == ()
    assert report.present == ("2 <= _local_scalar_dense", "_local_scalar_dense <= 10")
    assert everything(gm.graph) == before


@pytest.mark.parametrize(
    "check",
    [
        checking(ASSERT, (operator.ge, N, 1), (operator.le, N, 11)),
        checking(ASSERT, (operator.eq, N, N)),
        checking(ASSERT, (operator.ne, N, 2), (operator.gt, N, 2)),
        calling(functions.sym_constrain_range, min=1),
        calling(functions.sym_constrain_range_for_size),
        calling(operator.ge, 2),
    ],
)
def test_other_assertions_do_not_count(check: Any) -> None:
    """Weaker, other or trivial conditions, and conditions that are not asserted, do not count."""
    gm, env = scalar_graph(check)
    report = tfk.insert_runtime_asserts(gm, env)
    assert report.inserted == ("2 <= _local_scalar_dense", "_local_scalar_dense <= 10")
    assert report.present == ()


def test_a_conjunction_asserts_its_parts() -> None:
    """One assertion may have two conditions."""

    def check(graph: torch.fx.Graph, n: torch.fx.Node) -> None:
        with graph.inserting_before(n.next):
            low = graph.call_function(operator.ge, (n, 2))
            high = graph.call_function(operator.le, (n, 10))
            both = graph.call_function(operator.and_, (low, high))
            graph.call_function(ASSERT, (both, "no"))

    gm, env = scalar_graph(check)
    assert tfk.insert_runtime_asserts(gm, env).inserted == ()


@pytest.mark.parametrize("op", [operator.eq, operator.sub])
def test_a_condition_that_became_true_counts_by_its_node(op: Any) -> None:
    """Once asserted, the value of ``item == 3`` is ``True``, but the node still compares."""
    gm, env = traced(three, *CASES["constant"][1])
    (n,) = gm.graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default)
    with gm.graph.inserting_before(n.next):
        if op is operator.eq:
            condition = gm.graph.call_function(operator.eq, (n, 3))
        else:
            less = gm.graph.call_function(operator.sub, (n, 1))
            condition = gm.graph.call_function(operator.eq, (less, 2))
        condition.meta["val"] = n.meta["val"] == 3
        gm.graph.call_function(ASSERT, (condition, "no"))
    assert condition.meta["val"].node.expr is sympy.true
    report = tfk.insert_runtime_asserts(gm, env)
    assert (report.inserted, report.present) == ((), ("_local_scalar_dense == 3",))


def test_a_boolean_counts_as_a_number_too() -> None:
    """Torch asserts ``int(item) == 1`` for a boolean, which counts as the assertion."""
    gm, env = traced(must_be_true, *CASES["bool"][1])
    (n,) = gm.graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default)
    with gm.graph.inserting_before(n.next):
        number = gm.graph.call_function(torch.sym_ite, (n, 1, 0))
        condition = gm.graph.call_function(operator.eq, (number, 1))
        gm.graph.call_function(ASSERT, (condition, "no"))
    report = tfk.insert_runtime_asserts(gm, env)
    assert (report.inserted, report.present) == ((), ("_local_scalar_dense",))


def test_remainders_are_compared() -> None:
    """The range of the number determines which of torch's two remainders is meant."""

    def fn(n: torch.Tensor) -> torch.Tensor:
        k = n.sum().item()
        torch._check(k >= 0)
        torch._check(k % 2 == 0)
        return n * k

    gm, env = traced(fn, T([4]))
    (n,) = gm.graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default)
    with gm.graph.inserting_before(n.next):
        rest = gm.graph.call_function(operator.mod, (n, 2))
        condition = gm.graph.call_function(operator.eq, (rest, 0))
        gm.graph.call_function(ASSERT, (condition, "no"))
    report = tfk.insert_runtime_asserts(gm, env)
    assert report.inserted == ("0 <= _local_scalar_dense",)
    assert report.present == ("_local_scalar_dense % 2 == 0",)


def test_an_equality_counts_in_both_directions() -> None:
    """``size == item`` in a graph counts as the assertion ``item == size``."""
    gm, env = traced(same_as_size, *CASES["input"][1])
    x = gm.graph.find_nodes(op="placeholder")[0]
    (n,) = gm.graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default)
    with gm.graph.inserting_before(n.next):
        size = gm.graph.call_function(aten.sym_size.int, (x, 0))
        size.meta["val"] = x.meta["val"].size(0)
        gm.graph.call_function(ASSERT, (gm.graph.call_function(operator.eq, (size, n)), "no"))
    report = tfk.insert_runtime_asserts(gm, env)
    assert (report.inserted, report.present) == ((), ("_local_scalar_dense == x_1.size(0)",))


def test_an_assertion_on_an_equal_size_counts() -> None:
    """A condition recorded for one input may be asserted for another one of the same size."""

    def fn(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        n = z.nonzero()
        torch._check(n.shape[0] <= y.shape[0])
        torch._check(x.shape[0] == y.shape[0])
        return n + 1

    gm, env = traced(fn, V4, V4, torch.arange(5.0), env=ShapeEnv(duck_shape=False))
    x = gm.graph.find_nodes(op="placeholder")[0]
    (n,) = gm.graph.find_nodes(op="call_function", target=aten.nonzero.default)
    with gm.graph.inserting_before(n.next):
        sizes = [gm.graph.call_function(aten.sym_size.int, (t, 0)) for t in (n, x)]
        for size, tensor in zip(sizes, (n, x), strict=True):
            size.meta["val"] = tensor.meta["val"].size(0)
        condition = gm.graph.call_function(operator.le, tuple(sizes))
        gm.graph.call_function(ASSERT, (condition, "no"))
    report = tfk.insert_runtime_asserts(gm, env)
    assert report.inserted == ("nonzero.size(0) >= 0",)
    assert report.present == ("nonzero.size(0) <= y_1.size(0)",)


@pytest.mark.parametrize(("kwargs", "count"), [({"min": 0}, 1), ({"max": 9}, 1), ({}, 2)])
def test_a_size_is_marked_once(kwargs: dict[str, int], count: int) -> None:
    """The operator marks a number as a size only if it has a limit as argument."""
    gm, env = traced(advised, T([1, 2]))
    (n,) = gm.graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default)
    with gm.graph.inserting_after(n):
        gm.graph.call_function(SIZE, (n,), kwargs)
    report = tfk.insert_runtime_asserts(gm, env)
    assert report.present == ("_local_scalar_dense >= 0",)
    assert len(gm.graph.find_nodes(op="call_function", target=SIZE)) == count


def test_a_condition_that_lost_its_number_does_not_count() -> None:
    """The value is still ``u0 == s27``, but the node compares the size with itself."""
    gm, env = traced(same_as_size, *CASES["input"][1])
    x = gm.graph.find_nodes(op="placeholder")[0]
    ((expr),) = asserts_of(env)
    (n,) = gm.graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default)
    with gm.graph.inserting_before(n.next):
        size = gm.graph.call_function(aten.sym_size.int, (x, 0))
        size.meta["val"] = x.meta["val"].size(0)
        condition = gm.graph.call_function(operator.eq, (size, size))
        condition.meta["val"] = env.create_symboolnode(expr)
        gm.graph.call_function(ASSERT, (condition, "no"))
    assert tfk.insert_runtime_asserts(gm, env).inserted == ("_local_scalar_dense == x_1.size(0)",)


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_inserted_after_torchs_own_pass(name: str) -> None:
    """Dynamo's graph has all assertions, in torch's form."""
    fn, good, _, _ = CASES[name]
    gm, env = dynamo_frame(fn, *good, torch_pass=True)
    before = set(gm.graph.nodes)
    report = tfk.insert_runtime_asserts(gm, env)
    assert report.inserted == ()
    assert {n.target for n in set(gm.graph.nodes) - before} <= {
        SIZE,
        aten.sym_size.int,
        operator.getitem,
    }


def copied(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return a copy of the graph with the same values."""
    graph = torch.fx.Graph()
    outputs = graph.graph_copy(gm.graph, {})
    graph.output(outputs)
    return torch.fx.GraphModule(gm, graph)


ZOO = [
    "mark_unbacked", "mark_unbacked_shared", "item_with_checks", "tolist", "float_item",
    "item_equals_input_size", "nonzero_arithmetic", "nonzero", "unique",
]  # fmt: skip


@pytest.mark.parametrize("name", ZOO)
def test_the_conditions_are_those_of_torchs_pass(name: str) -> None:
    """On copies of one frame, both passes assert the same conditions."""
    program = programs()[name]
    fn, *calls = program.make()
    config = {**program.dynamo, "do_not_emit_runtime_asserts": True}
    frames = FrameList()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(**config):
        compiled = torch.compile(fn, backend=frames.backend, **program.options)
        for args in calls:
            compiled(*args)
    assert frames
    for gm, env in frames:
        ours, theirs = copied(gm), copied(gm)
        report = tfk.insert_runtime_asserts(ours, env)
        insert_deferred_runtime_asserts(theirs, env, name)
        assert report.unplaced == ()
        asserted, _ = asserted_by(ours.graph, env)
        by_torch, _ = asserted_by(theirs.graph, env)
        assert asserted <= by_torch | {key for key in asserted if not needs(key, env)}
        missing = {key for key in by_torch - asserted if needs(key, env)}
        assert not missing


def needs(key: Any, env: ShapeEnv) -> bool:
    """Return whether a condition adds to the ranges of its symbols, once they are replaced."""
    flags = {s: 0 <= r.lower <= r.upper <= 1 for s, r in env.var_to_range.items()}
    if len(key.free_symbols) == 1 and isinstance(key, sympy.Le):
        (symbol,) = key.free_symbols
        if symbol in env.replacements or flags[symbol]:
            return env._maybe_evaluate_static(env.replace(key)) is not sympy.true
    return True
