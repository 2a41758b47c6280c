"""The first page of a capture, for a terminal: its failure, what it is, and what to do next.

Everything is in the names of the program, and what there is many of is counted. Imports no torch.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, NamedTuple

from torch_fakeify.records.aliasing import storages
from torch_fakeify.records.rewrite import walk
from torch_fakeify.records.symbol_names import names_in
from torch_fakeify.records.tensor import ListValue, MetaTensorDesc, TupleValue

from .code import SourceLines, operator_counts
from .failing_nodes import failing_lines
from .readable_names import readable_frame
from .show import backend_text, hint_text, input_text, location_text, mode_rows
from .surroundings import machine_text, setting_texts
from .tables import fitted_lines, fitted_table, frame_row
from .text import (
    clip,
    count_text,
    escape,
    expr_text,
    failure_text,
    level_text,
    result_text,
    user_line,
    world_text,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from torch_fakeify.records.frame import (
        AotGraphDesc,
        CaptureDesc,
        ExportDesc,
        FailureDesc,
        InputDesc,
    )
    from torch_fakeify.records.shape_env import SymbolDesc
    from torch_fakeify.records.tensor import ExprDesc

_LONGEST = 400
"""Most characters of a value."""
_MESSAGE = 8
"""Most lines of an exception's message."""
_OPERATORS = 8
_NAMED = 6
"""Most names that are listed in a line."""
_ROWS = 10
"""Most rows of a section."""
_ATTRIBUTE = re.compile(r"\.\w+$")
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def summary_lines(
    desc: CaptureDesc,
    *,
    file: str | None = None,
    columns: int | None = None,
    torch_names: bool = False,
) -> list[str]:
    """Return the first page of a capture in the width of a terminal, as lines that are safe to print.

    The commands that come next need the ``file`` of the capture; names are as for `show_lines`.
    """
    shown = desc if torch_names else readable_frame(desc)
    lines: list[str] = []
    if shown.failure is not None:
        lines += [*_pairs(_failure_rows(shown.failure, desc, shown), columns), ""]
    lines += _pairs([*fact_rows(shown)], columns)
    for section in (_symbols(shown), _guards(shown), _inputs(shown)):
        if section:
            lines += ["", *(escape(line) for line in section)]
    lines = fitted_lines(lines, columns)
    return [*lines, "", *_next(desc, file)] if file is not None else lines


def capture_row(name: str, desc: CaptureDesc) -> tuple[str, ...]:
    """Return the row of a capture in a table of frames, whose columns are `FRAME_COLUMNS`."""
    seconds = desc.compile_seconds
    return frame_row(
        name,
        desc.frame or "?",
        operator_counts(desc.graph).total(),
        None if seconds is None else 1000 * seconds,
        result_text(desc),
    )


def bytes_text(count: int) -> str:
    """Return a number of bytes with the unit in which it has at most four digits."""
    if count.bit_length() > 100:  # of a file, that may say any number
        return f"at least 2**{count.bit_length() - 1} {_UNITS[0]}"
    size, unit = float(count), 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{count} {_UNITS[0]}" if unit == 0 else f"{size:.3g} {_UNITS[unit]}"


def _pairs(rows: Sequence[tuple[str, str]], columns: int | None) -> list[str]:
    return fitted_table([(head, escape(clip(text, _LONGEST))) for head, text in rows], columns)


def _failure_rows(
    failure: FailureDesc, desc: CaptureDesc, shown: CaptureDesc
) -> list[tuple[str, str]]:
    """Return the error, the node, where it was raised, and by which backend."""
    kind = failure_text(failure)
    first, *rest = [line for line in failure.message.splitlines() if line.strip()] or [""]
    more = [("", line.strip()) for line in rest[: _MESSAGE - 1]]
    if len(rest) >= _MESSAGE:
        more.append(("", f"and {len(rest) - _MESSAGE + 1} more lines"))
    raised = user_line(failure.stack)
    return [
        ("failed", f"{kind}: {first}" if first else kind),
        *more,
        *(("at node", line) for line in failing_lines(desc, shown)),
        *([("raised in", raised)] if raised else []),
        ("backend", backend_text(desc)),
    ]


