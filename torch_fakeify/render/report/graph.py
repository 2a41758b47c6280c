"""The graphs of a report: a row for each node, folded by module and by the user's lines, and a picture."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_fakeify.render.code import operator_name, result_text, statement
from torch_fakeify.render.nested_graphs import NodeAt, used_nodes
from torch_fakeify.render.readable_names import readable_module, readable_source
from torch_fakeify.render.text import clip, code_line, count_text, tensor_text, value_text

from .html import Html, data_block, joined, tag
from .outline import Group, outline, outline_lines
from .parts import LONGEST, node_id

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from torch_fakeify.records.graph import NodeDesc
    from torch_fakeify.render.nested_graphs import NamedGraph

    from .outline import Line
    from .parts import Stacks

MOST_NODES = 60_000
"""Most nodes of a report; ``show`` prints all."""
_CHARACTERS = 10_000_000
"""Most characters of all statements; each may have at least 200."""
_WIDEST, _NARROWEST = 2000, 200
_OPEN = 300
"""Most nodes of a graph that is unfolded when the page opens."""
_FEW = 30
"""Most nodes of an outer module that is unfolded in a larger graph."""
_CHUNK = 40
"""Rows that the browser lays out together, and skips while they are not visible."""
_BADGES = 6
_LABEL = 120
"""Most characters of a label of the picture."""

_MARK = re.compile("\x00([0-9]+)\x00")


class Page(NamedTuple):
    """The stacks and badges to which the rows of a report refer."""

    stacks: Stacks
    badges: Mapping[NodeAt, Sequence[str]]
    """Ids of the guards and runtime asserts on the line of a node."""
    torch_names: Sequence[Sequence[str]]
    """Torch's names of the nodes, by graph."""
    failing: Sequence[NodeAt] = ()
    """The nodes at which the backend failed."""
    most: int = MOST_NODES
    """Most nodes that are shown."""


