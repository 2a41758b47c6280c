"""Python in processes of its own, which can import the package."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from places import HARNESS, IMPORTABLE, ROOT

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Callable

PACKAGE = str(Path(tfk.__file__).parents[1])
"""The folder that has to be on the path."""
COMMAND = ("-m", "torch_fakeify")
"""What starts the command line."""


def environment(**variables: str) -> dict[str, str]:
    """The variables of this process, with the package on the path, and others."""
    known = filter(None, [os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([PACKAGE, *known]), **variables}


def fresh(
    *args: str | Path,
    cwd: Path | None = None,
    status: int | None = 0,
    interpreter: str = sys.executable,
    before: tuple[str | Path, ...] = (),
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run Python, and see how it ends.

    Args:
        args: of the interpreter: a script, ``-c`` and code, `COMMAND`.
        cwd: the working directory.
        status: the exit status that it has to end with; ``None`` for any.
        interpreter: the Python.
        before: a program that starts it, with arguments.
        variables: of its environment.
    """
    done = subprocess.run(
        list(map(str, [*before, interpreter, *args])),
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
    )
    assert status is None or done.returncode == status, done.stdout[-4000:] + done.stderr[-4000:]
    return done


def piped(code: str, data: bytes = b"", *, inherits: bool = True, **variables: str) -> bytes:
    """What code writes that reads ``data``, in a process that can import what the tests can.

    ``inherits`` is whether it has the environment of this process.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        input=data,
        capture_output=True,
        check=False,
        env={
            **(os.environ if inherits else {}),
            "PYTHONPATH": os.pathsep.join(sys.path),
            **variables,
        },
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def is_there(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def started(*args: str, **options: Any) -> subprocess.Popen[str]:
    """Start a command in a process of its own, with pipes, which Ctrl-C interrupts.

    The options are those of ``Popen``. The background job of a shell would ignore the signal.
    """
    return subprocess.Popen(
        [sys.executable, *COMMAND, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **{"env": environment(), **options},
    )


def until(
    happened: Callable[[], bool], *running: subprocess.Popen[Any], seconds: float = 300.0
) -> None:
    """Wait until a condition holds that processes bring about, some of which keep running."""
    end = time.monotonic() + seconds
    while not happened():
        assert all(process.poll() is None for process in running), "a process has ended"
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.02)


def python(script: str | Path, *args: str | Path, interpreter: str = sys.executable) -> str:
    """Run a script, which can import what the tests can, and return what it prints.

    Args:
        script: its path from the harness.
        args: of the script.
        interpreter: the Python that runs it.
    """
    path = [*IMPORTABLE, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return fresh(
        HARNESS / script,
        *args,
        cwd=HARNESS,
        interpreter=interpreter,
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        PYTHONPATH=os.pathsep.join(path),
    ).stdout
