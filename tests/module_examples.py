"""Examples for the handoff: modules of torch and of other libraries, each called with three sizes."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from backend_runs import Example
from torch import nn
from torch.nested._internal.nested_tensor import nested_from_padded

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

EXAMPLES: dict[str, Example] = {}

SIZES = ((2, 3), (3, 4), (5, 2))
"""Batch and length of each call."""


def example(**settings: Any) -> Callable[[Callable[[], tuple[Any, ...]]], Any]:
    """Enter a function in the table; the settings are `Example`'s fields, or ``dynamic``."""
    if "dynamic" in settings:
        settings["options"] = {"dynamic": settings.pop("dynamic")}

    def enter(make: Callable[[], tuple[Any, ...]]) -> Any:
        assert make.__doc__
        EXAMPLES[make.__name__] = Example(make=make, **settings)
        return make

    return enter


def variant(name: str, of: Callable[..., Any], **changes: Any) -> None:
    """Enter an example again with other settings."""
    if "dynamic" in changes:
        changes["options"] = {"dynamic": changes.pop("dynamic")}
    EXAMPLES[name] = replace(EXAMPLES[of.__name__], **changes)


# --- recurrent ------------------------------------------------------------------------------------

_RNN = {"allow_rnn": True}


def _sequences(width: int = 4) -> list[tuple[Any, ...]]:
    return [(torch.randn(batch, length, width),) for batch, length in SIZES]


@example(config=_RNN, grad=True)
def rnn() -> tuple[Any, ...]:
    """A simple recurrent network of two layers."""
    return nn.RNN(4, 3, num_layers=2, batch_first=True), *_sequences()


@example(config=_RNN)
def lstm() -> tuple[Any, ...]:
    """A bidirectional LSTM in inference; torch's own AOTAutograd cannot take its backward."""
    return nn.LSTM(4, 3, bidirectional=True, batch_first=True), *_sequences()


@example(config=_RNN, grad=True, dynamic=True)
def gru() -> tuple[Any, ...]:
    """A bidirectional GRU with a state that is passed in."""
    calls = [
        (torch.randn(length, batch, 4), torch.randn(2, batch, 3, requires_grad=True))
        for batch, length in SIZES
    ]
    return nn.GRU(4, 3, bidirectional=True), *calls


variant("lstm_inductor", lstm, backend="inductor", dynamic=True)
variant("rnn_inductor", rnn, backend="inductor")


# --- transformers ---------------------------------------------------------------------------------


@example(grad=True)
def encoder() -> tuple[Any, ...]:
    """A transformer encoder in training, with a padding mask and dropout."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.25, batch_first=True)
    calls = [
        (torch.randn(batch, length, 8), None, torch.arange(length).expand(batch, -1) > 1)
        for batch, length in SIZES
    ]
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), *calls


@example()
def encoder_inference() -> tuple[Any, ...]:
    """The same in inference, where torch has a fast path."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval(), *_sequences(8)


