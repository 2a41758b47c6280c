"""``insert_guards``, ``learn`` and ``strip_guards``: facts as nodes, and into a fresh ``ShapeEnv``."""

from __future__ import annotations

import operator
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import sympy
import torch
from assert_frames import CONFIG, everything
from torch._dynamo.source import LocalSource
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    SubclassSymbolicContext,
)
from torch.testing._internal.two_tensor import TwoTensor

import torch_fakeify as tfk
from torch_fakeify.expr_nodes import MARK, mark_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Frame(NamedTuple):
    """What a Dynamo backend saw, and real inputs for its graph."""

    gm: torch.fx.GraphModule
    env: ShapeEnv
    inputs: list[Any]
    compiled: Callable[..., Any]


def frame_of(fn: Callable[..., Any], *args: Any, dynamic: bool | None = True) -> Frame:
    """The last frame of a function, compiled by Dynamo."""
    frames: list[Frame] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        mode = TracingContext.get().fake_mode
        assert mode is not None
        assert mode.shape_env is not None
        frames.append(Frame(gm, mode.shape_env, [], gm.forward))

        def call(*real: Any) -> Any:
            frames[-1].inputs[:] = real
            return gm.forward(*real)

        return call

    torch._dynamo.reset()
    with torch._dynamo.config.patch(**CONFIG):
        torch.compile(fn, backend=backend, dynamic=dynamic)(*args)
    return frames[-1]


def new_inputs(frame: Frame, env: ShapeEnv) -> list[Any]:
    """Fakes of a frame's real inputs, every number a symbol of its own."""
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    made: list[Any] = []
    for fx_node, value in zip(
        frame.gm.graph.find_nodes(op="placeholder"), frame.inputs, strict=True
    ):
        source = LocalSource(fx_node.name)
        if isinstance(value, torch.Tensor):
            made.append(
                mode.from_tensor(value, source=source, symbolic_context=free_context(value))
            )
        elif isinstance(value, int):
            made.append(env.create_unspecified_symint_and_symbol(value, source, DimDynamic.DYNAMIC))
        else:
            made.append(value)
    return made


def free_context(t: torch.Tensor) -> StatelessSymbolicContext[..., Any]:
    """The policy that every size and stride is a symbol of its own."""
    sizes = [DimDynamic.DYNAMIC] * t.ndim
    if not isinstance(t, TwoTensor):
        return StatelessSymbolicContext(dynamic_sizes=sizes, dynamic_strides=sizes)
    inner = {name: free_context(getattr(t, name)) for name in ("a", "b")}
    return SubclassSymbolicContext(
        dynamic_sizes=sizes, dynamic_strides=sizes, tensor_source=LocalSource("t"),
        inner_contexts=inner,
    )  # fmt: skip


def learned(frame: Frame) -> tuple[ShapeEnv, list[Any]]:
    """A fresh environment that was told what the graph of a frame asserts."""
    env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
    inputs = new_inputs(frame, env)
    tfk.learn(frame.gm, inputs)
    return env, inputs


def accepts(frame: Frame, *args: Any) -> bool:
    """Whether the guards of a fresh environment hold for other inputs of the graph."""
    env, inputs = learned(frame)
    return env.evaluate_guards_for_args(inputs, list(args), ignore_static=False)


# --- what is inserted -----------------------------------------------------------------------------


