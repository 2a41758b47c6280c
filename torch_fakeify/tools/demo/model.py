"""The demo's model: a small decoder that writes its keys and values into a cache.

It has in few lines what makes real models hard to reproduce: tied embeddings (one parameter under
two names), key and value caches that are views of one storage and are written in place, dynamic
batch and sequence, and a position that comes out of a tensor, so that sizes depend on data.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

WIDTH = 32
"""Elements of a token's embedding."""


class Block(nn.Module):
    """Causal attention over the cache, then a gated feed-forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.RMSNorm(width)
        self.norm_forward = nn.RMSNorm(width)
        self.to_qkv = nn.Linear(width, 3 * width, bias=False)
        self.to_out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(
        self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int
    ) -> torch.Tensor:
        """Attend from ``x`` to the cache, up to the position of each token.

        Args:
            x: ``(batch, sequence, width)``.
            keys: ``(batch, heads, capacity, width / heads)``, written at ``start``.
            values: as ``keys``.
            start: position of the first token of ``x``.
        """
        batch, sequence, width = x.shape
        qkv = self.to_qkv(self.norm_attention(x))
        query, key, value = (
            part.view(batch, sequence, self.heads, width // self.heads).transpose(1, 2)
            for part in qkv.chunk(3, dim=-1)
        )
        keys.narrow(2, start, sequence).copy_(key)
        values.narrow(2, start, sequence).copy_(value)
        scores = query @ keys.narrow(2, 0, start + sequence).transpose(-1, -2)
        seen = torch.arange(start + sequence, device=x.device)
        own = torch.arange(sequence, device=x.device) + start
        scores = scores.masked_fill(seen > own[:, None], float("-inf"))
        weights = functional.softmax(scores * (width // self.heads) ** -0.5, dim=-1)
        mixed = weights @ values.narrow(2, 0, start + sequence)
        x = x + self.to_out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        gate, up = self.gate_up(self.norm_forward(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class Decoder(nn.Module):
    """A decoder with tied embeddings: the output projection is the token table itself."""

    def __init__(
        self, vocabulary: int = 97, width: int = WIDTH, heads: int = 4, layers: int = 2
    ) -> None:
        super().__init__()
        self.heads = heads
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def make_cache(self, batch: int, capacity: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Allocate keys and values for each block, of shape ``(batch, heads, capacity, width / heads)``.

        The two of a block are views of one buffer.
        """
        depth = self.tokens.embedding_dim // self.heads
        buffers = [torch.zeros(2, batch, self.heads, capacity, depth) for _ in self.blocks]
        return [(buffer[0], buffer[1]) for buffer in buffers]

    def forward(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        cache: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """Compute the logits of the next token at every position.

        Args:
            tokens: ``(batch, sequence)``, integers.
            lengths: ``(batch,)``, integers: how many tokens the cache holds for each row.
            cache: of ``make_cache``; written in place behind the longest row.

        Returns:
            ``(batch, sequence, vocabulary)``.
        """
        start = int(lengths.max().item())
        torch._check(start >= 0)
        torch._check(start + tokens.shape[1] <= cache[0][0].shape[2])
        x = self.tokens(tokens)
        for block, (keys, values) in zip(self.blocks, cache, strict=True):
            x = block(x, keys, values, start)
        return self.head(self.norm(x))
