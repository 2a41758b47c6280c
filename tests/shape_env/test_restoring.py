"""Errors of ``snapshot`` and ``restore``, and the stacks and locations of a restored ``ShapeEnv``."""

from __future__ import annotations

import traceback

import pytest
import sympy
from full_env import S0, used
from torch._guards import SLoc
from torch.fx.experimental.symbolic_shapes import (
    ShapeEnv,
)
from torch.utils._sympy.singleton_int import SingletonInt
from torch.utils._sympy.value_ranges import ValueRanges
from torch.utils._traceback import CapturedTraceback

from torch_fakeify.encoding.exprs import encode_expr
from torch_fakeify.encoding.stacks import (
    decode_location,
    decode_stack,
    encode_location,
    encode_stack,
)
from torch_fakeify.errors import FormatError, ShapeEnvError, UnknownNameError
from torch_fakeify.records.shape_env import (
    OrderDesc,
    ShapeEnvDesc,
    SymbolDesc,
)
from torch_fakeify.records.tensor import (
    ApplyNode,
    ExprDesc,
    FrameDesc,
    IntNode,
    StackDesc,
    SymbolNode,
)
from torch_fakeify.shape_env.restoring import restore
from torch_fakeify.shape_env.snapshot import snapshot

# --- what is refused --------------------------------------------------------------------------------


def test_an_unknown_attribute_is_refused() -> None:
    """State that the table does not have is not dropped, and the error names it."""
    env = ShapeEnv()
    env.new_in_some_torch = {}
    with pytest.raises(ShapeEnvError) as info:
        snapshot(env)
    assert str(info.value) == (
        "the ShapeEnv has an attribute that a snapshot does not support; expected the attributes of "
        "torch's ShapeEnv; found new_in_some_torch. Remove the attribute, or use a version "
        "of torch_fakeify for this torch."
    )


def test_an_entry_of_a_wrong_type_is_refused() -> None:
    """The error names an entry that torch never makes."""
    env = ShapeEnv()
    env.exclusion_constraints.append((S0, "7"))
    with pytest.raises(ShapeEnvError) as info:
        snapshot(env)
    assert str(info.value) == (
        "an entry of `exclusion_constraints` that a snapshot does not support; expected int; "
        "found str '7'"
    )
    env = ShapeEnv()
    env.var_to_range[S0 + 1] = ValueRanges(0, 1)
    with pytest.raises(ShapeEnvError) as info:
        snapshot(env)
    assert str(info.value) == (
        "an entry of the ShapeEnv is not about a symbol; expected a sympy.Symbol; found s0 + 1"
    )


SETTINGS = snapshot(ShapeEnv()).settings


ONE, THREE = ExprDesc(nodes=(IntNode(1),)), ExprDesc(nodes=(IntNode(3),))


X = ExprDesc(nodes=(SymbolNode("x", ()),))


BAD = ExprDesc(nodes=(SymbolNode("x", ()), ApplyNode("system", (0,))))


