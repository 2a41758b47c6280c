"""Programs: inputs that are views, aliases, empty, mutated, or sparse."""

from __future__ import annotations

from typing import Any

import torch
from program_zoo import of_sizes, program
from torch import nn


@program(dynamic=True, frames=2)
def transposed() -> tuple[Any, ...]:
    """Inputs that are transposed, permuted and strided views, with an offset."""
    calls = []
    for n in (6, 8):
        x = torch.randn(4, n, 5)
        calls.append((x[0].t(), x[1:].permute(0, 1, 2)[0], x[1::2, 2:, ::2]))
    return (lambda a, b, c: (a @ b, c * 2)), *calls


@program(dynamic=True)
def expanded() -> tuple[Any, ...]:
    """Inputs that are expanded: many elements on one place."""
    return (lambda a, b: (a + b, a.sum(0))), *of_sizes(
        lambda n: torch.randn(1, 5).expand(n, 5), lambda _: torch.randn(5)
    )


@program(dynamic=False)
def overlapping_mutated() -> tuple[Any, ...]:
    """Two views that overlap in a part, one of them changed."""

    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.mul_(2)
        return a.sum() + b

    x = torch.randn(10)
    return f, (x[:6], x[4:])


@program(dynamic=True)
def overlapping_mutated_dynamic() -> tuple[Any, ...]:
    """Two views that do not overlap though they share a storage, both changed, sizes symbolic."""

    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.mul_(2)
        b.add_(1)
        return a + b

    x = torch.randn(10)
    return f, (x[:5], x[5:])


