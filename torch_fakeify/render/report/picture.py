"""The picture of a graph: which nodes use which, by module, as data that the page's script draws.

Parameters, buffers, constants and sizes that are inputs are not drawn, as each would be a box of its own
with one edge. A module is one box until a reader opens it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_fakeify.render.code import operator_name
from torch_fakeify.render.nested_graphs import used_nodes
from torch_fakeify.render.readable_names import readable_module
from torch_fakeify.render.text import clip, code_line

from .html import Html, data_block, tag
from .outline import Group, outline

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch_fakeify.records.graph import NodeDesc
    from torch_fakeify.render.nested_graphs import NamedGraph, NodeAt

    from .outline import Line

_LONGEST = 120
"""Most characters of a label."""


def picture_html(data: dict[str, Any]) -> Html:
    """Return the elements into which the page's script draws the picture."""
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
        found.append(_graph(each, () if number else hidden, operators, max(most, 0)))
        most -= len(each.graph.nodes)
    return {
        "operators": list(operators),
        "graphs": found,
        "failing": [[node.graph, node.position] for node in failing],
    }


def _graph(
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
        labels.append(operators.setdefault(clip(label, _LONGEST), len(operators)))
        used = sorted({i for i in used_nodes(fx_node) if 0 <= i < at})
        uses.append([i for i in used if drawn[i]] if drawn[at] else [])
        bodies = _bodies(fx_node, [nodes[i] for i in used], named.inner)
        if bodies:
            inner[str(at)] = bodies
    parts = [_part(each, drawn) for each in outline(named.graph)]
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


def _part(part: Group | Line, drawn: Sequence[bool]) -> list[Any] | None:
    """Return a module as ``[name, class, parts]``, a line as ``[code, positions]``; ``None`` if empty."""
    if isinstance(part, Group):
        inside = [_part(each, drawn) for each in part.parts]
        cls = clip(part.cls.rpartition(".")[2], _LONGEST)
        name = clip(readable_module(part.name), _LONGEST) or cls
        inside = [each for each in inside if each is not None]
        return [name, cls, inside] if inside else None
    nodes = [at for at in part.nodes if at < len(drawn) and drawn[at]]
    code = "" if part.frame is None else clip(code_line(part.frame), _LONGEST)
    return [code, nodes] if nodes else None