@example(grad=True, dynamic=True)
def transformer() -> tuple[Any, ...]:
    """Encoder and decoder; the mask is made inside of sizes."""
    m = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = m

        def forward(self, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(t.shape[1])
            return self.inner(s, t, tgt_mask=mask, tgt_is_causal=True)

    calls = [(torch.randn(b, n, 8), torch.randn(b, n + 1, 8)) for b, n in SIZES]
    return Causal(), *calls


variant("encoder_inductor", encoder, backend="inductor")
variant("transformer_inductor", transformer, backend="inductor")


@example(grad=True)
def attention() -> tuple[Any, ...]:
    """Multi-head attention that returns its weights."""
    m = nn.MultiheadAttention(8, 2, batch_first=True)
    calls = [
        (torch.randn(b, n, 8), torch.randn(b, n + 2, 8), torch.randn(b, n + 2, 8)) for b, n in SIZES
    ]
    return m, *calls


class _Attention(nn.Module):
    """Attention with two heads, also of jagged tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.ModuleList(nn.Linear(8, 16) for _ in range(3))
        self.out = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (m(x).unflatten(-1, [2, 8]).transpose(1, 2) for m in self.project)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(-2)) + x


def _jagged(*lengths: int, grad: bool = False) -> torch.Tensor:
    parts = [torch.randn(n, 8) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=grad)


def _jagged_calls(*, grad: bool = False) -> list[tuple[Any, ...]]:
    return [(_jagged(*lengths, grad=grad),) for lengths in ((2, 3, 4), (5, 2), (3, 3, 1, 6))]


@example(grad=True)
def dense_attention() -> tuple[Any, ...]:
    """Scaled dot product attention of dense inputs."""
    return _Attention(), *_sequences(8)


@example(grad=True)
def jagged_attention() -> tuple[Any, ...]:
    """Scaled dot product attention of jagged inputs, in training."""
    return _Attention(), *_jagged_calls(grad=True)


@example()
def jagged_attention_inference() -> tuple[Any, ...]:
    """The same in inference."""
    return _Attention(), *_jagged_calls()


variant("jagged_attention_dynamic", jagged_attention, dynamic=True)
variant("jagged_attention_inductor", jagged_attention, backend="inductor")


class _Padded(_Attention):
    """Attention of a jagged tensor with padding, in one graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(torch.nested.to_padded_tensor(x, 0.0))
        return nested_from_padded(y, x.offsets(), ragged_idx=1, sum_S=x.values().shape[0]) + x


@example(grad=True)
def jagged_padded() -> tuple[Any, ...]:
    """Jagged inputs whose shortest and longest length is known, padded and cut again."""

    def call(*lengths: int) -> tuple[Any, ...]:
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        values = torch.randn(sum(lengths), 8, requires_grad=True)
        ends = {"min_seqlen": min(lengths), "max_seqlen": max(lengths)}
        return (torch.nested.nested_tensor_from_jagged(values, offsets, **ends),)

    return _Padded(), call(2, 3, 4), call(5, 2), call(3, 3, 1, 6)


variant("jagged_padded_inductor", jagged_padded, backend="inductor")


@example(grad=True)
def jagged_norms() -> tuple[Any, ...]:
    """What else a model does with a jagged tensor: norms, activations, softmax."""
    m = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))

    def f(x: torch.Tensor) -> Any:
        y = m(x)
        return y, y.softmax(-1), y.values().shape[0] * 2

    f.module = m  # type: ignore[attr-defined]
    return f, *_jagged_calls(grad=True)


@example(grad=True)
def jagged_shared_offsets() -> tuple[Any, ...]:
    """Two jagged inputs of the same raggedness: their sum is known to fit."""

    def call(lengths: list[int]) -> tuple[Any, ...]:
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        make = torch.nested.nested_tensor_from_jagged
        values = [torch.randn(sum(lengths), 8, requires_grad=True) for _ in range(2)]
        return tuple(make(v, offsets) for v in values)

    return (lambda x, y: (x * y + x.sin(), x.shape[0] + 1)), *map(
        call, ([2, 3, 4], [5, 2], [3, 3, 1, 6])
    )


variant("jagged_shared_offsets_dynamic", jagged_shared_offsets, dynamic=True)


@example()
def jagged_made_inside() -> tuple[Any, ...]:
    """A jagged tensor made in the graph of values and offsets, and given back."""

    def f(values: torch.Tensor, offsets: torch.Tensor) -> Any:
        x = torch.nested.nested_tensor_from_jagged(values, offsets)
        return x * 2, x.sum(dim=1)

    def call(*lengths: int) -> tuple[Any, ...]:
        return torch.randn(sum(lengths), 8), torch.tensor([0, *lengths]).cumsum(0)

    return f, call(2, 3, 4), call(5, 2), call(3, 3, 1, 6)


