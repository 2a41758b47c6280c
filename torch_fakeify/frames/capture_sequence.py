"""A sequence of captures that are read from their files. Nothing here imports torch until one is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from pathlib import Path

    from .captures import Capture


class CaptureSequence(Sequence["Capture"]):
    """Captures by their files; each access reads the file."""

    @property
    @abstractmethod
    def paths(self) -> list[Path]:
        """The files of the captures."""

    def __len__(self) -> int:
        return len(self.paths)

    @overload
    def __getitem__(self, index: int) -> Capture: ...
    @overload
    def __getitem__(self, index: slice) -> list[Capture]: ...
    def __getitem__(self, index: int | slice) -> Capture | list[Capture]:
        if isinstance(index, slice):
            return load_captures(self.paths[index])
        return load_captures([self.paths[index]])[0]


def load_captures(paths: Sequence[Path]) -> list[Capture]:
    """Read captures without limits, as the caller has recorded them."""
    from torch_fakeify.serialization.container import Limits

    from .captures import Capture

    return [Capture.load(path, limits=Limits.none()) for path in paths]