def over_flatten(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Needs that one size is a product of two others."""
    return x.flatten() + y


def over_reshape(x: torch.Tensor) -> torch.Tensor:
    """Needs that a size is divisible."""
    return x.reshape(100, -1)


def over_branch(x: torch.Tensor) -> torch.Tensor:
    """Branches on a size."""
    return x + 1 if x.shape[0] > 5 else x - 1


def over_twice(x: torch.Tensor) -> torch.Tensor:
    """Branches on a multiple of a size."""
    return x + 1 if 2 * x.shape[0] > 9 else x - 1


def over_strides(x: torch.Tensor) -> torch.Tensor:
    """Branches on a stride and on the storage offset."""
    return x + 1 if x.stride(0) * 2 > x.size(1) and x.storage_offset() > 2 else x - 1


def over_number(x: torch.Tensor, n: int) -> torch.Tensor:
    """Branches on a size and a number."""
    return x * n if n * x.shape[0] % 3 == 0 else x + n


def over_float(x: torch.Tensor, s: float) -> torch.Tensor:
    """Branches on a float."""
    return x * s if s > 1.5 else x


def over_item(x: torch.Tensor) -> torch.Tensor:
    """Checks what a tensor's only element is."""
    z = x.item()
    torch._check(z == 3)
    return torch.zeros(z)


def over_max(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Branches on the larger of two sizes."""
    return (x + 1 if torch.sym_max(x.shape[0], y.shape[0]) // 2 > 3 else x), y + 1


def over_constant(x: torch.Tensor) -> torch.Tensor:
    """Specializes on a size."""
    return x + 1 if x.shape[0] == 7 else x


STRIDED = torch.randn(100)[5:].as_strided((4, 5), (13, 2), 7)

CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[str]]] = {
    "product": (
        over_flatten,
        (torch.randn(3, 4), torch.randn(12)),
        [
            "l_x_.size(0) >= 2",
            "l_x_.size(1) >= 2",
            "l_x_.size(0) == s77",
            "l_x_.size(1) == s27",
            "l_x_.stride(0) == l_x_.size(1)",
            "l_y_.size(0) == l_x_.size(0)*l_x_.size(1)",
        ],
    ),
    "divisible": (
        over_reshape,
        (torch.randn(2000),),
        ["l_x_.size(0) >= 2", "l_x_.size(0) == s77", "l_x_.size(0) % 100 == 0"],
    ),
    "branch": (over_branch, (torch.randn(7),), ["l_x_.size(0) >= 6", "l_x_.size(0) == s77"]),
    "twice": (
        over_twice,
        (torch.randn(7),),
        ["l_x_.size(0) >= 2", "l_x_.size(0) == s77", "2*l_x_.size(0) > 9"],
    ),
    "strides": (
        over_strides,
        (STRIDED,),
        [
            "l_x_.size(0) >= 2",
            "l_x_.size(1) >= 2",
            "l_x_.stride(1) >= 2",
            "l_x_.storage_offset() >= 3",
            "l_x_.size(0) == s77",
            "l_x_.size(1) == s27",
            "l_x_.stride(0) == s7",
            "l_x_.stride(1) == s89",
            "l_x_.storage_offset() == s84",
            "2*l_x_.stride(0) > l_x_.size(1)",
            "l_x_.stride(1) != l_x_.stride(0)",
            "l_x_.stride(0) >= l_x_.stride(1)",
        ],
    ),
    "number": (
        over_number,
        (torch.randn(7), 6),
        ["l_x_.size(0) >= 2", "l_x_.size(0) == s77", "(l_n_*l_x_.size(0)) % 3 == 0"],
    ),
    "float": (
        over_float,
        (torch.randn(7), 2.5),
        ["l_x_.size(0) >= 2", "l_x_.size(0) == s77", "l_s_.item() > 1.5"],
    ),
    "item": (over_item, (torch.tensor(3),), ["l_x_.item() == 3"]),
    "max": (
        over_max,
        (torch.randn(9), torch.randn(4)),
        [
            "l_x_.size(0) >= 2",
            "l_y_.size(0) >= 2",
            "l_x_.size(0) == s77",
            "l_y_.size(0) == s17",
            "Max(l_x_.size(0), l_y_.size(0))//2 > 3",
        ],
    ),
    "constant": (over_constant, (torch.randn(7),), ["l_x_.size(0) == 7"]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_facts_of_a_frame_are_asserted(name: str) -> None:
    """Just what the frame assumes is inserted, over the names of the graph's inputs."""
    fn, args, expected = CASES[name]
    frame = frame_of(fn, *args)
    assert list(tfk.insert_guards(frame.gm, frame.env).inserted) == expected


@pytest.mark.parametrize("name", CASES)
def test_inserting_changes_no_environment_and_stripping_gives_the_graph_back(name: str) -> None:
    """Insertion adds no guard; insert then strip leaves graph and environment as they were."""
    fn, args, expected = CASES[name]
    frame = frame_of(fn, *args)
    before, state = everything(frame.gm.graph), tfk.snapshot(frame.env)
    tfk.insert_guards(frame.gm, frame.env)
    asserts = [n for n in frame.gm.graph.nodes if mark_of(n) and "assert" in str(n.target)]
    assert len(asserts) == len(expected)
    frame.gm.graph.lint()
    once = [n.name for n in frame.gm.graph.nodes]
    tfk.insert_guards(frame.gm, frame.env)
    assert len(once) == len(frame.gm.graph.nodes)
    tfk.strip_guards(frame.gm)
    assert everything(frame.gm.graph) == before
    assert tfk.snapshot(frame.env).guards == state.guards
    assert tfk.snapshot(frame.env).symbols == state.symbols


@pytest.mark.parametrize("name", CASES)
def test_the_asserting_graph_runs(name: str) -> None:
    """The nodes are part of a graph that runs on the frame's inputs as before."""
    fn, args, _ = CASES[name]
    frame = frame_of(fn, *args)
    expected = frame.gm(*frame.inputs)
    tfk.insert_guards(frame.gm, frame.env)
    torch.testing.assert_close(frame.gm(*frame.inputs), expected)


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
def test_what_was_learned_decides_about_other_inputs(name: str) -> None:
    """The guards of a fresh environment take inputs that the frame takes and no others."""
    fn, args, _ = CASES[name]
    frame = frame_of(fn, *args)
    tfk.insert_guards(frame.gm, frame.env)
    good, bad = OTHERS[name]
    assert accepts(frame, *good)
    assert not accepts(frame, *bad)


@pytest.mark.parametrize("name", OTHERS)
def test_the_graph_refuses_other_inputs_by_name(name: str) -> None:
    """Run on inputs that break an assumption, the graph says which."""
    fn, args, expected = CASES[name]
    frame = frame_of(fn, *args)
    tfk.insert_guards(frame.gm, frame.env)
    with pytest.raises(RuntimeError, match=r"^the graph assumes ") as raised:
        frame.gm(*OTHERS[name][1])
    assert str(raised.value).partition("assumes ")[2] in expected


def test_a_replacement_is_learned() -> None:
    """`Eq(s0*s1, s2)` becomes a replacement of the fresh environment too."""
    frame = frame_of(over_flatten, torch.randn(3, 4), torch.randn(12))
    tfk.insert_guards(frame.gm, frame.env)
    env, inputs = learned(frame)
    x, y = inputs[2:]
    product = x.size(0).node.expr * x.size(1).node.expr
    assert env.simplify(y.size(0).node.expr) == product
    assert len(env.replacements) == 3 + 1  # a scalar input each, the product, the stride


def test_facts_are_learned_before_any_tensor_operator() -> None:
    """Learning runs no operator on tensors but the questions for sizes."""
    frame = frame_of(over_reshape, torch.randn(2000))
    tfk.insert_guards(frame.gm, frame.env)
    for fx_node in frame.gm.graph.nodes:
        if mark_of(fx_node) is None and fx_node.op == "call_method":
            fx_node.target = "no_such_method"
    env, _ = learned(frame)
    assert [str(g.expr) for g in env.guards][-1].startswith("Eq(Mod(")


def test_a_second_lesson_teaches_nothing() -> None:
    """What the environment knows already adds no guard."""
    frame = frame_of(over_strides, STRIDED)
    tfk.insert_guards(frame.gm, frame.env)
    env, inputs = learned(frame)
    state = tfk.snapshot(env)
    assert tfk.learn(frame.gm, inputs) == 12
    assert tfk.snapshot(env).guards == state.guards
    assert tfk.snapshot(env).replacements == state.replacements


# --- what the nodes say ---------------------------------------------------------------------------


def test_nodes_say_what_they_are() -> None:
    """Each inserted node has a mark with its kind and expression."""
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


def test_nodes_have_values() -> None:
    """What runs over the graph next finds the symbolic value of each computation."""
    frame = frame_of(over_flatten, torch.randn(3, 4), torch.randn(12))
    tfk.insert_guards(frame.gm, frame.env)
    (product,) = [n for n in frame.gm.graph.nodes if n.name.startswith("mul")]
    x = frame.gm.graph.find_nodes(op="placeholder")[2].meta["example_value"]
    assert product.meta["example_value"].node.expr == (x.size(0) * x.size(1)).node.expr


def test_sub_expressions_are_shared() -> None:
    """A product that two conditions need is computed once."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0] * x.shape[1]
        return x + 1 if n % 3 == 0 and n > 100 else x

    frame = frame_of(fn, torch.randn(30, 4))
    tfk.insert_guards(frame.gm, frame.env)
    assert str(frame.gm.code).count("s77 * s27") + str(frame.gm.code).count("s27 * s77") == 1


def test_the_users_line_is_kept() -> None:
    """The guard that is learned names the line that caused the first one."""
    frame = frame_of(over_twice, torch.randn(7))
    (first,) = frame.env.guards
    tfk.insert_guards(frame.gm, frame.env)
    (fx_node,) = [n for n in frame.gm.graph.nodes if (mark_of(n) or {}).get("what") == "guard"]
    condition = fx_node.args[0]
    assert condition.meta["stack_trace"] == fx_node.meta["stack_trace"]
    assert "2 * x.shape[0] > 9" in fx_node.meta["stack_trace"]
    assert "in over_twice" in fx_node.meta["stack_trace"]
    env, _ = learned(frame)
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


def test_what_follows_is_left_out() -> None:
    """A transitive comparison is not asserted, but reported as implied."""

    def fn(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
        a, b, c = x.shape[0], y.shape[0], z.shape[0]
        return (x + 1 if a < c and a < b and b < c else x), y + 1, z + 1

    frame = frame_of(fn, torch.randn(3), torch.randn(5), torch.randn(8))
    report = tfk.insert_guards(frame.gm, frame.env)
    assert "l_x_.size(0) < l_z_.size(0)" in report.implied
    assert "l_x_.size(0) < l_y_.size(0)" in report.inserted
    assert "l_y_.size(0) < l_z_.size(0)" in report.inserted


def test_a_range_that_is_found_again_is_left_out() -> None:
    """`b >= 3` follows from `a < b` and `a >= 2`, and a ``ShapeEnv`` finds it by itself."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        return (x + 1 if x.shape[0] < y.shape[0] else x), y + 1

    frame = frame_of(fn, torch.randn(3), torch.randn(5))
    report = tfk.insert_guards(frame.gm, frame.env)
    assert report.implied == ("l_y_.size(0) >= 3",)
    env, inputs = learned(frame)
    y = inputs[3].size(0).node.expr
    assert env.bound_sympy(env.replace(y)).lower == 3


# --- what no input holds --------------------------------------------------------------------------


def test_facts_about_other_things_are_reported() -> None:
    """A guard on the size of an input that the graph does not have stays in the environment."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + 1 if y.shape[0] % 4 == 0 else x

    frame = frame_of(fn, torch.randn(3), torch.randn(8))
    report = tfk.insert_guards(frame.gm, frame.env)
    assert report.unreachable == ("s17 >= 2", "Eq(Mod(s17, 4), 0)")
    assert report.inserted == ("l_x_.size(0) >= 2", "l_x_.size(0) == s77")


def test_a_fact_is_told_by_what_replaced_its_symbol() -> None:
    """A guard on what no input holds is asserted where that equals what an input holds."""
    env = ShapeEnv()
    here, gone = (
        env.create_symintnode(env.create_symbol(8, LocalSource(name), DimDynamic.DYNAMIC), hint=8)
        for name in ("here", "gone")
    )
    assert gone % 4 == 0
    assert here == gone
    (replaced,) = env.replacements
    if replaced == here.node._expr:
        here, gone = gone, here
    report = tfk.insert_guards(graph_of(here, int), env)
    assert report.inserted == ("n >= 2", "n % 4 == 0")
    assert report.unreachable == (str(sympy.Eq(replaced, here.node.expr)),)


# --- kinds of inputs ------------------------------------------------------------------------------


def graph_of(value: Any, dtype: type) -> torch.fx.GraphModule:
    """A graph with one input that does nothing."""
    graph = torch.fx.Graph()
    placeholder = graph.placeholder("n", dtype)
    placeholder.meta["val"] = value
    graph.output(())
    return torch.fx.GraphModule({}, graph)


def test_guards_on_booleans() -> None:
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


def test_a_size_without_a_hint_keeps_its_range() -> None:
    """A size-like unbacked input stays in ``[0, inf)``: it is not taken for two or more."""

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
    """Two jagged tensors on one set of offsets are asserted to have one ragged size, if torch says so."""

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
        # As of torch 2.15: it compares the nested ints, and notes no guard.
        assert "l_a_.size(1) == l_b_.size(1)" not in inserted
        return
    assert "l_a_.size(1) == l_b_.size(1)" in inserted
    frame.gm(*frame.inputs)
    other = torch.nested.nested_tensor([torch.randn(4, 5), torch.randn(3, 5)], layout=torch.jagged)
    inputs = [other if x is second else x for x in frame.inputs]
    with pytest.raises(RuntimeError, match=r"l_a_.size\(1\) == l_b_.size\(1\)"):
        frame.gm(*inputs)


# --- errors ---------------------------------------------------------------------------------------


def test_inputs_that_contradict_are_refused_by_name() -> None:
    """Sizes that break an assumption are named with their values."""
    frame = frame_of(over_branch, torch.randn(7))
    tfk.insert_guards(frame.gm, frame.env)
    env = ShapeEnv()
    inputs = new_inputs(frame._replace(inputs=[4, torch.randn(4)]), env)
    with pytest.raises(tfk.ShapeEnvError) as raised:
        tfk.learn(frame.gm, inputs)
    assert str(raised.value) == (
        "l_x_.size(0) >= 6: the inputs contradict what the graph assumes; "
        f"expected l_x_.size(0) >= 6; found {inputs[0].node.expr} = 4. "
        "Make the inputs of the frame that the graph was traced for"
    )


def test_facts_that_contradict_are_both_named() -> None:
    """Without hints, the assertion and the earlier one that excludes it are named."""
    graph = torch.fx.Graph()
    n = graph.placeholder("n")
    for target, value in (("ge", 5), ("le", 3)):
        text = f"n {'>=' if target == 'ge' else '<='} {value}"
        fact = graph.call_function(getattr(operator, target), (n, value))
        call = graph.call_function(torch.ops.aten._assert_scalar.default, (fact, text))
        fact.meta["custom"] = {MARK: f"compute: {text}"}
        call.meta["custom"] = {MARK: f"range: {text}"}
    graph.output(n)
    gm = torch.fx.GraphModule({}, graph)
    env = ShapeEnv()
    with pytest.raises(tfk.ShapeEnvError) as raised:
        tfk.learn(gm, [env.create_unbacked_symint()])
    assert str(raised.value) == (
        "n <= 3: two facts contradict one another; expected n <= 3, which the graph assumes; "
        "found n >= 5, which the ShapeEnv knows. "
        "Make the inputs of the frame that the graph was traced for"
    )


def test_facts_of_several_symbols_that_contradict_are_both_named() -> None:
    """What no range shows is found too, where no number gives it away."""
    env = ShapeEnv()
    a, b = env.create_unbacked_symint(), env.create_unbacked_symint()
    torch._check(a + 2 * b > 710)
    graph = torch.fx.Graph()
    n = graph.placeholder("n")
    fact = graph.call_function(operator.lt, (n, 700))
    call = graph.call_function(torch.ops.aten._assert_scalar.default, (fact, "n < 700"))
    fact.meta["custom"] = {MARK: "compute: n < 700"}
    call.meta["custom"] = {MARK: "guard: n < 700"}
    graph.output(n)
    gm = torch.fx.GraphModule({}, graph)
    with pytest.raises(
        tfk.ShapeEnvError, match=r"found 710 < u0 \+ 2\*u1, which the ShapeEnv knows"
    ):
        tfk.learn(gm, [a + 2 * b])


def test_the_number_of_inputs_must_fit() -> None:
    """Too few inputs are refused."""
    frame = frame_of(over_branch, torch.randn(7))
    with pytest.raises(tfk.ShapeEnvError, match="2 inputs, one for each placeholder; found 1"):
        tfk.learn(frame.gm, [3])


def test_inputs_of_two_modes_are_refused() -> None:
    """Fake tensors of two modes teach nobody."""
    frame = frame_of(over_flatten, torch.randn(3, 4), torch.randn(12))
    ours, theirs = (new_inputs(frame, ShapeEnv()) for _ in range(2))
    with pytest.raises(tfk.ShapeEnvError, match=r"several fake modes; .* found 2 modes, 2 shape"):
        tfk.learn(frame.gm, [*ours[:3], theirs[3]])


def test_another_environment_is_refused() -> None:
    """The ``ShapeEnv`` must be that of the graph's fake values."""
    frame = frame_of(over_branch, torch.randn(7))
    with pytest.raises(tfk.ShapeEnvError, match=r"another ShapeEnv.* found s77"):
        tfk.insert_guards(frame.gm, ShapeEnv())


def test_a_graph_without_values_is_refused() -> None:
    """A plainly traced graph does not say what its inputs are."""
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    with pytest.raises(
        tfk.ShapeEnvError, match=r"^x: an input of the graph has no fake value; exp"
    ):
        tfk.insert_guards(gm, ShapeEnv())


# --- other graphs ---------------------------------------------------------------------------------


def test_guards_of_make_fx_graphs() -> None:
    """A symbolically traced ATen graph takes and strips guards as well."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.flatten() + y if x.shape[0] > 2 else x

    gm = make_fx(fn, tracing_mode="symbolic")(torch.randn(3, 4), torch.randn(12))
    env = gm.shape_env
    before = everything(gm.graph)
    report = tfk.insert_guards(gm, env)
    assert "x_1.size(0) >= 3" in report.inserted
    assert "y_1.size(0) == x_1.size(0)*x_1.size(1)" in report.inserted
    torch.testing.assert_close(gm(torch.ones(5, 2), torch.ones(10)), torch.full((10,), 2.0))
    with pytest.raises(RuntimeError, match=r"x_1.size\(0\) >= 3"):
        gm(torch.ones(2, 5), torch.ones(10))
    tfk.strip_guards(gm)
    assert everything(gm.graph) == before


@pytest.mark.parametrize("grad", [False, True])
def test_guards_survive_aot_autograd(grad: bool) -> None:
    """Functionalized and retraced, all assertions are there, marked, and strip takes them out."""
    frame = frame_of(over_flatten, torch.randn(3, 4, requires_grad=grad), torch.randn(12))
    count = len(tfk.insert_guards(frame.gm, frame.env).inserted)
    seen: list[torch.fx.GraphModule] = []

    def compiler(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        seen.append(gm)
        return make_boxed_func(gm.forward)

    env = ShapeEnv()
    fakes = new_inputs(frame, env)
    mode = torch._guards.detect_fake_mode(fakes)
    with torch._guards.tracing(TracingContext(mode)):
        aot_module_simplified(frame.gm, fakes, fw_compiler=compiler)
    gm = seen[0]
    asserts = [n for n in gm.graph.nodes if n.target is torch.ops.aten._assert_scalar.default]
    assert len(asserts) == count
    assert all(mark_of(n) is not None for n in asserts)
    tfk.strip_guards(gm)
    gm.graph.lint()
    targets = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    assert torch.ops.aten._assert_scalar.default not in targets
    assert torch.ops.aten.add.Tensor in targets


@pytest.mark.parametrize("functional", [False, True])
def test_guards_survive_a_retrace(functional: bool) -> None:
    """``make_fx``, also over functionalization, keeps all assertions, and they still refuse."""
    frame = frame_of(over_reshape, torch.randn(2000))
    count = len(tfk.insert_guards(frame.gm, frame.env).inserted)
    fn: Any = torch.func.functionalize(frame.gm) if functional else frame.gm
    gm = make_fx(fn, tracing_mode="symbolic")(300, torch.randn(300))
    asserts = [n for n in gm.graph.nodes if n.target is torch.ops.aten._assert_scalar.default]
    assert len(asserts) == count
    assert gm(500, torch.ones(500))[0].shape == (100, 5)
    with pytest.raises(RuntimeError, match=r"^the graph assumes l_x_.size\(0\) % 100 == 0$"):
        gm(2099, torch.ones(2099))


def test_guards_of_a_wrapper_subclass_reach_the_inner_tensors() -> None:
    """Sizes of inner tensors are read by attribute."""
    frame = frame_of(over_branch, TwoTensor(torch.randn(7), torch.randn(7)))
    inserted = tfk.insert_guards(frame.gm, frame.env).inserted
    assert "l_x_.a.size(0) == l_x_.size(0)" in inserted
    assert "l_x_.b.size(0) == l_x_.size(0)" in inserted
    env, inputs = learned(frame)
    x = inputs[-1]
    assert env.replace(x.a.size(0).node.expr) == env.replace(x.size(0).node.expr)
    assert env.bound_sympy(env.replace(x.a.size(0).node.expr)).lower == 6


def over_item_and_sizes(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Checks an element, beside equalities of sizes."""
    z = y[0].item()
    torch._check(z == 3)
    return x.flatten() + x.shape[0], torch.zeros(z)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_checks_of_data_stay_checks(backend: str) -> None:
    """Assertions about sizes do not swallow that an element must be 3."""

    def inner(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        mode = TracingContext.get().fake_mode
        assert mode is not None
        report = tfk.insert_guards(gm, mode.shape_env)
        assert "l_x_.size(0) == s77" in report.inserted
        return torch._dynamo.lookup_backend(backend)(gm, inputs)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(**CONFIG):
        compiled = torch.compile(over_item_and_sizes, backend=inner, dynamic=True)
        compiled(torch.randn(5, 3), torch.tensor([3, 9]))
        with pytest.raises(RuntimeError):
            compiled(torch.randn(5, 3), torch.tensor([4, 9]))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["product", "divisible", "strides", "float", "item"])
def test_backends_compile_graphs_with_guards(name: str, backend: str) -> None:
    """What a backend makes of the graph gives the same results."""
    fn, args, _ = CASES[name]

    def inner(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        mode = TracingContext.get().fake_mode
        assert mode is not None
        tfk.insert_guards(gm, mode.shape_env)
        return torch._dynamo.lookup_backend(backend)(gm, inputs)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(**CONFIG):
        compiled = torch.compile(fn, backend=inner, dynamic=True)
        torch.testing.assert_close(compiled(*args), fn(*args))


# --- across processes -----------------------------------------------------------------------------

READER = """
import sys, torch
import torch_fakeify as tfk
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

instance = tfk.Capture.load(sys.argv[1]).instantiate()
inputs = tfk.refakeify(instance.inputs, FakeTensorMode(shape_env=ShapeEnv()))
print(tfk.learn(instance.gm, inputs))
env = next(x for x in inputs if isinstance(x, torch.SymInt)).node.shape_env
for guard in env.guards:
    print(guard.expr.func.__name__, guard.sloc.maybe_user_loc.partition("  #")[0])
print(tfk.strip_guards(instance.gm))
print([n.op for n in instance.gm.graph.nodes])
"""


def test_guard_nodes_cross_processes(tmp_path: Path) -> None:
    """A fresh interpreter learns from a file what the frame's process knew, with the user's line."""
    frame_path = tmp_path / "frame.fkf"

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        mode = TracingContext.get().fake_mode
        assert mode is not None
        tfk.insert_guards(gm, mode.shape_env)
        tfk.capture(gm, inputs).save(frame_path)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(over_twice, backend=backend, dynamic=True)(torch.randn(7))
    out = subprocess.run(
        [sys.executable, "-c", READER, str(frame_path)], capture_output=True, text=True, check=True
    )
    line = "return x + 1 if 2 * x.shape[0] > 9 else x - 1"
    assert out.stdout.splitlines() == [
        "3",
        f"StrictGreaterThan {line}",
        "9",
        "['placeholder', 'placeholder', 'call_function', 'output']",
    ]


def test_a_fingerprint_does_not_depend_on_the_messages() -> None:
    """Assertions that differ in the names of symbols and nodes alone are one frame."""
    prints = []
    for name in ("s77", "s3"):
        graph = torch.fx.Graph()
        graph.call_function(torch.ops.aten._assert_scalar.default, (True, f"{name} >= 2"))
        graph.output(())
        prints.append(tfk.capture(torch.fx.GraphModule({}, graph), []).fingerprint())
    assert prints[0] == prints[1]
