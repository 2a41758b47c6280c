"""A small frontend that is not Dynamo: ``make_fx`` traces, all else is `torch_fakeify.frontend`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

from functorch import make_fx

from torch_fakeify import frontend

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class Entry(NamedTuple):
    """What was compiled for some arguments, and for which it holds."""

    trace: frontend.Trace
    gm: torch.fx.GraphModule
    guards: frontend.Guards
    run: Callable[..., Any]


class Jit:
    """A function that compiles itself for the arguments that it is called with.

    Attributes:
        entries: what was compiled, in order.
        missed: for each call that compiled, the guards of the earlier entries that did not hold.

    Args:
        fn: the function.
        policy: of its arguments.
        backend: compiles.
        options: of ``make_fx``.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        policy: frontend.Policy | None = None,
        backend: Any = "aot_eager",
        **options: Any,
    ) -> None:
        self.fn = fn
        self.signature = inspect.signature(fn)
        self.policy = policy
        self.backend = backend
        self.options = options
        self.entries: list[Entry] = []
        self.missed: list[list[str]] = []

    @property
    def count(self) -> int:
        """How often it has compiled."""
        return len(self.entries)

    def scope(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The arguments by name."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls what was compiled for such arguments."""
        scope = self.scope(*args, **kwargs)
        return self.entry(scope).run(scope)

    def entry(self, scope: dict[str, Any]) -> Entry:
        """What was compiled for such arguments; it is compiled if nothing was."""
        for entry in self.entries:
            if entry.guards.check(scope):
                return entry
        failing = [entry.guards.failing(scope) for entry in self.entries]
        self.missed.append([guard.text for guard in failing if guard is not None])
        self.entries.append(self.compiled(scope))
        failed = self.entries[-1].guards.failing(scope)
        assert failed is None, f"not for the arguments that it was traced with: {failed}"
        return self.entries[-1]

    def traced(
        self, scope: dict[str, Any], **options: Any
    ) -> tuple[frontend.Trace, torch.fx.GraphModule]:
        """The graph for some arguments."""
        trace = frontend.Trace(frontend.describe(scope, self.policy), **options)
        with trace:
            gm = make_fx(trace.flat(self._call, scope), **self.options)(*trace.inputs)
        return trace, gm

    def compiled(self, scope: dict[str, Any]) -> Entry:
        """A new entry for some arguments."""
        trace, gm = self.traced(scope)
        run = trace.compile(gm, self.backend)
        return Entry(trace, gm, trace.guards(), run)

    def _call(self, scope: dict[str, Any]) -> Any:
        bound = inspect.BoundArguments(self.signature, scope)  # type: ignore[arg-type]
        return self.fn(*bound.args, **bound.kwargs)
