"""The differences of two frames, in terms of the user's program.

Inputs are matched by source, symbols by the sizes that they represent, conditions by content, nodes
by target. Frames with different fingerprints have at least one difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from torch_fakeify.records.fingerprint import canonical_form
from torch_fakeify.records.tensor import SymDesc

from .alignment import align
from .code import argument_texts, node_stack, statement
from .nested_graphs import used_nodes
from .readable_names import ReadableNames, readable_name, readable_source
from .show import location_text, range_text
from .surroundings import Other, machine_differences, setting_differences
from .text import clip, level_text, result_text, tensor_text, user_line, value_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch_fakeify.records.frame import CaptureDesc, InputDesc, WorldDesc
    from torch_fakeify.records.graph import GraphModuleDesc, NodeDesc
    from torch_fakeify.records.tensor import IntLike, MetaTensorDesc

T = TypeVar("T")

_MOST = 8
"""Most differences of a part that are shown; the others are counted."""
_WIDEST = 400
_UNNAMED = "another input"


class Difference(NamedTuple):
    """A difference of two frames."""

    part: str
    """``inputs``, ``aliasing``, ``symbols``, ``guards``, ``runtime asserts``, ``graph``, ``modes``,
    ``compiler settings``, ``ranks``, ``shape settings``, ``examples`` or ``record``; with
    `other_surroundings` ``compiled otherwise`` or ``recorded elsewhere``."""
    text: str
    """A description without line breaks."""


class _Side(NamedTuple):
    """A frame, and the readable names of its symbols."""

    desc: CaptureDesc
    names: ReadableNames


def differences(a: CaptureDesc, b: CaptureDesc) -> list[Difference]:
    """Return the differences of two frames, the most important first; empty for equal frames.

    Different hints are a difference: the frame was compiled for other sizes. So are different settings of
    the compiler.
    """
    form_a, form_b = canonical_form(a), canonical_form(b)
    settings = any(setting_differences(a.surroundings, b.surroundings))
    if _same(form_a, form_b) and a.world == b.world and not settings:
        return []
    sides = [_Side(desc, ReadableNames(desc, by_order=True)) for desc in (a, b)]
    found = [
        Difference(part, clip(text, _WIDEST))
        for part, compare in _PARTS
        for text in compare(*sides)
    ]
    place = _first_other(form_a, form_b, "$") if not found else None
    return found if place is None else [Difference("record", clip(place, _WIDEST))]


def other_surroundings(a: CaptureDesc, b: CaptureDesc) -> list[Difference]:
    """Return what does not make one frame two: backend and result, machines and versions."""
    compiled: list[Other] = []
    if "not compiled" not in (a.state, b.state):
        compiled = [
            Other("backend", a.backend_name, b.backend_name),
            Other("result", result_text(a), result_text(b)),
        ]
    elsewhere = machine_differences(a.surroundings, b.surroundings)
    return [
        Difference(part, clip(f"{what}: {one} against {other}", _WIDEST))
        for part, found in (("compiled otherwise", compiled), ("recorded elsewhere", elsewhere))
        for what, one, other in found
        if one != other
    ]


def difference_lines(found: Sequence[Difference]) -> list[str]:
    """Return the first differences of each part as indented lines."""
    lines: list[str] = []
    for part in dict.fromkeys(each.part for each in found):
        texts = [each.text for each in found if each.part == part]
        lines.append(part)
        lines.extend(f"  {text}" for text in texts[:_MOST])
        if len(texts) > _MOST:
            lines.append(f"  ... and {len(texts) - _MOST} more")
    return lines


def recompilations(
    frames: Iterable[tuple[T, CaptureDesc]],
) -> Iterator[tuple[tuple[T, CaptureDesc], tuple[T, CaptureDesc]]]:
    """Yield each frame of a function that was compiled before, after the one before it.

    The frames come in the order in which they were compiled, with anything that names them.
    """
    last: dict[tuple[object, ...], tuple[T, CaptureDesc]] = {}
    for frame in frames:
        key = _function_key(frame[1])
        if key in last:
            yield last[key], frame
        last[key] = frame


def _function_key(desc: CaptureDesc) -> tuple[object, ...]:
    """Return what frames of one code object, and of one graph that AOTAutograd makes of it, share."""
    fields = {} if desc.shape_env is None else dict(desc.shape_env.co_fields)
    return (
        desc.frame,
        desc.aot and desc.aot.kind,
        *(fields.get(name) for name in ("co_name", "co_filename", "co_firstlineno")),
    )


_Names = tuple["ReadableNames", "ReadableNames"]


def _only(texts_a: Iterable[str], texts_b: Iterable[str]) -> Iterator[str]:
    """Yield the texts that only one side has, with the side."""
    of_a, of_b = dict.fromkeys(texts_a), dict.fromkeys(texts_b)
    yield from (f"{text} only in A" for text in of_a if text not in of_b)
    yield from (f"{text} only in B" for text in of_b if text not in of_a)


def _change(what: str, a: object, b: object) -> Iterator[str]:
    if a != b:
        yield f"{what}: {a} against {b}"


# --- inputs -------------------------------------------------------------------------------------


def _by_name(desc: CaptureDesc) -> dict[str, InputDesc]:
    """Return the inputs by name, without inputs that are dynamic sizes of other inputs."""
    return {
        readable_name(entry): entry
        for entry in desc.inputs
        if not (entry.sym is not None and readable_name(entry).endswith(")"))
    }


def _inputs(a: _Side, b: _Side) -> Iterator[str]:
    of_a, of_b = _by_name(a.desc), _by_name(b.desc)
    names = a.names, b.names
    yield from _only((f"input {n}" for n in of_a), (f"input {n}" for n in of_b))
    for name, first in of_a.items():
        second = of_b.get(name)
        if second is None:
            continue
        if first.tensor is not None and second.tensor is not None:
            yield from _tensor(name, first.tensor, second.tensor, names)
        else:
            yield from _change(name, _scalar(first), _scalar(second))
    common = [name for name in of_a if name in of_b]
    other = [name for name in of_b if name in of_a]
    if common != other:
        place = next(i for i, (x, y) in enumerate(zip(common, other, strict=True)) if x != y)
        yield f"the order of inputs: {common[place]} against {other[place]} first"


def _scalar(entry: InputDesc) -> str:
    if entry.tensor is not None:
        return f"a tensor {tensor_text(entry.tensor)}"
    if entry.sym is not None:
        return f"dynamic{_hint(entry.sym)}"
    return value_text(entry.value)


def _hint(n: object) -> str:
    if not isinstance(n, SymDesc):
        return ""
    return ", unbacked" if n.hint is None else f" ({n.hint} here)"


def _tensor(name: str, a: MetaTensorDesc, b: MetaTensorDesc, names: _Names) -> Iterator[str]:
    for field in ("dtype", "device", "layout"):
        yield from _change(f"{name}.{field}", getattr(a, field), getattr(b, field))
    for field in _FLAGS:
        yield from _change(f"{name}: {field}", getattr(a, field), getattr(b, field))
    if a.ndim != b.ndim:
        yield f"{name}: {a.ndim} dims against {b.ndim}"
        return
    sizes = list(_numbers(f"{name}.size", a.size, b.size, names))
    yield from sizes
    if not sizes and a.layout == b.layout:  # sparse tensors have no strides
        yield from _numbers(f"{name}.stride", a.stride, b.stride, names)
        yield from _number(f"{name}.storage_offset()", a.storage_offset, b.storage_offset, names)
    yield from _change(f"{name}: a view", a.is_view, b.is_view)
    yield from _change(f"{name}: a storage without bytes", _is_empty(a), _is_empty(b))
    yield from _change(f"{name}.grad", _there(a.grad), _there(b.grad))
    if a.grad is not None and b.grad is not None:
        yield from _tensor(f"{name}.grad", a.grad, b.grad, names)
    yield from _change(f"{name}: class", _class_of(a), _class_of(b))
    if a.subclass is not None and b.subclass is not None:
        inner = dict(b.subclass.tensors)
        for attribute, part in a.subclass.tensors:
            if attribute in inner:
                yield from _tensor(f"{name}.{attribute}", part, inner[attribute], names)


_FLAGS = (
    "requires_grad", "is_leaf", "is_inference", "is_conj", "is_neg", "is_parameter", "is_buffer",
    "is_pinned", "creation_meta", "grad_dtype",
)  # fmt: skip


def _is_empty(t: MetaTensorDesc) -> bool:
    return t.storage is not None and t.storage.nbytes == 0


def _there(part: object) -> str:
    return "None" if part is None else "a tensor"


def _class_of(t: MetaTensorDesc) -> str:
    if t.subclass is not None:
        return t.subclass.cls
    if t.functorch is not None:
        return t.functorch.kind
    return "functional" if t.functional is not None else "torch.Tensor"


def _numbers(what: str, a: Sequence[IntLike], b: Sequence[IntLike], names: _Names) -> Iterator[str]:
    for i, (first, second) in enumerate(zip(a, b, strict=True)):
        yield from _number(f"{what}({i})", first, second, names)


def _number(what: str, a: IntLike, b: IntLike, names: _Names) -> Iterator[str]:
    text_a, text_b = _number_text(a, what, names[0]), _number_text(b, what, names[1])
    if text_a != text_b:
        yield f"{what}: {text_a}{_hint(a)} against {text_b}{_hint(b)}"


def _number_text(n: IntLike, what: str, words: ReadableNames) -> str:
    """Return a number as text; a dynamic one by the name of another size that it equals, if any."""
    text = words.number(n)
    return "dynamic" if isinstance(n, SymDesc) and text == what else text


# --- aliasing -----------------------------------------------------------------------------------


def _aliasing(a: _Side, b: _Side) -> Iterator[str]:
    both = _by_name(a.desc).keys() & _by_name(b.desc).keys()
    yield from _only(_relations(a.desc, both), _relations(b.desc, both))
    yield from _only(_same_objects(a.desc), _same_objects(b.desc))


def _same_objects(desc: CaptureDesc) -> Iterator[str]:
    """Yield the sources at which the program had one object."""
    for one, other in desc.same_objects:
        yield f"{readable_source(one.name)} and {readable_source(other.name)} are one object"


def _relations(desc: CaptureDesc, names: set[str]) -> Iterator[str]:
    """Yield which inputs are one tensor, share a storage, or are views."""
    tensors = {
        n: e.tensor for n, e in _by_name(desc).items() if n in names and e.tensor is not None
    }
    one: dict[int, list[str]] = {}
    storages: dict[int, list[str]] = {}
    for name, t in sorted(tensors.items()):
        one.setdefault(t.id, []).append(name)
        if t.storage is not None:
            storages.setdefault(t.storage.id, []).append(name)
    for group in one.values():
        if len(group) > 1:
            yield f"{' and '.join(group)} are one tensor"
    for group in storages.values():
        if len({tensors[name].id for name in group}) > 1:
            yield f"{' and '.join(group)} share a storage"
    for name, t in sorted(tensors.items()):
        if t.base is not None:
            yield f"{name} is a view of {' = '.join(one.get(t.base.id, ())) or _UNNAMED}"


# --- shape environment --------------------------------------------------------------------------


def _changes(what: str, of_a: dict[str, str], of_b: dict[str, str]) -> Iterator[str]:
    """Yield the changes of what both sides have."""
    for name, text in of_a.items():
        if name in of_b:
            yield from _change(f"{what}{name}", text, of_b[name])


def _hints_of(side: _Side) -> dict[str, str]:
    names = side.names
    return {
        names.symbol(s.name): names.expr(s.hint) for s in side.desc.symbols if s.hint is not None
    }


def _ranges_of(side: _Side) -> dict[str, str]:
    names = side.names
    return {names.symbol(s.name): range_text(s, names.expr) for s in side.desc.symbols}


def _guards_of(side: _Side) -> dict[str, str]:
    """Return the user's lines by the condition of the guard."""
    guards = reversed(side.desc.guards)
    return {side.names.expr(g.expr): location_text(g.location) for g in guards}