def fact_rows(desc: CaptureDesc) -> Iterator[tuple[str, str]]:
    """Yield what a frame is: names of facts, with their values as text."""
    level = "" if desc.aot is None and desc.export is None else f", {level_text(desc)}"
    yield "frame", f"{desc.frame or '?'}{level}"
    if desc.failure is None:
        yield "result", desc.state or "compiled"
        yield "backend", backend_text(desc)
    yield from convention_rows(desc)
    yield "recorded", ", ".join([f"torch {desc.torch_version or '?'}", *machine_text(desc)])
    if desc.world is not None:
        yield "ranks", world_text(desc.world)
    counts = operator_counts(desc.graph)
    most = [f"{count} {name}" for name, count in counts.most_common(_OPERATORS)]
    others = len(counts) - len(most)
    more = [f"{others} others"] if others else []
    yield "operators", f"{counts.total()}: {', '.join([*most, *more])}"
    yield "tensors", _tensors_text(desc)
    tensors = [e.tensor for e in desc.inputs if e.tensor is not None]
    dtypes = Counter(t.dtype for t in tensors)
    devices = Counter(t.device for t in walk(desc.graph, MetaTensorDesc) if t.device)
    devices.update(t.device for t in tensors)
    if dtypes:
        yield "dtypes", _named(name for name, _ in dtypes.most_common())
    if devices:
        yield "devices", _named(name for name, _ in devices.most_common())
    dynamic = _dynamic(desc)
    yield "dynamic", _named(dynamic) if dynamic else "nothing: all sizes are numbers"
    settings = [*setting_texts(desc), *(f"{name} = {text}" for name, text in mode_rows(desc.modes))]
    if settings:
        yield "settings", "; ".join(settings)
    if desc.operators:
        yield "operators outside of torch", _named(each.operator for each in desc.operators)


def _tensors_text(desc: CaptureDesc) -> str:
    kinds = Counter(_kind_of(entry, ()) for entry in desc.inputs if entry.tensor is not None)
    others = kinds.pop("", 0)
    words = [count_text(n, kind) for kind, n in kinds.items() if kind != _CONSTANT]
    if others:
        words.append(f"{others} other" if words else count_text(others, "tensor"))
    found = storages(desc)
    known = [group.nbytes for group in found if group.nbytes is not None]
    size = [f"{bytes_text(sum(known))} in {count_text(len(found), 'storage')}"] if found else []
    unknown = len(found) - len(known)
    if unknown:
        size.append(f"{unknown} of unknown size")
    return "; ".join([", ".join(words) or "none", *size])


def _named(names: Iterable[str]) -> str:
    names = [*names]
    more = [f"and {len(names) - _NAMED} more"] if len(names) > _NAMED else []
    return ", ".join([*names[:_NAMED], *more])


# --- graphs that are no frame of Dynamo ------------------------------------------------------------


_INPUTS = {
    "PARAMETER": "parameter",
    "BUFFER": "buffer",
    "CONSTANT_TENSOR": "constant",
    "TOKEN": "token",
    "USER_INPUT": "argument",
}
_OUTPUTS = {
    "LOSS_OUTPUT": "the loss",
    "BUFFER_MUTATION": "the new value of buffer",
    "PARAMETER_MUTATION": "the new value of parameter",
    "GRADIENT_TO_PARAMETER": "the gradient of parameter",
    "GRADIENT_TO_USER_INPUT": "the gradient of argument",
    "USER_INPUT_MUTATION": "the new value of argument",
}


def convention_rows(desc: CaptureDesc) -> list[tuple[str, str]]:
    """Return what the inputs and outputs are of an exported program or of a graph of AOTAutograd.

    Nothing for a frame of Dynamo, whose inputs have sources.
    """
    if desc.export is not None:
        return list(_of_export(desc.export))
    return [] if desc.aot is None else list(_of_aot(desc, desc.aot))


