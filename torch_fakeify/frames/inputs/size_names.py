"""Parsing of requested sizes such as ``x.size(0)=17``, ``s77=17``, ``L['x'].size()[0]=17``.

A size can be named by its symbol, by a source, or by the readable name that the tools print. The error
for an unknown name lists the names of the frame.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sympy

from torch_fakeify.encoding.exprs import decode_expr
from torch_fakeify.errors import CaptureError
from torch_fakeify.records.tensor import ExprDesc, SymbolNode, SymDesc
from torch_fakeify.render.readable_names import ReadableNames, readable_source
from torch_fakeify.render.text import clip

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch_fakeify.records.frame import CaptureDesc
    from torch_fakeify.records.shape_env import SymbolDesc

_NAME = 80
"""Largest number of characters of a name in an error."""
_LISTED = 40
"""Largest number of names in an error."""
_SHAPE = re.compile(r"(?:\.shape|\.size\(\))\[(\d+)\]")
_OPEN = {"[": "]", "(": ")", "{": "}"}


# --- text -----------------------------------------------------------------------------------------


def parse_sizes(text: str) -> dict[str, int]:
    """Parse ``NAME=N,...``, or read the JSON file of ``fuzz --save``.

    `requested_sizes` checks the names. A comma inside brackets or quotes belongs to the name.

    Raises:
        CaptureError: a part is not ``NAME=N``, a name has two values, or the file has no sizes.
    """
    if "=" not in text or _is_file(text):
        return _of_file(text)
    found: dict[str, int] = {}
    for part in _parts(text):
        name, _, number = (piece.strip() for piece in part.rpartition("="))
        try:
            value = int(number)
        except ValueError:
            value = None
        if not name or value is None:
            raise CaptureError(
                "a size is not NAME=N", expected=_EXAMPLE, found=part.strip() or text
            )
        if found.setdefault(name, value) != value:
            raise CaptureError("a size has two values", where=name, found=f"{found[name]}, {value}")
    return found


def sizes_text(desc: CaptureDesc, sizes: Mapping[str, int]) -> str:
    """Write sizes of symbols as `parse_sizes` reads them, by readable names where these are of one symbol."""
    words, names = ReadableNames(desc), size_names(desc)
    parts: list[str] = []
    for symbol, n in sizes.items():
        word = words.symbol(symbol)
        is_clear = [*map(str, names.get(word, ()))] == [symbol] and [*_parts(word)] == [word]
        parts.append(f"{word if is_clear else symbol}={n}")
    return ",".join(parts)


_EXAMPLE = "a name and an integer, as in x.size(0)=17"


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a path
        return False


def _of_file(path: str) -> dict[str, int]:
    try:
        saved = json.loads(Path(path).read_text(encoding="utf-8"))
        smallest = saved["smallest"]
        if smallest is None:
            raise CaptureError(
                "the file has no sizes that fail", where=path, fix="Write sizes as NAME=N"
            )
        found = smallest["sizes"]
        return {str(name): int(value) for name, value in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CaptureError(
            "neither NAME=N nor a file of `fuzz --save`", where=path, expected=_EXAMPLE
        ) from error


def _parts(text: str) -> Iterator[str]:
    """Split a text at the commas outside brackets and quotes."""
    closing: list[str] = []
    start = 0
    for at, c in enumerate(text):
        if closing and closing[-1] in "'\"":
            if c == closing[-1]:
                closing.pop()
        elif c in "'\"":
            closing.append(c)
        elif c in _OPEN:
            closing.append(_OPEN[c])
        elif closing and c == closing[-1]:
            closing.pop()
        elif c == "," and not closing:
            yield text[start:at]
            start = at + 1
    yield text[start:]


# --- a frame's names ------------------------------------------------------------------------------


@dataclass(frozen=True)
class RequestedSize:
    """A size and its requested value."""

    name: str
    """The name as the user wrote it."""
    expr: Any
    """A sympy symbol of the frame, an expression over its symbols, or a number."""
    value: int


def requested_sizes(desc: CaptureDesc, sizes: Mapping[str, int]) -> list[RequestedSize]:
    """Resolve names of sizes to symbols and expressions of a frame.

    A name is that of a symbol, else a readable name, else a source. So ``u1`` is torch's ``u1``, even
    if it is also the readable name of another symbol.

    Raises:
        CaptureError: the frame has no such name, the name is ambiguous, the size is static, or a
            value is not an integer.
    """
    if sizes and desc.shape_env is None:
        raise CaptureError(
            "the frame has no symbols, so it takes no sizes",
            found=", ".join(sorted(map(str, sizes))),
            fix="Record the frame with dynamic=True",
        )
    names = size_names(desc) if sizes else {}
    found: list[RequestedSize] = []
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise CaptureError("a size is not an integer", where=str(name), found=repr(value))
        # ``x.size(0)`` for ``x.shape[0]`` and ``L['x'].size()[0]``
        readable = readable_source(_SHAPE.sub(r".size(\1)", str(name).strip()))
        exprs = names.get(name) or names.get(readable)
        if exprs is None:
            raise _unknown(name, names)
        if len(exprs) > 1:
            raise CaptureError(
                "a name is ambiguous",
                where=name,
                found=", ".join(sorted(map(str, exprs))),
                fix="Use one of these",
            )
        (expr,) = exprs
        if expr.is_integer is False:
            raise CaptureError(
                "a number of the program is no size", where=name, found=f"the float {expr}"
            )
        if expr.is_Integer and int(expr) != value:
            raise CaptureError(
                "a size is the same at each call of the frame",
                where=name,
                expected=str(expr),
                found=str(value),
                fix="Record the frame with that dim dynamic",
            )
        found.append(RequestedSize(name, expr, value))
    return found


def _unknown(name: str, names: Mapping[str, list[Any]]) -> CaptureError:
    dynamic = [n for n, exprs in names.items() if any(e.free_symbols for e in exprs)]
    shown = [clip(n, _NAME) for n in dynamic[:_LISTED]]
    more = len(dynamic) - len(shown)
    listed = ", ".join(shown) + (f" and {more} more" if more > 0 else "")
    return CaptureError(
        "the frame has no such symbol",
        expected=f"one of {listed}" if listed else None,
        found=str(name),
        fix="`torch-fakeify show FILE` lists the symbols",
    )


def size_names(desc: CaptureDesc) -> dict[str, list[Any]]:
    """Map the names of a frame's sizes to their expressions.

    Names of symbols take precedence over readable names, and these over sources.
    """
    symbols: dict[str, list[Any]] = {}
    words: dict[str, list[Any]] = {}
    sources: dict[str, list[Any]] = {}
    printed = ReadableNames(desc)
    for record in desc.symbols:
        expr = symbol_of(record)
        _add(symbols, record.name, expr)
        _add(words, printed.symbol(record.name), expr)
        for source in record.sources:
            _add(sources, source.name, expr)
            _add(words, readable_source(source.name), expr)
    decode = functools.cache(decode_expr)
    for name, n in _dims(desc):
        if name in sources:
            continue  # the symbol itself, which may have a replacement
        expr: Any = decode(n.expr) if isinstance(n, SymDesc) else sympy.Integer(n)
        _add(sources, name, expr)
        _add(words, readable_source(name), expr)
    ordered = symbols | words | sources
    return ordered | words | symbols


def symbol_of(record: SymbolDesc) -> Any:
    """The sympy symbol of a `SymbolDesc`."""
    return decode_expr(ExprDesc(nodes=(SymbolNode(record.name, record.assumptions),)))


def _add(table: dict[str, list[Any]], name: str, expr: Any) -> None:
    exprs = table.setdefault(name, [])
    if expr not in exprs:
        exprs.append(expr)


def _dims(desc: CaptureDesc) -> Iterator[tuple[str, Any]]:
    """The sizes of the inputs by source and placeholder, and inputs that are symbols."""
    for entry in desc.inputs:
        names = [entry.name]
        if entry.source is not None:
            names.append(entry.source.name)
        for name in names:
            if entry.sym is not None and entry.sym.kind == "int":
                yield name, entry.sym
            for dim, n in enumerate(() if entry.tensor is None else entry.tensor.size):
                if isinstance(n, (int, SymDesc)):
                    yield f"{name}.size()[{dim}]", n
