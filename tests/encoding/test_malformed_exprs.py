"""Malformed records of expressions."""

from __future__ import annotations

import pytest

from torch_fakeify.encoding import exprs
from torch_fakeify.encoding.exprs import decode_expr
from torch_fakeify.errors import FormatError, UnknownNameError
from torch_fakeify.records.tensor import (
    ApplyNode,
    AtomNode,
    ExprDesc,
    FloatNode,
    IntNode,
    RationalNode,
    SymbolNode,
)

X = SymbolNode("x", ())
GT = (X, IntNode(3), ApplyNode("Gt", (0, 1)))

MALFORMED = {
    "$.nodes: an expression without nodes; expected at least one node; found none": (),
    "$.nodes[0]: a bad reference; expected the position of an earlier node; found 1": (
        ApplyNode("Abs", (1,)),
        X,
    ),
    "$.nodes[1]: a bad reference; expected the position of an earlier node; found 1": (
        X,
        ApplyNode("Abs", (1,)),
    ),
    "$.nodes[1]: a bad reference; expected the position of an earlier node; found -1": (
        X,
        ApplyNode("Abs", (-1,)),
    ),
    "$.nodes[1]: a bad reference; expected the position of an earlier node; found False": (
        X,
        ApplyNode("Abs", (False,)),
    ),
    "$.nodes[1]: a malformed application of FloorDiv; expected 2 arguments; found 1 argument": (
        X,
        ApplyNode("FloorDiv", (0,)),
    ),
    "$.nodes[1]: a malformed application of Add; expected 2 to 1048576 arguments; found 1 "
    "argument": (X, ApplyNode("Add", (0,))),
    "$.nodes[1]: an unknown function; expected a function of sympy or "
    "torch.utils._sympy.functions; found 'eval'. Read the file with the version that wrote "
    "it, or a later one.": (X, ApplyNode("eval", (0,))),
    "$.nodes[0]: an unknown assumption; found 'purple'": (SymbolNode("x", (("purple", True),)),),
    "$.nodes[0]: assumption 'integer' is not a boolean; expected true or false; found 1": (
        SymbolNode("x", (("integer", 1),)),
    ),
    "$.nodes[0]: assumptions contradict each other; expected consistent ones; found "
    "negative, positive": (SymbolNode("x", (("negative", True), ("positive", True))),),
    "$.nodes[0]: assumptions out of order; expected sorted distinct names; found real, integer": (
        SymbolNode("x", (("real", True), ("integer", True))),
    ),
    "$.nodes[0]: an assumption that holds by default; expected no 'commutative'; found true": (
        SymbolNode("x", (("commutative", True),)),
    ),
    "$.nodes[0]: a symbol without a name; expected a printable text, not empty; found ''": (
        SymbolNode("", ()),
    ),
    "$.nodes[0]: a symbol without a name; expected a printable text, not empty; found "
    "'s\\x1b[2J'": (SymbolNode("s\x1b[2J", ()),),
    "$.nodes[0]: an ill-typed number; expected an integer; found True": (IntNode(True),),
    "$.nodes[0]: an integer too large; expected at most 65536 bits; found 65537 bits": (
        IntNode(1 << 65536),
    ),
    "$.nodes[0]: a malformed fraction; expected lowest terms, denominator above 1; found "
    "RationalNode(numerator=2, denominator=4)": (RationalNode(2, 4),),
    "$.nodes[0]: a malformed fraction; expected lowest terms, denominator above 1; found "
    "RationalNode(numerator=1, denominator=0)": (RationalNode(1, 0),),
    "$.nodes[0]: a malformed float; expected an odd mantissa; found FloatNode(mantissa=2, "
    "exponent=0, precision=53)": (FloatNode(2, 0, 53),),
    "$.nodes[0]: a malformed float; expected an exponent within 1048576; found "
    "FloatNode(mantissa=1, exponent=1099511627776, precision=53)": (FloatNode(1, 1 << 40, 53),),
    "$.nodes[0]: a malformed float; expected a mantissa of no more bits than the precision;"
    " found FloatNode(mantissa=7, exponent=0, precision=2)": (FloatNode(7, 0, 2),),
    f"$.nodes[0]: an unknown constant; expected one of {', '.join(exprs._ATOMS)}; found 'system'": (
        AtomNode("system"),
    ),
    "$.nodes[3]: a malformed application of Add; expected a number; found "
    "sympy.core.relational.StrictGreaterThan": (*GT, ApplyNode("Add", (0, 2))),
    "$.nodes[2]: a malformed application of And; expected a condition; found "
    "sympy.core.numbers.Integer": (X, IntNode(3), ApplyNode("And", (0, 1))),
    "$.nodes[3]: a malformed application of And; expected distinct arguments; found an "
    "argument twice": (*GT, ApplyNode("And", (2, 2))),
    "$.nodes[3]: a malformed application of Piecewise; expected ExprCondPair arguments; "
    "found sympy.core.relational.StrictGreaterThan": (*GT, ApplyNode("Piecewise", (2,))),
    "$.nodes[3]: not an expression; expected an expression; found ExprCondPair": (
        *GT,
        ApplyNode("ExprCondPair", (0, 2)),
    ),
    "$.nodes[4]: a malformed application of Abs; expected an expression; found ExprCondPair": (
        *GT,
        ApplyNode("ExprCondPair", (0, 2)),
        ApplyNode("Abs", (3,)),
    ),
    "$.nodes[1]: a node occurs twice; expected distinct nodes; found SymbolNode(name='x', "
    "assumptions=())": (X, X, ApplyNode("Abs", (1,))),
    "$.nodes[1]: a node is never used; expected an argument of a later node; found none": (
        X,
        IntNode(3),
        ApplyNode("Abs", (0,)),
    ),
    "$.nodes[1]: a malformed SingletonInt; expected a value and a coefficient; found 1 argument": (
        X,
        ApplyNode("SingletonInt", (0,)),
    ),
}


@pytest.mark.parametrize("message", MALFORMED)
def test_malformed_record_names_its_node(message: str) -> None:
    """Each malformed record raises its error, with the path of the node."""
    with pytest.raises(FormatError) as info:
        decode_expr(ExprDesc(nodes=MALFORMED[message]))
    assert type(info.value) is (UnknownNameError if "an unknown" in message else FormatError)
    assert str(info.value) == message
