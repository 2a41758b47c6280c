"""HTML of captures and results for a notebook: small, self-contained, escaped, without script."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .report.html import Html, lines, tag

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Html", "InNotebook", "folded", "html_block", "html_table"]

_LONGEST = 1000
"""Most lines or rows that are shown."""


class InNotebook:
    """A result that is printed by its ``lines``: ``str()`` of it, of which the HTML is made."""

    __slots__ = ()

    def lines(self) -> list[str]:
        """Format the result, what matters most first."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        return html_block(str(self).splitlines())


def html_block(texts: Sequence[str]) -> Html:
    """Return lines with their spaces and breaks."""
    shown = [*texts[:_LONGEST], *_rest(len(texts))]
    return tag("pre", lines("\n".join(shown)), style="text-align: left; margin: 0")


def html_table(rows: Sequence[Sequence[str]]) -> Html:
    """Return rows as a table."""
    shown = [*rows[:_LONGEST], *((text,) for text in _rest(len(rows)))]
    cells = ([tag("td", cell, style="text-align: left") for cell in row] for row in shown)
    return tag("table", *(tag("tr", *row) for row in cells))


def folded(title: str, content: Html) -> Html:
    """Return content under a title that unfolds it."""
    return tag("details", tag("summary", title), content)


def _rest(count: int) -> Iterable[str]:
    return [f"... and {count - _LONGEST} more"] if count > _LONGEST else []
