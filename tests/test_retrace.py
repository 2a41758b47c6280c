"""``retrace``: the unbacked symbols of a graph in a fresh ``ShapeEnv``, one for one.

Law 8: a retrace has exactly as many unbacked symbols as the original, all bound.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from assert_frames import (
    CASES,
    V4,
    Frame,
    T,
    asserts_of,
    calls,
    dynamo_frame,
    everything,
    fresh_inputs,
    raises,
    traced,
)
from hypothesis import HealthCheck, Phase, assume, given, settings
from shape_programs import Program, compiled, programs
from torch._decomp import core_aten_decompositions
from torch._dynamo.source import ConstantSource
from torch._functorch.aot_autograd import aot_export_module
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    statically_known_true,
)
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

import torch_fakeify as tfk
from torch_fakeify.binding_sites import env_of, expr_of, symbols_in
from torch_fakeify.errors import ShapeEnvError
from torch_fakeify.expr_nodes import bodies, value_of
from torch_fakeify.unbacked import Retraced, binding_faults, is_unbacked, renamed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import sympy

MASK = torch.tensor([True, False, True, True])

# --- what is counted ------------------------------------------------------------------------------


def graphs_of(gm: torch.fx.GraphModule) -> Iterator[torch.fx.GraphModule]:
    """A graph and the bodies of its higher-order operators."""
    yield gm
    for body in bodies(gm):
        yield from graphs_of(body)


def bound_by(gm: torch.fx.GraphModule) -> list[sympy.Symbol]:
    """The symbols that the nodes of a graph note, as its environment names them."""
    env = env_of(gm.graph)
    return [
        renamed(symbol, env)
        for graph in graphs_of(gm)
        for fx_node in graph.graph.nodes
        if fx_node.op != "placeholder"
        for symbol in fx_node.meta.get("unbacked_bindings") or {}
    ]


def unbacked_in(env: Any) -> set[sympy.Symbol]:
    """All unbacked symbols that an environment has made."""
    return {symbol for symbol in env.var_to_range if is_unbacked(symbol)}


def law_8(gm: torch.fx.GraphModule, **options: Any) -> tuple[Retraced, Any]:
    """Retrace a graph in a fresh environment; as many symbols as in the original, all bound."""
    original = bound_by(gm)
    assert len(set(original)) == len(original)
    mode, inputs = fresh_inputs(gm)
    given_already = unbacked_in(mode.shape_env)
    result = tfk.retrace(gm, inputs, mode=mode, **options)
    bound = bound_by(result.gm)
    assert len(set(bound)) == len(bound) == len(original)
    own = unbacked_in(mode.shape_env) - given_already
    inputs_of_bodies = own - set(bound)
    assert all(
        inputs_of_bodies >= (symbols_in(value_of(n)) - set(bound) - given_already)
        for graph in graphs_of(result.gm)
        for n in graph.graph.find_nodes(op="placeholder")
    )
    shown = {
        s
        for body in bodies(result.gm)
        for n in body.graph.find_nodes(op="placeholder")
        for s in symbols_in(value_of(n))
    }
    assert inputs_of_bodies <= shown
    assert set(result.symbols.values()) == own
    assert len(result.symbols) == len(own)
    assert set(result.symbols) >= set(original)
    if not binding_faults(gm):
        tfk.check_bindings(result.gm)
    return result, mode.shape_env


def shapes(gm: torch.fx.GraphModule, names: dict[Any, Any] | None = None) -> list[list[str]]:
    """The numbers of all values of a graph, over other symbols."""
    found: list[list[str]] = []
    for graph in graphs_of(gm):
        for fx_node in graph.graph.nodes:
            leaves, _ = tree_flatten(value_of(fx_node))
            numbers: list[Any] = []
            for leaf in leaves:
                if not isinstance(leaf, torch.Tensor):
                    numbers.append(leaf)
                elif leaf.layout is torch.strided:
                    numbers += [*leaf.size(), *leaf.stride(), leaf.dtype]
                else:  # a nested tensor, whose rows have a number of the mode
                    numbers += [leaf.size(0), *leaf.size()[2:], leaf.dtype]
            found.append([_text(n, names or {}) for n in numbers])
    return found


def _text(n: Any, names: dict[Any, Any]) -> str:
    expr = expr_of(n)
    if expr is None:
        return str(n)
    expr = getattr(n, "node", None).expr if hasattr(n, "node") else expr
    return str(expr.xreplace(names))


# --- programs -------------------------------------------------------------------------------------


def memoized(a: torch.Tensor, m: torch.Tensor) -> Any:
    """The same mask four times, a copy of it once, and a selection, which nothing remembers."""
    return a[m], (a + 1)[m], m.nonzero(), m.clone().nonzero(), torch.masked_select(a, m)


def mutated(m: torch.Tensor) -> Any:
    """Numbers that are found again after the data has changed."""
    m = m.clone()
    first, second = m.nonzero(), m.nonzero()
    m.logical_not_()
    third, fourth = m.nonzero(), m.nonzero()
    return first + second, third + fourth


def distinct(x: torch.Tensor) -> Any:
    """Every memo of torch: twice each, and what has none."""
    u, v = torch.unique(x), torch.unique(x, return_counts=True)
    w, z = torch.unique_consecutive(x), torch.unique_consecutive(x)
    k = (x > 0).sum()
    return u + v[0], v[1], w + z, torch.bincount((x > 0).long()), k.item() + k.item()


def flag(x: torch.Tensor) -> Any:
    """A boolean."""
    b = (x > 0).any().item()
    return x * torch.sym_ite(b, 1, 2), b


def split(x: torch.Tensor, n: torch.Tensor) -> Any:
    """Views at sizes from the data, and an offset."""
    k = n.sum().item()
    torch._check(k >= 0)
    torch._check(k <= x.shape[0])
    return torch.split(x, [k, x.shape[0] - k])


def branches(x: torch.Tensor) -> Any:
    """What a branch finds, inside and as the result."""

    def true(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0]

    def false(x: torch.Tensor) -> torch.Tensor:
        return x[:2] + x.nonzero().sum()

    return torch.cond(x.sum() > 0, true, false, (x,))


def loop(x: torch.Tensor, n: torch.Tensor) -> Any:
    """A counter that is a symbol of each body, and a body that finds a number."""
    k = n.sum().item()

    def condition(i: Any, a: torch.Tensor) -> Any:
        return i < 4

    def body(i: Any, a: torch.Tensor) -> Any:
        return i + 1, a + a.nonzero().shape[0]

    return torch._higher_order_ops.while_loop(condition, body, (k, x))


def mapped(x: torch.Tensor) -> Any:
    """A float found in each row."""
    return torch._higher_order_ops.map(lambda row: row + row.sum().item(), x.view(2, 2))


def jagged(x: torch.Tensor, n: torch.Tensor) -> Any:
    """A nested tensor whose rows the data tells."""
    nested: Any = torch.nested.nested_tensor_from_jagged(x.nonzero().float(), n)
    return nested.sin().sum()


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
    "memoized": (memoized, (V4, MASK), 3),
    "mutated": (mutated, (MASK,), 2),
    "distinct": (distinct, (V4,), 4),
    "flag": (flag, (V4,), 1),
    "split": (split, (V4, T([1, 2])), 1),
    "branches": (branches, (V4,), 3),
    "mapped": (mapped, (V4,), 1),
    "jagged": (jagged, (V4, T([0, 1, 3])), 1),
}
"""With the number of binding sites."""


def few(*plain: str) -> list[Any]:
    """All programs; those that are not named only in a sweep."""
    return [n if n in plain else pytest.param(n, marks=pytest.mark.sweep) for n in PROGRAMS]


@pytest.mark.parametrize("name", few("memoized", "mutated", "branches", "jagged"))
def test_as_many_symbols_as_binding_sites(name: str) -> None:
    """In a graph of Dynamo: what is remembered is made once, what has changed is made again."""
    fn, args, count = PROGRAMS[name]
    gm, _ = dynamo_frame(fn, *args)
    before = everything(gm.graph)
    result, _ = law_8(gm)
    assert len(result.symbols) == count
    assert everything(gm.graph) == before
    names = {new: old for old, new in result.symbols.items()}
    names |= {new: old for old, new in result.inputs.items() if new.is_Symbol}
    assert shapes(result.gm, names) == shapes(gm)


@pytest.mark.parametrize("name", few("branches")[:5])
def test_as_many_in_an_aten_graph_and_in_its_decompositions(name: str) -> None:
    """``make_fx``, then ours with and without decompositions, which make no symbol of their own."""
    fn, args, count = PROGRAMS[name]
    gm, _ = traced(fn, *args)
    for options in ({}, {"decompositions": {}}, {"decompositions": core_aten_decompositions()}):
        result, env = law_8(gm, **options)
        assert len(unbacked_in(env)) == count
        assert calls(result.gm) == calls(gm) or options


def test_a_loop_counter_is_bound_by_its_body() -> None:
    """Two bodies, each with a counter of its own, which is no binding site of a node."""
    gm, _ = dynamo_frame(loop, V4, T([1, 2]))
    result, env = law_8(gm)
    assert len(bound_by(result.gm)) == 3
    assert len(result.symbols) == len(unbacked_in(env)) == 5


def test_what_a_body_finds_is_not_known_around_it() -> None:
    """Torch 2.13 remembers it of the tensor: the operator after the branch binds nothing there.

    In the retrace it finds a number of its own, and the run of the branch that torch makes for its
    result leaves neither symbols nor asserts.
    """

    def fn(x: torch.Tensor) -> Any:
        def true(x: torch.Tensor) -> torch.Tensor:
            n = x.nonzero()
            torch._check(n.shape[0] <= 3)
            return n.sum() + x.sum()

        return torch.cond(x.sum() > 0, true, lambda x: x.sum() * 2, (x,)), x.nonzero()

    for gm, _ in (traced(fn, V4), dynamo_frame(fn, V4)):
        (fault,) = binding_faults(gm)
        assert str(fault).endswith("is new here, and the node has no note of it")
        mode, inputs = fresh_inputs(gm)
        result = tfk.retrace(gm, inputs, mode=mode)
        env: Any = mode.shape_env
        tfk.check_bindings(result.gm)
        assert set(bound_by(result.gm)) == unbacked_in(env)
        assert len(bound_by(result.gm)) == 2
        assert env.num_deferred_runtime_asserts == len(asserts_of(env))
        mode, inputs = fresh_inputs(gm)
        for graph in graphs_of(gm):
            for fx_node in graph.graph.nodes:
                fx_node.meta.clear()
        result = tfk.retrace(gm, inputs, mode=mode)  # there nothing says what is shown where
        tfk.check_bindings(result.gm)
        assert len(bound_by(result.gm)) == 2


# --- equal results --------------------------------------------------------------------------------


def test_equal_results_stay_provably_equal() -> None:
    """Two sizes that were one symbol are one symbol, also where a view of the mask was asked."""
    result, _ = law_8(traced(memoized, V4, MASK).gm)
    (fx_node,) = result.gm.graph.find_nodes(op="output")
    one, two, three, copy, _ = (value_of(arg).size(0) for arg in fx_node.args[0])
    assert statically_known_true(one == two)
    assert statically_known_true(two == three)
    assert not statically_known_true(one == copy)


def test_a_result_that_nothing_remembers_any_more_is_the_same_symbol() -> None:
    """A pass has put a copy of the mask before the second operator, which so forgets the first."""
    gm, _ = traced(lambda m: (m.nonzero(), m.nonzero()), MASK)
    (mask,) = gm.graph.find_nodes(op="placeholder")
    _, second = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.nonzero.default)
    with gm.graph.inserting_before(second):
        copy = gm.graph.call_function(torch.ops.aten.clone.default, (mask,))
    copy.meta["val"] = mask.meta["val"]
    second.args = (copy,)
    result, _ = law_8(gm)
    one, two = (n.meta["val"] for n in result.gm.graph.nodes if n.name.startswith("nonzero"))
    assert statically_known_true(one.size(0) == two.size(0))
    # Torch's own propagation makes a symbol for each, and loses that they are equal.
    mode, inputs = fresh_inputs(gm)
    for fx_node in gm.graph.nodes:
        fx_node.meta.pop("unbacked_bindings", None)
    FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*inputs)
    assert len(unbacked_in(mode.shape_env)) == 2


def test_an_operator_of_another_epoch_has_its_own_symbol() -> None:
    """Two sites of two symbols stay two, though the tensor would remember the first."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    mask = mode.from_tensor(MASK, source=ConstantSource("m"))
    graph = torch.fx.Graph()
    (placeholder := graph.placeholder("m")).meta["val"] = mask
    fx_nodes: list[torch.fx.Node] = []
    with mode:
        for _ in range(2):
            fx_node = graph.call_function(torch.ops.aten.nonzero.default, (placeholder,))
            fx_node.meta["val"] = fx_node.target(mask)
            fx_nodes.append(fx_node)
            mode.epoch += 1
    graph.output(tuple(fx_nodes))
    gm = torch.fx.GraphModule({}, graph)
    mode, inputs = fresh_inputs(gm)
    result = tfk.retrace(gm, inputs, mode=mode)
    assert len(result.symbols) == 2
    assert [len(n.meta["unbacked_bindings"]) for n in result.gm.graph.nodes if n.op[:4] == "call"]


