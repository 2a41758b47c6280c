"""Check the version of torch: supported, or newer and without findings of the census.

Each module with private names of torch checks before it imports any. A refused version is refused
on each import of such a module; modules without torch work with any version.
"""

from __future__ import annotations

import functools
import sys
import warnings

from torch_fakeify._version import PACKAGE_DIR
from torch_fakeify.errors import VersionError
from torch_fakeify.versions import (
    TorchVersionWarning,
    accepted_text,
    support_status,
    supported_torch_text,
)

_LISTED = 7
"""Most findings that an error lists."""
_LONGEST = 90
"""Most characters of a finding in an error."""


def check_torch_version(torch: str) -> None:
    """Refuse an unsupported version of torch.

    For a newer version the census is taken: without findings there is one warning, at the innermost
    line outside of this package.

    Raises:
        VersionError: it is older than the supported releases, or the census has findings.
    """
    if support_status(torch) == "known":
        return
    error = version_error(torch)
    if error is not None:
        raise error
    filename, line = _caller()
    warnings.warn_explicit(accepted_text(torch), TorchVersionWarning, filename, line)


@functools.cache
def check_installed_torch() -> None:
    """Refuse an unsupported installed torch, once it was accepted without further checks.

    Raises:
        VersionError: as for `check_torch_version`.
    """
    import torch

    check_torch_version(torch.__version__)


def version_error(torch: str) -> VersionError | None:
    """Return the error for a refused version of torch, else ``None``; may take the census."""
    status = support_status(torch)
    if status == "known":
        return None
    if status == "older":
        return VersionError(
            "this torch is too old for torch_fakeify",
            expected=supported_torch_text(),
            found=f"torch {torch}",
            fix="Upgrade torch. Commands without torch work: show, diff, report and doctor",
        )
    from .census import take_census

    findings = take_census().findings
    if not findings:
        return None
    return VersionError(
        "this release of torch_fakeify does not support this torch, and the census finds names that no "
        "table lists",
        expected=supported_torch_text(),
        found=f"torch {torch} with {_listed(findings)}",
        fix="Upgrade torch_fakeify, or use a supported torch. `torch-fakeify doctor` lists all findings; "
        "commands without torch work: show, diff and report",
    )


def _listed(findings: tuple[str, ...]) -> str:
    short = (
        text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
        for text in findings[:_LISTED]
    )
    more = len(findings) - _LISTED
    return ", ".join(short) + (f", and {more} more" if more > 0 else "")


def _caller() -> tuple[str, int]:
    """Return file and line of the innermost caller outside of this package and the import system."""
    frame = sys._getframe(1)
    while (name := frame.f_code.co_filename).startswith(str(PACKAGE_DIR)) or "importlib" in name:
        if frame.f_back is None:
            break
        frame = frame.f_back
    return name, frame.f_lineno
