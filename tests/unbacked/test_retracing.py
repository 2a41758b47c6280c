"""``retrace``: the unbacked symbols of a graph in a fresh ``ShapeEnv``, one for one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from assert_frames import (
    CASES,
    V4,
    T,
    asserts_of,
    calls,
    dynamo_frame,
    everything,
    fresh_inputs,
    raises,
    traced,
)
from quiet import quiet
from retrace_checks import MASK, PROGRAMS, bound_by, law_8, memoized, unbacked_in
from torch._decomp import core_aten_decompositions
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    statically_known_true,
)
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_flatten

import torch_fakeify as tfk
from torch_fakeify.errors import ShapeEnvError
from torch_fakeify.replay.bindings import expr_of
from torch_fakeify.replay.lowering import graphs_of, value_of
from torch_fakeify.unbacked.binding_checks import binding_faults

# --- what is counted --------------------------------------------------------------------------------


def shapes(gm: torch.fx.GraphModule, names: dict[Any, Any] | None = None) -> list[list[str]]:
    """Return the numbers of all values of a graph, with symbols renamed."""
    found: list[list[str]] = []
    for graph in graphs_of(gm):
        for fx_node in graph.nodes:
            leaves, _ = tree_flatten(value_of(fx_node))
            numbers: list[Any] = []
            for leaf in leaves:
                if not isinstance(leaf, torch.Tensor):
                    numbers.append(leaf)
                elif leaf.layout is torch.strided:
                    numbers += [*leaf.size(), *leaf.stride(), leaf.dtype]
                else:  # a nested tensor, whose rows have a number that its mode counts
                    numbers += [leaf.size(0), *leaf.size()[2:], leaf.dtype]
            found.append([_text(n, names or {}) for n in numbers])
    return found


def _text(n: Any, names: dict[Any, Any]) -> str:
    expr = expr_of(n)
    if expr is None:
        return str(n)
    expr = getattr(n, "node", None).expr if hasattr(n, "node") else expr
    return str(expr.xreplace(names))


def again(gm: torch.fx.GraphModule) -> tuple[Any, Any]:
    """Retrace a graph in a fresh environment."""
    mode, inputs = fresh_inputs(gm)
    return tfk.retrace(gm, inputs, mode=mode), mode.shape_env


def without(gm: torch.fx.GraphModule, *keys: str) -> None:
    """Remove metadata from all nodes of a graph and its bodies: some keys, or all."""
    for graph in graphs_of(gm):
        for fx_node in graph.nodes:
            for key in keys or list(fx_node.meta):
                fx_node.meta.pop(key, None)


def two_masks(
    fn: Any = lambda m: (m.nonzero() + 1, m.clone().nonzero() + 2),
) -> tuple[torch.fx.GraphModule, torch.fx.Node, torch.fx.Node]:
    """Return a graph with two nodes that find a number."""
    gm, _ = traced(fn, MASK)
    first, second = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.nonzero.default)
    return gm, first, second


# --- programs ---------------------------------------------------------------------------------------


def loop(x: torch.Tensor, n: torch.Tensor) -> Any:
    """Loop with a counter that is a symbol of each body, and a body that reads a number."""
    k = n.sum().item()

    def condition(i: Any, a: torch.Tensor) -> Any:
        return i < 4

    def body(i: Any, a: torch.Tensor) -> Any:
        return i + 1, a + a.nonzero().shape[0]

    return torch._higher_order_ops.while_loop(condition, body, (k, x))


def few(*plain: str) -> list[Any]:
    """Return all programs; those that are not named run only in a sweep."""
    return [n if n in plain else pytest.param(n, marks=pytest.mark.sweep) for n in PROGRAMS]


@pytest.mark.parametrize("name", few("memoized", "mutated", "branches", "jagged"))
def test_a_retrace_of_dynamos_graph_has_a_symbol_for_each_site(name: str) -> None:
    """A memoized symbol is made once, and one of changed data is made again."""
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
def test_a_retrace_of_an_aten_graph_has_a_symbol_for_each_site(name: str) -> None:
    """Decompositions make no symbols of their own."""
    fn, args, count = PROGRAMS[name]
    gm, _ = traced(fn, *args)
    for options in ({}, {"decompositions": {}}, {"decompositions": core_aten_decompositions()}):
        result, env = law_8(gm, **options)
        assert len(unbacked_in(env)) == count
        assert calls(result.gm) == calls(gm) or options


def test_a_loop_counter_is_bound_by_its_body() -> None:
    """The counter of each of two bodies is no binding site of a node."""
    gm, _ = dynamo_frame(loop, V4, T([1, 2]))
    result, env = law_8(gm)
    assert len(bound_by(result.gm)) == 3
    assert len(result.symbols) == len(unbacked_in(env)) == 5


def test_a_number_of_a_body_is_not_known_around_it() -> None:
    """Torch 2.13 memoizes it for the tensor: the operator after the branch binds nothing there.

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
        result, env = again(gm)
        tfk.check_bindings(result.gm)
        assert set(bound_by(result.gm)) == unbacked_in(env)
        assert len(bound_by(result.gm)) == 2
        assert env.num_deferred_runtime_asserts == len(asserts_of(env))
        mode, inputs = fresh_inputs(gm)
        without(gm)
        result = tfk.retrace(gm, inputs, mode=mode)  # without metadata no value has a symbol
        tfk.check_bindings(result.gm)
        assert len(bound_by(result.gm)) == 2


