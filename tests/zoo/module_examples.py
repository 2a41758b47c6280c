"""Examples for the handoff: the table, and modules of torch, each called with three sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from compiled_programs import Example
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

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


@example(dynamo=_RNN, grad=True)
def rnn() -> tuple[Any, ...]:
    """A simple recurrent network."""
    return nn.RNN(4, 3, batch_first=True), *_sequences()


variant("rnn_inductor", rnn, grad=False, backend="inductor", dynamic=True)


# --- transformers ---------------------------------------------------------------------------------


@example(grad=True)
def encoder() -> tuple[Any, ...]:
    """A transformer encoder in training, with a padding mask and dropout."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.25, batch_first=True)
    calls = [
        (torch.randn(batch, length, 8), None, torch.arange(length).expand(batch, -1) > 1)
        for batch, length in SIZES
    ]
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), *calls


@example()
def encoder_inference() -> tuple[Any, ...]:
    """The same in inference, where torch has a fast path."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval(), *_sequences(8)


variant("encoder_inductor", encoder, backend="inductor")


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


@example(grad=True, dynamo=_DATA)
def graph_network() -> tuple[Any, ...]:
    """A graph neural network over the distinct nodes of a batch, in training."""
    return _GraphLayer(), *_graphs()


@example(dynamo=_DATA, dynamic=True)
def graph_network_inference() -> tuple[Any, ...]:
    """The same in inference, all sizes dynamic from the start."""
    return _GraphLayer(), *_graphs()


variant("graph_network_inductor", graph_network, backend="inductor")
variant("graph_network_inference_inductor", graph_network_inference, backend="inductor")


@example(dynamo=_DATA, grad=True)
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
def adam_tensor_rate() -> tuple[Any, ...]:
    """A step of AdamW whose rate is a tensor, which changes between calls."""
    rate = torch.tensor(0.1)
    module, *calls = _step(lambda params: torch.optim.AdamW(params, lr=rate, foreach=False))
    return module, *calls


@example()
def adam_capturable() -> tuple[Any, ...]:
    """A step of Adam whose count stays in tensors."""
    return _step(lambda params: torch.optim.Adam(params, lr=0.1, foreach=True, capturable=True))


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
