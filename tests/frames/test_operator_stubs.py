"""Operators that are not here: what a capture has of them, and stubs with which its frame compiles."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode

import torch_fakeify as tfk
from torch_fakeify.encoding.operators import other_schemas
from torch_fakeify.errors import FormatError, LimitError, StubError, UnknownNameError
from torch_fakeify.records.frame import OperatorDesc
from torch_fakeify.records.tensor import FunctionValue
from torch_fakeify.serialization.limits import SCHEMA_TEXT, check_operators

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    from torch_fakeify.frames.captures import Capture


def _grouped(x: Any, y: Any, k: int = 2) -> Any:
    return x.new_empty(x.size(0) + k * y.size(0), x.size(1)), x.new_empty(
        x.size(0), dtype=torch.int
    )


def _found(x: Any) -> Any:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(min=2), x.size(1))


def _same(x: Any, *_: Any, **__: Any) -> Any:
    return torch.empty_like(x)


OPERATORS: dict[str, Any] = {
    "grouped(Tensor x, Tensor y, SymInt k=2) -> (Tensor, Tensor)": _grouped,
    "bump(Tensor(a!) x, float by, *, ScalarType? dtype=None) -> ()": lambda *_, **__: None,
    "found(Tensor x) -> Tensor": _found,
    "count(Tensor x) -> SymInt": lambda x: torch.library.get_ctx().new_dynamic_size(),
    "each(Tensor[] xs) -> Tensor[]": lambda xs: [torch.empty_like(x) for x in xs],
    "into(Tensor(a!) x) -> Tensor(a!)": lambda x: x,
    "plain(Tensor x) -> Tensor": _same,
    "plain.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)": lambda x, out: out,
    "cast(Tensor x, ScalarType dtype, Device? device=None, str how=\"a, b\") -> Tensor": (
        lambda x, dtype, device=None, how="": torch.empty_like(x, dtype=dtype)
    ),
}  # fmt: skip


@contextmanager
def away() -> Generator[Any, None, None]:
    """The library ``away`` with its operators, for a block."""
    with torch.library._scoped_library("away", "FRAGMENT") as library:
        for schema, fake in OPERATORS.items():
            library.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
            torch.library.register_fake(f"away::{schema.partition('(')[0]}", fake, lib=library)
        yield library


def recorded(program: Callable[..., Any], *args: Any, **options: Any) -> Capture:
    """The frame of a program that calls operators of ``away``, which exist while it is recorded."""
    found: list[Capture] = []

    def backend(gm: Any, inputs: Any) -> Any:
        found.append(tfk.capture(gm, inputs))
        raise KeyError("recorded")

    torch._dynamo.reset()
    with away(), pytest.raises(Exception, match="recorded"):
        torch.compile(program, backend=backend, fullgraph=True, **options)(*args)
    return found[0]


def compiled_nodes(capture: Capture, **options: Any) -> list[Any]:
    """The nodes of the forward graph that AOTAutograd makes of a frame."""
    nodes: list[Any] = []

    def forward(gm: Any, inputs: Any) -> Any:
        nodes.extend(gm.graph.nodes)
        return gm

    instance = capture.instantiate(**options)
    instance.compile(aot_autograd(fw_compiler=forward))
    return nodes


def sizes_of(nodes: list[Any], operator: str) -> list[tuple[str, ...]]:
    """The sizes of the results of an operator."""
    values = [n.meta["val"] for n in nodes if n.op == "call_function" and operator in str(n.target)]
    flat = [t for v in values for t in (v if isinstance(v, (list, tuple)) else [v])]
    return [tuple(map(str, t.shape)) if isinstance(t, torch.Tensor) else (str(t),) for t in flat]


def _two(x: Any, y: Any) -> Any:
    ops = torch.ops.away
    a, b = ops.grouped(x, y)
    z = x * 2
    ops.bump(z, 1.5, dtype=torch.int8)
    return a.cos(), b + 1, z


X, Y = torch.ones(3, 4), torch.ones(5, 4)


def test_a_capture_has_the_schemas_of_operators_outside_of_torch() -> None:
    """Every overload of those that the graph names, with tags; a file without any has no word of them."""
    none = tfk.capture(torch.fx.symbolic_trace(torch.nn.ReLU()), [X]).desc
    assert none.operators == ()
    assert b"operators" not in tfk.dumps(none)
    capture = recorded(lambda x: torch.ops.away.plain(x) + torch.ops.aten.sin.default(x), X)
    tags = ("needs_fixed_stride_order",)
    assert capture.desc.operators == (
        OperatorDesc(schema="away::plain(Tensor x) -> Tensor", tags=tags),
        OperatorDesc(
            schema="away::plain.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", tags=tags
        ),
    )
    assert [each.operator for each in capture.desc.operators] == ["away.plain"] * 2


def test_stubs_compile_with_symbols_mutation_and_two_results(tmp_path: Path) -> None:
    """Sizes of results are formulas over those of the arguments; a mutated argument is functionalized."""
    capture = recorded(_two, X, Y, dynamic=True)
    capture.save(tmp_path / "c.fkf")
    capture = tfk.Capture.load(tmp_path / "c.fkf")
    with capture.operator_stubs() as stubs:
        assert [each.operator for each in stubs] == ["away.bump", "away.grouped"]
        nodes = compiled_nodes(capture)
    values = [n.meta["val"] for n in nodes if n.op == "placeholder"]
    x, y = (value for value in values if isinstance(value, torch.Tensor))
    (a, b) = next(n.meta["val"] for n in nodes if "grouped" in str(n.target))
    assert a.shape[0].node.expr == x.shape[0].node.expr + 2 * y.shape[0].node.expr
    assert (a.shape[1], b.shape[0]) == (x.shape[1], x.shape[0])
    assert (a.dtype, b.dtype) == (torch.float32, torch.int32)
    assert any("auto_functionalized" in str(n.target) for n in nodes)


def test_the_stubs_end_with_their_block() -> None:
    """Afterwards the operators are as unknown as before, and the error names what to do."""
    at = torch.tensor([0])
    frame = recorded(lambda x, y, at: (_two(x, y), x[at]), X, Y, at).desc
    modules = (("away.grouped", "parts.away"), ("away.bump", "parts.away"))
    capture = tfk.Capture(msgspec.structs.replace(frame, operator_modules=modules))
    with capture.operator_stubs():
        capture.instantiate()
    for rebuild in (capture.instantiate, capture.materialize):
        with pytest.raises(
            UnknownNameError, match=r"to compile only, `Capture.operator_stubs`|--import"
        ) as caught:
            rebuild()
        assert "parts.away" in str(caught.value)
    assert not torch._C._jit_get_schemas_for_operator("away::grouped")


def test_running_a_stub_is_refused_by_name() -> None:
    """Compiled code and a direct call raise; no result is made up."""
    capture = recorded(lambda x: torch.ops.away.plain(x), X)
    with capture.operator_stubs():
        compiled = capture.compile("aot_eager")
        for run in (lambda: compiled(X), lambda: torch.ops.away.plain(X)):
            with pytest.raises(StubError, match=r"torch\.ops\.away\.plain is a stub here"):
                run()


def test_a_retrace_in_a_fresh_environment_has_its_own_symbols() -> None:
    """The formulas hold for new symbols."""
    capture = recorded(_two, X, Y, dynamic=True)
    with capture.operator_stubs():
        instance = capture.instantiate(fresh=True)
        sizes = [str(n) for n in instance.inputs[-1].shape]
        assert "s77" not in sizes
        a = torch.ops.away.grouped(*(t for t in instance.inputs if isinstance(t, torch.Tensor)))[0]
    tensors = [t for t in instance.inputs if isinstance(t, torch.Tensor)]
    assert a.shape[0] == tensors[0].shape[0] + 2 * tensors[1].shape[0]


def test_unbacked_sizes_are_made_anew_with_the_recorded_range() -> None:
    """A size that follows from no argument is a new unbacked symbol in each trace."""
    capture = recorded(lambda x: torch.ops.away.found(x) + 1, X)
    with capture.operator_stubs():
        nodes = compiled_nodes(capture)
    (node,) = (n for n in nodes if "found" in str(n.target))
    rows = node.meta["val"].shape[0]
    assert str(rows).startswith("u")
    bounds = rows.node.shape_env.var_to_range[rows.node.expr]
    assert bounds.lower == 2


@pytest.mark.parametrize(
    ("program", "operator", "sizes"),
    [
        (lambda x: torch.ops.away.each([x, x.t()])[1] + 1, "each", [("3", "4"), ("4", "3")]),
        (lambda x: torch.ops.away.into(x * 2) + 1, "", None),
        (lambda x: torch.ops.away.plain.out(x, out=torch.empty_like(x)) + 1, "", None),
        (lambda x: torch.ops.away.cast(x, torch.int32) + 1, "cast", [("3", "4")]),
        (lambda x: torch.ops.away.cast.default(x, torch.int32, how="c") + 1, "cast", [("3", "4")]),
        (lambda x: x.new_zeros(torch.ops.away.count(x)) + 1, "count", None),
    ],
    ids=["lists", "returned argument", "out", "dtype", "text", "number"],
)
def test_results_of_every_kind(program: Any, operator: str, sizes: Any) -> None:
    """With the stubs a frame compiles, or fails, as it does with the operators."""
    capture = recorded(program, X)

    def outcome() -> Any:
        try:
            return [str(n.target) for n in compiled_nodes(capture)]
        except Exception as error:  # noqa: BLE001 - compared below
            return type(error), str(error)

    with capture.operator_stubs():
        found = outcome()
        if sizes is not None:
            assert sizes_of(compiled_nodes(capture), operator) == sizes
    with away():
        assert outcome() == found


def test_a_call_that_is_not_on_record_is_refused_by_name() -> None:
    """Other static sizes, another dtype, other constants: the error says which argument differs."""
    capture = recorded(lambda x: torch.ops.away.cast(x, torch.int32), X)
    with capture.operator_stubs():
        mode = FakeTensorMode()
        cast = torch.ops.away.cast
        for args, found in (
            ((torch.ones(3, 5), torch.int32), r"x\.size\(1\) is 5, 4 recorded"),
            ((X.int(), torch.int32), r"x is of torch\.int32, torch\.float32 recorded"),
            ((torch.ones(3), torch.int32), "x has 1 dims, 2 recorded"),
            ((X, torch.int8), r"dtype is torch\.int8, not as recorded"),
        ):
            with mode, pytest.raises(StubError, match=found):
                cast(mode.from_tensor(args[0]), args[1])


@pytest.mark.parametrize("mode", ["formula", "composite", None])
def test_a_gradient_is_another_stub(mode: str | None) -> None:
    """Forward and backward compile; the gradient has the sizes of the inputs.

    Without a kernel of autograd an operator has none, and its stub neither.
    """
    with torch.library._scoped_library("away", "FRAGMENT") as library:
        library.define("half(Tensor x) -> Tensor")
        kind = "CompositeImplicitAutograd" if mode == "composite" else "CPU"
        library.impl("half", lambda x: x / 2, kind)
        if mode != "composite":
            torch.library.register_fake("away::half", torch.empty_like, lib=library)
        if mode == "formula":
            torch.library.register_autograd("away::half", lambda ctx, g: g / 2, lib=library)
        capture = recorded(lambda x: torch.ops.away.half(x.sin()).cos(), X.clone().requires_grad_())
    assert capture.desc.operators[0].autograd == mode
    if mode is None:
        return
    graphs: list[str] = []

    def compiler(gm: Any, inputs: Any) -> Any:
        graphs.append(str(gm.graph))
        return gm

    eager = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
    with eager, capture.operator_stubs():
        capture.compile(aot_autograd(fw_compiler=compiler, bw_compiler=compiler))
    assert "away.half" in graphs[0]
    assert "torch_fakeify.stub_gradients" in graphs[1]


# --- what has no stub -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def frame() -> Any:
    """The record of a frame that calls ``away.plain``."""
    return recorded(lambda x: torch.ops.away.plain(x), X).desc


REFUSED = {
    "view": ("away::plain(Tensor(a) x) -> Tensor(a)", None, "its result is a view of an argument"),
    "class": (
        "away::plain(__torch__.torch.classes.a.B x) -> Tensor", None, "objects of a custom class",
    ),
    "any": ("away::plain(Any x) -> Tensor", None, "values of the type Any"),
    "stream": ("away::plain(Stream x) -> Tensor", None, "values of the type Stream"),
    "tuple": ("away::plain((int, int)[] x) -> Tensor", None, "values of the type List.Tuple"),
    "dict": ("away::plain(Dict(str, int) x) -> Tensor", None, "values of the type Dict"),
    "variable": ("away::plain(t x) -> t", None, "values of the type t"),
    "any number": ("away::plain(Tensor x, ...) -> Tensor", None, "any number of values"),
    "mutation with a gradient": (
        "away::plain(Tensor(a!) x) -> ()", "formula", "writes into an argument and has a gradient",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_operator_that_cannot_have_a_stub_is_refused_by_name(name: str, frame: Any) -> None:
    """One error says which operator and why, and names the option that brings it."""
    schema, autograd, reason = REFUSED[name]
    operators = (OperatorDesc(schema=schema, autograd=autograd),)
    capture = tfk.Capture(msgspec.structs.replace(frame, operators=operators))
    with pytest.raises(StubError, match=reason) as caught, capture.operator_stubs():
        pass
    assert "away::plain" in str(caught.value)
    assert "--import MODULE" in str(caught.value)


HOSTILE = {
    "nothing": "",
    "no name": "(Tensor x) -> Tensor",
    "no namespace": "plain(Tensor x) -> Tensor",
    "control": "away::plain(Tensor x) -> Tensor\n__import__('os').system('touch PWNED')",
    "code": "away::plain(Tensor x=__import__('os').system('touch PWNED')) -> Tensor",
    "unfinished": "away::plain(Tensor x",
    "parentheses": "away::plain(" + "(" * 4000,
    "lists": "away::plain(Tensor" + "[]" * 2000 + " x) -> Tensor",
    "number": "away::plain(int x=" + "9" * 3000 + ") -> Tensor",
    "twice": "away::plain(Tensor x, Tensor x) -> Tensor",
    "no type": "away::plain(Nothing x) -> Tensor",
    "text": 'away::plain(str x="' + "\\" * 1001 + '") -> Tensor',
    "not ASCII": "away::plain(Tensor \N{GREEK SMALL LETTER ALPHA}) -> Tensor",
    "lone surrogate": "away::plain(Tensor \ud800) -> Tensor",
    "long": "away::plain(" + "Tensor x, " * 4000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_gives_one_error(name: str, frame: Any) -> None:
    """Of a file or of a record in memory; torch alone parses it, and nothing is registered."""
    operators = (OperatorDesc(schema=HOSTILE[name]),)
    capture = tfk.Capture(msgspec.structs.replace(frame, operators=operators))
    with pytest.raises((FormatError, StubError, UnknownNameError)):  # noqa: PT012 - either refuses
        check_operators(operators, "$.operators")
        with capture.operator_stubs():
            capture.instantiate()
    assert not torch._C._jit_get_schemas_for_operator("away::plain")


def test_schemas_are_bounded(tmp_path: Path, frame: Any) -> None:
    """A longer text is refused when a file is read, and not recorded."""
    long = OperatorDesc(schema="away::plain(" + " " * SCHEMA_TEXT + ") -> ()")
    capture = tfk.Capture(msgspec.structs.replace(frame, operators=(long,)))
    with pytest.raises(tfk.WriteError, match="the schema of an operator is too long"):
        capture.save(tmp_path / "c.fkf")
    with pytest.raises(LimitError, match="too long"):
        check_operators((long,), "$.operators")


@pytest.mark.parametrize("namespace", ["aten", "prims", "prim", "c10d"])
def test_no_operator_of_torch_is_replaced(namespace: str, frame: Any) -> None:
    """A file cannot define one in a namespace of torch."""
    target = FunctionValue(kind="packet", name=f"{namespace}.plain")
    nodes = tuple(
        msgspec.structs.replace(n, target=target) if n.op == "call_function" else n
        for n in frame.graph.nodes
    )
    graph = msgspec.structs.replace(frame.graph, nodes=nodes)
    operators = (OperatorDesc(schema=f"{namespace}::plain(Tensor x) -> Tensor"),)
    desc = msgspec.structs.replace(frame, graph=graph, operators=operators)
    stubs = tfk.Capture(desc).operator_stubs()
    with pytest.raises(FormatError, match="in a namespace of torch has no stub"), stubs:
        pass


def test_an_operator_that_is_here_has_no_stub(frame: Any) -> None:
    """Its library does the work; that its schema is another one is told by name."""
    with torch.library._scoped_library("away", "FRAGMENT") as library:
        library.define("plain(Tensor x, int n=1) -> Tensor")
        with tfk.Capture(frame).operator_stubs() as stubs:
            assert stubs == ()
        assert other_schemas(frame.operators) == [
            "the operator away::plain: away::plain(Tensor x) -> Tensor recorded, "
            "away::plain(Tensor x, int n=1) -> Tensor here",
            "the operator away::plain.out: away::plain.out(Tensor x, *, Tensor(a!) out) -> "
            "Tensor(a!) recorded, no such overload here",
        ]


def test_operators_that_the_graph_does_not_name_get_no_stub(frame: Any) -> None:
    """A file cannot register others."""
    other = OperatorDesc(schema="away::other(Tensor x) -> Tensor")
    desc = msgspec.structs.replace(frame, operators=(*frame.operators, other))
    with tfk.Capture(desc).operator_stubs() as stubs:
        assert {each.operator for each in stubs} == {"away.plain"}
        assert not torch._C._jit_get_schemas_for_operator("away::other")
