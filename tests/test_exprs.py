"""Sympy expressions and their records."""

from __future__ import annotations

import inspect
import subprocess
import sys
import time

import msgspec
import pytest
import sympy
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sympy.functions.elementary.piecewise import ExprCondPair
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy import functions as torch_functions
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.singleton_int import SingletonInt
from torch.utils._sympy.symbol import SymT, make_symbol, prefix_str

from torch_fakeify import exprs
from torch_fakeify.desc import (
    ApplyNode,
    AtomNode,
    ExprDesc,
    FloatNode,
    IntNode,
    RationalNode,
    SymbolNode,
    SymDesc,
)
from torch_fakeify.errors import FormatError, UnknownNameError, UnsupportedValueError
from torch_fakeify.exprs import HEADS, decode_expr, encode_expr, encode_int, encode_sym

S0, S1 = sympy.symbols("s0 s1", positive=True, integer=True)
U0 = sympy.Symbol("u0", integer=True)
ZF0 = sympy.Symbol("zf0", real=True)
P = sympy.Symbol("p")


def state_of(expr: sympy.Basic) -> dict[str, object]:
    """What an expression holds beside its class and arguments."""
    state = dict(getattr(expr, "__dict__", {}))
    # How torch came to a Max decides whether it has noted the symbols; noting them is right.
    state.pop("unique_summations_symbols", None)
    if isinstance(expr, sympy.Expr):
        state["is_commutative"] = expr.is_commutative
    return state


def check_round_trip(expr: sympy.Basic) -> None:
    """Both laws for one expression, and that nothing else about it changed."""
    record = encode_expr(expr)
    again = decode_expr(record)
    assert again == expr
    assert hash(again) == hash(expr)
    assert encode_expr(again) == record
    stack, seen = [(expr, again)], set()
    while stack:
        old, new = stack.pop()
        if id(old) in seen:
            continue
        seen.add(id(old))
        assert type(old) is type(new)
        assert state_of(old) == state_of(new)
        if not isinstance(old, SingletonInt):
            stack.extend(zip(old._args, new._args, strict=True))


# --- the table ----------------------------------------------------------------------------------


def test_every_class_of_torchs_functions_is_in_the_table() -> None:
    """Every sympy class that torch.utils._sympy.functions defines has a head."""
    classes = {
        value
        for value in vars(torch_functions).values()
        if inspect.isclass(value)
        and issubclass(value, sympy.Basic)
        and value.__module__ == torch_functions.__name__
        and value is not torch_functions.MinMaxBase
    }
    assert len(classes) == 41
    assert classes - {head.cls for head in HEADS.values()} == set()


def test_every_name_that_torch_exports_is_in_the_table() -> None:
    """The public names of torch.utils._sympy.functions are names of records."""
    assert set(torch_functions.__all__) <= set(HEADS)


@pytest.mark.parametrize("name", sorted(set(HEADS) - {"ExprCondPair"}))
def test_head_round_trips(name: str) -> None:
    """An unevaluated application of each function comes back equal, of the same class and state."""
    head = HEADS[name]
    count = max(head.low, 1)
    if head.domain == "bool":
        args = [sympy.Gt(S0, i + 7) for i in range(count)]
    elif head.domain == "pieces":
        args = [ExprCondPair(S0, sympy.Gt(S0, 7)), ExprCondPair(U0, sympy.true)]
    else:
        args = [S0 + i for i in range(1, count + 1)]
    check_round_trip(exprs._apply(head, args))


@pytest.mark.parametrize("name", exprs._ATOMS)
def test_atom_comes_back_as_the_same_object(name: str) -> None:
    """Constants are singletons on both sides."""
    atom = exprs._ATOMS[name]
    assert encode_expr(atom) == ExprDesc(nodes=(AtomNode(name),))
    assert decode_expr(encode_expr(atom)) is atom


