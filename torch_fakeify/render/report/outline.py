"""Group the nodes of a graph by the user's modules and lines, in their order, without torch.

A module that is called twice has two groups. A node without a recorded module is grouped with its
neighbours; a node of a backward graph belongs to the module of its forward node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch_fakeify.records.tensor import (
    DictValue,
    FunctionValue,
    OpaqueValue,
    TupleValue,
    TypeValue,
)
from torch_fakeify.render.code import node_stack
from torch_fakeify.render.text import clip, user_frame

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch_fakeify.records.graph import GraphModuleDesc
    from torch_fakeify.records.tensor import FrameDesc, StackDesc, Value

_DEPTH = 24
"""Most levels of nested groups."""
_GROUPS = 20_000
"""Most groups of a graph; further nodes are added to open groups."""
_LONGEST = 200
_KEYS = ("nn_module_stack", "fwd_nn_module_stack")


class Line(NamedTuple):
    """Consecutive nodes of one line of the user."""

    stack: StackDesc | None
    frame: FrameDesc | None
    """The user's innermost entry of the stack."""
    nodes: list[int]
    """Positions in the graph."""


class Group(NamedTuple):
    """Consecutive nodes of one call of a module."""

    path: str
    """The path of the module, such as ``L['self'].layers.0``."""
    name: str
    """The path relative to the enclosing module."""
    cls: str
    parts: list[Group | Line]

    @property
    def total(self) -> int:
        """The number of nodes in the group."""
        return sum(
            part.total if isinstance(part, Group) else len(part.nodes) for part in self.parts
        )


class _Module(NamedTuple):
    key: str
    path: str
    cls: str


def outline(graph: GraphModuleDesc) -> list[Group | Line]:
    """Return the nodes of a graph, without placeholders, grouped."""
    stacks = _module_stacks(graph)
    root: list[Group | Line] = []
    parts = root
    open_groups: list[tuple[_Module, list[Group | Line]]] = []
    made = 0
    last: object = None
    for at, fx_node in enumerate(graph.nodes):
        if fx_node.op == "placeholder":
            continue
        modules = stacks[at]
        same = _common(modules, [module for module, _ in open_groups])
        if same < len(open_groups):
            del open_groups[same:]
            parts = open_groups[-1][1] if open_groups else root
            last = None
        for module in modules[same:]:
            if made >= _GROUPS:
                break
            around = open_groups[-1][0].path if open_groups else ""
            name = module.path.removeprefix(f"{around}.") if around else module.path
            group = Group(module.path, name, module.cls, [])
            parts.append(group)
            parts = group.parts
            open_groups.append((module, parts))
            made, last = made + 1, None
        stack = node_stack(fx_node)
        place = stack_key(stack)
        if last is None or place != last:
            parts.append(Line(stack, user_frame(stack), []))
            last = place
        line = parts[-1]
        assert isinstance(line, Line)
        line.nodes.append(at)
    return root


def outline_lines(parts: Sequence[Group | Line]) -> Iterator[Line]:
    """Yield the lines of an outline in order."""
    todo = list(reversed(parts))
    while todo:
        part = todo.pop()
        if isinstance(part, Line):
            yield part
        else:
            todo.extend(reversed(part.parts))


def stack_key(stack: StackDesc | None) -> tuple[tuple[str, int, str], ...]:
    """Return the key of a line, without the column marks below the code."""
    frames = () if stack is None else stack.frames
    return tuple([(frame.file, frame.line, frame.function) for frame in frames])


def _common(a: Sequence[_Module], b: Sequence[_Module]) -> int:
    pairs = zip(a, b, strict=False)
    return next((at for at, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def _module_stacks(graph: GraphModuleDesc) -> list[Sequence[_Module]]:
    """Return the enclosing modules of each node, outermost first."""
    shared: dict[int, tuple[_Module, ...]] = {}
    found: list[Sequence[_Module] | None] = []
    for fx_node in graph.nodes:
        meta = dict(fx_node.meta)
        value = next((meta[key] for key in _KEYS if meta.get(key) is not None), None)
        if isinstance(value, OpaqueValue) and value.kind == "shared":
            at = value.data
            if not isinstance(at, int) or not 0 <= at < len(graph.shared):
                found.append(None)
                continue
            if at not in shared:
                shared[at] = _modules(graph.shared[at])
            found.append(shared[at] or None)
        else:
            found.append(_modules(value) or None)
    return _filled(graph, found)


def _filled(
    graph: GraphModuleDesc, found: Sequence[Sequence[_Module] | None]
) -> list[Sequence[_Module]]:
    """Assign a node without modules to the common modules of its neighbours."""
    after: Sequence[_Module] = ()
    following: list[Sequence[_Module]] = [()] * len(found)
    for at in range(len(found) - 1, -1, -1):
        following[at] = after
        after = found[at] or after
    filled: list[Sequence[_Module]] = []
    before: Sequence[_Module] = ()
    for at, modules in enumerate(found):
        if graph.nodes[at].op in ("placeholder", "output"):
            filled.append(())
        elif modules is None:
            filled.append(before[: _common(before, following[at])])
        else:
            filled.append(modules)
            before = modules
    return filled


def _modules(value: Value) -> tuple[_Module, ...]:
    if not isinstance(value, DictValue):
        return ()
    modules: list[_Module] = []
    for key, entry in value.items[:_DEPTH]:
        if not isinstance(entry, TupleValue) or len(entry.items) != 2:
            continue
        path, cls = entry.items
        if isinstance(cls, (TypeValue, FunctionValue)):
            cls = cls.name
        if isinstance(path, str) and isinstance(cls, str):
            modules.append(_Module(str(key), clip(path, _LONGEST), clip(cls, _LONGEST)))
    return tuple(modules)