# --- equal results ----------------------------------------------------------------------------------


def test_equal_results_stay_provably_equal() -> None:
    """Two sizes with one symbol have one symbol, also if a view of the mask was used."""
    result, _ = law_8(traced(memoized, V4, MASK).gm)
    (fx_node,) = result.gm.graph.find_nodes(op="output")
    one, two, three, copy, _ = (value_of(arg).size(0) for arg in fx_node.args[0])
    assert statically_known_true(one == two)
    assert statically_known_true(two == three)
    assert not statically_known_true(one == copy)


def test_a_result_that_is_no_longer_memoized_has_the_same_symbol() -> None:
    """A pass has put a copy of the mask before the second operator, so no memo exists."""
    gm, _, second = two_masks(lambda m: (m.nonzero(), m.nonzero()))
    (mask,) = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_before(second):
        copy = gm.graph.call_function(torch.ops.aten.clone.default, (mask,))
    copy.meta["val"] = mask.meta["val"]
    second.args = (copy,)
    result, _ = law_8(gm)
    one, two = (n.meta["val"] for n in result.gm.graph.nodes if n.name.startswith("nonzero"))
    assert statically_known_true(one.size(0) == two.size(0))
    # Torch's own propagation makes a symbol for each, and drops that they are equal.
    mode, inputs = fresh_inputs(gm)
    without(gm, "unbacked_bindings")
    FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*inputs)
    assert len(unbacked_in(mode.shape_env)) == 2


def test_an_operator_of_another_epoch_has_its_own_symbol() -> None:
    """Two sites of two symbols stay two, although the tensor would memoize the first."""
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
    result, _ = again(gm)
    assert len(result.symbols) == 2
    assert [len(n.meta["unbacked_bindings"]) for n in result.gm.graph.nodes if n.op[:4] == "call"]


# --- notes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", few("distinct")[:6])
def test_a_graph_without_notes_is_retraced(name: str) -> None:
    """Without notes in a graph, the first value with a symbol binds it in the retrace."""
    fn, args, count = PROGRAMS[name]
    gm, _ = dynamo_frame(fn, *args)
    notes = bound_by(gm)
    without(gm, "unbacked_bindings")
    result, _ = again(gm)
    assert len(bound_by(result.gm)) == len(result.symbols) == count
    assert set(result.symbols) == set(notes)


def test_a_graph_without_values_is_retraced() -> None:
    """A graph without values is propagated, and its nodes note what they bind."""
    gm, _ = traced(memoized, V4, MASK)
    mode, inputs = fresh_inputs(gm)
    without(gm)
    result = tfk.retrace(gm, inputs, mode=mode)
    assert result.symbols == {}
    assert len(bound_by(result.gm)) == 3
    tfk.check_bindings(result.gm)


