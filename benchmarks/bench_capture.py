"""Writing and loading captured frames, beside torch's ``GraphPickler``.

Run: ``python -m benchmarks.bench_capture [--layers N] [--rounds N]``; it needs the ``models`` extra.
Both sides write the frame that Dynamo hands to a backend (graph, metadata of every node, shape
environment) and load it into a fake mode of their own; rounds alternate in one process. The frames
are that of a Llama and that of a plain stack of linear layers, whose half is parameters.

``GraphPickler`` needs help with such a frame, and gets it before the clock runs: it must be allowed
all operators; Dynamo's ``grapharg``, which holds the real inputs, is removed; and fake tensors that are
views are replaced by aliases that are none, since the fake mode of their base does not pickle. It
writes no inputs and no policies, and gives bytes. Ours writes the frame as it is, to a file.

Times are those of the processor, so that waiting for the disk is no part of them: what a file that is
synced and renamed takes by the clock, beside one that is written only, has a line of its own. The
last lines hold the time a node of a frame ten times as large against that of a small one.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._graph_pickler import GraphPickler, Options
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torch_fakeify as tfk
from torch_fakeify.serialization.container import write_container

from .table import Figure, Row, at_least, at_most, compare, figures, print_rows, timed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LAYERS = 12
FEW, MANY = 3, 30
"""Layers of the small and the large frame whose times a node are held against each other."""
LINEARS = 250
"""Layers of the frame without attention: 500 parameters and about 1000 nodes."""
_DROPPED = frozenset({"grapharg"})


def rows(rounds: int, layers: int = LAYERS) -> Iterator[Row]:
    """Record frames and measure both sides on them, inside the backend that got them."""
    yield from in_backend(llama(layers), lambda *frame: _measure("Llama", *frame, rounds))
    yield from in_backend(linears(LINEARS), lambda *frame: _measure("linears", *frame, rounds))
    small: list[tuple[float, float]] = []
    in_backend(llama(FEW), lambda gm, inputs: small.extend(_ours(gm, inputs, rounds)))
    large: list[tuple[float, float]] = []
    in_backend(llama(MANY), lambda gm, inputs: large.extend(_ours(gm, inputs, rounds)))
    for side, what in enumerate(("write", "load")):
        values = [Figure((min(times[side] for times in sized),)) for sized in (small, large)]
        yield Row(f"a node of {FEW}, of {MANY} layers: {what}", "us", *values, at_most(1.2))


def in_backend(called: tuple[torch.nn.Module, dict[str, Any]], measure: Any) -> Any:
    """What a function gives of the frame of a model and its inputs."""
    found: list[Any] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.append(measure(gm, inputs))
        return gm.forward

    model, arguments = called
    # A float that is a symbol does not pickle.
    with (
        warnings.catch_warnings(),
        torch.no_grad(),
        torch._dynamo.config.patch(specialize_float=True),
    ):
        warnings.simplefilter("ignore")
        torch.compile(model, backend=backend, dynamic=True)(**arguments)
    torch._dynamo.reset()
    return found[0]


def _ours(gm: torch.fx.GraphModule, inputs: list[Any], rounds: int) -> list[tuple[float, float]]:
    """Microseconds a node for writing and loading, by round."""
    path = Path(tempfile.mkdtemp()) / "frame.fkf"
    tfk.capture(gm, inputs).save(path)
    write, load = figures(
        lambda: timed(lambda _: tfk.capture(gm, inputs).save(path)),
        lambda: timed(lambda _: tfk.Capture.load(path).instantiate()),
        rounds=rounds,
        scale=1e6 / len(gm.graph.nodes),
    )
    return list(zip(write.values, load.values, strict=True))


def llama(layers: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A narrow Llama: its frame has 9 parameters and about 75 nodes a layer."""
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


def linears(layers: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Linear layers with an activation after each: 2 parameters and 4 nodes a layer."""
    parts = [(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(layers)]
    model = torch.nn.Sequential(*[module for pair in parts for module in pair])
    return model, {"input": torch.randn(3, 8)}


def _measure(model: str, gm: torch.fx.GraphModule, inputs: list[Any], rounds: int) -> list[Row]:
    path = Path(tempfile.mkdtemp()) / "frame.fkf"
    frame = picklable(gm)
    options = Options(ops_filter=None, node_metadata_key_filter=lambda key: key not in _DROPPED)
    data = GraphPickler.dumps(frame, options)
    size = tfk.capture(gm, inputs).save(path)

    def write_theirs(_: None) -> Any:
        return GraphPickler.dumps(frame, options)

    def write_ours(_: None) -> Any:
        return tfk.capture(gm, inputs).save(path)

    def load_theirs(_: None) -> Any:
        return GraphPickler.loads(data, FakeTensorMode(shape_env=ShapeEnv()))

    def load_ours(_: None) -> Any:
        return tfk.Capture.load(path).instantiate()

    what = f"{model}, {len(gm.graph.nodes)} nodes, {len(inputs)} inputs"
    return [
        compare(
            f"{what}: write",
            lambda: timed(write_theirs),
            lambda: timed(write_ours),
            rounds=rounds,
            unit="ms",
            budget=at_least(2),
        ),
        compare(
            f"{what}: load",
            lambda: timed(load_theirs),
            lambda: timed(load_ours),
            rounds=rounds,
            unit="ms",
            budget=at_least(5),
        ),
        Row(
            f"{what}: size", "KB", Figure((len(data) / 1024,)), Figure((size / 1024,)), at_least(15)
        ),
        compare(
            f"a file of {size // 1024} KB by the clock: plain, synced",
            lambda: _seconds(lambda: path.with_suffix(".txt").write_bytes(bytes(size))),
            lambda: _seconds(lambda: write_container(path, {"some.json": b" " * size})),
            rounds=rounds,
            unit="ms",
        ),
    ]


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def picklable(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The frame with fake tensors that are no views, which ``GraphPickler`` can write."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    graph._codegen = gm.graph._codegen
    frame = torch.fx.GraphModule(gm, graph)
    for name in ("_param_name_to_source", "_source_to_user_stacks"):
        object.__setattr__(frame, name, getattr(gm, name, {}))
    frame.meta = dict(gm.meta)
    # `graph_copy` leaves the output out.
    for ours, theirs in zip(graph.nodes, gm.graph.nodes, strict=True):
        ours.meta = torch.utils._pytree.tree_map_only(FakeTensor, _no_view, dict(theirs.meta))
    return frame


def _no_view(fake: FakeTensor) -> torch.Tensor:
    if not fake._is_view():
        return fake
    guard = torch._C._AutoDispatchBelowAutograd()
    try:
        return fake.detach()
    finally:
        del guard


def main() -> None:
    """Print the table of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    print_rows(rows(args.rounds, args.layers))


if __name__ == "__main__":
    main()