# --- notes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", few("distinct")[:6])
def test_a_graph_without_notes(name: str) -> None:
    """The first value that shows a symbol binds it."""
    fn, args, count = PROGRAMS[name]
    gm, _ = dynamo_frame(fn, *args)
    notes = bound_by(gm)
    for graph in graphs_of(gm):
        for fx_node in graph.graph.nodes:
            fx_node.meta.pop("unbacked_bindings", None)
    mode, inputs = fresh_inputs(gm)
    result = tfk.retrace(gm, inputs, mode=mode)
    assert len(bound_by(result.gm)) == len(result.symbols) == count
    assert set(result.symbols) == set(notes)


def test_a_graph_without_values() -> None:
    """There is nothing to compare with: it is propagated, and its nodes note what they bind."""
    gm, _ = traced(memoized, V4, MASK)
    mode, inputs = fresh_inputs(gm)
    for fx_node in gm.graph.nodes:
        fx_node.meta.clear()
    result = tfk.retrace(gm, inputs, mode=mode)
    assert result.symbols == {}
    assert len(bound_by(result.gm)) == 3
    tfk.check_bindings(result.gm)


def two_counts(x: torch.Tensor) -> Any:
    """A wrapper around tensors of data-dependent sizes, a list of multiples of one."""
    n = x.nonzero()
    return TwoTensor(n, n), [x, torch.cat([n, n])]