def two_counts(x: torch.Tensor) -> Any:
    """Return a wrapper around tensors of data-dependent sizes, and a list with twice that size."""
    n = x.nonzero()
    return TwoTensor(n, n), [x, torch.cat([n, n])]


def test_symbols_of_inner_tensors_and_divided_sizes_are_bound() -> None:
    """Only an inner tensor, or only a multiple, has the symbol."""
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


def test_an_item_of_an_input_stays_one() -> None:
    """``item()`` of an integer input is a number of the input for Dynamo, and for a retrace."""

    def fn(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return x * n.item() if n.item() > 2 else x

    gm, env = dynamo_frame(fn, V4, torch.tensor(3))
    assert unbacked_in(env) == set()
    mode, inputs = fresh_inputs(gm)
    for _ in range(2):  # and again in the second epoch
        result = tfk.retrace(gm, inputs, mode=mode)
        assert result.symbols == {}
        assert unbacked_in(mode.shape_env) == set()
        assert "l_n_.item() >= 3" in tfk.insert_guards(result.gm, mode.shape_env).inserted


def test_an_item_that_was_specialized_stays_a_constant() -> None:
    """A number that the frontend read from the data of an input is bound by the node again."""

    def fn(x: torch.Tensor, n: torch.Tensor, f: torch.Tensor) -> Any:
        return x + len(range(n.item())), x * f.item()

    gm, _ = dynamo_frame(fn, V4, torch.tensor(3), torch.tensor(2.0))
    (number,) = bound_by(gm)
    result, _ = again(gm)
    assert set(result.symbols) == {number}
    assert len(bound_by(result.gm)) == 1


# --- facts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [n if n in ("nonzero", "product") else pytest.param(n, marks=pytest.mark.sweep) for n in CASES],
)
def test_asserts_are_transferred(name: str) -> None:
    """The new symbols have the asserts with messages and stacks, and the ranges of the old."""
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


def test_facts_without_asserts_are_transferred() -> None:
    """A range and a size-like mark may have no node."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        k: Any = x.sum().item()
        torch.fx.experimental.symbolic_shapes._constrain_range_for_size(k, min=2, max=9)
        return x * k

    result, fresh = law_8(traced(fn, V4.long()).gm)
    (made,) = result.symbols.values()
    assert asserts_of(fresh) == []
    assert (fresh.var_to_range[made].lower, fresh.var_to_range[made].upper) == (2, 9)
    assert made in fresh.size_like


def test_a_replacement_is_transferred() -> None:
    """Two numbers that are one in the environment, without an assert, stay one."""
    gm, env = traced(lambda m: (m.nonzero(), m.clone().nonzero()), MASK)
    one, two = bound_by(gm)
    env._eliminate_unbacked(two, one)
    result, fresh = law_8(gm)
    assert asserts_of(fresh) == []
    assert fresh.replace(result.symbols[two]) == result.symbols[one]


def test_an_assert_without_a_node_is_reported() -> None:
    """Dynamo has removed the node that read the number, so the assert cannot be checked."""
    fn, good, _, _ = CASES["bool"]
    gm, env = dynamo_frame(fn, *good)
    result, _ = again(gm)
    assert result.unplaced == ("Eq(u0, 1)",)
    assert result.unplaced == tuple(map(str, asserts_of(env)))


# --- what is refused --------------------------------------------------------------------------------


def refusal(gm: torch.fx.GraphModule, *inputs: Any, **options: Any) -> str:
    """Return the error of `retrace` for static inputs."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = [mode.from_tensor(x, static_shapes=True) for x in inputs]
    with pytest.raises(ShapeEnvError) as error:
        tfk.retrace(gm, fakes, **options)
    return str(error.value)


def test_a_missing_site_is_an_error() -> None:
    """The number of nonzero elements of an empty tensor is a constant, which may be allowed."""
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


