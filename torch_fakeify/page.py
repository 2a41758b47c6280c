"""A whole capture as text, without torch or sympy: the page that ``show`` prints.

Every line passes through ``escape``: a file that somebody else wrote can neither send control
sequences to a terminal nor forge lines, because a line break inside a record's text is shown as an
escape, too.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .code_text import Origins, code_lines
from .desc import ExprDesc, SymbolNode
from .text import clip, escape, expr_text, int_text, stack_lines, sym_text, tensor_text, user_line
from .text import value_text as _value_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .desc import MetaTensorDesc
    from .desc_env import GuardDesc, LocationDesc, RuntimeAssertDesc, ShapeEnvDesc, SymbolDesc
    from .desc_frame import CaptureDesc, FailureDesc, InputDesc, ModesDesc

_COLUMN = 56
"""Characters up to which columns are aligned."""
_NUMBER = re.compile(r"[0-9][0-9.,e+-]*")
_WIDEST = 2000
"""Characters of one expression that are shown."""


def show_lines(desc: CaptureDesc) -> list[str]:
    """The page of a capture, line by line, safe to print."""
    sections = [
        _heading(desc),
        _section("inputs", _input_rows(desc.inputs), len(desc.inputs)),
        _section("aliasing", _aliasing_rows(desc.inputs)),
    ]
    if desc.shape_env is not None:
        sections.extend(_environment_sections(desc.shape_env, Origins(desc.graph)))
    sections.append(_section("modes", mode_rows(desc.modes)))
    sections.append(_section("code", [(line,) for line in code_lines(desc.graph)]))
    if desc.failure is not None:
        sections.append(_failure_section(desc.failure))
    lines: list[str] = []
    for section in filter(None, sections):
        lines.extend([*([""] if lines else []), *section])
    return [escape(line.rstrip(" ")) for line in lines]


def table_lines(rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows as aligned columns, two spaces between, numbers to the right.

    A column is aligned over its cells of up to 56 characters; the last one is as wide as it likes.
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
            ("result", "compiled" if desc.failure is None else f"failed: {desc.failure.type}"),
        ]
    )


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _input_rows(inputs: Sequence[InputDesc]) -> Iterable[tuple[str, str, str]]:
    for entry in inputs:
        source = "" if entry.source is None else entry.source.name
        yield entry.name, clip(input_text(entry), _WIDEST), source


def input_text(entry: InputDesc) -> str:
    """What an input is, in one line."""
    if entry.tensor is not None:
        return tensor_text(entry.tensor)
    if entry.sym is not None:
        hint = "unbacked" if entry.sym.hint is None else f"hint {entry.sym.hint}"
        return f"{entry.sym.kind} {sym_text(entry.sym)}, {hint}"
    return _value_text(entry.value)


def _aliasing_rows(inputs: Sequence[InputDesc]) -> Iterable[tuple[str, str]]:
    """Which inputs are one tensor, which share a storage, and what they are views of."""
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


def _environment_sections(env: ShapeEnvDesc, origins: Origins) -> list[list[str]]:
    symbols = [_symbol_row(symbol, origins) for symbol in env.symbols]
    asserts = [_assert_row(entry, origins) for entry in env.runtime_asserts]
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


def _symbol_row(symbol: SymbolDesc, origins: Origins) -> tuple[str, str, str, str]:
    expr = ExprDesc(nodes=(SymbolNode(symbol.name, symbol.assumptions),))
    origin = ", ".join(source.name for source in symbol.sources)
    origin = origin or origins.find(expr) or user_line(symbol.stack)
    notes = ["size-like"] if symbol.size_like else []
    notes += [origin] if origin else []
    return symbol.name, hint_text(symbol), range_text(symbol), "; ".join(notes)


def hint_text(symbol: SymbolDesc) -> str:
    """What is known of a symbol's value."""
    if symbol.hint is not None:
        return f"hint {_expr(symbol.hint)}"
    if symbol.hint_override is not None:
        return f"hint override {int_text(symbol.hint_override)}"
    return "unbacked"


def range_text(symbol: SymbolDesc) -> str:
    """A symbol's value range, both ends inclusive."""
    lower = "?" if symbol.lower is None else _expr(symbol.lower)
    upper = "?" if symbol.upper is None else _expr(symbol.upper)
    return f"[{lower}, {upper}]"


def _guard_row(guard: GuardDesc) -> tuple[str, str]:
    return _expr(guard.expr), location_text(guard.location)


def _assert_row(entry: RuntimeAssertDesc, origins: Origins) -> tuple[str, str]:
    return _expr(entry.expr), origins.find(entry.expr) or user_line(entry.stack) or entry.msg


def location_text(location: LocationDesc | None) -> str:
    """The user's line if it is known, else the framework's."""
    if location is None:
        return ""
    user = user_line(location.user) or location.user_text
    if user:
        return user
    framework = user_line(location.framework) or location.framework_text
    return f"torch: {framework}" if framework else ""


# --- modes and failure --------------------------------------------------------------------------


def mode_rows(modes: ModesDesc) -> Iterable[tuple[str, str]]:
    """What is not torch's default."""
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


def _failure_section(failure: FailureDesc) -> list[str]:
    by = "" if failure.backend is None else f" by {failure.backend}"
    lines = [f"failure{by}", f"  {failure.type}"]
    lines.extend(f"    {line}" for line in failure.message.splitlines())
    if failure.stack is not None:
        lines.append("  stack")
        lines.extend(f"    {line}" for line in stack_lines(failure.stack))
    return lines
