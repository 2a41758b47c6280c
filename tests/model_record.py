"""Process A of the model tests: ``python model_record.py DIRECTORY MODEL...``.

For each model, forward and training, each frame leaves four files: the capture, its real inputs
and the results of eager on them as safetensors, and its guards as JSON.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from model_frames import contents, guard_set, run
from model_zoo import MODELS
from safetensors.torch import save_file

import torch_fakeify as tfk
from torch_fakeify import _torch


def record(name: str, *, training: bool, directory: Path) -> int:
    """Compile one model with ``aot_eager`` and keep all its frames; returns how many."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.train(training)
    frames: list[Path] = []
    inner = _torch.resolve_backend("aot_eager")

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        stem = directory / f"{name}-{'train' if training else 'infer'}-{len(frames)}"
        frames.append(stem)
        tfk.capture(gm, example_inputs).save(stem.with_suffix(".fkf"))
        env = torch._guards.TracingContext.get().fake_mode.shape_env
        try:
            compiled = inner(gm, example_inputs)
        except _torch.dynamo_control_flow():
            frames.pop()  # Dynamo traces the frame again
            raise
        stem.with_suffix(".guards.json").write_text(json.dumps(guard_set(env)))
        done = False

        def call(*args: Any) -> Any:
            nonlocal done
            if not done:
                done = True
                plain = [a.item() if isinstance(a, torch.SymInt) else a for a in args]
                save_file(contents(plain), stem.with_suffix(".inputs.safetensors"))
                results = run(gm.forward, plain, training=training)
                save_file(results, stem.with_suffix(".eager.safetensors"))
            return compiled(*args)

        return torch._dynamo.disable(call)

    compiled_model = torch.compile(model, backend=backend, dynamic=True)
    with torch.set_grad_enabled(training):
        output = compiled_model(**inputs)
    if training:
        output.loss.backward()
    return len(frames)


def main() -> None:
    """Record the models named on the command line."""
    warnings.simplefilter("ignore")
    directory = Path(sys.argv[1])
    for name in sys.argv[2:]:
        for training in (False, True):
            record(name, training=training, directory=directory)


if __name__ == "__main__":
    main()
