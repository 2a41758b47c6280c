"""``rename_symbols``: records over other symbols."""

from __future__ import annotations

import msgspec
from torch._dynamo.source import LocalSource

from torch_fakeify.encoding.sources import encode_source
from torch_fakeify.records.frame import InputDesc
from torch_fakeify.records.symbol_names import rename_symbols
from torch_fakeify.records.tensor import (
    ApplyNode,
    ExprDesc,
    IntNode,
    NestedIntDesc,
    SymbolFactDesc,
    SymbolNode,
    SymDesc,
)

A, B, C = (SymbolNode(name, (("integer", True),)) for name in "abc")
EXCHANGE = {A: B, B: A}
DIFFERENCE = ExprDesc(nodes=(A, B, ApplyNode("PythonMod", (0, 1))))


def test_symbols_are_renamed_all_at_once() -> None:
    """A symbol that gets the name of another one is not renamed a second time."""
    assert rename_symbols(DIFFERENCE, EXCHANGE) == ExprDesc(
        nodes=(B, A, ApplyNode("PythonMod", (0, 1)))
    )
    assert rename_symbols(rename_symbols(DIFFERENCE, EXCHANGE), EXCHANGE) == DIFFERENCE


def test_every_depth_of_a_record_is_renamed() -> None:
    """Fields, tuples, named tuples and facts that contain a symbol are renamed."""
    sym = SymDesc(expr=DIFFERENCE, kind="int", hint=NestedIntDesc(3, 1))
    fact = SymbolFactDesc(name="a", shape_env=0)
    renamed_sym, renamed_fact = rename_symbols((InputDesc(name="x", sym=sym), fact), EXCHANGE)
    assert renamed_sym == InputDesc(
        name="x", sym=msgspec.structs.replace(sym, expr=rename_symbols(DIFFERENCE, EXCHANGE))
    )
    assert renamed_fact == SymbolFactDesc(name="b", shape_env=0)


def test_a_shared_part_stays_shared() -> None:
    """Converters identify parts of records by identity."""
    sym = SymDesc(expr=DIFFERENCE, kind="int", hint=5)
    first, second = rename_symbols(
        (InputDesc(name="x", sym=sym), InputDesc(name="y", sym=sym)), EXCHANGE
    )
    assert first.sym is second.sym
    assert first.sym is not sym


def test_a_record_without_the_symbols_is_returned_unchanged() -> None:
    """A source whose text looks like a symbol is not renamed."""
    source = encode_source(LocalSource("a"))
    other = InputDesc(name="a", value="a", source=source)
    record = (other, ExprDesc(nodes=(C, IntNode(1), ApplyNode("Eq", (0, 1)))))
    assert rename_symbols(record, EXCHANGE) is record
    assert rename_symbols(record, {A: A}) is record
