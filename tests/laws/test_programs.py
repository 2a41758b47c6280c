"""Small programs of every kind: recorded in one process, compiled and run in another."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from program_runs import FAST, SLOW, replayed
from program_zoo import Program, programs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What became of the fast programs."""
    return replayed(tmp_path_factory, slow=False)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What became of the slow programs."""
    return replayed(tmp_path_factory, slow=True)


def _read(directory: Path, program: Program, kind: str) -> dict[str, Any]:
    return json.loads((directory / f"{program.name}.{kind}.json").read_text())


def _check(directory: Path, program: Program) -> None:
    recorded = _read(directory, program, "record")
    assert recorded["error"] is None, recorded["traceback"]
    assert len(recorded["frames"]) == program.frames
    found = _read(directory, program, "replay")
    assert not found["wrong"], "\n".join(found["wrong"])


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
    found = _read(fast, programs()["custom_op"], "replay")
    assert found["missing"] == (
        "UnknownNameError: $.nodes[1].target: torch.ops.programs.scale is not registered in this "
        "process. Use --import program_ops, or import program_ops first in Python; to compile only, "
        "`Capture.operator_stubs`"
    )