def test_inner_tensors_and_divided_sizes() -> None:
    """A symbol that only an inner tensor shows, or only a multiple of it."""
    for part, path in ((0, "inner_name='a'"), (1, "divisor=2")):
        env = ShapeEnv()
        mode = FakeTensorMode(shape_env=env)
        dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC])
        fake = mode.from_tensor(V4, source=ConstantSource("x"), symbolic_context=dynamic)
        graph = torch.fx.Graph()
        (arg := graph.placeholder("x")).meta["val"] = fake
        fx_node = graph.call_function(lambda x, part=part: two_counts(x)[part], (arg,))
        with mode:
            fx_node.meta["val"] = fx_node.target(fake)
        pending = set(env.pending_fresh_unbacked_symbols)
        notes = torch.fx.experimental.symbolic_shapes.compute_unbacked_bindings(
            env, fx_node.meta["val"]
        )
        assert pending == set(notes or {})
        fx_node.meta["unbacked_bindings"] = notes
        graph.output(fx_node)
        result, _ = law_8(torch.fx.GraphModule({}, graph))
        (found,) = (n for n in result.gm.graph.nodes if n.op == "call_function")
        assert path in str(found.meta["unbacked_bindings"])


def test_an_item_that_an_input_has_stays() -> None:
    """``item()`` of an integer input is a number of the input for Dynamo, and for a retrace."""

    def fn(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return x * n.item() if n.item() > 2 else x

    gm, env = dynamo_frame(fn, V4, torch.tensor(3))
    assert unbacked_in(env) == set()
    mode, inputs = fresh_inputs(gm)
    for _ in range(2):  # in the second epoch too
        result = tfk.retrace(gm, inputs, mode=mode)
        assert result.symbols == {}
        assert unbacked_in(mode.shape_env) == set()
        assert "l_n_.item() >= 3" in tfk.insert_guards(result.gm, mode.shape_env).inserted


def test_an_item_that_was_specialized_stays_a_constant() -> None:
    """And one that the frontend found in the data of an input is bound by the node again."""

    def fn(x: torch.Tensor, n: torch.Tensor, f: torch.Tensor) -> Any:
        return x + len(range(n.item())), x * f.item()

    gm, _ = dynamo_frame(fn, V4, torch.tensor(3), torch.tensor(2.0))
    (number,) = bound_by(gm)
    mode, inputs = fresh_inputs(gm)
    result = tfk.retrace(gm, inputs, mode=mode)
    assert set(result.symbols) == {number}
    assert len(bound_by(result.gm)) == 1


# --- facts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [n if n in ("nonzero", "product") else pytest.param(n, marks=pytest.mark.sweep) for n in CASES],
)
def test_asserts_go_along(name: str) -> None:
    """The asserts of the original, their messages and stacks, and the ranges of its symbols."""
    fn, good, bad, why = CASES[name]
    gm, env = traced(fn, *good)
    result, fresh = law_8(gm)
    assert result.unplaced == ()
    names = result.symbols | {o: n for o, n in result.inputs.items() if n.is_Symbol}
    old = [one for group in env.deferred_runtime_asserts.values() for one in group]
    new = [one for group in fresh.deferred_runtime_asserts.values() for one in group]
    assert [str(one.expr.xreplace(names)) for one in old] == [str(one.expr) for one in new]
    assert [one.msg for one in old] == [one.msg for one in new]
    assert [str(one.stack) for one in old] == [str(one.stack) for one in new]
    for symbol, made in result.symbols.items():
        assert fresh.var_to_range[made].issubset(env.var_to_range[symbol])
        assert (made in fresh.size_like) == (symbol in env.size_like)
    assert why in tfk.insert_runtime_asserts(result.gm, fresh).inserted
    result.gm(*good)
    raises(result.gm, *bad)


