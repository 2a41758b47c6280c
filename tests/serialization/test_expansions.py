"""The terms of an expression multiplied out, as a reader estimates them without sympy."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

import pytest
import sympy
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch.fx.experimental.symbolic_shapes import _fast_expand
from torch.utils._sympy.functions import FloorDiv, Max, Mod

import torch_fakeify as tfk
from torch_fakeify.encoding.exprs import decode_expr, encode_expr
from torch_fakeify.records.tensor import ApplyNode, ExprDesc, ExprNode, IntNode, SymbolNode
from torch_fakeify.serialization.expansions import Expanded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

SYMBOLS = [sympy.Symbol(f"s{i}", integer=True, positive=True) for i in range(3)]
NUMBERS = [sympy.Integer(n) for n in (-1, 1, 2, 3, 4, 6)]
OPERATIONS: dict[str, Callable[[sympy.Expr, sympy.Expr], sympy.Expr]] = {
    "+": lambda a, b: a + b,
    "*": lambda a, b: a * b,
    "//": FloorDiv,
    "max": Max,
    "%": Mod,
    "square": lambda a, _: a**2,
}


@st.composite
def expressions(draw: st.DrawFn) -> sympy.Expr:
    """An expression as torch makes one, of earlier ones, mostly of the last."""
    made = [*NUMBERS, *SYMBOLS]
    for _ in range(draw(st.integers(2, 9))):
        name = draw(st.sampled_from(["+", "*", "//", "//", "max", "%", "square"]))
        a, b = (made[-draw(st.integers(1, len(made)))] for _ in range(2))
        if b == 0 and name in ("//", "%"):
            continue
        try:
            made.append(OPERATIONS[name](a, b))
        except AssertionError:  # torch's `Mod` of a negative number
            continue
    return made[-1]


def terms(expr: sympy.Expr) -> int:
    """How many terms a reader expects."""
    return len(Expanded(encode_expr(expr).nodes, 10**7).polynomials[-1])


@given(expressions())
def test_at_least_the_terms_that_torch_makes_are_expected(expr: sympy.Expr) -> None:
    """Torch's multiplied out expression has at most the terms that a reader expects."""
    assert len(sympy.Add.make_args(_fast_expand(expr))) <= terms(expr)


def nodes_of(text: str) -> list[ExprNode]:
    """The nodes of an expression as it is written, without sympy's simplifications."""
    nodes: list[ExprNode] = []

    def add(node: ExprNode) -> int:
        if node not in nodes:
            nodes.append(node)
        return nodes.index(node)

    def visit(tree: ast.expr) -> int:
        match tree:
            case ast.Name(name):
                return add(SymbolNode(name, ASSUMPTIONS.get(name, ASSUMPTIONS["size"])))
            case ast.Constant(int(number)):
                return add(IntNode(number))
            case ast.BinOp(left, operator, right):
                args = (visit(left), visit(right))
                return add(ApplyNode(FUNCTIONS[type(operator)], args))
            case ast.UnaryOp(operand=ast.Constant(int(number))):
                return add(IntNode(-number))
            case ast.Call(args=args):
                return add(ApplyNode("Max", tuple(map(visit, args))))
        raise AssertionError(ast.dump(tree))

    visit(ast.parse(text, mode="eval").body)
    return nodes


FUNCTIONS: dict[type, str] = {
    ast.Add: "Add",
    ast.Mult: "Mul",
    ast.FloorDiv: "FloorDiv",
    ast.Mod: "PythonMod",
    ast.Pow: "Pow",
    ast.LShift: "LShift",
}
ASSUMPTIONS = {
    "size": (("integer", True), ("positive", True)),
    "u": (("integer", True),),
    "even": (("even", True), ("positive", True)),
}


