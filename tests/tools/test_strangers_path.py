"""From a failing script to a small one, as somebody walks it who reads only what is printed.

Everything is typed in a terminal of 80 columns; each command is one that the one before named.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import struct
import sys
import termios
from typing import TYPE_CHECKING

import pytest
from places import ROOT

if TYPE_CHECKING:
    from pathlib import Path

COLUMNS = 80
FILES = {
    "chips.py": """
import torch


def chip(gm, inputs):
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target is torch.cumsum:
            raise NotImplementedError(f"chip has no code for node {node.name}")
    return gm.forward
""",
    "layers.py": """
import torch
from torch import nn


class Gate(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.proj, self.norm = nn.Linear(dim, dim), nn.LayerNorm(dim)

    def forward(self, x):
        y = self.norm(self.proj(x)).sigmoid()
        if x.shape[0] > 4:
            y = torch.cumsum(y, 0)
        return x * y
""",
    "train.py": """
import torch
from chips import chip
from layers import Gate

model = torch.compile(Gate(8), backend=chip, dynamic=True)
for rows in (3, 14):
    model(torch.randn(rows, 8))
""",
}


class Terminal:
    """A terminal of 80 columns in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def type(self, command: str) -> tuple[int, list[str]]:
        """Run a command; return its exit status, and the lines that are left on the screen."""
        words = shlex.split(command)
        starts = {"torch-fakeify": ["-m", "torch_fakeify"], "python": []}
        argv = [sys.executable, *starts[words[0]], *words[1:]]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "NO_COLOR": "1"}
        environment.pop("COLUMNS", None)
        process, terminal = pty.fork()
        if process == 0:
            os.chdir(self.folder)
            os.execve(argv[0], argv, environment)
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        out = b""
        while part := self._read(terminal):
            out += part
        os.close(terminal)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        lines = out.decode().replace("\r\n", "\n").split("\n")
        return status, [line.rpartition("\r")[2].rstrip() for line in lines]

    @staticmethod
    def _read(terminal: int) -> bytes:
        try:
            return os.read(terminal, 1 << 16)
        except OSError:  # the other side is closed
            return b""


def command_in(lines: list[str], verb: str) -> str:
    """Return the command that is named, as a shell reads it with its continued lines."""
    text = "\n".join(lines).replace("\\\n", " ")
    found = re.search(rf"^ *(?:next +)?({verb} .*)$", text, re.MULTILINE)
    assert found is not None, text
    return " ".join(found[1].split())


def own(lines: list[str]) -> list[str]:
    """Return what the tool printed, after the last line of the script's own traceback."""
    ends = [at for at, line in enumerate(lines) if line.startswith("Set TORCHDYNAMO_VERBOSE")]
    return lines[ends[-1] + 1 :] if ends else lines


@pytest.mark.sweep
def test_from_a_failing_script_to_a_small_one(tmp_path: Path) -> None:
    """`run` names `minify`, which names the script, which fails in the same way with torch alone."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    terminal = Terminal(tmp_path)
    status, lines = terminal.type("torch-fakeify run train.py")
    assert status == 1
    check_width(own(lines))
    text = "\n".join(own(lines))
    assert re.search(r"your line +layers\.py:14: y = torch\.cumsum\(y, 0\)", text)
    assert re.search(r"error +NotImplementedError: chip has no code for node y_1", text)

    minify = command_in(own(lines), "torch-fakeify minify")
    (file,) = [word for word in minify.split() if word.endswith(".fkf")]
    status, lines = terminal.type(f"torch-fakeify show {file}")
    assert status == 0
    check_width(lines)
    assert len(lines) <= 40
    text = " ".join(" ".join(lines).split())
    assert "at node y_1 = torch.cumsum(y, 0) (named in the message; layers.py:14 in forward" in text
    assert command_in(lines, "torch-fakeify minify") == minify

    status, lines = terminal.type(minify)
    assert status == 0, lines
    check_width(lines)
    assert "operations: 6 -> 1" in lines
    assert "script: fails in the same way" in lines
    script = command_in(lines, "python")
    status, lines = terminal.type(script)
    assert status == 1
    assert any("NotImplementedError: chip has no code for node" in line for line in lines)
    assert not any("torch_fakeify" in line for line in lines), "the script uses torch alone"


def check_width(lines: list[str]) -> None:
    """Check that no line is longer than the terminal, but for a path that nothing can divide."""
    for line in lines:
        assert len(line) <= COLUMNS or " " not in line.strip(), line