def _asserts_of(side: _Side) -> dict[str, str]:
    asserts = reversed(side.desc.runtime_asserts)
    return {side.names.expr(e.expr): user_line(e.stack) for e in asserts}


def _conditions(of_a: dict[str, str], of_b: dict[str, str]) -> Iterator[str]:
    for side, own, other in (("A", of_a, of_b), ("B", of_b, of_a)):
        for text in reversed(own):
            if text not in other:
                place = f", from {own[text]}" if own[text] else ""
                yield f"{text} only in {side}{place}"


def _settings(a: _Side, b: _Side) -> Iterator[str]:
    one, other = a.desc.shape_env, b.desc.shape_env
    if one is None or other is None:
        yield from _change("a shape environment", _there(one), _there(other))
    else:
        yield from _fields(one.settings, other.settings)


def _compiler(a: _Side, b: _Side) -> Iterator[str]:
    for what, one, other in setting_differences(a.desc.surroundings, b.desc.surroundings):
        yield f"{what}: {one} against {other}"


def _world_text(world: WorldDesc | None) -> str:
    if world is None:
        return "none"
    groups = "; ".join(f"{group.name!r} {list(group.ranks) or 'all'}" for group in world.groups)
    return clip(f"rank {world.rank} of {world.size}, {groups}", 400)


