"""Features: inputs of every kind, what aliases them, and changes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from compiled_programs import feature
from torch.testing._internal.two_tensor import TwoTensor

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


# --- tensors that the graph holds -----------------------------------------------------------------


@feature(plain=True)
def held_by_the_graph(run: Run) -> None:
    """Tensors of static address, one of inner tensors, one changed; data of other sizes, another one."""
    base = torch.arange(12.0).view(3, 4)
    inner = TwoTensor(torch.ones(3, 5), torch.ones(3, 5))
    held = [torch.arange(3.0), base.t()[1:], inner, torch.zeros(2)]
    for t in held:
        torch._dynamo.mark_static_address(t, guard=True)

    def f(x: torch.Tensor, n: int) -> Any:
        held[-1].add_(x.sum())
        return held[0].sum() * x, held[0] * 2, [t.sum(0) + n for t in held[1:]]

    c = run.compile(f, dynamic=True)
    run.call(c, torch.ones(4), 3, of=held)
    held[0].data = torch.arange(5.0)
    run.call(c, torch.ones(6), 4, of=held)
    held[-1] = torch.ones(7)
    run.call(c, torch.ones(6), 4, of=held)
