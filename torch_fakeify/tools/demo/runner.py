"""The command ``demo --check``: record a small decoder here; rebuild, compile and run it in another process.

The decoder has in few lines what makes real models hard to reproduce: tied embeddings (one parameter
under two names), key and value caches that are views of one storage and are written in place, dynamic
batch and sequence, and a position that comes out of a tensor, so that sizes depend on data.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from torch_fakeify.compat import torch_dynamo
from torch_fakeify.errors import CaptureError
from torch_fakeify.frames.record_backend import record
from torch_fakeify.records.tensor import IntNode
from torch_fakeify.render.show import table_lines
from torch_fakeify.serialization.capture_file import read_capture
from torch_fakeify.tools.worker.client import ask, backend_request
from torch_fakeify.tools.worker.replies import Ended, Raised, Ran, Refused, indented

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch_fakeify.records.frame import CaptureDesc

TOLERANCE = 1e-4
"""Largest absolute difference to eager that counts as equal."""

_RECORDED = {"batch": 2, "sequence": 5, "capacity": 24}
_OTHERS = (
    {"batch": 3, "sequence": 7, "capacity": 40},
    {"batch": 6, "sequence": 16, "capacity": 64},
)
_TIMEOUT = 600.0
_WIDTH = 32
"""Elements of a token's embedding."""


@dataclass(frozen=True)
class DemoReport:
    """The measurements of the demo."""

    file: str
    nbytes: int
    record_ms: float
    desc: CaptureDesc
    backend: str
    pids: tuple[int, int]
    """Process ids of the recorder and of the one that rebuilt the frame."""
    reply: Ran

    @property
    def difference(self) -> float:
        """Largest absolute difference between compiled and eager, over all sizes."""
        return max(run["difference"] for run in self.reply.runs)

    @property
    def holds(self) -> bool:
        """Whether compiled and eager agree at every size."""
        return self.difference <= TOLERANCE

    def lines(self) -> list[str]:
        """Format the report."""
        return [
            "A decoder with a KV cache, tied embeddings and a position that depends on data.",
            "",
            f"Recorded in process {self.pids[0]}, which has the model:",
            *indented(table_lines(self._recorded_rows())),
            "",
            f"Rebuilt in process {self.pids[1]}, which has the file, no model code and no weights:",
            *indented(table_lines(self._rebuilt_rows())),
            "",
            f"Run there on synthetic inputs, {self.backend} beside eager:",
            *indented(table_lines(self._run_rows())),
            "",
            f"Largest difference {self.difference:.1e}: "
            + (f"at most {TOLERANCE:g}, equal." if self.holds else f"above {TOLERANCE:g}!"),
        ]

    def _recorded_rows(self) -> list[tuple[str, str]]:
        tensors = [entry.tensor for entry in self.desc.inputs if entry.tensor is not None]
        storages = {t.storage.id for t in tensors if t.storage is not None}
        views = sum(tensor.base is not None for tensor in tensors)
        unbacked = sum(symbol.hint is None for symbol in self.desc.symbols)
        return [
            ("file", f"{self.file}, {self.nbytes:,} bytes"),
            ("graph", f"{len(self.desc.graph.nodes)} FX nodes, {len(self.desc.inputs)} inputs"),
            ("tensors", f"{len(tensors)}, {views} of them views"),
            ("storages", str(len(storages))),
            ("symbols", f"{len(self.desc.symbols)}, {unbacked} of them from data"),
            ("guards", str(len(self.desc.guards))),
            ("asserts", str(len(self.desc.runtime_asserts))),
            ("recorded in", f"{self.record_ms:,.0f} ms, tracing included"),
        ]

    def _rebuilt_rows(self) -> list[tuple[str, str]]:
        return [
            ("loaded in", f"{self.reply.load:,.0f} ms"),
            ("compiled in", f"{self.reply.compile:,.0f} ms by {self.backend}"),
        ]

    def _run_rows(self) -> list[Sequence[str]]:
        head = (*_RECORDED, "output", "eager ms", "first ms", "next ms", "difference")
        rows: list[Sequence[str]] = [head]
        for sizes, run in zip(_OTHERS, self.reply.runs, strict=True):
            times = (f"{run[key]:.1f}" for key in ("eager", "first", "next"))
            output = " x ".join(map(str, run["outputs"][0]))
            rows.append((*map(str, sizes.values()), output, *times, f"{run['difference']:.1e}"))
        return rows


