"""The command ``diff``: why two captures are not of one frame. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_fakeify.render.diff import difference_lines, differences, other_surroundings
from torch_fakeify.render.notebook import InNotebook
from torch_fakeify.serialization.capture_file import read_capture
from torch_fakeify.serialization.container import Limits

from .capture_files import as_file

if TYPE_CHECKING:
    from torch_fakeify.render.diff import Difference

    from .capture_files import CaptureLike


@dataclass(frozen=True)
class FrameDiff(InNotebook):
    """The differences of two frames.

    Example:
        >>> graph = torch.fx.symbolic_trace(torch.nn.ReLU())
        >>> a, b = (tfk.capture(graph, [torch.ones(n)]) for n in (2, 3))
        >>> for difference in tfk.diff(a, b).differences:
        ...     print(f"{difference.part}: {difference.text}")
        inputs: input_1.size(0): 2 against 3
    """

    differences: tuple[Difference, ...]
    """The most important first; empty for equal frames."""
    elsewhere: tuple[Difference, ...]
    """How backends, results and machines differ, which does not make one frame two."""

    @property
    def is_one_frame(self) -> bool:
        """Whether the frames are equal; then the command exits with 0."""
        return not self.differences

    def lines(self) -> list[str]:
        """Format the differences by part."""
        return [
            *(difference_lines(self.differences) or ["one frame"]),
            *difference_lines(self.elsewhere),
        ]


def diff(a: CaptureLike, b: CaptureLike, *, trust: bool = False) -> FrameDiff:
    """Compare two frames in terms of the user's program.

    Args:
        a: a capture, or the path of its file.
        b: another one.
        trust: read the files without limits.

    Raises:
        MissingFileError: there is no such file.
        FormatError: a file is no capture.

    Example:
        >>> graph = torch.fx.symbolic_trace(torch.nn.ReLU())
        >>> a, b = (tfk.capture(graph, [torch.ones(n)]) for n in (2, 2))
        >>> tfk.diff(a, b).is_one_frame
        True
    """
    limits = Limits.none() if trust else None
    with as_file(a) as first, as_file(b) as second:
        one, other = read_capture(first, limits=limits), read_capture(second, limits=limits)
    return FrameDiff(tuple(differences(one, other)), tuple(other_surroundings(one, other)))