@pytest.mark.parametrize(
    "text",
    [
        "(x * a + x * b) // x",
        "(x * a * 4 + x * b * 6) // (x * 2)",
        "((a + b) * (c + d)) // (a + b)",
        "(a * x + b * x) // ((x * c) // c)",
        "(a * 2 + b * 2 + 2) // max(1, 2)",
        "((a // x) // y * c + a // (x * y) * d) // ((a // x) // y)",
        "(a * 6 + b * 9) // 6",
        "(x * a + x * b + c + c * -1) // x",
        "(a + a + b + b) // 2",
        "((a * 4 + b * 6) // (x * 2) * c + (a * 2 + b * 3) // x * d) // ((a * 2 + b * 3) // x)",
        "((a * 2 + b * 6) // 8 * c + (a + b * 3) // 4 * d) // ((a + b * 3) // 4)",
        "((a * 2) // 4 + a // 2 + (b * 2) // 4 + b // 2) // 2",
        "((a * 2) // 4 + a // 2 + (b * 2) // 4 + b // 2) % -1",
        "(a + (b * 2 + 1) % 2 * a + c + (b * 2 + 1) % 2 * c) // 2",
        "(b * (u * 5 + -1) ** 2 * 6 + b * 3 + 1) // 2",
        "(b * (u + 1) * 2 + b * u + b + 1) // 2",
        "((a + b) ** -1 * c) // 2 + ((a + b) * c) // 2",
        "(even + -1) % even",
        "(even * a + b) // 2",
        "(even * 3 + a) % 2 * (a + b)",
        "(u * 4 + (a << 2) + b) // 4",
        "(((a + b) << 1) + c * 2) // 2",
        "(a * -1 + -12) % -5",
        "(u + a ** 2 * 4 + b ** 2 * 4) // 4",
    ],
)
def test_what_sympy_simplifies_is_expected_too(text: str) -> None:
    """Terms that sympy makes of a division, which a file may have unsimplified."""
    nodes = nodes_of(text)
    found = _fast_expand(simplified(decode_expr(ExprDesc(nodes=tuple(nodes)))))
    assert len(sympy.Add.make_args(found)) <= len(Expanded(nodes, 10**7).polynomials[-1])


SIZES = (
    *(SymbolNode(name, ASSUMPTIONS["size"]) for name in "ab"),
    *(SymbolNode(name, ASSUMPTIONS[name]) for name in ("u", "even")),
)


@pytest.mark.parametrize("text", ["a ** 1000000000", "(a * b) ** 40", "(a * 3) ** 60"])
def test_powers_and_their_numbers_stay_short(text: str) -> None:
    """The estimate takes no time for a large exponent, and no memory for a number of many digits."""
    for polynomial in Expanded(nodes_of(f"({text}) * ({text}) * c"), 10**5).polynomials:
        for monomial, number in polynomial.items():
            assert len(monomial) <= 129
            assert number is None or number.bit_length() <= 128


BY_NUMBER = ("FloorDiv", "FloorDiv", "FloorDiv", "Mod", "PythonMod", "Pow", "LShift")
BY_FACTOR = ("FloorDiv", "Mod", "PythonMod", "Max")


def write(choose: Callable[[Sequence[Any]], Any]) -> list[ExprNode]:
    """Nodes that sympy has not simplified, as only a file has them: functions of sums of products."""
    nodes: list[ExprNode] = [*SIZES]
    factors = list(range(len(SIZES)))

    def add(node: ExprNode) -> int:
        nodes.append(node)
        return len(nodes) - 1

    def product() -> int:
        count = choose((1, 1, 1, 2))
        parts = [add(IntNode(choose((-1, 1, 1, 2, 3, 4, 6))))]
        return add(ApplyNode("Mul", (*parts, *(choose(factors[-6:]) for _ in range(count)))))

    for _ in range(choose((1, 2, 3, 4))):
        terms = [product() for _ in range(choose((1, 2, 2, 3)))]
        if choose((False, True)):
            terms.append(add(IntNode(choose((-1, 1, 2, 4)))))
        total = add(ApplyNode("Add", tuple(terms))) if len(terms) > 1 else terms[0]
        if choose((False, False, True)):
            function, other = choose(BY_FACTOR), choose((*factors[-6:], product()))
        else:
            function, other = choose(BY_NUMBER), add(IntNode(choose((2, 2, 3, 4))))
        factors.append(add(ApplyNode(function, (total, other))))
    return used(nodes)


