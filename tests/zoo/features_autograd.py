"""Features: backward passes, transforms, higher-order operators, and modes of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from compiled_programs import feature
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from observe import Run


def _leaf(n: int, *rest: int) -> torch.Tensor:
    size = torch.Size((n, *rest))
    return torch.arange(float(size.numel())).div(7).reshape(size).requires_grad_()


# --- backward -------------------------------------------------------------------------------------


@feature()
def backward_twice(run: Run) -> None:
    """A backward with ``retain_graph`` twice, an error the third time, and a double backward."""

    def f(x: torch.Tensor) -> Any:
        return (x.sin() * x.shape[0]).exp()

    for dynamic in (False, True):
        torch._dynamo.reset()
        c = run.compile(f, dynamic=dynamic)
        for n in (3, 4):
            x = _leaf(n)
            out = run.call(c, x, grad=False)
            for retain in (True, False):
                out.sum().backward(retain_graph=retain)
                run.note("gradient", [x.grad])
            run.backward(out, [x])
            y = _leaf(n)
            run.call(lambda y, c=c: torch.autograd.grad(c(y).sum(), y, create_graph=True)[0], y)


@feature()
def backward_late(run: Run) -> None:
    """The backward is compiled when it is first run: after other frames, after a reset."""
    a = run.compile(lambda x: x.sin() * x.shape[0], dynamic=True)
    b = run.compile(lambda x: x.cos() + x.shape[0], dynamic=True)
    x, y = _leaf(3), _leaf(5)
    out_a = run.call(a, x, grad=False)
    out_b = run.call(b, y, grad=False)
    run.backward(out_b, [y])
    torch._dynamo.reset()
    run.call(run.compile(torch.tanh), _leaf(2))
    run.backward(out_a, [x])
    z = _leaf(7)
    run.call(a, z)


@feature()
def tangents_of_other_kinds(run: Run) -> None:
    """Tangents that are expanded, transposed, or none at all for one of the results."""

    def f(x: torch.Tensor) -> Any:
        return x.t() * 2, x.sum(0), x.detach()

    c = run.compile(f)
    for n in (3, 4, 5):
        x = _leaf(n, 2)
        a, b, _ = run.call(c, x, grad=False)
        a.sum().backward()
        run.note("gradient", [x.grad])
        x.grad = None
        a, b, _ = run.call(c, x, grad=False)
        (a.t().sum() + b[0]).backward()
        run.note("gradient", [x.grad])


@feature(functorch={"donated_buffer": True})
def donated_buffers(run: Run) -> None:
    """With donated buffers a retained graph is an error, the same one."""
    _retained(run)


@feature(functorch={"donated_buffer": False})
def no_donated_buffers(run: Run) -> None:
    """Without them it works."""
    _retained(run)


def _retained(run: Run) -> None:
    c = run.compile(lambda x: (x.exp() @ x.exp().t()).sin())
    x = _leaf(3, 2)
    out = run.call(c, x, grad=False)
    try:
        out.sum().backward(retain_graph=True)
        out.sum().backward()
    except RuntimeError as error:
        run.seen.append(("error", str(error)[:80]))
    run.note("gradient", [x.grad])


@feature(dynamo={"compiled_autograd": True}, warm=True)
def backward_in_the_frame(run: Run) -> None:
    """A step with ``backward()`` inside the compiled function."""

    def f(x: torch.Tensor, m: Any) -> Any:
        loss = m(x).square().sum()
        loss.backward()
        return loss.detach()

    m = torch.nn.Linear(2, 2)
    c = run.compile(f)
    for n in (3, 4):
        run.call(c, _leaf(n, 2), m, of=m)
        run.note("gradients", [p.grad for p in m.parameters()])


@feature()
def checkpointed(run: Run) -> None:
    """Activation checkpointing, with dropout that is drawn again, sizes changing."""

    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout((x @ w).sin(), 0.5) * x.shape[0]

    def f(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = checkpoint(block, x, w, use_reentrant=False)
        return checkpoint(block, y, w, use_reentrant=False, preserve_rng_state=False) + x

    c = run.compile(f)
    for n in (3, 4, 5):
        run.call(c, _leaf(n, 2), _leaf(2, 2))


@feature()
def checkpointed_around(run: Run) -> None:
    """Eager checkpointing around a compiled function, reentrant and not."""
    c = run.compile(lambda x: x.sin().exp() * x.shape[0])
    for reentrant in (False, True):
        for n in (3, 4):
            run.call(lambda x, r=reentrant: checkpoint(c, x, use_reentrant=r), _leaf(n))


@feature(functorch={"activation_memory_budget": 0.1})
def a_memory_budget(run: Run) -> None:
    """AOTAutograd's own choice of what to recompute."""
    c = run.compile(lambda x: ((x @ x.t()).sin().exp() @ x).relu())
    for n in (3, 4):
        run.call(c, _leaf(n, 2))


@feature()
def saved_tensor_hooks(run: Run) -> None:
    """Hooks that pack what is saved, around a compiled function and inside it."""
    c = run.compile(lambda x: x.sin().exp())

    def pack(t: torch.Tensor) -> Any:
        return t.double()

    def around(x: torch.Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.float()):
            return c(x)

    run.call(around, _leaf(3))
    run.call(around, _leaf(4))


