"""The sections of a report on one frame. The aliasing diagram has its storages with their tensors, to scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_fakeify.records.aliasing import storages
from torch_fakeify.records.fingerprint import fingerprint
from torch_fakeify.render.code import node_stack
from torch_fakeify.render.failing_nodes import find_failing_nodes
from torch_fakeify.render.nested_graphs import NodeAt, all_graphs
from torch_fakeify.render.readable_names import readable_frame, readable_source
from torch_fakeify.render.show import input_text, mode_rows, operator_rows
from torch_fakeify.render.summary import fact_rows, is_of_script, next_commands, plain_inputs
from torch_fakeify.render.surroundings import surrounding_rows
from torch_fakeify.render.text import (
    clip,
    failure_text,
    int_text,
    result_text,
    stack_lines,
    sym_text,
    tensor_text,
    user_line,
    world_text,
)

from .environment import EnvironmentSections, conditions_section
from .graph import MOST_NODES, Page, graphs_html, picture_data, picture_html
from .html import Html, joined, lines, tag
from .parts import (
    LONGEST,
    ROWS,
    TOOLS,
    Section,
    Stacks,
    box,
    copied_list,
    node_id,
    pairs_table,
    section_html,
    table,
    titled,
    with_torch_name,
)
from .stages import stages_html

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from torch_fakeify.records.aliasing import StorageGroup, StorageRange, TensorPlacement
    from torch_fakeify.records.frame import CaptureDesc, FailureDesc, InputDesc

    from .environment import Conditions
    from .stages import Stages

_MESSAGE = 200_000
"""Most characters of an exception's message."""
_WIDTH = 1000
"""Units of an aliasing diagram, which the browser scales."""
_DRAWN = 200
"""Most storages that are drawn, and most tensors of one."""
_UNFOLDED = 12
"""Most storages with a single tensor whose list is unfolded."""
_LISTED = 10_000
"""Most storages with a single tensor."""


