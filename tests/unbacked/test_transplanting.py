"""``transplant``, ``check_bindings`` and ``repropagate``: effects of passes on binding sites."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from assert_frames import (
    V4,
    T,
    asserts_of,
    aten,
    dynamo_frame,
    everything,
    fresh_inputs,
    raises,
    traced,
)
from retrace_checks import MASK, unbacked_in
from torch.fx.experimental.symbolic_shapes import CallMethodKey, statically_known_true
from torch.utils._pytree import SequenceKey

import torch_fakeify as tfk
from torch_fakeify.errors import ShapeEnvError
from torch_fakeify.unbacked.binding_checks import binding_faults

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_fakeify.unbacked.transplanting import Transplanted

SIZE_0 = (CallMethodKey("size"), SequenceKey(0))


def few(x: torch.Tensor) -> Any:
    """Return at most three numbers."""
    n = x.nonzero()
    torch._check(n.shape[0] <= 3)
    torch._check(n.shape[0] % 2 == 0)
    return n + 1, n.shape[0] + x.shape[0]


def masks(m: torch.Tensor) -> Any:
    """Return two numbers that are used."""
    one, two = m.nonzero(), m.clone().nonzero()
    torch._check(two.shape[0] <= 3)
    return one + 1, two + 1


def nodes_of(gm: torch.fx.GraphModule, target: Any) -> list[torch.fx.Node]:
    """Return the nodes that call a function."""
    return list(gm.graph.find_nodes(op="call_function", target=target))


def node_of(gm: torch.fx.GraphModule, target: Any) -> torch.fx.Node:
    """Return the only node that calls a function."""
    (fx_node,) = nodes_of(gm, target)
    return fx_node


def finding(
    fn: Callable[..., Any], *args: Any, by: Any = aten.nonzero.default
) -> tuple[torch.fx.GraphModule, Any, torch.fx.Node]:
    """Return a graph, its environment, and its only node that finds a number in data."""
    gm, env = traced(fn, *args)
    return gm, env, node_of(gm, by)


def number_of(fx_node: torch.fx.Node) -> Any:
    """Return the symbol that a node notes."""
    (symbol,) = fx_node.meta["unbacked_bindings"]
    return symbol


def replaced(
    gm: torch.fx.GraphModule, old: torch.fx.Node, target: Any, *args: Any
) -> torch.fx.Node:
    """Put another call before a node, as a pass does, and update the values."""
    with gm.graph.inserting_before(old):
        new = gm.graph.call_function(target, args)
    tfk.repropagate(gm, [new])
    return new


def erase(gm: torch.fx.GraphModule, old: torch.fx.Node, new: torch.fx.Node) -> None:
    """Put one node in the place of another."""
    old.replace_all_uses_with(new)
    gm.graph.erase_node(old)


def transplanted(gm: torch.fx.GraphModule, old: torch.fx.Node, new: torch.fx.Node) -> Transplanted:
    """Transplant a node and erase it; all bindings are right then."""
    result = tfk.transplant(gm, old, new)
    erase(gm, old, new)
    tfk.check_bindings(gm)
    return result


def refused(function: Callable[..., Any], *args: Any) -> str:
    """Return the error of a call."""
    with pytest.raises(ShapeEnvError) as error:
        function(*args)
    return str(error.value)


def asserts_in(env: Any) -> list[str]:
    """Return the deferred runtime asserts of an environment."""
    return [*map(str, asserts_of(env))]


# --- transplant -----------------------------------------------------------------------------------


@pytest.mark.parametrize("noted", [True, False])
def test_asserts_move_to_the_new_symbol(noted: bool) -> None:
    """Messages, stacks and the range move, and values have the new symbol; a missing note is made."""
    gm, env, old = finding(few, V4)
    before = [one for group in env.deferred_runtime_asserts.values() for one in group]
    u0 = number_of(old)
    bounds = env.var_to_range[u0]
    new = replaced(gm, old, aten.argwhere.default, *old.args)
    notes = dict(new.meta["unbacked_bindings"])
    if not noted:  # a pass may run the operator itself and copy only the value
        del new.meta["unbacked_bindings"]
    result = transplanted(gm, old, new)
    (u1,) = notes
    assert new.meta["unbacked_bindings"] == notes
    assert "unbacked_bindings" not in old.meta
    assert (result.moved, result.replaced) == ({u0: u1}, {})
    after = [one for group in env.deferred_runtime_asserts.values() for one in group]
    assert asserts_in(env) == ["u1 <= 3", "Eq(Mod(u1, 2), 0)"]
    texts = [[(one.msg, str(one.stack)) for one in asserts] for asserts in (before, after)]
    assert texts[0] == texts[1]
    assert env.var_to_range[u1].issubset(bounds)
    assert u1 in env.size_like
    add = node_of(gm, aten.add.Tensor)
    assert statically_known_true(add.meta["val"].size(0) == new.meta["val"].size(0))
    mode, inputs = fresh_inputs(gm)
    assert set(tfk.retrace(gm, inputs, mode=mode).symbols) == {u1}
    tfk.insert_runtime_asserts(gm, env)
    gm.recompile()
    gm(torch.tensor([1.0, 0, 2, 0]))
    assert "argwhere_default.size(0) <= 3" in raises(gm, torch.ones(4))
    raises(gm, torch.tensor([1.0, 0, 0, 0]))


def test_asserts_are_checked_for_a_constant_at_once() -> None:
    """A size of two satisfies the asserts; one does not, and nothing is changed."""
    gm, env, old = finding(few, V4)
    u0 = number_of(old)
    before = asserts_in(env), everything(gm.graph)
    one = replaced(gm, old, aten.zeros.default, [1, 1])
    assert refused(tfk.transplant, gm, old, one) == (
        "Eq(Mod(u0, 2), 0): a runtime assert does not hold any more; found u0 is 1. Replace the "
        "symbol by a number for which the graph's assumptions hold"
    )
    gm.graph.erase_node(one)
    assert (asserts_in(env), everything(gm.graph)) == before
    two = replaced(gm, old, aten.zeros.default, [2, 1])
    result = transplanted(gm, old, two)
    assert (result.replaced, result.checks) == ({u0: 2}, ())
    assert asserts_in(env) == []
    assert env.replace(u0) == 2
    mode, inputs = fresh_inputs(gm)
    assert tfk.retrace(gm, inputs, mode=mode).symbols == {}
    tfk.repropagate(gm, list(two.users))
    assert tuple(node_of(gm, aten.add.Tensor).meta["val"].size()) == (2, 1)


def test_a_range_is_checked_for_a_constant() -> None:
    """A bound of ``torch._check`` that is only in the range of a number is checked, too."""

    def fn(n: torch.Tensor) -> torch.Tensor:
        k = n.sum().item()
        torch._check(k >= 2)
        return torch.zeros(k)

    gm, _, old = finding(fn, T([1, 2]), by=aten._local_scalar_dense.default)
    new = replaced(gm, old, aten.sym_size.int, node_of(gm, aten.zeros.default), 0)
    new.meta["val"] = 1
    error = refused(tfk.transplant, gm, old, new)
    assert error.startswith("2 <= u0: a runtime assert does not hold any more")


def test_an_assert_becomes_a_guard_on_an_input() -> None:
    """The size of an input replaces the number, and torch makes guards of such conditions."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        n = x.nonzero()
        torch._check(n.shape[0] <= 3)
        return n + 1

    for rows in (3, 4):
        gm, env, old = finding(fn, V4, torch.ones(rows, 1))
        guards = len(env.guards)
        new = replaced(gm, old, aten.alias.default, gm.graph.find_nodes(op="placeholder")[1])
        if rows == 4:
            error = refused(tfk.transplant, gm, old, new)
            assert "u0 is s27" in error
            assert "s27 is 4" in error
            continue
        size = new.meta["val"].size(0).node.expr
        result = tfk.transplant(gm, old, new)
        assert list(map(str, result.replaced.values())) == [str(size)]
        assert result.checks == (f"{size} <= 3",)
        assert [str(g.expr) for g in env.guards[guards:]] == [f"{size} <= 3"]
        assert asserts_in(env) == []


