"""Features: what Python does around and between the graphs."""

from __future__ import annotations

import itertools
import threading
import types
from typing import TYPE_CHECKING, Any

import torch
from compiled_programs import feature

if TYPE_CHECKING:
    from observe import Run


def _block(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * 2).relu()


def _leaf(n: int, *rest: int) -> torch.Tensor:
    size = torch.Size((n, *rest))
    return torch.arange(float(size.numel())).reshape(size).requires_grad_()


# --- graphs and what is between them --------------------------------------------------------------


@feature()
def graph_breaks(run: Run) -> None:
    """Breaks with views, mutations and sizes alive across them."""

    def f(x: torch.Tensor, out: list[Any]) -> Any:
        y = x * 2
        n = y.shape[0]
        v = x[1:] * 2
        torch._dynamo.graph_break()
        v.add_(n)
        out.append(v)
        torch._dynamo.graph_break()
        return y * n, v.view(-1), x.t()

    for dynamic in (None, True):
        torch._dynamo.reset()
        c = run.compile(f, dynamic=dynamic)
        for n in (3, 4, 5):
            run.call(c, _leaf(n, 2), [])


@feature(
    other_symbols="A tensor that is the base of another input has two policies. Torch takes the sizes of the"
    " one, here the two are known to be equal."
)
def graph_breaks_between_base_and_view(run: Run) -> None:
    """A view and its base are alive across a break and mutated after it."""

    def f(x: torch.Tensor) -> Any:
        y = x * 2
        v = y[1:]
        torch._dynamo.graph_break()
        v.add_(y.shape[0])
        torch._dynamo.graph_break()
        return y * 2, v.view(-1)

    c = run.compile(f)
    for n in (3, 4, 5):
        run.call(c, _leaf(n, 2))


@feature()
def fullgraph(run: Run) -> None:
    """``fullgraph=True`` compiles one graph, or says what breaks it."""
    run.call(run.compile(lambda x: _block(x), fullgraph=True), _leaf(3))
    run.call(run.compile(lambda x: x.sum().item() + x, fullgraph=True), _leaf(3))


@feature()
def compiled_in_compiled(run: Run) -> None:
    """A compiled function in a compiled one, and one that is compiled again on its own."""
    inner = run.compile(lambda x: _block(x) + x.shape[0], dynamic=True)

    def f(x: torch.Tensor) -> Any:
        return inner(x * 2) + torch.compiler.disable(torch.cos)(x)

    c = run.compile(f)
    for n in (3, 4, 5):
        run.call(c, _leaf(n))
        run.call(inner, _leaf(n))


@feature()
def compiled_by_the_backend(run: Run) -> None:
    """A backend that calls ``torch.compile`` while it compiles, and returns what calls it."""
    name = run.name

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        helper = torch.compile(lambda x: x * 2 + 1, backend=name)
        run.note("helped", [helper(torch.ones(3))])
        compiled = torch._dynamo.lookup_backend(name)(gm, inputs)
        return lambda *args: compiled(*args)

    c = torch.compile(lambda x: _block(x) * x.shape[0], backend=run.wrapped(backend))
    for n in (3, 4, 5):
        run.call(c, _leaf(n))


@feature()
def compiled_in_an_operator(run: Run) -> None:
    """A custom operator whose kernel is compiled, by the same backend, called in a compiled graph."""
    helper = run.compile(lambda x: x.sin() * x.shape[0])
    library = torch.library.Library("features", "FRAGMENT")
    library.define("helped(Tensor x) -> Tensor")
    library.impl("helped", lambda x: helper(x).clone(), "CPU")
    library.impl("helped", torch.empty_like, "Meta")
    try:
        c = run.compile(lambda x: torch.ops.features.helped(x * 2) + 1)
        for n in (3, 4, 5):
            run.call(c, _leaf(n).detach())
    finally:
        library._destroy()


@feature()
def two_threads(run: Run) -> None:
    """Compiled in a second thread, then called in the first one, and the backward the other way."""
    c = run.compile(lambda x: _block(x) * x.shape[0])
    outs: list[Any] = []

    def work(n: int) -> None:
        outs.append(run.call(c, _leaf(n), grad=False))

    for n in (3, 4):
        thread = threading.Thread(target=work, args=(n,))
        thread.start()
        thread.join()
        x = _leaf(n)
        out = run.call(c, x, grad=False)
        thread = threading.Thread(target=lambda out=out: out.sum().backward())
        thread.start()
        thread.join()
        run.note("gradients", [x.grad])
        outs.pop().sum().backward()


def _anew(fn: Any) -> Any:
    """The function in another file: Dynamo remembers what was called, also when it is reset."""
    code = fn.__code__.replace(co_filename=f"<eval_with_key>.{next(_COUNTER)}")
    return types.FunctionType(code, fn.__globals__)


_COUNTER = itertools.count(10**9)
"""Far above the numbers of FX, whose lines of source Python would print instead."""


@feature()
def stances(run: Run) -> None:
    """``set_stance``: eager, eager on recompile, fail on recompile, and back."""
    c = run.compile(lambda x: _block(x) + 1, dynamic=False)
    run.call(c, _leaf(3))
    for stance in ("force_eager", "eager_on_recompile", "fail_on_recompile", "default"):
        with torch.compiler.set_stance(stance):
            run.call(c, _leaf(3))
            run.call(c, _leaf(4))
    for stance in ("eager_then_compile", "aot_eager_then_compile"):
        with torch.compiler.set_stance(stance):
            e = run.compile(_anew(lambda x: x * 3))
            for n in (3, 4, 5):
                run.call(e, _leaf(n))
    with torch.compiler.set_stance("default", force_backend=run.backend):
        run.call(torch.compile(lambda x: x * 5, backend="eager"), _leaf(3))