def test_what_no_assert_says_goes_along() -> None:
    """A range and that a number is a size, which torch was told without a node for it."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        k: Any = x.sum().item()
        torch.fx.experimental.symbolic_shapes._constrain_range_for_size(k, min=2, max=9)
        return x * k

    result, fresh = law_8(traced(fn, V4.long()).gm)
    (made,) = result.symbols.values()
    assert asserts_of(fresh) == []
    assert (fresh.var_to_range[made].lower, fresh.var_to_range[made].upper) == (2, 9)
    assert made in fresh.size_like


def test_a_replacement_goes_along() -> None:
    """Two numbers that the environment was told to be one, without an assert."""
    gm, env = traced(lambda m: (m.nonzero(), m.clone().nonzero()), MASK)
    one, two = bound_by(gm)
    env._eliminate_unbacked(two, one)
    result, fresh = law_8(gm)
    assert asserts_of(fresh) == []
    assert fresh.replace(result.symbols[two]) == result.symbols[one]


def test_an_assert_without_a_node_is_reported() -> None:
    """Dynamo has taken out the node that found the number; the assert cannot be checked."""
    fn, good, _, _ = CASES["bool"]
    gm, env = dynamo_frame(fn, *good)
    mode, inputs = fresh_inputs(gm)
    result = tfk.retrace(gm, inputs, mode=mode)
    assert result.unplaced == ("Eq(u0, 1)",)
    assert result.unplaced == tuple(map(str, asserts_of(env)))


# --- what is refused ------------------------------------------------------------------------------


def refusal(gm: torch.fx.GraphModule, *inputs: Any, **options: Any) -> str:
    """What `retrace` says of static inputs."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = [mode.from_tensor(x, static_shapes=True) for x in inputs]
    with pytest.raises(ShapeEnvError) as error:
        tfk.retrace(gm, fakes, **options)
    return str(error.value)


