"""Capture files: a frame's record in a container, read and written without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .codec import Decoder, Encoder
from .container import Limits, read_container, write_container
from .desc_frame import CaptureDesc

if TYPE_CHECKING:
    import os

PRODUCER = "torch_fakeify 0.1"
_MEMBER = "capture"


def write_capture(path: str | os.PathLike[str], desc: CaptureDesc) -> int:
    """Write a capture file, whole or not at all, and return its size in bytes.

    Raises:
        WriteError: the file cannot be written; what was there before is untouched.
    """
    members = Encoder().add(_MEMBER, desc).members()
    write_container(path, members, producer=PRODUCER, torch=desc.torch_version)
    return Path(path).stat().st_size


def read_capture(path: str | os.PathLike[str], *, limits: Limits | None = None) -> CaptureDesc:
    """Read a capture file. Runs no code of the file and imports no torch.

    Args:
        path: the file.
        limits: what it may ask for.

    Raises:
        FormatError: no such file, not a capture, truncated, or ill-typed.
        VersionError: it needs a format version or a feature that is not known here.
        LimitError: it asks for more than ``limits`` allow.
    """
    limits = limits or Limits()
    members = read_container(path, limits=limits).members
    decoder = Decoder(members, limits.expr_nodes)
    del members["tables.json"]  # read, and large
    desc = decoder.get(_MEMBER, CaptureDesc)
    if desc.shape_env is not None:
        decoder.check_exponents(desc.shape_env)
    return desc
