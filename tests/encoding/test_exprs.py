"""Sympy expressions and their records."""

from __future__ import annotations

import inspect
import sys
import time

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

from torch_fakeify.encoding import exprs
from torch_fakeify.encoding.exprs import HEADS, decode_expr, encode_expr, encode_int, encode_sym
from torch_fakeify.errors import UnsupportedValueError
from torch_fakeify.records.tensor import (
    ApplyNode,
    AtomNode,
    ExprDesc,
    FloatNode,
    IntNode,
    SymbolNode,
    SymDesc,
)

S0, S1 = sympy.symbols("s0 s1", positive=True, integer=True)
U0 = sympy.Symbol("u0", integer=True)
ZF0 = sympy.Symbol("zf0", real=True)
P = sympy.Symbol("p")


def state_of(expr: sympy.Basic) -> dict[str, object]:
    """Return what an expression has beside its class and arguments."""
    state = dict(getattr(expr, "__dict__", {}))
    # It depends on how torch made a Max whether it has noted the symbols; noting them is right.
    state.pop("unique_summations_symbols", None)
    if isinstance(expr, sympy.Expr):
        state["is_commutative"] = expr.is_commutative
    return state


def check_round_trip(expr: sympy.Basic) -> None:
    """Check both laws for one expression, and that nothing else about it changed."""
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


def test_every_function_of_torch_is_in_the_table() -> None:
    """Every sympy class that ``torch.utils._sympy.functions`` defines has a head, by its public name."""
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
    assert set(torch_functions.__all__) <= set(HEADS)


@pytest.mark.parametrize("name", sorted(set(HEADS) - {"ExprCondPair"}))
def test_head_round_trips(name: str) -> None:
    """An unevaluated application of each function is decoded equal, of the same class and state."""
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
def test_atom_is_decoded_as_the_same_object(name: str) -> None:
    """Constants are singletons, and are decoded as the same object."""
    atom = exprs._ATOMS[name]
    assert encode_expr(atom) == ExprDesc(nodes=(AtomNode(name),))
    assert decode_expr(encode_expr(atom)) is atom


@pytest.mark.parametrize(
    "expr",
    [
        sympy.And(S0 > 3, S1 < 9, U0 >= 0),
        sympy.Or(sympy.Not(P), sympy.Eq(S0, S1)),
        sympy.Xor(S0 > 3, S1 > 4),
        sympy.ITE(S0 > 3, S1 > 4, U0 > 5),
        sympy.Piecewise((1, S0 > 3), (S1 / 2, U0 > 5), (0, True)),
        sympy.sqrt(S0) + sympy.exp(U0) * sympy.log(S1) / 3,
        sympy.Min(S0, 7) + sympy.Max(S1, U0) + sympy.Mod(U0, 7),
        torch_functions.Max(S0 + S1, U0 + P),
        torch_functions.Min(S0, U0, 7),
        torch_functions.FloorDiv(S0 * S1 + 3, 2 * U0),
        torch_functions.PythonMod(U0, S0) + torch_functions.Mod(S0, 8),
        torch_functions.ModularIndexing(S0, 3, S1),
        torch_functions.Where(S0 > 3, S1, U0),
        torch_functions.IntTrueDiv(S0, S1),
        torch_functions.TruncToInt(torch_functions.FloatTrueDiv(ZF0, sympy.Float(2.5))),
        torch_functions.OpaqueUnaryFn_sqrt(torch_functions.ToFloat(S0)),
        torch_functions.BitwiseFn_bitwise_and(U0, 7),
        torch_functions.LShift(U0, S1) + torch_functions.RShift(U0, 3),
        torch_functions.CeilDiv(S0, 8) + torch_functions.CleanDiv(S0, S1),
        torch_functions.Identity(S0 + 1),
        torch_functions.IsNonOverlappingAndDenseIndicator(S0, S1, S1, U0),
        sympy.Ne(S0, int_oo, evaluate=False),
        # unevaluated ones, which decoding does not simplify, reorder or merge
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
def test_expression_round_trips(expr: sympy.Basic) -> None:
    """What torch and sympy build has the same state once decoded, whether they evaluate it or not."""
    check_round_trip(expr)


# --- symbols ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SymT)
def test_symbol_of_every_kind_is_found_by_xreplace(kind: SymT) -> None:
    """A decoded symbol of any kind and assumptions equals the original for sympy."""
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
    """Symbols of one name with different assumptions stay different symbols."""
    expected = SymbolNode("s0", (("integer", True), ("positive", True)))
    assert encode_expr(S0).nodes == (expected,)
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
        SingletonInt(5, coeff=3),
    ],
    ids=str,
)
def test_every_digit_of_a_number_round_trips(value) -> None:
    """Floats have their mantissa and precision, integers and fractions their full size."""
    again = decode_expr(encode_expr(value))
    assert type(again) is type(value)
    assert again == value
    for name in ("_mpf_", "_prec", "_val", "_coeff"):
        assert getattr(again, name, None) == getattr(value, name, None)


