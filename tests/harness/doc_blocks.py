"""Runs the code blocks and console transcripts of README.md and docs/, page by page.

A page has a folder of its own, in which its blocks run from top to bottom:

- ``python`` runs in the interpreter of the test; the blocks of a page share their variables.
- ``output`` is what the ``python`` block before it prints.
- ``console`` has commands behind ``$``, each in a process of its own, with what they print.
- After the comment ``<!-- file: NAME -->`` a block is that file of the folder.
- After the comment ``<!-- not run: REASON -->`` a block is not run.

``[...]`` matches any text. Numbers before a unit of time or memory, process ids, and the columns ``ms`` and
``bytes`` of a table may differ. ``python tests/harness/doc_blocks.py PAGE...`` writes the text that
is printed here into the pages, where it differs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from places import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = ("python", "output", "console")
_BLOCK = re.compile(
    r"^(?:<!-- (?P<note>file|not run): (?P<value>[^\n]*) -->\n\n?)?"
    r"^```(?P<kind>[^\n`]+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_UNITS = r"(?= ?(?:ms|us|s|bytes|[KM]B|MiB|GiB)\b)"
_LOOSE_NUMBER = re.compile(rf"\b\d[\d.,]*{_UNITS}|(?<=process )\d+")
_LOOSE_COLUMNS = {"bytes", "ms"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a page."""

    kind: str
    text: str
    start: int
    line: int
    file: str | None = None
    not_run: str | None = None


def blocks_of(page: str) -> Iterator[Block]:
    """The fenced blocks of the text of a page, in order."""
    for found in _BLOCK.finditer(page):
        note, start = found["note"], found.start("text")
        yield Block(
            kind=found["kind"],
            text=found["text"],
            start=start,
            line=page.count("\n", 0, start) + 1,
            file=found["value"] if note == "file" else None,
            not_run=found["value"] if note == "not run" else None,
        )


def pattern_of(expected: str) -> re.Pattern[str]:
    """A pattern of what may be printed for ``expected``."""
    lines = []
    columns: list[int] = []
    for line in expected.rstrip().split("\n"):
        cells = re.split(r"  +", line.strip())
        if _LOOSE_COLUMNS & set(cells):
            columns = [i for i, cell in enumerate(cells) if cell in _LOOSE_COLUMNS]
        elif columns and len(cells) > max(columns):
            cells = ["\0" if i in columns else cell for i, cell in enumerate(cells)]
        else:
            columns = []
        text = _LOOSE_NUMBER.sub("\0", " ".join(" ".join(cells).split()))
        lines.append(text)
    pattern = re.escape("\n".join(lines)).replace(re.escape("[...]"), ".*?")
    return re.compile(
        pattern.replace("\0", r"\d[\d.,]*").replace(re.escape("\0"), r"\d[\d.,]*"), re.DOTALL
    )


def is_printed(expected: str, found: str) -> bool:
    """Whether a transcript holds: white space within a line does not count."""
    lines = [" ".join(line.split()) for line in found.rstrip().split("\n")]
    return pattern_of(expected).fullmatch("\n".join(lines)) is not None


def commands_of(text: str) -> list[tuple[str, str]]:
    """The commands of a transcript, each with what it prints."""
    parts = re.split(r"^\$ ", text, flags=re.MULTILINE)
    assert not parts[0].strip(), "a transcript begins with a command"
    return [
        (command, printed) for command, _, printed in (part.partition("\n") for part in parts[1:])
    ]


def run_command(command: str, folder: Path) -> str:
    """What a command of a shell prints, on both streams."""
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL, text=True, check=False, timeout=240,
    )  # fmt: skip
    return done.stdout


def install_acme(folder: Path) -> None:
    """Put the example backend on the path as an installed package."""
    source = ROOT / "examples" / "acme_backend"
    info = folder / "acme_backend-0.1.dist-info"
    info.mkdir(parents=True)
    (folder / "acme_backend.py").write_text((source / "acme_backend.py").read_text())
    points = re.search(r"^\[project\.entry-points\.(\w+)\]\n((?:.+\n)+)", (source / "pyproject.toml").read_text(), re.MULTILINE)  # fmt: skip
    assert points
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme_backend\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[{points[1]}]\n{points[2].replace(chr(34), '')}")


class PageRunner:
    """Runs the blocks of one page in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables: dict[str, Any] = {"__name__": "__page__"}
        self.printed = ""
        self.count = 0

    def run(self, block: Block) -> list[tuple[str, str]]:
        """Run one block; returns pairs of the text of the page and what was printed."""
        if block.not_run is not None:
            return []
        if block.file is not None:
            path = self.folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        elif block.kind == "python":
            self.printed = self._run_python(block)
        elif block.kind == "output":
            return [(block.text, self.printed)]
        elif block.kind == "console":
            return [(f"$ {c}\n{p}", f"$ {c}\n{run_command(c, self.folder)}") for c, p in commands_of(block.text)]  # fmt: skip
        return []

    def _run_python(self, block: Block) -> str:
        self.count += 1  # a file of its own: Dynamo and guards read lines from it
        path = self.folder / f"block_{self.count}.py"
        path.write_text(block.text, encoding="utf-8")
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(block.text, path, "exec", dont_inherit=True), self.variables)
        return out.getvalue()


@contextlib.contextmanager
def page_folder(folder: Path) -> Iterator[PageRunner]:
    """A folder to run a page in: the working directory, first on the path, with the example backend."""
    saved = Path.cwd(), dict(os.environ), [*sys.path]
    install_acme(folder / ".packages")
    places = [str(folder / ".packages"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    os.environ["COLUMNS"] = "80"
    sys.path[:0] = [str(folder), str(folder / ".packages")]
    os.chdir(folder)
    torch._dynamo.reset()
    try:
        yield PageRunner(folder)
    finally:
        torch._dynamo.reset()
        os.chdir(saved[0])
        os.environ.clear()
        os.environ.update(saved[1])
        sys.path[:] = saved[2]


def rewrite(page: Path) -> None:
    """Write what the blocks of a page print into the page, where it differs."""
    text = page.read_text(encoding="utf-8")
    changes: list[tuple[Block, str]] = []
    with tempfile.TemporaryDirectory() as name, page_folder(Path(name)) as runner:
        for block in blocks_of(text):
            pairs = runner.run(block)
            if all(is_printed(expected, found) for expected, found in pairs):
                continue
            new = [e if is_printed(e, f) else f"{f.rstrip()}\n" for e, f in pairs]
            changes.append((block, ("\n" if block.kind == "console" else "").join(new)))
    for block, new in reversed(changes):
        print(f"{page.name}:{block.line}")
        text = text[: block.start] + new + text[block.start + len(block.text) :]
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        rewrite(Path(argument).resolve())
