"""The command ``report``: a capture, or a directory of them, as one page for a browser."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch_fakeify._atomic_write import check_not_input, check_writable, write_atomic
from torch_fakeify.errors import FakeifyError
from torch_fakeify.render.notebook import InNotebook
from torch_fakeify.render.report.environment import Conditions
from torch_fakeify.render.report.page import ListedFrame, folder_page, html_page
from torch_fakeify.serialization.capture_file import read_capture
from torch_fakeify.serialization.container import Limits

from .capture_files import as_file, output_beside, path_of, read_captures
from .worker.limits import check_bounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_fakeify.records.frame import CaptureDesc

    from .capture_files import CaptureLike


@dataclass(frozen=True)
class WrittenReport(InNotebook):
    """A page that was written.

    Example:
        >>> capture = tfk.capture(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(2)])
        >>> print(tfk.report(capture, "frame.html"))
        wrote frame.html
    """

    path: Path
    """The page."""
    compiled: tuple[str, ...] = ()
    """How the compilation for its stages ended, in lines; empty without stages."""
    errors: tuple[tuple[str, str], ...] = ()
    """File and error of each capture of a directory that cannot be read."""

    def lines(self) -> list[str]:
        """Format the result."""
        return [
            *self.compiled[:1],
            *(f"  {line}" for line in self.compiled[1:]),
            *(f"not read: {file}: {error}" for file, error in self.errors),
            f"wrote {self.path}",
        ]

    def __fspath__(self) -> str:
        return str(self.path)


def report(
    capture: CaptureLike,
    output: str | os.PathLike[str] | None = None,
    *,
    stages: bool = False,
    backend: str | None = None,
    imports: Sequence[str] = (),
    timeout: float = 600.0,
    trust: bool = False,
) -> WrittenReport:
    """Write a capture, or a directory of captures, as one page for a browser, which needs no network.

    Args:
        capture: a capture, the path of its file, or the path of a directory.
        output: the page; by default beside the file of the capture, with ``.html``.
        stages: also compile the frame in a process of its own, for the graphs of AOTAutograd, the graphs
            and code of inductor, and the compile time.
        backend: with stages: name of a Dynamo backend, or ``MODULE:ATTR``; by default the recorded one.
        imports: with stages: modules that the process imports first.
        timeout: with stages: seconds after which the compilation counts as hanging.
        trust: read the file without limits, and set also the settings that could run or write something.

    Raises:
        MissingFileError: there is no such file.
        FormatError: the file is no capture.
        WriteError: the page cannot be written, or would overwrite the capture.
        FakeifyError: the frame cannot be rebuilt here, there is no such backend, a backend is given
            without stages, or stages are asked of a directory.

    Example:
        >>> capture = tfk.capture(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(2)])
        >>> tfk.report(capture, "frame.html").path.name
        'frame.html'
    """
    if isinstance(capture, (str, os.PathLike)) and Path(capture).is_dir():
        if stages:
            raise FakeifyError(
                "--stages is for one capture",
                where=os.fspath(capture),
                found="a directory",
                fix="Give the file of one of its captures",
            )
        return _report_folder(Path(capture), output, trust=trust)
    check_bounds(timeout)
    page = Path(output or output_beside(capture, ".html"))
    source, compiled = path_of(capture), None
    if not stages and (backend is not None or imports):
        raise FakeifyError(
            "--backend and --import are for --stages", fix="Add --stages, in Python stages=True"
        )
    with as_file(capture) as file:
        desc = read_capture(file, limits=Limits.none() if trust else None)
        if source is not None:
            check_not_input(page, source)  # before the compilation, which takes a while
        if stages:
            from .stages import compile_stages

            check_writable(page)
            compiled = compile_stages(
                file, backend=backend, imports=imports, timeout=timeout, trust=trust
            )
    name = None if source is None else source.name
    write_atomic(page, html_page(desc, compiled, _conditions(desc), file=name).encode())
    return WrittenReport(page, () if compiled is None else compiled.verdict)


def _report_folder(
    folder: Path, output: str | os.PathLike[str] | None, *, trust: bool
) -> WrittenReport:
    name = folder.resolve().name or "captures"
    page = Path(output or folder.resolve().parent / f"{name}.html")
    frames: list[ListedFrame] = []
    errors: list[tuple[str, str]] = []
    for file, found in read_captures(folder, limits=Limits.none() if trust else None):
        check_not_input(page, file.path)
        if isinstance(found, str):
            errors.append((file.name, found))
        else:
            frames.append(ListedFrame(file.name, found, _conditions(found)))
    write_atomic(page, folder_page(name, frames, errors).encode())
    return WrittenReport(page, errors=tuple(errors))


def _conditions(desc: CaptureDesc) -> Conditions | None:
    """Return which runtime asserts of a frame follow; torch is imported only for a frame that has some."""
    if not desc.runtime_asserts:
        return None
    try:
        from .unproved import runtime_conditions

        return runtime_conditions(desc)
    except (ImportError, FakeifyError) as error:  # no torch, or one that does not rebuild it
        return Conditions(error=str(error))