def _of_export(export: ExportDesc) -> Iterator[tuple[str, str]]:
    kinds = Counter(_INPUTS[each.kind] for each in export.inputs)
    yield "inputs", ", then ".join(count_text(n, kind) for kind, n in kinds.items()) or "none"
    changed = [
        f"{each.argument.name} is {_OUTPUTS[each.kind]} {each.target or ''}".rstrip()
        for each in export.outputs
        if each.kind in _OUTPUTS
    ]
    others = len(export.outputs) - len(changed)
    yield "outputs", "; ".join([*changed, count_text(others, "result")])


def _of_aot(desc: CaptureDesc, aot: AotGraphDesc) -> Iterator[tuple[str, str]]:
    tangents = sum(each.name.startswith("tangents_") for each in desc.inputs)
    first = "value" if aot.kind == "backward" else "argument"
    saved = " saved by the forward graph" if aot.kind == "backward" else ""
    then = f", then {count_text(tangents, 'gradient')} of results" if tangents else ""
    yield "inputs", f"{count_text(len(desc.inputs) - tangents, first)}{saved}{then}"
    last = desc.graph.nodes[-1]
    returned = last.args[0] if last.op == "output" and last.args else None
    if aot.kind == "joint" and isinstance(returned, (TupleValue, ListValue)):
        forward = count_text(aot.forward_outputs, "result")
        gradients = count_text(len(returned.items) - aot.forward_outputs, "gradient")
        yield "outputs", f"{forward} of the forward graph, then {gradients} of arguments"


# --- symbols ------------------------------------------------------------------------------------


def constant_symbols(desc: CaptureDesc) -> dict[str, str]:
    """Return the symbols that can only be one number, with it."""
    return {
        symbol.name: expr_text(symbol.lower)
        for symbol in desc.symbols
        if symbol.lower is not None and symbol.lower == symbol.upper
    }


def is_float(symbol: SymbolDesc) -> bool:
    """Return whether a symbol is a number that is no integer."""
    return dict(symbol.assumptions).get("integer") is not True


def _dynamic(desc: CaptureDesc) -> list[str]:
    constant = constant_symbols(desc)
    return [s.name for s in desc.symbols if s.name not in constant and not is_float(s)]


def _symbols(desc: CaptureDesc) -> list[str]:
    if not desc.symbols:
        return []
    constant, lines_of = constant_symbols(desc), SourceLines(desc.graph)
    floats = [s for s in desc.symbols if is_float(s)]
    ints = [s for s in desc.symbols if not is_float(s)]
    shown = [s for s in ints if s.name not in constant]
    fixed = len(ints) - len(shown)
    notes = [
        *([count_text(len(floats), "float constant")] if floats else []),
        *([f"{count_text(fixed, 'size')} that can only be one number"] if fixed else []),
    ]
    rows = [
        (symbol.name, _hint(symbol), _range(symbol), _origin(symbol, lines_of))
        for symbol in shown[:_ROWS]
    ]
    if not shown:
        return [f"symbols: {', '.join(notes)}"]
    title = f"symbols ({len(shown)})" + (f", and {', '.join(notes)}" if notes else "")
    more = [f"  and {len(shown) - _ROWS} more"] if len(shown) > _ROWS else []
    return [title, *(f"  {line}" for line in fitted_table(rows, None)), *more]


def _hint(symbol: SymbolDesc) -> str:
    text = hint_text(symbol)
    return f"was {text.removeprefix('hint ')}" if text.startswith("hint ") else text