def test_an_assert_on_another_number_becomes_a_node() -> None:
    """A number is replaced by another one, and its assert becomes a node over that."""
    gm, env = traced(masks, MASK)
    first, second = nodes_of(gm, aten.nonzero.default)
    u0, u1 = number_of(first), number_of(second)
    result = transplanted(gm, second, first)
    assert (result.replaced, result.moved) == ({}, {u1: u0})
    assert asserts_in(env) == ["u0 <= 3"]
    gm, env = traced(masks, MASK)
    first, second = nodes_of(gm, aten.nonzero.default)
    twice = replaced(gm, second, aten.cat.default, [first, first])
    result = transplanted(gm, second, twice)
    assert [str(expr) for expr in result.replaced.values()] == ["2*u0"]
    assert result.checks == ("2*u0 <= 3", "2*u0 >= 0")
    gm.recompile()
    gm(torch.tensor([True, False, False, False]))
    assert "2*nonzero.size(0) <= 3" in raises(gm, MASK)


def test_a_replacement_without_the_number_is_refused() -> None:
    """A new node with another structure, without a value, or none at all is refused."""
    gm, _, old = finding(few, V4)
    (x,) = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_before(old):
        new = gm.graph.call_function(aten.sum.default, (x,))
    assert refused(tfk.transplant, gm, old, new).startswith(
        "sum_default: a node that takes another one's place has no"
    )
    tfk.repropagate(gm, [new])
    assert refused(tfk.transplant, gm, old, new) == (
        "sum_default.size(0): the node that takes another one's place has no number there; expected the "
        "number that was u0, nonzero.size(0); found a FakeTensor"
    )
    assert refused(tfk.transplant, gm, old, None).startswith(
        "nonzero.size(0): a runtime assert would be lost; expected a node that has the place of "
        "u0; found u0 <= 3, Eq(Mod(u0, 2), 0)."
    )


