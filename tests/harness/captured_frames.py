"""Captures of the frames of a function, and files with captures."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import msgspec
import torch

import torch_fakeify as tfk
from torch_fakeify.serialization.capture_file import read_capture, write_capture

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path


def captures_of(
    fn: Callable[..., Any],
    *calls: Sequence[Any] | Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[tfk.Capture]:
    """Return a capture of every frame that Dynamo passes to a backend while a function is called.

    Args:
        fn: the function or module.
        calls: the positional or the keyword arguments of each call.
        settings: of `capture`.
        options: of ``torch.compile``.
    """
    found: list[tfk.Capture] = []

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        found.append(tfk.capture(gm, inputs, **(settings or {})))
        return gm.forward

    torch._dynamo.reset()
    compiled: Any = torch.compile(fn, backend=backend, **options)
    for args in calls:
        _ = compiled(**args) if isinstance(args, dict) else compiled(*args)
    torch._dynamo.reset()
    return found


def only_capture_of(fn: Callable[..., Any], *args: Any, **options: Any) -> tfk.Capture:
    """Return the capture of the only frame of one call of a function."""
    (capture,) = captures_of(fn, args, **options)
    return capture


def recorded_frame(directory: Path, fn: Callable[..., Any], *args: Any, **options: Any) -> Path:
    """Record the only frame of one call of a function, and return its file."""
    recorder = tfk.record(directory)
    torch._dynamo.reset()
    torch.compile(fn, backend=recorder, **options)(*args)
    (path,) = recorder.paths
    return path


def captured(directory: Path) -> Path:
    """A capture of a small frame."""
    return recorded_frame(directory, lambda x: x.sin(), torch.randn(3, 4), dynamic=True)


def small_and_large(directory: Path) -> tuple[Path, Path]:
    """A small capture, and one that takes so long to write that a writer is often caught at it."""
    small = captured(directory)
    desc = msgspec.structs.replace(read_capture(small), backend=random.randbytes(1 << 20).hex())
    large = directory / "large.fkf"
    write_capture(large, desc)
    return small, large