def test_a_site_that_is_gone_is_named() -> None:
    """An empty tensor has no nonzero element: the size is a constant, unless that is allowed."""
    gm, _ = traced(lambda x: x.nonzero() + 1, V4)
    assert refusal(gm, torch.zeros(0)) == (
        "nonzero.size(0): a binding site is gone; expected an unbacked symbol, as u0 was; found 0. "
        "allow_gone=True takes what is there"
    )
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = mode.from_tensor(torch.zeros(0), static_shapes=True)
    result = tfk.retrace(gm, [fake], allow_gone=True)
    assert {str(s): n for s, n in result.gone.items()} == {"u0": 0}
    assert result.symbols == {}


def test_what_was_assumed_is_checked_of_a_constant() -> None:
    """A number that must be at least 1 cannot become 0."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        n = x.nonzero()
        torch._check(n.shape[0] >= 1, lambda: "something must be there")
        return n

    assert refusal(traced(fn, V4).gm, torch.zeros(0), allow_gone=True) == (
        "1 <= u0: a runtime assert does not hold any more; found u0 is 0. What has the place of "
        "the symbol is not what the graph assumes of it"
    )


def test_a_symbol_bound_twice_is_named() -> None:
    """An operator that gives one tensor twice, where the graph has two numbers."""
    gm, _ = traced(lambda m: (m.nonzero(), m.clone().nonzero()), MASK)
    first, second = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.nonzero.default)
    second.target, second.args = torch.ops.aten.alias.default, (first,)
    assert refusal(gm, MASK) == (
        "nonzero_1.size(0): one symbol would be bound twice; expected a symbol of its own for u1; "
        "found u0, which nonzero.size(0) binds. The nodes have become one computation: transplant "
        "the second one"
    )


def test_a_number_that_was_none_is_named() -> None:
    """What was a size of the input is one from the data."""
    gm, _ = traced(lambda x: x.flip(0), V4)
    (flip,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.flip.default)
    flip.target, flip.args = torch.ops.aten.masked_select.default, (flip.args[0], flip.args[0])
    (arg,) = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_before(flip):
        mask = gm.graph.call_function(torch.ops.aten.gt.Scalar, (arg, 0))
    flip.args = (arg, mask)
    assert refusal(gm, V4).startswith(
        "flip.size(0): a node finds a number in its data that it did not find before; "
        "expected s27; found u0."
    )


def test_a_node_that_was_merged_is_named() -> None:
    """Common subexpressions were eliminated, and what uses the second one has its old values."""
    gm, _ = traced(lambda m: (m.nonzero() + 1, m.clone().nonzero() + 2), MASK)
    first, second = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.nonzero.default)
    second.replace_all_uses_with(first)
    gm.graph.erase_node(second)
    assert refusal(gm, MASK).startswith(
        "add_1.size(0): one symbol would be bound twice; expected a symbol of its own for u1; "
        "found u0, which nonzero.size(0) binds."
    )
    with pytest.raises(ShapeEnvError, match="add_1: u1 is used, and bound"):
        tfk.check_bindings(gm)


def test_a_node_that_was_moved_binds_what_it_finds_first() -> None:
    """The operator that remembered comes first now, and what bound the symbol remembers."""
    gm, _ = traced(lambda m: (m.nonzero() + 1, m.nonzero() + 2), MASK)
    first, second = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.nonzero.default)
    first.prepend(second)
    mode, inputs = fresh_inputs(gm)
    result = tfk.retrace(gm, inputs, mode=mode)
    assert len(result.symbols) == len(unbacked_in(mode.shape_env)) == 1
    notes = {n.name: bool(n.meta.get("unbacked_bindings")) for n in result.gm.graph.nodes}
    assert (notes["nonzero"], notes["nonzero_1"]) == (False, True)
    tfk.check_bindings(result.gm)


def test_an_assert_about_dead_code_is_reported() -> None:
    """Its node is eliminated: the fresh environment has neither symbol nor assert."""
    gm, _ = traced(lambda m: (torch._check(m.sum().item() > 1), m.nonzero())[1], MASK)
    (dead,) = (n for n in gm.graph.nodes if n.name == "_local_scalar_dense")
    gm.graph.erase_node(dead)
    mode, inputs = fresh_inputs(gm)
    result = tfk.retrace(gm, inputs, mode=mode)
    assert result.unplaced == ("1 < u0",)
    assert len(result.symbols) == len(unbacked_in(mode.shape_env)) == 1


def test_its_own_environment_is_refused() -> None:
    """There a retrace would make every symbol twice."""
    gm, _ = traced(lambda x: x.nonzero(), V4)
    inputs = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    with pytest.raises(ShapeEnvError, match="found the graph's own"):
        tfk.retrace(gm, inputs)
    with pytest.raises(ShapeEnvError, match="expected 1 inputs, one for each placeholder; found 0"):
        tfk.retrace(gm, [])


# --- export ---------------------------------------------------------------------------------------


class Masked(torch.nn.Module):
    """The model of pytorch issue 154647."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", MASK)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        """Two tensors, one mask."""
        return a[:, self.mask], b[:, self.mask]