def test_a_node_without_assumptions_is_removed() -> None:
    """The symbol of a removed node is removed from the environment."""
    gm, env, old = finding(lambda x: (x.nonzero(), x + 1), V4)
    output = gm.graph.output_node()
    output.args = (output.args[0][1:],)
    tfk.transplant(gm, old, None)
    gm.graph.erase_node(old)
    tfk.check_bindings(gm)
    assert unbacked_in(env) == set()


def test_a_number_that_another_node_has_too_stays() -> None:
    """The other node has the symbol by a memo, and its number may differ from the new one."""

    def fn(a: torch.Tensor, b: torch.Tensor, m: torch.Tensor) -> Any:
        one = a[m]
        torch._check(one.shape[0] <= 3)
        return one + 1, b[m] + 1

    gm, env = traced(fn, V4, V4 + 1, MASK)
    first, second = nodes_of(gm, aten.index.Tensor)
    notes = first.meta["unbacked_bindings"]
    u0 = number_of(first)
    new = replaced(gm, first, aten.slice.Tensor, first.args[0], 0, 0, 2)
    result = tfk.transplant(gm, first, new)
    assert result.retained == {u0: second}
    assert list(result.replaced) == [u0]
    assert second.meta["unbacked_bindings"] == notes
    assert env.replace(u0) == u0
    assert asserts_in(env) == ["u0 <= 3"]
    erase(gm, first, new)
    assert "add: u0 is used before index_1, which binds it" in refused(tfk.check_bindings, gm)
    tfk.repropagate(gm, list(new.users))
    tfk.check_bindings(gm)
    sizes = [str(n.meta["val"].size(0)) for n in gm.graph.output_node().args[0]]
    assert sizes == ["2", "u0"]
    error = refused(tfk.transplant, gm, second, node_of(gm, aten.slice.Tensor).args[0])
    assert error.startswith("u0 <= 3: a runtime assert does not hold any more")