@pytest.mark.parametrize(
    "build",
    [
        lambda: sympy.And(S0 > 3, S1 < 9, U0 >= 0),
        lambda: sympy.Or(sympy.Not(P), sympy.Eq(S0, S1)),
        lambda: sympy.Xor(S0 > 3, S1 > 4),
        lambda: sympy.ITE(S0 > 3, S1 > 4, U0 > 5),
        lambda: sympy.Piecewise((1, S0 > 3), (S1 / 2, U0 > 5), (0, True)),
        lambda: sympy.sqrt(S0) + sympy.exp(U0) * sympy.log(S1) / 3,
        lambda: sympy.Min(S0, 7) + sympy.Max(S1, U0) + sympy.Mod(U0, 7),
        lambda: torch_functions.Max(S0 + S1, U0 + P),
        lambda: torch_functions.Min(S0, U0, 7),
        lambda: torch_functions.FloorDiv(S0 * S1 + 3, 2 * U0),
        lambda: torch_functions.PythonMod(U0, S0) + torch_functions.Mod(S0, 8),
        lambda: torch_functions.ModularIndexing(S0, 3, S1),
        lambda: torch_functions.Where(S0 > 3, S1, U0),
        lambda: torch_functions.IntTrueDiv(S0, S1),
        lambda: torch_functions.TruncToInt(torch_functions.FloatTrueDiv(ZF0, sympy.Float(2.5))),
        lambda: torch_functions.OpaqueUnaryFn_sqrt(torch_functions.ToFloat(S0)),
        lambda: torch_functions.BitwiseFn_bitwise_and(U0, 7),
        lambda: torch_functions.LShift(U0, S1) + torch_functions.RShift(U0, 3),
        lambda: torch_functions.CeilDiv(S0, 8) + torch_functions.CleanDiv(S0, S1),
        lambda: torch_functions.Identity(S0 + 1),
        lambda: torch_functions.IsNonOverlappingAndDenseIndicator(S0, S1, S1, U0),
        lambda: sympy.Ne(S0, int_oo, evaluate=False),
    ],
)
def test_evaluated_expression_round_trips(build) -> None:
    """What torch and sympy build by evaluation comes back with the same state."""
    check_round_trip(build())


@pytest.mark.parametrize(
    "expr",
    [
        sympy.Eq(S0, S0, evaluate=False),
        sympy.Mul(2, sympy.Add(S0, S1), evaluate=False),
        sympy.Add(S0, S0, evaluate=False),
        sympy.Add(S1, 3, S0, evaluate=False),
        sympy.Mul(0, S0, evaluate=False),
        sympy.Pow(2, 3, evaluate=False),
        sympy.Gt(3, 2, evaluate=False),
        sympy.Not(sympy.Gt(S0, 3), evaluate=False),
        torch_functions.FloorDiv(S0, 1, evaluate=False),
        torch_functions.Mod(S0, S0, evaluate=False),
        torch_functions.Max(S0, -5, evaluate=False),
    ],
    ids=str,
)
def test_unevaluated_expression_stays_unevaluated(expr) -> None:
    """Decoding does not simplify, reorder or merge."""
    check_round_trip(expr)


# --- symbols ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SymT)
def test_symbol_of_every_kind_is_found_by_xreplace(kind: SymT) -> None:
    """A decoded symbol is the original to sympy, whatever its kind and assumptions."""
    for assumptions in (
        {},
        {"integer": True},
        {"positive": True, "integer": True},
        {"real": True, "negative": False},
        {"integer": True, "commutative": True},
    ):
        symbol = make_symbol(kind, 7, **assumptions)
        again = decode_expr(encode_expr(symbol))
        assert again == symbol
        assert again.assumptions0 == symbol.assumptions0
        assert (symbol + 1).xreplace({again: sympy.Integer(4)}) == 5
        assert again.name.startswith(prefix_str[kind])


def test_explicit_assumptions_are_recorded_sorted() -> None:
    """A symbol's record has what it was made with, in order."""
    symbol = sympy.Symbol("s0", positive=True, integer=True)
    expected = SymbolNode("s0", (("integer", True), ("positive", True)))
    assert encode_expr(symbol).nodes == (expected,)


def test_same_name_with_other_assumptions_is_another_node() -> None:
    """Two symbols of one name stay two."""
    expr = sympy.Symbol("s0") + S0
    assert len(encode_expr(expr).nodes) == 3
    check_round_trip(expr)


# --- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        sympy.Float(0.1),
        sympy.Float(0.0),
        sympy.Float(-2.5),
        sympy.Float(5e-324),
        sympy.Float(sys.float_info.max),
        sympy.Float("1.1", 60),
        sympy.Float(1) / 3,
        sympy.Integer(2) ** 300 - 1,
        sympy.Integer(-7),
        sympy.Rational(-1, 3),
        sympy.S.Half,
    ],
    ids=str,
)
def test_number_keeps_every_digit(value) -> None:
    """Floats keep mantissa and precision, integers and fractions their size."""
    again = decode_expr(encode_expr(value))
    assert type(again) is type(value)
    assert again == value
    assert getattr(again, "_mpf_", None) == getattr(value, "_mpf_", None)
    assert getattr(again, "_prec", None) == getattr(value, "_prec", None)


