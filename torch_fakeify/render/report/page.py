"""A capture as an HTML page in a single file, without network access.

Texts of the record are escaped (`html.text`), and the page's Content-Security-Policy permits only its
script and style, by their hashes. Equal captures give equal bytes.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

from torch_fakeify._atomic_write import check_not_input, write_atomic
from torch_fakeify._version import __version__
from torch_fakeify.records.aliasing import storages
from torch_fakeify.records.fingerprint import fingerprint
from torch_fakeify.records.tensor import ExprDesc, SymbolNode
from torch_fakeify.render.code import SourceLines
from torch_fakeify.render.readable_names import (
    ReadableNames,
    readable_frame,
    readable_source,
)
from torch_fakeify.render.show import (
    hint_text,
    input_text,
    mode_rows,
    operator_rows,
    range_text,
)
from torch_fakeify.render.surroundings import surrounding_rows
from torch_fakeify.render.text import (
    clip,
    expr_text,
    failure_text,
    place_text,
    result_text,
    stack_lines,
    user_frame,
    world_text,
)

from .graph import Page, all_graphs, graphs_html
from .html import Html, data_block, digest, joined, lines, tag
from .lines import LONGEST, NodeAt, NodesOfLines, Stacks, node_id
from .stages import stages_html
from .storage import aliasing_html

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from torch_fakeify.records.frame import CaptureDesc, FailureDesc, InputDesc
    from torch_fakeify.records.shape_env import (
        LocationDesc,
        ReplacementDesc,
        ShapeEnvDesc,
        SymbolDesc,
    )
    from torch_fakeify.records.tensor import StackDesc

    from .graph import NamedGraph
    from .stages import Stages

__all__ = ["html_page", "write_report"]

_ROWS = 10_000
"""Most rows of a table."""
_CHARACTERS = 4_000_000
"""Most characters of the conditions of a table; each may have at least 200."""
_UNFOLDED = 24
"""Most rows of a table that is unfolded when the page opens."""
_MENTIONED = 40
"""Most symbols of a condition, conditions of a symbol, and nodes of a line."""
_ABOUT = 8
"""Most symbols of a condition with links to their rows."""
_SOURCES = 4
"""Sources of a symbol that are not folded."""
_MESSAGE = 200_000


def write_report(
    path: str | os.PathLike[str],
    desc: CaptureDesc,
    *,
    source: str | os.PathLike[str] | None = None,
    stages: Stages | None = None,
) -> None:
    """Write the page of a capture atomically.

    Args:
        path: where.
        desc: the frame.
        source: the file that the frame was read from, which stays as it is.
        stages: how the frame was compiled here, for a section of its own.

    Raises:
        WriteError: the file cannot be written, or is the source. An existing file is left unchanged.
    """
    if source is not None:
        check_not_input(path, source)
    write_atomic(path, html_page(desc, stages).encode())


def html_page(desc: CaptureDesc, stages: Stages | None = None) -> str:
    """Return the page of a capture as self-contained HTML."""
    return _Report(desc, stages).html()


@cache
def _part(name: str) -> str:
    return files("torch_fakeify.render.report").joinpath(name).read_text(encoding="utf-8")


class _Condition(NamedTuple):
    """A guard or a runtime assert."""

    id: str
    expr: ExprDesc
    stack: StackDesc | None
    """The user's stack."""
    text: str
    """The user's location as text, or another recorded text."""
    framework: str
    notes: tuple[str, ...]


class _Section(NamedTuple):
    id: str
    title: str
    total: int | None
    content: Html


