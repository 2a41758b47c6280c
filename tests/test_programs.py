"""Small programs of every kind: recorded in one process, compiled and run in another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from program_zoo import Program, programs

pytestmark = pytest.mark.timeout(600)

HERE = Path(__file__).parent
FAST = [p for p in programs().values() if not p.slow]
SLOW = [p for p in programs().values() if p.slow]


def _python(script: str, *args: str) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / script), *args],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=HERE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def _record_and_replay(chosen: list[Program], directory: Path) -> Path:
    """All programs through one recording and one replaying process, once for all workers."""
    directory.mkdir(exist_ok=True)
    with FileLock(directory / "lock"):
        done = directory / "done"
        if not done.exists():
            _python("program_record.py", str(directory), *(p.name for p in chosen))
            entries = [f"{p.name}:{p.backend}:{'ops' if p.ops else ''}" for p in chosen]
            _python("program_replay.py", str(directory), *entries)
            done.touch()
    return directory


def _shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What became of the fast programs."""
    return _record_and_replay(FAST, _shared(tmp_path_factory) / "programs")


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What became of the slow programs."""
    return _record_and_replay(SLOW, _shared(tmp_path_factory) / "slow_programs")


def _read(directory: Path, program: Program, kind: str) -> dict[str, Any]:
    return json.loads((directory / f"{program.name}.{kind}.json").read_text())


def _check(directory: Path, program: Program) -> None:
    recorded = _read(directory, program, "record")
    if program.refused is not None:
        assert program.refused in (recorded["error"] or ""), recorded["error"]
        return
    assert recorded["error"] is None, recorded["traceback"]
    assert len(recorded["frames"]) == program.frames
    replayed = _read(directory, program, "replay")
    assert not replayed["wrong"], "\n".join(replayed["wrong"])


@pytest.mark.parametrize("program", FAST, ids=lambda p: p.name)
def test_a_program_replays_in_a_process_without_its_code(program: Program, fast: Path) -> None:
    """Outputs, mutations, gradients, guards and fingerprint are those of the recorded process."""
    _check(fast, program)


@pytest.mark.sweep
@pytest.mark.parametrize("program", SLOW, ids=lambda p: p.name)
def test_a_slow_program_replays_in_a_process_without_its_code(program: Program, slow: Path) -> None:
    """Outputs, mutations, gradients, guards and fingerprint are those of the recorded process."""
    _check(slow, program)


def test_the_table_is_large_and_described() -> None:
    """At least a hundred programs, each described by one sentence."""
    table = programs()
    assert len(table) >= 100
    for p in table.values():
        assert p.sentence.endswith("."), p.name
        assert "\n" not in p.sentence, p.name


def test_a_reader_without_a_custom_operator_is_told_which(fast: Path) -> None:
    """The error names the operator and says what to import."""
    replayed = _read(fast, programs()["custom_op"], "replay")
    assert replayed["missing"] == (
        "UnknownNameError: $.nodes[1].target: torch.ops.programs.scale is not registered in this "
        "process. Import the package that registers the operators of 'programs' first."
    )
