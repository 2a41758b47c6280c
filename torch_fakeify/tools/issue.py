"""The command ``issue``: a capture as the Markdown text of a bug report, with a script that was run."""

from __future__ import annotations

import ast
import platform
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch_fakeify._version import __version__
from torch_fakeify.errors import NotFailingError
from torch_fakeify.frames.backend_choice import choose_backend
from torch_fakeify.render.show import failure_lines, heading_rows, table_lines
from torch_fakeify.render.summary import command_line
from torch_fakeify.render.surroundings import surrounding_rows
from torch_fakeify.render.text import clip, escape
from torch_fakeify.serialization.capture_file import read_capture
from torch_fakeify.serialization.container import Limits
from torch_fakeify.tools.doctor import package_version
from torch_fakeify.tools.minify.failures import Failure, failure_in
from torch_fakeify.tools.minify.repro_script import (
    BackendCode,
    CheckedScript,
    check_script,
    is_script,
    write_checked_script,
)
from torch_fakeify.tools.worker.limits import check_bounds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch_fakeify.records.frame import CaptureDesc
    from torch_fakeify.tools.minify.failures import Outcome

_TITLE = 120
_FENCE = re.compile(r"`{3,}")


@dataclass(frozen=True)
class IssueReport:
    """The text of a bug report."""

    text: str
    """Markdown; its first line is the title."""
    outcome: Outcome | None
    """Whether the script in it fails as the frame does; ``None`` if there is no script."""
    state: str
    """The same in words."""


def issue(
    path: str | Path,
    *,
    backend: str | None = None,
    imports: Sequence[str] = (),
    timeout: float = 600.0,
    trust: bool = False,
) -> IssueReport:
    """Write a capture as the text of a bug report: error, script, how to run it, surroundings, versions.

    The script is that of `minify` beside the capture if there is one, else one of the whole frame; it
    is run, and the text has the outcome.

    Args:
        path: the capture file, best one that `minify` wrote.
        backend: name of the Dynamo backend, or ``MODULE:ATTR``; by default the recorded one.
        imports: modules that the script imports first.
        timeout: seconds to compile the frame once.
        trust: read the file without limits, and write also the settings that could run or write something.

    Raises:
        FormatError: the file is not a capture.
        CaptureError: there is no such backend.
        NotFailingError: neither the capture nor a script beside it has a failure.
    """
    check_bounds(timeout)
    path = Path(path)
    desc = read_capture(path, limits=Limits.none() if trust else None)
    beside = path.with_suffix(".py")
    written = beside.read_text("utf-8", errors="replace") if is_script(beside) else None
    if desc.failure is None:
        failure = _failure_of_script(written)
    else:
        recorded = desc.failure
        failure = Failure(recorded.kind, "compile", recorded.type, recorded.message)
    if failure is None:
        raise NotFailingError(
            "the capture has no failure on record",
            where=str(path),
            fix=f"Run `torch-fakeify minify {path}`, with --accuracy for wrong numbers, and name the "
            "capture that it writes",
        )
    code = BackendCode(backend or desc.backend_name, tuple(imports))
    if written is None:
        if not imports and ":" not in code.name:  # else the script imports it
            choose_backend(desc, backend)
        with tempfile.TemporaryDirectory(prefix="torch-fakeify-") as folder:
            found = write_checked_script(
                Path(folder) / "frame.py",
                desc,
                failure,
                code,
                timeout=timeout,
                stubs=not code.lines(),
                trust=trust,
            )
            written = None if found.path is None else found.path.read_text("utf-8")
    else:
        has_imports = "sys.path" in written
        outcome = check_script(beside, failure, timeout=timeout, imports=has_imports)
        found = CheckedScript(beside, outcome, outcome.text)
    command = _command(path, desc, failure, backend, imports)
    text = "\n".join(_lines(path, desc, failure, found, written, command))
    return IssueReport(text + "\n", found.outcome, found.state)


def _failure_of_script(text: str | None) -> Failure | None:
    """Return the failure that the docstring of a script describes, below its first line."""
    if text is None:
        return None
    try:
        lines = (ast.get_docstring(ast.parse(text)) or "").splitlines()
    except SyntaxError:
        return None
    end = next((i for i, line in enumerate(lines) if line.startswith("Recorded with")), len(lines))
    return failure_in([line for line in lines[1:end] if line])


def _lines(
    path: Path,
    desc: CaptureDesc,
    failure: Failure,
    found: CheckedScript,
    script: str | None,
    command: str,
) -> Iterator[str]:
    first = failure.lines[0].removeprefix("raises: ")
    yield escape(clip(f"# torch.compile with {desc.backend_name}: {first}", _TITLE))
    yield from ("", "## Error", "")
    recorded = failure.lines if desc.failure is None else failure_lines(desc.failure)
    yield from _fenced("text", map(escape, recorded))
    yield from ("", "## How to reproduce", "")
    if script is None:
        yield f"There is no script of this frame ({found.state.removeprefix('none: ')})."
    else:
        yield f"{_verdict(found)} Save it as `frame.py` and run `python frame.py`:"
        yield ""
        yield from _fenced("python", script.rstrip().splitlines())
    yield from ("", f"Or with the capture `{path.name}`, which has neither data nor weights:", "")
    yield from _fenced("console", ["$ pip install torch_fakeify", f"$ {escape(command)}"])
    yield from ("", "## Frame", "")
    yield from _fenced("text", map(escape, table_lines(heading_rows(desc))))
    writer = ("written by", f"torch_fakeify {__version__}, {_versions()}")
    rows = table_lines([*surrounding_rows(desc), writer])
    yield from ("", "## Surroundings and versions", "")
    yield from _fenced("text", map(escape, rows))


def _command(
    path: Path, desc: CaptureDesc, failure: Failure, backend: str | None, imports: Sequence[str]
) -> str:
    """Return the command by which a reader sees the failure of the capture."""
    place = desc.backend_place or ""
    if backend is None and ":" in place and not place.startswith("__main__:"):
        backend = place
    compiles = failure.kind != "wrong" and failure.stage not in ("forward", "backward")
    return command_line("replay" if compiles else "minify --accuracy", path.name, backend, imports)


def _verdict(found: CheckedScript) -> str:
    if found.outcome is not None and found.outcome.fails:
        return f"This script fails in the same way with {_versions(' and ')}."
    return (
        f"This script does **not** fail in the same way with {_versions(' and ')}: "
        f"{escape(found.state).rstrip('.')}."
    )


def _versions(between: str = ", ") -> str:
    return f"torch {package_version('torch') or '?'}{between}Python {platform.python_version()}"


def _fenced(language: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield a code block whose fence is longer than any in the text."""
    lines = list(lines)
    longest = max((len(found) for line in lines for found in _FENCE.findall(line)), default=2)
    fence = "`" * (longest + 1)
    yield f"{fence}{language}"
    yield from lines
    yield fence
