"""A capture as text, without torch or sympy: the output of ``show``.

Every line passes through ``escape``, which also escapes line breaks in texts of the record: an
untrusted file can neither send control sequences to a terminal nor forge lines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch_fakeify.records.metadata_keys import losses_of

from .code import SourceLines, code_lines
from .readable_names import readable_frame
from .surroundings import surrounding_rows
from .tables import table_lines
from .text import (
    clip,
    count_text,
    escape,
    expr_text,
    failure_text,
    int_text,
    level_text,
    result_text,
    stack_lines,
    sym_text,
    tensor_text,
    user_line,
    value_text,
    world_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from torch_fakeify.records.frame import CaptureDesc, FailureDesc, InputDesc, ModesDesc
    from torch_fakeify.records.graph import GraphModuleDesc
    from torch_fakeify.records.shape_env import LocationDesc, SymbolDesc
    from torch_fakeify.records.tensor import ExprDesc, MetaTensorDesc

Part = Literal["inputs", "guards", "code"]
PARTS: tuple[Part, ...] = ("inputs", "guards", "code")
"""Sections that can be printed alone; ``guards`` are all that the ``ShapeEnv`` has."""
_COLUMN = 56
"""Most characters of a short cell."""
_WIDEST = 2000
"""Most characters of an expression."""


def show_lines(desc: CaptureDesc, *, torch_names: bool = False) -> list[str]:
    """Return all that a capture holds, as lines that are safe to print.

    With ``torch_names`` symbols and inputs are named as torch does, not as the program does.
    """
    shown = desc if torch_names else readable_frame(desc)
    sections = [
        table_lines(heading_rows(desc)),
        *_input_sections(shown),
        *_environment_sections(shown),
        _section("modes", mode_rows(desc.modes)),
        _section("surroundings", surrounding_rows(desc)),
        _section("operators outside of torch", operator_rows(desc)),
        _code_section(shown),
    ]
    if shown.failure is not None:
        sections.append(failure_lines(shown.failure, qualified=True))
    return _joined(sections)


def section_lines(
    desc: CaptureDesc, sections: Collection[Part], *, torch_names: bool = False
) -> list[str]:
    """Return some sections of a capture in full, as lines that are safe to print; names as for `show_lines`."""
    shown = desc if torch_names else readable_frame(desc)
    lines: list[list[str]] = []
    if "inputs" in sections:
        lines += _input_sections(shown)
    if "guards" in sections:
        lines += _environment_sections(shown)
    if "code" in sections:
        lines.append(_code_section(shown))
    return _joined(lines)


def _joined(sections: Iterable[list[str]]) -> list[str]:
    lines: list[str] = []
    for section in filter(None, sections):
        lines.extend([*([""] if lines else []), *section])
    return [escape(line.rstrip(" ")) for line in lines]


def _input_sections(desc: CaptureDesc) -> list[list[str]]:
    return [
        _section("inputs", _input_rows(desc.inputs), is_counted=True),
        _section("aliasing", _aliasing_rows(desc.inputs)),
    ]


def _code_section(desc: CaptureDesc) -> list[str]:
    return _section("code", [(line,) for line in code_lines(desc.graph)])


def _section(title: str, rows: Iterable[Sequence[str]], *, is_counted: bool = False) -> list[str]:
    rows = list(rows)
    head = f"{title} ({len(rows)})" if is_counted else title
    return [head, *(f"  {line}" for line in table_lines(rows))] if rows else []


def _expr(expr: ExprDesc) -> str:
    return clip(expr_text(expr), _WIDEST)


# --- frame and inputs ---------------------------------------------------------------------------


def heading_rows(desc: CaptureDesc) -> list[tuple[str, str]]:
    """Return what a frame is in a few pairs: function, torch and backend, size, ranks, result."""
    level = "" if desc.aot is None and desc.export is None else f"{level_text(desc)}, "
    graph_size = f"{level}{count_text(len(desc.graph.nodes), 'FX node')}, {count_text(len(desc.inputs), 'input')}"
    return [
        ("frame", desc.frame or "?"),
        ("recorded", f"torch {desc.torch_version or '?'}, backend {backend_text(desc)}"),
        ("graph", graph_size),
        *([] if desc.world is None else [("ranks", clip(world_text(desc.world), _WIDEST))]),
        ("result", result_text(desc, qualified=True)),
    ]


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
    return value_text(entry.value)


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


def _environment_sections(desc: CaptureDesc) -> list[list[str]]:
    env, source_lines = desc.shape_env, SourceLines(desc.graph)
    if env is None:
        return []
    symbols = [_symbol_row(symbol, source_lines) for symbol in env.symbols]
    guards = [(_expr(guard.expr), location_text(guard.location)) for guard in env.guards]
    asserts = [
        (_expr(each.expr), source_lines.find(each.expr, each.stack) or each.msg)
        for each in env.runtime_asserts
    ]
    replacements = [(_expr(r.symbol), f"= {_expr(r.expr)}") for r in env.replacements]
    return [
        _section("symbols", symbols, is_counted=True),
        _section("replacements", replacements, is_counted=True),
        _section("divisible", [(f"{_expr(expr)} == 0",) for expr in env.divisible]),
        _section("guards", guards, is_counted=True),
        _section("runtime asserts", asserts, is_counted=True),
    ]


def _symbol_row(symbol: SymbolDesc, source_lines: SourceLines) -> tuple[str, str, str, str]:
    if symbol.sources:
        origin = ", ".join(s.name for s in symbol.sources if s.name != symbol.name)
    else:
        origin = user_line(source_lines.of_symbol(symbol))
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


def range_text(symbol: SymbolDesc, text_of: Callable[[ExprDesc], str] = _expr) -> str:
    """Return a symbol's value range as text, both ends inclusive."""
    ends = ("?" if end is None else text_of(end) for end in (symbol.lower, symbol.upper))
    return f"[{', '.join(ends)}]"


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


