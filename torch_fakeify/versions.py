"""Which releases of this package and of torch wrote a file, beside the ones that read it."""

from __future__ import annotations

import re
import warnings
from typing import Literal, TypeAlias

from . import __version__
from .errors import FormatError, VersionError

__all__ = [
    "KNOWN_TORCH",
    "PRODUCER",
    "Standing",
    "TorchVersionWarning",
    "accepted_text",
    "is_newer",
    "known_torch_text",
    "refusal_of_newer",
    "standing_of",
    "warn_of_torch",
]

KNOWN_TORCH = ((2, 13), (2, 14), (2, 15))
"""The releases of torch that this release is made for and tested with, oldest first.

They are named nowhere else in the package; each has all its patch releases.
"""

Standing: TypeAlias = Literal["known", "older", "unknown"]
"""What a version of torch is to this release."""

_TORCH = re.compile(
    r"\s*v?(?:\d{1,6}!)?(\d{1,6})\.(\d{1,6})(?:\.\d{1,6})*(?P<post>[-_.]?post\d{0,6})?(?P<rest>[^+]*)"
)

PRODUCER = f"torch_fakeify {__version__}"
"""What this release writes into the manifest of a file."""

_RELEASE = re.compile(r"torch_fakeify (\d{1,6}(?:\.\d{1,6}){0,3})")


class TorchVersionWarning(UserWarning):
    """A capture is read with another torch than it was recorded with, or torch is one too new to know."""


def standing_of(torch: str) -> Standing:
    """Whether a version of torch is a known release, older than all of these, or neither.

    A build suffix and the patch number do not matter. What comes before a release, such as a nightly
    or a build from source, is not that release, and what is no version is not known.

    Args:
        torch: as ``torch.__version__`` has it, such as ``2.16.0.dev20261101+cu132``.
    """
    found = _TORCH.match(torch)
    if found is None:
        return "unknown"
    release = int(found[1]), int(found[2])
    if release < KNOWN_TORCH[0]:
        return "older"
    return "known" if release in KNOWN_TORCH and not found["rest"].strip() else "unknown"


def known_torch_text() -> str:
    """The known releases of torch in words."""
    *first, last = (f"{major}.{minor}" for major, minor in KNOWN_TORCH)
    return f"torch {', '.join(first)} or {last}"


def accepted_text(torch: str) -> str:
    """What is said of a torch that is not known and in which the census finds nothing unknown."""
    return (
        f"this is torch {torch[:80]!r}, and this release knows {known_torch_text()}: the census finds "
        "nothing unknown in it, so it is used; torch-fakeify doctor says more"
    )


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
