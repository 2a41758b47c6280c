"""Records as text: what is printed, what a terminal receives, what it costs."""

from __future__ import annotations

import re

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod

from torch_fakeify.encoding.exprs import encode_expr
from torch_fakeify.records.tensor import (
    ApplyNode,
    AtomNode,
    BytesValue,
    ComplexValue,
    DictValue,
    EllipsisValue,
    EnumValue,
    ExprDesc,
    ExprValue,
    FloatNode,
    FloatValue,
    FrameDesc,
    FunctionalDesc,
    FunctionValue,
    FunctorchDesc,
    IntNode,
    ListValue,
    MetaStorageDesc,
    MetaTensorDesc,
    NamedTupleValue,
    NestedIntDesc,
    NodeValue,
    OpaqueValue,
    RangeValue,
    RationalNode,
    SetValue,
    SizeValue,
    SliceValue,
    SourceDesc,
    SourceValue,
    SparseDesc,
    StackDesc,
    SubclassDesc,
    SymbolNode,
    SymDesc,
    SymValue,
    TensorValue,
    TorchConstValue,
    TupleValue,
    TypeValue,
    Value,
)
from torch_fakeify.render.text import (
    clip,
    escape,
    expr_text,
    int_text,
    stack_lines,
    sym_text,
    tensor_text,
    user_line,
    value_text,
)

SYMBOLS = {name: sympy.Symbol(name, integer=True, positive=True) for name in ("s0", "s1", "u0")}


def symbol(name: str) -> ExprDesc:
    """Return the record of a symbol."""
    return ExprDesc(nodes=(SymbolNode(name, ()),))


def size(name: str) -> SymDesc:
    """Return the record of a symbolic size."""
    return SymDesc(expr=symbol(name), hint=4)


def tensor(**fields: object) -> MetaTensorDesc:
    """Return the record of a contiguous float tensor of sizes 2 and 3, with fields replaced."""
    storage = MetaStorageDesc(id=0, nbytes=24)
    plain: dict[str, object] = {
        "id": 0, "dtype": "float32", "device": "cpu", "size": (2, 3), "stride": (3, 1),
        "storage": storage,
    }  # fmt: skip
    return MetaTensorDesc(**{**plain, **fields})  # pyright: ignore[reportArgumentType]


# --- expressions ------------------------------------------------------------------------------

integers = st.recursive(
    st.sampled_from([*SYMBOLS.values()]) | st.integers(1, 9).map(sympy.Integer),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda p: p[0] + p[1]),
        st.tuples(inner, inner).map(lambda p: p[0] - p[1]),
        st.tuples(inner, inner).map(lambda p: p[0] * p[1]),
        st.tuples(inner, inner).map(lambda p: sympy.Max(p[0], 1) * p[1]),
        st.tuples(inner, st.integers(1, 7)).map(lambda p: FloorDiv(p[0], sympy.Integer(p[1]))),
        st.tuples(inner, st.integers(2, 7)).map(
            lambda p: Mod(sympy.Abs(p[0]) + 1, sympy.Integer(p[1]))
        ),
        st.tuples(inner, st.integers(2, 3)).map(lambda p: p[0] ** p[1]),
        st.tuples(inner, inner).map(lambda p: Max(p[0], p[1])),
        st.tuples(inner, inner).map(lambda p: Min(p[0], p[1])),
    ),
    max_leaves=8,
)
relations = st.tuples(
    st.sampled_from([sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge]),
    integers,
    integers,
).map(lambda p: p[0](p[1], p[2]))
conditions = st.recursive(
    relations,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda p: sympy.And(*p)),
        st.tuples(inner, inner).map(lambda p: sympy.Or(*p)),
        inner.map(sympy.Not),
    ),
    max_leaves=4,
)
NAMES = {"Max": max, "Min": min, "Abs": abs, "true": True, "false": False, "True": True}


def evaluate(text: str, values: dict[str, int]) -> object:
    """Evaluate a text in Python, including the parts after ``where``."""
    scope: dict[str, object] = {**NAMES, **values, "__builtins__": {}}
    scope |= {"sympy_Max": max}
    text = text.replace("sympy.Max", "sympy_Max")
    root, _, parts = text.partition(" where ")
    for part in filter(None, parts.split("; ")):
        name, _, value = part.partition(" = ")
        scope[name] = eval(value, scope)
    return eval(root, scope)


@given(integers | conditions, st.integers(2, 9), st.integers(2, 9), st.integers(2, 9))
def test_an_expression_reads_as_python(expr: sympy.Basic, s0: int, s1: int, u0: int) -> None:
    """Evaluated in Python, the text gives the value of the expression: its brackets are right."""
    values = {"s0": s0, "s1": s1, "u0": u0}
    expected = expr.xreplace({SYMBOLS[name]: sympy.Integer(v) for name, v in values.items()}).doit()
    found = evaluate(expr_text(encode_expr(expr)), values)
    assert found == (bool(expected) if expected in {sympy.true, sympy.false} else expected)