def _range(symbol: SymbolDesc) -> str:
    """Return a range in words: ``2 or more`` for ``[2, int_oo]``."""
    lower = "" if symbol.lower is None else expr_text(symbol.lower)
    upper = "" if symbol.upper is None else expr_text(symbol.upper)
    below, above = lower in ("", "-int_oo", "-oo"), upper in ("", "int_oo", "oo")
    if below and above:
        return "any number"
    if above:
        return f"{lower} or more"
    return f"at most {upper}" if below else f"{lower} to {upper}"


def _origin(symbol: SymbolDesc, lines_of: SourceLines) -> str:
    notes = ["size-like"] if symbol.size_like else []
    if symbol.sources:
        others = [source.name for source in symbol.sources if source.name != symbol.name]
        also = "also " if len(others) < len(symbol.sources) else ""
        notes += [f"{also}{_named(others)}"] if others else []
    else:
        notes.append(user_line(lines_of.of_symbol(symbol)))
    return "; ".join(filter(None, notes))


# --- guards -------------------------------------------------------------------------------------


class _Fact(NamedTuple):
    place: str
    text: str
    is_constant: bool


def _guards(desc: CaptureDesc) -> list[str]:
    """Return guards and runtime asserts, grouped by the line that made them."""
    env = desc.shape_env
    if env is None:
        return []
    constant, lines_of = constant_symbols(desc), SourceLines(desc.graph)
    guards = [
        _Fact(location_text(g.location), _condition(g.expr), names_in(g.expr) <= constant.keys())
        for g in env.guards
    ]
    asserts = [
        _Fact(lines_of.find(a.expr, a.stack) or a.msg, _condition(a.expr), False)
        for a in env.runtime_asserts
    ]
    lines = _facts("guards", guards)
    if asserts:
        lines += [*([""] if lines else []), *_facts("runtime asserts", asserts)]
    if env.divisible:
        texts = _named(f"{_condition(expr)} == 0" for expr in env.divisible)
        lines += [*([""] if lines else []), f"divisible: {texts}"]
    return lines


def _condition(expr: ExprDesc) -> str:
    return clip(expr_text(expr), _LONGEST)


def _facts(title: str, facts: Sequence[_Fact]) -> list[str]:
    if not facts:
        return []
    groups: dict[str, list[_Fact]] = {}
    for fact in facts:
        groups.setdefault(fact.place, []).append(fact)
    lines = [f"{title} ({len(facts)})"]
    for place, group in [*groups.items()][:_ROWS]:
        shown = [fact.text for fact in group if not fact.is_constant]
        fixed = [fact.text for fact in group if fact.is_constant]
        if len(fixed) == 1:
            shown += fixed
        elif fixed:
            shown.append(f"{len(fixed)} constants, as {fixed[0]}")
        lines.append(f"  {'; '.join(shown[:_NAMED])}")
        if len(shown) > _NAMED:
            lines[-1] += f"; and {len(shown) - _NAMED} more"
        if place:
            lines.append(f"      {clip(place, _LONGEST)}")
    if len(groups) > _ROWS:
        lines.append(f"  and those of {len(groups) - _ROWS} more lines")
    return lines


# --- inputs -------------------------------------------------------------------------------------


_CONSTANT = "float constant"


def _kind_of(entry: InputDesc, symbols: Collection[str]) -> str:
    """Return the kind of an input that the program does not pass; empty for one that it passes.

    A constant is a float attribute of the program, which Dynamo passes as a tensor.
    """
    tensor = entry.tensor
    if tensor is None:
        return "symbol" if entry.sym is not None and entry.name in symbols else ""
    if tensor.is_parameter:
        return "parameter"
    if tensor.is_buffer:
        return "buffer"
    is_number = tensor.dtype == "float64" and not tensor.size
    return _CONSTANT if is_number and _ATTRIBUTE.search(entry.name) else ""


def plain_inputs(desc: CaptureDesc) -> list[bool]:
    """Return whether each input is neither a parameter, a buffer, a constant nor a size."""
    symbols = {symbol.name for symbol in desc.symbols}
    return [not _kind_of(entry, symbols) for entry in desc.inputs]


