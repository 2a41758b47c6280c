"""A just-in-time compiler of a few lines, on a tracer that is not Dynamo.

``make_fx`` traces a function, a backend compiles the graph, and guards choose among what was
compiled. All that is needed around these three is `torch_fakeify.frontend`.

Run it: ``python examples/jit.py``, or with the name of a backend other than inductor.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any

import torch
from functorch import make_fx

import torch_fakeify as tfk
from torch_fakeify import frontend

if TYPE_CHECKING:
    from collections.abc import Callable


def jit(
    fn: Callable[..., Any], policy: frontend.Policy | None = None, backend: Any = "inductor"
) -> Callable[..., Any]:
    """A function that compiles itself for the arguments that it is called with.

    Args:
        fn: a function of tensors, numbers, modules and containers of them.
        policy: which sizes may change without another compilation.
        backend: any backend of ``torch.compile``.
    """
    signature = inspect.signature(fn)
    compiled: list[tuple[frontend.Guards, Callable[..., Any]]] = []

    def call(scope: dict[str, Any]) -> Any:
        bound = inspect.BoundArguments(signature, scope)  # type: ignore[arg-type]
        return fn(*bound.args, **bound.kwargs)

    def compile_for(scope: dict[str, Any]) -> Callable[..., Any]:
        trace = frontend.Trace(frontend.describe(scope, policy))
        with trace:
            gm = make_fx(trace.flat(call, scope))(*trace.inputs)
        run = trace.compile(gm, backend)
        compiled.append((trace.guards(), run))
        return run

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for guards, run in compiled:
            if guards.check(bound.arguments):
                return run(bound.arguments)
        for guards, _ in compiled:
            print("  not for", str(guards.failing(bound.arguments)).partition("  #")[0])
        print("  compiling", fn.__name__)
        return compile_for(bound.arguments)(bound.arguments)

    return wrapper


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Branches on a size."""
    z = x.flatten() + y
    return z.relu() if 2 * x.shape[0] > 9 else z


def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor], scale: float) -> torch.Tensor:
    """Has a module and a dictionary among its arguments."""
    return (model(batch["x"]) - batch["y"]).square().mean() * scale


def main(backend: str) -> None:
    """Call both functions with arguments of several sizes."""
    print("add")
    fast_add = jit(add, frontend.Policy(dims="DUCK"), backend)
    for rows, columns in ((6, 4), (7, 3), (4, 4), (3, 9)):
        x, y = torch.randn(rows, columns), torch.randn(rows * columns)
        print(f"  {rows} x {columns}")
        torch.testing.assert_close(fast_add(x, y), add(x, y))

    print("loss")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    policy = frontend.Policy(
        named={"L['batch']['x']": {0: "DYNAMIC"}, "L['batch']['y']": {0: "DYNAMIC"}}
    )
    fast_loss = jit(loss, policy, backend)
    for size in (32, 64):
        batch = {"x": torch.randn(size, 8), "y": torch.randn(size, 1)}
        expected = torch.autograd.grad(loss(model, batch, 2.0), list(model.parameters()))
        found = torch.autograd.grad(fast_loss(model, batch, 2.0), list(model.parameters()))
        torch.testing.assert_close(found, expected)
        print(f"  {size} rows: the gradients are eager's")
    model.eval()
    fast_loss(model, batch, 2.0)

    print("a broken promise")
    try:
        jit(loss, frontend.Policy(dims="DYNAMIC"), backend)(model, batch, 2.0)
    except tfk.ShapeEnvError as error:
        print(" ", str(error).replace("; ", "\n  "))


if __name__ == "__main__":
    main(*sys.argv[1:] or ["inductor"])
