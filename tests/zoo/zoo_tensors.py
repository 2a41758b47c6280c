"""Programs: operators on tensors and kinds of data."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from program_zoo import of_sizes, program


@program(grad=True, dynamic=True, slow=True)
def einsum() -> tuple[Any, ...]:
    """Einsum with ellipsis, a trace and a sum of three."""

    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        return (
            torch.einsum("b...i,bij->b...j", x, y),
            torch.einsum("bii->b", y),
            torch.einsum("bti,bij,btj->bt", x, y, x),
        )

    return f, (torch.randn(2, 5, 3), torch.randn(2, 3, 3))


@program(grad=True)
def index_put() -> tuple[Any, ...]:
    """Reading and writing through index tensors, masks, slices, None and an ellipsis."""

    def f(x: torch.Tensor, i: torch.Tensor, mask: torch.Tensor) -> Any:
        y = x.clone()
        y[i] = 0.0
        y[..., i] += 1.0
        y[mask] = -1.0
        y.index_put_((i, i), x[0, :2], accumulate=True)
        return y, x[i, None, 1::2], x[:, [0, -1]], x[..., -1:], x[None, ..., None]

    return f, (torch.randn(4, 4), torch.tensor([0, 2]), torch.rand(4, 4) > 0.5)


@program(grad=True, dynamic=True)
def scatter_gather() -> tuple[Any, ...]:
    """Scatter with a reduction, gather, index_add, take_along_dim and select_scatter."""

    def f(x: torch.Tensor, i: torch.Tensor) -> Any:
        zeros = torch.zeros(x.shape[0], 6)
        return (
            zeros.scatter_add(1, i, x),
            zeros.scatter_reduce(1, i, x, reduce="amax", include_self=False),
            x.gather(1, i),
            zeros.index_add(0, i[:, 0], zeros + 1),
            torch.take_along_dim(x, i, 1),
            torch.select_scatter(x, x[:, 0] * 2, 1, 1),
        )

    return f, (torch.randn(3, 4), torch.randint(0, 3, (3, 4)))


@program(grad=True)
def sorting() -> tuple[Any, ...]:
    """Sort, top k, argsort, kthvalue, mode, median, quantile, cummax and searchsorted."""

    def f(x: torch.Tensor) -> Any:
        values, indices = x.sort(dim=-1, descending=True, stable=True)
        top = x.topk(3, largest=False)
        return (
            values, indices, top.values, top[1], x.argsort(0), x.kthvalue(2).values,
            x.median(), x.quantile(0.3), x.cummax(1).values,
            torch.searchsorted(values.flip(-1), x),
        )  # fmt: skip

    return f, (torch.randn(3, 6),)


@program(grad=True, dynamo={"capture_dynamic_output_shape_ops": True}, dynamic=True)
def nonzero() -> tuple[Any, ...]:
    """The positions of what is not zero, whose number depends on the data."""

    def f(x: torch.Tensor) -> Any:
        i = x.nonzero()
        return i * 2, x[x > 0].sum()

    return f, *of_sizes(lambda n: torch.randn(n, 2).relu().requires_grad_())


@program(dynamo={"capture_dynamic_output_shape_ops": True}, dynamic=True)
def unique() -> tuple[Any, ...]:
    """Distinct values with inverse and counts, masked_select and repeat_interleave."""

    def f(x: torch.Tensor) -> Any:
        values, inverse, counts = x.unique(return_inverse=True, return_counts=True)
        torch._check(values.shape[0] <= x.numel())
        return values, inverse, counts, x.masked_select(x > 1), x[0].repeat_interleave(x[0])

    return f, *of_sizes(lambda n: torch.tensor([[1, 2, 2], [3, n, 0]]))


@program(grad=True)
def linear_algebra() -> tuple[Any, ...]:
    """Decompositions, solves, norms and a matrix power."""

    def f(x: torch.Tensor) -> Any:
        spd = x @ x.mT + 3 * torch.eye(3)
        _u, s, _vh = torch.linalg.svd(spd)
        q, r = torch.linalg.qr(x)
        return (
            torch.linalg.cholesky(spd), s, q.abs(), r.abs(), torch.linalg.solve(spd, x),
            torch.linalg.eigvalsh(spd), torch.linalg.slogdet(spd).logabsdet,
            torch.linalg.norm(x, "nuc"), torch.linalg.matrix_power(x, 3), torch.linalg.inv(spd),
        )  # fmt: skip

    return f, (torch.randn(3, 3),)


@program(grad=True)
def fourier() -> tuple[Any, ...]:
    """Fourier transforms, a short-time one and complex arithmetic."""

    def f(x: torch.Tensor) -> Any:
        z = torch.fft.rfft(x)
        window = torch.hann_window(4)
        short = torch.stft(x, 4, window=window, return_complex=True)
        return torch.fft.irfft(z * 1j, n=8), z.abs(), z.angle(), torch.view_as_real(short), z.conj()

    return f, (torch.randn(2, 8),)


@program(grad=True)
def complex_numbers() -> tuple[Any, ...]:
    """Complex inputs, constants and results."""

    def f(z: torch.Tensor, w: torch.Tensor) -> Any:
        return z @ w, (z * (2 + 3j)).real, torch.polar(w.abs(), w.angle()), z.imag, z.conj() + 1

    z = torch.randn(3, 3, dtype=torch.complex64, requires_grad=True)
    return f, (z, torch.randn(3, 3, dtype=torch.complex64))


@program()
def complex_scalar() -> tuple[Any, ...]:
    """A Python complex number among the arguments."""
    return (lambda x, c: x * c), (torch.randn(3), 2 - 1j)


@program()
def small_floats() -> tuple[Any, ...]:
    """float8 inputs of all kinds, and casts to them."""

    def f(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> Any:
        return a.float() + b.to(torch.bfloat16).float(), x.to(torch.float8_e4m3fn)

    x = torch.randn(4, 4)
    return f, (x.to(torch.float8_e5m2), x.to(torch.float8_e4m3fnuz), x)


@program(dynamic=True)
def half_floats() -> tuple[Any, ...]:
    """bfloat16 and float16 inputs, double results."""

    def f(a: torch.Tensor, b: torch.Tensor) -> Any:
        return a @ a.mT, (a + b).double(), torch.finfo(b.dtype).max * b

    return f, *of_sizes(
        lambda n: torch.randn(n, 4, dtype=torch.bfloat16),
        lambda n: torch.randn(n, 4, dtype=torch.float16),
    )


@program()
def small_integers() -> tuple[Any, ...]:
    """Unsigned integers of every width, packed four-bit weights and shifts."""

    def f(packed: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        low, high = packed & 15, packed >> 4
        weights = torch.stack((low, high), -1).flatten(-2).to(torch.int8) - 8
        return weights.float(), a.to(torch.int64), b.view(torch.int32), ~packed

    packed = torch.randint(0, 255, (3, 4), dtype=torch.uint8)
    return f, (packed, torch.tensor([1, 65535], dtype=torch.uint16), torch.randn(3))


@program()
def sub_byte_dtypes() -> tuple[Any, ...]:
    """Inputs of four-bit and bits dtypes, seen as bytes."""

    def f(a: torch.Tensor, b: torch.Tensor) -> Any:
        return a.view(torch.uint8) + 1, b.view(torch.uint8) ^ 3

    data = torch.randint(0, 255, (4,), dtype=torch.uint8)
    return f, (data.view(torch.float4_e2m1fn_x2), data.clone().view(torch.bits8))


@program(grad=True)
def random_numbers() -> tuple[Any, ...]:
    """Random operators of every distribution, with the seed set outside."""

    def f(x: torch.Tensor) -> Any:
        return (
            torch.rand_like(x) * x, torch.randn(3), torch.randint(0, 9, (3,)), torch.randperm(5),
            torch.bernoulli(x.sigmoid()), torch.multinomial(x.exp(), 2), torch.normal(x, 1.0),
            torch.empty(3).exponential_(2.0), F.gumbel_softmax(x, hard=True), F.rrelu(x),
        )  # fmt: skip

    return f, (torch.randn(2, 4),)


@program(grad=True)
def attention() -> tuple[Any, ...]:
    """Scaled dot product attention: causal, masked, with a scale and grouped queries."""

    def f(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> Any:
        sdpa = F.scaled_dot_product_attention
        return (
            sdpa(q, q, q, is_causal=True),
            sdpa(q, q, q, attn_mask=mask, scale=0.3),
            sdpa(q, k, k, enable_gqa=True),
        )

    mask = torch.rand(1, 1, 5, 5) > 0.3
    return f, (torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), mask)


@program(dynamic=True)
def making_tensors() -> tuple[Any, ...]:
    """Factories: from symbolic sizes, Python lists, ranges, other tensors, with every option."""

    def f(x: torch.Tensor) -> Any:
        n = x.shape[0]
        return (
            torch.arange(n, device=x.device), torch.tensor([1.0, 2.5, float("inf")]),
            torch.tensor([[n, 2], [3, 4]]), torch.full((n, 2), float("-inf")), x.new_zeros(n),
            torch.linspace(0, 1, 5), torch.eye(n, dtype=torch.float64), torch.tensor(True),
            torch.empty_strided((2, 3), (1, 2)).fill_(1), torch.ones_like(x, dtype=torch.int32),
            torch.as_tensor([1, 2]), torch.tril_indices(3, 3), torch.meshgrid(x, x, indexing="ij"),
        )  # fmt: skip

    return (lambda x: [t for t in f(x) if isinstance(t, torch.Tensor)]), (torch.randn(4),)


@program(dynamic=True, slow=True, implied_guards="Recorded are no guards that follow from others.")
def shapes() -> tuple[Any, ...]:
    """Operators on shapes: reshape, flatten, split, chunk, cat, stack, roll, unfold, movedim."""

    def f(x: torch.Tensor) -> Any:
        a, b = x.split([1, x.shape[1] - 1], dim=1)
        return (
            x.reshape(-1), x.flatten(1), x.unflatten(2, (2, -1)), a, b, *x.chunk(2, -1),
            torch.cat([x, x[:1]]), torch.stack([x, x], -1), x.roll(1, 0), x.unfold(1, 2, 1),
            x.movedim(0, -1), x.expand(2, *x.shape), x.repeat(1, 2, 1), x.tile(2),
            torch.block_diag(x[0], x[1]), x.unbind(1)[0],
        )  # fmt: skip

    return f, (torch.randn(2, 3, 4),)


@program(dynamic=True)
def numpy_code() -> tuple[Any, ...]:
    """NumPy code on NumPy inputs, traced by Dynamo."""

    def f(x: Any, y: Any) -> Any:
        z = np.tanh(x @ y.T) + np.arange(x.shape[0])[:, None]
        return np.concatenate([z, z[:1]]).sum(axis=0), np.linalg.norm(z), z.astype(np.float16)

    rng = np.random.default_rng(0)
    return f, (rng.normal(size=(3, 4)), rng.normal(size=(2, 4)))


@program()
def numpy_mixed() -> tuple[Any, ...]:
    """A tensor that becomes a NumPy array and back, and a NumPy scalar argument."""

    def f(x: torch.Tensor, s: Any) -> torch.Tensor:
        array = x.numpy() * s
        array[0] = 7
        return torch.from_numpy(np.sort(array, axis=-1)) + x

    return f, (torch.randn(3, 4), np.float64(2.5))


@program()
def dtypes_and_devices_as_arguments() -> tuple[Any, ...]:
    """A dtype, a device, a layout and a memory format passed in as arguments."""

    def f(x: torch.Tensor, dtype: Any, device: Any, form: Any) -> Any:
        y = x.to(device=device, dtype=dtype, memory_format=form)
        return y, x.cpu(), x.to("cpu", copy=True), x.type(torch.DoubleTensor), x.to(y)

    return f, (torch.randn(1, 2, 3, 3), torch.float64, torch.device("cpu"), torch.channels_last)


@program()
def bools_and_comparisons() -> tuple[Any, ...]:
    """Comparisons, logic, where, clamp with tensors, isin, allclose-like reductions."""

    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        return (
            torch.where(x > y, x, 0.0), (x == y).any(), ~(x < 0) & (y >= 0), x.clamp(min=y),
            torch.isin(x, y), x.isnan().logical_not(), torch.maximum(x, y), x.sign().bool().all(0),
        )  # fmt: skip

    return f, (torch.randn(3, 4), torch.randn(3, 4))


@program(backend="inductor", compiled="inductor", slow=True, dynamic=True)
def softmax_inductor() -> tuple[Any, ...]:
    """A softmax over a symbolic dim compiled by inductor."""
    return (lambda x: (x * 2).softmax(-1) + x.amax(-1, keepdim=True)), (torch.randn(3, 5),)


@program(backend="eager", dynamic=True)
def eager_backend() -> tuple[Any, ...]:
    """A graph that the reader runs as it is."""
    return (lambda x: x.softmax(-1).view(-1, 1)[: x.shape[0]]), (torch.randn(3, 5),)
