"""Reads captures in a process that has none of the code which made them.

- ``python program_replay.py programs DIRECTORY PROGRAM:BACKEND:OPS...`` replays programs that
  ``program_record.py`` recorded, and writes ``PROGRAM.replay.json`` for each.
- ``python program_replay.py CHECK FILE...`` prints the differences that a check of `CHECKS` finds in
  captures, by file, as JSON.
"""

from __future__ import annotations

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


# --- checks of single captures --------------------------------------------------------------------


def learned_differences(path: Path) -> list[str]:
    """What a new environment does not learn from the recorded guard nodes."""
    from replay_checks import Tally, check_instance

    tally = Tally()
    check_instance(tfk.Capture.load(path).instantiate(), tally)
    return [] if list(tally) == ["from a capture: proved"] else [f"the verdicts are {dict(tally)}"]


def fresh_differences(path: Path) -> list[str]:
    """What a fresh instance has other than a restored one."""
    from fresh_checks import differences

    return differences(tfk.Capture.load(path))


def run_differences(path: Path) -> list[str]:
    """What a fresh instance of a recorded program has or computes other than a restored one."""
    import program_ops  # noqa: F401 - registers operators that programs use
    import torch._prims

    wrong = fresh_differences(path)
    capture = tfk.Capture.load(path)
    data = torch.load(path.with_suffix(".pt"), weights_only=True)
    sizes = _unbacked_sizes(capture, json.loads(path.with_suffix(".json").read_text())["numbers"])

    def results(*, fresh: bool) -> tuple[Any, Any]:
        torch._dynamo.reset()
        inputs = capture.materialize(sizes=sizes)
        fill(inputs, data["inputs"])
        grad = any(key.startswith("grad") for key in data["results"])
        compiled = capture.instantiate(fresh=fresh).compile("aot_eager")
        with apply_modes(capture.desc.modes):
            try:
                tensors, facts, _ = run(compiled, inputs, grad=grad, again=False)
            except Exception as error:  # noqa: BLE001 - compared with the other's
                return f"{type(error).__name__}: {error}", None
        return tensors, facts

    (ours, our_facts), (theirs, their_facts) = results(fresh=True), results(fresh=False)
    if isinstance(ours, str) or isinstance(theirs, str):
        return wrong if ours == theirs else [*wrong, f"fresh: {ours}; restored: {theirs}"]
    wrong += [] if our_facts == their_facts else [f"{our_facts}, not {their_facts}"]
    return wrong + _differences(ours, theirs)


CHECKS = {"learned": learned_differences, "fresh": fresh_differences, "run": run_differences}


def _checked(check: str, path: Path) -> list[str]:
    try:
        return CHECKS[check](path)
    except Exception:  # noqa: BLE001 - the test shows it
        return [traceback.format_exc()]


def main() -> None:
    """Do what the command line says."""
    what, *args = sys.argv[1:]
    if what == "programs":
        replay_programs(Path(args[0]), args[1:])
    else:
        sys.stdout.write(json.dumps({name: _checked(what, Path(name)) for name in args}))
    code = {"program_zoo", "model_zoo", "shape_programs", "transformers"}
    assert not code & sys.modules.keys()


def replay_programs(directory: Path, entries: list[str]) -> None:
    """Replay recorded programs and write what was found of each."""
    warnings.simplefilter("ignore")
    for entry in entries:
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
        (directory / f"{name}.replay.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
