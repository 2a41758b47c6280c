"""JSON as this package reads it: strict UTF-8, bounded depth, no duplicate keys, no NaN.

msgspec parses and validates; what it lets pass is refused here, and what it reports becomes a
``FormatError`` with the ``$.path``.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from itertools import accumulate, count
from operator import sub
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from .errors import FormatError, LimitError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["MAX_DEPTH", "check_text", "decode", "is_canonical", "too_deep"]

MAX_DEPTH = 400
"""Arrays and objects inside one another."""

_PIECE = 1 << 20
_ITEMS = 64
"""How many items of a tuple are compared at once."""

_ROUNDS = 16
"""How often the innermost brackets are taken out, before those that are left are counted."""

_STEPS = bytes((byte in b"[{") * 2 for byte in range(256))
"""2 for what opens and 0 for what closes: less 1 each, the sums are the depths."""

_NEITHER = bytes(byte for byte in range(256) if byte not in b'[]{}"')
"""What is neither a bracket nor a quote."""


def check_text(data: bytes, where: str) -> int:
    """Refuse what is not UTF-8, and what would overflow the C stack of a recursive parser.

    Linear in the size, however the text is nested. Returns how many arrays and objects are inside
    one another, or more.

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
    ups = accumulate(brackets.translate(_STEPS))
    depth = levels + max(map(sub, ups, count(1)), default=0)
    if depth > MAX_DEPTH:
        raise LimitError(f"JSON is nested deeper than {MAX_DEPTH} levels", where=where)
    return depth


def _pieces(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The text in pieces that do not end inside of an escape, each with its position."""
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
    strict: Callable[[], msgspec.json.Decoder[Any]] | None = None,
) -> Any:
    """Parse and validate text that ``check_text`` let pass.

    Args:
        decoder: for the type that is expected.
        data: the text.
        where: put before the path in an error.
        whole: whether the type has all of the text; where it has only a part of it, duplicate
            keys are not looked for.
        strict: gives the decoder that refuses what ``decoder`` would pass over, if it would.

    Raises:
        FormatError: not JSON, ill-typed, or a key occurs twice in one object.
        LimitError: the interpreter's stack is too short.
    """
    try:
        found = decoder.decode(data)
        if whole and not is_canonical(found, data):
            # Not as we write it, perhaps edited. That is fine, but other keys and duplicates are not.
            found = None  # two trees of a large text would take twice the memory
            if strict is not None:
                strict().decode(data)
            json.loads(bytes(data), object_pairs_hook=functools.partial(_refuse_duplicates, where))
            found = decoder.decode(data)
    except msgspec.ValidationError as error:
        _raise_invalid(str(error), where)
    except msgspec.DecodeError as error:
        if "truncated" in str(error):
            raise FormatError("the data is truncated", where=where) from None
        raise FormatError("not valid JSON", where=where, found=str(error)) from None
    except RecursionError:
        raise too_deep(where) from None
    except FormatError:
        raise
    except ValueError as error:
        raise FormatError("not readable", where=where, found=str(error)) from None
    return found


def is_canonical(found: Any, data: bytes | memoryview) -> bool:
    """Whether the text is what this package writes for what was found in it.

    Large texts are compared part by part: a second copy of the whole is never made.
    """
    if len(data) < _PIECE:
        return msgspec.json.encode(found) == bytes(data)  # a view is compared byte by byte
    text = memoryview(data)
    end = 0
    for part in _parts(found):
        if bytes(text[end : end + len(part)]) != part:
            return False
        end += len(part)
    return end == len(text)


def _parts(found: Any) -> Iterator[bytes]:
    """What msgspec writes for an object: tuples some items at a time, structs field by field."""
    if isinstance(found, msgspec.Raw):
        raw = memoryview(found)
        for start in range(0, len(raw), _PIECE):
            yield bytes(raw[start : start + _PIECE])
    elif type(found) is tuple and len(found) > _ITEMS:
        for start in range(0, len(found), _ITEMS):
            items = msgspec.json.encode(found[start : start + _ITEMS])
            yield (b"," if start else b"[") + items[1:-1]
        yield b"]"
    elif isinstance(found, msgspec.Struct) and not found.__struct_config__.array_like:
        yield from _struct_parts(found)
    else:
        yield msgspec.json.encode(found)


def _struct_parts(found: msgspec.Struct) -> Iterator[bytes]:
    config = found.__struct_config__
    start = b"{"
    if config.tag is not None:
        yield b"{%b:%b" % (msgspec.json.encode(config.tag_field), msgspec.json.encode(config.tag))
        start = b","
    for field in msgspec.structs.fields(found):
        value = getattr(found, field.name)
        if value is msgspec.UNSET or (config.omit_defaults and value is field.default):
            continue
        yield b"%b%b:" % (start, msgspec.json.encode(field.encode_name))
        yield from _parts(value)
        start = b","
    yield b"{}" if start == b"{" else b"}"


def too_deep(where: str) -> LimitError:
    """The error for a ``RecursionError`` below the bounds on depth."""
    return LimitError(
        "the interpreter's stack is too short for this nesting",
        where=where,
        fix="Call it from a shallower stack, or raise sys.setrecursionlimit",
    )


def _refuse_duplicates(where: str, pairs: list[tuple[str, object]]) -> None:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise FormatError(f"the key {twice!r} occurs twice in one object", where=where)


def _raise_invalid(message: str, where: str) -> NoReturn:
    text, _, path = message.partition(" - at `$")
    where = f"{where}{path.removesuffix('`')}"
    typed = re.fullmatch(r"Expected `(.*)`, got `(.*)`", text)
    if typed:
        raise FormatError(
            "a value has the wrong type", where=where, expected=typed[1], found=typed[2]
        )
    bounded = re.fullmatch(r"Expected `(.*)` (.*)", text)
    if bounded:
        raise FormatError(
            "a value is out of range", where=where, expected=f"{bounded[1]} {bounded[2]}"
        )
    raise FormatError(text[0].lower() + text[1:], where=where)