def test_float_and_integer_of_one_value_stay_two() -> None:
    """``2`` and ``2.0`` are different nodes."""
    expr = torch_functions.FloatPow(ZF0, sympy.Float(2.0)) + 2
    assert IntNode(2) in encode_expr(expr).nodes
    assert FloatNode(1, 1, 53) in encode_expr(expr).nodes
    check_round_trip(expr)


def test_nested_int_keeps_id_and_coefficient() -> None:
    """A SingletonInt is its id and its coefficient."""
    nested = SingletonInt(5, coeff=3)
    again = decode_expr(encode_expr(nested))
    assert type(again) is SingletonInt
    assert (again._val, again._coeff) == (5, 3)
    assert encode_expr(again) == encode_expr(nested)


def test_numbers_out_of_range_are_refused() -> None:
    """No number is encoded that decoding would refuse."""
    with pytest.raises(UnsupportedValueError) as info:
        encode_expr(sympy.Integer(1 << exprs.MAX_INT_BITS))
    assert str(info.value) == (
        "an integer too large for a record; expected at most 65536 bits; found 65537 bits"
    )
    with pytest.raises(UnsupportedValueError, match="a float out of range"):
        encode_expr(sympy.Float(2.0) ** (1 << 21))


# --- laws ---------------------------------------------------------------------------------------

LEAVES = st.sampled_from([S0, S1, U0, ZF0, P, sympy.Symbol("i3")]) | st.one_of(
    st.integers(-(2**70), 2**70).map(sympy.Integer),
    st.floats(allow_nan=False, allow_infinity=False).map(sympy.Float),
    st.fractions(-9, 9, max_denominator=9).map(
        lambda f: sympy.Rational(f.numerator, f.denominator)
    ),
    st.sampled_from([sympy.oo, int_oo, -int_oo, sympy.pi, sympy.E, sympy.nan]),
)


@st.composite
def expressions(draw: st.DrawFn) -> sympy.Basic:
    """Random expressions over the whole table that share sub-expressions."""
    pool: list[sympy.Basic] = [S0, draw(LEAVES), draw(LEAVES)]
    booleans: list[sympy.Basic] = [sympy.true, sympy.Gt(S0, 3)]
    names = sorted(set(HEADS) - {"ExprCondPair"})
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=12)):
        head = HEADS[name]
        source = booleans if head.domain == "bool" else pool
        count = draw(st.integers(head.low, min(head.high, head.low + 2)))
        args = draw(st.lists(st.sampled_from(source), min_size=count, max_size=count))
        if head.domain == "pieces":
            conditions = draw(st.lists(st.sampled_from(booleans), min_size=count, max_size=count))
            args = list(map(ExprCondPair, args, conditions))
        if issubclass(head.cls, sympy.core.operations.LatticeOp) or head.cls is sympy.Xor:
            args = list(dict.fromkeys(args))
            if len(args) < 2:
                continue
        expr = exprs._apply(head, args)
        (booleans if isinstance(expr, sympy.logic.boolalg.Boolean) else pool).append(expr)
    return draw(st.sampled_from(pool + booleans))


@given(expressions())
@settings(deadline=None, max_examples=150)
def test_law_random_expressions(expr: sympy.Basic) -> None:
    """``decode(encode(e)) == e`` and ``encode(decode(d)) == d`` over the whole table."""
    check_round_trip(expr)


@given(
    st.recursive(
        st.sampled_from([S0, S1, U0, sympy.Integer(2), sympy.Integer(-3)]),
        lambda inner: st.one_of(
            st.tuples(inner, inner).map(sum),
            st.tuples(inner, inner).map(sympy.prod),
            st.tuples(inner, inner).map(lambda p: torch_functions.Max(*p)),
            st.tuples(inner, inner).map(lambda p: _maybe(torch_functions.FloorDiv, *p)),
            st.tuples(inner, inner).map(lambda p: _maybe(torch_functions.PythonMod, *p)),
        ),
        max_leaves=12,
    )
)
@settings(deadline=None, max_examples=60)
def test_law_evaluated_expressions(expr: sympy.Basic) -> None:
    """What size arithmetic gives, with torch's and sympy's own evaluation, round-trips."""
    assume(expr is not None)
    check_round_trip(expr)


