"""``run`` records modules and child processes, and each run has a folder of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cli_runs import Command, error_of

if TYPE_CHECKING:
    from pathlib import Path

MODULE = """
import multiprocessing, sys, torch

def child(n):
    return torch.compile(lambda x: x * n, backend="eager")(torch.ones(2)).tolist()

if __name__ == "__main__":
    print("argv", sys.argv[1:], sys.path[0], __spec__.name)
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        print(pool.map(child, [3]))
"""


def rows_of(text: str) -> list[str]:
    """The files in the table, with their folder."""
    return [line.split()[0] for line in text.splitlines() if ".fkf " in line]


@pytest.mark.parametrize(
    "method", ["spawn", pytest.param("fork", marks=pytest.mark.long)]
)  # of multiprocessing
@pytest.mark.sweep
def test_a_module_and_its_children_are_recorded(
    command: Command, tmp_path: Path, method: str
) -> None:
    """``run -m`` is ``python -m``; the table has the frames of child processes, in their folders."""
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "prog.py").write_text(MODULE)
    done = command("run", "--out", "out", "-m", "pkg.prog", method, "--out", "x", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    argv = [method, "--out", "x"]
    assert done.stdout.startswith(f"argv {argv} {tmp_path} pkg.prog\n[[3.0, 3.0]]\nfile")
    own, of_child = rows_of(done.stdout)
    assert own.startswith("pkg.prog/000-")
    process = of_child.split("/")[1]
    assert of_child.startswith(f"pkg.prog/{process}/000-")
    assert process.isdecimal()
    assert sorted(map(str, (tmp_path / "out").rglob("*.fkf"))) == sorted(
        str(tmp_path / "out" / row) for row in (own, of_child)
    )


@pytest.mark.sweep
def test_runs_do_not_mix(command: Command, tmp_path: Path) -> None:
    """Two scripts, and two runs of one script, have folders of their own; a failed run leaves none."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(
            f"import torch\ntorch.compile(lambda x: x + {ord(name)}, backend='eager')(torch.ones(2))\n"
        )
    (tmp_path / "c.py").write_text("raise ValueError")
    runs = [command("run", f"{name}.py", cwd=tmp_path) for name in "aab"]
    assert [rows_of(done.stdout)[0].split("/")[0] for done in runs] == ["a", "a-2", "b"]
    assert "found ValueError: " in error_of(command("run", "c.py", cwd=tmp_path))
    shown = command("show", "captures", cwd=tmp_path).stdout
    assert [shown.count(f"\n{name}/000-") for name in ("a", "a-2", "b", "c")] == [1, 1, 1, 0]
    assert sorted(path.name for path in (tmp_path / "captures").iterdir()) == ["a", "a-2", "b"]


@pytest.mark.sweep
def test_a_child_that_fails_or_dies_is_in_the_table(command: Command, tmp_path: Path) -> None:
    """The exit status is 1, though the script ends well."""
    (tmp_path / "s.py").write_text(
        "import subprocess, sys\n"
        "code = '''import os, signal, torch\n"
        "def fails(gm, inputs):\n"
        "    raise ValueError('no')\n"
        "def dies(gm, inputs):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "try:\n"
        "    torch.compile(lambda x: x + 1, backend=fails)(torch.ones(2))\n"
        "except Exception:\n"
        "    torch.compile(lambda x: x + 2, backend=dies)(torch.ones(2))\n"
        "'''\n"
        "subprocess.run([sys.executable, '-c', code], check=False)\n"
    )
    done = command("run", "s.py", cwd=tmp_path)
    assert done.returncode == 1
    first, second = done.stdout.splitlines()[1:3]
    assert first.endswith("failed: ValueError")
    process = second.split("/")[1]
    assert second.endswith(f"not finished: process {process} ended while dies compiled it")
    assert done.stderr.endswith(
        "of 2 frames 1 failed, 1 not finished; the script finished, exit status 0\n"
    )


@pytest.mark.sweep
def test_a_module_that_does_not_exist_is_an_error(command: Command, tmp_path: Path) -> None:
    """The error is Python's."""
    done = command("run", "-m", "no_such_module", cwd=tmp_path)
    assert error_of(done) == (
        "no_such_module: the script ended before it compiled anything; "
        "found ImportError: No module named no_such_module. Run it without recording first"
    )
    assert list(tmp_path.iterdir()) == []
