"""The aliasing diagram of a report: storages with their tensors, drawn to scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_fakeify.render.text import clip, int_text, sym_text, tensor_text

from .html import Html, joined, tag
from .lines import LONGEST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_fakeify.records.aliasing import StorageGroup, StorageRange, TensorPlacement

_WIDTH = 1000
"""Units of a diagram, which the browser scales."""
_DRAWN = 200
"""Most storages that are drawn, and most tensors of one."""
_UNFOLDED = 12
"""Most storages with a single tensor whose list is unfolded."""
_LISTED = 10_000


def aliasing_html(found: Sequence[StorageGroup]) -> Html:
    """Return the HTML of shared storages, then of storages with a single tensor."""
    drawn = [shared for shared in found if not shared.is_plain]
    plain = [shared for shared in found if shared.is_plain]
    parts = [_figure(shared) for shared in drawn[:_DRAWN]]
    if len(drawn) > _DRAWN:
        parts.append(tag("p", f"and {len(drawn) - _DRAWN} more such storages", class_="note"))
    if not drawn:
        parts.append(tag("p", "No two tensors share a storage, and none is a view.", class_="note"))
    if plain:
        parts.append(_plain(plain))
    return joined(parts)


def bytes_text(nbytes: int | None) -> str:
    """Return a number of bytes as text."""
    if nbytes is None:
        return "an unknown number of bytes"
    return "1 byte" if nbytes == 1 else f"{_digits(nbytes)} bytes"


def _digits(n: int) -> str:
    return f"{n:,}" if n.bit_length() < 128 else int_text(n)


def _figure(shared: StorageGroup) -> Html:
    symbolic = not isinstance(shared.storage.nbytes, int)
    caption = [
        tag("strong", f"Storage {shared.storage.id}"),
        f", {bytes_text(shared.nbytes)}",
        f" at the hints: {clip(sym_text(shared.storage.nbytes), LONGEST)}" if symbolic else "",
    ]
    most = [each.place.end for each in shared.tensors if each.place is not None]
    total = max([shared.nbytes or 0, *most, 1])
    rows = [_row(each, total) for each in shared.tensors[:_DRAWN]]
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


def _row(each: TensorPlacement, total: int) -> Html:
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


def _plain(plain: Sequence[StorageGroup]) -> Html:
    rows = [
        tag(
            "li",
            tag("code", clip(shared.tensors[0].names[0], LONGEST), class_="s"),
            tag("span", bytes_text(shared.nbytes), class_="t"),
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