def _inputs(desc: CaptureDesc) -> list[str]:
    """Return the inputs that are neither parameters nor constants nor sizes, and count the others."""
    if not desc.inputs:
        return []
    symbols = {symbol.name for symbol in desc.symbols}
    kinds = [_kind_of(entry, symbols) for entry in desc.inputs]
    rows = [
        (entry.name, clip(input_text(entry), _LONGEST))
        for entry, kind in zip(desc.inputs, kinds, strict=True)
        if not kind
    ]
    counts = Counter(filter(None, kinds))
    others = ", ".join(count_text(n, kind) for kind, n in counts.items())
    title = f"inputs ({len(desc.inputs)})"
    if others:
        title += f": {others}{', and' if rows else ''}"
    lines = [title, *(f"  {line}" for line in fitted_table(rows[:_ROWS], None))]
    return [*lines, f"  and {len(rows) - _ROWS} more"] if len(rows) > _ROWS else lines


# --- what is next -------------------------------------------------------------------------------


def _next(desc: CaptureDesc, file: str) -> list[str]:
    """Return the commands that come next, each in one line that can be copied."""
    is_found = is_entry_point(desc.backend)
    lines = ["next"]
    if is_of_script(desc.backend_place) and not is_found:
        lines.append("  move the backend from the script into a module, which is MODULE below")
    lines.append(f"  {next_commands(desc, file, is_found=is_found)[0].command}")
    lines.append(f"  torch-fakeify show --code {shlex.quote(file)}")
    lines.append("  and --inputs, --guards, --all for what is counted here")
    return [escape(line) for line in lines]


def is_of_script(place: str | None) -> bool:
    """Return whether the recorded script itself defines a backend, so that no command can import it."""
    return (place or "").partition(":")[0] == "__main__"


def named_backend(place: str | None) -> tuple[str | None, str | None]:
    """Return how a command names a recorded backend: as ``MODULE:ATTR``, else by the module to import.

    ``MODULE`` stands for that of a backend of the script itself.
    """
    module, _, attribute = (place or "").partition(":")
    if is_of_script(place):
        return f"MODULE:{attribute or 'ATTR'}", None
    return (place, None) if attribute else (None, module or None)


class Command(NamedTuple):
    """A command that comes next."""

    command: str
    why: str
    """What it is for."""


def is_entry_point(backend: str | None) -> bool:
    """Return whether a package that is installed here registers a backend under a name."""
    name = backend or ""
    return bool(entry_points(group="torch_dynamo_backends", name=name))


def command_line(
    verb: str, file: str, backend: str | None, imports: Iterable[str], options: Iterable[str] = ()
) -> str:
    """Return a command with its options, and those by which it finds a backend."""
    words = ["torch-fakeify", *verb.split(), *options]
    words += [word for module in imports for word in ("--import", module)]
    return shlex.join([*words, *([] if backend is None else ["--backend", backend]), file])


def next_commands(desc: CaptureDesc, file: str, *, is_found: bool = False) -> list[Command]:
    """Return the commands that come next, the first one first.

    A backend outside of torch is named by its module, unless it ``is_found`` here by its recorded name. One
    of the recorded script itself, which no command can import, is ``MODULE:ATTR``.
    """
    backend, module = named_backend(None if is_found else desc.backend_place)

    def command(verb: str, why: str) -> Command:
        return Command(command_line(verb, file, backend, [module] if module else []), why)

    fails = desc.failure is not None
    replay = command(
        "replay",
        "compile it here: does it fail, too?" if fails else "compile it without the program",
    )
    stages = command("report --stages", "graphs and code of AOTAutograd and inductor")
    if desc.aot is not None and desc.aot.kind == "joint":  # which replay alone compiles
        return [replay]
    if fails:
        minify = command("minify", "a small script that fails with torch alone")
        return [minify, replay, command("issue", "the text of a bug report"), stages]
    return [replay, command("fuzz", "compare its results with eager, for other inputs"), stages]
