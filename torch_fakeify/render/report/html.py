"""Make HTML, with all text escaped that is not of type ``Html``.

``tag`` makes elements, and passes their other parts through ``text``: an untrusted file can insert
neither markup nor control characters.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from typing import TYPE_CHECKING, Any

from torch_fakeify.render.text import escape

if TYPE_CHECKING:
    from collections.abc import Iterable

_IDS = re.compile(r' (?:id|for|aria-labelledby)="| href="#')
_VOID = frozenset({"meta", "input"})


class Html(str):
    """Markup, made only by this module and templates of the package."""

    __slots__ = ()


def text(value: str) -> Html:
    """Return a text of a record in one line, with characters that are not printable escaped."""
    return Html(html.escape(escape(value)))


def lines(value: str) -> Html:
    """Return a text of a record with its line breaks."""
    return Html("\n".join(text(line) for line in value.splitlines()))


def joined(parts: Iterable[str], between: str = "") -> Html:
    """Return parts joined by a separator."""
    return Html(_escaped(between).join([_escaped(part) for part in parts]))


def tag(name: str, /, *parts: str, **attributes: str | int | bool | None) -> Html:
    """Return an element.

    Args:
        name: the name of the element.
        parts: its content: ``Html`` unchanged, other text escaped.
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
    """Return JSON for the page's script, in which no text can close or open an element or an attribute."""
    data = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    for char in "<>&=":
        data = data.replace(char, f"\\u{ord(char):04x}")
    return Html(f'<script type="application/json" id="{name}">{data}</script>')


def prefixed(content: Html, prefix: str) -> Html:
    """Return markup with a prefix in its ids and in the links to them, for a page with several frames.

    They stand in attributes that this package wrote: neither text nor data can contain ``id="``.
    """
    return Html(_IDS.sub(rf"\g<0>{prefix}", content))


def digest(content: str) -> str:
    """Return the hash of a script or style for a Content-Security-Policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def _escaped(part: str) -> str:
    return part if isinstance(part, Html) else text(part)