def _maybe(function, *args: sympy.Basic) -> sympy.Basic:
    try:
        return function(*args)
    except ZeroDivisionError:
        return args[0]


def test_shared_sub_expressions_cost_once() -> None:
    """``x = x*x + x`` sixty times is 121 nodes, not 2**60, and takes no time."""
    expr = U0
    for _ in range(60):
        expr = expr * expr + expr
    start = time.perf_counter()
    record = encode_expr(expr)
    again = decode_expr(record)
    assert encode_expr(again) == record
    assert len(record.nodes) <= 122
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("depth", [5000])
def test_deep_expression_needs_no_python_stack(depth: int) -> None:
    """Depth is no limit: neither side recurses."""
    expr = S0
    for _ in range(depth):
        expr = exprs._apply(HEADS["Add"], [exprs._apply(HEADS["ToFloat"], [expr]), S1])
    record = encode_expr(expr)
    assert len(record.nodes) == 2 * depth + 2
    again = decode_expr(record)
    assert encode_expr(again) == record
    assert hash(again) == hash(expr)
    assert (again + 1).is_commutative


def test_deep_chain_of_functions_answers_questions() -> None:
    """What sympy finds out through the arguments is known for a deep decoded expression."""
    applied = tuple(ApplyNode("ToFloat", (i,)) for i in range(5000))
    assert decode_expr(ExprDesc(nodes=(SymbolNode("x", ()), *applied))).is_commutative


def test_records_mean_the_same_in_another_process() -> None:
    """A fresh interpreter, with other hashes, decodes to the same expression and record."""
    expr = sympy.And(
        torch_functions.Max(S0 + U0, S1 + P) > torch_functions.FloorDiv(U0, S1), sympy.Ne(S0, 5)
    )
    wire = msgspec.json.encode(encode_expr(expr))
    script = (
        "import sys, msgspec, sympy\n"
        "from torch_fakeify.desc import ExprDesc\n"
        "from torch_fakeify.exprs import decode_expr, encode_expr\n"
        "record = msgspec.json.decode(sys.stdin.buffer.read(), type=ExprDesc)\n"
        "expr = decode_expr(record)\n"
        "assert encode_expr(expr) == record\n"
        "print(expr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=wire, capture_output=True, check=True
    )
    assert done.stdout.decode().strip() == str(expr)


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expr", "message"),
    [
        (
            sympy.Dummy("d"),
            "an expression that a record cannot hold; expected a symbol, number or function that "
            "torch's symbolic shapes use; found sympy.core.symbol.Dummy (d). Rewrite it with the "
            "functions of sympy or torch.utils._sympy.functions.",
        ),
        (
            sympy.Function("f")(S0),
            "an expression that a record cannot hold; expected a symbol, number or function that "
            "torch's symbolic shapes use; found undefined.f (f). Rewrite it with the "
            "functions of sympy or torch.utils._sympy.functions.",
        ),
        (3, "not a sympy expression; expected sympy.Basic; found builtins.int"),
        (
            sympy.Basic.__new__(torch_functions.FloorDiv, S0),
            "a malformed application of FloorDiv; expected 2 arguments; found 1 argument",
        ),
    ],
    ids=["Dummy", "undefined function", "int", "arity"],
)
def test_what_has_no_record_is_refused_by_name(expr, message: str) -> None:
    """An expression outside the closed table names its class."""
    with pytest.raises(UnsupportedValueError) as info:
        encode_expr(expr)
    assert str(info.value) == message


X = SymbolNode("x", ())
GT = (X, IntNode(3), ApplyNode("Gt", (0, 1)))