@example(grad=True)
def jagged_and_dense() -> tuple[Any, ...]:
    """A dense input is made jagged by the offsets of a jagged one."""

    def f(x: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        return x + torch.nested.nested_tensor_from_jagged(dense, x.offsets())

    calls = [(x, torch.randn(x.values().shape[0], 8)) for (x,) in _jagged_calls(grad=True)]
    return f, *calls


# --- graphs ---------------------------------------------------------------------------------------

_DATA = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}


class _GraphLayer(nn.Module):
    """Messages along edges, summed at the targets; nodes that occur more than once are one."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(4, 4)
        self.update = nn.GRUCell(4, 4)

    def forward(self, names: torch.Tensor, edges: torch.Tensor, table: torch.Tensor) -> Any:
        nodes, positions = torch.unique(names, return_inverse=True)
        x = table[nodes]
        source, target = positions[edges[0]], positions[edges[1]]
        sent = self.message(x)[source].relu()
        got = torch.zeros_like(x).index_add(0, target, sent)
        degree = torch.zeros(x.shape[0]).scatter_add(0, target, torch.ones(target.shape[0]))
        x = self.update(got / degree.clamp(min=1).unsqueeze(1), x)
        pooled = torch.zeros(2, 4).scatter_reduce(
            0, (nodes % 2).unsqueeze(1).expand(-1, 4), x, "amax", include_self=False
        )
        return x, pooled, nodes


def _graphs() -> list[tuple[Any, ...]]:
    table = torch.randn(12, 4, requires_grad=True)
    return [
        (torch.randint(0, 12, (n,)), torch.randint(0, n, (2, e)), table)
        for n, e in ((6, 9), (8, 5), (5, 11))
    ]


@example(grad=True, config=_DATA)
def graph_network() -> tuple[Any, ...]:
    """A graph neural network over the distinct nodes of a batch, in training."""
    return _GraphLayer(), *_graphs()


@example(config=_DATA, dynamic=True)
def graph_network_inference() -> tuple[Any, ...]:
    """The same in inference, all sizes dynamic from the start."""
    return _GraphLayer(), *_graphs()


variant("graph_network_inductor", graph_network, backend="inductor")
variant("graph_network_inference_inductor", graph_network_inference, backend="inductor")


@example(config=_DATA, grad=True)
def graph_edges() -> tuple[Any, ...]:
    """Edges of an adjacency matrix by nonzero, counted with item, softmax over each node's edges."""
    score = nn.Linear(6, 1)

    def f(x: torch.Tensor, adjacency: torch.Tensor) -> Any:
        source, target = adjacency.nonzero().unbind(1)
        n = adjacency.sum().item()
        torch._check(n == source.shape[0])
        weight = score(torch.cat([x[source], x[target]], 1)).squeeze(1).exp()
        total = torch.zeros(x.shape[0]).index_add(0, target, weight)
        return torch.zeros_like(x).index_add(
            0, target, (weight / total[target]).unsqueeze(1) * x[source]
        ), torch.zeros(n)

    f.module = score  # type: ignore[attr-defined]
    calls = [(torch.randn(n, 3), (torch.rand(n, n) > 0.4).long()) for n in (4, 6, 5)]
    return f, *calls


variant("graph_edges_inductor", graph_edges, backend="inductor")


# --- subclass parameters --------------------------------------------------------------------------


@example()
def torchao_weight_only() -> tuple[Any, ...]:
    """A torchao model whose linear weights are int8."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    m = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    quantize_(m, Int8WeightOnlyConfig())
    return m, *[(torch.randn(n, 16),) for n in (3, 5, 2)]


@example()
def torchao_dynamic_activations() -> tuple[Any, ...]:
    """A torchao model that quantizes its activations too."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    m = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 32)).eval()
    quantize_(m, Int8DynamicActivationInt8WeightConfig())
    return m, *[(torch.randn(n, 32),) for n in (18, 20, 19)]


