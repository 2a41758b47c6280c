"""Runs of the command line, and the captures of one script."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from processes import COMMAND, fresh

from torch_fakeify import cli

SCRIPT = """
import sys

import torch

print("argv", sys.argv, __name__, __file__, sys.path[0], __spec__)


def mine(gm, inputs):
    return gm.forward


class Failing:
    def __call__(self, gm, inputs):
        raise ValueError(f"cannot compile {len(inputs)} inputs")


class Net(torch.nn.Module):
    def forward(self, x):
        if x.shape[0] > 3:
            return x.sin() + 1
        return x


@torch.compile(backend="eager")
def breaks(x):
    y = x + 1
    print("a graph break")
    return y * 2


x = torch.randn(4, 8)
torch.compile(lambda x: x + 1, backend="aot_eager")(x)
torch.compile(lambda x: x + 2, backend=mine)(x)
torch.compile(lambda x: x + 3, options={"max_fusion_size": 8})(x)
net = Net()
net.compile(backend="eager", dynamic=True)
net(x)
breaks(x)
torch.compile(lambda x: x + x.view(-1)[0], backend=Failing())(x)
"""
ROWS = 7


Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs the command in this process, in a directory."""

    def run(*args: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(cwd)
        torch._dynamo.reset()
        capfd.readouterr()
        try:
            status = cli.main([*map(str, args)])
        except SystemExit as usage:
            status = int(usage.code or 0)
        out, err = capfd.readouterr()
        return subprocess.CompletedProcess(args, status, out, err)

    return run


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """The one error of a command that was refused."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert "torch_fakeify/" not in done.stderr, "a traceback of ours"
    lines = [line for line in done.stderr.splitlines() if line.startswith("torch-fakeify")]
    assert len(lines) == 1, done.stderr
    return lines[0].removeprefix("torch-fakeify: error: ")


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """What ``run`` did with the script above; its captures are in ``captures/script`` beside it."""
    home = tmp_path_factory.mktemp("run")
    (home / "code").mkdir()
    (home / "code" / "script.py").write_text(SCRIPT)
    options = ("--out", "x", "-h", "b c")
    done = fresh(*COMMAND, "run", "code/script.py", *options, cwd=home, status=None)
    done.args = home
    return done


@pytest.fixture
def fresh_dynamo() -> None:
    """Dynamo has compiled nothing."""
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def captures(recorded: subprocess.CompletedProcess[str]) -> list[Path]:
    """The files that ``run`` wrote, in order."""
    return sorted((Path(str(recorded.args)) / "captures" / "script").iterdir())


@pytest.fixture(scope="session")
def dynamic(captures: list[Path]) -> Path:
    """The capture of the module with a dynamic size and a guard."""
    return captures[3]
