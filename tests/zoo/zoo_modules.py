"""Programs: modules of ``torch.nn``, and steps of training."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from program_zoo import of_sizes, program
from torch import nn

_RNN = {"allow_rnn": True}


@program(grad=True, dynamo=_RNN, backend="eager", compiled="eager")
def lstm() -> tuple[Any, ...]:
    """A two-layer bidirectional LSTM with gradients (which torch's aot_eager cannot take)."""
    return nn.LSTM(4, 3, num_layers=2, bidirectional=True), (torch.randn(5, 2, 4),)


@program(dynamo=_RNN, dynamic=True, slow=True)
def lstm_inference() -> tuple[Any, ...]:
    """A two-layer LSTM with projections in inference."""
    module = nn.LSTM(4, 3, num_layers=2, proj_size=2).eval()
    return module, *of_sizes(lambda n: torch.randn(5, n, 4))


@program(grad=True, dynamo=_RNN, dynamic=True, slow=True)
def gru() -> tuple[Any, ...]:
    """A GRU with a hidden state that is passed in."""
    module = nn.GRU(4, 3, batch_first=True, bidirectional=True)
    return module, *of_sizes(lambda n: torch.randn(n, 5, 4), lambda n: torch.randn(2, n, 3))


@program(dynamo=_RNN)
def rnn_cell() -> tuple[Any, ...]:
    """A cell applied in a Python loop that Dynamo unrolls."""
    cell = nn.LSTMCell(4, 3)

    def f(xs: torch.Tensor) -> torch.Tensor:
        h, c = torch.zeros(2, 3), torch.zeros(2, 3)
        for x in xs:
            h, c = cell(x, (h, c))
        return h

    return f, (torch.randn(4, 2, 4),)


@program(grad=True, dynamic=True, slow=True)
def multihead_attention() -> tuple[Any, ...]:
    """Attention with weights returned and a key padding mask."""
    m = nn.MultiheadAttention(8, 2, batch_first=True)
    mask = torch.tensor([[False, False, True]])
    return (lambda x, mask: m(x, x, x, key_padding_mask=mask)), *of_sizes(
        lambda n: torch.randn(n, 3, 8), lambda n: mask.repeat(n, 1)
    )


@program()
def multihead_attention_fast_path() -> tuple[Any, ...]:
    """Attention in inference, where torch may call its fused kernel."""
    m = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    return (lambda x: m(x, x, x, need_weights=False)[0]), (torch.randn(2, 3, 8),)


@program()
def encoder_fast_path() -> tuple[Any, ...]:
    """An encoder layer in inference, where torch may call its fused kernel."""
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), (torch.randn(2, 3, 8),)


@program(grad=True, dynamic=True, slow=True)
def transformer() -> tuple[Any, ...]:
    """Encoder and decoder with a causal mask of a symbolic size, in training without dropout."""
    m = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def f(s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(t.shape[1])
        return m(s, t, tgt_mask=mask, tgt_is_causal=True)

    return f, *of_sizes(
        lambda n: torch.randn(n - 1, n, 8), lambda n: torch.randn(n - 1, n + 1, 8), sizes=(3, 5)
    )


@program(grad=True, dynamic=True)
def batchnorm_train() -> tuple[Any, ...]:
    """Convolution and batch norm in training: running statistics and a counter are changed."""
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()), (
        torch.randn(2, 3, 6, 5),
    )


@program(dynamic=True, slow=True)
def batchnorm_eval() -> tuple[Any, ...]:
    """Convolution and batch norm in inference."""
    m = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4)).eval()
    return m, (torch.randn(2, 3, 7, 9),)