def test_an_equality_moves_to_the_new_symbol() -> None:
    """The number of the new operator has the assert, and is replaced by 3."""

    def fn(n: torch.Tensor) -> torch.Tensor:
        k = n.sum().item()
        torch._check(k == 3)
        return torch.zeros(k)

    gm, env, old = finding(fn, T([1, 2]), by=aten._local_scalar_dense.default)
    new = replaced(gm, old, aten.item.default, *old.args)
    u1 = number_of(new)
    transplanted(gm, old, new)
    assert asserts_in(env) == ["Eq(u1, 3)"]
    assert env.replace(u1) == 3
    tfk.insert_runtime_asserts(gm, env)
    gm.recompile()
    gm(T([1, 2]))
    raises(gm, T([2, 2]))


# --- check_bindings -------------------------------------------------------------------------------


def faults(gm: torch.fx.GraphModule) -> list[str]:
    """Return the faults of a graph, a line each."""
    return [str(fault) for fault in binding_faults(gm)]


def unnoted(gm: torch.fx.GraphModule, first: torch.fx.Node, second: torch.fx.Node) -> None:
    """The fault names the node that makes the symbol, not those that use it."""
    del first.meta["unbacked_bindings"]


def noted_late(gm: torch.fx.GraphModule, first: torch.fx.Node, second: torch.fx.Node) -> None:
    """A user has the note."""
    add, _ = nodes_of(gm, aten.add.Tensor)
    add.meta["unbacked_bindings"] = first.meta.pop("unbacked_bindings")


def copied(gm: torch.fx.GraphModule, first: torch.fx.Node, second: torch.fx.Node) -> None:
    """A pass has copied the metadata of a node."""
    second.meta = dict(first.meta)


def swapped(gm: torch.fx.GraphModule, first: torch.fx.Node, second: torch.fx.Node) -> None:
    """The value does not have the symbol."""
    first.meta["unbacked_bindings"] |= {number_of(second): SIZE_0}
    del second.meta["unbacked_bindings"]


def astray(gm: torch.fx.GraphModule, first: torch.fx.Node, second: torch.fx.Node) -> None:
    """The path leads to no number."""
    first.meta["unbacked_bindings"] = {number_of(first): (SequenceKey(0), *SIZE_0)}


def moved(gm: torch.fx.GraphModule, first: torch.fx.Node, second: torch.fx.Node) -> None:
    """A pass has left a node behind the first one that uses it."""
    gm.graph.output_node().prepend(second)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (unnoted, ["nonzero: u0 is new here, and the node has no note of it"]),
        (noted_late, ["nonzero: u0 is used before add, which binds it"]),
        (
            copied,
            [
                "nonzero_1: u0 is bound twice: nonzero binds it",
                "add_1: u1 is used, and bound nowhere",
            ],
        ),
        (swapped, ["nonzero: u1 is not there: nonzero.size(0) gives u0"]),
        (astray, ["nonzero: u0 is not there: nonzero[0].size(0) leads to no number"]),
        (moved, ["add_1: u1 is used before nonzero_1, which binds it"]),
    ],
)
def test_a_wrong_note_is_found(edit: Callable[..., None], expected: list[str]) -> None:
    """A pass has moved nodes or notes; each fault names node and symbol."""
    gm, _ = traced(masks, MASK)
    edit(gm, *nodes_of(gm, aten.nonzero.default))
    assert faults(gm) == expected


