"""The command ``demo``: a backend fails on a small model; the failure is recorded, replayed and minified."""

from __future__ import annotations

import os
import shlex
import signal
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torch_fakeify._atomic_write import write_atomic
from torch_fakeify.frames.capture_folders import new_folder
from torch_fakeify.tools.replaying import replay_capture
from torch_fakeify.tools.reporting import report
from torch_fakeify.tools.run_script import run

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

_FOLDER = "torch-fakeify-demo"
_BACKEND = "chip:compiler"
_FILES = {
    "chip.py": '''\
"""A backend of torch.compile with a planted bug: it has no code for one operation."""


def compiler(gm, example_inputs):
    for node in gm.graph.nodes:
        if "cumsum" in str(node.target):
            raise NotImplementedError("chip has no code for cumsum")
    return gm.forward
''',
    "train.py": '''\
"""A small model, compiled with the backend of chip.py."""

import torch
from chip import compiler


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    def __init__(self, width=32, depth=2):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return torch.softmax(torch.cumsum(x, dim=-1), dim=-1)


try:
    torch.compile(Model(), backend=compiler)(torch.randn(8, 32))
except Exception as error:
    raise SystemExit(1) from error  # without a traceback: run shows the error
''',
}
_INTERVAL = 1.0
"""Seconds between two signs of life."""


class _Stop(Exception):  # noqa: N818 - it does not leave this module
    """Raised by a step that did not do what it says."""


def show_tour(say: Callable[[str], None]) -> tuple[Path, str]:
    """Make a folder in the current one, and do there what a user with a failing frame does.

    ``say`` prints a part of a line. Returns the folder, and what a step did that did not do what it says;
    empty if all did.

    Raises:
        WriteError: the folder cannot be written.
        KeyboardInterrupt: Ctrl-C ended it; the files until then are in the folder.
    """
    folder = new_folder(Path.cwd(), _FOLDER).path
    folder.mkdir(exist_ok=True)
    for name, text in _FILES.items():
        write_atomic(folder / name, text.encode())
    say("A model is compiled by a backend that cannot compile one of its operations.\n")
    say(f"train.py and chip.py are in {folder.name}/, with what the steps leave.\n\n")
    with _working_in(folder):
        try:
            small = _steps(say)
        except _Stop as stop:
            say(f"\nThis step did not do what it says: {stop}\n")
            return folder, str(stop)
    say(f"\nAll files are in {folder}\n")
    say(f"Next: cd {shlex.quote(folder.name)}, then look at the page in a browser, or run\n")
    say(f"  python {small}\n  torch-fakeify show {small.with_suffix('.fkf')}\n")
    return folder, ""


def _steps(say: Callable[[str], None]) -> Path:
    """Do each step as its command does it; return the script."""
    with _step(say, "1. record it", "torch-fakeify run --out . train.py"):
        ran = run("train.py", directory=".")
    if ran.ending == "interrupted":
        raise KeyboardInterrupt
    failed = [frame.path for frame in ran.frames if frame.path and frame.state == "failed"]
    if len(failed) != 1:
        raise _Stop(f"{len(failed)} failing frames are on record, not 1: {ran}")
    (path,) = failed
    path = path.relative_to(Path.cwd())
    say(f"   {path}, {path.stat().st_size:,} bytes\n   {ran.frames[0].failure}\n\n")

    command = f"torch-fakeify replay --backend {_BACKEND} {path}"
    with _step(say, "2. replay it from this file alone, in another process", command):
        again = replay_capture(path, backend=_BACKEND)
    if again.verdict != "reproduced":
        raise _Stop(str(again))
    say(f"   {again.verdict}\n\n")

    command = f"torch-fakeify minify --backend {_BACKEND} {path}"
    with _step(say, "3. minify it to the operations that still fail", command):
        from torch_fakeify.tools.minify.search import minify  # imports torch, which takes seconds

        small = minify(path, backend=_BACKEND)
    if small.interrupted:
        raise KeyboardInterrupt
    if not small.holds or small.script is None or small.after >= small.before:
        raise _Stop(str(small))
    say(f"   operations: {small.before.operations} -> {small.after.operations}; ")
    say(f"the script {small.script_state}\n   {small.script}\n\n")

    with _step(say, "4. write a page for a browser", f"torch-fakeify report {path}"):
        page = report(path).path
    if "chip has no code for cumsum" not in page.read_text(encoding="utf-8"):
        raise _Stop(f"the page does not have the failure: {page}")
    say(f"   {page}\n")
    return small.script


@contextmanager
def _step(say: Callable[[str], None], title: str, command: str) -> Generator[None]:
    """Print what a step does and the command for it, then a dot each second until it is done."""
    say(f"{title}\n   $ {command}\n   ")
    ended = threading.Event()

    def work() -> None:
        signal.pthread_sigmask(
            signal.SIG_BLOCK, signal.valid_signals()
        )  # the main thread gets them
        while not ended.wait(_INTERVAL):
            say(".")

    ticker = threading.Thread(target=work, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        ended.set()
        ticker.join()
        say("\n")


@contextmanager
def _working_in(folder: Path) -> Generator[None]:
    """Change the working directory, from which processes import the backend."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
