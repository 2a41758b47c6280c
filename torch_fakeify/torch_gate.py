"""Which torch is let in: a known one at once, a newer one when the census finds nothing unknown.

``_torch.py`` asks before it imports anything private. What is refused is so each time that it is
asked for, since a module whose import fails is imported anew; what does without torch is not concerned.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from .errors import VersionError
from .versions import TorchVersionWarning, accepted_text, known_torch_text, standing_of

__all__ = ["check", "refusal_of"]

_FOLDER = str(Path(__file__).parent)
_LISTED = 7
"""Findings that an error lists."""
_LONGEST = 90
"""Characters of one of them."""


def check(torch: str) -> None:
    """Let a version of torch in, or refuse it.

    A known release costs nothing. Of any other but an older one the census is taken: if it finds
    nothing, there is one warning, at the line outside of this package that came here.

    Args:
        torch: as ``torch.__version__`` has it.

    Raises:
        VersionError: it is older than what is known, or the census finds what is not known.
    """
    if standing_of(torch) == "known":
        return
    error = refusal_of(torch)
    if error is not None:
        raise error
    filename, line = _caller()
    warnings.warn_explicit(accepted_text(torch), TorchVersionWarning, filename, line)


def refusal_of(torch: str) -> VersionError | None:
    """Why a version of torch is refused, or ``None`` if it is not; may take the census."""
    standing = standing_of(torch)
    if standing == "known":
        return None
    if standing == "older":
        return VersionError(
            "this torch is too old for torch_fakeify",
            expected=known_torch_text(),
            found=f"torch {torch}",
            fix="Upgrade torch. What needs none works: show, diff, report and doctor",
        )
    from .torch_census import take_census

    findings = take_census().findings
    if not findings:
        return None
    return VersionError(
        "this torch is not one that this release of torch_fakeify knows, and the census finds what no "
        "table has",
        expected=known_torch_text(),
        found=f"torch {torch} with {_listed(findings)}",
        fix="Upgrade torch_fakeify, or use a torch that it knows. `torch-fakeify doctor` lists all; "
        "what needs no torch works: show, diff and report",
    )


def _listed(findings: tuple[str, ...]) -> str:
    short = (
        text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
        for text in findings[:_LISTED]
    )
    more = len(findings) - _LISTED
    return ", ".join(short) + (f", and {more} more" if more > 0 else "")


def _caller() -> tuple[str, int]:
    """The file and the line outside of this package and of the import system that led here."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_on_the_way(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _is_on_the_way(filename: str) -> bool:
    return filename.startswith(_FOLDER) or "importlib" in filename