def run_demo(backend: str = "inductor", imports: Sequence[str] = ()) -> DemoReport:
    """Record the decoder here, rebuild and run it at two other sizes in a fresh interpreter.

    The fresh interpreter imports some modules first, and has the backend.

    Raises:
        CaptureError: the fresh interpreter failed; the message has the reason.
    """
    with tempfile.TemporaryDirectory(prefix="torch-fakeify-demo-") as directory:
        started = time.perf_counter()
        path = record_decoder(directory)
        record_ms = (time.perf_counter() - started) * 1e3
        desc = read_capture(path)
        answer = ask(
            {
                "task": "run",
                "file": str(path),
                **backend_request(backend, imports),
                "sizes": [_sizes_of(desc, sizes) for sizes in _OTHERS],
                "absent": ["torch_fakeify.tools.demo.runner"],
            },
            timeout=_TIMEOUT,
        )
        match answer.outcome:
            case Ran() as reply:
                pass
            case Refused() | Raised() as reply:
                raise CaptureError(reply.message)
            case Ended() as end:
                raise CaptureError(
                    "the process that rebuilds the frame ended",
                    found="\n".join(end.tail) or end.how,
                )
            case outcome:
                raise CaptureError("the frame was not run", found=str(outcome))
        assert answer.pid is not None
        return DemoReport(
            file=path.name,
            nbytes=path.stat().st_size,
            record_ms=record_ms,
            desc=desc,
            backend=backend,
            pids=(os.getpid(), answer.pid),
            reply=reply,
        )


def record_decoder(directory: str | Path) -> Path:
    """Compile the decoder with dynamic batch, sequence and capacity, and return its capture."""
    recorder = record(directory, inner="eager", on_error="raise")
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(0)
        model = Decoder().eval()
        batch, sequence, capacity = _RECORDED.values()
        tokens = torch.randint(0, 97, (batch, sequence))
        lengths = torch.arange(batch)
        cache = model.make_cache(batch, capacity)
        mark_dynamic = torch_dynamo.dynamo().mark_dynamic
        mark_dynamic(tokens, (0, 1))
        mark_dynamic(lengths, 0)
        for buffer in (buffer for pair in cache for buffer in pair):
            mark_dynamic(buffer, (0, 2))
        with torch_dynamo.dynamo_config_patch(capture_scalar_outputs=True):
            torch.compile(model, backend=recorder, fullgraph=True)(tokens, lengths, cache)
    return recorder.paths[-1]


def _sizes_of(desc: CaptureDesc, sizes: Mapping[str, int]) -> dict[str, int]:
    """Map each symbol to its new value, by its recorded one: batch, sequence or capacity."""
    new = {_RECORDED[name]: value for name, value in sizes.items()}
    # Where in their common buffer the values begin behind the keys.
    new[_offset(_RECORDED)] = _offset(sizes)
    chosen: dict[str, int] = {}
    for symbol in desc.symbols:
        hint = None if symbol.hint is None else symbol.hint.nodes[-1]
        if isinstance(hint, IntNode) and hint.value in new:
            chosen[symbol.name] = new[hint.value]
    return chosen


def _offset(sizes: Mapping[str, int]) -> int:
    """Number of elements of the keys of one block."""
    return sizes["batch"] * sizes["capacity"] * _WIDTH


# --- the model ------------------------------------------------------------------------------------


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
        self, vocabulary: int = 97, width: int = _WIDTH, heads: int = 4, layers: int = 2
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
