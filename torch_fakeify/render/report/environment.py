"""The sections of a report on the shape environment: symbols, guards, runtime asserts, conditions from data.

What there is many of is folded: constants, and symbols that can only be one number. Guards and runtime
asserts stand under the user's line that made them, in the order in which the lines were traced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch_fakeify.records.tensor import ExprDesc, SymbolNode
from torch_fakeify.render.code import SourceLines
from torch_fakeify.render.data_dependent import failed_condition, known_in
from torch_fakeify.render.readable_names import ReadableNames, readable_text
from torch_fakeify.render.show import hint_text, range_text
from torch_fakeify.render.summary import constant_symbols, is_float
from torch_fakeify.render.text import clip, count_text, expr_text, user_frame, user_line

from .html import Html, joined, lines, tag
from .outline import stack_key
from .parts import (
    LONGEST,
    ROWS,
    NodesOfLines,
    Section,
    box,
    copied_list,
    folded,
    node_id,
    plain_table,
    some,
    with_torch_name,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch_fakeify.records.frame import CaptureDesc
    from torch_fakeify.records.shape_env import (
        ReplacementDesc,
        ShapeEnvDesc,
        SymbolDesc,
    )
    from torch_fakeify.records.tensor import StackDesc
    from torch_fakeify.render.nested_graphs import NamedGraph, NodeAt

    from .parts import Stacks

UNKNOWN = "Record it with TORCH_FAKEIFY_ENTAILMENT=1 to see what is known and which check would do"
"""What is said of a condition without facts."""
_CHARACTERS = 4_000_000
"""Most characters of the conditions of a table; each may have at least 200."""
_MENTIONED = 40
"""Most symbols of a condition, conditions of a symbol, and nodes of a line."""
_ABOUT = 8
"""Most symbols of a condition with links to their rows."""
_COLUMNS = ("Symbol", "Hint", "Range", "From", "Guards")


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


class EnvironmentSections:
    """The sections of a report on the shape environment of a frame, with links to the graph and back.

    The frame has torch's names, the ``graphs`` those that are shown.
    """

    def __init__(self, desc: CaptureDesc, graphs: Sequence[NamedGraph], stacks: Stacks) -> None:
        self._stacks = stacks
        self._graphs = graphs
        self._words = ReadableNames(desc, LONGEST // 2)
        self._lines = SourceLines(desc.graph)
        self._env = desc.shape_env
        self._guards = self._guard_conditions(desc)
        self._asserts = self._assert_conditions(desc)
        self._constant = constant_symbols(desc)
        self._symbols = {symbol.name: at for at, symbol in enumerate(desc.symbols[:ROWS])}
        self._texts: dict[int, tuple[str, str]] = {}
        self._symbols_of: dict[str, list[str]] = {}
        conditions = [*self._guards, *self._asserts]
        self._mentions = self._mentioned_by(conditions)
        self._nodes = NodesOfLines(
            [each.graph for each in graphs], [user_frame(c.stack) for c in conditions]
        )
        self.badges: dict[NodeAt, list[str]] = {}
        """Ids of the guards and runtime asserts on the line of each node."""
        for condition in conditions:
            for node in self._nodes.find(user_frame(condition.stack))[: 10 * _MENTIONED]:
                self.badges.setdefault(node, []).append(condition.id)

    def sections(self) -> list[Section | None]:
        """Return the sections, ``None`` for one that would be empty."""
        env = self._env
        if env is None:
            return []
        asserts = len(env.runtime_asserts)
        return [
            self._symbol_section(env),
            self._condition_section("guards", "Guards", self._guards, len(env.guards)),
            self._condition_section("asserts", "Runtime asserts", self._asserts, asserts),
            self._divisible(env),
        ]

    # --- symbols ---

    def _symbol_section(self, env: ShapeEnvDesc) -> Section | None:
        if not env.symbols:
            return None
        replaced = {r.symbol: r for r in reversed(env.replacements)}
        shown: list[list[Html]] = []
        floats: list[list[Html]] = []
        fixed: list[list[Html]] = []
        for at, symbol in enumerate(env.symbols[:ROWS]):
            row = self._symbol(at, symbol, replaced)
            if is_float(symbol):
                floats.append(row)
            elif symbol.name in self._constant:
                fixed.append(row)
            else:
                shown.append(row)
        title = "symbols-title"
        parts = [plain_table(shown, _COLUMNS, title)] if shown else []
        for rows, what, how in (
            (floats, "float constant", ""),
            (fixed, "size", " that can only be one number"),
        ):
            if rows:
                summary = f"{count_text(len(rows), what)}{how}"
                parts.append(folded(summary, plain_table(rows, _COLUMNS, title)))
        if len(env.symbols) > ROWS:
            parts.append(tag("p", f"and {len(env.symbols) - ROWS} more", class_="note"))
        return Section("symbols", "Symbols", len(env.symbols), joined(parts))

    def _symbol(
        self, at: int, symbol: SymbolDesc, replaced: dict[ExprDesc, ReplacementDesc]
    ) -> list[Html]:
        expr = ExprDesc(nodes=(SymbolNode(symbol.name, symbol.assumptions),))
        name = clip(symbol.name, LONGEST)
        names = [tag("span", with_torch_name(self._words.symbol(symbol.name), name), id=f"s{at}")]
        if symbol.size_like:
            names.append(tag("span", "size-like", class_="badge"))
        range_ = [tag("code", clip(range_text(symbol), LONGEST))]
        if expr in replaced:
            range_.append(tag("div", "= ", tag("code", self._text(replaced[expr].expr, LONGEST))))
        sources = [tag("code", clip(source.name, LONGEST)) for source in symbol.sources]
        stack = None if sources else self._lines.of_symbol(symbol)
        return [
            joined(names, " "),
            tag("code", clip(hint_text(symbol).removeprefix("hint "), LONGEST)),
            joined(range_),
            self._place(stack) if stack else some(sources),
            self._mentioned(symbol),
        ]

    def _mentioned(self, symbol: SymbolDesc) -> Html:
        ids = self._mentions.get(symbol.name, [])
        links = [tag("a", _label(each), href=f"#{each}") for each in ids[:_MENTIONED]]
        more = [f"and {len(ids) - _MENTIONED} more"] if len(ids) > _MENTIONED else []
        return joined([*links, *more], ", ")

    def _divisible(self, env: ShapeEnvDesc) -> Section | None:
        rows = [
            tag("li", tag("code", f"{self._text(expr, LONGEST)} == 0"))
            for expr in env.divisible[:ROWS]
        ]
        count = len(env.divisible)
        content = tag("ul", *rows, class_="plainly")
        return Section("divisible", "Divisible", count, content) if rows else None

    def _text(self, expr: ExprDesc, width: int) -> str:
        return clip(self._words.expr(expr), width)

    # --- guards and runtime asserts ---

    def _guard_conditions(self, desc: CaptureDesc) -> list[_Condition]:
        found: list[_Condition] = []
        for at, guard in enumerate(desc.guards[:ROWS], 1):
            place = guard.location
            notes = ("size-oblivious",) if guard.size_oblivious else ()
            text = torchs = ""
            if place is not None:
                text = place.user_text or ""
                torchs = clip(user_line(place.framework) or place.framework_text or "", LONGEST)
            found.append(_Condition(f"g{at}", guard.expr, guard.user_stack, text, torchs, notes))
        return found

    def _assert_conditions(self, desc: CaptureDesc) -> list[_Condition]:
        return [
            _Condition(f"a{at}", e.expr, self._lines.stack(e.expr) or e.stack, e.msg, "", ())
            for at, e in enumerate(desc.runtime_asserts[:ROWS], 1)
        ]

    def _mentioned_by(self, conditions: Sequence[_Condition]) -> dict[str, list[str]]:
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
            self._symbols_of[condition.id] = names
        return found

    def _condition_section(
        self, name: str, title: str, conditions: Sequence[_Condition], count: int
    ) -> Section | None:
        if not conditions:
            return None
        width = min(2000, max(200, _CHARACTERS // len(conditions)))
        groups: dict[object, list[_Condition]] = {}
        for condition in conditions:
            groups.setdefault(stack_key(condition.stack) or condition.text, []).append(condition)
        rows = [self._group(group, width) for group in groups.values()]
        if count > len(conditions):
            rows.append(tag("li", f"and {count - len(conditions)} more", class_="note"))
        return Section(name, title, count, tag("ol", *rows, class_="conditions"))

    def _group(self, group: Sequence[_Condition], width: int) -> Html:
        """Return the conditions of a line: those on constants are folded."""
        shown = [c for c in group if not self._is_constant(c)]
        fixed = [c for c in group if self._is_constant(c)]
        if len(fixed) == 1:
            shown, fixed = [*group], []
        rows = [tag("ul", *[self._condition(c, width) for c in shown])] if shown else []
        if fixed:
            inside = tag("ul", *[self._condition(c, width) for c in fixed])
            rows.append(tag("details", tag("summary", f"{len(fixed)} on constants"), inside))
        return tag("li", self._origin(group[0]), *rows)

    def _is_constant(self, condition: _Condition) -> bool:
        names = self._symbols_of[condition.id]
        return bool(names) and all(name in self._constant for name in names)

    def _condition(self, condition: _Condition, width: int) -> Html:
        words, theirs = self._both(condition.expr, width)
        head = [
            tag("a", _label(condition.id), class_="number", href=f"#{condition.id}"),
            " ",
            with_torch_name(words, theirs),
        ]
        head += [tag("span", note, class_="badge") for note in condition.notes]
        listed = [name for name in self._symbols_of[condition.id] if name in self._symbols]
        symbols = [
            tag("a", clip(self._words.symbol(name), LONGEST // 4), href=f"#s{self._symbols[name]}")
            for name in listed[:_ABOUT]
        ]
        symbols += [joined(["..."])] if len(listed) > _ABOUT else []
        if symbols:
            head.append(tag("span", "on ", joined(symbols, ", "), class_="about"))
        if condition.framework:
            where = tag("code", condition.framework)
            head.append(tag("div", "in torch: ", where, class_="m torch"))
        return tag("li", *head, id=condition.id)

    def _both(self, expr: ExprDesc, width: int) -> tuple[str, str]:
        """Return a condition with readable names and with torch's; the result is cached by expression."""
        cached = self._texts.get(id(expr))
        if cached is None:
            cached = self._text(expr, width), clip(expr_text(expr), width)
            self._texts[id(expr)] = cached
        return cached

    def _origin(self, condition: _Condition) -> Html:
        """Return the user's line of a group, with its stack and the nodes of the line."""
        nodes = self._nodes.find(user_frame(condition.stack))
        more = [self._node_links(nodes)] if nodes else []
        if condition.stack is not None and condition.stack.frames:
            return self._place(condition.stack, *more)
        text = clip(condition.text, LONGEST) or "no line of yours is on record"
        return tag("div", tag("span", text, class_="m"), *more)

    def _place(self, stack: StackDesc, *more: Html) -> Html:
        frame = user_frame(stack)
        return Html() if frame is None else self._stacks.unfolding(frame, stack, *more)

    def _node_links(self, nodes: Sequence[NodeAt]) -> Html:
        links: list[Html] = []
        for node in nodes[:_MENTIONED]:
            name = self._graphs[node.graph].graph.nodes[node.position].name
            links.append(tag("a", tag("code", clip(name, LONGEST)), href=f"#{node_id(node)}"))
        count = "1 node comes" if len(nodes) == 1 else f"{len(nodes)} nodes come"
        more = f" and {len(nodes) - _MENTIONED} more" if len(nodes) > _MENTIONED else ""
        return tag("p", f"{count} from this line: ", joined(links, ", "), more)


