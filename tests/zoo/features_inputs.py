"""Features: inputs of every kind, and what aliases them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from compiled_programs import feature

if TYPE_CHECKING:
    from observe import Run

# --- aliasing -------------------------------------------------------------------------------------


@feature(plain=True)
def overlap_after_disjoint(run: Run) -> None:
    """Inputs of one storage that overlap in a later call only, and one of them is mutated."""

    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.add_(10)
        return x * 2, y + 1

    c = run.compile(f)
    for x_slice, y_slice in ((slice(0, 4), slice(4, 8)), (slice(0, 4), slice(2, 6))):
        whole = torch.arange(8.0)
        run.call(c, whole[x_slice], whole[y_slice], of=whole)
    run.call(c, torch.arange(4.0), torch.arange(4.0))


@feature()
def overlap_after_disjoint_dynamic(run: Run) -> None:
    """The same with symbolic sizes and offsets, and two outputs that are views."""

    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.mul_(2)
        return y.view(-1), x[1:]

    c = run.compile(f, dynamic=True)
    for a, b in ((0, 6), (0, 3), (2, 1), (0, 0), (0, 7)):
        whole = torch.arange(14.0)
        run.call(c, whole[a : a + 5], whole[b : b + 5], of=whole)
        run.call(c, whole[a : a + 6], whole[b : b + 6], of=whole)


@feature()
def overlap_of_three(run: Run) -> None:
    """Three inputs of one storage, which overlap pairwise in one call or another."""

    def f(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
        y.add_(x)
        return x + y + z

    for dynamic in (None, True, False):
        torch._dynamo.reset()
        c = run.compile(f, dynamic=dynamic)
        for a, b, d in ((0, 4, 8), (0, 2, 8), (0, 6, 8), (0, 4, 0), (3, 3, 3)):
            whole = torch.arange(12.0)
            run.call(c, whole[a : a + 4], whole[b : b + 4], whole[d : d + 4], of=whole)


@feature()
def overlap_in_two_dims(run: Run) -> None:
    """Columns and rows of one matrix: the ranges of bytes overlap, the elements need not."""

    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.add_(1)
        return y * 2

    for dynamic in (None, True):
        torch._dynamo.reset()
        c = run.compile(f, dynamic=dynamic)
        for make in (
            lambda m: (m[:, :2], m[:, 2:]),
            lambda m: (m[:2], m[2:]),
            lambda m: (m[:, 1:3], m[:, 2:]),
            lambda m: (m[:, ::2], m[:, 1::2]),
            lambda m: (m.t()[:2], m[:2].t()),
        ):
            m = torch.arange(16.0).reshape(4, 4)
            run.call(c, *make(m), of=m)


@feature()
def the_same_tensor_twice(run: Run) -> None:
    """One tensor as two arguments, first or later, mutated or not, with gradients or without."""

    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.add_(1)
        return x * y, x, y

    def g(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x * y, x

    for fn, grad in ((f, False), (g, True)):
        for order in ((True, False), (False, True)):
            torch._dynamo.reset()
            c = run.compile(fn)
            for twice in order:
                x, y = (torch.arange(3.0, requires_grad=grad) for _ in range(2))
                run.call(c, x, x if twice else y)


@feature()
def base_and_views(run: Run) -> None:
    """A base beside its views, mutated through one of them; synthetic bases in the graph."""

    def f(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> Any:
        v.mul_(2)
        return x + 1, v.view(-1), w

    for dynamic in (None, True):
        torch._dynamo.reset()
        c = run.compile(f, dynamic=dynamic)
        for n in (3, 4, 5):
            x = torch.arange(2.0 * n).reshape(n, 2)
            run.call(c, x, x.view(2, n), x.t())
            leaf = torch.arange(2.0 * n, requires_grad=True)
            x = leaf.clone().reshape(n, 2)
            run.call(c, x, x.view(2, n), x.t(), of=leaf)


@feature()
def views_as_inputs(run: Run) -> None:
    """Views of leaves, made under ``no_grad``, of several outputs, of other dtypes, of views."""

    def f(x: torch.Tensor) -> Any:
        return x * 2, x.detach(), x[..., :1]

    def views(leaf: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            silent = leaf[1:]
        return [
            leaf[1:],
            silent,
            *leaf.split(2),
            *leaf.unbind(0),
            leaf.view(2, 2, -1),
            leaf.t()[1:],
            leaf.diagonal(),
            leaf.detach(),
            leaf.unfold(1, 2, 1),
        ]

    for dynamic in (None, True):
        torch._dynamo.reset()
        c = run.compile(f, dynamic=dynamic)
        for n in (4, 6):
            leaf = torch.arange(4.0 * n).reshape(4, n).requires_grad_()
            for i in range(len(views(leaf))):
                leaf.grad = None
                run.call(c, views(leaf)[i], of=leaf)


@feature()
def mutated_views_as_inputs(run: Run) -> None:
    """The same kinds of views, mutated where eager may."""

    def f(x: torch.Tensor) -> Any:
        x.mul_(2)
        return x.sum()

    for n in (4, 6):
        for make in (
            lambda t: t[1:],
            lambda t: t.t(),
            lambda t: t.split(2)[1],
            lambda t: t.unbind(0)[1],
            lambda t: t.view(2, 2, -1)[0],
            lambda t: t.detach()[1:],
            lambda t: t.diagonal(),
        ):
            for grad in (False, True):
                torch._dynamo.reset()
                leaf = torch.arange(4.0 * n).reshape(4, n).requires_grad_(grad)
                base = leaf.clone()
                run.call(run.compile(f), make(base), of=[leaf, base])
                with torch.no_grad():
                    run.call(run.compile(f), make(leaf), of=leaf)


# --- kinds ----------------------------------------------------------------------------------------


@feature(backends=("aot_eager",))
def sparse(run: Run) -> None:
    """Sparse inputs, as far as the direct backend takes them."""
    c = run.compile(lambda x, y: (x @ y, y + 1))
    dense = torch.tensor([[0.0, 1, 0], [2, 0, 3]])
    for s in (dense.to_sparse(), dense.to_sparse_csr()):
        run.call(c, s, torch.ones(3, 2))
        run.call(c, s, torch.ones(3, 4))


@feature(warm=True)
def changes_beside_a_wrapper(run: Run) -> None:
    """A wrapper subclass is an input of frames that change what others are.

    The fakes that such a frame was traced with tell of it afterwards; the backend sees the inputs
    as they were at first.
    """
    from torch.testing._internal.two_tensor import TwoTensor

    def transposed(x: torch.Tensor, p: torch.Tensor, w: torch.Tensor) -> Any:
        z = w * x
        x.t_()
        return z * 2, x + 1

    def swapped(x: torch.Tensor, p: torch.Tensor, w: torch.Tensor) -> Any:
        z = w * x
        x.data = torch.ones(5)
        return z * 2, x + 1

    def joined(x: torch.Tensor, p: torch.Tensor, w: torch.Tensor) -> Any:
        x.add_(p)
        return x * 2, w * 2

    for fn in (transposed, swapped, joined):
        for dynamic in (False, True):
            torch._dynamo.reset()
            a = torch.arange(6.0).reshape(3, 2)
            p = torch.ones(3, 2, requires_grad=True)
            run.call(run.compile(fn, dynamic=dynamic), a, p, TwoTensor(a + 1, a + 2), grad=False)


@feature(plain=True)
def data_of_another_size(run: Run) -> None:
    """``x.data = y`` where ``y`` has other sizes, of which the code asks something."""

    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        z = x * 2
        if x.shape[0] > 2:
            z = z + 1
        x.data = y
        return z, x + y.shape[0]

    for dynamic in (False, True):
        torch._dynamo.reset()
        run.call(run.compile(f, dynamic=dynamic), torch.ones(3, 4), torch.ones(5))


@feature()
def subclasses_that_are_no_wrappers(run: Run) -> None:
    """Parameters, buffers, and a subclass with ``__torch_function__`` alone."""

    class Named(torch.Tensor):
        pass

    class Weight(torch.nn.Parameter):
        pass

    c = run.compile(lambda x: x * 2 + 1)
    with torch._dynamo.config.patch(traceable_tensor_subclasses={Named, Weight}):
        for n in (2, 3, 4):
            run.call(c, Weight(torch.ones(n)))
            run.call(c, torch.nn.Parameter(torch.ones(n)))
            run.call(c, torch.nn.Buffer(torch.ones(n)))
            run.call(c, torch.ones(n).as_subclass(Named))
