"""Process B of the program tests: ``python program_replay.py DIRECTORY PROGRAM:BACKEND:OPS...``.

Has none of the programs. Writes ``PROGRAM.replay.json`` for each.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from guard_equivalence import Facts, by_sources, equivalent, facts_of
from program_frames import fill, run, storage_groups

import torch_fakeify as tfk
from torch_fakeify.codec import loads
from torch_fakeify.modes import apply_modes
from torch_fakeify.text import expr_text


def replay(stem: Path, backend: str) -> list[str]:
    """Compile one frame, run it on process A's data; returns what differs from process A."""
    captured = tfk.Capture.load(stem.with_suffix(".fkf"))
    instance = captured.instantiate()
    with instance.active():
        again = tfk.capture(instance.gm, instance.inputs, constants="small")
    wrong: list[str] = []
    if again.fingerprint() != captured.fingerprint():
        wrong.append("the recaptured instance has another fingerprint")
    compiled = instance.compile(backend)
    text = stem.with_suffix(".json")
    if not text.exists():
        return [*wrong, "the frame was not run"]
    expected = json.loads(text.read_text())
    data = torch.load(stem.with_suffix(".pt"), weights_only=True)
    verdict = equivalent(_facts(tfk.restore(loads(data["env"]))), _facts(instance.shape_env))
    if not verdict:
        wrong.append(f"facts of the shape environment: {verdict}")
    inputs = captured.materialize(sizes=_unbacked_sizes(captured, expected["numbers"]))
    if storage_groups(inputs) != expected["groups"]:
        return [*wrong, f"inputs share storages {storage_groups(inputs)}, not {expected['groups']}"]
    numbers = [None if isinstance(x, torch.Tensor) else repr(x) for x in inputs]
    if numbers != expected["numbers"]:
        wrong.append(f"scalar inputs {numbers}, not {expected['numbers']}")
    fill(inputs, data["inputs"])
    with apply_modes(captured.desc.modes):
        results, facts, _ = run(
            compiled, inputs, grad=any(k.startswith("grad") for k in data["results"]), again=False
        )
    pairs = zip(facts, expected["facts"], strict=True)
    wrong += [f"{ours}, not {theirs}" for ours, theirs in pairs if ours != theirs]
    return wrong + _differences(results, data["results"])


def _facts(shape_env: Any) -> Facts:
    """All that an environment says of its inputs; nothing where there is none."""
    if shape_env is None:
        return Facts(())
    return facts_of(shape_env, by_sources(shape_env), asserts=True)


def _unbacked_sizes(captured: tfk.Capture, numbers: list[str | None]) -> dict[str, int]:
    """The recorded values of sizes that have no hint."""
    return {
        expr_text(entry.sym.expr): int(number)
        for entry, number in zip(captured.desc.inputs, numbers, strict=True)
        if entry.sym is not None and entry.sym.hint is None and number is not None
    }


def _differences(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    wrong: list[str] = []
    if sorted(ours) != sorted(theirs):
        wrong.append(f"results {sorted(ours)}, not {sorted(theirs)}")
    for key in sorted(set(ours) & set(theirs)):
        wrong += _difference(key, _comparable(ours[key]), _comparable(theirs[key]))
    return wrong


def _difference(key: str, ours: torch.Tensor, theirs: torch.Tensor) -> list[str]:
    try:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)
    except AssertionError as error:
        return [f"{key}: {error}"]
    return []


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8)
    if str(tensor.dtype).startswith(("torch.uint", "torch.int", "torch.bits", "torch.quint")):
        try:
            return tensor.long()
        except RuntimeError:
            return tensor.contiguous().view(torch.uint8)
    return tensor


def without_ops(stem: Path) -> str | None:
    """The error that a reader gets who has not registered the custom operators."""
    try:
        tfk.Capture.load(stem.with_suffix(".fkf")).instantiate()
    except tfk.FakeifyError as error:
        return f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    """Replay the programs named on the command line."""
    warnings.simplefilter("ignore")
    directory = Path(sys.argv[1])
    for entry in sys.argv[2:]:
        name, backend, ops = entry.split(":")
        start = time.perf_counter()
        recorded = json.loads((directory / f"{name}.record.json").read_text())
        result: dict[str, Any] = {"wrong": [], "missing": None}
        torch._dynamo.reset()
        frames = recorded["frames"] if recorded["error"] is None else []
        for frame in frames:
            if ops == "ops":
                if "program_ops" not in sys.modules:
                    result["missing"] = without_ops(directory / frame)
                import program_ops  # noqa: F401
            try:
                found = replay(directory / frame, backend)
            except Exception:  # noqa: BLE001 - the test of this program shows it
                found = [traceback.format_exc()]
            result["wrong"] += [f"{frame}: {w}" for w in found]
        result["seconds"] = time.perf_counter() - start
        assert "program_zoo" not in sys.modules
        (directory / f"{name}.replay.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
