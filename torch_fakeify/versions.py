"""Which releases of this package and of torch wrote a file, beside the ones that read it."""

from __future__ import annotations

import re
import warnings

from . import __version__
from .errors import FormatError, VersionError

__all__ = ["PRODUCER", "TorchVersionWarning", "is_newer", "refusal_of_newer", "warn_of_torch"]

PRODUCER = f"torch_fakeify {__version__}"
"""What this release writes into the manifest of a file."""

_RELEASE = re.compile(r"torch_fakeify (\d{1,6}(?:\.\d{1,6}){0,3})")


class TorchVersionWarning(UserWarning):
    """A capture is read with another version of torch than it was recorded with."""


def warn_of_torch(recorded: str, running: str, *, stacklevel: int) -> None:
    """Warn if a capture was recorded with another torch than the one that is here.

    Args:
        recorded: torch's version as the capture has it, without the local build suffix; empty
            where it is not known.
        running: the version that is here, in the same form.
        stacklevel: as of ``warnings.warn``, counted from the caller.
    """
    if recorded and recorded != running:
        warnings.warn(
            f"the capture was recorded with torch {recorded[:80]!r}, and this is torch {running!r}: "
            "operators, classes and what torch makes of them may differ",
            TorchVersionWarning,
            stacklevel=stacklevel + 1,
        )


def is_newer(producer: str) -> bool:
    """Whether a later release than this one wrote a file, by the manifest's ``producer``."""
    found, own = _RELEASE.match(producer), _RELEASE.match(PRODUCER)
    return found is not None and own is not None and _numbers(found[1]) > _numbers(own[1])


def _numbers(release: str) -> list[int]:
    numbers = [int(part) for part in release.split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers


def refusal_of_newer(error: FormatError, where: str, *, producer: str, torch: str) -> VersionError:
    """What to raise for a file of a later release in which ``error`` was found.

    Args:
        error: the refusal, which names what is unknown.
        where: the file.
        producer: the release that wrote it, as the manifest has it.
        torch: the version of torch that it was recorded with, as the manifest has it.
    """
    return VersionError(
        "a newer version of torch_fakeify wrote this file, and this one cannot read it",
        where=where,
        expected=f"what {PRODUCER} knows",
        found=f"{error} (written by {written_by(producer, torch)})",
        fix="Upgrade torch_fakeify",
    )


def written_by(producer: str, torch: str) -> str:
    """Both versions in one phrase."""
    return " with ".join(
        filter(None, [producer or "an unknown release", torch and f"torch {torch}"])
    )