@example(grad=True)
def torchao_training() -> tuple[Any, ...]:
    """Training with int8 weights: the gradient is dense, the parameter is not."""
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training
    from torchao.quantization import quantize_

    m = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    quantize_(m, int8_weight_only_quantized_training())
    return m, *[(torch.randn(n, 16),) for n in (3, 5, 2)]


variant("torchao_weight_only_inductor", torchao_weight_only, backend="inductor")


def _two(a: torch.Tensor) -> Any:
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(a, a.clone() * 2)


def _linear_of(weight: torch.Tensor) -> nn.Module:
    m = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    m.weight = nn.Parameter(weight)
    return m


@example(grad=True)
def two_tensor_parameter() -> tuple[Any, ...]:
    """A parameter that is a wrapper of two tensors."""
    return _linear_of(_two(torch.randn(3, 4))), *[(torch.randn(n, 4),) for n in (2, 5, 3)]


@example(grad=True)
def nested_two_tensors() -> tuple[Any, ...]:
    """A parameter that is a wrapper of wrappers, and an input that is one."""
    weight = _two(torch.randn(3, 4))
    from torch.testing._internal.two_tensor import TwoTensor

    inner = TwoTensor(weight, _two(torch.randn(3, 4)))
    return _linear_of(inner), *[(_two(torch.randn(n, 4)),) for n in (2, 5, 3)]


@example(grad=True, dynamic=True)
def two_tensor_inputs() -> tuple[Any, ...]:
    """Wrappers as inputs, one of a wrapper of others, both dims dynamic."""

    def call(n: int) -> tuple[Any, ...]:
        x = _two(torch.randn(n, 6)).requires_grad_()
        return x, _two(_two(torch.randn(n, 6)))

    return (lambda x, y: (x * y).sum(0) + x.shape[0]), call(2), call(5), call(3)


variant("two_tensor_parameter_inductor", two_tensor_parameter, backend="inductor")


# --- distributed ----------------------------------------------------------------------------------


@contextlib.contextmanager
def one_process() -> Generator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))


@example(grad=True, around=one_process, warm=True)
def dtensor_linear() -> tuple[Any, ...]:
    """Two linear layers, sharded by columns and by rows, in training."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    m = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    parallelize_module(m, _mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return m, *[(torch.randn(n, 4),) for n in (2, 5, 3)]


@example(around=one_process)
def dtensor_inputs() -> tuple[Any, ...]:
    """Distributed inputs, redistributed inside."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = _mesh()

    def f(x: Any, y: Any) -> Any:
        z = (x @ y.t()).redistribute(mesh, [Replicate()])
        return z.relu(), z.to_local() + 1

    calls = [
        (
            distribute_tensor(torch.randn(n, 4), mesh, [Shard(0)]),
            distribute_tensor(torch.randn(n + 1, 4), mesh, [Replicate()]),
        )
        for n in (2, 5, 3)
    ]
    return f, *calls


@example(grad=True, around=one_process)
def dtensor_made_inside() -> tuple[Any, ...]:
    """A DTensor made in the graph: the mesh is an input of the frame."""
    from torch.distributed.tensor import DTensor, Shard

    m = nn.Linear(4, 4)

    def f(x: torch.Tensor, mesh: Any) -> torch.Tensor:
        return DTensor.from_local(m(x), mesh, [Shard(0)]).full_tensor().sin()

    f.module = m  # type: ignore[attr-defined]
    mesh = _mesh()
    return f, *[(torch.randn(n, 4), mesh) for n in (2, 5, 3)]


@example(around=one_process)
def collectives() -> tuple[Any, ...]:
    """Functional collectives over a process group that is passed in."""
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional

    group = dist.group.WORLD

    def f(x: torch.Tensor, group: Any) -> Any:
        return functional.all_reduce(x, "sum", group) + 1, functional.all_gather_tensor(x, 0, group)

    return f, *[(torch.randn(n, 4), group) for n in (2, 5, 3)]


