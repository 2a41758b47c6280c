"""Which recorded frames are of one function, compiled again. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch_fakeify.records.frame import CaptureDesc

T = TypeVar("T")


def recompilations(
    frames: Iterable[tuple[T, CaptureDesc]],
) -> Iterator[tuple[tuple[T, CaptureDesc], tuple[T, CaptureDesc]]]:
    """Yield each frame of a function that was compiled before, after the one before it.

    Args:
        frames: with anything that names them, in the order in which they were compiled.
    """
    last: dict[tuple[object, ...], tuple[T, CaptureDesc]] = {}
    for frame in frames:
        key = _function_key(frame[1])
        if key in last:
            yield last[key], frame
        last[key] = frame


def _function_key(desc: CaptureDesc) -> tuple[object, ...]:
    """Return what frames of one code object, and of one graph that AOTAutograd makes of it, share."""
    fields = {} if desc.shape_env is None else dict(desc.shape_env.co_fields)
    return (
        desc.frame,
        desc.aot and desc.aot.kind,
        *(fields.get(name) for name in ("co_name", "co_filename", "co_firstlineno")),
    )