def test_an_unbound_symbol_is_found() -> None:
    """A pass has replaced the node, but neither its users nor the asserts."""
    gm, _ = traced(masks, MASK)
    first, second = nodes_of(gm, aten.nonzero.default)
    erase(gm, second, first)
    assert refused(tfk.check_bindings, gm) == (
        "add_1: an unbacked symbol is not bound as it should be; found add_1: u1 is used, and "
        "bound nowhere. A pass that replaces or removes a node that binds symbols calls "
        "transplant, and repropagate for what uses it"
    )
    tfk.repropagate(gm, [n for n in gm.graph.nodes if n.name == "add_1"])
    assert faults(gm) == ["a runtime assert: u1 is bound nowhere: nothing can check u1 <= 3"]
    tfk.check_bindings(gm, asserts=False)


def test_symbols_of_inputs_are_bound() -> None:
    """Marked dims, other graphs, inputs of a body, and the graph around it bind symbols."""

    def inner(x: torch.Tensor) -> Any:
        k = x.nonzero().shape[0]
        return torch.cond(x.sum() > 0, lambda x: x + k, lambda x: x[x > 0].sum() * x, (x,))

    x = torch.ones(4)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    gm, env = dynamo_frame(inner, x, dynamic=None)
    assert len(unbacked_in(env)) > 1
    assert faults(gm) == []
    gm, env = traced(masks, MASK)
    half = torch.fx.Graph()
    first, _ = nodes_of(gm, aten.nonzero.default)
    (arg := half.placeholder("n")).meta["val"] = first.meta["val"]
    fx_node = half.call_function(aten.add.Tensor, (arg, 1))
    fx_node.meta = dict(nodes_of(gm, aten.add.Tensor)[0].meta)
    half.output(fx_node)
    part = torch.fx.GraphModule({}, half)
    tfk.check_bindings(part, asserts=False)
    assert faults(part) == ["a runtime assert: u1 is bound nowhere: nothing can check u1 <= 3"]


def test_a_missing_note_in_a_body_is_found() -> None:
    """A node of a body that lacks the note of its number is found."""

    def fn(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x[x > 0].sum(), lambda x: x.sum(), (x,))

    gm, _ = dynamo_frame(fn, V4)
    body: Any = gm.get_submodule("cond_true_0")
    (fx_node,) = (n for n in body.graph.nodes if n.meta.get("unbacked_bindings"))
    del fx_node.meta["unbacked_bindings"]
    assert faults(gm) == [f"{fx_node.name}: u0 is new here, and the node has no note of it"]


# --- repropagate ----------------------------------------------------------------------------------