def doubling(levels: int) -> ExprDesc:
    """Return a value added to itself ``levels`` times: expanded it has ``2**levels`` terms."""
    nodes: list[SymbolNode | ApplyNode] = [SymbolNode("s0", ())]
    nodes.extend(ApplyNode("FloorDiv", (at, at)) for at in range(levels))
    return ExprDesc(nodes=tuple(nodes))


def test_division_is_in_brackets() -> None:
    """``//`` and ``%`` are in brackets unless they are the first factor."""
    for function, sign in (("FloorDiv", "//"), ("Mod", " % ")):
        s0, s1, two = SymbolNode("s0", ()), SymbolNode("s1", ()), IntNode(2)
        last = ExprDesc(nodes=(s0, s1, two, ApplyNode(function, (1, 2)), ApplyNode("Mul", (0, 3))))
        first = ExprDesc(nodes=(s0, s1, two, ApplyNode(function, (1, 2)), ApplyNode("Mul", (3, 0))))
        minus = ExprDesc(nodes=(IntNode(-1), *first.nodes[1:4], ApplyNode("Mul", (0, 3))))
        assert expr_text(last) == f"s0*(s1{sign}2)"
        assert expr_text(minus) == f"-(s1{sign}2)"
        assert expr_text(first) == f"s1{sign}2*s0"


def test_shared_parts_are_named() -> None:
    """A long expression names its shared parts and does not repeat them."""
    assert expr_text(doubling(2)) == "(s0//s0)//(s0//s0)"
    assert expr_text(doubling(8)).startswith("t6//t6 where t0 = s0//s0; t1 = t0//t0; ")


def test_text_is_linear_in_the_record() -> None:
    """The length of an expression's text is in proportion to its record, not to its expansion."""
    assert len(expr_text(doubling(20_000))) < 20_000 * 40


def test_text_of_a_chain_is_linear() -> None:
    """A deep chain is cut into named parts, since its text would be quadratic."""
    nodes: list[SymbolNode | ApplyNode] = [SymbolNode("s0", ())]
    nodes.extend(ApplyNode("Abs", (at,)) for at in range(50_000))
    text = expr_text(ExprDesc(nodes=tuple(nodes)))
    assert len(text) < 50_000 * 40
    assert max(map(len, re.split(r" where |; ", text))) < 200


def test_numbers_of_any_size_are_printed() -> None:
    """Python's limit of decimal digits does not apply."""
    assert int_text(-7) == "-7"
    assert int_text(1 << 20_000).startswith("0x1000")
    assert expr_text(ExprDesc(nodes=(FloatNode(3, -1, 53),))) == "1.5"
    assert expr_text(ExprDesc(nodes=(FloatNode(1, 1 << 40, 53),))) == "1*2**1099511627776"
    assert expr_text(ExprDesc(nodes=(RationalNode(1, 3),))) == "1/3"
    assert expr_text(ExprDesc(nodes=(AtomNode("int_oo"),))) == "int_oo"


def test_sizes_are_printed_as_numbers_or_expressions() -> None:
    """A constant size is a number, a symbolic one an expression."""
    assert [sym_text(value) for value in (3, size("s0"), 2.5, True, None)] == [
        "3", "s0", "2.5", "True", "None",
    ]  # fmt: skip


# --- values -----------------------------------------------------------------------------------

VALUES: list[tuple[Value, str]] = [
    (None, "None"),
    (True, "True"),
    (7, "7"),
    (2.5, "2.5"),
    ("a'b", '"a\'b"'),
    (FloatValue(text="-inf"), 'float("-inf")'),
    (ComplexValue(real=1.0, imag=FloatValue(text="nan")), 'complex(1.0, float("nan"))'),
    (BytesValue(data=b"\x00a"), r"b'\x00a'"),
    (EllipsisValue(), "..."),
    (TupleValue(items=(1,)), "(1,)"),
    (TupleValue(items=(1, NodeValue(index=0))), "(1, x)"),
    (ListValue(items=(1, 2)), "[1, 2]"),
    (SizeValue(items=(1, SymValue(sym=size("s0")))), "torch.Size([1, s0])"),
    (SetValue(items=(1,), frozen=True), "frozenset([1])"),
    (DictValue(items=(("k", 1), (2, None))), "{'k': 1, 2: None}"),
    (NodeValue(index=0), "x"),
    (SliceValue(start=1, stop=NodeValue(index=9)), "slice(1, %9, None)"),
    (RangeValue(start=0, stop=4, step=2), "range(0, 4, 2)"),
    (TorchConstValue(kind="dtype", name="float32"), "torch.float32"),
    (TorchConstValue(kind="device", name="cuda:1"), "device('cuda:1')"),
    (EnumValue(cls="m.Color", name="RED"), "m.Color.RED"),
    (NamedTupleValue(cls="m.Point", items=(1, 2)), "m.Point(1, 2)"),
    (TypeValue(name="m.C"), "m.C"),
    (FunctionValue(kind="op", name="aten.add.Tensor"), "aten.add.Tensor"),
    (SymValue(sym=size("s1")), "s1"),
    (ExprValue(expr=symbol("s1")), "s1"),
    (TensorValue(tensor=tensor()), "<tensor float32[2, 3]>"),
    (SourceValue(source=SourceDesc(cls="LocalSource", name="L['x']")), "L['x']"),
    (OpaqueValue(kind="stream"), "<stream>"),
    (OpaqueValue(kind="stream", data=3), "<stream 3>"),
]


