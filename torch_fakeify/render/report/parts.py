"""Parts of which the pages of a report are made: sections, tables, boxes, the user's lines, the tools of the graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch_fakeify.render.code import node_stack
from torch_fakeify.render.nested_graphs import NodeAt
from torch_fakeify.render.text import clip, code_line, place_text

from .html import Html, joined, tag

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch_fakeify.records.graph import GraphModuleDesc
    from torch_fakeify.records.tensor import FrameDesc, StackDesc

LONGEST = 400
"""Most characters of a line, name or path."""
_FRAMES = 400
"""Most entries of a stack, the innermost."""
_MATCHES = 20
"""Most lines to which a node is assigned."""
ROWS = 10_000
"""Most rows of a table."""
_UNFOLDED = 24
"""Most rows of a table that is unfolded when the page opens."""
_SOURCES = 4
"""Sources of a symbol that are not folded."""


class Section(NamedTuple):
    """A section of a page, under a heading."""

    id: str
    title: str
    total: int | None
    """How many there are of what it lists."""
    content: Html


_KEYS = (
    (("/",), "search"),
    (("Enter", "n"), "next hit"),
    (("Shift Enter", "N"), "previous hit"),
    (("Esc",), "from the box to the hit; else no marks"),
    (("\u2191", "\u2193"), "through the graph"),
    (("\u2190", "\u2192"), "fold, unfold; the names in a row"),
    (("Enter",), "on a name: its node, and what uses it"),
)

TOOLS = joined(
    [
        tag(
            "details",
            tag("summary", "Keys"),
            tag(
                "dl",
                *[
                    tag("div", tag("dt", joined([tag("kbd", key) for key in keys], " ")),
                        tag("dd", what))
                    for keys, what in _KEYS
                ],
            ),
            tag(
                "label",
                tag("input", id="letters", type="checkbox", checked=True),
                " single letters work outside of the search box",
            ),
            class_="keys",
            hidden=True,
        ),
        tag(
            "div",
            tag("label", "Search the graph", for_="query"),
            tag("input", id="query", type="search", autocomplete="off", spellcheck="false",
                placeholder="Search the graph"),
            tag("span", id="hits", role="status"),
            tag("button", "Previous", id="previous", type="button"),
            tag("button", "Next", id="next", type="button"),
            tag("button", "Unfold all", id="unfold", type="button"),
            tag("button", "Fold all", id="fold", type="button"),
            class_="tools",
            role="search",
            hidden=True,
        ),
        Html("<noscript><p>Search and the stacks of nodes need JavaScript.</p></noscript>"),
    ]
)  # fmt: skip


def section_html(section: Section) -> Html:
    """Return a section as an element that links can focus."""
    heading = tag("h2", *titled(section), id=f"{section.id}-title")
    return tag(
        "section",
        heading,
        section.content,
        id=section.id,
        aria_labelledby=f"{section.id}-title",
        tabindex="-1",
    )


def titled(section: Section) -> list[Html]:
    """Return the title of a section, with its count."""
    parts = [joined([section.title])]
    if section.total is not None:
        parts += [Html(" "), tag("span", str(section.total), class_="count")]
    return parts


def table(
    name: str,
    title: str,
    labels: Sequence[str],
    rows: Sequence[Sequence[Html]],
    count: int,
    *,
    is_counted: bool = True,
) -> Section | None:
    """Return a section with a table, which is folded if it is long; ``None`` without rows."""
    if not rows:
        return None
    made = plain_table(rows, labels, f"{name}-title")
    note = [tag("p", f"and {count - len(rows)} more", class_="note")] if count > len(rows) else []
    shown = count if is_counted else None
    if count <= _UNFOLDED:
        return Section(name, title, shown, joined([made, *note]))
    return Section(name, title, shown, folded(f"All {count}", made, *note))


def folded(summary: str, *content: Html) -> Html:
    """Return a long table that is folded under a line of text."""
    return tag("details", tag("summary", summary), *content, class_="long")


def plain_table(rows: Sequence[Sequence[Html]], labels: Sequence[str], title: str) -> Html:
    """Return a table, shown as cards on a narrow screen; ARIA roles preserve the table.

    ``title`` is the id of the element that names it.
    """
    head = tag("tr", *[tag("th", label, scope="col", role="columnheader") for label in labels],
               role="row")  # fmt: skip
    body = [
        tag(
            "tr",
            *[
                tag("td", *([tag("div", cell)] if cell else []), data_label=label, role="cell")
                for cell, label in zip(row, labels, strict=True)
            ],
            role="row",
        )
        for row in rows
    ]
    return tag(
        "table",
        tag("thead", head, role="rowgroup"),
        tag("tbody", *body, role="rowgroup"),
        role="table",
        aria_labelledby=title,
    )


def box(label: str, content: Html) -> Html:
    """Return text in a scrollable box that can be focused."""
    return tag("pre", content, tabindex="0", role="region", aria_label=label)


def copied_list(rows: Iterable[tuple[str, str]]) -> Html:
    """Return lines of code, each with a button that copies it and what it is for."""
    entries = [
        tag(
            "li",
            tag("code", clip(code, LONGEST), class_="command"),
            tag("button", "Copy", type="button", class_="copy", hidden=True),
            *([tag("span", why, class_="m")] if why else []),
        )
        for code, why in rows
    ]
    return tag("ul", *entries, class_="commands")


def pairs_table(
    name: str,
    title: str,
    labels: tuple[str, str],
    pairs: Iterable[tuple[str, str]],
    *,
    is_counted: bool = True,
) -> Section | None:
    """Return a table of names and values."""
    rows = [
        [tag("code", clip(what, LONGEST)), tag("code", clip(value, LONGEST))]
        for what, value in pairs
    ]
    return table(name, title, labels, rows[:ROWS], len(rows), is_counted=is_counted)


def with_torch_name(words: str, theirs: str) -> Html:
    """Return a readable name or condition, followed by torch's if they differ."""
    if words == theirs:
        return tag("code", words)
    return joined([tag("code", words), " ", tag("code", theirs, class_="m")])