def _fields(a: msgspec.Struct, b: msgspec.Struct) -> Iterator[str]:
    for name in a.__struct_fields__:
        yield from _change(name, getattr(a, name), getattr(b, name))


# --- graph --------------------------------------------------------------------------------------


def _graph(a: _Side, b: _Side) -> Iterator[str]:
    yield from _change("level", level_text(a.desc), level_text(b.desc))
    yield from _graphs(a.desc.graph, b.desc.graph, "")


def _graphs(a: GraphModuleDesc, b: GraphModuleDesc, where: str) -> Iterator[str]:
    of_a, of_b = ([i for i, n in enumerate(g.nodes) if n.op != "placeholder"] for g in (a, b))
    matched = align(_keys(a, of_a), _keys(b, of_b))
    pairs = {of_a[i]: of_b[j] for i, j in matched.pairs}
    back = {j: i for i, j in pairs.items()}
    names_a, names_b = _names(a), _names(b)

    def is_other(x: int, y: int) -> bool:
        """Return whether operands in one position differ; the absence of an unpaired one is reported itself."""
        inputs = a.nodes[x].op == "placeholder", b.nodes[y].op == "placeholder"
        if all(inputs):
            return names_a[x] != names_b[y]
        if any(inputs):
            return x in pairs or y in back
        return x in pairs and y in back and pairs[x] != y

    found = list(_unpaired(of_a, of_b, pairs))
    for i, j in pairs.items():
        taken = zip(used_nodes(a.nodes[i]), used_nodes(b.nodes[j]), strict=False)
        if any(is_other(x, y) for x, y in taken):
            found.append(([i], [j]))
    if any(matched.unsearched):
        left = " and ".join(
            f"{count} nodes of {side}" for side, count in zip("AB", matched.unsearched, strict=True)
        )
        yield f"{where}these graphs have little in common: {left} were not compared in detail"
    for run_a, run_b in sorted(found):
        yield from _run("A", a, run_a, names_a, where)
        yield from _run("B", b, run_b, names_b, where)
    graphs = dict(b.submodules)
    yield from _only(
        (f"the graph {where}{name}" for name, _ in a.submodules),
        (f"the graph {where}{name}" for name, _ in b.submodules),
    )
    for name, graph in a.submodules:
        if name in graphs:
            yield from _graphs(graph, graphs[name], f"{where}{name}: ")


