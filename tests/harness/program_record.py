"""Records programs and models: ``python program_record.py DIRECTORY PROGRAM...``.

Each frame of a program leaves its capture and, beside it, what the replaying process compares: the
bytes of the inputs, the results of the graph run eagerly, and the ``ShapeEnv``.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from model_zoo import models
from program_frames import contents, run, storage_groups
from program_zoo import Program, programs
from quiet import quiet

import torch_fakeify as tfk
from torch_fakeify.compat import torch_dynamo
from torch_fakeify.compat.backends import resolve_backend
from torch_fakeify.serialization.document import dumps

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_fakeify.records.shape_env import ShapeEnvDesc


class Writer:
    """A Dynamo backend that writes each frame of one program and then runs it eagerly."""

    def __init__(self, program: Program, directory: Path) -> None:
        self.program = program
        self.directory = directory
        self.stems: list[Path] = []
        self.inner = resolve_backend(program.compiled)

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Capture, compile (which may add guards) and return the eager graph."""
        stem = self.directory / f"{self.program.name}-{len(self.stems)}"
        self.stems.append(stem)
        tfk.capture(gm, example_inputs, constants="small").save(stem.with_suffix(".fkf"))
        env = torch._guards.TracingContext.get().fake_mode.shape_env
        known = frozenset[str]() if env is None else frozenset(env.source_to_var)
        try:
            self.inner(gm, example_inputs)
        except torch_dynamo.dynamo_control_flow():
            self.stems.pop()  # Dynamo traces the frame again
            raise
        state = dumps(_without_new_names(tfk.snapshot(env), known))
        written = False

        def call(*args: Any) -> Any:
            nonlocal written
            if written:
                return gm.forward(*args)
            written = True
            plain = [a.item() if isinstance(a, torch.SymInt) else a for a in args]
            before = contents(plain)
            groups = storage_groups(plain)
            results, facts, outputs = run(gm.forward, plain, grad=self.program.grad, again=True)
            data = {"inputs": before, "results": results, "env": state}
            torch.save(data, stem.with_suffix(".pt"))
            numbers = [None if isinstance(x, torch.Tensor) else repr(x) for x in plain]
            text = {"facts": facts, "groups": groups, "numbers": numbers}
            stem.with_suffix(".json").write_text(json.dumps(text))
            return outputs

        return torch._dynamo.disable(call)


def _without_new_names(desc: ShapeEnvDesc, known: frozenset[str]) -> ShapeEnvDesc:
    """The environment without the sources that a backend has added to symbols that had some.

    AOTAutograd makes fake tensors of the inputs again, and calls an input that is also the base of
    another one by that one's ``_base``: it is one tensor with two names.

    Args:
        desc: what the environment is after the backend.
        known: the names of sources that it had before.
    """
    symbols = []
    for symbol in desc.symbols:
        sources = tuple(s for s in symbol.sources if s.name in known)
        symbols.append(msgspec.structs.replace(symbol, sources=sources or symbol.sources))
    alone = {s.name for symbol in symbols for s in symbol.sources}
    names = tuple(pair for pair in desc.source_to_var if pair[0] in known | alone)
    return msgspec.structs.replace(desc, symbols=tuple(symbols), source_to_var=names)


def record(program: Program, directory: Path) -> dict[str, Any]:
    """Run one program; returns what happened."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    writer = Writer(program, directory)
    start = time.perf_counter()
    error = trace = None
    with quiet(), program.active():
        try:
            fn, *calls = program.make()
            compiled = torch.compile(fn, backend=writer, **program.options)
            for args in calls:
                compiled(*args)
        except Exception as raised:  # noqa: BLE001 - the test of this program shows it
            error = f"{type(raised).__name__}: {raised}"
            trace = traceback.format_exc()
    return {
        "frames": [stem.name for stem in writer.stems],
        "implied_guards": program.implied_guards,
        "error": error,
        "traceback": trace,
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    """Record the programs named on the command line."""
    directory = Path(sys.argv[1])
    table = {**programs(), **models()}
    for name in sys.argv[2:]:
        result = record(table[name], directory)
        (directory / f"{name}.record.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