def test_asserts_are_checked_for_a_constant() -> None:
    """A number that must be at least 1 cannot become 0."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        n = x.nonzero()
        torch._check(n.shape[0] >= 1, lambda: "something must be there")
        return n

    assert refusal(traced(fn, V4).gm, torch.zeros(0), allow_gone=True) == (
        "1 <= u0: a runtime assert does not hold any more; found u0 is 0. Replace the symbol "
        "by a number for which the graph's assumptions hold"
    )


def test_a_symbol_bound_twice_is_an_error() -> None:
    """An operator returns one tensor twice, where the graph has two numbers."""
    gm, first, second = two_masks()
    second.target, second.args = torch.ops.aten.alias.default, (first,)
    assert refusal(gm, MASK) == (
        "nonzero_1.size(0): one symbol would be bound twice; expected a symbol of its own for u1; "
        "found u0, which nonzero.size(0) binds. The nodes have become one computation: transplant "
        "the second one"
    )


def test_a_new_number_from_data_is_an_error() -> None:
    """A size of the input has become one from the data."""
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


@pytest.mark.parametrize("decompositions", [None, {}], ids=["plain", "decomposed"])
def test_a_merged_node_is_an_error(decompositions: Any) -> None:
    """Common subexpressions were eliminated, and users of the second have its old values.

    Torch's methods are its own afterwards, although the stored error refers to the frames of the retrace.
    """
    gm, first, second = two_masks()
    second.replace_all_uses_with(first)
    gm.graph.erase_node(second)
    method = ShapeEnv.create_symbol
    mode, inputs = fresh_inputs(gm)
    with pytest.raises(ShapeEnvError) as error:
        tfk.retrace(gm, inputs, mode=mode, decompositions=decompositions)
    assert ShapeEnv.create_symbol is method
    assert error.value.__traceback__ is not None
    assert str(error.value).startswith(
        "add_1.size(0): one symbol would be bound twice; expected a symbol of its own for u1; "
        "found u0, which nonzero.size(0) binds."
    )
    with pytest.raises(ShapeEnvError, match="add_1: u1 is used, and bound"):
        tfk.check_bindings(gm)


def test_a_moved_node_binds_its_symbol() -> None:
    """The operator with a memoized result comes first now and binds the symbol."""
    gm, first, second = two_masks(lambda m: (m.nonzero() + 1, m.nonzero() + 2))
    first.prepend(second)
    result, env = again(gm)
    assert len(result.symbols) == len(unbacked_in(env)) == 1
    notes = {n.name: bool(n.meta.get("unbacked_bindings")) for n in result.gm.graph.nodes}
    assert (notes["nonzero"], notes["nonzero_1"]) == (False, True)
    tfk.check_bindings(result.gm)


def test_an_assert_about_dead_code_is_reported() -> None:
    """A node of an assert that is eliminated leaves neither symbol nor assert."""
    gm, _ = traced(lambda m: (torch._check(m.sum().item() > 1), m.nonzero())[1], MASK)
    (dead,) = (n for n in gm.graph.nodes if n.name == "_local_scalar_dense")
    gm.graph.erase_node(dead)
    result, env = again(gm)
    assert result.unplaced == ("1 < u0",)
    assert len(result.symbols) == len(unbacked_in(env)) == 1


def test_the_environment_of_the_graph_is_refused() -> None:
    """A retrace in it would make every symbol twice."""
    gm, _ = traced(lambda x: x.nonzero(), V4)
    inputs = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    with pytest.raises(ShapeEnvError, match="found the graph's own"):
        tfk.retrace(gm, inputs)
    with pytest.raises(ShapeEnvError, match="expected 1 inputs, one for each placeholder; found 0"):
        tfk.retrace(gm, [])


# --- export -----------------------------------------------------------------------------------------


class Masked(torch.nn.Module):
    """The model of pytorch issue 154647."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", MASK)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        """Apply one mask to two tensors."""
        return a[:, self.mask], b[:, self.mask]


def exported(*, strict: bool) -> Any:
    """Return its exported program."""
    with quiet():
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
def test_a_retrace_drops_the_unbound_symbol_of_a_strict_export() -> None:
    """Torch 2.13 has a range for ``u1``, which nothing binds."""
    program = exported(strict=True)
    assert sorted(map(str, program.range_constraints)) == ["u0", "u1"]
    _, env = law_8(program.graph_module)
    assert len(unbacked_in(env)) == 1
    with quiet():
        again = program.run_decompositions()
    law_8(again.graph_module)
