"""The command ``bisect``: the first of several interpreters at which the verdict of a capture changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch_fakeify.errors import CaptureError, FakeifyError, check_texts
from torch_fakeify.serialization.capture_file import read_capture
from torch_fakeify.serialization.container import Limits
from torch_fakeify.tools.replaying import masked, replay_capture
from torch_fakeify.tools.worker.interpreters import find_interpreter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch_fakeify.tools.worker.interpreters import Interpreter

_REFUSED = "cannot be rebuilt"


class _Found(NamedTuple):
    word: str
    detail: str
    """What happened, in one line."""

    def same_as(self, other: _Found) -> bool:
        """Whether two interpreters agree; numbers and addresses do not count."""
        if self.word != other.word:
            return False
        return self.word == "compiles" or masked(self.detail) == masked(other.detail)


class Bisection(NamedTuple):
    """The verdicts of the interpreters that were asked."""

    interpreters: tuple[Interpreter, ...]
    found: dict[int, _Found]
    """By position in the list."""
    first: int | None
    """The first interpreter with the verdict of the last one; ``None`` if the first has it too."""

    def lines(self) -> list[str]:
        """Format the verdicts in the order of the list, and the result."""
        lines: list[str] = []
        for at, each in enumerate(self.interpreters):
            verdict = self.found.get(at)
            text = "not asked" if verdict is None else f"{verdict.word}: {verdict.detail}"
            lines.append(f"{each.executable}  {each.text}  {text}")
        if self.first is None:
            lines.append("the first and the last have one verdict: there is nothing to find")
        else:
            each, before = self.interpreters[self.first], self.interpreters[self.first - 1]
            lines.append(f"the verdict changes at {each.executable}: {each.text}")
            lines.append(f"the one before is {before.executable}: {before.text}")
        return lines


def bisect(path: str | Path, pythons: Sequence[str], **options: Any) -> Bisection:
    """Find the first interpreter at which the verdict changes, by halving the list.

    As with any bisection the interpreters between have either the verdict of the first or that of the
    last, and change once.

    Args:
        path: the capture file.
        pythons: executables in order, at least two.
        options: as of `replay_capture`.

    Raises:
        FormatError: the file is no capture.
        CaptureError: an executable is no interpreter with torch.
    """
    check_texts(pythons, "pythons", CaptureError, such_as="['python3.11', 'python3.12']")
    read_capture(path, limits=Limits.none() if options.get("trust") else None)
    interpreters = tuple(map(find_interpreter, pythons))
    found: dict[int, _Found] = {}

    def ask(at: int) -> _Found:
        if at not in found:
            found[at] = _verdict(path, interpreters[at].executable, options)
        return found[at]

    low, high = 0, len(interpreters) - 1
    last = ask(high)
    if ask(low).same_as(last):
        return Bisection(interpreters, found, None)
    while high - low > 1:
        middle = (low + high) // 2
        if ask(middle).same_as(found[low]):
            low = middle
        else:
            high = middle
    return Bisection(interpreters, found, high)


def _verdict(path: str | Path, python: str, options: dict[str, Any]) -> _Found:
    try:
        verdict = replay_capture(path, python=python, **options)
    except FakeifyError as error:
        return _Found(_REFUSED, str(error))
    lines = [line.strip() for line in verdict.details[1:]]
    now = lines.index("now:") + 1 if "now:" in lines else 0
    return _Found(verdict.verdict, next(filter(None, lines[now:]), ""))
