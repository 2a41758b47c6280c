"""A capture as an HTML page in a single file, without network access.

Texts of the record are escaped (`html.text`), and the page's Content-Security-Policy permits only its
script and style, by their hashes. Equal captures give equal bytes.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from torch_fakeify._version import __version__

from .frame_sections import FrameSections
from .html import Html, data_block, digest, tag

if TYPE_CHECKING:
    from torch_fakeify.records.frame import CaptureDesc

    from .environment import Conditions
    from .stages import Stages

_SCRIPTS = ("report.js", "picture.js")


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