@feature()
def operators(run: Run) -> None:
    """Custom operators whose fake kernel and backward ask about sizes, one that mutates."""
    library = torch.library.Library("features", "FRAGMENT")
    try:
        library.define("double(Tensor x) -> Tensor")
        library.define("fill_(Tensor(a!) x, int n) -> ()")

        def fill(x: torch.Tensor, n: int) -> None:
            x.fill_(n)

        library.impl("double", lambda x: x * 2, "CPU")
        library.impl("fill_", fill, "CPU")

        @torch.library.register_fake("features::double", lib=library)
        def _(x: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(x)

        @torch.library.register_fake("features::fill_", lib=library)
        def _(x: torch.Tensor, n: int) -> None:
            return None

        def backward(ctx: Any, g: torch.Tensor) -> Any:
            return g * 2 if g.shape[0] < 6 else g * 3

        torch.library.register_autograd("features::double", backward, lib=library)

        def f(x: torch.Tensor, y: torch.Tensor) -> Any:
            torch.ops.features.fill_(y, x.shape[0])
            return torch.ops.features.double(x) + y

        for dynamic in (None, True):
            torch._dynamo.reset()
            c = run.compile(f, dynamic=dynamic)
            for n in (3, 4, 7, 5):
                run.call(c, _leaf(n), torch.ones(n))
    finally:
        library._destroy()


# --- transforms and higher-order operators --------------------------------------------------------


@feature(plain=True)
def transforms_around(run: Run) -> None:
    """A compiled function called under vmap, grad, vmap of grad, jvp, and functionalize."""
    F = torch.func
    c = run.compile(lambda x: (x.sin() * 2).sum(-1))
    for n in (3, 4, 5):
        x = _leaf(n, 2).detach()
        run.call(F.vmap(c), x)
        run.call(F.grad(lambda x: c(x).sum()), x)
        run.call(F.vmap(F.grad(c)), x)
        run.call(lambda x: F.jvp(c, (x,), (torch.ones_like(x),)), x)
        run.call(F.functionalize(c), x)


@feature()
def regions(run: Run) -> None:
    """``nested_compile_region``: one subgraph called several times, with gradients and sizes."""

    @torch.compiler.nested_compile_region
    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).relu() * x.shape[0]

    def f(x: torch.Tensor, w: torch.Tensor) -> Any:
        return block(block(block(x, w), w), w)

    for dynamic in (None, True):
        torch._dynamo.reset()
        c = run.compile(f, dynamic=dynamic, fullgraph=True)
        for n in (3, 4, 5):
            run.call(c, _leaf(n, 2), _leaf(2, 2))


# --- modes ----------------------------------------------------------------------------------------


@feature()
def grad_modes(run: Run) -> None:
    """no_grad, enable_grad and inference mode: around, inside, and inputs made in them."""

    def f(x: torch.Tensor) -> Any:
        with torch.no_grad():
            y = x * 2
        with torch.enable_grad():
            z = x.sin()
        return y, z, x.view(-1), x.detach()

    def g(x: torch.Tensor) -> Any:
        with torch.inference_mode():
            y = x * 2
        return y, x + 1

    c = run.compile(f)
    modes = (torch.no_grad, torch.enable_grad, torch.inference_mode)
    for n in (3, 4):
        for mode in modes:
            with mode():
                run.call(c, _leaf(n), grad=False)
        with torch.inference_mode():
            x = torch.ones(n)
        run.call(c, x)
        with torch.inference_mode():
            run.call(c, x[1:])
        run.call(run.compile(g), _leaf(n))


@feature()
def autocast(run: Run) -> None:
    """bfloat16 around and inside, with gradients, and nested switched off."""

    def f(x: torch.Tensor, w: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ w
            with torch.autocast("cpu", enabled=False):
                z = y.float() @ w
        return y, z, x @ w

    c = run.compile(f)
    for n in (3, 4, 5):
        run.call(c, _leaf(n, 2), _leaf(2, 2))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            run.call(c, _leaf(n, 2), _leaf(2, 2))
        with torch.autocast("cpu", dtype=torch.float16):
            run.call(c, _leaf(n, 2), _leaf(2, 2))


@feature(inductor={"fallback_random": True})
def random_numbers(run: Run) -> None:
    """Dropout, rand, normal, randperm and seeds inside, with inductor's numbers as eager's."""

    def f(x: torch.Tensor) -> Any:
        y = torch.nn.functional.dropout(x, 0.5) + torch.rand(x.shape[0])
        return (
            y,
            torch.randn_like(x),
            torch.randperm(x.shape[0]),
            torch.bernoulli(torch.ones(3) / 2),
        )

    c = run.compile(f)
    for n in (3, 4, 5):
        run.call(c, _leaf(n))


@feature()
def settings_of_torch(run: Run) -> None:
    """Deterministic algorithms, default dtype, anomaly detection, and number of threads."""
    c = run.compile(lambda x: x.cumsum(0) + torch.ones(x.shape[0]))
    run.call(c, _leaf(3))
    torch.use_deterministic_algorithms(True)
    try:
        run.call(c, _leaf(3))
    finally:
        torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float64)
    try:
        run.call(c, _leaf(3))
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.autograd.set_detect_anomaly(True):
        run.call(c, _leaf(4))


@feature(inductor={"freezing": True}, backends=("inductor",))
def frozen_weights(run: Run) -> None:
    """Inductor's freezing: weights become constants, under ``no_grad``, sizes changing."""
    m = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU()).eval()
    c = run.compile(m)
    with torch.no_grad():
        for n in (2, 3, 4):
            run.call(c, torch.ones(n, 4), of=m)
    conv = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3)).eval()
    with torch.no_grad():
        run.call(run.compile(conv), torch.ones(1, 2, 5, 5), of=conv)
