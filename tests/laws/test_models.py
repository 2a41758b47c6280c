"""Real architectures: recorded in one process, compiled and run in another without their code."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from processes import python

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("transformers", reason="needs the `models` extra: pip install '.[models]'")

pytestmark = [pytest.mark.models, pytest.mark.timeout(900)]

MODELS = ["bert", "t5", "llama", "mixtral", "vit", "mamba"]


def _check_replayed(model: str, backend: str, directory: Path) -> None:
    names = [f"model_{model}_{kind}" for kind in ("inference", "training")]
    python("program_record.py", directory, *names)
    python("program_replay.py", "programs", directory, *(f"{name}:{backend}:" for name in names))
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
    "model", [MODELS[0], *(pytest.param(name, marks=pytest.mark.long) for name in MODELS[1:])]
)
def test_a_model_replays_in_a_process_without_its_code(model: str, tmp_path: Path) -> None:
    """Outputs and gradients are eager's, guards, facts and fingerprint the recorded ones."""
    _check_replayed(model, "aot_eager", tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "model",
    [
        "mixtral",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("gpt2", "whisper", "mamba", "llama", "bert", "t5", "vit", "swin")
        ),
    ],
)
def test_what_is_written_of_a_model_is_read(model: str, tmp_path: Path) -> None:
    """No frame of a real model with dynamic sizes meets a limit of the reader."""
    assert python("exchange.py", "write", tmp_path, f"model_{model}") == ""
    assert [*tmp_path.glob("*.fkf")]


@pytest.mark.sweep
@pytest.mark.parametrize("model", ["bert", "llama"])
@pytest.mark.long
def test_models_compile_with_inductor_without_their_code(model: str, tmp_path: Path) -> None:
    """A capture compiled by inductor in another process gives eager's outputs and gradients."""
    _check_replayed(model, "inductor", tmp_path)
