"""Functions compiled and called: the guards that Dynamo installs, how often it compiles, the results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import ShapeEnv

if TYPE_CHECKING:
    from collections.abc import Callable


class Asking:
    """A backend that asks something of its inputs, and then lets another one compile.

    Args:
        asks: gets the tensors among the inputs.
        inner: compiles.
    """

    def __init__(self, asks: Callable[..., Any], inner: Any = "eager") -> None:
        self.asks = asks
        self.inner = backend_of(inner)

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """Asks and compiles."""
        self.asks(*(x for x in inputs if isinstance(x, torch.Tensor)))
        return self.inner(gm, inputs)


class Faked:
    """Gives a backend Dynamo's own fakes of the inputs, as AOTAutograd would make them.

    A handoff does that too, so this is the direct way of a backend that expects fakes.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """Compiles."""
        values = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
        return self.inner(gm, values)


class Run:
    """A function, compiled anew with a backend.

    Attributes:
        guards: the guards on shapes that Dynamo installed, as Python; one tuple for each time.
        told: the same as torch tells them to a user, with who caused them.
        asserts: the runtime asserts that were known when the backend was done: the condition, its
            message, the function that stated it.
        envs: the ``ShapeEnv`` that Dynamo traced with, for each time that it called the backend.
    """

    def __init__(self, fn: Callable[..., Any], backend: Any, **options: Any) -> None:
        torch._dynamo.reset()
        self.guards: list[tuple[str, ...]] = []
        self.told: list[tuple[str, ...]] = []
        self.asserts: list[list[tuple[Any, str, str]]] = []
        self.envs: list[Any] = []
        self._backend = backend_of(backend)
        self._compiled = torch.compile(fn, backend=self._compile, **options)

    @property
    def count(self) -> int:
        """How often Dynamo called the backend."""
        return len(self.envs)

    def _compile(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.envs.append(env_of_frame())
        made = self._backend(gm, inputs)
        self.asserts.append(_asserts(self.envs[-1]))  # later their stacks are gone
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the compiled function."""
        produce = ShapeEnv.produce_guards_verbose

        def noted(env: Any, *args: Any, **kwargs: Any) -> Any:
            parts = produce(env, *args, **kwargs)
            langs = kwargs.get("langs", ())
            if "verbose_python" in langs and any(env is known for known in self.envs):
                texts = dict(zip(langs, parts, strict=True))
                self.guards.append(tuple(texts["python"].exprs))
                self.told.append(tuple(texts["verbose_python"].exprs))
            return parts

        with mock.patch.object(ShapeEnv, "produce_guards_verbose", noted):
            return self._compiled(*args, **kwargs)


def _asserts(env: Any) -> list[tuple[Any, str, str]]:
    found: list[tuple[Any, str, str]] = []
    for group in env.deferred_runtime_asserts.values():
        for one in group:
            frames = [f.name for f in one.stack.summary() if "/torch/" not in f.filename]
            found.append((one.expr, one.msg, frames[-1] if frames else ""))
    return found


def backend_of(backend: Any) -> Any:
    """A backend by name, or itself."""
    return torch._dynamo.lookup_backend(backend) if isinstance(backend, str) else backend


def env_of_frame() -> Any:
    """The ``ShapeEnv`` of the active ``TracingContext``."""
    mode = TracingContext.get().fake_mode
    assert mode is not None
    return mode.shape_env
