"""Real architectures: recorded in one process, compiled and run in another without their code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the `models` extra: pip install '.[models]'")

pytestmark = [pytest.mark.models, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
FAST = ("llama", "bert")
SLOW = ("mixtral", "vit", "t5", "mamba")


def _python(script: str, *args: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / script), *args],
        capture_output=True,
        text=True,
        env=environment,
        cwd=HERE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def _check(directory: Path, models: tuple[str, ...]) -> None:
    _python("model_record.py", str(directory), *models)
    captures = sorted(str(p) for p in directory.glob("*.fkf"))
    assert len(captures) >= 2 * len(models)
    replayed = [
        json.loads(line) for line in _python("model_replay.py", "aot_eager", *captures).splitlines()
    ]
    assert [r["capture"] for r in replayed] == [Path(c).name for c in captures]
    for result in replayed:
        _check_replayed(result)


def _check_replayed(result: dict[str, Any]) -> None:
    name = result["capture"]
    assert not result["transformers"], name
    assert result["same_results"], name
    assert any(r.startswith("out") for r in result["results"]), name
    assert result["guards_lost"] == [], name
    assert result["guards_new"] == [], name
    assert result["fingerprint_kept"], name


def test_models_replay_in_a_process_without_their_code(tmp_path: Path) -> None:
    """Outputs, gradients and guards of two models equal eager's and process A's."""
    _check(tmp_path, FAST)


@pytest.mark.sweep
def test_more_models_replay_in_a_process_without_their_code(tmp_path: Path) -> None:
    """Outputs, gradients and guards of the other models equal eager's and process A's."""
    _check(tmp_path, SLOW)


@pytest.mark.sweep
@pytest.mark.parametrize("model", ["llama", "bert"])
def test_models_compile_with_inductor_without_their_code(model: str, tmp_path: Path) -> None:
    """A capture compiled by inductor in another process gives eager's outputs and gradients."""
    _python("model_record.py", str(tmp_path), model)
    captures = sorted(str(p) for p in tmp_path.glob("*.fkf"))
    for line in _python("model_replay.py", "inductor", *captures).splitlines():
        result = json.loads(line)
        assert result["same_results"], result["capture"]
        assert not result["transformers"]