def some(items: Sequence[Html]) -> Html:
    """Return the first items, with the others folded."""
    shown = joined(items[:_SOURCES], ", ")
    rest = items[_SOURCES:ROWS]
    if not rest:
        return shown
    more = tag("details", tag("summary", f"{len(rest)} more"), joined(rest, ", "))
    return joined([shown, more])


# --- the user's lines: stacks, and the nodes of a line ----------------------------------------------------


def node_id(node: NodeAt) -> str:
    """Return the id of a node's row on the page."""
    return f"n{node.graph}-{node.position}"


class Stacks:
    """Stacks by number, written once as data; the page's script shows one on request."""

    def __init__(self) -> None:
        self._frames: dict[FrameDesc, int] = {}
        self._numbers: dict[int, int] = {}
        self._alive: list[StackDesc] = []  # so that their id() stay valid
        self._stacks: list[list[int]] = []

    def data(self) -> dict[str, Any]:
        """Return all stacks for the page's script, entries outermost first."""
        frames = [
            [clip(f.file, LONGEST), f.line, clip(f.function, LONGEST), clip(code_line(f), LONGEST)]
            for f in self._frames
        ]
        return {"frames": frames, "stacks": self._stacks}

    def unfolding(self, frame: FrameDesc, stack: StackDesc, *more: str) -> Html:
        """A line of the user's that unfolds to its stack."""
        line = clip(place_text(frame), LONGEST)
        return tag(
            "details", tag("summary", line), *more, class_="place", data_stack=self._at(stack)
        )

    def _at(self, stack: StackDesc) -> int:
        number = self._numbers.get(id(stack))
        if number is None:
            number = self._numbers[id(stack)] = len(self._stacks)
            self._alive.append(stack)
            numbers = self._frames
            frames = stack.frames[-_FRAMES:]
            self._stacks.append([numbers.setdefault(frame, len(numbers)) for frame in frames])
        return number


class NodesOfLines:
    """The nodes whose stacks contain some lines.

    Files match by the ends of their paths, as torch shortens the file in the location of a guard.
    """

    def __init__(
        self, graphs: Sequence[GraphModuleDesc], frames: Iterable[FrameDesc | None]
    ) -> None:
        requested = {_key(frame) for frame in frames if frame is not None}
        self._found: dict[tuple[str, int, str], list[tuple[str, NodeAt]]] = {}
        matching: dict[int, tuple[StackDesc, list[FrameDesc]]] = {}
        for at, graph in enumerate(graphs if requested else ()):
            for position, fx_node in enumerate(graph.nodes):
                stack = node_stack(fx_node)
                if stack is None:
                    continue
                if id(stack) not in matching:
                    matches = {_key(f): f for f in stack.frames if _key(f) in requested}
                    matching[id(stack)] = stack, list(matches.values())[:_MATCHES]
                for frame in matching[id(stack)][1]:
                    self._found.setdefault(_key(frame), []).append(
                        (frame.file, NodeAt(at, position))
                    )

    def find(self, frame: FrameDesc | None) -> list[NodeAt]:
        """Return the nodes of a requested line, in order."""
        if frame is None:
            return []
        return [node for file, node in self._found.get(_key(frame), ()) if _fits(file, frame.file)]


def _key(frame: FrameDesc) -> tuple[str, int, str]:
    return frame.file.rpartition("/")[2], frame.line, frame.function


def _fits(path: str, shortened: str) -> bool:
    return path == shortened or path.endswith(f"/{shortened}")
