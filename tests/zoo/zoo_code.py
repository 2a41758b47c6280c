"""Programs: Python code around tensors: control flow, transforms, contexts, optimizers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import program_ops
import torch
import torch.utils.checkpoint
from program_zoo import of_sizes, program
from torch import nn


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


_SCALE = torch.tensor([1.0, 2.0, 3.0])
_NUMBERS = {"a": 2, "b": [3, 4.5]}


def _rows_and_weight() -> list[tuple[Any, ...]]:
    return of_sizes(
        lambda n: torch.randn(n, 2, requires_grad=True),
        lambda _: torch.randn(2, requires_grad=True),
    )


@program(frames=2)
def graph_break() -> tuple[Any, ...]:
    """A graph break in the middle: two frames, the second one resumes."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y + x

    return f, (torch.randn(3),)


@program(frames=3, dynamic=True)
def data_dependent_branch() -> tuple[Any, ...]:
    """A branch on data breaks the graph; both sides are compiled."""

    def f(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x.relu() + x.shape[0]
        return x.abs()

    return f, (torch.ones(3),), (-torch.ones(4),)


@program(frames=2, dynamic=False)
def recompiles() -> tuple[Any, ...]:
    """Another number and another dtype: each compiles the function again."""
    return (lambda x, n: x * n), (torch.ones(3), 2), (torch.ones(3).double(), 3)


@program(grad=True, dynamic=True)
def cond() -> tuple[Any, ...]:
    """torch.cond on data, with a closure, sizes and gradients."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin() * w, lambda x: x.cos() + x.shape[0], (x,))

    return f, *_rows_and_weight()


@program(dynamic=True)
def cond_on_a_size() -> tuple[Any, ...]:
    """torch.cond on a symbolic condition, nested, with symbolic sizes inside."""

    def inner(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.max() > 1, lambda x: x + x.shape[0], lambda x: x * 2, (x,))

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cond(y.sum() > x.shape[0], inner, lambda x: x - 1, (x,))

    return f, (torch.randn(4, 3), torch.ones(9))


@program(dynamic=True)
def while_loop() -> tuple[Any, ...]:
    """A while loop whose number of steps is a size."""
    from torch._higher_order_ops import while_loop as loop

    def f(x: torch.Tensor, w: torch.Tensor) -> Any:
        start = (torch.tensor(1), x.detach() + 0)
        return loop(lambda i, y: i < x.shape[0], lambda i, y: (i + 1, y * w), start)

    return f, *_rows_and_weight()


@program()
def while_loop_on_data() -> tuple[Any, ...]:
    """A while loop whose number of steps depends on the data."""
    from torch._higher_order_ops import while_loop as loop

    def f(i: torch.Tensor, x: torch.Tensor) -> Any:
        return loop(lambda i, x: i < 5, lambda i, x: (i + 1, x * 1.5), (i, x))

    return f, (torch.tensor(1), torch.randn(3))


@program(grad=True, dynamic=True)
def scan() -> tuple[Any, ...]:
    """A scan over the first dim that carries a sum."""
    from torch._higher_order_ops import scan as scan_

    def f(xs: torch.Tensor, w: torch.Tensor) -> Any:
        return scan_(lambda c, x: (c + x * w, c * x), xs[0] * 0, xs, dim=0)

    return f, *_rows_and_weight()


@program(dynamic=True, frames=2, slow=True)
def associative_scan() -> tuple[Any, ...]:
    """A cumulative sum as an associative scan."""
    from torch._higher_order_ops import associative_scan as scan_

    def f(x: torch.Tensor) -> Any:
        return scan_(lambda a, b: a + b, x, 0, combine_mode="generic")

    return f, *of_sizes(lambda n: torch.randn(n, 2))


@program(grad=True, dynamic=True)
def map_over_a_dim() -> tuple[Any, ...]:
    """A map over the first dim with an extra argument."""
    from torch._higher_order_ops.map import map as map_

    return (lambda xs, w: map_(lambda x, w: x.sin() * w, xs, w)), *_rows_and_weight()


@program(grad=True, dynamic=True)
def checkpointing() -> tuple[Any, ...]:
    """Activation checkpointing of a block, with dropout off."""
    m = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    return (lambda x: torch.utils.checkpoint.checkpoint(m, x, use_reentrant=False).sin()), (
        torch.randn(2, 3),
    )


def _keep_products(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> Any:
    policy = torch.utils.checkpoint.CheckpointPolicy
    return policy.MUST_SAVE if op is torch.ops.aten.mm.default else policy.PREFER_RECOMPUTE


@program(grad=True, dynamic=True)
def selective_checkpointing() -> tuple[Any, ...]:
    """Selective activation checkpointing by a list of operators and by a policy over them."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts as contexts

    m = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    saved = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    chosen = [functools.partial(contexts, one) for one in (saved, _keep_products)]

    def f(x: torch.Tensor) -> torch.Tensor:
        for context_fn in chosen:
            x = torch.utils.checkpoint.checkpoint(
                lambda x: m(x).exp(), x, use_reentrant=False, context_fn=context_fn
            )
        return x

    return f, *of_sizes(lambda n: torch.randn(n, 3))


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, limit: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.limit = limit
        return x.clamp(-limit, limit)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * 2 + x * ctx.limit, None


@program(grad=True, dynamic=True)
def autograd_function() -> tuple[Any, ...]:
    """An autograd.Function whose backward is not the derivative of its forward."""
    return (lambda x: _Clipped.apply(x, 0.5).sum(0)), *of_sizes(
        lambda n: torch.randn(n, 3, requires_grad=True)
    )


@program(grad=True, ops=True)
def custom_op() -> tuple[Any, ...]:
    """A custom operator with its own gradient."""
    return (lambda x: program_ops.scale(x, 3.0) + 1), (torch.randn(3, requires_grad=True),)


@program(ops=True)
def custom_op_in_place() -> tuple[Any, ...]:
    """A custom operator that changes its argument."""

    def f(x: torch.Tensor) -> torch.Tensor:
        program_ops.add_one_(x, [1, 2])
        return x * 2

    return f, (torch.randn(3),)


@program(ops=True, dynamic=True)
def custom_op_dynamic_output() -> tuple[Any, ...]:
    """A custom operator whose output size depends on the data."""
    return (lambda x: program_ops.positive(x) * 2), (torch.randn(6),)


@program(grad=True, dynamic=True)
def vmap() -> tuple[Any, ...]:
    """torch.vmap with several in_dims, chunked and nested."""

    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        inner = torch.vmap(torch.dot, in_dims=(None, 1))
        outer = torch.vmap(lambda r: r.outer(r), randomness="error")
        return (
            torch.vmap(inner, in_dims=(0, None))(x, y),
            torch.vmap(lambda a: a.sum() * a)(x),
            outer(x),
        )

    return f, *of_sizes(
        lambda n: torch.randn(n, 2, requires_grad=True), lambda _: torch.randn(2, 4)
    )


@program(grad=True, dynamic=True)
def grad_transform() -> tuple[Any, ...]:
    """torch.func.grad and vjp inside the compiled function, per sample by vmap."""

    def f(x: torch.Tensor, w: torch.Tensor) -> Any:
        def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return (x @ w).sin().sum()

        per_sample = torch.vmap(torch.func.grad(loss), (None, 0))(w, x)
        value, pull = torch.func.vjp(lambda w: x @ w, w)
        return per_sample, value, pull(torch.ones_like(value))[0]

    return f, *_rows_and_weight()


@program(grad=True, dynamic=True, frames=2, slow=True)
def jacobians() -> tuple[Any, ...]:
    """jacrev, jacfwd and a hessian."""

    def f(x: torch.Tensor) -> Any:
        def g(x: torch.Tensor) -> torch.Tensor:
            return x.sin() * x.sum()

        return (
            torch.func.jacrev(g)(x),
            torch.func.jacfwd(g)(x),
            torch.func.hessian(lambda x: g(x).sum())(x),
        )

    return f, *of_sizes(lambda n: torch.randn(n, requires_grad=True))


@program(grad=True, dynamic=True)
def forward_mode() -> tuple[Any, ...]:
    """A jvp inside the compiled function."""
    return (lambda x, t: torch.func.jvp(torch.tanh, (x,), (t,))), *of_sizes(
        lambda n: torch.randn(n, requires_grad=True), lambda n: torch.randn(n)
    )


@program(grad=True, dynamic=True)
def functional_call() -> tuple[Any, ...]:
    """An ensemble: functional_call over stacked parameters."""
    models = [nn.Linear(3, 2) for _ in range(3)]
    params, buffers = torch.func.stack_module_state(models)

    def f(params: Any, x: torch.Tensor) -> torch.Tensor:
        def call(p: Any, b: Any) -> torch.Tensor:
            return torch.func.functional_call(models[0], (p, b), (x,))

        return torch.vmap(call)(params, buffers)

    weights = {k: v.detach().requires_grad_() for k, v in params.items()}
    return f, *of_sizes(lambda _: weights, lambda n: torch.randn(n, 3), sizes=(4, 5))


@program(grad=True)
def autocast_inside() -> tuple[Any, ...]:
    """An autocast region inside the compiled function, and one switched off inside it."""
    m = nn.Linear(4, 4)

    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = m(x)
            with torch.autocast("cpu", enabled=False):
                z = y.float() @ x
        return z + y

    return f, (torch.randn(4, 4),)


@program(grad=True, around=lambda: torch.autocast("cpu"))
def autocast_outside() -> tuple[Any, ...]:
    """A frame compiled while autocast is on."""
    m = nn.Linear(4, 4)
    return (lambda x: m(x).relu() @ x), (torch.randn(4, 4),)


@program(grad=True)
def no_grad_inside() -> tuple[Any, ...]:
    """no_grad, enable_grad and detach inside a frame with gradients."""

    def f(x: torch.Tensor) -> Any:
        with torch.no_grad():
            y = x * 2
            with torch.enable_grad():
                z = x * 3
        return y * x, z, x.detach() * x

    return f, (torch.randn(3, requires_grad=True),)


@program()
def inference_mode_inside() -> tuple[Any, ...]:
    """An inference-mode region inside the compiled function."""

    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return x.sin() + 1

    return f, (torch.randn(3),)


@program(around=torch.inference_mode)
def inference_mode_outside() -> tuple[Any, ...]:
    """A frame compiled in inference mode, with a parameter made outside of it."""
    with torch.inference_mode(False):
        m = nn.Linear(3, 3)
    return (lambda x: (m(x) + x, x[0])), (torch.randn(2, 3),)


@program(around=functools.partial(_default_dtype, torch.float64))
def default_dtype() -> tuple[Any, ...]:
    """A frame compiled under another default dtype."""
    return (lambda x: x + torch.ones(3) * torch.tensor(0.1)), (torch.randn(3),)


@program()
def inference_tensors() -> tuple[Any, ...]:
    """Inputs made in inference mode, used outside of it."""
    with torch.inference_mode():
        x = torch.randn(3)
        y = x[1:]
    return (lambda x, y: (x * 2, y + 1)), (x, y)


class _Point(NamedTuple):
    x: torch.Tensor
    scale: float


@dataclasses.dataclass
class _Options:
    weight: torch.Tensor
    name: str
    power: int = 2
    extra: tuple[int, ...] = (1, 2)


@program(dynamic=True)
def structured_arguments() -> tuple[Any, ...]:
    """Named tuples, dataclasses, dicts with several key types, nested lists, sets and None."""

    def f(p: _Point, o: _Options, d: dict[Any, Any], items: list[Any], none: None) -> Any:
        y = p.x * p.scale + o.weight**o.power
        if none is None and o.name == "ünïcode" and 3 in d["set"]:
            y = y + d[0] + d["k"]["v"]
        items[0].add_(1)
        d["new"] = items[0] * 2
        return {"y": y, "z": [items[0], (items[1][0] * 2,)]}, _Point(items[0], 2.0)

    def arguments(n: int) -> tuple[Any, ...]:
        d = {0: torch.ones(n), "k": {"v": torch.randn(n)}, "set": {1, 3}}
        items = [torch.randn(2), [torch.randn(1)]]
        return _Point(torch.randn(n), 0.5), _Options(torch.randn(n), "ünïcode"), d, items, None

    return f, arguments(3), arguments(5)


@program(grad=True)
def closures_and_globals() -> tuple[Any, ...]:
    """Tensors and numbers of closures, defaults and globals, changed in place too."""
    state = {"n": torch.zeros(3)}
    w = torch.randn(3)

    def f(x: torch.Tensor, y: torch.Tensor = w) -> torch.Tensor:
        state["n"].add_(1)
        return (lambda a: a * _SCALE + _NUMBERS["b"][1])(x) + y * state["n"]

    return f, (torch.randn(3),)


@program(grad=True)
def nested_compile() -> tuple[Any, ...]:
    """A compiled function inside a compiled function, and a disabled one."""
    inner = torch.compile(lambda x: x.sin(), backend="eager")
    return (lambda x: inner(x) + inner(x * 2)), (torch.randn(3),)


@program()
def generators_and_closures() -> tuple[Any, ...]:
    """Comprehensions, generators, zip, sorted, enumerate, functools and a context manager."""

    @contextlib.contextmanager
    def twice() -> Any:
        yield 2

    def f(xs: list[torch.Tensor]) -> torch.Tensor:
        total = sum(x * i for i, x in enumerate(xs))
        with twice() as n:
            total = total * n
        return torch.stack([a + b for a, b in zip(xs, sorted(xs, key=len), strict=True)]) + total

    return f, ([torch.randn(3), torch.randn(3)],)


@program(grad=True)
def tensor_hooks() -> tuple[Any, ...]:
    """A hook on an intermediate tensor and retain_grad."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.register_hook(lambda g: g * 3)
        return y.sin()

    return f, (torch.randn(3, requires_grad=True),)


@program()
def constants_folded() -> tuple[Any, ...]:
    """Python arithmetic with math and big numbers that ends as constants in the graph."""

    def f(x: torch.Tensor) -> torch.Tensor:
        big = 2**40 + math.factorial(10)
        return x * math.pi + torch.tensor(big) - math.inf * 0.0 if big < 0 else x + big // 3

    return f, (torch.randn(3),)


@program(dynamic=True)
def outputs_of_every_kind() -> tuple[Any, ...]:
    """Outputs that are inputs, views of inputs and results, twice the same, constants and None."""

    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        z = x + y
        views = (x.t(), x.view(-1), y[0], y.detach(), y.as_strided((2,), (1,)))
        return x, views, z, z, None, 3, "text", z[1:], z.detach(), z.t(), z.chunk(2), z[0, 0], y

    return f, *of_sizes(lambda n: torch.randn(n, 3), lambda n: torch.randn(n, 3))


@program(frames=0)
def empty_graph() -> tuple[Any, ...]:
    """A function without operators compiles no frame."""
    return (lambda x: x), (torch.randn(3),)


@program()
def no_tensor_inputs() -> tuple[Any, ...]:
    """A function without tensor arguments."""
    return (lambda n: torch.ones(n) * n), (3,)


@program()
def unused_inputs() -> tuple[Any, ...]:
    """A function that uses one of its many arguments."""
    return (lambda a, b, c: b * 2), (torch.randn(3), torch.randn(2), torch.randn(4))


@program(slow=True)
def two_thousand_nodes() -> tuple[Any, ...]:
    """A graph of two thousand nodes."""

    def f(x: torch.Tensor) -> torch.Tensor:
        for _ in range(1000):
            x = (x + 1) * 0.5
        return x

    return f, (torch.randn(3),)


@program()
def unicode_names() -> tuple[Any, ...]:
    """Variables, keys and strings beyond ASCII."""

    def f(größe: dict[str, torch.Tensor]) -> torch.Tensor:
        длина = größe["键 with space\n\u202e"] * 2
        return длина + 1

    return f, ({"键 with space\n\u202e": torch.randn(3)},)


@program(grad=True, dynamic=True, frames=2)
def flex_attention() -> tuple[Any, ...]:
    """Flex attention with a score function that closes over a tensor, and a causal mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    bias = torch.randn(2)

    def f(q: torch.Tensor, mask: Any) -> torch.Tensor:
        return flex_attention(
            q, q * 2, q / 3, score_mod=lambda s, b, h, i, j: s + bias[h] * (i - j), block_mask=mask
        )

    return f, *of_sizes(
        lambda n: torch.randn(1, 2, n, 16),
        lambda n: create_block_mask(lambda b, h, q, k: q >= k, 1, 2, n, n, device="cpu"),
        sizes=(128, 256),
    )


@program()
def deterministic() -> tuple[Any, ...]:
    """A frame compiled with deterministic algorithms asked for inside."""

    def f(x: torch.Tensor) -> torch.Tensor:
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        y = x.cumsum(0)
        torch.use_deterministic_algorithms(before)
        return y

    return f, (torch.randn(4),)


@program(dynamic=True)
def prints_and_asserts() -> tuple[Any, ...]:
    """An assertion on data, on a size and torch._assert inside the graph, and a region of a profile."""

    def f(x: torch.Tensor) -> torch.Tensor:
        assert x.sum() < 100, "too large"
        torch._assert(x.dim() == 1, "a vector")
        torch._assert(x.shape[0] > 0, "rows")
        torch._assert_async((x > -50).all(), "too small")
        with torch.autograd.profiler.record_function("part"):
            return x + 1

    return f, *of_sizes(torch.randn)
