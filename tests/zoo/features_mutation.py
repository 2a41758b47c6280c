"""Features: changes of inputs, of their metadata and of their data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from compiled_programs import feature

if TYPE_CHECKING:
    from observe import Run

# --- metadata that tracing changes ----------------------------------------------------------------


def _metadata(do: Any) -> Any:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        do(x)
        return y.sum() + x

    return f


CHANGES = {
    "transpose_": lambda x: x.transpose_(0, 1),
    "t_": lambda x: x.t_(),
    "squeeze_": lambda x: x.squeeze_(-1),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "as_strided_": lambda x: x.as_strided_((2, 2), (1, 2)),
    "swapdims_": lambda x: x.swapdims_(0, 1),
    "detach_": lambda x: x.detach_(),
    "resize_": lambda x: x.resize_(7, 5).fill_(3),
    "resize_ smaller": lambda x: x.resize_(2),
    "set_": lambda x: x.set_(torch.ones(5)),
    "data": lambda x: setattr(x, "data", torch.ones(6, 2)),
}


def _change(run: Run, name: str, **options: Any) -> None:
    shape = (3, 4, 1) if name == "squeeze_" else (3, 4)
    for grown in (0, 1):
        size = (shape[0] + grown, *shape[1:])
        f = run.compile(_metadata(CHANGES[name]), **options)
        run.call(f, torch.arange(float(torch.Size(size).numel())).reshape(size), grad=False)


@feature()
def metadata_changes(run: Run) -> None:
    """Operators that change the metadata of an input while it is traced."""
    for name in CHANGES:
        torch._dynamo.reset()
        run.seen.append(("mutation", name))
        _change(run, name)
        torch._dynamo.reset()
        _change(run, name, dynamic=True)


@feature(plain=True)
def metadata_changes_twice(run: Run) -> None:
    """Two inputs that alias one another, and one is transposed, resized and set."""

    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        a = x + 1
        x.transpose_(0, 1)
        y.unsqueeze_(0)
        x.mul_(2)
        return a, x * 3, y + 1

    for n in (3, 4, 5):
        x = torch.arange(n * 4.0).reshape(n, 4)
        run.call(run.compile(f, dynamic=True), x, x.view(-1))


@feature(raises=True)
def swap_tensors(run: Run) -> None:
    """Two inputs change places while they are traced."""

    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        z = x + 1
        torch.utils.swap_tensors(x, y)
        return z, x * 2, y * 3

    run.call(run.compile(f), torch.ones(3), torch.arange(4.0))


@feature()
def resized_storage(run: Run) -> None:
    """A storage of no bytes that the graph fills, and one that it frees, as FSDP does."""

    def fill(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.untyped_storage().resize_(y.numel() * 4)
        with torch.no_grad():
            x.copy_(y)
        return x * 2

    def free(x: torch.Tensor) -> Any:
        out = x * 2
        x.untyped_storage().resize_(0)
        return out

    def empty(n: int) -> torch.Tensor:
        x = torch.zeros(n)
        x.untyped_storage().resize_(0)
        return x

    for n in (4, 5):
        run.call(run.compile(fill), empty(n), torch.arange(float(n)))
        run.call(run.compile(free), torch.arange(float(n)))


# --- mutation -------------------------------------------------------------------------------------


@feature(plain=True)
def mutated(run: Run) -> None:
    """In place, on views of inputs, and on inputs that require gradients under ``no_grad``."""

    def f(x: torch.Tensor, y: torch.Tensor, p: torch.Tensor) -> Any:
        x.add_(1)
        y[1:].mul_(2)
        y.view(-1)[0] = 5
        with torch.no_grad():
            p.mul_(0.5)
        return x * p, y.t()

    for n in (3, 4, 5):
        p = torch.arange(float(n), requires_grad=True)
        run.call(run.compile(f), torch.ones(n), torch.ones(n, 2), p)


@feature()
def mutated_non_leaf(run: Run) -> None:
    """An input with a ``grad_fn`` is mutated, and its base with it."""

    def f(x: torch.Tensor) -> Any:
        x.mul_(3)
        return x.sin()

    for n in (3, 4):
        leaf = torch.arange(float(n), requires_grad=True)
        run.call(run.compile(f), leaf * 2, of=leaf)
        leaf = torch.arange(2.0 * n, requires_grad=True)
        whole = leaf.clone()
        run.call(run.compile(f), whole[n:], of=[leaf, whole])
        run.call(run.compile(f), whole.view(2, -1), of=[leaf, whole])


@feature(raises=True)
def mutated_leaf_is_an_error(run: Run) -> None:
    """Eager's error for a leaf that is changed in place comes out as it does directly."""
    f = run.compile(lambda x: x.mul_(2))
    run.call(f, torch.ones(3, requires_grad=True))


@feature()
def data_and_grad(run: Run) -> None:
    """``.data`` is mutated, ``.grad`` read, set to zero, added to and taken away."""

    def f(x: torch.Tensor) -> Any:
        x.data.add_(1)
        y = x.grad * 2
        x.grad.zero_()
        return y, x.detach() + 1

    def g(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.grad = y * 2
        return x + 1

    def h(x: torch.Tensor) -> Any:
        x.grad = None
        return x + 1

    for n in (3, 4):
        x = torch.arange(float(n), requires_grad=True)
        x.grad = torch.ones(n)
        run.call(run.compile(f), x, of=[x.grad], grad=False)
        run.call(run.compile(g), x, torch.ones(n), of=[x.grad])
        run.note("grad", [x.grad])
        run.call(run.compile(h), x, grad=False)
        run.note("grad", [x.grad])
