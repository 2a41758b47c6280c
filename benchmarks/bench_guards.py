"""Carrying the guards of a ``ShapeEnv`` as FX nodes into a fresh one.

Run: ``python -m benchmarks.bench_guards [--rounds N]``. Torch has no
such thing: beside each step stands ``produce_guards`` of the same environment. Both first ask the
environment which guards follow from ranges; it has answers already, but for those of "new guards". The last line has
the cost of all steps for many guards, with a tenth of them beside.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sympy.core.cache import clear_cache
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import torch_fakeify as tfk

from .run import main
from .table import Row, at_most, compare, timed

if TYPE_CHECKING:
    from collections.abc import Iterator

GUARDS = 1000
SYMBOLS = 300
_DIMS = 3
BUDGET = at_most(12)
"""Ten times as many guards."""
GOAL = at_most(1.1)
"""Of inserting, beside ``produce_guards``."""


class GuardedGraph:
    """A graph over tensors with dynamic sizes, about which its ``ShapeEnv`` has many guards.

    Args:
        guards: how many.
        symbols: how many sizes; each guard is about one to three of them.
    """

    def __init__(self, guards: int, symbols: int) -> None:
        env: Any = ShapeEnv(duck_shape=False)
        mode: Any = FakeTensorMode(shape_env=env)
        self.env = env
        sizes = [[20 + i + d for d in range(_DIMS)] for i in range(0, symbols, _DIMS)]
        self.tensors = [torch.empty(size) for size in sizes]
        self.sources = [LocalSource(f"x{i}") for i in range(len(self.tensors))]
        self.fakes = self.inputs(mode)
        self.graph = torch.fx.Graph()
        inputs = [self.graph.placeholder(f"x{i}") for i in range(len(self.fakes))]
        for fx_node, fake in zip(inputs, self.fakes, strict=True):
            fx_node.meta["example_value"] = fake
        self.graph.output((inputs[0],))
        self.gm = torch.fx.GraphModule(torch.nn.Module(), self.graph)
        n = [size for fake in self.fakes for size in fake.size()]
        for i in range(guards):
            turn = i // len(n)
            _guard(i, *(n[(i + step) % len(n)] for step in (0, 1 + turn, 2 + 3 * turn)))

    def inputs(self, mode: Any) -> list[Any]:
        """Fakes of the tensors, every dim with a symbol of its own."""
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * _DIMS)
        pairs = zip(self.tensors, self.sources, strict=True)
        return [mode.from_tensor(t, source=s, symbolic_context=context) for t, s in pairs]

    def fresh(self) -> list[Any]:
        """Inputs for a new environment."""
        return self.inputs(FakeTensorMode(shape_env=ShapeEnv(duck_shape=False)))

    def produce_guards(self) -> list[str]:
        """Torch's own text of the guards."""
        return self.env.produce_guards(self.fakes, self.sources)


def _guard(number: int, a: Any, b: Any, c: Any) -> None:
    """One guard that does not follow from those before it, as a Python condition adds it."""
    match number % 4:
        case 0:
            bool(a + b < 10_000 + number)
        case 1:
            bool(a * b + number != c)
        case 2:
            bool(2 * a + b - c + number > -10_000)
        case _:
            bool((a + b * c) % (number + 5) < number + 4)


def _new(guards: int, symbols: int) -> GuardedGraph:
    graph = GuardedGraph(guards, symbols)
    # Torch keeps answers of all environments of the process, by expression.
    symbolic_shapes._maybe_evaluate_static_worker.cache_clear()
    return graph


def _produce(graph: GuardedGraph) -> float:
    clear_cache()
    return timed(lambda _: graph.produce_guards())


def _insert(graph: GuardedGraph) -> float:
    tfk.strip_guards(graph.gm)
    clear_cache()  # few guards would find all of their expressions there
    return timed(lambda _: tfk.insert_guards(graph.gm, graph.env))


def _learn(graph: GuardedGraph) -> float:
    fakes = graph.fresh()
    clear_cache()
    return timed(lambda _: tfk.learn(graph.gm, fakes))


def rows(rounds: int, guards: int = GUARDS, symbols: int = SYMBOLS) -> Iterator[Row]:
    """Every line of the table."""
    rounds = min(rounds, 2)  # each takes half a minute
    few, many = GuardedGraph(guards // 10, symbols // 10), GuardedGraph(guards, symbols)
    for graph, count in ((few, guards // 10), (many, guards)):
        for what, ours in (("insert", _insert), ("learn", _learn)):
            budget = GOAL if (what, graph) == ("insert", many) else None
            yield compare(
                f"{count} guards: {what}",
                partial(_produce, graph),
                partial(ours, graph),
                rounds=rounds,
                unit="ms",
                budget=budget,
            )
    yield compare(
        f"{guards} new guards: insert",
        lambda: _produce(_new(guards, symbols)),
        lambda: _insert(_new(guards, symbols)),
        rounds=rounds,
        unit="ms",
    )
    yield compare(
        f"insert and learn guards: {guards // 10}, {guards}",
        lambda: _insert(few) + _learn(few),
        lambda: _insert(many) + _learn(many),
        rounds=rounds,
        unit="ms",
        budget=BUDGET,
    )


if __name__ == "__main__":
    main(__doc__, rows)
