"""A compile cache on disk: what one process has traced, other processes compile without tracing it.

An entry is a capture and the guards under which it may be used. Both are data: finding an entry runs
no code of the cache. Entries are files that are named by their content and replaced as a whole, so that
several processes may read and write one cache.

Run it twice: ``python examples/compile_cache.py DIR``, or with the name of a backend after it.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from functorch import make_fx

import torch_fakeify as tfk
from torch_fakeify import frontend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Cache:
    """Captures and their guards in a directory.

    Attributes:
        compiled: compiled graphs by their structure: equal layers share one.

    Args:
        directory: is made if it is missing.
        backend: any backend of ``torch.compile``.
    """

    def __init__(self, directory: str | Path, backend: str = "inductor") -> None:
        self.directory = Path(directory) / torch.__version__
        self.backend = backend
        self.compiled: dict[str, list[tuple[tfk.Instance, Callable[..., Any]]]] = {}

    def entries(self, name: str) -> Iterator[tuple[frontend.Guards, tfk.Capture]]:
        """Yield what is in the directory for a function.

        Args:
            name: names the function and the version of its code.
        """
        for path in sorted((self.directory / name).glob("*.guards")):
            guards = frontend.Guards.loads(path.read_bytes())
            yield guards, tfk.Capture.load(path.with_suffix(".fkf"))

    def add(self, name: str, guards: frontend.Guards, capture: tfk.Capture) -> None:
        """Add an entry; a process that reads meanwhile finds it whole or not at all."""
        data = guards.dumps()
        digest = hashlib.sha256(capture.fingerprint().encode() + data).hexdigest()[:16]
        folder = self.directory / name
        folder.mkdir(parents=True, exist_ok=True)
        capture.save(folder / f"{digest}.fkf")  # writes a new file, and renames it
        handle, path = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(path).replace(folder / f"{digest}.guards")  # last: it makes the entry visible

    def run(self, capture: tfk.Capture, inputs: list[Any]) -> tuple[Any, ...] | None:
        """Run the compiled graph; ``None`` if the backend has compiled it for other sizes."""
        alike = self.compiled.setdefault(capture.fingerprint("structure"), [])
        for instance, compiled in alike:
            if instance.check_inputs(inputs) is None:
                return tuple(compiled(*inputs))
        instance = capture.instantiate()
        compiled = instance.compile(self.backend)
        alike.append((instance, compiled))
        # The backend may have added guards: what it assumed of these sizes.
        return tuple(compiled(*inputs)) if instance.check_inputs(inputs) is None else None


def jit(
    cache: Cache,
    name: str,
    fn: Callable[..., tuple[Any, ...]],
    policy: frontend.Policy | None = None,
) -> Callable[..., tuple[Any, ...]]:
    """Return a function that uses what this or another process has traced for such arguments.

    Args:
        cache: where entries are.
        name: names the function and the version of its code.
        fn: a function that returns a tuple of tensors.
        policy: which sizes may change without another entry.
    """
    signature = inspect.signature(fn)
    known: list[tuple[frontend.Guards, tfk.Capture]] = []

    def call(scope: dict[str, Any]) -> Any:
        return fn(**scope)

    def traced(scope: dict[str, Any]) -> tuple[frontend.Guards, tfk.Capture]:
        trace = frontend.Trace(frontend.describe(scope, policy))
        with trace:
            gm = make_fx(trace.flat(call, scope))(*trace.inputs)
        with trace.handoff(gm) as (graph, inputs):
            capture = tfk.capture(graph, inputs)
        return trace.guards(), capture

    def result(guards: frontend.Guards, capture: tfk.Capture, scope: dict[str, Any]) -> Any:
        if not guards.check(scope):
            return None
        return cache.run(capture, capture.bind(scope, check=False))

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        scope = dict(bound.arguments)
        for entry in known:
            if (found := result(*entry, scope)) is not None:
                return found
        for entry in cache.entries(name):
            if (found := result(*entry, scope)) is not None:
                print(f"  {name}: found")
                known.append(entry)
                return found
        print(f"  {name}: traced")
        entry = traced(scope)
        cache.add(name, *entry)
        known.append(entry)
        found = result(*entry, scope)
        assert found is not None
        return found

    return wrapper


def layer(weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
    """Branches on a size."""
    y = torch.addmm(bias, x, weight)
    return (y.relu() if x.shape[0] > 4 else y.sigmoid(),)


def main(directory: str, backend: str = "inductor") -> None:
    """Call two layers of equal structure with batches of several sizes."""
    cache = Cache(directory, backend)
    torch.manual_seed(0)
    policy = frontend.Policy(named={"x": {0: frontend.Dim(warn_only=True)}})
    for name in ("first-v1", "second-v1"):
        run = jit(cache, name, layer, policy)
        weight, bias = torch.randn(8, 8), torch.randn(8)
        for rows in (3, 6, 9):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(run(weight, bias, x), layer(weight, bias, x))
    print(f"  compiled: {sum(map(len, cache.compiled.values()))} graphs")


if __name__ == "__main__":
    main(*sys.argv[1:] or [tempfile.mkdtemp()])