def graphs_html(graphs: Sequence[NamedGraph], page: Page) -> Html:
    """Return the HTML of all graphs, the main graph first."""
    total = sum(len(graph.graph.nodes) for graph in graphs)
    width = min(_WIDEST, max(_NARROWEST, _CHARACTERS // max(total, 1)))
    left = page.most
    parts: list[Html] = []
    for number, each in enumerate(graphs):
        count = len(each.graph.nodes)
        if number and left > 0:
            heading = tag("h3", "graph ", tag("code", f"self.{clip(each.name, LONGEST)}"))
            parts.append(tag("div", heading, class_="body-of", id=f"graph{number}"))
        if left > 0:
            is_small = total <= _OPEN
            parts.append(_Rows(number, each, page, width, left, is_small).html())
        left -= count
    if left < 0:
        text = f"{page.most} of {total} nodes are shown; `torch-fakeify show` prints all of them."
        parts.append(tag("p", text, class_="note"))
    return joined(parts)


class _Rows:
    """The rows of one graph."""

    def __init__(
        self, number: int, named: NamedGraph, page: Page, width: int, most: int, is_small: bool
    ) -> None:
        self.number = number
        self.graph = named.graph
        self.inner = named.inner
        self.page = page
        self.width = width
        self.most = most
        self.is_small = is_small
        self.names = tuple([clip(fx_node.name, LONGEST) for fx_node in self.graph.nodes])
        self.titles = tuple(
            [
                clip(name, LONGEST) if name != fx_node.name else None
                for name, fx_node in zip(page.torch_names[number], self.graph.nodes, strict=True)
            ]
        )
        """Torch's name of each node that has another one here."""
        self.failing = {n.position for n in page.failing if n.graph == number}
        self.marked = tuple([f"\x00{at}\x00" for at in range(len(self.names))])

    def html(self) -> Html:
        """Return the HTML of inputs, tensors of the module, and groups of nodes."""
        parts = outline(self.graph)
        has_modules = any(isinstance(part, Group) for part in parts)
        rows = [self._inputs(), self._attributes()]
        rows.extend(self._part(part, 0, has_modules) for part in parts)
        return tag("div", *rows, class_="graph")

    # --- what the graph starts from ---

    def _inputs(self) -> Html:
        at = [i for i, n in enumerate(self.graph.nodes[: self.most]) if n.op == "placeholder"]
        if not at:
            return Html()
        title = "inputs" if self.number == 0 else "arguments"
        return self._group(title, None, len(at), [self._chunks(at)], is_open=len(at) <= _FEW // 3)

    def _attributes(self) -> Html:
        rows = [
            tag(
                "li",
                tag("code", f"self.{clip(name, LONGEST)}", class_="s"),
                tag("span", clip(tensor_text(tensor), LONGEST), class_="t"),
                class_="r",
            )
            for name, tensor in self.graph.tensors[: self.most]
        ]
        if not rows:
            return Html()
        count = len(self.graph.tensors)
        return self._group("tensors of the graph", None, count, [tag("ul", *rows)], is_open=False)

    # --- groups and lines ---

    def _part(self, part: Group | Line, depth: int, has_modules: bool) -> Html:
        if not isinstance(part, Group):
            return self._line(part)
        inside = [self._part(each, depth + 1, has_modules) for each in part.parts]
        count = part.total
        is_open = self.is_small or depth == 0 or (depth < 2 and count <= _FEW)
        is_open = is_open or self._fails(part)
        cls = clip(part.cls.rpartition(".")[2], LONGEST)
        name = clip(readable_module(part.name), LONGEST) or cls
        return self._group(
            name, cls, count, inside, is_open=is_open, title=f"{part.path}: {part.cls}"
        )

    def _fails(self, group: Group) -> bool:
        """Return whether the backend failed in a module."""
        if not self.failing:
            return False
        return any(at in self.failing for line in outline_lines([group]) for at in line.nodes)

    @staticmethod
    def _group(
        name: str,
        cls: str | None,
        count: int,
        inside: Sequence[str],
        *,
        is_open: bool,
        title: str | None = None,
    ) -> Html:
        words = [tag("code", name), " "]
        if cls is not None:
            words += [tag("span", cls, class_="cls"), " "]
        summary = tag(
            "summary", *words, tag("span", count_text(count, "node"), class_="n"), title=title
        )
        return tag("details", summary, *inside, class_="mod", open=is_open)

    def _line(self, line: Line) -> Html:
        nodes = [at for at in line.nodes if at < self.most]
        if not nodes:
            return Html()
        if line.frame is None or line.stack is None:
            return self._chunks(nodes)
        head = self.page.stacks.unfolding(line.frame, line.stack)
        return self._chunks(nodes, joined([head, *self._badges(nodes)]))

    def _badges(self, nodes: Sequence[int]) -> Iterator[Html]:
        found: dict[str, None] = {}
        for at in nodes:
            found.update(dict.fromkeys(self.page.badges.get(NodeAt(self.number, at), ())))
        for each in list(found)[:_BADGES]:
            word = "guard" if each.startswith("g") else "assert"
            yield tag("a", f"{word} {each[1:]}", class_="badge", href=f"#{each}")
        if len(found) > _BADGES:
            yield tag("span", f"and {len(found) - _BADGES} more", class_="badge")

    def _chunks(self, nodes: Sequence[int], head: Html | None = None) -> Html:
        """Return rows in lists of limited length, with the head in the first."""
        chunks: list[Html] = []
        for start in range(0, len(nodes), _CHUNK):
            some = nodes[start : start + _CHUNK]
            rows = tag("ul", *[self._row(at) for at in some])
            size = "l" if len(some) <= _CHUNK // 4 else "l many"
            chunks.append(tag("div", *([head] if head and not start else []), rows, class_=size))
        return joined(chunks)

    # --- rows ---

    def _row(self, at: int) -> Html:
        fx_node = self.graph.nodes[at]
        shape = clip(result_text(fx_node), min(self.width, LONGEST))
        code = tag("code", *self._code(at, fx_node), class_="s")
        parts = [code, tag("span", shape, class_="t")] if shape else [code]
        kind = "r"
        if at in self.failing:
            parts.append(tag("span", "the backend failed here", class_="badge fails"))
            kind = "r failing"
        return tag("li", *parts, class_=kind, id=node_id(NodeAt(self.number, at)))

    def _code(self, at: int, fx_node: NodeDesc) -> Iterator[str]:
        own = tag("a", self.names[at], class_="d", href=self._href(at), title=self.titles[at])
        if fx_node.op == "placeholder":
            yield own
            source = fx_node.source
            words = "" if source is None else readable_source(clip(source.name, LONGEST))
            if words and words != self.names[at]:
                yield tag("span", f" {words}", class_="m")
            elif source is None and fx_node.args:
                yield clip(f" = {value_text(fx_node.args[0])}", self.width)
            return
        plain = statement(fx_node, self.names)
        text = plain
        if len(plain) > self.width or "\x00" in plain:
            text = clip(plain, self.width).replace("\x00", "\\x00")
        else:
            text = statement(fx_node, self.marked)
        head = f"{fx_node.name} = "
        if text.startswith(head):
            yield own
            text = text[len(head) - 3 :]
        else:  # `return` has no name of its own
            word, space, text = text.partition(" ")
            yield joined([tag("a", word, class_="d", href=self._href(at)), space])
        yield from self._linked(text, fx_node)

    def _linked(self, text: str, fx_node: NodeDesc) -> Iterator[str]:
        """Yield a statement, with links for the names of other nodes and graphs."""
        for number, part in enumerate(_MARK.split(text)):
            if number % 2:
                at = int(part)
                yield tag("a", self.names[at], href=self._href(at), title=self.titles[at])
            elif part:
                yield part
        if fx_node.op in ("get_attr", "call_module") and isinstance(fx_node.target, str):
            inner = self.inner.get(fx_node.target)
            if inner is not None:
                yield joined([" ", tag("a", "its graph", class_="badge", href=f"#graph{inner}")])

    def _href(self, at: int) -> str:
        return f"#{node_id(NodeAt(self.number, at))}"


# --- the picture: which nodes use which, by module, as data that the page's script draws ----------------


def picture_html(data: dict[str, Any]) -> Html:
    """Return the elements into which the page's script draws the picture.

    Parameters, buffers, constants and sizes that are inputs are not drawn, as each would be a box of its own
    with one edge. A module is one box until a reader opens it.
    """
    buttons = [
        tag("button", text, type="button", data_do=what, title=title)
        for text, what, title in (
            ("Fold all", "fold", "Show the outer modules alone"),
            ("\u2212", "smaller", "Smaller"),
            ("+", "larger", "Larger"),
            ("Fit", "fit", "As wide as the window"),
        )
    ]
    note = "A box with + unfolds; a click on an operation shows its row. Parameters are not drawn."
    return tag(
        "details",
        tag("summary", "Picture"),
        tag("p", note, class_="m"),
        tag("div", *buttons, class_="zoom"),
        tag("div", class_="canvas", tabindex="-1"),
        data_block("flow", data),
        class_="picture",
        open=True,
        hidden=True,
    )


def picture_data(
    graphs: Sequence[NamedGraph],
    *,
    hidden: Collection[int],
    failing: Sequence[NodeAt],
    most: int,
) -> dict[str, Any]:
    """Return what the script needs to draw at most ``most`` nodes of the graphs of a frame.

    The placeholders at ``hidden`` positions of the first graph are not drawn.
    """
    operators: dict[str, int] = {}
    found: list[dict[str, Any]] = []
    for number, each in enumerate(graphs):
        found.append(_graph_data(each, () if number else hidden, operators, max(most, 0)))
        most -= len(each.graph.nodes)
    return {
        "operators": list(operators),
        "graphs": found,
        "failing": [[node.graph, node.position] for node in failing],
    }


def _graph_data(
    named: NamedGraph, hidden: Collection[int], operators: dict[str, int], most: int
) -> dict[str, Any]:
    """Return a graph: for each node its operator and the drawn nodes that it uses; and the outline."""
    nodes = named.graph.nodes[:most]
    drawn = [n.op != "get_attr" and at not in hidden for at, n in enumerate(nodes)]
    labels: list[int] = []
    uses: list[list[int]] = []
    inner: dict[str, list[int]] = {}
    for at, fx_node in enumerate(nodes):
        label = operator_name(fx_node) if fx_node.op.startswith("call_") else fx_node.op
        labels.append(operators.setdefault(clip(label, _LABEL), len(operators)))
        used = sorted({i for i in used_nodes(fx_node) if 0 <= i < at})
        uses.append([i for i in used if drawn[i]] if drawn[at] else [])
        bodies = _bodies(fx_node, [nodes[i] for i in used], named.inner)
        if bodies:
            inner[str(at)] = bodies
    parts = [_part_data(each, drawn) for each in outline(named.graph)]
    return {
        "labels": labels,
        "uses": uses,
        "inner": inner,
        "parts": [each for each in parts if each is not None],
    }


def _bodies(fx_node: NodeDesc, used: Sequence[NodeDesc], inner: dict[str, int]) -> list[int]:
    """Return the numbers of the graphs that a node calls."""
    called = [fx_node] if fx_node.op == "call_module" else []
    called += [node for node in used if node.op == "get_attr"]
    targets = [node.target for node in called if isinstance(node.target, str)]
    return [inner[target] for target in targets if target in inner]


def _part_data(part: Group | Line, drawn: Sequence[bool]) -> list[Any] | None:
    """Return a module as ``[name, class, parts]``, a line as ``[code, positions]``; ``None`` if empty."""
    if isinstance(part, Group):
        inside = [_part_data(each, drawn) for each in part.parts]
        cls = clip(part.cls.rpartition(".")[2], _LABEL)
        name = clip(readable_module(part.name), _LABEL) or cls
        inside = [each for each in inside if each is not None]
        return [name, cls, inside] if inside else None
    nodes = [at for at in part.nodes if at < len(drawn) and drawn[at]]
    code = "" if part.frame is None else clip(code_line(part.frame), _LABEL)
    return [code, nodes] if nodes else None