@pytest.mark.parametrize(
    ("nodes", "kind", "message"),
    [
        (
            (),
            FormatError,
            "$.nodes: an expression without nodes; expected at least one node; found none",
        ),
        (
            (ApplyNode("Abs", (1,)), X),
            FormatError,
            "$.nodes[0]: a bad reference; expected the position of an earlier node; found 1",
        ),
        (
            (X, ApplyNode("Abs", (1,))),
            FormatError,
            "$.nodes[1]: a bad reference; expected the position of an earlier node; found 1",
        ),
        (
            (X, ApplyNode("Abs", (-1,))),
            FormatError,
            "$.nodes[1]: a bad reference; expected the position of an earlier node; found -1",
        ),
        (
            (X, ApplyNode("Abs", (False,))),
            FormatError,
            "$.nodes[1]: a bad reference; expected the position of an earlier node; found False",
        ),
        (
            (X, ApplyNode("FloorDiv", (0,))),
            FormatError,
            "$.nodes[1]: a malformed application of FloorDiv; expected 2 arguments; "
            "found 1 argument",
        ),
        (
            (X, ApplyNode("Add", (0,))),
            FormatError,
            "$.nodes[1]: a malformed application of Add; expected 2 to 1048576 arguments; "
            "found 1 argument",
        ),
        (
            (X, ApplyNode("eval", (0,))),
            UnknownNameError,
            "$.nodes[1]: an unknown function; expected a function of sympy or "
            "torch.utils._sympy.functions; found 'eval'. Read the file with the version that "
            "wrote it, or a later one.",
        ),
        (
            (SymbolNode("x", (("purple", True),)),),
            UnknownNameError,
            "$.nodes[0]: an unknown assumption; found 'purple'",
        ),
        (
            (SymbolNode("x", (("integer", 1),)),),
            FormatError,
            "$.nodes[0]: assumption 'integer' is not a boolean; expected true or false; found 1",
        ),
        (
            (SymbolNode("x", (("negative", True), ("positive", True))),),
            FormatError,
            "$.nodes[0]: assumptions contradict each other; expected consistent ones; "
            "found negative, positive",
        ),
        (
            (SymbolNode("x", (("real", True), ("integer", True))),),
            FormatError,
            "$.nodes[0]: assumptions out of order; expected sorted distinct names; "
            "found real, integer",
        ),
        (
            (SymbolNode("x", (("commutative", True),)),),
            FormatError,
            "$.nodes[0]: an assumption that holds by default; expected no 'commutative'; found true",
        ),
        (
            (SymbolNode("", ()),),
            FormatError,
            "$.nodes[0]: a symbol without a name; expected a printable text, not empty; found ''",
        ),
        (
            (SymbolNode("s\x1b[2J", ()),),
            FormatError,
            "$.nodes[0]: a symbol without a name; expected a printable text, not empty; "
            "found 's\\x1b[2J'",
        ),
        (
            (IntNode(True),),
            FormatError,
            "$.nodes[0]: an ill-typed number; expected an integer; found True",
        ),
        (
            (IntNode(1 << 65536),),
            FormatError,
            "$.nodes[0]: an integer too large; expected at most 65536 bits; found 65537 bits",
        ),
        (
            (RationalNode(2, 4),),
            FormatError,
            "$.nodes[0]: a malformed fraction; expected lowest terms, denominator above 1; "
            "found RationalNode(numerator=2, denominator=4)",
        ),
        (
            (RationalNode(1, 0),),
            FormatError,
            "$.nodes[0]: a malformed fraction; expected lowest terms, denominator above 1; "
            "found RationalNode(numerator=1, denominator=0)",
        ),
        (
            (FloatNode(2, 0, 53),),
            FormatError,
            "$.nodes[0]: a malformed float; expected an odd mantissa; "
            "found FloatNode(mantissa=2, exponent=0, precision=53)",
        ),
        (
            (FloatNode(1, 1 << 40, 53),),
            FormatError,
            "$.nodes[0]: a malformed float; expected an exponent within 1048576; "
            "found FloatNode(mantissa=1, exponent=1099511627776, precision=53)",
        ),
        (
            (FloatNode(7, 0, 2),),
            FormatError,
            "$.nodes[0]: a malformed float; expected a mantissa of no more bits than the "
            "precision; found FloatNode(mantissa=7, exponent=0, precision=2)",
        ),
        (
            (AtomNode("system"),),
            UnknownNameError,
            f"$.nodes[0]: an unknown constant; expected one of {', '.join(exprs._ATOMS)}; "
            "found 'system'",
        ),
        (
            (*GT, ApplyNode("Add", (0, 2))),
            FormatError,
            "$.nodes[3]: a malformed application of Add; expected a number; "
            "found sympy.core.relational.StrictGreaterThan",
        ),
        (
            (X, IntNode(3), ApplyNode("And", (0, 1))),
            FormatError,
            "$.nodes[2]: a malformed application of And; expected a condition; "
            "found sympy.core.numbers.Integer",
        ),
        (
            (*GT, ApplyNode("And", (2, 2))),
            FormatError,
            "$.nodes[3]: a malformed application of And; expected distinct arguments; "
            "found an argument twice",
        ),
        (
            (*GT, ApplyNode("Piecewise", (2,))),
            FormatError,
            "$.nodes[3]: a malformed application of Piecewise; expected ExprCondPair arguments; "
            "found sympy.core.relational.StrictGreaterThan",
        ),
        (
            (*GT, ApplyNode("ExprCondPair", (0, 2))),
            FormatError,
            "$.nodes[3]: not an expression; expected an expression; found ExprCondPair",
        ),
        (
            (*GT, ApplyNode("ExprCondPair", (0, 2)), ApplyNode("Abs", (3,))),
            FormatError,
            "$.nodes[4]: a malformed application of Abs; expected an expression; "
            "found ExprCondPair",
        ),
        (
            (X, X, ApplyNode("Abs", (1,))),
            FormatError,
            "$.nodes[1]: a node occurs twice; expected distinct nodes; "
            "found SymbolNode(name='x', assumptions=())",
        ),
        (
            (X, IntNode(3), ApplyNode("Abs", (0,))),
            FormatError,
            "$.nodes[1]: a node is never used; expected an argument of a later node; found none",
        ),
        (
            (X, ApplyNode("SingletonInt", (0,))),
            FormatError,
            "$.nodes[1]: a malformed SingletonInt; expected a value and a coefficient; "
            "found 1 argument",
        ),
    ],
)
def test_malformed_record_names_its_node(nodes, kind, message: str) -> None:
    """Every way in which a record can be wrong has its error with a path."""
    with pytest.raises(FormatError) as info:
        decode_expr(ExprDesc(nodes=nodes))
    assert type(info.value) is kind
    assert str(info.value) == message


