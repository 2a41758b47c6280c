"""Ten bugs that a backend may have, and a model whose frame shows each of them.

Every backend is eager, but for its bug. `BUGS` says how each one shows; what `minify` leaves of the
model's frame is known: see `test_minify`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

BACKENDS = '''
import os
import signal
import time

import torch


def _calls(graph_module, name):
    found = [n for n in graph_module.graph.nodes if n.op.startswith("call")]
    return [n for n in found if name in str(n.target)]


def bug_rejects_op(gm, inputs):
    """It has no kernel for an operator."""
    if _calls(gm, "softmax"):
        raise NotImplementedError(f"no kernel for softmax, node {len(gm.graph.nodes)}")
    return gm


def bug_rejects_pattern(gm, inputs):
    """It fuses a linear layer with the normalization before, and has not all cases."""
    for fx_node in _calls(gm, "linear"):
        if "layer_norm" in str(fx_node.args[0].target):
            raise AssertionError(f"epilogue {fx_node.name} has no schedule")
    return gm


def bug_segfaults(gm, inputs):
    """It crashes the process."""
    if _calls(gm, "tanh"):
        os.kill(os.getpid(), signal.SIGSEGV)
    return gm


def bug_hangs(gm, inputs):
    """Its search for a schedule has no end."""
    while _calls(gm, "gelu"):
        time.sleep(0.1)
    return gm


def bug_miscompiles(gm, inputs):
    """It fuses an addition with the activation after it, and forgets the addition."""
    for fx_node in _calls(gm, "gelu"):
        before = fx_node.args[0]
        if before.op == "call_function" and "add" in str(before.target):
            fx_node.args = (before.args[0],)
    gm.recompile()
    return gm


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 0.5 * grad * (1 - x.tanh() ** 2)


def _halved(x):
    return _Halved.apply(x)


def bug_wrong_gradient(gm, inputs):
    """The derivative of an operator is wrong, the operator is not."""
    for fx_node in _calls(gm, "tanh"):
        fx_node.op, fx_node.target, fx_node.kwargs = "call_function", _halved, {}
    gm.recompile()
    return gm


def bug_raises_when_run(gm, inputs):
    """What it made of an operator does not run."""
    if not _calls(gm, "softmax"):
        return gm

    def run(*args):
        raise IndexError("lane 33 of 32")

    return run


def bug_dynamic_only(gm, inputs):
    """It cannot tile what has dynamic rows."""
    for fx_node in _calls(gm, "linear"):
        rows = fx_node.args[0].meta["example_value"].shape[:-1]
        if any(isinstance(n, torch.SymInt) for n in rows):
            raise RuntimeError(f"cannot tile rows {tuple(rows)}")
    return gm


def bug_aliased_only(gm, inputs):
    """It plans memory for inputs as if none were part of another one."""
    seen = set()
    for value in inputs:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()._cdata
            if storage in seen:
                raise ValueError("the memory plan has an overlap")
            seen.add(storage)
    return gm


def bug_guard_only(gm, inputs):
    """It prints guards, and one kind wrong."""
    for value in inputs:
        if isinstance(value, torch.SymInt):
            for guard in value.node.shape_env.guards:
                if "Mod" in str(guard.expr) or "%" in str(guard.expr):
                    raise SyntaxError(f"cannot print {guard.expr}")
    return gm
'''


class Bug(NamedTuple):
    """One of them."""

    backend: str
    accuracy: bool
    """Whether it shows only in what the compiled code does."""
    left: int
    """Operations of the smallest frame that shows it."""
    dynamic: bool = False
    """Whether it shows only where sizes are symbols."""


BUGS = (
    Bug("bug_rejects_op", False, 1),
    Bug("bug_rejects_pattern", False, 2),
    Bug("bug_segfaults", False, 1),
    Bug("bug_hangs", False, 1),
    Bug("bug_miscompiles", True, 2),
    Bug("bug_wrong_gradient", True, 1),
    Bug("bug_raises_when_run", True, 1),
    Bug("bug_dynamic_only", False, 1, dynamic=True),
    Bug("bug_aliased_only", False, 1),
    Bug("bug_guard_only", False, 1, dynamic=True),
)


class Block(torch.nn.Module):
    """Attention and a feed-forward part, each with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (torch.nn.Linear(width, width) for _ in range(4))
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states of shape ``[batch, length, width]`` to such."""
        h = self.before(x)
        weights = functional.softmax(self.q(h) @ self.k(h).transpose(-1, -2) / 8.0, -1)
        x = x + self.o(weights @ self.v(h))
        h = functional.gelu(self.up(self.between(x)) + 0.5)
        return x + torch.tanh(self.down(h))


class Decoder(torch.nn.Module):
    """A few blocks over hidden states, of which the second input is a part."""

    def __init__(self, blocks: int = 3, width: int = 32) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(width) for _ in range(blocks)])

    def forward(self, x: torch.Tensor, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states, and the sum of the part."""
        if x.shape[1] % 4 == 0:
            x = x * 1.5
        for block in self.blocks:
            x = block(x)
        return x, part.sum(-1)


def example() -> tuple[Decoder, tuple[torch.Tensor, torch.Tensor]]:
    """The model and its inputs."""
    torch.manual_seed(0)
    x = torch.randn(2, 16, 32)
    return Decoder(), (x, x[:, 4:])