@feature(plain=True)
def one_backend_twice(run: Run) -> None:
    """Two ``torch.compile`` of one function with equal backends share what is compiled."""

    def f(x: torch.Tensor) -> Any:
        return _block(x)

    for _ in range(3):
        name = run.name if run.direct else f"handoff:{run.name}"
        run.call(torch.compile(f, backend=_named(name)), _leaf(3))


def _named(name: str) -> Any:
    import torch_fakeify as tfk

    kind, _, inner = name.partition(":")
    return tfk.handoff(inner) if inner else kind


@feature()
def explained(run: Run) -> None:
    """``torch._dynamo.explain`` of a function whose parts are compiled already."""

    def f(x: torch.Tensor) -> Any:
        y = _block(x)
        torch._dynamo.graph_break()
        return y * 2

    run.call(run.compile(f), _leaf(3))
    found = torch._dynamo.explain(f)(_leaf(3))
    run.seen.append(("explained", found.graph_count, found.graph_break_count, found.op_count))
    torch._dynamo.reset()
    run.call(run.compile(f), _leaf(3))


@feature()
def disabled_parts(run: Run) -> None:
    """``disable``, ``nonstrict_trace``, ``allow_in_graph`` and ``skip`` in a frame."""

    @torch.compiler.disable
    def eager(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @torch._dynamo.nonstrict_trace
    def traced(x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x).real

    def f(x: torch.Tensor) -> Any:
        return eager(x.sin()) + traced(x)

    c = run.compile(f)
    for n in (3, 4):
        run.call(c, _leaf(n))


@feature(dynamo={"inline_inbuilt_nn_modules": False})
def modules_not_inlined(run: Run) -> None:
    """Parameters are attributes of the graph's module, not inputs."""
    _modules(run)


@feature()
def modules(run: Run) -> None:
    """Parameters are inputs of the graph; tied ones, buffers, and a new value in between."""
    _modules(run)


def _modules(run: Run) -> None:
    m = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 4)
    )
    m[3].weight = m[0].weight
    c = run.compile(m)
    for n in (2, 3, 4):
        run.call(c, _leaf(n, 4), of=m)
    m.requires_grad_(False)
    run.call(c, _leaf(3, 4), of=m)
    m.eval()
    run.call(c, torch.ones(3, 4), of=m)
    m[0].weight.data = torch.ones(4, 4)
    run.call(c, torch.ones(3, 4), of=m)


@feature(dynamo={"install_free_tensors": True, "inline_inbuilt_nn_modules": True})
def free_tensors_installed(run: Run) -> None:
    """Tensors of closures and parameters are attributes of the graph's module."""
    w = torch.ones(3, requires_grad=True)
    m = torch.nn.Linear(3, 2)
    c = run.compile(lambda x: m(x * w) + x.shape[0])
    for n in (2, 3, 4):
        run.call(c, _leaf(n, 3), of=[w, *m.parameters()])


@feature()
def modules_compiled_in_place(run: Run) -> None:
    """``Module.compile()``, a compiled method, and regional compilation of repeated blocks."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).relu() + x

    blocks = torch.nn.Sequential(*(Block() for _ in range(3)))
    for block in blocks:
        block.compile(backend=run.backend)
    for n in (2, 3, 4):
        run.call(blocks, _leaf(n, 4), of=blocks)


# --- what is outside of the graph -----------------------------------------------------------------


@feature()
def hooks_and_side_effects(run: Run) -> None:
    """Module hooks, tensor hooks, globals, and lists that the function fills."""
    calls: list[Any] = []
    m = torch.nn.Linear(3, 3)
    m.register_forward_hook(lambda _m, _x, y: y * 2)
    m.weight.register_hook(lambda g: g * 3)

    def f(x: torch.Tensor) -> Any:
        y = m(x)
        y.register_hook(lambda g: g + 1)
        calls.append(y.shape[0])
        return y.sin()

    c = run.compile(f)
    for n in (2, 3):
        run.call(c, _leaf(n, 3), of=m)
    run.seen.append(("calls", list(calls)))


@feature()
def torch_function_modes(run: Run) -> None:
    """A ``__torch_function__`` subclass and a default device while it is compiled."""

    class Named(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.arange(3.0).as_subclass(Named)
    with torch._dynamo.config.patch(traceable_tensor_subclasses={Named}):
        run.call(run.compile(lambda x: x * 2 + 1), x)
    with torch.device("cpu"):
        run.call(run.compile(lambda x: x * torch.ones(3)), _leaf(3))


@feature()
def errors_of_the_backend(run: Run) -> None:
    """What a backend raises is what Dynamo says; with ``suppress_errors`` it runs eagerly."""

    def fails(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        raise ValueError("no such kernel")

    def shortened(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return None

    for backend in (fails, shortened):
        for suppress in (False, True):
            torch._dynamo.reset()
            with torch._dynamo.config.patch(suppress_errors=suppress):
                c = torch.compile(_block, backend=run.wrapped(backend))
                run.call(c, _leaf(3))


@feature()
def skipped_by_the_backend(run: Run) -> None:
    """A backend may ask Dynamo to skip a frame."""
    from torch._dynamo.exc import SkipFrame

    def skips(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        raise SkipFrame("not this one")

    run.call(torch.compile(_block, backend=run.wrapped(skips)), _leaf(3))


@feature(dynamo={"verify_correctness": True}, backends=("aot_eager",))
def verified(run: Run) -> None:
    """Dynamo runs the graph beside what the backend gives."""
    run.call(run.compile(_block), torch.ones(3))
