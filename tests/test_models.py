"""Real architectures: recorded in one process, compiled and run in another without their code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from program_runs import python

pytest.importorskip("transformers", reason="needs the `models` extra: pip install '.[models]'")

pytestmark = [pytest.mark.models, pytest.mark.timeout(900)]

MODELS = ["bert", "t5", "llama", "mixtral", "vit", "mamba"]


def _check_replayed(result: dict[str, Any]) -> None:
    name = result["capture"]
    assert not result["transformers"], name
    assert result["same_results"], name
    assert any(r.startswith("out") for r in result["results"]), name
    assert result["guards_lost"] == [], name
    assert result["guards_new"] == [], name
    assert result["fingerprint_kept"], name


@pytest.mark.sweep
@pytest.mark.parametrize(
    "model", [*MODELS[:2], *(pytest.param(name, marks=pytest.mark.long) for name in MODELS[2:])]
)
def test_a_model_replays_in_a_process_without_its_code(model: str, tmp_path: Path) -> None:
    """Outputs, gradients and guards of a model equal eager's and process A's."""
    python("model_record.py", str(tmp_path), model)
    captures = sorted(str(p) for p in tmp_path.glob("*.fkf"))
    assert len(captures) >= 2
    replayed = [
        json.loads(line) for line in python("model_replay.py", "aot_eager", *captures).splitlines()
    ]
    assert [r["capture"] for r in replayed] == [Path(c).name for c in captures]
    for result in replayed:
        _check_replayed(result)


@pytest.mark.sweep
@pytest.mark.parametrize("model", ["bert", pytest.param("llama", marks=pytest.mark.long)])
def test_models_compile_with_inductor_without_their_code(model: str, tmp_path: Path) -> None:
    """A capture compiled by inductor in another process gives eager's outputs and gradients."""
    python("model_record.py", str(tmp_path), model)
    captures = sorted(str(p) for p in tmp_path.glob("*.fkf"))
    for line in python("model_replay.py", "inductor", *captures).splitlines():
        result = json.loads(line)
        assert result["same_results"], result["capture"]
        assert not result["transformers"]
