"""Real architectures: recorded in one process, compiled and run in another without their code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from program_runs import python

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("transformers", reason="needs the `models` extra: pip install '.[models]'")

pytestmark = [pytest.mark.models, pytest.mark.timeout(900)]

ZOO = ["llama", "mixtral", "gpt2", "bert", "t5", "vit", "whisper", "mamba", "swin"]
MODELS = ["bert", "t5", "llama", "mixtral", "vit", "mamba"]


def _check_replayed(model: str, backend: str, directory: Path) -> None:
    names = [f"model_{model}_{kind}" for kind in ("inference", "training")]
    python("program_record.py", str(directory), *names)
    python("program_replay.py", str(directory), *(f"{name}:{backend}:" for name in names))
    for name in names:
        recorded, replayed = (
            json.loads((directory / f"{name}.{kind}.json").read_text())
            for kind in ("record", "replay")
        )
        assert recorded["error"] is None, recorded["traceback"]
        assert recorded["frames"]
        assert not replayed["wrong"], "\n".join(replayed["wrong"])


@pytest.mark.sweep
@pytest.mark.parametrize(
    "model", [*MODELS[:2], *(pytest.param(name, marks=pytest.mark.long) for name in MODELS[2:])]
)
def test_a_model_replays_in_a_process_without_its_code(model: str, tmp_path: Path) -> None:
    """Outputs and gradients are eager's, guards, facts and fingerprint the recorded ones."""
    _check_replayed(model, "aot_eager", tmp_path)


WRITTEN = """
import sys, warnings
from pathlib import Path
import torch
from model_zoo import MODELS
import torch_fakeify as tfk

warnings.simplefilter("ignore")
file = Path(sys.argv[1]) / "frame.fkf"


def backend(gm, inputs):
    capture = tfk.capture(gm, inputs)
    capture.save(file)
    assert tfk.Capture.load(file).desc == capture.desc
    print("read", len(gm.graph.nodes))
    return gm.forward


torch.manual_seed(0)
model, inputs = MODELS[sys.argv[2]]()
with torch.no_grad():
    torch.compile(model.eval(), backend=backend, dynamic=True)(**inputs)
"""


@pytest.mark.sweep
@pytest.mark.parametrize("model", [*ZOO[:-1], pytest.param("swin", marks=pytest.mark.long)])
def test_what_is_written_of_a_model_is_read(model: str, tmp_path: Path) -> None:
    """No frame of a real model with dynamic sizes meets a limit of the reader."""
    result = subprocess.run(
        [sys.executable, "-c", WRITTEN, str(tmp_path), model],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=800,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "read" in result.stdout


@pytest.mark.sweep
@pytest.mark.parametrize("model", ["bert", pytest.param("llama", marks=pytest.mark.long)])
def test_models_compile_with_inductor_without_their_code(model: str, tmp_path: Path) -> None:
    """A capture compiled by inductor in another process gives eager's outputs and gradients."""
    _check_replayed(model, "inductor", tmp_path)