def _unpaired(
    of_a: list[int], of_b: list[int], pairs: dict[int, int]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the nodes of both sides between consecutive pairs."""
    last_a = last_b = 0
    place_a, place_b = ({i: at for at, i in enumerate(of)} for of in (of_a, of_b))
    for i, j in [*((place_a[i], place_b[j]) for i, j in pairs.items()), (len(of_a), len(of_b))]:
        if (i, j) != (last_a, last_b):
            yield of_a[last_a:i], of_b[last_b:j]
        last_a, last_b = i + 1, j + 1


def _keys(graph: GraphModuleDesc, of: Sequence[int]) -> list[str]:
    """Return a key for each node: its call with constants, other nodes as ``_``."""
    names = ("_",) * len(graph.nodes)
    called = (graph.nodes[i] for i in of)
    return [f"{n.op} {_called(n)} {argument_texts(n, names)}" for n in called]


def _names(graph: GraphModuleDesc) -> tuple[str, ...]:
    """Return the names of the nodes, with inputs by source."""
    return tuple([_called(n) if n.op == "placeholder" else n.name for n in graph.nodes])


def _called(fx_node: NodeDesc) -> str:
    if fx_node.op == "placeholder":
        return readable_name(fx_node)
    return "" if fx_node.op == "output" else value_text(fx_node.target)


def _run(
    side: str, graph: GraphModuleDesc, run: Sequence[int], names: tuple[str, ...], where: str
) -> Iterator[str]:
    """Yield a text for nodes that only one side has: the first, and the number of others."""
    if not run:
        return
    more = f", and {len(run) - 1} after it" if len(run) > 1 else ""
    first = graph.nodes[run[0]]
    line = user_line(node_stack(first))
    place = f", from {line}" if line else ""
    yield f"{where}{clip(statement(first, names), 160)}{more} only in {side}{place}"


# --- differences of no other part ---------------------------------------------------------------


def _first_other(a: Any, b: Any, path: str) -> str | None:
    """Return the first difference of two canonical forms, with its path."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        parts = [(a[key], b[key], f"{path}.{key}") for key in a]
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        parts = [(x, y, f"{path}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True))]
    else:
        return None if _same(a, b) else f"{path}: {a} against {b}"
    return next(filter(None, (_first_other(*part) for part in parts)), None)


def _same(a: Any, b: Any) -> bool:
    return msgspec.json.encode(a) == msgspec.json.encode(b)


_PARTS: tuple[tuple[str, Callable[[_Side, _Side], Iterator[str]]], ...] = (
    ("inputs", _inputs),
    ("aliasing", _aliasing),
    ("symbols", lambda a, b: _changes("the range of ", _ranges_of(a), _ranges_of(b))),
    ("guards", lambda a, b: _conditions(_guards_of(a), _guards_of(b))),
    ("runtime asserts", lambda a, b: _conditions(_asserts_of(a), _asserts_of(b))),
    ("graph", _graph),
    ("modes", lambda a, b: _fields(a.desc.modes, b.desc.modes)),
    ("compiler settings", _compiler),
    (
        "ranks",
        lambda a, b: _change(
            "the process groups", _world_text(a.desc.world), _world_text(b.desc.world)
        ),
    ),
    ("shape settings", _settings),
    ("examples", lambda a, b: _changes("", _hints_of(a), _hints_of(b))),
)