def exported(*, strict: bool) -> Any:
    """Its program."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(Masked(), (torch.ones(2, 4), torch.ones(3, 4)), strict=strict)


def test_a_boolean_buffer_decomposes() -> None:
    """Issue 154647: one symbol for both results, in a fresh environment and decomposed.

    Torch 2.13's own decompositions do it in the environment of the export; a propagation in a fresh
    one fails there, since old and new symbols have one name.
    """
    program = exported(strict=False)
    gm = program.graph_module
    mode, inputs = fresh_inputs(gm)
    with pytest.raises(AssertionError, match="u0 possible memo disaster"):
        FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*inputs)
    gm = exported(strict=False).graph_module
    result, env = law_8(gm, decompositions=torch.export.default_decompositions())
    assert [str(s) for s in unbacked_in(env)] == ["u0"]
    one, two = (value_of(arg) for arg in result.gm.graph.output_node().args[0])
    assert statically_known_true(one.size(1) == two.size(1))
    names = [n.name for n in result.gm.graph.find_nodes(op="placeholder")]
    assert names == [n.name for n in gm.graph.find_nodes(op="placeholder")]
    a, b = torch.randn(2, 4), torch.randn(3, 4)
    for ours, eager in zip(result.gm(MASK, a, b), Masked()(a, b), strict=True):
        assert torch.equal(ours, eager)


@pytest.mark.sweep
def test_a_strict_export_leaves_a_symbol_behind_and_a_retrace_does_not() -> None:
    """Torch 2.13 has a range for ``u1``, which nothing binds."""
    program = exported(strict=True)
    assert sorted(map(str, program.range_constraints)) == ["u0", "u1"]
    _, env = law_8(program.graph_module)
    assert len(unbacked_in(env)) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = program.run_decompositions()
    law_8(again.graph_module)


# --- other tracers --------------------------------------------------------------------------------


def through_functionalize(fn: Callable[..., Any], args: tuple[Any, ...]) -> torch.fx.GraphModule:
    """Traced under functionalization."""
    return traced(torch.func.functionalize(fn), *args).gm


def through_aot(fn: Callable[..., Any], args: tuple[Any, ...]) -> torch.fx.GraphModule:
    """AOTAutograd's graph, with decompositions."""

    class Program(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            out = fn(*args)
            return tuple(out) if isinstance(out, (tuple, list)) else (out,)

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    fakes = [
        mode.from_tensor(
            arg,
            source=ConstantSource(f"arg{i}"),
            symbolic_context=StatelessSymbolicContext([DimDynamic.DUCK] * arg.ndim),
        )
        for i, arg in enumerate(args)
    ]
    with mode:
        gm, _ = aot_export_module(
            Program(), fakes, trace_joint=False, decompositions=core_aten_decompositions()
        )
    return gm


def through_make_fx(fn: Callable[..., Any], args: tuple[Any, ...]) -> torch.fx.GraphModule:
    """Dynamo's graph, run by an interpreter under ``make_fx`` in a fresh environment."""
    gm, _ = dynamo_frame(fn, *args)
    mode, inputs = fresh_inputs(gm)
    with mode:
        return make_fx(lambda *args: torch.fx.Interpreter(gm).run(*args))(*inputs)


@pytest.mark.parametrize(
    ("name", "through"),
    [
        ("memoized", through_aot),
        *(
            pytest.param(name, through, marks=pytest.mark.sweep)
            for name in ("memoized", "distinct")
            for through in (through_functionalize, through_make_fx, through_aot)
        ),
    ],
)
def test_through_other_tracers(name: str, through: Callable[..., Any]) -> None:
    """Torch's pipelines note as many symbols as the program has, and a retrace has these."""
    fn, args, count = PROGRAMS[name]
    gm = through(fn, args)
    assert len(bound_by(gm)) == count
    law_8(gm)
    law_8(gm, decompositions={})


# --- sweeps ---------------------------------------------------------------------------------------


def frames_of(program: Program) -> list[Frame]:
    """What a Dynamo backend sees of a program."""
    frames: list[Frame] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        mode = TracingContext.get().fake_mode
        assert mode is not None
        assert mode.shape_env is not None
        frames.append(Frame(gm, mode.shape_env))
        return gm.forward

    compiled(program, backend)
    return frames


@pytest.mark.sweep
@settings(
    max_examples=25, deadline=None, phases=[Phase.generate], suppress_health_check=HealthCheck
)
@given(programs(policies=("dynamic", "dynamic", "mark", "unbacked")))
def test_law_8_of_programs(program: Program) -> None:
    """Random programs with numbers from their data."""
    text = program.source()
    assume("nonzero" in text or "item" in text or "tolist" in text or "masked" in text)
    for gm, _ in frames_of(program):
        law_8(gm)


NO_DATA_FOR_ATEN = {"jagged", "split"}
"""Programs of which ``make_fx`` alone takes no size from the data."""


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("of", "name"),
    [("dynamo", name) for name in (*CASES, *PROGRAMS)]
    + [("aten", name) for name in (*CASES, *PROGRAMS) if name not in NO_DATA_FOR_ATEN],
)
def test_law_8_of_all_cases(of: str, name: str) -> None:
    """Each program as Dynamo and as ``make_fx`` see it; again of the retrace."""
    fn, args = CASES[name][:2] if name in CASES else PROGRAMS[name][:2]
    gm, _ = (dynamo_frame if of == "dynamo" else traced)(fn, *args)
    result, _ = law_8(gm)
    law_8(result.gm)


