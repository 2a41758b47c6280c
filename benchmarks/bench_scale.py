"""What a frame of 60,000 nodes costs: capture, file, rebuilding, conversion, and a report.

Run: ``python -m benchmarks.bench_scale [--rounds N]``. Torch has nothing for most of it: a figure stands
beside the design's goal, or beside what it must not be much slower than. Times are of the processor, a
node. Memory is the growth of the peak of a process that loads and rebuilds the frame.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import torch_fakeify as tfk

from .memory import high_water, measured
from .run import main
from .table import Figure, Row, at_most, compare, timed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NODES = 60_000
WEIGHTS = 200
LAYER = 6
"""Nodes of a layer."""
GOALS = {"capture": 50e-6, "instantiate": 80e-6}
"""Seconds a node."""
MEGA = 2**20
MEMORY = 500.0
"""The most megabytes for loading and rebuilding 60,000 nodes."""
SECONDS = 60.0
"""The most that a report takes."""


def frame(nodes: int) -> tuple[torch.fx.GraphModule, list[Any]]:
    """A graph of layers as Dynamo makes it, with one dynamic size, and its inputs.

    Args:
        nodes: how many.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    static = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.STATIC] * 2)
    shapes = {"x": (torch.empty(7, 64), dynamic)}
    shapes |= {f"w{i}": (torch.empty(64, 64), static) for i in range(WEIGHTS)}
    inputs = [
        mode.from_tensor(t, source=LocalSource(name), symbolic_context=context)
        for name, (t, context) in shapes.items()
    ]
    graph = torch.fx.Graph()
    made: list[tuple[Any, Any]] = []
    for name, value in zip(shapes, inputs, strict=True):
        fx_node = graph.placeholder(name)
        fx_node.meta["example_value"] = value
        made.append((fx_node, value))
    x, weights, layer = made[0], made[1:], 0
    targets = (torch.mm, torch.add, torch.relu, torch.mul, torch.sin, torch.nn.functional.gelu)
    with mode:
        while len(graph.nodes) + LAYER <= nodes:
            where = {
                "stack_trace": f'  File "model.py", line {layer % 500}, in forward\n    x = self.f(x)',
                "nn_module_stack": {f"L{layer}": (f"L['self'].layers[{layer}]", torch.nn.Linear)},
            }
            for target in targets:
                others = {torch.mm: [weights[layer % WEIGHTS]], torch.add: [x], torch.mul: [(2, 2)]}
                args = [x, *others.get(target, [])]
                fx_node = graph.call_function(target, tuple(arg[0] for arg in args))
                value = target(*(arg[1] for arg in args))
                fx_node.meta |= {"example_value": value, **where}
                x = fx_node, value
            layer += 1
    graph.output((x[0],))
    return _LazyGraphModule(torch.nn.Module(), graph), inputs  # Dynamo's class


def rows(rounds: int, nodes: int = NODES) -> Iterator[Row]:
    """Every line of the table."""
    rounds = min(rounds, 3)  # a frame takes seconds
    gm, inputs = frame(nodes)
    capture = tfk.capture(gm, inputs)
    line = functools.partial(_line, rounds=rounds, nodes=nodes, count=len(gm.graph.nodes))
    yield line("capture", GOALS["capture"], lambda: tfk.capture(gm, inputs), 1)
    yield line("instantiate", GOALS["instantiate"], capture.instantiate, 1)
    yield line(
        "instantiate(fresh=True)", capture.instantiate, lambda: capture.instantiate(fresh=True), 1.2
    )
    yield line(
        "refakeify", capture.instantiate, lambda: tfk.refakeify((gm, inputs), _new_mode()), 1.5
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "frame.fkf")
        capture.save(path)
        grown = [
            measured("bench_scale", str(path))[0] - measured("bench_scale", "")[0]
            for _ in range(rounds)
        ]
        peak = Figure(tuple(each / MEGA for each in grown))
        goal = Figure((MEMORY,) * rounds)
        yield Row(f"{nodes} nodes, load and rebuild: goal, peak", "MB", goal, peak, at_most(1))
        page = Path(folder, "report.html")
        spent = timed(lambda _: tfk.report(path, page))
        size = page.stat().st_size / MEGA
        both = Figure((SECONDS,)), Figure((spent,))
        yield Row(f"{nodes} nodes, report of {size:.0f} MB: goal", "s", *both, at_most(1))


def _line(
    what: str,
    other: float | Callable[[], Any],
    work: Callable[[], Any],
    most: float,
    *,
    rounds: int,
    nodes: int,
    count: int,
) -> Row:
    """A line in microseconds a node, beside a goal or another work."""

    def theirs() -> float:
        return timed(lambda _: other()) if callable(other) else other * count

    beside = "instantiate" if callable(other) else "goal"
    return compare(
        f"{nodes} nodes, {beside}, {what}",
        theirs,
        lambda: timed(lambda _: work()),
        rounds=rounds,
        count=count,
        budget=at_most(most),
    )


def _new_mode() -> FakeTensorMode:
    return FakeTensorMode(shape_env=ShapeEnv())


def _load(path: str) -> None:
    made = tfk.Capture.load(path).instantiate() if path else None
    print(high_water())
    del made


if __name__ == "__main__":
    main(__doc__, rows, child=_load)