def nested(number: int, coeff: sympy.Basic | int) -> ExprDesc:
    """Return the record of a nested int."""
    return encode_expr(SingletonInt(number, coeff=coeff))


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        (
            {"symbols": (SymbolDesc(name="x"), SymbolDesc(name="x"))},
            FormatError,
            "$.symbols[1]: a symbol occurs twice; expected distinct symbols; found x",
        ),
        (
            {"symbols": (SymbolDesc(name="x", lower=THREE, upper=ONE),)},
            FormatError,
            "$.symbols[0]: not a value range; expected lower <= upper; found [3, 1]",
        ),
        (
            {"symbols": (SymbolDesc(name="x", lower=ONE),)},
            FormatError,
            "$.symbols[0].upper: a value is missing; expected one, since the symbol is a key; "
            "found none",
        ),
        (
            {"symbols": (SymbolDesc(name="x", hint=X),)},
            FormatError,
            "$.symbols[0].hint: not a number; expected a number; found Symbol",
        ),
        (
            {"axioms": ((X, BAD),)},
            UnknownNameError,
            "$.axioms[0][1].nodes[1]: an unknown function; expected a function of sympy or "
            "torch.utils._sympy.functions; found 'system'. Read the file with the version that "
            "wrote it, or a later one.",
        ),
        (
            {"source_to_var": (("L['x']", BAD),)},
            UnknownNameError,
            "$.source_to_var[0][1].nodes[1]: an unknown function; expected a function of sympy or "
            "torch.utils._sympy.functions; found 'system'. Read the file with the version that "
            "wrote it, or a later one.",
        ),
        (
            {"duck_shapes": ((ONE, ONE),)},
            FormatError,
            "$.duck_shapes[0][1]: not a symbol; expected a symbol; found One",
        ),
        (
            {"duck_shapes": ((nested(1 << 70, 1), X),)},
            FormatError,
            "$.duck_shapes[0][0]: not a size; expected a nested int of torch's; found 71 bits",
        ),
        (
            {"duck_shapes": ((nested(3, sympy.Symbol("x")), X),)},
            FormatError,
            "$.duck_shapes[0][0]: not a size; expected a nested int times a number; found times x",
        ),
        (
            {"orders": (OrderDesc(table="var_to_range", keys=(X,)),)},
            FormatError,
            "$.orders[0].keys: not keys of symbols; expected symbols of this record, each once; "
            "found var_to_range",
        ),
        (
            {
                "symbols": (SymbolDesc(name="x", guard_count=1),),
                "orders": (OrderDesc(table="symbol_guard_counter", keys=()),),
            },
            FormatError,
            "$.orders[0].keys: keys are missing; expected every symbol that has a value; "
            "found symbol_guard_counter",
        ),
        (
            {
                "symbols": (SymbolDesc(name="x"),),
                "orders": (OrderDesc(table="symbol_guard_counter", keys=(X,)),),
            },
            FormatError,
            "$.symbols[0].guard_count: a value is missing; expected one, since the symbol is a "
            "key; found none",
        ),
    ],
)
def test_a_malformed_record_is_refused_with_its_path(fields, kind, message: str) -> None:
    """A record that contradicts itself is refused, and the error contains the path."""
    with pytest.raises(FormatError) as info:
        restore(ShapeEnvDesc(settings=SETTINGS, **fields))
    assert type(info.value) is kind
    assert str(info.value) == message


# --- stacks -----------------------------------------------------------------------------------------


def test_a_stack_round_trips() -> None:
    """Summary, formatted text and line of code are equal, and cleanup removes them."""
    stack = CapturedTraceback.extract()
    expected = stack.format()
    record = encode_stack(stack)
    assert record.frames[-1].code == "stack = CapturedTraceback.extract()"
    again = decode_stack(record)
    assert isinstance(again, CapturedTraceback)
    assert again.format() == expected
    assert again.summary() == stack.summary()
    assert encode_stack(again) == record
    assert encode_stack(again.summary()) == record
    again.cleanup()
    stack.cleanup()
    assert again.format() == stack.format() == []
    assert encode_stack(again) == encode_stack(stack)
    assert encode_stack(None) is decode_stack(None) is None


def test_a_restored_stack_does_not_read_files() -> None:
    """The line of code is the recorded one, although the file has another one."""
    frame = FrameDesc(file=__file__, line=1, function="f", code="recorded = True")
    (entry,) = decode_stack(StackDesc(frames=(frame,))).format()
    assert entry == f'  File "{__file__}", line 1, in f\n    recorded = True\n'


@pytest.mark.parametrize(
    "location",
    [
        SLoc(None, None),
        SLoc("reason of the framework", None),
        SLoc(traceback.FrameSummary("/a/b.py", 3, "g"), "y = x + 1  # m.py:7 in f"),
        SLoc(None, "None  # m.py:7 in f"),
        SLoc(None, "x  # y  # m.py:007 in f"),
        SLoc(None, "no location at all"),
        SLoc(None, "a  # b  # dir # x/m.py:7 in f in g"),
    ],
    ids=repr,
)
def test_a_location_prints_the_same(location: SLoc) -> None:
    """Every kind of SLoc has the same text after a round trip."""
    record = encode_location(location)
    again = decode_location(record)
    assert str(again) == str(location)
    assert again.maybe_user_loc == location.maybe_user_loc
    assert encode_location(again) == record


def test_a_location_has_the_users_frame() -> None:
    """The user's frame is a frame in the record, not only text."""
    frame = encode_location(SLoc(None, "y = x + 1  # m.py:7 in f")).user.frames[0]
    assert (frame.file, frame.line, frame.function, frame.code) == ("m.py", 7, "f", "y = x + 1")


def test_equal_parts_are_one_object_in_the_record() -> None:
    """The record shares expressions, stacks and locations that the environment shares."""
    env = ShapeEnv()
    env.create_unbacked_symint()
    (symbol,) = snapshot(env).symbols
    assert symbol.lower_location is symbol.upper_location
    record = snapshot(used(env))
    found: dict[ExprDesc, int] = {}
    for key, value in record.axioms:
        for expr in (key, value):
            assert found.setdefault(expr, id(expr)) == id(expr)
