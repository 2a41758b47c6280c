"""Replays recorded programs: ``python program_replay.py DIRECTORY PROGRAM:BACKEND:OPS...``.

The process has neither the programs' nor the models' code. Writes ``PROGRAM.replay.json`` for each.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "zoo"))

import json
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import sympy
import torch
from guard_equivalence import Facts, by_sources, equivalent, facts_of
from program_frames import fill, run, storage_groups

import torch_fakeify as tfk
from torch_fakeify.encoding.modes import apply_modes
from torch_fakeify.render.text import expr_text
from torch_fakeify.serialization.document import loads


def replay(stem: Path, backend: str, *, implied_guards: bool) -> list[str]:
    """Compile one frame and run it on the recorded inputs; returns what differs from the record.

    Args:
        stem: the path of the frame's files, without a suffix.
        backend: what compiles.
        implied_guards: whether guards need only be equivalent, and not the same.
    """
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
    env = tfk.restore(loads(data["env"]))
    verdict = equivalent(_facts(env), _facts(instance.shape_env))
    ours, theirs = _guards(instance.shape_env), _guards(env)
    # Inductor makes guards of its own, which the recorder did not see.
    has_more = backend == "inductor" and ours > theirs
    if not verdict and not has_more:
        wrong.append(f"facts of the shape environment: {verdict}")
    if ours != theirs and not implied_guards and not has_more:
        wrong.append(f"guards {sorted(ours - theirs)}, not {sorted(theirs - ours)}")
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


def _guards(shape_env: Any) -> set[str]:
    """The guards of an environment as expressions over sources."""
    if shape_env is None:
        return set()
    sources = {s: found[0].name for s, found in shape_env.var_to_sources.items() if found}
    names = {s: sympy.Symbol(name) for s, name in sources.items()}
    return {str(guard.expr.xreplace(names)) for guard in shape_env.guards}


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
                implied = bool(recorded["implied_guards"])
                found = replay(directory / frame, backend, implied_guards=implied)
            except Exception:  # noqa: BLE001 - the test of this program shows it
                found = [traceback.format_exc()]
            result["wrong"] += [f"{frame}: {w}" for w in found]
        result["seconds"] = time.perf_counter() - start
        assert not {"program_zoo", "model_zoo", "transformers"} & sys.modules.keys()
        (directory / f"{name}.replay.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
