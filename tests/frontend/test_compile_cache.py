"""The compile cache of ``examples/compile_cache.py``, in several processes."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from places import ROOT
from processes import environment

if TYPE_CHECKING:
    from pathlib import Path

TRACED = ["first-v1: traced"] * 2 + ["second-v1: traced"] * 2 + ["compiled: 2 graphs"]
FOUND = ["first-v1: found"] * 2 + ["second-v1: found"] * 2 + ["compiled: 2 graphs"]
"""Two entries for each layer, of which those of equal structure share compiled code."""


def start(directory: Path, backend: str = "aot_eager", **env: str) -> subprocess.Popen[str]:
    """Start the example on a cache."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / "compile_cache.py"), str(directory), backend],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**env),
    )


def lines(process: subprocess.Popen[str]) -> list[str]:
    """Return what the example printed; it must have ended well."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return [line.strip() for line in out.splitlines()]


@pytest.mark.sweep
def test_another_process_does_not_trace(tmp_path: Path) -> None:
    """It finds the entry of each size by its guards, and gets the results of Python."""
    assert lines(start(tmp_path)) == TRACED
    files = sorted(path.name for path in tmp_path.rglob("*.*") if path.is_file())
    assert lines(start(tmp_path)) == FOUND
    assert sorted(path.name for path in tmp_path.rglob("*.*") if path.is_file()) == files
    assert len(files) == 8


@pytest.mark.sweep
def test_processes_write_one_cache_at_a_time(tmp_path: Path) -> None:
    """Each gets right results, whatever the others write, and the entries are those of one."""
    for process in [start(tmp_path) for _ in range(3)]:
        printed = lines(process)
        assert len(printed) == 5
        assert printed[-1] == "compiled: 2 graphs"
    assert lines(start(tmp_path)) == FOUND
    assert len(list(tmp_path.rglob("*.guards"))) == 4
    assert not list(tmp_path.rglob("tmp*"))


@pytest.mark.sweep
def test_inductor_finds_its_own_entries(tmp_path: Path) -> None:
    """In the second process, inductor takes the code of each graph from its cache."""
    code = tmp_path / "inductor"
    env = {
        "TORCHINDUCTOR_CACHE_DIR": str(code),
        "TORCHINDUCTOR_VEC_ISA_OK": "0",  # known without a compilation for each instruction set
        "TORCH_LOGS": "+torch._inductor.codecache",
    }
    assert lines(start(tmp_path / "cache", "inductor", **env)) == TRACED
    second = start(tmp_path / "cache", "inductor", **env)
    out, err = second.communicate(timeout=300)
    assert [line.strip() for line in out.splitlines()] == FOUND, err
    assert err.count("fx graph cache hit") == 2
    assert "fx graph cache miss" not in err
