"""``rename_symbols``: records over other symbols."""

from __future__ import annotations

import msgspec
from torch._dynamo.source import LocalSource

from torch_fakeify.desc import (
    ApplyNode,
    ExprDesc,
    IntNode,
    NestedIntDesc,
    SymbolFactDesc,
    SymbolNode,
    SymDesc,
)
from torch_fakeify.desc_frame import InputDesc
from torch_fakeify.renaming import rename_symbols
from torch_fakeify.sources import encode_source

A, B, C = (SymbolNode(name, (("integer", True),)) for name in "abc")
SWAP = {A: B, B: A}
DIFFERENCE = ExprDesc(nodes=(A, B, ApplyNode("PythonMod", (0, 1))))


def test_symbols_are_renamed_all_at_once() -> None:
    """A symbol that gets the name of another is not taken for it."""
    assert rename_symbols(DIFFERENCE, SWAP) == ExprDesc(
        nodes=(B, A, ApplyNode("PythonMod", (0, 1)))
    )
    assert rename_symbols(rename_symbols(DIFFERENCE, SWAP), SWAP) == DIFFERENCE


def test_every_depth_of_a_record_is_reached() -> None:
    """Fields, tuples and named tuples, and the facts that name a symbol."""
    sym = SymDesc(expr=DIFFERENCE, kind="int", hint=NestedIntDesc(3, 1))
    fact = SymbolFactDesc(name="a", shape_env=0)
    renamed_sym, renamed_fact = rename_symbols((InputDesc(name="x", sym=sym), fact), SWAP)
    assert renamed_sym == InputDesc(
        name="x", sym=msgspec.structs.replace(sym, expr=rename_symbols(DIFFERENCE, SWAP))
    )
    assert renamed_fact == SymbolFactDesc(name="b", shape_env=0)


def test_what_is_one_object_stays_one() -> None:
    """Converters know parts of records by their identity."""
    sym = SymDesc(expr=DIFFERENCE, kind="int", hint=5)
    first, second = rename_symbols(
        (InputDesc(name="x", sym=sym), InputDesc(name="y", sym=sym)), SWAP
    )
    assert first.sym is second.sym
    assert first.sym is not sym


def test_what_names_no_symbol_stays_the_object_it_is() -> None:
    """Also a source, whose text may look like a symbol, and the record if no name changes."""
    source = encode_source(LocalSource("a"))
    other = InputDesc(name="a", value="a", source=source)
    record = (other, ExprDesc(nodes=(C, IntNode(1), ApplyNode("Eq", (0, 1)))))
    assert rename_symbols(record, SWAP) is record
    assert rename_symbols(record, {A: A}) is record
