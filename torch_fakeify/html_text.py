"""Text as HTML: whatever is not markup on purpose is escaped.

``tag`` makes elements; a part of one that is no ``Html`` is text of a record, and passes through
``text``. So a file that somebody else wrote can bring neither markup nor control characters.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from typing import TYPE_CHECKING, Any

from .text import escape

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Html", "data_block", "digest", "joined", "lines", "tag", "text"]

_VOID = frozenset({"meta", "input"})


class Html(str):
    """Markup. Only this module and templates of the package make it."""

    __slots__ = ()


def text(value: str) -> Html:
    """A text of a record in one line; what is not printable is written as an escape."""
    return Html(html.escape(escape(value)))


def lines(value: str) -> Html:
    """A text of a record with its line breaks."""
    return Html("\n".join(text(line) for line in value.splitlines()))


def joined(parts: Iterable[str], between: str = "") -> Html:
    """Parts side by side."""
    return Html(_escaped(between).join([_escaped(part) for part in parts]))


def tag(name: str, /, *parts: str, **attributes: str | int | bool | None) -> Html:
    """An element.

    Args:
        name: of the element.
        parts: what it holds: ``Html`` as it is, other text escaped.
        attributes: ``class_`` is ``class``, other underscores are hyphens. ``None`` and ``False``
            leave an attribute out, ``True`` gives it no value.
    """
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        words.append(key if value is True else f'{key}="{_escaped(str(value))}"')
    head = Html(f"<{' '.join(words)}>")
    if name in _VOID:
        return head
    return Html(f"{head}{''.join([_escaped(part) for part in parts])}</{name}>")


def data_block(name: str, value: Any) -> Html:
    """JSON for the page's script, in which no text can end the element or begin another one."""
    data = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    for char in "<>&":
        data = data.replace(char, f"\\u{ord(char):04x}")
    return Html(f'<script type="application/json" id="{name}">{data}</script>')


def digest(content: str) -> str:
    """What a Content-Security-Policy calls a script or style by."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def _escaped(part: str) -> str:
    return part if isinstance(part, Html) else text(part)
