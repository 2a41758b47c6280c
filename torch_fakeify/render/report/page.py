"""A capture, or a directory of them, as an HTML page in a single file, without network access.

The page of a directory has an index, recompilations side by side, and each frame.

Texts of the record are escaped (`html.text`), and the page's Content-Security-Policy permits only its
script and style, by their hashes. Equal captures give equal bytes.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

from torch_fakeify._version import __version__
from torch_fakeify.render.diff import difference_lines, differences, recompilations
from torch_fakeify.render.readable_names import ReadableNames, readable_frame
from torch_fakeify.render.show import input_text
from torch_fakeify.render.summary import capture_row
from torch_fakeify.render.tables import FRAME_COLUMNS
from torch_fakeify.render.text import clip

from .frame_sections import FrameSections
from .graph import MOST_NODES
from .html import Html, data_block, digest, joined, lines, prefixed, tag
from .parts import LONGEST, Section, plain_table, section_html

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch_fakeify.records.frame import CaptureDesc

    from .environment import Conditions
    from .stages import Stages

_SCRIPTS = ("report.js", "picture.js")
_FRAMES = 200
"""Most frames of a directory that are shown whole; the index has all."""
_RECOMPILES = 100
_ROWS = 40
"""Most rows of two frames side by side."""


def html_page(
    desc: CaptureDesc,
    stages: Stages | None = None,
    conditions: Conditions | None = None,
    *,
    file: str | None = None,
) -> str:
    """Return the page of a capture as self-contained HTML.

    Args:
        desc: the frame.
        stages: how the frame was compiled here, for a section of its own.
        conditions: its runtime asserts, for the section on conditions from data.
        file: name of the file of the capture, for the commands that come next.
    """
    frame = FrameSections(desc, file=file, stages=stages, conditions=conditions)
    return document(
        f"{frame.name}: a frame of torch.compile",
        tag("a", "Skip to the graph", class_="skip", href="#graph"),
        tag("header", tag("h1", "frame ", tag("code", frame.name)), frame.facts()),
        frame.navigation(),
        tag("main", *frame.sections(), class_="frame", data_prefix=""),
        data_block("stacks", frame.stacks()),
    )


def document(title: str, *body: Html) -> str:
    """Return an HTML document with the style and the script of a report, which permits no other."""
    style, script = _part("report.css"), "\n".join(map(_part, _SCRIPTS))
    policy = (
        f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        Html(f"<style>{style}</style>"),
    )
    footer = tag("footer", f"torch_fakeify {__version__}")
    content = tag("body", *body, footer, Html(f"<script>{script}</script>"))
    return f"<!DOCTYPE html>\n{tag('html', head, content, lang='en')}\n"


@cache
def _part(name: str) -> str:
    return files("torch_fakeify.render.report").joinpath(name).read_text(encoding="utf-8")


# --- a directory of captures -------------------------------------------------------------------------


class ListedFrame(NamedTuple):
    """A capture of a directory."""

    file: str
    """Its path in the directory."""
    desc: CaptureDesc
    conditions: Conditions | None = None
    """Its runtime asserts, for the section on conditions from data."""


def folder_page(
    name: str, frames: Sequence[ListedFrame], errors: Sequence[tuple[str, str]] = ()
) -> str:
    """Return the page of a directory of captures as self-contained HTML.

    The frames are in the order in which they were made; the errors are of the files that cannot be read.
    """
    numbers = {frame.file: number for number, frame in enumerate(frames)}
    found = [
        ((a.file, one), (b.file, other))
        for (a, one), (b, other) in recompilations((frame, frame.desc) for frame in frames)
    ]
    pairs = [_against(*pair, numbers) for pair in found[:_RECOMPILES]]
    sections = [
        Section("index", "Frames", len(frames), _index(frames)),
        Section("not-read", "Not read", len(errors), _errors(errors)) if errors else None,
        Section("recompiles", "Compiled again", len(found), joined(pairs)) if pairs else None,
    ]
    failed = sum(frame.desc.failure is not None for frame in frames)
    title = clip(name, LONGEST)
    facts = tag(
        "dl",
        tag("div", tag("dt", "frames"), tag("dd", str(len(frames)))),
        tag("div", tag("dt", "failed"), tag("dd", str(failed), class_="bad" if failed else "good")),
        class_="facts",
    )
    return document(
        f"{title}: frames of torch.compile",
        tag("header", tag("h1", "captures ", tag("code", title)), facts),
        tag("main", *[section_html(each) for each in sections if each is not None], *_all(frames)),
    )


def _index(frames: Sequence[ListedFrame]) -> Html:
    rows: list[list[Html]] = []
    for number, frame in enumerate(frames):
        file, *cells = [clip(cell.strip(), LONGEST) for cell in capture_row(frame.file, frame.desc)]
        is_bad = frame.desc.failure is not None or frame.desc.state == "not finished"
        name = tag("code", file)
        link = tag("a", name, href=f"#{_id(number)}") if number < _FRAMES else name
        result = tag("span", cells.pop(), class_="bad" if is_bad else "good")
        rows.append([link, *[tag("code", cell) for cell in cells], result])
    return plain_table(rows, [label.capitalize() for label in FRAME_COLUMNS], "index-title")


def _errors(errors: Sequence[tuple[str, str]]) -> Html:
    rows = [
        [tag("code", clip(file, LONGEST)), tag("span", clip(error, LONGEST))]
        for file, error in errors
    ]
    return plain_table(rows, ("File", "Error"), "not-read-title")


def _id(number: int) -> str:
    return f"f{number}"


def _all(frames: Sequence[ListedFrame]) -> Iterator[Html]:
    """Yield each frame whole, folded; all together have as many nodes as the page of one may have."""
    left = MOST_NODES
    for number, frame in enumerate(frames[:_FRAMES]):
        parts = FrameSections(
            frame.desc,
            file=frame.file.rpartition("/")[2],
            conditions=frame.conditions,
            most=max(left, 0),
        )
        left -= parts.count
        prefix = f"{_id(number)}-"
        content = [parts.facts(), parts.navigation(), *parts.sections()]
        failure = frame.desc.failure
        mark = [] if failure is None else [" ", tag("span", "failed", class_="badge fails")]
        yield tag(
            "details",
            tag("summary", tag("code", clip(frame.file, LONGEST)), f" {parts.name}", *mark),
            prefixed(joined([*content, data_block("stacks", parts.stacks())]), prefix),
            class_="frame",
            id=_id(number),
            data_prefix=prefix,
        )
    if len(frames) > _FRAMES:
        text = f"{_FRAMES} of {len(frames)} frames are here; `torch-fakeify report FILE` has the others."
        yield tag("p", text, class_="note")


# --- two frames of one function -----------------------------------------------------------------


def _against(
    earlier: tuple[str, CaptureDesc], later: tuple[str, CaptureDesc], numbers: dict[str, int]
) -> Html:
    """Return two frames of a function side by side, and their differences in words."""
    (file_a, a), (file_b, b) = earlier, later
    links = [
        tag("a", tag("code", clip(file, LONGEST)), href=f"#{_id(numbers[file])}")
        for file in (file_a, file_b)
    ]
    title = tag(
        "h3", tag("code", clip(b.frame or "?", LONGEST)), ": ", links[1], " after ", links[0]
    )
    found = differences(a, b)
    if not found:
        return joined([title, tag("p", "the same frame again", class_="m")])
    rows = [
        [tag("span", what), *[tag("code", clip(text, LONGEST)) for text in (one, other)]]
        for what, one, other in list(_rows(a, b))[:_ROWS]
    ]
    table = tag("div", plain_table(rows, ("", "Before: A", "After: B"), "recompiles-title"),
                class_="against")  # fmt: skip
    words = tag("pre", lines("\n".join(difference_lines(found))), tabindex=0)
    return joined([title, table, tag("details", tag("summary", "Why: the diff"), words, open=True)])


def _rows(a: CaptureDesc, b: CaptureDesc) -> Iterator[tuple[str, str, str]]:
    """Yield what differs: the columns of the index, inputs, and guards that one frame alone has."""
    for label, one, other in zip(
        FRAME_COLUMNS, capture_row("", a), capture_row("", b), strict=True
    ):
        if one.strip() != other.strip():
            yield label, one.strip(), other.strip()
    inputs_a, inputs_b = _inputs(a), _inputs(b)
    for name in dict.fromkeys([*inputs_a, *inputs_b]):
        one, other = inputs_a.get(name, "\u2013"), inputs_b.get(name, "\u2013")
        if one != other:
            yield name, one, other
    guards_a, guards_b = _guards(a), _guards(b)
    for text in dict.fromkeys([*guards_a, *guards_b]):
        if (text in guards_a) != (text in guards_b):
            one, other = (text if text in of else "\u2013" for of in (guards_a, guards_b))
            yield "guard", one, other


def _inputs(desc: CaptureDesc) -> dict[str, str]:
    """Return the inputs of a frame as text, by name."""
    return {entry.name: input_text(entry) for entry in readable_frame(desc).inputs}


def _guards(desc: CaptureDesc) -> list[str]:
    names = ReadableNames(desc, by_order=True)
    return [names.expr(guard.expr) for guard in desc.guards]
