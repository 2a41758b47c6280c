"""The section of a report on conditions from data: what failed, and what is left to run time."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch_fakeify.render.data_dependent import failed_condition, known_in
from torch_fakeify.render.readable_names import readable_text
from torch_fakeify.render.text import clip

from .html import Html, joined, lines, tag
from .lines import LONGEST
from .parts import ROWS, Section, box, copied_list, with_torch_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch_fakeify.records.frame import CaptureDesc

UNKNOWN = "Record it with TORCH_FAKEIFY_ENTAILMENT=1 to see what is known and which check would do"
"""What is said of a condition without facts."""


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
