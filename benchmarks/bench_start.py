"""What starting costs, in processes of their own that take turns: CPU seconds.

Run: ``python -m benchmarks.bench_start [--rounds N]``. The first lines stand beside ``import torch``,
which none of these commands does. ``replay`` starts an interpreter that rebuilds and compiles; its
start is all that both processes import before they open the capture, and stands beside an interpreter
that imports the same modules of torch (with what these import) and nothing of ours. The entry point that
``import torch`` loads in every process stands beside that import, with ``TORCH_FAKEIFY_RECORD`` and without. A
checkout is compiled to bytecode first, as pip does with a package that it installs.
"""

from __future__ import annotations

import compileall
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import torch_fakeify as tfk
import torch_fakeify_autoload

from .run import main
from .table import Row, at_most, compare

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

REPLAY = at_most(1.1)
_PARENT = "import torch_fakeify.cli as cli, torch_fakeify.tools.replaying; cli._parser()"
_CHILD = "import torch_fakeify.tools.worker.tasks"
_MODULES = f"{_CHILD}, sys; print(*(m for m in sys.modules if m.split('.')[0] == 'torch'))"


_ENTRY_POINT = (
    "import torch, sys, time; sys.modules.pop('torch_fakeify_autoload', None); "
    "from importlib.metadata import EntryPoint; at = time.process_time_ns(); "
    "EntryPoint('fakeify', 'torch_fakeify_autoload:start', 'torch.backends').load()(); "
    "print(time.process_time_ns() - at)"
)


def rows(rounds: int) -> Iterator[Row]:
    """Every line of the table."""
    compileall.compile_dir(Path(tfk.__file__).parent, quiet=1)
    compileall.compile_file(torch_fakeify_autoload.__file__, quiet=1)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "frame.fkf"))
        save(path)
        light = {
            "import torch_fakeify": ("-c", "import torch_fakeify"),
            "torch-fakeify --help": ("-m", "torch_fakeify", "--help"),
            "torch-fakeify show": ("-m", "torch_fakeify", "show", path),
        }
        for what, args in light.items():
            yield compare(
                what,
                lambda: seconds(("-c", "import torch")),
                lambda args=args: seconds(args),
                rounds=rounds,
                unit="ms",
            )
    for what, directory in (("not set", ""), ("set", "captures")):
        yield compare(
            f"in import torch, TORCH_FAKEIFY_RECORD {what}",
            lambda: seconds(("-c", "import torch")),
            lambda directory=directory: entry_point_seconds(directory),
            rounds=rounds,
            unit="ms",
        )
    theirs = ("-c", _importing(_loaded()))
    yield compare(
        "torch-fakeify replay: until it opens the capture",
        lambda: seconds(("-c", "pass")) + seconds(theirs),
        lambda: seconds(("-c", _PARENT)) + seconds(("-c", _CHILD)),
        rounds=rounds,
        unit="ms",
        budget=REPLAY,
    )


def seconds(args: Sequence[str]) -> float:
    """CPU seconds of one interpreter.

    Raises:
        CalledProcessError: it failed.
    """
    command = [sys.executable, *args]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return usage.ru_utime + usage.ru_stime


def entry_point_seconds(directory: str) -> float:
    """CPU seconds of the entry point in a process of its own, its import included.

    Args:
        directory: of the variable; empty for none.
    """
    env = {**os.environ, "TORCH_FAKEIFY_RECORD": directory}
    command = [sys.executable, "-c", _ENTRY_POINT]
    return int(subprocess.run(command, env=env, check=True, capture_output=True).stdout) / 1e9


def save(path: str) -> None:
    """A small capture."""

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        tfk.capture(gm, inputs).save(path)
        return gm

    torch.compile(lambda x: x * 2 + x.shape[0], backend=backend, dynamic=True)(torch.ones(3, 4))
    torch._dynamo.reset()


def _loaded() -> list[str]:
    """The modules of torch that a replaying interpreter has loaded at its start."""
    command = [sys.executable, "-c", f"import sys, {_MODULES.removeprefix('import ')}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.split()


def _importing(modules: Sequence[str]) -> str:
    lines = ["import importlib, torch", f"for name in {list(modules)!r}:"]
    # Some are made at run time and have no file.
    lines += ["    try: importlib.import_module(name)", "    except ImportError: pass"]
    return "\n".join(lines)


if __name__ == "__main__":
    main(__doc__, rows)
