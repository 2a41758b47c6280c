"""Bytes that are no document, or exceed the limits, are refused with their path."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import pytest
from codec_records import X, chain_of_sources, nested_tuples, tensor
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_fakeify.errors import (
    FakeifyError,
    FormatError,
    LimitError,
    UnknownNameError,
    VersionError,
)
from torch_fakeify.records.tensor import (
    ExprDesc,
    IntNode,
    MetaStorageDesc,
)
from torch_fakeify.serialization import decoder, encoder
from torch_fakeify.serialization.document import dumps, loads
from torch_fakeify.serialization.format import MAX_CHAIN, MAX_NESTING
from torch_fakeify.serialization.strict_json import MAX_DEPTH

# --- bad bytes ------------------------------------------------------------------------------------


def document(**changes: Any) -> bytes:
    """The bytes of a small document with some members changed."""
    base = tensor(storage=MetaStorageDesc(id=0, nbytes=4))
    view = tensor(id=1, base=base, source=chain_of_sources(2))
    parts = json.loads(dumps([view, nested_tuples(2), ExprDesc(nodes=(X, IntNode(3)))]))
    return json.dumps({**parts, **changes}).encode()


TENSOR: dict[str, Any] = {"id": 0, "dtype": "f", "device": "cpu", "size": [], "stride": []}


def record(name: str, body: Any) -> dict[str, Any]:
    """A record in a tree."""
    return {"type": "record", "name": name, "body": body}


def no_row(table: str, found: int = 0, below: int = 0) -> str:
    """The error for a position in a table."""
    rows = f"a position below {below}" if below else "no position: there are no rows"
    return f"there is no such row of {table} yet; expected {rows}; found {found}"


VALUE = {"type": "tensor", "tensor": 0}
FIELDS = {"cls": "C", "name": "n", "fields": [["t", VALUE]]}
TWO_EQUAL = "an expression is empty or has two equal nodes"
NEWER = "a newer version of torch_fakeify wrote this; expected version 1 or older; found version 2"
OTHER = "not data of torch_fakeify; expected torch_fakeify.records; found 'zip'"


@pytest.mark.parametrize(
    ("part", "value", "text"),
    [
        ("tensors", [{**TENSOR, "base": 0}], f".tensors[0].base: {no_row('tensors')}"),
        ("sources", [FIELDS], f".sources[0].fields[0][1].tensor: {no_row('tensors')}"),
        ("nodes", [["a", "Neg", [0]]], f".nodes[0].args[0]: {no_row('nodes')}"),
        ("nodes", [["i", 3, 4]], None),
        ("nodes", [["i", 3], ["i", 3]], ".nodes: two expression nodes are equal"),
        ("exprs", [[0, 0]], f".exprs[0]: {TWO_EQUAL}"),
        ("exprs", [[]], f".exprs[0]: {TWO_EQUAL}"),
        ("exprs", [9], f".exprs[0]: {no_row('nodes', 9, 2)}"),
        ("stacks", [[0]], f".stacks[0]: {no_row('frames')}"),
        ("root", record("os.system", 0), ".root.name: no such record type; found 'os.system'"),
        (
            "root",
            {"type": "list", "items": [1, record("SourceDesc", [])]},
            ".root.items[1].body: a value has the wrong type; expected int; found array",
        ),
        (
            "root",
            record("TensorValue", {**VALUE, "tensor": 9}),
            f".root.body.tensor: {no_row('tensors', 9, 2)}",
        ),
        ("root", {"type": "dict", "items": [["a", 1], ["a", 2]]}, ".root: a key occurs twice"),
        ("version", 2, f": {NEWER}. Upgrade torch_fakeify"),
        ("version", 0, ": no such version; found 0"),
        ("format", "zip", f": {OTHER}"),
    ],
)
def test_ill_typed_bytes_name_the_path(part: str, value: Any, text: str | None) -> None:
    """Each kind of wrong content has its error, with where, expected and found."""
    kind = {"version": VersionError}.get(part, FormatError)
    kind = UnknownNameError if "os.system" in str(value) else kind
    with pytest.raises(kind) as error:
        loads(document(**{part: value}))
    assert type(error.value) is kind
    assert text is None or str(error.value) == f"${text}"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "found the data is truncated"),
        (b"{", "found the data is truncated"),
        (b"PK\x03\x04", "found not valid JSON"),
        (b'{"format":"torch_fakeify.records","version":1}', "the document has no root"),
        (document().replace(b'"id": 0', b'"id": NaN'), "not valid JSON"),
        (document().replace(b'"root"', b'"root": 1, "root"'), "the key 'root' occurs twice"),
    ],
)
def test_bytes_that_are_no_document(data: bytes, text: str) -> None:
    """What is not strict JSON of ours is refused."""
    with pytest.raises(FormatError) as error:
        loads(data)
    assert text in str(error.value)


VALID = document()


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_bytes_never_crash(data: st.DataObject) -> None:
    """Any truncation or change of bytes gives a good result or an error of the package."""
    raw = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        with_ = data.draw(
            st.sampled_from([b"", b"[", b"}", b"9", b'"', b"\x00", b"\xff", b"null", b"-1"])
        )
        raw[at : at + data.draw(st.sampled_from([0, 1, 5, len(raw)]))] = with_
        if not raw:
            break
    with contextlib.suppress(FakeifyError):
        loads(bytes(raw))


# --- limits ---------------------------------------------------------------------------------------


def test_chains_are_bounded_on_both_sides() -> None:
    """The longest chain that is written is read; one more is refused, without recursion."""
    longest = chain_of_sources(MAX_CHAIN)
    assert loads(dumps(longest)).name == longest.name
    with pytest.raises(LimitError):
        dumps(chain_of_sources(MAX_CHAIN + 1))
    with pytest.raises(LimitError):
        dumps(chain_of_sources(100_000))
    row = {"cls": "TypeSource", "name": "n"}
    rows = [row] + [{**row, "base": i} for i in range(MAX_CHAIN)]
    with pytest.raises(LimitError) as error:
        loads(document(sources=rows))
    assert str(error.value) == "$.sources[250]: more than 250 rows in a chain"


def test_chains_through_several_fields_cost_their_length() -> None:
    """Diamonds of base and grad are walked once each, not once a path."""
    t = tensor()
    for i in range(1, 60):
        t = tensor(id=i, base=t, grad=t)
    back = loads(dumps(t))
    assert back.base is back.grad


def test_nesting_is_bounded_on_both_sides() -> None:
    """Values inside values: the deepest that is written is read, one more is refused.

    The bound on JSON leaves room for the deepest value that is written.
    """
    assert MAX_DEPTH >= 3 * MAX_NESTING
    deepest = nested_tuples(MAX_NESTING)
    assert loads(dumps(deepest)) == deepest
    with pytest.raises(LimitError) as error:
        dumps(nested_tuples(MAX_NESTING + 1))
    assert "records are nested deeper than 100 levels" in str(error.value)
    text = '{"type":"list","items":[' * 130 + "]}" * 130
    body = document(root={"type": "record", "name": "ListValue", "body": json.loads(text)})
    with pytest.raises(LimitError):
        loads(body)
    tree: Any = []
    for _ in range(MAX_NESTING):
        tree = [tree]
    with pytest.raises(LimitError):
        dumps(tree)


def test_expressions_cannot_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many expressions over one long pool are bounded by what they would weigh."""
    for module in (decoder, encoder):
        monkeypatch.setattr(module, "MAX_EXPR_NODES", 1000)
    nodes: list[Any] = [["i", 0]] + [["a", "Neg", [i]] for i in range(100)]
    with pytest.raises(LimitError, match="expressions have more than 1000 nodes"):
        loads(document(nodes=nodes, exprs=[100] * 11))
    exprs = loads(dumps([ExprDesc(nodes=(X,))] * 2000))
    assert len(exprs) == 2000


def test_a_short_stack_is_a_clear_error() -> None:
    """Near the interpreter's recursion limit both sides work, or name a remedy."""
    value = nested_tuples(90)
    data = dumps(value)

    def deeper(left: int, call: Any) -> Any:
        return call() if left == 0 else deeper(left - 1, call)

    def outcome(call: Any, frames: int) -> Any:
        used = len(__import__("inspect").stack())
        try:
            return deeper(sys.getrecursionlimit() - used - frames, call)
        except LimitError as error:
            return str(error)

    for call, expected in ((lambda: dumps(value), data), (lambda: loads(data), value)):
        found = [outcome(call, frames) for frames in (60, 90, 120, 400)]
        errors = [one for one in found if one != expected]
        # As of Python 3.12 the frames of C code are not counted.
        assert errors or sys.version_info >= (3, 12)
        assert all("the interpreter's stack is too short" in error for error in errors)
        assert found[-1] == expected
