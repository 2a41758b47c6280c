"""Programs: symbols, guards, marks, scalars, data-dependent sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from program_zoo import of_sizes, program
from torch._dynamo import decorators

if TYPE_CHECKING:
    from collections.abc import Callable

_DATA = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}


@program(dynamic=True)
def branch_on_size() -> tuple[Any, ...]:
    """Python branches on sizes leave guards."""

    def f(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] * 2 > 9 and x.shape[1] % 2 == 0:
            return x.sin()
        return x.cos()

    return f, (torch.randn(7, 4),)


@program(dynamic=False)
def all_static() -> tuple[Any, ...]:
    """dynamic=False: no symbol at all."""
    return (lambda x: x.view(-1)), (torch.randn(3, 4),)


@program(frames=2)
def automatic_dynamic() -> tuple[Any, ...]:
    """The second call with another size makes the dim dynamic."""
    return (
        (lambda x: x.sum() * x.shape[0]),
        (torch.randn(3, 4),),
        (torch.randn(5, 4),),
        (torch.randn(9, 4),),
    )


@program(frames=2)
def automatic_dynamic_scalars() -> tuple[Any, ...]:
    """The second call with another int and float makes both dynamic."""
    return (lambda x, n, y: x * n + y), (torch.ones(3), 4, 0.5), (torch.ones(3), 7, 1.5)


def _marked(mark: Callable[..., None], *sizes: tuple[int, ...], **how: Any) -> list[torch.Tensor]:
    """Tensors of these sizes whose first dim is marked."""
    found = [torch.randn(size) for size in sizes]
    for x in found:
        mark(x, 0, **how)
    return found


@program()
def mark_dynamic() -> tuple[Any, ...]:
    """mark_dynamic with a range, and without one."""
    sizes = ((8, 4), (6, 4), (9, 4))
    xs = _marked(decorators.mark_dynamic, *sizes, min=4, max=64)
    ys = _marked(decorators.mark_dynamic, *reversed(sizes))
    return (lambda x, y: (x * 2, y.sum(0) * y.shape[0])), *zip(xs, ys, strict=True)


@program(frames=2)
def maybe_mark_dynamic() -> tuple[Any, ...]:
    """maybe_mark_dynamic on a dim that is specialized in the end."""
    xs = _marked(decorators.maybe_mark_dynamic, (8, 4), (6, 4), (5, 4))
    return (lambda x: x * 2 if x.shape[0] == 8 else x + x.shape[0]), *((x,) for x in xs)


@program(dynamic=True, frames=2)
def mark_static() -> tuple[Any, ...]:
    """mark_static on one dim of a dynamic frame."""
    xs = _marked(decorators.mark_static, (8, 4), (8, 5), (6, 5))
    return (lambda x: x.view(-1) * x.shape[0]), *((x,) for x in xs)


def _unbacked(**how: Any) -> list[tuple[torch.Tensor, ...]]:
    sizes = ((8, 4), (5, 4), (60, 4))
    xs, ys = (_marked(decorators.mark_unbacked, *sizes, **how) for _ in range(2))
    return [*zip(xs, ys, strict=True)]


@program()
def mark_unbacked() -> tuple[Any, ...]:
    """mark_unbacked: sizes without a hint, with checks and bounds."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] > 3)
        return x.sum(0) + x.shape[0] + x.new_zeros(y.shape[0]).sum()

    return f, *_unbacked(min=2, max=60)