@program(backend="inductor", compiled="inductor", slow=True)
def conv_inductor() -> tuple[Any, ...]:
    """Convolution and batch norm compiled by inductor."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval(), (
        torch.randn(2, 3, 7, 9),
    )


@program(grad=True)
def other_convolutions() -> tuple[Any, ...]:
    """Transposed, grouped, dilated and one- and three-dimensional convolutions, channels last."""
    a = nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2)
    b = nn.Conv3d(2, 3, 2, dilation=2, padding_mode="circular", padding=1)
    c = nn.Conv1d(3, 3, 3, groups=3, padding="same")

    def f(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
        return a(x), b(y), c(z)

    x = torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)
    return f, (x, torch.randn(1, 2, 4, 4, 4), torch.randn(2, 3, 8))


@program(grad=True, dynamic=True)
def embedding_bag() -> tuple[Any, ...]:
    """An embedding bag with offsets and weights for each sample."""
    m = nn.EmbeddingBag(10, 3, mode="sum")
    return m, (torch.tensor([1, 2, 4, 5, 4]), torch.tensor([0, 2]), torch.rand(5))


@program(grad=True)
def embedding() -> tuple[Any, ...]:
    """An embedding with padding and renormalization, which changes the weight."""
    m = nn.Embedding(10, 3, padding_idx=0, max_norm=0.5)
    return (lambda i: m(i) * 2), (torch.tensor([[0, 2], [9, 1]]),)


@program(dynamic=True, slow=True)
def interpolate() -> tuple[Any, ...]:
    """Resizing by factor and to a symbolic size, in several modes."""

    def f(x: torch.Tensor) -> Any:
        bigger = (x.shape[2] * 2, x.shape[3] + 1)
        return (
            F.interpolate(x, scale_factor=2.0, mode="nearest"),
            F.interpolate(x, size=bigger, mode="bilinear", align_corners=False),
            F.interpolate(x, scale_factor=(1.5, 0.5), mode="bicubic", antialias=True),
        )

    return f, (torch.randn(1, 2, 6, 5),)


@program(grad=True)
def norms() -> tuple[Any, ...]:
    """Layer, group, instance and RMS norm."""
    a, b, c, d = nn.LayerNorm(6), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4), nn.RMSNorm(6)
    return (lambda x: (a(x), b(x), c(x), d(x))), (torch.randn(2, 4, 6),)


@program(grad=True)
def pooling() -> tuple[Any, ...]:
    """Pooling with indices and back, adaptive pooling, unfold and fold, pixel shuffle, padding."""

    def f(x: torch.Tensor) -> Any:
        pooled, indices = F.max_pool2d(x, 2, return_indices=True)
        patches = F.unfold(x, 3, padding=1)
        return (
            F.max_unpool2d(pooled, indices, 2),
            F.adaptive_avg_pool2d(x, (2, 3)),
            F.fold(patches, (4, 6), 3, padding=1),
            F.pixel_shuffle(x, 2),
            F.pad(x, (1, 2, 0, 1), mode="reflect"),
            F.lp_pool2d(x.abs() + 1, 2.0, 2),
        )

    return f, (torch.randn(2, 4, 4, 6),)


@program(grad=True)
def losses() -> tuple[Any, ...]:
    """Cross entropy with smoothing, CTC, triplet, KL, huber and cosine losses."""

    def f(x: torch.Tensor, y: torch.Tensor, target: torch.Tensor) -> Any:
        lengths = torch.full((3,), 5)
        return (
            F.cross_entropy(x, target, label_smoothing=0.1, ignore_index=2),
            F.kl_div(x.log_softmax(1), y.log_softmax(1), log_target=True, reduction="batchmean"),
            F.triplet_margin_loss(x, y, x.flip(0)),
            F.huber_loss(x, y, delta=0.5),
            F.cosine_embedding_loss(x, y, torch.ones(3)),
            F.ctc_loss(
                x.expand(5, 3, 4).log_softmax(-1), target.view(3, 1) + 1, lengths, lengths * 0 + 1
            ),
        )

    return f, (torch.randn(3, 4), torch.randn(3, 4), torch.tensor([0, 2, 1]))


@program(grad=True)
def grid_sample() -> tuple[Any, ...]:
    """A spatial transformer: affine grid and sampling."""

    def f(x: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, padding_mode="border", align_corners=False)

    return f, (torch.randn(1, 2, 4, 4), torch.randn(1, 2, 3))


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(4))
        self.other = self.scale

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(2)
        return self.head(self.embed(i) * self.other)


@program(grad=True, backend="eager")
def tied_parameters() -> tuple[Any, ...]:
    """A weight and a changed buffer under two names (torch's aot_eager gets this gradient wrong)."""
    return _Tied(), (torch.tensor([1, 3]),), (torch.tensor([0, 2]),)


class _Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Parameter(torch.randn(4, 6))
        self.register_buffer("left", self.all.detach()[:, :3])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.all + (x @ self.left).sum() + self.all.data.sum()


@program(grad=True)
def parameter_views() -> tuple[Any, ...]:
    """A buffer that is a view of a parameter."""
    return _Views(), (torch.randn(2, 4),)


@program(grad=True)
def parametrizations() -> tuple[Any, ...]:
    """Weight norm, spectral norm in inference and an orthogonal weight."""
    a = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    b = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)).eval()
    return (lambda x: b(a(x))), (torch.randn(2, 4),)


@program(grad=True)
def parameter_containers() -> tuple[Any, ...]:
    """Parameter lists and dicts, module dicts with odd keys and module lists with negative index."""

    class Containers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.list = nn.ParameterList([torch.randn(3), torch.randn(3)])
            self.dict = nn.ParameterDict({"a b": torch.randn(3), "ü-1": torch.randn(3)})
            self.modules_ = nn.ModuleDict({"first layer": nn.Linear(3, 3), "0": nn.Tanh()})
            self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * self.list[0] + self.list[-1] + self.dict["a b"] * self.dict["ü-1"]
            for m in self.modules_.values():
                x = m(x)
            return self.layers[-1](self.layers[0](x))

    return Containers(), (torch.randn(2, 3),)


