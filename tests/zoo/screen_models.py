"""Small real models whose captures are printed."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """A pre-norm block with causal attention."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run it."""
        batch, length, width = x.shape
        qkv = self.qkv(self.ln1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.ln2(x))))


class Decoder(nn.Module):
    """A decoder of four blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(100, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 100, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Run it."""
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Sizes(nn.Module):
    """Sizes that are dynamic, compared, and read from data; the name of an argument is used again."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))
        self.factor = 1.5

    def forward(self, x: torch.Tensor, y: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
        """Run it."""
        if x.shape[0] > 4:
            x = x[1:]
        count = int(y.sum().item())
        torch._check(count >= 0)
        torch._check(count < 100)
        return self.lin(x) * self.scale * self.factor + n, torch.zeros(count), torch.cat([y, y])
