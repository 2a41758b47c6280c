"""JSON as it is read: large texts piece by piece, with the answers that small ones get."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_fakeify import dumps, loads
from torch_fakeify.errors import FormatError, LimitError
from torch_fakeify.records.tensor import FloatValue, ListValue, TupleValue
from torch_fakeify.serialization import strict_json

TEXTS = st.text(st.sampled_from('ab"\\[]{}é\u20ac\U0001f600\n'), max_size=30)
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda part: st.lists(part, max_size=4) | st.dictionaries(TEXTS, part, max_size=4),
    max_leaves=20,
)


@pytest.fixture(params=[1, 2, 3, 7])
def piece(request, monkeypatch):
    """Texts are cut into pieces of so many bytes."""
    monkeypatch.setattr(strict_json, "_PIECE", request.param)
    return request.param


def outcome(data):
    """The error that a text is refused with, as text."""
    try:
        strict_json.check_text(data, "$")
    except (FormatError, LimitError) as error:
        return str(error)
    return None


@given(tree=TREES, escaped=st.booleans())
def test_pieces_change_nothing_for_text(tree, escaped):
    """Any JSON passes, with any quotes, escapes and brackets in its strings."""
    data = json.dumps(tree, ensure_ascii=escaped).encode()
    for size in (1, 2, 5):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(strict_json, "_PIECE", size)
            patch.setattr(strict_json, "MAX_DEPTH", 12)
            small = outcome(data)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(strict_json, "MAX_DEPTH", 12)
            assert outcome(data) == small


@pytest.mark.parametrize("data", [b"\xff", b"ab\xe2\x82", b"ab\xe2\x82x", b'{"a": "\xc3\xa9\xc3"}'])
def test_the_byte_that_is_not_utf8_is_named(piece, data):
    """The position in the whole text, also of a character that a piece ends inside of."""
    with pytest.raises(UnicodeDecodeError) as caught:
        data.decode()
    with pytest.raises(FormatError) as error:
        strict_json.check_text(data, "x")
    assert error.value.where == f"x byte {caught.value.start}"


@pytest.mark.parametrize(
    ("text", "deep"),
    [
        ("[" * 401, True),
        ('["' + "[" * 401 + '"]', False),
        ('["\\\\' + '"' + "[" * 401, True),
        ('["\\"' + "[" * 401 + '"]', False),
    ],
)
def test_depth_is_counted_outside_of_strings(piece, text, deep):
    """Also where an escape stands between two pieces."""
    assert (outcome(text.encode()) is not None) == deep


def test_large_texts_are_compared_part_by_part(piece, monkeypatch):
    """What is written as it is read needs no second look for keys that occur twice."""
    value = TupleValue(
        items=(*range(9), "é", FloatValue(text="inf"), ListValue(items=(), immutable=True), None)
    )
    data = dumps([value, {"a": 1, "b": (1.5, -0.0)}, ListValue(items=(value,) * 5)])
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("read a second time"))
    assert loads(data) == [value, {"a": 1, "b": (1.5, -0.0)}, ListValue(items=(value,) * 5)]


def test_keys_that_occur_twice_are_found_in_large_texts(piece):
    """At any depth, also in the last part."""
    data = dumps([TupleValue(items=(1, 2, 3, ListValue(items=(4,), immutable=True)))])
    for key in (b'"items":[4]', b'"immutable":true', b'"version":1'):
        assert data.count(key) == 1
        with pytest.raises(FormatError, match="twice"):
            loads(data.replace(key, key + b"," + key))
    assert loads(json.dumps(json.loads(data)).encode()) == loads(data)
    assert msgspec.json.decode(data)["version"] == 1
