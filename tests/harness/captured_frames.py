"""Captures of small frames, for tests of files and processes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec
import torch

import torch_fakeify as tfk
from torch_fakeify.serialization.capture_file import read_capture, write_capture

if TYPE_CHECKING:
    from pathlib import Path


def captured(directory: Path) -> Path:
    """A capture of a small frame."""
    recorder = tfk.record(directory)
    torch.compile(lambda x: x.sin(), backend=recorder, dynamic=True)(torch.randn(3, 4))
    torch._dynamo.reset()
    return recorder.paths[-1]


def small_and_large(directory: Path) -> tuple[Path, Path]:
    """A small capture, and one that takes so long to write that a writer is often caught at it."""
    small = captured(directory)
    desc = msgspec.structs.replace(read_capture(small), backend=random.randbytes(1 << 20).hex())
    large = directory / "large.fkf"
    write_capture(large, desc)
    return small, large