@pytest.mark.parametrize(("value", "text"), VALUES, ids=lambda part: type(part).__name__)
def test_every_kind_of_value_has_a_text(value: Value, text: str) -> None:
    """Each kind of value is printed as in the table."""
    assert value_text(value, names=("x",)) == text


def test_every_kind_of_value_is_in_the_table() -> None:
    """The table has every record type of the union of values."""
    kinds = {arg for arg in Value.__args__ if isinstance(arg, type)}  # pyright: ignore
    assert kinds <= {type(value) for value, _ in VALUES}


def test_deep_values_are_truncated() -> None:
    """The text of a deeply nested value ends at a fixed depth."""
    value: Value = 1
    for _ in range(5000):
        value = ListValue(items=(value,))
    assert value_text(value).count("[") == 41


# --- tensors and stacks -----------------------------------------------------------------------


PLAIN = tensor()
THREE = SymDesc(expr=encode_expr(3 * SYMBOLS["s0"]), hint=12)
KINDS: dict[str, dict[str, object]] = {
    "float32[2, 3]": {},
    "float32[]": {"size": (), "stride": ()},
    "float32[1, 3]": {"size": (1, 3), "stride": (77, 1)},
    "float32[2, 3] stride (1, 2)": {"stride": (1, 2)},
    "float32[2, 3] cuda:1 offset 4": {"device": "cuda:1", "storage_offset": 4},
    "float32[s0, 3]": {"size": (size("s0"), 3)},
    "float32[s1, s0, 3]": {"size": (size("s1"), size("s0"), 3), "stride": (THREE, 3, 1)},
    "float32[2, j0] stride (3*j0, 1)": {
        "size": (2, NestedIntDesc(0)),
        "stride": (NestedIntDesc(0, 3), 1),
    },
    "float32[2, 3] parameter": {"is_parameter": True, "requires_grad": True},
    "float32[2, 3] requires_grad non-leaf conj": {
        "requires_grad": True,
        "is_leaf": False,
        "is_conj": True,
    },
    "float32[2, 3] coalesced sparse_coo": {
        "layout": "sparse_coo",
        "stride": (),
        "sparse": SparseDesc(sparse_dim=2, dense_dim=0, is_coalesced=True),
    },
    "float32[2, 3] blocks 1x3 sparse_bsr": {
        "layout": "sparse_bsr",
        "sparse": SparseDesc(sparse_dim=2, dense_dim=0, blocksize=(1, 3)),
    },
    "float32[2, 3] mkldnn pinned": {"layout": "_mkldnn", "is_pinned": True},
    "float32[2, 3] Two(x, y)": {
        "subclass": SubclassDesc(cls="a.Two", tensors=(("x", PLAIN), ("y", PLAIN)))
    },
    "float32[2, 3] batched at level 2": {
        "functorch": FunctorchDesc(kind="batched", unwrapped=PLAIN, level=2)
    },
    "float32[2, 3] functional": {"functional": FunctionalDesc(unwrapped=PLAIN)},
}


@pytest.mark.parametrize("text", KINDS)
def test_tensors_have_a_text(text: str) -> None:
    """The line of a tensor has what differs from a plain CPU tensor."""
    assert tensor_text(tensor(**KINDS[text])) == text


def test_stacks_have_a_text() -> None:
    """A stack is printed as Python prints it, its innermost entry on one line."""
    stack = StackDesc(
        frames=(FrameDesc("/a/b.py", 3, "main", "f(x)"), FrameDesc("/a/c.py", 5, "f", ""))
    )
    assert stack_lines(stack) == [
        'File "/a/b.py", line 3, in main',
        "  f(x)",
        'File "/a/c.py", line 5, in f',
    ]
    assert user_line(stack) == "c.py:5 in f"
    assert user_line(None) == user_line(StackDesc(frames=())) == ""


# --- what a terminal may be sent --------------------------------------------------------------


@given(st.text())
def test_only_what_cannot_be_printed_is_escaped(text: str) -> None:
    """Each other character stays as it is, and the escape is that of a Python string."""
    parts = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    assert escape(text) == "".join(parts)
    assert escape("a\x1b[31mb\n\x9b\u202e\ud800é") == r"a\x1b[31mb\n\x9b\u202e\ud800é"


def test_clip_truncates_visibly() -> None:
    """A text that is too long is cut to the width and ends with a mark."""
    assert [clip("abcdef", width) for width in (6, 5, 3, 1)] == ["abcdef", "ab...", "...", "..."]