@program(grad=True)
def deep_module_names() -> tuple[Any, ...]:
    """A parameter sixty modules deep."""
    m: nn.Module = nn.Linear(3, 3)
    for i in range(60):
        m = nn.ModuleDict({f"level{i}": m})

    def f(x: torch.Tensor) -> torch.Tensor:
        inner: Any = m
        while isinstance(inner, nn.ModuleDict):
            inner = next(iter(inner.values()))
        return inner(x)

    return f, (torch.randn(2, 3),)


@program(grad=True)
def deep_sequential() -> tuple[Any, ...]:
    """Forty modules nested in one another, each with code of its own."""
    m: nn.Module = nn.Linear(3, 3)
    for _ in range(40):
        m = nn.Sequential(m)
    return m, (torch.randn(2, 3),)


@program(grad=True, dynamic=True)
def module_hooks() -> tuple[Any, ...]:
    """Forward hooks and pre-hooks that change what a module gets and gives."""
    m = nn.Linear(3, 3)
    m.register_forward_pre_hook(lambda _m, args: (args[0] * 2,))
    m.register_forward_hook(lambda _m, _args, out: out.relu())
    return m, *of_sizes(lambda n: torch.randn(n, 3), sizes=(2, 4))


@program()
def buffer_counter() -> tuple[Any, ...]:
    """A module that counts its calls in a buffer and in a Python number."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            self.calls += 1
            return x * self.count

    return Counter(), (torch.randn(3),)


@program(grad=True)
def dropout() -> tuple[Any, ...]:
    """Dropout of several kinds in training: the random numbers are those of the seed."""
    m = nn.Sequential(nn.Dropout(0.5), nn.AlphaDropout(0.2), nn.Dropout1d(0.5))
    return m, (torch.randn(4, 5, 6),)


@program(dynamic=True)
def kv_cache() -> tuple[Any, ...]:
    """A key-value cache that is written at a position and read up to it."""

    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("k", torch.zeros(1, 2, 16, 4))

        def forward(self, k: torch.Tensor, start: int) -> torch.Tensor:
            self.k[:, :, start : start + k.shape[2]] = k
            return self.k[:, :, : start + k.shape[2]].sum(2)

    return Cache(), (torch.randn(1, 2, 5, 4), 3), (torch.randn(1, 2, 4, 4), 8)


# --- training -------------------------------------------------------------------------------------


def _optimizer(make: Any) -> tuple[Any, ...]:
    params = [torch.randn(3, requires_grad=True), torch.randn(2, 2, requires_grad=True)]
    for p in params:
        p.grad = torch.randn_like(p)
    opt = make(params)
    opt.step()  # makes the state
    return opt, params


@program(grad=True, slow=True)
def adam_step() -> tuple[Any, ...]:
    """A compiled step of Adam over several parameters at once."""
    opt, _ = _optimizer(lambda p: torch.optim.Adam(p, lr=0.1, foreach=True))
    return (lambda: opt.step()), ()


@program(grad=True, frames=2)
def sgd_step() -> tuple[Any, ...]:
    """A compiled step of SGD with momentum that reads the gradients of the parameters."""
    opt, params = _optimizer(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True))

    def f() -> torch.Tensor:
        opt.step()
        return params[0].sum()

    return f, ()


@program(grad=True, frames=2, slow=True)
def adamw_capturable() -> tuple[Any, ...]:
    """A compiled step of AdamW with clipped gradients."""
    opt, params = _optimizer(lambda p: torch.optim.AdamW(p, amsgrad=True, foreach=False))

    def f() -> Any:
        norm = torch.nn.utils.clip_grad_norm_(params, 0.5)
        opt.step()
        return norm

    return f, ()


@program(grad=True, dynamic=True)
def read_gradients() -> tuple[Any, ...]:
    """A function that reads ``.grad`` of its arguments and changes both."""

    def f(p: torch.Tensor) -> Any:
        with torch.no_grad():
            p.add_(p.grad, alpha=-0.1)
            y = p.grad * 2
            p.grad.zero_()
        return y, p.detach() + 1

    def with_gradient(n: int) -> torch.Tensor:
        p = torch.randn(n, requires_grad=True)
        p.grad = torch.randn(n)
        return p

    return f, *of_sizes(with_gradient)


@program(grad=True, dynamo={"trace_autograd_ops": True})
def backward_inside() -> tuple[Any, ...]:
    """torch.autograd.grad inside the compiled function."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = (x**3).sum()
        (g,) = torch.autograd.grad(y, x)
        return g * 2

    return f, (torch.randn(3, requires_grad=True),)
