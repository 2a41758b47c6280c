"""Process B of the model tests: ``python model_replay.py BACKEND CAPTURE...``.

Has neither the models' code nor their weights. Prints one line of JSON for each capture.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from model_frames import fill, guard_set, run
from safetensors.torch import load_file

import torch_fakeify as tfk


def replay(path: Path, backend: str) -> dict[str, Any]:
    """Compile one capture, run it on process A's data and compare with process A's eager."""
    stem = path.with_suffix("")
    captured = tfk.Capture.load(path)
    instance = captured.instantiate()
    compiled = instance.compile(backend)
    guards = guard_set(instance.shape_env)
    expected_guards = json.loads(stem.with_suffix(".guards.json").read_text())
    inputs = captured.materialize()
    fill(inputs, load_file(stem.with_suffix(".inputs.safetensors")))
    results = run(compiled, inputs, training="-train-" in path.name)
    expected = load_file(stem.with_suffix(".eager.safetensors"))
    worst = 0.0
    for key, value in expected.items():
        torch.testing.assert_close(results[key], value, rtol=1e-4, atol=1e-5)
        if value.is_floating_point() and value.numel():
            worst = max(worst, (results[key] - value).abs().max().item())
    return {
        "capture": path.name,
        "nodes": len(captured.desc.graph.nodes),
        "inputs": len(inputs),
        "results": sorted(expected),
        "same_results": sorted(results) == sorted(expected),
        "worst": worst,
        "guards": len(guards),
        "guards_lost": sorted(set(expected_guards) - set(guards)),
        "guards_new": sorted(set(guards) - set(expected_guards)),
        "fingerprint_kept": _recaptured(captured) == captured.fingerprint(),
        "transformers": "transformers" in sys.modules,
        "bytes": path.stat().st_size,
    }


def _recaptured(captured: tfk.Capture) -> str:
    instance = captured.instantiate()
    with instance.active():
        return tfk.capture(instance.gm, instance.inputs).fingerprint()


def main() -> None:
    """Replay the captures named on the command line."""
    warnings.simplefilter("ignore")
    for path in map(Path, sys.argv[2:]):
        print(json.dumps(replay(path, sys.argv[1])), flush=True)


if __name__ == "__main__":
    main()