DATA_OPS = {
    "NumpyNMSCustomOp", "NumpyNonzeroCustomOp", "argwhere", "bincount", "combinations", "item",
    "masked_select", "nonzero", "unique", "unique_consecutive",
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:`create_unbacked_symint` is deprecated:FutureWarning")
def test_law_8_of_operators() -> None:
    """Every operator of torch's tables that finds a number in its data, on its samples."""
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.custom_op_db import custom_op_db

    done: set[str] = set()
    for op in (*op_db, *custom_op_db):
        if op.name not in DATA_OPS:
            continue
        kinds = (torch.float32, torch.int64, torch.bool)
        dtype = next(d for d in kinds if d in op.supported_dtypes("cpu"))
        for sample in list(op.sample_inputs("cpu", dtype))[:4]:
            leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
            places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

            def fn(*args: Any, op: Any = op, leaves: Any = leaves, spec: Any = spec) -> Any:
                own = list(leaves)
                for i, arg in zip(
                    (i for i, leaf in enumerate(own) if isinstance(leaf, torch.Tensor)),
                    args,
                    strict=True,
                ):
                    own[i] = arg
                first, rest, options = tree_unflatten(own, spec)
                return op(first, *rest, **options)

            gm, env = traced(fn, *(leaves[i] for i in places))
            if unbacked_in(env):
                law_8(gm)
                if op.name not in done:
                    law_8(gm, decompositions=core_aten_decompositions())
                done.add(op.name)
    assert done == DATA_OPS