def used(nodes: list[ExprNode]) -> list[ExprNode]:
    """The nodes of the last one, each once, as the codec has them."""
    made: dict[ExprNode, int] = {}

    def add(node: ExprNode) -> int:
        if isinstance(node, ApplyNode):
            node = ApplyNode(node.function, tuple(add(nodes[at]) for at in node.args))
        return made.setdefault(node, len(made))

    add(nodes[-1])
    return list(made)


@given(st.composite(lambda draw: write(lambda options: draw(st.sampled_from(options))))())
@settings(max_examples=500)
def test_at_least_the_terms_that_sympy_makes_of_a_file_are_expected(nodes: list[ExprNode]) -> None:
    """Whatever a file has unsimplified, torch's expression has at most the terms that a reader expects."""
    desc = ExprDesc(nodes=tuple(nodes))
    try:
        found = _fast_expand(simplified(decode_expr(desc)))
    except (AssertionError, ZeroDivisionError, RecursionError, tfk.FormatError):
        # A division by zero, a remainder of a negative number, or sympy's remainder by a shift.
        reject()
    assert len(sympy.Add.make_args(found)) <= len(Expanded(nodes, 10**7).polynomials[-1])


def simplified(expr: sympy.Basic) -> sympy.Basic:
    """The expression as sympy makes it of its parts."""
    return expr.func(*map(simplified, expr.args)) if expr.args else expr


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("function", ["FloorDiv", "CleanDiv", "Mod", "PythonMod", "Pow", "LShift"])
def test_another_number_of_arguments_is_estimated_and_refused(function: str, count: int) -> None:
    """The estimate comes before the expression is built, where the error has the number."""
    size = SymbolNode("a", ASSUMPTIONS["size"])
    nodes = (size, IntNode(2), ApplyNode(function, (0, 1, 0)[:count]))
    assert len(Expanded(nodes, 100).polynomials) == 3
    with pytest.raises(tfk.FormatError, match="argument"):
        decode_expr(ExprDesc(nodes=tuple(used(list(nodes)))))


@pytest.mark.parametrize("levels", [1, 3, 8])
def test_divisions_of_nested_windows_stay_single_terms(levels: int) -> None:
    """The sizes of strided convolutions and of windows, as in MaxViT, do not grow by their nesting."""
    size: sympy.Expr = SYMBOLS[0]
    for _ in range(levels):
        size = FloorDiv(size - 1, sympy.Integer(2)) + 1
        windows = FloorDiv(size, sympy.Integer(4))
        assert terms(FloorDiv(size, windows)) == 1
        assert terms(size) <= 2
    assert terms(FloorDiv(SYMBOLS[0] + SYMBOLS[1], SYMBOLS[2])) == 1


def exceeding(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Sizes of which each might be a sum, for what a reader knows."""
    length, step = x.shape[0] + x.shape[1], x.shape[2]
    parts = [max(length * n, step) // max(n, step) for n in y.shape]
    return torch.zeros(parts, device="meta") + 1


def test_a_frame_beyond_the_limits_is_recorded_and_read_on_request(tmp_path: Path) -> None:
    """The frame has a file, which is refused by default, with the advice; the block itself reads it."""
    torch._dynamo.reset()
    with tfk.recording(tmp_path) as frames:
        compiled = torch.compile(exceeding, backend="eager", dynamic=True)
        compiled(torch.ones(2, 3, 4), torch.ones(2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2))
    expected = "the products of sums are too large multiplied out"
    with pytest.raises(tfk.LimitError, match=f"{expected}.*or `--trust` on the command line"):
        tfk.Capture.load(frames.paths[0])
    (capture,) = frames
    assert capture.instantiate().gm.graph.nodes
    with pytest.raises(tfk.WriteError, match="Pass higher limits to `save`"):
        capture.save(tmp_path / "again.fkf")
    with pytest.raises(tfk.LimitError, match=expected):
        capture.replay(backend="eager")
    assert capture.replay(backend="eager", trust=True).verdict == "compiles"
