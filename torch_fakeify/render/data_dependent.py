"""What the message of a data-dependent error says with `torch_fakeify.entailment`: its text, and back."""

from __future__ import annotations

import re
from typing import NamedTuple

_HEADING = "What the facts say (torch_fakeify.entailment):"
_KNOWN = "  known: "
_MORE = re.compile(r"  and (\d+) more")
_NOTHING = "  nothing is known of "
_CHECKS = "It would follow with:"
_OPPOSITE = "Its negation would follow with:"
_UNNAMED = re.compile(r"\((.+): torch's symbols, for which no variable of yours was found\.\)")
_CONDITION = re.compile(r"data-dependent expression (.*?)(?:  ?\(|$)", re.MULTILINE)


class KnownOf(NamedTuple):
    """What is known of the symbols of a condition that does not follow, as texts."""

    known: tuple[str, ...] = ()
    """The facts, each with the line that stated it."""
    more: int = 0
    """How many further facts there are."""
    nothing: str = ""
    """The symbols, if nothing is known of them."""
    checks: tuple[str, ...] = ()
    """Calls of ``torch._check`` from which the condition follows, each with the line before which it stands."""
    opposite: tuple[str, ...] = ()
    """Calls of ``torch._check`` from which its negation follows."""
    unnamed: str = ""
    """The symbols for which torch's names stand, as no variable holds them."""

    def lines(self) -> list[str]:
        """Return the lines of the message, without the first."""
        lines = [f"{_KNOWN}{text}" for text in self.known]
        lines += [f"  and {self.more} more"] if self.more else []
        lines += [f"{_NOTHING}{self.nothing}"] if self.nothing else []
        for intro, checks in self.suggestions():
            lines += [intro, *(f"  {check}" for check in checks)]
        if self.unnamed:
            lines.append(
                f"({self.unnamed}: torch's symbols, for which no variable of yours was found.)"
            )
        return lines

    def suggestions(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return the checks that would do, of each kind of which there are any, under a title."""
        kinds = ((_CHECKS, self.checks), (_OPPOSITE, self.opposite))
        return [(title, checks) for title, checks in kinds if checks]

    def text(self) -> str:
        """Return what is added to the message."""
        return "\n".join([_HEADING, *self.lines()])


def known_in(message: str) -> KnownOf | None:
    """Return what `KnownOf.text` added to a message; ``None`` if nothing was added."""
    _, heading, rest = message.partition(_HEADING)
    if not heading:
        return None
    found = KnownOf()
    checks = "checks"
    for line in rest.removeprefix("\n").split("\n"):
        more, unnamed = _MORE.fullmatch(line), _UNNAMED.fullmatch(line)
        if line.startswith(_KNOWN):
            found = found._replace(known=(*found.known, line.removeprefix(_KNOWN)))
        elif more is not None:
            found = found._replace(more=int(more[1]))
        elif line.startswith(_NOTHING):
            found = found._replace(nothing=line.removeprefix(_NOTHING))
        elif line in (_CHECKS, _OPPOSITE):
            checks = "checks" if line == _CHECKS else "opposite"
        elif line.startswith("  torch._check("):
            found = found._replace(**{checks: (*getattr(found, checks), line[2:])})
        elif unnamed is not None:
            found = found._replace(unnamed=unnamed[1])
        else:  # what torch adds
            break
    return found


def advice_in(message: str) -> list[str]:
    """Return the lines that `KnownOf.text` added to a message, without the first and without indentation."""
    known = known_in(message)
    return [] if known is None else [line.strip() for line in known.lines()]


def without_known(message: str) -> str:
    """Return a message without the lines of the facts, which are not where it failed."""
    known = known_in(message)
    return message if known is None else message.replace(known.text(), "")


def failed_condition(message: str) -> str | None:
    """Return the condition on which torch could not guard; ``None`` of another message."""
    found = _CONDITION.search(message)
    return None if found is None else found[1]