class FrameSections:
    """The parts of a report on one frame; the arguments are as for `page.html_page`.

    At most ``most`` nodes are shown.
    """

    def __init__(
        self,
        desc: CaptureDesc,
        *,
        file: str | None = None,
        stages: Stages | None = None,
        conditions: Conditions | None = None,
        most: int = MOST_NODES,
    ) -> None:
        self.name = clip(desc.frame or "?", LONGEST)
        """The function."""
        self._desc = desc
        self._file = file
        self._stages = stages
        self._conditions = conditions
        self._most = most
        self._stacks = Stacks()
        self._shown = readable_frame(desc)
        self._graphs = all_graphs(self._shown.graph)
        self.count = sum(len(each.graph.nodes) for each in self._graphs)
        """The number of nodes, also in nested graphs."""
        self._failing = find_failing_nodes(desc)
        self._environment = EnvironmentSections(desc, self._graphs, self._stacks)
        nodes = enumerate(desc.graph.nodes)
        self._placeholders = [at for at, fx_node in nodes if fx_node.op == "placeholder"]
        self._sections = [each for each in self._all_sections() if each is not None]

    def stacks(self) -> Any:
        """Return the stacks to which the sections refer, for the script of the page."""
        return self._stacks.data()

    def navigation(self) -> Html:
        """Return links to the sections."""
        contents = [
            tag("li", tag("a", *titled(section), href=f"#{section.id}"))
            for section in self._sections
        ]
        return tag("nav", tag("ul", *contents), aria_label="Sections")

    def sections(self) -> list[Html]:
        """Return the sections."""
        return [section_html(section) for section in self._sections]

    def facts(self) -> Html:
        """Return what the head of a page says of the frame."""
        desc = self._desc
        bad = desc.failure is not None or desc.state == "not finished"
        facts = {
            "result": tag(
                "span",
                clip(result_text(desc), LONGEST),
                class_="bad" if bad else "good",
            ),
            "torch": clip(desc.torch_version or "?", LONGEST),
            "backend": clip(desc.backend or "?", LONGEST),
            "nodes": str(self.count),
            "inputs": str(len(desc.inputs)),
            "fingerprint": tag("code", fingerprint(desc)),
        }
        if desc.world is not None:
            facts["ranks"] = clip(world_text(desc.world), LONGEST)
        pairs = [tag("div", tag("dt", what), tag("dd", value)) for what, value in facts.items()]
        return tag("dl", *pairs, class_="facts")

    def _all_sections(self) -> list[Section | None]:
        desc = self._desc
        found = storages(self._shown)
        pairs = zip(self._shown.inputs, desc.inputs, strict=True)
        inputs = [self._input(at, *pair) for at, pair in enumerate(pairs) if at < ROWS]
        outer = ("frame", "result", "backend", "recorded")  # in the head of the page
        facts = [(what, text) for what, text in fact_rows(self._shown) if what not in outer]
        stages = self._stages
        return [
            None if desc.failure is None else self._failure(desc.failure),
            conditions_section(desc, self._conditions),
            Section("commands", "Next", None, self._commands()),
            pairs_table("summary", "Summary", ("What", "Value"), facts, is_counted=False),
            *self._environment.sections(),
            table("inputs", "Inputs", ("Input", "Value", "From"), inputs, len(desc.inputs)),
            Section("storages", "Storages", len(found), _aliasing(found)) if found else None,
            pairs_table("modes", "Modes", ("Mode", "Value"), mode_rows(desc.modes)),
            pairs_table("surroundings", "Surroundings", ("What", "Value"), surrounding_rows(desc)),
            pairs_table(
                "operators", "Operators outside of torch", ("Schema", "Module"), operator_rows(desc)
            ),
            Section("graph", "Graph", self.count, self._graph()),
            None
            if stages is None
            else Section("stages", "Stages", None, joined(stages_html(stages))),
        ]

    def _commands(self) -> Html:
        """Return commands with what each is for, and a button that copies it."""
        commands = copied_list(next_commands(self._desc, self._file or "FILE"))
        if not is_of_script(self._desc.backend_place):
            return commands
        text = "First move the backend from the script into a module, which is MODULE below."
        return joined([tag("p", text), commands])

    def _graph(self) -> Html:
        """Return the picture of the graph beside its rows."""
        failing = () if self._failing is None else self._failing.nodes
        torch_names = [
            [fx_node.name for fx_node in each.graph.nodes] for each in all_graphs(self._desc.graph)
        ]
        page = Page(self._stacks, self._environment.badges, torch_names, failing, self._most)
        inputs = zip(self._placeholders, plain_inputs(self._shown), strict=False)
        hidden = [at for at, is_plain in inputs if not is_plain]
        data = picture_data(self._graphs, hidden=set(hidden), failing=failing, most=self._most)
        rows = tag("div", graphs_html(self._graphs, page), class_="rows")
        return joined([TOOLS, tag("div", picture_html(data), rows, class_="beside")])

    def _failure(self, failure: FailureDesc) -> Section:
        kind = failure_text(failure)
        by = "" if failure.backend is None else f" by {clip(failure.backend, LONGEST)}"
        parts = [
            tag("p", tag("code", clip(kind, LONGEST), class_="bad"), by),
            *self._failing_nodes(),
            box("message", lines(clip(failure.message, _MESSAGE))),
        ]
        if failure.stack is not None and failure.stack.frames:
            stack = joined(stack_lines(failure.stack), Html("\n"))
            parts.append(tag("details", tag("summary", "Stack"), box("stack", stack), open=True))
        return Section("failure", "Failure", None, joined(parts))

    def _failing_nodes(self) -> list[Html]:
        """Return links to the nodes at which the backend failed."""
        found = self._failing
        if found is None:
            return []
        rows: list[Html] = []
        for node in found.nodes:
            fx_node = self._graphs[node.graph].graph.nodes[node.position]
            name = tag("code", clip(fx_node.name, LONGEST))
            place = user_line(node_stack(fx_node))
            where = ["; ", tag("code", clip(place, LONGEST))] if place else []
            link = tag("a", name, href=f"#{node_id(node)}")
            rows.append(tag("p", "at node ", link, f", {found.reason}", *where))
        return rows

    def _input(self, at: int, entry: InputDesc, theirs: InputDesc) -> list[Html]:
        """Return the row of an input; ``theirs`` has torch's names."""
        name = tag("code", clip(entry.name, LONGEST), title=clip(theirs.name, LONGEST))
        if at < len(self._placeholders):
            name = tag("a", name, href=f"#{node_id(NodeAt(0, self._placeholders[at]))}")
        what = tag("code", clip(input_text(entry), LONGEST))
        source = "" if theirs.source is None else clip(theirs.source.name, LONGEST)
        return [name, what, with_torch_name(clip(readable_source(source), LONGEST), source)]


# --- the aliasing diagram ---------------------------------------------------------------------------


