"""A capture as text, without torch or sympy: the output of ``show``.

Every line passes through ``escape``, which also escapes line breaks in texts of the record: an
untrusted file can neither send control sequences to a terminal nor forge lines.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torch_fakeify.records.metadata_keys import losses_of
from torch_fakeify.records.tensor import ExprDesc, SymbolNode

from .code import SourceLines, code_lines
from .text import (
    clip,
    escape,
    expr_text,
    failure_text,
    int_text,
    result_text,
    stack_lines,
    sym_text,
    tensor_text,
    user_line,
)
from .text import value_text as _value_text
from .text import world_text as _world_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch_fakeify.records.frame import CaptureDesc, FailureDesc, InputDesc, ModesDesc
    from torch_fakeify.records.graph import GraphModuleDesc
    from torch_fakeify.records.shape_env import (
        GuardDesc,
        LocationDesc,
        RuntimeAssertDesc,
        ShapeEnvDesc,
        SymbolDesc,
    )
    from torch_fakeify.records.tensor import MetaTensorDesc

_COLUMN = 56
"""Most characters of a cell that widens its column."""
_NUMBER = re.compile(r"[0-9][0-9.,e+-]*")
_WIDEST = 2000
"""Most characters of an expression."""


def show_lines(desc: CaptureDesc) -> list[str]:
    """Return the lines of a capture's page, safe to print."""
    sections = [
        _heading(desc),
        _section("inputs", _input_rows(desc.inputs), len(desc.inputs)),
        _section("aliasing", _aliasing_rows(desc.inputs)),
    ]
    if desc.shape_env is not None:
        sections.extend(_environment_sections(desc.shape_env, SourceLines(desc.graph)))
    sections.append(_section("modes", mode_rows(desc.modes)))
    sections.append(_section("code", [(line,) for line in code_lines(desc.graph)]))
    if desc.failure is not None:
        sections.append(_failure_section(desc.failure))
    lines: list[str] = []
    for section in filter(None, sections):
        lines.extend([*([""] if lines else []), *section])
    return [escape(line.rstrip(" ")) for line in lines]