def test_float_and_integer_of_one_value_stay_different() -> None:
    """``2`` and ``2.0`` in one expression are different nodes."""
    expr = torch_functions.FloatPow(ZF0, sympy.Float(2.0)) + 2
    assert IntNode(2) in encode_expr(expr).nodes
    assert FloatNode(1, 1, 53) in encode_expr(expr).nodes
    check_round_trip(expr)


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
    """Draw random expressions over the whole table that share sub-expressions."""
    pool: list[sympy.Basic] = [S0, draw(LEAVES), draw(LEAVES)]
    booleans: list[sympy.Basic] = [sympy.true, sympy.Gt(S0, 3)]
    names = sorted(set(HEADS) - {"ExprCondPair"})
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=12)):
        head = HEADS[name]
        source = booleans if head.domain == "bool" else pool
        count = draw(st.integers(head.low, min(head.high, head.low + 2)))
        args = draw(st.lists(st.sampled_from(source), min_size=count, max_size=count))
        if head.domain == "pieces":
            # Sympy rewrites a condition with a case distinction, and refuses one without a rest.
            plain = [each for each in booleans if not each.has(sympy.Piecewise)]
            conditions = draw(st.lists(st.sampled_from(plain), min_size=count, max_size=count))
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
    """``decode(encode(e)) == e`` and ``encode(decode(d)) == d`` hold over the whole table."""
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
    """Size arithmetic with the evaluation of torch and sympy round-trips."""
    assume(expr is not None)
    check_round_trip(expr)


def _maybe(function, *args: sympy.Basic) -> sympy.Basic:
    try:
        return function(*args)
    except ZeroDivisionError:
        return args[0]


def test_shared_sub_expressions_are_encoded_once() -> None:
    """``x = x*x + x`` sixty times is 121 nodes, not 2**60, and is encoded at once."""
    expr = U0
    for _ in range(60):
        expr = expr * expr + expr
    start = time.perf_counter()
    record = encode_expr(expr)
    again = decode_expr(record)
    assert encode_expr(again) == record
    assert len(record.nodes) <= 122
    assert time.perf_counter() - start < 5


def test_deep_expression_needs_no_python_stack() -> None:
    """Neither encoding nor decoding of a deep expression recurses."""
    expr, depth = S0, 5000
    for _ in range(depth):
        expr = exprs._apply(HEADS["Add"], [exprs._apply(HEADS["ToFloat"], [expr]), S1])
    record = encode_expr(expr)
    assert len(record.nodes) == 2 * depth + 2
    again = decode_expr(record)
    assert encode_expr(again) == record
    assert hash(again) == hash(expr)
    assert (again + 1).is_commutative


def test_a_deep_chain_of_functions_has_its_assumptions() -> None:
    """What sympy derives through the arguments is known for a deep decoded expression."""
    applied = tuple(ApplyNode("ToFloat", (i,)) for i in range(5000))
    assert decode_expr(ExprDesc(nodes=(SymbolNode("x", ()), *applied))).is_commutative


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
            sympy.Integer(1 << exprs.MAX_INT_BITS),
            "an integer too large for a record; expected at most 65536 bits; found 65537 bits",
        ),
        (
            sympy.Float(2.0) ** (1 << 21),
            "a float out of range; expected an exponent within 1048576; found FloatNode(mantissa=1, "
            "exponent=2097152, precision=53)",
        ),
        (
            sympy.Basic.__new__(torch_functions.FloorDiv, S0),
            "a malformed application of FloorDiv; expected 2 arguments; found 1 argument",
        ),
    ],
    ids=["Dummy", "undefined function", "int", "large int", "large float", "arity"],
)
def test_an_expression_without_a_record_is_refused(expr, message: str) -> None:
    """The error names the class that is outside the closed table."""
    with pytest.raises(UnsupportedValueError) as info:
        encode_expr(expr)
    assert str(info.value) == message


# --- symbolic scalars ---------------------------------------------------------------------------


def backed(env: ShapeEnv, value: int, name: str = "x") -> torch.SymInt:
    """Return a backed symbolic int with a value."""
    from torch._dynamo.source import LocalSource

    symbol = env.create_symbol(value, LocalSource(name), DimDynamic.DYNAMIC)
    return env.create_symintnode(symbol, hint=value)


def test_symbolic_scalars_carry_kind_and_hint() -> None:
    """Ints, floats and bools have their expression and value, and no guard is added."""
    env = ShapeEnv()
    s = backed(env, 7)
    expr = s.node.expr
    assert encode_sym(s * 2) == SymDesc(expr=encode_expr(2 * expr), kind="int", hint=14)
    assert encode_sym(torch.sym_float(s)) == SymDesc(
        expr=encode_expr(torch_functions.ToFloat(expr)), kind="float", hint=7.0
    )
    assert encode_sym(s > 3) == SymDesc(expr=encode_expr(expr > 3), kind="bool", hint=True)
    assert encode_sym(env.create_unbacked_symint() + 1).hint is None
    assert env.guards == []


def test_replacements_are_applied() -> None:
    """The record has the expression after the replacements of the environment."""
    env = ShapeEnv()
    a, b = backed(env, 7, "a"), backed(env, 7, "b")
    assert bool(a == b)
    assert encode_sym(a) == encode_sym(b)


def test_constants_are_plain_integers() -> None:
    """An integer is encoded as one, and so is a symbolic int that became constant."""
    env = ShapeEnv()
    s = backed(env, 7)
    assert encode_int(5) == 5
    assert encode_int(s) == encode_sym(s)
    assert bool(s == 7)
    assert encode_int(s) == 7


NO_SCALARS = {
    "a nested int cannot be recorded; found j3. Pass the components of the jagged nested tensor instead.": (
        torch._C._get_nested_int(3, 1)
    ),
    "not a symbolic scalar; expected SymInt, SymFloat or SymBool; found builtins.int": 3,
}


@pytest.mark.parametrize("message", NO_SCALARS)
def test_no_other_scalar_has_a_record(message: str) -> None:
    """`encode_sym` refuses nested ints and plain numbers."""
    with pytest.raises(UnsupportedValueError) as info:
        encode_sym(NO_SCALARS[message])
    assert str(info.value) == message
