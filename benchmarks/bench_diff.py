"""``diff`` of two graphs that are nearly one, by what differs and by their size.

Run: ``python -m benchmarks.bench_diff [--rounds N]``. Torch has nothing for it: a node of a large graph
is held against one of a small graph, and the whole time at 60,000 nodes against three seconds.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

import torch

import torch_fakeify as tfk
from torch_fakeify.render.diff import differences

from .run import main
from .table import Figure, Row, at_most, compare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch_fakeify.records.frame import CaptureDesc

FEW, MANY = 6000, 60_000
SECONDS = 3.0
_LAYER = ("linear", "gelu", "linear", "add", "relu", "mul")


def changed(ops: list[str]) -> list[str]:
    """Another function in the middle."""
    middle = len(ops) // 2
    return [*ops[:middle], "neg", *ops[middle + 1 :]]


def inserted(ops: list[str]) -> list[str]:
    """One more node in the middle."""
    middle = len(ops) // 2
    return [*ops[:middle], "relu", *ops[middle:]]


def moved(ops: list[str]) -> list[str]:
    """A node of the beginning in the middle."""
    middle = len(ops) // 2
    return [*ops[:7], *ops[8:middle], ops[7], *ops[middle:]]


def without_layers(ops: list[str]) -> list[str]:
    """Every hundredth layer is missing."""
    return [op for i, op in enumerate(ops) if i // len(_LAYER) % 100]


def swapped(ops: list[str]) -> list[str]:
    """A graph whose two different halves are swapped."""
    middle = len(ops) // 2
    return [*ops[middle:], *ops[:middle]]


def others(ops: list[str]) -> list[str]:
    """Nodes of the same kinds in an order of their own."""
    return [("linear", "add", "mul", "relu", "gelu")[(i * i // 7) % 5] for i in range(len(ops))]


EDITS: tuple[Callable[[list[str]], list[str]], ...] = (
    changed, inserted, moved, without_layers, swapped, others,
)  # fmt: skip


def rows(rounds: int) -> Iterator[Row]:
    """Every line of the table."""
    for edit in EDITS:
        few, many = _pair(edit, FEW), _pair(edit, MANY)
        row = compare(
            f"diff, {edit.__name__.replace('_', ' ')}: a node of {FEW}, of {MANY}",
            functools.partial(_seconds, few),
            functools.partial(_seconds, many),
            rounds=rounds,
            budget=at_most(1.5) if edit is changed else None,
        )
        yield row
        if edit is changed:
            whole = Figure(tuple(value * MANY / 1e6 for value in row.ours.values))
            limit = Figure((SECONDS,) * len(whole.values))
            yield Row(f"diff, {MANY} nodes, of {SECONDS:.0f} s", "s", limit, whole, at_most(1))


def _pair(edit: Callable[[list[str]], list[str]], nodes: int) -> tuple[CaptureDesc, CaptureDesc]:
    ops = [_LAYER[i % len(_LAYER)] for i in range(nodes // 2)]
    ops += [op for op in ops if op != "add"] + ["add"] * ops.count("add")
    return _frame(ops), _frame(edit(ops))


def _frame(ops: list[str]) -> CaptureDesc:
    """The record of a chain of these functions."""
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    functions: dict[str, Any] = {
        "linear": torch.nn.functional.linear,
        "gelu": torch.nn.functional.gelu,
    }
    out = x
    for op in ops:
        taken = (out, w) if op in {"linear", "add", "mul"} else (out,)
        out = graph.call_function(functions.get(op) or getattr(torch, op), taken)
    graph.output((out,))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    return tfk.capture(gm, [torch.ones(4, 4), torch.ones(4, 4)]).desc


def _seconds(pair: tuple[CaptureDesc, CaptureDesc]) -> float:
    """Of CPU, for a node."""
    start = time.process_time()
    differences(*pair)
    return (time.process_time() - start) / len(pair[0].graph.nodes)


if __name__ == "__main__":
    main(__doc__, rows)