def ran(gm: torch.fx.GraphModule, changed: list[torch.fx.Node]) -> tuple[list[str], list[str]]:
    """Return the operators that a repropagation runs, and the nodes that get new values."""
    seen: list[str] = []

    class Log(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Log():
        updated = tfk.repropagate(gm, changed)
    return seen, [n.name for n in updated]


def chain(x: torch.Tensor, m: torch.Tensor) -> Any:
    """Compute in two branches, one of them with numbers from the data."""
    y = x.sin()
    n = m.logical_not().nonzero()
    torch._check(n.shape[0] <= 3)
    return y + 1, n + 1, x[m].cos()


def test_a_data_dependent_node_of_unchanged_inputs_does_not_run() -> None:
    """Nodes that a change does not reach have the same objects as values."""
    gm, env = traced(chain, V4, MASK)
    values = {n: n.meta.get("val") for n in gm.graph.nodes}
    symbols = unbacked_in(env)
    node = node_of(gm, aten.logical_not.default)
    node.target = aten.bitwise_not.default  # the same metadata
    seen, updated = ran(gm, [node])
    assert updated == []
    assert "aten.nonzero.default" not in seen
    assert {n: n.meta.get("val") for n in gm.graph.nodes} == values
    sin = node_of(gm, aten.sin.default)
    sin.target, sin.args = aten._to_copy.default, sin.args
    sin.kwargs = {"dtype": torch.float64}
    seen, updated = ran(gm, [sin])
    assert updated == ["sin", "add"]
    assert "aten.nonzero.default" not in seen
    assert unbacked_in(env) == symbols
    tfk.check_bindings(gm)


def test_a_data_dependent_node_has_its_symbols_after_it_runs() -> None:
    """A node with an input of another type, or with another operator, has the same number."""
    gm, env = traced(chain, V4, MASK)
    before = everything_bound(gm)
    node = node_of(gm, aten.logical_not.default)
    node.target, node.kwargs = aten._to_copy.default, {"dtype": torch.int64}
    counter = env.unbacked_symint_counter
    seen, updated = ran(gm, [node])
    assert "aten.nonzero.default" in seen
    assert updated == ["logical_not"]
    assert everything_bound(gm) == before
    assert env.unbacked_symint_counter == counter
    cos = node_of(gm, aten.cos.default)
    index = node_of(gm, aten.index.Tensor)
    x = gm.graph.find_nodes(op="placeholder")[0]
    with gm.graph.inserting_before(index):
        wide = gm.graph.call_function(aten._to_copy.default, (x,), {"dtype": torch.float64})
    index.replace_input_with(x, wide)
    _, updated = ran(gm, [wide, index])
    assert updated == ["_to_copy_default", "index", "cos"]
    assert cos.meta["val"].dtype == torch.float64
    assert everything_bound(gm) == before
    tfk.check_bindings(gm)


def everything_bound(gm: torch.fx.GraphModule) -> dict[str, list[str]]:
    """Return the symbols that each node notes."""
    return {
        n.name: [str(s) for s in n.meta["unbacked_bindings"]]
        for n in gm.graph.nodes
        if n.meta.get("unbacked_bindings")
    }


def test_a_memo_is_no_binding_site() -> None:
    """A node with the symbol of another one has it again, and binds nothing."""
    gm, env = traced(lambda m: (m.nonzero(), m.nonzero().float()), MASK)
    _, second = nodes_of(gm, aten.nonzero.default)
    second.target = aten.argwhere.default
    before, counter = everything_bound(gm), env.unbacked_symint_counter
    assert tfk.repropagate(gm, [second]) == ()
    assert everything_bound(gm) == before
    assert env.unbacked_symint_counter == counter == 1


def test_a_new_node_gets_a_value_and_a_note() -> None:
    """A node that a pass has inserted gets its value and the note of its symbol."""
    gm, _ = traced(lambda x: x + 1, V4)
    (x,) = gm.graph.find_nodes(op="placeholder")
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        new = gm.graph.call_function(aten.nonzero.default, (x,))
    output.args = ((output.args[0], new),)
    assert tfk.repropagate(gm, [new]) == (new,)
    assert [str(s) for s in new.meta["unbacked_bindings"]] == ["u0"]
    tfk.check_bindings(gm)


def test_bodies_are_updated() -> None:
    """The nodes of a branch get the type of its input, and its symbols stay."""

    def fn(x: torch.Tensor) -> Any:
        y = x.sin()
        return torch.cond(x.sum() > 0, lambda y: y[y > 0], lambda y: y[:2] * 2, (y,))

    gm, _ = traced(fn, V4)
    body: Any = gm.get_submodule("true_graph_0")
    before, inner = everything_bound(gm), everything_bound(body)
    sin = node_of(gm, aten.sin.default)
    sin.target, sin.kwargs = aten._to_copy.default, {"dtype": torch.float64}
    tfk.repropagate(gm, [sin])
    assert node_of(body, aten.index.Tensor).meta["val"].dtype == torch.float64
    assert (everything_bound(gm), everything_bound(body)) == (before, inner)
    tfk.check_bindings(gm)


def test_a_lost_binding_site_is_an_error() -> None:
    """The changed node has no number from data, and the error refers to `transplant`."""
    gm, _ = traced(chain, V4, MASK)
    nonzero = node_of(gm, aten.nonzero.default)
    nonzero.target, nonzero.args = aten.zeros.default, ([2, 1],)
    assert refused(tfk.repropagate, gm, [nonzero]) == (
        "nonzero.size(0): a binding site is gone; expected the unbacked symbol u0; found 2. "
        "Insert a new node for it, and transplant the old one to that"
    )
