"""A frame as Python users look at it: its inputs, symbols and guards by name, as text and for a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .code import code_lines
from .notebook import folded, html_block, html_table
from .readable_names import ReadableNames, readable_name
from .show import (
    failure_lines,
    heading_rows,
    hint_text,
    input_text,
    location_text,
    range_text,
    table_lines,
)
from .text import clip, count_text, escape, expr_text, result_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch_fakeify.records.frame import CaptureDesc
    from torch_fakeify.records.tensor import MetaTensorDesc

_WIDEST = 400
"""Most characters of a cell."""


@dataclass(frozen=True)
class FrameInput:
    """An input of a frame."""

    name: str
    """Its name in the program, such as ``self.fc.weight``; that of the placeholder if it has no source."""
    kind: str
    """What it is, in one line, such as ``float32 [4, 8]``."""
    placeholder: str
    """The name of its placeholder."""
    tensor: MetaTensorDesc | None
    """The record of a tensor; ``None`` for a scalar or a constant."""

    def __repr__(self) -> str:
        return f"<input {escape(self.name)}: {escape(self.kind)}>"


@dataclass(frozen=True)
class FrameSymbol:
    """A symbol of a frame."""

    name: str
    """The size that it stands for, such as ``x.size(0)``; ``u0`` and so on for one that comes from data."""
    symbol: str
    """Torch's name of it, such as ``s77``."""
    hint: str
    """``hint 4``, or ``unbacked``."""
    range: str
    """Its value range, both ends inclusive."""

    def __repr__(self) -> str:
        words = escape(f"{self.name} = {self.symbol}, {self.hint}, in {self.range}")
        return f"<symbol {words}>"


@dataclass(frozen=True)
class FrameGuard:
    """A guard of a frame."""

    condition: str
    """In names of the program, such as ``x.size(0) > 3``."""
    expr: str
    """In torch's symbols, such as ``s77 > 3``."""
    line: str
    """The user's line that it comes from, else torch's; empty if none is on record."""

    def __repr__(self) -> str:
        place = f", from {escape(self.line)}" if self.line else ""
        return f"<guard {escape(self.condition)}{place}>"


def frame_inputs(desc: CaptureDesc) -> tuple[FrameInput, ...]:
    """Return the inputs in the order of the placeholders."""
    return tuple(
        FrameInput(
            readable_name(entry),
            clip(input_text(entry), _WIDEST),
            entry.name,
            entry.tensor,
        )
        for entry in desc.inputs
    )


def frame_symbols(desc: CaptureDesc) -> tuple[FrameSymbol, ...]:
    """Return the symbols of the shape environment; none without one."""
    words = ReadableNames(desc, _WIDEST)
    return tuple(
        FrameSymbol(words.symbol(s.name), s.name, hint_text(s), range_text(s)) for s in desc.symbols
    )


def frame_guards(desc: CaptureDesc) -> tuple[FrameGuard, ...]:
    """Return the guards of the shape environment; none without one."""
    words = ReadableNames(desc, _WIDEST)
    return tuple(
        FrameGuard(words.expr(g.expr), expr_text(g.expr), location_text(g.location))
        for g in desc.guards
    )


def frame_summary(desc: CaptureDesc) -> str:
    """Return a frame in a few words, on one line."""
    counts = (
        (len(desc.graph.nodes), "node"),
        (len(desc.inputs), "input"),
        (len(desc.guards), "guard"),
    )
    texts = ", ".join(count_text(*each) for each in counts)
    return f"{escape(clip(desc.frame or 'frame', 80))}: {texts}"


def frame_lines(desc: CaptureDesc) -> list[str]:
    """Return what ``print`` shows of a capture: code, inputs, symbols, guards and failure; safe to print."""
    message = "" if desc.failure is None else desc.failure.message.strip().partition("\n")[0]
    result = clip(": ".join(filter(None, [result_text(desc), message])), _WIDEST)
    lines = [f"Capture of {frame_summary(desc)}", result, ""]
    lines += code_lines(desc.graph, _function(desc))
    for title, rows in _tables(desc):
        lines += ["", f"{title}:", *(f"    {line}" for line in table_lines(rows))]
    if desc.failure is not None:
        lines += ["", *failure_lines(desc.failure)]
    return [escape(line.rstrip(" ")) for line in lines]


def frame_html(desc: CaptureDesc) -> str:
    """Return a capture for a notebook: what it is and how it failed, the rest folded."""
    failure = [] if desc.failure is None else [html_block(failure_lines(desc.failure))]
    tables = [folded(f"{title} ({len(rows)})", html_table(rows)) for title, rows in _tables(desc)]
    code = folded("code", html_block(code_lines(desc.graph, _function(desc))))
    return "".join([html_table(heading_rows(desc)), *failure, code, *tables])


def _function(desc: CaptureDesc) -> str:
    name = desc.frame or ""
    return name if name.isidentifier() else "forward"


def _tables(desc: CaptureDesc) -> Iterable[tuple[str, Sequence[Sequence[str]]]]:
    """Yield inputs, symbols and guards as rows, where there are any."""
    tables = {
        "inputs": [(i.placeholder, i.kind, i.name) for i in frame_inputs(desc)],
        "symbols": [(s.symbol, s.hint, s.range, s.name) for s in frame_symbols(desc)],
        "guards": [(clip(g.expr, _WIDEST), g.line) for g in frame_guards(desc)],
    }
    yield from ((title, rows) for title, rows in tables.items() if rows)