@program()
def mark_unbacked_shared() -> tuple[Any, ...]:
    """Two unbacked sizes that are equal by a check."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] == y.shape[0])
        return x + y

    return f, *_unbacked()


@program(grad=True)
def mark_unbacked_of_one_shape() -> tuple[Any, ...]:
    """Two unbacked sizes of one name, which have a hint of their own."""
    return (lambda x, y: (x + y, x.sum(0))), *_unbacked(shape_id="rows", hint_override=8)


@program(dynamic=True)
def static_address() -> tuple[Any, ...]:
    """Inputs whose address is static, as CUDA graphs want it; one is changed."""
    x, state = torch.randn(3), torch.zeros(3)
    torch._dynamo.mark_static_address(x)
    torch._dynamo.mark_static_address(state, guard=False)

    def f(x: torch.Tensor, state: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        state.add_(y.sum())
        return x * 2 * state * y

    return f, *of_sizes(lambda _: x, lambda _: state, lambda n: torch.randn(n, 1))


@program(grad=True, dynamo=_DATA, dynamic=True)
def item_with_checks() -> tuple[Any, ...]:
    """A size read from data, with bounds by torch._check."""

    def f(x: torch.Tensor, n: torch.Tensor) -> Any:
        k = n.item()
        torch._check(k >= 1)
        torch._check(k <= x.shape[0])
        return x[:k].sum(), torch.ones(k), x.narrow(0, 0, k)

    return f, *of_sizes(lambda n: torch.randn(n + 5, requires_grad=True), torch.tensor)


@program(grad=True, dynamo=_DATA, dynamic=True)
def tolist() -> tuple[Any, ...]:
    """Split sizes read from data, whose sum is checked."""

    def f(x: torch.Tensor, sizes: torch.Tensor) -> Any:
        a, b, c = sizes.tolist()
        for n in (a, b, c):
            torch._check(n >= 0)
            torch._check(n <= x.shape[0])
        torch._check(a + b + c == x.shape[0])
        return torch.split(x, [a, b, c])

    return f, *of_sizes(
        lambda n: torch.randn(n + 5, requires_grad=True), lambda n: torch.tensor([n, 5, 0])
    )


@program(dynamo=_DATA)
def float_item() -> tuple[Any, ...]:
    """A float and a bool read from data."""

    def f(x: torch.Tensor, s: torch.Tensor, b: torch.Tensor) -> Any:
        return x * s.item() + 1, torch.full((2,), s.item()), x + b.item()

    return f, (torch.randn(3), torch.tensor(2.5), torch.tensor(True))


@program(grad=True, dynamo=_DATA)
def float_item_squared() -> tuple[Any, ...]:
    """A float of the data, which stays symbolic and becomes a tensor again, and a bool."""

    def f(x: torch.Tensor, s: torch.Tensor, b: torch.Tensor) -> Any:
        a = s.item()
        return x * a + a**2 + 1, torch.full((2,), a), x + b.item()

    x = torch.randn(3, requires_grad=True)
    return f, *((x, torch.tensor(a), torch.tensor(a > 2)) for a in (2.5, 1.5))


@program(dynamo=_DATA, dynamic=True)
def item_equals_input_size() -> tuple[Any, ...]:
    """A data-dependent size that is proven to be an input's size."""

    def f(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        k = n.item()
        torch._check(k == x.shape[0])
        return torch.zeros(k) + x

    return f, (torch.randn(5), torch.tensor(5))


@program(dynamo=_DATA)
def nonzero_arithmetic() -> tuple[Any, ...]:
    """Arithmetic on a data-dependent size: views, padding, a loop over symbols."""

    def f(x: torch.Tensor) -> Any:
        i = x.nonzero().squeeze(-1)
        n = i.shape[0]
        return i.new_zeros(n * 2 + 1), i.view(n, 1).expand(n, 3), torch.cat([i, i])[: n + 1]

    return f, (torch.tensor([0, 1, 2, 0, 3]),)


@program(frames=2)
def zero_and_one() -> tuple[Any, ...]:
    """Ints 0, 1 and -1 as arguments are specialized."""
    return (lambda x, a, b, c: x * a + b - c), (torch.ones(3), 0, 1, -1), (torch.ones(3), 1, 0, -2)


@program(dynamic=True)
def huge_and_negative_ints() -> tuple[Any, ...]:
    """Ints at the borders of 64 bits, and negative ones, as symbols."""
    return (lambda x, a, b, c: (x * a, x.long() + b, x + c)), (
        torch.ones(3), 2**62, -(2**63) + 7, -5,
    )  # fmt: skip


@program(dynamic=True)
def odd_floats() -> tuple[Any, ...]:
    """Infinite, not-a-number, negative zero and denormal floats as arguments."""
    return (lambda x, a, b, c, d: x * a + b * c + d), (
        torch.ones(3), float("inf"), float("nan"), -0.0, 5e-324,
    )  # fmt: skip


@program(grad=True, dynamic=True, frames=5)
def float_arguments() -> tuple[Any, ...]:
    """Floats as symbols: in tensor arithmetic, in Python arithmetic, in a comparison, made constant."""

    def f(x: torch.Tensor, a: float, b: float) -> torch.Tensor:
        scale = a * 2 + b**2
        y = x * scale + torch.full((3,), a) if a > 0.25 else x - scale
        return y**b if b > 1 else torch.dropout(y * int(b), p=b, train=False)

    x = torch.ones(3, requires_grad=True)
    pairs = ((0.5, 1.5), (0.75, 2.5), (float("inf"), 1.5), (float("nan"), 2.5), (0.0, 0.5))
    return f, *((x, a, b) for a, b in pairs)


@program(dynamic=False)
def bool_none_and_str() -> tuple[Any, ...]:
    """Bools, strings, None, bytes, enums and ranges steer the trace and leave no input."""

    def f(x: torch.Tensor, flag: bool, mode: str, none: Any, r: range) -> torch.Tensor:
        if flag and none is None:
            x = getattr(x, mode)()
        return x + len(r)

    return f, (torch.randn(3), True, "sin", None, range(4))


@program(dynamic=True)
def shape_arithmetic() -> tuple[Any, ...]:
    """Floor division, modulo, min, max, power, rounding and comparison of symbols."""

    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        n, m = x.shape[0], y.shape[0]
        k = max(n // 2, m % 3 + 1)
        total = int(n * 1.5) + min(n, m) ** 2 + round(m / 2) - abs(n - m)
        return x.new_ones(k), x.new_zeros(total), torch.sym_max(n, m) + x, -n + y, x * (n / m)

    return f, (torch.randn(7), torch.randn(5))


@program(dynamic=True)
def duck_shapes() -> tuple[Any, ...]:
    """Equal sizes share a symbol; broadcasting and matmul add equalities."""
    return (lambda x, y, z: (x @ y) + z), (torch.randn(4, 6), torch.randn(6, 3), torch.randn(4, 3))


@program(dynamic=True)
def equal_by_guard() -> tuple[Any, ...]:
    """A flattened size that equals another input's: a product in a guard."""
    return (lambda x, y: x.flatten() + y), (torch.randn(3, 4), torch.randn(12))


@program(dynamic=True)
def divisible() -> tuple[Any, ...]:
    """A reshape that needs divisibility."""
    return (lambda x: x.reshape(5, -1).sum(1)), (torch.randn(20, 3),)


@program(dynamic=True)
def sizes_as_outputs() -> tuple[Any, ...]:
    """Symbols among the outputs, alone and in arithmetic."""
    return (lambda x: (x * 2, x.shape[0], x.numel() // 2, x.stride(0), x.shape)), (
        torch.randn(6, 4),
    )


@program(dynamic=True)
def strides_and_offsets() -> tuple[Any, ...]:
    """Guards on strides and the storage offset."""

    def f(x: torch.Tensor) -> torch.Tensor:
        if x.stride(0) > x.shape[1] and x.storage_offset() > 0 and not x.is_contiguous():
            return x.contiguous() * x.stride(0)
        return x + x.storage_offset()

    return f, (torch.randn(6, 8)[1:, 2:5],)


@program(dynamic=True)
def specialized_by_trace() -> tuple[Any, ...]:
    """Sizes that tracing fixes to a number and to one another."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(x.shape[0]):
            x = x + 1
        return x if x.shape[1] == y.shape[0] else y

    return f, (torch.randn(3, 4), torch.randn(4))


@program(
    options={"dynamic": True, "fullgraph": True, "mode": None},
    implied_guards="Guards that follow from others are not stated again.",
)
def dynamic_rnn_like() -> tuple[Any, ...]:
    """A loop over a static dim with slices at symbolic positions."""

    def f(x: torch.Tensor, n: int) -> torch.Tensor:
        out = x[:, n:]
        return torch.nn.functional.pad(out, (n, 0)) + x[:, -n:].sum(1, keepdim=True)

    return f, (torch.randn(3, 9), 4)