# --- symbolic scalars ---------------------------------------------------------------------------


def backed(env: ShapeEnv, value: int, name: str = "x") -> torch.SymInt:
    """A backed symbolic int of the value."""
    from torch._dynamo.source import LocalSource

    symbol = env.create_symbol(value, LocalSource(name), DimDynamic.DYNAMIC)
    return env.create_symintnode(symbol, hint=value)


def test_symbolic_scalars_carry_kind_and_hint() -> None:
    """Ints, floats and bools keep their expression and value, and leave no guard."""
    env = ShapeEnv()
    s = backed(env, 7)
    expr = s.node.expr
    assert encode_sym(s * 2) == SymDesc(expr=encode_expr(2 * expr), kind="int", hint=14)
    assert encode_sym(torch.sym_float(s)) == SymDesc(
        expr=encode_expr(torch_functions.ToFloat(expr)), kind="float", hint=7.0
    )
    assert encode_sym(s > 3) == SymDesc(expr=encode_expr(expr > 3), kind="bool", hint=True)
    assert env.guards == []


def test_unbacked_scalar_has_no_hint() -> None:
    """An expression over unbacked symbols has no hint."""
    u = ShapeEnv().create_unbacked_symint()
    assert encode_sym(u + 1).hint is None


def test_replacements_are_applied() -> None:
    """The record has the expression as the environment sees it now."""
    env = ShapeEnv()
    a, b = backed(env, 7, "a"), backed(env, 7, "b")
    assert bool(a == b)
    assert encode_sym(a) == encode_sym(b)


def test_constants_are_plain_integers() -> None:
    """An integer stays one, and so does a symbolic int that became constant."""
    env = ShapeEnv()
    s = backed(env, 7)
    assert encode_int(5) == 5
    assert encode_int(s) == encode_sym(s)
    assert bool(s == 7)
    assert encode_int(s) == 7


def test_nested_int_is_refused() -> None:
    """A nested int has no record of its own."""
    nested = torch._C._get_nested_int(3, 1)
    with pytest.raises(UnsupportedValueError) as info:
        encode_sym(nested)
    assert str(info.value) == (
        "a nested int cannot be recorded; found j3. "
        "Pass the components of the jagged nested tensor instead."
    )


def test_plain_number_is_no_symbolic_scalar() -> None:
    """encode_sym wants a symbolic scalar."""
    with pytest.raises(UnsupportedValueError) as info:
        encode_sym(3)
    assert str(info.value) == (
        "not a symbolic scalar; expected SymInt, SymFloat or SymBool; found builtins.int"
    )
