"""The keys of the frames of a corpus.

Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_fakeify.records.fingerprint import compile_key
from torch_fakeify.serialization.capture_file import read_capture
from torch_fakeify.tools.replaying import masked

if TYPE_CHECKING:
    from pathlib import Path

    from torch_fakeify.records.frame import CaptureDesc
    from torch_fakeify.serialization.container import Limits


@dataclass(frozen=True)
class FrameKey:
    """The key under which captures of one frame are compiled once."""

    fingerprint: str
    """Of the frame's structure and, if there are any, its settings."""
    failure: tuple[str, str] | None
    """Type and masked message of the recorded failure."""
    backend: str
    """That compiles it."""


def frame_key(desc: CaptureDesc, backend: str | None) -> FrameKey:
    """Return what all captures of a frame that are compiled with one backend have in common.

    Args:
        desc: the frame, with its settings.
        backend: that compiles it; ``None`` for the recorded one.
    """
    return FrameKey(
        compile_key(desc, "structure"), _failure_key(desc), backend or desc.backend_name
    )


def _failure_key(desc: CaptureDesc) -> tuple[str, str] | None:
    if desc.failure is not None:
        return desc.failure.type or desc.failure.kind, masked(desc.failure.message)
    return (desc.state, "") if desc.state == "not finished" else None


def read_keyed(
    path: Path, backend: str | None, *, limits: Limits | None = None
) -> tuple[CaptureDesc, FrameKey]:
    """Read a capture and compute the key of its frame, see `frame_key`.

    Raises:
        FormatError: as of `read_capture`.
    """
    desc = read_capture(path, limits=limits)
    return desc, frame_key(desc, backend)