@program(dynamic=True)
def base_and_view() -> tuple[Any, ...]:
    """A base and two views of it among the inputs, the base changed."""

    def f(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> Any:
        x.add_(1)
        return v * 2, w + v

    x = torch.randn(4, 4)
    return f, (x, x[1], x[:, 2])


@program(dynamic=True, backend="eager", compiled="eager")
def view_before_base() -> tuple[Any, ...]:
    """A changed view among the inputs before its base (torch's aot_eager gets it wrong)."""

    def f(v: torch.Tensor, x: torch.Tensor) -> Any:
        v.add_(1)
        return x * 2, v.sum()

    x = torch.randn(4, 6)
    return f, (x[1:, 2:], x)


@program()
def same_tensor_twice() -> tuple[Any, ...]:
    """One tensor passed twice, changed through one name."""

    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a * b

    x = torch.randn(3)
    return f, (x, x)


@program(dynamic=False)
def other_dtype_view() -> tuple[Any, ...]:
    """Views under another dtype: the same bytes as integers and halves."""
    x = torch.randn(4, 4)
    return (lambda a, b: (a + 1, b.float())), (x.view(torch.int32), x[1:].view(torch.float16))


@program(dynamic=False)
def complex_view_of_real() -> tuple[Any, ...]:
    """A complex view of real numbers."""
    x = torch.randn(4, 2)
    return (lambda c, x: (c * 2, x + 1)), (torch.view_as_complex(x), x)


@program()
def real_view_of_complex() -> tuple[Any, ...]:
    """The real and imaginary parts of complex tensors as inputs."""
    z = torch.randn(3, 3, dtype=torch.complex64)
    return (lambda a, b, c: (a + b, c * 2)), (z.real, z.imag, torch.view_as_real(z))


@program()
def conj_and_neg() -> tuple[Any, ...]:
    """Inputs with the conjugate and the negative bit."""
    z = torch.randn(3, 3, dtype=torch.complex64)
    return (lambda a, b, c: (a * 2, b + 1, c @ a)), (z.conj(), z.conj().imag, z.mH)


@program(grad=True)
def views_that_require_grad() -> tuple[Any, ...]:
    """Views of a leaf: under grad mode, under no_grad, and one output of unbind."""
    x = torch.randn(3, 4, requires_grad=True)
    with torch.no_grad():
        quiet = x[0]
    return (lambda a, b, c, d: a * 2 + b + c + d.sum()), (x[0], quiet, x.unbind(0)[1], x)


@program(grad=True)
def non_leaf() -> tuple[Any, ...]:
    """Inputs with a history, one that retains its gradient, and a view of one."""
    x = torch.randn(3, 4, requires_grad=True)
    y = x * 2
    z = x.exp()
    z.retain_grad()
    return (lambda y, z, v: y * z + v), (y, z, y[1])


@program(grad=True, backend="eager")
def mutated_non_leaf() -> tuple[Any, ...]:
    """An input with a history that is changed in place, and a view of it (gradients as in eager)."""

    def f(y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y.mul_(2)
        return y.sum() + v

    y = torch.randn(3, 4, requires_grad=True) * 1
    return f, (y, y[1])


@program(grad=True)
def parameters_as_inputs() -> tuple[Any, ...]:
    """Parameters and buffers passed as arguments, frozen and not."""
    frozen = nn.Parameter(torch.randn(3), requires_grad=False)
    return (lambda a, b, c: a * b + c), (
        nn.Parameter(torch.randn(3)), frozen, nn.Buffer(torch.randn(3)),
    )  # fmt: skip


@program(dynamic=True)
def in_place() -> tuple[Any, ...]:
    """Every usual way to change an input in place."""

    def f(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        a += 1
        b[1:] = 2.0
        c.copy_(a)
        torch.sin(d, out=d)
        a.data.mul_(3)
        return a + b

    return f, tuple(torch.randn(4) for _ in range(4))


@program()
def metadata_in_place() -> tuple[Any, ...]:
    """Inputs whose shape and strides are changed in place."""

    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.t_()
        b.unsqueeze_(0)
        b.squeeze_(0)
        return a @ a.t() + b.sum()

    return f, (torch.randn(3, 4), torch.randn(3))


@program(dynamic=True, frames=2)
def data_swapped() -> tuple[Any, ...]:
    """Inputs that are given the data of another one."""

    def f(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
        d = c.sin()
        c.data = b
        with torch.no_grad():
            a.set_(b)
        return a * 2, c + d

    return f, *of_sizes(lambda _: torch.randn(7), torch.randn, torch.randn)


@program(frames=2)
def resized() -> tuple[Any, ...]:
    """An intermediate tensor that is resized inside, written to by out=."""

    def f(a: torch.Tensor) -> torch.Tensor:
        out = torch.empty(0)
        torch.add(a, 1, out=out)
        return out * 2

    return f, (torch.randn(3),)


@program()
def zero_dim() -> tuple[Any, ...]:
    """Inputs without dims, of several dtypes, one of them a view."""
    x = torch.randn(3)
    return (lambda a, b, c, d: a * b + c + d), (
        torch.tensor(2.0), torch.tensor(3), torch.tensor(True), x[1],
    )  # fmt: skip


@program(dynamic=True)
def empty_inputs() -> tuple[Any, ...]:
    """Inputs without elements, in one dim and in all."""
    return (lambda a, b, c: (a.sum(), torch.cat([b, b]), c.t())), *of_sizes(
        lambda _: torch.randn(0), lambda n: torch.randn(n, 0), lambda _: torch.randn(0, 4)
    )


@program(dynamic=True)
def zero_bytes() -> tuple[Any, ...]:
    """An input whose storage was given back, as FSDP does; it is not read."""

    def empty(n: int) -> torch.Tensor:
        x = torch.randn(n, 4)
        x.untyped_storage().resize_(0)
        return x

    return (lambda x, y: y + x.shape[0]), *of_sizes(empty, lambda _: torch.randn(3))


@program(dynamic=True)
def channels_last() -> tuple[Any, ...]:
    """Channels-last inputs with symbolic sizes, and a size of one."""
    last = torch.channels_last
    return (lambda x, y: (x * y).contiguous(memory_format=last) + 1), *of_sizes(
        lambda n: torch.randn(2, 3, n, 5).to(memory_format=last),
        lambda n: torch.randn(2, 1, n, 5).to(memory_format=last),
    )


@program(dynamic=True)
def huge_strides() -> tuple[Any, ...]:
    """as_strided views with gaps, overlaps and an offset."""
    x = torch.randn(100)
    return (lambda a, b: a.sum(0) + b[0]), *of_sizes(
        lambda n: x.as_strided((3, n), (20, 2), 5),
        lambda n: x.as_strided((5, n), (1, 1), 10),
        sizes=(4, 6),
    )


@program(dynamic=True)
def part_of_a_storage() -> tuple[Any, ...]:
    """Inputs on a storage that is larger than they are, without a base."""
    x = torch.randn(10, 10)
    return (lambda a, b: a + b), *of_sizes(
        lambda n: x[2 : n + 2, 1:4].detach(), lambda n: x.data[4 : n + 4, 0:3], sizes=(4, 6)
    )


@program(dynamic=True, slow=True)
def many_inputs() -> tuple[Any, ...]:
    """A hundred inputs, each with symbols of its own."""
    xs = [torch.randn(2 + i % 5, 3) for i in range(100)]
    return (lambda xs: [x * 2 for x in xs]), (xs,)


@program(frames=0)
def sparse() -> tuple[Any, ...]:
    """A sparse input: Dynamo itself leaves such a function to eager."""
    return (lambda x, y: torch.sparse.mm(x, y)), (torch.eye(3).to_sparse(), torch.randn(3, 2))
