"""Releases of this package and of torch: those supported, and those that wrote a file."""

from __future__ import annotations

import re
import warnings
from typing import Literal, TypeAlias

from ._version import __version__
from .errors import FormatError, VersionError

SUPPORTED_TORCH = ((2, 13), (2, 14), (2, 15))
"""The releases of torch that this release supports, oldest first, with all patch releases.

The only list of them in the package.
"""

SupportStatus: TypeAlias = Literal["known", "older", "unknown"]
"""Whether a version of torch is supported (``known``), older than those, or any other."""

_TORCH = re.compile(
    r"\s*v?(?:\d{1,6}!)?(\d{1,6})\.(\d{1,6})(?:\.\d{1,6})*(?P<post>[-_.]?post\d{0,6})?(?P<rest>[^+]*)"
)

PRODUCER = f"torch_fakeify {__version__}"
"""The ``producer`` in the manifest of a file."""

_RELEASE = re.compile(r"torch_fakeify (\d{1,6}(?:\.\d{1,6}){0,3})")


class TorchVersionWarning(UserWarning):
    """A capture was recorded with another torch, or the running torch is newer than those supported.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("ignore", tfk.TorchVersionWarning)
    """


def support_status(torch: str) -> SupportStatus:
    """Return whether a version of torch is supported, older than all supported ones, or neither.

    Build suffix and patch number do not matter. A pre-release, such as a nightly or a build from
    source, is not its release, and text that is no version is ``unknown``.

    Args:
        torch: ``torch.__version__``, such as ``2.16.0.dev20261101+cu132``.
    """
    found = _TORCH.match(torch)
    if found is None:
        return "unknown"
    release = int(found[1]), int(found[2])
    if release < SUPPORTED_TORCH[0]:
        return "older"
    return "known" if release in SUPPORTED_TORCH and not found["rest"].strip() else "unknown"


def supported_torch_text() -> str:
    """Return the supported releases of torch as a phrase."""
    *first, last = (f"{major}.{minor}" for major, minor in SUPPORTED_TORCH)
    return f"torch {', '.join(first)} or {last}"


def accepted_text(torch: str) -> str:
    """Return the warning for a newer torch in which the census finds nothing unknown."""
    return (
        f"this is torch {torch[:80]!r}, and this release supports {supported_torch_text()}: the census "
        "finds nothing unknown, so it is used; torch-fakeify doctor has details"
    )


def warn_of_other_torch(recorded: str, running: str, *, stacklevel: int) -> None:
    """Warn if a capture was recorded with another version of torch than the running one.

    Args:
        recorded: torch's version in the capture, without the local build suffix; empty if unknown.
        running: the running version, in the same form.
        stacklevel: as for ``warnings.warn``, counted from the caller.
    """
    if recorded and recorded != running:
        warnings.warn(
            f"the capture was recorded with torch {recorded[:80]!r}, and this is torch {running!r}: "
            "operators, classes and what torch makes of them may differ",
            TorchVersionWarning,
            stacklevel=stacklevel + 1,
        )


def is_newer(producer: str) -> bool:
    """Return whether a later release than this one wrote a file, by the manifest's ``producer``."""
    found, running = _RELEASE.match(producer), _RELEASE.match(PRODUCER)
    return found is not None and running is not None and _numbers(found[1]) > _numbers(running[1])


def _numbers(release: str) -> list[int]:
    numbers = [int(part) for part in release.split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers


def newer_release_error(
    error: FormatError, where: str, *, producer: str, torch: str
) -> VersionError:
    """Return the error for a file of a later release that cannot be read.

    Args:
        error: the error, which names what is unknown.
        where: the file.
        producer: the release that wrote it, from the manifest.
        torch: the version of torch that recorded it, from the manifest.
    """
    return VersionError(
        "a newer version of torch_fakeify wrote this file, and this one cannot read it",
        where=where,
        expected=f"content that {PRODUCER} supports",
        found=f"{error} (written by {written_by(producer, torch)})",
        fix="Upgrade torch_fakeify",
    )


def written_by(producer: str, torch: str) -> str:
    """Return the writer's releases of this package and of torch as a phrase."""
    return " with ".join(
        filter(None, [producer or "an unknown release", torch and f"torch {torch}"])
    )