def operator_rows(desc: CaptureDesc) -> Iterable[tuple[str, str]]:
    """Yield the schema of each operator outside of torch, and the module that registered it."""
    modules = dict(desc.operator_modules)
    for operator in desc.operators:
        yield clip(operator.schema, _WIDEST), clip(modules.get(operator.operator, ""), _COLUMN)


def loss_lines(desc: CaptureDesc) -> list[str]:
    """Return lines that list the dropped metadata, safe to print; empty if there is none."""
    return [escape(line.rstrip(" ")) for line in _section("left out", _loss_rows(desc.graph))]


def _loss_rows(graph: GraphModuleDesc) -> Iterable[tuple[str, str, str]]:
    """Yield each dropped key, its count and the reason."""
    for loss in losses_of(graph):
        key = loss.key if not loss.graph else f"{loss.key} of {loss.graph}"
        times = "once" if loss.count == 1 else f"{loss.count} times"
        yield f"meta {clip(key, _COLUMN)}", times, clip(loss.reason, _WIDEST)


def backend_text(desc: CaptureDesc) -> str:
    """Return the name of the recorded backend, and where it is defined."""
    name, place = desc.backend or "?", desc.backend_place
    if place is None:
        return name
    return f"{name}, which is {place}" if ":" in place else f"{name} of {place}"


def failure_lines(failure: FailureDesc, *, qualified: bool = False) -> list[str]:
    """Return how a backend failed: its name, the exception (see `failure_text`) or end of its process, the stack."""
    by = "" if failure.backend is None else f" by {failure.backend}"
    lines = [f"failure{by}", f"  {failure_text(failure, qualified=qualified)}"]
    lines.extend(f"    {line}" for line in failure.message.splitlines())
    if failure.stack is not None:
        lines.append("  stack")
        lines.extend(f"    {line}" for line in stack_lines(failure.stack))
    return lines