def _aliasing(found: Sequence[StorageGroup]) -> Html:
    """Return the HTML of shared storages, then of storages with a single tensor."""
    drawn = [shared for shared in found if not shared.is_plain]
    plain = [shared for shared in found if shared.is_plain]
    parts = [_storage(shared) for shared in drawn[:_DRAWN]]
    if len(drawn) > _DRAWN:
        parts.append(tag("p", f"and {len(drawn) - _DRAWN} more such storages", class_="note"))
    if not drawn:
        parts.append(tag("p", "No two tensors share a storage, and none is a view.", class_="note"))
    if plain:
        parts.append(_plain_storages(plain))
    return joined(parts)


def _bytes(nbytes: int | None) -> str:
    """Return a number of bytes as text."""
    if nbytes is None:
        return "an unknown number of bytes"
    return "1 byte" if nbytes == 1 else f"{_digits(nbytes)} bytes"


def _digits(n: int) -> str:
    return f"{n:,}" if n.bit_length() < 128 else int_text(n)


def _storage(shared: StorageGroup) -> Html:
    symbolic = not isinstance(shared.storage.nbytes, int)
    caption = [
        tag("strong", f"Storage {shared.storage.id}"),
        f", {_bytes(shared.nbytes)}",
        f" at the hints: {clip(sym_text(shared.storage.nbytes), LONGEST)}" if symbolic else "",
    ]
    most = [each.place.end for each in shared.tensors if each.place is not None]
    total = max([shared.nbytes or 0, *most, 1])
    rows = [_placed(each, total) for each in shared.tensors[:_DRAWN]]
    if len(shared.tensors) > _DRAWN:
        rows.append(tag("li", f"and {len(shared.tensors) - _DRAWN} more tensors", class_="note"))
    scale = tag(
        "div",
        tag("span", "byte 0"),
        tag("span", _digits(total)),
        class_="scale",
        aria_hidden="true",
    )
    return tag("figure", tag("figcaption", *caption), tag("ul", *rows), scale)


def _placed(each: TensorPlacement, total: int) -> Html:
    names = clip(" = ".join(each.names), LONGEST)
    notes = [clip(tensor_text(each.tensor), LONGEST)]
    if len(each.names) > 1:
        notes.append("one tensor")
    if each.base is not None:
        notes.append(f"view of {clip(each.base, LONGEST)}")
    words = [
        tag("code", names, class_="name"),
        tag("span", "; ".join(notes), class_="m"),
        tag("span", _where(each.place), class_="where"),
    ]
    picture = [] if each.place is None else [_bar(each, each.place, total)]
    return tag("li", *words, *picture, class_=f"depth{min(each.depth, 4)}")


def _where(place: StorageRange | None) -> str:
    if place is None:
        return "not drawn: a size has no hint"
    if place.begin == place.end:
        return "no element"
    text = f"bytes {_digits(place.begin)} to {_digits(place.end)}"
    if not place.whole:
        return f"{text}, with gaps"
    return text if len(place.runs) == 1 else f"{text}, in {len(place.runs)} runs"


def _bar(each: TensorPlacement, place: StorageRange, total: int) -> Html:
    kind = "base" if each.depth == 0 else "view"
    if not place.whole:
        kind += " gaps"
    marks = [tag("rect", class_="storage", x=0, y=4, width=_WIDTH, height=12)]
    for begin, end in place.runs:
        x, right = _scaled(begin, total), _scaled(end, total)
        width = max(right - x, 2.0)  # also a byte of a gigabyte is seen
        x = min(x, _WIDTH - width)
        marks.append(tag("rect", class_=kind, x=f"{x:g}", y=0, width=f"{width:g}", height=20))
    return tag(
        "svg",
        *marks,
        viewBox=f"0 0 {_WIDTH} 20",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{_where(place)} of {_digits(total)}",
    )


def _scaled(at: int, total: int) -> float:
    return round(at * _WIDTH * 100 // total / 100, 2)


def _plain_storages(plain: Sequence[StorageGroup]) -> Html:
    rows = [
        tag(
            "li",
            tag("code", clip(shared.tensors[0].names[0], LONGEST), class_="s"),
            tag("span", _bytes(shared.nbytes), class_="t"),
            class_="r",
        )
        for shared in plain[:_LISTED]
    ]
    if len(plain) > _LISTED:
        rows.append(tag("li", f"and {len(plain) - _LISTED} more", class_="note"))
    count = len(plain)
    words = "1 storage of one tensor" if count == 1 else f"{count} storages of one tensor each"
    summary = tag("summary", words)
    return tag("details", summary, tag("ul", *rows), class_="plain", open=count <= _UNFOLDED)
