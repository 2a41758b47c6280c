"""Functions compiled and called: the guards that Dynamo installs, how often it compiles, the results."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import ShapeEnv

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Asking:
    """A backend that asks something of the inputs, and then lets another one compile."""

    def __init__(self, asks: Callable[..., Any], inner: Any = "eager") -> None:
        self.asks = asks
        self.inner = inner

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """Asks and compiles."""
        self.asks(*(x for x in inputs if isinstance(x, torch.Tensor)))
        backend = self.inner
        return (torch._dynamo.lookup_backend(backend) if isinstance(backend, str) else backend)(
            gm, inputs
        )


class Faked:
    """Gives a backend the fake inputs that AOTAutograd would make: what a handoff does anyway."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """Compiles."""
        mode = TracingContext.get().fake_mode
        assert mode is not None
        values = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
        return self.inner(gm, values)


class Run:
    """A function, compiled with a backend.

    Attributes:
        count: how often Dynamo compiled.
        guards: the guards on shapes that Dynamo installed, as Python, for each time.
        envs: the ``ShapeEnv`` of each time, which Dynamo traced with.
    """

    def __init__(self, fn: Callable[..., Any], backend: Any, **options: Any) -> None:
        torch._dynamo.reset()
        self.guards: list[tuple[str, ...]] = []
        self.envs: list[Any] = []
        self.backend = torch._dynamo.lookup_backend(backend) if isinstance(backend, str) else backend
        self._compiled = torch.compile(fn, backend=self._compile, **options)

    @property
    def count(self) -> int:
        return len(self.envs)

    def _compile(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        mode = TracingContext.get().fake_mode
        assert mode is not None
        self.envs.append(mode.shape_env)
        return self.backend(gm, inputs)

    def __call__(self, *args: Any) -> Any:
        """Calls the compiled function."""
        produce = ShapeEnv.produce_guards_verbose

        def noted(env: Any, *args: Any, **kwargs: Any) -> Any:
            parts = produce(env, *args, **kwargs)
            if any(env is known for known in self.envs) and "verbose_python" in kwargs["langs"]:
                self.guards.append(tuple(parts[0].exprs))
            return parts

        with mock.patch.object(ShapeEnv, "produce_guards_verbose", noted):
            return self._compiled(*args)
