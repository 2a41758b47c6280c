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
import subprocess
import sys
import termios
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from processes import COMMAND, environment

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


def typed(command: str, folder: Path) -> tuple[int, list[str]]:
    """Run a command in a terminal; return its exit status, and the lines that are left on the screen."""
    words = shlex.split(command)
    starts = {"torch-fakeify": COMMAND, "python": ()}
    terminal, other_side = pty.openpty()
    fcntl.ioctl(other_side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    process = subprocess.Popen(
        [sys.executable, *starts[words[0]], *words[1:]],
        cwd=folder, env=environment(TERM="xterm", NO_COLOR="1"),
        stdin=other_side, stdout=other_side, stderr=other_side,
    )  # fmt: skip
    os.close(other_side)
    out = b""
    with suppress(OSError):  # the other side is closed
        while part := os.read(terminal, 1 << 16):
            out += part
    os.close(terminal)
    lines = out.decode().replace("\r\n", "\n").split("\n")
    return process.wait(), [line.rpartition("\r")[2].rstrip() for line in lines]


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
    status, lines = typed("torch-fakeify run train.py", tmp_path)
    assert status == 1
    check_width(own(lines))
    text = "\n".join(own(lines))
    assert re.search(r"your line +layers\.py:14: y = torch\.cumsum\(y, 0\)", text)
    assert re.search(r"error +NotImplementedError: chip has no code for node y_1", text)

    minify = command_in(own(lines), "torch-fakeify minify")
    (file,) = [word for word in minify.split() if word.endswith(".fkf")]
    status, lines = typed(f"torch-fakeify show {file}", tmp_path)
    assert status == 0
    check_width(lines)
    assert len(lines) <= 40
    text = " ".join(" ".join(lines).split())
    assert "at node y_1 = torch.cumsum(y, 0) (named in the message; layers.py:14 in forward" in text
    assert command_in(lines, "torch-fakeify minify") == minify

    status, lines = typed(minify, tmp_path)
    assert status == 0, lines
    check_width(lines)
    assert "operations: 6 -> 1" in lines
    assert "script: fails in the same way" in lines
    script = command_in(lines, "python")
    status, lines = typed(script, tmp_path)
    assert status == 1
    assert any("NotImplementedError: chip has no code for node" in line for line in lines)
    assert not any("torch_fakeify" in line for line in lines), "the script uses torch alone"


def check_width(lines: list[str]) -> None:
    """Check that no line is longer than the terminal, but for a path that nothing can divide."""
    for line in lines:
        assert len(line) <= COLUMNS or " " not in line.strip(), line