@example(around=one_process, dynamic=True)
def dtensor_dynamic() -> tuple[Any, ...]:
    """A DTensor with dynamic sizes on a mesh of two dims."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))

    def f(x: Any) -> Any:
        return (x * x.shape[0]).redistribute(mesh, [Replicate(), Replicate()]).sin()

    return f, *[
        (distribute_tensor(torch.randn(n, 4), mesh, [Shard(0), Shard(1)]),) for n in (2, 5, 3)
    ]


variant("dtensor_linear_inductor", dtensor_linear, backend="inductor")
variant("dtensor_inputs_inductor", dtensor_inputs, backend="inductor")


# --- optimizers -----------------------------------------------------------------------------------


def _step(make: Callable[[list[nn.Parameter]], Any]) -> tuple[Any, ...]:
    params = [nn.Parameter(torch.randn(n, 3)) for n in (2, 3, 2)]
    optimizer = make(params)

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.params = nn.ParameterList(params)

        def forward(self, grads: list[torch.Tensor]) -> Any:
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad
            optimizer.step()
            return [(k, v) for p in params for k, v in optimizer.state[p].items()]

    return Step(), *[([torch.randn(p.shape) for p in params],) for _ in range(3)]


@example()
def adam() -> tuple[Any, ...]:
    """A step of Adam over lists of tensors."""
    return _step(lambda params: torch.optim.Adam(params, lr=0.1, foreach=True))


@example()
def adam_single() -> tuple[Any, ...]:
    """A step of Adam tensor by tensor, with amsgrad and decay."""
    return _step(
        lambda params: torch.optim.Adam(
            params, lr=0.1, foreach=False, amsgrad=True, weight_decay=0.1
        )
    )


@example()
def adam_tensor_rate() -> tuple[Any, ...]:
    """A step of AdamW whose rate is a tensor, which changes between calls."""
    rate = torch.tensor(0.1)
    module, *calls = _step(lambda params: torch.optim.AdamW(params, lr=rate, foreach=False))
    return module, *calls


@example()
def adam_capturable() -> tuple[Any, ...]:
    """A step of Adam whose count stays in tensors."""
    return _step(lambda params: torch.optim.Adam(params, lr=0.1, foreach=True, capturable=True))


@example()
def sgd() -> tuple[Any, ...]:
    """A step of SGD with momentum."""
    return _step(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True))


variant("adam_inductor", adam, backend="inductor")
variant("adam_capturable_inductor", adam_capturable, backend="inductor")


# --- LoRA -----------------------------------------------------------------------------------------


class _LoRA(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(2, base.in_features))
        self.b = nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


class _Adapted(nn.Module):
    """Two adapters on one frozen weight, and an embedding that is the head too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        base = nn.Linear(4, 4).requires_grad_(False)
        self.first, self.second = _LoRA(base), _LoRA(base)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(self.embed(i)).tanh()))


@example(grad=True)
def lora() -> tuple[Any, ...]:
    """Low-rank adapters that share a frozen weight; tied embeddings."""
    return _Adapted(), *[(torch.randint(0, 7, (b, n)),) for b, n in SIZES]


variant("lora_dynamic", lora, dynamic=True)
variant("lora_inductor", lora, backend="inductor")


# --- random numbers -------------------------------------------------------------------------------


@example(grad=True)
def dropout() -> tuple[Any, ...]:
    """Dropout of several kinds in training, and random numbers made of sizes."""
    m = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.AlphaDropout(0.25), nn.Linear(4, 4))

    def f(x: torch.Tensor) -> Any:
        y = m(x)
        return y + torch.rand_like(y), torch.randn(x.shape[0]), torch.bernoulli(y.sigmoid())

    f.module = m  # type: ignore[attr-defined]
    return f, *_sequences()


variant("dropout_dynamic", dropout, dynamic=True)
variant("dropout_inductor", dropout, backend="inductor")