def _label(name: str) -> str:
    return f"{'guard' if name.startswith('g') else 'assert'} {name[1:]}"


# --- conditions from data: what failed, and what is left to run time ---------------------------------


class Conditions(NamedTuple):
    """The runtime asserts of a frame, as Python code."""

    open: tuple[str, ...] = ()
    """The conditions that only a check at run time decides."""
    proved: tuple[str, ...] = ()
    """Those that follow from the guards and the other asserts."""
    error: str | None = None
    """Why it was not found out which of them follow."""

    def titled(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return the conditions of each kind, of which there are any, under a title."""
        kinds = (
            ("Checked at run time, as the other facts do not give them", self.open),
            ("Checked at run time, although they follow from the other facts", self.proved),
        )
        return [(title, texts) for title, texts in kinds if texts]


def conditions_section(desc: CaptureDesc, found: Conditions | None) -> Section | None:
    """Return the section on a frame and its runtime asserts; ``None`` without such conditions."""
    parts = [*_failed(desc), *([] if found is None else _checked(found))]
    return Section("from-data", "Conditions from data", None, joined(parts)) if parts else None


def _failed(desc: CaptureDesc) -> Iterator[Html]:
    """The condition on which torch could not guard, the facts, and the checks that would do."""
    message = "" if desc.failure is None else desc.failure.message
    condition = failed_condition(message)
    if condition is None:
        return
    text = with_torch_name(clip(readable_text(condition, desc), LONGEST), clip(condition, LONGEST))
    yield tag("p", "It failed on a condition that does not follow: ", text)
    known = known_in(message)
    if known is None:
        yield tag("p", UNKNOWN, class_="note")
        return
    if known.known:
        more = [f"and {known.more} more"] if known.more else []
        yield tag("p", "Known:")
        yield _listed("known", (*known.known, *more))
    if known.nothing:
        yield tag("p", f"Nothing is known of {clip(known.nothing, LONGEST)}.")
    for title, checks in known.suggestions():
        yield tag("p", title)
        yield copied_list([(check, "") for check in checks[:ROWS]])
    if known.unnamed:
        names = clip(known.unnamed, LONGEST)
        yield tag("p", f"{names}: torch's symbols, for which no variable was found.", class_="note")


def _checked(found: Conditions) -> Iterator[Html]:
    for title, texts in found.titled():
        yield tag("p", f"{title}:")
        yield _listed(title, texts)
    if found.error is not None:
        yield tag(
            "p",
            f"Which runtime asserts follow from the other facts was not found out: "
            f"{clip(found.error, LONGEST)}",
            class_="note",
        )


def _listed(label: str, texts: tuple[str, ...]) -> Html:
    shown = [clip(text, LONGEST) for text in texts[:ROWS]]
    more = [f"and {len(texts) - len(shown)} more"] if len(texts) > len(shown) else []
    return box(label, lines("\n".join([*shown, *more])))