class _Report:
    def __init__(self, desc: CaptureDesc, stages: Stages | None = None) -> None:
        self.desc = desc
        self.compiled = stages
        self.stacks = Stacks()
        self.words = ReadableNames(desc, LONGEST // 2)
        self.shown = readable_frame(desc)
        self.graphs: list[NamedGraph] = all_graphs(self.shown.graph)
        self.torch_names = [
            [fx_node.name for fx_node in each.graph.nodes] for each in all_graphs(desc.graph)
        ]
        self.origins = SourceLines(desc.graph)
        env = desc.shape_env
        self.guards = [] if env is None else self._guards(env)
        self.asserts = [] if env is None else self._asserts(env)
        symbols = () if env is None else env.symbols[:_ROWS]
        self.symbols = {symbol.name: at for at, symbol in enumerate(symbols)}
        self._texts: dict[int, tuple[str, str]] = {}
        self.symbols_of: dict[str, list[str]] = {}
        nodes = enumerate(desc.graph.nodes)
        self.placeholders = [at for at, fx_node in nodes if fx_node.op == "placeholder"]
        conditions = [*self.guards, *self.asserts]
        self.mentions = self._mentions(conditions)
        self.nodes = NodesOfLines(
            [each.graph for each in self.graphs], [user_frame(c.stack) for c in conditions]
        )
        self.badges: dict[NodeAt, list[str]] = {}
        for condition in conditions:
            for node in self.nodes.find(user_frame(condition.stack))[: 10 * _MENTIONED]:
                self.badges.setdefault(node, []).append(condition.id)

    def html(self) -> str:
        """Return the HTML document."""
        sections = [section for section in self._sections() if section is not None]
        style, script = _part("report.css"), _part("report.js")
        policy = (
            f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; "
            "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; "
            "trusted-types 'none'"
        )
        frame = clip(self.desc.frame or "?", LONGEST)
        head = tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=policy),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", f"{frame}: a frame of torch.compile"),
            Html(f"<style>{style}</style>"),
        )
        contents = [
            tag("li", tag("a", *_titled(section), href=f"#{section.id}")) for section in sections
        ]
        body = tag(
            "body",
            tag("a", "Skip to the graph", class_="skip", href="#graph"),
            tag("header", tag("h1", "frame ", tag("code", frame)), self._facts()),
            tag("nav", tag("ul", *contents), aria_label="Sections"),
            tag("main", *[_section_html(section) for section in sections]),
            tag("footer", f"torch_fakeify {__version__}"),
            data_block("stacks", self.stacks.data()),
            Html(f"<script>{script}</script>"),
        )
        return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"

    def _sections(self) -> list[_Section | None]:
        desc, env = self.desc, self.desc.shape_env
        found = storages(self.shown)
        nodes = sum(len(each.graph.nodes) for each in self.graphs)
        pairs = zip(self.shown.inputs, desc.inputs, strict=True)
        inputs = [self._input(at, *pair) for at, pair in enumerate(pairs) if at < _ROWS]
        page = Page(self.stacks, self.badges, self.torch_names)
        graph = joined([_TOOLS, graphs_html(self.graphs, page)])
        env_sections = [] if env is None else self._environment(env)
        return [
            None if desc.failure is None else _failure(desc.failure),
            *env_sections,
            _table("inputs", "Inputs", ("Input", "Value", "From"), inputs, len(desc.inputs)),
            _Section("storages", "Storages", len(found), aliasing_html(found)) if found else None,
            _pairs("modes", "Modes", ("Mode", "Value"), mode_rows(desc.modes)),
            _pairs("surroundings", "Surroundings", ("What", "Value"), surrounding_rows(desc)),
            _pairs(
                "operators", "Operators outside of torch", ("Schema", "Module"), operator_rows(desc)
            ),
            _Section("graph", "Graph", nodes, graph),
            None
            if self.compiled is None
            else _Section("stages", "Stages", None, stages_html(self.compiled)),
        ]

    def _environment(self, env: ShapeEnvDesc) -> list[_Section | None]:
        count = len(env.runtime_asserts)
        return [
            self._symbol_section(env),
            self._condition_section("guards", "Guards", self.guards, len(env.guards)),
            self._condition_section("asserts", "Runtime asserts", self.asserts, count),
            self._divisible(env),
        ]

    def _facts(self) -> Html:
        desc = self.desc
        bad = desc.failure is not None or desc.state == "not finished"
        facts = {
            "result": tag(
                "span", clip(result_text(desc), LONGEST), class_="bad" if bad else "good"
            ),
            "torch": clip(desc.torch_version or "?", LONGEST),
            "backend": clip(desc.backend or "?", LONGEST),
            "nodes": str(sum(len(each.graph.nodes) for each in self.graphs)),
            "inputs": str(len(desc.inputs)),
            "fingerprint": tag("code", fingerprint(desc)),
        }
        if desc.world is not None:
            facts["ranks"] = clip(world_text(desc.world), LONGEST)
        return tag("dl", *[tag("div", tag("dt", k), tag("dd", v)) for k, v in facts.items()])

    # --- inputs and symbols ---

    def _input(self, at: int, entry: InputDesc, theirs: InputDesc) -> list[Html]:
        """Return the row of an input; ``theirs`` has torch's names."""
        name = tag("code", clip(entry.name, LONGEST), title=clip(theirs.name, LONGEST))
        if at < len(self.placeholders):
            name = tag("a", name, href=f"#{node_id(NodeAt(0, self.placeholders[at]))}")
        what = tag("code", clip(input_text(entry), LONGEST))
        source = "" if theirs.source is None else clip(theirs.source.name, LONGEST)
        return [name, what, _with_torch_name(clip(readable_source(source), LONGEST), source)]

    def _symbol_section(self, env: ShapeEnvDesc) -> _Section | None:
        replaced = {r.symbol: r for r in reversed(env.replacements)}
        rows = [self._symbol(at, s, replaced) for at, s in enumerate(env.symbols[:_ROWS])]
        labels = ("Symbol", "Hint", "Range", "From", "Guards")
        return _table("symbols", "Symbols", labels, rows, len(env.symbols))

    def _symbol(
        self, at: int, symbol: SymbolDesc, replaced: dict[ExprDesc, ReplacementDesc]
    ) -> list[Html]:
        expr = ExprDesc(nodes=(SymbolNode(symbol.name, symbol.assumptions),))
        name = clip(symbol.name, LONGEST)
        names = [tag("span", _with_torch_name(self.words.symbol(symbol.name), name), id=f"s{at}")]
        if symbol.size_like:
            names.append(tag("span", "size-like", class_="badge"))
        range_ = [tag("code", clip(range_text(symbol), LONGEST))]
        if expr in replaced:
            range_.append(tag("div", "= ", tag("code", self._words(replaced[expr].expr, LONGEST))))
        sources = [tag("code", clip(source.name, LONGEST)) for source in symbol.sources]
        stack = None if sources else self.origins.stack(expr) or symbol.stack
        return [
            joined(names, " "),
            tag("code", clip(hint_text(symbol).removeprefix("hint "), LONGEST)),
            joined(range_),
            self._place(stack) if stack else _some(sources),
            self._mentioned(symbol),
        ]

    def _mentioned(self, symbol: SymbolDesc) -> Html:
        ids = self.mentions.get(symbol.name, [])
        links = [tag("a", _label(each), href=f"#{each}") for each in ids[:_MENTIONED]]
        more = [f"and {len(ids) - _MENTIONED} more"] if len(ids) > _MENTIONED else []
        return joined([*links, *more], ", ")

    def _divisible(self, env: ShapeEnvDesc) -> _Section | None:
        rows = [
            tag("li", tag("code", f"{self._words(expr, LONGEST)} == 0"))
            for expr in env.divisible[:_ROWS]
        ]
        count = len(env.divisible)
        content = tag("ul", *rows, class_="plainly")
        return _Section("divisible", "Divisible", count, content) if rows else None

    def _words(self, expr: ExprDesc, width: int) -> str:
        return clip(self.words.expr(expr), width)

    # --- guards and runtime asserts ---

    def _guards(self, env: ShapeEnvDesc) -> list[_Condition]:
        found: list[_Condition] = []
        for at, guard in enumerate(env.guards[:_ROWS], 1):
            place = guard.location
            notes = ("size-oblivious",) if guard.size_oblivious else ()
            text = "" if place is None else place.user_text or ""
            found.append(
                _Condition(f"g{at}", guard.expr, guard.user_stack, text, _framework(place), notes)
            )
        return found

    def _asserts(self, env: ShapeEnvDesc) -> list[_Condition]:
        found: list[_Condition] = []
        for at, entry in enumerate(env.runtime_asserts[:_ROWS], 1):
            stack = self.origins.stack(entry.expr) or entry.stack
            found.append(_Condition(f"a{at}", entry.expr, stack, entry.msg, "", ()))
        return found

    def _mentions(self, conditions: Sequence[_Condition]) -> dict[str, list[str]]:
        """Return the ids of the conditions that contain each symbol."""
        cached: dict[int, list[str]] = {}
        found: dict[str, list[str]] = {}
        for condition in conditions:
            names = cached.get(id(condition.expr))
            if names is None:
                nodes = condition.expr.nodes
                names = [node.name for node in nodes if isinstance(node, SymbolNode)]
                cached[id(condition.expr)] = names = names[:_MENTIONED]
            for name in names:
                found.setdefault(name, []).append(condition.id)
            self.symbols_of[condition.id] = names
        return found

    def _condition_section(
        self, name: str, title: str, conditions: Sequence[_Condition], count: int
    ) -> _Section | None:
        if not conditions:
            return None
        width = min(2000, max(200, _CHARACTERS // len(conditions)))
        rows = [self._condition(condition, width) for condition in conditions]
        if count > len(rows):
            rows.append(tag("li", f"and {count - len(rows)} more", class_="note"))
        return _Section(name, title, count, tag("ol", *rows, class_="conditions"))

    def _condition(self, condition: _Condition, width: int) -> Html:
        words, theirs = self._both(condition.expr, width)
        head = [
            tag("a", _label(condition.id), class_="number", href=f"#{condition.id}"),
            " ",
            _with_torch_name(words, theirs),
        ]
        head += [tag("span", note, class_="badge") for note in condition.notes]
        listed = [name for name in self.symbols_of[condition.id] if name in self.symbols]
        symbols = [
            tag("a", clip(self.words.symbol(name), LONGEST // 4), href=f"#s{self.symbols[name]}")
            for name in listed[:_ABOUT]
        ]
        symbols += [joined(["..."])] if len(listed) > _ABOUT else []
        if symbols:
            head.append(tag("span", "on ", joined(symbols, ", "), class_="about"))
        return tag("li", tag("div", *head), self._origin(condition), id=condition.id)

    def _both(self, expr: ExprDesc, width: int) -> tuple[str, str]:
        """Return a condition with readable names and with torch's; the result is cached by expression."""
        cached = self._texts.get(id(expr))
        if cached is None:
            cached = self._words(expr, width), clip(expr_text(expr), width)
            self._texts[id(expr)] = cached
        return cached

    def _origin(self, condition: _Condition) -> Html:
        """Return the user's line with its stack, torch's line, and the nodes of the line."""
        more: list[Html] = []
        if condition.framework:
            more.append(tag("p", "in torch: ", tag("code", condition.framework), class_="m"))
        nodes = self.nodes.find(user_frame(condition.stack))
        if nodes:
            more.append(self._nodes(nodes))
        if condition.stack is not None and condition.stack.frames:
            return self._place(condition.stack, *more)
        text = clip(condition.text, LONGEST) or "no line of yours is on record"
        return tag("div", tag("span", text, class_="m"), *more)

    def _place(self, stack: StackDesc, *more: Html) -> Html:
        frame = user_frame(stack)
        return Html() if frame is None else self.stacks.unfolding(frame, stack, *more)

    def _name(self, node: NodeAt) -> str:
        return self.graphs[node.graph].graph.nodes[node.position].name

    def _nodes(self, nodes: Sequence[NodeAt]) -> Html:
        links = [
            tag(
                "a",
                tag("code", clip(self._name(node), LONGEST)),
                href=f"#{node_id(node)}",
            )
            for node in nodes[:_MENTIONED]
        ]
        count = "1 node comes" if len(nodes) == 1 else f"{len(nodes)} nodes come"
        more = f" and {len(nodes) - _MENTIONED} more" if len(nodes) > _MENTIONED else ""
        return tag("p", f"{count} from this line: ", joined(links, ", "), more)


# --- parts of the page ----------------------------------------------------------------------------


_KEYS = (
    (("/",), "search"),
    (("Enter", "n"), "next hit"),
    (("Shift Enter", "N"), "previous hit"),
    (("Esc",), "from the box to the hit; else no marks"),
    (("\u2191", "\u2193"), "through the graph"),
    (("\u2190", "\u2192"), "fold, unfold; the names in a row"),
    (("Enter",), "on a name: its node, and what uses it"),
)

_TOOLS = joined(
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


def _section_html(section: _Section) -> Html:
    heading = tag("h2", *_titled(section), id=f"{section.id}-title")
    return tag(
        "section",
        heading,
        section.content,
        id=section.id,
        aria_labelledby=f"{section.id}-title",
        tabindex="-1",
    )


def _titled(section: _Section) -> list[Html]:
    parts = [joined([section.title])]
    if section.total is not None:
        parts += [Html(" "), tag("span", str(section.total), class_="count")]
    return parts


def _table(
    name: str, title: str, labels: Sequence[str], rows: Sequence[Sequence[Html]], count: int
) -> _Section | None:
    """Return a table, shown as cards on a narrow screen; ARIA roles preserve the table."""
    if not rows:
        return None
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
    table = tag(
        "table",
        tag("thead", head, role="rowgroup"),
        tag("tbody", *body, role="rowgroup"),
        role="table",
        aria_labelledby=f"{name}-title",
    )
    note = [tag("p", f"and {count - len(rows)} more", class_="note")] if count > len(rows) else []
    if count <= _UNFOLDED:
        return _Section(name, title, count, joined([table, *note]))
    summary = tag("summary", f"All {count}")
    return _Section(name, title, count, tag("details", summary, table, *note, class_="long"))


def _failure(failure: FailureDesc) -> _Section:
    by = "" if failure.backend is None else f" by {clip(failure.backend, LONGEST)}"
    parts = [
        tag("p", tag("code", clip(failure_text(failure), LONGEST), class_="bad"), by),
        _box("message", lines(clip(failure.message, _MESSAGE))),
    ]
    if failure.stack is not None and failure.stack.frames:
        stack = joined(stack_lines(failure.stack), Html("\n"))
        parts.append(tag("details", tag("summary", "Stack"), _box("stack", stack), open=True))
    return _Section("failure", "Failure", None, joined(parts))


def _box(label: str, content: Html) -> Html:
    """Return text in a scrollable box that can be focused."""
    return tag("pre", content, tabindex="0", role="region", aria_label=label)


def _pairs(
    name: str, title: str, labels: tuple[str, str], pairs: Iterable[tuple[str, str]]
) -> _Section | None:
    """Return a table of names and values."""
    rows = [
        [tag("code", clip(what, LONGEST)), tag("code", clip(value, LONGEST))]
        for what, value in pairs
    ]
    return _table(name, title, labels, rows[:_ROWS], len(rows))


def _with_torch_name(words: str, theirs: str) -> Html:
    """Return a readable name or condition, followed by torch's if they differ."""
    if words == theirs:
        return tag("code", words)
    return joined([tag("code", words), " ", tag("code", theirs, class_="m")])


def _some(items: Sequence[Html]) -> Html:
    """Return the first items, with the others folded."""
    shown = joined(items[:_SOURCES], ", ")
    rest = items[_SOURCES:_ROWS]
    if not rest:
        return shown
    more = tag("details", tag("summary", f"{len(rest)} more"), joined(rest, ", "))
    return joined([shown, more])


def _label(name: str) -> str:
    return f"{'guard' if name.startswith('g') else 'assert'} {name[1:]}"


def _framework(location: LocationDesc | None) -> str:
    if location is None:
        return ""
    frame = user_frame(location.framework)
    text = place_text(frame) if frame is not None else location.framework_text or ""
    return clip(text, LONGEST)