def table_lines(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns, separated by two spaces, numbers on the right.

    Cells of more than 56 characters do not widen their column.
    """
    rows = [tuple(row) for row in rows]
    widths: dict[int, int] = {}
    texts: set[int] = set()
    for number, row in enumerate(rows):
        for at, cell in enumerate(row):
            if len(cell) <= _COLUMN:
                widths[at] = max(widths.get(at, 0), len(cell))
            if number and not _NUMBER.fullmatch(cell):
                texts.add(at)
    lines: list[str] = []
    for row in rows:
        cells = [
            cell.ljust(widths.get(at, 0)) if at in texts else cell.rjust(widths.get(at, 0))
            for at, cell in enumerate(row)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _section(title: str, rows: Iterable[Sequence[str]], count: int | None = None) -> list[str]:
    rows = list(rows)
    if not rows:
        return []
    head = title if count is None else f"{title} ({count})"
    return [head, *(f"  {line}" for line in table_lines(rows))]


def _expr(expr: ExprDesc) -> str:
    return clip(expr_text(expr), _WIDEST)


# --- frame and inputs ---------------------------------------------------------------------------


def _heading(desc: CaptureDesc) -> list[str]:
    graph_size = f"{_count(len(desc.graph.nodes), 'FX node')}, {_count(len(desc.inputs), 'input')}"
    return table_lines(
        [
            ("frame", desc.frame or "?"),
            ("recorded", f"torch {desc.torch_version or '?'}, backend {desc.backend or '?'}"),
            ("graph", graph_size),
            *([] if desc.world is None else [("ranks", clip(_world_text(desc.world), _WIDEST))]),
            ("result", result_text(desc)),
        ]
    )


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _input_rows(inputs: Sequence[InputDesc]) -> Iterable[tuple[str, str, str]]:
    for entry in inputs:
        source = "" if entry.source is None else entry.source.name
        yield entry.name, clip(input_text(entry), _WIDEST), source


def input_text(entry: InputDesc) -> str:
    """Return the description of an input in one line."""
    if entry.tensor is not None:
        return tensor_text(entry.tensor)
    if entry.sym is not None:
        hint = "unbacked" if entry.sym.hint is None else f"hint {entry.sym.hint}"
        return f"{entry.sym.kind} {sym_text(entry.sym)}, {hint}"
    return _value_text(entry.value)


def _aliasing_rows(inputs: Sequence[InputDesc]) -> Iterable[tuple[str, str]]:
    """Yield which inputs are one tensor, which share a storage, and which are views."""
    names: dict[int, list[str]] = {}
    on_storage: dict[int, dict[int, str]] = {}
    views: dict[int, list[str]] = {}
    storages: dict[int, str] = {}
    bases: dict[int, MetaTensorDesc] = {}
    for entry in inputs:
        tensor = entry.tensor
        if tensor is None:
            continue
        names.setdefault(tensor.id, []).append(entry.name)
        if tensor.base is not None:
            bases[tensor.base.id] = tensor.base
            views.setdefault(tensor.base.id, []).append(entry.name)
        if tensor.storage is not None:
            on_storage.setdefault(tensor.storage.id, {})[tensor.id] = entry.name
            storages[tensor.storage.id] = clip(sym_text(tensor.storage.nbytes), _COLUMN)
    for group in names.values():
        if len(group) > 1:
            yield " = ".join(group), "one tensor"
    for storage_id, tensors in on_storage.items():
        if len(tensors) > 1:
            shared = f"storage of {storages[storage_id]} bytes"
            yield shared, f"of {', '.join(tensors.values())}"
    for base_id, base in bases.items():
        home = " = ".join(names.get(base_id, [])) or f"{tensor_text(base)}, which is no input"
        yield ", ".join(views[base_id]), f"view of {home}"


# --- shape environment --------------------------------------------------------------------------


def _environment_sections(env: ShapeEnvDesc, source_lines: SourceLines) -> list[list[str]]:
    symbols = [_symbol_row(symbol, source_lines) for symbol in env.symbols]
    asserts = [_assert_row(entry, source_lines) for entry in env.runtime_asserts]
    return [
        _section("symbols", symbols, len(env.symbols)),
        _section(
            "replacements",
            [(_expr(r.symbol), f"= {_expr(r.expr)}") for r in env.replacements],
            len(env.replacements),
        ),
        _section("divisible", [(f"{_expr(expr)} == 0",) for expr in env.divisible]),
        _section("guards", [_guard_row(guard) for guard in env.guards], len(env.guards)),
        _section("runtime asserts", asserts, len(env.runtime_asserts)),
    ]


def _symbol_row(symbol: SymbolDesc, source_lines: SourceLines) -> tuple[str, str, str, str]:
    expr = ExprDesc(nodes=(SymbolNode(symbol.name, symbol.assumptions),))
    origin = ", ".join(source.name for source in symbol.sources)
    origin = origin or source_lines.find(expr) or user_line(symbol.stack)
    notes = ["size-like"] if symbol.size_like else []
    notes += [origin] if origin else []
    return symbol.name, hint_text(symbol), range_text(symbol), "; ".join(notes)


def hint_text(symbol: SymbolDesc) -> str:
    """Return the hint of a symbol as text."""
    if symbol.hint is not None:
        return f"hint {_expr(symbol.hint)}"
    if symbol.hint_override is not None:
        return f"hint override {int_text(symbol.hint_override)}"
    return "unbacked"


def range_text(symbol: SymbolDesc) -> str:
    """Return a symbol's value range as text, both ends inclusive."""
    lower = "?" if symbol.lower is None else _expr(symbol.lower)
    upper = "?" if symbol.upper is None else _expr(symbol.upper)
    return f"[{lower}, {upper}]"


def _guard_row(guard: GuardDesc) -> tuple[str, str]:
    return _expr(guard.expr), location_text(guard.location)


def _assert_row(entry: RuntimeAssertDesc, source_lines: SourceLines) -> tuple[str, str]:
    return _expr(entry.expr), source_lines.find(entry.expr) or user_line(entry.stack) or entry.msg


def location_text(location: LocationDesc | None) -> str:
    """Return the user's line if it was recorded, else the framework's."""
    if location is None:
        return ""
    user = user_line(location.user) or location.user_text
    if user:
        return user
    framework = user_line(location.framework) or location.framework_text
    return f"torch: {framework}" if framework else ""


# --- modes and failure --------------------------------------------------------------------------


def mode_rows(modes: ModesDesc) -> Iterable[tuple[str, str]]:
    """Yield the modes that differ from torch's defaults."""
    default = type(modes)()
    for name in modes.__struct_fields__:
        value = getattr(modes, name)
        if value == getattr(default, name):
            continue
        if name == "autocast":
            for entry in modes.autocast:
                state = "on" if entry.enabled else "off"
                yield f"autocast {entry.device_type}", f"{state}, {entry.dtype}"
        else:
            yield name, str(value)


def loss_lines(desc: CaptureDesc) -> list[str]:
    """Return lines that list the dropped metadata, safe to print; empty if there is none."""
    return [escape(line.rstrip(" ")) for line in _section("left out", _loss_rows(desc.graph))]


def _loss_rows(graph: GraphModuleDesc) -> Iterable[tuple[str, str, str]]:
    """Yield each dropped key, its count and the reason."""
    for loss in losses_of(graph):
        key = loss.key if not loss.graph else f"{loss.key} of {loss.graph}"
        times = "once" if loss.count == 1 else f"{loss.count} times"
        yield f"meta {clip(key, _COLUMN)}", times, clip(loss.reason, _WIDEST)


def _failure_section(failure: FailureDesc) -> list[str]:
    by = "" if failure.backend is None else f" by {failure.backend}"
    lines = [f"failure{by}", f"  {failure_text(failure)}"]
    lines.extend(f"    {line}" for line in failure.message.splitlines())
    if failure.stack is not None:
        lines.append("  stack")
        lines.extend(f"    {line}" for line in stack_lines(failure.stack))
    return lines
