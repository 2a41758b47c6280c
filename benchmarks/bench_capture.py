"""Writing and loading a captured Llama frame, beside torch's ``GraphPickler``.

Run it with ``python -m benchmarks.bench_capture [--layers N]``; it needs the ``models`` extra.
Both sides write the frame that Dynamo hands to a backend (graph, metadata of every node, inputs)
and load it into a fake mode of their own; rounds alternate in one process.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._graph_pickler import GraphPickler
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 7


def main() -> None:
    """Record one frame, time both sides, print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    layers = parser.parse_args().layers
    warnings.simplefilter("ignore")
    results: list[tuple[str, Any, Any]] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        results.extend(measure(gm, inputs))
        return gm.forward

    model, arguments = llama(layers)
    with torch.no_grad():
        torch.compile(model, backend=backend, dynamic=True)(**arguments)
    print(f"{'work':34} {'GraphPickler':>14} {'torch_fakeify':>14} {'ratio':>7}")
    for name, theirs, ours in results:
        print(f"{name:34} {_cell(theirs):>14} {_cell(ours):>14} {_ratio(theirs, ours):>7}")


def llama(layers: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A narrow Llama: its frame has 9 parameters and about 90 nodes a layer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config), {"input_ids": torch.randint(0, 64, (2, 7))}


def measure(gm: torch.fx.GraphModule, inputs: list[Any]) -> list[tuple[str, Any, Any]]:
    """Rows ``(what, theirs, ours)``; ``theirs`` is the error where torch cannot do it."""
    folder = Path(tempfile.mkdtemp())
    path = folder / "frame.fkf"
    frame = _picklable(gm)
    size = tfk.capture(gm, inputs).save(path)

    def write_ours() -> Any:
        return tfk.capture(gm, inputs).save(path)

    def load_ours() -> Any:
        return tfk.Capture.load(path).instantiate()

    try:
        data = GraphPickler.dumps(frame)
    except Exception as error:  # noqa: BLE001 - the benchmark reports what torch cannot do
        kind = type(error).__name__
        ours = [_median(write_ours), _median(load_ours)]
        return [
            ("write", kind, ours[0]),
            ("load + instantiate", kind, ours[1]),
            ("bytes", kind, size),
        ]

    def write_theirs() -> Any:
        return GraphPickler.dumps(frame)

    def load_theirs() -> Any:
        return GraphPickler.loads(data, FakeTensorMode(shape_env=ShapeEnv()))

    rows: list[tuple[str, Any, Any]] = []
    for name, theirs, ours in (
        ("write", write_theirs, write_ours),
        ("load + instantiate", load_theirs, load_ours),
    ):
        rows.append((f"{name}, {len(gm.graph.nodes)} nodes", *_alternate(theirs, ours)))
    rows.append((f"bytes, {len(inputs)} inputs", len(data), size))
    return rows


def _picklable(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph without what ``GraphPickler`` refuses: Dynamo's ``GraphArg`` and user stacks."""
    import copy

    assert TracingContext.try_get() is not None
    clone = copy.copy(gm)
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    clone = torch.fx.GraphModule(gm, graph)
    keep = ("example_value", "stack_trace", "nn_module_stack", "source_fn_stack")
    for fx_node in clone.graph.nodes:
        fx_node.meta = {k: v for k, v in fx_node.meta.items() if k in keep}
    return clone


def _alternate(theirs: Callable[[], Any], ours: Callable[[], Any]) -> tuple[float, float]:
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for fn, sink in zip((theirs, ours), times, strict=True):
            sink.append(_time(fn))
    return statistics.median(times[0]), statistics.median(times[1])


def _median(fn: Callable[[], Any]) -> float:
    return statistics.median(_time(fn) for _ in range(ROUNDS))


def _time(fn: Callable[[], Any]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value * 1e3:.1f} ms"
    return f"{value / 1024:.1f} KB" if isinstance(value, int) else str(value)


def _ratio(theirs: Any, ours: Any) -> str:
    return "-" if isinstance(theirs, str) else f"{theirs / ours:.1f}x"


if __name__ == "__main__":
    main()
