"""Strict JSON: UTF-8, bounded depth, no duplicate keys, no NaN.

msgspec parses and validates. What it accepts beyond that is refused here, and its errors become
``FormatError`` with the ``$.path``.
"""

from __future__ import annotations

import codecs
import json
import re
from itertools import accumulate, count
from operator import sub
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from torch_fakeify.errors import FormatError, LimitError

from .faults import Fault

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_DEPTH = 400
"""Most arrays and objects nested in one another."""

_PIECE = 1 << 20
_ROUNDS = 16
"""How often innermost brackets are removed before the rest is counted."""

_BRACKET_WEIGHTS = bytes((byte in b"[{") * 2 for byte in range(256))
"""2 for an opening and 0 for a closing bracket: sums of these less 1 are depths."""

_NEITHER = bytes(byte for byte in range(256) if byte not in b'[]{}"')
"""All bytes that are neither a bracket nor a quote."""


def check_text(data: bytes, where: str) -> int:
    """Return an upper bound of the nesting of a text; refuse a text that no parser should get.

    Linear in the size, however the text is nested: deep nesting overflows a recursive parser's stack.

    Raises:
        FormatError: not UTF-8.
        LimitError: nested too deep.
    """
    utf8, ascii_alone = codecs.getincrementaldecoder("utf-8")(), data.isascii()
    pieces: list[bytes] = []
    for start, piece in _pieces(data):
        try:
            if not ascii_alone:
                utf8.decode(piece, final=start + len(piece) == len(data))
        except UnicodeDecodeError as error:
            # An unfinished character of the piece before stands before this one.
            byte = start + len(piece) - len(error.object) + error.start
            raise FormatError("not UTF-8 text", where=f"{where} byte {byte}") from None
        # A backslash occurs in strings alone; without escapes every second piece is a string.
        text = piece.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in piece else piece
        # Two quotes in a row change nothing for what is between others.
        pieces.append(text.translate(None, _NEITHER).replace(b'""', b""))
    text = b"".join(pieces).replace(b'""', b"")
    brackets = b"".join(text.split(b'"')[::2])
    levels = 0
    while levels < _ROUNDS:
        shorter = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if len(shorter) == len(brackets):
            break
        brackets = shorter
        levels += 1
    # What remains has `levels` more inside; most texts have nothing left.
    ups = accumulate(brackets.translate(_BRACKET_WEIGHTS))
    depth = levels + max(map(sub, ups, count(1)), default=0)
    if depth > MAX_DEPTH:
        raise LimitError(f"JSON is nested deeper than {MAX_DEPTH} levels", where=where)
    return depth


def _pieces(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the position and bytes of pieces that do not end within an escape."""
    start = 0
    while start < len(data):
        end = min(start + _PIECE, len(data))
        while data[end - 1 : end] == b"\\" and end < len(data):
            end += 1
        yield start, data[start:end]
        start = end


def decode(
    decoder: msgspec.json.Decoder[Any],
    data: bytes | memoryview,
    where: str,
    *,
    whole: bool = True,
) -> Any:
    """Parse and validate text that ``check_text`` let pass.

    Args:
        decoder: for the type that is expected.
        data: the text.
        where: put before the path in an error.
        whole: whether the type has all fields of the text; if not, duplicate keys are not checked.

    Raises:
        FormatError: not JSON, ill-typed, or a key occurs twice in one object.
        LimitError: the interpreter's stack is too short.
    """
    try:
        found = parse(decoder, data)
        if whole and not _equal(msgspec.json.encode(found), data):
            found = None  # two trees of a large text would take twice the memory
            _refuse_duplicates(data)
            found = parse(decoder, data)
    except Fault as fault:
        raise fault.error(where, FormatError) from None
    except RecursionError:
        raise too_deep(where) from None
    return found


def parse(decoder: msgspec.json.Decoder[Any], data: bytes | memoryview) -> Any:
    """Parse and validate text; keys are not checked.

    Raises:
        Fault: not JSON, or ill-typed, or the decoder's hook raised it.
        RecursionError: the interpreter's stack is too short.
    """
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _fault_of(error) from None
    except msgspec.DecodeError as error:
        if "truncated" in str(error):
            raise Fault("the data is truncated") from None
        raise Fault("not valid JSON", found=str(error)) from None


def canonical_text(
    decoder: msgspec.json.Decoder[Any], data: bytes | memoryview
) -> bytes | memoryview:
    """Validate text, and return what msgspec writes for it, in which each key is in its place.

    Text of this package is that text already. Text that was edited by hand may have other blanks or
    another order of keys, but no key twice.

    Args:
        decoder: for a type that refuses unknown keys.
        data: the text.

    Raises:
        Fault: as `parse`, or a key occurs twice in one object.
        RecursionError: the interpreter's stack is too short.
    """
    written = msgspec.json.encode(parse(decoder, data))
    if _equal(written, data):
        return data
    _refuse_duplicates(data)
    return written


def _equal(text: bytes, data: bytes | memoryview) -> bool:
    """Compare two texts piece by piece: a view is compared one byte at a time."""
    view = memoryview(data)
    if len(text) != len(view):
        return False
    starts = range(0, len(text), _PIECE)
    return all(text[at : at + _PIECE] == bytes(view[at : at + _PIECE]) for at in starts)


def too_deep(where: str) -> LimitError:
    """Return the error for a ``RecursionError`` at a permitted depth."""
    return LimitError(
        "the interpreter's stack is too short for this nesting",
        where=where,
        fix="Call it from a shallower stack, or raise sys.setrecursionlimit",
    )


class _KeyTwice(NamedTuple):
    """Replaces an object that has a key twice."""

    key: str


def _refuse_duplicates(data: bytes | memoryview) -> None:
    twice: list[_KeyTwice] = []

    def unique(pairs: list[tuple[str, object]]) -> object:
        found = dict(pairs)
        if len(found) == len(pairs):
            return found
        keys = [key for key, _ in pairs]
        twice.append(_KeyTwice(next(key for key in keys if keys.count(key) > 1)))
        return twice[-1]

    try:
        tree = json.loads(bytes(data), object_pairs_hook=unique)
    except ValueError as error:
        raise Fault("not readable", found=str(error)) from None
    pending: list[tuple[str, Any]] = [("", tree)] if twice else []
    while pending:
        path, value = pending.pop()
        if type(value) is _KeyTwice:
            raise Fault(f"the key {value.key!r} occurs twice in one object").at(path)
        if type(value) is dict:
            pending += [(f"{path}.{key}", part) for key, part in value.items()]
        elif type(value) is list:
            pending += [(f"{path}[{i}]", part) for i, part in enumerate(value)]


def _fault_of(error: msgspec.ValidationError) -> Fault:
    """Return an error of msgspec with its path; that of a hook if one raised it."""
    text, _, path = str(error).rpartition(" - at `$")
    if not text:
        text, path = path, ""
    path = path.removesuffix("`")
    if isinstance(error.__cause__, Fault):
        return error.__cause__.at(path)
    typed = re.fullmatch(r"Expected `(.*)`, got `(.*)`", text)
    if typed:
        return Fault("a value has the wrong type", typed[1], typed[2]).at(path)
    bounded = re.fullmatch(r"Expected `(.*)` (.*)", text)
    if bounded:
        return Fault("a value is out of range", f"{bounded[1]} {bounded[2]}").at(path)
    return Fault(text[0].lower() + text[1:]).at(path)
